"""Messages of one round: commitments, parts on their way to owners and back, proposals, votes, timeouts."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Message
from atoll.wire.messages.statements import AgreedWeights, QuorumCertificate, SignedStatement


class RoundMessage(Message, frozen=True, tag="RoundMessage"):
    """Every message of a round says which one, and carries the round's trace id."""

    phase: ClassVar[str] = ""
    round: int
    attempt: int
    trace: str

    @property
    def place(self) -> Hashable:
        """A later attempt says the same again."""
        return msgspec.structs.replace(self, attempt=0)


class BroadcastMessage(RoundMessage, frozen=True, tag="Unasked"):
    """Told to all whom it concerns. Whoever lacks it later asks for it, and is answered by something else."""

    @property
    def of_round(self) -> int:
        return self.round


class CommitAnnouncement(RoundMessage, frozen=True, tag="Committed"):
    phase: ClassVar[str] = "commit"
    statement: SignedStatement  # Commit
    asks: bool = False  # I have not heard yours


class CommitRequest(RoundMessage, frozen=True, tag="WantCommit"):
    """What has this peer committed to in this attempt? I do not hear it, and it counts. Answered by Committed."""

    phase: ClassVar[str] = "commit"
    peer: PeerId


class RowContribution(BroadcastMessage, frozen=True, tag="Contribution"):
    """One part of my update for its owner; the encoded bytes are the payload."""

    phase: ClassVar[str] = "share"
    part: int
    owner_index: int  # -1: for a peer that hands it on
    path: tuple[Digest, ...]  # Merkle path from the payload's digest to the committed root
    statement: SignedStatement  # the Commit, for owners that the broadcast did not reach

    @property
    def place(self) -> Hashable:
        """Of a part, whatever the round: who shares in the next one has closed this one."""
        return type(self), self.part


class PartialSum(BroadcastMessage, frozen=True, tag="Handed"):
    """Rows of several peers, combined on the way to the owner; the encoded mean is the payload."""

    phase: ClassVar[str] = "share"
    part: int
    owner_index: int  # -1: for a peer that hands it on
    weight: int  # of all of them
    contributors: tuple[PeerId, ...]
    by: PeerId | UnsetType = UNSET  # who combined them, where another passes on what the owner asked it for

    @property
    def place(self) -> Hashable:
        return type(self), self.part, self.by


class PartDeclined(RoundMessage, frozen=True, tag="Declined"):
    """I cannot combine this part: do not wait for me."""

    phase: ClassVar[str] = "share"
    part: int


class ReachabilityHint(RoundMessage, frozen=True, tag="Heard"):
    """I hear this peer, and what it has to do with this part it does with me: you may not hear it."""

    phase: ClassVar[str] = "share"
    part: int
    peer: PeerId


class PartResult(BroadcastMessage, frozen=True, tag="Answer"):
    """The combined part, once, for everybody; the encoded bytes are the payload.

    Without a payload it is an owner's word alone: a witness's, or one that somebody holds of an owner that died.
    """

    phase: ClassVar[str] = "share"
    statement: SignedStatement  # Answered
    weighing: AgreedWeights | UnsetType = UNSET  # where rows are weighed: the one that the statement names


class RowComparison(RoundMessage, frozen=True, tag="Comparison"):
    """How the rows of a part lie to each other, for all who may have to weigh them."""

    phase: ClassVar[str] = "share"
    statement: SignedStatement  # Compared


class PartStatementsRequest(RoundMessage, frozen=True, tag="WantWords"):
    """What have you signed about this part? Where owners check each other in a large committee."""

    phase: ClassVar[str] = "share"
    part: int


class RowRequest(RoundMessage, frozen=True, tag="WantRow"):
    """Open to me what this peer contributed to this part: I doubt its answer, or lack the row as an owner."""

    phase: ClassVar[str] = "share"
    part: int
    peer: PeerId


class RowResponse(RoundMessage, frozen=True, tag="RowBytes"):
    """The row of whoever signed `statement`, as its author sent it to the owners; the bytes are the payload."""

    phase: ClassVar[str] = "share"
    part: int
    path: tuple[Digest, ...]  # Merkle path from the payload's digest to the committed root
    statement: SignedStatement  # Commit


class PartRequest(RoundMessage, frozen=True, tag="WantPart"):
    """Who has the combined bytes of this digest? Answered by PartBytes, or not at all."""

    phase: ClassVar[str] = "agree"
    digest: Digest


class PartResponse(RoundMessage, frozen=True, tag="PartBytes"):
    phase: ClassVar[str] = "agree"
    digest: Digest


class ResendRequest(RoundMessage, frozen=True, tag="Repeat"):
    """I came late to this round and dropped words of yours: say again what you told me in it."""

    phase: ClassVar[str] = "share"


class ProposalMessage(RoundMessage, frozen=True, tag="Propose"):
    phase: ClassVar[str] = "agree"
    statement: SignedStatement  # Proposed
    body: bytes
    timeouts: tuple[SignedStatement, ...]  # a quorum of Timeouts of the attempt before; empty in attempt 0
    high: QuorumCertificate | None  # the highest certificate among them, which forces the body


class VoteMessage(RoundMessage, frozen=True, tag="Voted"):
    phase: ClassVar[str] = "agree"
    statement: SignedStatement  # Vote
    proof: QuorumCertificate | UnsetType = (
        UNSET  # said again: what my commit vote stands on, for who may not hold it
    )


class TimeoutMessage(RoundMessage, frozen=True, tag="TimedOut"):
    phase: ClassVar[str] = "agree"
    statement: SignedStatement  # Timeout
    high: QuorumCertificate | None  # proof of the claim inside the statement; None where Raft decides


class PreVote(RoundMessage, frozen=True, tag="PreVote"):
    """I would close this view if a quorum would (specs/raft.md). Not signed: it binds nobody."""

    phase: ClassVar[str] = "agree"
    view: int
