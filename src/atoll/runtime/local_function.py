"""A function in another process of this computer: `python -m atoll.runtime.local_function CALL RESULT`.

`atoll.local(function)` writes the call, and reads the result once the process has ended. Both files lie in the
swarm's own folder, as cloudpickle writes them: functions of a notebook travel with what they refer to.
Not responsible for: anything of another computer; nothing from a peer is ever unpickled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from atoll.base.errors import UsageError
from atoll.base.ids import one_line

FAILURE = ".failed"  # suffix of the file beside the result, for a notebook that does not show the processes' stderr


def cloudpickle() -> ModuleType:
    """The library. UsageError if it is not installed."""
    try:
        import cloudpickle as library
    except ImportError:
        raise UsageError(
            "E-USE-09",
            "a function can only be sent to other processes with cloudpickle, which is not installed",
            fix="pip install cloudpickle; or write the function into a script: atoll.local('train.py')",
        ) from None
    return library


def write_call(function: Callable[..., Any], words: Sequence[str], to: Path) -> None:
    to.write_bytes(cloudpickle().dumps((function, tuple(words))))


def read_failure(path: Path) -> str:
    """First line of the exception that ended the function, whose process printed all; empty if there was none."""
    with suppress(OSError):
        return one_line(path.with_suffix(FAILURE).read_text("utf-8", "replace").partition("\n")[0])
    return ""


def forget_failures(folder: Path) -> None:
    """Remove what functions of an earlier call left."""
    for path in folder.glob(f"*{FAILURE}"):
        path.unlink()


def read_result(path: Path) -> Any:
    return cloudpickle().loads(path.read_bytes())


if __name__ == "__main__":
    call, result = map(Path, sys.argv[1:])
    function, words = cloudpickle().loads(call.read_bytes())
    try:
        result.write_bytes(cloudpickle().dumps(function(*words)))
    except Exception as why:
        result.with_suffix(FAILURE).write_text(f"{type(why).__name__}: {str(why).strip()}")
        raise
