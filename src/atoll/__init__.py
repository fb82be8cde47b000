"""Atoll trains one PyTorch model on many machines that do not trust each other.

Stable API:
- `join` and `found` for your own training loop (`atoll.runtime.embed.api`), `RunOptions` and `Run`.
- `checkpoints` gives its agreed states to evaluations of your own (`atoll.runtime.publishing.api`).
- `local` runs such a script many times on this computer (`atoll.runtime.local_swarm`).
- `experiment` tries a recipe in one process. `reduce` is the all-reduce alone. The errors.
All other modules may change. Importing this package imports nothing heavy.
Pages that docstrings name, such as specs/codecs.md: `atoll docs specs/codecs.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.base.errors import AtollError, NetworkError, RefusedError, RunEnded, RunFailedError, UsageError
from atoll.base.version import VERSION

if TYPE_CHECKING:
    from atoll import reduce
    from atoll.runtime.embed.api import found, join
    from atoll.runtime.embed.options import RunOptions
    from atoll.runtime.embed.run import Run
    from atoll.runtime.local_swarm import local
    from atoll.runtime.publishing.api import Checkpoint, checkpoints
    from atoll.training.experiment.api import ExperimentOptions, experiment

__version__ = VERSION
__all__ = [
    "AtollError",
    "Checkpoint",
    "ExperimentOptions",
    "NetworkError",
    "RefusedError",
    "Run",
    "RunEnded",
    "RunFailedError",
    "RunOptions",
    "UsageError",
    "__version__",
    "checkpoints",
    "experiment",
    "found",
    "join",
    "local",
    "reduce",
]

for _error in (AtollError, NetworkError, RefusedError, RunEnded, RunFailedError, UsageError):
    _error.__module__ = __name__  # tracebacks show the name that users import

_LAZY = {  # modules that import torch
    "Checkpoint": "atoll.runtime.publishing.api",
    "checkpoints": "atoll.runtime.publishing.api",
    "Run": "atoll.runtime.embed.run",
    "RunOptions": "atoll.runtime.embed.options",
    "found": "atoll.runtime.embed.api",
    "join": "atoll.runtime.embed.api",
    "local": "atoll.runtime.local_swarm",
    "experiment": "atoll.training.experiment.api",
    "ExperimentOptions": "atoll.training.experiment.api",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "reduce" or name in _LAZY:
        from atoll.runtime.system import check_system

        check_system()
    if name == "reduce":  # a module; resolved here for scripts that only `import atoll`
        return import_module("atoll.reduce")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
