"""Agreed head: the state that training continues from, with its vertex and round."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.base.ids import Digest
from atoll.training.recipe.state import SharedState


@dataclass
class AgreedHead:
    """Written by the training worker only. Readers may see it change between two `await`s."""

    head: SharedState | None = None
    name: Digest | None = None
    vertex: Digest | None = None  # vertex that agrees on the head
    round: int = -1  # round of the head, or of the state that is being adopted
