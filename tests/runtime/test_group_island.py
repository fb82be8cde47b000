"""One member of a group without the others: what it makes of rows, where that lies, and what bytes are called."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atoll.base.errors import RunFailedError
from atoll.base.ids import PeerId
from atoll.base.limits import MIB
from atoll.base.machine import Payload
from atoll.crypto.digest import digest
from atoll.peer.tasks import AdoptState, AdvanceState, EncodeUpdate, UpdateEncoded
from atoll.protocol.allreduce.tasks import CombineRows, TaskRow
from atoll.runtime.allreduce.call import GroupTerms, ReduceCall, ReduceResult
from atoll.runtime.allreduce.flatten import CudaStreamPool
from atoll.runtime.allreduce.pending import PendingReduce
from atoll.runtime.allreduce.trust import VerifiableReduceArithmetic
from atoll.runtime.allreduce.worker import GroupWorker
from atoll.runtime.network.buffer_pool import BufferPool
from atoll.runtime.storage.store import PeerStore
from atoll.training.codec import SharedKnowledge, codec_named
from atoll.training.codec.byte_compression import METHODS, PLAIN
from atoll.wire.messages.round import PartialSum, PartResponse, PartResult, RowContribution, RowResponse
from atoll.wire.messages.statements import SignedStatement

A, B, C = (PeerId(name) for name in "abc")
SHARES = (1,)
N = 300_000  # more than a span


def story(
    folder: Path, terms: GroupTerms, tell: Callable[[GroupWorker, UpdateEncoded], Coroutine[None, None, None]]
):
    """`tell` is told of a member and of what it encoded: 0, 1, 2 … / N."""

    async def told() -> None:
        store = PeerStore(folder)
        island = GroupWorker(store)
        island.terms = terms
        island.call(call := ReduceCall(torch.arange(N) / N, 1, terms.codec))
        try:
            await tell(island, await island.run(EncodeUpdate(0, SHARES)))
        finally:
            call.future.cancel()
            await island.close()
            store.close()

    asyncio.run(told())


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_bytes_have_one_name_wherever_they_are_named(tmp_path: Path, codec: str):
    """By a member that encoded or combined them, while they come in slab by slab, and when they lie there."""
    nothing = SignedStatement(A, b"", b"")

    async def tell(island: GroupWorker, encoded: UpdateEncoded) -> None:
        (row,) = encoded.parts
        done = await island.run(CombineRows(0, 0, SHARES, (TaskRow(A, 1, row, (A,)), TaskRow(B, 2, row, (B,)))))
        words = (
            (row, (RowContribution(0, 0, "", 0, 0, (), nothing), RowResponse(0, 0, "", 0, (), nothing))),
            (done.payload, (PartResult(0, 0, "", nothing), PartResponse(0, 0, "", done.payload.digest))),
        )
        for payload, messages in words:
            data, follower = memoryview(payload.data).cast("B"), island.follow()
            for at in range(0, len(data), 100_000):
                follower.update(data[at : at + 100_000])
            for message in messages:
                assert island.digest_of(message, data) == payload.digest
                assert island.named(message, follower.digest()) == payload.digest
        handed = PartialSum(0, 0, "", 0, 0, 1, (A,))
        assert island.named(handed, b"quick") is None  # its name is a slower one

    story(tmp_path, GroupTerms(codec), tell)


def test_a_round_that_goes_on_after_its_call_was_told_of_a_failure_is_declined(tmp_path: Path):
    """A quorum that was lost comes back between training and encoding."""

    async def tell(island: GroupWorker, encoded: UpdateEncoded) -> None:
        island.fail_all(RunFailedError("E-RED-05", "the quorum is lost"))
        with pytest.raises(RunFailedError, match="E-RED-06"):
            await island.run(EncodeUpdate(1, SHARES))

    story(tmp_path, GroupTerms("fp32"), tell)


@pytest.mark.parametrize("diverged", [False, True])
def test_a_call_that_failed_while_it_was_encoded_takes_no_later_one_with_it(tmp_path: Path, diverged: bool):
    """The quorum is lost while a thread is at work; its user calls again, and the old round closes after all."""
    began, goes_on = threading.Event(), threading.Event()

    async def tell(island: GroupWorker, encoded: UpdateEncoded) -> None:
        island.fail_all(RunFailedError("E-RED-05", "the quorum is lost"))
        slow, later = (ReduceCall(torch.zeros(N), 1, "fp32") for _ in range(2))

        def row(lo: int, hi: int) -> torch.Tensor:
            began.set()
            goes_on.wait(60.0)
            return torch.full((N,), torch.inf if diverged else 1.0)

        slow.row = row
        island.terms, island.checked = (
            GroupTerms("fp32"),
            VerifiableReduceArithmetic(island.store, "fp32", "fp32", opened=False),
        )
        island.call(slow)
        encoding = asyncio.ensure_future(island.run(EncodeUpdate(1, SHARES)))
        await asyncio.to_thread(began.wait, 60.0)
        island.fail_all(RunFailedError("E-RED-05", "the quorum is lost"))
        island.call(later)
        goes_on.set()
        with pytest.raises(RunFailedError):
            await encoding
        island.deliver_round(ReduceResult(1, (), (), (), ()), again=False)
        assert list(island.calls) == [later] and not later.future.done()

    story(tmp_path, GroupTerms("fp32"), tell)


def test_an_answer_lies_where_rows_lay(tmp_path: Path):
    memory = BufferPool()
    used = memory(4 * N)
    address = torch.frombuffer(used, dtype=torch.uint8).data_ptr()
    del used

    async def tell(island: GroupWorker, encoded: UpdateEncoded) -> None:
        island.room = memory
        done = await island.run(CombineRows(0, 0, SHARES, (TaskRow(A, 1, encoded.parts[0], (A,)),)))
        assert torch.frombuffer(done.payload.data, dtype=torch.uint8).data_ptr() == address

    assert 4 * N >= MIB  # smaller wires are no business of this memory
    story(tmp_path, GroupTerms(), tell)


def test_sums_on_the_way_travel_as_answers_do(tmp_path: Path):
    """Two bits up, fp32 down: what a parent lost would be lost twice, and no member feeds its error back."""

    async def tell(island: GroupWorker, encoded: UpdateEncoded) -> None:
        (row,) = encoded.parts
        rough, fine = codec_named("2bit"), codec_named("fp32")
        below = (TaskRow(A, 1, row, (A,)), TaskRow(B, 1, row, (B,)))
        sum_ = await island.run(CombineRows(0, 0, SHARES, below, onward=True))
        assert torch.equal(fine.decode(sum_.payload.data, N), rough.decode(row.data, N))
        rows = (TaskRow(A, 2, sum_.payload, (A, B), handed=True), TaskRow(C, 2, row, (C,)))
        done = await island.run(CombineRows(0, 0, SHARES, rows))
        assert done.counted == (A, C)
        assert torch.equal(fine.decode(done.payload.data, N), rough.decode(row.data, N))

    story(tmp_path, GroupTerms("2bit", "fp32"), tell)


def test_an_answer_to_many_is_packed_for_a_link_that_is_too_fast_for_one_receiver(tmp_path: Path):
    """400 MB/s: a sum goes to one member, an answer to as many as sent rows, beside the owner's own."""

    async def tell(island: GroupWorker, encoded: UpdateEncoded) -> None:
        island.uplink_bytes_s = lambda: 4e8
        (row,) = encoded.parts
        rows = tuple(TaskRow(PeerId(name), 1, row, (PeerId(name),)) for name in "abcde")
        works = [CombineRows(0, 0, SHARES, rows[:2]), CombineRows(0, 0, SHARES, rows)]
        works += [CombineRows(0, 0, SHARES, rows, onward=True)]
        begin = [(await island.run(work)).payload.data[0] for work in works]
        assert begin == [PLAIN, METHODS["zstd:3"].code, PLAIN]

    story(tmp_path, GroupTerms("int8", "int8+zstd"), tell)


