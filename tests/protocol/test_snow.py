"""Snowball over a virtual network: one preference, liars among those who answer, and honesty about a split.

Queries and answers are messages with latency and loss; liars answer whatever serves them, and differently to each.
"""

from __future__ import annotations

import heapq
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from clocks import Clock
from hypothesis import given, settings
from hypothesis import strategies as st
from mutated import without

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.machine import Effect, Emit, Event, Received, Send, SetTimer, TimerFired
from atoll.crypto.digest import digest
from atoll.features.forks import poll
from atoll.features.forks.poll import IN_A_ROW, UNSETTLED_AFTER, SnowballPoll
from atoll.peer.events import BranchPollResult
from atoll.wire.messages.preference import PreferenceRequest, PreferenceResponse

GAMES = int(os.environ.get("ATOLL_STORIES", "40"))
RED, BLUE, GREEN = digest(b"red"), digest(b"blue"), digest(b"green")
SLOT = "branch/1"

Lie = Callable[[random.Random, PreferenceRequest], Digest | None]


@dataclass
class Swarm:
    """`peers` machines, of which the last `liars` are the enemy's."""

    peers: int
    draw: random.Random
    red: float = 0.5  # share of the peers whose branch is the red one
    liars: int = 0
    lie: Lie = lambda draw, query: draw.choice([RED, BLUE])
    loss: float = 0.0
    cut: Callable[[PeerId, PeerId], bool] = lambda a, b: False
    drift: float = 0.0  # clocks run by up to so much too fast or too slow
    now: float = 0.0
    count: int = 0
    machines: dict[PeerId, SnowballPoll] = field(default_factory=dict)
    clocks: dict[PeerId, Clock] = field(default_factory=dict)
    timers: dict[PeerId, int] = field(default_factory=dict)
    queue: list[tuple[float, int, PeerId, Event]] = field(default_factory=list)
    told: list[BranchPollResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = [PeerId(f"p{i:03d}") for i in range(self.peers)]
        self.honest = self.names[: self.peers - self.liars]
        self.clocks = {p: Clock.drifting(self.draw, self.drift) if self.drift else Clock() for p in self.honest}
        self.own = {p: (RED, BLUE) if self.draw.random() < self.red else (BLUE, RED) for p in self.honest}
        for name in self.honest:
            self.start(name)

    def start(self, name: PeerId) -> None:
        """A peer that restarts prefers its own branch again."""
        everyone = set(self.names) - {name}
        self.machines[name] = SnowballPoll(name, ZERO_DIGEST, 1, self.own[name], everyone)
        self.carry_out(name, self.machines[name].reach(everyone, self.time_at(name)))

    def time_at(self, name: PeerId) -> float:
        return self.clocks[name].shows(self.now)

    def run(self, for_s: float) -> None:
        until = self.now + for_s
        while self.queue and self.queue[0][0] <= until:
            self.now, number, name, event = heapq.heappop(self.queue)
            if isinstance(event, TimerFired):
                if self.timers.get(name) == number:
                    self.carry_out(name, self.machines[name].resume(self.time_at(name)))
                continue
            assert isinstance(event, Received)
            message, machine = event.message, self.machines.get(name)
            if isinstance(message, PreferenceRequest):
                answer = self.lie(self.draw, message) if machine is None else machine.preference
                self.send(name, event.sender, PreferenceResponse(SLOT, message.number, answer))
            elif machine is not None and isinstance(message, PreferenceResponse):
                self.carry_out(name, machine.count(event.sender, message, self.time_at(name)))
        self.now = until

    @property
    def settled(self) -> dict[PeerId, Digest]:
        return {p: m.preference for p, m in self.machines.items() if m.is_settled}

    def until_settled(self, limit_s: float = 400.0) -> set[Digest]:
        while len(self.settled) < len(self.honest) and self.now < limit_s:
            self.run(1.0)
        return set(self.settled.values())

    def carry_out(self, name: PeerId, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to, message):
                    self.send(name, to, message)
                case SetTimer(timer, at):
                    self.count += 1
                    self.timers[name] = self.count
                    if at is not None:
                        at = self.now + self.clocks[name].wait_s(at, self.now)
                        heapq.heappush(self.queue, (at, self.count, name, TimerFired(timer)))
                case Emit(fact):
                    assert isinstance(fact, BranchPollResult)
                    self.told.append(fact)
                case _:
                    raise AssertionError(effect)

    def send(self, sender: PeerId, to: PeerId, message: PreferenceRequest | PreferenceResponse) -> None:
        if (sender in self.machines and self.draw.random() < self.loss) or self.cut(sender, to):
            return
        self.count += 1
        at = self.now + self.draw.uniform(0.005, 0.05)
        heapq.heappush(self.queue, (at, self.count, to, Received(sender, message)))


LIES: list[Lie] = [lambda draw, query: draw.choice([RED, BLUE]), lambda draw, query: BLUE]


@pytest.mark.parametrize("lie", LIES, ids=["at random", "always the smaller one"])
def test_a_swarm_comes_to_one_preference_though_a_fifth_lies(lie: Lie):
    """100 peers, 20 liars, a clear majority: all others come to prefer it."""
    swarm = Swarm(100, random.Random(1), red=0.85, liars=20, lie=lie)
    swarm.until_settled()
    assert {swarm.machines[p].preference for p in swarm.honest} == {RED}


# "Upon every successful query, the node increments its confidence counter for that color. A node switches colors
# when the confidence in its current color becomes lower than the confidence value of the new color." (arXiv
# 1906.08936, of Snowball)
def test_no_two_settle_differently():
    """Even splits, loss, restarts in between: whatever is settled is one choice."""
    for seed in range(GAMES // 4):
        draw = random.Random(seed)
        swarm = Swarm(24, draw, draw.choice([0.3, 0.5, 0.7]), loss=draw.choice([0.0, 0.05]))
        for _ in range(4):
            swarm.run(5.0)
            swarm.start(draw.choice(swarm.honest))
        assert len(swarm.until_settled()) == 1 and len(swarm.settled) == len(swarm.honest), f"seed {seed}"


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(20, 40), st.sampled_from([0.0, 0.03]))
def test_whatever_is_drawn(seed: int, peers: int, loss: float):
    swarm = Swarm(peers, random.Random(seed), loss=loss)
    assert len(swarm.until_settled()) == 1


def test_a_swarm_cut_into_halves_that_prefer_differently_settles_nothing_and_says_so():
    """Half of each sample does not answer, so six of ten are seldom met; the cut heals, and they agree."""
    swarm = Swarm(40, random.Random(1), red=1.0)
    left = set(swarm.names[:20])
    swarm.cut = lambda a, b: (a in left) != (b in left)
    for name in swarm.names[20:]:
        swarm.own[name] = (BLUE, RED)
        swarm.start(name)
    swarm.run(4.5 * UNSETTLED_AFTER)
    assert not swarm.settled
    unsettled = [f for f in swarm.told if not f.settled and f.queries == UNSETTLED_AFTER]
    assert len(unsettled) >= 40 and all(f.named < 10 for f in unsettled)
    swarm.cut = lambda a, b: False
    assert len(swarm.until_settled(800.0)) == 1 and len(swarm.settled) == 40


def test_a_branch_that_is_not_known_is_never_preferred():
    """All the liars there may be name a third choice: they count for nothing."""
    swarm = Swarm(30, random.Random(4), liars=4, lie=lambda draw, query: GREEN)
    settled = swarm.until_settled()
    assert len(settled) == 1 and GREEN not in settled
    assert all(GREEN not in m.confidence for m in swarm.machines.values())


COUNTING_RULES = [
    ("responses to another query", "answer.number != self.number or ", ""),
    ("members that were not asked", "sender not in self.asked or ", ""),
    ("a second response", " or sender in self.answers", ""),
]


@pytest.mark.parametrize("rule", [None, *COUNTING_RULES], ids=lambda rule: rule[0] if rule else "all rules")
def test_only_who_was_asked_counts_and_counts_once(rule: tuple[str, str, str] | None):
    names = [PeerId(f"p{i:02d}") for i in range(21)]
    kind = without(poll, *rule[1:]).SnowballPoll if rule else SnowballPoll
    machine = kind(names[0], ZERO_DIGEST, 1, (RED, BLUE), set(names[1:]))
    asked = [e.to for e in machine.reach(set(names[1:]), 0.0) if isinstance(e, Send)]
    assert len(set(asked)) == 10 and names[0] not in asked
    stranger = next(p for p in names[1:] if p not in asked)
    for who, number, said in ((asked[0], 1, BLUE), (asked[0], 1, RED), (stranger, 1, BLUE), (asked[1], 2, BLUE)):
        assert machine.count(who, PreferenceResponse(SLOT, number, said), 0.0) == []
    assert (machine.answers == {asked[0]: BLUE}) == (rule is None)


def test_samples_are_spread_evenly():
    """2000 samples of 10 out of 19 others: each is drawn about 1053 times; five deviations are allowed."""
    names = [PeerId(f"p{i:02d}") for i in range(20)]
    me = SnowballPoll(names[0], ZERO_DIGEST, 1, (RED, BLUE), set(names[1:]))
    me.reach(set(names[1:]), 0.0)
    drawn = dict.fromkeys(names[1:], 0)
    for number in range(2000):
        me.number = number
        for peer in me._sample():
            drawn[peer] += 1
    assert all(abs(count - 1052.6) < 5 * 22.3 for count in drawn.values())


def test_mutant_one_majority_is_enough(monkeypatch: pytest.MonkeyPatch):
    """Without a row of 20: in an even split some settle on red and some on blue."""
    monkeypatch.setattr(poll, "IN_A_ROW", 1)
    assert IN_A_ROW == 20 and 2 in {len(Swarm(24, random.Random(seed)).until_settled()) for seed in range(10)}
