"""Places of settings for error messages: the file and line, or the environment variable, that gave a refused value.

Not responsible for: `--set`, whose words the user has just typed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from atoll.base.errors import UsageError

ENVIRONMENT = "ATOLL_"
_KEY = re.compile(r"[a-z]\w*\.\w+", re.IGNORECASE)


@contextmanager
def named_places(path: Path | None, sets: Sequence[str], environment: Mapping[str, str]) -> Iterator[None]:
    """Put the place of the first setting that a UsageError names before its text: `run.toml:2: run.rounds: …`."""
    try:
        yield
    except UsageError as why:
        place = _place(_KEY.findall(why.what), path, sets, environment)
        if not place:
            raise
        raise UsageError(why.code, f"{place}: {why.what}", cause=why.cause, fix=why.fix) from None


def _place(keys: Collection[str], path: Path | None, sets: Sequence[str], environment: Mapping[str, str]) -> str:
    for key in keys:
        if any(text.partition("=")[0].strip() == key for text in sets):
            return ""
        variable = ENVIRONMENT + key.upper().replace(".", "__")
        if variable in environment:
            return f"${variable}"
        if path is not None and (number := line_of_key(path.read_text("utf-8"), key)):
            return f"{path}:{number}"
    return ""


def line_of_key(text: str, key: str) -> int:
    """Number of the line in a TOML text that sets this key; 0 if it is in none, or written inside a table."""
    section, _, name = key.partition(".")
    inside = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            inside = header[1]
        elif written := re.match(r"\s*([\w-]+(?:\s*\.\s*[\w-]+)?)\s*=", line):
            dotted = written[1].replace(" ", "")
            if (inside, dotted) == (section, name) or (inside, dotted) == ("", key):
                return number
    return 0
