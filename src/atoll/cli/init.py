"""What ships with Atoll: `atoll init` writes a run.toml or an example program, `atoll docs` prints a page."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from atoll.base.errors import UsageError
from atoll.cli.say import AsJson, say, say_json


def init(
    file: Annotated[Path | None, Parameter(help="File to write. Default: run.toml, or NAME.py.")] = None,
    /,
    *,
    example: Annotated[
        str, Parameter(help="Write this example program instead; `--example list` names all of them.")
    ] = "",
    force: Annotated[bool, Parameter(negative="", help="Overwrite the file.")] = False,
    json: AsJson = False,
) -> None:
    """Write a short run.toml with the settings that most people change, or an example program."""
    from atoll.peer.config.render import first_toml

    if example == "list":
        return _list(json)
    file = file or Path(f"{example}.py" if example else "run.toml")
    text = _program(example) if example else first_toml()
    if file.exists() and not force:
        again = f" --example {example}" if example else ""
        raise UsageError(
            "E-ARG-08", f"{file} is there already", fix=f"atoll init {file}{again} --force, or name another file"
        )
    try:
        file.write_text(text, "utf-8")
    except OSError as why:
        raise UsageError("E-ARG-04", f"cannot write {file}: {why.strerror}", fix="name another file") from None
    if json:
        say_json({"path": str(file)})
    elif example:
        say(f"wrote {file}; its first lines say how to run it")
    else:
        say(f"wrote {file}; change it, then: atoll up {file} (every setting: atoll config --all)")


def _program(name: str) -> str:
    from atoll.runtime.shipped_files import example_text, examples

    known = examples()
    if name not in known:
        raise UsageError(
            "E-ARG-19",
            f"there is no example {name!r}; there are {', '.join(known)}",
            fix="atoll init --example list says what each of them is",
        )
    return example_text(known[name])


def _list(json: bool) -> None:
    from atoll.runtime.shipped_files import examples

    first = {name: file.read_text("utf-8").split('"""')[1].splitlines()[0] for name, file in examples().items()}
    if json:
        return say_json({"examples": first})
    width = max(map(len, first))
    for name, about in first.items():
        say(f"{name:<{width}}  {about}")


def docs(
    page: Annotated[
        str, Parameter(help="A page as texts name it: specs/round.md, or round. Default: all pages.")
    ] = "",
    /,
    *,
    json: AsJson = False,
) -> None:
    """Print a page of the documentation. Without a page: where the pages are, and their names."""
    from atoll.runtime.shipped_files import pages, shipped_folder

    folder, known = shipped_folder(), pages()
    if not page:
        return say_json({"folder": str(folder), "pages": known}) if json else say("\n".join([f"{folder}:", *known]))
    found = [page] if page in known else [one for one in known if page in (Path(one).name, Path(one).stem)]
    if len(found) > 1:
        named = ", ".join(found)
        raise UsageError("E-ARG-20", f"several pages are called {page!r}: {named}", fix=f"atoll docs {found[0]}")
    if not found:
        names = {Path(one).stem: one for one in known}
        near = "".join(f"atoll docs {names[one]}; " for one in get_close_matches(Path(page).stem, names, 1))
        raise UsageError("E-ARG-20", f"there is no page {page!r}", fix=f"{near}atoll docs names every page")
    text = (folder / found[0]).read_text("utf-8")
    if json:
        say_json({"page": found[0], "path": str(folder / found[0]), "text": text})
    else:
        say(text.rstrip())
