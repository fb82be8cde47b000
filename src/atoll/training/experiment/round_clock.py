"""Round clock of an experiment: ends of rounds, batch sizes and the position in the rate schedules.

Rounds follow the recipe's schedule, or the rules of real plans (`base/workload.py`). The clock keeps the counters
that a vertex holds in a real run, in steps of the run's clock.
Not responsible for: training, deciding which updates count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from atoll.base.workload import (
    AdaptiveWorkloadPolicy,
    AdaptiveWorkloadState,
    RoundWorkload,
    effort_problem,
    fastest_of,
    progress_after,
    steps_at,
    workload_of,
)
from atoll.training.experiment.faults import FaultSpec
from atoll.training.recipe.lr_position import horizon_of, later, step_at
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.schedule import SyncSchedule, due


class RoundSchedule:
    def __init__(
        self, recipe: Recipe, steps: int, peers: int, effort: AdaptiveWorkloadPolicy | None, trouble: FaultSpec
    ) -> None:
        self.recipe = recipe  # recipe of the round in progress, with its batch size
        self.trouble = trouble
        self.steps, self.peers, self.effort = steps, peers, effort
        self.horizon = horizon_of(recipe)
        self.began = 0  # steps of the run before the round in progress
        self.dealt = 0  # samples handed out to all members before it
        self.tokens = 0  # tokens learned by counted members
        self.members = peers  # members at the start of the round in progress
        self.whole = True  # the last round took all its steps
        self._taken = [0] * peers  # samples of each member since its last round
        self._quota: RoundWorkload | None = None  # None: between two rounds
        self._own: dict[int, int] = {}  # steps of each member in this round, if they follow its speed
        self._reached: AdaptiveWorkloadState | UnsetType = UNSET

    def begin_round(self, members: Sequence[int]) -> None:
        """Called before every step. If a round begins with it, `members` take part."""
        if self._quota is not None:
            return
        self.members = len(members)
        effort, inner_steps = self.effort or UNSET, self.recipe.schedule.inner_steps
        self._quota = workload_of(effort, inner_steps, self._reached, self.members)
        self._own = self._by_speed(members) if self.effort is not None and self.effort.by_speed is True else {}
        if self._quota.batch not in (0, self.recipe.batch):
            self.recipe = replace(self.recipe, batch=self._quota.batch)

    def takes_step(self, peer: int, step: int) -> bool:
        """Whether `peer` trains in this step of the run: by its speed, or up to its own number of steps."""
        if peer not in self._own:
            return self.trouble.takes_step(peer, step)
        return step - self.began <= self._own[peer]  # all end together, so the order of its steps does not matter

    def cursor_of(self, peer: int, cursor: int) -> int:
        """Position of the member's next sample in its share.

        If steps go by speed, a round begins after all samples of the round before, as in real rounds. Otherwise it
        begins at the member's own `cursor`.
        """
        return self.dealt // self.peers + self._taken[peer] if peer in self._own else cursor

    def drop_samples(self, peer: int) -> None:
        """Restart after an absence: earlier samples are dropped."""
        self._taken[peer] = 0

    def count_step(self, peer: int) -> None:
        """Count one step of `peer`."""
        self._taken[peer] += self.recipe.batch

    def due(self, step: int) -> tuple[int, ...]:
        """Fragments that are sent after `step` steps of the run."""
        if self.effort is None:
            return due(self.recipe.schedule, step, self.steps)
        return (0,) if step == self.steps or step >= self.began + self._steps else ()

    def rate_step(self, step: int) -> int:
        """Schedule step that sets the inner rate after `step` steps of the run."""
        if self.horizon is None:
            return step
        together = self.recipe.batch * self.recipe.seq_len * self.members
        return step_at(self.horizon, later(self.horizon, self.tokens, step - self.began, together))

    def outer_step(self, begun: int) -> int:
        """Step of the schedule for the outer step of the round in progress; `begun` is that of the recipe's
        schedule.
        """
        if self.horizon is not None:
            return step_at(self.horizon, self.tokens)
        regular = self.effort is None and not self.recipe.schedule.phases
        return begun if regular else self.began

    def end_round(self, step: int, members: Sequence[int], losses: Mapping[int, Sequence[float]]) -> None:
        """End a round after `step` steps of the run; `losses`, step by step, of the counted members."""
        taken = {peer: self._taken[peer] for peer in losses}
        if self.effort is not None:
            most = self._steps * self.recipe.batch  # as agreed states count when rates go by tokens
            taken = {peer: min(samples, most) for peer, samples in taken.items()}
            means = [sum(each) / len(each) for each in losses.values() if each]
            inner_steps = self.recipe.schedule.inner_steps
            self._reached = progress_after(self.effort, inner_steps, self._reached, means)
            self.whole = step == self.began + self._steps
        self.tokens += sum(taken.values()) * self.recipe.seq_len
        self.dealt += (step - self.began) * self.recipe.batch * self.peers
        self.began, self._quota = step, None
        for peer in members:
            self._taken[peer] = 0

    def _by_speed(self, members: Sequence[int]) -> dict[int, int]:
        """Steps that each member takes in this round, as real plans compute them."""
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


def misfit(effort: AdaptiveWorkloadPolicy, recipe: Recipe) -> str:
    """Why an experiment cannot run this recipe with `effort`; empty if it can."""
    schedule, whole = recipe.schedule, recipe.reducer.group == "all" and not recipe.own_anchors
    plain = SyncSchedule(schedule.inner_steps, schedule.rounds, total_tokens=schedule.total_tokens)
    if schedule != plain or not whole:
        return "it needs fragments=1, overlap=0, no phases or closing averages, and members that reduce together"
    if effort.batch != recipe.batch:
        return f"the effort begins with batches of {effort.batch} samples, the recipe with {recipe.batch}"
    return effort_problem(effort, schedule.inner_steps)
