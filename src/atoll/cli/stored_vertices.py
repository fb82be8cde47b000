"""Vertices of a run folder as its disk has them, and validators' findings about their states. Unverified."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from atoll.base.errors import PeerFault, RunFailedError

if TYPE_CHECKING:
    from atoll.peer.verify.chain import StoredHistory
    from atoll.wire.messages.vertex import Vertex, VertexBody


def read_vertex(kept: StoredHistory, folder: Path, round: int) -> tuple[Vertex, VertexBody]:
    """Vertex of a listed round, unverified. RunFailedError if it cannot be read."""
    from atoll.wire.codec import decode_body, decode_vertex

    data = kept.genesis if round == -1 else kept.read(round)
    assert data is not None  # it was listed in this very transaction
    try:
        vertex = decode_vertex(data)
        return vertex, decode_body(vertex.body)
    except PeerFault as fault:
        raise RunFailedError(
            "E-CHK-02",
            f"the vertex of round {round} cannot be read: {fault.what}",
            cause="this disk or a copy of this folder lost or changed bytes",
            fix=f"atoll verify {folder}",
        ) from fault


def validated(kept: StoredHistory, folder: Path, round: int) -> dict[str, float]:
    """Validators' findings about this state in later vertices, unverified.

    Empty if there are none, too few validators reported, or the loss is not finite.
    """
    from atoll.base.limits import VALIDATION_OPEN
    from atoll.peer.settings import settings_of_run
    from atoll.verification.state_validation.policy import ALL, LOSS_MOST, NAT, ValidationLedger
    from atoll.wire.codec import vertex_id

    settings = settings_of_run(read_vertex(kept, folder, -1)[1])
    if settings.validated is None:
        return {}
    here = {-1, *kept.rounds}
    read = {r: read_vertex(kept, folder, r) for r in range(round, round + VALIDATION_OPEN + 1) if r in here}
    bodies, ids = {r: body for r, (_, body) in read.items()}, {r: vertex_id(v.body) for r, (v, _) in read.items()}
    validations = ValidationLedger(settings.validated, settings.round.quorum)
    validations.follow(round, ids, bodies)
    if (candidate := validations.candidates.get(round)) is None:
        return {}
    validations.follow(max(bodies), ids, bodies)
    found: dict[str, float] = {}
    for of, loss in zip(("", "canary "), candidate.values or (), strict=False):
        found |= {f"{of}loss": loss / NAT} if loss < LOSS_MOST else {}
    for of, right in zip(("", "canary "), candidate.accuracy or (), strict=False):
        found |= {f"{of}accuracy": right / ALL}
    return found
