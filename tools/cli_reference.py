"""Reference page of the command line (docs/reference/cli.md), written by cyclopts from the commands.

Usage: make reference
"""

from __future__ import annotations

import re
from pathlib import Path

from atoll.cli.main import app

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
HEAD = """# Command line

Every command of `atoll`, its arguments and its options. `atoll VERB --help` shows the same text.

| exit status | meaning |
|---|---|
| 0 | success |
| 2 | the request is wrong: an option, a setting or a file |
| 3 | no peer answered, or an address cannot be reached |
| 4 | a peer answered and refused |
| 5 | the run failed |
| 130 | ended by Ctrl-C |

Every error has a code; [errors.md](errors.md) lists them. Settings for `--set` are in [config.md](config.md).

This page is generated: `make reference` writes it anew.
"""


def page_text() -> str:
    """The page for the commands of this version: head, list of commands, one section for each."""
    text = re.sub(r"\A# atoll\n", "", app.generate_docs())
    text = re.sub(r"^(atoll[a-z ]*) -m \S+", r"\1", text, flags=re.M)  # the rest of `python -m pytest`
    text = text.replace(
        "(#atoll-install-completion)", "(#atoll---install-completion)"
    )  # as GitHub and Sphinx name it
    text = re.sub(r"^## Table of Contents\n.*?(?=^\*\*Begin)", "", text, flags=re.M | re.S)
    return HEAD + text.rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page_text())
