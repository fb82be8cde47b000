"""Advice of a peer's errors for a user of Python: arguments in place of options of commands."""

from __future__ import annotations

import re

IN_PYTHON = (
    (re.compile(r"atoll join (?:NEW_)?TICKET --dir (\S+?)(?=[;,]|$| )"), r'atoll.join(ticket, folder="\1")'),
    (
        re.compile(r"atoll up --dir (\S+?)(?=[;,]|$| ) (?:to go|goes) on with it"),
        r'the same program goes on with it: folder="\1"',
    ),
    (re.compile(r"atoll up --announce \S+"), "RunOptions(announce=(…,)), or join(announce=(…,))"),
    (re.compile(r"--(announce|listen)\b"), r"\1="),
    (re.compile(r"\bwith --dir\b"), "with folder="),
    (re.compile(r"atoll up run\.toml, or atoll join TICKET"), "atoll.found(…), or atoll.join(ticket)"),
)


def in_python(fix: str) -> str:
    """The advice with Python's calls and arguments; commands that work beside a loop stay as they are."""
    for command, call in IN_PYTHON:
        fix = command.sub(call, fix)
    return fix
