"""A member that does not train for some rounds, because it says so: which words that takes, and until when.

    rests from the next round on   Rests{next} stands in this vertex, whose plan then draws somebody else
    rests in the round under way   Rests{this} and a commitment to nothing: nobody waits, and no record falls

Promises: the word for a round is said once in it and once in the round before. Lost with the process: who is
started again trains. Never judges a word, policy/membership does.
"""

from __future__ import annotations

from atoll.wire.messages.statements import SkipRound

WHY = "it rests"  # in words for people


class RoundOptOut:
    def __init__(self) -> None:
        self.first, self.last = 0, -1  # rounds, both included

    def begins(self, first: int, rounds: int) -> None:
        """From this round on for so many; none: it is back."""
        self.first, self.last = first, first + rounds - 1

    def covers(self, round: int) -> bool:
        return self.first <= round <= self.last

    def words(self, round: int) -> list[SkipRound]:
        """What is to be said while this round is under way."""
        return [SkipRound(r) for r in (round, round + 1) if self.covers(r)]
