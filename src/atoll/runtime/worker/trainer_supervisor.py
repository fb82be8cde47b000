"""A trainer that is looked after: started when there is something to train, and again after it failed.

Promises: one command at a time, in the order they were asked (`turn`); a trainer that keeps failing is started
later each time, and after FAILURES_MAX failures in a row it is `hopeless`.
Never knows what the live parameters should be: its island writes them, then says that the trainer is `ready`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from atoll.base.errors import RunFailedError
from atoll.base.ids import Seconds
from atoll.runtime.embed.peer_process import AttachedTrainer
from atoll.runtime.trainer import TrainerClient, TrainerFailed, TrainerHeartbeat, TrainerSpec
from atoll.training.exchange.layout import check_same
from atoll.training.recipe.gradient import PLAIN
from atoll.training.recipe.lr_position import horizon_of
from atoll.training.recipe.recipes import Recipe
from atoll.training.spec import ATTACHED, TrainingSpec

RETRY_FIRST_S, RETRY_LAST_S = 0.5, 60.0  # a trainer that failed is started again after this long, doubling
FAILURES_MAX = 6  # in a row; then the peer leaves with a farewell


class TrainerSupervisor:
    """`trainer` is the user's own loop, or None for a process of ours."""

    def __init__(self, threads: int, trainer: AttachedTrainer | None, device: str = "cpu") -> None:
        self.attached = trainer is not None
        self.trainer = trainer or TrainerClient(on_beat=lambda beat: self.on_beat(beat))
        self.ready = False  # it runs and holds the live parameters
        self.lives = 0  # times that it was started
        self.failures = 0  # in a row
        self.on_beat: Callable[[TrainerHeartbeat], None] = lambda beat: None
        self.turn = asyncio.Lock()
        self.looking = asyncio.Lock()  # of those who look at losses, batch by batch: one at a time
        self._threads, self._device = threads, device
        self._data = ""  # a path or name for the trainer, once the data set is here
        self._base = ""  # a path, where the run's model has a base
        self._equipped = asyncio.Event()
        self._retry_at: Seconds = 0.0

    def equip(self, data: str, base: str = "") -> None:
        self._data, self._base = data, base
        self._equipped.set()

    async def equipped(self) -> None:
        await self._equipped.wait()

    async def wanted(self, seconds_max: Seconds) -> None:
        """Return once it may be asked for steps. Raises RunFailedError if that is not within this time."""
        if time.monotonic() < self._retry_at:
            raise RunFailedError("E-TRN-11", f"its trainer failed {self.failures} times and is being restarted")
        try:
            async with asyncio.timeout(seconds_max):
                await self._equipped.wait()
        except TimeoutError:
            raise RunFailedError("E-TRN-12", "its data set has not arrived yet") from None

    async def start(self, learning: TrainingSpec) -> None:
        """It runs; its inner state and parameters are still to be written."""
        recipe = learning.recipe
        assert self._equipped.is_set()
        if learning.data == ATTACHED and not self.attached:
            raise TrainerFailed(
                "refused",
                "this run trains a model of its members' own",
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
        )
        self.lives += 1
        check_same(learning.layout, await self.trainer.start(spec))

    def rates(self, recipe: Recipe) -> dict[str, Any]:
        """What a trainer is told of a round's: not always those that it was started with. Attached loops have
        their own."""
        return {} if recipe.model == ATTACHED else {"inner": recipe.inner, "horizon": horizon_of(recipe)}

    async def failed(self) -> None:
        """End it; it is started again later, each time later than the last."""
        self.ready = False
        self.failures += 1
        self._retry_at = time.monotonic() + min(RETRY_LAST_S, RETRY_FIRST_S * 2 ** (self.failures - 1))
        await self.trainer.stop()

    @property
    def hopeless(self) -> bool:
        return self.failures >= FAILURES_MAX
