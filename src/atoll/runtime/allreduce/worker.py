"""The island of a peer that only reduces: its tensors are whatever its user hands in, call by call.

Stands where a trainer stands in a run that learns: a round "trains" when the user calls, its update is the tensors
themselves, its state is the name of what was agreed. So an all-reduce is a round: agreed, elastic, encrypted.
Promises: tensors of a call change only once its round is agreed, and then to the same bits at every member; a
member whose user does not call for `timeout_s` while others wait passes, and says so.
Never keeps tensors between calls (what error feedback owes is its caller's), never writes them to disk.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, repeat
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

from atoll.base.errors import AtollError, PeerFault, RunFailedError
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId, Seconds
from atoll.base.machine import Message, Payload
from atoll.crypto.digest import Buffer, digest
from atoll.peer.round.topology_choice import ASKED, PAIRS
from atoll.peer.tasks import (
    AdoptState,
    AdvanceState,
    BuildOpening,
    EncodeUpdate,
    ExhibitRow,
    JudgeOpening,
    JudgeRow,
    PinBlobs,
    RestoreState,
    RowJudged,
    StateAdvanced,
    StateRestored,
    TrainingResult,
    TrainRound,
    UpdateEncoded,
)
from atoll.protocol.allreduce.tasks import CombineRows, CompareRows, ComputedWeights, RowsCombined, WeighRows
from atoll.runtime.allreduce.delta_reference import DeltaReference
from atoll.runtime.allreduce.flatten import ON_HOST, DeviceStream, moved
from atoll.runtime.allreduce.trust import CheckedArithmetic, values_of
from atoll.runtime.network.buffer_pool import BufferPool
from atoll.runtime.network.bulk_channel import PayloadHasher
from atoll.runtime.storage.store import PeerStore, stored
from atoll.training.codec import Codec, SharedKnowledge, codec_named, pack_spans
from atoll.training.codec.blocks import Room, spans_of
from atoll.training.codec.compiled import native
from atoll.training.codec.compiled.device import pack_there
from atoll.training.codec.fp32 import TRUSTED_FP32
from atoll.training.exchange.combine import CombinedPart as Made
from atoll.training.exchange.combine import combine, gather
from atoll.training.exchange.distance_weights import weigh
from atoll.training.recipe.reply_formats import ReplyFormat
from atoll.training.recipe.update import TensorPlace, matrices, part_bounds, tensor_sizes, whole_sizes
from atoll.verification.malformed_updates.tensors import UNJUDGED
from atoll.wire.messages.round import PartResponse, PartResult, RowContribution, RowResponse
from atoll.worker.downlink_error_feedback import DownlinkErrorFeedback

SAMPLE_VALUES = 2**20
SAMPLE = SharedKnowledge(seed=b"sample", shapes=((2**10, 2**10),))  # of a codec, to see how long its wires are
SHAPED = frozenset({"lowrank", "changed"})  # codecs that ask what tensors a vector is made of
PART_VALUES = 2 * 2**20  # of a part in fp32: while one is combined the next ones are on their way
PART_VALUES_MOST = 4 * 2**20  # of one in codecs with fewer bytes: half as many messages for the same work
TURNS = 3  # of every owner, in fp32: it holds everybody's rows of one of them, not of its whole share
TURN_VALUES_LEAST = 2**19  # of a part for that: below it more messages cost more than the memory is worth
PART_VALUES_LEAST = 2**16  # below it a part costs everybody more in messages than its owner in work
GATHERED = "gathered"  # a way back without a codec: answers are the rows themselves, and everybody combines them
QUICK = (
    RowContribution | RowResponse | PartResult | PartResponse
)  # messages whose payloads a private group names by XXH3
STATES_KEPT = 16  # names of agreed states: a newcomer fetches one while the next ones are agreed, ten a second
HELD = "held="  # the word for it
Cuts = tuple[tuple[int, int], ...]  # [lo, hi) of every part
Part = tuple[tuple[int, int], tuple[PeerId, ...]]  # [lo, hi) of the fused values, and who is in it
Agreed = tuple[Payload | None, bool]  # a part's answer, and whether what I sent is in it


class GroupTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What genesis of a group fixes for its members. Strict, or a training run could be read as a group."""

    codec: str = "fp32"
    way_back: str = ""  # codec of the combined parts; empty: the same one; or GATHERED
    timeout_s: Seconds = 60.0


