"""`atoll simulate`: the very same peers in a virtual world where hours take seconds and seeds replay."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from atoll.base.errors import RunFailedError, UsageError
from atoll.cli.say import AsJson, say, say_json


def simulate(
    name: Annotated[str, Parameter(help="A scenario, or `all`. Without one: list them.")] = "",
    /,
    *,
    seed: Annotated[int, Parameter(help="The first seed. The same seed gives the same story.")] = 1,
    seeds: Annotated[int, Parameter(help="How many seeds to play, one after the other.")] = 1,
    peers: Annotated[int | None, Parameter(help="Virtual peers. Default: the scenario's.")] = None,
    rounds: Annotated[int | None, Parameter(help="Rounds. Default: the scenario's.")] = None,
    quorum: Annotated[
        Literal["", "majority", "two-thirds"],
        Parameter(help="Whose votes make a certificate. Default: the scenario's."),
    ] = "",
    protocol: Annotated[
        Literal["bft", "raft"],
        Parameter(help="By which members agree. Raft plays the stories in which nobody lies."),
    ] = "bft",
    json: AsJson = False,
) -> None:
    """Play a scenario with virtual peers; a failure ends with the one line that replays it."""
    from atoll.sim.scenarios import SCENARIOS, NotForRaft, ScenarioFailed, run_scenario

    if not name:
        say_json(list(SCENARIOS)) if json else say("scenarios: " + ", ".join(SCENARIOS))
        return
    if name not in SCENARIOS and name != "all":
        raise UsageError(
            "E-ARG-09", f"there is no scenario {name!r}", fix="one of " + ", ".join([*SCENARIOS, "all"])
        )
    failures: list[str] = []
    for story in SCENARIOS if name == "all" else [name]:
        for number in range(seed, seed + seeds):
            try:
                report = run_scenario(story, number, peers, rounds, quorum, protocol)
            except NotForRaft as why:
                if name != "all":
                    raise UsageError("E-ARG-09", str(why), fix=f"atoll simulate {name}") from None
                continue
            except ScenarioFailed as failure:
                failures.append(str(failure))
                continue
            if json:
                say_json(report)
            else:
                say(report.line)
    if failures:
        *told, replay = failures[0].strip().splitlines()
        raise RunFailedError(
            "E-SIM-01",
            "\n".join(told) or "a scenario failed",
            cause=f"{len(failures)} of the runs failed",
            fix=replay,
        )
