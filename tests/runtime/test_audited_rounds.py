"""Islands whose rounds are audited: the real trainer keeps its chain, another island takes its segments again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from audited import SETTINGS, STEPS, Swarm, play, skips
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import RunFailedError, UsageError
from atoll.base.limits import SEGMENT_STEPS
from atoll.base.workload import AdaptiveWorkloadPolicy, LossAdaptiveBatchSize
from atoll.crypto.digest import digest
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import BuildExhibit, PinBlobs
from atoll.peer.tasks import TrainRound as TrainAsked
from atoll.policy.plan import RoundSettings
from atoll.runtime.trainer import TrainerCommandError
from atoll.runtime.trainer.process import TrainerCommandLoop
from atoll.runtime.trainer.protocol import TrainSteps
from atoll.runtime.training_spec import founding_blobs, start_of_built_in
from atoll.training.codec.byte_compression import PLAIN
from atoll.training.recipe.recipes import diloco, with_overlap
from atoll.verification.replay_audit.state_chain import claim_name
from atoll.wire.messages.statements import ChangeableSettings, ChangedSettings


def learns_faster(child: TrainerCommandLoop, job: TrainSteps) -> bool:
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
    effort = AdaptiveWorkloadPolicy(2, batches=LossAdaptiveBatchSize(0.5, 2, 64), bounded=True)
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
        faster, usual = ChangedSettings(ChangeableSettings(lr=0.02), 1, STEPS), UNSET
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
        await swarm.islands[1].run(PinBlobs((swarm.before,)))
        shown = await swarm.islands[1].run(BuildExhibit(0, 1))
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
        tasks = [asyncio.create_task(island.run(TrainAsked(1, STEPS, 600.0, 1, 3)))]
        await turn.was_asked(1)
        tasks.append(asyncio.create_task(swarm.audited(0, 0, by=1)))
        await turn.was_asked(2)
        tasks.append(asyncio.create_task(island.run(TrainAsked(1, STEPS, 600.0, 1, 3))))
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
            broken.setattr("atoll.verification.replay_audit.trainer.states_of", fails)
            with pytest.raises(TrainerCommandError):
                await swarm.audited(1, 0)
        assert (await swarm.audited(1, 0)).finding == "accepted"

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


def test_runs_that_cannot_be_audited_are_not_founded(book: str):
    """Overlap merges while anchors arrive: nobody could take such steps again."""
    with pytest.raises(UsageError, match="E-RUN-16"):
        founding_blobs(
            start_of_built_in(with_overlap(diloco("gpt-nano", rounds=8, inner_steps=20), 4, 1), book), SETTINGS
        )
