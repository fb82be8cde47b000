"""Files that ship beside the code: examples, and the pages of documentation that error texts and help name.

A wheel holds them in `atoll/shipped` (pyproject.toml, force-include). A checkout has them where they are written.
Invariants:
- A name has the same form in both: `examples/mnist.py`, `specs/round.md`.
Not responsible for: the generated site (docs/conf.py).
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def shipped_folder() -> Path:
    """The folder that holds `examples`, `docs` and `specs`."""
    installed = PACKAGE / "shipped"
    return installed if installed.is_dir() else PACKAGE.parents[1]


def examples() -> dict[str, Path]:
    """Every example program by name."""
    return {file.stem: file for file in sorted((shipped_folder() / "examples").glob("*.py"))}


def example_text(file: Path) -> str:
    """The program as it is written elsewhere: the commands in it name it without its folder."""
    return file.read_text("utf-8").replace(f"examples/{file.name}", file.name)


def pages() -> list[str]:
    """Every shipped page, as error texts and help name it: `specs/round.md`."""
    folder = shipped_folder()
    places = ("*.md", "docs/*.md", "docs/*/*.md", "specs/*.md", "bench/*.md")
    return sorted(str(page.relative_to(folder)) for place in places for page in folder.glob(place))
