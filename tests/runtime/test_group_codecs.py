"""Calls whose values travel in fewer bytes, and what brings later what was left out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import pytest
import torch
from grouped import PATIENCE_S, found, groups, together

import atoll.reduce
from atoll.base.errors import RunFailedError, UsageError
from atoll.peer.tasks import UpdateEncoded
from atoll.protocol.allreduce.tasks import RowsCombined
from atoll.training.codec import codec_named
from atoll.training.codec.byte_compression import METHODS, PLAIN

pytestmark = [pytest.mark.net]


def test_codecs_are_the_groups_or_the_calls():
    with groups(2, codec="int8") as members:
        torch.manual_seed(0)
        tensors = [torch.randn(100_000) for _ in members]
        mean = (tensors[0] + tensors[1]) / 2
        together(members, tensors)
        assert torch.equal(*tensors)
        assert 0 < (tensors[0] - mean).abs().max() < 0.05
        together(members, tensors, codec="fp32")
        with pytest.raises(UsageError, match="E-RED-08"):
            members[0].all_reduce(tensors[0], codec="int3")
        drawn: list[torch.Tensor] = []  # the same places at both, parts of two owners, other places in every call
        for _ in range(2):
            tensors = [torch.full((150_000,), 1.0), torch.full((150_000,), 4.0)]
            together(members, tensors, codec="randk:0.25+fp32")
            assert torch.equal(*tensors) and set(tensors[0].tolist()) == {0.0, 2.5}
            drawn.append(tensors[0] != 0)
            assert int(drawn[-1].sum()) == pytest.approx(37_500, abs=1)
        assert int((drawn[0] & drawn[1]).sum()) < 0.1 * 150_000  # a sixteenth, by chance


def test_matrices_of_low_rank_travel_as_factors_and_shapes_are_part_of_the_call():
    """In parts of two owners, of a rank that four directions have room for. Other shapes of as many values would
    be read as something else."""
    with groups(2, codec="lowrank:4+fp32", way_back="fp32") as members:
        torch.manual_seed(0)
        tensors = [[torch.randn(400, 2) @ torch.randn(2, 500), torch.randn(77)] for _ in members]
        mean = [(a + b) / 2 for a, b in zip(*tensors, strict=True)]
        assert all(done.complete for done in together(members, tensors))
        for mine, yours, wanted in zip(*tensors, mean, strict=True):
            assert torch.equal(mine, yours) and torch.allclose(mine, wanted, atol=1e-4)
        works = [
            m.all_reduce_async(torch.ones(shape)) for m, shape in zip(members, [(40, 50), (50, 40)], strict=True)
        ]
        for work in works:
            with pytest.raises(
                RunFailedError, match=r"E-RED-10 .*shapes=(\w+), this .*shapes=(?!\1)(.*\n)*.*lowrank"
            ):
                work.wait(PATIENCE_S)


@pytest.mark.parametrize("trust", ["private", "open"])
def test_of_a_call_only_tensors_travel_that_changed(trust: str):
    """Four tensors in a call, all within a page or across many: one moved, one did not, one moved by 1.2e-6 in all
    its values together, though by less in what a part holds of it, and one by too little. A call may say otherwise
    what is too little."""
    still, little, too_little = torch.zeros(300), torch.full((200_000,), 2.7e-9), torch.full((100,), 0.99e-7)
    with groups(2 if trust == "private" else 4, codec="changed+fp32", trust=trust) as members:
        sent = [[torch.full((500,), 2.0), still.clone(), little.clone(), too_little.clone()] for _ in members]
        assert all(done.complete for done in together(members, sent))
        for moved, *others in sent:
            assert torch.equal(moved, torch.full((500,), 2.0)) and torch.equal(others[0], still)
            assert torch.allclose(others[1], little, rtol=1e-6, atol=0) and not others[2].any()
        if trust == "private":
            together(members, sent, codec="changed:1e-5+fp32")
            assert bool(sent[0][0].all()) and not sent[0][2].any()


def test_whoever_cuts_its_tensors_otherwise_is_told_where_only_what_changed_travels():
    """As many values, and nothing but the border between two tensors is elsewhere."""
    with groups(2, codec="changed+fp32") as members:
        sizes = [(1000, 3000), (3000, 1000)]
        works = [
            m.all_reduce_async([torch.ones(size) for size in mine]) for m, mine in zip(members, sizes, strict=True)
        ]
        for work in works:
            with pytest.raises(RunFailedError, match=r"E-RED-10 .*shapes=(\w+), this .*shapes=(?!\1)"):
                work.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("codec", "way_back", "made"), [("int8+zstd", "int8", UpdateEncoded), ("int8", "int8+zstd", RowsCombined)]
)
def test_wires_are_packed_for_a_slow_link_and_not_for_a_fast_one(codec: str, way_back: str, made: type):
    """Two members, by what they say that their uplinks carry at most: 1 MB/s and 1 GB/s. Each reads what the other
    sends, rows or answers, and the mean is to the bit that of wires that no member packs."""
    with ExitStack() as stack:
        slow = stack.enter_context(found(peers=2, way_back=way_back, upload_bytes_s=1_000_000))
        fast = stack.enter_context(atoll.reduce.join(slow.ticket, upload_bytes_s=1_000_000_000))
        slow_wires, fast_wires = wires_begin_with(slow, made), wires_begin_with(fast, made)
        torch.manual_seed(0)
        tensors = [torch.randn(150_000) * (torch.rand(150_000) < 0.05) for _ in range(2)]
        sent = [coded(x) for x in tensors]
        assert all(done.complete for done in together([slow, fast], tensors, codec=codec))
        assert (set(slow_wires), set(fast_wires)) == ({METHODS["zstd:3"].code}, {PLAIN})
        assert torch.equal(*tensors) and torch.equal(tensors[0], coded((sent[0] + sent[1]) / 2))


def coded(x: torch.Tensor) -> torch.Tensor:
    codec = codec_named("int8")
    return codec.decode(codec.encode(x), len(x))


def wires_begin_with(member: atoll.reduce.Group, made: type) -> list[int]:
    """The first byte of every row (Encoded) or answer (Combined) that it makes from now on."""
    kinds, do = list[int](), member._host.island.run

    async def told(work: object) -> object:
        done = await do(work)
        if isinstance(done, made):
            wires = done.parts if isinstance(done, UpdateEncoded) else [done.payload]
            kinds.extend(wire.data[0] for wire in wires if wire.size_bytes)
        return done

    member._host.island.run = told
    return kinds


@pytest.mark.parametrize("remembered", [False, True])
def test_what_answers_leave_out_comes_with_later_ones_where_owners_remember(remembered: bool, monkeypatch):
    """The same tensors in every call, in slices, exact on the way up: the sum of all answers misses what two bits
    of one answer leave out, once and not every time. A call of other tensors between them changes nothing."""
    monkeypatch.setattr("atoll.runtime.allreduce.group.SLICE_BYTES", 200_000 * 4)
    with groups(3, codec="fp32", way_back="2bit", remembered=remembered) as members:
        torch.manual_seed(0)
        mine = [torch.randn(300_000) for _ in members]
        mean, got = sum(mine) / 3, torch.zeros(300_000)
        owed = [atoll.reduce.ErrorFeedback() for _ in members]
        for _ in range(6):
            tensors = [x.clone() for x in mine]
            calls = zip(members, tensors, owed, strict=True)
            works = [m.all_reduce_async(t, error_feedback=o) for m, t, o in calls]
            assert all(work.wait(PATIENCE_S).complete for work in works)
            assert torch.equal(tensors[0], tensors[1]) and torch.equal(tensors[0], tensors[2])
            got += tensors[0]
            together(members, [torch.randn(1000) for _ in members])
        error = float((got - 6 * mean).norm() / mean.norm())
        assert error < 1 if remembered else error > 1.5  # six times what one answer leaves out, or once


def test_rows_that_come_back_are_not_coded_twice():
    """The mean of what was sent, in parts of two owners. Of fp32 no rows come, since their mean is shorter."""
    with groups(3, codec="2bit", way_back="gathered") as members:
        torch.manual_seed(0)
        with pytest.raises(UsageError, match=r"E-RED-08 .*ring"):
            members[0].all_reduce(torch.ones(3), topology="ring")
        with pytest.raises(UsageError, match="E-RED-08 no topology moebius"):
            members[0].all_reduce(torch.ones(3), topology="moebius")
        for codec in ("2bit", "fp32"):
            tensors = [torch.randn(150_000) for _ in members]
            sent = [codec_named(codec).decode(codec_named(codec).encode(t), len(t)) for t in tensors]
            mean = (sent[0] * 1 + sent[1] * 2 + sent[2] * 3) / 6
            works = [m.all_reduce_async(tensors[i], weight=i + 1, codec=codec) for i, m in enumerate(members)]
            assert all(work.wait(PATIENCE_S).complete for work in works)
            assert all(torch.equal(t, tensors[0]) for t in tensors)
            assert torch.allclose(tensors[0], mean, rtol=0, atol=1e-6)


def test_error_feedback_brings_later_what_the_codec_left_out():
    """Of four values a call sends the largest. What sums of means lack without feedback grows with every call; with
    it, it stays what the codec leaves out of a few."""
    with groups(2, codec="topk:0.25+fp32", way_back="fp32") as members:
        torch.manual_seed(0)
        gradients = [torch.randn(8192) for _ in members]
        owed = [atoll.reduce.ErrorFeedback() for _ in members]

        def lacking(calls: int, feedbacks: Sequence[atoll.reduce.ErrorFeedback | None]) -> float:
            off_N = torch.zeros(8192)
            for _ in range(calls):
                tensors = [tensor.clone() for tensor in gradients]
                asked = zip(members, tensors, feedbacks, strict=True)
                works = [m.all_reduce_async(t, error_feedback=f) for m, t, f in asked]
                assert all(work.wait(PATIENCE_S).complete for work in works)
                assert torch.equal(*tensors)
                off_N += (gradients[0] + gradients[1]) / 2 - tensors[0]
            return float(off_N.norm())

        once = lacking(1, [None, None])
        assert lacking(3, [None, None]) == pytest.approx(3 * once, rel=1e-3)
        assert lacking(12, owed) < 4 * once


def test_differences_from_what_all_hold_lose_less_and_who_holds_nothing_gets_whole_values():
    """Values of 100 that move by a hundredth; in the third call one member is as new, in the fifth one forgets."""
    with groups(3, codec="int8") as members:
        torch.manual_seed(0)
        held = [atoll.reduce.DeltaReference() for _ in members]
        around_N, errors = 100 * torch.randn(1000), []
        for call in range(6):
            if call == 2:
                held[2] = atoll.reduce.DeltaReference()
            tensors = [around_N + 0.01 * torch.randn(1000) for _ in members]
            mean_N = torch.stack(tensors).mean(0)
            kept = [None if call == 4 and i == 0 else one for i, one in enumerate(held)]
            works = [m.all_reduce_async(t, held=h) for m, t, h in zip(members, tensors, kept, strict=True)]
            done = [work.wait(PATIENCE_S) for work in works]
            assert all(one.complete and len(one.contributors) == 3 for one in done)
            assert torch.equal(tensors[0], tensors[1]) and torch.equal(tensors[0], tensors[2])
            errors.append(float((tensors[0] - mean_N).square().mean().sqrt()))
        differ = [error < 0.01 for error in errors]
        assert differ == [False, True, False, True, False, False]  # who forgot holds an older mean than the others


def test_the_groups_codec_by_whatever_name_is_no_other_codec():
    with groups(2, codec="topk:0.1+int8") as members:
        works = [
            m.all_reduce_async(torch.ones(10), codec=c)
            for m, c in zip(members, (None, "topk:0.1+int8"), strict=True)
        ]
        assert all(work.wait(PATIENCE_S).complete for work in works)


@pytest.mark.parametrize("asked", [("fp16", "bf16"), (None, "2bit")])
def test_calls_with_other_codecs_do_not_mix_and_everybody_is_told_who_asked_for_what(asked):
    """Also where their bytes are as many, and one would pass for the other."""
    with groups(2) as members:
        tensors = [torch.zeros(1000), torch.ones(1000)]
        pairs = zip(members, tensors, asked, strict=True)
        for i, work in enumerate([m.all_reduce_async(t, codec=codec) for m, t, codec in pairs]):
            said = [f"m{1 - i} called with .*codec={asked[1 - i] or 'fp32'}", f"this .*codec={asked[i] or 'fp32'}"]
            with pytest.raises(RunFailedError, match=f"E-RED-10 {', '.join(said)}\n(.*\n)*.*same codec= at all"):
                work.wait(PATIENCE_S)
        assert not tensors[0].any() and tensors[1].all()
        assert all(done.complete for done in together(members, tensors, codec="fp16"))
        assert torch.equal(tensors[0], torch.full((1000,), 0.5))
