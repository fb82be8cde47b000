"""A virtual network and clock of its own for the agreement under test: real machines, seeded trouble.

Voters run on hosts with a disk, a clock that is a little off, and the habits of the round that drives them in real
life: attempts end by the clock, what was said is repeated, a proposer known to be dead is passed over, bodies are
judged after a while and fetched by name, whoever decided shows it. The trouble: loss, duplicates, reordering,
partitions in one or both directions, and crashes in the middle of what a host was doing: of the effects of one call
a part is carried out, and what was written since the last word that left is lost. With `drift`, clocks run apart
for ever, and in the storm are set forward and back. Villains sign with their own keys only (`villains.py`); what
must always hold is asserted after every event (`watch.py`).

With `heights`, one agreement follows the other, by real vertices in real histories, and each has another committee
(`chain.py`): some hosts are heights behind, some have no vote yet or none any more, and disks are lost with the
keys on them.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chain import Chain, VertexIs
from clocks import Clock
from villains import Gang
from watch import Watch

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Effect, Emit, Persist, Received, Send, expand_broadcasts
from atoll.crypto.signer import Signer
from atoll.peer.sync.early_messages import EarlyMessageBuffer
from atoll.policy.plan import quorum
from atoll.protocol.agreement.events import (
    BodyDecided,
    Equivocation,
    LocalProposerTurnBegan,
    PrepareQuorumReached,
    ProposalReceived,
    VertexBodyMissing,
)
from atoll.protocol.agreement.interface import ConsensusEngine
from atoll.protocol.agreement.two_phase import TwoPhaseAgreement
from atoll.protocol.agreement.voter import Electorate
from atoll.protocol.history.chain import VertexChain
from atoll.simulation.signatures import RealKeys, VirtualSignatureVerifier, VirtualSigner
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import ProposalMessage, TimeoutMessage, ViewChangePreVote, VoteMessage
from atoll.wire.messages.statements import QuorumCertificate
from atoll.wire.messages.vertex import Vertex, VertexBody

RUN = Digest(bytes(32))
ROUND = 7
ATTEMPT_S, GROWTH, GROWN = 8.0, 1.5, 5
NUDGE_S, PATIENCE_S = 1.0, 2.0


def _is_word(effect: Effect) -> bool:
    """What others may act on: a host acts on a decision as on a Send."""
    return isinstance(effect, Send) or (isinstance(effect, Emit) and isinstance(effect.fact, BodyDecided))


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
class WantVertex:
    round: int


@dataclass
class Height:
    """One agreement: who votes, what is watched, who lies."""

    round: int
    names: tuple[PeerId, ...]  # in the order of their turns
    keys: dict[PeerId, bytes]
    quorum: int
    watch: Watch
    head: Digest = RUN  # what it follows
    parent: VertexBody | None = None
    began_s: float = 0.0

    def __post_init__(self) -> None:
        self.gang: Gang | None = None


@dataclass
class Host:
    """One voter's computer."""

    name: PeerId
    notary: StatementSigner
    clock: Clock
    height: Height
    history: VertexChain | None = None  # of heights
    early: EarlyMessageBuffer = field(default_factory=EarlyMessageBuffer)
    machine: ConsensusEngine | None = None
    life: int = 0
    kept: dict[str, bytes] = field(default_factory=dict)
    attempt: int = 0
    free: int | None = None
    vertex: QuorumCertificate | None = None  # the last one: decided and durable
    died_at: float = 0.0

    @property
    def kept_here(self) -> bytes | None:
        return self.kept.get(f"said/{self.height.round}/agreement")


