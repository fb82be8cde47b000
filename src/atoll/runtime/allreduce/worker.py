"""Worker of a reduce-only peer: its updates are the tensors of its user's calls.

Stands in the place of a trainer: a round "trains" when the user calls, its update is the tensors themselves, and
its state is the digests of the agreed parts. So an all-reduce is a round: agreed, elastic, encrypted.

Invariants:
- Tensors of a call change only once its round is agreed, and to the same bits at every member.
- If a user does not call for `timeout_s` while others wait, its member passes and reports that.
- Tensors are not kept between calls (residuals belong to the caller) and never written to disk.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import torch
import xxhash

from atoll.base.errors import AtollError, PeerFault, RunFailedError
from atoll.base.ids import DIGEST_BYTES, Digest
from atoll.base.machine import Message, Payload
from atoll.crypto.digest import Buffer, digest
from atoll.peer.tasks import (
    AdoptState,
    AdvanceState,
    BuildMalformedRowEvidence,
    BuildSumOpening,
    EncodeUpdate,
    JudgeMalformedRow,
    JudgeSumOpening,
    MalformedRowJudged,
    PinBlobs,
    RestoreState,
    StateAdvanced,
    StateRestored,
    TrainingResult,
    TrainRound,
    UpdateEncoded,
)
from atoll.protocol.allreduce.tasks import CombineRows, ComputeRowProducts, RowsCombined, WeighRows
from atoll.runtime.allreduce.call import (
    GATHERED,
    SAMPLE,
    Cuts,
    GroupTerms,
    ReduceCall,
    ReduceResult,
    asked_for,
    is_shaped,
)
from atoll.runtime.allreduce.parts import cuts, paired_cuts, part_values, seed_of
from atoll.runtime.allreduce.trust import VerifiableReduceArithmetic, values_of
from atoll.runtime.network.buffer_pool import BufferPool
from atoll.runtime.network.bulk_channel import PayloadHasher
from atoll.runtime.storage.store import PeerStore, run_store_task
from atoll.training.codec import Codec, SharedKnowledge, codec_named
from atoll.training.codec.blocks import Room
from atoll.training.codec.compiled import native
from atoll.training.codec.fp32 import TRUSTED_FP32
from atoll.training.exchange.combine import CombinedPart as Made
from atoll.training.exchange.combine import combine, gather
from atoll.training.recipe.reply_formats import ReplyFormat
from atoll.training.recipe.update import matrices, tensor_sizes, whole_sizes
from atoll.verification.malformed_updates.tensors import UNJUDGED
from atoll.wire.messages.round import PartResponse, PartResult, RowContribution, RowResponse
from atoll.worker.arithmetic import compute_weights

QUICK = (
    RowContribution | RowResponse | PartResult | PartResponse
)  # messages with payloads that a private group names by XXH3
STATES_KEPT = 16  # states of which the digests are kept: a new member fetches one while up to ten a second follow
Agreed = tuple[Payload | None, bool]  # result of a part, and whether the local row is in it


class GroupWorker:
    def __init__(self, store: PeerStore) -> None:
        self.store = store
        self.terms = GroupTerms()
        self.pieces = self.pair_pieces = 1
        self.remembers = False  # owners keep residuals of results in the `ErrorFeedback` of a call
        self.calls: deque[ReduceCall] = deque()
        self._closed = False
        self.current: tuple[int, ReduceCall] | None = None  # current round, and the call encoded for it
        self._agreed: dict[Digest, tuple[Payload | None, ...]] = {}
        self._parts: tuple[Agreed, ...] = ()  # results of the last agreed round, until they are delivered
        self._led: tuple[Digest, ...] = ()  # digests of the results among them that this member gave
        self._deliveries: set[asyncio.Future[None]] = set()
        self._states: deque[Digest] = deque(maxlen=STATES_KEPT)
        self._changed = asyncio.Event()  # set by a new call, or when it is time to pass
        self._waited_for: asyncio.TimerHandle | None = None
        self._pass_reason = ""  # reason why the current round goes on without the local user
        self._arithmetic = ThreadPoolExecutor(1, "arithmetic")
        # estimated rate of the local uplink; None: unknown
        self.uplink_bytes_s: Callable[[], float | None] = lambda: None
        self.room: Room = BufferPool()  # buffers for encoded bytes; best the pool that arriving parts use
        self.checked: VerifiableReduceArithmetic | None = None  # set where members may lie
        self._needed: dict[str, tuple[Digest, ...]] = {}  # job → blobs in use by openings and verdicts

    # ---- what the group's owner does -----------------------------------------------------------------------

    def call(self, call: ReduceCall) -> None:
        if self._closed:  # in between, by another thread than its user's
            call.future.set_exception(_closed_error())
            return
        native.load_for(len(call.flat_N))
        self.calls.append(call)
        self._changed.set()

    def start_pass_timer(self) -> None:
        """Start the timeout: another member committed to a round that the local user has not called for yet."""
        if self.calls or self._waited_for is not None:
            return
        loop = asyncio.get_running_loop()
        why = f"its user did not call for {self.terms.timeout_s:.0f} s"
        self._waited_for = loop.call_later(self.terms.timeout_s, self.pass_round, why)

    def pass_round(self, why: str) -> None:
        """Let this round go on without the local user, unless it has called."""
        self._pass_reason = why
        self._changed.set()

    def deliver_round(self, done: ReduceResult, again: bool, others: Container[int] = ()) -> None:
        """Deliver an agreed round.

        `again`: the round only admitted or released members, and the call is repeated in the next one. `others`:
        parts with the mean of a different call.
        """
        self._clear_pass()
        call, led = self._call_in(done.round), self._led
        parts = tuple((None, False) if i in others else agreed for i, agreed in enumerate(self._parts))
        self.current, self._parts = None, ()
        if call is None or (again and not call.future.done()):
            return  # the round went on without the local user; a later call belongs to the next round
        self.calls.popleft()
        delivery = asyncio.ensure_future(self._off_loop(self._deliver, (call, parts, led, done)))
        self._deliveries.add(delivery)
        delivery.add_done_callback(self._deliveries.discard)

    def fail_missed(self, upto: int, why: AtollError) -> None:
        """Fail the call of a round that the group has passed without a mean here.

        Kept for the next round, it would be averaged with later calls, or wait forever.
        """
        if self.current is None or self.current[0] > upto:
            return
        self._clear_pass()
        _, call = self.current
        self.current, self._parts = None, ()
        self.calls.popleft()
        if not call.future.done():
            call.future.set_exception(why)

    def mark_mixed(self, round: int) -> None:
        """Mark the round as mixed: another member holds another mean or none, so differences cannot be added."""
        call = self._call_in(round)
        if call is not None:
            call.mixed = round

    def repeats_call(self, round: int, anyway: bool) -> bool:
        """Return whether the call of a failed round is repeated, with whole values.

        Members may have held different means. All see this in one vertex, whatever commits they received.
        """
        call = self._call_in(round)
        if anyway or call is None or call.future.done():
            return anyway
        if call.sent_whole:
            return False
        call.sent_whole, call.from_name, call.from_N = True, "", None
        return True

    def fail_all(self, why: AtollError) -> None:
        """Fail all pending calls: the group goes on without this member."""
        self._clear_pass()
        self.current, self._parts = None, ()
        calls, self.calls = self.calls, deque[ReduceCall]()
        for call in calls:
            if not call.future.done():
                call.future.set_exception(why)

    def fail_call(self, round: int, why: AtollError) -> None:
        """Fail the call of this round at once; its tensors stay unchanged."""
        call = self._call_in(round)
        if call is not None and not call.future.done():
            call.future.set_exception(why)

    def cuts_of(self, round: int) -> Cuts:
        """Bounds of the parts of this round's call; () if nothing was encoded or the call cannot succeed, since its
        cuts may then differ from those of other members.
        """
        call = self._call_in(round)
        return call.cuts if call is not None and not call.future.done() else ()

    def asked_in(self, round: int) -> tuple[int, str] | None:
        """Values and deviations to which the local call of this round committed; None as in `cuts_of`."""
        call = self._call_in(round)
        return (len(call.flat_N), self._asked(call)) if call is not None and not call.future.done() else None

    # ---- what the driver asks for --------------------------------------------------------------------------

    async def run(self, work: Any) -> Any:
        match work:
            case TrainRound():
                return await self._train()
            case EncodeUpdate():
                return await self._encode(work)
            case CombineRows():
                return await self._off_loop(self._combine, work)
            case ComputeRowProducts() if self.checked is not None:
                return await self._off_loop(lambda work: self._checked.compare(work, self._values(work)), work)
            case WeighRows():
                return compute_weights(work)
            case BuildSumOpening():
                return await asyncio.to_thread(self._checked.lay_open, work)
            case JudgeSumOpening():
                # where rows are shown, all calls use this codec
                each = part_values(codec_named(self.terms.codec, SAMPLE))
                lo, hi = cuts(values_of(work), work.shares, self.pieces, each)[work.answered.part]
                return await self._off_loop(lambda work: self._checked.judge(work, hi - lo), work)
            case BuildMalformedRowEvidence() | JudgeMalformedRow():
                return MalformedRowJudged(fault=UNJUDGED)  # any row is valid: its content is the caller's choice
            case PinBlobs(blobs, why):
                self._needed[why] = blobs
                return None
            case AdvanceState():
                return self._advance(work)
            case AdoptState():
                return await self._off_loop(self._adopt, work)
            case RestoreState():
                # every call needs its own mean, so an older state cannot be restored
                return StateRestored() if self.store.has_blob(work.state) else None
            case _:
                return run_store_task(self.store, work)

    def digest_of(self, message: Message, payload: Buffer) -> Digest:
        """Fast hash of a part: members of a private group trust each other, and the link authenticates bytes."""
        if self.checked is not None:
            return self.checked.digest_of(message, payload)
        return _quick_name(payload) if isinstance(message, QUICK) else digest(payload)

    def follow(self) -> PayloadHasher | None:
        """Hasher for one incoming payload."""
        return xxhash.xxh3_128() if self.checked is None else None

    def named(self, message: Message, followed: bytes) -> Digest | None:
        """Digest of a payload hashed on arrival; None if it needs the slower hash."""
        return _padded(followed) if self.checked is None and isinstance(message, QUICK) else None

    async def close(self) -> None:
        self._closed = True
        self._clear_pass()
        for call in self.calls:
            if not call.future.done():
                call.future.set_exception(_closed_error())
        await asyncio.gather(*self._deliveries, return_exceptions=True)
        self._arithmetic.shutdown(wait=True, cancel_futures=True)

    # ---- the work ------------------------------------------------------------------------------------------

    async def _train(self) -> TrainingResult:
        while not self.calls and not self._pass_reason:
            self._changed.clear()
            await self._changed.wait()
        if not self.calls:
            raise RunFailedError("E-RED-06", self._pass_reason)
        call = self.calls[0]
        if call.held is not None:
            await asyncio.gather(*self._deliveries, return_exceptions=True)
            if not self._is_first(call):  # removed from the group in between
                return await self._train()
            call.load_reference()
        return TrainingResult(1, call.weight, 0.0, 0.0, len(call.flat_N), self._asked(call))

    async def _encode(self, work: EncodeUpdate) -> UpdateEncoded:
        told = RunFailedError("E-RED-06", "its user was told that its call failed")
        if not self.calls:  # removed from the group after training, and the round goes on after all
            raise told
        call = self.calls[0]
        try:
            payloads = await self._off_loop(lambda work: self._rows(work, call), work)
        except ValueError as why:
            refused = RunFailedError("E-RED-11", f"these tensors cannot be averaged: {why}")
            self._refuse(call, refused)
            raise refused from why
        except Exception as why:  # it would fail again in every round
            self._refuse(call, _defect_error(why))
            raise
        if not self._is_first(call):  # removed in between: the user's next call is another one
            raise told
        self.current = work.round, call
        return UpdateEncoded(payloads)

    def _refuse(self, call: ReduceCall, why: AtollError) -> None:
        if self._is_first(call) and not self._closed:  # the future informs the user
            self.calls.popleft().future.set_exception(why)

    def _is_first(self, call: ReduceCall) -> bool:
        return bool(self.calls) and self.calls[0] is call

    def _rows(self, work: EncodeUpdate, call: ReduceCall) -> tuple[Payload, ...]:
        each = part_values(codec_named(call.codec, SAMPLE))
        if call.paired:
            call.members = len(work.shares) // self.pair_pieces
            call.cuts = paired_cuts(len(call.flat_N), call.members, self.pair_pieces, each)
        else:
            call.cuts = cuts(len(call.flat_N), work.shares, self.pieces, each)
        if call.owing is not None:
            call.owing.commit((), call.whole)  # staged residuals belong to a round that failed here
        filled = max(1, sum(hi > lo for lo, hi in call.cuts))
        with call.lane.work():
            call.left_N = None if call.owed_N is None else torch.empty_like(call.flat_N)
            rows = [self._encoded(call, work.round, part) for part in range(0, filled, call.members)]
        return tuple(row for row in rows for _ in range(call.members))

    def _combine(self, work: CombineRows) -> RowsCombined:
        call, values = self._call_of(work), self._values(work)
        if self.checked is not None:
            up, down = self._both_ways(call, work)
            done, payload = self.checked.combine(work, values, up, down, self.room)
        else:
            done, payload = self._combine_trusting(call, work, values)
        counted = tuple(work.rows[i].peer for i in done.counted)
        faulty = tuple(work.rows[i].peer for i, _ in done.faults)
        return RowsCombined(payload, counted, faulty, done.why)

    def _combine_trusting(self, call: ReduceCall, work: CombineRows, values: int) -> tuple[Made, Payload | None]:
        """Partial sums travel with the codec of results, which is the finer one."""
        rows = [(row.weight, row.payload.data) for row in work.rows]
        if call.paired:
            return self._combine_pair(call, work, rows)
        if self.terms.way_back == GATHERED:
            done = self._gathering(call, work.round, work.part).encode(rows)
            return done, _quickly_named(done.wire, xxhash.xxh3_128_digest(done.wire)) if done.wire else None
        up, down = self._both_ways(call, work)
        if call.owing is not None:
            lo = call.at + call.cuts[work.part][0]
            done, left_N = call.owing.combine(rows, lo, values, up, down)
            if done.wire is None or left_N is None:
                return done, None
            payload = _quickly_named(done.wire, xxhash.xxh3_128_digest(done.wire))
            call.owing.stage(payload.digest, lo, left_N)
            return done, payload
        name = xxhash.xxh3_128()
        codecs = [down if row.handed else up for row in work.rows]
        done = combine(rows, values, codecs, down.with_hashing(name.update), room=self.room)
        return done, _quickly_named(done.wire, name.digest()) if done.wire is not None else None

    def _combine_pair(
        self, call: ReduceCall, work: CombineRows, rows: Sequence[tuple[int, Buffer]]
    ) -> tuple[Made, Payload | None]:
        """Mean of a pair: only its digest is sent, and no codec is applied."""
        lo, hi = call.cuts[work.part]
        done = gather(rows, hi - lo, self._codec(call.codec, call, work.round, work.part))
        if done.mean_N is None:
            return Made(None, done.counted, done.faults, "no row has any weight"), None
        name = xxhash.xxh3_128_digest(done.mean_N.numpy().data.cast("B"))
        answer = _quickly_named(name, xxhash.xxh3_128_digest(name))
        call.made[work.part, answer.digest] = done.mean_N
        return Made(name, done.counted, done.faults), answer

    def _values(self, work: CombineRows | ComputeRowProducts) -> int:
        lo, hi = self._call_of(work).cuts[work.part]
        return hi - lo

    def _call_of(self, work: CombineRows | ComputeRowProducts) -> ReduceCall:
        call = self._call_in(work.round)
        if call is None:
            raise RunFailedError("E-RED-06", "its user has not called")
        if call.future.done() or call.mixed == work.round:
            raise RunFailedError("E-RED-06", "its call cannot succeed")
        return call

    def _advance(self, work: AdvanceState) -> StateAdvanced:
        """The state is the digests of the agreed parts: enough for members to compare what they hold."""
        names = [ABSENT if p is None else p.digest for p in work.parts]
        state = self.store.put_blob(work.before + b"".join(names))
        self._agreed[state] = work.parts
        self._states.append(state)
        return StateAdvanced(state)

    def _adopt(self, work: AdoptState) -> None:
        answers, self._agreed = self._agreed.get(work.state, ()), {}
        self._parts, self._led = tuple(zip(answers, work.counted or repeat(False), strict=False)), work.led
        self.store.drop_blobs({*self._states, work.state, *chain.from_iterable(self._needed.values())})

    def _deliver(self, delivery: tuple[ReduceCall, tuple[Agreed, ...], tuple[Digest, ...], ReduceResult]) -> None:
        call, parts, led, done = delivery
        if call.future.done():
            return  # its user already got an error
        try:
            with call.lane.work():
                for part, ((payload, counted), (lo, hi)) in enumerate(zip(parts, call.cuts, strict=bool(parts))):
                    if payload is None or (call.paired and (part, payload.digest) not in call.made):
                        continue
                    call.settle(lo, hi, counted)
                    call.written = hi
                    self._decode(call, done.round, part, payload)
        except PeerFault as fault:
            why = RunFailedError(
                "E-RED-17",
                f"the agreed mean does not decode: {fault.what}",
                cause="the member that answered for a part of it is broken, or lies",
                fix="see that all members have the same version; go on with the next call",
            )
            call.future.set_exception(why)
        except Exception as why:  # whatever the error, a user waits for this future
            call.future.set_exception(_defect_error(why))
            raise
        else:
            if call.owing is not None:
                call.owing.commit(led, call.whole)
            if call.held is not None:
                call.held.take(call.at, call.flat_N)
            call.from_N = None
            call.left_N, call.made = None, {}  # a user that keeps the result must not keep these alive
            call.future.set_result(done)

    def _decode(self, call: ReduceCall, round: int, part: int, answer: Payload) -> None:
        lo, hi = call.cuts[part]
        if call.paired:
            call.flat_N[lo:hi] = call.made[part, answer.digest]
        elif self.terms.way_back == GATHERED:
            call.flat_N[lo:hi] = self._gathering(call, round, part).decode(answer.data).value_N
        else:
            self._way_back(call, round, part).decode_into(answer.data, call.flat_N[lo:hi])
        if call.from_N is not None:
            call.flat_N[lo:hi] += call.from_N[lo:hi]

    def _gathering(self, call: ReduceCall, round: int, part: int) -> ReplyFormat:
        """Reply format of a part that is one tensor, without agreement statistics."""
        lo, hi = call.cuts[part]
        return ReplyFormat(self._codec(call.codec, call, round, part), None, "mean", False, (hi - lo,))

    def _both_ways(self, call: ReduceCall, work: CombineRows) -> tuple[Codec, Codec]:
        """A result goes to all contributors, a partial sum to one: the uplink's rate per receiver differs."""
        up, carried_bytes_s = self._codec(call.codec, call, work.round, work.part), self.uplink_bytes_s()
        receivers = 1 if work.onward else max(1, len(work.rows) - 1)
        each_bytes_s = carried_bytes_s / receivers if carried_bytes_s is not None else None
        return up, self._way_back(call, work.round, work.part, each_bytes_s)

    def _way_back(self, call: ReduceCall, round: int, part: int, link_bytes_s: float | None = None) -> Codec:
        return self._codec(self.terms.way_back or call.codec, call, round, part, link_bytes_s)

    # ---- small words ---------------------------------------------------------------------------------------

    def _asked(self, call: ReduceCall) -> str:
        codec = call.codec if call.codec != self.terms.codec else ""
        return asked_for(codec, call.topology, call.tensors, call.from_name)

    def _codec(
        self, name: str, call: ReduceCall, round: int, part: int, link_bytes_s: float | None = None
    ) -> Codec:
        """Codec of a part. Trusting members do not check for non-finite values."""
        if name == "fp32" and self.checked is None:
            return TRUSTED_FP32
        known = SharedKnowledge(seed=seed_of(round, call.coded_as(part)), link_bytes_s=link_bytes_s)
        if is_shaped(name):
            cut = call.tensors, *call.cuts[part]
            known = replace(known, sizes=tensor_sizes(*cut), wholes=whole_sizes(*cut), shapes=matrices(*cut))
        return codec_named(name, known)

    def _encoded(self, call: ReduceCall, round: int, part: int) -> Payload:
        codec = self._codec(call.codec, call, round, part, self.uplink_bytes_s())
        lo, hi = call.cuts[part]
        if self.checked is not None:
            return self.checked.made(codec, lambda shown: call.encoded_apart(shown, lo, hi, self.room))
        name = xxhash.xxh3_128()
        wire = call.encoded(codec.with_hashing(name.update), lo, hi)
        return _quickly_named(wire, name.digest())

    @property
    def _checked(self) -> VerifiableReduceArithmetic:
        if self.checked is None:
            raise RunFailedError("E-AUD-03", "members of this group trust each other")
        return self.checked

    def _call_in(self, round: int) -> ReduceCall | None:
        return self.current[1] if self.current is not None and self.current[0] == round else None

    def _clear_pass(self) -> None:
        self._pass_reason = ""
        if self._waited_for is not None:
            self._waited_for.cancel()
            self._waited_for = None

    async def _off_loop(self, work: Callable[[Any], Any], argument: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._arithmetic, work, argument)


ABSENT = Digest(bytes(DIGEST_BYTES))


def _closed_error() -> AtollError:
    return RunFailedError("E-RED-04", "the group was closed before this all-reduce was agreed")


def _defect_error(why: Exception) -> AtollError:
    text = f"an error of Atoll itself: {type(why).__name__}: {why}"
    fix = "free memory, if that is what it lacked, and call again; else report it with the lines above"
    return RunFailedError("E-INT-01", text, cause="a defect, or no memory left", fix=fix)


def _quick_name(data: Buffer) -> Digest:
    return _padded(xxhash.xxh3_128_digest(data))


def _quickly_named(wire: Buffer, hashed: bytes) -> Payload:
    return Payload(_padded(hashed), memoryview(wire).nbytes, wire)


def _padded(hashed: bytes) -> Digest:
    return Digest(hashed.ljust(DIGEST_BYTES, b"\0"))
