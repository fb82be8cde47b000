"""What an island sent in the last rounds, kept for those who are drawn to look at it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from atoll.base.errors import RunFailedError
from atoll.crypto.digest import Buffer
from atoll.peer.tasks import ExhibitBuilt, ShowUpdate
from atoll.runtime.storage.state_cache import StateCache
from atoll.training.recipe.update import EncodedUpdate
from atoll.verification.loss_scoring.tensors import update_bytes


@dataclass
class SentUpdateCache:
    shelf: StateCache
    rounds: int  # whose updates are kept: those that may still be asked for and the one under way
    wires: dict[int, tuple[Buffer, ...]] = field(default_factory=dict[int, tuple[Buffer, ...]])

    def made(self, round: int, update: EncodedUpdate) -> None:
        self.wires[round] = update.wires
        while len(self.wires) > self.rounds:
            del self.wires[min(self.wires)]

    async def show(self, wish: ShowUpdate) -> ExhibitBuilt:
        """RunFailedError if it is gone, as after a restart."""
        wires = self.wires.get(wish.round)
        if wires is None:
            raise RunFailedError("E-SCO-01", f"nothing is left of the update of round {wish.round}")
        return ExhibitBuilt(await asyncio.to_thread(lambda: self.shelf.put_other(update_bytes(wires))))
