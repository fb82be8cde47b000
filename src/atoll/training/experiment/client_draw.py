"""Client sampling in an experiment: draws the peers that train in a round, with the function of real rounds.

`base/fair_draw.py` prefers the peers with the fewest turns, per data group if groups are given. A peer that is not
drawn stays at the anchor and still owns its parts.
Not responsible for: tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from atoll.base.fair_draw import ABSENT_COST, TURN_COST, credits_after, draw_sample

THOUSAND = 1000


class ClientSampler:
    """`sample`: share or number of peers per round. `groups`: data group per peer; empty: one group per peer."""

    def __init__(self, peers: int, sample: float, groups: Sequence[str] = ()) -> None:
        share = round(sample * THOUSAND)  # per mille, as in genesis
        self.count = max(1, sample if isinstance(sample, int) else -(-share * peers // THOUSAND))
        self.groups = list(groups) or [f"@{peer}" for peer in range(peers)]
        self.credits = [(0, 0)] * peers
        self.drawn: list[int] = []
        self._round = -1  # round of the draw

    def draw(self, seed: bytes, present: Sequence[int], round: int) -> None:
        """Draw from the `present` peers, once per round. An absent peer keeps its credits."""
        if round == self._round:
            return
        self._round = round
        groups, credits = [self.groups[p] for p in present], [self.credits[p] for p in present]
        self.drawn = [present[place] for place in draw_sample(seed, groups, credits, self.count)]

    def discard(self) -> None:
        """Drop a draw with too few present peers, so that the next step draws again."""
        self._round = -1

    def charge(self, counted: Collection[int]) -> None:
        """Charge the drawn peers when the round is over; `counted` are those with an update in the result."""
        costs = [0] * len(self.groups)
        for peer in self.drawn:
            costs[peer] = TURN_COST if peer in counted else ABSENT_COST
        self.credits = credits_after(self.groups, self.credits, costs)


def check_sampling(sample: float | None, groups: Sequence[str], peers: int) -> None:
    """ValueError if `sample` is no valid share or number of peers, or `groups` lacks an entry per peer."""
    share = isinstance(sample, float) and 0 < sample <= 1
    if sample is not None and not share and (isinstance(sample, float | bool) or not 1 <= sample <= peers):
        raise ValueError(
            f"sample is a share of the peers, such as 0.5, or a number of peers, 1 … {peers}; not {sample}"
        )
    if groups and (sample is None or len(groups) != peers):
        raise ValueError(f"groups needs a data group for each of {peers} peers, and sampled rounds: sample=0.5")
