"""Who of an experiment's workers trains in a round: drawn by the very function of real rounds (base/fair_draw.py).

Whoever had the fewest turns comes first, by groups of data where there are some; who is not drawn stands at the
anchor, and still owns its parts. Never touches a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from atoll.base.fair_draw import CALL, TURN, credits_after, draw_sample

THOUSAND = 1000


class ClientSampler:
    """`sample`: a share of the workers, or how many. `groups`: of each worker; none: each is one by itself."""

    def __init__(self, peers: int, sample: float, groups: Sequence[str] = ()) -> None:
        share = round(sample * THOUSAND)  # as genesis has it
        self.count = max(1, sample if isinstance(sample, int) else -(-share * peers // THOUSAND))
        self.groups = list(groups) or [f"@{peer}" for peer in range(peers)]
        self.credits = [(0, 0)] * peers
        self.drawn: list[int] = []

    def draw(self, seed: bytes, present: Sequence[int]) -> None:
        """Of those that are here; everybody else's turn waits."""
        groups, credits = [self.groups[p] for p in present], [self.credits[p] for p in present]
        self.drawn = [present[place] for place in draw_sample(seed, groups, credits, self.count)]

    def took_turns(self, counted: Collection[int]) -> None:
        """The round is over, and of those that were drawn these count."""
        costs = [0] * len(self.groups)
        for peer in self.drawn:
            costs[peer] = TURN if peer in counted else CALL
        self.credits = credits_after(self.groups, self.credits, costs)


def check_clients(sample: float | None, groups: Sequence[str], peers: int) -> None:
    """ValueError for what is no number of workers, or no group for each."""
    share = isinstance(sample, float) and 0 < sample <= 1
    if sample is not None and not share and (isinstance(sample, float | bool) or not 1 <= sample <= peers):
        raise ValueError(
            f"sample is a share of the peers, such as 0.5, or a number of them, 1 … {peers}; not {sample}"
        )
    if groups and (sample is None or len(groups) != peers):
        raise ValueError(f"groups say whose data each of {peers} peers has, where rounds are sampled: sample=0.5")
