"""How much lying a round is built for: pure arithmetic on the agreed settings and members.

Of n members whose rows count, f may lie; a statistic that withstands f needs 2f + 1 rows; of f + 1 owners who give
the same answer for a part one is honest, and of fewer hardly ever none. Never looks at what anybody sent.

A lie is proven by what the liar signed (peer/round/vertex_body) and ends its membership for good. Silence,
left-out rows and
rows that are not shown can happen to honest peers too: they are noted, and only who fails twice within a few
rounds is complained of. Complaints by more members than may lie make it step back, and it may return.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import comb
from typing import Literal, TypeAlias, get_args

from atoll.base.draw import shuffled
from atoll.base.ids import Digest, PeerId

STRIKES = 2  # failures seen by one member before it complains: one may be the network's
STRIKE_ROUNDS = 8  # within so many rounds

MixedName: TypeAlias = Literal["nnm + median", "nnm + trimmed_mean", "nnm + meamed"]
DistanceName: TypeAlias = Literal[
    "robust",
    "krum",
    "multi_krum",
    "geometric_median",
    "centred_clipping",
    "mda",
    "clipped_caf",
    "nnm + krum",
    "nnm + multi_krum",
    "nnm + geometric_median",
    "nnm + centred_clipping",
    MixedName,
]
StatisticName: TypeAlias = Literal["mean", "median", "trimmed_mean", "meamed"] | DistanceName
DISTANCES: tuple[DistanceName, ...] = get_args(DistanceName)  # of whole rows; the others look value by value
MIXED: tuple[MixedName, ...] = get_args(MixedName)  # do both: mix nearest rows, and sort the values of mixtures


def liars_among(n: int, tolerance: float) -> int:
    """f: how many of n may lie. Never more than agreement survives (Pease, Shostak, Lamport 1980)."""
    return max(0, min(int(tolerance * n), (n - 1) // 3))


def peers_for_one_liar(tolerance: float, statistic: StatisticName = "mean") -> int:
    """The fewest members among whom this tolerance withstands anybody at all, with all their rows there."""
    assert tolerance > 0
    n = 4
    while liars_among(n, tolerance) == 0 or n < members_needed(statistic, liars_among(n, tolerance)):
        n += 1
    return n


def members_needed(statistic: StatisticName, liars: int) -> int:
    """Members that a rule is reckoned with: `robust` wants two more than it makes do with when rows are missing."""
    return 2 * liars + 3 if statistic == "robust" else rows_needed(statistic, liars)


def rows_needed(statistic: StatisticName, liars: int) -> int:
    """Rows of settled members without which a part has no answer: more honest ones than lies.

    Yin et al. 2018 (median, trimmed mean), Xie et al. 2018 (mean around the median) and all rules by distance ask
    for n > 2f, but for Krum: n >= 2f + 3 (Blanchard et al. 2017).
    """
    if statistic == "mean":
        return 0
    return 2 * liars + 3 if statistic.endswith("krum") else 2 * liars + 1


CAPTURED = 0.05  # one witness for up to nine members, two for more: one reduce of seven is 1.4 times a plain one


def captured_parts(drawn_from: int, liars: int, first: int) -> float:
    """The share of parts whose `first` owners, drawn out of so many, are liars one and all.

    Hypergeometric: 1 of 28 where two of eight lie and a part has one witness, 1 of 30 where 33 of a hundred lie and
    it has two. Zero as soon as more say the same than may lie.
    """
    return comb(liars, first) / comb(drawn_from, first) if first <= drawn_from else 0.0


def witnesses(owners: int, drawn_from: int, liars: int, captured: float) -> int:
    """Owners beside the first who combine a part too, where owners are not trusted, as far as a part has owners.

    The fewest, but one at least, with which liars own no larger share of the parts than `captured` by themselves.
    With none captured that is f: above f = 5 the list of owners is shorter than f + 1, and then all of a part's
    owners together can lie if the draw gives the part to villains alone.
    """
    most = min(owners - 1, max(1, liars))
    return next((w for w in range(1, most) if captured_parts(drawn_from, liars, w + 1) <= captured), most)


VOICES = 32  # who make a part again if it is doubted: its first owners and a jury, as many as a small run's voters
VERDICT = 18  # of these 32: of 100 voters 33 liars have so many in 9 of 10,000 draws, as often as all six owners


def jury_of(
    head: Digest, part: int, committee: Sequence[PeerId], owners: Collection[PeerId], first: int
) -> tuple[PeerId, ...]:
    """Voters of a large committee who make the answers to this part again if they are doubted, for all others.

    With the `first` owners, who made it anyway, they are VOICES.
    """
    return tuple(shuffled(head, f"jury/{part}", [p for p in committee if p not in owners])[: VOICES - first])


def verdict_of(liars: int) -> int:
    """So many who say the same are believed: more than may lie, or than hardly any draw gives to liars."""
    return min(liars + 1, VERDICT)


def captured_share(voters: int, liars: int, drawn: int) -> float:
    """How likely a committee of `drawn` out of so many voters holds more liars than the two-thirds rule survives.

    Hypergeometric: each draw of voters is equally likely. Zero where everybody votes and liars are below a third.
    Of one round; over many rounds 1 - (1 - share) ** rounds. A proposer that tries several bodies draws as often.
    """
    assert 0 <= liars <= voters and 0 < drawn <= voters
    survived = (drawn - 1) // 3
    worse = range(survived + 1, min(liars, drawn) + 1)
    return sum(comb(liars, k) * comb(voters - liars, drawn - k) for k in worse) / comb(voters, drawn)


class OwnerStrikes:
    """What this member saw others fail at. Local, so it only ever leads to a signed complaint."""

    def __init__(self) -> None:
        self.seen: dict[
            PeerId, list[tuple[int, float]]
        ] = {}  # the last rounds in which it failed: what each weighs

    def note(self, peer: PeerId, round: int, weight: float = 1.0) -> bool:
        """True if this is a failure too many. `weight`: of a short wait less than 1 (windows.patience_shown)."""
        recent = [(r, w) for r, w in self.seen.get(peer, []) if round - STRIKE_ROUNDS < r < round]
        self.seen[peer] = [*recent, (round, weight)]
        return len(self.seen[peer]) >= STRIKES and sum(w for _, w in self.seen[peer]) >= STRIKES
