"""Replay audits by a worker: claims about own rounds, exhibits of them, and judgments of other members' rounds.

Checks without steps come first: an update that does not follow from its claim's parameters is refuted without the
trainer. The trainer replays steps one at a time while no round needs it. A replay that waited for a whole training
goes before the next training; a second replay does not. Every round begins with what vertices hold against this
peer: an own round that no vertex counts never happened, and after a round with a lost record moments are fresh.
Invariants:
- No number that follows from agreed state is taken from the audited member.
Not responsible for: choosing the audited members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
from torch import Tensor

from atoll.base.errors import UNREADABLE, PeerFault, RunFailedError
from atoll.base.ids import Digest, PeerId
from atoll.base.limits import SEGMENT_STEPS
from atoll.crypto.digest import merkle_root
from atoll.peer.tasks import AdoptState, BuildExhibit, ExhibitBuilt, JudgeReplay, JudgmentResult, TrainRound
from atoll.training.codec import Codec
from atoll.training.recipe.error_feedback import EncodedUpdate
from atoll.training.recipe.state import SharedState
from atoll.verification.replay_audit.exhibit import shown_bytes, shown_from_bytes, vector_bytes
from atoll.verification.replay_audit.judge import ReplayAccepted, Verdict
from atoll.verification.replay_audit.replay import ChainLink, TrainingAssignment
from atoll.verification.replay_audit.replay_judge import ReplayJudge, assigned, in_words
from atoll.verification.replay_audit.state_chain import ChainClaim, chain_head, claim_name, memory_name
from atoll.verification.replay_audit.tolerance import TrainingProfile
from atoll.verification.replay_audit.trainer_commands import (
    AuditCommand,
    AuditStepCompleted,
    JudgeSegment,
    NextAuditStep,
    WriteSegmentExhibit,
)
from atoll.worker.context import Handlers, WorkerContext
from atoll.worker.trainer_commands import TrainerCommandError

MADE_HELD = 2  # rounds that can still be shown; each holds one more vector
SHOWING_MAX = 2  # rounds that wait to be shown: the trainer keeps the states of each

_CLAIM = msgspec.msgpack.Decoder(ChainClaim)


class ChainedSteps(Protocol):
    """A trainer's answer about steps with a chain."""

    @property
    def steps(self) -> int: ...
    @property
    def links(self) -> tuple[ChainLink, ...]: ...
    @property
    def profile(self) -> TrainingProfile | None: ...


@dataclass
class OwnRoundRecord:
    """What this worker needs to show one of its own rounds."""

    claim: ChainClaim
    last: ChainClaim | None
    memory_F: Tensor | None  # before the update was encoded
    wires: tuple[bytes, ...]  # of the update, if not every machine encodes alike; else empty
    life: int  # of the trainer that took the steps: another one does not hold their moments


