"""What cannot be a member is refused before a run is founded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

import atoll
from atoll.integrations.accelerate import attach
from atoll.runtime.embed.loop_model import plain_optimizer


class Slow(torch.optim.Optimizer):
    """A wrapper that never called Optimizer.__init__: torch cannot run hooks at its steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = inner, inner.param_groups


def test_an_optimizer_is_taken_out_of_the_wrappers_that_only_pass_its_steps_on(tmp_path: Path):
    """Other wrappers do more in a step than the optimizer inside, so a hook there would come too early."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert plain_optimizer(Accelerator(cpu=True).prepare(optimizer)) is plain_optimizer(optimizer) is optimizer
    with pytest.raises(atoll.UsageError, match=r"E-ATT-18 the steps of a Slow cannot be followed"):
        atoll.found(folder=tmp_path / "one").attach(model, Slow(optimizer))
    with pytest.raises(atoll.UsageError, match=r"E-ATT-19 Accelerate trains this model in 2 processes"):
        two = SimpleNamespace(num_processes=2, gradient_accumulation_steps=1, unwrap_model=lambda model: model)
        attach(atoll.found(folder=tmp_path / "one"), two, model, optimizer)
    assert not (tmp_path / "one").exists()
