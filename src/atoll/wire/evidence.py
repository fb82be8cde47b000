"""Evidence: two different statements of one signer for one slot, checked by anybody from these bytes alone.

A slot is one thing that a peer may say once: its commitment, one answer or comparison in an attempt, its proposal,
one vote or its timeout in a view. Both statements must be signed with one session key in one run, and the
certificate says whose key that is. Promises: an honest peer is never framed, also after a restart, because what it
said for a slot is durable before it is said and its session key lives in the same folder; words under another
session key are other slots. Reports about members have no slot: they may change, and are never evidence. Never
trusts who shows it.
"""

from __future__ import annotations

import msgspec

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.crypto.signer import SignatureVerifier
from atoll.wire.codec import decode_statement
from atoll.wire.envelope import signed_bytes
from atoll.wire.messages.statements import (
    Commitment,
    OwnerComparison,
    OwnerResult,
    Proposal,
    SignedStatement,
    Statement,
    ViewTimeout,
    Vote,
)

Slot = tuple[str, int, int, str]  # kind, round, attempt or view, what distinguishes statements within


class Evidence(msgspec.Struct, frozen=True, array_like=True):
    """`first` and `second` contradict each other; in the order of their bytes, so that it has one name."""

    run: Digest
    vote_key: bytes  # the session key that signed both
    first: SignedStatement
    second: SignedStatement
    certificate: bytes = b""  # the identity's word for the key; empty where the agreed membership tells whose it is

    @property
    def signer(self) -> PeerId:
        return self.first.signer


def slot_of(statement: Statement) -> Slot | None:
    """What may be said once; None for what may be said again and differently."""
    match statement:
        case Commitment(round, attempt):
            return "commit", round, attempt, ""
        case OwnerResult(round, attempt, part, owner_index):
            return "answer", round, attempt, f"{part}/{owner_index}"
        case OwnerComparison(round, attempt, part, owner_index):
            return "compare", round, attempt, f"{part}/{owner_index}"
        case Proposal(round, view):
            return "propose", round, view, ""
        case Vote(round, view, stage):
            return "vote", round, view, stage
        case ViewTimeout(round, view):
            return "timeout", round, view, ""
        case _:
            return None


def two_updates(one: Statement, other: Statement) -> bool:
    """Commitments of one round, the later attempt's to another update than the earlier one's word stands for.

    Attempts share the same updates again, and rows were shown in between. Giving nothing is possible at any time.
    """
    if not isinstance(one, Commitment) or not isinstance(other, Commitment):
        return False
    first, later = (one, other) if one.attempt < other.attempt else (other, one)
    new = later.parts > 0 and (later.root, later.parts) != (first.root, first.parts)
    return new and first.round == later.round and first.attempt < later.attempt


def contradiction(
    run: Digest, vote_key: bytes, one: SignedStatement, other: SignedStatement, certificate: bytes = b""
) -> Evidence:
    """Evidence out of two statements whose signatures were checked and that contradict each other."""
    first, second = sorted((one, other), key=lambda signed: signed.body)
    return Evidence(run, vote_key, first, second, certificate)


def why_not(evidence: Evidence, verifier: SignatureVerifier, agreed_key: bytes | None = None) -> str | None:
    """None if this proves that its signer said two things; else what is wrong with it, in plain words.

    `agreed_key` is the signer's key in the agreed membership of that round, where the reader holds it; without
    one the certificate must say whose the key is.
    """
    first, second = evidence.first, evidence.second
    if first.signer != second.signer:
        return "its statements are by two signers"
    if first.body >= second.body:
        return "it shows one statement twice, or in the wrong order"
    if agreed_key is not None and agreed_key != evidence.vote_key:
        return f"that is not the agreed key of {evidence.signer}"
    if agreed_key is None and not verifier.certifies(
        evidence.certificate, evidence.signer, evidence.vote_key, evidence.run
    ):
        return f"nothing says that this key is {evidence.signer}'s"
    try:
        slots = {slot_of(decode_statement(s.body, PeerId(""))) for s in (first, second)}
    except PeerFault as fault:
        return f"a statement cannot be read: {fault.what}"
    if len(slots) != 1:
        return "its statements are for two slots"
    if None in slots:
        return "such statements may change"
    for signed in (first, second):
        if not verifier.holds(evidence.vote_key, signed_bytes(evidence.run, signed.body), signed.signature):
            return f"{evidence.signer} did not sign one of its statements"
    return None
