"""Writes every generated page. Each `*_reference.py` here has a PAGE and a function page_text().

Usage: make reference
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def generated_pages() -> dict[Path, Callable[[], str]]:
    """Every generated page with the function that returns its text."""
    modules = [import_module(file.stem) for file in sorted(Path(__file__).parent.glob("*_reference.py"))]
    return {module.PAGE: module.page_text for module in modules}


if __name__ == "__main__":
    for page, text in generated_pages().items():
        page.parent.mkdir(exist_ok=True)
        page.write_text(text())
