"""Validators' findings about the states of a run folder. Unverified."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from atoll.runtime.storage.stored_history import read_vertex

if TYPE_CHECKING:
    from atoll.peer.verify.chain import StoredHistory


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
