"""Entry points for a user's training loop: `atoll.found(…)` begins a run, `atoll.join(ticket)` takes part in one.

Invariants:
- Arguments that are invalid, or do not fit together, are refused before anything is started or written.
Not responsible for: starting the peer process (`Run.attach` does, once the model is known).
"""

from __future__ import annotations

import os
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any

from msgspec import UNSET

from atoll.base.arguments import Count, Peers, Whole, arguments
from atoll.base.errors import UsageError
from atoll.base.workload import AdaptiveWorkloadPolicy, effort_problem
from atoll.policy.fault_tolerance import StatisticName, peers_for_one_liar
from atoll.policy.participation import THOUSAND, ParticipationPolicy, group_problem, named
from atoll.policy.presets import PRESETS, Trust
from atoll.runtime.embed.messages import RunRequest
from atoll.runtime.embed.options import INNER_STEPS, RunOptions
from atoll.runtime.embed.program_end import end_plainly
from atoll.runtime.embed.run import Run
from atoll.runtime.embed.trust_defaults import rule_of
from atoll.runtime.network.addresses import listening
from atoll.runtime.peer_folder import DEFAULT_DIR
from atoll.runtime.publishing.places import place_at
from atoll.training.recipe.recipes import Recipe, custom_loop_recipe, for_custom_loop
from atoll.wire.ticket import parse

RECIPE_OPTIONS = ("outer_lr", "outer_momentum", "up", "down", "fragments", "overlap", "epochs", "share")


@arguments("atoll.join", "E-ATT-11")
def join(
    ticket: str | None = None,
    *,
    folder: str | Path = "",
    name: str = "",
    group: str = "",
    listen: tuple[str, ...] = (),
    announce: tuple[str, ...] = (),
    or_found: dict[str, Any] | None = None,
) -> Run:
    """Join the run of this ticket, or of the environment's (ATOLL_TICKET, as `local` sets it).

    Call `.attach(model, optimizer)` next. `folder` keeps keys and state: the same folder is the same peer. `group`
    names the owner of its data if rounds are sampled (specs/clients.md). Members on other computers can dial it if
    `listen` or ATOLL_LISTEN is an address such as /ip4/0.0.0.0/tcp/7071.
    If there is no ticket, `or_found` holds the arguments for `found`, so that one script serves all members.
    `name` is what others see; default: ATOLL_NAME, or the computer's name. ATOLL_STATE_FROM names a place of
    `atoll publish` that is asked for the agreed state before the members.
    Raises UsageError if the ticket is invalid, or if there is none and no `or_found`.
    """
    end_plainly()
    ticket, folder = ticket or os.environ.get("ATOLL_TICKET", ""), _folder(folder)
    if ticket:
        parse(ticket)  # reports a mistyped ticket here, before the peer process starts
        if state_from := os.environ.get("ATOLL_STATE_FROM", ""):
            place_at(state_from)  # reports a wrong place or a missing library
        return Run(
            RunRequest(
                str(folder), ticket, _member_name(name, group), listening(listen), announce, state_from=state_from
            )
        )
    if or_found is None:
        raise UsageError(
            "E-TKT-09",
            "there is no ticket to join with",
            cause="neither an argument nor ATOLL_TICKET names one",
            fix='atoll.join("ATOLL1:…"), or atoll.found() to start a run',
        )
    asked = dict(or_found)
    options = asked.pop("options", None) or RunOptions()
    if isinstance(options, RunOptions):
        here = {"name": name, "group": group, "listen": listen, "announce": announce}
        options = replace(options, **{key: getattr(options, key) or value for key, value in here.items()})
    return found(**({"folder": folder, "start_peers": _start_peers(), "options": options} | asked))


@arguments("atoll.found", "E-ATT-11")
def found(
    *,
    recipe: Annotated[
        Recipe | None, "what a method of atoll.training.recipe.methods returns: cooperative(), …"
    ] = None,
    rounds: Whole = 0,
    inner_steps: Count = INNER_STEPS,
    start_peers: Peers = 1,
    trust: Trust = "private",
    folder: str | Path = "",
    options: RunOptions | None = None,
) -> Run:
    """Found a run of DiLoCo rounds over the model that is attached next; `run.ticket` then lets others join.

    A round is `inner_steps` optimizer steps of each member. `rounds=0` goes on until all members have left.
    Training begins when `start_peers` are present. `folder` keeps keys and state: the same folder is the same peer,
    and a run in it goes on as it was founded. A warning then names the arguments that it does not have.

    `trust="community"` or "open" tolerates liars among up to a third of the members (docs/how-to/choose-trust.md).
    Updates are weighed by distances, with "open" sorted, or combined by the `statistic` of the options. Both need
    at least four members. Members then evaluate the agreed model, and go back behind a bad one, if their loops pass
    `attach(…, validate=…)`.

    `recipe=cooperative(rounds=20)` replaces rounds, steps, outer step and codecs by those of a published method
    (atoll.training.recipe.methods). Model, data and inner optimizer stay yours. `cooperative` tolerates no liar.
    Recipes that agree on gradients (data_parallel, powersgd, demo_, pipelined, parameter_server) have no inner
    steps: they take the step themselves, with their own rate, in place of `optimizer.step()`.

    `options` holds everything else, see help(atoll.RunOptions). Batches and rates are the loop's: there is no
    total_tokens and no adaptive_batching here. Raises UsageError for arguments that do not fit together.
    """
    end_plainly()
    wish = options or RunOptions()
    numbers: dict[str, Any] = {"rounds": rounds, "inner_steps": inner_steps}
    numbers |= {name: getattr(wish, name) for name in RECIPE_OPTIONS}
    fixed = ("outer_lr", "outer_momentum", "up", "down")
    if wish.share and any(getattr(wish, name) != getattr(RunOptions(), name) for name in fixed):
        raise UsageError(
            "E-ATT-12",
            f"share={wish.share:g} averages drawn values in fp16, without an outer step or another codec",
            fix="leave out outer_lr, outer_momentum, up and down; or leave out share",
        )
    try:
        if recipe is None:
            recipe = custom_loop_recipe(**numbers)
        else:
            _check_only_recipe(numbers)
            recipe = for_custom_loop(recipe, believed=trust == "private")
        rule, _ = rule_of(trust, wish.statistic, start_peers, wish.min_peers)
        effort = _effort(recipe, wish)
    except ValueError as why:
        fix = "see help(atoll.found), help(atoll.RunOptions), and for codecs: atoll docs specs/codecs.md"
        raise UsageError("E-ATT-12", f"no run can be founded with these arguments: {why}", fix=fix) from None
    return Run(
        RunRequest(
            str(_folder(folder)),
            name=_member_name(wish.name, wish.group),
            listen=listening(wish.listen),
            announce=wish.announce,
            recipe=recipe,
            start_peers=start_peers,
            min_peers=wish.min_peers,
            trust=trust,
            statistic=wish.statistic,
            sample=_sample(wish, trust, rule),
            effort=effort,
        )
    )


