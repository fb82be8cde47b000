"""Where a run stands in its schedules of rates: by steps, or by the tokens that the swarm has learned from.

Without a horizon a position is the number of inner steps of one worker (`SharedState.steps`). With one it is tokens
(`SharedState.tokens`), and the nominal steps of the run are spread over those of the horizon: who comes, goes or
takes fewer steps moves the rates as far as it moved the learning. Within a round a worker reckons with what all
take together, as the plan has it; the next round begins where the agreed state says.
Integers only, so every peer and every auditor comes to the same step. Where members take exactly the steps that the
horizon supposes, both ways give the same rates, step by step.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.state import SharedState

Many = Annotated[int, msgspec.Meta(ge=1)]


class ScheduleHorizon(msgspec.Struct, frozen=True):
    steps: Many  # nominal, of one worker over the whole run: rates are functions of these
    tokens: Many  # of all workers, over which they are spread


def horizon_of(recipe: Recipe) -> ScheduleHorizon | None:
    """None: rates go by steps."""
    total = recipe.schedule.total_tokens
    return None if total is msgspec.UNSET else ScheduleHorizon(recipe.schedule.steps, total)


def position_of(recipe: Recipe, state: SharedState) -> int:
    """Where the run stands at an agreed state."""
    return state.steps if horizon_of(recipe) is None else state.tokens


def later(horizon: ScheduleHorizon | None, position: int, steps: int, tokens_per_step: int) -> int:
    """The position after so many steps of a worker; all workers together learn from `tokens_per_step` meanwhile."""
    return position + (steps if horizon is None else steps * tokens_per_step)


def step_at(horizon: ScheduleHorizon | None, position: int) -> int:
    """The step of the run, counted from 0, whose rates hold there."""
    return position if horizon is None else position * horizon.steps // horizon.tokens


def step_of_run(recipe: Recipe, state: SharedState) -> int:
    """The same at an agreed state, for the outer step that it takes next."""
    return step_at(horizon_of(recipe), position_of(recipe, state))
