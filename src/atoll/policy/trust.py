"""How much lying a round is built for: pure arithmetic on the agreed settings and members.

Of n members whose rows count, f may lie; a statistic that withstands f needs 2f + 1 rows; and of f + 1 owners who
give the same answer for a part, one is honest. Never looks at what anybody sent.

A lie is proven by what the liar signed (node/body) and ends its membership for good. Silence, left-out rows and
rows that are not shown can happen to honest peers too: they are noted, and only who fails twice within a few
rounds is complained of. Complaints by more members than may lie make it step back, and it may return.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from atoll.base.ids import PeerId

STRIKES = 2  # failures seen by one member before it complains: one may be the network's
STRIKE_ROUNDS = 8  # within so many rounds

StatisticName: TypeAlias = Literal["mean", "median", "trimmed_mean", "meamed"]  # of one value over the rows


def liars_among(n: int, tolerance: float) -> int:
    """f: how many of n may lie. Never more than agreement survives (Pease, Shostak, Lamport 1980)."""
    return max(0, min(int(tolerance * n), (n - 1) // 3))


def peers_for_one_liar(tolerance: float) -> int:
    """The fewest members among whom this tolerance withstands anybody at all."""
    assert tolerance > 0
    n = 4
    while liars_among(n, tolerance) == 0:
        n += 1
    return n


def rows_needed(statistic: StatisticName, liars: int) -> int:
    """Rows of settled members without which a part has no answer: more honest ones than lies, per value.

    Yin et al. 2018 (median, trimmed mean) and Xie et al. 2018 (mean around the median) ask for n > 2f.
    """
    return 0 if statistic == "mean" else 2 * liars + 1


def witnesses(owners: int, liars: int) -> int:
    """Owners beside the first who combine a part too, where owners are not trusted: f, as far as there are owners.

    At least one; above f = 5 the list of owners is shorter than f + 1, and then all of a part's owners together
    can lie if the draw gives the part to villains alone.
    """
    return min(owners - 1, max(1, liars))


class Strikes:
    """What this member saw others fail at. Local, so it only ever leads to a signed complaint."""

    def __init__(self) -> None:
        self.seen: dict[PeerId, list[int]] = {}  # the last rounds in which this peer failed

    def note(self, peer: PeerId, round: int) -> bool:
        """True if this is a failure too many."""
        recent = [r for r in self.seen.get(peer, []) if round - STRIKE_ROUNDS < r < round]
        self.seen[peer] = [*recent, round][-STRIKES:]
        return len(self.seen[peer]) >= STRIKES
