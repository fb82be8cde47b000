"""A false recovery: a quorum was only unreachable, both sides go on, and when they meet all members are
notified.
"""

from __future__ import annotations

import msgspec
import pytest

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.machine import Fact
from atoll.capabilities import CAPABILITIES
from atoll.features.forks.detect import KEPT
from atoll.peer.events import BranchPollResult, ForkBranchDetected, ProtocolFault
from atoll.peer.operator_commands import recover
from atoll.peer.verify.chain import HistoryVerificationReport, StoredHistory, verify_history
from atoll.protocol.history.chain import recovery_bytes
from atoll.simulation.signatures import VirtualSignatureVerifier, sign_as_identity
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.world import VirtualComputer
from atoll.wire.codec import decode_body, decode_vertex, encode, vertex_id
from atoll.wire.messages.vertex import Vertex

CREATOR = peer_name(0)
NAMES = [peer_name(i) for i in range(7)]
MINORITY, QUORUM = NAMES[:3], NAMES[3:]


class Parted:
    """Three of seven, the creator among them, are cut off and recover; four go on. Then the cut is healed."""

    def __init__(self) -> None:
        knobs = SwarmKnobs(peers=7)
        knobs.run = msgspec.structs.replace(knobs.run, recovery=CREATOR.encode())
        self.swarm = swarm = VirtualSwarm(1, knobs)
        swarm.world.watchers.remove(swarm.checkers.watch)  # it takes two vertices of one round for a broken promise
        swarm.world.watchers.append(self.watch)
        self.seen: dict[PeerId, list[ForkBranchDetected]] = {}
        self.preferred: dict[PeerId, BranchPollResult] = {}
        self.faults: list[ProtocolFault] = []
        swarm.world.run(8)
        swarm.world.split(set(MINORITY))
        swarm.world.run(40)
        node = swarm.world.nodes[CREATOR]
        sign = lambda data: sign_as_identity(CREATOR.encode(), data)  # noqa: E731  # reads like the word it is
        self.last = node.machine.history.head
        swarm.world.carry_out(node, recover(node.machine, sign, node.clock.local(swarm.world.now)))
        swarm.world.run(90)

    def watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, ForkBranchDetected):
            self.seen.setdefault(node.name, []).append(fact)
        if isinstance(fact, BranchPollResult):
            self.preferred[node.name] = fact
        if isinstance(fact, ProtocolFault):
            self.faults.append(fact)

    def machine(self, name: PeerId):
        return self.swarm.world.nodes[name].machine

    def heal(self) -> None:
        self.swarm.world.network.heal()
        self.swarm.world.run(self.swarm.world.now + 60)


def test_when_they_meet_both_know_and_nobody_is_blamed():
    """Each receives the other's first vertex, once, and continues where it was; a restart remembers it.

    All learn which branch most members are on, and it is the one without the recovery.
    """
    parted = Parted()
    assert parted.seen == {} == parted.preferred
    parted.heal()
    assert parted.faults == []
    began = parted.last + 1
    for name in NAMES:
        (seen,) = parted.seen[name]
        recovered = name in QUORUM
        assert (seen.round, seen.recovered, seen.epoch) == (began, recovered, int(recovered))
        assert vertex_id(parted.machine(name).known.forks.branches.known[began].body) == seen.vertex
    heads = [parted.machine(name).history.head_body for name in (CREATOR, NAMES[6])]
    assert [body.epoch for body in heads] == [1, 0] and min(body.round for body in heads) > began + 3
    theirs = vertex_id(parted.machine(CREATOR).history.vertices[began].body)
    assert {seen.vertex for name in QUORUM for seen in parted.seen[name]} == {theirs}

    ours = vertex_id(parted.machine(NAMES[6]).history.vertices[began].body)
    for name in NAMES:
        found = parted.preferred[name]
        assert (found.vertex, found.ours, found.settled) == (ours, name in QUORUM, True)
        assert 4 <= found.named <= found.asked == 6

    parted.swarm.world.crash(NAMES[6])
    parted.swarm.world.start(NAMES[6])
    kept = parted.swarm.world.nodes[NAMES[6]].kept[f"{KEPT}{began}"]
    assert parted.machine(NAMES[6]).known.forks.branches.known == {began: decode_vertex(kept)}


def test_verify_judges_what_is_kept_of_another_branch():
    """Both sides' histories are intact, and name the other's first vertex; a damaged one is named as damaged."""
    parted = Parted()
    parted.heal()
    began = parted.last + 1
    for name, recovered in ((CREATOR, False), (NAMES[6], True)):
        audit = audit_of(parted, name)
        (branch,) = audit.branches
        assert audit.intact and (branch.round, branch.recovered, branch.epoch) == (began, recovered, int(recovered))
        assert branch.voters == (3 if recovered else 7) and branch.vertex == parted.seen[name][0].vertex.hex()
    kept = parted.swarm.world.nodes[CREATOR].kept
    real = kept[f"{KEPT}{began}"]
    for damaged in (b"\xc1", encode(Vertex(decode_vertex(real).body, None, b"forged"))):
        kept[f"{KEPT}{began}"] = damaged
        audit = audit_of(parted, CREATOR)
        assert [p.round for p in audit.problems] == [began] and not audit.branches


def audit_of(parted: Parted, name: PeerId) -> HistoryVerificationReport:
    kept = parted.swarm.world.nodes[name].kept
    rounds = sorted(int(key.split("/")[1]) for key in kept if key.startswith("vertex/"))
    vertex, branch = (lambda round, kind=kind: kept.get(f"{kind}/{round}") for kind in ("vertex", "branch"))
    found = StoredHistory(parted.swarm.run_id, kept["genesis"], rounds, vertex, branch=branch)
    return verify_history(found, VirtualSignatureVerifier(), CAPABILITIES.verifiers)


def test_a_branch_that_nobody_signed_is_its_bringers_fault_and_leaves_nothing():
    """The right round and parent, another state: signed neither by a quorum nor by the recovery identity."""
    parted = Parted()
    history = parted.machine(NAMES[6]).history
    real = parted.machine(CREATOR).history.vertices[parted.last + 1]
    raw = encode(msgspec.structs.replace(decode_body(real.body), proposer=NAMES[6]))
    forged = Vertex(raw, None, sign_as_identity(b"somebody else", recovery_bytes(parted.swarm.run_id, raw)))
    for vertex in (forged, Vertex(raw, history.vertices[parted.last + 1].certificate)):
        with pytest.raises(PeerFault, match=r"signed|recovery key"):
            parted.machine(NAMES[6]).known.forks.branches.check_past_vertex(vertex, NAMES[5])
    assert parted.machine(NAMES[6]).known.forks.branches.known == {}
    ours = history.vertices[parted.last + 1]
    assert parted.machine(NAMES[6]).known.forks.branches.check_past_vertex(ours, NAMES[5]) == []
