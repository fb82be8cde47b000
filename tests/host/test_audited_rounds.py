"""Islands whose rounds are audited: the real trainer keeps its chain, another island takes its segments again.

Trainers run in this process (`Near`), so that one of them can cheat where only its own steps are; what crosses
between islands is what the protocol hands round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from members import Inside
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.effort import Batches, Effort
from atoll.base.errors import RunFailedError, UsageError
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import SEGMENT_STEPS
from atoll.cli.verdicts import judged_again, verdicts_text
from atoll.host import judging, tended
from atoll.host.island import Island
from atoll.host.learning import built_in, decode_learning, found
from atoll.host.store import Store
from atoll.host.trainer import TrainerFailed, TrainerSpec
from atoll.host.trainer.child import Child
from atoll.host.trainer.words import GoOn, LoadInner, Progressed, SaveInner, Train
from atoll.host.verdicts import Court, Looked, fallen
from atoll.keys.digest import digest, merkle_root
from atoll.keys.identity import SessionVerifier
from atoll.learn.audit import Accepted, claim_name
from atoll.learn.audit.shown import Shown, shown_bytes, shown_from_bytes
from atoll.learn.codec.squeeze import PLAIN
from atoll.learn.recipes import diloco, over_tokens, overlapping
from atoll.node.jobs import Adopt, Advance, Counted, Encode, Encoded, Exhibit, Hold, Judge, Judged, Restore
from atoll.node.jobs import Train as TrainAsked
from atoll.node.settings import RunSettings
from atoll.node.verdicts import Doubt, Said
from atoll.node.verify import Audit, Share, reading
from atoll.policy.plan import RoundSettings
from atoll.protocol.reduce.work import Combine, Row
from atoll.wire.messages.statements import Finding, Numbers, Tuned

NAMES = (PeerId("ada"), PeerId("bob"), PeerId("eve"))
SHARES = (1, 1, 1)
STEPS = 25  # three segments: ten, ten, five
RUN = digest(b"a run whose rounds are audited")
SETTINGS = RunSettings(audit_rate=1.0)


Cheat = Callable[[Child, Train], bool]


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
        replays = isinstance(work, GoOn) and len(self.child.auditing.chores) == 1
        return Progressed(False) if self.lingers and replays else self.ask(work)

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
        cheat: Callable[[Child, Train], bool] | None = None,
        up="2bit",
        settings: RunSettings = SETTINGS,
        tokens: int = 0,
    ) -> None:
        recipe = diloco("gpt-nano", rounds=8, inner_steps=STEPS, batch=2, seq_len=16, up=up)
        recipe = over_tokens(recipe, tokens) if tokens else recipe
        self.founded = found(built_in(recipe, book), settings)
        self.batch = 0  # of the next round; 0: as the recipe has it
        self.base, self.book = base, book
        self.trainers = [Near(), Near(), Near(cheat)]
        self.stores = [Store(base / name, durable=False) for name in NAMES]
        self.state = {store.put_blob(self.founded.state) for store in self.stores}.pop()
        self.islands = [self.island(k) for k in range(3)]
        self.round, self.before = 0, self.state
        self.claims: list[list[Digest | None]] = [[], [], []]  # per island, of its counted rounds
        self.roots: list[Digest | None] = []  # of the last round; None: passed
        self.mine: list[tuple[Counted, ...]] = [()] * 3  # what the last two vertices count of whom

    def island(self, index: int) -> Island:
        island = Island(self.stores[index], 1, trainer=self.trainers[index])
        island.learning = decode_learning(self.founded.settings)
        island.be_audited(RUN, NAMES[index])
        island.equip(self.book)
        return island

    def vertex(self, round: int) -> Digest:
        return digest(f"vertex {round}".encode())

    async def begin(self) -> None:
        for island in self.islands:
            assert await island.do(Restore(self.round - 1, self.vertex(self.round - 1), self.state))

    async def play(self, counted: tuple[int, ...] = (0, 1, 2)) -> None:
        """One round; the updates of those who are not counted come too late, and who has none passes."""
        updates: list[Encoded | None] = []
        for k, island in enumerate(self.islands):
            done = await island.do(TrainAsked(self.round, STEPS, 600.0, k, 3, self.batch))
            assert done.steps == STEPS
            try:
                updates.append(await island.do(Encode(self.round, SHARES)))
            except RunFailedError:
                updates.append(None)
        counted = tuple(k for k in counted if updates[k] is not None)
        answers = []
        for part in range(3):
            rows = tuple(Row(NAMES[k], STEPS * 2, updates[k].parts[part], (NAMES[k],)) for k in counted)
            answers.append((await self.islands[part].do(Combine(self.round, part, SHARES, rows))).payload)
        samples = STEPS * (self.batch or 2) * len(counted)
        work = Advance(self.round, self.state, tuple(answers), STEPS, samples, 3, SHARES, batch=self.batch)
        states = {(await island.do(work)).state for island in self.islands}
        assert len(states) == 1
        self.before, self.state = self.state, states.pop()
        self.roots = [merkle_root(tuple(p.digest for p in u.parts)) if u is not None else None for u in updates]
        for k, island in enumerate(self.islands):
            claim = updates[k].claim if k in counted else None
            if claim is not None:
                self.claims[k].append(claim)
            mine, held = (k in counted,) * 3, Counted(self.vertex(self.round - 1))
            if k in counted:
                held = Counted(held.before, self.roots[k], mine, claim)
            self.mine[k] = (held, *self.mine[k][:1])
            await island.do(Adopt(self.round, self.vertex(self.round), self.state, mine, claim, mine=held))
        self.round += 1

    async def exhibit(self, of: int, segment: int) -> Digest:
        """What one shows of its last round; at everybody's from now on."""
        shown = await self.islands[of].do(Exhibit(self.round - 1, segment))
        data = self.stores[of].read_blob(shown.blob)
        return {store.put_blob(data) for store in self.stores}.pop()

    def work(self, of: int, segment: int, blob: Digest) -> Judge:
        """What an auditor of it is to do."""
        last = self.claims[of][-2] if len(self.claims[of]) > 1 else None
        return Judge(
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

    async def audited(self, of: int, segment: int, by: int = 0, **changes: Any) -> Judged:
        """The last round of one, by another: what the protocol would carry, carried by hand."""
        blob = await self.exhibit(of, segment)
        await self.islands[by].do(Hold((blob, self.before)))
        return await self.islands[by].do(replace(self.work(of, segment, blob), **changes))

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


def skips(child: Child, job: Train) -> bool:
    """The thirteenth step is not taken, and counted all the same."""
    if child.span.steps != 12:
        return False
    child.span.steps, child.span.samples = child.span.steps + 1, child.span.samples + child.spec.batch
    child.inner.steps += 1
    return True


def learns_faster(child: Child, job: Train) -> bool:
    """Every step twice as long as assigned."""
    before_P = child.x_P.clone()
    inputs, targets = child._batch(job, job.cursor + child.span.samples)
    child._step(inputs, targets, job.global_step + child.span.steps)
    child.x_P.add_(child.x_P - before_P)
    child.span.steps, child.span.samples = child.span.steps + 1, child.span.samples + child.spec.batch
    return True


@pytest.mark.parametrize("up", ["2bit", "int8+zstd"])
def test_honest_rounds_are_accepted_in_every_segment_round_after_round(tmp_path: Path, book: str, up: str):
    """Moments and error feedback go on from claim to claim; the auditor's own training is untouched by it. What the
    audited one takes its link to carry is unknown to the others, and its rows are packed otherwise than theirs."""

    async def story(swarm: Swarm) -> None:
        swarm.islands[1].mine.uplink_bytes_s = lambda: 1e12
        for _ in range(3):
            await swarm.play()
            if up == "int8+zstd":
                mine, others = (island.auditing.made[swarm.round - 1].wires for island in swarm.islands[1::-1])
                assert {wire[0] for wire in mine} == {PLAIN} and {wire[0] for wire in others} != {PLAIN}
            for segment in range(3):
                said = await swarm.audited(1, segment, by=segment % 2 * 2)
                assert said.finding == "accepted", said
        assert swarm.trainers[0].audited > 2 * 10  # ten steps are ten commands, between which a round may begin

    play(tmp_path, book, story, up=up)


def test_an_audit_takes_the_batch_and_the_rates_that_the_round_had(tmp_path: Path, book: str):
    """Batches of two, three, then five, under rates by tokens: accepted; taken for another batch, nothing fits."""
    effort = Effort(2, batches=Batches(0.5, 2, 64), bounded=True)
    settings = RunSettings(audit_rate=1.0, round=RoundSettings(inner_steps=STEPS, effort=effort))

    async def story(swarm: Swarm) -> None:
        for batch in (2, 3, 5):
            swarm.batch = batch
            await swarm.play()
            for segment in (0, 2):
                said = await swarm.audited(1, segment)
                assert said.finding == "accepted", said
        assert (await swarm.audited(1, 2, batch=3)).finding != "accepted"
        assert swarm.islands[0].head.samples == 3 * STEPS * (2 + 3 + 5)

    play(tmp_path, book, story, settings=settings, tokens=9000)


def test_an_audit_takes_the_rates_that_held_in_the_round(tmp_path: Path, book: str):
    """Another rate from the second round on: both are accepted, and neither would be at the other's."""

    async def story(swarm: Swarm) -> None:
        faster, usual = Tuned(Numbers(lr=0.02), 1, STEPS), UNSET
        for island in swarm.islands:
            island.tuned_before = lambda round: faster if round else usual
        for other in (faster, usual):
            await swarm.play()
            assert (await swarm.audited(1, 2)).finding == "accepted"
            before, swarm.islands[0].tuned_before = swarm.islands[0].tuned_before, lambda round, other=other: other
            assert (await swarm.audited(1, 2)).finding != "accepted"
            swarm.islands[0].tuned_before = before

    play(tmp_path, book, story)


def test_a_busy_auditor_shows_its_own_round_in_the_middle_of_a_replay(tmp_path: Path, book: str):
    """Else who was drawn twice as an auditor is sent away for withholding what it was given no time to show. States
    that were not kept are made anew by the very replica that replays: it goes on where it was."""

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        bob = swarm.trainers[1]
        kept = bob.child.auditing.records[0].kept
        del kept[1], kept[2]
        bob.lingers = True
        judging = asyncio.create_task(swarm.audited(0, 0, by=1))
        while not bob.audited:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(swarm.audited(2, 0, by=1))
        await swarm.islands[1].do(Hold((swarm.before,)))
        shown = await swarm.islands[1].do(Exhibit(0, 1))
        assert swarm.stores[1].read_blob(shown.blob) is not None
        assert not judging.done() and not waiting.done()
        assert (await swarm.audited(1, 1, by=0)).finding == "accepted"
        for _ in range(4):
            await swarm.play()
        assert not judging.done()
        bob.lingers = False
        assert (await judging).finding == "accepted"
        await asyncio.wait([waiting])  # what it was to judge by is not held any more

    play(tmp_path, book, story)


class Turn(asyncio.Lock):
    """It says how often it was asked for."""

    asked = 0

    async def acquire(self):
        self.asked += 1
        return await super().acquire()

    async def was_asked(self, times: int) -> None:
        while self.asked < times:
            await asyncio.sleep(0)


def test_a_replay_that_has_waited_for_a_training_goes_before_the_next(tmp_path: Path, book: str):
    """Two rounds' trainings without a pause: step by step the replay would come to its end after many of them."""

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        bob, island, order, go_on = swarm.trainers[1], swarm.islands[1], list[str](), asyncio.Event()
        turn = island.tended.turn = Turn()
        audit, train = bob.audit, bob.train

        async def audits(work: Any) -> Any:
            order.append("audit")
            return await audit(work)

        async def trains(*given: Any, **named: Any) -> Any:
            order.append("train")
            await go_on.wait()
            return await train(*given, **named)

        bob.audit, bob.train = audits, trains
        tasks = [asyncio.create_task(island.do(TrainAsked(1, STEPS, 600.0, 1, 3)))]
        await turn.was_asked(1)
        tasks.append(asyncio.create_task(swarm.audited(0, 0, by=1)))
        await turn.was_asked(2)
        tasks.append(asyncio.create_task(island.do(TrainAsked(1, STEPS, 600.0, 1, 3))))
        await turn.was_asked(3)
        go_on.set()
        await asyncio.wait(tasks)
        assert tasks[1].result().finding == "accepted"
        assert order == ["train", *["audit"] * (SEGMENT_STEPS + 1), "train"]

    play(tmp_path, book, story)


def test_a_skipped_step_is_found_in_its_segment_and_the_others_are_accepted(tmp_path: Path, book: str):
    async def story(swarm: Swarm) -> None:
        for _ in range(2):
            await swarm.play()
            found = [(await swarm.audited(2, segment)).finding for segment in range(3)]
            assert found == ["accepted", "mismatch", "accepted"]
            assert (await swarm.audited(1, 1)).finding == "accepted"

    play(tmp_path, book, story, cheat=skips)


def test_steps_of_another_length_are_found_wherever_one_looks(tmp_path: Path, book: str):
    async def story(swarm: Swarm) -> None:
        await swarm.play()
        assert {(await swarm.audited(2, segment, by=1)).finding for segment in range(3)} == {"mismatch"}

    play(tmp_path, book, story, cheat=learns_faster)


def test_an_update_that_its_steps_did_not_make_is_found(tmp_path: Path, book: str):
    """Every step is honest; what was sent is something else, and the commitment says so."""

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        ada = swarm.trainers[0]
        said = await swarm.audited(1, 0, root=digest(b"another update"))
        assert said.finding == "wrong", said
        made = swarm.islands[1].auditing.made[0]
        other = replace(made.claim, root=digest(b"another update"))
        made.claim = other
        said = await swarm.audited(1, 0, root=other.root, claim=claim_name(other))
        assert said.finding == "mismatch" and "update" in said.why
        assert not ada.audited  # without a step of her trainer, which may be busy with its own round

    play(tmp_path, book, story)


def test_a_round_that_was_not_counted_never_happened(tmp_path: Path, book: str):
    """Bob's second update comes too late: its third round begins from the anchor, with moments as of its first."""

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        await swarm.play(counted=(0, 2))
        await swarm.play()
        for segment in range(3):
            assert (await swarm.audited(1, segment)).finding == "accepted"

    play(tmp_path, book, story)


def test_a_restart_goes_on_from_the_last_claim_and_one_without_its_files_from_fresh_moments(
    tmp_path: Path, book: str
):
    async def story(swarm: Swarm) -> None:
        await swarm.play()
        for lost in (False, True):
            await swarm.islands[1].close()
            if lost:
                (tmp_path / "bob" / "private.bin").unlink()
            swarm.trainers[1] = Near()
            swarm.islands[1] = swarm.island(1)
            found = Restore(swarm.round - 1, swarm.vertex(swarm.round - 1), swarm.state, mine=swarm.mine[1])
            assert await swarm.islands[1].do(found)
            assert (swarm.islands[1].auditing.last is None) == lost
            await swarm.play()
            said = await swarm.audited(1, 0)
            assert said.finding == "accepted", said

    play(tmp_path, book, story)


def test_who_was_killed_before_its_vertex_came_goes_on_from_the_claim_that_this_holds(tmp_path: Path, book: str):
    """Another life hears of the round from the others: moments, feedback and claim are those of the file ahead."""

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        before = Restore(0, swarm.vertex(0), swarm.state, mine=swarm.mine[1])
        await swarm.play()
        old = swarm.islands[1]
        await old.close()
        swarm.trainers[1] = Near()
        swarm.islands[1] = island = swarm.island(1)
        assert await island.do(before)
        held = swarm.mine[1][0]
        await island.do(Adopt(1, swarm.vertex(1), swarm.state, None, held.claim, mine=held))
        assert torch.equal(island.mine.memory_F, old.mine.memory_F) and island.auditing.last == old.auditing.last
        assert bytes(island.live.inner) == bytes(old.live.inner) != b""
        await swarm.play()
        said = await swarm.audited(1, 0)
        assert said.finding == "accepted", said

    play(tmp_path, book, story)


def test_a_trainer_that_restarts_before_its_round_is_agreed_goes_on_with_fresh_moments(tmp_path: Path, book: str):
    """It holds moments of the round before: neither what the claim ended with nor fresh, so nobody may go on from
    them."""

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        bob = swarm.islands[1]
        own_do, old = bob.do, bob.live.inner

        async def do(work: Any) -> Any:
            if isinstance(work, Adopt):
                await swarm.trainers[1].set_inner_state(old)
                bob.tended.lives += 1
            return await own_do(work)

        bob.do = do
        await swarm.play()
        assert bob.live.inner == b""
        bob.do = own_do
        await swarm.play()
        said = await swarm.audited(1, 0)
        assert said.finding == "accepted", said

    play(tmp_path, book, story)


def test_who_lost_its_trainer_before_its_update_was_made_passes_and_is_no_liar(
    tmp_path: Path, book: str, monkeypatch: pytest.MonkeyPatch
):
    """An audit fails between the last step and the encoding, and the next one starts the trainer again: its x is
    the anchor. An update of nothing under the claim of 25 steps would be a lie that two auditors expel for."""
    monkeypatch.setattr(tended, "RETRY_FIRST_S", 0.0)

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        bob = swarm.islands[1]
        own_do = bob.do

        async def do(work: Any) -> Any:
            if isinstance(work, Encode):
                await bob.tended.failed()
                await bob.warm_up()
                assert torch.equal(swarm.trainers[1].read_x(), bob.head.anchor_F)
            return await own_do(work)

        bob.do = do
        await swarm.play()
        assert swarm.roots[1] is None and swarm.roots[0] is not None
        bob.do = own_do
        with pytest.raises(RunFailedError, match="E-TRN-14"):
            await bob.do(Encode(swarm.round, SHARES))
        for segment in range(3):
            await swarm.play()
            said = await swarm.audited(1, segment)
            assert said.finding == "accepted", said

    play(tmp_path, book, story)


@pytest.mark.parametrize("again", [False, True], ids=["gone", "started again"])
def test_moments_that_went_with_a_trainer_are_not_written_ahead(tmp_path: Path, book: str, again: bool):
    """Its trainer fails while the update is encoded, then the peer is killed when the vertex is kept: what it had
    before the round is neither what the claim ends with nor fresh."""

    async def gone(room: object = None) -> bytes:
        raise TrainerFailed("crashed", "it was killed")

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        bob, trainer = swarm.islands[1], swarm.trainers[1]
        own_do, own_encode, old, disk = bob.do, bob.mine.encode, bytes(bob.live.inner), dict[str, bytes]()

        def encode(*given: Any) -> Any:
            made = own_encode(*given)  # of x as the steps left it
            trainer.child.mailbox.put(old)
            trainer.ask(LoadInner(len(old)))
            bob.tended.lives += 1
            return made

        async def do(work: Any) -> Any:
            if isinstance(work, Encode) and again:
                bob.mine.encode = encode
            elif isinstance(work, Encode):
                trainer.inner_state = gone
            elif isinstance(work, Adopt):
                disk.update((path.name, path.read_bytes()) for path in bob.store.folder.glob("private.*"))
            return await own_do(work)

        bob.do = do
        await swarm.play()
        await bob.close()
        for name, data in disk.items():
            (bob.store.folder / name).write_bytes(data)
        swarm.trainers[1] = Near()
        swarm.islands[1] = swarm.island(1)
        assert await swarm.islands[1].do(Restore(1, swarm.vertex(1), swarm.state, mine=swarm.mine[1]))
        await swarm.play()
        said = await swarm.audited(1, 0)
        assert said.finding == "accepted", said

    play(tmp_path, book, story)


@pytest.mark.parametrize("trouble", [TypeError("len() of a 0-d tensor"), MemoryError("8 GB")])
def test_an_exhibit_that_cannot_be_read_here_is_no_verdict_and_ends_nobody(
    tmp_path: Path, book: str, monkeypatch: pytest.MonkeyPatch, trouble: Exception
):
    """The driver tells a failed job to the audit, which then says `unauditable`."""

    def fails(*_: object) -> None:
        raise trouble

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        with monkeypatch.context() as broken:
            broken.setattr("atoll.host.trainer.auditing.states_of", fails)
            with pytest.raises(TrainerFailed):
                await swarm.audited(1, 0)
        assert (await swarm.audited(1, 0)).finding == "accepted"

    play(tmp_path, book, story)


def test_what_a_crash_took_is_never_a_lie(tmp_path: Path, book: str):
    """The vertex holds a claim whose record is gone: nothing can be shown, and the next round begins afresh."""

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        swarm.islands[1].auditing.made.clear()
        with pytest.raises(RunFailedError, match="E-AUD-02"):
            await swarm.islands[1].do(Exhibit(0, 0))
        island = swarm.islands[1]
        await island.do(TrainAsked(1, STEPS, 600.0, 1, 3))
        await island.do(Encode(1, SHARES))
        island.auditing.made.clear()
        await island.do(
            Adopt(1, swarm.vertex(1), swarm.state, (True,) * 3, digest(b"what I said in a life before"))
        )
        assert island.live.inner == b"" and island.mine.memory_F is None and island.auditing.last is None

    play(tmp_path, book, story)


def test_junk_in_the_place_of_an_exhibit_is_no_show(tmp_path: Path, book: str):
    async def story(swarm: Swarm) -> None:
        await swarm.play()
        junk = swarm.stores[0].put_blob(b"junk")
        assert (await swarm.audited(1, 0, blob=junk)).finding == "withheld"
        assert (await swarm.audited(1, 0, claim=digest(b"another"))).finding == "withheld"
        with pytest.raises(RunFailedError, match="E-AUD-03"):
            await swarm.audited(1, 0, blob=digest(b"not here"))

    play(tmp_path, book, story)


# ---- judged again by who was not there ---------------------------------------------------------------------


class Reader:
    """Somebody with a folder of the run, to whom auditors' words and what they judged is all there is."""

    def __init__(self, swarm: Swarm, of: int, by: int = 0) -> None:
        self.swarm, self.of, self.folder = swarm, of, swarm.stores[by].folder
        self.court = Court([self.folder], swarm.founded.settings, reading(RUN, SessionVerifier()))

    async def refuted(self, segment: int) -> Shown:
        """As the audit of this segment ended; what was shown."""
        self.work = self.swarm.work(self.of, segment, await self.swarm.exhibit(self.of, segment))
        return shown_from_bytes(self.swarm.stores[0].read_blob(self.work.blob))

    def looks(self, finding: Finding = "mismatch", shown: Shown | bytes | None = None) -> Looked:
        """At one auditor's word, about another blob if one is given."""
        store, blob = self.swarm.stores[0], self.work.blob
        if shown is not None:
            blob = store.put_blob(shown if isinstance(shown, bytes) else shown_bytes(shown))
        said = Said(NAMES[0], finding, self.work.round + 1, blob)
        peer = NAMES[self.of]
        doubt = self.doubt = Doubt(self.work.round, peer, "a segment", 1, self.work, {}, UNSET, {NAMES[0]: said})
        (looked,) = self.court.look(doubt)
        self.stands = not fallen([doubt], lambda _: [looked])
        return looked

    def told(self) -> tuple[list[str], list[str]]:
        """By `atoll verify --verdicts`, had the history held this alone: codes of problems, and lines."""
        audit = Audit(RUN, self.swarm.founded.settings, shares={peer: Share(peer) for peer in NAMES})
        audit.out.doubts[self.doubt.round, self.doubt.peer] = self.doubt
        looked = judged_again(audit, [self.folder], fetch=False)
        return [p.code for p in audit.problems], list(verdicts_text(audit, looked))


def test_an_exhibit_convicts_a_cheat_again_in_the_hands_of_a_stranger(tmp_path: Path, book: str):
    """Out of a folder, with nobody asked: the segment with the skipped step is refuted, the one before it is not,
    and who says otherwise of that one is not borne out."""

    async def story(swarm: Swarm) -> None:
        for _ in range(2):
            await swarm.play()
        reader = Reader(swarm, of=2)
        await reader.refuted(1)
        looked = reader.looks()
        assert (looked.result, reader.stands) == ("agrees", True) and "mismatch" in looked.what
        assert reader.told()[0] == []
        await reader.refuted(0)
        assert reader.looks().result == "differs" and not reader.stands
        problems, lines = reader.told()
        assert problems == ["E-VER-16"] and any("differs  ada said mismatch" in line for line in lines)
        reader.folder.joinpath("blobs", reader.work.before.hex()).unlink()
        reader.court = Court([reader.folder], swarm.founded.settings, reading(RUN, SessionVerifier()))
        looked = reader.looks()
        assert looked.result == "unknown" and "state" in looked.what and reader.stands
        reader.court.folders = [reader.folder, swarm.stores[1].folder]
        assert reader.looks().result == "differs"

    play(tmp_path, book, story, cheat=skips)


def test_what_other_machines_may_find_otherwise_is_not_held_against_auditors(
    tmp_path: Path, book: str, monkeypatch: pytest.MonkeyPatch
):
    """Near the tolerance, or where they compared bits that are not the same here: nobody can tell from here."""

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        reader = Reader(swarm, of=1)
        await reader.refuted(0)
        for distance, bits, result in ((6e-4, False, "unknown"), (1e-5, True, "unknown"), (1e-5, False, "differs")):
            found = Accepted(distance, 1e-3)
            monkeypatch.setattr(judging, "judge_segment", lambda *_, found=found: found)
            monkeypatch.setattr(judging, "pinned", lambda one, other, bits=bits: bits and one is other)
            reader.court = Court([reader.folder], swarm.founded.settings, reading(RUN, SessionVerifier()))
            assert reader.looks().result == result, distance

    play(tmp_path, book, story)


def test_nobody_is_convicted_by_an_exhibit_that_somebody_made_up(tmp_path: Path, book: str):
    """An honest round, and whatever a liar may do to what it showed: none of that is what it committed to."""

    async def story(swarm: Swarm) -> None:
        for _ in range(2):
            await swarm.play()
        reader = Reader(swarm, of=1)
        shown = await reader.refuted(1)
        assert reader.looks().result == "differs" and not reader.stands
        of_another = swarm.stores[0].read_blob(await swarm.exhibit(0, 1))
        of_another_segment = swarm.stores[0].read_blob(await swarm.exhibit(1, 2))

        def flipped(data: bytes) -> bytes:
            return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]

        turned = (shown.links[0], shown.links[2], shown.links[1], shown.links[3])
        assert shown.last is not None and shown.memory and shown.wires
        made_up: dict[str, Shown | bytes] = {
            "junk": b"junk",
            "another's": bytes(of_another),
            "another segment": bytes(of_another_segment),
            "another claim": replace(shown, claim=replace(shown.claim, steps=STEPS + 1)),
            "without the claim before": replace(shown, last=None),
            "another claim before": replace(shown, last=replace(shown.last, ends=ZERO_DIGEST)),
            "links": replace(shown, links=turned),
            "fewer links": replace(shown, links=shown.links[:-1]),
            "begin": replace(shown, begin=flipped(shown.begin)),
            "end": replace(shown, end=flipped(shown.end)),
            "x": replace(shown, x=flipped(shown.x)),
            "feedback": replace(shown, memory=flipped(shown.memory)),
            "no feedback": replace(shown, memory=b""),
            "wires": replace(shown, wires=(flipped(shown.wires[0]), *shown.wires[1:])),
            "no wires": replace(shown, wires=()),
        }
        for name, one in made_up.items():
            looked = reader.looks("mismatch", one)
            assert looked.result == "differs" and "anybody" in looked.what and not reader.stands, (name, looked)
            assert reader.looks("wrong", one).result == "word", name  # that it was shown so

    play(tmp_path, book, story, up="int8+zstd")


def test_runs_that_cannot_be_audited_are_not_founded(book: str):
    """Overlap merges while anchors arrive: nobody could take such steps again."""
    with pytest.raises(UsageError, match="E-RUN-16"):
        found(built_in(overlapping(diloco("gpt-nano", rounds=8, inner_steps=20), 4, 1), book), SETTINGS)
