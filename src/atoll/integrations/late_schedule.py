"""Learning-rate schedule of a member that joins late or was away: moved on to the steps that the others have taken.

Invariants:
- A schedule moves on by whole rounds that the run trained and this member's library did not count.
- A schedule stays that needs measurements for a step (ReduceLROnPlateau) or fails after its last (OneCycleLR).
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

if TYPE_CHECKING:
    from atoll.runtime.embed.run import Run

FIXED = (ReduceLROnPlateau, OneCycleLR)

log = logging.getLogger(__name__)


def advance_schedule(run: Run, schedule: Any, trained: int | None, every: int = 1) -> None:
    """Move the schedule on to the run's rounds.

    `trained`: rounds that it has counted, None: unknown, as at the start. `every`: optimizer steps for one of it.
    """
    rounds = run.trained - (trained or 0)
    if run.done or rounds < 1 or not isinstance(schedule, LRScheduler) or isinstance(schedule, FIXED):
        return
    steps = rounds * run.round_steps // every
    if trained is None:  # a checkpoint of another program may have moved it on already
        steps -= schedule.last_epoch
    if steps < 1:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch expects a step of the optimizer first
        for _ in range(steps):
            schedule.step()
    log.info("the learning-rate schedule skips %s steps, which the run took without this loop", steps)
