"""Attachment of what `accelerator.prepare` returned.

    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    run = attach(atoll.join(or_found={"rounds": 20}), accelerator, model, optimizer, batch=8)

`run.attach(model, optimizer)` works as well; this function also checks that the member is one process, takes off
the wrappers that Accelerate put around the model, and counts accumulated gradients in the batch.
`save_state` and `load_state` keep what a member needs to come back: call the former after an agreed round.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.integrations.one_process import check_single_process
from atoll.runtime.storage.atomic_files import write_durably

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from atoll.runtime.embed.run import Run

LAST = "last-step"  # name of the file with the step of the last complete state


def attach(
    run: Run,
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    batch: int = 1,
    **settings: Any,
) -> Run:
    """`run.attach` for a prepared model and optimizer; `batch` counts the samples of one batch of the loader."""
    check_single_process(accelerator.num_processes, "Accelerate")
    batch *= accelerator.gradient_accumulation_steps
    return run.attach(accelerator.unwrap_model(model), optimizer, batch=batch, **settings)


def save_state(accelerator: Accelerator, folder: str | Path, step: int) -> None:
    """`accelerator.save_state` into this folder, in place of the last one, once it is complete."""
    folder = Path(folder)
    accelerator.save_state(str(folder / f"step-{step}"))
    write_durably(folder / LAST, [str(step).encode()], exported=True)
    for old in folder.glob("step-*"):
        if old.name != f"step-{step}":
            shutil.rmtree(old)


def load_state(accelerator: Accelerator, folder: str | Path) -> int:
    """Load what `save_state` saved there last; returns its step, or 0 if there is none."""
    last = Path(folder) / LAST
    step = int(last.read_text()) if last.exists() else 0
    if step:
        accelerator.load_state(str(last.with_name(f"step-{step}")))
    return step
