"""Callback that makes a `transformers.Trainer` a member of a run.

    run = atoll.join(or_found={"rounds": 20, "inner_steps": 50})
    trainer = Trainer(…, callbacks=[AtollCallback(run)])
    trainer.train(resume_from_checkpoint=last_checkpoint(trainer.args.output_dir))

Gradient accumulation, schedulers, fp16, bf16, PEFT and checkpoints stay the Trainer's. The callback attaches when
training begins, reports the loss of every step, stops the Trainer when the run is over, and then closes the run.

A checkpoint of the Trainer holds the optimizer, the scheduler and the place in the data. The run's folder holds the
agreed model, which replaces the checkpoint's. Both fit together where a round has just been agreed. So a save that
the Trainer asks for within a round is made at the end of that round. If the run trained rounds that the Trainer did
not count, its schedule begins where the others are.
Invariants:
- A Trainer that begins after the end of its run changes no parameter.
Not responsible for: which data this member trains on (`data_seed`, or a data set of its own).
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

from atoll.integrations.late_schedule import advance_schedule
from atoll.integrations.one_process import check_single_process

if TYPE_CHECKING:
    from transformers.training_args import TrainingArguments

    from atoll.runtime.embed.run import Run

log = logging.getLogger(__name__)
STATE = "atoll"  # key in the Trainer's state, which its checkpoints hold
CHECKPOINT, WRITTEN_LAST = "checkpoint-*", "trainer_state.json"


class AtollCallback(TrainerCallback):
    """Attaches the Trainer's model and optimizer to this run, which `atoll.join` or `atoll.found` returned.

    `save_rounds=5` also saves a checkpoint after every fifth agreed round. `attach` holds further arguments of
    `run.attach`: `only`, `validate`, `state_memory`.
    """

    def __init__(self, run: Run, *, save_rounds: int = 0, **attach: Any) -> None:
        self.run, self._save_rounds, self._attach = run, save_rounds, attach
        self._losses: list[torch.Tensor] = []  # of the forward passes since the last step
        self._are_parts = False  # True if these losses are parts of the step's loss, False if it is their mean
        self._hook: Any = None
        self._round, self._is_save_due = -1, False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        check_single_process(args.world_size, "transformers.Trainer")
        steps, loader = max(1, args.gradient_accumulation_steps), kwargs.get("train_dataloader")
        known: dict[str, Any] = {"batch": args.train_batch_size * steps, "after_end": "skip"}
        with suppress(TypeError):  # a stream has no length
            known["pass_steps"] = ceil(len(loader) / steps)  # type: ignore[arg-type]
        model = kwargs["model"]
        self.run.attach(model, kwargs["optimizer"], **known | self._attach)
        self._round = self.run.round
        self._hook = model.register_forward_hook(self._see_loss, with_kwargs=True)
        kept: Any = state.stateful_callbacks
        before = kept.get(STATE, {}).get("trained")
        advance_schedule(self.run, kwargs.get("lr_scheduler"), before)
        if before is not None and before != self.run.trained and not self.run.done:  # after the end none follows
            log.warning(
                "the Trainer's checkpoint was written after %s agreed rounds, and the run is at %s: the model is "
                "the agreed one; step %s and its data follow",
                *(before, self.run.trained, state.global_step + 1),
            )

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._losses and not self.run.done:
            loss = float(sum(self._losses))
            self.run.report(loss if self._are_parts else loss / len(self._losses))
        self._losses.clear()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        is_agreed, self._round = self.run.round != self._round, self.run.round
        kept: Any = state.stateful_callbacks
        kept[STATE] = {"trained": self.run.trained}
        self._is_save_due |= control.should_save
        if self._save_rounds and is_agreed:
            self._is_save_due |= self.run.trained % self._save_rounds == 0
        if self.run.done:
            control.should_training_stop = True
            self._is_save_due |= args.save_strategy != SaveStrategy.NO
        control.should_save = self._is_save_due and (is_agreed or control.should_training_stop)
        self._is_save_due &= not control.should_save

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._is_save_due |= control.should_save
        control.should_save = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._hook.remove()
        self.run.close()

    def _see_loss(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook: keeps the loss that the Trainer takes from this output."""
        if not (model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return
        with suppress(KeyError, IndexError, TypeError):
            loss = output["loss"] if isinstance(output, dict) else output[0]
            if isinstance(loss, torch.Tensor) and loss.ndim == 0:
                self._losses.append(loss.detach())
                self._are_parts = kwargs.get("num_items_in_batch") is not None


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest checkpoint in this folder that was written to its end; None if there is none.

    For `trainer.train(resume_from_checkpoint=…)`: a process that is killed while it saves leaves half a checkpoint,
    which the Trainer itself would take.
    """
    found = dict[int, str]()
    for folder in Path(output_dir).glob(CHECKPOINT):
        with suppress(OSError, ValueError, KeyError):
            found[int(json.loads((folder / WRITTEN_LAST).read_text())["global_step"])] = str(folder)
    return found[max(found)] if found else None
