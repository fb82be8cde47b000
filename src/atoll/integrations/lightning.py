"""Callback that makes a `lightning.Trainer` a member of a run.

    run = atoll.join(or_found={"rounds": 20, "inner_steps": 50})
    trainer = Trainer(max_epochs=-1, callbacks=[AtollLightningCallback(run, checkpoint="last.ckpt")])
    trainer.fit(model, ResumableLoader(…), ckpt_path="last.ckpt" if Path("last.ckpt").exists() else None)

Precision, accumulation, schedulers and loggers stay the Trainer's. The callback attaches when training begins,
reports the loss of every step, stops the Trainer when the run is over, and then closes the run.

A checkpoint holds the optimizer, the schedulers and the place in the data. The run's folder holds the agreed model,
which replaces the checkpoint's. Both fit together where a round was just agreed: `checkpoint` is written there.
If the run trained rounds that the Trainer did not count, schedules that move by steps begin where the others are.
Not responsible for: which data this member trains on, models with several optimizers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from atoll.base.errors import UsageError
from atoll.integrations.late_schedule import advance_schedule
from atoll.integrations.one_process import check_single_process

if TYPE_CHECKING:
    from pytorch_lightning import Callback

    from atoll.runtime.embed.run import Run

else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

log = logging.getLogger(__name__)


class AtollLightningCallback(Callback):
    """Attaches the module and its optimizer to this run, which `atoll.join` or `atoll.found` returned.

    `checkpoint` names a file that is replaced after every agreed round, or after every `save_rounds` of them.
    `attach` holds further arguments of `run.attach`: `batch`, `only`, `validate`, `state_memory`.
    """

    def __init__(self, run: Run, *, checkpoint: str | Path = "", save_rounds: int = 1, **attach: Any) -> None:
        self.run, self._attach = run, attach
        self._checkpoint, self._save_rounds = checkpoint, save_rounds
        self._round, self._before = -1, None

    def state_dict(self) -> dict[str, Any]:
        return {"trained": self.run.trained}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = state_dict["trained"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        check_single_process(trainer.world_size, "lightning.Trainer")
        if len(trainer.optimizers) != 1:
            raise UsageError(
                "E-ATT-18",
                f"this module has {len(trainer.optimizers)} optimizers; a run follows the steps of one",
                fix="one torch optimizer with a parameter group for each part of the model",
            )
        size = getattr(trainer.train_dataloader, "batch_size", None) or 1
        usual: dict[str, Any] = {"batch": size * trainer.accumulate_grad_batches, "after_end": "skip"}
        self.run.attach(pl_module, trainer.optimizers[0], **usual | self._attach)
        self._round, trainer.should_stop = self.run.round, self.run.done
        for known in trainer.lr_scheduler_configs:
            if known.interval == "step":
                advance_schedule(self.run, known.scheduler, self._before, known.frequency)
        if self._before not in (None, self.run.trained) and not self.run.done:  # after the end no step follows
            log.warning(
                "the checkpoint was written after %s agreed rounds, and the run is at %s: the model is the agreed "
                "one; step %s and its data follow",
                *(self._before, self.run.trained, trainer.global_step + 1),
            )

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        if not self.run.done:
            self.run.report(loss * trainer.accumulate_grad_batches)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.run.done:
            trainer.should_stop = True
        if self.run.round != self._round:
            self._round = self.run.round
            if self._checkpoint and (self.run.done or self.run.trained % self._save_rounds == 0):
                trainer.save_checkpoint(self._checkpoint, weights_only=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.run.close()


class ResumableLoader(DataLoader[Any]):
    """A DataLoader with its place in Lightning's checkpoints: training resumes at the next batch of the same pass.

    `shuffle=True` draws the order of each pass from `seed` and the number of the pass.
    """

    def __init__(self, dataset: Any, batch_size: int = 1, *, seed: int = 0, **settings: Any) -> None:
        self._seed, self._passes, self._batches = seed, 0, 0  # whole passes, and batches of this one
        self._draw = torch.Generator()
        super().__init__(dataset, batch_size, generator=self._draw, **settings)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._draw.manual_seed(self._seed + self._passes)
        for index, batch in enumerate(super().__iter__()):
            if index >= self._batches:
                self._batches = index + 1
                yield batch
        self._passes, self._batches = self._passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self._passes, "batches": self._batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._passes, self._batches = state["passes"], state["batches"]
