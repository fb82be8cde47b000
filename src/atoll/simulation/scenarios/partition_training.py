"""A minority is cut off for many rounds, trains on by itself, and returns with its work."""

from __future__ import annotations

from dataclasses import replace

from atoll.policy.capability_terms import PartitionPolicy
from atoll.policy.plan import quorum
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.swarm import SwarmKnobs

CUTS = 3
ROUNDS = 4  # rounds' worth of steps that a member may take alone
CUT_S = 60.0, 150.0  # seconds; a first attempt takes half a minute to fail
SETTLED_ROUNDS = 5  # observer, newcomer, member: from then on its late work may be sent
WEATHER = NetworkKnobs(loss_rate=0.03, duplicate_rate=0.03, jitter_s=0.05)


def apart(stage: ScenarioContext) -> None:
    """Three partitions, one after the other, some one way only; every other seed a member of the minority dies,
    too.

    The majority goes on, no state differs, and every step taken alone is counted once.
    """
    terms = PartitionPolicy("drop" if stage.seed % 5 == 0 else "merge", ROUNDS)
    stage.gather(SwarmKnobs(stage.peers, network=WEATHER, run=stage.settings(apart=terms)))
    rule = stage.swarm.knobs.run.round.quorum
    stage.until_round(1)
    for cut in range(CUTS):
        _cut_off(stage, stage.peers - quorum(stage.peers, rule), crash=bool(stage.seed % 2) and cut == 1)
    network = stage.world.network
    network.knobs = replace(network.knobs, loss_rate=0.0, duplicate_rate=0.0)
    stage.demand_progress()
    stage.until_round(max(stage.swarm.heads()) + SETTLED_ROUNDS)
    _check_books(stage, terms)


def _cut_off(stage: ScenarioContext, most: int, crash: bool) -> None:
    """Cut a minority off and heal the cut; the others do not wait."""
    swarm, world = stage.swarm, stage.world
    names = sorted(swarm.founders)
    side = stage.draw.sample(names, stage.draw.randint(1, most))
    both_ways = stage.draw.random() < 0.7
    stage.fault("partition" if both_ways else "one way")
    world.split(set(side), both_ways)
    rest = [name for name in names if name not in side]
    before = max(swarm.head(name) for name in rest)
    world.run(world.now + stage.draw.uniform(*CUT_S))
    goes_on = lambda: max(swarm.head(name) for name in rest) >= before + 2  # noqa: E731
    stage.until(goes_on, stage.healed(), f"{rest} did not go on without {side}")
    if crash:
        stage.fault("kill")
        world.crash(side[0])
        world.start(side[0])
        world.run(world.now + stage.draw.uniform(1.0, 60.0))
    world.network.heal()
    stage.until(lambda: _all_settled(stage), stage.healed(), "not every peer is a member again")
    stage.until_round(max(swarm.heads()) + stage.draw.randint(0, SETTLED_ROUNDS))


def _all_settled(stage: ScenarioContext) -> bool:
    """True if all are settled; called at every event."""
    history = stage.newest
    return history is not None and all(m.standing == "member" for m in history.head_body.members)


def _check_books(stage: ScenarioContext, terms: PartitionPolicy) -> None:
    """Check that counted, held and dropped steps add up to the steps of the workers, except after crashes."""
    counted = stage.swarm.checkers.late
    for name in stage.swarm.founders:
        book = stage.world.nodes[name].island.alone
        rest = book.taken - book.held - book.out - book.dropped
        if not rest - book.lost <= counted[name] <= rest:
            raise InvariantBroken(f"{name} gave {counted[name]} late steps by the vertices, and has {book}")
    books = [node.island.alone for node in stage.world.nodes.values()]
    stage.measured["taken_alone"] = float(sum(book.taken for book in books))
    stage.measured["counted_late"] = float(counted.total())
    if terms.then == "drop" and counted:
        raise InvariantBroken(f"late work was sent although it is to be dropped: {dict(counted)}")
