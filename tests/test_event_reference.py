"""The page of facts is what the types say."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from event_reference import PAGE, page_text


def test_the_page_of_facts_is_the_one_that_the_types_give():
    """If it differs: python tools/event_reference.py. A changed or removed field needs a higher EVENTS_VERSION."""
    assert PAGE.read_text() == page_text()
