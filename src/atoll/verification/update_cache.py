"""Cache of the updates that this peer sent in recent rounds, for the members drawn to inspect them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from atoll.base.errors import RunFailedError
from atoll.crypto.digest import Buffer
from atoll.peer.tasks import BuildUpdateExhibit, ExhibitBuilt
from atoll.training.recipe.error_feedback import EncodedUpdate
from atoll.verification.shown_update import update_bytes
from atoll.worker.context import BlobPins, Handlers


@dataclass
class SentUpdateCache:
    pins: BlobPins
    rounds: int  # number of kept rounds: those that can still be requested and the current one
    wires: dict[int, tuple[Buffer, ...]] = field(default_factory=dict[int, tuple[Buffer, ...]])

    def handlers(self) -> Handlers:
        return {BuildUpdateExhibit: self._show}

    def add(self, round: int, update: EncodedUpdate) -> None:
        self.wires[round] = update.wires
        while len(self.wires) > self.rounds:
            del self.wires[min(self.wires)]

    async def _show(self, wish: BuildUpdateExhibit) -> ExhibitBuilt:
        """RunFailedError if the update is gone, for example after a restart."""
        wires = self.wires.get(wish.round)
        if wires is None:
            raise RunFailedError("E-SCO-01", f"the update of round {wish.round} is no longer kept")
        return ExhibitBuilt(await asyncio.to_thread(lambda: self.pins.put_blob(update_bytes(wires))))
