"""Snowball over a virtual network: one preference, liars among those who answer, and honesty about a split.

Queries and answers are messages with latency and loss; liars answer whatever serves them, and differently to each.
"""

from __future__ import annotations

import heapq
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from clocks import Clock
from hypothesis import given, settings
from hypothesis import strategies as st
from mutated import without

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Effect, Emit, Event, Persist, Received, Send, SetTimer, Start, TimerFired
from atoll.crypto.digest import digest
from atoll.features.forks import snowball
from atoll.features.forks.snowball import ChoiceHeard, ChoiceSettled, ChoiceUnsettled, SnowballPoll, SnowParams
from atoll.wire.messages.preference import PreferenceRequest, PreferenceResponse

GAMES = int(os.environ.get("ATOLL_STORIES", "40"))
RED, BLUE, GREEN = digest(b"red"), digest(b"blue"), digest(b"green")
PAPER = SnowParams(k=10, alpha=8, beta=150)
SHORT = SnowParams(k=8, alpha=6, beta=12)

Lie = Callable[[random.Random, PreferenceRequest], Digest | None]


@dataclass
class Swarm:
    """`peers` machines, of which the last `liars` are the enemy's."""

    peers: int
    draw: random.Random
    params: SnowParams = SHORT
    liars: int = 0
    lie: Lie = lambda draw, query: draw.choice([RED, BLUE])
    loss: float = 0.0
    judges: bool = False  # hosts find right whatever they hear of
    cut: Callable[[PeerId, PeerId], bool] = lambda a, b: False
    drift: float = 0.0  # clocks run by up to so much too fast or too slow
    now: float = 0.0
    count: int = 0
    machines: dict[PeerId, SnowballPoll] = field(default_factory=dict)
    kept: dict[PeerId, dict[str, bytes]] = field(default_factory=dict)
    clocks: dict[PeerId, Clock] = field(default_factory=dict)
    timers: dict[PeerId, int] = field(default_factory=dict)
    queue: list[tuple[float, int, PeerId, Event]] = field(default_factory=list)
    settled: dict[PeerId, Digest] = field(default_factory=dict)
    told: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = [PeerId(f"p{i:03d}") for i in range(self.peers)]
        self.honest = self.names[: self.peers - self.liars]
        self.clocks = {p: Clock.drifting(self.draw, self.drift) if self.drift else Clock() for p in self.honest}
        for name in self.honest:
            self.start(name)

    def start(self, name: PeerId) -> None:
        seed = name.encode()
        self.machines[name] = SnowballPoll(name, self.names, "slot", seed, self.params, preference_only=True)
        kept = dict(self.kept.setdefault(name, {}))
        self.carry_out(name, self.machines[name].handle(Start(kept), self.time_at(name)))

    def time_at(self, name: PeerId) -> float:
        return self.clocks[name].shows(self.now)

    def offer(self, name: PeerId, choice: Digest) -> None:
        self.carry_out(name, self.machines[name].offer(choice, self.time_at(name)))

    def offer_all(self, red: float) -> None:
        """Everybody judges both; a share of `red` saw red first."""
        for name in self.honest:
            both = [RED, BLUE] if self.draw.random() < red else [BLUE, RED]
            for choice in both:
                self.offer(name, choice)

    def run(self, for_s: float) -> None:
        until = self.now + for_s
        while self.queue and self.queue[0][0] <= until:
            self.now, number, name, event = heapq.heappop(self.queue)
            if name not in self.machines:
                assert isinstance(event, Received) and isinstance(event.message, PreferenceRequest)
                answer = self.lie(self.draw, event.message)
                self.send(name, event.sender, PreferenceResponse("slot", event.message.number, answer))
            elif not isinstance(event, TimerFired) or self.timers.get(name) == number:
                self.carry_out(name, self.machines[name].handle(event, self.time_at(name)))
        self.now = until

    def until_settled(self, limit_s: float = 120.0) -> set[Digest]:
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
                case Persist(slot, blob):
                    assert blob is not None
                    self.kept[name][slot] = blob
                case Emit(fact):
                    self.told.append(fact)
                    if isinstance(fact, ChoiceHeard) and self.judges:
                        self.offer(name, fact.choice)
                    if isinstance(fact, ChoiceSettled):
                        assert self.settled.setdefault(name, fact.choice) == fact.choice, f"{name} changed its mind"
                case _:
                    raise AssertionError(effect)
        machine = self.machines[name]
        if name in self.settled:
            assert machine.preference == self.settled[name], f"{name} no longer prefers what it settled on"

    def send(self, sender: PeerId, to: PeerId, message: Any) -> None:
        if (sender in self.machines and self.draw.random() < self.loss) or self.cut(sender, to):
            return
        self.count += 1
        at = self.now + self.draw.uniform(0.005, 0.05)
        heapq.heappush(self.queue, (at, self.count, to, Received(sender, message)))


LIES: list[Lie] = [lambda draw, query: draw.choice([RED, BLUE]), lambda draw, query: BLUE]


