"""Loss measurement by the trainer, batch by batch between two rounds.

Invariants:
- A round waits for one batch at most.
- A measurement begins again if the trainer is restarted, at most `BEGUN_MAX` times.
Not responsible for: what the losses mean (vertices decide).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from atoll.base.errors import RunFailedError
from atoll.worker.context import WorkerContext
from atoll.worker.trainer_commands import ContinueMeasurement, Look, LossesMeasured, TrainerCommandError

SAMPLES = 128  # of each set, the same ones at every validator: losses of two rounds are compared
BEGUN_MAX = 3  # starts of one measurement: a trainer that keeps failing must not be kept busy for ever


async def measure_losses(
    context: WorkerContext, wish: Look, x_F: Tensor, then: Callable[[], None] = lambda: None
) -> LossesMeasured:
    """Losses at these parameters and buffers (F,). `then` is called in the last turn, before it is given back."""
    tended = context.trainer
    await tended.equipped()
    work: Look | ContinueMeasurement = wish
    life, begun = -1, 0
    async with tended.looking:
        while True:
            async with tended.turn:
                try:
                    await context.start_trainer()
                    if life != tended.lives:
                        work, life, begun = wish, tended.lives, begun + 1
                    if begun > BEGUN_MAX:
                        raise RunFailedError(
                            "E-VAL-02",
                            f"the trainer was restarted {BEGUN_MAX} times during one loss measurement",
                            cause="it crashes, or the run rolls back again and again",
                            fix="run the same command once more",
                        )
                    found = await tended.trainer.validate(
                        work, None if isinstance(work, ContinueMeasurement) else x_F
                    )
                    if found.done:
                        then()
                except TrainerCommandError as failed:
                    if not failed.alive:
                        await tended.failed(failed)
                    raise
            if found.done:
                return found
            work = ContinueMeasurement()
