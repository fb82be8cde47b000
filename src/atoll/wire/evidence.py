"""Equivocation evidence: two different statements of one signer for one slot, checkable from their bytes alone.

A slot admits one statement: a commitment, result or comparison, a proposal, a vote or a timeout.
Both statements must be signed with one session key in one run, and the certificate names the key's owner.

Invariants:
- An honest peer is never framed, also after a restart: its statement for a slot is durable before it is sent, and
  its session key is stored in the same folder. Statements under another session key have other slots.
- Member reports have no slot: they may change and are never evidence.
Not responsible for: trust in the peer that shows the evidence; it needs none.
"""

from __future__ import annotations

import msgspec

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.crypto.signer import SignatureVerifier
from atoll.wire.codec import decode_statement
from atoll.wire.envelope import signed_bytes
from atoll.wire.messages.statements import (
    BaseStatement,
    Commitment,
    OwnerResult,
    Proposal,
    RowInnerProducts,
    SignedStatement,
    ViewTimeout,
    Vote,
)

Slot = tuple[str, int, int, str]  # kind, round, attempt or view, sub-slot


class Evidence(msgspec.Struct, frozen=True, array_like=True):
    """Two contradicting statements, in the order of their bytes so that the evidence has one digest."""

    run: Digest
    vote_key: bytes  # the session key that signed both
    first: SignedStatement
    second: SignedStatement
    certificate: bytes = b""  # session certificate of the key; empty if the agreed membership holds the key

    @property
    def signer(self) -> PeerId:
        return self.first.signer


def slot_of(statement: BaseStatement) -> Slot | None:
    """The slot of a statement; None for statements that may change."""
    match statement:
        case Commitment(round, attempt):
            return "commit", round, attempt, ""
        case OwnerResult(round, attempt, part, owner_index):
            return "answer", round, attempt, f"{part}/{owner_index}"
        case RowInnerProducts(round, attempt, part, owner_index):
            return "compare", round, attempt, f"{part}/{owner_index}"
        case Proposal(round, view):
            return "propose", round, view, ""
        case Vote(round, view, stage):
            return "vote", round, view, stage
        case ViewTimeout(round, view):
            return "timeout", round, view, ""
        case _:
            return None


def commits_to_two_updates(one: BaseStatement, other: BaseStatement) -> bool:
    """Whether these are commitments of one round to different updates, in two attempts.

    Attempts share the same updates, and rows were revealed in between. A skipped round is allowed in any attempt.
    """
    if not isinstance(one, Commitment) or not isinstance(other, Commitment):
        return False
    first, later = (one, other) if one.attempt < other.attempt else (other, one)
    new = later.parts > 0 and (later.root, later.parts) != (first.root, first.parts)
    return new and first.round == later.round and first.attempt < later.attempt


def contradiction(
    run: Digest, vote_key: bytes, one: SignedStatement, other: SignedStatement, certificate: bytes = b""
) -> Evidence:
    """Evidence from two contradicting statements with checked signatures."""
    first, second = sorted((one, other), key=lambda signed: signed.body)
    return Evidence(run, vote_key, first, second, certificate)


def evidence_flaw(evidence: Evidence, verifier: SignatureVerifier, agreed_key: bytes | None = None) -> str | None:
    """Describe what is wrong with this evidence; None if it proves an equivocation.

    `agreed_key`: the signer's key in the agreed membership of that round, if known. Otherwise the certificate must
    bind the key to the signer.
    """
    first, second = evidence.first, evidence.second
    if first.signer != second.signer:
        return "its statements have two signers"
    if first.body >= second.body:
        return "its statements are equal or in the wrong order"
    if agreed_key is not None and agreed_key != evidence.vote_key:
        return f"its key is not the agreed key of {evidence.signer}"
    if agreed_key is None and not verifier.certifies(
        evidence.certificate, evidence.signer, evidence.vote_key, evidence.run
    ):
        return f"no certificate binds its key to {evidence.signer}"
    try:
        slots = {slot_of(decode_statement(s.body, PeerId(""))) for s in (first, second)}
    except PeerFault as fault:
        return f"one of its statements cannot be decoded: {fault.what}"
    if len(slots) != 1:
        return "its statements are for two slots"
    if None in slots:
        return "its statements may change, so two of them prove nothing"
    for signed in (first, second):
        if not verifier.holds(evidence.vote_key, signed_bytes(evidence.run, signed.body), signed.signature):
            return f"{evidence.signer} did not sign one of its statements"
    return None