def is_shaped(name: str) -> bool:
    return not SHAPED.isdisjoint(stage.partition(":")[0] for stage in name.split("+"))


def asked_for(codec: str, topology: str, tensors: tuple[TensorPlace, ...] = (), held: str = "") -> str:
    """What a call wants otherwise than its group, in the words in which members commit to it; empty: nothing. Where
    tensors matter rows of others would be read as if they were these; `held` is what rows are differences from."""
    shapes = digest(repr([tuple(tensor) for tensor in tensors]).encode()).hex()[:16] if tensors else ""
    words = f"{ASKED}{topology}", f"codec={codec}", f"shapes={shapes}", f"{HELD}{held}"
    return " ".join(word for word in words if not word.endswith("="))


def but_for_held(asked: str) -> str:
    return " ".join(word for word in asked.split(" ") if not word.startswith(HELD))


@dataclass(frozen=True)
class ReduceResult:
    """What an all-reduce did. Peers are ids, in order."""

    round: int
    contributors: tuple[PeerId, ...]  # in at least one part of the mean
    partly: tuple[PeerId, ...]  # of those, the ones missing from some part
    missing: tuple[PeerId, ...]  # members that are in no part
    parts: tuple[Part, ...]
    """A slice that nobody answered for names nobody, and keeps this member's own values."""
    topology: str = ""  # by which it was reduced

    @property
    def complete(self) -> bool:
        """Every value is the mean over all contributors."""
        return not self.partly and all(names for (lo, hi), names in self.parts if hi > lo)


