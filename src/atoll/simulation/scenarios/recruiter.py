"""Hostile recruiter: an invited member that invites itself again and again to gain votes. In the end its names
leave and return in turn, each after the next one has its vote.

Required in every vertex: all peers invited by the recruiter vote only after the counted rounds that genesis sets,
and hold at most a third of the votes until each has counted for as long as its bound lasts. Agreement goes on, so
no honest peer depends on their joint reports.
"""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Fact
from atoll.peer.events import RoundClosed
from atoll.policy.membership import changes_max
from atoll.simulation.adversaries.byzantine import villain
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.replay_audits import as_it_is
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.swarm import SwarmKnobs
from atoll.simulation.world import VirtualComputer
from atoll.wire.messages.statements import LeaveReport
from atoll.wire.messages.vertex import VertexBody

NAMES = 12  # names under which it returns
AFTER_ROUNDS, SPONSOR_ROUNDS = (
    4,
    80,
)  # rounds of the scenario, which ends before any name is old enough to be free of bounds
TURNS, TURN_ROUNDS = 4, 5  # names that leave and return one after the other; rounds for each
ROUND_S = 60.0


def recruiter(stage: ScenarioContext) -> None:
    """Four founders invite one peer by a ticket with one use; it makes a ticket for each of its other names."""
    play_recruiter(stage, AFTER_ROUNDS, SPONSOR_ROUNDS)


def play_recruiter(stage: ScenarioContext, after_rounds: int, sponsor_rounds: int) -> RecruitedVoterRecorder:
    stage.quorum, first = "two-thirds", stage.peers
    terms = {"vote_after_rounds": after_rounds or UNSET, "sponsor_rounds": sponsor_rounds or UNSET}
    run = replace(stage.settings(open_to_all=False), **terms)
    places = range(first, first + 1 + NAMES)
    swarm = stage.gather(SwarmKnobs(stage.peers, run=run), villains=dict.fromkeys(places, villain(as_it_is)))
    votes = RecruitedVoterRecorder(
        frozenset(swarm.keys.name(place) for place in places), after_rounds, sponsor_rounds
    )
    stage.world.watchers.append(votes.watch)
    stage.until_round(2)
    recruiter = swarm.join(first, swarm.founders[0], swarm.invite(swarm.founders[0]))
    stage.fault("recruiter")
    stage.until(lambda: votes.of_one >= 1, ROUND_S * 40, "the recruiter was never given its vote")
    for place in places[1:]:
        ticket = swarm.invite(recruiter)
        swarm.join(place, recruiter, ticket)
        stage.until_round(max(swarm.heads()) + 1)
    stage.until_round(max(swarm.heads()) + stage.rounds)
    for place in places[:TURNS]:  # it leaves, so that the next name gets its vote, and returns at once
        name = swarm.keys.name(place)
        node = stage.world.nodes[name]
        assert node.machine is not None
        farewell = LeaveReport(max(swarm.heads()), "")
        stage.world.carry_out(node, node.machine.say(farewell, node.clock.local(stage.world.now)))
        stage.until_round(max(swarm.heads()) + TURN_ROUNDS)
    if not votes.trained.issuperset(votes.names):
        raise InvariantBroken("a name of the recruiter's never trained: nothing was tried")
    stage.measured["votes_of_one"] = votes.most
    return votes


class RecruitedVoterRecorder:
    """Voting names of the recruiter in every closed vertex."""

    def __init__(self, names: frozenset[PeerId], after_rounds: int, sponsor_rounds: int) -> None:
        self.names, self.after_rounds, self.sponsor_rounds = names, after_rounds, sponsor_rounds
        self.of_one = self.most = self.seen = 0
        self.trained: set[PeerId] = set()
        self.counted: dict[PeerId, int] = {}

    def watch(self, now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundClosed) and fact.body.round >= self.seen:
            self.seen = fact.body.round + 1
            self._look(fact.body)

    def _look(self, body: VertexBody) -> None:
        voters = {m.peer for m in body.members if m.votes}
        ours = voters & self.names
        self.of_one, self.most = len(ours), max(self.most, len(ours))
        self.trained |= {signed.signer for signed in body.commits} & self.names
        if body.invited is not UNSET:
            named = zip(body.members, body.invited.counted, strict=True)
            self.counted = {m.peer: counted for m, counted in named}
        if early := [p for p in ours if self.counted.get(p, 0) < self.after_rounds]:
            raise InvariantBroken(f"round {body.round}: {early} vote before {self.after_rounds} counted rounds")
        young = [p for p in ours if self.counted.get(p, 0) < self.sponsor_rounds]
        if self.sponsor_rounds and len(young) > changes_max(len(voters)):
            raise InvariantBroken(f"round {body.round}: {len(young)} of {len(voters)} votes are one person's")
