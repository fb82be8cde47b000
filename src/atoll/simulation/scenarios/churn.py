"""Churn: every kind of computer and network fault at once; then peace, in which progress is required."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace as replaced

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Fact
from atoll.peer.events import RoundBegan, RoundClosed
from atoll.peer.governance.orders import amend_of, goal_of, tunes_in
from atoll.peer.operator_commands import go_back, pause, tune, with_waiting
from atoll.peer.peer import Peer
from atoll.policy.capability_terms import ErasureParams, StateValidationTerms
from atoll.policy.findings import REFUTING
from atoll.policy.participation import ParticipationPolicy
from atoll.policy.plan import StragglerPolicy
from atoll.simulation.adversaries.byzantine import usurp, villain
from atoll.simulation.data_reading import DataPositionChecker, DatasetReadingWorker
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.loss_scoring import islands as scored_islands
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.redundant_training import islands as twinned_islands
from atoll.simulation.replay_audits import islands
from atoll.simulation.scenarios.archive import restore_everything
from atoll.simulation.scenarios.harness import FactReports, ScenarioContext
from atoll.simulation.scenarios.redundant_training import RedundancyReports as TwinsTold
from atoll.simulation.scenarios.replay_audits import AuditReports
from atoll.simulation.scenarios.state_validation import CALM_ROUNDS, demand_near
from atoll.simulation.scenarios.state_validation import islands as validated_islands
from atoll.simulation.signatures import RealKeys, peer_name
from atoll.simulation.swarm import IslandMaker, SwarmKnobs, VirtualSwarm, WorldKeys
from atoll.simulation.worker import VirtualWorker, WorkerKnobs
from atoll.simulation.world import VirtualComputer
from atoll.wire.messages.statements import ChangeableSettings

PACE_S = 3.0  # mean time between two faults
DOWN_SHARE = 0.3  # greatest share of the founders that is down or asleep at one time
BACK_MAX = 24  # rounds; states stay on virtual disks for sixteen
JOINERS_MAX = 6  # strangers that join in one run
WEATHER = NetworkKnobs(loss_rate=0.05, duplicate_rate=0.05, jitter_s=0.05)


def churn(stage: ScenarioContext) -> None:
    """Loss, kills with lost writes, sleeps, partitions, joins, leaves, failing trainers, drifting clocks."""
    _through_weather(stage, None)


def overlap(stage: ScenarioContext) -> None:
    """Churn with overlap: trainers go on during agreement, so the next round finds most of its steps taken."""
    _through_weather(stage, None, overlap=16)


def weighed(stage: ScenarioContext) -> None:
    """Churn with rows weighed by distances: owners die before, between and after their two messages."""
    _through_weather(stage, None, statistic="robust", tolerance=0.33)


def paced(stage: ScenarioContext) -> None:
    """Churn with time limits that follow the measured pace, while link quality changes all the time."""
    _through_weather(stage, None, round=stage.paced())


def sampled_churn(stage: ScenarioContext) -> None:
    """Churn with half of the members training per round, drawn by the round before."""
    drawn = ParticipationPolicy(thousandths=500, least=1 if stage.quorum == "majority" else 4)
    _through_weather(stage, None, round=replaced(stage.paced(), sample=drawn))


def straggler_churn(stage: ScenarioContext) -> None:
    """Churn with rounds that go on without the slow: one member always is, others for a while."""
    stage.quorum = "majority"
    waits = replaced(stage.paced(), acceptance=StragglerPolicy(quorum=max(2, stage.peers // 2), grace=2))
    _through_weather(stage, None, overlap=4, slow=1, round=waits)


def reputed_churn(stage: ScenarioContext) -> None:
    """Churn with records: a member that was down weighs less and owns less, and all agree on it.

    With every other seed rows are weighed by distances, too.
    """
    more = {"statistic": "robust", "tolerance": 0.33} if stage.seed % 2 else {}
    _through_weather(stage, None, reputation=True, **more)


def clocks(stage: ScenarioContext) -> None:
    """Churn with clocks up to a twentieth too fast or too slow, five hundred times the usual spread."""
    _through_weather(stage, None, drift=0.05)


def real_keys(stage: ScenarioContext) -> None:
    """Churn with real signatures: Ed25519 sessions certified by ML-DSA identities."""
    _through_weather(stage, RealKeys(stage.seed))


def post_quantum(stage: ScenarioContext) -> None:
    """Churn with ML-DSA-65 sessions, with keys, statements and certificates of their length."""
    _through_weather(stage, None, round=replaced(stage.settings().round, votes="ml-dsa-65"))


def rollback(stage: ScenarioContext) -> None:
    """Churn while the recovery identity sends the run back to random rounds, again and again."""
    _through_weather(stage, None, returns=True)


def pauses(stage: ScenarioContext) -> None:
    """Churn while the recovery identity pauses and resumes the run: no paused round is trained in, and each pause
    ends.
    """
    _through_weather(stage, None, pauses=True)


def amendments(stage: ScenarioContext) -> None:
    """Churn while the recovery identity changes settings and sends the run back, beside a member that forges its
    orders.

    Every order counts once, and every round uses the settings of its vertex.
    """
    if stage.protocol == "bft":
        stage.quorum = "two-thirds"
    _through_weather(stage, None, returns=True, amends=True)


def pieces_churn(stage: ScenarioContext) -> None:
    """Churn with older states in pieces: holders come and go, and a rollback may target a state that no member
    holds whole.

    In the end every state that was ever placed comes back.
    """
    _through_weather(stage, None, returns=True, coded=ErasureParams(3, 6, every_rounds=4, lost_s=30.0))
    restore_everything(stage)


def audited_churn(stage: ScenarioContext) -> None:
    """Churn with every round of every member audited: crashes lose records, the run is sent back, no member is
    convicted.
    """
    told = AuditReports(stage)
    _through_weather(stage, None, returns=True, told=told, audit_rate=1.0)
    expelled = sorted(peer for peer, (_, how) in told.left.items() if how == "expelled")
    if expelled or REFUTING & told.findings.keys():
        raise InvariantBroken(f"honest trainers were found {dict(told.findings)}, expelled: {expelled}")


def scored_churn(stage: ScenarioContext) -> None:
    """Churn with scored updates: a restarted member knows what the others know, so records stay equal."""
    _through_weather(stage, None, island=scored_islands({}), reputation=True, score_rate=0.25)


def twinned_churn(stage: ScenarioContext) -> None:
    """Churn while members replay each other's samples: a restarted member draws as before, and no honest one
    strays.
    """
    told = TwinsTold(stage)
    _through_weather(stage, None, told=told, island=twinned_islands({}), reputation=True, twin_rate=0.5)
    if strayed := sorted(peer for peer, words in told.words.items() if words["strayed"]):
        raise InvariantBroken(f"no member cheats, but these were found to: {strayed}")


def data_churn(stage: ScenarioContext) -> None:
    """Churn while members read one data set: no sample is lost or counted again without a record of it."""
    told = DataPositionChecker()
    _through_weather(stage, None, told=told, island=DatasetReadingWorker)
    data = told.newest.data if told.newest is not None else UNSET
    if data is UNSET or not data.counted:
        raise InvariantBroken("no vertex counted a sample")
    stage.measured |= {"samples": data.counted, "dropped": data.dropped, "repeated": data.repeated}


def validated_churn(stage: ScenarioContext) -> None:
    """Churn with real numbers while one member poisons a mean now and then: the run leaves the bad states again."""
    bouts = range(4, stage.rounds, 7)
    stage.quorum = "two-thirds"
    _through_weather(
        stage, None, island=validated_islands([1], "silent", "huge", bouts), validation=StateValidationTerms()
    )
    settled = stage.newest.head if stage.newest is not None else 0
    stage.until_round(settled + CALM_ROUNDS, stage.healed() * CALM_ROUNDS)
    demand_near(stage)


def _through_weather(
    stage: ScenarioContext,
    keys: WorldKeys | None,
    *,
    overlap: int = 0,
    slow: int = 0,
    drift: float = 1e-4,
    returns: bool = False,
    pauses: bool = False,
    amends: bool = False,
    told: FactReports | None = None,
    island: IslandMaker | None = None,
    **settings: Any,
) -> None:
    words = returns or pauses or amends  # orders of the recovery identity
    knobs = SwarmKnobs(
        stage.peers,
        network=WEATHER,
        island=WorkerKnobs(train_failure_rate=0.02, overlap=overlap, carries=slow > 0),
        clock_offset_s=0.2,
        clock_drift=drift,
        run=stage.settings(**({"recovery": peer_name(0).encode()} if words else {}), **settings),
    )
    villains = {stage.peers - 1: villain(usurp)} if amends and stage.protocol == "bft" else {}
    swarm = stage.gather(knobs, villains, keys, island or (VirtualWorker if told is None else islands({})))
    if told is not None:
        stage.world.watchers.append(told.watch)
    for name in swarm.founders[:slow]:
        island_of = swarm.world.nodes[name].island
        island_of.knobs = replace(island_of.knobs, step_s=4 * island_of.knobs.step_s)
    weather = FaultInjector(stage)
    weather.kinds += [(6, weather.go_back)] if returns else []
    if pauses:
        weather.kinds.append((6, weather.pause))
        stage.world.watchers.append(_no_paused_round_trains)
    if amends:
        weather.kinds.append((12, weather.amend))
        stage.world.watchers.append(_RollbackStory(weather).watch)
    weather.begin()
    honest = [name for name in swarm.founders if name not in swarm.checkers.villains]
    heads = FounderProgressCount(swarm, stage.rounds - 1, honest)
    stage.until(
        lambda: heads() * 2 > stage.peers,
        60.0 * (stage.rounds + 10),
        f"no majority reached round {stage.rounds - 1} in bad weather",
    )
    weather.end()
    stage.until(weather.goes_on, stage.healed(), "the run is still paused")
    stage.demand_progress()


def _no_paused_round_trains(now: Seconds, node: VirtualComputer, fact: Fact) -> None:
    """Check that the round with the order is the last that trains."""
    if isinstance(fact, RoundClosed) and fact.body.paused not in (UNSET, fact.body.round):
        assert fact.body.paused < fact.body.round
        if fact.body.parts or fact.body.commits:
            raise InvariantBroken(f"round {fact.body.round} trained, paused since {fact.body.paused}")


class _RollbackStory:
    """Orders of the recovery identity, and the vertices that contain them."""

    def __init__(self, weather: FaultInjector) -> None:
        self.weather = weather
        self.held: dict[bytes, int] = {}  # order → round of the vertex that contains it

    def watch(self, now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        if node.name in self.weather.swarm.checkers.villains:
            return
        if isinstance(fact, RoundClosed):
            for _, word in tunes_in(fact.body.reports):
                if word.to not in self.weather.numbers:
                    raise InvariantBroken(f"round {fact.body.round} changed settings without an order: {word.to}")
                if self.held.setdefault(word.signature, fact.body.round) != fact.body.round:
                    raise InvariantBroken(f"round {fact.body.round} held a word for a second time")
            back, history = amend_of(fact.body), node.machine.history if node.machine is not None else None
            goal = history.bodies.get(back.round) if back is not None and history is not None else None
            if goal is not None and goal.tuned != fact.body.tuned:
                raise InvariantBroken(f"round {fact.body.round} went back, and its numbers did not")
            self.weather.stage.measured["amended"] = len(self.held)
        if isinstance(fact, RoundBegan) and node.machine is not None and node.machine.history is not None:
            tuned = node.machine.history.bodies[fact.round - 1].tuned
            steps = UNSET if tuned is UNSET else tuned.to.inner_steps
            if fact.steps != (self.weather.swarm.knobs.run.round.inner_steps if steps is UNSET else steps):
                raise InvariantBroken(f"{node.name} takes {fact.steps} steps in round {fact.round}, not {steps}")


class FounderProgressCount:
    """Number of founders (or of `who`) that have reached a round, counted once per virtual second at most."""

    def __init__(self, swarm: VirtualSwarm, round: int, who: Sequence[PeerId] = ()) -> None:
        self.swarm, self.round, self.due, self.there = swarm, round, 0.0, 0
        self.who = who or swarm.founders

    def __call__(self) -> int:
        if self.swarm.world.now >= self.due:
            self.due = self.swarm.world.now + 1.0
            self.there = sum(self.swarm.head(p) >= self.round for p in self.who)
        return self.there


class FaultInjector:
    """Draws one fault after another until `end`; then repairs everything.

    `spare` returns how many more members may be gone, if a share of all of them is not the limit.
    """

    def __init__(self, stage: ScenarioContext, spare: Callable[[], int] | None = None) -> None:
        self.spare = spare
        self.stage, self.swarm, self.world, self.draw = stage, stage.swarm, stage.swarm.world, stage.draw
        self.over = self.cut = False
        self.away: set[PeerId] = set()
        self.side: set[PeerId] = set()  # members that are cut off from the others
        self.leaving: set[PeerId] = set()  # members that left, even if they are back: no vertex contains it yet
        self.troubled: dict[PeerId, Seconds] = {}  # member → time until which it was last away or cut off
        self.joined = 0
        self.numbers: list[ChangeableSettings] = []  # settings that the run was ordered to use
        self.kinds: list[tuple[int, Callable[[], None]]] = [
            (4, self._kill),
            (4, self._kill_while_writing),
            (3, self._sleep),
            (3, self._partition),
            (1, self._join),
            (1, self._leave),
        ]

    def begin(self) -> None:
        self.world.at(self.world.now + self.draw.expovariate(1 / PACE_S), self._strike)

    def end(self) -> None:
        """Peace: stop message loss, start stopped peers, wake sleeping ones."""
        self.over = True
        network = self.world.network
        network.heal()
        network.knobs = replace(network.knobs, loss_rate=0.0, duplicate_rate=0.0)
        for node in list(self.world.nodes.values()):
            node.island.knobs = replace(node.island.knobs, train_failure_rate=0.0)
            node.dies_after = None
            self.world.wake(node.name)
        self.world.run(self.world.now + 0.1)  # scheduled deaths happen first
        for node in list(self.world.nodes.values()):
            self.world.start(node.name)
        self._resume()

    @property
    def gone(self) -> set[PeerId]:
        """Members that are away, or may be in a moment."""
        nodes = self.world.nodes.values()
        down = {n.name for n in nodes if n.machine is None or n.asleep or n.dies_after is not None}
        return self.away | self.side | self.leaving | down

    def took(self, who: PeerId, since: Seconds) -> bool:
        """True if the member was away at some time since then."""
        return who in self.gone or self.troubled.get(who, -1.0) >= since

    def _strike(self) -> None:
        if self.over:
            return
        for node in list(self.world.nodes.values()):  # peers that died late of an earlier fault
            if node.machine is None and node.name not in self.away:
                self._back(node.name)
        weights = [w for w, _ in self.kinds]
        self.draw.choices([act for _, act in self.kinds], weights)[0]()
        self.begin()

    def _victim(self) -> PeerId | None:
        most = DOWN_SHARE * self.stage.peers if self.spare is None else len(self.away) + self.spare()
        if len(self.away) + 1 > most:
            return None
        up = [n.name for n in self.swarm.honest if not n.asleep and n.name not in self.away]
        return self.draw.choice(up) if up else None

    def _later(self, least_s: float, most_s: float, act: Callable[[], None]) -> None:
        def unless_over() -> None:
            if not self.over:
                act()

        self.world.at(self.world.now + self.draw.uniform(least_s, most_s), unless_over)

    def _back(self, who: PeerId) -> None:
        self.away.discard(who)
        self.troubled[who] = self.world.now
        self.world.wake(who)
        self.world.start(who)

    def _kill(self) -> None:
        who = self._victim()
        if who is not None:
            self.stage.fault("kill")
            self.away.add(who)
            self.world.crash(who)
            self._later(0.3, 20.0, lambda: self._back(who))

    def _kill_while_writing(self) -> None:
        who = self._victim()
        if who is not None:
            self.stage.fault("torn")
            self.away.add(who)
            self.world.doom(who, self.draw.randint(1, 8))
            self._later(4.0, 12.0, lambda: self._back(who))

    def _sleep(self) -> None:
        who = self._victim()
        if who is not None:
            self.stage.fault("sleep")
            self.away.add(who)
            self.world.sleep(who)
            self._later(1.0, 20.0, lambda: self._back(who))

    def _partition(self) -> None:
        if self.cut:
            return
        everybody = sorted(self.world.nodes)
        most = max(1, len(everybody) // 2) if self.spare is None else min(self.spare(), len(everybody) // 2)
        if most < 1:
            return
        side = self.side = set(self.draw.sample(everybody, self.draw.randint(1, most)))
        self.stage.fault("partition")
        self.cut = True
        self.world.split(side, both_ways=self.draw.random() < 0.7)

        def heal() -> None:
            self.troubled |= dict.fromkeys(side, self.world.now)
            self.cut, self.side = False, set()
            self.world.network.heal()

        self._later(1.0, 25.0, heal)

    def _join(self) -> None:
        if self.joined < JOINERS_MAX:
            self.stage.fault("join")
            up = [n.name for n in self.swarm.honest if not n.asleep]
            if up:
                self.swarm.join(self.stage.peers + self.joined, via=self.draw.choice(up))
                self.joined += 1

    def go_back(self) -> None:
        """Send an order to go back through a running peer; the state may be there, elsewhere or nowhere."""
        up = [n.machine for n in self.swarm.honest if n.machine and not n.asleep and n.machine.history]
        via = self.draw.choice(up) if up else None
        history = via.history if via is not None else None
        if via is None or history is None:
            return
        round = self.draw.randint(max(-1, history.head - BACK_MAX), history.head)
        if round not in history.bodies:
            return  # it joined later, or lost its disk
        if not self.world.faults.admits("rollback", self.world.now, via.me):
            return
        node, sign = self.world.nodes[via.me], self.swarm.keys.vouch(self.swarm.founders[0]).sign
        goal = goal_of(history.bodies[round], history.ids[round])
        with suppress(ValueError):  # it is not a member (yet)
            self.world.carry_out(node, go_back(via, goal, sign, node.clock.local(self.world.now)))
            self.stage.fault("rollback")

    def amend(self) -> None:
        """Send new settings through a running peer; some orders change what was changed before."""
        up = [n.machine for n in self.swarm.honest if n.machine and not n.asleep and n.machine.history]
        if not up:
            return
        via = self.draw.choice(up)
        numbers = ChangeableSettings(inner_steps=self.draw.randint(5, 30))
        if self.draw.random() < 0.5:
            numbers = replaced(numbers, owner_s=self.draw.uniform(6.0, 9.0), lr=self.draw.random())
        if not self.world.faults.admits("amend", self.world.now, via.me):
            return
        node, sign = self.world.nodes[via.me], self.swarm.keys.vouch(self.swarm.founders[0]).sign
        with suppress(ValueError):  # it is not a member (yet)
            self.numbers.append(with_waiting(via, numbers))
            self.world.carry_out(node, tune(via, numbers, sign, node.clock.local(self.world.now)))
            self.stage.fault("amend")

    def pause(self) -> None:
        """Send an order through a running peer that toggles its pause."""
        up = [n.machine for n in self.swarm.honest if n.machine and not n.asleep]
        known = [(peer, peer.history.head_body) for peer in up if peer.history]
        if known:
            via, head = self.draw.choice(known)
            if self.world.faults.admits("pause", self.world.now, via.me):
                self._say_pause(via, head.paused is UNSET)

    def goes_on(self) -> bool:
        """True if no peer regards the run as paused."""
        return not self._paused

    @property
    def _paused(self) -> list[Peer]:
        up = [n.machine for n in self.swarm.honest if n.machine]
        return [peer for peer in up if peer.history and peer.history.head_body.paused is not UNSET]

    def _resume(self) -> None:
        """Resume the run at every peer that regards it as paused, until the scenario ends.

        An order to pause from the time of faults may enter a later vertex.
        """
        if self._paused:
            self._say_pause(self._paused[0], False)
        self.world.at(self.world.now + 1.0, self._resume)

    def _say_pause(self, via: Peer, paused: bool) -> None:
        node, sign = self.world.nodes[via.me], self.swarm.keys.vouch(self.swarm.founders[0]).sign
        with suppress(ValueError):  # it is not a member (yet)
            self.world.carry_out(node, pause(via, paused, sign, node.clock.local(self.world.now)))
            self.stage.fault("pause" if paused else "resume")

    def _leave(self) -> None:
        who = self._victim()
        if who is not None:
            self.stage.fault("leave")
            self.away.add(who)
            self.leaving.add(who)
            self.world.leave(who)
            self._later(2.0, 40.0, lambda: self._back(who))
