"""What a peer tells upward: how it came to take part, how rounds began and closed, what it lacked, whom it caught.

Facts are read by the driver, the dashboard and the simulator's checkers; saying them changes nothing.
"""

from __future__ import annotations

from typing import Literal

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Fact
from atoll.peer.settings import RunSettings
from atoll.wire.messages.statements import Accusation, Finding, Lapse, OwnerComplaint
from atoll.wire.messages.vertex import Member, Vertex, VertexBody


class GenesisKnown(Fact, frozen=True, kw_only=True, tag="GenesisKnown"):
    phase = "join"
    settings: RunSettings
    vertex: Vertex


class CaughtUp(Fact, frozen=True, kw_only=True, tag="CaughtUp"):
    """My state is the one agreed in this round."""

    phase = "join"
    by: str  # "disk", "blob" or "rounds"


class FetchBegan(Fact, frozen=True, kw_only=True, tag="FetchBegan"):
    phase = "join"
    why: str


class MembershipChanged(Fact, frozen=True, kw_only=True, tag="MembershipChanged"):
    phase = "membership"
    joined: tuple[PeerId, ...]
    left: tuple[PeerId, ...]
    members: tuple[Member, ...]


class JoinRejected(Fact, frozen=True, kw_only=True, tag="Refused"):
    """A member turned my join down, or I cannot take part myself."""

    phase = "join"
    by: PeerId
    code: str
    what: str
    fix: str
    for_good: bool = False  # asking again is no use


class RunOver(Fact, frozen=True, kw_only=True, tag="RunOver"):
    phase = "keep"
    rounds: int
    state: Digest


class RoundBegan(Fact, frozen=True, kw_only=True, tag="RoundBegan"):
    phase = "plan"
    members: tuple[PeerId, ...]
    assembling: bool
    topology: str  # empty while assembling
    paused: bool = False  # then it assembles, too
    why: str  # this one
    steps: int = 0  # that it asks of this peer, at most
    batch: int = 0  # samples of each; 0: as the recipe has it


class TrainEnded(Fact, frozen=True, kw_only=True, tag="TrainEnded"):
    phase = "train"
    steps: int
    samples: int
    loss: float
    step_s: Seconds


class RoundSkipped(Fact, frozen=True, kw_only=True, tag="Passed"):
    """I contribute nothing to this round, and say why."""

    phase = "train"
    why: str


class TrainedApart(Fact, frozen=True, kw_only=True, tag="TrainedApart"):
    """I hear too few voters to close this round, and took so many steps by myself; see specs/apart.md."""

    phase = "apart"
    steps: int  # just now; 0: as many as I may
    loss: float
    heard: int  # voters, myself among them
    quorum: int


class ShareBegan(Fact, frozen=True, kw_only=True, tag="ShareBegan"):
    phase = "share"
    attempt: int
    committed: tuple[PeerId, ...]
    absent: tuple[PeerId, ...]


class AttemptFailed(Fact, frozen=True, kw_only=True, tag="AttemptFailed"):
    phase = "agree"
    attempt: int


class ProposalRejected(Fact, frozen=True, kw_only=True, tag="Disagreed"):
    """I found a proposal wrong and did not vote for it."""

    phase = "agree"
    proposer: PeerId
    why: str


class IncompatibleCall(Fact, frozen=True, kw_only=True, tag="OtherCall"):
    """Its update has another length than mine, or its caller asked for something else: they cannot be averaged."""

    phase = "commit"
    peer: PeerId
    values: int
    asked: str
    my_values: int
    my_asked: str


class ProtocolFault(Fact, frozen=True, kw_only=True, tag="Fault"):
    """A peer broke the protocol; its message was dropped."""

    phase = "trust"
    peer: PeerId
    what: str


class MemberAccused(Fact, frozen=True, kw_only=True, tag="Accused"):
    """I have something against this peer that the members should know: a proven lie, or one failure too many."""

    phase = "trust"
    peer: PeerId
    statement: Accusation | OwnerComplaint


class MalformedRow(Fact, frozen=True, kw_only=True, tag="Unread"):
    """This peer committed to a row of that round that cannot be read, as I saw myself."""

    phase = "trust"
    peer: PeerId
    of: int  # round
    why: str


