"""`atoll simulate`: real peers in a virtual world, where hours take seconds and seeds replay."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from difflib import get_close_matches
from functools import partial
from inspect import cleandoc
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from atoll.base.errors import RunFailedError, UsageError
from atoll.cli.say import AsJson, say, say_json
from atoll.peer.settings import TopologyName

if TYPE_CHECKING:
    from atoll.simulation.scenarios.harness import Scenario, ScenarioFailed, ScenarioReport

SOME = Number(gte=1)


def simulate(
    name: Annotated[str, Parameter(help="A scenario, or `all`. Without one: list them.")] = "",
    /,
    *,
    seed: Annotated[int, Parameter(help="The first seed. The same seed gives the same world.")] = 1,
    seeds: Annotated[int, Parameter(validator=SOME, help="How many seeds to play, one after the other.")] = 1,
    peers: Annotated[
        int | None, Parameter(validator=SOME, help="Virtual peers. Default: the scenario's, or drawn.")
    ] = None,
    rounds: Annotated[
        int | None, Parameter(validator=SOME, help="Rounds. Default: the scenario's, or drawn.")
    ] = None,
    quorum: Annotated[
        Literal["majority", "two-thirds"] | None,
        Parameter(help="Quorum rule of certificates. Default: the scenario's."),
    ] = None,
    protocol: Annotated[
        Literal["bft", "raft"],
        Parameter(help="Agreement protocol. Raft plays the scenarios without liars."),
    ] = "bft",
    topology: Annotated[
        TopologyName | None,
        Parameter(help="Topology of the all-reduce; most are for scenarios without liars."),
    ] = None,
    swarm: Annotated[
        bool,
        Parameter(negative="", help="Play drawn scenarios at drawn sizes, from this seed on, until time is up."),
    ] = False,
    minutes: Annotated[
        float | None, Parameter(validator=Number(gte=0, lt=inf), help="How long --swarm goes on. Default: 10.")
    ] = None,
    jobs: Annotated[
        int | None,
        Parameter(validator=SOME, help="Worlds that --swarm plays at a time, a core each. Default: one."),
    ] = None,
    faults: Annotated[
        str | None,
        Parameter(
            help="Play only these faults, as a failing run names them, separated by commas; `none` for none."
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Play a scenario with virtual peers. If it fails, show few faults that cause it, and how to replay it."""
    from atoll.simulation import scenarios
    from atoll.simulation.fault_schedule import FaultSelection
    from atoll.simulation.scenarios import SCENARIOS, ScenarioFailed, ScenarioUnsupported, run_scenario

    if name and name not in SCENARIOS and name != "all":
        fix = f"one of {', '.join([*SCENARIOS, 'all'])}"
        near = get_close_matches(name, SCENARIOS, 1, 0.6)
        guess = f"; did you mean {near[0]}?" if near else ""
        raise UsageError("E-ARG-09", f"there is no scenario {name!r}{guess}", fix=fix)
    if not swarm and (minutes is not None or jobs is not None):
        raise UsageError(
            "E-ARG-13",
            "--minutes and --jobs are for --swarm",
            cause="without it the seeds are played once each, one after the other",
            fix=f"atoll simulate {name} --swarm, or leave them out".replace("  ", " "),
        )
    if swarm:
        from atoll.simulation.scenarios.random_campaign import night

        stories = {name: SCENARIOS[name]} if name in SCENARIOS else SCENARIOS
        worlds = night(
            stories, seed, 60 * (10.0 if minutes is None else minutes), peers=peers, rounds=rounds, jobs=jobs or 1
        )
        _swarm(worlds, f"atoll simulate {name}".rstrip(), seed, json)
        return
    if not name:
        say_json(list(SCENARIOS)) if json else say(cleandoc(scenarios.__doc__ or ""))
        return
    play = partial(
        run_scenario, peers=peers, rounds=rounds, quorum=quorum or "", protocol=protocol, topology=topology
    )
    only = None if faults is None else frozenset(faults.split(","))
    failures: list[ScenarioFailed] = []
    small: dict[str, str] = {}
    for story, number in product(SCENARIOS if name == "all" else [name], range(seed, seed + seeds)):
        try:
            report = play(story, number, faults=FaultSelection(only))
        except ScenarioUnsupported as why:
            if name != "all":
                raise UsageError("E-ARG-09", str(why), fix=f"atoll simulate {name}") from None
        except ScenarioFailed as failure:
            failures.append(failure)
            small |= _small(story, SCENARIOS[story], peers, rounds)
        else:
            say_json(report) if json else say(report.line)
    _end(failures, "".join(small.values()))


def _small(story: str, told: Scenario, peers: int | None, rounds: int | None) -> dict[str, str]:
    """Advice if a failure may come from too few peers or rounds for this scenario; else empty."""
    from atoll.simulation.scenarios.random_campaign import least

    peers_least, rounds_least = least(story, told)
    if (peers or told.peers) >= peers_least and (rounds or told.rounds) >= rounds_least:
        return {}
    wanted = f"{peers_least} peers" + (f" and {rounds_least} rounds" if rounds_least else "")
    return {story: f"; {story} needs {wanted}, and may fail with fewer"}


def _swarm(night: Iterator[ScenarioReport | ScenarioFailed], command: str, seed: int, json: bool) -> None:
    """Print each world as it ends, then the number of worlds and the failures."""
    from atoll.simulation.scenarios import ScenarioFailed

    worlds, failures = 0, list[ScenarioFailed]()
    for told in night:
        worlds += 1
        if isinstance(told, ScenarioFailed):
            failures.append(told)
            print(told, file=sys.stderr, flush=True)
        elif json:
            say_json(told)
        else:
            say(told.line)
    if not json:
        say(f"{worlds} worlds, {len(failures)} failed; to go on: {command} --swarm --seed {seed + worlds}")
    _end(failures)


def _end(failures: list[ScenarioFailed], small: str = "") -> None:
    """End with the first failure, with as few faults as still cause it."""
    if failures:
        from atoll.simulation.failure_minimizer import FailureMinimizer
        from atoll.simulation.scenarios import SCENARIOS

        *told, replay = FailureMinimizer(failures[0], SCENARIOS).minimize().strip().splitlines()
        raise RunFailedError(
            "E-SIM-01",
            "\n".join(told) or "a scenario failed",
            cause=f"{len(failures)} of the runs failed{small}",
            fix=replay,
        )
