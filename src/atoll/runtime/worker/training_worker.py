"""Training worker: executes a peer's tasks with the trainer process, the tensors of the shared state and the disk.

All work runs off the event loop: training in the trainer's own process, tensor arithmetic on one thread (torch
releases Python's lock), disk access on another. A crashed trainer costs one round.
Invariants:
- Every task is answered once.
- `StateAdvanced` and `AdoptState` are answered after their bytes are durable.
Not responsible for: which updates count and which state is the head (vertices decide).
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
from typing import Any, TypeVar

import msgspec
import torch
from msgspec import UNSET, UnsetType
from torch import Tensor

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest
from atoll.crypto.digest import Buffer, digest, merkle_root
from atoll.features.partition_training.worker import PartitionedTrainer
from atoll.peer.config.node_sections import FeedbackPrecision, StateMemory
from atoll.peer.config.sections import KeepSection
from atoll.peer.tasks import (
    AdoptState,
    AdvanceState,
    EncodeUpdate,
    EndTrainingEarly,
    LocalUpdateOutcome,
    PinBlobs,
    RestoreEarlierState,
    RestoreState,
    StateAdvanced,
    StateRestored,
    TrainingResult,
    TrainRound,
    TrainWithoutQuorum,
    UpdateEncoded,
)
from atoll.protocol.allreduce.tasks import (
    CombineRows,
    ComputeRowProducts,
    ProductsComputed,
    RowsCombined,
    WeighRows,
)
from atoll.runtime.embed.attached_trainer import AttachedTrainer
from atoll.runtime.event_log import CLOSED_BEFORE
from atoll.runtime.network.buffer_pool import BufferPool
from atoll.runtime.network.file_memory import file_memory
from atoll.runtime.storage.blob_retention import BlobRetention
from atoll.runtime.storage.private_state import (
    NOTHING,
    InFlightUpdate,
    PrivateState,
    matching_state,
    read_private,
    write_private,
    write_span,
)
from atoll.runtime.storage.state_files import FileStateStore
from atoll.runtime.storage.store import PeerStore, run_store_task
from atoll.runtime.trainer import ModelEvaluated, TrainerCommandError
from atoll.runtime.worker import storage_tasks
from atoll.runtime.worker.capabilities import handlers_of_every_run
from atoll.runtime.worker.head import AgreedHead
from atoll.runtime.worker.live_parameters import LiveParameters
from atoll.runtime.worker.local_update import LocalUpdateState
from atoll.runtime.worker.trainer_supervisor import TrainerSupervisor
from atoll.training.codec import Codec
from atoll.training.codec.compiled import native
from atoll.training.recipe.error_feedback import FEEDBACK_DTYPES, settle_error_feedback
from atoll.training.recipe.moments import adopt_moments_bytes, as_bytes, joiner_state
from atoll.training.recipe.outer import MomentAverage
from atoll.training.recipe.private_parameters import PrivateModelCopy
from atoll.training.recipe.reply_formats import has_owner_feedback
from atoll.training.recipe.schedule import moments_due
from atoll.training.recipe.state import SharedState, size_bytes_of
from atoll.training.recipe.update import RoundCodingInputs, moved, part_codecs
from atoll.training.spec import TrainingSpec, spec_after
from atoll.verification.replay_audit.trainer_commands import AuditCommand, AuditStepCompleted
from atoll.verification.replay_audit.worker import ReplayAuditWorker
from atoll.verification.sum_check.wire_digests import WireDigestCache
from atoll.verification.update_cache import SentUpdateCache
from atoll.wire.messages.statements import ChangedSettings
from atoll.worker.arithmetic import (
    combine_rows,
    compare_rows,
    compute_weights,
    payload_of,
    stage_advance,
    stage_rollback,
)
from atoll.worker.context import Handler, Handlers, WorkerContext
from atoll.worker.downlink_error_feedback import DownlinkErrorFeedback
from atoll.worker.shared_states import AgreedStateCache
from atoll.worker.state_store import MissingStateError

log = logging.getLogger(__name__)

T = TypeVar("T")


class TrainingWorker:
    """`trains` is false for an observer. `trainer` is the user's own loop; None: a trainer process is started."""

    def __init__(
        self,
        store: PeerStore,
        threads: int,
        trains: bool = True,
        trainer: AttachedTrainer | None = None,
        keep: KeepSection = KeepSection(),  # a frozen value
        device: str = "cpu",
        state_memory: StateMemory = "memory",
        feedback: FeedbackPrecision = "fp32",
    ) -> None:
        self.store, self.trains, self.keep = store, trains, keep
        self.learning: TrainingSpec | None = None  # spec in genesis
        self.tuned_before: Callable[[int], ChangedSettings | UnsetType] = lambda round: UNSET  # numbers of a round
        self.tended = TrainerSupervisor(threads, trainer, device)
        self.trainer = self.tended.trainer
        self.retention = BlobRetention(store, keep)
        self.states = AgreedStateCache(FileStateStore(store, self.retention))
        self._arithmetic = ThreadPoolExecutor(1, "arithmetic")
        self._disk = ThreadPoolExecutor(1, "disk")
        self._coding = ThreadPoolExecutor(1, "coding")  # pieces of a large state take seconds; no round waits
        self.away = PartitionedTrainer(self.tended)
        # for vectors that every round makes anew: fresh pages cost more than sums. A sweep per round bounds it
        files = file_memory(store.folder) if state_memory == "disk" else None
        room = self._memory = BufferPool(sys.maxsize, files)
        self.mine = LocalUpdateState(self.away, self._arithmetic, room, FEEDBACK_DTYPES[feedback])
        self.agreed = AgreedHead()
        self.live = LiveParameters(self.tended, self.away, self.mine, self.agreed, room)
        self.owing = DownlinkErrorFeedback()  # for owners that keep error feedback
        self.auditing: ReplayAuditWorker | None = None  # of runs with replay audits
        self.digests: WireDigestCache | None = None  # of runs with sum checks
        self.outbox: SentUpdateCache | None = None  # of runs in which members inspect each other's updates
        self.needed: dict[str, frozenset[Digest]] = {}  # purpose -> blobs that stay on disk
        self._ahead: PrivateState | None = None  # private state on disk, if the current round counts the update
        self._writing: asyncio.Task[None] | None = None  # the write of `_ahead`
        self.context = WorkerContext(
            spec_of=self._learning_in,
            genesis_spec=lambda: self._learning,
            blobs=store,
            pins=self.retention,
            states=self.states,
            trainer=self.tended,
            start_trainer=self._ready,
            wire_digest=self._up_name,
            tensor_thread=self._arithmetic,
            coding_thread=self._coding,
        )
        self._handlers: dict[type, Handler] = {
            TrainRound: self._train,
            EndTrainingEarly: self._hand_over,
            TrainWithoutQuorum: self._train_apart,
            EncodeUpdate: self._encode_update,
            CombineRows: self._combine_rows,
            ComputeRowProducts: self._compare_rows,
            WeighRows: partial(self.context.run_tensor_job, compute_weights),
            AdvanceState: self._advance_state,
            AdoptState: self._adopt,
            RestoreEarlierState: self._roll_back,
            RestoreState: self._restore_state,
            PinBlobs: self._pin_blobs,
        }
        self.register(storage_tasks.handlers(store, self.retention, self.states.store, self._disk))
        self.register(handlers_of_every_run(self.context))

    @property
    def head(self) -> SharedState | None:
        return self.agreed.head

    def register(self, handlers: Handlers) -> None:
        """Add the handlers of a capability; later ones replace earlier ones of the same task."""
        self._handlers |= handlers

    def wrap(self, kind: type, around: Callable[[Handler], Handler]) -> None:
        """Replace the handler of a task by one that may call it."""
        self._handlers[kind] = around(self._handlers[kind])

    def equip(self, data: str) -> None:
        """The data set has arrived, and so has the frozen base if the run has one: training can start."""
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

    async def run(self, work: Any) -> Any:
        """The answer to a task. Raises AtollError, PeerFault or OSError: the driver answers Failed."""
        handler = self._handlers.get(type(work))
        return await (handler(work) if handler is not None else self._run_on_disk(run_store_task, self.store, work))

    async def run_audit_step(self, command: AuditCommand) -> AuditStepCompleted:
        """One step of showing or replaying a segment; the caller holds the trainer's turn."""
        assert not isinstance(self.trainer, AttachedTrainer), "a user's own loop is never audited"
        return await self.trainer.audit(command)

    async def _run_on_disk(self, job: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, job, *args)

    def digest_of(self, message: object, payload: Buffer) -> Digest:
        return digest(payload) if self.digests is None else self.digests.of_arrived(message, payload)

    def _up_name(self, wire: Buffer) -> Digest:
        return digest(wire) if self.digests is None else self.digests.of_row(wire)

    def _down_name(self, wire: Buffer) -> Digest:
        return digest(wire) if self.digests is None else self.digests.of_my_answer(wire)

    # ---- tasks of a round ----------------------------------------------------------------------------------

    async def _train(self, work: TrainRound) -> TrainingResult:
        if not self.trains:
            raise RunFailedError("E-TRN-10", "this peer does not train")
        return await self.live.train(work, self._learning_in(work.round), self.auditing)

    async def _hand_over(self, work: EndTrainingEarly) -> None:
        self.live.hand_over(work.round)

    async def _train_apart(self, work: TrainWithoutQuorum) -> TrainingResult:
        return await self.live.train_apart(work, self._learning_in(work.round), self._keep)

    async def _encode_update(self, work: EncodeUpdate) -> UpdateEncoded:
        if work.round <= self.agreed.round:  # local state must not move any more
            raise RunFailedError("E-RUN-09", CLOSED_BEFORE)
        encoded = await self.context.run_tensor_job(self._encode, work)
        if self.mine.own is not None:
            await self.live.follow(self.mine.own)
        self._write_ahead(work, encoded)
        return encoded

    def _refuse_agreed(self, round: int) -> None:
        if round <= self.agreed.round:
            raise RunFailedError("E-RUN-09", f"round {round} is over: its rows build on an older head")

    async def _combine_rows(self, work: CombineRows) -> RowsCombined:
        self._refuse_agreed(work.round)
        return await self.context.run_tensor_job(self._combine, work, self._common(work.round))

    async def _compare_rows(self, work: ComputeRowProducts) -> ProductsComputed:
        self._refuse_agreed(work.round)
        spec, common = self._learning_in(work.round), self._common(work.round)
        return await self.context.run_tensor_job(compare_rows, work, spec, common)

    async def _advance_state(self, work: AdvanceState) -> StateAdvanced:
        await self._written()  # before this peer can vote: no vertex is kept before it
        return await self.context.run_tensor_job(self._advance, work)

    async def _roll_back(self, work: RestoreEarlierState) -> StateAdvanced:
        return await self.context.run_tensor_job(stage_rollback, work, self._learning, self.states)

    async def _restore_state(self, work: RestoreState) -> StateRestored | None:
        await self._written()
        if work.left is not None:
            await self.mine.abandon_round(work.left)
        return await self.context.run_tensor_job(self._restore, work)

    async def _pin_blobs(self, work: PinBlobs) -> None:
        if work.why == "verdicts":
            self.retention.retain_verdicts(work.blobs)
        else:
            self.needed[work.why] = frozenset(work.blobs)

    # ---- the trainer and the model ---------------------------------------------------------------------------

    async def warm_up(self) -> None:
        """Start early what the first round should not wait for: the trainer's imports, and compiled kernels."""
        native.load_for(self._learning.layout.floats)
        if not self.trains:
            return
        await self.tended.equipped()
        async with self.tended.turn:
            try:
                await self._ready()
            except TrainerCommandError as failed:
                await self.tended.failed(failed)

    async def _ready(self) -> None:
        """Make the trainer ready: it runs and holds the live parameters."""
        await self.live.ready(self._learning)

    async def evaluate(self, samples: int = 512) -> ModelEvaluated:
        """Validation loss and accuracy of the head."""
        return await self.live.evaluate(self._learning, samples)

    async def sample(self, prompt: str, count: int, seed: int) -> str:
        return await self.live.sample(self._learning, prompt, count, seed)

    async def end_on_head(self) -> None:
        """At the end of the run, set the live parameters to the agreed ones."""
        head_F = self.live.head_if_different(self._learning.recipe)
        if head_F is None or not self.tended.ready:
            return
        async with self.tended.turn:
            await self.trainer.write_x(head_F)

    # ---- tensors -------------------------------------------------------------------------------------------

    def _encode(self, work: EncodeUpdate) -> UpdateEncoded:
        mine, common, learning = self.mine, self._common(work.round), self._learning_in(work.round)
        x_F = self.live.handed_over(learning, common.state)
        update, late = mine.encode(work, learning, common, x_F, self.live.steps_since, self.live.members)
        claim = None
        if self.auditing is not None:
            claim = self.auditing.claim(work.round, update, mine.memory_F, mine.up)
        if self.outbox is not None:
            self.outbox.add(work.round, update)
        return UpdateEncoded(tuple(payload_of(wire, self._up_name) for wire in update.wires), claim, late)

    def _common(self, round: int) -> RoundCodingInputs:
        head, name = self.agreed.head, self.agreed.name
        assert head is not None and name is not None
        return self._learning.round_inputs(round, head, name)

    def _combine(self, work: CombineRows, common: RoundCodingInputs) -> RowsCombined:
        name = self._up_name if work.onward else self._down_name
        return combine_rows(work, self._learning_in(work.round), common, self.owing, name)

    def _advance(self, work: AdvanceState) -> StateAdvanced:
        before = self.states.load(work.before, self._learning.layout)
        needs_update = self.mine.own is not None  # the mean moves the local anchor, too
        learning = self._learning_in(work.round)
        name, combined_N = stage_advance(work, learning, before, self.states, self._memory, needs_update)
        self.mine.record_mean(name, combined_N)
        return StateAdvanced(name)

    # ---- agreed states -------------------------------------------------------------------------------------

    async def _adopt(self, work: AdoptState) -> None:
        await self.live.wait_merged()
        await self._written()
        self.agreed.round = work.round
        if work.late:
            self.away.forget()
        was_apart = await self.away.rejoin()
        work, before = await self._recalled(work)
        uncounted = self.mine.uncounted_steps(work.counted)
        loop = asyncio.get_running_loop()
        after = await loop.run_in_executor(self._arithmetic, self.states.commit, work.state, self._learning.layout)
        if has_owner_feedback(self._learning.recipe):
            await loop.run_in_executor(self._arithmetic, self.owing.commit, work.led, len(after.anchor_F))
        if self.tended.ready:
            self.trainer.cancel()  # the round is over at all members: its remaining steps are not taken
        if self.auditing is not None:
            counts = before is None and self.auditing.counts(work) and not work.afresh
            async with self.tended.turn if self.tended.ready else nullcontext():
                await self._begin_anew(work, after, counts, before)
        elif work.afresh and not self.tended.ready:  # a starting trainer holds the turn, possibly for minutes
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
        else:  # a starting or failed trainer will begin from the head of that time
            await self._follow(work, after)
        self.agreed.name, self.agreed.vertex = work.state, work.vertex
        if work.afresh:
            self.away.forget()
        elif was_apart and uncounted:
            self.mine.defer_feedback(uncounted)
        if work.afresh:
            await loop.run_in_executor(self._disk, self.retention.clear_pins)  # its lock may be held for seconds
        await self._keep(work.vertex, self._foreseen(work))

    async def _follow(
        self, work: AdoptState, after: SharedState
    ) -> tuple[SharedState | None, SharedState, bool, Tensor | None]:
        """Make the state the head and settle the local update of its round.

        Returns the old head, the new one, whether a local update was encoded, and the local anchor's move (F,).
        """
        learning = self._learning_in(work.round)
        before, sent = self.head, await self.mine.settle(work, learning, self.head)
        by_F = self.mine.on_round_agreed(work.state, learning, before, after)
        self.agreed.head = after
        return before, after, sent, by_F

    async def _begin_anew(
        self, work: AdoptState, after: SharedState, counts: bool, before: PrivateState | None
    ) -> None:
        """Begin an audited round: from the anchor, with the moments and error feedback that vertices prescribe.

        Those before the own round if it does not count, those after it if it does, else fresh, as after a rollback.
        """
        if counts or before is not None:
            await self.mine.settle(work, self._learning_in(work.round), self.head)
        elif work.claim is not None or work.afresh:
            self.mine.memory_F, self.live.inner = None, b""
        if work.afresh:
            self.owing.reset()
        self.mine.update, self.agreed.head = None, after
        goes_on = counts and self.auditing is not None and self.auditing.lives_on(work.round)
        await self.live.reset(after.anchor_F, counts, goes_on)

    def _restore(self, work: RestoreState) -> StateRestored | None:
        kept = None
        try:
            state = self.states.commit(work.state, self._learning.layout)
        except MissingStateError:
            return None
        files = read_private(self.store, self._learning.layout.floats)
        anew = work.left is None and self.away.held is None  # else an abandoned round would be in both
        private = self._private(files, work, work.mine if anew else (), state)
        if work.left is None or not work.left.afresh:
            on_disk = private.kept or next((one.kept for one in reversed(files)), None)
            kept = self._still_kept(on_disk, work.state, state)
        self.agreed.name, self.agreed.round = work.state, work.round
        self._begin_afresh(state, kept)
        self.mine.restore_feedback(private.memory_F)
        self.live.inner = private.inner or self._inherited(state)
        self.away.held, self.agreed.vertex = self.away.held or private.late, work.vertex
        if self.auditing is not None:
            self.auditing.remember(private.claim)
        return StateRestored(size_bytes_of(state, self._learning.layout))

    def _private(
        self,
        files: list[PrivateState],
        work: RestoreState,
        mine: tuple[LocalUpdateOutcome, ...],
        state: SharedState,
    ) -> PrivateState:
        """The private state that belongs to this vertex and its state, brought up to date."""
        private, counted = matching_state(files, work.vertex, mine)
        sent = private.sent
        if sent is None:
            return private
        assert counted is not None and private.vertex is not None
        newest = counted is mine[0]
        up = () if all(counted.parts) else self._encoded_with(sent, work.round - (not newest))
        if up is None:
            return NOTHING
        left_N = settle_error_feedback(sent.update, counted.parts, up)
        memory_F = write_span(private.memory_F, left_N, sent.begins, self._learning.layout.floats)
        late = next((one.late for one in files if one.matches(private.vertex, None)), None)  # late work done since
        inner, schedule = private.inner, self._learning_in(work.round).recipe.schedule
        if newest and (due := moments_due(schedule, state.round - 1)):
            inner = adopt_moments_bytes(inner, state, due)
        return replace(private, memory_F=memory_F, inner=inner, late=late, sent=None)

    def _encoded_with(self, sent: InFlightUpdate, round: int) -> tuple[Codec, ...] | None:
        """The codecs of the update sent in this round; None if its state is gone."""
        before = self._find(sent.state)
        if before is None:
            return None
        learning = self._learning_in(round)
        common = learning.round_inputs(round, before, sent.state)
        return part_codecs(learning.recipe_after(before).coding.up, common, moved(sent.update.bounds, sent.begins))

    def _still_kept(
        self, on_disk: PrivateModelCopy | None, name: Digest, state: SharedState
    ) -> PrivateModelCopy | None:
        """Private parameters after skipped rounds.

        None if their state is gone, or if the new state is older than theirs.
        """
        kept = self.mine.kept or on_disk
        before = None if kept is None else self._find(kept.state)
        if kept is None or before is None or before.round > state.round:
            return None
        return kept.with_moved(before.anchor_F, state.anchor_F, name)

    def _begin_afresh(self, state: SharedState, kept: PrivateModelCopy | None = None) -> None:
        """Start from this state like a newcomer: of the local state only `kept` survives."""
        self.mine.begin_afresh(self._learning, state, kept)
        self.live.inner = self._inherited(state)
        self.owing.reset()
        self.tended.ready = False
        self.agreed.head = state  # last: a starting trainer reads the head, then writes all of the above

    def _inherited(self, state: SharedState) -> bytes:
        """The first moments of a member that has none."""
        return as_bytes(joiner_state(state)) if isinstance(self._learning.recipe.outer, MomentAverage) else b""

    def _find(self, name: Digest) -> SharedState | None:
        return self.states.find(name, self._learning.layout)

    # ---- private state on disk ---------------------------------------------------------------------------------

    def _write_ahead(self, work: EncodeUpdate, encoded: UpdateEncoded) -> None:
        """While the update is in flight, write the private state in case it is counted. Not for late work."""
        away, mine, agreed, self._ahead = self.away, self.mine, self.agreed, None
        if mine.own is not None or away.held is not None or away.base_F is not None:
            return
        if work.round <= agreed.round or mine.update is None or agreed.head is None or agreed.name is None:
            return  # the round was agreed while the update was encoded
        root = merkle_root(tuple(part.digest for part in encoded.parts))
        learning, claim = self._learning_in(work.round), b""
        if self.auditing is not None and encoded.claim is not None:
            claim = self.auditing.memory(sent=work.round)
        sent = InFlightUpdate(root, encoded.claim, agreed.name, learning.turn(agreed.head)[0], mine.update)
        memory_F = None if len(mine.update.memory_F) >= learning.layout.floats else mine.memory_F
        private = PrivateState(agreed.vertex, memory_F, b"", claim, None, mine.kept, sent)
        self._writing = asyncio.create_task(self._keep_ahead(private, learning, work.round))

    async def _keep_ahead(self, private: PrivateState, learning: TrainingSpec, round: int) -> None:
        inner = await self.live.read_moments(learning.recipe, undone=self.auditing is not None)
        if self.auditing is not None and not self.auditing.lives_on(round):
            inner = b""  # the moments at the end of the claim are gone
        private = replace(private, inner=inner)
        try:
            mapped = await self._run_on_disk(write_private, self.store, private)
        except (OSError, MemoryError) as why:  # required writes meet the same disk error
            log.warning("private state could not be written ahead: %r", why)
        else:
            self._ahead = mapped
            self.mine.use_mapped(private, mapped)

    async def _written(self) -> None:
        """Wait until the private state that is written ahead is on disk."""
        writing = self._writing  # another may begin during the wait
        if writing is not None:
            await asyncio.wait([writing])
            writing.result()

    async def _recalled(self, work: AdoptState) -> tuple[AdoptState, PrivateState | None]:
        """Load an update from disk that an earlier process sent, if the vertex counts it."""
        if work.mine is None or work.mine.root is None or self.mine.update is not None or self.mine.own is not None:
            return work, None
        loop = asyncio.get_running_loop()
        files = await loop.run_in_executor(self._disk, read_private, self.store, self._learning.layout.floats)
        private, _ = matching_state(files, work.vertex, (work.mine,))
        if private.sent is None or work.mine.before != self.agreed.vertex:
            return work, None
        up = await loop.run_in_executor(self._arithmetic, self._encoded_with, private.sent, work.round)
        if up is None:
            return work, None
        self.mine.restore_sent(private.sent.update, up)
        if self.tended.ready:
            self.trainer.cancel()
        await self.live.restore_moments(private.inner, self._learning_in(work.round).recipe)
        if self.auditing is not None:
            self.auditing.remember(private.claim)
        self._ahead = private
        return msgspec.structs.replace(work, counted=work.mine.parts), private

    def _foreseen(self, work: AdoptState) -> bool:
        """Whether the private state written ahead is the current one."""
        ahead, mine, self._ahead = self._ahead, work.mine, None
        if ahead is None or mine is None or work.afresh or not all(mine.parts) or self.away.kept() is not None:
            return False
        runs_on = self.live.runs_on(self._learning_in(work.round).recipe)  # moments are those of the last merge
        return ahead.matches(work.vertex, mine) and (runs_on or ahead.inner is self.live.inner)

    async def _keep(self, vertex: Digest, foreseen: bool = False) -> None:
        """Make the private state for this vertex durable."""
        await asyncio.get_running_loop().run_in_executor(self._disk, self._keep_private, vertex, foreseen)

    def _keep_private(self, vertex: Digest, foreseen: bool) -> None:
        claim = self.auditing.memory() if self.auditing is not None else b""
        mine, late = self.mine, self.away.kept()
        if foreseen:
            self.store.private.promote()
        else:
            private = PrivateState(vertex, mine.memory_F, self.live.inner, claim, late, mine.kept)
            mine.use_mapped(private, write_private(self.store, private))
        needed = frozenset[Digest]().union(*self.needed.values())
        data = [self._learning.data_blob, *self._learning.beside]
        # private parameters may still be those of the state before
        self.retention.tidy({*data, *needed}, self.agreed.round, keeps_before=mine.kept is not None)
        self._memory.sweep()

    def _learning_in(self, round: int) -> TrainingSpec:
        """The spec of this round."""
        return spec_after(self._learning, self.tuned_before(round))

    @property
    def _learning(self) -> TrainingSpec:
        if self.learning is None:
            raise RunFailedError("E-RUN-04", "the run's genesis is not known yet")
        return self.learning


torch.set_num_threads(1)  # the arithmetic thread; trainers have processes of their own