def test_sums_on_the_way_hold_the_places_that_members_drew(tmp_path: Path):
    """As specs/codecs.md says they are drawn in a group, here in round 0 for part 0."""
    known = SharedKnowledge(seed=digest(b"atoll/group/seed/1" + bytes(8 + 4)))
    codec, x_N = codec_named("randk:0.25+fp32", known), torch.arange(N) / N

    async def tell(island: GroupWorker, encoded: UpdateEncoded) -> None:
        (row,) = encoded.parts
        assert bytes(row.data) == bytes(codec.encode(x_N))
        below = (TaskRow(A, 1, row, (A,)), TaskRow(B, 1, row, (B,)))
        sum_ = await island.run(CombineRows(0, 0, SHARES, below, onward=True))
        rows = (TaskRow(A, 2, sum_.payload, (A, B), handed=True), TaskRow(C, 2, row, (C,)))
        done = await island.run(CombineRows(0, 0, SHARES, rows))
        assert bytes(done.payload.data) == bytes(row.data)

    story(tmp_path, GroupTerms("randk:0.25+fp32"), tell)


def test_a_part_that_does_not_decode_leaves_the_values_behind_it_alone(tmp_path: Path):
    """Of three parts the second is one byte short, as every member agreed: the first holds the mean, the
    third not.
    """

    async def tell(island: GroupWorker, _: UpdateEncoded) -> None:
        island.calls.popleft().future.cancel()
        shares, sent_N = (1, 1, 1), torch.arange(N) / N
        island.call(call := ReduceCall(sent_N.clone(), 1, "int8"))
        rows = (await island.run(EncodeUpdate(1, shares))).parts
        answers = []
        for part, row in enumerate(rows):
            answers.append((await island.run(CombineRows(1, part, shares, (TaskRow(A, 1, row, (A,)),)))).payload)
        short = bytes(answers[1].data)[:-1]
        answers[1] = Payload(digest(short), len(short), short)
        state = (await island.run(AdvanceState(1, digest(b"before"), tuple(answers), 1, 1, 1))).state
        await island.run(AdoptState(1, state, state, (True, True, True)))
        island.deliver_round(ReduceResult(1, (A,), (), (), ()), again=False)
        with pytest.raises(RunFailedError, match="E-RED-17"):
            await asyncio.wrap_future(call.future)
        (_, first), (_, second), _ = call.cuts
        assert torch.equal(call.flat_N[:first], codec_named("int8").decode(answers[0].data, first))
        assert not torch.equal(call.flat_N[:first], sent_N[:first])
        assert torch.equal(call.flat_N[second:], sent_N[second:]) and call.written == second

    story(tmp_path, GroupTerms("int8"), tell)


