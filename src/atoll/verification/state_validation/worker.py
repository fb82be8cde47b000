"""An island's side of validation: the losses of given parameters, measured by its trainer between two steps.

Takes its turn batch by batch; whatever a round wants of the trainer comes between two of them. A look begins again
where the trainer was started anew, as when the run goes back. Never says what the losses mean: vertices do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec import UNSET, UnsetType
from torch import Tensor

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest
from atoll.peer.tasks import ValidationLosses
from atoll.runtime.storage.store import PeerStore
from atoll.runtime.trainer import TrainerFailed
from atoll.runtime.trainer.protocol import BeginValidation, Look, LossesMeasured, NextBatch
from atoll.runtime.worker.trainer_supervisor import TrainerSupervisor
from atoll.training.recipe.state import SharedState

SAMPLES = 128  # of each set, the same ones at every validator: losses of two rounds are compared
BEGUN_MAX = 3  # times that one look begins: a trainer that never lives so long shall not be kept busy for ever


def canary_in(store: PeerStore, blob: Digest | UnsetType) -> str:
    """The path of the run's canary data; empty if it has none. RunFailedError if it has not come yet."""
    if blob is UNSET:
        return ""
    if not store.has_blob(blob):
        raise RunFailedError("E-VAL-03", "the canary data of this run has not arrived yet")
    return str(store.blob_path(blob))


async def validated(
    tended: TrainerSupervisor, ready: Callable[[], Awaitable[None]], state: SharedState | None, canary: str
) -> ValidationLosses:
    """Mean losses in nats and shares of right answers, one per set of data. `ready` is to be called in its
    turn: the trainer runs then."""
    if state is None:
        raise RunFailedError("E-VAL-01", "the state to be looked at is not on this disk any more")
    found = await looked(tended, ready, BeginValidation(SAMPLES, canary), state.anchor_F)
    return ValidationLosses(found.losses, found.right)


async def looked(
    tended: TrainerSupervisor,
    ready: Callable[[], Awaitable[None]],
    wish: Look,
    x_F: Tensor,
    then: Callable[[], None] = lambda: None,
) -> LossesMeasured:
    """Losses at these parameters and buffers (F,), looked at batch by batch. `then`: called in its last turn."""
    await tended.equipped()
    work: Look | NextBatch = wish
    life, begun = -1, 0
    async with tended.looking:
        while True:
            async with tended.turn:
                try:
                    await ready()
                    if life != tended.lives:
                        work, life, begun = wish, tended.lives, begun + 1
                    if begun > BEGUN_MAX:
                        raise RunFailedError(
                            "E-VAL-02",
                            f"the trainer was started anew {BEGUN_MAX} times while it looked at a state",
                            cause="it crashes, or the run goes back again and again",
                            fix="the same command once more",
                        )
                    found = await tended.trainer.validate(work, None if isinstance(work, NextBatch) else x_F)
                    if found.done:
                        then()
                except TrainerFailed as failed:
                    if not failed.alive:
                        await tended.failed()
                    raise
            if found.done:
                return found
            work = NextBatch()
