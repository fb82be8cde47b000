"""One all-reduce among thousands of virtual peers: the `AllReduce` machines of the real world on virtual links.

Plays one attempt from the first row to the last answer. Everybody has committed and heard all commitments before
time 0: what committing costs is not in here. Updates are multisets of names, so counting is checked exactly.

A payload occupies its sender's uplink and its receiver's downlink, first come, first served, and reaches the
downlink with its first byte (cut-through), as in policy/topology_cost, whose predictions can be held against it.
Combining takes one thread per peer, and an answer leaves when it is on disk.

Promises: the same seed and code give the same history (`Outcome.digest`). Peers may die, once, at random moments,
and everybody notices later, each at its own time. Never loses a message otherwise, never wakes the dead.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import cast

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import MIB, OWNER_WINDOWS, OWNERS_PER_PART
from atoll.base.machine import (
    Effect,
    Emit,
    Message,
    Payload,
    Persist,
    Received,
    RunTask,
    Send,
    SetTimer,
    Start,
    TaskDone,
    TimerFired,
)
from atoll.crypto.digest import digest, merkle_root
from atoll.policy.topology_cost import AgreedLinks
from atoll.protocol.allreduce.buffers import LocalRow
from atoll.protocol.allreduce.engine import AllReduce
from atoll.protocol.allreduce.environment import ReduceEnvironment
from atoll.protocol.allreduce.events import PartsReduced
from atoll.protocol.allreduce.factory import build_reduce
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.tasks import CombineRows
from atoll.protocol.allreduce.topology import ReduceTopology
from atoll.simulation.network import NetworkKnobs, VirtualNetwork
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner
from atoll.simulation.worker import VirtualWorker, WorkerKnobs
from atoll.wire.envelope import StatementSigner, VerifiedCache
from atoll.wire.messages.round import PartialSum, PartRequest, PartResponse, ResendRequest, RowContribution
from atoll.wire.messages.statements import BaseStatement, Commitment, SignedStatement

RUN = Digest(bytes(32))
ANSWER_BYTES_MAX = MIB  # that is opened once for all: thousands hold it, and it names thousands
GIGABIT = NetworkKnobs(0.025, 0.050, jitter_s=0.0, uplink_bytes_s=125e6, downlink_bytes_s=125e6)


@dataclass(frozen=True)
class ReductionKnobs:
    network: NetworkKnobs = GIGABIT  # latencies and rates of it; a loss would be a death here
    update_bytes: int = 1_000_000
    message_s: Seconds = AgreedLinks.message_s  # per message at either end; an assumption, as in the planner
    combine_bytes_s: float = 1e9  # encoded bytes; int8 adds up at twice that on one core (bench/codec.py)
    fsync_s: Seconds = 0.004
    window_s: Seconds = 120.0  # each owner's; above what the slowest reduce takes, so deadlines decide nothing
    death_rate: float = 0.0  # of peers
    deaths_until_s: Seconds = 0.5  # they die between 0 and this
    detect_s: Seconds = 1.0  # until the first notices a death; an assumption, a reset socket is quicker
    detect_spread_s: Seconds = 0.5  # and until the last does


@dataclass(frozen=True)
class PartOutcome:
    """One part as the living see it in the end."""

    owners_alive: int
    holders: dict[Digest, int]  # result -> how many hold it; more than one result only around an owner's death
    without: int  # living peers that hold none
    left_out: int  # living peers that a result does not count, over all results
    twice: int  # names that a result counts more than once, over all results


@dataclass(frozen=True)
class Outcome:
    seconds: Seconds  # until the last living peer is done with every part
    parts: tuple[PartOutcome, ...]
    alive: int
    messages: dict[PeerId, int]  # with a payload, sent
    sent_bytes: dict[PeerId, int]  # of payloads
    control: int  # messages without a payload, of all
    hops: int  # of the farthest row to the owner that answered
    events: int
    miscounted: tuple[str, ...]
    digest: str  # names the whole history


class Reduction:
    """`topology` must cut into equal shares, which all do that are built without upload rates."""

    def __init__(
        self, seed: int, peers: Sequence[PeerId], topology: ReduceTopology, knobs: ReductionKnobs | None = None
    ) -> None:
        assert len({part.share for part in topology.parts}) == 1
        self.peers, self.knobs = tuple(peers), knobs or ReductionKnobs()
        self.draw = random.Random(f"reduction/{seed}")
        self.network = VirtualNetwork(self.knobs.network, random.Random(f"network/{seed}"))
        owners = range(min(OWNERS_PER_PART, len(self.peers)))
        until = tuple(self.knobs.window_s * min(k + 1, OWNER_WINDOWS) for k in owners)
        self.plan = ReducePlan(0, 0, "", topology, self.peers, until)
        self.island = VirtualWorker(PeerId("all"), WorkerKnobs(update_bytes=self.knobs.update_bytes), self.draw)
        self.now: Seconds = 0.0
        self.queue: list[tuple[Seconds, int, Callable[[], None]]] = []
        self.sequence = self.events = self.control = 0
        self.died: dict[PeerId, Seconds] = {}
        self.noticed: defaultdict[PeerId, set[PeerId]] = defaultdict(set)  # by whom -> who is gone
        self.free: defaultdict[tuple[str, PeerId], Seconds] = defaultdict(float)  # links, threads, disks
        self.timers: dict[tuple[PeerId, str], int] = {}
        self.messages: Counter[PeerId] = Counter()
        self.sent_bytes: Counter[PeerId] = Counter()
        self.hops: Counter[tuple[int, PeerId]] = Counter()  # (part, peer): of the farthest row that came to it
        self.finished: dict[PeerId, Seconds] = {}
        self._digest = blake2b(digest_size=8)
        self.commits: dict[PeerId, Commitment] = {}
        self.updates: dict[PeerId, LocalRow] = {}
        self.machines: dict[PeerId, AllReduce] = {}
        reader = StatementSigner(RUN, VirtualSigner(PeerId("reader")), VirtualSignatureVerifier())
        reader.opened = VerifiedCache(bytes_max=ANSWER_BYTES_MAX)
        for peer in self.peers:
            self._add(peer, Desk(StatementSigner(RUN, VirtualSigner(peer), VirtualSignatureVerifier()), reader))

    def _add(self, peer: PeerId, desk: Desk) -> None:
        size = self.knobs.update_bytes // self.plan.parts
        parts = tuple(Payload(digest(f"{peer}/{j}".encode()), size, (peer,)) for j in range(self.plan.parts))
        commit = Commitment(0, 0, merkle_root(tuple(x.digest for x in parts)), len(parts), 1, 1, 1.0, 1.0, 1)
        self.commits[peer], self.updates[peer] = commit, LocalRow(desk.sign(commit), parts)
        noticed = self.noticed[peer]

        def awaits(part: int, names: Container[PeerId], among: Iterable[PeerId] | None) -> bool:
            return any(q not in names and q not in noticed for q in (self.peers if among is None else among))

        notary = cast(StatementSigner, desk)
        around = ReduceEnvironment(_vote_key, self.commits.get, awaits, noticed.__contains__)
        self.machines[peer] = build_reduce(notary, self.plan, around)

    def run(self) -> Outcome:
        """Play until nothing moves any more."""
        for peer in self.peers:
            self._at(0.0, lambda peer=peer: self._begin(peer))
        for victim in self.draw.sample(self.peers, round(self.knobs.death_rate * len(self.peers))):
            self._at(self.draw.uniform(0, self.knobs.deaths_until_s), lambda victim=victim: self._die(victim))
        while self.queue:
            self.now, _, act = heapq.heappop(self.queue)
            act()
        return self._outcome()

    # ---- events --------------------------------------------------------------------------------------------

    def _at(self, when: Seconds, act: Callable[[], None]) -> None:
        self.sequence += 1
        heapq.heappush(self.queue, (when, self.sequence, act))

    def _handle(self, peer: PeerId, label: str, act: Callable[[AllReduce], list[Effect]]) -> None:
        if peer in self.died:
            return
        self.events += 1
        self._digest.update(f"{self.now:.9f}/{peer}/{label}".encode())
        self._carry_out(peer, act(self.machines[peer]))

    def _begin(self, peer: PeerId) -> None:
        update = self.updates[peer]
        self._handle(peer, "Start", lambda m: m.handle(Start({}), self.now) + m.contribute(update, self.now))

    def _die(self, victim: PeerId) -> None:
        self.died[victim] = self.now
        for peer in self.peers:
            if peer not in self.died:
                noticed_s = self.knobs.detect_s + self.draw.uniform(0, self.knobs.detect_spread_s)
                self._at(self.now + noticed_s, lambda peer=peer: self._notice(peer, victim))

    def _notice(self, peer: PeerId, victim: PeerId) -> None:
        self.noticed[peer].add(victim)
        self._handle(peer, f"gone {victim}", lambda m: m.review(self.now))

    def _deliver(self, sender: PeerId, send: Send, left: Seconds) -> None:
        if self.died.get(sender, left) < left:
            return  # it died before the last byte was out
        message = send.message
        label = f"{sender}>{type(message).__name__}"
        self._handle(send.to, label, lambda m: self._hear(m, sender, message, send.payload))

    def _hear(self, m: AllReduce, sender: PeerId, message: Message, payload: Payload | None) -> list[Effect]:
        """What the round around a reduce does for it (peer/round/machine.py): repeats and bytes that were asked
        for."""
        match message:
            case ResendRequest():
                return m.resend(sender)
            case PartRequest(digest=wanted):
                held = [h.payload for h in m.results.values() if h.payload.digest == wanted]
                return [Send(sender, PartResponse(0, 0, "", p.digest), payload=p) for p in held]
            case PartResponse():
                assert payload is not None
                return m.accept_bytes(payload)
            case _:
                return m.handle(Received(sender, message, payload), self.now)

    # ---- effects -------------------------------------------------------------------------------------------

    def _carry_out(self, peer: PeerId, effects: list[Effect]) -> None:
        sends: list[Send] = []
        for effect in effects:
            match effect:
                case Send():
                    sends.append(effect)
                case SetTimer(name, at):
                    self._set_timer(peer, name, at)
                case RunTask(job, CombineRows() as work):
                    self._combine(peer, job, work)
                case Persist():
                    self._occupy("disk", peer, self.now, self.knobs.fsync_s)
                case Emit(PartsReduced()):
                    self.finished[peer] = self.now
                case Emit():
                    pass
                case _:
                    raise AssertionError(f"a reduce does not {type(effect).__name__}")
        if not sends:
            return
        # a Keep is durable before any later Send leaves; here, before any of the same moment
        durable = self.free["disk", peer]
        if durable > self.now:
            self._at(durable, lambda: self._depart(peer, sends))
        else:
            self._depart(peer, sends)

    def _set_timer(self, peer: PeerId, name: str, at: Seconds | None) -> None:
        number = self.timers[peer, name] = self.sequence + 1

        def fire() -> None:
            if self.timers[peer, name] == number:
                self._handle(peer, name, lambda m: m.handle(TimerFired(name), self.now))

        if at is not None:
            self._at(at, fire)

    def _combine(self, peer: PeerId, job: str, work: CombineRows) -> None:
        takes_s = sum(row.payload.size_bytes for row in work.rows) / self.knobs.combine_bytes_s
        done = self._occupy("thread", peer, self.now, takes_s)
        result = self.island.run(work)
        self._at(done, lambda: self._handle(peer, job, lambda m: m.handle(TaskDone(job, result), self.now)))

    def _depart(self, peer: PeerId, sends: list[Send]) -> None:
        if peer in self.died:
            return
        for send in sends:
            self._send(peer, send)

    def _send(self, peer: PeerId, send: Send) -> None:
        way_s, message_s = self.network.one_way_s(peer, send.to), self.knobs.message_s
        if send.payload is None:
            self.control += 1
            self._at(self.now + way_s + 2 * message_s, lambda: self._deliver(peer, send, self.now))
            return
        self.messages[peer] += 1
        self.sent_bytes[peer] += send.payload.size_bytes
        if isinstance(send.message, RowContribution | PartialSum):
            here, there = (send.message.part, peer), (send.message.part, send.to)
            self.hops[there] = max(self.hops[there], self.hops[here] + 1)
        takes_s = send.payload.size_bytes / self.knobs.network.uplink_bytes_s
        left = self._occupy("up", peer, self.now, message_s + takes_s)
        self._at(left - takes_s + way_s, lambda: self._arrive(peer, send, left, left + way_s))

    def _arrive(self, sender: PeerId, send: Send, left: Seconds, last: Seconds) -> None:
        """The first byte is at the receiver's downlink, the last one comes at `last`, or later if that is busy."""
        assert send.payload is not None
        message_s = self.knobs.message_s
        takes_s = send.payload.size_bytes / self.knobs.network.downlink_bytes_s
        through = self._occupy("down", send.to, self.now, message_s + takes_s)
        self._at(max(last + message_s, through), lambda: self._deliver(sender, send, left))

    def _occupy(self, what: str, whose: PeerId, ready: Seconds, takes_s: Seconds) -> Seconds:
        """When it has worked off what it was given before, and this."""
        done = self.free[what, whose] = max(ready, self.free[what, whose]) + takes_s
        return done

    # ---- what came of it -----------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        living = [p for p in self.peers if p not in self.died]
        owners = {(j, o) for j in range(self.plan.parts) for o in self.plan.owners(j)}
        return Outcome(
            seconds=max((self.finished.get(p, float("inf")) for p in living), default=0.0),
            parts=tuple(self._part_outcome(j, living) for j in range(self.plan.parts)),
            alive=len(living),
            messages={p: self.messages[p] for p in self.peers},
            sent_bytes={p: self.sent_bytes[p] for p in self.peers},
            control=self.control,
            hops=max((hops for place, hops in self.hops.items() if place in owners), default=0),
            events=self.events,
            miscounted=tuple(self.island.miscounted),
            digest=self._digest.hexdigest(),
        )

    def _part_outcome(self, part: int, living: Sequence[PeerId]) -> PartOutcome:
        held = [self.machines[p].results[part].payload for p in living if part in self.machines[p].results]
        different = {payload.digest: payload for payload in held}.values()
        results = [Counter[PeerId](payload.data) for payload in different]
        return PartOutcome(
            owners_alive=len(set(self.plan.owners(part)) - self.died.keys()),
            holders=dict(Counter(payload.digest for payload in held)),
            without=len(living) - len(held),
            left_out=sum(not names[p] for names in results for p in living),
            twice=sum(times > 1 for names in results for times in names.values()),
        )


@dataclass(frozen=True)
class Desk:
    """A peer's `StatementSigner` that lets one reader open statements for all: thousands hold one copy of each
    answer."""

    own: StatementSigner
    reader: StatementSigner = field(repr=False)

    @property
    def me(self) -> PeerId:
        return self.own.me

    def sign(self, statement: BaseStatement) -> SignedStatement:
        return self.own.sign(statement)

    def open(self, signed: SignedStatement, kind: type[BaseStatement], vote_key: bytes | None) -> BaseStatement:
        return self.reader.open(signed, kind, vote_key)


def _vote_key(peer: PeerId) -> bytes:
    return VirtualSigner(peer).vote_key
