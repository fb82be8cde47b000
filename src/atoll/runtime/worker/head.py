"""The agreed state that an island goes on from."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.base.ids import Digest
from atoll.training.recipe.state import SharedState


@dataclass
class AgreedHead:
    """Its island writes it; whoever works for the island reads it, and may see it change between two `await`s."""

    head: SharedState | None = None
    name: Digest | None = None
    vertex: Digest | None = None  # that says so
    round: int = -1  # whose state is the head, or is just becoming it
