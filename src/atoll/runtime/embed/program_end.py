"""Last words of a program whose loop ends by an AtollError or by Ctrl-C: the error's text, or how to come back.

Python would print a traceback of several libraries above them. `sys.excepthook` is replaced only if it is Python's
own, and passes on all other exceptions. No line that it prints shows a whole ticket.
Not responsible for: leaving the run (`PeerChannel.stop`, when Python exits); notebooks, which have no such hook.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from traceback import FrameSummary, extract_tb, format_exception
from types import TracebackType

from atoll.base.errors import AtollError
from atoll.base.ids import printable, without_tickets

LIBRARIES = tuple(
    {str(Path(__file__).parents[2])} | {sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib")}
)  # folders whose code is not the user's

_comeback: Callable[[], str | None] | None = None  # see `on_interrupt`


def end_plainly() -> None:
    """From now on, an AtollError that ends the program prints its text without a traceback, and so does Ctrl-C."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_end


def on_interrupt(comeback: Callable[[], str | None] | None) -> None:
    """After Ctrl-C, print how to come back, as this function returns it; nothing if that is empty.

    Python prints its traceback if it returns None (the run is over), or without a function.
    """
    global _comeback
    _comeback = comeback


def _print_end(kind: type[BaseException], why: BaseException, trace: TracebackType | None) -> None:
    if isinstance(why, AtollError):
        text = str(why)
    elif kind is not KeyboardInterrupt or _comeback is None or (text := _comeback()) is None:
        _print_traceback(kind, why, trace)
        return
    if not text:
        return
    frames = extract_tb(trace)
    place = next((one for one in reversed(frames) if not _is_of_library(one.filename)), None)
    sys.stderr.write(printable(text) + (f"\n  at {_place_text(place)}" if place else "") + "\n")


def _is_of_library(file: str) -> bool:
    return file.startswith(LIBRARIES) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _print_traceback(kind: type[BaseException], why: BaseException, trace: TracebackType | None) -> None:
    """Python's own traceback, except that source lines with a ticket are cut."""
    text = "".join(format_exception(kind, why, trace))
    if (cut := without_tickets(text)) == text:
        sys.__excepthook__(kind, why, trace)
    else:
        sys.stderr.write(cut)


def _place_text(place: FrameSummary) -> str:
    line = linecache.getline(place.filename, place.lineno or 0).strip()
    return printable(f"{place.filename}, line {place.lineno}" + f": {without_tickets(line)}" * bool(line))
