"""Deterministic world: one event queue, a virtual clock, seeded links and disks, and the real peers.

Invariants:
- The same seed and code give the same history, event for event (`digest()`), in any process and under any hash
  seed.
- Every peer has its own drifting clock and its own disk; a crash loses what was not synced.
- Peers never see world time.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from atoll.base.errors import RunFailedError
from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import (
    BandwidthMeasured,
    Connect,
    ContactsPolicy,
    Disconnect,
    Effect,
    Emit,
    Event,
    Fact,
    LinkDown,
    LinkUp,
    Message,
    Persist,
    Received,
    ResumedFromSleep,
    RunTask,
    Send,
    SetTimer,
    Start,
    TaskDone,
    TaskFailed,
    TimerFired,
    contact_all,
    expand_broadcasts,
    tag_of,
)
from atoll.peer.bandwidth import BandwidthEstimator
from atoll.peer.operator_commands import farewell
from atoll.peer.peer import Peer
from atoll.peer.tasks import EndTrainingEarly, TrainRound
from atoll.simulation.fault_schedule import FaultSelection
from atoll.simulation.network import NetworkKnobs, QueuedMessage, VirtualNetwork
from atoll.simulation.worker import VirtualWorker
from atoll.wire.codec import encode

REDIAL_S = 0.5  # interval at which a peer retries a connection
MEASURED_EVERY_S = 0.5  # as in a real peer
BROKEN_S = 2.0  # both ends give up a connection without traffic after this time


@dataclass(frozen=True)
class DriftingClock:
    """Clock of one peer: offset from and drift against world time."""

    offset_s: Seconds = 0.0
    drift: float = 0.0  # seconds per second

    def local(self, world_s: Seconds) -> Seconds:
        return world_s * (1 + self.drift) + self.offset_s

    def world(self, local_s: Seconds) -> Seconds:
        return (local_s - self.offset_s) / (1 + self.drift)


@dataclass
class VirtualComputer:
    """One virtual computer: the state that survives a crash, and the process that runs on it."""

    name: PeerId
    make: Callable[[], Peer]
    island: VirtualWorker
    clock: DriftingClock
    fsync_s: Seconds = 0.004
    kept: dict[str, bytes] = field(default_factory=dict)
    machine: Peer | None = None
    life: int = 0  # incremented with every start: events of an earlier life are not delivered
    asleep: bool = False
    missed: list[tuple[Seconds, Event]] = field(default_factory=list)
    timers: dict[str, int] = field(default_factory=dict)
    contacts: set[PeerId] = field(default_factory=set)
    training: Callable[[], None] | None = None  # ends the current job of its trainer
    disk_free: Seconds = 0.0
    # durable writes until it is killed, between a write and its sync or just after; None: it lives
    dies_after: int | None = None


class VirtualWorld:
    def __init__(self, seed: int, knobs: NetworkKnobs | None = None, faults: FaultSelection | None = None) -> None:
        self.seed, self.faults = seed, faults or FaultSelection()
        self.draw = random.Random(f"world/{seed}")
        self.network = VirtualNetwork(knobs or NetworkKnobs(), random.Random(f"network/{seed}"))
        self.contacts: ContactsPolicy = contact_all
        self.now: Seconds = 0.0
        self.nodes: dict[PeerId, VirtualComputer] = {}
        self.links: set[tuple[PeerId, PeerId]] = set()
        self.queue: list[tuple[Seconds, int, Callable[[], None]]] = []
        self.watchers: list[Callable[[Seconds, VirtualComputer, Fact], None]] = []
        self.events = 0
        self.kinds: Counter[str] = Counter()  # kind → messages that peers wanted to send
        self.weighs = False  # measure control messages too; costs an encoding per broadcast
        self.control_bytes = 0
        self._weighed: tuple[Message, int] | None = None
        self._sequence = 0
        self._digest = blake2b(digest_size=8)

    # ---- people ------------------------------------------------------------------------------------------

    def add(
        self, name: PeerId, make: Callable[[], Peer], island: VirtualWorker, clock: DriftingClock | None = None
    ) -> VirtualComputer:
        node = VirtualComputer(name, make, island, clock or DriftingClock(), kept=island.kept)
        self.nodes[name] = node
        self.at(self.now, lambda: self.start(name))
        return node

    def start(self, name: PeerId) -> None:
        node = self.nodes[name]
        if node.machine is not None:
            return
        node.life += 1
        node.machine, node.timers, node.asleep = node.make(), {}, False
        self._handle(node, Start(dict(node.kept)))
        if self.network.knobs.measured:
            self._measure(node, node.life, BandwidthEstimator())
        else:
            self._handle(node, BandwidthMeasured(self.network.uplink_of(name), ()))

    def crash(self, name: PeerId) -> None:
        """Kill the process: unsynced writes are lost, its sockets are reset, redials are refused."""
        if self.nodes[name].machine is not None and self.faults.admits("crash", self.now, name):
            self.kill(name)

    def kill(self, name: PeerId) -> None:
        node = self.nodes[name]
        if node.machine is None:
            return
        node.machine, node.missed, node.contacts = None, [], set()
        node.disk_free, node.dies_after = self.now, None
        node.life += 1
        node.island.crash()
        for other in sorted(self.nodes):
            self._drop_link(name, other, refused=True)

    def leave(self, name: PeerId, why: str = "enough for today") -> None:
        """Leave in good order: the process ends once its last messages are out."""
        node = self.nodes[name]
        if node.machine is None or node.asleep or not self.faults.admits("leave", self.now, name):
            return
        if isinstance(node.machine, Peer):  # a villain ends without a leave report
            self.carry_out(node, farewell(node.machine, why, node.clock.local(self.now)))
        life = node.life
        self.at(max(self.now, node.disk_free) + 0.05, lambda: self.kill(name) if node.life == life else None)

    def doom(self, name: PeerId, keeps: int) -> None:
        """Kill it around its `keeps`-th durable write from now: the moment at which a loss would hurt most."""
        if self.faults.admits("doom", self.now, name):
            self.nodes[name].dies_after = keeps

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Cut the link between two peers; their connection breaks a little later."""
        if not self.faults.admits("cut", self.now, a, b):
            return
        self.network.split({a}, {b})
        self.at(self.now + BROKEN_S, lambda: self._break_link(a, b))

    def split(self, side: set[PeerId], both_ways: bool = True) -> None:
        """Block messages from `side` to all others; connections across the cut break a little later."""
        if not self.faults.admits("split", self.now, *side):
            return
        others = set(self.nodes) - side
        self.network.split(side, others, both_ways)
        for a in sorted(side):
            for b in sorted(others):
                self.at(self.now + BROKEN_S, lambda a=a, b=b: self._break_link(a, b))

    def sleep(self, name: PeerId) -> None:
        """Suspend the process: nothing is handled until `wake`, and no peer is informed."""
        node = self.nodes[name]
        if node.machine is not None and not node.asleep and self.faults.admits("sleep", self.now, name):
            node.asleep = True

    def wake(self, name: PeerId) -> None:
        node = self.nodes[name]
        if node.machine is None or not node.asleep:
            return
        node.asleep = False
        waiting, node.missed = node.missed, []
        self._handle(node, ResumedFromSleep())
        for _, event in waiting:
            if node.machine is not None and not node.asleep:
                self._handle(node, event)

    # ---- time ----------------------------------------------------------------------------------------------

    def at(self, when: Seconds, act: Callable[[], None]) -> int:
        self._sequence += 1
        heapq.heappush(self.queue, (max(when, self.now), self._sequence, act))
        return self._sequence

    def run(self, until: Seconds, stop: Callable[[], bool] | None = None) -> None:
        queue = self.queue  # one list object for the whole run
        while queue and queue[0][0] <= until:
            self.now, _, act = heapq.heappop(queue)
            act()
            if stop is not None and stop():
                return
        self.now = max(self.now, until)

    def digest(self) -> str:
        """Digest of the whole history so far."""
        return self._digest.hexdigest()

    # ---- events and effects --------------------------------------------------------------------------------

    def _handle(self, node: VirtualComputer, event: Event) -> None:
        assert node.machine is not None
        self.events += 1
        if self.faults.events_max is not None and self.events > self.faults.events_max:
            raise RuntimeError(f"more than {self.faults.events_max} events")
        self._digest.update(f"{self.now:.9f}/{node.name}/{_label(event)}".encode())
        if self.faults.trace is not None:
            self.faults.trace.append(f"{self.now:.3f} s  {node.name}  {_label(event)}")
        self.carry_out(node, node.machine.handle(event, node.clock.local(self.now)))

    def carry_out(self, node: VirtualComputer, effects: list[Effect]) -> None:
        for effect in expand_broadcasts(effects, self.contacts):
            self._carry_out(node, effect)

    def dial(self, name: PeerId, other: PeerId) -> None:
        """Start a peer that knows an address and nothing else."""
        self._dial(name, other, self.nodes[name].life)

    def _carry_out(self, node: VirtualComputer, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(node, effect)
            case SetTimer(name, at):
                self._set_timer(node, name, at)
            case RunTask(job, work):
                self._ask(node, job, work)
            case Persist(name, blob):
                self._keep(node, name, blob)
            case Connect(peer):
                node.contacts.add(peer)
                self._dial(node.name, peer, node.life)
            case Disconnect(peer):
                node.contacts.discard(peer)
                if node.name not in self.nodes[peer].contacts:
                    self._drop_link(node.name, peer, refused=False)
            case Emit(fact):
                for watch in self.watchers:
                    watch(self.now, node, fact)

    def _send(self, node: VirtualComputer, send: Send) -> None:
        other = self.nodes.get(send.to)
        if other is None or other.machine is None:
            return
        self.kinds[tag_of(send.message)] += 1
        if self.weighs:
            self.control_bytes += self._weight(send.message)
        leave = self._durable_at(node)  # a Persist is durable before any later Send leaves
        life = other.life
        event = Received(node.name, send.message, send.payload)
        if leave > self.now:
            own = node.life
            self.at(leave, lambda: self._depart(node, own, send, other, life, event))
        else:
            self._depart(node, node.life, send, other, life, event)

    def _durable_at(self, node: VirtualComputer) -> Seconds:
        """Time at which all writes of this peer so far are on its disk."""
        return max(self.now, node.disk_free)

    def _depart(
        self, node: VirtualComputer, own: int, send: Send, other: VirtualComputer, life: int, event: Received
    ) -> None:
        if node.life != own:
            return  # it crashed before its disk was done: these messages were never sent
        said, arrivals = self.network.arrivals(self.now, send.to, event)
        for when in arrivals:
            if event.payload is None:
                self.at(when, lambda: self._deliver(other, life, event))
            else:
                self.at(when, lambda: self._arrive(other, life, said))

    def _arrive(self, node: VirtualComputer, life: int, said: QueuedMessage) -> None:
        """Handle the first byte of a payload."""
        self.at(self.network.through(self.now, node.name, said), lambda: self._deliver(node, life, said.event))

    def _deliver(self, node: VirtualComputer, life: int, event: Event) -> None:
        if node.machine is None or node.life != life:
            return
        if node.asleep:
            if len(node.missed) < 10_000:
                node.missed.append((self.now, event))
            return
        self._handle(node, event)

    def _measure(self, node: VirtualComputer, life: int, estimator: BandwidthEstimator) -> None:
        """Sample the uploads of this process, now and from now on."""
        if node.machine is None or node.life != life:
            return
        round = node.machine.round.plan.round if node.machine.round is not None else None
        uploading = self.network.upload_progress(node.name, self.now - MEASURED_EVERY_S, self.now)
        measured = estimator.sample(self.now, uploading, round)
        if measured is not None and not node.asleep:
            self._handle(node, measured)
        self.at(self.now + MEASURED_EVERY_S, lambda: self._measure(node, life, estimator))

    def _set_timer(self, node: VirtualComputer, name: str, at: Seconds | None) -> None:
        if at is None:
            node.timers.pop(name, None)
            return
        life = node.life
        number = self._sequence + 1

        def fire() -> None:
            if node.life == life and node.timers.get(name) == number:
                if not node.asleep:
                    del node.timers[name]
                self._deliver(node, life, TimerFired(name))

        node.timers[name] = number
        # as in reality, time passes before a timer fires: a time rounded to just before it is not met twice
        self.at(max(node.clock.world(at), self.now + 1e-6), fire)

    def _ask(self, node: VirtualComputer, job: str, work: Any) -> None:
        life, over = node.life, False

        def finish() -> None:
            nonlocal over
            if node.life != life or over:
                return
            over = True  # a training job may have ended before its time
            try:
                answer: Event = TaskDone(job, node.island.run(work))
            except (RuntimeError, KeyError, RunFailedError) as why:
                answer = TaskFailed(job, str(why))
            self._deliver(node, life, answer)

        begin = self._durable_at(node)  # a Persist is durable before any later RunTask begins
        if isinstance(work, TrainRound):
            node.training = finish
        self.at(begin + node.island.takes_s(work), finish)
        if isinstance(work, EndTrainingEarly) and node.training is not None:  # not before the job is known
            self.at(begin + max(node.island.step_ends_s(), node.island.takes_s(work)), node.training)

    def _keep(self, node: VirtualComputer, name: str, blob: bytes | None) -> None:
        life = node.life
        node.disk_free = max(self.now, node.disk_free) + node.fsync_s
        # drawn now, so that the outcome of this write does not depend on later events
        survives_unsynced = self.draw.random() < 0.3

        def synced() -> None:
            if node.life != life and not survives_unsynced:
                return  # torn or lost: the process died before the disk confirmed
            if node.life == life or survives_unsynced:
                _write(node.kept, name, blob)

        self.at(node.disk_free, synced)
        if node.dies_after is not None:
            node.dies_after -= 1
            if node.dies_after <= 0:
                moment = self.now + self.draw.uniform(0, 2) * node.fsync_s
                self.at(moment, lambda: self.kill(node.name) if node.life == life else None)

    def _weight(self, message: Message) -> int:
        if self._weighed is None or self._weighed[0] is not message:
            self._weighed = (message, len(encode(message)))
        return self._weighed[1]

    # ---- links ---------------------------------------------------------------------------------------------

    def _dial(self, name: PeerId, other: PeerId, life: int) -> None:
        node = self.nodes[name]
        if node.life != life or other not in node.contacts or _pair(name, other) in self.links or name == other:
            return
        target = self.nodes.get(other)
        cut = (name, other) in self.network.blocked or (other, name) in self.network.blocked
        if target is None or target.machine is None or target.asleep or cut:
            self.at(self.now + REDIAL_S, lambda: self._dial(name, other, life))
            return
        self.links.add(_pair(name, other))
        delay = self.network.one_way_s(name, other)
        for a, b in ((name, other), (other, name)):
            self.at(
                self.now + delay,
                lambda a=a, b=b, life=self.nodes[a].life: self._deliver(self.nodes[a], life, LinkUp(b)),
            )

    def _break_link(self, a: PeerId, b: PeerId) -> None:
        """Both ends give up a connection that is still cut; they redial until the cut is healed."""
        cut = (a, b) in self.network.blocked or (b, a) in self.network.blocked
        if not cut or _pair(a, b) not in self.links:
            return
        self.links.discard(_pair(a, b))
        for name, other in ((a, b), (b, a)):
            node = self.nodes[name]
            self._deliver(node, node.life, LinkDown(other, refused=False))
            if other in node.contacts:
                self._dial(name, other, node.life)

    def _drop_link(self, name: PeerId, other: PeerId, refused: bool) -> None:
        if _pair(name, other) not in self.links:
            return
        self.links.discard(_pair(name, other))
        node = self.nodes[other]
        delay = self.network.one_way_s(name, other)
        self.at(self.now + delay, lambda: self._deliver(node, node.life, LinkDown(name, refused)))
        if name in node.contacts:
            self.at(self.now + REDIAL_S, lambda: self._dial(other, name, node.life))


def _pair(a: PeerId, b: PeerId) -> tuple[PeerId, PeerId]:
    return (a, b) if a < b else (b, a)


def _write(kept: dict[str, bytes], name: str, blob: bytes | None) -> None:
    if blob is None:
        kept.pop(name, None)
    else:
        kept[name] = blob


# labels in digests of histories, independent of class names
_LABELS = {
    Start: "Start",
    LinkUp: "LinkUp",
    LinkDown: "LinkDown",
    ResumedFromSleep: "Woke",
    BandwidthMeasured: "Carried",
}


def _label(event: Event) -> str:
    if isinstance(event, Received):  # nearly all events; a match would test every case first
        return f"{event.sender}>{tag_of(event.message)}"
    if isinstance(event, TimerFired):
        return event.name
    return event.job if isinstance(event, TaskDone | TaskFailed) else _LABELS[type(event)]
