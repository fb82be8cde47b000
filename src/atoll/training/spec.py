"""TrainingSpec: the training half of genesis, and the spec that holds in one round."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from atoll.base.ids import ATTACHED, Digest
from atoll.training.data import STDLIB, Data, data_digest, load_data
from atoll.training.exchange.layout import ModelLayout
from atoll.training.recipe.inner import GradientSumOptimizer, tuned
from atoll.training.recipe.outer import momentum_of
from atoll.training.recipe.recipes import Recipe, closing_recipe, coding_at_step, over_tokens, with_length
from atoll.training.recipe.schedule import turn_of
from atoll.training.recipe.state import SharedState
from atoll.training.recipe.update import RoundCodingInputs
from atoll.wire.messages.statements import ChangedSettings


class TrainingSpec(msgspec.Struct, frozen=True):
    """The training half of genesis, encoded in `RunSettings.learning`."""

    recipe: Recipe
    data: str  # label for people: "stdlib", "attached", or the name of the founder's file; never a path to open
    data_blob: Digest  # name of the data set's blob
    layout: ModelLayout  # names, shapes and dtypes that every member's model must have
    canary: Digest | UnsetType = UNSET  # blob of more held-out data, which validators measure too
    tokenizer: Digest | UnsetType = UNSET  # blob of the tokenizer.json that made the data; unset: bytes are tokens
    base: Digest | UnsetType = UNSET  # blob of a built-in model's frozen parameters; unset: nothing is frozen

    @property
    def beside(self) -> list[Digest]:
        """Blobs that every member fetches besides the data."""
        return [blob for blob in (self.canary, self.tokenizer, self.base) if blob is not UNSET]

    def turn(self, before: SharedState) -> tuple[int, int]:
        """[lo, hi) of the vector that the round after this state carries."""
        return turn_of(self.recipe.schedule, self.layout, before.round)

    def recipe_after(self, before: SharedState) -> Recipe:
        """The recipe of the round after this state; the last round may be a closing average."""
        return self.recipe_at(before.round)

    def recipe_at(self, done: int) -> Recipe:
        """The recipe of the round after `done` rounds."""
        recipe, schedule = self.recipe, self.recipe.schedule
        if schedule.closing and done + 1 == schedule.turns:
            return closing_recipe(recipe)
        if not schedule.phases:
            return recipe
        coding = coding_at_step(recipe, schedule.begun(done + 1), schedule.steps)
        return msgspec.structs.replace(recipe, coding=coding)

    def round_inputs(self, round: int, before: SharedState, name: Digest) -> RoundCodingInputs:
        """Inputs that all members of this round share; `before` is the state of this name that it builds on."""
        return RoundCodingInputs(round, before, name, self.layout, momentum_of(self.recipe.outer))


def local_data(learning: TrainingSpec) -> Data | None:
    """The data set, if it is made of this Python's own library; None: the blob has to be fetched.

    Opens no other file: else the founder would choose what is read on every member's disk.
    """
    if learning.data != STDLIB:
        return None
    try:
        data = load_data(STDLIB)
    except (ValueError, OSError):
        return None
    return data if data_digest(data) == learning.data_blob else None


def spec_after(learning: TrainingSpec, changed: ChangedSettings | UnsetType) -> TrainingSpec:
    """The spec of the round after a vertex with these changed numbers; `learning` is the spec of genesis.

    Total, with the same result at all members: a number that the recipe does not have changes nothing.
    """
    if changed is UNSET:
        return learning
    to, recipe = changed.to, _timed(learning.recipe, changed)
    if to.total_tokens is not UNSET:
        recipe = over_tokens(recipe, to.total_tokens)
    if to.lr is not UNSET and recipe.model != ATTACHED:
        if isinstance(recipe.inner, GradientSumOptimizer):  # the outer step is the optimizer
            recipe = replace(recipe, outer=_with_rate(recipe.outer, to.lr))
        else:
            recipe = replace(recipe, inner=tuned(recipe.inner, lr=to.lr))
    if to.outer_lr is not UNSET and not isinstance(recipe.inner, GradientSumOptimizer):
        recipe = replace(recipe, outer=_with_rate(recipe.outer, to.outer_lr))
    return replace(learning, recipe=recipe)


def _timed(recipe: Recipe, changed: ChangedSettings) -> Recipe:
    """The recipe with changed rounds and steps. Learning rates fall over past and future steps, or over tokens."""
    to, schedule = changed.to, recipe.schedule
    if to.rounds in (UNSET, 0) and to.inner_steps is UNSET:
        return recipe
    rounds = to.rounds // schedule.fragments if to.rounds else schedule.rounds
    steps = schedule.inner_steps if to.inner_steps is UNSET else to.inner_steps * schedule.fragments
    timed = replace(schedule, rounds=rounds, inner_steps=steps)
    if recipe.model == ATTACHED:
        return replace(recipe, schedule=timed)
    total = changed.steps + max(0, timed.turns - changed.trained) * timed.turn_steps
    total = timed.steps if schedule.total_tokens is not UNSET else total
    return replace(with_length(recipe, max(1, total)), schedule=timed)


def _with_rate(outer: Any, lr: float) -> Any:
    return replace(outer, lr=lr) if "lr" in outer.__struct_fields__ else outer
