"""When an experiment's rounds end, of how many samples their steps are, and where the run stands in its rates.

By the recipe's schedule, or by the very rules that plans of real rounds follow (`base/workload.py`): what a vertex
would hold is kept here. Counts in steps of the run's clock; never trains and never decides who counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from atoll.base.workload import (
    RoundWorkload,
    WorkloadPolicy,
    WorkloadProgress,
    effort_problem,
    fastest_of,
    quota_of,
    reached_after,
    steps_at,
)
from atoll.training.experiment.faults import FaultSpec
from atoll.training.recipe.lr_position import horizon_of, later, step_at
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.schedule import SyncSchedule, due


class RoundClock:
    def __init__(
        self, recipe: Recipe, steps: int, peers: int, effort: WorkloadPolicy | None, trouble: FaultSpec
    ) -> None:
        self.recipe = recipe  # of the round under way: its batch
        self.trouble = trouble
        self.steps, self.peers, self.effort = steps, peers, effort
        self.horizon = horizon_of(recipe)
        self.began = 0  # steps of the run before the round under way
        self.dealt = 0  # samples handed out to all workers before it
        self.tokens = 0  # that those learned from whose updates counted
        self.members = peers  # of the round under way, as it began
        self.whole = True  # the last round took all its steps
        self._taken = [0] * peers  # samples since each worker's last round
        self._quota: RoundWorkload | None = None  # None: between two rounds
        self._own: dict[int, int] = {}  # steps of each member in it, where these follow its speed
        self._reached: WorkloadProgress | UnsetType = UNSET

    def go_on(self, members: Sequence[int]) -> None:
        """Before every step: if a round begins with it, these members take part."""
        if self._quota is not None:
            return
        self.members = len(members)
        effort, inner_steps = self.effort or UNSET, self.recipe.schedule.inner_steps
        self._quota = quota_of(effort, inner_steps, self._reached, self.members)
        self._own = self._by_speed(members) if self.effort is not None and self.effort.by_speed is True else {}
        if self._quota.batch not in (0, self.recipe.batch):
            self.recipe = replace(self.recipe, batch=self._quota.batch)

    def takes(self, peer: int, step: int) -> bool:
        """Whether it takes this step of the run: as fast as it is, or its own steps of the round and no more."""
        if peer not in self._own:
            return self.trouble.takes_step(peer, step)
        return step - self.began <= self._own[peer]  # all end together, so it does not matter when it takes them

    def place(self, peer: int, cursor: int) -> int:
        """Where in its share of the data it reads on. Where steps go by speed a round begins behind all that the
        one before handed out, as real ones do; else at its own `cursor`."""
        return self.dealt // self.peers + self._taken[peer] if peer in self._own else cursor

    def came(self, peer: int) -> None:
        """Back from an absence, with nothing of what it did before."""
        self._taken[peer] = 0

    def took(self, peer: int) -> None:
        """A step."""
        self._taken[peer] += self.recipe.batch

    def due(self, step: int) -> tuple[int, ...]:
        """The fragments that are sent after so many steps of the run."""
        if self.effort is None:
            return due(self.recipe.schedule, step, self.steps)
        return (0,) if step == self.steps or step >= self.began + self._steps else ()

    def rate_step(self, step: int) -> int:
        """The step whose inner rate holds at the step of the run that comes after so many."""
        if self.horizon is None:
            return step
        together = self.recipe.batch * self.recipe.seq_len * self.members
        return step_at(self.horizon, later(self.horizon, self.tokens, step - self.began, together))

    def outer_step(self, begun: int) -> int:
        """The same for the outer step of the round under way, `begun` by the recipe's schedule."""
        if self.horizon is not None:
            return step_at(self.horizon, self.tokens)
        regular = self.effort is None and not self.recipe.schedule.phases
        return begun if regular else self.began

    def closed(self, step: int, members: Sequence[int], losses: Mapping[int, Sequence[float]]) -> None:
        """A round ended after so many steps of the run; `losses` of those who count, step by step."""
        taken = {peer: self._taken[peer] for peer in losses}
        if self.effort is not None:
            most = self._steps * self.recipe.batch  # as agreed states count, where rates go by them
            taken = {peer: min(samples, most) for peer, samples in taken.items()}
            means = [sum(each) / len(each) for each in losses.values() if each]
            inner_steps = self.recipe.schedule.inner_steps
            self._reached = reached_after(self.effort, inner_steps, self._reached, means)
            self.whole = step == self.began + self._steps
        self.tokens += sum(taken.values()) * self.recipe.seq_len
        self.dealt += (step - self.began) * self.recipe.batch * self.peers
        self.began, self._quota = step, None
        for peer in members:
            self._taken[peer] = 0

    def _by_speed(self, members: Sequence[int]) -> dict[int, int]:
        """Steps of this round that these members are asked for, as in plans of real ones."""
        assert self._quota is not None and self.effort is not None
        steps_s = {peer: 1.0 / self.trouble.speed(peer) for peer in members}
        fastest_s = fastest_of(list(steps_s.values()), liars=0)
        if fastest_s is None:
            return {}
        steps, least = self._quota.steps, self.effort.steps_min
        return {peer: steps_at(step_s, fastest_s, steps, least) for peer, step_s in steps_s.items()}

    @property
    def _steps(self) -> int:
        assert self._quota is not None
        return self._quota.steps


def misfit(effort: WorkloadPolicy, recipe: Recipe) -> str:
    """Why an experiment with this recipe cannot go by it; empty if it can."""
    schedule, whole = recipe.schedule, recipe.reducer.group == "all" and not recipe.own_anchors
    plain = SyncSchedule(schedule.inner_steps, schedule.rounds, total_tokens=schedule.total_tokens)
    if schedule != plain or not whole:
        return "it takes fragments=1, overlap=0, no phases or closing averages, and members that reduce together"
    if effort.batch != recipe.batch:
        return f"it begins with batches of {effort.batch}, the recipe with {recipe.batch}"
    return effort_problem(effort, schedule.inner_steps)
