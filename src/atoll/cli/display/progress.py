"""Progress of long commands on a terminal: a spinner with the elapsed time, or a bar with the time left.

Both are drawn on standard error and vanish at the end, so standard output stays as it is. Without a terminal nothing
is drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

POLL_S = 0.2  # seconds between two looks at a download


@contextmanager
def busy(text: str) -> Iterator[None]:
    """Show what the command is doing, and for how long already."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(text, total=None)
        yield


@contextmanager
def transfer(text: str, transferred: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Show a download: bytes that are here, of all, and the time left. All are 0 until the size is known."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    ended = Event()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)

        def follow() -> None:
            while not ended.wait(POLL_S):
                here, whole = transferred()
                bar.update(task, completed=here, total=whole or None)

        watcher = Thread(target=follow, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
