"""The generated pages are what the source code gives. If one differs: make reference."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from error_reference import AREAS, CODE, messages
from reference import generated_pages

PAGES = generated_pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_committed_page_is_the_generated_one(page: Path):
    """A changed or removed field of a fact also needs a higher EVENTS_VERSION."""
    assert page.read_text() == PAGES[page]()


def test_the_page_of_errors_has_every_code_of_the_source():
    """A code that is raised in a form that the generator does not read is missing in its page."""
    source = Path(__file__).parents[1] / "src" / "atoll"
    literals = {
        code for file in source.rglob("*.py") for code in re.findall(r'"(E-[A-Z]+-\d\d)"', file.read_text())
    }
    found = messages()
    assert literals - {message.code for message in found} == set()
    assert {CODE.fullmatch(message.code)[1] for message in found} == set(AREAS)
