"""Position of a run in its rate schedules: by steps, or by tokens learned by the swarm.

Without a horizon the position is the number of inner steps of one worker (`SharedState.steps`). With a horizon it
is tokens (`SharedState.tokens`), and the run's nominal steps are spread over the horizon's tokens. Members that
join, leave or take fewer steps then move the rates exactly as far as they move the learning. Within a round a
worker assumes the plan's total of all members; the next round begins at the position in the agreed state.
Invariants:
- Integers only: every peer and every auditor computes the same step.
- If members take exactly the steps that the horizon assumes, both positions give the same rates, step by step.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.state import SharedState

Many = Annotated[int, msgspec.Meta(ge=1)]


class ScheduleHorizon(msgspec.Struct, frozen=True):
    steps: Many  # nominal steps of one worker over the whole run; rates are functions of them
    tokens: Many  # tokens of all workers, over which the steps are spread


def horizon_of(recipe: Recipe) -> ScheduleHorizon | None:
    """The horizon of the recipe; None: rates follow steps."""
    total = recipe.schedule.total_tokens
    return None if total is msgspec.UNSET else ScheduleHorizon(recipe.schedule.steps, total)


def position_of(recipe: Recipe, state: SharedState) -> int:
    """The run's position at an agreed state."""
    return state.steps if horizon_of(recipe) is None else state.tokens


def later(horizon: ScheduleHorizon | None, position: int, steps: int, tokens_per_step: int) -> int:
    """The position after `steps` steps of a worker, while all workers together learn from `tokens_per_step` per
    step.
    """
    return position + (steps if horizon is None else steps * tokens_per_step)


def step_at(horizon: ScheduleHorizon | None, position: int) -> int:
    """The step of the run, counted from 0, that sets the rates at a position."""
    return position if horizon is None else position * horizon.steps // horizon.tokens


def step_of_run(recipe: Recipe, state: SharedState) -> int:
    """The same at an agreed state, for the outer step that comes next."""
    return step_at(horizon_of(recipe), position_of(recipe, state))
