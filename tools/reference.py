"""Writes every generated page. Each `*_reference.py` here has a PAGE and a function page_text().

Usage: make reference
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

GENERATORS = sorted(Path(__file__).parent.glob("*_reference.py"))


def generated_pages() -> dict[Path, Callable[[], str]]:
    """Every generated page with the function that returns its text."""
    modules = [import_module(file.stem) for file in GENERATORS]
    return {module.PAGE: module.page_text for module in modules}


if __name__ == "__main__":
    for generator in GENERATORS:
        sys.argv = [str(generator)]
        runpy.run_path(str(generator), run_name="__main__")
