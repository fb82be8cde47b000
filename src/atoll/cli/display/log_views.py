"""Views of a running peer for logs: lines with times, lines of JSON, warnings only, or every fact.

Invariants:
- A full disk or a reader that left never ends the peer.
Not responsible for: the words of a line (`cli/watch.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from atoll.base.ids import one_line
from atoll.cli.say import json_text, say
from atoll.runtime.event_log import RunStatus

LineOf = Callable[[dict[str, Any], RunStatus], str]
FIGURES = (
    "round",
    "trained",
    "loss",
    "counted",
    "missing",
    "bytes_out",
    "bytes_in",
    "peer",
    "why",
    "code",
    "address",
)
VIEWS = "atoll.cli.watch"  # logger of what views print
LINE_MAX = 2000  # characters of one log message


class LogView:
    """View that prints lines; its functions give the words, and `write` decides their form."""

    ends_with_stdin = False

    def __init__(
        self,
        line_of: LineOf,
        introduction: Callable[[dict[str, Any]], str],
        farewell: Callable[[dict[str, Any]], str],
        *,
        quiet: bool = False,
        verbose: bool = False,
    ) -> None:
        self.line_of, self.introduction, self.farewell = line_of, introduction, farewell
        self.quiet, self.verbose = quiet, verbose

    def opened(self, news: dict[str, Any]) -> None:
        if not self.quiet:
            self.write("Opened", self.introduction(news), news)
        elif news["ticket"]:
            self.write("Opened", f"atoll join {news['ticket']}", news)

    def entry(self, entry: dict[str, Any], progress: RunStatus) -> None:
        line = self.line_of(entry, progress)
        if not line and self.verbose:
            figures = {key: value for key, value in entry.items() if isinstance(value, str | int | float)}
            line = one_line(" ".join(f"{key}={value}" for key, value in figures.items()), LINE_MAX)
        if line and (not self.quiet or line.startswith("!")):
            self.write(entry["fact"], line, {key: entry[key] for key in FIGURES if key in entry} | _left(progress))

    def notice(self, text: str) -> None:
        if not self.quiet or text.startswith("!"):
            self.write("Notice", text, {})

    def ended(self, news: dict[str, Any]) -> None:
        self.write("Ended", self.farewell(news), news)

    def write(self, event: str, text: str, fields: dict[str, Any]) -> None:
        with suppress(OSError):
            say(text)


class TimestampedLogView(LogView):
    """Lines that begin with the time, in UTC."""

    def write(self, event: str, text: str, fields: dict[str, Any]) -> None:
        for line in text.splitlines():
            if line.strip():
                super().write(event, f"{_now()} {line}", fields)


class JsonLogView(LogView):
    """One object per line: time, level, event, message and the figures of the event."""

    def write(self, event: str, text: str, fields: dict[str, Any]) -> None:
        level = "warning" if text.startswith("!") else "info"
        told = {"time": _now(), "level": level, "event": event, "message": text.removeprefix("! ")}
        with suppress(OSError):
            print(json_text(told | {k: v for k, v in fields.items() if k not in told}), flush=True)


class NoticeLogHandler(logging.Handler):
    """Handler that shows messages of the log as notices of a view, except lines that the view prints itself."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.notice = notice

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == VIEWS:
            return
        mark = "! " if record.levelno >= logging.WARNING else ""
        self.notice(one_line(f"{mark}{record.name}: {record.getMessage()}", LINE_MAX))


def _left(progress: RunStatus) -> dict[str, Any]:
    return {} if progress.left_s is None else {"left_s": round(progress.left_s)}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