@dataclass
class World:
    """`voters` machines of which the last `liars` are the enemy's; `machine` is the class under test."""

    seed: int
    voters: int
    liars: int = 0
    rule: str = "two-thirds"
    machine: Callable[..., ConsensusEngine] = TwoPhaseAgreement
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
    forgers: bool = False  # liars speak for others, and show certificates of something else than they claim
    heights: int = 0  # so many follow each other, and members come and go; 0: one, of one committee
    past: type[VertexChain] = VertexChain  # the class under test

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.time = random.Random(f"clocks/{self.seed}")  # of its own: a seed is the same storm without clocks
        most = self.voters if not self.heights else 2 * self.voters
        self.signers: dict[PeerId, Signer] = {s.peer: s for s in map(self._signer, range(most))}
        self.verifier = self.real.verifier if self.real is not None else VirtualSignatureVerifier()
        self.names = tuple(self.signers)
        self.chain: Chain | None = None
        if self.heights:
            raft = self.rule == "majority"
            self.chain = Chain(self.seed, self.names, self.voters, self.liars, self.rule, self.heights, raft)  # type: ignore[arg-type]
            self.villains = self.chain.villains
        else:
            self.villains = frozenset(self.draw.sample(self.names, self.liars))
        self.honest = [p for p in self.names if p not in self.villains]
        self.levels: list[Height] = []
        first = self._first_height()
        self.loss = self.draw.choice([0.0, 0.05, 0.2])
        self.doubled = self.draw.choice([0.0, 0.1])
        self.latency_s = self.draw.choice([(0.001, 0.01), (0.005, 0.08), (0.01, 0.5)])
        self.hosts = {p: self._host(p, first) for p in self.honest}
        first.gang = Gang(self, first)
        self.dying = self.draw.choice(self.honest) if self.crashes and self.draw.random() < 0.5 else None
        for name in self.honest:
            self.start(name)
            self._every(NUDGE_S, lambda n=name: self._nudge(n))

    # ---- heights -------------------------------------------------------------------------------------------

    @property
    def watch(self) -> Watch:
        return self.levels[-1].watch

    def _first_height(self) -> Height:
        if self.chain is not None:
            return self._next_height(self.chain.run, self.chain.genesis)
        need = self.needed or quorum(self.voters, self.rule)  # type: ignore[arg-type]
        keys = {p: signer.vote_key for p, signer in self.signers.items()}
        self.levels.append(Height(ROUND, self.names, keys, need, self._watch(ROUND, need, keys)))
        return self.levels[0]

    def _next_height(self, head: Digest, body: VertexBody) -> Height:
        assert self.chain is not None
        keys, need = self.chain.voters_of(head, body)
        round, turns = body.round + 1, self.chain.turns(head, body)
        watch = self._watch(round, need, keys)
        self.levels.append(Height(round, turns, keys, need, watch, head, body, body.time_s))
        return self.levels[-1]

    def _watch(self, round: int, need: int, keys: dict[PeerId, bytes]) -> Watch:
        reader = self.notary(self.honest[0])
        watch = Watch(round, need, self.signers, frozenset(self.honest), reader, keys)
        if self.levels:
            watch.signed = self.levels[0].watch.signed  # whoever spies on notaries
        return watch

    def body(self, height: Height, right: bool, name: PeerId, clock_s: float, mark: str) -> bytes:
        if self.chain is None or height.parent is None:
            return f"{'right' if right else 'wrong'}: {mark}".encode()
        make = self.chain.body if right else self.chain.wrong
        return make(height.head, height.parent, name, clock_s, mark, self.draw)

    def _is_right(self, host: Host, body: bytes) -> bool:
        height, now = host.height, host.clock.shows(self.now)
        if self.chain is None or height.parent is None:
            return body.startswith(b"right")
        return self.chain.is_right(body, height.head, height.parent, now)

    def is_over(self, height: Height) -> bool:
        """Nobody honest is at this height or below any more."""
        return all(h.vertex is not None or h.height.round > height.round for h in self.hosts.values())

    # ---- time ----------------------------------------------------------------------------------------------

    def notary(self, name: PeerId) -> StatementSigner:
        return StatementSigner(self.chain.run if self.chain is not None else RUN, self.signers[name], self.verifier)

    def _host(self, name: PeerId, height: Height) -> Host:
        notary = self.levels[0].watch.spied(self.notary(name))
        return Host(name, notary, self._clock(), height, self._history(notary))

    def _history(self, notary: StatementSigner) -> VertexChain | None:
        chain = self.chain
        return self.past(chain.first, notary, chain.voters_of) if chain is not None else None

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

    def run(self, until: float, over: Callable[[], bool] | None = None) -> None:
        over = over or self.all_decided
        while self.queue and self.queue[0][0] <= until and not over():
            self.now, _, do = heapq.heappop(self.queue)
            do()
        self.now = max(self.now, until) if not over() else self.now

    def all_decided(self) -> bool:
        return all(h.vertex is not None for h in self.hosts.values())

    # ---- the network ---------------------------------------------------------------------------------------

    def send(self, sender: PeerId, to: PeerId, message: Any) -> None:
        for height in self.levels:
            height.watch.shown(message)
            if sender in self.hosts:
                height.watch.said(sender, message)
        if (sender, to) in self.cut or self.draw.random() < self.loss:
            return
        for _ in range(1 + (self.draw.random() < self.doubled)):
            self.after(self.draw.uniform(*self.latency_s), lambda: self._arrive(sender, to, message))

    def _arrive(self, sender: PeerId, to: PeerId, message: Any) -> None:
        if to in self.villains:
            at = [h for h in self.levels if self.chain is None or h.round == getattr(message, "round", -1)]
            for height in at:
                assert height.gang is not None
                height.gang.hear(to, message)
            return
        host = self.hosts[to]
        if host.machine is None:
            return
        if (
            isinstance(message, (ProposalMessage, VoteMessage, TimeoutMessage, ViewChangePreVote, WantVertex))
            and host.history is not None
        ):
            if message.round <= host.history.head:
                if not self.storm or self.draw.random() < 0.3:
                    self.send(to, sender, VertexIs(host.history.vertices[message.round]))
                return
            if isinstance(message, WantVertex):
                return
            if message.round > host.height.round:
                host.early.remember(Received(sender, message))
                return
        elif host.vertex is not None:
            if not isinstance(message, (VertexIs, BodyIs, WantBody)):
                if not self.storm or self.draw.random() < 0.05:
                    # what lies behind me: see how it ended
                    self.send(to, sender, VertexIs(Vertex(b"", host.vertex)))
            elif isinstance(message, WantBody):
                self._give_body(host, sender, message)
            return
        match message:
            case WantBody():
                self._give_body(host, sender, message)
            case BodyIs(body):
                self._apply(host, host.machine.add_body(body))
            case VertexIs(vertex) if host.history is not None:
                self._learn(host, vertex, sender)
            case VertexIs(Vertex(certificate=QuorumCertificate() as certificate)):
                if self.watch.is_final(certificate):
                    self.watch.decided(to, certificate)
                    host.machine.stop()
                    host.vertex = certificate
            case ProposalMessage() | VoteMessage() | TimeoutMessage() | ViewChangePreVote():
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

    def _learn(self, host: Host, vertex: Vertex, who: PeerId) -> None:
        """A vertex that somebody shows, or my own machine: the history judges it, and the next height begins."""
        assert host.history is not None and host.machine is not None
        try:
            body = host.history.append(vertex, who)
        except PeerFault as fault:
            assert who in self.villains, f"{host.name} does not believe what honest {who} decided: {fault}"
            return
        if body is None:
            return
        assert vertex.certificate is not None
        host.height.watch.decided(host.name, vertex.certificate)
        host.machine.stop()
        if self.chain is not None and body.round + 1 == self.chain.length:
            host.vertex = vertex.certificate
            return
        self._enter(host)
        self.start(host.name)
        for event in host.early.take():
            self.after(0.0, lambda e=event: self._arrive(e.sender, host.name, e.message))

    def _enter(self, host: Host) -> None:
        """The height after the head of its history; if it is the first one there, that height begins."""
        assert host.history is not None
        head, body = host.history.head_id, host.history.head_body
        found = next((h for h in self.levels if h.head == head), None)
        if found is None:
            before = self.levels[-1]
            found = self._next_height(head, body)
            found.gang = Gang(self, found, before.gang)
        host.height = found

    # ---- hosts ---------------------------------------------------------------------------------------------

    def start(self, name: PeerId) -> None:
        host, height = self.hosts[name], self.hosts[name].height
        host.life, host.free = host.life + 1, None
        host.attempt = attempt_at(host.clock.shows(self.now) - height.began_s)
        electorate = Electorate(height.round, "", dict(height.keys), height.quorum, height.names)
        host.machine = machine = self.machine(host.notary, electorate, host.kept_here)
        if host.vertex is not None:
            machine.stop()
            return
        early = machine.close_view(host.attempt * len(height.names) - 1) if host.attempt else []
        self._apply(host, [*early, *machine.start()])
        if host.life and host.height is height:
            self._wait_for_attempt(host, host.life)

    def crash(self, name: PeerId) -> None:
        host = self.hosts[name]
        host.machine, host.died_at = None, self.now
        if self.storm and self.draw.random() < 0.5 and host.history is None:
            host.vertex = None  # it had decided, and nothing said so on its disk yet

    def _forget(self, host: Host) -> None:
        """The same of the last of many, if nothing that was said since is on its disk; and words that waited."""
        host.early.take()
        if self.chain is None or host.history is None or not self.storm or self.chain.draw.random() < 0.5:
            return
        if f"said/{host.history.head + 1}/agreement" not in host.kept and host.history.head >= 0:
            host.vertex = None
            self._restore(host, host.history.head)

    def _restore(self, host: Host, until: int) -> None:
        """Its history is what its disk holds of it: all before this round."""
        assert host.history is not None
        kept, host.history = host.history.vertices, self._history(host.notary)
        assert host.history is not None
        for round in range(until):
            host.history.restore(kept[round])
        self._enter(host)

    def _lose_disk(self, host: Host) -> None:
        """And with it what it said, and the key that it said it with."""
        assert self.chain is not None
        self.chain.sessions[host.name] += 1
        self.signers[host.name] = VirtualSigner(host.name, self.chain.sessions[host.name])
        host.machine, host.died_at, host.vertex, host.kept = None, self.now, None, {}
        host.notary = self.levels[0].watch.spied(self.notary(host.name))
        self._restore(host, 0)

    def _wait_for_attempt(self, host: Host, life: int) -> None:
        def end() -> None:
            if host.life != life or host.machine is None or host.vertex is not None:
                return
            host.attempt = max(host.attempt + 1, attempt_at(host.clock.shows(self.now) - height.began_s))
            self._apply(host, host.machine.close_view(host.attempt * len(height.names) - 1))
            if host.life == life:
                self._wait_for_attempt(host, life)

        height = host.height
        self.after(host.clock.wait_s(height.began_s + attempt_end(host.attempt), self.now), end)

    def _nudge(self, name: PeerId) -> None:
        host = self.hosts[name]
        if host.machine is None or host.vertex is not None:
            return
        if host.history is not None:
            self.send(name, self.draw.choice(self.names), WantVertex(host.height.round))
        self._apply(host, host.machine.retransmit())
        for lacking in (
            sorted(host.machine.missing_bodies) if host.machine is not None and host.vertex is None else ()
        ):
            for peer in self.draw.sample(self.names, min(4, self.voters)):
                self.send(name, peer, WantBody(lacking))
        if host.machine is not None and host.free is not None and host.free == host.machine.view:
            self._propose(host, host.free)
        who = host.machine.silent_proposer if host.machine is not None else None
        if who is None or who == name or host.machine.view >= self._last_view(host):
            return
        dead = who in self.hosts and self.hosts[who].machine is None
        if dead and self.now - self.hosts[who].died_at > PATIENCE_S:
            self._apply(host, host.machine.close_view(host.machine.view))

    def _last_view(self, host: Host) -> int:
        return (host.attempt + 1) * len(host.height.names) - 1

    def _propose(self, host: Host, view: int) -> None:
        assert host.machine is not None
        mark = f"{host.name} in {view}/{self.draw.random()}"
        body = self.body(host.height, True, host.name, host.clock.shows(self.now), mark)
        host.height.watch.bodies.add(body)
        self._apply(host, host.machine.propose(view, body))

    def _judged(self, host: Host, life: int, digest: Digest, body: bytes) -> None:
        if host.life == life and host.machine is not None and host.vertex is None and self._is_right(host, body):
            self._apply(host, host.machine.approve(digest))

    def _apply(self, host: Host, effects: list[Effect]) -> None:
        """All of it; or, if it dies now, a part, without the writes that no word has followed yet."""
        height, dies = host.height, False
        effects = list(expand_broadcasts(effects))
        if self.dying == host.name and any(isinstance(e, Persist) for e in effects):
            self.dying = None
            effects = effects[: self.draw.randint(0, len(effects))]
            last_word = max((i for i, e in enumerate(effects) if _is_word(e)), default=-1)
            synced = self.draw.randint(last_word + 1, len(effects))
            effects = [e for i, e in enumerate(effects) if not isinstance(e, Persist) or i < synced]
            self.crash(host.name)
            dies = True
        for effect in effects:
            match effect:
                case Persist(name, bytes(blob)):
                    host.kept[name] = blob
                case Send(to, message):
                    self.send(host.name, to, message)
                case Emit(fact):
                    self._hear_fact(host, height, fact)
                case _:
                    raise AssertionError(effect)
        if dies:
            self._forget(host)
        elif host.machine is not None:
            host.height.watch.bounded(host.machine)

    def _hear_fact(self, host: Host, height: Height, fact: Any) -> None:
        machine = host.machine
        match fact:
            case Equivocation(peer=peer):
                assert peer in self.villains, f"honest {peer} was caught saying two things"
                height.watch.evidence(fact)
            case PrepareQuorumReached():
                pass
            case BodyDecided(certificate=certificate, body=body):
                height.watch.decided(host.name, certificate)
                if machine is None:
                    pass
                elif host.history is None:
                    host.vertex = certificate
                elif body is not None:  # else it is asked for with the next nudge
                    self._learn(host, Vertex(body, certificate), host.name)
            case _ if machine is None:
                pass
            case ProposalReceived(digest=digest, body=body):
                life = host.life
                delay_s = self.draw.choice([0.0, 0.01, 0.5])
                self.after(delay_s, lambda: self._judged(host, life, digest, body))
            case LocalProposerTurnBegan(view=view):
                host.free = view
                if self.draw.random() < 0.7:
                    self._propose(host, view)
            case VertexBodyMissing(digest=digest):
                for peer in machine.holders(digest):
                    self.send(host.name, peer, WantBody(digest))
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
        elif self.chain is not None and self._may_lose_disk(host) and self.chain.draw.random() < 0.1:
            self._lose_disk(host)
        elif what < 0.25 and self.crashes:
            self.dying = name
        elif what < 0.35 and self.crashes:
            self.crash(name)
            self._forget(host)
        elif what < 0.55:
            self._cut_links()
        elif what < 0.65:
            self.cut.clear()
        elif what < 0.8 and host.vertex is None and host.machine.view < self._last_view(host):
            self._apply(host, host.machine.close_view(host.machine.view))  # it thinks that the proposer is gone

    def _may_lose_disk(self, host: Host) -> bool:
        """One that votes, where every committee that others still need can do without it."""
        chain, needed = self.chain, [level for level in self.levels if not self.is_over(level)]
        if chain is None or host.name not in self.levels[-1].keys:
            return False
        return all(level.parent and chain.may_lose_disk(level.head, level.parent, host.name) for level in needed)

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
        for _ in range(self.heights):
            self._pass_height(turns)
        if self.heights:
            return
        shown = [h.clock.shows(self.now) for h in self.hosts.values()]
        first = max(h.attempt for h in self.hosts.values())
        while ATTEMPT_S * GROWTH ** min(first, GROWN) < 2 * (max(shown) - min(shown)):
            first += 1
        last = first + turns
        over = max(h.clock.wait_s(attempt_end(last), self.now) for h in self.hosts.values())
        self.run(self.now + over + 1.0)
        undecided = [p for p in self.honest if self.hosts[p].vertex is None]
        assert not undecided, f"{undecided} did not decide within {turns} attempts of peace"

    def _pass_height(self, turns: int) -> None:
        """The lowest height that anybody honest is at is over for all in so many attempts."""
        low = min((h.height for h in self.hosts.values() if h.vertex is None), key=lambda h: h.round, default=None)
        if low is None:
            return
        here = [h for h in self.hosts.values() if h.height is low]
        last = max(attempt_at(h.clock.shows(self.now) - low.began_s) for h in here) + turns
        over = max(h.clock.wait_s(low.began_s + attempt_end(last), self.now) for h in here)
        self.run(self.now + over + 1.0, lambda: self.is_over(low))
        late = [h.name for h in self.hosts.values() if h.vertex is None and h.height.round <= low.round]
        assert not late, f"{late} did not pass height {low.round} within {turns} attempts of peace"


def story(seed: int, voters: int, liars: int = 0, rule: str = "two-thirds", moves: int = 60, **more: Any) -> World:
    """One seeded world, storm and peace. Raises AssertionError naming what did not hold."""
    world = World(seed, voters, liars, rule, **more)
    try:
        world.play(moves)
        world.heal()
    except AssertionError as why:
        raise AssertionError(f"seed {seed}, {voters} voters, {liars} liars, {rule}: {why}") from why
    return world
