"""Four real processes over encrypted sockets end with the very bits of the experiment of their recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from exact import RECIPES, book, shown

pytestmark = [pytest.mark.long, pytest.mark.net, pytest.mark.timeout(600)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_real_run_and_the_experiment_end_with_the_same_state(tmp_path: Path, recipe: str):
    """Round by round the same name of the state, and the same bits of the model at the end."""
    settings = [f"train.recipe={recipe}", *RECIPES[recipe], f"data.source={book(tmp_path)}"]
    found = shown(settings, tmp_path)
    assert found.same, found
