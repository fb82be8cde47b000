"""Atoll trains one PyTorch model on many machines that nobody fully controls.

What stands here is promised to stay: `join` and `found` for your own training loop (`atoll.runtime.embed.api`)
with the
`Run` that they return (`atoll.runtime.embed.run`), `local`, which runs such a script many times on this computer
(`atoll.runtime.local_swarm`), `experiment`, which tries a recipe in one process, `reduce`, the all-reduce alone,
and the
errors. All else may move. Importing this package imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.base.errors import AtollError, NetworkError, RefusedError, RunFailedError, UsageError

if TYPE_CHECKING:
    from atoll import reduce
    from atoll.runtime.embed.api import found, join
    from atoll.runtime.embed.run import Run
    from atoll.runtime.local_swarm import local
    from atoll.training.experiment.api import ExperimentOptions, experiment

__version__ = "0.1.0"
__all__ = [
    "AtollError",
    "ExperimentOptions",
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
    "Run": "atoll.runtime.embed.run",
    "found": "atoll.runtime.embed.api",
    "join": "atoll.runtime.embed.api",
    "local": "atoll.runtime.local_swarm",
    "experiment": "atoll.training.experiment.api",
    "ExperimentOptions": "atoll.training.experiment.api",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "reduce":  # a module of its own, for whoever says no more than `import atoll`
        return import_module("atoll.reduce")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
