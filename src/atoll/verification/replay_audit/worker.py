"""An island's side of audits: what it claims of its rounds, what it lays out, and how it judges others.

What takes no steps is looked at first: an update that its claim's parameters do not make is found without the
trainer. Steps are taken again by the trainer, one at a time, while nobody wants it for a round; a replay that has
waited for a whole training goes before the next one, but no second one does. What a round begins with is what
vertices hold against this peer: a round of its own that no vertex counts never happened, and one whose record is
lost is followed by fresh moments.
Never decides who is audited, and never takes a number from the audited peer that follows from what was agreed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from torch import Tensor

from atoll.base.errors import UNREADABLE, PeerFault, RunFailedError
from atoll.base.ids import Digest, PeerId
from atoll.base.limits import SEGMENT_STEPS
from atoll.crypto.digest import Buffer, merkle_root
from atoll.peer.tasks import AdoptState, BuildExhibit, ExhibitBuilt, JudgeReplay, JudgmentResult, TrainRound
from atoll.runtime.embed.peer_process import AttachedTrainer
from atoll.runtime.storage.state_cache import StateCache
from atoll.runtime.storage.store import PeerStore
from atoll.runtime.trainer import TrainerFailed
from atoll.runtime.trainer.protocol import AuditProgress, JudgeSegment, NextAuditStep, ShowSegment
from atoll.runtime.trainer.protocol import StepsTrained as TakenSteps
from atoll.runtime.training_spec import TrainingSpec
from atoll.runtime.worker.trainer_supervisor import TrainerSupervisor
from atoll.training.codec import Codec
from atoll.training.recipe.state import SharedState
from atoll.training.recipe.update import EncodedUpdate
from atoll.verification.replay_audit.exhibit import shown_bytes, shown_from_bytes, vector_bytes
from atoll.verification.replay_audit.judge import ReplayAccepted, Verdict
from atoll.verification.replay_audit.replay import TrainingAssignment
from atoll.verification.replay_audit.replay_judge import ReplayJudge, assigned, in_words
from atoll.verification.replay_audit.state_chain import ChainClaim, chain_head, claim_name, memory_name

MADE_HELD = 2  # rounds whose update can still be shown; they hold one vector more each
SHOWING_MAX = 2  # rounds that wait to be shown: the trainer keeps the states of each


_CLAIM = msgspec.msgpack.Decoder(ChainClaim)


@dataclass
class OwnRoundRecord:
    """What this island needs to show of one round of its own."""

    claim: ChainClaim
    last: ChainClaim | None
    memory_F: Tensor | None  # before the update was encoded
    wires: tuple[bytes, ...]  # where not every machine encodes alike
    life: int  # of the trainer that took its steps: another one does not hold their moments


@dataclass
class ReplayAuditWorker:
    run: Digest
    me: PeerId
    learning_in: Callable[[int], TrainingSpec]  # what a round is learned by
    store: PeerStore
    shelf: StateCache
    tended: TrainerSupervisor
    arithmetic: Executor
    ready: Callable[[], Awaitable[None]]  # the trainer runs; to be called in its turn
    name: Callable[[Buffer], Digest]  # what commitments call a wire
    last: ChainClaim | None = None  # of my last round that a vertex counts, as far as I remember
    made: dict[int, OwnRoundRecord] = field(default_factory=dict[int, OwnRoundRecord])
    told: TrainingAssignment | None = None  # to my trainer, in the round under way
    taken: TakenSteps | None = None  # by it
    life: int = 0  # in which it took them
    showing: set[int] = field(default_factory=set[int])  # rounds of mine that are to be shown
    trainings: int = 0  # that have ended
    _shown: asyncio.Condition = field(default_factory=asyncio.Condition)  # `showing` has one less
    _show: asyncio.Lock = field(default_factory=asyncio.Lock)
    _replay: asyncio.Lock = field(default_factory=asyncio.Lock)

    # ---- my own rounds -------------------------------------------------------------------------------------

    def assignment(self, work: TrainRound, head: SharedState) -> TrainingAssignment:
        self.taken, self.life = None, self.tended.lives
        told = work.round, self.me, work.shard, work.shards, work.steps, head, work.batch
        self.told = assigned(self.run, self.learning_in(work.round), *told)
        return self.told

    def took(self, done: TakenSteps) -> None:
        self.taken, self.trainings = done, self.trainings + 1

    def claim(
        self, round: int, update: EncodedUpdate, memory_F: Tensor | None, codecs: tuple[Codec, ...]
    ) -> Digest | None:
        """The name of my claim about this update; None if nobody could show how it came to be."""
        taken, self.taken = self.taken, None
        if taken is None or not taken.links or taken.profile is None or self.told is None:
            return None
        assert self.told.round == round
        wires = tuple(bytes(wire) for wire in update.wires)
        root = merkle_root(tuple(self.name(wire) for wire in wires))
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
        """The vertex holds the very claim that I made; from now on I go on from what it ended with."""
        made = self.made.get(work.round)
        if work.claim is None:
            return False
        self.last = made.claim if made is not None and claim_name(made.claim) == work.claim else None
        return self.last is not None

    def lives_on(self, round: int) -> bool:
        """The trainer that took the steps of this round still runs, and holds the moments that they left."""
        made = self.made.get(round)
        return self.tended.ready and made is not None and made.life == self.tended.lives

    def memory(self, sent: int | None = None) -> bytes:
        """For the private file: after a restart my next claim begins where the last one ended. `sent`: the round
        whose claim it is once that is counted."""
        last = self.last if sent is None else self.made[sent].claim
        return b"" if last is None else msgspec.msgpack.encode(last)

    def remember(self, data: bytes) -> None:
        try:
            self.last = _CLAIM.decode(data) if data else None
        except UNREADABLE:
            self.last = None  # another version's: moments are fresh then, too

    # ---- showing -------------------------------------------------------------------------------------------

    async def show(self, wish: BuildExhibit) -> ExhibitBuilt:
        made = self.made.get(wish.round)
        if made is None:
            raise RunFailedError("E-AUD-02", f"nothing is left of round {wish.round} that could be shown")
        if len(self.showing) >= SHOWING_MAX:
            raise RunFailedError("E-AUD-02", f"round {wish.round} is one too many of those that wait to be shown")
        path = self.store.folder / "exhibit.part"
        self.showing.add(wish.round)
        try:
            async with self._show:
                await self._chore(ShowSegment(wish.round, wish.segment, made.claim, made.last, str(path)))
                return ExhibitBuilt(await asyncio.to_thread(self._lay_out, path, made))
        finally:
            self.showing.discard(wish.round)
            async with self._shown:
                self._shown.notify_all()

    def _lay_out(self, path: Path, made: OwnRoundRecord) -> Digest:
        states = shown_from_bytes(path.read_bytes())
        memory = b"" if made.memory_F is None else vector_bytes(made.memory_F)
        shown = msgspec.structs.replace(states, memory=memory, wires=made.wires)
        path.unlink()
        return self.shelf.put_other(shown_bytes(shown))

    # ---- judging -------------------------------------------------------------------------------------------

    async def judge(self, work: JudgeReplay) -> JudgmentResult:
        try:
            verdict = await self._judge(work)
        except PeerFault as fault:
            return JudgmentResult("withheld", fault.what)
        return in_words(verdict)

    async def _judge(self, work: JudgeReplay) -> Verdict:
        loop = asyncio.get_running_loop()
        data = await asyncio.to_thread(self.store.read_blob, work.blob)
        before = await loop.run_in_executor(
            self.arithmetic, self.shelf.find, work.before, self.learning_in(work.round).layout
        )
        if data is None or before is None:
            raise RunFailedError("E-AUD-03", "what this audit needs is not on this disk any more")
        shown = await asyncio.to_thread(shown_from_bytes, data)
        trial = ReplayJudge(self.run, self.learning_in(work.round), work, shown, before, self.name)
        assignment = await loop.run_in_executor(self.arithmetic, trial.assignment)
        update = await loop.run_in_executor(self.arithmetic, trial.update, assignment)
        if not isinstance(update, ReplayAccepted):
            return update
        del data, shown, trial  # replays wait for each other
        async with self._replay:
            path = str(self.store.blob_path(work.blob))
            verdict = await self._chore(JudgeSegment(assignment, work.segment, path))
        assert verdict is not None
        return verdict

    # ---- small words ---------------------------------------------------------------------------------------

    async def _chore(self, work: ShowSegment | JudgeSegment) -> Verdict | None:
        """Step by step, and between two steps whoever wants the trainer for a round comes first.

        A show does not wait for a replay to end: one that is late is taken for none. Where rounds are shorter than
        a replay it would come to no end between them, so what has waited for one training goes before the next;
        what then begins has waited for none.
        """
        await self.tended.equipped()
        ask: ShowSegment | JudgeSegment | NextAuditStep = work
        replays, since = isinstance(work, JudgeSegment), self.trainings
        life: int | None = None
        while True:
            if replays:
                async with self._shown:
                    await self._shown.wait_for(lambda: not self.showing)
            async with self.tended.turn:
                for _ in range(SEGMENT_STEPS + 1 if replays and since < self.trainings else 1):
                    if replays and self.showing:
                        break
                    done = await self._step(ask, life)
                    life = self.tended.lives
                    if done.done:
                        return done.verdict
                    ask = NextAuditStep()

    async def _step(self, ask: ShowSegment | JudgeSegment | NextAuditStep, life: int | None) -> AuditProgress:
        """By the trainer of this life, if one has begun; the caller has its turn."""
        try:
            await self.ready()
            if life not in (None, self.tended.lives):
                raise RunFailedError("E-AUD-04", "the trainer was started anew in the middle of an audit")
            trainer = self.tended.trainer
            assert not isinstance(trainer, AttachedTrainer), "nobody audits somebody's own loop"
            return await trainer.audit(ask)
        except TrainerFailed as failed:
            if not failed.alive:
                await self.tended.failed()
            raise
