"""What every machine behind the door of agreement has: who votes, whose turn it is, what was proposed and decided.

`TwoPhaseAgreement` and `OnePhaseAgreement` add the rules by which they vote; nothing here ever makes a vote or
counts one.
Promises: a proposal is one of this round, by whose turn it is, with the bytes that were signed; of a signer's
contradicting words one pair is reported, once; a body is judged once; a decision that came before its body is
reported again when that arrives; views that are long over leave nothing behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Effect, Emit, Fact, Send
from atoll.protocol.agreement.events import BodyDecided, Equivocation, ProposalReceived
from atoll.wire.codec import vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.evidence import contradiction
from atoll.wire.messages.round import ProposalMessage, VoteMessage
from atoll.wire.messages.statements import Proposal, QuorumCertificate, SignedStatement

ATTEMPTS_AHEAD = 2  # words are remembered for the views of this many attempts ahead: clocks differ by less


@dataclass(frozen=True)
class Electorate:
    """Who decides how one round ends, the same at everybody."""

    round: int
    trace: str
    vote_keys: dict[PeerId, bytes]  # of those who vote
    quorum: int
    proposers: tuple[PeerId, ...]  # the same ones, in turn

    def __post_init__(self) -> None:
        assert 0 < self.quorum <= len(self.vote_keys) == len(self.proposers)


@dataclass
class ViewState:
    """What the proposer of one view said."""

    proposal: ProposalMessage | None = None
    proposed: SignedStatement | None = None
    digest: Digest | None = None  # of the proposed body
    told: bool = False  # where it is my turn: the round knows that I may propose

    def put(self, proposal: ProposalMessage, digest: Digest) -> None:
        self.proposal, self.proposed, self.digest = proposal, proposal.statement, digest


T = TypeVar("T", bound=ViewState)


class RoundVoter(ABC, Generic[T]):
    """One voter (or listener) of one round."""

    view: int
    heard: type[T]  # what is remembered of one view

    def __init__(self, notary: StatementSigner, electorate: Electorate) -> None:
        vote_keys = electorate.vote_keys
        self.notary, self.me, self.round, self.trace = notary, notary.me, electorate.round, electorate.trace
        self.vote_keys, self.quorum, self.proposers = vote_keys, electorate.quorum, electorate.proposers
        self.others = tuple(p for p in vote_keys if p != self.me)
        self.tallies: dict[int, T] = {}  # words heard, by view
        self.votes = vote_keys.get(self.me) == notary.signer.vote_key  # not yet with a session that is not agreed
        self.bodies: dict[Digest, bytes] = {}
        self.asked: set[Digest] = set()  # bodies that the round was asked to judge
        self.approved: set[Digest] = set()
        self.caught: set[PeerId] = set()  # signers whose contradiction was reported: one pair says it all
        self.decided: BodyDecided | None = None
        self.over = False  # decided, here or elsewhere: nothing is said any more

    def proposer(self, view: int) -> PeerId:
        """Everybody in turn within an attempt, and each attempt begins with another one."""
        return self.proposers[(view + self._attempt(view)) % len(self.proposers)]

    def learn_body(self, body: bytes) -> list[Effect]:
        """Bytes that arrived by another way; completes a decision whose certificate came first."""
        digest = vertex_id(body)
        self.bodies.setdefault(digest, body)
        if self.decided is not None and self.decided.digest == digest and self.decided.body is None:
            self.decided = replace(self.decided, body=body)
            return [Emit(self.decided)]
        return self._go_on_with(digest)

    @property
    def lacking(self) -> set[Digest]:
        """Bodies that are named by what would bind me, or by what is decided, and are not here."""
        if self.over:
            named = {self.decided.digest} if self.decided is not None else set[Digest]()
        else:
            named = self._named()
        return named - self.bodies.keys()

    @abstractmethod
    def _named(self) -> set[Digest]:
        """Bodies that would bind me."""

    @abstractmethod
    def _go_on_with(self, digest: Digest) -> list[Effect]:
        """This body is here now, and something may have waited for it."""

    def stop(self) -> None:
        """The round's vertex came from somebody else: there is nothing left to agree on."""
        self.over = True

    # ---- proposals -----------------------------------------------------------------------------------------

    def _is_my_turn(self, view: int) -> bool:
        return not self.over and self.votes and view == self.view and self.proposer(view) == self.me

    def _put_forward(
        self,
        view: int,
        digest: Digest,
        body: bytes,
        timeouts: tuple[SignedStatement, ...],
        high: QuorumCertificate | None,
    ) -> list[Effect]:
        """To everybody, as the one body that I propose in this view, and needing no judgement of mine."""
        statement = self.notary.sign(Proposal(self.round, view, digest))
        message = ProposalMessage(self.round, self._attempt(view), self.trace, statement, body, timeouts, high)
        self._tally(view).put(message, digest)
        self.asked.add(digest)
        self.approved.add(digest)
        return [Send(peer, message) for peer in self.others]

    def _opened(self, sender: PeerId, message: ProposalMessage) -> Proposal | None:
        """What its proposer signed, or None if that is of no view within reach.

        Raises PeerFault unless it is the proposer's turn, and these are the bytes that it named.
        """
        signed = message.statement
        proposed = self.notary.open(signed, Proposal, self.vote_keys.get(signed.signer))
        view = proposed.view
        if proposed.round != self.round or not self._in_reach(view):
            return None
        if signed.signer != self.proposer(view):
            raise PeerFault(signed.signer, f"proposed out of turn in view {view}", signed.body)
        if vertex_id(message.body) != proposed.digest:
            raise PeerFault(sender, f"sent other bytes than were proposed in view {view}", signed.body)
        return proposed

    def _judge(self, view: int, turn: ViewState) -> list[Effect]:
        """Ask the round whether this proposal is right, if it was not asked yet."""
        assert turn.proposal is not None and turn.digest is not None
        if turn.digest in self.asked:
            return []
        self.asked.add(turn.digest)
        return [self._report(ProposalReceived(view=view, digest=turn.digest, body=turn.proposal.body))]

    # ---- small words ---------------------------------------------------------------------------------------

    def _decide(self, certificate: QuorumCertificate) -> list[Effect]:
        self.over = True
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
            self.tallies[view] = self.heard()
        return self.tallies[view]

    def _in_reach(self, view: int) -> bool:
        """Words of long finished views change nothing; those of far future ones are not remembered."""
        ahead = ATTEMPTS_AHEAD * len(self.proposers)
        return max(0, self.view - 1) <= view <= self.view + ahead or view in self.tallies

    def _forget_but(self, needed: Iterable[Digest]) -> None:
        """A long pause passes through thousands of views; what they left behind changes nothing any more."""
        for view in [v for v in self.tallies if v < self.view - 1]:
            del self.tallies[view]
        live = {turn.digest for turn in self.tallies.values()}
        live.update(needed)
        self.bodies = {digest: body for digest, body in self.bodies.items() if digest in live}
        self.asked &= self.bodies.keys()
        self.approved &= self.bodies.keys()

    def _voted(self, view: int, signed: SignedStatement) -> VoteMessage:
        return VoteMessage(self.round, self._attempt(view), self.trace, signed)

    def _attempt(self, view: int) -> int:
        return view // len(self.proposers)

    def _catch(self, first: SignedStatement, second: SignedStatement) -> list[Effect]:
        """Of two words for one slot; the same one said again is nothing."""
        if first.body == second.body or first.signer in self.caught:
            return []
        self.caught.add(first.signer)
        evidence = contradiction(self.notary.run, self.vote_keys[first.signer], first, second)
        return [self._report(Equivocation(peer=first.signer, evidence=evidence))]

    def _report(self, fact: Fact) -> Emit:
        return Emit(replace(fact, round=self.round, trace=self.trace))