@pytest.mark.parametrize("lie", LIES, ids=["at random", "always the smaller one"])
def test_a_swarm_comes_to_one_preference_though_a_fifth_lies_at_the_papers_parameters(lie: Lie):
    """100 peers, k = 10, alpha = 8, beta = 150, 20 liars: all others prefer alike and stay so; nobody settles."""
    swarm = Swarm(100, random.Random(1), PAPER, liars=20, lie=lie)
    swarm.offer_all(red=0.75)
    swarm.run(6.0)
    for _ in range(3):
        assert {swarm.machines[p].preference for p in swarm.honest} == {RED}
        swarm.run(0.5)
    assert not swarm.settled


def test_a_swarm_with_few_liars_settles_at_the_papers_parameters():
    swarm = Swarm(100, random.Random(2), PAPER, liars=2, lie=LIES[1])
    swarm.offer_all(red=0.6)
    assert len(swarm.until_settled()) == 1 and len(swarm.settled) == 98


# "Upon every successful query, the node increments its confidence counter for that color. A node switches colors
# when the confidence in its current color becomes lower than the confidence value of the new color." (arXiv
# 1906.08936, of Snowball)
def test_a_settled_peer_never_flips_and_no_two_settle_differently():
    """Even splits, loss, a few liars, restarts in between: whatever is settled is one choice, and stays it."""
    for seed in range(GAMES):
        draw = random.Random(seed)
        swarm = Swarm(24, draw, SHORT, liars=draw.choice([0, 2]), loss=draw.choice([0.0, 0.05]))
        swarm.offer_all(red=draw.choice([0.3, 0.5, 0.7]))
        for _ in range(4):
            swarm.run(0.5)
            back = draw.choice(swarm.honest)
            swarm.start(back)
            swarm.offer(back, draw.choice([RED, BLUE]))
            swarm.offer(back, RED)
            swarm.offer(back, BLUE)
        assert len(swarm.until_settled()) == 1 and len(swarm.settled) == len(swarm.honest), f"seed {seed}"


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(20, 40), st.sampled_from([0.0, 0.03]))
def test_whatever_is_drawn(seed: int, peers: int, loss: float):
    swarm = Swarm(peers, random.Random(seed), SHORT, loss=loss)
    swarm.offer_all(red=0.5)
    assert len(swarm.until_settled()) == 1


def test_a_swarm_cut_into_halves_that_prefer_differently_settles_nothing_and_says_so():
    """Half of each sample does not answer, so alpha is never met often enough; the cut heals, and they agree."""
    swarm = Swarm(40, random.Random(1), SnowParams(k=10, alpha=8, beta=20, query_s=0.2))
    left = set(swarm.names[:20])
    swarm.cut = lambda a, b: (a in left) != (b in left)
    for name in swarm.honest:
        for choice in [RED, BLUE] if name in left else [BLUE, RED]:
            swarm.offer(name, choice)
    swarm.run(60.0)
    assert not swarm.settled
    unsettled = [f for f in swarm.told if isinstance(f, ChoiceUnsettled)]
    assert len(unsettled) >= 40 and all(sum(f.answers.values()) < 10 for f in unsettled)
    swarm.cut = lambda a, b: False
    assert len(swarm.until_settled()) == 1 and len(swarm.settled) == 40


def test_one_peer_that_prefers_is_enough_to_bring_everybody_along():
    """The others prefer nothing; their hosts judge what they hear of when they are asked, and find it right."""
    swarm = Swarm(30, random.Random(3), judges=True)
    swarm.offer(swarm.names[0], GREEN)
    assert swarm.until_settled() == {GREEN} and len(swarm.settled) == 30


def test_a_liar_that_names_many_choices_makes_nobody_deaf_to_what_others_name():
    """A hundred times another one: the host is told of 16, and still of the one that an honest peer prefers."""
    names = [PeerId(f"p{i:02d}") for i in range(12)]
    me = SnowballPoll(names[0], names, "slot", b"seed", SHORT, preference_only=True)

    def told(sender: PeerId, choice: Digest) -> bool:
        effects = me.handle(Received(sender, PreferenceRequest("slot", 1, choice)), 0.0)
        return Emit(ChoiceHeard(choice=choice)) in effects

    assert sum(told(names[1], digest(b"%d" % i)) for i in range(100)) == snowball.CHOICES_MAX
    assert told(names[2], GREEN) and not told(names[3], GREEN)


def test_a_choice_that_was_not_judged_is_told_of_and_never_preferred():
    """All the liars there may be name a third choice: they are heard, and count for nothing."""
    swarm = Swarm(30, random.Random(4), liars=4, lie=lambda draw, query: GREEN)
    swarm.offer_all(red=0.5)
    settled = swarm.until_settled()
    assert len(settled) == 1 and GREEN not in settled
    assert any(isinstance(f, ChoiceHeard) and f.choice == GREEN for f in swarm.told)
    assert all(GREEN not in m.confidence for m in swarm.machines.values())


