"""The island behind a peer: the trainer process that owns the device, and the tensors of the shared state.

Carries out the work that machines ask for, off the event loop: training in the trainer's own process (`tended.py`),
tensor arithmetic on one thread (torch releases Python's lock), disk on another. What is in whose hands: the head in
`agreed.py`, older states in `shelf.py`, error feedback and the update under way in `mine.py`, x and its steps in
`live.py`; sums that everybody must agree on are functions (`arithmetic.py`). All of it belongs to the peer, so a
crashed trainer costs a round and nothing more. What is told here is which of them hears of what, in which order.
Promises: every piece of work is answered once; `StateAdvanced` and `AdoptState` are answered when their bytes are
durable.
Never decides anything: what is counted and what is the head is said by the vertex.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch
from msgspec import UNSET, UnsetType
from torch import Tensor

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest, PeerId
from atoll.crypto.digest import Buffer, digest, merkle_root
from atoll.features.archive.worker import cut_state, rebuild_blob
from atoll.features.attribution.worker import LeaveOneOutWorker
from atoll.features.partition_training.worker import OfflineProgress
from atoll.peer.config.sections import KeepSection
from atoll.peer.tasks import (
    AdoptState,
    AdvanceState,
    BuildExhibit,
    BuildOpening,
    CutState,
    EncodeUpdate,
    ExhibitRow,
    FindState,
    HandOver,
    HoldPieces,
    HoldRows,
    JudgeOpening,
    JudgeReplay,
    JudgeRow,
    KeepRows,
    LeaveOneOut,
    PinBlobs,
    ReadRow,
    RebuildState,
    ReplayBoth,
    RestoreState,
    RollbackState,
    ScoreUpdate,
    ShowUpdate,
    StateAdvanced,
    StateRestored,
    TrainApart,
    TrainRound,
    UpdateEncoded,
    UpdateSettlement,
    ValidateState,
)
from atoll.protocol.allreduce.tasks import CombineRows, CompareRows, RowsCombined, WeighRows
from atoll.protocol.transfer.tasks import CloseBlob
from atoll.runtime.control.settings_change import learning_after
from atoll.runtime.embed.peer_process import AttachedTrainer
from atoll.runtime.network.buffer_pool import BufferPool
from atoll.runtime.storage.private_state import (
    NOTHING,
    InFlightUpdate,
    PrivateState,
    going_with,
    placed,
    read_private,
    write_private,
)
from atoll.runtime.storage.state_cache import StateCache
from atoll.runtime.storage.store import PeerStore, stored
from atoll.runtime.trainer import ModelEvaluated, TrainerFailed
from atoll.runtime.training_spec import TrainingSpec
from atoll.runtime.worker.arithmetic import advanced, answer, compared, named, weighed
from atoll.runtime.worker.downlink_error_feedback import DownlinkErrorFeedback
from atoll.runtime.worker.head import AgreedHead
from atoll.runtime.worker.live_parameters import LiveParameters
from atoll.runtime.worker.local_update import LocalUpdateState
from atoll.runtime.worker.trainer_supervisor import TrainerSupervisor
from atoll.training.codec import Codec
from atoll.training.codec.compiled import native
from atoll.training.data import position_after
from atoll.training.recipe.moments import as_bytes, inherited, taken_in
from atoll.training.recipe.outer import MomentAverage
from atoll.training.recipe.private_parameters import PrivateParameters
from atoll.training.recipe.reply_formats import remembers
from atoll.training.recipe.schedule import moments_due
from atoll.training.recipe.state import SharedState, export_model, gone_back
from atoll.training.recipe.update import RoundInputs, moved, part_codecs, settle
from atoll.verification.loss_scoring.worker import LossScoringWorker
from atoll.verification.malformed_updates.worker import looked_at_row
from atoll.verification.redundant_training.worker import RedundancyWorker
from atoll.verification.replay_audit.worker import ReplayAuditWorker
from atoll.verification.state_validation.worker import canary_in, validated
from atoll.verification.sum_check.worker import SumCheckWorker
from atoll.verification.update_cache import SentUpdateCache
from atoll.wire.messages.statements import ChangedNumbers

log = logging.getLogger(__name__)


class TrainingWorker:
    """`trains` is false for an observer; `trainer` is the user's own loop, or None for a process of ours."""

    def __init__(
        self,
        store: PeerStore,
        threads: int,
        trains: bool = True,
        trainer: AttachedTrainer | None = None,
        keep: KeepSection = KeepSection(),  # a frozen value
        device: str = "cpu",
    ) -> None:
        self.store, self.trains, self.keep = store, trains, keep
        self.learning: TrainingSpec | None = None  # as genesis has it
        self.tuned_before: Callable[[int], ChangedNumbers | UnsetType] = lambda round: UNSET  # numbers of a round
        self.tended = TrainerSupervisor(threads, trainer, device)
        self.trainer = self.tended.trainer
        self.shelf = StateCache(store, keep)
        self._arithmetic = ThreadPoolExecutor(1, "arithmetic")
        self.away = OfflineProgress(self.tended)
        # for vectors that every round makes anew: fresh pages cost more than sums. A sweep per round bounds it
        room = self._memory = BufferPool(sys.maxsize)
        self.mine = LocalUpdateState(self.away, self._arithmetic, room)
        self.agreed = AgreedHead()
        self.live = LiveParameters(self.tended, self.away, self.mine, self.agreed, room)
        self.owing = DownlinkErrorFeedback()  # where owners remember
        self.auditing: ReplayAuditWorker | None = None  # where rounds are audited
        self.needed: dict[str, frozenset[Digest]] = {}  # blobs that stay on disk, by what for
        self.openings: SumCheckWorker | None = None  # where answers are opened
        self.outbox: SentUpdateCache | None = None  # where others look at updates
        self.scoring: LossScoringWorker | None = None  # where updates are scored
        self.twins: RedundancyWorker | None = None  # where members take each other's samples
        self._ahead: PrivateState | None = None  # what is on disk once the round under way counts what I sent
        self._writing: asyncio.Task[None] | None = None  # that
        self._disk = ThreadPoolExecutor(1, "disk")
        self._coding = ThreadPoolExecutor(1, "coding")  # pieces of a large state take seconds, and nobody waits

    @property
    def head(self) -> SharedState | None:
        """The agreed state that it goes on from."""
        return self.agreed.head

    def be_audited(self, run: Digest, me: PeerId) -> None:
        """Rounds of this run are: keep a chain of every one, and be able to take others' again."""
        self.auditing = ReplayAuditWorker(
            run,
            me,
            self._learning_in,
            self.store,
            self.shelf,
            self.tended,
            self._arithmetic,
            self._ready,
            self._up_name,
        )

    def be_opened(self) -> None:
        """Blocks of answers of this run are: name wires so that they can be, show mine, judge others'."""
        self.openings = SumCheckWorker(self._learning, self._learning_in, self.store, self.shelf)

    def be_scored(self) -> None:
        """Updates of this run are: keep what was sent for a while, and be able to take a step along others'."""
        self.outbox = SentUpdateCache(self.shelf, 2)  # the one that was agreed last and the one under way
        self.scoring = LossScoringWorker(
            self._learning_in, self.store, self.shelf, self.tended, self._arithmetic, self._ready, self._up_name
        )

    def be_twinned(self) -> None:
        """Members of this run take each other's samples: the same, and be able to take others' steps again."""
        self.outbox = SentUpdateCache(self.shelf, 3)  # who was a twin is known a round later
        self.twins = RedundancyWorker(
            self._learning_in, self.store, self.shelf, self.tended, self._arithmetic, self._ready, self._up_name
        )

    def equip(self, data: str) -> None:
        """The data set is here, and the base if there is one: from now on there is something to train."""
        base = self.learning.base if self.learning is not None else UNSET
        self.tended.equip(data, str(self.store.blob_path(base)) if base is not UNSET else "")

    async def close(self) -> None:
        await self.trainer.stop()
        await self.live.close()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        self._arithmetic.shutdown(wait=True, cancel_futures=True)
        self._disk.shutdown(wait=True, cancel_futures=True)
        self._coding.shutdown(wait=True, cancel_futures=True)

    async def do(self, work: Any) -> Any:
        """The answer to a piece of work. Raises AtollError, PeerFault or OSError: the driver answers Failed."""
        run = asyncio.get_running_loop().run_in_executor
        arithmetic, coding, disk = (partial(run, on) for on in (self._arithmetic, self._coding, self._disk))
        match work:
            case TrainRound():
                if not self.trains:
                    raise RunFailedError("E-TRN-10", "this peer does not train")
                return await self.live.train(work, self._learning_in(work.round), self.auditing)
            case HandOver():
                return self.live.hand_over(work.round)
            case TrainApart():
                return await self.live.train_apart(work, self._learning_in(work.round), self._keep)
            case EncodeUpdate():
                if work.round <= self.agreed.round:  # what is mine must not move any more
                    raise RunFailedError("E-RUN-09", f"round {work.round} is over: it was agreed without this peer")
                encoded = await arithmetic(self._encode, work)
                if self.mine.own is not None:
                    await self.live.follow(self.mine.own)
                self._write_ahead(work, encoded)
                return encoded
            case CombineRows() | CompareRows() if work.round <= self.agreed.round:
                raise RunFailedError("E-RUN-09", f"round {work.round} is over: its rows build on an older head")
            case CombineRows():
                return await arithmetic(self._combine, work, self._common(work.round))
            case CompareRows():
                return await arithmetic(compared, work, self._learning_in(work.round), self._common(work.round))
            case WeighRows():
                return await arithmetic(weighed, work)
            case AdvanceState():
                await self._written()  # before I can vote: no vertex is kept before it
                return await arithmetic(self._advance, work)
            case AdoptState():
                return await self._adopt(work)
            case RollbackState():
                return await arithmetic(self._go_back, work)
            case FindState():
                return await disk(self.shelf.look_for, work.state)
            case CutState():
                return await coding(cut_state, self.store, work, self.shelf.hold_a_while)
            case RebuildState():
                return await coding(rebuild_blob, self.store, work, self.shelf.hold_a_while)
            case HoldPieces():
                return await disk(self.shelf.hold_pieces, work.pieces, work.whole)
            case PinBlobs(blobs, "verdicts"):
                return self.shelf.keep_verdicts(blobs)
            case PinBlobs(blobs, why):
                self.needed[why] = frozenset(blobs)
                return None
            case ValidateState():
                looked_at = await arithmetic(self._find, work.state)
                canary = canary_in(self.store, self._learning.canary)
                return await validated(self.tended, self._ready, looked_at, canary)
            case BuildOpening() if self.openings is not None:
                return await asyncio.to_thread(self.openings.lay, work)
            case JudgeOpening() if self.openings is not None:
                return await arithmetic(self.openings.judge, work)
            case ExhibitRow() | JudgeRow():
                up, put = self.openings.names.up if self.openings is not None else None, self.shelf.put_other
                learning = self._learning_in(work.round)
                return await arithmetic(looked_at_row, work, learning, up, put)
            case BuildExhibit() if self.auditing is not None:
                return await self.auditing.show(work)
            case JudgeReplay() if self.auditing is not None:
                return await self.auditing.judge(work)
            case ShowUpdate() if self.outbox is not None:
                return await self.outbox.show(work)
            case ScoreUpdate() if self.scoring is not None:
                return await self.scoring.score(work)
            case ReplayBoth() if self.twins is not None:
                return await self.twins.compare(work)
            case KeepRows():
                return await disk(self.shelf.rows.put, work.rows)
            case HoldRows():
                return await disk(self.shelf.rows.hold, work.blobs)
            case ReadRow():
                return await disk(self.shelf.rows.read, work.blob, work.digest)
            case LeaveOneOut():
                hands = self.store, self.shelf, self.tended, self._arithmetic, self._ready
                return await LeaveOneOutWorker(self._learning_in(work.round), *hands).left_out(work)
            case CloseBlob():
                await disk(stored, self.store, work)
                return self.shelf.hold_a_while(work.blob)
            case RestoreState():
                await self._written()
                if work.left is not None:
                    await self.mine.leave_open(work.left)
                return await arithmetic(self._restore, work)
            case _:
                return await disk(stored, self.store, work)

    def name_of(self, message: object, payload: Buffer) -> Digest:
        return digest(payload) if self.openings is None else self.openings.names.of_arrived(message, payload)

    def _up_name(self, wire: Buffer) -> Digest:
        return digest(wire) if self.openings is None else self.openings.names.of_row(wire)

    def _down_name(self, wire: Buffer) -> Digest:
        return digest(wire) if self.openings is None else self.openings.names.of_my_answer(wire)

    async def warm_up(self) -> None:
        """Begin now what a first round should not wait for: the trainer's imports, and compiling for large sums."""
        native.load_for(self._learning.layout.floats)
        if not self.trains:
            return
        await self.tended.equipped()
        async with self.tended.turn:
            try:
                await self._ready()
            except TrainerFailed:
                await self.tended.failed()

    async def _ready(self) -> None:
        """The trainer runs and holds the live parameters."""
        await self.live.ready(self._learning)

    async def evaluate(self, samples: int = 512) -> ModelEvaluated:
        """Validation loss of the head."""
        await self.tended.equipped()
        async with self.tended.turn:
            await self._ready()
            return await self.trainer.evaluate(samples, self.live.shown(self._learning.recipe))

    async def sample(self, prompt: str, count: int, seed: int) -> str:
        if self._learning.tokenizer is not UNSET:
            raise TrainerFailed(
                "refused",
                "this model writes tokens of the run's tokenizer, not bytes",
                fix="atoll checkpoint export ROUND FOLDER --hf writes both for other programs",
                alive=True,
            )
        await self.tended.equipped()
        async with self.tended.turn:
            await self._ready()
            return await self.trainer.sample(prompt, count, seed, self.live.shown(self._learning.recipe))

    async def end_on_head(self) -> None:
        """The run is over: the live parameters become the agreed ones."""
        head_F = self.live.shown(self._learning.recipe)
        if head_F is None or not self.tended.ready:
            return
        async with self.tended.turn:
            await self.trainer.write_x(head_F)

    async def export(self) -> bytes:
        """The agreed model by tensor name, as a safetensors file."""
        assert self.head is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._arithmetic, export_model, self.head, self._learning.layout)

    # ---- tensors -------------------------------------------------------------------------------------------

    def _encode(self, work: EncodeUpdate) -> UpdateEncoded:
        mine, common, learning = self.mine, self._common(work.round), self._learning_in(work.round)
        x_F = self.live.handed(learning, common.state)
        update, late = mine.encode(work, learning, common, x_F, self.live.steps_since, self.live.members)
        claim = None
        if self.auditing is not None:
            claim = self.auditing.claim(work.round, update, mine.memory_F, mine.up)
        if self.outbox is not None:
            self.outbox.made(work.round, update)
        return UpdateEncoded(tuple(named(wire, self._up_name) for wire in update.wires), claim, late)

    def _common(self, round: int) -> RoundInputs:
        head, name = self.agreed.head, self.agreed.name
        assert head is not None and name is not None
        return self._learning.common(round, head, name)

    def _combine(self, work: CombineRows, common: RoundInputs) -> RowsCombined:
        name = self._up_name if work.onward else self._down_name
        return answer(work, self._learning_in(work.round), common, self.owing, name)

    def _advance(self, work: AdvanceState) -> StateAdvanced:
        before = self._find(work.before)
        if before is None:
            raise RunFailedError("E-RUN-02", "the agreed state is not on this disk")
        after, combined_N = advanced(work, self._learning_in(work.round), before, self._memory)
        name = self.shelf.put(after, self._learning.layout)
        self.mine.led(name, combined_N)
        return StateAdvanced(name)

    def _go_back(self, work: RollbackState) -> StateAdvanced:
        before, earlier = self._find(work.before), self._find(work.back_to)
        if before is None or earlier is None:
            raise RunFailedError("E-RUN-02", "the agreed state is not on this disk")
        taken = work.steps * (work.batch or self._learning.recipe.batch)
        samples = position_after(before.samples, work.shards, taken) - before.samples
        return StateAdvanced(self.shelf.put(gone_back(earlier, before, samples), self._learning.layout))

    # ---- what was agreed -----------------------------------------------------------------------------------

    async def _adopt(self, work: AdoptState) -> None:
        await self.live.taken_in()
        await self._written()
        self.agreed.round = work.round
        if work.late:
            self.away.forget()
        was_apart = await self.away.come_back()
        work, before = await self._recalled(work)
        in_vain = self.mine.in_vain(work.counted)
        loop = asyncio.get_running_loop()
        after = await loop.run_in_executor(self._arithmetic, self._find, work.state)
        if after is None:
            raise RunFailedError("E-RUN-02", "the agreed state is not on this disk")
        if remembers(self._learning.recipe):
            await loop.run_in_executor(self._arithmetic, self.owing.settle, work.led, len(after.anchor_F))
        if self.tended.ready:
            self.trainer.cancel()  # the round is over for everybody: what is left of its steps is not taken
        if self.auditing is not None:
            counts = before is None and self.auditing.counts(work) and not work.afresh
            async with self.tended.turn if self.tended.ready else nullcontext():
                await self._begin_anew(work, after, counts, before)
        elif work.afresh and not self.tended.ready:  # a trainer that is starting has the turn, for long perhaps
            self._begin_afresh(after)
        elif work.afresh:
            async with self.tended.turn:
                await loop.run_in_executor(self._arithmetic, self._begin_afresh, after)
        elif self.tended.ready and self.live.runs_on(self._learning.recipe):
            was, after, sent, by_F = await self._follow(work, after)
            self.live.take_in(self._learning_in(work.round), was, after, sent and before is None, by_F)
        elif self.tended.ready:
            async with self.tended.turn:
                was, after, sent, _ = await self._follow(work, after)
                await self.live.merge(self._learning_in(work.round), was, after, sent)
        else:  # it is starting, or gone: it will begin from the head, whichever that is by then
            await self._follow(work, after)
        self.agreed.name, self.agreed.vertex = work.state, work.vertex
        if work.afresh:
            self.away.forget()
        elif was_apart and in_vain:
            self.mine.owe(in_vain)
        if work.afresh:
            await loop.run_in_executor(self._disk, self.shelf.found_way)  # its lock may be held for long
        await self._keep(work.vertex, self._foreseen(work))

    async def _follow(
        self, work: AdoptState, after: SharedState
    ) -> tuple[SharedState | None, SharedState, bool, Tensor | None]:
        """The state is the head, and what is mine of its round is settled. Returns the head before, this one,
        whether something of mine was encoded, and what my own anchor (F,) moved by."""
        learning = self._learning_in(work.round)
        before, sent = self.head, await self.mine.settle(work, learning, self.head)
        by_F = self.mine.hear(work.state, learning, before, after)
        self.agreed.head = after
        return before, after, sent, by_F

    async def _begin_anew(
        self, work: AdoptState, after: SharedState, counts: bool, before: PrivateState | None
    ) -> None:
        """Where rounds are audited each one begins from the anchor, with moments and error feedback as vertices
        hold them against me: as before if my round does not count, as it left them if it does, else fresh. Fresh,
        too, where the run went back: an auditor takes that for a crash."""
        if counts or before is not None:
            await self.mine.settle(work, self._learning_in(work.round), self.head)
        elif work.claim is not None or work.afresh:
            self.mine.memory_F, self.live.inner = None, b""
        if work.afresh:
            self.owing.forget()
        self.mine.update, self.agreed.head = None, after
        goes_on = counts and self.auditing is not None and self.auditing.lives_on(work.round)
        await self.live.begin_again(after.anchor_F, counts, goes_on)

    def _restore(self, work: RestoreState) -> StateRestored | None:
        state, kept = self._find(work.state), None
        if state is None:
            return None
        files = read_private(self.store, self._learning.layout.floats)
        anew = work.left is None and self.away.held is None  # else what a round left open is in both
        private = self._private(files, work, work.mine if anew else (), state)
        if work.left is None or not work.left.afresh:
            on_disk = private.kept or next((one.kept for one in reversed(files)), None)
            kept = self._still_kept(on_disk, work.state, state)
        self.agreed.name, self.agreed.round = work.state, work.round
        self._begin_afresh(state, kept)
        self.mine.memory_F, self.live.inner = private.memory_F, private.inner or self._inherited(state)
        self.away.held, self.agreed.vertex = self.away.held or private.late, work.vertex
        if self.auditing is not None:
            self.auditing.remember(private.claim)
        manifest = self.store.manifest(work.state)
        return StateRestored(manifest.size_bytes if manifest is not None else 0)

    def _private(
        self, files: list[PrivateState], work: RestoreState, mine: tuple[UpdateSettlement, ...], state: SharedState
    ) -> PrivateState:
        """What of these goes with this vertex and its state, as it is since."""
        private, counted = going_with(files, work.vertex, mine)
        sent = private.sent
        if sent is None:
            return private
        assert counted is not None and private.vertex is not None
        newest = counted is mine[0]
        up = () if all(counted.parts) else self._encoded_with(sent, work.round - (not newest))
        if up is None:
            return NOTHING
        left_N = settle(sent.update, counted.parts, up)
        memory_F = placed(private.memory_F, left_N, sent.begins, self._learning.layout.floats)
        late = next((one.late for one in files if one.goes_with(private.vertex, None)), None)  # done since
        inner, schedule = private.inner, self._learning_in(work.round).recipe.schedule
        if newest and (due := moments_due(schedule, state.round - 1)):
            inner = taken_in(inner, state, due)
        return replace(private, memory_F=memory_F, inner=inner, late=late, sent=None)

    def _encoded_with(self, sent: InFlightUpdate, round: int) -> tuple[Codec, ...] | None:
        """The codecs of what was sent in this round; None if its state is gone."""
        before = self._find(sent.state)
        if before is None:
            return None
        learning = self._learning_in(round)
        common = learning.common(round, before, sent.state)
        return part_codecs(learning.recipe_after(before).coding.up, common, moved(sent.update.bounds, sent.begins))

    def _still_kept(
        self, on_disk: PrivateParameters | None, name: Digest, state: SharedState
    ) -> PrivateParameters | None:
        """My own parameters in a state that I come to by leaving out rounds; None where the one is gone that they
        belong to, or this one is from before it."""
        kept = self.mine.kept or on_disk
        before = None if kept is None else self._find(kept.state)
        if kept is None or before is None or before.round > state.round:
            return None
        return kept.with_moved(before.anchor_F, state.anchor_F, name)

    def _begin_afresh(self, state: SharedState, kept: PrivateParameters | None = None) -> None:
        """From this state with nothing of my own but `kept`, like a newcomer: my steps, feedback and moments led
        elsewhere."""
        self.mine.begin_afresh(self._learning, state, kept)
        self.live.inner = self._inherited(state)
        self.owing.forget()
        self.tended.ready = False
        self.agreed.head = state  # last: a trainer that is starting looks at it, and then writes all of the above

    def _inherited(self, state: SharedState) -> bytes:
        """The moments that whoever has none begins with."""
        return as_bytes(inherited(state)) if isinstance(self._learning.recipe.outer, MomentAverage) else b""

    def _find(self, name: Digest) -> SharedState | None:
        return self.shelf.find(name, self._learning.layout)

    # ---- what is this peer's own, on its disk -----------------------------------------------------------------

    def _write_ahead(self, work: EncodeUpdate, encoded: UpdateEncoded) -> None:
        """While what I made is on its way: what will be mine if it is counted. Late work goes another way."""
        away, mine, agreed, self._ahead = self.away, self.mine, self.agreed, None
        if mine.own is not None or away.held is not None or away.base_F is not None:
            return
        if work.round <= agreed.round or mine.update is None or agreed.head is None or agreed.name is None:
            return  # it was agreed without this update, while that was encoded
        root = merkle_root(tuple(part.digest for part in encoded.parts))
        learning, claim = self._learning_in(work.round), b""
        if self.auditing is not None and encoded.claim is not None:
            claim = self.auditing.memory(sent=work.round)
        sent = InFlightUpdate(root, encoded.claim, agreed.name, learning.turn(agreed.head)[0], mine.update)
        memory_F = None if len(mine.update.memory_F) >= learning.layout.floats else mine.memory_F
        private = PrivateState(agreed.vertex, memory_F, b"", claim, None, mine.kept, sent)
        self._writing = asyncio.create_task(self._keep_ahead(private, learning, work.round))

    async def _keep_ahead(self, private: PrivateState, learning: TrainingSpec, round: int) -> None:
        inner = await self.live.left(learning.recipe, undone=self.auditing is not None)
        if self.auditing is not None and not self.auditing.lives_on(round):
            inner = b""  # the moments that the claim ends with are gone
        private = replace(private, inner=inner)
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, write_private, self.store, private)
        except (OSError, MemoryError) as why:  # what must be kept meets the same disk
            log.warning("what is this peer's own could not be written ahead: %r", why)
        else:
            self._ahead = private

    async def _written(self) -> None:
        """Whatever is written ahead is on disk."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
            self._writing.result()

    async def _recalled(self, work: AdoptState) -> tuple[AdoptState, PrivateState | None]:
        """The vertex may count what a life before sent, and this one knows from its disk alone."""
        if work.mine is None or work.mine.root is None or self.mine.update is not None or self.mine.own is not None:
            return work, None
        loop = asyncio.get_running_loop()
        files = await loop.run_in_executor(self._disk, read_private, self.store, self._learning.layout.floats)
        private, _ = going_with(files, work.vertex, (work.mine,))
        if private.sent is None or work.mine.before != self.agreed.vertex:
            return work, None
        up = await loop.run_in_executor(self._arithmetic, self._encoded_with, private.sent, work.round)
        if up is None:
            return work, None
        self.mine.take_up(private.sent.update, up)
        if self.tended.ready:
            self.trainer.cancel()
        await self.live.recall(private.inner, self._learning_in(work.round).recipe)
        if self.auditing is not None:
            self.auditing.remember(private.claim)
        self._ahead = private
        return msgspec.structs.replace(work, counted=work.mine.parts), private

    def _foreseen(self, work: AdoptState) -> bool:
        """What was written ahead is what is mine now."""
        ahead, mine, self._ahead = self._ahead, work.mine, None
        if ahead is None or mine is None or work.afresh or not all(mine.parts) or self.away.kept() is not None:
            return False
        runs_on = self.live.runs_on(self._learning_in(work.round).recipe)  # moments are of the merge before
        return ahead.goes_with(work.vertex, mine) and (runs_on or ahead.inner is self.live.inner)

    async def _keep(self, vertex: Digest, foreseen: bool = False) -> None:
        """What is this peer's own, and good for this vertex, is durable."""
        await asyncio.get_running_loop().run_in_executor(self._disk, self._keep_private, vertex, foreseen)

    def _keep_private(self, vertex: Digest, foreseen: bool) -> None:
        claim = self.auditing.memory() if self.auditing is not None else b""
        mine, late = self.mine, self.away.kept()
        if foreseen:
            self.store.private.come_true()
        else:
            write_private(self.store, PrivateState(vertex, mine.memory_F, self.live.inner, claim, late, mine.kept))
        name = self.agreed.name
        assert name is not None
        needed = frozenset[Digest]().union(*self.needed.values())
        data = [self._learning.data_blob, *self._learning.beside]
        self.shelf.tidy({name, *data, *needed}, self.agreed.round)
        self._memory.sweep()

    def _learning_in(self, round: int) -> TrainingSpec:
        """What this round is learned by."""
        return learning_after(self._learning, self.tuned_before(round))

    @property
    def _learning(self) -> TrainingSpec:
        if self.learning is None:
            raise RunFailedError("E-RUN-04", "the run's genesis is not known yet")
        return self.learning


torch.set_num_threads(1)  # the arithmetic thread; trainers have processes of their own
