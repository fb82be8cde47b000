"""Supervisor of one trainer: starts it once there is data, and restarts it after failures with backoff.

Invariants:
- Commands run one at a time, in the order of requests (`turn`).
- A trainer that keeps failing restarts later each time, and the round waits for it: otherwise a lone member would
  close empty rounds as fast as its disk allows. After FAILURES_MAX failures in a row the trainer is `hopeless`.
Not responsible for: the live parameters (the worker writes them, then marks the trainer as `ready`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from atoll.base.errors import RunFailedError
from atoll.base.ids import ATTACHED, Seconds
from atoll.runtime.embed.attached_trainer import AttachedTrainer
from atoll.runtime.event_log import DATA_LATE, LATE_START
from atoll.runtime.trainer import TrainerClient, TrainerCommandError, TrainerHeartbeat, TrainerSpec
from atoll.training.exchange.layout import check_same
from atoll.training.recipe.gradient import PLAIN
from atoll.training.recipe.lr_position import horizon_of
from atoll.training.recipe.recipes import Recipe
from atoll.training.spec import TrainingSpec

RETRY_FIRST_S, RETRY_LAST_S = 0.5, 60.0  # seconds until the first and the latest restart; the wait doubles
FAILURES_MAX = 3  # in a row; then the peer leaves with a farewell message

log = logging.getLogger(__name__)


class TrainerSupervisor:
    """`trainer` is the user's own loop; None: a trainer process is started."""

    def __init__(self, threads: int, trainer: AttachedTrainer | None, device: str = "cpu") -> None:
        self.attached = trainer is not None
        self.trainer = trainer or TrainerClient(on_beat=lambda beat: self.on_beat(beat))
        self.ready = False  # the trainer runs and holds the live parameters
        self.lives = 0  # number of starts
        self.failures = 0  # consecutive failures
        self.last_failure: TrainerCommandError | None = None
        self.on_beat: Callable[[TrainerHeartbeat], None] = lambda beat: None
        self.turn = asyncio.Lock()
        self.looking = asyncio.Lock()  # held for a whole loss measurement, batch by batch
        self._threads, self._device = threads, device
        self._data = ""  # path or name of the data set; empty until it has arrived
        self.own_data = False  # the data set is this member's own
        self._base = ""  # path of the frozen base; empty: none
        self._equipped = asyncio.Event()
        self._retry_at: Seconds = 0.0

    def equip(self, data: str, base: str = "") -> None:
        self._data, self._base = data, base
        self._equipped.set()

    async def equipped(self) -> None:
        await self._equipped.wait()

    async def wanted(self, seconds_max: Seconds) -> None:
        """Wait until the trainer may take steps. RunFailedError if it may not within `seconds_max`."""
        waits_s = self._retry_at - time.monotonic()
        try:
            async with asyncio.timeout(seconds_max):
                await asyncio.sleep(max(0.0, waits_s))
                await self._equipped.wait()
        except TimeoutError:
            if waits_s >= seconds_max:
                why = f"the trainer failed {self.failures} times and starts again later"
                raise RunFailedError("E-TRN-11", why) from None
            late = self._equipped.is_set()
            why = LATE_START if late else DATA_LATE
            raise RunFailedError("E-TRN-12", why) from None

    async def start(self, learning: TrainingSpec) -> None:
        """Start the trainer; its inner state and parameters still have to be written."""
        recipe = learning.recipe
        assert self._equipped.is_set()
        if learning.data == ATTACHED and not self.attached:
            raise TrainerCommandError(
                "refused",
                "members of this run train a model in their own loops",
                cause="its founder attached a PyTorch model from Python",
                fix="in your own training loop: atoll.join(ticket).attach(model, optimizer)",
            )
        spec = TrainerSpec(
            recipe.model,
            recipe.seed,
            self._data,
            recipe.batch,
            recipe.seq_len,
            recipe.inner,
            self._threads,
            self._device,
            horizon=horizon_of(recipe),
            base=self._base,
            computing=recipe.computing or PLAIN,
            own_data=self.own_data,
        )
        self.lives += 1
        try:
            check_same(learning.layout, await self.trainer.start(spec))
        except ValueError as why:
            raise TrainerCommandError("refused", str(why)) from why

    def rates(self, recipe: Recipe) -> dict[str, Any]:
        """Optimizer numbers of a round, which may differ from those at the start. Attached loops have their own."""
        return {} if recipe.model == ATTACHED else {"inner": recipe.inner, "horizon": horizon_of(recipe)}

    async def failed(self, why: TrainerCommandError) -> None:
        """End the trainer; the wait before the next start doubles each time."""
        self.ready, self.last_failure = False, why
        self.failures += 1
        log.warning("failure %d of the trainer: %s", self.failures, "; ".join(filter(None, (why.what, why.cause))))
        self._retry_at = time.monotonic() + min(RETRY_LAST_S, RETRY_FIRST_S * 2 ** (self.failures - 1))
        await self.trainer.stop()

    @property
    def hopeless(self) -> bool:
        return self.failures >= FAILURES_MAX