@dataclass
class ReduceCall:
    """One slice of one all-reduce: `flat_N` is read while it is under way, and overwritten when it is agreed."""

    flat_N: Tensor  # (N,) fp32, on the host or on a GPU
    weight: int
    codec: str
    owed_N: Tensor | None = None
    """(N,) what earlier calls left out, where this one feeds errors back. May lie elsewhere than the vector."""
    topology: str = ""  # that its caller wants otherwise than its group
    tensors: tuple[TensorPlace, ...] = ()  # where a codec asks what `flat_N` is made of
    owing: DownlinkErrorFeedback | None = None  # what my answers for these tensors left out, where owners remember
    at: int = 0  # where `flat_N` begins in what was called for, which has so many values
    whole: int = 0
    held: DeltaReference | None = None  # what its user holds of an earlier mean of these tensors
    lane: DeviceStream = ON_HOST  # in which `flat_N` is worked on
    future: Future[ReduceResult] = field(default_factory=Future[ReduceResult])
    written: int = 0  # values of `flat_N` up to here may be the mean's, or of a part of it that could not be read
    cuts: Cuts = ()
    left_N: Tensor | None = None  # (N,) what its rows leave out: owed where the agreed mean holds them
    members: int = 1  # in pairs: as many parts follow each other that hold the same of everybody's rows
    mixed: int = -1  # in this round others held another mean, or none: nothing may be added up
    sent_whole: bool = False  # so no differences this time
    from_N: Tensor | None = None  # (N,) what its rows are differences from
    from_name: str = ""
    made: dict[tuple[int, Digest], Tensor] = field(default_factory=dict[tuple[int, Digest], Tensor])
    """In pairs: by the part and the answer that names it, what I combined for myself. One attempt may differ from
    another, and the vertex says which of them counts."""

    @property
    def paired(self) -> bool:
        return self.topology == PAIRS

    def coded_as(self, part: int) -> int:
        """The part whose draw this one's codec goes by: what is one row of all has one wire."""
        return part - part % self.members

    def begins(self) -> None:
        """What an earlier call of the same tensors agreed on is in them."""
        if self.held is not None and not self.sent_whole:
            self.from_name, self.from_N = self.held.slice(self.at, len(self.flat_N))

    def row(self, lo: int, hi: int) -> Tensor:
        """What members send of these values: the values, or how they differ from those that all hold."""
        return self.flat_N[lo:hi] if self.from_N is None else self.flat_N[lo:hi] - self.from_N[lo:hi]

    def encoded(self, codec: Codec, lo: int, hi: int) -> Buffer:
        x_N = self.row(lo, hi)
        if self.owed_N is None or self.left_N is None:
            return codec.encode(x_N)
        owed_N, left_N = moved(self.owed_N[lo:hi], x_N), self.left_N[lo:hi]
        if x_N.is_cuda:
            return pack_there(codec, x_N, owed_N, left_N)
        return pack_spans(codec, (x_N[a:b] for a, b in spans_of(hi - lo)), owed_N, 1.0, left_N)

    def encoded_apart(self, codec: Codec, lo: int, hi: int, room: Room) -> Buffer:
        """The same in memory of its own: the mean is written over the tensor before rows are shown."""
        if self.owed_N is not None or self.flat_N.is_cuda or codec.spanwise is None:  # a wire in any case
            return self.encoded(codec, lo, hi)
        x_N = self.row(lo, hi)
        return codec.encode_spans(hi - lo, (x_N[a:b] for a, b in spans_of(hi - lo)), room)

    def settle(self, lo: int, hi: int, counted: bool) -> None:
        """A mean of these values was agreed on, with mine or without, and is about to be written over them."""
        if self.owed_N is None or self.left_N is None:
            return
        if counted:
            self.owed_N[lo:hi] = self.left_N[lo:hi]
        else:
            self.owed_N[lo:hi] += moved(self.flat_N[lo:hi], self.owed_N)


