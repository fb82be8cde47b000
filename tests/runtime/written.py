"""What comes of the words of a run.toml, for the tests of its keys."""

from __future__ import annotations

import pytest

from atoll.base.errors import UsageError
from atoll.peer.settings import RunSettings
from atoll.runtime.config import load_config, missing_protections, recipe_of, settings_of


def trouble(*sets: str) -> UsageError:
    """Why they are refused."""
    with pytest.raises(UsageError) as caught:
        load_config(None, sets, {})
    return caught.value


def trusted(*sets: str) -> tuple[RunSettings, list[str]]:
    """The run that they make, and what it does without."""
    config = load_config(None, sets, {})
    recipe = recipe_of(config)
    return settings_of(config, recipe), missing_protections(config, recipe, 0)