class OwnerFault(Fact, frozen=True, kw_only=True, tag="Lapsed"):
    """This owner failed the round as far as I could see, in a way that proves nothing."""

    phase = "trust"
    peer: PeerId
    why: Lapse


class AuditDrawn(Fact, frozen=True, kw_only=True, tag="AuditDrawn"):
    """The vertex of this round drew a segment of this peer's; `auditors` in the order of their turns."""

    phase = "audit"
    peer: PeerId
    segment: int
    auditors: tuple[PeerId, ...]


class AuditEnded(Fact, frozen=True, kw_only=True, tag="AuditEnded"):
    """I took the segment again, or added up what was opened, or tried to: this is what I found."""

    phase = "audit"
    peer: PeerId
    of: int  # round
    segment: int
    finding: Finding
    why: str
    opening: int | None = None  # its number, where it is one
    exhibit: Digest | None = None  # the blob that was judged


class AuditVerdict(Fact, frozen=True, kw_only=True, tag="Verdict"):
    """A vertex holds what an auditor found."""

    phase = "audit"
    peer: PeerId
    of: int  # round
    auditor: PeerId
    finding: Finding


class StateEvaluated(Fact, frozen=True, kw_only=True, tag="Looked"):
    """I was drawn to look at the state of this round: these losses are what I tell the members."""

    phase = "validate"
    of: int  # round
    state: Digest
    losses: tuple[int, ...]  # millionths of a nat
    right: tuple[int, ...] = ()  # millionths of all answers; none: not counted


class StateJudged(Fact, frozen=True, kw_only=True, tag="StateJudged"):
    """Vertices hold enough words about the state of this round."""

    phase = "validate"
    of: int  # round
    opinion: Literal["good", "bad"]
    values: tuple[int, ...]  # millionths of a nat, one per set of data
    bounds: tuple[int, ...] | None  # above which it would be bad; None: nothing to compare with
    accuracy: tuple[int, ...] | None = None  # millionths of all answers; None: too few validators counted them


class AutoRolledBack(Fact, frozen=True, kw_only=True, tag="WentBack"):
    """Validators found the state bad, and this round's vertex left it."""

    phase = "validate"
    back_to: int  # round
    refused: tuple[int, ...]  # rounds that trained in between
    contributors: tuple[PeerId, ...]  # to any of them: no verdict on any of these


class ScoreDrawn(Fact, frozen=True, kw_only=True, tag="ScoreDrawn"):
    """The vertex of this round drew this peer's update, to be scored by these."""

    phase = "score"
    peer: PeerId
    scorers: tuple[PeerId, ...]


class ScoreTaken(Fact, frozen=True, kw_only=True, tag="ScoreTaken"):
    """I took a step along the update, or was shown none: this is what I tell the members."""

    phase = "score"
    peer: PeerId
    of: int  # round
    falls: tuple[int, ...]  # millionths of a nat: on own samples, on others, standard error; empty: nothing shown
    why: str


class ScoreMissed(Fact, frozen=True, kw_only=True, tag="ScoreMissed"):
    """My own trainer failed at it: an update of mine is not shown, or another's is not scored by me."""

    phase = "score"
    peer: PeerId  # whose update
    of: int  # round
    why: str


class UpdateScored(Fact, frozen=True, kw_only=True, tag="UpdateScored"):
    """Vertices hold enough words about this update."""

    phase = "score"
    peer: PeerId
    of: int  # round
    opinion: Literal["taught", "hollow", "unclear"]
    falls: tuple[int, ...]  # medians


class TwinsFound(Fact, frozen=True, kw_only=True, tag="TwinsFound"):
    """This vertex shows that two took the same samples, and their updates differ: these compare them."""

    phase = "twins"
    peer: PeerId  # the guest
    host: PeerId
    of: int  # round
    referees: tuple[PeerId, ...]


class TwinsCompared(Fact, frozen=True, kw_only=True, tag="TwinsCompared"):
    """I held twins' updates against each other, or was not shown both: this is what I tell the members."""

    phase = "twins"
    peer: PeerId  # the guest
    of: int  # round
    apart: tuple[int, int]  # millionths of an update: the guest's, its host's
    why: str


class TwinsMissed(Fact, frozen=True, kw_only=True, tag="TwinsMissed"):
    """My own trainer failed at it: an update of mine is not shown, or twins are not compared by me."""

    phase = "twins"
    peer: PeerId  # the guest, or I
    of: int  # round
    why: str


