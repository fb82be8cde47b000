"""`atoll init`: writes a short run.toml to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from atoll.base.errors import UsageError
from atoll.cli.say import AsJson, say, say_json


def init(
    file: Annotated[Path, Parameter(help="File to write.")] = Path("run.toml"),
    /,
    *,
    force: Annotated[bool, Parameter(negative="", help="Overwrite the file.")] = False,
    json: AsJson = False,
) -> None:
    """Write a short run.toml with the settings that most people change."""
    from atoll.peer.config.render import first_toml

    if file.exists() and not force:
        raise UsageError(
            "E-ARG-08", f"{file} is there already", fix=f"atoll init {file} --force, or name another file"
        )
    try:
        file.write_text(first_toml(), "utf-8")
    except OSError as why:
        raise UsageError("E-ARG-04", f"cannot write {file}: {why.strerror}", fix="name another file") from None
    if json:
        say_json({"path": str(file)})
    else:
        say(f"wrote {file}; change it, then: atoll up {file} (every setting: atoll config --all)")
