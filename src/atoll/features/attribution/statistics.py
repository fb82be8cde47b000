"""Loss statistics of a history: rounds after which the loss rose, their contributors, and conspicuous peers.

A vertex holds every contributor's signed commitment, with the loss that this peer reported for its own data before
its update was combined. So vertices alone show which peers' losses stand apart, and after which rounds the swarm's
loss rose. They also show whether it rises more when a peer counts than when it does not.

A reported loss is the peer's own claim. Validators measure held-out data, and show damage that no member's own data
shows. Neither shows the effect of one update: if updates are kept, a replay of the round without it does
(`leave_one_out.py`). A coincidence is reported as one.

Not responsible for: verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

import msgspec

from atoll.base.ids import PeerId, names_of
from atoll.policy.loss_statistics import LossSuspicion, commitments_to_updates, names_among
from atoll.wire.messages.vertex import VertexBody

JUMPS_SHOWN = 5


class LossJump(msgspec.Struct, frozen=True):
    """A rise of the mean loss by `by` from the round before to this one, after these updates."""

    round: int
    by: float
    counted: tuple[str, ...]


@dataclass
class _PeerLosses:
    name: str = ""
    losses: dict[int, float] = field(default_factory=dict[int, float])  # round -> reported loss


def blame_by_loss(bodies: Iterable[VertexBody]) -> tuple[list[LossSuspicion], list[LossJump]]:
    """Peers, the most conspicuous first, and the rounds with the largest rise. `bodies` in the order of rounds."""
    peers: dict[PeerId, _PeerLosses] = {}
    rounds: list[int] = []
    for body in bodies:
        for m in body.members:
            peers.setdefault(m.peer, _PeerLosses()).name = m.name
        commits = commitments_to_updates(body)
        for peer, commit in commits.items():
            peers.setdefault(peer, _PeerLosses()).losses[body.round] = commit.loss
        if commits:
            rounds.append(body.round)
    swarm = {r: {p: of.losses[r] for p, of in peers.items() if r in of.losses} for r in rounds}
    names = names_of((p, of.name) for p, of in peers.items())
    for peer, name in names.items():
        peers[peer].name = name
    found = [_suspicion(peer, of, rounds, swarm) for peer, of in peers.items() if of.losses]
    found.sort(key=lambda s: -(s.excess or 0.0))
    means = {r: fmean(losses.values()) for r, losses in swarm.items()}
    jumps = [
        LossJump(after, means[after] - means[before], names_among(swarm[before], names))
        for before, after in pairwise(rounds)
    ]
    risen = sorted((j for j in jumps if j.by > 0), key=lambda j: -j.by)
    return found, risen[:JUMPS_SHOWN]


def _suspicion(
    peer: PeerId, of: _PeerLosses, rounds: list[int], swarm: dict[int, dict[PeerId, float]]
) -> LossSuspicion:
    excess: dict[int, float] = {}
    for round, loss in of.losses.items():
        others = [other for p, other in swarm[round].items() if p != peer]
        if others:
            excess[round] = loss - fmean(others)
    worst = max(excess, key=lambda r: excess[r], default=None)
    with_it, without = list[float](), list[float]()
    for before, after in pairwise(rounds):
        both = (swarm[before].keys() & swarm[after].keys()) - {peer}  # the same peers, so that the data is the same
        if both:
            change = fmean(swarm[after][p] - swarm[before][p] for p in both)
            (with_it if peer in swarm[before] else without).append(change)
    return LossSuspicion(
        peer,
        of.name,
        len(of.losses),
        fmean(excess.values()) if excess else None,
        excess[worst] if worst is not None else None,
        worst,
        fmean(with_it) if with_it else None,
        fmean(without) if without else None,
    )
