"""Changes of a run's numbers by its owner: parsing, meaning for training, and checks.

    atoll amend run.rounds=60 train.lr=0.002 ─► ChangeableSettings ─► statement ─► vertex ─► `learning_after`

Invariants:
- The training terms of a round follow from genesis and the vertex before it, whatever that vertex says.
- A senseless change is refused here, before any member receives it.
- Only settings with an `AmendRule` can change; for any other, the refusal gives the reason.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, ValidationError, convert
from msgspec.structs import replace

from atoll.base.errors import RefusedError, UsageError
from atoll.base.ids import ATTACHED, Seconds
from atoll.peer.config.sections import declarations, sections
from atoll.peer.governance.settings_change import in_words, is_over, numbers_in, tuned_by, with_numbers
from atoll.peer.operator_commands import with_waiting
from atoll.peer.settings import RunSettings
from atoll.runtime.config import numbers_of
from atoll.runtime.training_spec import check_vertex_room, effort_misfit
from atoll.training.recipe.inner import GradientSumOptimizer
from atoll.training.recipe.recipes import check_recipe, swarm_problem
from atoll.training.spec import TrainingSpec, spec_after
from atoll.wire.messages.statements import ChangeableSettings, ChangedSettings
from atoll.wire.messages.vertex import VertexBody

if TYPE_CHECKING:
    from atoll.runtime.training_peer import TrainingPeer


KEYS = {key: setting.amend for key, setting in declarations().items() if setting.amend}


def fixed_reason(key: str) -> str:
    """Reason why a key cannot change."""
    return declarations()[key].fixed or dict(sections())[key.partition(".")[0]].fixed


def numbers_from(written: Sequence[str], fragments: int) -> ChangeableSettings:
    """Parse key=value pairs. Raises UsageError, also for keys that cannot change."""
    found: dict[str, Any] = {}
    for key, value in numbers_of(written).items():
        number = KEYS.get(key)
        if number is None:
            raise UsageError(
                "E-RUN-27",
                f"{key} stays as genesis has it",
                cause=fixed_reason(key),
                fix=f"change one of {', '.join(KEYS)}; or begin a new run",
            )
        if number.fragments < 0 and value % fragments:
            raise UsageError(
                "E-RUN-27",
                f"{key} = {value} is not to be divided by the {fragments} fragments of this run",
                fix=f"write {key} = {max(1, round(value / fragments)) * fragments}",
            )
        if number.fragments:
            value = value * fragments if number.fragments > 0 else value // fragments
        found[number.number] = value if number.factor == 1.0 else value * number.factor
        _demand_bounds(key, number.number, found[number.number])
    return convert(found, ChangeableSettings)


def _demand_bounds(key: str, name: str, value: float) -> None:
    """Raise UsageError for values that the config allows and a vertex does not: 0 for "none", long waits."""
    try:
        convert({name: value}, ChangeableSettings)
    except ValidationError:
        more = "is more than members agree on"
        none = "is a number that this run may change, and not switch off"
        raise UsageError(
            "E-RUN-27", f"{key} {more if value > 0 else none}", fix=f"write another value: atoll amend {key}=…"
        ) from None


def by_key(to: ChangeableSettings, fragments: int) -> dict[str, Any]:
    """The numbers by their keys in run.toml."""
    given, found = numbers_in(to), dict[str, Any]()
    for key, number in KEYS.items():
        if number.number in given:
            value = given[number.number]
            if number.fragments:
                value = value // fragments if number.fragments > 0 else value * fragments
            found[key] = value if number.factor == 1.0 else round(value / number.factor, 9)
    return found


def problem(learning: TrainingSpec, settings: RunSettings, changed: ChangedSettings) -> str:
    """Reason why the run cannot use these numbers; empty if it can. `settings` already include them."""
    to, before, then = changed.to, learning.recipe, spec_after(learning, changed).recipe
    loops = before.model == ATTACHED
    without = "its members' loops have optimizers of their own" if loops else "its recipe has none"
    for name in sorted({"lr", "outer_lr"} & numbers_in(to).keys()):
        alone = spec_after(learning, replace(changed, to=convert({name: 1e-30}, ChangeableSettings))).recipe
        if alone == before:
            return f"train.{name}: {without}"
    if to.inner_steps is not UNSET:
        if before.schedule.epochs is not UNSET:
            return "its rounds are passes over members' own data, not steps (epochs)"
        if isinstance(before.inner, GradientSumOptimizer):
            return "every step is a round, which can be neither longer nor shorter"
        if before.own_anchors:
            return "trainers run on for a whole round before they know how long the next one is"
    if settings.min_peers < before.reducer.peers_min:
        return f"its recipe needs {before.reducer.peers_min} members (run.min_peers)"
    try:
        if not loops:
            check_recipe(then)
        check_vertex_room(settings)
    except ValueError as why:
        return str(why)
    return swarm_problem(then) or effort_misfit(then, settings.round.effort)


async def amend_run(host: TrainingPeer, texts: Sequence[str], wait_s: Seconds) -> dict[str, Any]:
    """Send the change to the members and wait up to `wait_s` for its vertex. Raises UsageError or RefusedError."""
    history, learning = host.machine.history, host.island.learning
    if history is None or learning is None:
        raise RefusedError("E-RUN-28", "this peer does not know the run yet", fix="atoll status")
    genesis, fragments = host.machine.settings, learning.recipe.schedule.fragments
    to = numbers_from(texts, fragments)
    both, was_over = with_waiting(host.machine, to), is_over(genesis, history.head_body)
    try:
        then = tuned_by(genesis, history.head_body, history.head_body.trained, both)
        if why := problem(learning, with_numbers(genesis, then.to), then):
            raise ValueError(why)
        host.change_numbers(to)
    except ValueError as why:
        raise RefusedError("E-RUN-28", f"these settings cannot change: {why}", fix="atoll status") from None
    before, until = history.head, time.monotonic() + wait_s
    while (body := _first_with(history.bodies, before, to)) is None and time.monotonic() < until:
        await host.next_round(until - time.monotonic())
    last = history.head_body if body is None else body
    told = {"agreed": body is not None, "amended": by_key(to, fragments)}
    told |= {"was_over": was_over, "over": is_over(genesis, last), "changes_rate": _changes_rate(learning, to)}
    return told | {"round": last.round, "trained": last.trained}


def _changes_rate(learning: TrainingSpec, to: ChangeableSettings) -> bool:
    """True if these numbers change the learning rate of the run's recipe: it may fall over all rounds or tokens."""
    over_tokens = learning.recipe.schedule.total_tokens is not UNSET
    names = {"lr", "rounds", "total_tokens", "inner_steps"} if over_tokens else {"lr", "rounds"}
    return learning.recipe.model != ATTACHED and bool(names & numbers_in(to).keys())


def _first_with(bodies: Mapping[int, VertexBody], after: int, to: ChangeableSettings) -> VertexBody | None:
    """The first vertex after round `after` with these numbers."""
    wanted, later = numbers_in(to).items(), sorted(round for round in bodies if round > after)
    said = (bodies[round] for round in later)
    return next((b for b in said if b.tuned is not UNSET and wanted <= numbers_in(b.tuned.to).items()), None)


def amended_of(host: TrainingPeer) -> dict[str, Any] | None:
    """Numbers that differ from genesis, for people; None if none do."""
    history, learning = host.machine.history, host.island.learning
    if history is None or learning is None or history.head_body.tuned is UNSET:
        return None
    said = history.head_body.tuned
    numbers = by_key(said.to, learning.recipe.schedule.fragments)
    return {"numbers": numbers, "trained": said.trained, "words": in_words(numbers_in(said.to))}
