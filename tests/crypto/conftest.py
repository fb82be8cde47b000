from __future__ import annotations

import os

import pytest

from atoll.crypto.identity import Identity

FUZZ = int(os.environ.get("ATOLL_FUZZ", "300"))


@pytest.fixture(scope="session")
def alice() -> Identity:
    return Identity.from_seeds(b"a" * 32, b"A" * 32)


@pytest.fixture(scope="session")
def bob() -> Identity:
    return Identity.from_seeds(b"b" * 32, b"B" * 32)


@pytest.fixture(scope="session")
def mallory() -> Identity:
    return Identity.from_seeds(b"m" * 32, b"M" * 32)


@pytest.fixture(scope="session")
def fuzz() -> int:
    """How many inputs a fuzz test tries: `ATOLL_FUZZ`, by default few enough for every run."""
    return FUZZ
