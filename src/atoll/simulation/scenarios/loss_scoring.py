"""Members with useless updates, and scorers that lie, where single updates are scored."""

from __future__ import annotations

from collections import Counter, defaultdict

from atoll.base.ids import PeerId
from atoll.base.machine import Fact
from atoll.peer.events import ReviewDecided
from atoll.policy.reputation import CLAIMED_UNTAUGHT, scores_of, tier_of
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.loss_scoring import LYING, SHIRKING, SQUATTER, islands
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.replay_audits import SHIRKERS, as_it_is
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.world import VirtualComputer

CLAIMS_END = 10  # rounds after which own reports no longer raise a member (policy/reputation.CLAIMED_UNTAUGHT)
SHARE = 0.25  # share of scored updates: four times as many of those on probation, that is all


def scores(stage: ScenarioContext) -> None:
    """As many villains as may lie, each of a drawn kind: they end on probation, no honest update is found hollow.

    Members with useful updates leave probation.
    """
    play_scores(stage, stage.draw_villains((*SHIRKING, *LYING)))


class ScoringReportRecorder:
    """Scoring reports in the vertices of one honest peer."""

    def __init__(self, stage: ScenarioContext) -> None:
        self.stage = stage
        self.opinions: defaultdict[PeerId, Counter[str]] = defaultdict(Counter)
        self.seen: dict[tuple[int, PeerId], str] = {}

    def watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        if not isinstance(fact, ReviewDecided) or node.name in self.stage.swarm.checkers.villains:
            return
        key = fact.of, fact.peers[0]
        if key not in self.seen:
            self.seen[key] = fact.opinion
            self.opinions[fact.peers[0]][fact.opinion] += 1
        if self.seen[key] != fact.opinion:
            raise InvariantBroken(f"two opinions of the update of {fact.peers[0]} in round {fact.of}")


def play_scores(
    stage: ScenarioContext, kinds: dict[int, str], network: NetworkKnobs | None = None
) -> ScoringReportRecorder:
    stage.quorum = "two-thirds"
    run = stage.settings(reputation=True, score_rate=SHARE)
    twist_of = lambda kind: (SHIRKERS | SQUATTER).get(kind, as_it_is)  # noqa: E731
    told = stage.play_beside(kinds, twist_of, islands, run, ScoringReportRecorder, network)
    names = {stage.swarm.keys.name(place): kind for place, kind in kinds.items()}
    machine = stage.swarm.honest[0].machine
    assert machine is not None and machine.history is not None
    _judge(scores_of(machine.history.head_body), names, told)
    return told


def _judge(worth: dict[PeerId, int], names: dict[PeerId, str], told: ScoringReportRecorder) -> None:
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
