"""Trainers that do not train as assigned, and auditors that lie, in a run with audited rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.limits import AUDIT_ROUNDS
from atoll.base.machine import Fact
from atoll.peer.events import AuditFindingRecorded, RoundClosed, TrainerDrawnForAudit
from atoll.simulation.adversaries.byzantine import villain
from atoll.simulation.adversaries.proposer_grinding import keeper
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.replay_audits import LIARS, SHIRKERS, TRAINERS, as_it_is, islands
from atoll.simulation.scenarios.harness import LOSSY, ROUND_S, ScenarioContext
from atoll.simulation.swarm import SwarmKnobs, peer_name
from atoll.simulation.world import VirtualComputer

KEPT_RATE = 0.2  # audit rate where liars try to escape audits
LATE_SHARE = 20  # at most one audit of this many waits for lost messages
OPEN_ROUNDS = 3  # newest rounds with audits that may be in progress


def audits(stage: ScenarioContext) -> None:
    """As many villains as the run withstands, of drawn kinds: those that did not train are out, no others."""
    kinds = sorted((*TRAINERS, *SHIRKERS))
    play_audits(stage, stage.draw_villains(kinds))


def accusers(stage: ScenarioContext) -> None:
    """The villains find every trainer guilty: no member leaves."""
    play_audits(stage, dict.fromkeys(stage.draw_places(), "accuser"))


def keepers(stage: ScenarioContext) -> None:
    """The villains collude and try bodies when they propose: each gets its turns, and no more.

    Measured: their share of the rounds, and the audited share of their claims under their own and under honest
    proposers.
    """
    stage.quorum = "two-thirds"
    places = stage.draw_places()
    friends = frozenset(peer_name(place) for place in places)
    chairs = ProposerStats(stage, friends)
    knobs = SwarmKnobs(stage.peers, run=replace(stage.settings(), audit_rate=KEPT_RATE))
    makers = {place: villain(keeper(friends)) for place in places}
    stage.gather(knobs, villains=makers, island=islands({}))
    stage.fault("keeper")
    stage.world.watchers.append(chairs.watch)
    stage.until_round(stage.rounds - 1, ROUND_S * stage.rounds)
    chairs.demand_turns()


class ProposerStats:
    """Proposers of the vertices, and the audited friends."""

    def __init__(self, stage: ScenarioContext, friends: frozenset[PeerId]) -> None:
        self.stage, self.friends = stage, friends
        self.wrote: dict[int, PeerId] = {}
        self.claims: dict[int, frozenset[PeerId]] = {}
        self.drawn: set[tuple[int, PeerId]] = set()

    def watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, TrainerDrawnForAudit):
            self.drawn.add((fact.round, fact.peer))
        if isinstance(fact, RoundClosed):
            self.wrote[fact.body.round] = fact.body.proposer
            self.claims[fact.body.round] = self.friends & {signed.signer for signed in fact.body.commits}

    def demand_turns(self) -> None:
        theirs = {round for round, who in self.wrote.items() if who in self.friends}
        self.stage.measured["liars"] = len(self.friends) / self.stage.peers
        self.stage.measured["liars_propose"] = len(theirs) / len(self.wrote)
        self.stage.measured["audited_by_liars"] = self._audited(theirs)
        self.stage.measured["audited_by_honest"] = self._audited(self.wrote.keys() - theirs)
        turns = -(-len(self.wrote) // self.stage.peers)  # full turns around the circle
        if len(theirs) > turns * len(self.friends):
            raise InvariantBroken(
                f"{len(self.friends)} of {self.stage.peers} wrote {len(theirs)} of {len(self.wrote)}"
            )

    def _audited(self, rounds: Set[int]) -> float:
        """Audited share of the friends' claims in these rounds."""
        claims = {(round, peer) for round in rounds for peer in self.claims[round]}
        return len(claims & self.drawn) / max(1, len(claims))


def audited(stage: ScenarioContext) -> None:
    """No cheats, but messages are lost and links are slow: nearly all is accepted, and nothing is refuted."""
    told = play_audits(stage, {}, LOSSY)
    late = len(told.late) + told.findings["withheld"]  # a lost chunk is requested again after five seconds
    if not set(told.findings) <= {"accepted", "withheld"} or late * LATE_SHARE > len(told.drawn):
        raise InvariantBroken(f"honest trainers were found {dict(told.findings)}, audits open: {sorted(told.late)}")


class AuditReports:
    """Audit reports in the vertices of one honest peer."""

    def __init__(self, stage: ScenarioContext) -> None:
        self.stage = stage
        self.findings: Counter[str] = Counter()
        self.drawn: set[tuple[int, PeerId]] = set()
        self.done: set[tuple[int, PeerId]] = set()
        self.left: dict[PeerId, tuple[int, str]] = {}  # peer → (first round after which it was gone, how)
        self.head = -1

    def watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        if node.name in self.stage.swarm.checkers.villains:
            return
        match fact:
            case TrainerDrawnForAudit(round=round, peer=peer):
                self.drawn.add((round, peer))
            case AuditFindingRecorded(peer=peer, of=round, finding=finding):
                self.findings[finding] += 1
                self.done.add((round, peer))
            case RoundClosed(body=body):
                self.head = max(self.head, body.round)
                for member in body.members:
                    if not member.is_present:
                        self.left.setdefault(member.peer, (body.round, member.standing))
            case _:
                pass

    @property
    def late(self) -> set[tuple[int, PeerId]]:
        return {key for key in self.drawn - self.done if key[0] < self.head - OPEN_ROUNDS}


def play_audits(
    stage: ScenarioContext, kinds: dict[int, str], network: NetworkKnobs | None = None, share: float = 1.0
) -> AuditReports:
    stage.quorum = "two-thirds"
    settings = replace(stage.settings(), audit_rate=share)
    twist_of = lambda kind: SHIRKERS.get(kind, as_it_is)  # noqa: E731
    told = stage.play_beside(kinds, twist_of, islands, settings, AuditReports, network)
    swarm = stage.swarm
    for place, kind in kinds.items():
        name = swarm.keys.name(place)
        if kind not in LIARS:
            continue
        round, how = told.left.get(name, (stage.rounds, "member"))
        wanted = "expelled" if kind in TRAINERS else "away"
        if stage.rounds > AUDIT_ROUNDS and how != wanted:
            raise InvariantBroken(f"the {kind} {name} is {how} after round {round}, not {wanted}")
    harmed = sorted(told.left.keys() - swarm.checkers.villains)
    if harmed:
        raise InvariantBroken(f"honest {harmed} lost their place")
    return told
