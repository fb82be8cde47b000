"""Every kind of villain at once, nearly a third of all members, in bad weather: an open run under siege.

Required: the checkers of every run stay quiet, the villains' influence stays within its bound in every part of
every round, no honest member is expelled or found guilty by an honest auditor, and all honest peers go on after the
weather. Speed is not required. The weather stops before villains become a third of the remaining members: nothing
is promised beyond that (specs/trust.md, "Under siege"). It may happen anyway, since members that were away briefly
may be voted away later. The scenario then ends without a verdict, but fails if an honest member was sent away that
the weather had left alone.
"""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.limits import COMMITTEE_MOST
from atoll.base.machine import Fact
from atoll.peer.events import AuditFindingRecorded, RoundClosed, SumCheckFindingRecorded
from atoll.policy.capability_terms import OPENED_SHARE, SumCheckTerms
from atoll.policy.fault_tolerance import STRIKE_ROUNDS, liars_among
from atoll.policy.findings import REFUTING
from atoll.policy.plan import plan_round
from atoll.simulation.adversaries.byzantine import KINDS, Twist, villain
from atoll.simulation.adversaries.influence_bound import POISONS, InfluenceMeter, SimulatedRowValues
from atoll.simulation.adversaries.lying_owners import CROOKS
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.replay_audits import SHIRKERS, TRAINERS, as_it_is
from atoll.simulation.scenarios.churn import WEATHER, FaultInjector, FounderProgressCount
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.simulated_audit_chain import VirtualTrainingChain
from atoll.simulation.swarm import SwarmKnobs, peer_name
from atoll.simulation.worker import WorkerKnobs
from atoll.simulation.world import VirtualComputer
from atoll.wire.messages.vertex import VertexBody

VILLAINS = 0.3
AUDITED = 0.05  # share of trainers' rounds that is audited
CAPTURED = 0.05  # share of parts that liars may own by themselves, where siege_opened opens results
# block size: a result has a hundred blocks and more, as an update is a megabyte in at most sixteen parts
LEAF_BYTES = 512
ROUND_S = 240.0  # virtual time per round: attempts fail because of villains and weather
CHURNER_S = 20.0  # mean time between two disappearances of one member
MOUTHS: dict[str, Twist] = {**KINDS, **CROOKS, **SHIRKERS, **dict.fromkeys((*TRAINERS, "churner"), as_it_is)}


