"""Synchronization schedule: when members synchronize, and which slice of the model (fragments, overlap, phases).

A fragment is a range of the flat vector that is sent together. Fragments take turns within a round, which lowers
the peak rate. With an overlap a fragment is applied some steps after it was sent, and training never waits. In a
real run every turn is an agreed round of its own (`turn_of`), and the overlap bounds the steps that a trainer takes
while it waits for agreement.
Invariants:
- Pure arithmetic on the run's step: every member computes the same schedule.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from atoll.base.arguments import Count, Share, Whole
from atoll.training.exchange.layout import ModelLayout
from atoll.training.recipe.update import Bounds

# separator of two codecs; a colon before a number ("topk:0.1", "topk:64/4096", "zstd:3") belongs to a codec's name
BETWEEN_CODECS = re.compile(r":(?!\d[\d./e-]*(?:[:+]|$))", re.ASCII)


class SyncSchedulePhase(msgspec.Struct, frozen=True):
    """A later part of the run with another rhythm: shorter rounds, or finer codecs."""

    since: Share  # share of the run's steps, 0 … 1
    inner_steps: Count
    up: str = ""  # empty: as before
    down: str = ""


class SyncSchedule(msgspec.Struct, frozen=True):
    """When peers synchronize: after `inner_steps`, or earlier if the plan's time is up."""

    inner_steps: Count = 50  # H; a larger H sends fewer bytes and moves further from synchronous training
    rounds: Whole = 30
    fragments: Count = 1  # each synchronizes once per round, inner_steps / fragments steps after the one before
    overlap: Whole = 0
    """tau: steps between sending and applying; 0 waits. Below inner_steps, and in real runs below those of a turn,
    since they have one fragment in flight.
    """
    phases: tuple[SyncSchedulePhase, ...] = ()
    closing: str = ""  # codec of one last average of live parameters, both ways; empty: no such average
    moments: tuple[Whole, Whole] = (0, 0)  # rounds between averages of inner moments (first, second); 0: never
    epochs: Count | UnsetType = UNSET
    """Passes per round that a member makes over its own data; inner_steps then bounds its steps. Unset: inner_steps
    for every member.
    """
    total_tokens: Annotated[int, Meta(ge=1, lt=2**62)] | UnsetType = UNSET
    """Tokens of all members over which rates fall (lr_position.py). Unset: rates fall over `steps`."""

    @property
    def steps(self) -> int:
        return self.rounds * self.inner_steps

    def steps_of(self, pass_steps: int) -> int:
        """Steps per round of a member with `pass_steps` steps of data."""
        return self.inner_steps if self.epochs is UNSET else min(self.epochs * pass_steps, self.inner_steps)

    @property
    def turns(self) -> int:
        """Agreed rounds of a real run: each carries one fragment."""
        return sum(rounds for rounds, _ in phase_rounds(self)) if self.phases else self.rounds * self.fragments

    @property
    def turn_steps(self) -> int:
        """Inner steps of each turn, without phases."""
        return self.inner_steps // self.fragments

    def begun(self, turns: int) -> int:
        """Steps of the run before turn number `turns`."""
        if not self.phases:
            return turns * self.turn_steps
        taken = 0
        for rounds, steps in phase_rounds(self):
            taken += min(turns, rounds) * steps
            turns -= min(turns, rounds)
        return taken


def fragments_of(layout: ModelLayout, count: int) -> Bounds:
    """[lo, hi) of `count` fragments of about equal size, cut between tensors. ValueError if there are too few
    tensors.
    """
    ends = [slot.at + slot.size for slot in layout.slots if slot.kind != "counter"]
    if count > len(ends):
        raise ValueError(f"a model of {len(ends)} tensors cannot be cut into {count} fragments")
    cuts = [0]
    for index in range(1, count):
        wanted = layout.floats * index / count
        room = [end for end in ends if end > cuts[-1]][: -(count - index)]
        cuts.append(min(room, key=lambda end: abs(end - wanted)))
    return tuple(pairwise([*cuts, layout.floats]))


def turn_of(schedule: SyncSchedule, layout: ModelLayout, done: int) -> tuple[int, int]:
    """[lo, hi) that the round after `done` rounds carries: fragments in the order of `due`, at the end the whole
    model.

    Behind the model lie moments.
    """
    if schedule.fragments == 1 or done + 1 == schedule.turns:
        return 0, layout.floats + moments_due(schedule, done) * layout.parameters
    return fragments_of(layout, schedule.fragments)[(done + 1) % schedule.fragments]


