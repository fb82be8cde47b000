"""A long night: story after story, each at a drawn size, by a drawn rule, until time is up.

One number draws everything about a world, so a night is continued where it ended and every failure is replayed by
one line. Promises: over many numbers every story comes up, with few and many peers, under both quorums and by both
protocols where its members may choose. Never stops at a failure: it is told, and the night goes on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from atoll.base.ids import Seconds
from atoll.sim.scenarios.stage import NotForRaft, Scenario, ScenarioFailed, ScenarioReport, play

SIZES: dict[str, tuple[int, ...]] = {  # these are short and of drawn sizes; others are told as they are
    **dict.fromkeys(
        ("churn", "overlap", "weighed", "rollback", "paired_churn", "paced", "blackout"),
        (4, 5, 6, 7, 8, 10, 12, 16),
    ),
    **dict.fromkeys(("liars", "owners", "framers"), (4, 7, 10, 13)),
    "calm": (1, 2, 3, 8, 16),
    "branches": (12, 20, 30, 40),
    "siege": (10, 14),
}
ROUNDS = {"siege": 3, "branches": 0}  # of those; else at most ROUNDS_MOST
ROUNDS_MOST = 12  # many worlds find more than long ones
RAFT_SHARE = 0.25  # of the worlds whose members may agree by it


@dataclass(frozen=True)
class World:
    """What one number draws."""

    story: str
    seed: int
    peers: int
    rounds: int
    protocol: str


def drawn(number: int, stories: dict[str, Scenario]) -> World:
    draw = random.Random(f"night/{number}")
    story = draw.choice(sorted(stories))
    told = stories[story]
    peers, rounds = told.peers, told.rounds
    if story in SIZES:
        peers, rounds = draw.choice(SIZES[story]), ROUNDS.get(story, min(rounds, ROUNDS_MOST))
    return World(story, number, peers, rounds, "raft" if draw.random() < RAFT_SHARE else "bft")


def least(story: str, told: Scenario) -> tuple[int, int]:
    """Peers and rounds with which it is known to be a story; of fewer it may ask what cannot be."""
    if story not in SIZES:
        return told.peers, told.rounds
    return min(SIZES[story]), ROUNDS.get(story, min(told.rounds, ROUNDS_MOST))


def night(
    stories: dict[str, Scenario],
    first: int,
    lasts_s: Seconds,
    clock: Callable[[], Seconds] = time.monotonic,
) -> Iterator[ScenarioReport | ScenarioFailed]:
    """Worlds `first`, `first` + 1, … that begin before time is up; at least one."""
    until, number = clock() + lasts_s, first
    while number == first or clock() < until:
        yield _told(stories, drawn(number, stories))
        number += 1


def _told(stories: dict[str, Scenario], world: World) -> ScenarioReport | ScenarioFailed:
    for protocol in (world.protocol, "bft"):
        try:
            return play(world.story, stories[world.story], world.seed, world.peers, world.rounds, "", protocol)
        except NotForRaft:
            continue
        except ScenarioFailed as failure:
            return failure
    raise AssertionError("by two phases every story can be told")
