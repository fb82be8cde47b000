"""Validation statistics of a history: judged states, rollbacks that validators ordered, and conspicuous peers.

Validators measure held-out data, and show damage that no member's own data shows.

Not responsible for: verdicts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import fmean

import msgspec

from atoll.base.ids import Digest, PeerId, names_of
from atoll.base.limits import VALIDATION_ROUNDS
from atoll.peer.governance.orders import amend_of
from atoll.policy.loss_statistics import LossSuspicion, commitments_to_updates, names_among
from atoll.verification.state_validation.policy import (
    ALL,
    LOSS_MOST,
    NAT,
    Opinion,
    ValidationCandidate,
    ValidationLedger,
)
from atoll.wire.messages.vertex import VertexBody


class StateValidationRecord(msgspec.Struct, frozen=True):
    """Validators' losses for the state of `round`. None: not a number, or nothing to compare with."""

    round: int
    losses: tuple[float | None, ...]  # per set of held-out data, as the verdict counts them
    opinion: Opinion
    by: float | None  # rise of the first of them since the judged state before
    counted: tuple[str, ...]  # authors of the updates in between
    # share of correct predictions, per set; empty: too few validators counted them
    accuracy: tuple[float, ...] = ()


class ValidationRollback(msgspec.Struct, frozen=True):
    """A round that went back, since validators found the model bad. Contributors since then are named, not
    judged."""

    round: int
    back_to: int
    refused: tuple[int, ...]  # rounds that trained in between
    contributors: tuple[PeerId, ...]  # to any of them


def refusal_in(body: VertexBody, before: Iterable[VertexBody]) -> ValidationRollback | None:
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
    return ValidationRollback(body.round, back.round, tuple(b.round for b in refused), tuple(sorted(who)))


def refusals(bodies: Iterable[VertexBody]) -> list[ValidationRollback]:
    """All refusals of a history; `bodies` in the order of rounds."""
    recent: deque[VertexBody] = deque(maxlen=VALIDATION_ROUNDS)
    found: list[ValidationRollback] = []
    for body in bodies:
        if (refusal := refusal_in(body, recent)) is not None:
            found.append(refusal)
        recent.append(body)
    return found


def blame_by_validation(
    bodies: Mapping[int, VertexBody], ids: Mapping[int, Digest], validations: ValidationLedger
) -> tuple[list[LossSuspicion], list[StateValidationRecord]]:
    """Peers with the largest rise of held-out loss after their updates, and the states that validators judged.

    `bodies` in the order of rounds; `validations` is fresh, and of the run's own rule.
    """
    found: dict[
        int, tuple[ValidationCandidate, ValidationCandidate | None, set[PeerId]]
    ] = {}  # with the state before, and the contributors
    moved: list[tuple[int, set[PeerId]]] = []  # rounds that no later one abandoned
    members: dict[PeerId, str] = {}
    for round, body in bodies.items():
        validations.follow(round, ids, bodies)
        members |= {m.peer: m.name for m in body.members}
        if (back := amend_of(body)) is not None:
            moved = [(r, who) for r, who in moved if r <= back.round]
            continue
        moved.append((round, set(commitments_to_updates(body))))
        if (candidate := validations.candidates.get(round)) is not None:
            before = next((c for r, c in reversed(validations.candidates.items()) if r < round), None)
            since = before.round if before is not None else round - 1
            found[round] = candidate, before, {p for r, who in moved if r > since for p in who}
    names = names_of(members.items())
    judged: list[StateValidationRecord] = []
    risen: dict[PeerId, dict[int, float]] = {}
    for candidate, before, who in found.values():
        losses = _nats(candidate)
        if not losses:
            continue  # too few reports
        now, was = losses[0], next(iter(_nats(before)), None) if before is not None else None
        by = now - was if now is not None and was is not None else None
        shares = tuple(one / ALL for one in candidate.accuracy or ())
        judged.append(
            StateValidationRecord(candidate.round, losses, candidate.opinion, by, names_among(who, names), shares)
        )
        for peer in who:
            risen.setdefault(peer, {})
            if by is not None:
                risen[peer][candidate.round] = by
    rises = {j.round: j.by for j in judged if j.by is not None}
    peers = [_validated(peer, names.get(peer, peer), of, rises) for peer, of in risen.items()]
    return sorted(peers, key=lambda s: -(s.rise or 0.0)), judged


def _nats(candidate: ValidationCandidate) -> tuple[float | None, ...]:
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
