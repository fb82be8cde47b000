"""Parts that lose all owners at once, with and without trust between members."""

from __future__ import annotations

from functools import partial
from typing import Any

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Fact
from atoll.peer.events import RoundClosed, UpdateSharingBegan
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.scenarios.lying_owners import check_sums
from atoll.simulation.swarm import SwarmKnobs
from atoll.simulation.world import VirtualComputer
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import OwnerResult

MOMENTS_S = 0.15  # time from the first share on: about the duration of rows and results
TRUSTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("majority", {}),
    ("two-thirds", {"tolerance": 0.33}),
    ("two-thirds", {"tolerance": 0.33, "witnessed": True}),
)


def orphans(stage: ScenarioContext) -> None:
    """Again and again the six owners of a drawn part die or freeze in the middle of a round, under each trust in
    turn.

    The remaining members combine the part all the same, and agree on it.
    """
    stage.quorum, more = TRUSTS[stage.seed % len(TRUSTS)]
    stage.gather(SwarmKnobs(stage.peers, run=stage.settings(round=stage.paced(), **more)))
    stage.until_round(1)
    for _ in range(stage.rounds):
        check_sums(stage.world, OrphanedPart(stage).play(), frozenset())
        stage.demand_progress(rounds=2)


class OrphanedPart:
    """One part of one round."""

    def __init__(self, stage: ScenarioContext) -> None:
        self.stage, self.world = stage, stage.world
        self.owners: tuple[PeerId, ...] = ()
        self.round, self.part = -1, -1
        self.closed: RoundClosed | None = None

    def play(self) -> RoundClosed:
        """Run until all remaining members have closed the round; then revive the others."""
        stage, villains = self.stage, self.stage.swarm.checkers.villains
        self.world.watchers.append(self.watch)
        stage.until(lambda: bool(self.owners), 600.0, "no member shared anything")
        left = [peer for peer in stage.swarm.founders if peer not in self.owners]
        stage.until_round(self.round, stage.healed(), [peer for peer in left if peer not in villains])
        self.world.watchers.remove(self.watch)
        assert self.closed is not None
        self._check(self.closed, left)
        for peer in self.owners:
            self.world.wake(peer)
            self.world.start(peer)
        return self.closed

    def watch(self, now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        if node.name in self.stage.swarm.checkers.villains:
            return
        if isinstance(fact, RoundClosed) and fact.body.round == self.round:
            self.closed = fact
        if isinstance(fact, UpdateSharingBegan) and not self.owners:
            round = node.machine.round if node.machine is not None else None
            assert round is not None and round.reduce is not None
            self._begin(fact.round, round.reduce.plan)

    def _begin(self, round: int, plan: ReducePlan) -> None:
        """Begin with villains, if any: with a part that one of them replaces an owner of."""
        draw, villains = self.stage.draw, self.stage.swarm.checkers.villains
        parts = [part for part in range(plan.parts) if villains.isdisjoint(plan.owners(part))]
        if villains:
            parts = [part for part in parts if plan.owners_and_reserves(part)[len(plan.owners(part))] in villains]
        if not parts:
            return
        self.round, self.part = round, draw.choice(parts)
        self.owners = plan.owners(self.part)
        for peer in self.owners:
            kind = draw.choice(("kill", "sleep"))
            end = self.world.crash if kind == "kill" else self.world.sleep
            self.world.at(self.world.now + draw.uniform(0.0, MOMENTS_S), partial(end, peer))
            self.stage.fault(kind)

    def _check(self, closed: RoundClosed, left: list[PeerId]) -> None:
        what = f"part {self.part} of round {self.round}, which lost its owners,"
        signed = closed.body.parts[self.part]
        if signed is None:
            raise InvariantBroken(f"{what} is in no result")
        answered = decode_statement(signed.body, signed.signer)
        assert isinstance(answered, OwnerResult)
        if lost := sorted(set(left) - set(answered.contributors)):
            raise InvariantBroken(f"{what} lacks {lost}, who are left")
        self.stage.fault("owner" if signed.signer in self.owners else "stood_in")
