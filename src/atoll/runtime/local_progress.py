"""Progress of a swarm on this computer: a bar of the agreed rounds, loss and time left, from the founder's facts.

In a terminal the bar is live. In a notebook it is one output that is replaced. Elsewhere nothing is shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import get_console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from atoll.runtime.event_log import RunStatus
from atoll.runtime.log_follower import LogFollower

COLUMNS = ("{task.fields[rounds]}", "{task.fields[loss]}")


class SwarmProgress:
    """The bar; `update` reads what the founder has logged since."""

    def __init__(self, facts: Path, peers: int) -> None:
        self._news, self._status = LogFollower(facts), RunStatus()
        console = get_console()
        texts = [TextColumn(text) for text in COLUMNS]
        self._bar = Progress(BarColumn(), *texts, TimeRemainingColumn(), console=console)
        self._task = self._bar.add_task("", total=None, rounds=f"starting {peers} processes", loss="")
        self._is_live, self._cell = console.is_terminal, None
        if console.is_jupyter:
            from IPython.display import display  # type: ignore[import-not-found]

            self._is_live, self._cell = False, display(self._table(), display_id=True)
        if self._is_live:
            self._bar.start()

    def update(self) -> None:
        before = self._status.trained
        for entry in self._news.read():
            self._status.fold(entry)
        if self._status.trained == before:
            return
        loss = "" if self._status.loss is None else f"loss {self._status.loss:.4f}"
        total, trained = self._status.rounds or None, self._status.trained
        rounds = f"{trained} of {total} rounds" if total else f"{trained} rounds"
        self._bar.update(self._task, total=total, completed=trained, rounds=rounds, loss=loss)
        if self._cell is not None:
            self._cell.update(self._table())

    def close(self) -> None:
        self.update()
        if self._is_live:
            self._bar.stop()
        self._news.close()

    def _table(self) -> Any:
        return self._bar.make_tasks_table(self._bar.tasks)