class GroupWorker:
    def __init__(self, store: PeerStore) -> None:
        self.store = store
        self.terms = GroupTerms()
        self.pieces = self.pair_pieces = 1
        self.remembers = False  # what answers left out, where a call says with what
        self.calls: deque[ReduceCall] = deque()
        self._closed = False
        self.current: tuple[int, ReduceCall] | None = (
            None  # the round that is under way, and what was encoded for it
        )
        self._agreed: dict[Digest, tuple[Payload | None, ...]] = {}
        self._parts: tuple[Agreed, ...] = ()  # of the round that was agreed last, until they are delivered
        self._led: tuple[Digest, ...] = ()  # of those, the ones that I answered
        self._deliveries: set[asyncio.Future[None]] = set()
        self._states: deque[Digest] = deque(maxlen=STATES_KEPT)
        self._changed = asyncio.Event()  # there is a call, or it is time to pass
        self._waited_for: asyncio.TimerHandle | None = None
        self._passes = ""  # why the round that is under way goes on without my user
        self._arithmetic = ThreadPoolExecutor(1, "arithmetic")
        self.uplink_bytes_s: Callable[[], float | None] = lambda: None  # what it carries, as far as is known
        self.room: Room = BufferPool()  # for wires; better the one that arriving parts lie in
        self.checked: CheckedArithmetic | None = None  # where members may lie
        self._needed: dict[str, tuple[Digest, ...]] = {}  # blobs, for openings under way and for verdicts

    # ---- what the group's owner does -----------------------------------------------------------------------

    def call(self, call: ReduceCall) -> None:
        if self._closed:  # meanwhile, by another thread than its user's
            call.future.set_exception(_never_agreed())
            return
        native.load_for(len(call.flat_N))
        self.calls.append(call)
        self._changed.set()

    def others_wait(self) -> None:
        """Somebody committed to a round that my user has not called for yet."""
        if self.calls or self._waited_for is not None:
            return
        loop = asyncio.get_running_loop()
        why = f"its user did not call for {self.terms.timeout_s:.0f} s"
        self._waited_for = loop.call_later(self.terms.timeout_s, self.passes, why)

    def passes(self, why: str) -> None:
        """This round goes on without my user, unless it has called."""
        self._passes = why
        self._changed.set()

    def closed(self, done: ReduceResult, again: bool, others: Container[int] = ()) -> None:
        """The round was agreed. `again`: it only made room for a newcomer, the call is for the next one. `others`:
        of these parts the mean is of other calls than mine."""
        self._others_are_served()
        mine, led = self._mine(done.round), self._led
        parts = tuple((None, False) if i in others else agreed for i, agreed in enumerate(self._parts))
        self.current, self._parts = None, ()
        if mine is None or (again and not mine.future.done()):
            return  # it went on without me: the call, if there is one, is for the next round
        self.calls.popleft()
        delivery = asyncio.ensure_future(self._off_loop(self._deliver, (mine, parts, led, done)))
        self._deliveries.add(delivery)
        delivery.add_done_callback(self._deliveries.discard)

    def missed(self, upto: int, why: AtollError) -> None:
        """The group went past the round of my call and I do not hold its mean: the next call is for the next round.

        Kept for the next round it would be averaged with calls that come after it, or wait for ever for one.
        """
        if self.current is None or self.current[0] > upto:
            return
        self._others_are_served()
        _, mine = self.current
        self.current, self._parts = None, ()
        self.calls.popleft()
        if not mine.future.done():
            mine.future.set_exception(why)

    def mixes(self, round: int) -> None:
        """Others hold another mean than mine, or none: differences from one are not added to those from another."""
        mine = self._mine(round)
        if mine is not None:
            mine.mixed = round

    def goes_again(self, round: int, anyway: bool) -> bool:
        """Nothing came of the call of this round. True if it goes once more, with whole values: members may have
        held different means. All see so in one vertex, whoever of them heard of whose call."""
        mine = self._mine(round)
        if anyway or mine is None or mine.future.done():
            return anyway
        if mine.sent_whole:
            return False
        mine.sent_whole, mine.from_name, mine.from_N = True, "", None
        return True

    def ousted(self, why: AtollError) -> None:
        """The others go on without this member: nobody answers the calls that wait, and their users are told."""
        self._others_are_served()
        self.current, self._parts = None, ()
        calls, self.calls = self.calls, deque[ReduceCall]()
        for call in calls:
            if not call.future.done():
                call.future.set_exception(why)

    def fails(self, round: int, why: AtollError) -> None:
        """The call of this round cannot succeed: its user is told at once, its tensors stay as they are."""
        mine = self._mine(round)
        if mine is not None and not mine.future.done():
            mine.future.set_exception(why)

    def cuts_of(self, round: int) -> Cuts:
        """Where the parts of this round's call lie; nothing if nothing was encoded for it, or it cannot succeed: it
        may have been cut as nobody else's."""
        mine = self._mine(round)
        return mine.cuts if mine is not None and not mine.future.done() else ()

    def asked_in(self, round: int) -> tuple[int, str] | None:
        """What my call of this round committed to, its values and what it wants; nothing as above."""
        mine = self._mine(round)
        return (len(mine.flat_N), self._asked(mine)) if mine is not None and not mine.future.done() else None

    # ---- what the driver asks for --------------------------------------------------------------------------

    async def do(self, work: Any) -> Any:
        match work:
            case TrainRound():
                return await self._train()
            case EncodeUpdate():
                return await self._encode(work)
            case CombineRows():
                return await self._off_loop(self._combine, work)
            case CompareRows() if self.checked is not None:
                return await self._off_loop(lambda work: self._checked.compare(work, self._values(work)), work)
            case WeighRows():
                return ComputedWeights(weigh(work.statistic, work.liars, work.rows, work.parts))
            case BuildOpening():
                return await asyncio.to_thread(self._checked.lay_open, work)
            case JudgeOpening():
                # where rows are shown all calls are in this codec
                each = part_values(codec_named(self.terms.codec, SAMPLE))
                lo, hi = cuts(values_of(work), work.shares, self.pieces, each)[work.answered.part]
                return await self._off_loop(lambda work: self._checked.judge(work, hi - lo), work)
            case ExhibitRow() | JudgeRow():
                return RowJudged(fault=UNJUDGED)  # what a row has to be is its caller's choice
            case PinBlobs(blobs, why):
                self._needed[why] = blobs
                return None
            case AdvanceState():
                return self._advance(work)
            case AdoptState():
                return await self._off_loop(self._adopt, work)
            case RestoreState():
                return StateRestored() if self.store.has_blob(work.state) else None  # calls want every mean
            case _:
                return stored(self.store, work)

    def name_of(self, message: Message, payload: Buffer) -> Digest:
        """Parts are named by a fast hash: members of a group trust each other, and the link authenticates bytes."""
        if self.checked is not None:
            return self.checked.name_of(message, payload)
        return _quick_name(payload) if isinstance(message, QUICK) else digest(payload)

    def follow(self) -> PayloadHasher | None:
        """Hashes one payload on its way in."""
        return xxhash.xxh3_128() if self.checked is None else None

    def named(self, message: Message, followed: bytes) -> Digest | None:
        """What a payload that was followed is called; None if it has a slower name."""
        return _padded(followed) if self.checked is None and isinstance(message, QUICK) else None

    async def close(self) -> None:
        self._closed = True
        self._others_are_served()
        for call in self.calls:
            if not call.future.done():
                call.future.set_exception(_never_agreed())
        await asyncio.gather(*self._deliveries, return_exceptions=True)
        self._arithmetic.shutdown(wait=True, cancel_futures=True)

    # ---- the work ------------------------------------------------------------------------------------------

    async def _train(self) -> TrainingResult:
        while not self.calls and not self._passes:
            self._changed.clear()
            await self._changed.wait()
        if not self.calls:
            raise RunFailedError("E-RED-06", self._passes)
        call = self.calls[0]
        if call.held is not None:
            await asyncio.gather(*self._deliveries, return_exceptions=True)
            if not self._is_first(call):  # ousted meanwhile
                return await self._train()
            call.begins()
        return TrainingResult(1, call.weight, 0.0, 0.0, len(call.flat_N), self._asked(call))

    async def _encode(self, work: EncodeUpdate) -> UpdateEncoded:
        told = RunFailedError("E-RED-06", "its user was told that its call failed")
        if not self.calls:  # ousted since it trained, and the round goes on after all
            raise told
        call = self.calls[0]
        try:
            payloads = await self._off_loop(lambda work: self._rows(work, call), work)
        except ValueError as why:
            refused = RunFailedError("E-RED-11", f"these tensors cannot be averaged: {why}")
            self._refuse(call, refused)
            raise refused from why
        except Exception as why:  # it would fail again in every round
            self._refuse(call, _defect(why))
            raise
        if not self._is_first(call):  # ousted meanwhile: what its user calls now is another call
            raise told
        self.current = work.round, call
        return UpdateEncoded(payloads)

    def _refuse(self, call: ReduceCall, why: AtollError) -> None:
        if self._is_first(call) and not self._closed:  # which tells everybody
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
            call.owing.settle((), call.whole)  # what waits is of a round that failed here
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
        """Sums made on the way travel as answers do, which is the finer codec."""
        rows = [(row.weight, row.payload.data) for row in work.rows]
        if call.paired:
            return self._combine_pair(call, work, rows)
        if self.terms.way_back == GATHERED:
            done = self._gathering(call, work.round, work.part).answer(rows)
            return done, _quickly_named(done.wire, xxhash.xxh3_128_digest(done.wire)) if done.wire else None
        up, down = self._both_ways(call, work)
        if call.owing is not None:
            lo = call.at + call.cuts[work.part][0]
            done, left_N = call.owing.combine(rows, lo, values, up, down)
            if done.wire is None or left_N is None:
                return done, None
            payload = _quickly_named(done.wire, xxhash.xxh3_128_digest(done.wire))
            call.owing.waits(payload.digest, lo, left_N)
            return done, payload
        name = xxhash.xxh3_128()
        codecs = [down if row.handed else up for row in work.rows]
        done = combine(rows, values, codecs, down.showing(name.update), room=self.room)
        return done, _quickly_named(done.wire, name.digest()) if done.wire is not None else None

    def _combine_pair(
        self, call: ReduceCall, work: CombineRows, rows: Sequence[tuple[int, Buffer]]
    ) -> tuple[Made, Payload | None]:
        """The mean is mine alone, so its name is all that the others hear of it, and no codec comes between."""
        lo, hi = call.cuts[work.part]
        done = gather(rows, hi - lo, self._codec(call.codec, call, work.round, work.part))
        if done.mean_N is None:
            return Made(None, done.counted, done.faults, "no row has any weight"), None
        name = xxhash.xxh3_128_digest(done.mean_N.numpy().data.cast("B"))
        answer = _quickly_named(name, xxhash.xxh3_128_digest(name))
        call.made[work.part, answer.digest] = done.mean_N
        return Made(name, done.counted, done.faults), answer

    def _values(self, work: CombineRows | CompareRows) -> int:
        lo, hi = self._call_of(work).cuts[work.part]
        return hi - lo

    def _call_of(self, work: CombineRows | CompareRows) -> ReduceCall:
        call = self._mine(work.round)
        if call is None:
            raise RunFailedError("E-RED-06", "its user has not called")
        if call.future.done() or call.mixed == work.round:
            raise RunFailedError("E-RED-06", "its call cannot succeed")
        return call

    def _advance(self, work: AdvanceState) -> StateAdvanced:
        """The state is the names of the agreed parts: enough for every member to see that it holds the same."""
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
            return  # its user was told that it cannot succeed
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
        except Exception as why:  # whatever it is, somebody waits
            call.future.set_exception(_defect(why))
            raise
        else:
            if call.owing is not None:
                call.owing.settle(led, call.whole)
            if call.held is not None:
                call.held.take(call.at, call.flat_N)
            call.from_N = None
            call.left_N, call.made = None, {}  # whoever keeps the result need not keep these
            call.future.set_result(done)

    def _decode(self, call: ReduceCall, round: int, part: int, answer: Payload) -> None:
        lo, hi = call.cuts[part]
        if call.paired:
            call.flat_N[lo:hi] = call.made[part, answer.digest]
        elif self.terms.way_back == GATHERED:
            call.flat_N[lo:hi] = self._gathering(call, round, part).read(answer.data).value_N
        else:
            self._way_back(call, round, part).decode_into(answer.data, call.flat_N[lo:hi])
        if call.from_N is not None:
            call.flat_N[lo:hi] += call.from_N[lo:hi]

    def _gathering(self, call: ReduceCall, round: int, part: int) -> ReplyFormat:
        """Of a part that is one tensor, and nobody asks how much the rows agree."""
        lo, hi = call.cuts[part]
        return ReplyFormat(self._codec(call.codec, call, round, part), None, "mean", False, (hi - lo,))

    def _both_ways(self, call: ReduceCall, work: CombineRows) -> tuple[Codec, Codec]:
        """An answer goes to all whose rows are in it, a sum to one: so much less does my uplink carry of it."""
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
        """Where members trust each other nobody looks for numbers that are none."""
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
        wire = call.encoded(codec.showing(name.update), lo, hi)
        return _quickly_named(wire, name.digest())

    @property
    def _checked(self) -> CheckedArithmetic:
        if self.checked is None:
            raise RunFailedError("E-AUD-03", "members of this group trust each other")
        return self.checked

    def _mine(self, round: int) -> ReduceCall | None:
        return self.current[1] if self.current is not None and self.current[0] == round else None

    def _others_are_served(self) -> None:
        self._passes = ""
        if self._waited_for is not None:
            self._waited_for.cancel()
            self._waited_for = None

    async def _off_loop(self, work: Callable[[Any], Any], argument: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._arithmetic, work, argument)


