"""`atoll config`: prints the settings in effect, or every setting with its meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from atoll.base.errors import UsageError
from atoll.cli.say import AsJson, Sets, say, say_json


def config(
    file: Annotated[Path | None, Parameter(help="run.toml. Default: none, so defaults and environment.")] = None,
    /,
    *,
    all: Annotated[bool, Parameter(negative="", help="Print a commented run.toml with every setting.")] = False,
    set: Sets = [],  # noqa: B006  # cyclopts reads it, no code changes it
    json: AsJson = False,
) -> None:
    """Print the settings in effect: key, value, and where it comes from. --all explains every setting."""
    from atoll.peer.config.render import commented_toml
    from atoll.peer.config.sections import toml_text
    from atoll.runtime.config import settings_in_effect

    if all and (file or set):
        raise UsageError(
            "E-ARG-15", "--all prints defaults only, not a file", fix="leave out --all, or file and --set"
        )
    if all:
        text = commented_toml()
        return say_json({"toml": text}) if json else say(text.rstrip())
    found = settings_in_effect(file, set)
    if json:
        return say_json({"settings": [{"key": k, "value": value, "source": source} for k, value, source in found]})
    for key, value, source in found:
        say(f"{key:<26} {'not used' if value is None else toml_text(value):<26} {source}")
