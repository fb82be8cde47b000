"""Offline verification of a kept history: agreed content passes, and every later change is found and named.

The histories come from virtual swarms with keys that can sign anything, so also what a dishonest quorum would sign.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.capabilities import CAPABILITIES
from atoll.cli.verify import votes_alone
from atoll.crypto.digest import digest
from atoll.peer.operator_commands import recover
from atoll.peer.verify.chain import HistoryVerificationReport, StoredHistory, verify_history
from atoll.peer.verify.eras import EraSignatureResult
from atoll.protocol.history.era_signatures import EraEndSignatures, decode_era, encode_era, era_bytes
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner, sign_as_identity
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.wire.codec import decode_body, decode_vertex, encode, vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.history import EraSignature
from atoll.wire.messages.statements import QuorumCertificate, SignedStatement, Vote
from atoll.wire.messages.vertex import Vertex, VertexBody

Rows = dict[int, bytes]


@cache
def history(seed: int = 3) -> tuple[Digest, bytes, Rows]:
    """A run of four: a newcomer, one who is lost and comes back, a recovery; as its creator's disk has it."""
    knobs = SwarmKnobs(peers=4)
    knobs.run = replace(knobs.run, recovery=peer_name(0).encode(), era_rounds=10)
    swarm = VirtualSwarm(seed, knobs)
    world = swarm.world
    world.run(10)
    swarm.join(4, peer_name(0))
    world.run(60)
    for index in (2, 3, 4):
        world.crash(peer_name(index))
    world.run(100)
    node = world.nodes[peer_name(0)]
    assert node.machine is not None
    vouch = recover(node.machine, lambda data: sign_as_identity(peer_name(0).encode(), data), node.clock.local(100))
    world.carry_out(node, vouch)
    world.run(130)
    world.start(peer_name(2))
    world.run(170)
    rows = {int(k[7:]): v for k, v in node.kept.items() if k.startswith("vertex/")}
    ERAS[swarm.run_id] = {
        int(k.split("/")[1]): v for k, v in node.kept.items() if k.startswith(("era/", "sealed/"))
    }
    return swarm.run_id, node.kept["genesis"], rows


ERAS: dict[Digest, Rows] = {}  # the signatures under a run's eras


def eras_of() -> Rows:
    return dict(ERAS[history()[0]])


def audit_of(
    rows: Rows, genesis: bytes | None = None, trusted: Digest | None = None, eras: Rows | None = None
) -> HistoryVerificationReport:
    run, first, _ = history()
    kept = StoredHistory(run, genesis or first, sorted(rows), rows.get, (eras_of() if eras is None else eras).get)
    return verify_history(kept, VirtualSignatureVerifier(), CAPABILITIES.verifiers, trusted)


def found(audit: HistoryVerificationReport) -> list[tuple[int, str]]:
    return [(p.round, p.kind) for p in audit.problems]


def rows_of() -> Rows:
    return dict(history()[2])


def body_of(rows: Rows, round: int) -> VertexBody:
    return decode_body(decode_vertex(rows[round]).body)


def certified(
    rows: Rows, round: int, change: Callable[[VertexBody], VertexBody], run: Digest | None = None
) -> bytes:
    """A changed body with the votes of all its voters, which lie together."""
    run = run or history()[0]
    raw = encode(change(body_of(rows, round)))
    before = body_of(rows, round - 1)
    vote = Vote(round, 0, "commit", vertex_id(raw))
    voters = sorted(m.peer for m in before.members if m.votes)
    notaries = [StatementSigner(run, VirtualSigner(p), VirtualSignatureVerifier()) for p in voters]
    votes = tuple((n.me, n.sign(vote).signature) for n in notaries)
    return encode(Vertex(raw, QuorumCertificate(round, 0, "commit", vote.digest, votes)))


def test_a_history_with_newcomers_losses_and_a_recovery_is_intact():
    """The walk reports joins, departures and contributions: as many samples as the vertices count together."""
    rows = rows_of()
    audit = audit_of(rows)
    assert found(audit) == [] and audit.intact and audit.missing == audit.unchecked == []
    assert audit.vertices == len(rows) and audit.head == max(rows)
    (recovered,) = audit.recoveries
    assert decode_vertex(rows[recovered]).certificate is None
    assert next(c.joined for c in audit.members) == ("0", "1", "2", "3")
    assert any(set(c.left) >= {"2", "3"} for c in audit.members) and any("p0004" in c.joined for c in audit.members)
    samples = sum(body_of(rows, r).metrics.samples for r in rows)
    assert sum(share.samples for share in audit.shares.values()) == samples > 0
    assert audit.shares[peer_name(0)].rounds > audit.shares[peer_name(3)].rounds > 0


