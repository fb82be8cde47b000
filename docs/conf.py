"""Documentation site: `make docs` builds docs/_build/html from the Markdown pages, without the network.

The source folder is the repository's root, so relative links work both on the site and in a checkout.
"""

import re
from typing import Any

from atoll.base.version import VERSION

project = "Atoll"
author = copyright = "The Atoll authors"
version = release = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["docs/**", "specs/**", "bench/RESULTS.md"]
include_patterns += ["README.md", "ARCHITECTURE.md", "GLOSSARY.md", "SECURITY.md", "CHANGELOG.md"]
exclude_patterns = ["docs/_build"]

myst_heading_anchors = 4  # links such as page.md#heading, as code hosts make them
copybutton_prompt_text = "$ "
smartquotes = False  # texts hold code, such as trust="open"

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"Atoll {VERSION}"
html_static_path = ["_static"]
html_extra_path = ["_extra"]
html_css_files = ["atoll.css"]
html_copy_source = False
html_show_copyright = False


def _plain_text(app: Any, what: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with `names`: keep stars, underscores, code and lists of names as they are."""
    if lines[:1] and lines[0].startswith("Alias for field number"):  # of a NamedTuple
        lines.clear()
    parts = []
    for part in "\n".join(lines).strip().split("\n\n"):
        if part.startswith("    "):
            parts.append(f"::\n\n{part}")
            continue
        words = part.split("`")
        words[::2] = [re.sub(r"([*_|\\])", r"\\\1", word) for word in words[::2]]
        text = "``".join(words)
        is_list = len(re.findall(r"^``[^`]+``[:,]", text, re.M)) > 1
        parts.append("\n".join(f"| {line}" for line in text.split("\n")) if is_list else text)
    lines[:] = "\n\n".join(parts).split("\n")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _plain_text)
