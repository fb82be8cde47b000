"""Evidence holds for whoever said two things, and for nobody else."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.simulation.signatures import RealKeys, VirtualSignatureVerifier, VirtualSigner
from atoll.wire.envelope import StatementSigner
from atoll.wire.evidence import Evidence, commits_to_two_updates, contradiction, evidence_flaw, slot_of
from atoll.wire.messages.statements import (
    BaseStatement,
    Commitment,
    LeaveReport,
    OwnerResult,
    Proposal,
    ViewTimeout,
    Vote,
)

RUN, A, B = Digest(bytes(32)), Digest(b"a" * 32), Digest(b"b" * 32)
SIGNER = VirtualSigner(PeerId("ada"))
NOTARY = StatementSigner(RUN, SIGNER, VirtualSignatureVerifier())

few, digests = st.integers(0, 2), st.sampled_from([A, B])
statements = st.one_of(
    st.builds(Vote, few, few, st.sampled_from(["prepare", "commit"]), digests),
    st.builds(ViewTimeout, few, few, few, digests),
    st.builds(Proposal, few, few, digests),
    st.builds(Commitment, few, few, digests, few, few, few, st.just(1.0), st.just(1.0), few),
    st.builds(OwnerResult, few, few, few, few, digests, few, st.just((PeerId("x"),))),
    st.builds(LeaveReport, few, st.sampled_from(["a", "b"])),
)


def of(one: BaseStatement, other: BaseStatement) -> Evidence:
    return contradiction(RUN, SIGNER.vote_key, NOTARY.sign(one), NOTARY.sign(other), SIGNER.certificate)


@given(statements, statements)
def test_two_statements_are_evidence_if_and_only_if_they_differ_in_one_slot(
    one: BaseStatement, other: BaseStatement
):
    proves = evidence_flaw(of(one, other), VirtualSignatureVerifier()) is None
    assert proves == (one != other and slot_of(one) is not None and slot_of(one) == slot_of(other))
    assert of(one, other) == of(other, one)


@given(st.data())
def test_a_changed_bit_anywhere_proves_nothing_any_more(data: st.DataObject):
    """Real keys; every byte of the run, the keys, the certificate, the statements and the signatures counts."""
    raw = bytearray(msgspec.msgpack.encode(REAL))
    at = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[at // 8] ^= 1 << at % 8
    try:
        evidence = msgspec.msgpack.decode(bytes(raw), type=Evidence)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    assert evidence == REAL or evidence_flaw(evidence, KEYS.verifier) is not None


KEYS = RealKeys(5)
_notary = StatementSigner(RUN, KEYS.signer(0, RUN), KEYS.verifier)
REAL = contradiction(
    RUN,
    KEYS.vote_key(0),
    _notary.sign(Vote(3, 1, "commit", A)),
    _notary.sign(Vote(3, 1, "commit", B)),
    KEYS.signer(0, RUN).certificate,
)


def test_it_needs_nothing_but_itself_or_the_agreed_key():
    assert evidence_flaw(REAL, KEYS.verifier) is None
    bare = replace(REAL, certificate=b"")
    assert "no certificate binds" in (evidence_flaw(bare, KEYS.verifier) or "")
    assert evidence_flaw(bare, KEYS.verifier, KEYS.vote_key(0)) is None
    assert "not the agreed key" in (evidence_flaw(REAL, KEYS.verifier, KEYS.vote_key(1)) or "")


def test_words_of_another_run_another_peer_or_another_session_frame_nobody():
    """A peer whose folder is lost comes back with another session key: what it says then contradicts nothing."""
    vote, other = Vote(3, 1, "commit", A), Vote(3, 1, "commit", B)
    elsewhere = StatementSigner(Digest(b"r" * 32), SIGNER, VirtualSignatureVerifier()).sign(other)
    mixed = contradiction(RUN, SIGNER.vote_key, NOTARY.sign(vote), elsewhere, SIGNER.certificate)
    assert "did not sign" in (evidence_flaw(mixed, VirtualSignatureVerifier()) or "")
    returned = VirtualSigner(PeerId("ada"), session=1)
    later = StatementSigner(RUN, returned, VirtualSignatureVerifier()).sign(other)
    for key in (SIGNER, returned):
        evidence = contradiction(RUN, key.vote_key, NOTARY.sign(vote), later, key.certificate)
        assert "did not sign" in (evidence_flaw(evidence, VirtualSignatureVerifier()) or "")
    bob = StatementSigner(RUN, VirtualSigner(PeerId("bob")), VirtualSignatureVerifier()).sign(other)
    two = contradiction(RUN, SIGNER.vote_key, NOTARY.sign(vote), bob, SIGNER.certificate)
    assert "two signers" in (evidence_flaw(two, VirtualSignatureVerifier()) or "")


def test_its_bytes_are_what_they_were():
    evidence = of(Vote(3, 1, "commit", A), Vote(3, 1, "commit", B))
    assert (
        msgspec.msgpack.encode(evidence)
        .hex()
        .startswith("95c420" + "00" * 32 + "c405" + b"ada#0".hex() + "93a3616461")
    )


def test_two_attempts_of_a_round_share_one_update_or_none():
    """An update after a pass, or after another one, is a second update; a pass may come at any time."""

    def said(attempt: int, root: bytes, parts: int, round: int = 7) -> Commitment:
        return Commitment(round, attempt, Digest(root * 32), parts, 1, 1, 1.0, 1.0, 1)

    first, second, none = said(0, b"a", 3), said(1, b"b", 3), said(0, b"\0", 0)
    for later in (said(1, b"a", 3), said(1, b"\0", 0), said(1, b"b", 3, round=8), said(0, b"b", 3)):
        assert not commits_to_two_updates(first, later) and not commits_to_two_updates(later, first)
    assert commits_to_two_updates(first, second) and commits_to_two_updates(second, first)
    assert commits_to_two_updates(none, second) and not commits_to_two_updates(none, said(1, b"\0", 0))
    assert commits_to_two_updates(first, said(1, b"a", 2))
