"""Atoll trains one PyTorch model on many machines that nobody fully controls.

What stands here is promised to stay: `join`, `found` and `local` for your own training loop (`atoll.host.attach`),
`Run`, which they return, and the errors. Everything else may move. Importing this package imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.base.errors import AtollError, NetworkError, RefusedError, RunFailedError, UsageError

if TYPE_CHECKING:
    from atoll.host.attach import Run, found, join, local

__version__ = "0.1.0"
__all__ = [
    "AtollError",
    "NetworkError",
    "RefusedError",
    "Run",
    "RunFailedError",
    "UsageError",
    "__version__",
    "found",
    "join",
    "local",
]

_LAZY = ("Run", "found", "join", "local")  # they import torch


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from atoll.host import attach

        return getattr(attach, name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
