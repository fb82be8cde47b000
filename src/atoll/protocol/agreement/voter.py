"""Common part of the consensus engines: electorate, proposer rotation, proposals and the decision.

Invariants:
- An accepted proposal is of this round, from the proposer of its view, with the signed bytes.
- One pair of contradicting statements is reported per signer, once.
- A body is judged once.
- A decision that precedes its body is reported again when the body arrives.
- Views that ended long ago leave no memory behind.
Not responsible for: making or counting votes (`two_phase.py`, `one_phase.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Broadcast, Effect, Emit, Fact, Message
from atoll.protocol.agreement.events import BodyDecided, Equivocation, ProposalReceived
from atoll.wire.codec import vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.evidence import contradiction
from atoll.wire.messages.round import ProposalMessage, VoteMessage
from atoll.wire.messages.statements import Proposal, QuorumCertificate, SignedStatement

ATTEMPTS_AHEAD = 2  # messages for views of this many attempts ahead are stored: clocks differ by less


@dataclass(frozen=True)
class Electorate:
    """The voters, quorum and proposer order of one round, equal at all peers."""

    round: int
    trace: str
    vote_keys: dict[PeerId, bytes]  # voter -> vote key
    quorum: int
    proposers: tuple[PeerId, ...]  # all voters, in proposing order

    def __post_init__(self) -> None:
        assert 0 < self.quorum <= len(self.vote_keys) == len(self.proposers)


@dataclass
class ViewState:
    """The proposal of one view."""

    proposal: ProposalMessage | None = None
    proposed: SignedStatement | None = None
    digest: Digest | None = None  # of the proposed body
    is_reported: bool = (
        False  # whether the local peer's turn was acted on: reported to the round, or proposed again
    )

    def set_proposal(self, proposal: ProposalMessage, digest: Digest) -> None:
        self.proposal, self.proposed, self.digest = proposal, proposal.statement, digest


T = TypeVar("T", bound=ViewState)


class RoundVoter(ABC, Generic[T]):
    """One voter (or listener) of one round."""

    view: int
    tally_type: type[T]  # record type of one view

    def __init__(self, notary: StatementSigner, electorate: Electorate) -> None:
        vote_keys = electorate.vote_keys
        self.notary, self.me, self.round, self.trace = notary, notary.me, electorate.round, electorate.trace
        self.vote_keys, self.quorum, self.proposers = vote_keys, electorate.quorum, electorate.proposers
        self.others = tuple(p for p in vote_keys if p != self.me)
        self.tallies: dict[int, T] = {}  # view -> received messages
        self.votes = vote_keys.get(self.me) == notary.signer.vote_key  # False while the session key is not agreed
        self.bodies: dict[Digest, bytes] = {}
        self.sent_for_judgment: set[Digest] = set()  # bodies sent to the round for judgment
        self.approved: set[Digest] = set()
        self.equivocators: set[PeerId] = set()  # signers with a reported equivocation: one pair is proof enough
        self.decided: BodyDecided | None = None
        self.is_over = False  # the round is decided, here or elsewhere: nothing more is sent

    def proposer(self, view: int) -> PeerId:
        """Proposers rotate within an attempt, and each attempt begins with another proposer."""
        return self.proposers[(view + self._attempt(view)) % len(self.proposers)]

    def add_body(self, body: bytes) -> list[Effect]:
        """Add a body that was fetched apart from a proposal. Completes a decision that lacked its body."""
        digest = vertex_id(body)
        self.bodies.setdefault(digest, body)
        if self.decided is not None and self.decided.digest == digest and self.decided.body is None:
            self.decided = replace(self.decided, body=body)
            return [Emit(self.decided)]
        return self._resume_with_body(digest)

    @property
    def missing_bodies(self) -> set[Digest]:
        """Missing bodies: named by a binding certificate or ballot, or by the decision."""
        if self.is_over:
            named = {self.decided.digest} if self.decided is not None else set[Digest]()
        else:
            named = self._binding_digests()
        return named - self.bodies.keys()

    @abstractmethod
    def _binding_digests(self) -> set[Digest]:
        """Digests of the bodies that certificates or ballots bind the local voter to."""

    @abstractmethod
    def _resume_with_body(self, digest: Digest) -> list[Effect]:
        """Continue with steps that waited for this body."""

    def stop(self) -> None:
        """End this agreement: the round's vertex arrived from another peer."""
        self.is_over = True

    # ---- proposals -----------------------------------------------------------------------------------------

    def _is_my_turn(self, view: int) -> bool:
        return not self.is_over and self.votes and view == self.view and self.proposer(view) == self.me

    def _send_proposal(
        self,
        view: int,
        digest: Digest,
        body: bytes,
        timeouts: tuple[SignedStatement, ...],
        high: QuorumCertificate | None,
    ) -> list[Effect]:
        """Sign the local proposal of this view, send it to all voters and approve it."""
        statement = self.notary.sign(Proposal(self.round, view, digest))
        message = ProposalMessage(self.round, self._attempt(view), self.trace, statement, body, timeouts, high)
        self._tally(view).set_proposal(message, digest)
        self.sent_for_judgment.add(digest)
        self.approved.add(digest)
        return [self._broadcast(message)]

    def _broadcast(self, message: Message) -> Broadcast:
        return Broadcast("agreement", message, self.others)

    def _open_proposal(self, sender: PeerId, message: ProposalMessage) -> Proposal | None:
        """The signed proposal, or None if its view is out of reach.

        Raises PeerFault if the signer is not the proposer of the view, or the bytes do not match the digest.
        """
        signed = message.statement
        proposed = self.notary.open(signed, Proposal, self.vote_keys.get(signed.signer))
        view = proposed.view
        if proposed.round != self.round or not self._in_reach(view):
            return None
        if signed.signer != self.proposer(view):
            raise PeerFault(signed.signer, f"proposed out of turn in view {view}", signed.body)
        if vertex_id(message.body) != proposed.digest:
            raise PeerFault(sender, f"body differs from the digest proposed in view {view}", signed.body)
        return proposed

    def _request_judgment(self, view: int, turn: ViewState) -> list[Effect]:
        """Send this proposal to the round for judgment, once per body."""
        assert turn.proposal is not None and turn.digest is not None
        if turn.digest in self.sent_for_judgment:
            return []
        self.sent_for_judgment.add(turn.digest)
        return [self._emit(ProposalReceived(view=view, digest=turn.digest, body=turn.proposal.body))]

    # ---- helpers -------------------------------------------------------------------------------------------

    def _decide(self, certificate: QuorumCertificate) -> list[Effect]:
        self.is_over = True
        self.decided = BodyDecided(
            round=self.round,
            trace=self.trace,
            view=certificate.view,
            digest=certificate.digest,
            body=self.bodies.get(certificate.digest),
            certificate=certificate,
        )
        return [Emit(self.decided)]

    def _tally(self, view: int) -> T:
        if view not in self.tallies:
            self.tallies[view] = self.tally_type()
        return self.tallies[view]

    def _in_reach(self, view: int) -> bool:
        """Whether messages of this view are stored: not of long finished or far future views."""
        ahead = ATTEMPTS_AHEAD * len(self.proposers)
        return max(0, self.view - 1) <= view <= self.view + ahead or view in self.tallies

    def _drop_old_views(self, needed: Iterable[Digest]) -> None:
        """Drop old views and all bodies except live and `needed` ones. A long pause passes thousands of views."""
        for view in [v for v in self.tallies if v < self.view - 1]:
            del self.tallies[view]
        live = {turn.digest for turn in self.tallies.values()}
        live.update(needed)
        self.bodies = {digest: body for digest, body in self.bodies.items() if digest in live}
        self.sent_for_judgment &= self.bodies.keys()
        self.approved &= self.bodies.keys()

    def _vote_message(self, view: int, signed: SignedStatement) -> VoteMessage:
        return VoteMessage(self.round, self._attempt(view), self.trace, signed)

    def _attempt(self, view: int) -> int:
        return view // len(self.proposers)

    def _report_equivocation(self, first: SignedStatement, second: SignedStatement) -> list[Effect]:
        """Report two different statements for one slot. An equal repetition is ignored."""
        if first.body == second.body or first.signer in self.equivocators:
            return []
        self.equivocators.add(first.signer)
        evidence = contradiction(self.notary.run, self.vote_keys[first.signer], first, second)
        return [self._emit(Equivocation(peer=first.signer, evidence=evidence))]

    def _emit(self, fact: Fact) -> Emit:
        return Emit(replace(fact, round=self.round, trace=self.trace))