@pytest.mark.parametrize(
    "knobs",
    [
        {"topology": "ring"},
        {"topology": "tree", "pieces": 2},
        {"topology": "star"},
        {"topology": "auto"},
        {"min_peers": 3, "start_peers": 4},
        {"open_to_all": False},
        {"reputation": True},
    ],
    ids=str,
)
def test_what_peers_agreed_on_is_intact_whatever_the_settings_of_the_run(knobs: dict[str, Any]):
    """One is lost, one comes with a ticket: the walk judges every round by the ground that its voters stood on."""
    swarm_knobs = SwarmKnobs(peers=4)
    swarm_knobs.run = replace(swarm_knobs.run, **knobs)
    swarm = VirtualSwarm(11, swarm_knobs)
    world = swarm.world
    world.run(2)
    ticket = swarm.invite(peer_name(1)) if not swarm_knobs.run.open_to_all else None
    world.run(12)
    swarm.join(4, peer_name(1), ticket)
    world.crash(peer_name(2))
    world.run(50)
    node = world.nodes[peer_name(0)]
    rows = {int(k[7:]): v for k, v in node.kept.items() if k.startswith("vertex/")}
    kept = StoredHistory(swarm.run_id, node.kept["genesis"], sorted(rows), rows.get)
    audit = verify_history(kept, VirtualSignatureVerifier(), CAPABILITIES.verifiers)
    assert found(audit) == [] and audit.vertices > 10
    assert any("p0004" in c.joined for c in audit.members) and any("2" in c.left for c in audit.members)


@settings(max_examples=40)
@given(st.data())
def test_any_flipped_bit_is_found_in_the_round_where_it_is(data: st.DataObject):
    """In body, certificate, signature or frame; nothing else is blamed but perhaps its child."""
    rows = rows_of()
    round = data.draw(st.sampled_from(sorted(rows)))
    bit = data.draw(st.integers(0, 8 * len(rows[round]) - 1))
    changed = bytearray(rows[round])
    changed[bit // 8] ^= 1 << bit % 8
    if decoded_alike(bytes(changed), rows[round]):
        return  # msgpack has several spellings of one value
    rows[round] = bytes(changed)
    audit = audit_of(rows)
    assert round in {r for r, _ in found(audit)} and not audit.intact
    assert {r for r, _ in found(audit)} <= {round, round + 1}


def decoded_alike(one: bytes, other: bytes) -> bool:
    try:
        return decode_vertex(one) == decode_vertex(other)
    except Exception:
        return False


def test_a_changed_body_and_a_changed_certificate_are_told_apart():
    rows = rows_of()
    vertex = decode_vertex(rows[5])
    assert vertex.certificate is not None
    body = decode_body(vertex.body)
    rows[5] = encode(replace(vertex, body=encode(replace(body, time_s=body.time_s + 0.001))))
    assert found(audit_of(rows)) == [(5, "body")]
    assert audit_of(rows).unchecked == [6]

    (peer, signature), *others = vertex.certificate.votes
    votes = ((peer, bytes([signature[0] ^ 1]) + signature[1:]), *others)
    rows[5] = encode(replace(vertex, certificate=replace(vertex.certificate, votes=votes)))
    audit = audit_of(rows)
    assert found(audit) == [(5, "certificate")] and audit.unchecked == []
    assert f"{len(votes) - 1} of {len(votes)} votes hold" in audit.problems[0].what

    rows[5] = encode(replace(vertex, certificate=replace(vertex.certificate, digest=Digest(bytes(32)))))
    assert "a quorum signed this body" in audit_of(rows).problems[0].what


def test_a_dropped_vertex_is_a_gap_and_two_exchanged_ones_are_named():
    rows = rows_of()
    del rows[4], rows[5]
    audit = audit_of(rows)
    assert found(audit) == [(4, "missing"), (5, "missing")]
    assert audit.missing == [4, 5] and audit.unchecked == [6]

    rows = rows_of()
    rows[4], rows[9] = rows[9], rows[4]
    assert found(audit_of(rows)) == [(4, "misplaced"), (9, "misplaced")]

    rows = rows_of()
    rows[4] = rows[9]
    assert found(audit_of(rows)) == [(4, "misplaced")] and audit_of(rows).missing == [4]


def promote(body: VertexBody) -> VertexBody:
    """All members that are no voters become voters."""
    members = tuple(replace(m, standing="member", role="trainer", missed=0) for m in body.members)
    mallory = replace(members[0], peer=PeerId("p0666"), vote_key=b"p0666#0", name="mallory")
    return replace(body, members=(*members, mallory))


def more_steps(body: VertexBody) -> VertexBody:
    return replace(body, metrics=replace(body.metrics, samples=body.metrics.samples + 1))


def leave_out_a_commitment(body: VertexBody) -> VertexBody:
    return replace(body, commits=body.commits[1:])


def borrow_a_signature(body: VertexBody) -> VertexBody:
    first, second, *rest = body.commits
    return replace(body, commits=(replace(first, signature=second.signature), second, *rest))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (promote, "its membership does not follow from its reports"),
        (more_steps, "its metrics do not follow from its commitments"),
        (leave_out_a_commitment, "its commitments are not exactly those of its contributors"),
        (borrow_a_signature, "did not sign"),
        (lambda body: replace(body, trained=body.trained + 1), "miscounts the training rounds"),
        (lambda body: replace(body, settings=b"x"), "not by a voter of this round"),
    ],
)
def test_what_every_voter_signed_together_must_still_follow_from_the_statements(
    change: Callable[[VertexBody], VertexBody], words: str
):
    """The newest vertex is forged by all its voters: the votes hold, the content does not."""
    rows = rows_of()
    newest = max(rows)
    rows[newest] = certified(rows, newest, change)
    audit = audit_of(rows)
    assert found(audit) == [(newest, "content")]
    assert words in audit.problems[0].what
    assert audit_of({**rows, newest: certified(rows_of(), newest, lambda body: body)}).intact


