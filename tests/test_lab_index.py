"""The index of lab notes lists every page once, and entries stay short."""

from __future__ import annotations

import re
from pathlib import Path

LAB = Path(__file__).parents[1] / "docs" / "lab"
ENTRY_CHARS_MAX = 520  # four lines


def test_the_index_has_one_row_per_page():
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \| .+ \|$", (LAB / "index.md").read_text(), re.M)
    pages = sorted(page.stem for page in LAB.glob("*.md") if page.name != "index.md")
    assert sorted(rows) == [(page, page) for page in pages]


def test_an_entry_has_at_most_four_lines():
    for page in LAB.glob("*.md"):
        for entry in re.split(r"^## ", page.read_text(), flags=re.M)[1:]:
            title, _, text = entry.partition("\n")
            assert len(text.strip()) <= ENTRY_CHARS_MAX, title