def siege(stage: ScenarioContext, captured: float = 0.0) -> None:
    """Kinds, poisons and places are drawn: 3 members of 10 are villains, and each poisons its rows as well."""
    stage.quorum = "two-thirds"
    places = stage.draw.sample(range(stage.peers), min(int(VILLAINS * stage.peers), (stage.peers - 1) // 3))
    order = stage.draw.sample(sorted(MOUTHS), len(MOUTHS))
    play_siege(stage, {place: order[k % len(order)] for k, place in enumerate(places)}, captured)


def siege_opened(stage: ScenarioContext) -> None:
    """Siege with fewer witnesses: blocks of results are opened, and liars may own parts by themselves."""
    siege(stage, CAPTURED)


def play_siege(stage: ScenarioContext, kinds: dict[int, str], captured: float = 0.0) -> MixedByzantineChecker:
    """`kinds`: place → kind of villain."""
    plan = replace(stage.settings().round, committee=COMMITTEE_MOST)
    trust = {"witnessed": True, "tolerance": 0.33, "statistic": "trimmed_mean", "audit_rate": AUDITED}
    trust |= {"openings": SumCheckTerms(OPENED_SHARE, LEAF_BYTES), "captured": captured} if captured else {}
    knobs = SwarmKnobs(
        stage.peers,
        network=WEATHER,
        island=WorkerKnobs(train_failure_rate=0.01),
        clock_offset_s=0.2,
        clock_drift=1e-4,
        run=replace(stage.settings(), round=plan, **trust),
    )
    names = {peer_name(place): kind for place, kind in kinds.items()}
    poisons = {name: stage.draw.choice(sorted(POISONS)) for name in names}
    ledger = SimulatedRowValues()

    def chain(me: PeerId) -> VirtualTrainingChain:
        chain = VirtualTrainingChain(me)
        chain.cheats, chain.starts = names.get(me) == "cheat", names.get(me) == "starter"
        return chain

    mouths = {place: villain(MOUTHS[kind]) for place, kind in kinds.items()}
    swarm = stage.gather(knobs, villains=mouths, island=ledger.islands(poisons, chain))
    for kind in kinds.values():
        stage.fault(kind)
    siege = MixedByzantineChecker(stage, names, InfluenceMeter(ledger, swarm.checkers.villains))
    stage.world.watchers.append(siege.watch)
    weather = FaultInjector(stage, siege.spare)
    siege.weather = weather
    weather.begin()
    for name, kind in names.items():
        if kind == "churner":
            siege.come_and_go(name)
    honest = [p for p in swarm.founders if p not in names]
    heads = FounderProgressCount(swarm, stage.rounds - 1, honest)
    try:
        stage.until(
            lambda: heads() * 2 > len(honest),
            ROUND_S * (stage.rounds + 10),
            f"no majority reached round {stage.rounds - 1} under siege",
        )
        weather.end()
        stage.demand_progress()
    except OutsideFaultBound:
        stage.measured["not_judged_after"] = siege.seen
    siege.measure()
    return siege


class OutsideFaultBound(Exception):
    """The weather left fewer honest members than the run is built for."""


class MixedByzantineChecker:
    """Checks of this scenario beside those of every run, and the weather that it can still bear."""

    def __init__(self, stage: ScenarioContext, kinds: dict[PeerId, str], influence: InfluenceMeter) -> None:
        self.stage, self.kinds, self.influence = stage, kinds, influence
        self.villains = stage.swarm.checkers.villains
        self.weather: FaultInjector | None = None
        self.seen = -1  # newest round checked
        self.closed = [0.0] * STRIKE_ROUNDS  # round → time of its first closing
        self.present = set(stage.swarm.founders)
        # honest member that the weather had left alone → round after which it was sent away
        self.sent_away: dict[PeerId, int] = {}
        self.left: dict[PeerId, tuple[int, str]] = {}  # villain → (first round after which it was gone, how)

    def watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        if node.name in self.villains:
            return
        match fact:
            case RoundClosed(body=body) if body.round > self.seen:
                self.seen = body.round
                self.influence.look(fact)
                self._members(fact)
                self.closed.append(now)
            case AuditFindingRecorded(peer=peer, auditor=by, finding=finding) if finding in REFUTING:
                self._found(peer, by, finding)
            case SumCheckFindingRecorded(peer=peer, checker=by, finding=finding) if finding in REFUTING:
                self._found(peer, by, finding)
            case _:
                pass

    def _found(self, peer: PeerId, by: PeerId, finding: str) -> None:
        if not {peer, by} & self.villains:
            raise InvariantBroken(f"honest {by} found {finding} against honest {peer}")

    def _members(self, closed: RoundClosed) -> None:
        """Check that no honest member is expelled, and that villains are as few as the promises require."""
        body = closed.body
        for member in body.members:
            if member.standing == "expelled" and member.peer not in self.villains:
                raise InvariantBroken(f"honest {member.peer} was expelled after round {body.round}")
            if member.peer in self.villains and not member.is_present:
                self.left.setdefault(member.peer, (body.round, member.standing))
        self._departures(body)
        plan = plan_round(closed.id, body, self.stage.swarm.knobs.run.round)
        settled = [m.peer for m in plan.trainers if m.standing == "member"]
        lying, voting = self._liars(settled), self._liars(plan.committee)
        if lying > liars_among(len(settled), 0.33) or voting > plan.tolerated:
            if self.sent_away:
                raise InvariantBroken(
                    f"{lying} villains of {len(settled)} trainers, {voting} of {len(plan.committee)} voters after "
                    f"round {body.round}: nothing is promised there, and {self.sent_away} were sent away"
                )
            raise OutsideFaultBound

    def _departures(self, body: VertexBody) -> None:
        """Members voted away were silent or failed others lately: complaints reach back that far."""
        present, weather = {m.peer for m in body.members if m.is_present}, self.weather
        assert weather is not None
        for who in self.present - present - self.villains:
            if not weather.took(who, since=self.closed[-STRIKE_ROUNDS]):
                self.sent_away[who] = body.round
        weather.leaving &= present
        self.present = present
        self.sent_away = {who: round for who, round in self.sent_away.items() if who not in present}

    def _liars(self, peers: list[PeerId] | tuple[PeerId, ...]) -> int:
        return sum(peer in self.villains for peer in peers)

    def spare(self) -> int:
        """Number of further members that may go before villains are a third of the rest."""
        newest, weather = self.stage.newest, self.weather
        if newest is None or weather is None:
            return 0
        members, gone = newest.head_body.members, weather.gone
        here = [m.peer for m in members if m.votes and m.standing == "member" and m.peer not in gone]
        return max(0, len(here) - 1 - 3 * self._liars(here))

    def come_and_go(self, name: PeerId) -> None:
        """Kill and restart a villain again and again, forever."""
        world, draw = self.stage.world, self.stage.draw

        def vanish() -> None:
            world.crash(name)
            world.at(world.now + draw.uniform(0.2, 4.0), lambda: world.start(name))
            world.at(world.now + 4.0 + draw.expovariate(1 / CHURNER_S), vanish)

        world.at(draw.expovariate(1 / CHURNER_S), vanish)

    def measure(self) -> None:
        """Values for the report: shares are of 1, shifts in units of the honest rows' values."""
        told, influence = self.stage.measured, self.influence
        parts = max(1, influence.parts)
        told["liars_rows"] = influence.liars_rows / max(1, influence.rows)
        told["moved_per_part"] = influence.moved / parts
        told["allowed_per_part"] = influence.most / parts
        told["expelled"] = sum(how == "expelled" for _, how in self.left.values())
        told["villains"] = len(self.villains)
        told["complaints"] = self.stage.swarm.checkers.complaints
        for kind, count in sorted(Counter(self.kinds[p] for p in self.villains - self.left.keys()).items()):
            told[f"{kind} stayed"] = count
