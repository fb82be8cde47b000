"""Round messages: commitments, rows for owners, part results, proposals, votes, timeouts."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec
from msgspec import UNSET, UnsetType

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Message
from atoll.wire.messages.statements import AgreedWeights, QuorumCertificate, SignedStatement


class RoundMessage(Message, frozen=True, tag="RoundMessage"):
    """Base of all messages of a round, with the round's number and trace id."""

    round: int
    attempt: int
    trace: str

    @property
    def replaces_key(self) -> Hashable:
        """Key of the message, equal in later attempts."""
        return msgspec.structs.replace(self, attempt=0)


class BroadcastMessageBase(RoundMessage, frozen=True, tag="BroadcastMessageBase"):
    """Base of messages that are broadcast without a request. A peer that lacks one sends a separate request."""

    @property
    def expires_with_round(self) -> int:
        return self.round


class UpdateCommitmentMessage(RoundMessage, frozen=True, tag="UpdateCommitmentMessage"):
    """A member's commitment to its update."""

    statement: SignedStatement  # Commitment
    asks: bool = False  # whether the sender lacks the receiver's commitment


class CommitmentRequest(RoundMessage, frozen=True, tag="CommitmentRequest"):
    """Request for a silent peer's commitment in this attempt. Answered by UpdateCommitmentMessage."""

    peer: PeerId


class RowContribution(BroadcastMessageBase, frozen=True, tag="RowContribution"):
    """The sender's row for a part's owner. Its encoded bytes are the payload."""

    part: int
    owner_index: int  # -1: for a forwarding peer
    path: tuple[Digest, ...]  # Merkle path from the payload's digest to the committed root
    statement: SignedStatement  # Commitment, for owners that did not receive its broadcast

    @property
    def replaces_key(self) -> Hashable:
        """Key of the part in any round: a sender of the next round's row has closed this round."""
        return type(self), self.part


class PartialSum(BroadcastMessageBase, frozen=True, tag="PartialSum"):
    """Rows of several peers, combined on the way to the owner. The encoded mean is the payload."""

    part: int
    owner_index: int  # -1: for a forwarding peer
    weight: int  # total weight of the rows
    contributors: tuple[PeerId, ...]
    by: PeerId | UnsetType = UNSET  # peer that combined the rows, if another peer forwards them to the owner

    @property
    def replaces_key(self) -> Hashable:
        return type(self), self.part, self.by


class PartReductionDeclined(RoundMessage, frozen=True, tag="PartReductionDeclined"):
    """Report of an owner that cannot combine this part."""

    part: int


class RowReroutedHint(RoundMessage, frozen=True, tag="RowReroutedHint"):
    """Hint that the sender reaches `peer` and exchanges this part with it; the receiver may not reach it."""

    part: int
    peer: PeerId


class PartResult(BroadcastMessageBase, frozen=True, tag="PartResult"):
    """The result of a part, for all members. The encoded bytes are the payload.

    Without a payload it carries only the owner's statement: from a witness, or from a holder after the owner died.
    """

    statement: SignedStatement  # OwnerResult
    weighing: AgreedWeights | UnsetType = UNSET  # weights that the statement names, if rows are weighted


class PartRowProducts(RoundMessage, frozen=True, tag="PartRowProducts"):
    """Inner products of a part's rows, for all owners that may compute weights."""

    statement: SignedStatement  # RowInnerProducts


class PartStatementsRequest(RoundMessage, frozen=True, tag="PartStatementsRequest"):
    """Request for the receiver's signed statements about this part, in large committees with cross-checks."""

    part: int


class RowRequest(RoundMessage, frozen=True, tag="RowRequest"):
    """Request for a peer's row of this part: the sender disputes a result, or is an owner that lacks the row."""

    part: int
    peer: PeerId


class RowResponse(RoundMessage, frozen=True, tag="RowResponse"):
    """The row of the signer of `statement`, as sent to the owners. Its bytes are the payload."""

    part: int
    path: tuple[Digest, ...]  # Merkle path from the payload's digest to the committed root
    statement: SignedStatement  # Commitment


class PartRequest(RoundMessage, frozen=True, tag="PartRequest"):
    """Request for the combined bytes of this digest. Answered by PartResponse, or not at all."""

    digest: Digest


class PartResponse(RoundMessage, frozen=True, tag="PartResponse"):
    """Combined bytes of this digest, as the payload."""

    digest: Digest


class ResendRequest(RoundMessage, frozen=True, tag="ResendRequest"):
    """Request of a late peer that dropped messages of this round: the receiver sends them again."""


class ProposalMessage(RoundMessage, frozen=True, tag="ProposalMessage"):
    """A proposed vertex body with the view-change proof that permits it."""

    statement: SignedStatement  # Proposal
    body: bytes
    timeouts: tuple[SignedStatement, ...]  # a quorum of ViewTimeouts of the view before; empty in view 0
    high: QuorumCertificate | None  # the highest certificate among the timeouts, which binds the body


class VoteMessage(RoundMessage, frozen=True, tag="VoteMessage"):
    """A vote. `proof`: the certificate under a repeated commit vote, for receivers that may lack it."""

    statement: SignedStatement  # Vote
    proof: QuorumCertificate | UnsetType = UNSET


class TimeoutMessage(RoundMessage, frozen=True, tag="TimeoutMessage"):
    """A voter's timeout or, with Raft, its ballot."""

    statement: SignedStatement  # ViewTimeout
    high: QuorumCertificate | None  # proof of the claim inside the statement; None with Raft


class ViewChangePreVote(RoundMessage, frozen=True, tag="ViewChangePreVote"):
    """The sender would close this view if a quorum would (specs/raft.md). Not signed: it binds no voter."""

    view: int
