"""Learning-rate schedule of a member that joins late or was away: moved on to the steps that the others have taken.

Invariants:
- A schedule moves on by whole rounds that the run trained and this member's library did not count.
- A schedule that needs measurements for a step (ReduceLROnPlateau) stays as it is.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

if TYPE_CHECKING:
    from atoll.runtime.embed.run import Run

log = logging.getLogger(__name__)


def advance_schedule(run: Run, schedule: Any, trained: int | None, every: int = 1) -> None:
    """Move the schedule on to the run's rounds. `trained`: rounds that it has counted, None: it begins now.

    `every`: optimizer steps for one step of the schedule.
    """
    rounds = run.trained - (trained or 0)
    if run.done or rounds < 1 or not isinstance(schedule, LRScheduler) or isinstance(schedule, ReduceLROnPlateau):
        return
    steps = rounds * run.round_steps // every
    with warnings.catch_warnings(), suppress(ValueError):  # a schedule of fixed length has ended
        warnings.simplefilter("ignore", UserWarning)  # torch expects a step of the optimizer first
        for _ in range(steps):
            schedule.step()
    log.info(
        "the learning-rate schedule skips %s steps: the run trained %s rounds without this loop", steps, rounds
    )
