"""Settings change: the numbers of a run that members may change while it goes on, and their effect.

Genesis fixes the settings; a vertex may hold numbers that the recovery identity changed since. `settings_after`
alone derives the settings of the next round, so a plan uses nothing that is not in genesis or in its vertex.

Invariants:
- The result is equal at all peers, also for an old vertex.
- Only `ChangeableSettings` can change. None needs anything new at members: no model, data, codec, key, protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict, replace

from atoll.base.ids import Digest
from atoll.base.units import counted_text, seconds_text
from atoll.peer.config.sections import declarations
from atoll.peer.governance.orders import amends_in, tunes_in
from atoll.peer.settings import RunSettings, pacing_problem
from atoll.policy.plan import RoundPlan, plan_round
from atoll.wire.messages.statements import ChangeableSettings, ChangedSettings, SignedStatement
from atoll.wire.messages.vertex import VertexBody


def settings_after(settings: RunSettings, body: VertexBody) -> RunSettings:
    """Settings of the round after this vertex, from those of genesis."""
    return settings if body.tuned is UNSET else with_numbers(settings, body.tuned.to)


def plan_after(settings: RunSettings, head: Digest, body: VertexBody) -> RoundPlan:
    """The plan of the round after `body`, with id `head`; `settings` are those of genesis."""
    return plan_round(head, body, settings_after(settings, body).round)


def is_over(settings: RunSettings, body: VertexBody) -> bool:
    """True if no round trains after this vertex, unless members agree on more of them."""
    return 0 < settings_after(settings, body).rounds <= body.trained


def with_numbers(settings: RunSettings, to: ChangeableSettings) -> RunSettings:
    """The settings with these numbers; training workers apply those that only they use."""
    s, given = settings.round, numbers_in(to)
    accepted, effort = s.acceptance, s.effort
    if accepted is not UNSET:
        accepted = replace(accepted, quorum=given.get("updates", accepted.quorum))
        accepted = replace(accepted, grace=given.get("grace", accepted.grace))
    if effort is not UNSET and to.round_time_s is not UNSET:
        effort = replace(effort, train_s=to.round_time_s)
    own = {k: given[k] for k in ("inner_steps", "train_max_s", "owner_s", "window_min_s") if k in given}
    if to.owner_s is not UNSET:
        own["agree_s"] = 2 * to.owner_s  # same ratio as in the config
    of_the_run = {k: given[k] for k in ("rounds", "start_peers", "min_peers", "audit_rate") if k in given}
    return replace(settings, round=replace(s, acceptance=accepted, effort=effort, **own), **of_the_run)


def numbers_in(to: ChangeableSettings) -> dict[str, Any]:
    """The numbers that are set, by name."""
    return {name: value for name, value in asdict(to).items() if value is not UNSET}


WORDS = {s.amend.number: s.amend.words for s in declarations().values() if s.amend}  # number → text for people


def in_words(numbers: Mapping[str, float]) -> str:
    """These numbers as text for people: '14 rounds, learning rate 0.002'."""
    return ", ".join(_told(name, value) for name, value in numbers.items())


def _told(name: str, value: float) -> str:
    if name == "rounds" and not value:
        return "rounds without end"
    return WORDS.get(name, name + " {:g}").format(seconds_text(value) if name.endswith("_s") else value)


def tuned_after(
    settings: RunSettings, parent: VertexBody, trained: int, reports: Sequence[SignedStatement]
) -> ChangedSettings | UnsetType:
    """Changed numbers in a vertex after `parent` with these reports; `trained` counts its training rounds.

    A rollback restores the numbers of its target.
    """
    back = next((amend for _, amend in amends_in(reports)), None)
    if back is not None:
        return back.tuned
    word = next((tune for _, tune in tunes_in(reports)), None)
    return parent.tuned if word is None else tuned_by(settings, parent, trained, word.to)


def tuned_by(settings: RunSettings, parent: VertexBody, trained: int, to: ChangeableSettings) -> ChangedSettings:
    """Changed numbers after this change."""
    before = ChangedSettings(ChangeableSettings(), 0, 0) if parent.tuned is UNSET else parent.tuned
    steps = before.steps + (trained - before.trained) * settings_after(settings, parent).round.inner_steps
    return ChangedSettings(replace(before.to, **numbers_in(to)), trained, steps)


def why_not(settings: RunSettings, parent: VertexBody, to: ChangeableSettings) -> str:
    """Why the settings cannot take these numbers after this vertex, as a clause; empty if they can."""
    now, given = settings_after(settings, parent), numbers_in(to)
    held = {} if parent.tuned is UNSET else numbers_in(parent.tuned.to)
    if all(held.get(name) == value for name, value in given.items()):
        return "they are already in effect"
    if not all(isfinite(value) for value in given.values()):
        return "one is not a finite number"
    if lacking := [what for name, what in _lacks(now).items() if name in given]:
        return f"they change what this run does not have: {'; '.join(lacking)}"
    if now.round.rhythm is not UNSET and given.keys() & {"rounds", "inner_steps"}:
        return "rounds and steps stay in a run whose phases are shares of all its rounds (sync.phases)"
    goes_on = parent.trained + (not (is_over(settings, parent) or parent.paused is not UNSET))
    if to.rounds is not UNSET and 0 < to.rounds <= goes_on:
        asked = counted_text(to.rounds, "round")
        return f"this asks for {asked}, but {goes_on} will have trained when members agree on it"
    then = with_numbers(now, to)
    return _misfit(then) or pacing_problem(then)


def _lacks(settings: RunSettings) -> dict[str, str]:
    """Numbers without a meaning in this run, and the missing feature."""
    s = settings.round
    timed = s.effort is not UNSET and s.effort.train_s is not UNSET
    bounded = s.effort is not UNSET and s.effort.bounded is True
    needs = {
        "audit_rate": (settings.audited_share > 0, "audits (run.audit_rate)"),
        "window_min_s": (s.window_min_s is not UNSET, "windows that follow the pace (consensus.timeout_min)"),
        "updates": (s.acceptance is not UNSET, "rounds that go on without the slow (sync.quorum)"),
        "grace": (s.acceptance is not UNSET, "rounds that go on without the slow (sync.grace)"),
        "round_time_s": (timed, "rounds in minutes (train.round_time)"),
        "total_tokens": (bounded, "rates that follow tokens (train.total_tokens)"),
    }
    return {name: what for name, (there, what) in needs.items() if not there}


def _misfit(settings: RunSettings) -> str:
    """Which two numbers conflict, with the config's rules."""
    s = settings.round
    timed_s = s.effort.train_s if s.effort is not UNSET and s.effort.train_s is not UNSET else 0.0
    for small, large, low, high in (
        ("run.min_peers", "run.start_peers", settings.min_peers, settings.start_peers),
        ("run.first_train", "run.train_max", s.first_train_s, s.train_max_s),
        ("train.round_time", "run.train_max", timed_s, s.train_max_s),
        ("run.suspect", "a fifth of consensus.timeout", s.suspect_s, s.owner_s),
        ("a fifth of consensus.timeout_min", "one of consensus.timeout", _least_s(settings), s.owner_s),
    ):
        if low > high:
            return f"they would put {small} ({low:g}) above {large} ({high:g})"
    return ""


def _least_s(settings: RunSettings) -> float:
    least_s = settings.round.window_min_s
    return 0.0 if least_s is UNSET else least_s