class TwinsJudged(Fact, frozen=True, kw_only=True, tag="TwinsJudged"):
    """Vertices hold what became of a pair of twins."""

    phase = "twins"
    peer: PeerId  # the guest
    host: PeerId
    of: int  # round
    opinion: Literal["alike", "strayed", "hidden", "unclear"]
    strayed: tuple[PeerId, ...]  # whose update is none of these samples
    hid: tuple[PeerId, ...]  # who did not show its own


class OpeningVerdict(Fact, frozen=True, kw_only=True, tag="OpeningVerdict"):
    """A vertex holds what a checker found in blocks of an answer that were opened to it, or were not."""

    phase = "trust"
    peer: PeerId  # the owner
    of: int  # round
    part: int
    checker: PeerId
    finding: Finding


class StateMissing(Fact, frozen=True, kw_only=True, tag="StateMissing"):
    """The round is decided, but I cannot compute its state: fetch it whole. `why` says whether I diverged."""

    phase = "keep"
    vertex: Vertex
    why: str


class StateUnavailable(Fact, frozen=True, kw_only=True, tag="StateLacked"):
    """A body goes back to an earlier state that is not here: I cannot vote for it until it is."""

    phase = "agree"
    state: Digest


class HistoryLacks(Fact, frozen=True, kw_only=True, tag="HistoryLacks"):
    """This disk changed or lost the vertex of round `lacks`: I wait for it before I go on."""

    phase = "join"
    lacks: int


class HistoryMended(Fact, frozen=True, kw_only=True, tag="HistoryMended"):
    """A member gave the vertex of round `lacked`, the very one that the next vertex names."""

    phase = "join"
    lacked: int
    by: PeerId


class BranchSeen(Fact, frozen=True, kw_only=True, tag="BranchSeen"):
    """The run goes on elsewhere, too: this vertex closed the round as well as ours, in this epoch."""

    phase = "trust"
    epoch: int
    vertex: Digest
    members: tuple[PeerId, ...]  # voting there
    recovered: bool  # it begins the epoch, by the recovery identity; else a quorum voted for it


class BranchPreferred(Fact, frozen=True, kw_only=True, tag="BranchPreferred"):
    """Of two branches that part at this round most of those who were asked prefer this one. It decides nothing."""

    phase = "trust"
    vertex: Digest  # with which it begins
    ours: bool
    named: int  # it, in the last query
    asked: int  # in the last query
    queries: int  # so far
    settled: bool  # enough queries in a row named the same


class PieceKept(Fact, frozen=True, kw_only=True, tag="PieceKept"):
    """A piece of the state agreed in round `of` lies on my disk."""

    phase = "keep"
    of: int
    index: int
    size_bytes: int
    repaired: bool  # made of others' pieces, because its holder is gone or lost it


class StateRebuilt(Fact, frozen=True, kw_only=True, tag="StateRebuilt"):
    """An earlier state is here again, whole, bit for bit, out of the pieces of these holders."""

    phase = "keep"
    of: int
    state: Digest
    sources: tuple[PeerId, ...]


class StateLost(Fact, frozen=True, kw_only=True, tag="StateLost"):
    """An earlier state, or a piece of one, could not be made just now."""

    phase = "keep"
    of: int
    state: Digest
    why: str


class RowsGathered(Fact, frozen=True, kw_only=True, tag="RowsGathered"):
    """Whoever asks who damaged a round has the rows of it that can be had."""

    phase = "keep"
    of: int
    came: int  # from others
    gone: tuple[tuple[int, PeerId], ...]  # part and author of those that nobody showed


class RoundClosed(Fact, frozen=True, kw_only=True, tag="RoundClosed"):
    """Agreed, durable, merged: the next round may begin."""

    phase = "keep"
    vertex: Vertex
    body: VertexBody
    id: Digest
    counted: tuple[PeerId, ...]  # in at least one part
    partly: tuple[PeerId, ...]  # of those, the ones missing from some part
    missing: tuple[PeerId, ...]  # voting members in no part
    parts_missing: int
    topology: str = ""  # by which its updates were reduced
    alike: tuple[
        tuple[PeerId, ...], ...
    ] = ()  # whose updates are bit for bit the same: policy/duplicate_updates.py
