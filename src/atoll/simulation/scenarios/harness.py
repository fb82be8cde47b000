"""Scenario harness: a swarm, its faults, final checks and the report.

Every scenario has two halves. In the first, anything may happen and only safety is required. Then the world is
healed, and every honest peer must make progress within a bounded time. The harness never steers a peer.
"""

from __future__ import annotations

import gc
import random
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import msgspec

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Fact
from atoll.peer.events import RoundAttemptFailed
from atoll.peer.settings import RunSettings, TopologyName, features_of
from atoll.policy.compatibility import problem_with
from atoll.policy.plan import RoundPlan, RoundSettings
from atoll.simulation.adversaries.byzantine import Twist, villain
from atoll.simulation.fault_schedule import FaultSelection
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.swarm import IslandMaker, PeerMaker, SwarmKnobs, VirtualSwarm, WorldKeys, peer_name
from atoll.simulation.worker import VirtualWorker
from atoll.simulation.world import VirtualComputer

ERA_ROUNDS = 10  # short, so that every scenario contains the end of an era
WINDOW_MIN_S = 1.5  # as in `atoll up`
# containers, and rounds of the younger generations: reference counts free nearly everything
COLLECTIONS = 20_000, 10, 10
DIRECT = "butterfly", "star"  # topologies that send every row to its owner as its author wrote it
HEALED_ATTEMPTS = 4  # after healing, all peers must be at the head again within the time of this many attempts

ROUND_S = 120.0  # virtual time per round beside villains
LOSSY = NetworkKnobs(0.01, 0.3, jitter_s=0.05, loss_rate=0.01)


class FactReports(Protocol):
    """Facts of one run, as far as a scenario judges them."""

    def watch(self, now: Seconds, node: VirtualComputer, fact: Fact) -> None: ...


R = TypeVar("R", bound=FactReports)


class ScenarioFailed(AssertionError):
    """Failure of a scenario; the last line of its message replays it.

    `kind`: the message without names and numbers. `call`: arguments of `play`. `faults`: those that happened, with
    their world times. `events`: handled until then.
    """

    kind: str
    call: dict[str, Any]
    faults: dict[str, Seconds]
    events: int


class ScenarioUnsupported(ValueError):
    """Protocol or topology that the scenario excludes: it has liars, needs a quorum that tolerates some, or its own
    topology.
    """


class ScenarioReport(msgspec.Struct, kw_only=True):
    scenario: str
    seed: int
    peers: int
    quorum: str
    protocol: str
    rounds: int  # closed by the last of the honest peers
    virtual_s: float
    wall_s: float
    cpu_s: float
    peak_mib: float
    events: int
    messages: int
    kinds: dict[str, int]  # kind of message → number sent, most first
    payload_mb: float
    complete_share: float  # share of closings of training rounds that counted every voter in every part
    attempts_failed: int
    repairs: int  # complete states downloaded because parts were missing
    members: int  # voters at the end
    faults: dict[str, int]
    measured: dict[str, float] = {}  # values of scenarios that measure something
    digest: str  # digest of the whole history: the same seed gives the same

    @property
    def line(self) -> str:
        faults = " ".join(f"{k}={v}" for k, v in sorted(self.faults.items())) or "none"
        measured = "".join(f"  {k} {v:.4g}" for k, v in self.measured.items())
        return (
            f"{self.scenario:<11} seed {self.seed:<6} {self.peers:>3} peers {self.rounds:>4} rounds  "
            f"complete {self.complete_share:6.1%}  failed attempts {self.attempts_failed:>3}  "
            f"repairs {self.repairs}  {self.virtual_s:8.1f} s virtual {self.wall_s:6.1f} s  {self.digest}  "
            f"faults: {faults}{measured}"
        )


@dataclass
class Scenario:
    tell: Callable[[ScenarioContext], None]
    peers: int
    rounds: int


