"""Slow but honest members, bad links and lost messages: no member is ever accused of anything.

Slow members take twice as long for a step and send over a tenth of the others' uplink; all are audited, and their
owners watched. An accusation is a claim of proof, an auditor's finding against a member, or a complaint.
"""

from __future__ import annotations

from dataclasses import replace as replaced

from msgspec.structs import replace

from atoll.base.machine import Fact
from atoll.peer.events import AuditFindingRecorded, MemberAccused, RoundClosed
from atoll.policy.findings import REFUTING
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.replay_audits import islands
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.swarm import SwarmKnobs
from atoll.simulation.world import VirtualComputer

LINKS = NetworkKnobs(0.01, 0.3, jitter_s=0.05, loss_rate=0.01, duplicate_rate=0.01)
SLOWER = 2.0
SLOW_BYTES_S = LINKS.uplink_bytes_s / 10
AUDITED = 0.2
ROUND_S = 120.0


def slow(stage: ScenarioContext) -> None:
    """A third of the members, drawn, are slow."""
    stage.quorum = "two-thirds"
    settings = replace(
        stage.settings(), witnessed=True, tolerance=0.33, statistic="trimmed_mean", audit_rate=AUDITED
    )
    knobs = SwarmKnobs(stage.peers, network=LINKS, clock_offset_s=0.2, clock_drift=1e-4, run=settings)
    swarm = stage.gather(knobs, island=islands({}))
    for name in stage.draw.sample(swarm.founders, stage.peers // 3):
        stage.fault("slow")
        island = swarm.world.nodes[name].island
        island.knobs = replaced(island.knobs, step_s=SLOWER * island.knobs.step_s)
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
