"""Reference page of settings (docs/reference/config.md), written from their declarations.

Usage: make reference
"""

from __future__ import annotations

from pathlib import Path

from atoll.peer.config.render import reference as page_text

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "config.md"

if __name__ == "__main__":
    PAGE.write_text(page_text())
