"""A loop of another library that comes back from a checkpoint older than its run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.integrations import lightning, transformers


def trainer_comes_back(run: Any) -> None:
    state = SimpleNamespace(stateful_callbacks={transformers.STATE: {"trained": 7}}, global_step=80)
    args = SimpleNamespace(world_size=1, gradient_accumulation_steps=1, train_batch_size=4)
    transformers.AtollCallback(run).on_train_begin(
        args, state, None, model=torch.nn.Linear(2, 2), optimizer=None, train_dataloader=[0]
    )


def lightning_comes_back(run: Any) -> None:
    callback = lightning.AtollLightningCallback(run)
    callback.load_state_dict({"trained": 7})
    trainer = SimpleNamespace(
        world_size=1,
        optimizers=[None],
        train_dataloader=None,
        accumulate_grad_batches=1,
        global_step=80,
        lr_scheduler_configs=(),
    )
    callback.on_train_start(trainer, None)


@pytest.mark.parametrize("comes_back", [trainer_comes_back, lightning_comes_back])
def test_no_step_follows_a_checkpoint_after_the_end_of_the_run(comes_back: Any, caplog: pytest.LogCaptureFixture):
    """The checkpoint is of 7 rounds, the run is at 8: it goes on, then it is over."""
    run = SimpleNamespace(attach=lambda *_, **__: None, round=9, trained=8, done=False)
    comes_back(run)
    assert "step 81 and its data follow" in caplog.text
    caplog.clear()
    run.done = True
    comes_back(run)
    assert not caplog.text
