"""Members with useless updates, and scorers that lie, where single updates are scored."""

from __future__ import annotations

from collections import Counter, defaultdict

from atoll.base.ids import PeerId
from atoll.base.machine import Fact
from atoll.peer.events import UpdateScored
from atoll.policy.reputation import CLAIMED_UNTAUGHT, scores_of, tier_of
from atoll.simulation.adversaries.byzantine import villain
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.loss_scoring import LYING, SHIRKING, SQUATTER, islands
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.replay_audits import SHIRKERS, as_it_is
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.swarm import SwarmKnobs, peer_name
from atoll.simulation.world import VirtualComputer

ROUND_S = 120.0  # virtual time per round beside villains
CLAIMS_END = 10  # rounds after which own reports no longer raise a member (policy/reputation.CLAIMED_UNTAUGHT)
SHARE = 0.25  # share of scored updates: four times as many of those on probation, that is all


def scores(stage: ScenarioContext) -> None:
    """As many villains as may lie, each of a drawn kind: they end on probation, no honest update is found hollow.

    Members with useful updates leave probation.
    """
    tolerated = (stage.peers - 1) // 3
    kinds = [stage.draw.choice((*SHIRKING, *LYING)) for _ in range(tolerated)]
    play_scores(stage, dict(zip(stage.draw.sample(range(stage.peers), tolerated), kinds, strict=True)))


class ScoringReports:
    """Scoring reports in the vertices of one honest peer."""

    def __init__(self, stage: ScenarioContext) -> None:
        self.stage = stage
        self.opinions: defaultdict[PeerId, Counter[str]] = defaultdict(Counter)
        self.seen: dict[tuple[int, PeerId], str] = {}

    def watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        if not isinstance(fact, UpdateScored) or node.name in self.stage.swarm.checkers.villains:
            return
        key = fact.of, fact.peer
        if key not in self.seen:
            self.seen[key] = fact.opinion
            self.opinions[fact.peer][fact.opinion] += 1
        if self.seen[key] != fact.opinion:
            raise InvariantBroken(f"two opinions of the update of {fact.peer} in round {fact.of}")


def play_scores(
    stage: ScenarioContext, kinds: dict[int, str], network: NetworkKnobs | None = None
) -> ScoringReports:
    stage.quorum = "two-thirds"
    for kind in kinds.values():
        stage.fault(kind)
    run = stage.settings(reputation=True, score_rate=SHARE)
    twists = {place: villain((SHIRKERS | SQUATTER).get(kind, as_it_is)) for place, kind in kinds.items()}
    behind = islands({peer_name(place): kind for place, kind in kinds.items()})
    knobs = SwarmKnobs(stage.peers, run=run, network=network or NetworkKnobs())
    swarm = stage.gather(knobs, villains=twists, island=behind)
    names = {swarm.keys.name(place): kind for place, kind in kinds.items()}
    told = ScoringReports(stage)
    stage.world.watchers.append(told.watch)
    stage.until_round(stage.rounds - 1, ROUND_S * stage.rounds)
    machine = swarm.honest[0].machine
    assert machine is not None and machine.history is not None
    _judge(scores_of(machine.history.head_body), names, told)
    return told


def _judge(worth: dict[PeerId, int], names: dict[PeerId, str], told: ScoringReports) -> None:
    """A member with undecided scores stays where its own reports bring it, however good its work is.

    A good score before that is worth no more than these reports.
    """
    taught = {peer for (of, peer), opinion in told.seen.items() if opinion == "taught" and of >= CLAIMS_END}
    for peer, score in worth.items():
        kind, found = names.get(peer, ""), told.opinions[peer]
        low = tier_of(score) == "probation"
        if kind in SHIRKING and not low:
            raise InvariantBroken(f"the {kind} {peer} is worth {score}")
        if not kind and (found["hollow"] or (low and peer in taught) or score < CLAIMED_UNTAUGHT):
            raise InvariantBroken(f"{peer} is honest, worth {score}, and its updates were found {dict(found)}")