def _check_only_recipe(numbers: dict[str, Any]) -> None:
    """ValueError if the caller chose a number beside a recipe, which would ignore it."""
    defaults = {"rounds": 0, "inner_steps": INNER_STEPS} | {
        key: getattr(RunOptions(), key) for key in RECIPE_OPTIONS
    }
    if given := [name for name, value in numbers.items() if value != defaults[name]]:
        raise ValueError(f"a recipe has numbers of its own, set {', '.join(given)} in the recipe")


def _effort(recipe: Recipe, wish: RunOptions) -> AdaptiveWorkloadPolicy | None:
    """Adaptive length of the rounds; None: fixed. ValueError if the recipe cannot adapt so."""
    from atoll.runtime.training_spec import effort_misfit

    steps_min, samples, by_loss = wish.inner_steps_min, wish.target_samples, wish.adaptive_steps
    if steps_min > 1 and not (samples or by_loss):
        raise ValueError("inner_steps_min changes nothing without target_samples or adaptive_steps")
    if not (wish.round_time or samples or by_loss):
        return None
    batch = 1  # replaced by the batch of `attach`
    effort = AdaptiveWorkloadPolicy(batch, wish.round_time or UNSET, samples or UNSET, steps_min, by_loss or UNSET)
    if problem := effort_misfit(recipe, effort) or effort_problem(effort, recipe.schedule.turn_steps):
        raise ValueError(f"rounds cannot adapt their length: {problem}")
    return effort


def _folder(given: str | Path) -> Path:
    """The peer's folder. Absolute, since errors name it and the program may change its directory."""
    return Path(given or os.environ.get("ATOLL_DIR") or DEFAULT_DIR).expanduser().absolute()


def _start_peers() -> int:
    """Number of peers in the environment, as `local` sets it."""
    text = os.environ.get("ATOLL_START_PEERS", "1")
    if not text.isdecimal():
        what = f"ATOLL_START_PEERS={text!r} is not a number of peers"
        raise UsageError("E-ATT-11", what, fix="unset ATOLL_START_PEERS, or set it to a number such as 4")
    return int(text)


def _member_name(name: str, group: str) -> str:
    """Name under which others see a peer of this group; defaults: ATOLL_NAME, ATOLL_GROUP. UsageError if bad."""
    name, group = name or os.environ.get("ATOLL_NAME", ""), group or os.environ.get("ATOLL_GROUP", "")
    if problem := group_problem(group):
        raise UsageError("E-ATT-07", f"group={group!r}: {problem}", fix='name it like "hospital-a"')
    return named(name, group)


def _sample(wish: RunOptions, trust: Trust, statistic: StatisticName) -> ParticipationPolicy | None:
    """Members drawn per round; None: all. UsageError if the draw contradicts itself or tolerates no liar."""
    share, peers, group = wish.sample, wish.sample_peers, wish.group
    if share and peers:
        raise UsageError(
            "E-ATT-06",
            f"sample={share:g} and sample_peers={peers} both set how many members train in a round",
            fix="use one of them: sample=0.5, half of the members, or sample_peers=10",
        )
    thousandths = 0 if peers else ceil(round(share * THOUSAND, 6))
    if not (peers or 0 < thousandths < THOUSAND):
        return None
    least = 1 if trust == "private" else peers_for_one_liar(PRESETS[trust].tolerance, statistic)
    if 0 < peers < least:
        raise UsageError(
            "E-ATT-15",
            f"sample_peers={peers} draws rounds too small to withstand one liar",
            cause=f'with trust="{trust}" a round needs {least} updates to withstand one liar',
            fix=f'sample_peers={least} or more, or trust="private"',
        )
    if group and trust != "private":
        raise UsageError(
            "E-ATT-15",
            f'group="{group}" has no effect with trust="{trust}"',
            cause="members name their group themselves: a liar in a group of its own would be drawn most often",
            fix='leave group out, or use trust="private"',
        )
    return ParticipationPolicy(thousandths, peers, least)
