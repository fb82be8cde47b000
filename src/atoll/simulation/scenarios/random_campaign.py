"""Random campaign: scenario after scenario with drawn sizes and rules, until time is up.

One number draws everything about a world, so a campaign can be continued, and every failure is replayed by one
line. Worlds share nothing: several may run at a time, each in a process of its own.

Invariants:
- Over many numbers every scenario occurs, with few and many peers, under both quorums, and by both protocols where
  its members may choose.
- A failure is reported, and the campaign goes on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context

from atoll.base.ids import Seconds
from atoll.peer.round.topology_choice import TOPOLOGIES
from atoll.peer.settings import TopologyName
from atoll.simulation.scenarios.harness import Scenario, ScenarioFailed, ScenarioReport, ScenarioUnsupported, play

SIZES: dict[str, tuple[int, ...]] = {  # short scenarios with drawn sizes; all others have fixed sizes
    **dict.fromkeys(
        ("churn", "overlap", "weighed", "rollback", "paced", "blackout"),
        (4, 5, 6, 7, 8, 10, 12, 16),
    ),
    **dict.fromkeys(("liars", "owners", "framers", "poisoners"), (4, 7, 10, 13)),
    "calm": (1, 2, 3, 8, 16),
    "branches": (12, 20, 30, 40),
    "siege": (10, 13, 16, 20),
}
ROUNDS = {"siege": 3, "branches": 0}  # rounds of these; otherwise at most ROUNDS_MOST
ROUNDS_MOST = 12  # many worlds find more than long ones
RAFT_SHARE = 0.25  # share of worlds with Raft, where members may use it
TOPOLOGY_SHARE = 0.25  # share of worlds with a drawn topology, where rows may use one


@dataclass(frozen=True)
class DrawnScenario:
    """World drawn from one number."""

    story: str
    seed: int
    peers: int
    rounds: int
    protocol: str
    topology: TopologyName | None = None  # None: the scenario's own


def drawn(
    number: int, stories: dict[str, Scenario], peers: int | None = None, rounds: int | None = None
) -> DrawnScenario:
    """World of a number. `peers` and `rounds` replace the drawn values; all else stays as drawn."""
    draw = random.Random(f"night/{number}")
    story = draw.choice(sorted(stories))
    told = stories[story]
    size, length = told.peers, told.rounds
    if story in SIZES:
        size, length = draw.choice(SIZES[story]), ROUNDS.get(story, min(length, ROUNDS_MOST))
    protocol = "raft" if draw.random() < RAFT_SHARE else "bft"
    topology = draw.choice(TOPOLOGIES) if draw.random() < TOPOLOGY_SHARE else None
    return DrawnScenario(story, number, peers or size, rounds or length, protocol, topology)


def least(story: str, told: Scenario) -> tuple[int, int]:
    """(peers, rounds) with which the scenario is known to work; with fewer its demands may be impossible."""
    if story not in SIZES:
        return told.peers, told.rounds
    return min(SIZES[story]), ROUNDS.get(story, min(told.rounds, ROUNDS_MOST))


def processes(jobs: int) -> Executor:
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))


def night(
    stories: dict[str, Scenario],
    first: int,
    lasts_s: Seconds,
    clock: Callable[[], Seconds] = time.monotonic,
    *,
    peers: int | None = None,
    rounds: int | None = None,
    jobs: int = 1,
    pool: Callable[[int], Executor] = processes,
) -> Iterator[ScenarioReport | ScenarioFailed]:
    """Worlds `first`, `first` + 1, … that begin before time is up, reported as they end; at least one per job."""
    until = clock() + lasts_s
    worlds = (drawn(number, stories, peers, rounds) for number in count(first))
    if jobs == 1:
        yield _told(stories, next(worlds))
        while clock() < until:
            yield _told(stories, next(worlds))
        return
    with pool(jobs) as players:
        playing = {players.submit(_told, stories, next(worlds)) for _ in range(jobs)}
        while playing:
            over, playing = wait(playing, return_when=FIRST_COMPLETED)
            for told in over:
                yield told.result()
                if clock() < until:
                    playing.add(players.submit(_told, stories, next(worlds)))


def _told(stories: dict[str, Scenario], world: DrawnScenario) -> ScenarioReport | ScenarioFailed:
    drawn_by = world.protocol, world.topology
    ways: tuple[tuple[str, TopologyName | None], ...] = (drawn_by, (world.protocol, None), ("bft", None))
    for protocol, topology in ways:
        try:
            numbers = world.seed, world.peers, world.rounds
            return play(world.story, stories[world.story], *numbers, "", protocol=protocol, topology=topology)
        except ScenarioUnsupported:
            continue
        except ScenarioFailed as failure:
            return failure
    raise AssertionError("by two phases, and as it is, every story can be told")
