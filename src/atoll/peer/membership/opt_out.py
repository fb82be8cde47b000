"""Round opt-out: a member that does not train for some rounds, at its own request.

    from the next round on   RoundOptOutNotice{next} in this vertex: the next plan draws another member
    in the current round     RoundOptOutNotice{this} and an empty commitment: no member waits or counts it

Invariants:
- The report for a round is sent once in that round and once in the round before.
- The opt-out ends with the process: a restarted peer trains.
Not responsible for: judging the reports (policy/membership.py).
"""

from __future__ import annotations

from atoll.wire.messages.statements import RoundOptOutNotice

WHY = "it rests"  # pass reason, for people


class RoundOptOut:
    def __init__(self) -> None:
        self.first, self.last = 0, -1  # first and last round, both included

    def begins(self, first: int, rounds: int) -> None:
        """Opt out of this many rounds from `first` on; 0 ends it."""
        self.first, self.last = first, first + rounds - 1

    def covers(self, round: int) -> bool:
        return self.first <= round <= self.last

    def words(self, round: int) -> list[RoundOptOutNotice]:
        """Reports to send during this round."""
        return [RoundOptOutNotice(r) for r in (round, round + 1) if self.covers(r)]
