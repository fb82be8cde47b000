"""Members that replay each other's samples in secret, some of which cheat, and referees that lie."""

from __future__ import annotations

from collections import Counter, defaultdict

from atoll.base.ids import PeerId
from atoll.base.machine import Fact
from atoll.peer.events import ReviewDecided, ReviewersDrawn
from atoll.policy.reputation import scores_of
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.redundant_training import CHEATING, FORGER, HIDING, LYING, islands
from atoll.simulation.replay_audits import SHIRKERS, as_it_is
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.world import VirtualComputer

SHARE = 0.5  # share of updates that are replayed: the scenario is short


def twins(stage: ScenarioContext) -> None:
    """As many villains as may lie, each of a drawn kind: members that do not learn from their samples are found, no
    honest one is.
    """
    kinds = stage.draw_villains((*CHEATING, *HIDING, *LYING))
    told = play_twins(stage, kinds)
    for place, kind in kinds.items():
        if kind in CHEATING and not told.words[stage.swarm.keys.name(place)]["strayed"]:
            raise InvariantBroken(f"the {kind} {stage.swarm.keys.name(place)} was never found")


class RedundancyReports:
    """Redundancy reports in the vertices of one honest peer."""

    def __init__(self, stage: ScenarioContext) -> None:
        self.stage = stage
        self.pairs: dict[tuple[int, PeerId], ReviewDecided] = {}
        self.found: dict[tuple[int, PeerId], PeerId] = {}  # (round, host) of opened cases → found peer
        self.words: defaultdict[PeerId, Counter[str]] = defaultdict(Counter)  # member → reports against it
        self.worth: dict[PeerId, int] = {}  # final reputation

    def watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        if node.name in self.stage.swarm.checkers.villains:
            return
        if isinstance(fact, ReviewersDrawn):
            guest, host = fact.peers
            self.found[fact.of, guest] = host
        if not isinstance(fact, ReviewDecided):
            return
        first = self.pairs.setdefault((fact.of, fact.peers[0]), fact)
        if first is fact:
            for word, peers in (("strayed", fact.against), ("hid", fact.hid)):
                for peer in peers:
                    self.words[peer][word] += 1
        elif (first.against, first.hid) != (fact.against, fact.hid):
            raise InvariantBroken(f"two verdicts about {fact.peers} in round {fact.of}")


def play_twins(
    stage: ScenarioContext, kinds: dict[int, str], network: NetworkKnobs | None = None, share: float = SHARE
) -> RedundancyReports:
    stage.quorum = "two-thirds"
    run = stage.settings(reputation=True, twin_rate=share)
    twist_of = lambda kind: (SHIRKERS | FORGER).get(kind, as_it_is)  # noqa: E731
    told = stage.play_beside(kinds, twist_of, islands, run, RedundancyReports, network)
    names = {stage.swarm.keys.name(place): kind for place, kind in kinds.items()}
    machine = stage.swarm.honest[0].machine
    assert machine is not None and machine.history is not None
    told.worth = scores_of(machine.history.head_body)
    for peer, words in told.words.items():
        kind = names.get(peer, "")
        if (kind not in CHEATING and words["strayed"]) or (kind not in HIDING and words["hid"]):
            raise InvariantBroken(f"{peer} is {kind or 'honest'} and was found {dict(words)}")
    return told
