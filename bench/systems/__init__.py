"""Systems that average tensors, each behind the same door, so that one bench can time them all.

One module per system holds one class; one process per peer makes one object of it (`peer.py`). The object owns the
vector `x`, because some systems keep it in memory of their own. What is timed is `average()` and nothing else.
Never judges: whether the mean is right is measured outside (`data.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

BENCH = Path(__file__).resolve().parent.parent
OWN_PYTHON = BENCH / ".venv" / "bin" / "python"  # what is compared with, but not needed, is installed there


@dataclass(frozen=True)
class Task:
    """What one peer is told about the group it will be in."""

    system: str  # of atoll also with a statistic and a trust: "atoll+median+community"
    rank: int  # 0 is the one that invites
    peers: int
    values: int  # of fp32 in the vector
    codec: str
    topology: str
    folder: str  # of the group; empty at first
    losses: int = 0  # peers that may die: 0 lets a system insist on everybody
    way_back: str = ""  # of atoll: a codec, "gathered", or "remembered": the codec's, whose owners remember
    device: str = "cpu"  # where the vector lies, of those systems that take it from anywhere (DEVICES)


@dataclass(frozen=True)
class Done:
    """What a system says about an all-reduce that ended."""

    count: int  # peers in the mean
    contributors: tuple[str, ...] | None = None  # who, if it names them
    partly: tuple[str, ...] = ()  # who is in some parts of the mean only, if it says so
    parts: tuple[tuple[int, int, tuple[str, ...]], ...] = ()  # per [lo, hi) of the values who is in, if it says so


class System(Protocol):
    """One peer of a group. Errors of the system come out as they are."""

    x: torch.Tensor  # (values,) fp32, written by the bench before each `average`, read after it
    me: str  # how the others name this peer, from `enter` on

    def __init__(self, task: Task) -> None: ...

    def invite(self) -> str:
        """Where to find the group. Rank 0 is asked first and makes it; later anybody may be asked."""
        ...

    def enter(self, invitation: str) -> None:
        """Come together. May return before the others are there."""
        ...

    def average(self) -> Done:
        """Turn `x` into the mean of everybody's `x`, in place; returns when `x` holds it."""
        ...

    def leave(self) -> None: ...


CLASSES = {
    "tcp": ("systems.tcp", "Tcp"),
    "gloo": ("systems.gloo", "Gloo"),
    "torchft": ("systems.torchft", "Torchft"),
    "hivemind": ("systems.hivemind", "Hivemind"),
    "atoll": ("systems.atoll", "Atoll"),
}
CODECS = {  # what each can send; of atoll's there is no list here, a wrong name is its own ValueError
    "tcp": ("fp32",),
    "gloo": ("fp32",),
    "torchft": ("fp32",),  # its fp8 needs a GPU
    "hivemind": ("fp32", "fp16", "int8"),
}
OPTIONAL = {"hivemind": "hivemind==1.1.12", "torchft": "torchft==0.2.0"}  # in the bench's own environment
PINS = ("torch==2.13.0", "numpy==2.2.6", *OPTIONAL.values())  # hivemind's int8 averages nothing from NumPy 2.3 on


DEVICES = ("atoll", "gloo")  # average vectors of a GPU, too


def vector(task: Task) -> torch.Tensor:
    return torch.zeros(task.values, device=task.device)


def made(task: Task) -> System:
    from importlib import import_module

    module, name = CLASSES[task.system.partition("+")[0]]
    system: Any = getattr(import_module(module), name)
    return system(task)