def test_votes_of_everybody_begin_no_epoch():
    rows = rows_of()
    newest = max(rows)
    rows[newest] = certified(rows, newest, lambda body: replace(body, epoch=body.epoch + 1))
    audit = audit_of(rows)
    assert found(audit) == [(newest, "recovery")] and "only the recovery key can" in audit.problems[0].what


def scored(body: VertexBody, *changes: tuple[int, int]) -> VertexBody:
    """With other scores at these places."""
    assert body.reputation is not UNSET
    scores = list(body.reputation)
    for place, score in changes:
        scores[place] = score
    return replace(body, reputation=tuple(scores))


@pytest.mark.parametrize(
    "change",
    [
        lambda body: scored(body, (0, body.reputation[0] + 1)),
        lambda body: scored(body, (1, 1000), (3, 10_000)),
        lambda body: replace(body, reputation=body.reputation[:-1]),
        lambda body: replace(body, reputation=UNSET),
    ],
    ids=["one more", "framed and praised", "one missing", "none"],
)
def test_a_score_that_does_not_follow_is_named_even_if_every_voter_signed_it(
    change: Callable[[VertexBody], VertexBody],
):
    """Scores follow from the parent and from the body itself; a recovery in between hands them on as they were."""
    knobs = SwarmKnobs(peers=4)
    knobs.run = replace(knobs.run, recovery=peer_name(0).encode(), reputation=True)
    swarm = VirtualSwarm(3, knobs)
    world = swarm.world
    world.run(20)
    for index in (2, 3):
        world.crash(peer_name(index))
    world.run(30)
    node = world.nodes[peer_name(0)]
    assert node.machine is not None
    sign = lambda data: sign_as_identity(peer_name(0).encode(), data)  # noqa: E731
    world.carry_out(node, recover(node.machine, sign, node.clock.local(30)))
    world.run(45)
    rows = {int(k[7:]): v for k, v in node.kept.items() if k.startswith("vertex/")}

    def audit() -> HistoryVerificationReport:
        return verify_history(
            StoredHistory(swarm.run_id, node.kept["genesis"], sorted(rows), rows.get),
            VirtualSignatureVerifier(),
            CAPABILITIES.verifiers,
        )

    assert audit().intact and len(audit().recoveries) == 1
    newest = max(rows)
    rows[newest] = certified(rows, newest, change, swarm.run_id)
    assert found(audit()) == [(newest, "content")]
    assert "its reputations do not follow" in audit().problems[0].what


