"""`atoll watch`: the view of a peer in a second terminal, read from its event log. It asks the peer nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from atoll.base.errors import UNREADABLE, UsageError
from atoll.cli.display.options import OutputOptions
from atoll.cli.say import Dir, folder_of, say_json

_ENTRY = msgspec.json.Decoder(dict[str, Any])
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
    """Entries after this place of the log, as they come, until the peer has ended. Follows a rotated log."""
    from atoll.runtime.control.socket import is_running

    lines = record.open("rb")
    lines.seek(begin)
    rest = b""
    while True:
        runs = is_running(folder)
        rest += lines.read()
        *whole, rest = rest.split(b"\n")
        for line in whole:
            with suppress(*UNREADABLE):
                yield _ENTRY.decode(line)
        with suppress(FileNotFoundError):
            if not os.path.samestat(os.fstat(lines.fileno()), record.stat()):
                lines.close()
                lines, rest = record.open("rb"), b""
                continue
        if not runs:
            lines.close()
            return
        time.sleep(POLL_S)
