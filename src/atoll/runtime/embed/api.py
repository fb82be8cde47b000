"""How a loop of one's own comes to a run: `atoll.join(ticket)` takes part in one, `atoll.found(…)` begins one.

Promises: what cannot be founded, or makes no sense together, is refused here, in words and before anything is
started or written. Never starts a peer: that is `attach`'s, once the model is known.
"""

from __future__ import annotations

import os
from inspect import signature
from math import ceil
from pathlib import Path
from typing import Annotated, Any

from msgspec import UNSET, Meta

from atoll.base.arguments import Count, Peers, Positive, Share, Whole, arguments
from atoll.base.errors import UsageError
from atoll.base.ids import Seconds
from atoll.base.limits import PEERS_MAX, WINDOW_MOST_S
from atoll.base.workload import WorkloadPolicy, effort_problem
from atoll.policy.fault_tolerance import StatisticName, peers_for_one_liar
from atoll.policy.participation import THOUSAND, ParticipationPolicy
from atoll.policy.presets import PRESETS, Trust
from atoll.runtime.embed.run import Run
from atoll.runtime.embed.trust_defaults import rule_of
from atoll.runtime.network.addresses import listening
from atoll.training.recipe.recipes import Recipe, in_own_loop, own_loop
from atoll.wire.ticket import parse


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
    """A place in the ticket's run, or in the one that the environment names (ATOLL_TICKET, as `local` sets it).

    Call `.attach(model, optimizer)` next. `folder` keeps keys and state: the same folder is the same peer. `group`
    says whose data it has, where rounds are sampled (specs/clients.md). Members on other computers can dial it if
    `listen`, or ATOLL_LISTEN, says /ip4/0.0.0.0/tcp/7071.
    Where there is no ticket, `or_found` holds the arguments for `found`, so that one script serves all members.
    """
    ticket, folder = ticket or os.environ.get("ATOLL_TICKET", ""), _folder(folder)
    name, group = name or os.environ.get("ATOLL_NAME", ""), group or os.environ.get("ATOLL_GROUP", "")
    if ticket:
        parse(ticket)  # a slip in it is told here, not by the peer once the model is attached
        listen = listening(listen)
        return Run(folder=folder, ticket=ticket, name=name, group=group, listen=listen, announce=announce)
    if or_found is None:
        raise UsageError(
            "E-TKT-09",
            "there is no ticket to join with",
            cause="neither an argument nor ATOLL_TICKET names one",
            fix='atoll.join("ATOLL1:…"), or atoll.found() to start a run',
        )
    here: dict[str, Any] = {"folder": folder, "name": name, "group": group, "listen": listen, "announce": announce}
    here["start_peers"] = _start_peers()
    return found(**(here | or_found))


@arguments("atoll.found", "E-ATT-11")
def found(
    *,
    folder: str | Path = "",
    name: str = "",
    group: str = "",
    recipe: Annotated[
        Recipe | None, "what a method of atoll.training.recipe.methods returns: cooperative(), …"
    ] = None,
    inner_steps: Count = 50,
    epochs: Whole = 0,
    sample: Share = 0.0,
    sample_peers: Annotated[int, Meta(ge=0, le=PEERS_MAX)] = 0,
    rounds: Whole = 0,
    start_peers: Peers = 1,
    min_peers: Annotated[int, Meta(ge=0, le=PEERS_MAX)] = 0,
    trust: Trust = "private",
    statistic: StatisticName | None = None,
    outer_lr: Positive = 1.0,
    outer_momentum: Share = 0.6,
    up: str = "int8",
    down: str = "int8",
    fragments: Count = 1,
    overlap: Whole = 0,
    share: Share = 0.0,
    round_time: Annotated[Seconds, Meta(ge=0, le=WINDOW_MOST_S)] = 0.0,
    target_samples: Annotated[int, Meta(ge=0, lt=2**40)] = 0,
    adaptive_steps: bool = False,
    inner_steps_min: Count = 1,
    listen: tuple[str, ...] = (),
    announce: tuple[str, ...] = (),
) -> Run:
    """A new run of DiLoCo rounds over the model that is attached next; `run.ticket` then lets others join.

    `inner_steps` optimizer steps make a round; `rounds=0` goes on until everybody leaves; training begins when
    `start_peers` are there, and waits while fewer than `min_peers` are. The outer step is Nesterov(outer_lr,
    outer_momentum); `overlap` steps go on while a round is agreed, and rounds carry one of `fragments` each: see
    docs/config.md. With `epochs` a member's round is so many passes over its own data, and at most `inner_steps`.
    `sample`, a share of the members, or `sample_peers`, a number, train in a round, drawn by the one before;
    `group` says whose data this loop has.
    With `share`, such as 0.005 and `inner_steps=1`, only so large a part of the values is averaged, another in
    every round, and members keep their own of all others until the last one (SPARTA; codecs and outer step are its
    own).
    With `trust="community"` or "open" up to a third of the members may lie (docs/loops.md): updates are then
    weighed by distances, with "open" sorted, or combined by the `statistic` that you name (no rule by distance with
    "open"), and `min_peers` is what that takes unless you say more. Both are refused with fewer than four. Members
    then look at the agreed model, and go back behind a bad one, if their loops bring `attach(…, validate=…)`.
    `recipe=cooperative(rounds=20)` takes another published method (atoll.training.recipe.methods) in the place of
    these
    numbers, which are then its own; model, data and inner optimizer stay yours. That one withstands no liar.
    Recipes that agree on gradients (data_parallel, powersgd, demo_, pipelined, parameter_server) have no inner
    steps: they take the step themselves, with their own rate, where `optimizer.step()` stands.
    A round may be shorter than its `inner_steps`: `round_time` seconds of training, about `target_samples` of all
    members together (`attach(batch=…)` says how many a step has), or with `adaptive_steps` as the loss falls that
    `run.report` tells (specs/effort.md), but never shorter than `inner_steps_min`. Batches and rates are the
    loop's: there is no total_tokens and no adaptive_batching here.
    """
    numbers: dict[str, Any] = {
        "rounds": rounds,
        "inner_steps": inner_steps,
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
        "up": up,
        "down": down,
        "fragments": fragments,
        "overlap": overlap,
        "epochs": epochs,
        "share": share,
    }
    if share and (outer_lr, outer_momentum, up, down) != (1.0, 0.6, "int8", "int8"):
        raise UsageError(
            "E-ATT-12",
            f"share={share:g} averages drawn values in fp16, and nothing else is done to them",
            fix="leave out outer_lr, outer_momentum, up and down; or leave out share",
        )
    try:
        if recipe is None:
            recipe = own_loop(**numbers)
        else:
            _check_only_recipe(numbers)
            recipe = in_own_loop(recipe, believed=trust == "private")
        rule, _ = rule_of(trust, statistic, start_peers, min_peers)
        effort = _effort(recipe, round_time, target_samples, adaptive_steps, inner_steps_min)
    except ValueError as why:
        fix = "help(atoll.found) says what goes together, specs/codecs.md has every codec"
        raise UsageError("E-ATT-12", f"no run can be founded like this: {why}", fix=fix) from None
    return Run(
        folder=_folder(folder),
        recipe=recipe,
        start_peers=start_peers,
        min_peers=min_peers,
        trust=trust,
        statistic=statistic,
        name=name,
        group=group,
        sample=_sample(sample, sample_peers, group, trust, rule),
        effort=effort,
        listen=listening(listen),
        announce=announce,
    )


