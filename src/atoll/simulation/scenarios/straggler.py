"""One member is several times slower than the others: rounds do not wait for it, and all its steps count.

Alternatively all are waited for, and each takes steps by its own speed, so that all finish together.

Measured: `useful`, the share of all trainers' possible work, without waiting, that vertices contain; and `slow`,
that of the slow member alone. Without either method a round takes as long as the slow member.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace as replaced

from msgspec.structs import replace

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Fact
from atoll.base.workload import AdaptiveWorkloadPolicy
from atoll.peer.events import RoundClosed
from atoll.policy.plan import StragglerPolicy
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.swarm import SwarmKnobs
from atoll.simulation.worker import BATCH, WorkerKnobs
from atoll.simulation.world import VirtualComputer
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import Commitment

LINKS = NetworkKnobs(0.01, 0.05, jitter_s=0.01)
SLOWER = 4.0
WARM_ROUNDS = 2  # no speed is known in the first, and the second began before speeds were agreed
STEP_S = 0.1
USEFUL_MIN = 0.85
ACCEPTANCE = StragglerPolicy(quorum=2, grace=2)  # of four


def straggler(stage: ScenarioContext) -> None:
    """A round goes on without slow members as soon as half of the members have their updates."""
    tell(stage, ACCEPTANCE)
    if stage.measured["useful"] < USEFUL_MIN:
        raise InvariantBroken(f"only {stage.measured['useful']:.2f} of all steps that could be taken count")


def by_speed(stage: ScenarioContext) -> None:
    """All are waited for, and slow members take fewer steps, so that waits are short."""
    tell(stage, None, by_speed=True)
    if stage.measured["useful"] < USEFUL_MIN:
        raise InvariantBroken(f"only {stage.measured['useful']:.2f} of all steps that could be taken count")


def tell(
    stage: ScenarioContext, acceptance: StragglerPolicy | None, overlap: int = 4, by_speed: bool = False
) -> None:
    stage.quorum = "majority"
    round = stage.paced()
    if acceptance is not None:
        round = replace(round, acceptance=acceptance)
    if by_speed:
        effort = AdaptiveWorkloadPolicy(BATCH, steps_min=overlap + 1, by_speed=True)
        round = replace(round, inner_steps=2 * round.inner_steps, effort=effort)
    settings = stage.settings(round=round)
    island = WorkerKnobs(step_s=STEP_S, overlap=overlap, carries=True, update_bytes=400_000)
    swarm = stage.gather(SwarmKnobs(stage.peers, network=LINKS, island=island, run=settings))
    slow = swarm.founders[-1]
    swarm.world.nodes[slow].island.knobs = replaced(island, step_s=SLOWER * STEP_S)
    stage.fault("slow")
    steps, began, ended = Counter[PeerId](), dict[int, Seconds](), dict[int, Seconds]()

    def watch(now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        if not isinstance(fact, RoundClosed) or fact.body.round in ended:
            return
        ended[fact.body.round] = now
        if fact.body.round < WARM_ROUNDS:
            began[0] = now
            return
        said = [decode_statement(signed.body, signed.signer) for signed in fact.body.commits]
        by = {
            signed.signer: c for signed, c in zip(fact.body.commits, said, strict=True) if isinstance(c, Commitment)
        }
        if tuple(sorted(by)) != fact.counted:
            raise InvariantBroken(f"round {fact.body.round} counts {fact.counted}, and says steps of {sorted(by)}")
        for peer, commit in by.items():
            steps[peer] += commit.steps

    stage.world.watchers.append(watch)
    stage.until_round(stage.rounds - 1)
    took_s = max(ended.values()) - began[0]
    whole = took_s / STEP_S * (stage.peers - 1 + 1 / SLOWER)
    stage.measured["useful"] = sum(steps.values()) / whole
    stage.measured["slow"] = steps[slow] * SLOWER * STEP_S / took_s
    could = took_s / (SLOWER * STEP_S * (1 - island.step_jitter)) + settings.round.inner_steps / 2  # begun before
    if steps[slow] > could:
        raise InvariantBroken(f"{steps[slow]} steps of {slow} count, and it can have taken {could:.0f}")
    stage.measured["round_s"] = took_s / (max(ended) + 1 - WARM_ROUNDS)
