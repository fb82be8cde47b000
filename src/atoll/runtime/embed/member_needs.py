"""Memory and disk that a member's peer needs for a model, and the refusal of what cannot fit.

Not responsible for: the loop's own model, optimizer and activations.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from atoll.base.errors import UsageError
from atoll.base.limits import MIB
from atoll.base.units import bytes_text
from atoll.peer.config.node_sections import FeedbackPrecision, StateMemory
from atoll.runtime.system import container_bytes
from atoll.training.exchange.layout import ModelLayout

TOLD_FROM_BYTES = 64 * MIB  # smaller models fit anywhere
PROCESS_BYTES = 256 * MIB  # a peer without a model, and its buffers
# Models of fp32 in the peer's memory: values handed over, what the codec left, and encoded updates of int8, its own
# and those of others. Its state is in files. With `disk` only encoded updates remain.
MODELS_IN_MEMORY: dict[StateMemory, float] = {"memory": 3.5, "disk": 1.2}
SAVED_MODELS: dict[FeedbackPrecision, float] = {"fp32": 0.0, "bf16": 0.4}  # of memory; measured, 50 M values
# Two states of two vectors, two private files, and with `disk` the mailbox and what else is in memory
MODELS_ON_DISK: dict[StateMemory, float] = {"memory": 6.5, "disk": 8.5}
BYTES_A_VALUE = 1.01  # of an int8 update
SLOW_BYTES_S = 6.25e6  # 50 Mbit/s


@dataclass(frozen=True)
class MemberNeeds:
    values: int
    state_memory: StateMemory
    memory_bytes: int
    disk_bytes: int

    def text(self) -> str:
        update_bytes = BYTES_A_VALUE * self.values
        return (
            f"{self.values / 1e6:,.0f} M values: this peer takes up to {bytes_text(self.memory_bytes)} of memory "
            f"and {bytes_text(self.disk_bytes)} of disk, beside older states (keep.bytes_max); an int8 update is "
            f"{bytes_text(update_bytes)}, {update_bytes / SLOW_BYTES_S:.0f} s at 50 Mbit/s"
        )


def needs_of(
    layout: ModelLayout, state_memory: StateMemory, feedback_precision: FeedbackPrecision = "fp32"
) -> MemberNeeds:
    model_bytes, models = 4 * layout.floats, MODELS_IN_MEMORY[state_memory]
    if state_memory == "memory":
        models -= SAVED_MODELS[feedback_precision]
    return MemberNeeds(
        layout.floats,
        state_memory,
        int(models * model_bytes) + PROCESS_BYTES,
        int(MODELS_ON_DISK[state_memory] * model_bytes),
    )


def check_room(needs: MemberNeeds, own: Path, folder: Path) -> str:
    """What the member needs, for people; empty for a small model. Raises UsageError if it cannot fit.

    `own`: the member's folder, which may not exist yet; `folder`: one on the same disk that does.
    """
    if 4 * needs.values < TOLD_FROM_BYTES:
        return ""
    memory_bytes, disk_bytes = free_memory_bytes(), shutil.disk_usage(folder).free
    held_bytes = sum(size_of(file) for pattern in ("blobs/*", "private.*") for file in own.glob(pattern))
    if memory_bytes < needs.memory_bytes:
        less = 'run.attach(…, state_memory="disk"), ' if needs.state_memory == "memory" else ""
        raise UsageError(
            "E-ATT-16",
            f"{needs.text()}; this computer has {bytes_text(memory_bytes)} of memory free",
            fix=f"{less}exchange fewer values (only=[…], adapters), or close other programs",
        )
    if disk_bytes + held_bytes < needs.disk_bytes:
        raise UsageError(
            "E-ATT-16",
            f"{needs.text()}; the disk of {folder} has {bytes_text(disk_bytes)} free",
            fix="free some space there, or choose another folder=",
        )
    return needs.text()


def size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # removed meanwhile
        return 0


def free_memory_bytes() -> int:
    """Memory that this process could take, within the limit of its container."""
    free, limit = psutil.virtual_memory().available, container_bytes()
    return free if limit is None else min(free, limit)
