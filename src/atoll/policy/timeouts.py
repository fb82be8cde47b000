"""Adaptive windows: how long a round waits for silent owners, from the duration of agreed rounds.

A *window* is the time of one owner to gather and answer. `plan.py` adds windows to the time of training. Genesis
fixes the longest. If it fixes a shortest as well, every vertex holds the window of the next round, computed by
every voter from the parent and from the times in the vertex: 1.5 times what the round took beside its training. So
silence costs a few rounds' time instead of a fixed one.

Invariants:
- The window stays between the two of genesis.
- It does not shrink while attempts fail, deadlines pass or members are missing, and at most by a third per round.
- No clock is read: a slow member shows in a vertex first.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.base.ids import Seconds

# growth per failed attempt and per round that may have been too short for a member; also the largest shrinkage per
# round, so that a proposer that lies about the time makes no member late
GROWTH = 1.5
# factor on the round's time beside training; two more windows pass before training ends, so a round may take four
# times as long as the last one before a member is late: a busy moment is no silence
MARGIN = 1.5


@dataclass(frozen=True)
class ObservedRoundTiming:
    """Timing of a round as shown by its vertex."""

    took_s: Seconds  # from the parent's proposal to its own
    training_s: Seconds  # training time of the median contributor in it: the slowest may claim anything
    attempt: int
    late: bool  # a deadline of its first attempt passed
    whole: bool  # every awaited update counts
    excused: bool  # late only because of skipped owners, which draws no complaints


def next_window(window_s: Seconds, shown: ObservedRoundTiming, shortest_s: Seconds, longest_s: Seconds) -> Seconds:
    """The window of the next round, rounded to the millisecond."""
    if shown.attempt > 0:
        return longest_s
    if not shown.whole or (shown.late and not shown.excused):
        wanted_s = window_s * GROWTH  # the time that the late member needed is unknown
    elif shown.late:
        wanted_s = window_s
    else:
        wanted_s = max(MARGIN * (shown.took_s - shown.training_s), window_s / GROWTH)
    return within(round(wanted_s, 3), shortest_s, longest_s)


def within(window_s: Seconds, shortest_s: Seconds, longest_s: Seconds) -> Seconds:
    """Any number in a vertex, clamped to what genesis allows."""
    return min(max(shortest_s, window_s), longest_s)


def patience_shown(had_s: Seconds, window_s: Seconds, longest_s: Seconds) -> float:
    """Weight of an owner's failure after it had `had_s` seconds, with this window as its end.

    1 in the longest window, else in proportion. So before a complaint a slow owner gets as much time in total as if
    the others had never been fast.
    """
    return 1.0 if window_s >= longest_s else had_s / longest_s
