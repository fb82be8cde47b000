"""Training loss of a run as its vertices hold it, also for rounds that the local peer did not close itself.

Invariants: torch is never imported, since light commands read it.
Not responsible for: the loss curve of the event log (`event_log.py`), which lacks the rounds of an absence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atoll.peer.governance.orders import amend_of

if TYPE_CHECKING:
    from atoll.wire.messages.vertex import VertexBody


def newest_counted(head: VertexBody | None, body_of: Callable[[int], VertexBody | None]) -> VertexBody | None:
    """The round in which the newest counted update of this head moved the model; None if it is not here."""
    body = head
    while body is not None and not any(body.parts):
        back = amend_of(body)  # the rounds in between are not in the model
        body = body_of(body.round - 1 if back is None else back.round)
    return body


def agreed_loss(
    head: VertexBody | None, body_of: Callable[[int], VertexBody | None], logged: float | None
) -> float | None:
    """Loss that members reported for the newest counted round; `logged` if that round's vertex is not here."""
    body = newest_counted(head, body_of)
    return logged if body is None else body.metrics.reported_loss
