"""After which rounds did the loss rise, who counted in them, and whose own loss stands apart? From vertices alone.

A vertex holds every contributor's signed commitment, and with it the loss that this peer reported for its own data
before its update was combined. So this can say whose losses stand apart, after which rounds the swarm's loss rose,
and whether it rises more when a peer counts than when it does not. Reported losses are each peer's own word, and
what one update did is not in them: where updates are kept, a round made again without it tells (`without.py`). A
coincidence is called one; never a verdict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

import msgspec

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId, names_of
from atoll.base.limits import VALIDATION_ROUNDS
from atoll.node.amend import amend_of
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import Commit
from atoll.wire.messages.vertex import Body

JUMPS_SHOWN = 5


class Suspicion(msgspec.Struct, frozen=True):
    """How one peer's rounds differ from the others'. None: there is nothing to compare with."""

    peer: PeerId
    name: str
    rounds: int  # in which it counted
    excess: float | None  # its reported loss minus the mean of the others in the same rounds
    worst: float | None  # the largest such difference, and where
    worst_round: int | None
    rise: float | None  # mean change of the others' loss into the round after it counted
    rise_without: float | None  # the same after rounds in which it did not count


class Jump(msgspec.Struct, frozen=True):
    """The mean loss rose by `by` from the round before to this one; these updates had moved the model between."""

    round: int
    by: float
    counted: tuple[str, ...]


class Refusal(msgspec.Struct, frozen=True):
    """Validators found the model bad, and this round went back. Who counted since is named, not judged."""

    round: int
    back_to: int
    refused: tuple[int, ...]  # rounds that trained in between
    contributors: tuple[PeerId, ...]  # to any of them


def refusal_in(body: Body, before: Iterable[Body]) -> Refusal | None:
    """What this vertex refuses of those `before` it, oldest first; None unless validators sent it back.

    A round that went back moved nothing itself, and what it left behind is refused no second time.
    """
    back = amend_of(body)
    if back is None or back.signature:
        return None
    refused: list[Body] = []
    for b in before:
        if not back.round < b.round < body.round:
            continue
        if (left := amend_of(b)) is not None:
            refused = [r for r in refused if r.round <= left.round]
        elif b.parts:
            refused.append(b)
    who = {signed.signer for b in refused for signed in b.commits}
    return Refusal(body.round, back.round, tuple(b.round for b in refused), tuple(sorted(who)))


def refusals(bodies: Iterable[Body]) -> list[Refusal]:
    """All of a history; `bodies` in the order of rounds."""
    recent: deque[Body] = deque(maxlen=VALIDATION_ROUNDS)
    found: list[Refusal] = []
    for body in bodies:
        if (refusal := refusal_in(body, recent)) is not None:
            found.append(refusal)
        recent.append(body)
    return found


@dataclass
class _Peer:
    name: str = ""
    losses: dict[int, float] = field(default_factory=dict[int, float])  # round -> as it reported


def blame_by_loss(bodies: Iterable[Body]) -> tuple[list[Suspicion], list[Jump]]:
    """Peers, the most conspicuous first, and the rounds whose loss rose most. `bodies` in the order of rounds."""
    peers: dict[PeerId, _Peer] = {}
    rounds: list[int] = []
    for body in bodies:
        for m in body.members:
            peers.setdefault(m.peer, _Peer()).name = m.name
        commits = _commits(body)
        for peer, commit in commits.items():
            peers.setdefault(peer, _Peer()).losses[body.round] = commit.loss
        if commits:
            rounds.append(body.round)
    swarm = {r: {p: of.losses[r] for p, of in peers.items() if r in of.losses} for r in rounds}
    names = names_of((p, of.name) for p, of in peers.items())
    for peer, name in names.items():
        peers[peer].name = name
    found = [_suspicion(peer, of, rounds, swarm) for peer, of in peers.items() if of.losses]
    found.sort(key=lambda s: -(s.excess or 0.0))
    jumps = [
        Jump(after, fmean(swarm[after].values()) - fmean(swarm[before].values()), _named(swarm[before], names))
        for before, after in pairwise(rounds)
    ]
    risen = sorted((j for j in jumps if j.by > 0), key=lambda j: -j.by)
    return found, risen[:JUMPS_SHOWN]


def _suspicion(peer: PeerId, of: _Peer, rounds: list[int], swarm: dict[int, dict[PeerId, float]]) -> Suspicion:
    excess: dict[int, float] = {}
    for round, loss in of.losses.items():
        others = [other for p, other in swarm[round].items() if p != peer]
        if others:
            excess[round] = loss - fmean(others)
    worst = max(excess, key=lambda r: excess[r], default=None)
    with_it, without = list[float](), list[float]()
    for before, after in pairwise(rounds):
        both = (swarm[before].keys() & swarm[after].keys()) - {
            peer
        }  # the same peers, so that nobody's data differs
        if both:
            change = fmean(swarm[after][p] - swarm[before][p] for p in both)
            (with_it if peer in swarm[before] else without).append(change)
    return Suspicion(
        peer,
        of.name,
        len(of.losses),
        fmean(excess.values()) if excess else None,
        excess[worst] if worst is not None else None,
        worst,
        fmean(with_it) if with_it else None,
        fmean(without) if without else None,
    )


def _commits(body: Body) -> dict[PeerId, Commit]:
    commits: dict[PeerId, Commit] = {}
    for signed in body.commits:
        try:
            statement = decode_statement(signed.body, signed.signer)
        except PeerFault:
            continue  # `atoll verify` names it
        if isinstance(statement, Commit) and statement.parts > 0:
            commits[signed.signer] = statement
    return commits


def _named(peers: Iterable[PeerId], names: dict[PeerId, str]) -> tuple[str, ...]:
    return tuple(sorted(names.get(p, p) for p in peers))