def test_only_who_was_asked_counts_and_counts_once():
    names = [PeerId(f"p{i}") for i in range(12)]
    me = SnowballPoll(names[0], names, "slot", b"seed", SnowParams(k=5, alpha=3, beta=1), preference_only=True)
    asked = [e.to for e in me.offer(RED, 0.0) if isinstance(e, Send)]
    assert len(set(asked)) == 5 and names[0] not in asked
    me.offer(BLUE, 0.0)
    stranger = next(p for p in names[1:] if p not in asked)

    def says(who: PeerId, number: int = 1) -> list[Effect]:
        return me.handle(Received(who, PreferenceResponse("slot", number, BLUE)), 0.0)

    assert not any([says(asked[0]), says(asked[0]), says(asked[0]), says(stranger), says(asked[1], number=2)])
    assert not says(asked[1])
    assert any(isinstance(e, Emit) and isinstance(e.fact, ChoiceSettled) for e in says(asked[2]))
    with pytest.raises(PeerFault, match="not of"):
        says(PeerId("nobody"))


NEXT_SLOT_RULES = [
    ("answers are to the question of this slot", " if answer.slot == self.slot", ""),
    ("who was let go is not heard", "if sender not in self.known:", "if False:"),
    ("who was let go is not asked", "tuple(sorted(self.known & peers))", "tuple(sorted(peers))"),
]


@pytest.mark.parametrize("rule", [None, *NEXT_SLOT_RULES], ids=lambda rule: rule[0] if rule else "all rules")
def test_a_slot_of_other_members_is_decided_by_them_alone(rule: tuple[str, str, str] | None):
    """A third left, a third is new; all who were there go on to say of both slots what they said of the first."""
    before, now = [[PeerId(f"p{i:02d}") for i in range(first, first + 12)] for first in (0, 4)]
    kind = without(snowball, *rule[1:]).SnowballPoll if rule else SnowballPoll
    me = kind(now[0], now, "height/1", b"seed", SnowParams(k=5, alpha=3, beta=1), preference_only=True)
    me.among({*before, *now})
    asked = [e.to for e in me.offer(RED, 0.0) if isinstance(e, Send)]
    me.offer(BLUE, 0.0)
    believed = set(asked) - set(now)
    before.remove(me.me)
    for peer in before:
        for slot in ("height/0",) if peer in now else ("height/0", "height/1"):
            try:
                believed |= {peer} if me.handle(Received(peer, PreferenceResponse(slot, 1, BLUE)), 0.0) else set()
                believed |= {peer} if me.handle(Received(peer, PreferenceRequest(slot, 1, BLUE)), 0.0) else set()
            except PeerFault as fault:
                assert fault.who == peer and peer not in now
    assert bool(believed or me.answers) == bool(rule)


def test_below_its_safe_size_it_is_built_for_preference_only_and_says_that_it_is_not_safe():
    few = [PeerId(f"p{i}") for i in range(100)]
    with pytest.raises(ValueError, match="let a quorum decide"):
        SnowballPoll(few[0], few, "slot", b"seed")
    assert not SnowballPoll(few[0], few, "slot", b"seed", preference_only=True).safe
    many = [PeerId(f"p{i}") for i in range(snowball.SAFE_SIZE)]
    assert SnowballPoll(many[0], many, "slot", b"seed").safe
    with pytest.raises(ValueError, match="let a quorum decide"):
        SnowballPoll(many[0], many, "slot", b"seed", SnowParams(k=10, alpha=8, beta=20))
    with pytest.raises(ValueError, match="more than half"):
        SnowballPoll(many[0], many, "slot", b"seed", SnowParams(k=10, alpha=5))


def test_samples_are_spread_evenly():
    """2000 samples of 3 out of 11 others: each is drawn about 545 times; five deviations are allowed."""
    names = [PeerId(f"p{i:02d}") for i in range(12)]
    me = SnowballPoll(names[0], names, "slot", b"seed", SnowParams(k=3, alpha=2, beta=9), preference_only=True)
    drawn = dict.fromkeys(names[1:], 0)
    for number in range(2000):
        me.number = number
        for peer in me._sample():
            drawn[peer] += 1
    assert all(abs(count - 545.5) < 5 * 20 for count in drawn.values())


# ---- mutants ---------------------------------------------------------------------------------------------------


def test_mutant_one_alpha_majority_is_enough():
    """beta = 1: in an even split some settle on red and some on blue."""
    choices = set[int]()
    for seed in range(10):
        swarm = Swarm(24, random.Random(seed), SnowParams(k=8, alpha=6, beta=1))
        swarm.offer_all(red=0.5)
        choices.add(len(swarm.until_settled()))
    assert 2 in choices


def test_mutant_a_settled_choice_that_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    """A peer that settled on red comes back among peers that were told of blue only: it must still say red."""

    def comes_back() -> Digest | None:
        swarm = Swarm(20, random.Random(5))
        for name in swarm.honest:
            swarm.offer(name, RED)
        assert swarm.until_settled() == {RED}
        swarm.settled.clear()
        swarm.start(swarm.names[0])
        return swarm.machines[swarm.names[0]].preference

    assert comes_back() == RED
    settle = SnowballPoll._settle
    forget = lambda self, choice: [e for e in settle(self, choice) if not isinstance(e, Persist)]  # noqa: E731
    monkeypatch.setattr(SnowballPoll, "_settle", forget)
    assert comes_back() is None
