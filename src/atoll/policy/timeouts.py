"""How long a round waits for members that keep silent: by how long agreed rounds have shown to be.

A round's *window* is what one owner of a part has to gather and answer; the plan reckons the end of training with
it, too. Genesis names the longest. Where it names a shortest as well, every vertex holds the window of the round
after it, which every voter works out from the vertex before and from the times in this one: half as much again as
the round took beside its training, so that silence costs some rounds' time instead of a fixed one.
Promises: the window stays between the two that genesis names; it does not fall while attempts fail, deadlines
pass or members are missing, and to no less than two thirds in any one round. Never looks at a clock: what is slow
shows in a vertex first.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.base.ids import Seconds

# each failed attempt, and each round that may have been too short for somebody, gives half as much more; and a
# window shrinks by no more in one round, so that one proposer that lies about the time makes nobody late
GROWTH = 1.5
# times what a round took beside its training; two windows more pass before, until training is over, so a round may
# take four times as long as the last one before anybody is late: a busy moment is no silence
MARGIN = 1.5


@dataclass(frozen=True)
class RoundTiming:
    """What a vertex shows of how its round went."""

    took_s: Seconds  # from the proposal before to its own
    training_s: Seconds  # of these, in which the median contributor trained: the slowest may say what it likes
    attempt: int
    late: bool  # a deadline of its first attempt had passed
    whole: bool  # all whose updates are waited for count in it
    excused: bool  # it was late for owners that were passed over, and nobody is complained of for that


def next_window(window_s: Seconds, shown: RoundTiming, shortest_s: Seconds, longest_s: Seconds) -> Seconds:
    """The window of the next round, after one with this window that went like this; to the millisecond."""
    if shown.attempt > 0:
        return longest_s
    if not shown.whole or (shown.late and not shown.excused):
        wanted_s = window_s * GROWTH  # how long whoever was late would have taken is not known
    elif shown.late:
        wanted_s = window_s
    else:
        wanted_s = max(MARGIN * (shown.took_s - shown.training_s), window_s / GROWTH)
    return within(round(wanted_s, 3), shortest_s, longest_s)


def within(window_s: Seconds, shortest_s: Seconds, longest_s: Seconds) -> Seconds:
    """Of whatever number stands in a vertex, also of one that is none: what genesis allows."""
    return min(max(shortest_s, window_s), longest_s)


def patience_shown(had_s: Seconds, window_s: Seconds, longest_s: Seconds) -> float:
    """What it weighs against an owner that it failed though it had so long, with this window as the end of it.

    1 in the longest window, else as often as it had that one: so whoever is slow is given as much time in all,
    before anybody complains, as if the others had never been quick.
    """
    return 1.0 if window_s >= longest_s else had_s / longest_s
