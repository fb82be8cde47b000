"""Failure minimizer: delta debugging (ddmin) of the fault schedule of a failed scenario.

A smaller schedule counts if the run fails in the same way: the same message, apart from names and numbers. The
report ends with the command that replays the smallest schedule. A fault may stay in it because a scenario draws
later faults from the peers that it leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

from atoll.base.ids import Seconds
from atoll.simulation.fault_schedule import FaultSelection
from atoll.simulation.scenarios.harness import Scenario, ScenarioFailed, play

RUNS_MAX, WALL_MAX_S = 80, 120.0  # of one minimization; the run under way ends first
EVENTS_FACTOR = 2  # a run with fewer faults has at most this many times the events of the failed one


class FailureMinimizer:
    """Replays one failed run with fewer faults."""

    def __init__(
        self,
        failure: ScenarioFailed,
        scenarios: Mapping[str, Scenario],
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        self.failure, self.scenarios, self.clock = failure, scenarios, clock
        self.runs, self.until = 0, clock() + WALL_MAX_S
        self.smallest = failure

    def minimize(self) -> str:
        """The failure with its smallest schedule, the first event that a good run lacks, and the replay command."""
        before = len(self.failure.faults)
        self._shrink()
        faults = self.smallest.faults
        head = f"smallest schedule that fails like this: {len(faults)} of {before} faults, after {self.runs} runs"
        lines = [f"  {at:9.3f} s  {name}" for name, at in faults.items()]
        told = [head, *lines, *self._parting(list(faults))]
        *what, replay = str(self.smallest).splitlines()
        return "\n".join([*what, *(f"  {line}" for line in told), replay])

    def _shrink(self) -> None:
        """Drop halves, then quarters, … then single faults, as long as the run fails in the same way."""
        pieces = 1  # first without any fault
        while (names := list(self.smallest.faults)) and pieces <= len(names):
            size = -(-len(names) // pieces)
            for at in range(0, len(names), size):
                if self.runs >= RUNS_MAX or self.clock() >= self.until:
                    return
                if self._fails(names[:at] + names[at + size :]):
                    pieces = max(pieces - 1, 2)
                    break
            else:
                pieces = 2 * pieces if pieces == len(names) else min(2 * pieces, len(names))

    def _fails(self, names: Sequence[str]) -> bool:
        self.runs += 1
        found = self._play(FaultSelection(frozenset(names), events_max=EVENTS_FACTOR * self.failure.events))
        if found is None or found.kind != self.failure.kind or len(found.faults) >= len(self.smallest.faults):
            return False
        self.smallest = found
        return True

    def _parting(self, names: Sequence[str]) -> list[str]:
        """The first event at which the run parts from the run without its last fault."""
        if not names:
            return ["it fails without any fault"]
        if self.clock() >= self.until:
            return []
        bad, good = FaultSelection(frozenset(names), trace=[]), FaultSelection(frozenset(names[:-1]), trace=[])
        self._play(bad)
        is_good = self._play(good) is None
        ends = "good" if is_good else "that fails in another way"
        for ours, theirs in zip_longest(bad.trace or (), good.trace or (), fillvalue="the end"):
            if ours != theirs:
                return [f"without {names[-1]} the run is {ends}; the first event that differs:", f"  {ours}"]
        return []

    def _play(self, schedule: FaultSelection) -> ScenarioFailed | None:
        try:
            play(**self.failure.call, scenario=self.scenarios[self.failure.call["name"]], faults=schedule)
        except ScenarioFailed as found:
            return found
        return None
