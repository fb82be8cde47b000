"""Two branches of one run meet, and a fifth lie about their preference: all honest peers come to prefer the larger
branch, and no history changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from msgspec.structs import replace as replaced

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Fact, Send
from atoll.peer.events import BranchPollResult, ForkBranchDetected
from atoll.peer.operator_commands import recover
from atoll.protocol.history.chain import VertexChain
from atoll.simulation.adversaries.byzantine import ByzantineMember, villain
from atoll.simulation.invariants import InvariantBroken, InvariantCheckers
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.signatures import peer_name
from atoll.simulation.swarm import SwarmKnobs
from atoll.simulation.worker import WorkerKnobs
from atoll.simulation.world import VirtualComputer
from atoll.wire.messages.preference import PreferenceResponse

SHARE = 5  # one of this many is on the recovered branch, and one of this many lies
WEATHER = NetworkKnobs(loss_rate=0.03, duplicate_rate=0.03, jitter_s=0.05)
STEP_S = 0.5  # rounds of ten seconds: this scenario lasts for minutes
ALONE_S = 60.0  # time for which the sides go on without each other
ASKING_S = 1200.0  # time for all to settle: a query every few seconds, some tens of them
CREATOR = peer_name(0)


def branches(stage: ScenarioContext) -> None:
    """The creator and a few others lose contact with a healthy quorum, and recover; then the cut heals."""
    few = max(2, stage.peers // SHARE)
    minority = {CREATOR, *stage.draw.sample([peer_name(i) for i in range(1, stage.peers)], few - 1)}
    places = stage.draw.sample(range(1, stage.peers), stage.peers // SHARE)
    told = BranchRecorder(stage, minority)
    liars = {place: villain(told.lie(stage.draw.choice(sorted(LIES)))) for place in places}
    knobs = SwarmKnobs(
        stage.peers,
        network=WEATHER,
        island=WorkerKnobs(step_s=STEP_S),
        run=replaced(stage.settings(), recovery=CREATOR.encode()),
    )
    world = stage.gather(knobs, liars).world
    told.watch_both()
    stage.until_round(1)
    world.split(set(minority))
    world.run(world.now + ALONE_S)
    stage.fault("recovery")
    creator = world.nodes[CREATOR]
    assert creator.machine is not None
    vouch = stage.swarm.keys.vouch(CREATOR)
    world.carry_out(creator, recover(creator.machine, vouch.sign, creator.clock.local(world.now)))
    world.run(world.now + ALONE_S)
    pasts = {node.name: past_of(node) for node in stage.swarm.honest}
    network = world.network
    network.heal()
    network.knobs = replace(network.knobs, loss_rate=0.0)

    honest = [node.name for node in stage.swarm.honest]
    stage.until(
        lambda: all(told.settled.get(name) for name in honest), ASKING_S, "not all settled on what they prefer"
    )
    wrong = sorted(name for name in honest if told.prefers[name] == told.recovered)
    if wrong:
        raise InvariantBroken(f"{wrong} came to prefer the branch of {few} of {stage.peers}")
    _no_peer_moved(stage, minority, pasts)
    stage.measured["queries"] = max(told.queries.values())


LIES: dict[str, Callable[[random.Random, Digest, Digest | None], Digest | None]] = {
    "the smaller one": lambda draw, recovered, own: recovered,
    "any": lambda draw, recovered, own: draw.choice([recovered, own]),
    "none": lambda draw, recovered, own: None,
}


class BranchRecorder:
    """Facts about branches by peer, and a checker for each branch."""

    def __init__(self, stage: ScenarioContext, minority: set[PeerId]) -> None:
        self.stage, self.minority = stage, minority
        self.recovered: Digest | None = None  # first vertex of the smaller branch
        self.prefers: dict[PeerId, Digest] = {}
        self.settled: dict[PeerId, bool] = {}
        self.queries: dict[PeerId, int] = {}

    def lie(self, kind: str) -> Callable[[ByzantineMember, Send], list[Effect]]:
        def twist(liar: ByzantineMember, send: Send) -> list[Effect]:
            message = send.message
            if not isinstance(message, PreferenceResponse) or self.recovered is None:
                return [send]
            self.stage.fault(f"says {kind}")
            said = LIES[kind](liar.draw, self.recovered, message.choice)
            return [Send(send.to, replaced(message, choice=said))]

        return twist

    def watch_both(self) -> None:
        """One checker would take two vertices of one round for equivocation: each side has its own."""
        stage, ours = self.stage, self.stage.swarm.checkers
        theirs = InvariantCheckers(ours.villains)

        def watch(now: Seconds, node: VirtualComputer, fact: Fact) -> None:
            (theirs if node.name in self.minority else ours).watch(now, node, fact)
            self._hear(node.name, fact)

        stage.world.watchers.remove(ours.watch)
        stage.world.watchers.append(watch)

    def _hear(self, name: PeerId, fact: Fact) -> None:
        if isinstance(fact, ForkBranchDetected) and fact.recovered:
            self.recovered = fact.vertex
        if isinstance(fact, BranchPollResult):
            self.prefers[name], self.settled[name] = fact.vertex, fact.settled
            self.queries[name] = fact.queries


def past_of(node: VirtualComputer) -> dict[int, Digest]:
    return dict(_history_of(node).ids)


def _history_of(node: VirtualComputer) -> VertexChain:
    assert node.machine is not None and node.machine.history is not None
    return node.machine.history


def _no_peer_moved(stage: ScenarioContext, minority: set[PeerId], pasts: dict[PeerId, dict[int, Digest]]) -> None:
    """Check that every peer continues its own branch, by more than it was shown."""
    for node in stage.swarm.honest:
        before, now = pasts[node.name], _history_of(node)
        moved = [round for round, id in before.items() if now.ids.get(round, id) != id]
        if moved or now.head_body.epoch != (node.name in minority):
            raise InvariantBroken(f"{node.name} changed sides: epoch {now.head_body.epoch}, rounds {moved}")
        if now.head <= max(before):
            raise InvariantBroken(f"{node.name} did not go on after the branches met")
