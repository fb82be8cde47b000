"""Progress of a swarm on this computer: a bar of the agreed rounds, loss and time left, from the founder's facts.

In a terminal the bar is live. In a notebook it is one output that is replaced. Elsewhere nothing is shown.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from rich import get_console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from atoll.base.errors import UNREADABLE
from atoll.runtime.event_log import RunStatus

COLUMNS = ("{task.completed} of {task.total} rounds", "{task.fields[loss]}")
_ENTRY = msgspec.json.Decoder(dict[str, Any])


class SwarmProgress:
    """The bar; `update` reads what the founder has logged since."""

    def __init__(self, facts: Path) -> None:
        self._facts, self._status = facts, RunStatus()
        self._file: BinaryIO | None = None
        console = get_console()
        texts = [TextColumn(text) for text in COLUMNS]
        self._bar = Progress(BarColumn(), *texts, TimeRemainingColumn(), console=console)
        self._task = self._bar.add_task("", total=None, loss="")
        self._is_live, self._cell = console.is_terminal, None
        if console.is_jupyter:
            from IPython.display import display  # type: ignore[import-not-found]

            self._is_live, self._cell = False, display(self._table(), display_id=True)
        if self._is_live:
            self._bar.start()

    def update(self) -> None:
        before = self._status.trained
        for line in self._new_lines():
            with suppress(*UNREADABLE):
                self._status.fold(_ENTRY.decode(line))
        if self._status.trained == before:
            return
        loss = "" if self._status.loss is None else f"loss {self._status.loss:.4f}"
        total, trained = self._status.rounds or None, self._status.trained
        self._bar.update(self._task, total=total, completed=trained, loss=loss)
        if self._cell is not None:
            self._cell.update(self._table())

    def close(self) -> None:
        self.update()
        if self._is_live:
            self._bar.stop()
        if self._file is not None:
            self._file.close()

    def _table(self) -> Any:
        return self._bar.make_tasks_table(self._bar.tasks)

    def _new_lines(self) -> list[bytes]:
        """Whole lines that were added since; a long file is replaced by a new one."""
        with suppress(FileNotFoundError):
            if self._file is None or not os.path.samestat(os.fstat(self._file.fileno()), self._facts.stat()):
                self._file = self._facts.open("rb")
        lines = list[bytes]()
        while self._file is not None and (line := self._file.readline()):
            if not line.endswith(b"\n"):
                self._file.seek(-len(line), 1)
                break
            lines.append(line)
        return lines
