"""Slow links. Members that measure them share out the update by that, and slow but honest members are not accused.

- `equal_links`, `slow_uplink`, `slow_downlink`, `changing_link`: every round cuts an update for a butterfly. Shares
  are checked, and the seconds from the first row to the last closed round beside those that the busiest link needs
  for its bytes. Measured: `wait`, their largest ratio.
- `slow`: slow members take twice as long for a step and send over a tenth of the others' uplink; messages are lost,
  all are audited, and their owners watched. An accusation is a claim of proof, an auditor's finding against a
  member, or a complaint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace as replaced

from msgspec.structs import replace

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Fact
from atoll.peer.events import AuditFindingRecorded, MemberAccused, RoundClosed, UpdateSharingBegan
from atoll.peer.settings import PIECES_BY_SIZE
from atoll.policy.findings import REFUTING
from atoll.protocol.allreduce.topology import PartReductionTree
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.replay_audits import islands
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.swarm import SwarmKnobs
from atoll.simulation.worker import WorkerKnobs
from atoll.simulation.world import VirtualComputer

UPDATE_BYTES, RATE_BYTES_S = 30_000_000, 6_250_000.0  # 30 M values in int8, over 50 Mbit/s
SLOWER, FASTER = 8.0, 4.0
LINKS = NetworkKnobs(
    0.01, 0.03, jitter_s=0.005, uplink_bytes_s=RATE_BYTES_S, downlink_bytes_s=RATE_BYTES_S, measured=True
)
STEP_S = 2.0  # training takes longer than the slowest exchange: no member is late for the next round
LEARNED = 3  # rounds after which a change of a link has to show in the shares: the median of three, then a plan
EQUAL = 0.1  # largest difference of equal shares
WAIT_MAX = 1.3

Checks = Callable[[int, dict[PeerId, float]], None]
"""Called once per round with its number and the members' shares, which add up to 1."""

LOSSY_LINKS = NetworkKnobs(0.01, 0.3, jitter_s=0.05, loss_rate=0.01, duplicate_rate=0.01)
SLOW_STEPS, SLOW_BYTES_S = 2.0, LOSSY_LINKS.uplink_bytes_s / 10
AUDITED = 0.2
ROUND_S = 120.0


def equal_links(stage: ScenarioContext) -> None:
    """All links are fast for two rounds, then all are slower: shares stay equal."""

    def check(round: int, shares: dict[PeerId, float]) -> None:
        if round == 1:
            for name in stage.swarm.founders:
                _set_rates(stage, name, RATE_BYTES_S)
        _demand_equal(round, shares)

    _gather(stage)
    for name in stage.swarm.founders:
        _set_rates(stage, name, FASTER * RATE_BYTES_S)
    _play(stage, check)


def slow_uplink(stage: ScenarioContext) -> None:
    _gather(stage)
    slow = stage.swarm.founders[0]
    stage.world.network.uplink_bytes_s[slow] = RATE_BYTES_S / SLOWER

    def check(round: int, shares: dict[PeerId, float]) -> None:
        if round >= LEARNED:
            _demand_little(round, shares, slow)
            _demand_equal(round, {peer: share for peer, share in shares.items() if peer != slow})

    _play(stage, check)


def slow_downlink(stage: ScenarioContext) -> None:
    """Its own uplink is as fast as any, and others' uplinks are not taken for slow because of it."""
    _gather(stage)
    stage.world.network.downlink_bytes_s[stage.swarm.founders[0]] = RATE_BYTES_S / SLOWER

    def check(round: int, shares: dict[PeerId, float]) -> None:
        if round >= LEARNED:
            _demand_equal(round, shares)

    _play(stage, check)


def changing_link(stage: ScenarioContext) -> None:
    """It becomes slower after a third of the rounds, and is as fast as the others again after two thirds."""
    _gather(stage)
    slow = stage.swarm.founders[0]
    falls, rises = stage.rounds // 3, 2 * stage.rounds // 3

    def check(round: int, shares: dict[PeerId, float]) -> None:
        if round in (falls, rises):
            stage.world.network.uplink_bytes_s[slow] = RATE_BYTES_S / SLOWER if round == falls else RATE_BYTES_S
        if falls + LEARNED <= round <= rises:
            _demand_little(round, shares, slow)
        elif round <= falls or round >= rises + LEARNED:
            _demand_equal(round, shares)

    _play(stage, check)