ABSENT = Digest(bytes(DIGEST_BYTES))


def _never_agreed() -> AtollError:
    return RunFailedError("E-RED-04", "the group was closed before this all-reduce was agreed")


def _defect(why: Exception) -> AtollError:
    text = f"an error of Atoll itself: {type(why).__name__}: {why}"
    fix = "free memory, if that is what it lacked, and call again; else report it with the lines above"
    return RunFailedError("E-INT-01", text, cause="a defect, or no memory left", fix=fix)


def seed_of(round: int, part: int) -> bytes:
    """Of `randk`: what all members of a round know, however they came to it. Known beforehand, also to liars."""
    return digest(b"atoll/group/seed/1" + round.to_bytes(8, "big") + part.to_bytes(4, "big"))


def part_values(codec: Codec) -> int:
    """How many values of a large call make a part: as many bytes as in fp32, but not too much work at once."""
    return min(PART_VALUES_MOST, 4 * PART_VALUES * SAMPLE_VALUES // codec.wire_bytes(SAMPLE_VALUES))


def cuts(values: int, shares: Sequence[int], pieces: int, each: int) -> Cuts:
    """[lo, hi) per part, in proportion to the shares, cut between blocks of the codecs.

    The parts are `pieces` turns of all owners, of about `each` values, or less for the sake of memory. Few values
    fill only the first turn, or a part of it, and the other parts are empty: every part costs each member a message
    there and back. An owner alone would take in and give out what all together do, and hold everybody's rows, so
    all are owners as soon as that pays.
    """
    owners = len(shares) // pieces
    share = values / owners
    turns = min(pieces, max(round(share / each), min(TURNS * PART_VALUES // each, int(share / TURN_VALUES_LEAST))))
    used = turns * owners if turns > 1 else min(owners, max(1, round(values / PART_VALUES_LEAST)))
    filled = part_bounds(values, shares[:used])
    return filled + ((values, values),) * (len(shares) - len(filled))


def paired_cuts(values: int, members: int, pieces: int, each: int) -> Cuts:
    """The same where members exchange in pairs: pieces of about `each` values, and of each a part per member."""
    filled = part_bounds(values, (1,) * min(pieces, max(1, round(values / each))))
    bounds = filled + ((values, values),) * (pieces - len(filled))
    return tuple(bound for bound in bounds for _ in range(members))


def _quick_name(data: Buffer) -> Digest:
    return _padded(xxhash.xxh3_128_digest(data))


def _quickly_named(wire: Buffer, hashed: bytes) -> Payload:
    return Payload(_padded(hashed), memoryview(wire).nbytes, wire)


def _padded(hashed: bytes) -> Digest:
    return Digest(hashed.ljust(DIGEST_BYTES, b"\0"))


def placed(tensors: Sequence[Tensor], origin: int) -> tuple[TensorPlace, ...]:
    """Where they lie in such a vector, counted from `origin`."""
    ends = accumulate(tensor.numel() for tensor in tensors)
    return tuple(
        TensorPlace(end - t.numel() - origin, t.numel(), tuple(t.shape))
        for t, end in zip(tensors, ends, strict=True)
        if t.numel()
    )