class ScenarioContext:
    """Parameters of a scenario, its seeded random generator, and helpers for time and peers."""

    def __init__(
        self,
        name: str,
        seed: int,
        peers: int,
        rounds: int,
        quorum: str,
        protocol: str = "bft",
        topology: TopologyName | None = None,
        schedule: FaultSelection | None = None,
    ) -> None:
        self.schedule = schedule
        self.name, self.seed, self.peers, self.rounds = name, seed, peers, rounds
        self.protocol, self.topology = protocol, topology
        trusted = protocol == "raft" or topology is not None  # most topologies require trusted members
        drawn = "two-thirds" if seed % 2 and not trusted else "majority"
        self.quorum = quorum or drawn
        self.draw = random.Random(f"{name}/{seed}")
        self.faults: Counter[str] = Counter()
        self.measured: dict[str, float] = {}
        self.attempts_failed = 0
        self.swarm: VirtualSwarm  # set by `gather`

    def gather(
        self,
        knobs: SwarmKnobs | None = None,
        villains: Mapping[int, PeerMaker] | None = None,
        keys: WorldKeys | None = None,
        island: IslandMaker = VirtualWorker,
    ) -> VirtualSwarm:
        self.swarm = VirtualSwarm(
            self.seed, knobs or SwarmKnobs(self.peers, run=self.settings()), villains, keys, island, self.schedule
        )
        self.world = self.swarm.world
        self.world.watchers.append(self._watch)
        return self.swarm

    def settings(self, open_to_all: bool = True, **more: object) -> RunSettings:
        rule = "two-thirds" if self.quorum == "two-thirds" else "majority"
        raft = self.protocol == "raft"
        if raft and rule != "majority":
            raise ScenarioUnsupported(
                f"members of {self.name!r} may lie, and Raft is for those who trust each other"
            )
        if self.topology is not None:
            more = {"topology": self.topology} | more
        plan = RoundSettings(inner_steps=20, first_train_s=10, quorum=rule)
        settings = msgspec.structs.replace(
            RunSettings(open_to_all=open_to_all, era_rounds=ERA_ROUNDS, round=plan),
            protocol="raft" if raft else msgspec.UNSET,
            **more,
        )
        if self.topology is not None and (why := self._not_by_it(settings)):
            raise ScenarioUnsupported(f"{self.name!r} cannot be told by a {self.topology} topology: {why}")
        return settings

    def _not_by_it(self, settings: RunSettings) -> str:
        """Reason why the requested topology would not be used; empty if it would."""
        if settings.topology != self.topology:
            return "it has one of its own"
        if self.topology not in DIRECT and (settings.round.quorum != "majority" or settings.statistic != "mean"):
            return "its members may lie, and members that relay rows are not checked"
        features = features_of(settings)
        return problem_with("a quorum of updates", features) if "a quorum of updates" in features else ""

    @property
    def tolerated(self) -> int:
        """Most members that may lie."""
        return (self.peers - 1) // 3

    def draw_places(self) -> list[int]:
        return self.draw.sample(range(self.peers), self.tolerated)

    def draw_villains(self, kinds: Sequence[str]) -> dict[int, str]:
        """Place → kind of as many villains as may lie."""
        drawn = [self.draw.choice(kinds) for _ in range(self.tolerated)]
        return dict(zip(self.draw_places(), drawn, strict=True))

    def play_beside(
        self,
        kinds: Mapping[int, str],
        twist_of: Callable[[str], Twist],
        islands: Callable[[dict[PeerId, str]], IslandMaker],
        run: RunSettings,
        reports: Callable[[ScenarioContext], R],
        network: NetworkKnobs | None = None,
    ) -> R:
        """Play all rounds beside villains (place → kind), and return the reports that watched."""
        for kind in kinds.values():
            self.fault(kind)
        villains = {place: villain(twist_of(kind)) for place, kind in kinds.items()}
        behind = islands({peer_name(place): kind for place, kind in kinds.items()})
        knobs = SwarmKnobs(self.peers, run=run, network=network or NetworkKnobs())
        self.gather(knobs, villains, island=behind)
        told = reports(self)
        self.world.watchers.append(told.watch)
        self.until_round(self.rounds - 1, ROUND_S * self.rounds)
        return told

    def paced(self) -> RoundSettings:
        """Round settings with time limits that follow the pace."""
        return msgspec.structs.replace(self.settings().round, window_min_s=WINDOW_MIN_S)

    def fault(self, kind: str) -> None:
        self.faults[kind] += 1

    # ---- time ----------------------------------------------------------------------------------------------

    def until(self, true: Callable[[], bool], within_s: Seconds, what: str) -> None:
        """Run until `true`. If it does not become true in time, the scenario fails with the text of `what`."""
        if not true():
            self.world.run(self.world.now + within_s, stop=true)
        if not true():
            raise InvariantBroken(f"{what}, not within {within_s:.0f} s; {self.standing()}")

    def until_round(self, target: int, within_s: Seconds | None = None, who: list[PeerId] | None = None) -> None:
        """Run until all honest peers (or `who`) hold the state of this round."""
        self.until(
            self._reached(target, who),
            within_s or 600.0 * (target + 2),
            f"round {target} was not reached by all",
        )

    def healed(self) -> Seconds:
        """Longest recovery: the time of the attempts that the longest time limits allow."""
        settings = self.swarm.knobs.run.round
        run = self.swarm.run_id
        plan = RoundPlan(0, run, run, self.swarm.founders[0], 0.0, (), settings, settings.first_train_s, 3)
        lengths = [b - a for a, b in pairwise(plan.times(k).begin for k in range(10))]
        return HEALED_ATTEMPTS * lengths[-1]

    def demand_progress(self, rounds: int = 3) -> None:
        """Require, after healing, that all running peers get `rounds` further than the furthest now, and vote
        again.
        """
        goal = max(self.swarm.heads()) + rounds
        self.until_round(goal, self.healed())
        self.until(lambda: not self._strangers(), self.healed(), "not every peer is a member again")

    def _reached(self, target: int, who: list[PeerId] | None) -> Callable[[], bool]:
        """Predicate for every event; it tests the peer first that was behind at the last test."""
        behind = self.swarm.founders[0]

        def reached() -> bool:
            nonlocal behind
            if self._awaited(behind, who) and self.swarm.head(behind) < target:
                return False
            names = [n.name for n in self.swarm.honest] if who is None else who
            behind = next((name for name in names if self.swarm.head(name) < target), behind)
            return bool(names) and all(self.swarm.head(name) >= target for name in names)

        return reached

    def _awaited(self, name: PeerId, who: list[PeerId] | None) -> bool:
        if who is not None:
            return name in who
        return name not in self.swarm.checkers.villains and self.world.nodes[name].machine is not None

    def _strangers(self) -> list[PeerId]:
        """Running peers that want to vote, and may not."""
        body = self.newest.head_body if self.newest else None
        votes = {m.peer for m in body.members if m.votes} if body else set[PeerId]()
        return [
            n.name
            for n in self.swarm.honest
            if n.machine and n.machine.wish.role != "observer" and n.name not in votes
        ]

    @property
    def newest(self):
        histories = [n.machine.history for n in self.swarm.honest if n.machine and n.machine.history]
        return max(histories, key=lambda h: h.head, default=None)

    def standing(self) -> str:
        """State of all peers, for the failure message."""
        lines: list[str] = []
        for node in self.world.nodes.values():
            lines.append(f"{node.name}: {_where(node)}")
        return "; ".join(lines)

    def _watch(self, now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundAttemptFailed):
            self.attempts_failed += 1


