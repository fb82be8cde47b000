"""`atoll watch`: the view of a peer in a second terminal, read from its event log. It asks the peer nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.base.errors import UsageError
from atoll.cli.display.options import OutputOptions
from atoll.cli.say import Dir, folder_of, say_json

POLL_S = 0.3  # seconds between two looks at the log


def watch(dir: Dir = None, *, output: OutputOptions = OutputOptions()) -> None:
    """Show a running peer in another terminal: its live picture and events, until it ends or Ctrl-C."""
    from atoll.cli.watch import LiveTerminalView, view_of
    from atoll.runtime.event_log import RunStatus, entries_in

    folder = folder_of(dir)
    record = folder / "facts.jsonl"
    if not record.exists():
        raise UsageError(
            "E-ARG-18",
            f"there is no event log in {folder}",
            cause="no peer has run in this folder, or it was started with another --dir",
            fix="atoll watch FOLDER, with the --dir of `atoll up` or `atoll join`",
        )
    view, progress = view_of(output), RunStatus()
    end = record.stat().st_size  # lines from here on are news
    for entry in entries_in(record):
        progress.fold(entry)
    if isinstance(view, LiveTerminalView):
        view.progress = progress
        view.live.start()
    try:
        for entry in _news(folder, record, end):
            progress.fold(entry)
            view.entry(entry, progress)
    finally:
        if isinstance(view, LiveTerminalView):
            view.close()
    if output.json and not output.facts:
        say_json({"folder": str(folder), "trained": progress.trained, "over": progress.over})
    view.notice(f"the peer in {folder} has ended; atoll up --dir {folder} resumes it")


def _news(folder: Path, record: Path, begin: int) -> Iterator[dict[str, Any]]:
    """Entries after this place of the log, as they come, until the peer has ended."""
    from atoll.runtime.control.socket import is_running
    from atoll.runtime.log_follower import LogFollower

    log, runs = LogFollower(record, begin), True
    while runs:
        runs = is_running(folder)  # asked first: what it wrote before its end is read below
        yield from log.read()
        if runs:
            time.sleep(POLL_S)
    log.close()
