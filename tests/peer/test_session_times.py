"""A session certificate is judged where it is admitted: by its epoch, and by the time of the body with the join."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.base.ids import PeerId
from atoll.base.limits import CLOCK_ZONE_S
from atoll.base.machine import Received
from atoll.crypto.identity import SessionSigner
from atoll.peer.membership.admission import REFUSALS, refusal_of
from atoll.peer.round.vertex_body import open_report
from atoll.simulation.signatures import RealKeys
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm
from atoll.simulation.world import DriftingClock
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.membership import ReportMessage
from atoll.wire.messages.statements import JoinRequest, SignedStatement

NOW_S, DAY_S = 1.8e9, 86400
IN_2002_S = 1_025_000_000


def running() -> tuple[VirtualSwarm, RealKeys]:
    """Four members with real keys, in the year 2027."""
    keys = RealKeys(1)
    swarm = VirtualSwarm(1, SwarmKnobs(peers=4), keys=keys)
    for node in swarm.world.nodes.values():
        node.clock = DriftingClock(NOW_S)
    swarm.world.run(10)
    return swarm, keys


def join_with(swarm: VirtualSwarm, keys: RealKeys, begin_s: int, end_s: int, epoch: int = 0) -> SignedStatement:
    """Of the second member, by another key that its identity certified for this time."""
    times = {"not_before_s": begin_s, "not_after_s": end_s}
    stolen = SessionSigner.certified(keys._identity(1), swarm.run_id, epoch=epoch, **times)
    head = swarm.world.nodes[keys.name(0)].machine.history.head_id
    join = JoinRequest(stolen.peer, stolen.vote_key, stolen.certificate, (), "trainer", "stolen", head, b"")
    return StatementSigner(swarm.run_id, stolen, keys.verifier).sign(join)


def keys_after(swarm: VirtualSwarm, signed: SignedStatement) -> set[bytes]:
    """All vote keys that its line had in the rounds after all others heard the join."""
    for name, node in swarm.world.nodes.items():
        if name != signed.signer:
            swarm.world._handle(node, Received(signed.signer, ReportMessage(signed)))
    swarm.world.run(swarm.world.now + 10)
    bodies = swarm.world.nodes[swarm.founders[0]].machine.history.bodies.values()
    return {m.vote_key for body in bodies for m in body.members if m.peer == signed.signer}


def test_a_stolen_key_whose_certificate_expired_in_2002_replaces_no_line():
    """The same join with a certificate of today does replace it: the identity may always bring a new key."""
    swarm, keys = running()
    assert keys_after(swarm, join_with(swarm, keys, IN_2002_S, IN_2002_S + 90 * DAY_S)) == {keys.vote_key(1)}
    signed = join_with(swarm, keys, int(NOW_S), int(NOW_S) + 90 * DAY_S)
    assert len(keys_after(swarm, signed)) == 2


@pytest.mark.parametrize(
    ("begin_s", "end_s", "epoch", "why"),
    [
        (-90 * DAY_S, -2 * DAY_S, 0, "its session ended 2 days ago"),
        (2 * DAY_S, 90 * DAY_S, 0, "its session begins in 2 days"),
        (-DAY_S, 90 * DAY_S, 1, "certified for epoch 1; this run is in epoch 0"),
        (-90 * DAY_S, -CLOCK_ZONE_S / 2, 0, ""),
        (CLOCK_ZONE_S / 2, 90 * DAY_S, 0, ""),
    ],
)
def test_voters_judge_a_certificate_by_the_time_of_the_body(begin_s: int, end_s: int, epoch: int, why: str):
    """Not by their own clocks: all come to the same result. Half a day either way is a clock difference."""
    swarm, keys = running()
    signed = join_with(swarm, keys, int(NOW_S + begin_s), int(NOW_S + end_s), epoch)
    ground = swarm.world.nodes[keys.name(0)].machine.round.ground
    reported = open_report(StatementSigner(swarm.run_id, keys.signer(0, swarm.run_id), keys.verifier), signed, {})
    assert reported is not None
    found = ground.admissible(reported, NOW_S)
    assert why in found if why else found is None
    if why and not epoch:
        refused = refusal_of(replace(reported, by=PeerId(signed.signer)), found)
        assert refused.code == "E-JOIN-06" and "clock" in REFUSALS[refused.code][1]
