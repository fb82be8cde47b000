"""Runs with sessions that sign with ML-DSA-65: everything that signs and checks goes by what genesis says."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.machine import Fact
from atoll.capabilities import CAPABILITIES
from atoll.crypto.identity import SessionVerifier
from atoll.peer.events import JoinRejected, ProtocolFault
from atoll.peer.settings import RunSettings, decode_settings, encode_settings, settings_of_run
from atoll.peer.verify.chain import StoredHistory, verify_history
from atoll.policy.plan import RoundSettings
from atoll.protocol.history.chain import genesis_digest
from atoll.simulation.scenarios import run_scenario
from atoll.simulation.signatures import RealKeys, VirtualKeys
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm
from atoll.simulation.world import VirtualComputer
from atoll.wire.codec import decode_body, encode
from atoll.wire.envelope import StatementSigner
from atoll.wire.evidence import contradiction, evidence_flaw
from atoll.wire.messages.statements import Vote
from atoll.wire.messages.vertex import Vertex

ROUND = RoundSettings(inner_steps=20, first_train_s=10, quorum="two-thirds", votes="ml-dsa-65")
QUANTUM = RunSettings(open_to_all=True, era_rounds=4, round=ROUND)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_swarm_goes_through_weather_with_signatures_that_long(seed: int):
    assert run_scenario("post_quantum", seed, rounds=8).rounds >= 8


def test_members_joiners_and_strangers_go_by_the_kind_that_genesis_names():
    """Four with real ML-DSA-65 sessions: one crashes and comes back, one joins, one comes with the wrong kind."""
    keys = RealKeys(5, "ml-dsa-65")
    swarm = VirtualSwarm(5, SwarmKnobs(4, run=QUANTUM), keys=keys)
    told: list[Fact] = []
    swarm.world.watchers.append(lambda now, node, fact: told.append(fact))
    victim, ada = swarm.founders[2], swarm.founders[0]
    swarm.world.run(6)
    swarm.world.crash(victim)
    joiner = swarm.join(4, ada)
    swarm.world.run(10)
    swarm.world.start(victim)
    swarm.keys = RealKeys(5)  # an older program knows no other kind
    stranger = swarm.join(5, ada)
    swarm.world.run(40)

    assert [f.what for f in told if isinstance(f, ProtocolFault)] == []
    body = swarm.world.nodes[ada].machine.history.head_body
    assert {m.peer for m in body.members if m.votes} == {*swarm.founders, joiner}
    assert {len(m.vote_key) for m in body.members} == {1952}
    refused = [f for f in told if isinstance(f, JoinRejected)]
    assert refused and all(f.code == "E-JOIN-05" and "keys" in f.what for f in refused)
    assert stranger not in {m.peer for m in body.members}

    node = swarm.world.nodes[joiner]
    audit = verified(swarm, node)
    assert audit.intact and audit.head == node.machine.history.head > 6 and len(audit.eras) >= 1
    vertex = node.machine.history.vertices[audit.head]
    assert {len(signed.signature) for signed in decode_body(vertex.body).commits} == {3309}
    assert {len(signature) for _, signature in vertex.certificate.votes} == {3309}

    # a vote exchanged for another's, as a forger of certificates would have it
    (peer, _), *rest = vertex.certificate.votes
    forged = replace(vertex, certificate=replace(vertex.certificate, votes=((peer, rest[0][1]), *rest)))
    node.kept[f"vertex/{audit.head}"] = encode(forged)
    assert [p.kind for p in verified(swarm, node).problems] == ["certificate"]


def verified(swarm: VirtualSwarm, node: VirtualComputer):
    rounds = sorted(int(key.split("/")[1]) for key in node.kept if key.startswith("vertex/"))
    read = lambda round: node.kept.get(f"vertex/{round}")  # noqa: E731  # reads like the table it is
    era = lambda round: node.kept.get(f"sealed/{round}") or node.kept.get(f"era/{round}")  # noqa: E731
    kept = StoredHistory(swarm.run_id, node.kept["genesis"], rounds, read, era)
    return verify_history(kept, SessionVerifier(), CAPABILITIES.verifiers)


def test_who_votes_twice_is_proven_to_have_by_signatures_of_either_kind():
    """Evidence names nothing but keys and signatures: it cannot be made of one word, nor under another's key."""
    keys = RealKeys(3, "ml-dsa-65")
    run, ada, bob = bytes(32), keys.signer(0, bytes(32)), keys.signer(1, bytes(32))
    votes = [StatementSigner(run, ada, keys.verifier).sign(Vote(4, 0, "commit", bytes([k]) * 32)) for k in (1, 2)]
    evidence = contradiction(run, ada.vote_key, *votes, certificate=ada.certificate)
    assert evidence_flaw(evidence, keys.verifier) is None
    assert evidence_flaw(evidence, keys.verifier, ada.vote_key) is None
    again = StatementSigner(run, ada, keys.verifier).sign(Vote(4, 0, "commit", bytes([1]) * 32))
    assert again.signature != votes[0].signature  # randomised: what is compared are words, never signatures
    assert evidence_flaw(replace(evidence, second=again, first=votes[0]), keys.verifier) is not None
    assert (
        evidence_flaw(replace(evidence, vote_key=bob.vote_key, certificate=bob.certificate), keys.verifier)
        is not None
    )


def test_a_genesis_whose_own_member_votes_by_another_kind_is_believed_by_nobody():
    """Who reads that votes are ML-DSA-65 may rely on it."""
    body = decode_body(VirtualSwarm(1, SwarmKnobs(2, run=QUANTUM)).genesis.body)
    assert settings_of_run(body).round.signing.kind == "ml-dsa-65"
    short = replace(body, members=(replace(body.members[0], vote_key=bytes(32)), body.members[1]))
    with pytest.raises(PeerFault, match="ml-dsa-65"):
        settings_of_run(short)
    genesis = Vertex(encode(short), None)
    run, keys = genesis_digest(genesis), VirtualKeys()
    audit = verify_history(
        StoredHistory(run, encode(genesis), [], lambda round: None), keys.verifier, CAPABILITIES.verifiers
    )
    assert [p.code for p in audit.problems] == ["E-VER-02"]


def test_runs_of_before_say_nothing_of_it():
    plain = encode_settings(RunSettings())
    assert b"votes" not in plain and decode_settings(plain).round.signing.kind == "ed25519"
    with pytest.raises(PeerFault, match="votes"):
        decode_settings(encode_settings(replace(QUANTUM, round=replace(ROUND, votes="rsa"))))  # type: ignore[arg-type]