@dataclass
class ReplayAuditWorker:
    context: WorkerContext
    run: Digest
    me: PeerId
    audit: Callable[
        [AuditCommand], Awaitable[AuditStepCompleted]
    ]  # one step by the trainer process, within its turn
    last: ChainClaim | None = None  # about the last own round that a vertex counts; None: unknown
    made: dict[int, OwnRoundRecord] = field(default_factory=dict[int, OwnRoundRecord])
    told: TrainingAssignment | None = None  # assignment of the current round
    taken: ChainedSteps | None = None  # steps taken under it
    life: int = 0  # of the trainer that took them
    showing: set[int] = field(default_factory=set[int])  # own rounds that wait to be shown
    trainings: int = 0  # number of trainings that have ended
    _shown: asyncio.Condition = field(default_factory=asyncio.Condition)  # notified when `showing` shrinks
    _show: asyncio.Lock = field(default_factory=asyncio.Lock)
    _replay: asyncio.Lock = field(default_factory=asyncio.Lock)

    def handlers(self) -> Handlers:
        return {BuildExhibit: self.show, JudgeReplay: self.judge}

    # ---- own rounds ----------------------------------------------------------------------------------------

    def assignment(self, work: TrainRound, head: SharedState) -> TrainingAssignment:
        self.taken, self.life = None, self.context.trainer.lives
        told = work.round, self.me, work.shard, work.shards, work.steps, head, work.batch
        self.told = assigned(self.run, self.context.spec_of(work.round), *told)
        return self.told

    def took(self, done: ChainedSteps) -> None:
        self.taken, self.trainings = done, self.trainings + 1

    def claim(
        self, round: int, update: EncodedUpdate, memory_F: Tensor | None, codecs: tuple[Codec, ...]
    ) -> Digest | None:
        """The name of the claim about this update; None if its steps could not be shown."""
        taken, self.taken = self.taken, None
        if taken is None or not taken.links or taken.profile is None or self.told is None:
            return None
        assert self.told.round == round
        wires = tuple(bytes(wire) for wire in update.wires)
        root = merkle_root(tuple(self.context.wire_digest(wire) for wire in wires))
        claim = ChainClaim(
            chain_head(self.told, taken.steps, taken.links),
            taken.steps,
            root,
            taken.profile,
            memory_name(memory_F),
            memory_name(update.memory_F),
            taken.links[-1].private,
        )
        alike = all(codec.same_everywhere for codec in codecs)
        self.made[round] = OwnRoundRecord(claim, self.last, memory_F, () if alike else wires, self.life)
        while len(self.made) > MADE_HELD:
            del self.made[min(self.made)]
        return claim_name(claim)

    def counts(self, work: AdoptState) -> bool:
        """Whether the vertex holds the own claim of this round; the next claim then begins where this one ended."""
        made = self.made.get(work.round)
        if work.claim is None:
            return False
        self.last = made.claim if made is not None and claim_name(made.claim) == work.claim else None
        return self.last is not None

    def lives_on(self, round: int) -> bool:
        """Whether the trainer that took the steps of this round still runs, and holds their moments."""
        made = self.made.get(round)
        tended = self.context.trainer
        return tended.ready and made is not None and made.life == tended.lives

    def memory(self, sent: int | None = None) -> bytes:
        """The last claim for the private file: after a restart the next claim begins where it ended.

        `sent`: the round of a claim that is not counted yet.
        """
        last = self.last if sent is None else self.made[sent].claim
        return b"" if last is None else msgspec.msgpack.encode(last)

    def remember(self, data: bytes) -> None:
        try:
            self.last = _CLAIM.decode(data) if data else None
        except UNREADABLE:
            self.last = None  # of another version: moments are fresh then, too

    # ---- showing -------------------------------------------------------------------------------------------

    async def show(self, wish: BuildExhibit) -> ExhibitBuilt:
        made = self.made.get(wish.round)
        if made is None:
            raise RunFailedError("E-AUD-02", f"round {wish.round} is no longer kept and cannot be shown")
        if len(self.showing) >= SHOWING_MAX:
            raise RunFailedError("E-AUD-02", f"round {wish.round} is refused: {SHOWING_MAX} others wait")
        path = self.context.blobs.folder / "exhibit.part"
        self.showing.add(wish.round)
        try:
            async with self._show:
                await self._run_steps(
                    WriteSegmentExhibit(wish.round, wish.segment, made.claim, made.last, str(path))
                )
                return ExhibitBuilt(await asyncio.to_thread(self._store_exhibit, path, made))
        finally:
            self.showing.discard(wish.round)
            async with self._shown:
                self._shown.notify_all()

    def _store_exhibit(self, path: Path, made: OwnRoundRecord) -> Digest:
        states = shown_from_bytes(path.read_bytes())
        memory = b"" if made.memory_F is None else vector_bytes(made.memory_F)
        shown = msgspec.structs.replace(states, memory=memory, wires=made.wires)
        path.unlink()
        return self.context.pins.put_blob(shown_bytes(shown))

    # ---- judging -------------------------------------------------------------------------------------------

    async def judge(self, work: JudgeReplay) -> JudgmentResult:
        try:
            verdict = await self._judge(work)
        except PeerFault as fault:
            return JudgmentResult("withheld", fault.what)
        return in_words(verdict)

    async def _judge(self, work: JudgeReplay) -> Verdict:
        context, spec = self.context, self.context.spec_of(work.round)
        data = await asyncio.to_thread(context.blobs.read_blob, work.blob)
        before = await context.find_state(work.before, spec)
        if data is None or before is None:
            raise RunFailedError("E-AUD-03", "the exhibit or the state to judge it by is no longer on this disk")
        shown = await asyncio.to_thread(shown_from_bytes, data)
        trial = ReplayJudge(self.run, context.spec_of(work.round), work, shown, before, context.wire_digest)
        assignment = await context.run_tensor_job(trial.assignment)
        update = await context.run_tensor_job(trial.update, assignment)
        if not isinstance(update, ReplayAccepted):
            return update
        del data, shown, trial  # replays wait for each other
        async with self._replay:
            path = str(context.blobs.blob_path(work.blob))
            verdict = await self._run_steps(JudgeSegment(assignment, work.segment, path))
        assert verdict is not None
        return verdict

    # ---- steps ---------------------------------------------------------------------------------------------

    async def _run_steps(self, work: WriteSegmentExhibit | JudgeSegment) -> Verdict | None:
        """Step by step; between two steps a round that needs the trainer comes first.

        A show does not wait for the end of a replay: a late exhibit counts as withheld. If rounds are shorter than
        a replay, a replay that waited for one training goes before the next one; a replay that begins then has
        waited for none.
        """
        tended = self.context.trainer
        await tended.equipped()
        command: AuditCommand = work
        replays, since = isinstance(work, JudgeSegment), self.trainings
        life: int | None = None
        while True:
            if replays:
                async with self._shown:
                    await self._shown.wait_for(lambda: not self.showing)
            async with tended.turn:
                for _ in range(SEGMENT_STEPS + 1 if replays and since < self.trainings else 1):
                    if replays and self.showing:
                        break
                    done = await self._step(command, life)
                    life = tended.lives
                    if done.done:
                        return done.verdict
                    command = NextAuditStep()

    async def _step(self, command: AuditCommand, life: int | None) -> AuditStepCompleted:
        """One step by the trainer of this life; None: of any. The caller holds its turn."""
        tended = self.context.trainer
        try:
            await self.context.start_trainer()
            if life not in (None, tended.lives):
                raise RunFailedError("E-AUD-04", "the trainer was restarted in the middle of an audit")
            return await self.audit(command)
        except TrainerCommandError as failed:
            if not failed.alive:
                await tended.failed(failed)
            raise
