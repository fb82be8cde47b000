"""Lets the tests here import `islands` and `members`: pytest's importlib mode leaves sys.path alone."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def book(tmp_path: Path) -> str:
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"{i} squared is {i * i}." for i in range(4000)))
    return str(path)
