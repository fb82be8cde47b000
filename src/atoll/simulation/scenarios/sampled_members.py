"""Trainers drawn per round: all other members neither count nor miss anything, and all get their turns.

Three groups of data of very different sizes; one member rests for a while, one declines whenever it is drawn, one
is killed and returns. Turns are recomputed here from draws and contributors, without credits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace as replaced

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.fair_draw import ABSENT_COST, CREDIT_MAX, TURN_COST
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Fact
from atoll.peer import operator_commands
from atoll.peer.events import RoundBegan, RoundClosed
from atoll.policy.participation import ParticipationPolicy, group_of, resting_in
from atoll.policy.plan import RoundSettings, plan_round
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.swarm import SwarmKnobs
from atoll.simulation.world import VirtualComputer
from atoll.wire.codec import decode_body
from atoll.wire.messages.vertex import VertexBody

ROUND_S = 60.0  # greatest virtual time per round
RESTS = 6  # rounds that the member rests


class ParticipationCount:
    """Turns recomputed from vertices, each read when the first peer closes it."""

    def __init__(self, settings: RoundSettings, wanted: int, run: Digest, genesis: VertexBody) -> None:
        self.settings, self.wanted = settings, wanted
        self.bodies: dict[int, tuple[Digest, VertexBody]] = {genesis.round: (run, genesis)}
        self.drawn: Counter[PeerId] = Counter()
        self.counted: Counter[PeerId] = Counter()
        self.group: dict[PeerId, str] = {}

    def watch(self, now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundClosed) and fact.body.round not in self.bodies:
            self.bodies[fact.body.round] = fact.id, fact.body
            if fact.body.parts and fact.body.round - 1 in self.bodies:
                self._look(fact)

    def _look(self, fact: RoundClosed) -> None:
        body, counted = fact.body, set(fact.counted)
        head, parent = self.bodies[body.round - 1]
        drawn = plan_round(head, parent, self.settings).drawn
        if drawn is None or body.credits is UNSET:
            raise InvariantBroken(f"no member was drawn for round {body.round}")
        there = {m.peer for m in parent.members if m.may_train and m.standing == "member"}
        if len(drawn) != min(self.wanted, len(there - resting_in(parent, body.round))) or not drawn <= there:
            raise InvariantBroken(f"{sorted(drawn)} of {sorted(there)} were drawn for round {body.round}")
        if not counted <= drawn:
            raise InvariantBroken(f"{counted - drawn} count in round {body.round} and were not drawn")
        rested = resting_in(body, body.round) | resting_in(parent, body.round)
        if rested & set(fact.missing) or not set(fact.missing) <= drawn:
            raise InvariantBroken(f"{fact.missing} are called missing in round {body.round}")
        before = {m.peer: m.missed for m in parent.members}
        for m in body.members:
            if m.missed > before.get(m.peer, 0) and (m.peer not in drawn or m.peer in rested):
                raise InvariantBroken(f"round {body.round} is held against {m.peer}, which had no part in it")
            self.group[m.peer] = group_of(m.name)
        self.drawn.update(drawn)
        self.counted.update(counted)

    def levels(self, peers: list[PeerId], trusted: bool) -> Counter[str]:
        """Quarters of turns, by group."""
        found: Counter[str] = Counter()
        for peer in peers:
            vain = self.drawn[peer] - self.counted[peer]
            paid = TURN_COST * self.counted[peer] + (ABSENT_COST if trusted else TURN_COST) * vain
            found[self.group[peer] if trusted else peer] += paid
        return found


def clients(stage: ScenarioContext) -> None:
    """Two of seven train among trusting members, in groups of four, two and one; four among others."""
    trusted = stage.quorum == "majority"
    wanted = 2 if trusted else 4
    plan = replace(stage.settings().round, sample=ParticipationPolicy(peers=wanted, least=1 if trusted else wanted))
    names = tuple(f"{i}@{'aaaabbc'[i % 7]}" for i in range(stage.peers))
    swarm = stage.gather(SwarmKnobs(stage.peers, run=stage.settings(round=plan), names=names))
    turns = ParticipationCount(plan, wanted, swarm.run_id, decode_body(swarm.genesis.body))
    stage.world.watchers.append(turns.watch)
    founders, world = swarm.founders, stage.world
    rester, decliner, killed = founders[-1], founders[0], founders[4]
    unwilling = world.nodes[decliner].island
    unwilling.knobs = replaced(unwilling.knobs, train_failure_rate=1.0)

    def decline(now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundBegan) and node.name == decliner:
            world.at(now, lambda: rest(decliner, 1, at_once=True))

    def rest(name: PeerId, rounds: int, at_once: bool = False) -> None:
        node = world.nodes[name]
        round = node.machine.round if node.machine is not None else None
        if node.machine is not None and round is not None and (round.trains or not at_once):
            stage.fault("rests")
            world.carry_out(
                node, operator_commands.rest(node.machine, rounds, node.clock.local(world.now), at_once)
            )

    world.watchers.append(decline)
    others = [p for p in founders if p != killed]
    stage.until_round(stage.rounds // 5, ROUND_S * stage.rounds, others)
    rest(rester, RESTS)
    stage.until_round(stage.rounds // 4, ROUND_S * stage.rounds, others)
    stage.fault("kill")
    world.crash(killed)
    stage.until_round(stage.rounds // 3, ROUND_S * stage.rounds, others)
    world.start(killed)
    stage.until_round(stage.rounds - 1, ROUND_S * stage.rounds, others)
    _judge(stage, turns, others if trusted else [p for p in others if p != rester], trusted)


def _judge(stage: ScenarioContext, turns: ParticipationCount, peers: list[PeerId], trusted: bool) -> None:
    everybody = list(stage.swarm.founders)
    levels = turns.levels(everybody if trusted else peers, trusted)
    apart = max(levels.values()) - min(levels.values())
    stage.measured |= {f"turns_{name}": turns.levels(everybody, True)[name] / TURN_COST for name in "abc"}
    stage.measured["apart"] = apart / TURN_COST
    # a draw counts the turn as paid; a member that then pays a quarter gets its turn once more
    vain = TURN_COST - ABSENT_COST if trusted else 0
    if apart > TURN_COST + vain * turns.wanted:
        raise InvariantBroken(f"after {stage.rounds} rounds turns are {dict(levels)} quarters")
    most = max(max(pair) for _, body in turns.bodies.values() if body.credits is not UNSET for pair in body.credits)
    if most > CREDIT_MAX:
        raise InvariantBroken(f"a member has a credit of {most}")