def _where(node: VirtualComputer) -> str:
    m = getattr(node.machine, "peer", node.machine)  # a villain wraps an honest peer
    if m is None:
        return "down"
    state = f"at {m.at}, knows {m.history.head if m.history else None}"
    if node.asleep:
        state += ", asleep"
    if m.round is not None:
        r = m.round
        state += f", attempt {r.attempt} view {r.agreement.view} {'sharing' if r.patience.sharing else 'training'}"
        state += f"{', decided' if r.agreement.decided else ''}{', adopting' if r.adopting else ''}"
    if m.regain.fetch is not None:
        state += ", fetching"
    return state


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Reduce garbage collection: searching millions of objects took a tenth to a fifth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(*COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _kind_of(failure: str) -> str:
    """The message without lists, names and numbers."""
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", re.split(r"[;\[{(]", failure)[0])


def play(
    name: str,
    scenario: Scenario,
    seed: int,
    peers: int,
    rounds: int,
    quorum: str,
    *,
    protocol: str = "bft",
    topology: TopologyName | None = None,
    faults: FaultSelection | None = None,
) -> ScenarioReport:
    """Play a scenario, with all of its faults or those that `faults` selects; `faults` then names them."""
    faults = faults or FaultSelection()
    stage = ScenarioContext(name, seed, peers, rounds, quorum, protocol, topology, faults)
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        with _seldom_collected():
            scenario.tell(stage)
    except ScenarioUnsupported:
        raise
    except Exception as why:
        kind = "" if isinstance(why, InvariantBroken) else f"{type(why).__name__}: "
        replay = f"atoll simulate {name} --seed {seed} --peers {peers}"
        replay += f" --rounds {rounds}" if rounds else ""  # some scenarios have no rounds
        replay += f" --quorum {stage.quorum}"
        replay += f" --protocol {protocol}" if protocol != "bft" else ""
        replay += f" --topology {topology}" if topology is not None else ""
        replay += f" --faults {','.join(faults.happened) or 'none'}" if faults.only is not None else ""
        at = f"at {stage.world.now:.1f} s, " if hasattr(stage, "world") else ""  # before the swarm was gathered
        failed = ScenarioFailed(f"{kind}{why}\n  {at}replay: {replay}")
        failed.kind, failed.faults = (
            _kind_of(f"{kind}{why}"),
            faults.happened,
        )
        failed.call = {"name": name, "seed": seed, "peers": peers, "rounds": rounds, "quorum": quorum}
        failed.call |= {"protocol": protocol, "topology": topology}
        failed.events = stage.world.events if hasattr(stage, "world") else 0
        raise failed from why
    checkers, world = stage.swarm.checkers, stage.world
    newest = stage.newest
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return ScenarioReport(
        scenario=name,
        seed=seed,
        peers=peers,
        quorum=stage.quorum,
        protocol=protocol,
        rounds=min(stage.swarm.heads(), default=-1) + 1,
        virtual_s=world.now,
        wall_s=time.perf_counter() - wall,
        cpu_s=time.process_time() - cpu,
        peak_mib=peak / (2**20 if sys.platform == "darwin" else 2**10),
        events=world.events,
        messages=world.network.sent,
        kinds=dict(world.kinds.most_common()),
        payload_mb=world.network.bytes / 1e6,
        complete_share=checkers.full / max(1, checkers.training),
        attempts_failed=stage.attempts_failed,
        repairs=checkers.repairs,
        members=sum(m.votes for m in newest.head_body.members) if newest else 0,
        faults=dict(sorted(stage.faults.items())),
        measured=stage.measured,
        digest=world.digest(),
    )
