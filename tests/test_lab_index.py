"""The index of lab notes lists every entry once, and entries stay short."""

from __future__ import annotations

import re
from pathlib import Path

LAB = Path(__file__).parents[1] / "docs" / "lab"
ENTRY_CHARS_MAX = 520  # four lines


def test_the_index_has_one_row_per_entry():
    """Row and heading agree in title, page and anchor."""
    rows = re.findall(r"^\|\[(.+)\]\((\S+)\.md#(\S+)\)\|(\S+)\|.+\|$", (LAB / "index.md").read_text(), re.M)
    found = []
    for page in LAB.glob("*.md"):
        for title in re.findall(r"^## (.+)$", page.read_text(), re.M):
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
            found.append((title, page.stem, anchor, page.stem))
    assert sorted(rows) == sorted(found)


def test_an_entry_has_at_most_four_lines():
    for page in LAB.glob("*.md"):
        for entry in re.split(r"^## ", page.read_text(), flags=re.M)[1:]:
            title, _, text = entry.partition("\n")
            assert len(text.strip()) <= ENTRY_CHARS_MAX, title