def _gather(stage: ScenarioContext) -> None:
    stage.quorum = "majority"
    plan = replace(stage.settings().round, owner_s=60.0, first_train_s=120.0)
    settings = stage.settings(round=plan, topology="butterfly", update_bytes=UPDATE_BYTES, pieces=PIECES_BY_SIZE)
    island = WorkerKnobs(step_s=STEP_S, update_bytes=UPDATE_BYTES)
    stage.gather(SwarmKnobs(stage.peers, network=LINKS, island=island, run=settings))


def _play(stage: ScenarioContext, check: Checks) -> None:
    """Play all rounds; `check` is called as each begins to share."""
    began, needed_s = dict[int, Seconds](), dict[int, Seconds]()
    stage.measured["wait"] = 0.0

    def watch(now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, UpdateSharingBegan) and fact.round not in began:
            assert node.machine is not None and node.machine.round is not None
            topology = node.machine.round.ground.topology
            assert topology is not None
            began[fact.round] = now
            whole, shares = sum(part.share for part in topology.parts), Counter[PeerId]()
            for part in topology.parts:
                shares[part.owners[0]] += part.share
            check(fact.round, {peer: shares[peer] / whole for peer in stage.swarm.founders})
            needed_s[fact.round] = _needed_s(stage, topology.parts)
        if isinstance(fact, RoundClosed):
            wait = (now - began[fact.body.round]) / needed_s[fact.body.round]
            stage.measured["wait"] = max(stage.measured["wait"], wait)
            if wait > WAIT_MAX:
                raise InvariantBroken(f"round {fact.body.round} takes {wait:.2f} times what its busiest link needs")

    stage.world.watchers.append(watch)
    stage.until_round(stage.rounds - 1, within_s=600.0 * stage.rounds)


def _needed_s(stage: ScenarioContext, parts: tuple[PartReductionTree, ...]) -> Seconds:
    """Seconds that the busiest link needs for its bytes."""
    network, whole = stage.world.network, sum(part.share for part in parts)
    units = {
        peer: sum(p.share * (stage.peers - 1 if p.owners[0] == peer else 1) for p in parts)
        for peer in stage.swarm.founders
    }
    rates = {peer: min(network.uplink_of(peer), network.downlink_of(peer)) for peer in units}
    return max(units[peer] / whole * UPDATE_BYTES / rates[peer] for peer in units)


def _set_rates(stage: ScenarioContext, peer: PeerId, rate_bytes_s: float) -> None:
    stage.fault("rate")
    stage.world.network.uplink_bytes_s[peer] = stage.world.network.downlink_bytes_s[peer] = rate_bytes_s


def _demand_equal(round: int, shares: dict[PeerId, float]) -> None:
    if max(shares.values()) > (1 + EQUAL) * min(shares.values()):
        raise InvariantBroken(f"links are equal and shares in round {round} are not: {shares}")


def _demand_little(round: int, shares: dict[PeerId, float], slow: PeerId) -> None:
    if shares[slow] > 0.5 / len(shares):
        raise InvariantBroken(f"{slow} has a slow link and owns {shares[slow]:.2f} of the update in round {round}")


def slow(stage: ScenarioContext) -> None:
    """A third of the members, drawn, are slow."""
    stage.quorum = "two-thirds"
    settings = replace(
        stage.settings(), witnessed=True, tolerance=0.33, statistic="trimmed_mean", audit_rate=AUDITED
    )
    knobs = SwarmKnobs(stage.peers, network=LOSSY_LINKS, clock_offset_s=0.2, clock_drift=1e-4, run=settings)
    swarm = stage.gather(knobs, island=islands({}))
    for name in stage.draw.sample(swarm.founders, stage.peers // 3):
        stage.fault("slow")
        island = swarm.world.nodes[name].island
        island.knobs = replaced(island.knobs, step_s=SLOW_STEPS * island.knobs.step_s)
        swarm.world.network.uplink_bytes_s[name] = SLOW_BYTES_S
        swarm.world.network.downlink_bytes_s[name] = SLOW_BYTES_S
    stage.measured["audits"] = 0

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        match fact:
            case MemberAccused(peer=peer, statement=statement):
                raise InvariantBroken(f"{node.name} accuses {peer}: {type(statement).__name__} {statement}")
            case AuditFindingRecorded(peer=peer, auditor=by, finding=finding):
                if finding in REFUTING:
                    raise InvariantBroken(f"{by} found {finding} against {peer}")
                stage.measured["audits"] += node.name == swarm.founders[0]
            case RoundClosed(body=body):
                gone = [m.peer for m in body.members if not m.votes]
                if gone:
                    raise InvariantBroken(f"{gone} lost their votes in round {body.round}")
            case _:
                pass

    stage.world.watchers.append(watch)
    stage.until_round(stage.rounds - 1, ROUND_S * stage.rounds)
