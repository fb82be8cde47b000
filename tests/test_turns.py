"""Who is spoken to again now: in a small swarm everybody, in a large one a few, and in time all."""

from __future__ import annotations

from atoll.base.limits import COMMITTEE_MAX
from atoll.base.round_robin import AT_ONCE, round_robin


def test_in_a_large_swarm_all_who_are_silent_are_spoken_to_in_turn():
    """Fifty of a hundred: a few at a time, each of them within as many turns as that takes."""
    silent = list(range(50))
    turns = [list(round_robin(silent, 100, turn)) for turn in range(7, 7 + -(-50 // AT_ONCE))]
    assert all(len(spoken) == AT_ONCE for spoken in turns)
    assert {peer for spoken in turns for peer in spoken} == set(silent)


def test_few_are_spoken_to_at_once():
    assert list(round_robin(range(COMMITTEE_MAX), COMMITTEE_MAX, 3)) == list(range(COMMITTEE_MAX))
    assert list(round_robin(range(AT_ONCE), 100, 3)) == list(range(AT_ONCE))
