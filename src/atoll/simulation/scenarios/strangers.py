"""Strangers at a private run: they receive nothing and end no peer, and invited peers can join beside them."""

from __future__ import annotations

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Fact
from atoll.crypto.digest import blob_id, manifest_of
from atoll.peer.events import JoinRejected, RoundClosed
from atoll.simulation.adversaries.strangers import StrangerAdversary, stranger
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.swarm import SwarmKnobs, peer_name
from atoll.simulation.worker import GENESIS_STATE
from atoll.simulation.world import VirtualComputer

COMES_IN_S = 60.0  # from an invited peer's first connection to its vote, in rounds of some seconds


def strangers(stage: ScenarioContext) -> None:
    """One knows the run's id, the other has a ticket that is soon used up. Both request everything all the time."""
    states: list[Digest] = [blob_id(manifest_of(GENESIS_STATE))]
    members = [peer_name(index) for index in range(stage.peers)]
    outside, late, invited = stage.peers, stage.peers + 1, stage.peers + 2
    makers = dict.fromkeys((outside, late), stranger(members, states))
    swarm = stage.gather(SwarmKnobs(stage.peers, run=stage.settings(open_to_all=False)), makers)

    def watch(now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, JoinRejected):
            raise InvariantBroken(f"{node.name} was ended by strangers: {fact.what}")
        if isinstance(fact, RoundClosed) and fact.body.state not in states:
            states.append(fact.body.state)

    stage.world.watchers.append(watch)
    stage.until_round(1)
    stage.fault("stranger")
    swarm.join(outside, via=members[0])
    stage.until_round(max(swarm.heads()) + 2)
    ticket = swarm.invite(members[0])
    stage.until(lambda: all(_tickets(stage)), 120.0, "the ticket never entered a vertex")
    newcomer = swarm.join(invited, via=members[-1], ticket=ticket)
    stage.until(lambda: newcomer in _voters(stage), COMES_IN_S, "the invited peer did not come in")
    stage.fault("used ticket")
    swarm.join(late, via=members[0], ticket=ticket)
    stage.until_round(max(swarm.heads()) + stage.rounds)
    stage.demand_progress()
    for index in (outside, late):
        one = stage.world.nodes[peer_name(index)].machine
        assert isinstance(one, StrangerAdversary)
        if one.leaked or not one.told["JoinRefused"]:
            raise InvariantBroken(f"a stranger was told {one.leaked[:1]}, in all {dict(one.told)}")
        stage.measured[f"told_{index}"] = sum(one.told.values())
    if lost := {*members, newcomer} - _voters(stage):
        raise InvariantBroken(f"{lost} lost their votes to strangers")


def _voters(stage: ScenarioContext) -> set[PeerId]:
    return {m.peer for m in stage.newest.head_body.members if m.votes} if stage.newest else set()


def _tickets(stage: ScenarioContext) -> list[bool]:
    """For each honest peer: whether it knows a ticket."""
    machines = [node.machine for node in stage.swarm.honest]
    return [bool(m and m.history and m.history.head_body.tickets) for m in machines]
