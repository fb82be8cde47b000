"""Three islands of one run whose rounds are audited, and how one of them may cheat.

Trainers run in this process (`Near`), so that one of them can cheat where only its own steps are; what crosses
between islands is what the protocol hands round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from members import Inside
from msgspec.structs import replace

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest, PeerId
from atoll.crypto.digest import digest, merkle_root
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import (
    AdoptState,
    AdvanceState,
    BuildExhibit,
    EncodeUpdate,
    JudgeReplay,
    JudgmentResult,
    LocalUpdateOutcome,
    PinBlobs,
    RestoreState,
    UpdateEncoded,
)
from atoll.peer.tasks import TrainRound as TrainAsked
from atoll.protocol.allreduce.tasks import CombineRows, TaskRow
from atoll.runtime.storage.store import PeerStore
from atoll.runtime.trainer import TrainerSpec
from atoll.runtime.trainer.process import TrainerCommandLoop
from atoll.runtime.trainer.protocol import LoadInner, SaveInner, TrainSteps
from atoll.runtime.training_spec import founding_blobs, parse_training_spec, start_of_built_in
from atoll.runtime.worker.capabilities import enable_replay_audit
from atoll.runtime.worker.training_worker import TrainingWorker
from atoll.training.recipe.recipes import diloco, over_tokens
from atoll.verification.replay_audit.trainer_commands import AuditStepCompleted, NextAuditStep

NAMES = (PeerId("ada"), PeerId("bob"), PeerId("eve"))
SHARES = (1, 1, 1)
STEPS = 25  # three segments: ten, ten, five
RUN = digest(b"a run whose rounds are audited")
SETTINGS = RunSettings(audit_rate=1.0)

Cheat = Callable[[TrainerCommandLoop, TrainSteps], bool]


class Near(Inside):
    """It also answers auditors. `cheat` is what it does in the place of a step, if anything."""

    def __init__(self, cheat: Cheat | None = None) -> None:
        super().__init__()
        self.cheat = cheat
        self.audited = 0  # commands about audits
        self.lingers = False  # whatever it takes again for others comes to no end

    async def start(self, spec: TrainerSpec):
        layout = await super().start(spec)
        if (cheat := self.cheat) is not None:
            honest = self.child._take_step
            self.child._take_step = lambda job: None if cheat(self.child, job) else honest(job)
        return layout

    async def audit(self, work):
        self.audited += 1
        await asyncio.sleep(0)
        replays = isinstance(work, NextAuditStep) and len(self.child.auditing.chores) == 1
        return AuditStepCompleted(False) if self.lingers and replays else self.ask(work)

    async def inner_state(self, room=None) -> bytes:
        return self.child.mailbox.take(self.ask(SaveInner()).size_bytes)

    async def set_inner_state(self, data: bytes) -> None:
        self.child.mailbox.put(data)
        self.ask(LoadInner(len(data)))


class Swarm:
    """Three islands of one run; every claim is believed to stand in the vertex of its round."""

    def __init__(
        self,
        base: Path,
        book: str,
        cheat: Callable[[TrainerCommandLoop, TrainSteps], bool] | None = None,
        up="2bit",
        settings: RunSettings = SETTINGS,
        tokens: int = 0,
    ) -> None:
        recipe = diloco("gpt-nano", rounds=8, inner_steps=STEPS, batch=2, seq_len=16, up=up)
        recipe = over_tokens(recipe, tokens) if tokens else recipe
        self.founded = founding_blobs(start_of_built_in(recipe, book), settings)
        self.batch = 0  # of the next round; 0: as the recipe has it
        self.base, self.book = base, book
        self.trainers = [Near(), Near(), Near(cheat)]
        self.stores = [PeerStore(base / name, durable=False) for name in NAMES]
        self.state = {store.put_blob(*self.founded.state) for store in self.stores}.pop()
        for store in self.stores:
            store.put_blob(self.founded.data)  # members fetch it before they train
        self.islands = [self.island(k) for k in range(3)]
        self.round, self.before = 0, self.state
        self.claims: list[list[Digest | None]] = [[], [], []]  # per island, of its counted rounds
        self.roots: list[Digest | None] = []  # of the last round; None: passed
        self.mine: list[tuple[LocalUpdateOutcome, ...]] = [()] * 3  # by member: what the last two vertices count

    def island(self, index: int) -> TrainingWorker:
        island = TrainingWorker(self.stores[index], 1, trainer=self.trainers[index])
        island.learning = parse_training_spec(self.founded.settings)
        enable_replay_audit(island, RUN, NAMES[index])
        island.equip(self.book)
        return island

    def again(self, index: int) -> TrainingWorker:
        """Another life of this one's peer and trainer, with what is on its disk."""
        self.trainers[index] = Near()
        self.islands[index] = self.island(index)
        return self.islands[index]

    def vertex(self, round: int) -> Digest:
        return digest(f"vertex {round}".encode())

    async def begin(self) -> None:
        for island in self.islands:
            assert await island.run(RestoreState(self.round - 1, self.vertex(self.round - 1), self.state))

    async def play(self, counted: tuple[int, ...] = (0, 1, 2)) -> None:
        """One round; the updates of those who are not counted come too late, and who has none passes."""
        updates: list[UpdateEncoded | None] = []
        for k, island in enumerate(self.islands):
            done = await island.run(TrainAsked(self.round, STEPS, 600.0, k, 3, self.batch))
            assert done.steps == STEPS
            try:
                updates.append(await island.run(EncodeUpdate(self.round, SHARES)))
            except RunFailedError:
                updates.append(None)
        counted = tuple(k for k in counted if updates[k] is not None)
        answers = []
        for part in range(3):
            rows = tuple(TaskRow(NAMES[k], STEPS * 2, updates[k].parts[part], (NAMES[k],)) for k in counted)
            answers.append((await self.islands[part].run(CombineRows(self.round, part, SHARES, rows))).payload)
        samples = STEPS * (self.batch or 2) * len(counted)
        work = AdvanceState(self.round, self.state, tuple(answers), STEPS, samples, 3, SHARES, batch=self.batch)
        states = {(await island.run(work)).state for island in self.islands}
        assert len(states) == 1
        self.before, self.state = self.state, states.pop()
        self.roots = [merkle_root(tuple(p.digest for p in u.parts)) if u is not None else None for u in updates]
        for k, island in enumerate(self.islands):
            claim = updates[k].claim if k in counted else None
            if claim is not None:
                self.claims[k].append(claim)
            mine, held = (k in counted,) * 3, LocalUpdateOutcome(self.vertex(self.round - 1))
            if k in counted:
                held = LocalUpdateOutcome(held.before, self.roots[k], mine, claim)
            self.mine[k] = (held, *self.mine[k][:1])
            await island.run(AdoptState(self.round, self.vertex(self.round), self.state, mine, claim, mine=held))
        self.round += 1

    async def exhibit(self, of: int, segment: int) -> Digest:
        """What one shows of its last round; at everybody's from now on."""
        shown = await self.islands[of].run(BuildExhibit(self.round - 1, segment))
        data = self.stores[of].read_blob(shown.blob)
        return {store.put_blob(data) for store in self.stores}.pop()

    def work(self, of: int, segment: int, blob: Digest) -> JudgeReplay:
        """What an auditor of it is to do."""
        last = self.claims[of][-2] if len(self.claims[of]) > 1 else None
        return JudgeReplay(
            blob=blob,
            round=self.round - 1,
            peer=NAMES[of],
            segment=segment,
            before=self.before,
            steps_max=STEPS,
            shard=of,
            shards=3,
            shares=SHARES,
            steps=STEPS,
            root=self.roots[of],
            claim=self.claims[of][-1],
            last_claim=last,
            last_whole=last is not None,
            batch=self.batch,
        )

    async def audited(self, of: int, segment: int, by: int = 0, **changes: Any) -> JudgmentResult:
        """The last round of one, by another: what the protocol would carry, carried by hand."""
        blob = await self.exhibit(of, segment)
        await self.islands[by].run(PinBlobs((blob, self.before)))
        return await self.islands[by].run(replace(self.work(of, segment, blob), **changes))

    async def close(self) -> None:
        for island in self.islands:
            await island.close()
        for store in self.stores:
            store.close()


def play(tmp_path: Path, book: str, story: Callable[[Swarm], Any], **how: Any) -> None:
    async def run() -> None:
        swarm = Swarm(tmp_path, book, **how)
        try:
            await swarm.begin()
            await story(swarm)
        finally:
            await swarm.close()

    asyncio.run(run())


def skips(child: TrainerCommandLoop, job: TrainSteps) -> bool:
    """The thirteenth step is not taken, and counted all the same."""
    if child.span.steps != 12:
        return False
    child.span.steps, child.span.samples = child.span.steps + 1, child.span.samples + child.spec.batch
    child.inner.steps += 1
    return True