def a_call_in_two_slices(tensors: list[torch.Tensor]) -> tuple[PendingReduce, ReduceCall, ReduceCall]:
    fused = CudaStreamPool().fused(tensors, lambda tensor: False)
    flat_N = fused.vector_N
    half = len(flat_N) // 2
    calls = [ReduceCall(flat_N[at : at + half], 1, "fp32", at=at, whole=len(flat_N)) for at in (0, half)]
    group = SimpleNamespace(check_process=lambda: None, trouble=lambda: "")
    return PendingReduce(group, tensors, fused, calls), *calls


def test_whoever_is_told_of_a_failure_has_the_tensors_back():
    """The first slice fails, the second is still under way: its mean would be written after the user was told."""
    work, failed, goes_on = a_call_in_two_slices([torch.zeros(8)])
    failed.future.set_exception(RunFailedError("E-RED-11", "a value is not finite", fix="look for it"))
    with pytest.raises(RunFailedError, match=r"E-RED-03 .* still owns its tensors"):
        work.wait(0.0)
    goes_on.flat_N.fill_(1.0)
    goes_on.written = 4
    goes_on.future.set_result(ReduceResult(1, (A,), (), (), ()))
    with pytest.raises(RunFailedError, match="E-RED-11 a value is not finite; of 8 values 4 to 8 were written"):
        work.wait(0.0)


def test_tensors_that_were_copied_are_as_they_were_after_a_failure():
    tensors = [torch.zeros(4), torch.zeros(4)]
    work, failed, done = a_call_in_two_slices(tensors)
    done.flat_N.fill_(1.0)
    done.written = 4
    done.future.set_result(ReduceResult(1, (A,), (), (), ()))
    failed.future.set_exception(RunFailedError("E-RED-11", "a value is not finite"))
    with pytest.raises(RunFailedError, match=r"E-RED-11 a value is not finite$"):
        work.wait(0.0)
    assert all(torch.equal(tensor, torch.zeros(4)) for tensor in tensors)


@pytest.mark.parametrize("ends", ["counted", "uncounted", "unanswered", "failed", "of others"])
def test_what_is_owed_depends_on_how_a_call_ended(tmp_path: Path, ends: str):
    """The row of the next call, with nothing new to say, is what is owed: what the codec left out of the agreed
    row; where the mean is without it, all of it; and nothing where the user still has its values, the mean being
    one of other calls, too."""
    codec, owed_N = codec_named("2bit"), torch.zeros(N)

    async def tell(island: GroupWorker, _: UpdateEncoded) -> None:
        island.calls.popleft().future.cancel()
        sent_N = torch.arange(N) / N
        island.call(call := ReduceCall(sent_N.clone(), 1, "2bit", owed_N))
        (row,) = (await island.run(EncodeUpdate(1, SHARES))).parts
        left_N = sent_N - codec.decode(row.data, N)
        answer = (await island.run(CombineRows(1, 0, SHARES, (TaskRow(A, 1, row, (A,)),)))).payload
        answers = (None,) if ends == "unanswered" else (answer,)
        state = (await island.run(AdvanceState(1, digest(b"before"), answers, 1, 1, 1))).state
        await island.run(AdoptState(1, state, state, (ends == "counted",)))
        if ends == "failed":
            island.fail_call(1, RunFailedError("E-RED-09", "others called with other sizes"))
        island.deliver_round(
            ReduceResult(1, (A,), (), (), ()), again=False, others={0} if ends == "of others" else ()
        )
        with suppress(RunFailedError):
            await asyncio.wrap_future(call.future)
        assert torch.equal(call.flat_N, sent_N) == (ends in ("unanswered", "failed", "of others"))
        island.call(last := ReduceCall(torch.zeros(N), 1, "fp32", owed_N))
        (row,) = (await island.run(EncodeUpdate(2, SHARES))).parts
        wanted = {"counted": left_N, "uncounted": sent_N}.get(ends, torch.zeros(N))
        assert torch.equal(codec_named("fp32").decode(row.data, N), wanted)
        last.future.cancel()

    story(tmp_path, GroupTerms("fp32"), tell)


def test_a_call_of_which_nothing_came_goes_once_more_whoever_heard_why(tmp_path: Path):
    """Nothing is combined because of a commitment that did not reach this member: it sees no parts."""

    async def tell(island: GroupWorker, encoded: UpdateEncoded) -> None:
        assert island.repeats_call(0, False)
        assert not island.repeats_call(0, False)

    story(tmp_path, GroupTerms("fp32"), tell)
