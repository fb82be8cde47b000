"""What real islands measure of agreed states: the same everywhere, beside their training, on states that stay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from members import PEERS, SHARES, Members, recipe_for
from msgspec.structs import replace

from atoll.base.errors import PeerFault, RunFailedError, UsageError
from atoll.base.ids import Digest, PeerId
from atoll.crypto.digest import digest
from atoll.peer.config.sections import KeepSection
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import AdoptState, AdvanceState, EncodeUpdate, PinBlobs
from atoll.peer.tasks import MeasureValidationLoss as ValidateAsked
from atoll.peer.tasks import TrainRound as TrainAsked
from atoll.policy.capability_terms import StateValidationTerms
from atoll.protocol.allreduce.tasks import CombineRows, TaskRow
from atoll.runtime.config import load_config, recipe_of, settings_of
from atoll.runtime.trainer import TrainerCommandError
from atoll.runtime.training_spec import founding_blobs, parse_training_spec, start_of_built_in
from atoll.training.recipe.state import state_hash
from atoll.verification.state_validation.policy import ValidationCandidate, fixed_point
from atoll.verification.state_validation.worker import SAMPLES
from atoll.worker.trainer_commands import BeginValidation, ContinueMeasurement

RECIPE = recipe_for({"overlap": 0, "fragments": 1}, rounds=9)


def play(tmp_path: Path, book: str, story: Callable[[Members], Awaitable[None]]) -> None:
    async def run() -> None:
        members = Members(tmp_path / "a", RECIPE, book)
        await members.begin()
        await story(members)

    asyncio.run(run())


async def looked(members: Members, index: int, state: Digest) -> float:
    return (await members.islands[index].run(ValidateAsked(0, state))).losses[0]


async def right(members: Members, index: int, state: Digest) -> float:
    return (await members.islands[index].run(ValidateAsked(0, state))).right[0]


async def poisoned(members: Members) -> None:
    """A round in which one of two sends its update a hundred times as large, the other way."""
    steps, recipe = RECIPE.schedule.turn_steps, RECIPE
    for index, island in enumerate(members.islands):
        await island.run(TrainAsked(members.round, steps, 600.0, index, PEERS))
    villain = members.islands[1]
    x_F = villain.trainer.read_x()
    x_F.copy_(villain.head.anchor_F - 100 * (x_F - villain.head.anchor_F))
    updates = [await island.run(EncodeUpdate(members.round, SHARES)) for island in members.islands]
    answers = []
    for part in range(PEERS):
        rows = tuple(
            TaskRow(PeerId(str(k)), steps * recipe.batch, u.parts[part], (PeerId(str(k)),))
            for k, u in enumerate(updates)
        )
        answers.append((await members.islands[part].run(CombineRows(members.round, part, SHARES, rows))).payload)
    work = AdvanceState(
        members.round, members.state, tuple(answers), steps, steps * recipe.batch * PEERS, PEERS, SHARES
    )
    (members.state,) = {(await island.run(work)).state for island in members.islands}
    members.round += 1
    for island in members.islands:
        await island.run(AdoptState(members.round - 1, members.vertex(), members.state, (True,) * PEERS))


def test_both_measure_the_same_and_a_poisoned_mean_is_far_above_every_bound(tmp_path: Path, book: str):
    """Three honest rounds bring the loss down; one poisoned update more, and both voices are against."""

    async def story(members: Members) -> None:
        states = [members.state]
        for _ in range(3):
            await members.play()
            states.append(members.state)
        await poisoned(members)
        states.append(members.state)
        said = [[await looked(members, k, state) for state in states] for k in range(2)]
        assert said[0] == said[1]
        honest, ruined = said[0][:-1], said[0][-1]
        assert honest[0] == pytest.approx(5.545, abs=0.3) and honest[-1] < honest[0] - 0.5
        candidate = ValidationCandidate(3, members.vertex(), states[-1], 4, (PeerId("0"), PeerId("1")), 2)
        candidate.said = {PeerId(str(k)): (fixed_point(losses[-1]),) for k, losses in enumerate(said)}
        low = min(map(fixed_point, honest))
        candidate.judge((low + low // 4,))
        assert candidate.opinion == "bad" and ruined > 2 * honest[-1]
        candidate.said = {PeerId(str(k)): (fixed_point(losses[-2]),) for k, losses in enumerate(said)}
        candidate.judge((low + low // 4,))
        assert candidate.opinion == "good"

    play(tmp_path, book, story)


def test_looking_changes_nothing_and_training_goes_on_between_two_batches(tmp_path: Path, book: str):
    """One swarm looks at every state while it trains, the other never: the same states, to the bit."""

    async def story(members: Members) -> None:
        (tmp_path / "b").mkdir()
        others = Members(tmp_path / "b", RECIPE, book)
        await others.begin()
        trainer, tended = members.trainers[0], members.islands[0].tended
        for _ in range(3):
            look = asyncio.create_task(looked(members, 0, members.state))
            await members.play()
            await look
            await others.play()
            assert members.state == others.state
        x_F = trainer.read_x().clone()
        trainer.child.mailbox.show(members.islands[0].head.anchor_F)
        batches = 1
        assert not trainer.ask(BeginValidation(SAMPLES)).done
        while not (said := trainer.ask(ContinueMeasurement())).done:
            batches += 1
        assert batches == SAMPLES // 64 and torch.equal(trainer.read_x(), x_F)
        with pytest.raises(TrainerCommandError, match="no measurement is in progress"):
            trainer.ask(ContinueMeasurement())
        assert said.losses == pytest.approx([await looked(members, 0, members.state)]) and tended.lives == 1

    play(tmp_path, book, story)


def test_loss_and_accuracy_are_those_that_evaluation_shows(tmp_path: Path, book: str):
    async def story(members: Members) -> None:
        await members.play()
        trainer = members.trainers[1]
        trainer.child.mailbox.show(members.islands[1].head.anchor_F)
        with trainer.child._model_at(True):
            shown = trainer.child.evaluate(SAMPLES)
        assert await looked(members, 1, members.state) == pytest.approx(shown.loss, rel=1e-6)
        assert await right(members, 1, members.state) == pytest.approx(shown.accuracy) and shown.accuracy > 0

    play(tmp_path, book, story)


def test_canaries_are_a_set_of_their_own_and_all_of_them_are_looked_at(tmp_path: Path, book: str):
    """A text that the book does not resemble: its loss is another one, and it is not learned from."""

    async def story(members: Members) -> None:
        (path := tmp_path / "canary.txt").write_text("Quick wafting zephyrs vex bold Jim. " * 300)
        settings = RunSettings(validation=StateValidationTerms(sets=2))
        founded = founding_blobs(start_of_built_in(RECIPE, book, str(path)), settings)
        learning = parse_training_spec(founded.settings)
        assert learning.canary == state_hash(founded.canary)
        island = members.islands[0]
        island.learning = learning
        await members.play()
        with pytest.raises(RunFailedError, match="E-VAL-03"):
            await looked(members, 0, members.state)
        members.stores[0].put_blob(founded.canary)
        held_out, canary = (await island.run(ValidateAsked(0, members.state))).losses
        assert held_out == await looked(members, 1, members.state) and abs(canary - held_out) > 0.05
        for _ in range(6):
            await members.play()
            island.retention._kept_since.clear()
            island.retention._replaced.clear()
        assert members.stores[0].has_blob(learning.canary)
        held_out, later = (await island.run(ValidateAsked(0, members.state))).losses
        assert later > held_out + 0.5
        with pytest.raises(PeerFault, match="other sets of data"):
            parse_training_spec(replace(founded.settings, validation=StateValidationTerms()))

    play(tmp_path, book, story)


def test_canaries_that_the_model_cannot_look_at_are_refused_before_there_is_a_run(tmp_path: Path, book: str):
    (path := tmp_path / "canary.txt").write_text("short")
    with pytest.raises(ValueError, match="5 bytes or tokens of text are too few"):
        start_of_built_in(RECIPE, book, str(path))


def test_a_state_that_is_not_here_is_an_error_in_words(tmp_path: Path, book: str):
    async def story(members: Members) -> None:
        with pytest.raises(RunFailedError, match="E-VAL-01"):
            await looked(members, 0, digest(b"elsewhere"))

    play(tmp_path, book, story)


def test_a_look_begins_again_with_a_trainer_that_was_started_anew_but_not_for_ever(tmp_path: Path, book: str):
    """As a run that goes back does it; half of a loss is never told."""

    async def story(members: Members) -> None:
        island, trainer, deaths = members.islands[0], members.trainers[0], [1, 100]
        await members.play()
        whole, does = await looked(members, 0, members.state), trainer.validate

        async def dies(work, of_F=None):
            said = await does(work, of_F)
            if deaths[0] > 0:
                deaths[0] -= 1
                island.tended.ready = False
            return said

        trainer.validate = dies
        assert await looked(members, 0, members.state) == whole and deaths.pop(0) == 0
        with pytest.raises(RunFailedError, match="E-VAL-02"):
            await looked(members, 0, members.state)

    play(tmp_path, book, story)


def test_states_that_validation_needs_stay_whatever_else_is_tidied_away(tmp_path: Path, book: str):
    """Twelve rounds later nothing else would keep it; audits' own wishes are beside the point."""

    async def story(members: Members) -> None:
        island, store = members.islands[0], members.stores[0]
        island.retention._retention.keep = KeepSection(newest=0, every_rounds=1000, bytes_max=0)
        await members.play()
        good = members.state
        await island.run(PinBlobs((good,), "validation"))
        await island.run(PinBlobs((), "audits"))
        for _ in range(6):
            await members.play()
            island.retention._kept_since.clear()  # a minute went by
            island.retention._replaced.clear()
        assert store.has_blob(good)
        await island.run(PinBlobs((), "validation"))
        await members.play()
        island.retention._kept_since.clear()
        island.retention._replaced.clear()
        await members.play()
        assert not store.has_blob(good)

    play(tmp_path, book, story)


def test_the_file_says_how_often_and_how_wide_and_nothing_by_default():
    plain = load_config(None, (), {})
    assert settings_of(plain, recipe_of(plain)).validated is None
    config = load_config(None, ("run.validate_every=2", "run.validate_margin=0.5"), {})
    settings = settings_of(config, recipe_of(config))
    assert settings.validated == StateValidationTerms(every=2, margin_percent=50)
    assert replace(settings, learning=b"") == replace(
        settings_of(plain, recipe_of(plain)), validation=StateValidationTerms(2, 50)
    )
    assert RunSettings().validated is None
    config = load_config(None, ("run.validate_every=1", "data.canary=some.txt"), {})
    assert settings_of(config, recipe_of(config)).validated == StateValidationTerms(sets=2)
    for useless in ("data.canary=some.txt", "run.validate_margin=0.5"):
        with pytest.raises(UsageError, match=f"E-CFG-10.*{useless.split('=')[0]} changes nothing"):
            load_config(None, (useless,), {})
