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

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

import msgspec

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, names_of
from atoll.base.limits import VALIDATION_ROUNDS
from atoll.peer.governance.orders import amend_of
from atoll.verification.state_validation.policy import (
    ALL,
    LOSS_MOST,
    NAT,
    Opinion,
    ValidatedState,
    ValidationLedger,
)
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import Commitment
from atoll.wire.messages.vertex import VertexBody

JUMPS_SHOWN = 5


class LossSuspicion(msgspec.Struct, frozen=True):
    """How one peer's rounds differ from the others'. None: there is nothing to compare with."""

    peer: PeerId
    name: str
    rounds: int  # rounds in which it counted
    excess: float | None  # its reported loss minus the mean of the others in the same rounds
    worst: float | None  # the largest such difference, and its round
    worst_round: int | None
    rise: float | None  # mean change of the others' loss into the round after it counted
    rise_without: float | None  # the same after rounds in which it did not count


class LossJump(msgspec.Struct, frozen=True):
    """A rise of the mean loss by `by` from the round before to this one, after these updates."""

    round: int
    by: float
    counted: tuple[str, ...]


class StateLosses(msgspec.Struct, frozen=True):
    """Validators' losses for the state of `round`. None: not a number, or nothing to compare with."""

    round: int
    losses: tuple[float | None, ...]  # per set of held-out data, as the verdict counts them
    opinion: Opinion
    by: float | None  # rise of the first of them since the judged state before
    counted: tuple[str, ...]  # authors of the updates in between
    # share of correct predictions, per set; empty: too few validators counted them
    accuracy: tuple[float, ...] = ()


class StateRefusal(msgspec.Struct, frozen=True):
    """A round that went back, since validators found the model bad. Contributors since then are named, not
    judged."""

    round: int
    back_to: int
    refused: tuple[int, ...]  # rounds that trained in between
    contributors: tuple[PeerId, ...]  # to any of them


def refusal_in(body: VertexBody, before: Iterable[VertexBody]) -> StateRefusal | None:
    """The refusal in this vertex of those `before` it, oldest first; None unless validators ordered it.

    A round that went back moved nothing itself, and updates that it left behind are not refused a second time.
    """
    back = amend_of(body)
    if back is None or back.signature:
        return None
    refused: list[VertexBody] = []
    for b in before:
        if not back.round < b.round < body.round:
            continue
        if (left := amend_of(b)) is not None:
            refused = [r for r in refused if r.round <= left.round]
        elif b.parts:
            refused.append(b)
    who = {signed.signer for b in refused for signed in b.commits}
    return StateRefusal(body.round, back.round, tuple(b.round for b in refused), tuple(sorted(who)))


def refusals(bodies: Iterable[VertexBody]) -> list[StateRefusal]:
    """All refusals of a history; `bodies` in the order of rounds."""
    recent: deque[VertexBody] = deque(maxlen=VALIDATION_ROUNDS)
    found: list[StateRefusal] = []
    for body in bodies:
        if (refusal := refusal_in(body, recent)) is not None:
            found.append(refusal)
        recent.append(body)
    return found


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
        commits = _commits(body)
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
    jumps = [
        LossJump(after, fmean(swarm[after].values()) - fmean(swarm[before].values()), _named(swarm[before], names))
        for before, after in pairwise(rounds)
    ]
    risen = sorted((j for j in jumps if j.by > 0), key=lambda j: -j.by)
    return found, risen[:JUMPS_SHOWN]


def blame_by_validation(
    bodies: Mapping[int, VertexBody], ids: Mapping[int, Digest], validations: ValidationLedger
) -> tuple[list[LossSuspicion], list[StateLosses]]:
    """Peers with the largest rise of held-out loss after their updates, and the states that validators judged.

    `bodies` in the order of rounds; `validations` is fresh, and of the run's own rule.
    """
    found: dict[
        int, tuple[ValidatedState, ValidatedState | None, set[PeerId]]
    ] = {}  # with the state before, and the contributors
    moved: list[tuple[int, set[PeerId]]] = []  # rounds that no later one abandoned
    members: dict[PeerId, str] = {}
    for round, body in bodies.items():
        validations.follow(round, ids, bodies)
        members |= {m.peer: m.name for m in body.members}
        if (back := amend_of(body)) is not None:
            moved = [(r, who) for r, who in moved if r <= back.round]
            continue
        moved.append((round, set(_commits(body))))
        if (candidate := validations.candidates.get(round)) is not None:
            before = next((c for r, c in reversed(validations.candidates.items()) if r < round), None)
            since = before.round if before is not None else round - 1
            found[round] = candidate, before, {p for r, who in moved if r > since for p in who}
    names = names_of(members.items())
    judged: list[StateLosses] = []
    risen: dict[PeerId, dict[int, float]] = {}
    for candidate, before, who in found.values():
        losses = _nats(candidate)
        if not losses:
            continue  # too few reports
        now, was = losses[0], next(iter(_nats(before)), None) if before is not None else None
        by = now - was if now is not None and was is not None else None
        shares = tuple(one / ALL for one in candidate.accuracy or ())
        judged.append(StateLosses(candidate.round, losses, candidate.opinion, by, _named(who, names), shares))
        for peer in who:
            risen.setdefault(peer, {})
            if by is not None:
                risen[peer][candidate.round] = by
    rises = {j.round: j.by for j in judged if j.by is not None}
    peers = [_validated(peer, names.get(peer, peer), of, rises) for peer, of in risen.items()]
    return sorted(peers, key=lambda s: -(s.rise or 0.0)), judged


def _nats(candidate: ValidatedState) -> tuple[float | None, ...]:
    return tuple(v / NAT if v < LOSS_MOST else None for v in candidate.values or ())


def _validated(peer: PeerId, name: str, of: dict[int, float], rises: dict[int, float]) -> LossSuspicion:
    worst = max(of, key=lambda r: of[r], default=None)
    others = [by for round, by in rises.items() if round not in of]
    return LossSuspicion(
        peer,
        name,
        len(of),
        None,
        of[worst] if worst is not None else None,
        worst,
        fmean(of.values()) if of else None,
        fmean(others) if others else None,
    )


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


def _commits(body: VertexBody) -> dict[PeerId, Commitment]:
    commits: dict[PeerId, Commitment] = {}
    for signed in body.commits:
        try:
            statement = decode_statement(signed.body, signed.signer)
        except PeerFault:
            continue  # `atoll verify` reports it
        if isinstance(statement, Commitment) and statement.parts > 0:
            commits[signed.signer] = statement
    return commits


def _named(peers: Iterable[PeerId], names: dict[PeerId, str]) -> tuple[str, ...]:
    return tuple(sorted(names.get(p, p) for p in peers))
