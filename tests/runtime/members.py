"""Islands of one run whose trainers are in this process; the test hands round what the protocol would."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.crypto.digest import merkle_root
from atoll.peer.config.node_sections import FeedbackPrecision
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import (
    AdoptState,
    AdvanceState,
    EncodeUpdate,
    LocalUpdateOutcome,
    RestoreState,
    StateRestored,
    UpdateEncoded,
)
from atoll.peer.tasks import TrainRound as TrainAsked
from atoll.protocol.allreduce.tasks import CombineRows, TaskRow
from atoll.runtime.storage.store import PeerStore
from atoll.runtime.system import anonymous_file
from atoll.runtime.trainer import TrainerCommandError, TrainerSpec
from atoll.runtime.trainer.process import TrainerCommandLoop
from atoll.runtime.trainer.protocol import (
    CommandFailed,
    LoadInner,
    MergeAnchorIntoParameters,
    SaveInner,
    SetParameters,
    StepsTrained,
    TrainSteps,
)
from atoll.runtime.training_spec import RunStart, founding_blobs, parse_training_spec, start_of_built_in
from atoll.runtime.worker.training_worker import TrainingWorker
from atoll.training.recipe.recipes import Recipe, diloco, with_overlap
from atoll.training.spec import TrainingSpec

PEERS = 2
SHARES = (1,) * PEERS


class Inside:
    """The very trainer, in this process: whatever it may do unasked it has done before it is asked again."""

    def __init__(self) -> None:
        self.cancelled = self.hurried = self.stands = -1
        self.quiet = True
        self.jobs = self.done = 0

    async def start(self, spec: TrainerSpec):
        self.child = TrainerCommandLoop(anonymous_file(), msgspec.msgpack.encode(spec), self, io.BytesIO())
        return self.child.set_up().layout

    def ask(self, command):
        answer = self.child.outcome(lambda: self.child.carry_out(command))
        self.child.step_ahead()
        if isinstance(answer, CommandFailed):
            raise TrainerCommandError(answer.why, answer.what, alive=True)
        return answer

    async def train(
        self,
        steps,
        *,
        cursor,
        shard,
        shards,
        global_step,
        until=None,
        ahead=None,
        assignment=None,
        held=(),
        apart=False,
        batch=0,
        inner=None,
        horizon=None,
        span=None,
    ) -> StepsTrained:
        self.jobs += 1
        named = steps, until, cursor, shard, shards, global_step, ahead, assignment, held, apart, batch
        named += (inner, horizon)
        return self.ask(TrainSteps(self.jobs, *named))

    def cancel(self) -> None:
        self.cancelled = self.jobs

    def hand_over(self) -> None:
        self.hurried = self.jobs

    def stand(self) -> None:
        self.cancelled = self.stands = self.jobs

    def read_x(self):
        return self.child.mailbox.x_F

    async def write_x(self, x_F, counters=()):
        self.read_x().copy_(x_F)
        self.ask(SetParameters(counters))

    async def merge(self, lo, value_N, how):
        self.read_x()[lo : lo + len(value_N)].copy_(value_N)
        self.ask(MergeAnchorIntoParameters(lo, lo + len(value_N), how))

    async def validate(self, work, of_F=None):
        self.child.mailbox.show(of_F)
        return self.ask(work)

    def made(self):
        return self.child.mailbox.shown()

    async def inner_state(self, room=None) -> bytes:
        return bytes(self.child.mailbox.take(self.ask(SaveInner()).size_bytes))

    async def set_inner_state(self, data: bytes) -> None:
        self.child.mailbox.put(data)
        self.ask(LoadInner(len(data)))

    async def stop(self) -> None:
        return


def recipe_for(how: dict, *, up="2bit", down="int8", rounds=3) -> Recipe:
    made = diloco("gpt-nano", rounds=rounds, inner_steps=12, batch=2, seq_len=16, up=up, down=down)
    return with_overlap(replace(made, merge=how.get("merge", "replace")), how["overlap"], how["fragments"])


class Members:
    """Each owns one part."""

    settings = RunSettings()
    feedback: FeedbackPrecision = "fp32"

    def __init__(
        self, base: Path, recipe: Recipe, book: str, peers: int = PEERS, settings: RunSettings | None = None
    ) -> None:
        self.base, self.recipe, self.book, self.peers = base, recipe, book, peers
        founded = founding_blobs(self.beginning(recipe, book), settings or self.settings)
        self.shares = (1,) * peers
        self.learning: TrainingSpec = parse_training_spec(founded.settings)
        self.trainers = [self.trainer() for _ in range(peers)]
        self.stores = [PeerStore(base / f"{k}", durable=False) for k in range(peers)]
        self.islands = [self.island(k) for k in range(peers)]
        self.state = {store.put_blob(*founded.state) for store in self.stores}.pop()
        self.round = 0
        self.steps, self.batch = recipe.schedule.turn_steps, 0  # of the next round; 0: as the recipe has it
        self.fewer: dict[int, int] = {}  # steps of members that are asked for fewer
        self.mine: list[tuple[LocalUpdateOutcome, ...]] = [
            ()
        ] * peers  # by member: what the last two vertices count

    def beginning(self, recipe: Recipe, book: str) -> RunStart:
        return start_of_built_in(recipe, book)

    def trainer(self) -> Inside:
        return Inside()

    def island(self, index: int) -> TrainingWorker:
        island = TrainingWorker(self.stores[index], 1, trainer=self.trainers[index], feedback=self.feedback)
        island.learning = self.learning
        island.equip(self.book)
        return island

    async def begin(self) -> None:
        for island in self.islands:
            found = await island.run(RestoreState(-1, self.vertex(), self.state))
            assert found == StateRestored(island.store.blob_path(self.state).stat().st_size)

    def vertex(self) -> Digest:
        return Digest(self.round.to_bytes(32, "big"))

    def restore(self, index: int) -> RestoreState:
        """As a start asks for it."""
        return RestoreState(self.round - 1, self.vertex(), self.state, mine=self.mine[index])

    def counts(self, index: int, encoded: UpdateEncoded | None, parts: tuple[bool, ...]) -> LocalUpdateOutcome:
        """What the vertex that was just agreed counts of its update; to be called once."""
        before = Digest((self.round - 1).to_bytes(32, "big"))
        mine = LocalUpdateOutcome(before)
        if encoded is not None and any(parts):
            mine = LocalUpdateOutcome(
                before, merkle_root(tuple(part.digest for part in encoded.parts)), parts, encoded.claim
            )
        self.mine[index] = (mine, *self.mine[index][:1])
        return mine

    async def train(self, index: int, late: bool = False) -> UpdateEncoded:
        """Its update of this round; late work, if it has any, rides on it."""
        asked = TrainAsked(self.round, self.asked_of(index), 600.0, index, self.peers, self.batch)
        await self.islands[index].run(asked)
        return await self.islands[index].run(EncodeUpdate(self.round, self.shares, late))

    def asked_of(self, index: int) -> int:
        return self.fewer.get(index, self.steps)

    async def play(
        self,
        encoding: Sequence[int] | None = None,
        counted: Sequence[int] | None = None,
        here: Sequence[int] | None = None,
        weights: dict[int, int] | None = None,
        late: bool = False,
    ) -> None:
        """One round. Who does not encode came too late with its update; who is not counted sent it in vain; who is
        not here hears of nothing. Rows weigh their samples, but where `weights` say otherwise.
        """
        steps, batch, peers = self.steps, self.batch or self.recipe.batch, self.peers
        here = range(peers) if here is None else here
        encoding = here if encoding is None else encoding
        counted = encoding if counted is None else counted
        for index in here:
            if index not in encoding:
                await self.islands[index].run(TrainAsked(self.round, steps, 600.0, index, peers, self.batch))
        updates = {k: await self.train(k, late) for k in encoding}
        taken = [k for k in counted if updates[k].late is not None]
        answers, led = [], dict[int, list[Digest]]()
        for part in range(peers):
            rows = tuple(
                TaskRow(
                    PeerId(str(k)),
                    (weights or {}).get(k, self.asked_of(k) * batch),
                    u.parts[part],
                    (PeerId(str(k)),),
                )
                for k, u in updates.items()
                if k in counted
            )
            combine = CombineRows(self.round, part, self.shares, rows)
            answers.append((await self.islands[here[part % len(here)]].run(combine)).payload)
            led.setdefault(here[part % len(here)], []).append(answers[-1].digest)
        samples = sum(self.asked_of(k) for k in counted) * batch
        work = AdvanceState(
            self.round, self.state, tuple(answers), steps, samples, peers, self.shares, batch=self.batch
        )
        states = {(await self.islands[k].run(work)).state for k in here}
        assert len(states) == 1
        (self.state,) = states
        self.round += 1
        for index in here:
            mine = (index in counted,) * peers if index in encoding else None
            mine_led = tuple(led.get(index, ()))
            held = self.counts(index, updates.get(index), mine or ())
            adopt = AdoptState(
                self.round - 1, self.vertex(), self.state, mine, late=index in taken, led=mine_led, mine=held
            )
            await self.islands[index].run(adopt)

    async def close(self) -> None:
        for island in self.islands:
            await island.close()
        for store in self.stores:
            store.close()


def story(tell, members: Members) -> None:
    async def told() -> None:
        try:
            await members.begin()
            await tell(members)
        finally:
            await members.close()

    asyncio.run(told())
