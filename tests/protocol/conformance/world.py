"""A virtual network and clock of its own for the agreement under test: real machines, seeded trouble.

Voters run on hosts with a disk, a clock that is a little off, and the habits of the round that drives them in real
life: attempts end by the clock, what was said is repeated, a proposer known to be dead is passed over, bodies are
judged after a while and fetched by name, whoever decided shows it. The trouble: loss, duplicates, reordering,
partitions in one or both directions, and crashes in the middle of what a host was doing: of the effects of one call
a part is carried out, and what was written since the last word that left is lost. With `drift`, clocks run apart
for ever, and in the storm are set forward and back. Villains sign with their own keys only (`villains.py`); what
must always hold is asserted after every event (`watch.py`).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from clocks import Clock
from villains import Gang
from watch import Watch

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Effect, Keep, Report, Send
from atoll.keys.signer import Signer
from atoll.policy.plan import quorum
from atoll.protocol.consensus.agreement import Agreement
from atoll.protocol.consensus.door import Door
from atoll.protocol.consensus.facts import Bound, Decided, Equivocation, Free, Judge, Prepared
from atoll.sim.signatures import RealKeys, VirtualSigner, VirtualVerifier
from atoll.wire.envelope import Notary
from atoll.wire.messages.round import PreVote, Propose, TimedOut, Voted
from atoll.wire.messages.statements import Certificate

RUN = Digest(bytes(32))
ROUND = 7
ATTEMPT_S, GROWTH, GROWN = 8.0, 1.5, 5
NUDGE_S, PATIENCE_S = 1.0, 2.0


def _is_word(effect: Effect) -> bool:
    """What others may act on: a host acts on a decision as on a Send."""
    return isinstance(effect, Send) or (isinstance(effect, Report) and isinstance(effect.fact, Decided))


def attempt_end(attempt: int) -> float:
    """When the clock ends this attempt: windows grow, then stay."""
    grown = sum(ATTEMPT_S * GROWTH ** min(k, GROWN) for k in range(min(attempt, GROWN) + 1))
    return grown + max(0, attempt - GROWN) * ATTEMPT_S * GROWTH**GROWN


def attempt_at(now: float) -> int:
    attempt = 0
    while attempt_end(attempt) <= now:
        attempt += 1
    return attempt


@dataclass(frozen=True)
class WantBody:
    digest: Digest


@dataclass(frozen=True)
class BodyIs:
    body: bytes


@dataclass(frozen=True)
class VertexIs:
    certificate: Certificate


@dataclass
class Host:
    """One voter's computer."""

    name: PeerId
    notary: Notary
    clock: Clock
    machine: Door | None = None
    life: int = 0
    kept: bytes | None = None
    attempt: int = 0
    free: int | None = None
    bound: int | None = None
    wanted: Digest | None = None
    vertex: Certificate | None = None  # decided and durable
    died_at: float = 0.0


