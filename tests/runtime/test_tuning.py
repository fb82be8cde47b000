"""What islands and owners make of changed numbers: the run goes on as one that was founded with them."""

from __future__ import annotations

import pytest
from members import Members, recipe_for, story
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from atoll.base.errors import UsageError
from atoll.peer.config.sections import keys
from atoll.peer.governance.settings_change import WORDS
from atoll.peer.settings import RunSettings
from atoll.runtime.control.settings_change import (
    KEYS,
    by_key,
    fixed_reason,
    numbers_from,
    problem,
)
from atoll.runtime.training_spec import founding_blobs, parse_training_spec, start_of_built_in
from atoll.training.recipe.inner import rate_at, tuned
from atoll.training.recipe.methods import data_parallel
from atoll.training.recipe.recipes import Recipe, diloco
from atoll.training.spec import TrainingSpec, spec_after
from atoll.wire.messages.statements import ChangeableSettings, ChangedSettings

THIRDS = {"fragments": 3, "overlap": 2, "merge": "delta"}


def test_rounds_after_a_change_are_those_of_a_run_that_was_founded_with_the_numbers(tmp_path, book):
    """Other rates and twice the rounds from the first vertex on, told to trainers that run already: to the bit."""
    changed = ChangedSettings(ChangeableSettings(rounds=6 * THIRDS["fragments"], lr=0.001, outer_lr=0.5), 0, 0)
    founded, wanted = recipe_for(THIRDS, rounds=3), recipe_for(THIRDS, rounds=6)
    founded = replace(founded, inner=tuned(founded.inner, warmup_steps=2))
    wanted = replace(wanted, inner=tuned(wanted.inner, warmup_steps=2, lr=0.001))
    wanted = replace(wanted, outer=replace(wanted.outer, lr=0.5))
    states: list[list[bytes]] = []
    for recipe, said in ((founded, changed), (wanted, UNSET)):

        async def tell(members: Members, said: ChangedSettings | UnsetType = said) -> None:
            for island in members.islands:
                await island.warm_up()
                island.tuned_before = lambda round: said
            states.append([])
            for _ in range(2):
                await members.play()
                states[-1].append(members.state)

        story(tell, Members(tmp_path / str(len(states)), recipe, book))
    assert states[0] == states[1]


def learning_of(recipe: Recipe, book: str) -> TrainingSpec:
    return parse_training_spec(founding_blobs(start_of_built_in(recipe, book), RunSettings()).settings)


def test_rates_fall_over_the_steps_that_were_taken_and_those_to_come(book):
    """Ten rounds of 50 steps, then ten of 20: after 700 steps the rate is at its floor, and was not before."""
    before = learning_of(diloco("gpt-nano", rounds=30, seq_len=16), book)
    after = spec_after(before, ChangedSettings(ChangeableSettings(rounds=20, inner_steps=20), 10, 500)).recipe
    assert (after.schedule.turns, after.schedule.turn_steps) == (20, 20)
    assert rate_at(after.inner, 700) == pytest.approx(after.inner.floor * after.inner.lr)
    assert rate_at(after.inner, 600) > 1.5 * rate_at(after.inner, 700)
    assert spec_after(before, ChangedSettings(ChangeableSettings(owner_s=9.0), 10, 500)) == before
    each = data_parallel("gpt-nano", rounds=30, seq_len=16, lr=0.003)
    assert (
        spec_after(learning_of(each, book), ChangedSettings(ChangeableSettings(lr=0.1), 3, 3)).recipe.outer.lr
        == 0.1
    )


def test_people_write_keys_of_run_toml_and_are_told_why_others_stay():
    """A run of three fragments has three agreed rounds to one of these; every key of the file has an answer."""
    texts = ["run.rounds=20", "train.inner_steps=30", "consensus.timeout=1min", "train.lr=0.002"]
    to = numbers_from(texts, 3)
    assert to == ChangeableSettings(rounds=60, inner_steps=10, owner_s=12.0, lr=0.002)
    assert by_key(to, 3) == {
        "run.rounds": 20,
        "consensus.timeout": 60.0,
        "train.inner_steps": 30,
        "train.lr": 0.002,
    }
    assert {KEYS[key].number for key in KEYS} == set(ChangeableSettings.__struct_fields__) == set(WORDS)
    assert all(fixed_reason(key) for key in keys())
    for text, told in (
        ("model.name=gpt-tiny", "shape"),
        ("keep.newest=3", "run.toml"),
        ("train.inner_steps=32", "write train.inner_steps = 33"),
        ("run.audit_rate=0", "run.audit_rate is a number that this run may change, and not switch off"),
        ("consensus.timeout=1e9", "consensus.timeout is more than members agree on"),
        ("train.lr=-1", "train.lr"),
        ("lr=0.1", "did you mean train.lr"),
        ("train.lr", "no value"),
    ):
        with pytest.raises(UsageError) as caught:
            numbers_from([text], 3)
        assert told in str(caught.value) + caught.value.cause + caught.value.fix, text


def test_what_a_recipe_cannot_do_is_refused_before_anybody_hears_of_it(book):
    overlapping, each = (
        learning_of(recipe_for(THIRDS), book),
        learning_of(data_parallel("gpt-nano", seq_len=16), book),
    )
    for learning, to, told in (
        (overlapping, ChangeableSettings(inner_steps=2), "overlap"),
        (each, ChangeableSettings(outer_lr=0.5), "train.outer_lr: its recipe has none"),
        (each, ChangeableSettings(inner_steps=2), "every step is a round"),
    ):
        assert told in problem(learning, RunSettings(), ChangedSettings(to, 1, 4))
    assert (
        problem(overlapping, RunSettings(), ChangedSettings(ChangeableSettings(inner_steps=6, lr=0.1), 1, 4)) == ""
    )
