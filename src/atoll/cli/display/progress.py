"""Progress of long commands on a terminal: a spinner with the elapsed time, or a bar with the time left.

Both are drawn on standard error and vanish at the end, so standard output stays as it is.
Nothing is drawn without a terminal.
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


class DownloadBar:
    """Bar of a download: bytes that are here, of all, and the time left. Without a size yet, it only moves."""

    def __init__(self, text: str) -> None:
        self.text, self.ended = text, Event()
        self.transferred: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def show(self, transferred: Callable[[], tuple[int, int]]) -> None:
        """Follow what this function returns: (bytes here, bytes in all)."""
        self.transferred = transferred

    def __enter__(self) -> DownloadBar:
        self.watcher = Thread(target=self._follow, daemon=True)
        if sys.stderr.isatty():
            self.watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.watcher.is_alive():
            self.watcher.join()

    def _follow(self) -> None:
        from rich import progress
        from rich.console import Console

        text, left = progress.TextColumn("{task.description}", markup=False), progress.TimeRemainingColumn()
        columns = text, progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn(), left
        with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(self.text, total=None)
            while not self.ended.wait(POLL_S):
                here, whole = self.transferred()
                bar.update(task, completed=here, total=whole or None)
