"""Output of commands: text for people on a terminal, one JSON object for programs, errors on stderr.

Invariants:
- With `--json` (or `--facts`) stdout holds nothing but JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from atoll.base.errors import AtollError, UsageError
from atoll.base.ids import one_line, printable
from atoll.runtime.peer_folder import DEFAULT_DIR

Dir = Annotated[Path | None, Parameter(name="--dir", help="A peer's folder. Default: $ATOLL_DIR, or ./atoll-run.")]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Answer with one JSON object.")]
Sets = Annotated[
    list[str],
    Parameter(name="--set", negative="", help="section.key=value; overrides file and environment; repeatable."),
]
TicketFile = Annotated[
    Path | None,
    Parameter(
        name="--ticket-file",
        help="Read the ticket from this file: other users of the computer can see the words of a command.",
    ),
]
UNNAMED = "run"  # default of run.name
TICKET_FILE_MAX = 64 * 1024  # characters; a ticket is one line of some hundreds


def ticket_of(given: str, file: Path | None) -> str:
    """The ticket as given; `-` reads the first line of standard input, and `file` names a file that holds one."""
    if given and file is not None:
        raise UsageError("E-ARG-14", "a ticket and --ticket-file exclude each other", fix="leave one of them out")
    if given == "-":
        given = sys.stdin.readline(TICKET_FILE_MAX)
    elif file is not None:
        with file.expanduser().open(encoding="utf-8-sig", errors="replace") as lines:
            given = lines.readline(TICKET_FILE_MAX)
    else:
        return given
    if not given.strip():
        where = "standard input" if file is None else str(file)
        raise UsageError("E-ARG-05", f"there is no ticket in {where}", fix="atoll invite, at a member, makes one")
    return given.strip()


def ticket_then_folder(ticket: str, dir: Path | None, file: Path | None) -> tuple[str, Path | None]:
    """The two words by what they are, for `join - FOLDER` and `join --ticket-file FILE FOLDER`."""
    if dir == Path("-"):
        return "-", Path(ticket)
    return ("", Path(ticket)) if file and ticket and ":" not in ticket and dir is None else (ticket, dir)


def folder_of(given: Path | None) -> Path:
    """The peer's folder: as given, else from ATOLL_DIR, else ./atoll-run."""
    folder = (given or Path(os.environ.get("ATOLL_DIR", DEFAULT_DIR))).expanduser()
    # the last name is not resolved: if it is a link, its owner is checked
    return folder.resolve() if folder.name in ("", "..") else folder.parent.resolve() / folder.name


def json_text(value: Any) -> str:
    """One line of JSON that is safe to print: control characters are escaped as \\uXXXX."""
    text = msgspec.json.encode(value, enc_hook=str).decode()
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def say_json(value: Any) -> None:
    sys.stdout.write(json_text(value) + "\n")
    sys.stdout.flush()


def say(text: str = "") -> None:
    print(printable(text), flush=True)


def say_trouble(why: AtollError, as_json: bool) -> int:
    """Print what happened, the likely cause and the next command; returns the exit status."""
    if as_json:
        told = {"error": why.code, "what": why.what, "cause": why.cause, "fix": why.fix, "exit": why.exit_status}
        sys.stderr.write(json_text(told) + "\n")
    else:
        sys.stderr.write(f"{printable(str(why))}\n")
    return why.exit_status


def run_title(name: str, short: str) -> str:
    """Title of the run with this name and short id; a run without a name of its own has just the id."""
    return f"run {short}" if name == UNNAMED else f"run {one_line(name)} ({short})"


def qr(text: str) -> str:
    """QR code in half blocks; tickets are upper case base32, which QR codes pack tightly."""
    import io

    import segno

    out = io.StringIO()
    segno.make_qr(text, error="l").terminal(out=out, compact=True, border=1)
    return out.getvalue()


def say_reviews(checks: Mapping[str, Mapping[str, Any]]) -> None:
    """One line per check: its title, and how many reviews had which outcome."""
    for check in checks.values():
        found = ", ".join(f"{count} {opinion}" for opinion, count in sorted(check["outcomes"].items()))
        say(f"  {check['title']}: {found or 'none yet'}")
