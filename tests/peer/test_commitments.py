"""Evidence of a double commitment: which voters send it to an owner."""

from __future__ import annotations

from collections import Counter

from atoll.base.ids import PeerId
from atoll.base.limits import COMMITTEE_MAX
from atoll.crypto.digest import digest
from atoll.peer.round.commitments import SHOWN_BY, shown_by

HUNDRED = tuple(PeerId(f"p{k:03d}") for k in range(100))


def test_in_a_small_swarm_everybody_shows_what_it_heard():
    few = HUNDRED[:COMMITTEE_MAX]
    assert shown_by(few[0], few, digest(b"head"), 0) == few


def test_of_a_hundred_a_few_show_it_to_each_owner_and_nobody_to_all():
    """Drawn anew for every owner and attempt, from both halves that a liar may have sent different commitments."""
    shows: Counter[PeerId] = Counter()
    for owner in HUNDRED:
        drawn = shown_by(owner, HUNDRED, digest(b"head"), 0)
        assert len(set(drawn)) == SHOWN_BY and {HUNDRED.index(p) % 2 for p in drawn} == {0, 1}
        shows.update(drawn)
    assert max(shows.values()) < len(HUNDRED) / 2
    assert shown_by(HUNDRED[0], HUNDRED, digest(b"head"), 0) != shown_by(HUNDRED[0], HUNDRED, digest(b"head"), 1)
