"""Runs that agree by Raft: a leader that stays, deaths of leaders, bad weather; a history like any other.

The checkers of every scenario watch; what is asserted here is what Raft does otherwise.
"""

from __future__ import annotations

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.machine import Fact
from atoll.capabilities import CAPABILITIES
from atoll.peer.events import RoundAttemptFailed, RoundClosed
from atoll.peer.round.machine import NUDGE_S
from atoll.peer.round.view_timer import VIEW_S
from atoll.peer.settings import RunSettings, decode_settings, encode_settings
from atoll.peer.verify.chain import StoredHistory, verify_history
from atoll.policy.plan import RoundSettings
from atoll.protocol.allreduce.events import PartsReduced
from atoll.simulation.scenarios import ScenarioUnsupported, run_scenario
from atoll.simulation.signatures import VirtualSignatureVerifier
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm
from atoll.simulation.world import VirtualComputer

RAFT = RunSettings(protocol="raft", round=RoundSettings(inner_steps=20, first_train_s=10))


class Story:
    def __init__(self, peers: int, settings: RunSettings = RAFT) -> None:
        self.swarm = VirtualSwarm(1, SwarmKnobs(peers, run=settings))
        self.world = self.swarm.world
        self.world.watchers.append(self._watch)
        self.proposers: dict[int, PeerId] = {}
        self.ends: dict[int, float] = {}  # when the last of those alive had closed the round
        self.reduced: dict[int, float] = {}
        self.failed = 0
        self.kills: dict[int, PeerId] = {}  # in the round's agreement, as soon as it has its parts
        self.messages = 0

    def run(self, rounds: int) -> None:
        self.world.run(self.world.now + 3600.0, stop=lambda: min(self.swarm.heads()) >= rounds - 1)
        assert min(self.swarm.heads()) >= rounds - 1

    def _watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        match fact:
            case RoundClosed(body=body):
                self.proposers[body.round], self.ends[body.round] = body.proposer, now
            case PartsReduced():
                self.reduced.setdefault(fact.round, now)
                if self.kills.get(fact.round) == node.name:
                    del self.kills[fact.round]
                    self.world.at(now, lambda: self.world.crash(node.name))
            case RoundAttemptFailed():
                self.failed += 1
            case _:
                pass


def test_a_leader_stays_while_it_lives():
    """Where two phases decide the head draws another one for each round."""
    led, drawn = Story(4), Story(4, replace(RAFT, protocol=UNSET))
    led.run(10)
    drawn.run(10)
    assert len(set(led.proposers.values())) == 1 < len(set(drawn.proposers.values()))
    assert led.failed == drawn.failed == 0


def test_a_leader_killed_in_the_middle_of_its_round_costs_patience_and_no_round():
    """It dies once it has its parts, in round 6; the round closes in its first attempt, the next leader stays."""
    story = Story(5)
    leader = story.swarm.founders[0]
    story.kills = {6: leader}
    story.run(12)
    assert story.proposers[5] == leader and not story.kills
    # words that were on their way make it look alive to most, so its view has its three seconds and a nudge
    assert story.failed == 0 and story.ends[6] - story.reduced[6] < VIEW_S + 2 * NUDGE_S
    later = {story.proposers[round] for round in range(7, 12)}
    assert len(later) == 1 and later != {leader}


def test_its_history_is_believed_offline_like_any_other():
    """`atoll verify` reads what a peer's disk holds, and knows nothing of Raft."""
    story = Story(4)
    story.run(8)
    kept = story.world.nodes[story.swarm.founders[1]].kept
    rows = {int(name.partition("/")[2]): row for name, row in kept.items() if name.startswith("vertex/")}
    audit = verify_history(
        StoredHistory(story.swarm.run_id, kept["genesis"], sorted(rows), rows.get),
        VirtualSignatureVerifier(),
        CAPABILITIES.verifiers,
    )
    assert audit.intact and audit.head >= 7 and audit.settings.by_raft


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_a_small_swarm_that_agrees_by_raft_weathers_everything(seed: int):
    report = run_scenario("churn", seed, peers=6, rounds=10, protocol="raft")
    assert report.rounds >= 10 and report.members >= 6 and report.quorum == "majority"


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_a_blackout_in_the_middle_of_a_vote_loses_no_round_of_a_leader_either(seed: int):
    assert run_scenario("blackout", seed, rounds=8, protocol="raft").rounds >= 8


def test_where_members_may_lie_raft_is_refused():
    """By stories with liars, and by a member that reads a genesis that asks for both. Old settings keep their
    bytes.
    """
    with pytest.raises(ScenarioUnsupported, match="trust each other"):
        run_scenario("liars", 1, protocol="raft")
    assert decode_settings(encode_settings(RAFT)).by_raft
    with pytest.raises(PeerFault, match="members that may lie and Raft"):
        decode_settings(encode_settings(replace(RAFT, round=replace(RAFT.round, quorum="two-thirds"))))
    with pytest.raises(PeerFault, match="invalid settings"):
        decode_settings(encode_settings(replace(RAFT, protocol="paxos")))  # type: ignore[arg-type]
    assert b"protocol" not in encode_settings(RunSettings())
