"""Events of a peer: joining, membership, rounds, missing states, and evidence against members.

Read by the driver, the dashboard and the simulator's checkers; emitting one changes nothing.
"""

from __future__ import annotations

from typing import Literal

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Fact
from atoll.peer.settings import RunSettings
from atoll.wire.messages.statements import Accusation, Finding, Lapse, OwnerComplaint
from atoll.wire.messages.vertex import Member, Vertex, VertexBody

UNSERVED = "no other member could serve it"  # end of the reason of a state download without a source


class GenesisKnown(Fact, frozen=True, kw_only=True, tag="GenesisKnown"):
    phase = "join"
    settings: RunSettings
    vertex: Vertex


class LocalStateCaughtUp(Fact, frozen=True, kw_only=True, tag="LocalStateCaughtUp"):
    """The local state is the one agreed in this round."""

    phase = "join"
    by: str  # "disk", "blob" or "rounds"
    trained: int  # training rounds up to this state


class StateDownloadBegan(Fact, frozen=True, kw_only=True, tag="StateDownloadBegan"):
    phase = "join"
    why: str


class MembershipChanged(Fact, frozen=True, kw_only=True, tag="MembershipChanged"):
    phase = "membership"
    joined: tuple[PeerId, ...]
    left: tuple[PeerId, ...]
    members: tuple[Member, ...]


class JoinRejected(Fact, frozen=True, kw_only=True, tag="JoinRejected"):
    """A member refused the local join request, or this peer cannot take part itself."""

    phase = "join"
    by: PeerId
    code: str
    what: str
    fix: str
    cause: str = ""
    for_good: bool = False  # asking again is of no use


class RunOver(Fact, frozen=True, kw_only=True, tag="RunOver"):
    phase = "keep"
    rounds: int
    state: Digest


class RoundBegan(Fact, frozen=True, kw_only=True, tag="RoundBegan"):
    phase = "plan"
    members: tuple[PeerId, ...]
    assembling: bool
    topology: str  # empty while assembling
    paused: bool = False  # True: it assembles as well
    why: str  # reason for this topology
    steps: int = 0  # steps assigned to this peer, at most
    batch: int = 0  # samples per step; 0: the recipe's


class LocalTrainingEnded(Fact, frozen=True, kw_only=True, tag="LocalTrainingEnded"):
    phase = "train"
    steps: int
    samples: int
    loss: float
    step_s: Seconds


class LocalContributionSkipped(Fact, frozen=True, kw_only=True, tag="LocalContributionSkipped"):
    """The local peer contributes nothing to this round, for this reason."""

    phase = "train"
    why: str


class TrainedWithoutQuorum(Fact, frozen=True, kw_only=True, tag="TrainedWithoutQuorum"):
    """Too few voters are reachable to close this round, so the local peer trained alone; see specs/apart.md."""

    phase = "apart"
    steps: int  # taken since the last such event; 0: the bound is reached
    loss: float
    heard: int  # reachable voters, the local peer included
    quorum: int


class UpdateSharingBegan(Fact, frozen=True, kw_only=True, tag="UpdateSharingBegan"):
    phase = "share"
    attempt: int
    committed: tuple[PeerId, ...]
    absent: tuple[PeerId, ...]


class RoundAttemptFailed(Fact, frozen=True, kw_only=True, tag="RoundAttemptFailed"):
    phase = "agree"
    attempt: int


class ProposalRejected(Fact, frozen=True, kw_only=True, tag="ProposalRejected"):
    """The local peer rejected a proposal and did not vote for it."""

    phase = "agree"
    proposer: PeerId
    why: str


class IncompatibleUpdateReceived(Fact, frozen=True, kw_only=True, tag="IncompatibleUpdateReceived"):
    """This peer's update has another length than the local one, or other options: they cannot be averaged."""

    phase = "commit"
    peer: PeerId
    values: int
    asked: str
    my_values: int
    my_asked: str


class ProtocolFault(Fact, frozen=True, kw_only=True, tag="ProtocolFault"):
    """A peer broke the protocol; its message was dropped."""

    phase = "trust"
    peer: PeerId
    what: str


class MemberAccused(Fact, frozen=True, kw_only=True, tag="MemberAccused"):
    """Evidence against this peer for the members: a proven lie, or one failure too many."""

    phase = "trust"
    peer: PeerId
    statement: Accusation | OwnerComplaint


