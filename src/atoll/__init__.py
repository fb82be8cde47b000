"""Atoll trains one PyTorch model on many machines that nobody fully controls.

What stands here is promised to stay: `join`, `found` and `local` for your own training loop (`atoll.host.attach`),
`Run`, which they return, `experiment`, which tries a recipe in one process, `reduce`, the all-reduce alone, and the
errors. All else may move. Importing this package imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.base.errors import AtollError, NetworkError, RefusedError, RunFailedError, UsageError

if TYPE_CHECKING:
    from atoll import reduce
    from atoll.host.attach import Run, found, join, local
    from atoll.learn.experiment import experiment

__version__ = "0.1.0"
__all__ = [
    "AtollError",
    "NetworkError",
    "RefusedError",
    "Run",
    "RunFailedError",
    "UsageError",
    "__version__",
    "experiment",
    "found",
    "join",
    "local",
    "reduce",
]

_LAZY = {  # they import torch
    "Run": "atoll.host.attach",
    "found": "atoll.host.attach",
    "join": "atoll.host.attach",
    "local": "atoll.host.attach",
    "experiment": "atoll.learn.experiment",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "reduce":  # a module of its own, for whoever says no more than `import atoll`
        return import_module("atoll.reduce")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