def test_a_membership_forged_without_the_votes_is_a_body_that_nobody_agreed_on():
    """The forger adds itself and goes on alone from there: the first forged round is named."""
    rows = rows_of()
    raw = encode(promote(body_of(rows, 7)))
    mallory = StatementSigner(history()[0], VirtualSigner(PeerId("p0666")), VirtualSignatureVerifier())
    vote = Vote(7, 0, "commit", vertex_id(raw))
    certificate = QuorumCertificate(7, 0, "commit", vote.digest, ((mallory.me, mallory.sign(vote).signature),))
    rows[7] = encode(Vertex(raw, certificate))
    audit = audit_of(rows)
    assert found(audit)[0] == (7, "certificate")
    assert "0 of 1 votes hold" in audit.problems[0].what and "its membership does not" in audit.problems[0].what


def test_an_epoch_that_the_recovery_identity_did_not_begin_is_named():
    """Signed by another identity; and by the right one, but over more than a change of standing."""
    (recovered,) = audit_of(rows_of()).recoveries
    run = history()[0]
    for creator, change, kind in (
        (b"somebody else", lambda body: body, "recovery"),
        (peer_name(0).encode(), lambda body: replace(body, trained=body.trained + 1), "recovery"),
        (peer_name(0).encode(), lambda body: replace(body, attempt=3), "content"),
    ):
        rows = {r: v for r, v in rows_of().items() if r <= recovered}
        raw = encode(change(body_of(rows, recovered)))
        signature = sign_as_identity(creator, b"atoll/recovery/1\0" + run + vertex_id(raw))
        rows[recovered] = encode(Vertex(raw, None, signature))
        assert found(audit_of(rows)) == [(recovered, kind)]


def test_a_changed_genesis_is_said_to_make_everything_else_unknowable():
    genesis = bytearray(history()[1])
    genesis[40] ^= 1
    audit = audit_of(rows_of(), bytes(genesis))
    assert len(audit.problems) == 1 and audit.problems[0].round == -1
    assert "nothing can be judged" in audit.problems[0].what


def test_a_vertex_that_cannot_be_judged_may_hold_anything_and_the_walk_goes_on():
    """After a gap follows a body without an author: unreadable statements, and no voters that could agree on the
    next.
    """
    rows = rows_of()
    del rows[4]
    nonsense = replace(
        body_of(rows, 5), members=(), commits=(SignedStatement(PeerId("p0001"), b"?", b""),), reports=()
    )
    rows[5] = encode(Vertex(encode(nonsense), QuorumCertificate(5, 0, "commit", vertex_id(encode(nonsense)), ())))
    rows[6] = encode(Vertex(encode(replace(body_of(rows, 6), parent=vertex_id(encode(nonsense)))), None))
    audit = audit_of(rows)
    assert found(audit)[:2] == [(4, "missing"), (6, "link")] and audit.unchecked == [5]
    assert "no voter" in audit.problems[1].what and audit.head == max(rows)


def test_a_trusted_vertex_vouches_for_what_came_before_by_its_digest():
    """Old certificates are no longer looked at, old bodies still have to hash into the trusted one."""
    rows = rows_of()
    trusted = vertex_id(decode_vertex(rows[8]).body)
    rows[3] = encode(replace(decode_vertex(rows[3]), certificate=None))
    assert found(audit_of(rows)) == [(3, "recovery")]
    audit = audit_of(rows, trusted=trusted)
    assert audit.intact and audit.trusted == 8

    body = body_of(rows, 3)
    rows[3] = encode(Vertex(encode(replace(body, time_s=body.time_s + 1)), None))
    assert found(audit_of(rows, trusted=trusted)) == [(4, "link")]
    assert found(audit_of(rows, trusted=Digest(bytes(32)))) == [(-1, "trusted")]


# ---- eras --------------------------------------------------------------------------------------------------


def test_eras_are_held_by_identities_and_the_last_rounds_by_votes_alone():
    """Joins, losses, a recovery: eras follow each other without a gap, each signed; what is left is not over."""
    rows = rows_of()
    audit = audit_of(rows)
    firsts, lasts = [e.first for e in audit.eras], [e.last for e in audit.eras]
    assert firsts == [0, *(last + 1 for last in lasts[:-1])] and audit.head - lasts[-1] < 10
    assert all(e.anchored for e in audit.eras) and any(e.last - e.first < 9 for e in audit.eras)
    (recovered,) = audit.recoveries
    assert [e.needed for e in audit.eras if e.last == recovered] == [0]
    assert all(e.signed >= e.needed for e in audit.eras)
    assert votes_alone(audit) == ([(lasts[-1] + 1, audit.head)] if audit.head > lasts[-1] else [])


