"""What must hold in every world, checked from outside the machines: by what left them and by what they reported.

agreement      no two bodies are decided for one round
committee      whoever has no vote at this height, or not with this key, says nothing
validity       what is decided was put forward and is right
integrity      a decision shows a quorum of distinct voters, and honest ones among them did say so
no double vote an honest voter never says two things for one slot, across restarts too; nothing in views it closed,
               no vote in views before one that it voted in
grounds        whoever votes after view 0 was shown a quorum of timeouts that allows this body
lock           whoever voted to commit a body in a view claims a certificate at least as high in later timeouts
bodies         whoever is bound by a certificate, or claims one, has its body to give, across restarts too
evidence       names liars only, and both signatures hold
pre-vote       where Raft decides, who leaves a view was told by a quorum that it would, or that too few are left
bounded        what a machine remembers does not grow with the noise
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.crypto.digest import digest
from atoll.crypto.signer import Signer
from atoll.protocol.agreement.events import Equivocation
from atoll.protocol.agreement.interface import ConsensusEngine
from atoll.protocol.agreement.voter import ATTEMPTS_AHEAD
from atoll.wire.codec import decode_statement, encode
from atoll.wire.envelope import StatementSigner, signed_bytes
from atoll.wire.evidence import evidence_flaw
from atoll.wire.messages.round import ProposalMessage, TimeoutMessage, ViewChangePreVote, VoteMessage
from atoll.wire.messages.statements import (
    BaseStatement,
    Proposal,
    QuorumCertificate,
    SignedStatement,
    ViewTimeout,
    Vote,
)

BODIES_BOUND = 3  # on disk: of what the last timeout claimed, of the highest certificate, and the newest voted for


def slot_of(statement: BaseStatement) -> tuple[str, int]:
    match statement:
        case Vote(view=view, stage=stage):
            return stage, view
        case Proposal(view=view):
            return "propose", view
        case ViewTimeout(view=view):
            return "timeout", view
        case _:
            raise AssertionError(statement)


class Watch:
    def __init__(
        self,
        round: int,
        quorum: int,
        signers: dict[PeerId, Signer],
        honest: frozenset[PeerId],
        reader: StatementSigner,
        keys: dict[PeerId, bytes] | None = None,
    ) -> None:
        self.round = round
        self.quorum, self.signers, self.honest, self.reader = quorum, signers, honest, reader
        self.keys = keys or {peer: signer.vote_key for peer, signer in signers.items()}
        self.bodies: set[bytes] = set()  # right ones that were put forward
        self.slots: dict[tuple[PeerId, str, int], bytes] = {}
        self.closed: dict[PeerId, int] = {}
        self.voted: dict[PeerId, int] = {}
        self.locked: dict[PeerId, int] = {}
        self.wishes: dict[PeerId, int] = {}  # the last view that each would leave
        self.signed: set[tuple[PeerId, bytes]] = set()
        self.justified: set[tuple[int, Digest]] = set()  # (view, body) that timeouts of the view before allow
        self.seen: dict[int, Any] = {}
        self.final: QuorumCertificate | None = None
        self.caught: set[PeerId] = set()

    def spied(self, notary: StatementSigner) -> StatementSigner:
        sign = notary.sign

        def remembered(statement: BaseStatement) -> SignedStatement:
            signed = sign(statement)
            self.signed.add((signed.signer, signed.body))
            return signed

        notary.sign = remembered  # type: ignore[method-assign]
        return notary

    def shown(self, message: Any) -> None:
        """Something leaves anybody. A body may be voted for if a quorum closed the view before and binds so."""
        if not isinstance(message, ProposalMessage) or id(message) in self.seen:
            return
        self.seen[id(message)] = message
        proposed = decode_statement(message.statement.body, message.statement.signer)
        assert isinstance(proposed, Proposal)
        if proposed.round != self.round:
            return
        claims: dict[PeerId, ViewTimeout] = {}
        for signed in message.timeouts:
            timeout = decode_statement(signed.body, signed.signer)
            assert isinstance(timeout, ViewTimeout)
            of_before = (timeout.round, timeout.view) == (self.round, proposed.view - 1)
            if of_before and self._holds(signed.signer, signed.body, signed.signature):
                claims.setdefault(signed.signer, timeout)
        top = max((t.high_view for t in claims.values()), default=-1)
        binding = {t.high_digest for t in claims.values() if t.high_view == top}
        if len(claims) >= self.quorum and (top < 0 or proposed.digest in binding):
            self.justified.add((proposed.view, proposed.digest))

    def said(self, who: PeerId, message: Any) -> None:
        """Something left an honest voter."""
        if (
            not isinstance(message, (ProposalMessage, VoteMessage, TimeoutMessage, ViewChangePreVote))
            or message.round != self.round
        ):
            return
        assert who in self.keys, f"{who} speaks at height {self.round} and has no vote there"
        if isinstance(message, ViewChangePreVote):
            self.wishes[who] = max(message.view, self.wishes.get(who, -1))
            return
        signed = message.statement
        if signed.signer != who:
            return
        statement = decode_statement(signed.body, who)
        kind, view = slot_of(statement)
        first = self.slots.get((who, kind, view))
        if first is not None:
            assert first == signed.body, f"{who} said two things as {kind} of view {view}"
            return
        self.slots[who, kind, view] = signed.body
        assert self._holds(who, signed.body, signed.signature), f"{who} signs with a key that is not agreed"
        if isinstance(statement, ViewTimeout):
            lock = self.locked.get(who, -1)
            if lock <= view:
                assert statement.high_view >= lock, f"{who} closed view {view} silent about its lock in {lock}"
            self.closed[who] = max(view, self.closed.get(who, -1))
            self._with_leave(who, view)
            return
        assert view > self.closed.get(who, -1), f"{who} spoke as {kind} in view {view} after it had closed it"
        if isinstance(statement, Vote):
            assert view >= self.voted.get(who, 0), f"{who} voted in view {view} after {self.voted[who]}"
            self.voted[who] = view
        if isinstance(statement, Vote) and view > 0:
            assert (view, statement.digest) in self.justified, f"{who} voted in view {view} without grounds"
        if isinstance(statement, Vote) and statement.stage == "commit":
            self.locked[who] = max(view, self.locked.get(who, -1))

    def _with_leave(self, who: PeerId, view: int) -> None:
        """Only where somebody ever asked; the end of an attempt is known to all."""
        if not self.wishes or (view + 1) % len(self.keys) == 0:
            return
        closed = {p for p, last in self.closed.items() if last >= view}
        would = closed | {p for p, last in self.wishes.items() if last >= view}
        fine = len(would - {who}) >= self.quorum - 1 or len(closed - {who}) > len(self.keys) - self.quorum
        assert fine, f"{who} left view {view} alone"

    def decided(self, who: PeerId, certificate: QuorumCertificate) -> None:
        if self.final is not None:
            assert certificate.digest == self.final.digest, "two bodies are decided"
            return
        assert self.is_final(certificate), f"{who} decided without a quorum"
        assert certificate.digest in {digest(b) for b in self.bodies}, f"{who} decided what is not right"
        vote = encode(Vote(certificate.round, certificate.view, certificate.stage, certificate.digest))
        for peer, _ in certificate.votes:
            assert peer not in self.honest or (peer, vote) in self.signed, f"{peer} never voted so"
        self.final = certificate

    def is_final(self, certificate: QuorumCertificate) -> bool:
        """Judged by counting, not by the code under test."""
        vote = encode(Vote(certificate.round, certificate.view, "commit", certificate.digest))
        good = {peer for peer, signature in certificate.votes if self._holds(peer, vote, signature)}
        return certificate.stage == "commit" and len(good) >= self.quorum

    def evidence(self, fact: Equivocation) -> None:
        """It stands on its own: whoever holds the agreed key, and whoever holds the certificate, can check it."""
        evidence, verifier = fact.evidence, self.reader.verifier
        assert evidence.signer == fact.peer
        assert evidence_flaw(evidence, verifier, self.keys[fact.peer]) is None, evidence_flaw(evidence, verifier)
        alone = replace(evidence, certificate=self.signers[fact.peer].certificate)
        assert evidence_flaw(alone, verifier) is None and evidence_flaw(evidence, verifier) is not None
        self.caught.add(fact.peer)

    def bounded(self, machine: ConsensusEngine) -> None:
        n = len(self.keys)
        assert len(machine.tallies) <= (ATTEMPTS_AHEAD + 2) * n + 2, "tallies pile up"
        assert len(machine.bodies) <= len(machine.tallies) + BODIES_BOUND + 2 >= len(machine.sent_for_judgment), (
            "bodies pile up"
        )
        if hasattr(machine, "certificates"):  # a TwoPhaseAgreement, or a mutant of one
            assert len(machine.certificates.known) <= 2 + n * len(machine.tallies), "proofs pile up"
            assert len(machine.state.bodies) <= BODIES_BOUND, "bodies pile up"
            for bound in (c.digest for c in (machine.state.claimed, machine.state.high) if c is not None):
                assert digest(machine.state.bodies.get(bound, b"")) == bound, "it is bound to a body that it lacks"

    def _holds(self, peer: PeerId, body: bytes, signature: bytes) -> bool:
        return peer in self.keys and self.reader.verifier.holds(
            self.keys[peer], signed_bytes(self.reader.run, body), signature
        )