@dataclass
class World:
    """`voters` machines of which the last `liars` are the enemy's; `machine` is the class under test."""

    seed: int
    voters: int
    liars: int = 0
    rule: str = "two-thirds"
    machine: Callable[..., Door] = Agreement
    crashes: bool = True
    needed: int | None = None  # mutant: another quorum than the rule says
    real: RealKeys | None = None  # instead of keyed hashes, which are a hundred times faster
    now: float = 0.0
    count: int = 0
    queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    cut: set[tuple[PeerId, PeerId]] = field(default_factory=set)
    loss: float = 0.0
    doubled: float = 0.0
    latency_s: tuple[float, float] = (0.005, 0.08)
    dying: PeerId | None = None
    storm: bool = True
    hub: bool = False  # most links never heal: honest voters hear one of them, and nobody else who is honest
    drift: float = 0.0  # clocks run by up to so much too fast or too slow, and are set

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.time = random.Random(f"clocks/{self.seed}")  # of its own: a seed is the same storm without clocks
        self.signers: dict[PeerId, Signer] = {s.peer: s for s in map(self._signer, range(self.voters))}
        self.verifier = self.real.verifier if self.real is not None else VirtualVerifier()
        self.names = tuple(self.signers)
        self.quorum = self.needed or quorum(self.voters, self.rule)  # type: ignore[arg-type]
        self.villains = frozenset(self.draw.sample(self.names, self.liars))
        self.honest = [p for p in self.names if p not in self.villains]
        self.keys = {p: signer.vote_key for p, signer in self.signers.items()}
        reader = self.notary(self.honest[0])
        self.watch = Watch(self.quorum, self.signers, frozenset(self.honest), reader)
        self.loss = self.draw.choice([0.0, 0.05, 0.2])
        self.doubled = self.draw.choice([0.0, 0.1])
        self.latency_s = self.draw.choice([(0.001, 0.01), (0.005, 0.08), (0.01, 0.5)])
        self.hosts = {p: Host(p, self.watch.spied(self.notary(p)), self._clock()) for p in self.honest}
        self.gang = Gang(self)
        self.dying = self.draw.choice(self.honest) if self.crashes and self.draw.random() < 0.5 else None
        for name in self.honest:
            self.start(name)
            self._every(NUDGE_S, lambda n=name: self._nudge(n))

    # ---- time ----------------------------------------------------------------------------------------------

    def notary(self, name: PeerId) -> Notary:
        return Notary(RUN, self.signers[name], self.verifier)

    def _signer(self, index: int) -> Signer:
        return self.real.signer(index, RUN) if self.real is not None else VirtualSigner(PeerId(f"p{index:02d}"))

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now + delay_s, self.count, do))

    def _clock(self) -> Clock:
        return Clock.drifting(self.time, self.drift, self.draw.uniform(-0.2, 0.2))

    def _every(self, period_s: float, do: Callable[[], None]) -> None:
        def again() -> None:
            do()
            self.after(period_s, again)

        self.after(self.draw.uniform(0, period_s), again)

    def run(self, until: float) -> None:
        while self.queue and self.queue[0][0] <= until and not self.all_decided():
            self.now, _, do = heapq.heappop(self.queue)
            do()
        self.now = max(self.now, until) if not self.all_decided() else self.now

    def all_decided(self) -> bool:
        return all(h.vertex is not None for h in self.hosts.values())

    # ---- the network ---------------------------------------------------------------------------------------

    def send(self, sender: PeerId, to: PeerId, message: Any) -> None:
        self.watch.shown(message)
        if sender in self.hosts:
            self.watch.said(sender, message)
        if (sender, to) in self.cut or self.draw.random() < self.loss:
            return
        for _ in range(1 + (self.draw.random() < self.doubled)):
            self.after(self.draw.uniform(*self.latency_s), lambda: self._arrive(sender, to, message))

    def _arrive(self, sender: PeerId, to: PeerId, message: Any) -> None:
        if to in self.villains:
            self.gang.hear(to, message)
            return
        host = self.hosts[to]
        if host.machine is None:
            return
        if host.vertex is not None:
            if not isinstance(message, (VertexIs, BodyIs, WantBody)):
                if not self.storm or self.draw.random() < 0.05:
                    self.send(to, sender, VertexIs(host.vertex))  # what lies behind me: see how it ended
            elif isinstance(message, WantBody):
                self._give_body(host, sender, message)
            return
        match message:
            case WantBody():
                self._give_body(host, sender, message)
            case BodyIs(body):
                self._apply(host, host.machine.learn_body(body))
                if host.machine is not None and host.bound is not None:
                    self._apply(host, host.machine.repropose(host.bound))
            case VertexIs(certificate):
                if self.watch.is_final(certificate):
                    self.watch.decided(to, certificate)
                    host.machine.stop()
                    host.vertex = certificate
            case Propose() | Voted() | TimedOut() | PreVote():
                try:
                    effects = host.machine.receive(sender, message)
                except PeerFault as fault:
                    assert fault.who not in self.hosts, f"{to} blames honest {fault}"
                    return
                self._apply(host, effects)
            case _:
                raise AssertionError(message)

    def _give_body(self, host: Host, to: PeerId, message: WantBody) -> None:
        body = host.machine.bodies.get(message.digest) if host.machine is not None else None
        if body is not None:
            self.send(host.name, to, BodyIs(body))

    # ---- hosts ---------------------------------------------------------------------------------------------

    def start(self, name: PeerId) -> None:
        host = self.hosts[name]
        host.life, host.free, host.bound, host.wanted = host.life + 1, None, None, None
        host.attempt = attempt_at(host.clock.shows(self.now))
        host.machine = machine = self.machine(
            host.notary, ROUND, "", dict(self.keys), self.quorum, self.names, host.kept
        )
        if host.vertex is not None:
            machine.stop()
            return
        early = machine.close_view(host.attempt * self.voters - 1) if host.attempt else []
        self._apply(host, [*early, *machine.begin()])
        self._wait_for_attempt(host, host.life)

    def crash(self, name: PeerId) -> None:
        host = self.hosts[name]
        host.machine, host.died_at = None, self.now
        if self.storm and self.draw.random() < 0.5:
            host.vertex = None  # it had decided, and nothing said so on its disk yet

    def _wait_for_attempt(self, host: Host, life: int) -> None:
        def end() -> None:
            if host.life != life or host.machine is None or host.vertex is not None:
                return
            host.attempt = max(host.attempt + 1, attempt_at(host.clock.shows(self.now)))
            self._apply(host, host.machine.close_view(host.attempt * self.voters - 1))
            self._wait_for_attempt(host, life)

        self.after(host.clock.wait_s(attempt_end(host.attempt), self.now), end)

    def _nudge(self, name: PeerId) -> None:
        host = self.hosts[name]
        if host.machine is None or host.vertex is not None:
            return
        self._apply(host, host.machine.remind())
        if host.machine is not None and host.wanted is not None and host.vertex is None:
            for peer in self.draw.sample(self.names, min(4, self.voters)):
                self.send(name, peer, WantBody(host.wanted))
        if host.machine is not None and host.free is not None and host.free == host.machine.view:
            self._propose(host, host.free)
        who = host.machine.waiting_for if host.machine is not None else None
        if who is None or who == name or host.machine.view >= self._last_view(host):
            return
        dead = who in self.hosts and self.hosts[who].machine is None
        if dead and self.now - self.hosts[who].died_at > PATIENCE_S:
            self._apply(host, host.machine.close_view(host.machine.view))

    def _last_view(self, host: Host) -> int:
        return (host.attempt + 1) * self.voters - 1

    def _propose(self, host: Host, view: int) -> None:
        assert host.machine is not None
        body = f"right: {host.name} in {view}/{self.draw.random()}".encode()
        self.watch.bodies.add(body)
        self._apply(host, host.machine.propose(view, body))

    def _judged(self, host: Host, life: int, digest: Digest, body: bytes) -> None:
        if host.life == life and host.machine is not None and host.vertex is None and body.startswith(b"right"):
            self._apply(host, host.machine.approve(digest))

    def _apply(self, host: Host, effects: list[Effect]) -> None:
        """All of it; or, if it dies now, a part, without the writes that no word has followed yet."""
        if self.dying == host.name and any(isinstance(e, Keep) for e in effects):
            self.dying = None
            effects = effects[: self.draw.randint(0, len(effects))]
            last_word = max((i for i, e in enumerate(effects) if _is_word(e)), default=-1)
            synced = self.draw.randint(last_word + 1, len(effects))
            effects = [e for i, e in enumerate(effects) if not isinstance(e, Keep) or i < synced]
            self.crash(host.name)
        for effect in effects:
            match effect:
                case Keep(blob=blob):
                    host.kept = blob
                case Send(to, message):
                    self.send(host.name, to, message)
                case Report(fact):
                    self._hear_fact(host, fact)
                case _:
                    raise AssertionError(effect)
        if host.machine is not None:
            self.watch.bounded(host.machine)

    def _hear_fact(self, host: Host, fact: Any) -> None:
        machine = host.machine
        match fact:
            case Equivocation(peer=peer):
                assert peer in self.villains, f"honest {peer} was caught saying two things"
                self.watch.evidence(fact)
            case Prepared():
                pass
            case Decided(certificate=certificate):
                self.watch.decided(host.name, certificate)
                if machine is not None:
                    host.vertex = certificate
            case _ if machine is None:
                pass
            case Judge(digest=digest, body=body):
                life = host.life
                delay_s = self.draw.choice([0.0, 0.01, 0.5])
                self.after(delay_s, lambda: self._judged(host, life, digest, body))
            case Free(view=view):
                host.free = view
                if self.draw.random() < 0.7:
                    self._propose(host, view)
            case Bound(view=view, digest=digest):
                host.bound = view
                effects = machine.repropose(view)
                if not effects and digest not in machine.bodies:
                    host.wanted = digest
                    for peer in machine.holders(digest):
                        self.send(host.name, peer, WantBody(digest))
                self._apply(host, effects)
            case _:
                raise AssertionError(fact)

    # ---- the enemy of networks and computers ------------------------------------------------------------------

    def play(self, moves: int) -> None:
        for _ in range(moves):
            if self.all_decided():
                return
            self._move()
            self.run(self.now + self.draw.choice([0.01, 0.05, 0.3, 1.0, 3.0]))

    def _move(self) -> None:
        what, draw = self.draw.random(), self.draw
        name = draw.choice(self.honest)
        host = self.hosts[name]
        if self.drift and self.time.random() < 0.2:
            host.clock.set(self.time, self.now)
        if host.machine is None:
            self.start(name)
        elif what < 0.25 and self.crashes:
            self.dying = name
        elif what < 0.35 and self.crashes:
            self.crash(name)
        elif what < 0.55:
            self._cut_links()
        elif what < 0.65:
            self.cut.clear()
        elif what < 0.8 and host.vertex is None and host.machine.view < self._last_view(host):
            self._apply(host, host.machine.close_view(host.machine.view))  # it thinks that the proposer is gone

    def _cut_links(self) -> None:
        """Two sides deaf to each other, or one deaf to the other; one voter alone; and some links at random."""
        side = {p for p in self.names if self.draw.random() < 0.5}
        if self.draw.random() < 0.3:
            side = {self.draw.choice(self.names)}
        both_ways = self.draw.random() < 0.5
        for a in self.names:
            for b in self.names:
                apart = (a in side) != (b in side) and (both_ways or a in side)
                if apart or self.draw.random() < 0.05:
                    self.cut.add((a, b))

    def heal(self) -> None:
        """Network and computers are well from now on, villains go on: everybody decides in bounded attempts.

        With a hub only its links are well, and everybody decides by the time that all had the first turn. Clocks go
        on to run apart: attempts are counted from the farthest, and from the first whose window is twice as long as
        clocks are apart, until the slowest clock shows that they are over.
        """
        self.cut.clear()
        if self.hub:
            apart = set(self.honest) - {self.draw.choice(self.honest)}
            self.cut = {(a, b) for a in apart for b in apart}
        self.loss = self.doubled = 0.0
        self.latency_s = (0.005, 0.05)
        self.dying, self.storm = None, False
        for name in self.honest:
            if self.hosts[name].machine is None:
                self.start(name)
        turns = self.liars + 2 + self.hub * self.voters
        shown = [h.clock.shows(self.now) for h in self.hosts.values()]
        first = max(h.attempt for h in self.hosts.values())
        while ATTEMPT_S * GROWTH ** min(first, GROWN) < 2 * (max(shown) - min(shown)):
            first += 1
        last = first + turns
        over = max(h.clock.wait_s(attempt_end(last), self.now) for h in self.hosts.values())
        self.run(self.now + over + 1.0)
        undecided = [p for p in self.honest if self.hosts[p].vertex is None]
        assert not undecided, f"{undecided} did not decide within {turns} attempts of peace"


def story(seed: int, voters: int, liars: int = 0, rule: str = "two-thirds", moves: int = 60, **more: Any) -> World:
    """One seeded world, storm and peace. Raises AssertionError naming what did not hold."""
    world = World(seed, voters, liars, rule, **more)
    try:
        world.play(moves)
        world.heal()
    except AssertionError as why:
        raise AssertionError(f"seed {seed}, {voters} voters, {liars} liars, {rule}: {why}") from why
    return world