class MalformedRowDetected(Fact, frozen=True, kw_only=True, tag="MalformedRowDetected"):
    """This peer committed to a row of that round that did not decode here."""

    phase = "trust"
    peer: PeerId
    of: int  # round
    why: str


class PartOwnerFaultObserved(Fact, frozen=True, kw_only=True, tag="PartOwnerFaultObserved"):
    """This owner failed the round as observed here, which proves nothing."""

    phase = "trust"
    peer: PeerId
    why: Lapse


class TrainerDrawnForAudit(Fact, frozen=True, kw_only=True, tag="TrainerDrawnForAudit"):
    """The vertex of this round drew a segment of this peer's; `auditors` in the order of their turns."""

    phase = "audit"
    peer: PeerId
    segment: int
    auditors: tuple[PeerId, ...]


class LocalAuditCompleted(Fact, frozen=True, kw_only=True, tag="LocalAuditCompleted"):
    """Finding of the local peer after a replay or a sum check, also after a failed try."""

    phase = "audit"
    peer: PeerId
    of: int  # round
    segment: int
    finding: Finding
    why: str
    opening: int | None = None  # number of the opening, if it is one
    exhibit: Digest | None = None  # judged blob


class AuditFindingRecorded(Fact, frozen=True, kw_only=True, tag="AuditFindingRecorded"):
    """A vertex holds an auditor's finding."""

    phase = "audit"
    peer: PeerId
    of: int  # round
    auditor: PeerId
    finding: Finding


class ValidationLossReported(Fact, frozen=True, kw_only=True, tag="ValidationLossReported"):
    """The local peer was drawn to evaluate the state of this round and reports these losses."""

    phase = "validate"
    of: int  # round
    state: Digest
    losses: tuple[int, ...]  # millionths of a nat
    right: tuple[int, ...] = ()  # millionths of all predictions; empty: not counted


class StateValidationDecided(Fact, frozen=True, kw_only=True, tag="StateValidationDecided"):
    """Vertices hold enough reports about the state of this round."""

    phase = "validate"
    of: int  # round
    opinion: Literal["good", "bad"]
    values: tuple[int, ...]  # millionths of a nat, one per set of data
    bounds: tuple[int, ...] | None  # above it a value is bad; None: nothing to compare with
    accuracy: tuple[int, ...] | None = None  # millionths of all predictions; None: too few validators counted them


class BadStateRolledBack(Fact, frozen=True, kw_only=True, tag="BadStateRolledBack"):
    """Validators found the state bad, and this round's vertex rolled it back."""

    phase = "validate"
    back_to: int  # round
    refused: tuple[int, ...]  # training rounds in between
    contributors: tuple[PeerId, ...]  # contributors to any of them, without a verdict on one of these


class ReviewersDrawn(Fact, frozen=True, kw_only=True, tag="ReviewersDrawn"):
    """The vertex of this round drew updates for a check, and the members that review them."""

    phase = "review"
    check: str
    of: int  # round of the updates
    peers: tuple[PeerId, ...]  # their authors; with redundant training guest and host
    reviewers: tuple[PeerId, ...]


class ReviewReported(Fact, frozen=True, kw_only=True, tag="ReviewReported"):
    """The local peer reviewed another's update and reports these numbers; `why`: reason if nothing was shown."""

    phase = "review"
    check: str
    of: int  # round
    peer: PeerId  # the first author
    numbers: tuple[int, ...]  # the check says what they mean
    why: str


class LocalReviewFailed(Fact, frozen=True, kw_only=True, tag="LocalReviewFailed"):
    """The local trainer failed: an own update is not shown, or another's is not reviewed here."""

    phase = "review"
    check: str
    of: int  # round
    peer: PeerId  # the first author, or the local peer if it cannot show its own
    why: str


class ReviewDecided(Fact, frozen=True, kw_only=True, tag="ReviewDecided"):
    """Vertices hold enough reports about these updates for a verdict."""

    phase = "review"
    check: str
    of: int  # round
    peers: tuple[PeerId, ...]  # the authors
    opinion: str  # one word of the check's own
    against: tuple[PeerId, ...]  # authors that the verdict is against
    hid: tuple[PeerId, ...]  # authors that did not show their update
    numbers: tuple[int, ...]  # the agreed numbers behind it, if the check has any


