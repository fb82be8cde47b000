"""Arguments of `atoll.found` that the run of a folder does not follow, because it was founded with others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.peer.settings import RunSettings
from atoll.policy.presets import PRESETS
from atoll.runtime.embed.messages import RunRequest
from atoll.runtime.embed.options import INNER_STEPS
from atoll.runtime.training_spec import parse_training_spec
from atoll.training.recipe.recipes import Recipe, custom_loop_recipe

USUAL = RunRequest("")


def ignored_arguments(request: RunRequest, settings: RunSettings) -> tuple[str, ...]:
    """Arguments that the caller chose and that the run does not have, with both values where they are short."""
    try:
        recipe = parse_training_spec(settings).recipe
    except PeerFault:
        return ()  # another version founded it, which is reported elsewhere
    return tuple(
        name if has is None else f"{name}={wants!r} (it has {has!r})"
        for name, wants, _, has in _compared(request, settings, recipe)
    )


def _compared(request: RunRequest, settings: RunSettings, recipe: Recipe) -> Iterator[tuple[str, Any, Any, Any]]:
    """(name, asked value, default, value of the run or None) where the asked value is neither of the others."""
    wanted, usual = request.recipe, custom_loop_recipe(rounds=0, inner_steps=INNER_STEPS)
    if wanted is None:
        return
    terms = settings.round.quorum, settings.tolerance, settings.witnessed
    level = next((t for t, p in PRESETS.items() if (p.quorum, p.tolerance, p.witnessed) == terms), "other")
    rows = [
        ("rounds", wanted.schedule.turns, usual.schedule.turns, settings.rounds),
        ("inner_steps", wanted.schedule.turn_steps, usual.schedule.turn_steps, settings.round.inner_steps),
        ("start_peers", request.start_peers, USUAL.start_peers, settings.start_peers),
        ("min_peers", request.min_peers, USUAL.min_peers, settings.min_peers),
        ("trust", request.trust, USUAL.trust, level),
        ("statistic", request.statistic, USUAL.statistic, settings.statistic),
    ]
    yield from (row for row in rows if row[1] not in row[2:])
    if request.sample is not None and request.sample != settings.round.sample:
        yield "sample", None, None, None
    if request.effort is not None and settings.round.effort is UNSET:
        yield "round_time, target_samples or adaptive_steps", None, None, None
    if _beside_length(wanted) not in (_beside_length(usual), _beside_length(recipe)):
        yield "recipe, or the options of its outer step, codecs and fragments", None, None, None


def _beside_length(recipe: Recipe) -> Recipe:
    """The recipe without the numbers that have rows of their own."""
    return replace(recipe, schedule=replace(recipe.schedule, rounds=1, inner_steps=1))
