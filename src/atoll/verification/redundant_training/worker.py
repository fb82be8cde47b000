"""An island's side of twins, as a referee: two updates that were to come of the same samples, and where they differ
a third that its own trainer makes of them.

The trainer takes the steps in a model of its own, one by one and whenever no round wants it; all else is done on
the arithmetic thread. What an update does not say by itself comes from vertices, never from its author.
Never says who is to blame: vertices do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from atoll.base.errors import PeerFault, RunFailedError
from atoll.base.ids import Digest
from atoll.crypto.digest import Buffer
from atoll.peer.tasks import ReplayBoth, TwinUpdate, UpdateDistances
from atoll.runtime.storage.state_cache import StateCache
from atoll.runtime.storage.store import PeerStore
from atoll.runtime.trainer.protocol import BeginReplay
from atoll.runtime.training_spec import TrainingSpec
from atoll.runtime.worker.trainer_supervisor import TrainerSupervisor
from atoll.training.data import cursor_after
from atoll.training.recipe.lr_position import horizon_of, position_of
from atoll.training.recipe.state import SharedState
from atoll.training.recipe.update import part_bounds, part_codecs
from atoll.verification.loss_scoring.tensors import wires_from_bytes
from atoll.verification.redundant_training.policy import APART_MOST, MILLION, TOLERANCE
from atoll.verification.redundant_training.tensors import decoded, distance
from atoll.verification.state_validation.worker import looked


@dataclass
class RedundancyWorker:
    learning_in: Callable[[int], TrainingSpec]  # what a round is learned by
    store: PeerStore
    shelf: StateCache
    tended: TrainerSupervisor
    arithmetic: Executor
    ready: Callable[[], Awaitable[None]]  # the trainer runs; to be called in its turn
    name: Callable[[Buffer], Digest]  # what commitments call a wire

    async def compare(self, work: ReplayBoth) -> UpdateDistances:
        """RunFailedError if what it needs is gone here."""
        loop = asyncio.get_running_loop()
        before = await loop.run_in_executor(
            self.arithmetic, self.shelf.find, work.before, self.learning_in(work.round).layout
        )
        shown = [await asyncio.to_thread(self.store.read_blob, row.blob) for row in work.rows]
        if before is None or None in shown:
            raise RunFailedError("E-TWI-01", "what this comparison needs is not on this disk any more")
        rows_F, why = list[Tensor | None](), ""
        for row, data in zip(work.rows, shown, strict=True):
            assert data is not None
            try:
                rows_F.append(await loop.run_in_executor(self.arithmetic, self._read, work, row, data, before))
            except PeerFault as fault:
                rows_F.append(None)
                why = why or fault.what
        guest_F, host_F = rows_F
        if guest_F is None or host_F is None:
            return UpdateDistances((_lack(guest_F), _lack(host_F)), why)
        steps = tuple(row.steps for row in work.rows)
        between = _millionths(max(distance(guest_F, host_F), distance(host_F, guest_F)))
        if steps[0] == steps[1] and between <= TOLERANCE:
            return UpdateDistances((between, between))
        made_F = {count: await self._made(work, before, count) for count in sorted(set(steps))}
        return UpdateDistances(
            (
                _millionths(distance(guest_F, made_F[steps[0]])),
                _millionths(distance(host_F, made_F[steps[1]])),
            )
        )

    def _read(self, work: ReplayBoth, row: TwinUpdate, data: Buffer, before: SharedState) -> Tensor:
        """The update (F,), if this is the one that was committed to. PeerFault if not."""
        learning = self.learning_in(work.round)
        bounds = part_bounds(learning.layout.floats, work.shares)
        wires = wires_from_bytes(data, row.root, bounds, self.name)
        common = learning.common(work.round, before, work.before)
        return decoded(wires, bounds, part_codecs(learning.recipe.coding.up, common, bounds))

    async def _made(self, work: ReplayBoth, before: SharedState, steps: int) -> Tensor:
        """The update (F,) that so many steps on these samples make."""
        recipe = self.learning_in(work.round).recipe
        wish = BeginReplay(
            work.shard,
            work.shards,
            cursor_after(before.samples, work.shards),
            steps,
            work.batch or recipe.batch,
            position_of(recipe, before),
            recipe.inner,
            horizon_of(recipe),
        )
        made = list[Tensor]()
        trainer = self.tended.trainer
        await looked(self.tended, self.ready, wish, before.anchor_F, lambda: made.append(trainer.made()))
        return made[0]


def _lack(row_F: Tensor | None) -> int:
    """Of one that was shown alone nothing is said."""
    return APART_MOST if row_F is None else 0


def _millionths(apart: float) -> int:
    return min(round(apart * MILLION), APART_MOST - 1) if isfinite(apart) else APART_MOST - 1
