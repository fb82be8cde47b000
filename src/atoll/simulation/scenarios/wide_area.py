"""Members on several continents, at the ratios of INTELLECT-1 (2412.01152, table 2), with and without overlap.

38 minutes of training, and uplinks on which a ring all-reduce of its 10 GB takes its 469 seconds. Sizes and rates
are a hundredth of those, which changes no time; downlinks are as fast as uplinks. All members are equally fast, as
their table counts no waiting for slower ones. Measured: `overlapped` and `waiting`, the share of the time in which
a member trains, everything else counted. There it was 0.83 around the world, without overlap.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.base.ids import Seconds
from atoll.base.machine import Fact
from atoll.peer.events import RoundClosed
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.swarm import SwarmKnobs
from atoll.simulation.worker import WorkerKnobs
from atoll.simulation.world import VirtualComputer

STEPS, STEP_S = 100, 22.8  # 38 minutes
UPDATE_BYTES = 100_000_000  # int8
RING_S, RING_MEMBERS = 469.0, 14
RATE_BYTES_S = 2 * (RING_MEMBERS - 1) / RING_MEMBERS * UPDATE_BYTES / RING_S
LINKS = NetworkKnobs(0.03, 0.15, jitter_s=0.01, uplink_bytes_s=RATE_BYTES_S, downlink_bytes_s=RATE_BYTES_S)
OVERLAP = 25  # steps: about ten minutes, enough for an exchange
WARM_ROUNDS = 2  # trainers start in the first, and no member trains ahead of it
OVERLAPPED_MIN = 0.96
OF_LINKS_MIN = 0.99  # least share of the training possible if an exchange took only the time of its bytes


def oceans(stage: ScenarioContext) -> None:
    """The same members twice: they wait while a round is agreed, and they go on."""
    stage.measured["waiting"], stage.measured["overlapped"] = trained(stage, 0), trained(stage, OVERLAP)
    exchange_s = 2 * (stage.peers - 1) / stage.peers * UPDATE_BYTES / RATE_BYTES_S
    possible = STEPS * STEP_S / (STEPS * STEP_S + exchange_s)
    for name, least in (("waiting", OF_LINKS_MIN * possible), ("overlapped", OVERLAPPED_MIN)):
        if stage.measured[name] < least:
            raise InvariantBroken(
                f"members train {stage.measured[name]:.3f} of the time, {name}: wanted {least:.3f}"
            )


def trained(stage: ScenarioContext, overlap: int, spread: float = 0.0) -> float:
    """Share of all members' time spent on steps that vertices count; `spread` is that of step times."""
    stage.quorum = "majority"
    plan = replace(
        stage.settings().round, inner_steps=STEPS, first_train_s=3600.0, owner_s=900.0, beat_s=60.0, suspect_s=180.0
    )
    island = WorkerKnobs(step_s=STEP_S, step_jitter=spread, overlap=overlap, update_bytes=UPDATE_BYTES)
    settings = stage.settings(round=plan, topology="butterfly")
    stage.gather(SwarmKnobs(stage.peers, network=LINKS, island=island, run=settings))
    steps, ended = dict[int, int](), dict[int, Seconds]()

    def watch(now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundClosed) and fact.body.round not in ended:
            steps[fact.body.round], ended[fact.body.round] = fact.body.metrics.steps, now

    stage.world.watchers.append(watch)
    stage.until_round(stage.rounds - 1, within_s=2 * stage.rounds * STEPS * STEP_S)
    last = max(ended)
    counted = sum(steps[round] for round in range(WARM_ROUNDS, last + 1))
    return counted * STEP_S / (ended[last] - ended[WARM_ROUNDS - 1]) / stage.peers
