"""Fault tolerance: how many liars a round withstands, as arithmetic on agreed settings and members.

Of n members with counted rows f may lie, and a statistic that withstands f needs 2f + 1 rows. Of f + 1 owners with
the same result for a part one is honest; of fewer, hardly ever none.

The liar's own signatures prove a lie (peer/round/vertex_body.py), which ends its membership for good. Silence,
missing rows and rows not shown can happen to honest peers: a member notes them and complains after two failures
within `STRIKE_ROUNDS` rounds. If more members complain than may lie, the owner steps back and may return.

Not responsible for: messages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import comb
from typing import Literal, TypeAlias, get_args

from atoll.base.draw import shuffled
from atoll.base.ids import Digest, PeerId

STRIKES = 2  # failures seen before a member complains: one may be the network's
STRIKE_ROUNDS = 8  # rounds within which they must fall

MixedName: TypeAlias = Literal["nnm + median", "nnm + trimmed_mean", "nnm + meamed"]
DistanceName: TypeAlias = Literal[
    "robust",
    "krum",
    "multi_krum",
    "geometric_median",
    "centered_clipping",
    "mda",
    "clipped_caf",
    "nnm + krum",
    "nnm + multi_krum",
    "nnm + geometric_median",
    "nnm + centered_clipping",
    MixedName,
]
StatisticName: TypeAlias = Literal["mean", "median", "trimmed_mean", "meamed"] | DistanceName
DISTANCES: tuple[DistanceName, ...] = get_args(DistanceName)  # weight whole rows; the others work value by value
MIXED: tuple[MixedName, ...] = get_args(MixedName)  # do both: mix nearest rows, then sort values of the mixtures


def liars_among(n: int, tolerance: float) -> int:
    """f: how many of n may lie, at most what agreement survives (Pease, Shostak, Lamport 1980)."""
    return max(0, min(int(tolerance * n), (n - 1) // 3))


def peers_for_one_liar(tolerance: float, statistic: StatisticName = "mean") -> int:
    """The fewest members among which this tolerance withstands one liar, with all their rows present."""
    assert tolerance > 0
    n = 4
    while liars_among(n, tolerance) == 0 or n < members_needed(statistic, liars_among(n, tolerance)):
        n += 1
    return n


def members_needed(statistic: StatisticName, liars: int) -> int:
    """Members that a rule is planned with: `robust` wants two more than it needs when rows are missing."""
    return 2 * liars + 3 if statistic == "robust" else rows_needed(statistic, liars)


def rows_needed(statistic: StatisticName, liars: int) -> int:
    """Rows of settled members below which a part has no result: more honest ones than lies.

    Yin et al. 2018 (median, trimmed mean), Xie et al. 2018 (mean around the median) and all rules by distance
    require n > 2f, except Krum: n >= 2f + 3 (Blanchard et al. 2017).
    """
    if statistic == "mean":
        return 0
    return 2 * liars + 3 if statistic.endswith("krum") else 2 * liars + 1


# one witness up to nine members, two above: one reduce of seven members takes 1.4 times a plain one
CAPTURED = 0.05


def captured_parts(drawn_from: int, liars: int, first: int) -> float:
    """Share of parts with nothing but liars as their `first` owners, drawn from `drawn_from` peers.

    Hypergeometric: 1 of 28 where two of eight lie and a part has one witness, 1 of 30 where 33 of a hundred lie and
    it has two. Zero if `first` exceeds the number of liars.
    """
    return comb(liars, first) / comb(drawn_from, first) if first <= drawn_from else 0.0


def witnesses(owners: int, drawn_from: int, liars: int, captured: float) -> int:
    """Owners after the first that also combine a part, where owners are not trusted.

    Bounded by the part's owners.

    The fewest, at least one, with which liars own at most the share `captured` of parts alone. For `captured` = 0
    that is f. Above f = 5 the list of owners is shorter than f + 1, so all owners of a part may lie if the draw
    gives it to liars.
    """
    most = min(owners - 1, max(1, liars))
    return next((w for w in range(1, most) if captured_parts(drawn_from, liars, w + 1) <= captured), most)


VOICES = 32  # peers that recompute a disputed part: first owners and jury, as many as a small run's voters
# of these 32: 33 liars among 100 voters hold that many in 9 of 10,000 draws, as often as all six owners
VERDICT = 18


def jury_of(
    head: Digest, part: int, committee: Sequence[PeerId], owners: Collection[PeerId], first: int
) -> tuple[PeerId, ...]:
    """Voters of a large committee that recompute disputed results of this part for all others.

    Together with the `first` owners, which computed it anyway, they are VOICES.
    """
    return tuple(shuffled(head, f"jury/{part}", [p for p in committee if p not in owners])[: VOICES - first])


def verdict_of(liars: int) -> int:
    """Number of equal results that are believed: more than may lie, or than hardly any draw gives to liars."""
    return min(liars + 1, VERDICT)


def captured_share(voters: int, liars: int, drawn: int) -> float:
    """Probability that a committee of `drawn` voters holds more liars than the two-thirds rule survives.

    Hypergeometric: each draw is equally likely. Zero where all vote and liars are below a third. For one round;
    over many rounds 1 - (1 - share) ** rounds. A proposer that tries several bodies draws as often.
    """
    assert 0 <= liars <= voters and 0 < drawn <= voters
    survived = (drawn - 1) // 3
    worse = range(survived + 1, min(liars, drawn) + 1)
    return sum(comb(liars, k) * comb(voters - liars, drawn - k) for k in worse) / comb(voters, drawn)


class OwnerStrikes:
    """Failures of others that this member saw. Local, so they only lead to a signed complaint."""

    def __init__(self) -> None:
        self.seen: dict[PeerId, list[tuple[int, float]]] = {}  # recent rounds with a failure, and its weight

    def note(self, peer: PeerId, round: int, weight: float = 1.0) -> bool:
        """True if this failure is one too many. `weight`: below 1 after a short wait (timeouts.patience_shown)."""
        recent = [(r, w) for r, w in self.seen.get(peer, []) if round - STRIKE_ROUNDS < r < round]
        self.seen[peer] = [*recent, (round, weight)]
        return len(self.seen[peer]) >= STRIKES and sum(w for _, w in self.seen[peer]) >= STRIKES