def moments_due(schedule: SyncSchedule, done: int) -> int:
    """Number of inner moments that the round after `done` rounds averages: 0, 1 (first) or 2."""
    first, second = schedule.moments
    return 0 if not first or (done + 1) % first else 1 if (done + 1) % second else 2


def longest_turn(schedule: SyncSchedule, layout: ModelLayout) -> int:
    """The largest number of values that a round carries."""
    return layout.floats + (2 * layout.parameters if any(schedule.moments) else 0)


def phase_at(schedule: SyncSchedule, step: int, steps: int) -> tuple[int, SyncSchedulePhase]:
    """(first step, phase) in effect after `step` steps of a run of `steps`."""
    found = (0, SyncSchedulePhase(0.0, schedule.inner_steps))
    for phase in schedule.phases:
        begins = round(phase.since * steps)
        if step > begins:
            found = (begins, phase)
    return found


def phase_rounds(schedule: SyncSchedule) -> tuple[tuple[int, int], ...]:
    """(rounds, steps of each) in order, for phases that change the round length; whole models only.

    The remainder of a phase goes into the first round of the next one, and the remainder of the run into one more
    round.
    """
    begins = [round(phase.since * schedule.steps) for phase in schedule.phases]
    lengths = [schedule.inner_steps, *(phase.inner_steps for phase in schedule.phases)]
    found, ended = list[tuple[int, int]](), 0
    for steps, (begin, end) in zip(lengths, pairwise([0, *begins, schedule.steps]), strict=True):
        rounds = (end - begin) // steps
        if rounds:
            found += [(1, begin + steps - ended), (rounds - 1, steps)]
            ended = begin + rounds * steps
    found.append((1, schedule.steps - ended))
    return tuple((rounds, steps) for rounds, steps in found if rounds and steps)


def parse_phases(text: str) -> tuple[SyncSchedulePhase, ...]:
    """Phases from since:inner_steps[:up[:down]], separated by commas: "0.8:16,0.9:8:topk:0.1:int8". ValueError if
    malformed.
    """
    found = list[SyncSchedulePhase]()
    for piece in filter(None, text.split(",")):
        since, steps, codecs, *_ = [*piece.split(":", 2), "", ""]
        up, down, *more = [*BETWEEN_CODECS.split(codecs), "", ""]
        try:
            found.append(SyncSchedulePhase(float(since), int(steps), up, down))
        except ValueError:
            more = [piece]
        if any(more):
            raise ValueError(f"{piece!r} is no phase: a phase is since:inner_steps[:up[:down]], such as 0.9:8:int8")
    return tuple(found)


def due(schedule: SyncSchedule, step: int, steps: int) -> tuple[int, ...]:
    """Fragments that are sent after `step` steps; at the end of the run, all of them."""
    if step == steps:
        return tuple(range(schedule.fragments))
    begins, phase = phase_at(schedule, step, steps)
    apart = phase.inner_steps / schedule.fragments
    within = (step - begins) % phase.inner_steps
    return tuple(f for f in range(schedule.fragments) if step > begins and within == int(f * apart))


def check_schedule(schedule: SyncSchedule) -> None:
    """ValueError if the numbers do not fit each other."""
    shortest = min([schedule.inner_steps, *(phase.inner_steps for phase in schedule.phases)])
    if min(schedule.rounds, shortest, schedule.fragments) < 1 or schedule.overlap < 0:
        raise ValueError(
            "rounds, inner_steps (also of phases) and fragments must be at least 1, overlap at least 0"
        )
    if schedule.epochs is not UNSET and (schedule.epochs < 1 or schedule.fragments > 1 or schedule.overlap):
        raise ValueError("epochs, passes over a member's own data, are at least 1: fragments=1, overlap=0")
    if schedule.fragments > shortest:
        raise ValueError(f"{schedule.fragments} fragments do not fit rounds of {shortest} steps")
    if schedule.overlap and schedule.overlap >= shortest:
        raise ValueError(
            f"an overlap of {schedule.overlap} steps needs more than {schedule.overlap} steps per round, or a "
            f"fragment would be sent again while it is under way; a round has {shortest}"
        )
    since = [phase.since for phase in schedule.phases]
    if since != sorted(since) or any(not 0 < at < 1 for at in since):
        raise ValueError("phases begin in order, each after 0 and before 1 (shares of the run)")