def _check_only_recipe(numbers: dict[str, Any]) -> None:
    """ValueError if any of `found`'s own numbers was given beside a recipe, which would ignore it."""
    defaults = signature(found).parameters
    if given := [name for name, value in numbers.items() if value != defaults[name].default]:
        raise ValueError(f"a recipe has numbers of its own, say there what {', '.join(given)} shall be")


def _effort(recipe: Recipe, train_s: Seconds, samples: int, by_loss: bool, steps_min: int) -> WorkloadPolicy | None:
    """What of a round's work follows the run; None: nothing. ValueError if that is none for this recipe."""
    from atoll.runtime.training_spec import effort_misfit

    if steps_min > 1 and not (samples or by_loss):
        raise ValueError("inner_steps_min changes nothing without target_samples or adaptive_steps")
    if not (train_s or samples or by_loss):
        return None
    effort = WorkloadPolicy(
        1, train_s or UNSET, samples or UNSET, steps_min, by_loss or UNSET
    )  # a batch is told later
    if problem := effort_misfit(recipe, effort) or effort_problem(effort, recipe.schedule.turn_steps):
        raise ValueError(f"rounds cannot follow the run: {problem}")
    return effort


def _folder(given: str | Path) -> Path:
    """As the call says, else as ATOLL_DIR does."""
    return Path(given or os.environ.get("ATOLL_DIR") or "atoll-run")


def _start_peers() -> int:
    """As `local` sets it."""
    text = os.environ.get("ATOLL_START_PEERS", "1")
    if not text.isdecimal():
        raise UsageError(
            "E-ATT-11", f"ATOLL_START_PEERS={text!r} is no number of peers", fix="unset ATOLL_START_PEERS, or say 4"
        )
    return int(text)


def _sample(
    share: float, peers: int, group: str, trust: Trust, statistic: StatisticName
) -> ParticipationPolicy | None:
    """How many train in a round; None: everybody. UsageError for what is none, or withstands nobody."""
    if share and peers:
        raise UsageError(
            "E-ATT-06",
            f"sample={share:g}, sample_peers={peers} says not how many members train in a round",
            fix="give one of them: sample=0.5, half of the members, or sample_peers=10",
        )
    thousandths = 0 if peers else ceil(round(share * THOUSAND, 6))
    if not (peers or 0 < thousandths < THOUSAND):
        return None
    least = 1 if trust == "private" else peers_for_one_liar(PRESETS[trust].tolerance, statistic)
    if 0 < peers < least:
        raise UsageError(
            "E-ATT-15",
            f"sample_peers={peers} draws rounds in which one liar cannot be withstood",
            cause=f'with trust="{trust}" it takes {least} updates to withstand one',
            fix=f'sample_peers={least} or more, or trust="private"',
        )
    if group and trust != "private":
        raise UsageError(
            "E-ATT-15",
            f'group="{group}" changes nothing with trust="{trust}"',
            cause="a group is its member's own word: a liar in a group of its own would be drawn most often",
            fix='leave group out, or say trust="private"',
        )
    return ParticipationPolicy(thousandths, peers, least)