class SumCheckFindingRecorded(Fact, frozen=True, kw_only=True, tag="SumCheckFindingRecorded"):
    """A vertex holds a checker's finding about opened blocks of a result, or about blocks not opened."""

    phase = "trust"
    peer: PeerId  # the owner
    of: int  # round
    part: int
    checker: PeerId
    finding: Finding


class AgreedStateMissing(Fact, frozen=True, kw_only=True, tag="AgreedStateMissing"):
    """The round is decided but its state cannot be computed here and must be fetched.

    `why` reports a divergence.
    """

    phase = "keep"
    vertex: Vertex
    why: str


class RollbackStateUnavailable(Fact, frozen=True, kw_only=True, tag="RollbackStateUnavailable"):
    """A body rolls back to an earlier state that is not stored here: no vote for it until it is."""

    phase = "agree"
    state: Digest


class StoredVertexLost(Fact, frozen=True, kw_only=True, tag="StoredVertexLost"):
    """This disk changed or lost the vertex of round `lacks`; the peer waits for it."""

    phase = "join"
    lacks: int


class HistoryVertexRecovered(Fact, frozen=True, kw_only=True, tag="HistoryVertexRecovered"):
    """A member sent the vertex of round `lacked`, which the next vertex names."""

    phase = "join"
    lacked: int
    by: PeerId


class ForkBranchDetected(Fact, frozen=True, kw_only=True, tag="ForkBranchDetected"):
    """A fork of the run: this other vertex closed the same round in this epoch."""

    phase = "trust"
    epoch: int
    vertex: Digest
    members: tuple[PeerId, ...]  # its voters
    recovered: bool  # True: signed by the recovery identity to begin the epoch; False: certified by a quorum


class BranchPollResult(Fact, frozen=True, kw_only=True, tag="BranchPollResult"):
    """Of two branches that part at this round most polled members prefer this one. It decides nothing."""

    phase = "trust"
    vertex: Digest  # first vertex of the branch
    ours: bool
    named: int  # members that named it in the last query
    asked: int  # members polled in the last query
    queries: int  # so far
    settled: bool  # enough queries in a row named the same


class ErasurePieceStored(Fact, frozen=True, kw_only=True, tag="ErasurePieceStored"):
    """A piece of the state agreed in round `of` is on the local disk."""

    phase = "keep"
    of: int
    index: int
    size_bytes: int
    repaired: bool  # made from others' pieces, because its holder is gone or lost it


class ArchivedStateRebuilt(Fact, frozen=True, kw_only=True, tag="ArchivedStateRebuilt"):
    """An earlier state is stored again, whole and bit for bit, from the pieces of these holders."""

    phase = "keep"
    of: int
    state: Digest
    sources: tuple[PeerId, ...]


class ArchivedStateRebuildFailed(Fact, frozen=True, kw_only=True, tag="ArchivedStateRebuildFailed"):
    """An earlier state, or a piece of one, could not be made now."""

    phase = "keep"
    of: int
    state: Digest
    why: str


class AttributionRowsGathered(Fact, frozen=True, kw_only=True, tag="AttributionRowsGathered"):
    """All available rows of a round under attribution are stored here."""

    phase = "keep"
    of: int
    came: int  # rows received from others
    gone: tuple[tuple[int, PeerId], ...]  # part and author of rows that no peer sent


class RoundClosed(Fact, frozen=True, kw_only=True, tag="RoundClosed"):
    """Agreed, durable, merged: the next round may begin."""

    phase = "keep"
    vertex: Vertex
    body: VertexBody
    id: Digest
    counted: tuple[PeerId, ...]  # in at least one part
    partly: tuple[PeerId, ...]  # members of `counted` missing in some part
    missing: tuple[PeerId, ...]  # voting members in no part
    parts_missing: int
    topology: str = ""  # topology of the reduce
    alike: tuple[
        tuple[PeerId, ...], ...
    ] = ()  # groups of members with bit-for-bit equal updates: policy/duplicate_updates.py
    outliers: tuple[
        PeerId, ...
    ] = ()  # authors of rows far from the others, if the local peer weighed rows by distance