def after_recovery(rows: Rows) -> EraSignatureResult:
    audit = audit_of(rows)
    return next(e for e in audit.eras if e.first > audit.recoveries[0])


def test_an_era_without_its_quorum_is_demanded_once_another_one_has_passed():
    """Signatures taken away: a problem, and all that follow have lost their anchor; before a recovery, covered."""
    rows = rows_of()
    first, signed = audit_of(rows).eras[0], after_recovery(rows)
    eras = eras_of()
    del eras[first.last]
    audit = audit_of(rows, eras=eras)
    assert audit.intact and audit.eras[0].covered and not audit.eras[0].sealed
    assert votes_alone(audit) == votes_alone(audit_of(rows))
    del eras[signed.last]
    audit = audit_of(rows, eras=eras)
    assert found(audit) == [(signed.last, "era")] and f"0 of {signed.of} long-term keys" in audit.problems[0].what
    assert votes_alone(audit)[0][0] == signed.first
    young = {r: v for r, v in rows.items() if r < signed.last + 10}
    assert audit_of(young, eras=eras).intact
    assert votes_alone(audit_of(young, eras=eras))[0] == (signed.first, max(young))


def test_a_signature_under_an_era_that_does_not_hold_is_named():
    rows, eras = rows_of(), eras_of()
    last = after_recovery(rows).last
    era = decode_era(eras[last])
    assert era is not None
    first, *others = era.signatures
    for changed, what in (
        (replace(era, signatures=(replace(first, signature=b"scribble"), *others)), "did not sign"),
        (replace(era, signatures=(first,) * 4), f"1 of {len(era.signers)} long-term keys"),
        (replace(era, vertex=Digest(bytes(32))), "for another vertex"),
        (replace(era, signatures=(replace(first, identity=b"mallory"), *others)), "is not p0000's"),
    ):
        audit = audit_of(rows, eras=eras | {last: encode_era(changed)})
        assert {(r, k) for r, k in found(audit)} == {(last, "era")}
        assert any(what in p.what for p in audit.problems), what
    audit = audit_of(rows, eras=eras | {last: b"nonsense"})
    assert any("cannot be read" in p.what for p in audit.problems)


def test_made_up_members_who_sign_for_each_other_hold_nothing():
    """The forger can forge every vote: it lets in five of its own and lets them sign. They began no signed era."""
    run, _, _ = history()
    rows, eras = rows_of(), eras_of()
    early = next(e for e in audit_of(rows).eras if e.needed and e.last - e.first == 9)
    began = body_of(rows, early.first - 1) if early.first else None
    signers = began.members if began is not None else decode_body(decode_vertex(history()[1]).body).members
    named = vertex_id(decode_vertex(rows[early.last]).body)
    forged = [
        EraSignature(
            PeerId(f"m{k}"), f"m{k}".encode(), sign_as_identity(f"m{k}".encode(), era_bytes(run, early.last, named))
        )
        for k in range(5)
    ]
    pins = {PeerId(f"m{k}"): digest(f"m{k}".encode()) for k in range(5)}
    eras[early.last] = encode_era(EraEndSignatures(early.last, named, pins, 3, tuple(forged)))
    audit = audit_of(rows, eras=eras)
    assert (early.last, "era") in found(audit) and len(signers) >= 3
    assert any("is not a signer" in p.what for p in audit.problems)
    assert not any(e.sealed for e in audit.eras if e.last == early.last)


def test_after_a_lost_vertex_eras_are_taken_up_where_a_kept_one_ends():
    rows = rows_of()
    whole = audit_of(rows).eras
    lost = whole[1].first + 1
    del rows[lost]
    audit = audit_of(rows)
    assert found(audit) == [(lost, "missing")]
    assert [e.last for e in audit.eras] == [e.last for e in whole if e is not whole[1]]
    assert not any(e.anchored for e in audit.eras[1:] if e.last < audit.recoveries[0])


def test_a_run_from_before_eras_says_that_votes_alone_protect_it():
    swarm = VirtualSwarm(5, SwarmKnobs(peers=3))
    swarm.world.run(20)
    kept = swarm.world.nodes[peer_name(0)].kept
    rows = {int(k[7:]): v for k, v in kept.items() if k.startswith("vertex/")}
    audit = verify_history(
        StoredHistory(swarm.run_id, kept["genesis"], sorted(rows), rows.get),
        VirtualSignatureVerifier(),
        CAPABILITIES.verifiers,
    )
    assert audit.intact and audit.eras == [] and votes_alone(audit) == [(0, max(rows))]
