"""The slow work of a peer: what a round asks of the trainer and of the tensors, and what comes back.

Carried out off the loop by `runtime/worker/training_worker.py` on real tensors and by `simulation/worker.py` on
multisets of names. Each
is answered exactly once. Work that changes durable state is durable when its answer arrives.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Payload
from atoll.protocol.allreduce.tasks import TaskRow
from atoll.wire.messages.statements import Finding, LateShare, OwnerResult, SignedStatement
from atoll.wire.weights import RowWeights


class TrainRound(msgspec.Struct, frozen=True):
    """Take up to `steps` inner steps on this slice of the data, for at most `seconds_max` -> Trained."""

    round: int
    steps: int
    seconds_max: Seconds
    shard: int
    shards: int
    batch: int = 0  # samples of a step; 0: as the recipe has it, here and below
    limit_s: Seconds | None = None  # of training, from when the trainer runs; None: none


class HandOver(msgspec.Struct, frozen=True):
    """Enough others have their updates: end the training of this round at its next step, with what it has -> None.

    Its `Train` is answered as ever, soon. Harmless if it was, or has not begun.
    """

    round: int


class TrainApart(msgspec.Struct, frozen=True):
    """Go on from the live parameters by myself: no quorum is heard -> Trained, of these steps alone.

    At most `steps`, and not beyond `steps_max` of all that no vertex holds; 0 steps: the bound is reached.
    """

    round: int  # that cannot be closed
    steps: int
    steps_max: int
    seconds_max: Seconds
    shard: int
    shards: int
    merge: bool  # they are kept to be sent when I am back; else they are dropped then


class TrainingResult(msgspec.Struct, frozen=True):
    steps: int  # since the last update that was counted: spans failed rounds
    samples: int
    loss: float  # mean over those steps
    step_s: Seconds
    values: int = 0  # of the update, where genesis does not say it
    asked: str = ""  # by the caller, otherwise than genesis says: where such an update is given


class EncodeUpdate(msgspec.Struct, frozen=True):
    """Pseudo-gradient of the live parameters against the anchor, with error feedback -> Encoded."""

    round: int
    shares: tuple[int, ...]  # relative sizes of the parts that the update is cut into
    late: bool = False  # late work, if there is any, may ride on it: the row weighs something

    @property
    def parts(self) -> int:
        return len(self.shares)


class UpdateEncoded(msgspec.Struct, frozen=True):
    parts: tuple[Payload, ...]
    claim: Digest | None = None  # of how I trained for it, where rounds are audited
    late: LateShare | None = None  # that rides on it


class AdvanceState(msgspec.Struct, frozen=True):
    """What the shared state would become with these combined parts; written durably -> Advanced."""

    round: int
    before: Digest  # state blob to start from: the head's
    parts: tuple[Payload | None, ...]
    steps: int  # inner steps of one worker in this round
    samples: int  # that all contributors learned from
    shards: int  # workers that the data was handed out to
    shares: tuple[int, ...] = ()  # relative sizes of the parts
    batch: int = 0


class StateAdvanced(msgspec.Struct, frozen=True):
    state: Digest


class UpdateSettlement(msgspec.Struct, frozen=True):
    """How a vertex counts my update of its round, also where a life before sent it."""

    before: Digest  # the vertex that it follows
    root: Digest | None = None  # of the update's parts; None: nothing of mine is in it
    parts: tuple[bool, ...] = ()
    claim: Digest | None = None


class AdoptState(msgspec.Struct, frozen=True):
    """The vertex is final: make `state` the head, settle error feedback, merge the live parameters -> None.

    `counted`: per part, whether my own encoded message is in it; None if I encoded nothing this round, so that
    the live parameters keep their own progress on top of the new anchor.
    """

    round: int
    vertex: Digest
    state: Digest
    counted: tuple[bool, ...] | None
    claim: Digest | None = None  # of mine, as the vertex holds it: what my next round must begin with
    afresh: bool = False  # the run went back: live parameters, feedback and moments are of another past, drop them
    late: bool = False  # the vertex holds my late work: also what I said of it in a life before
    led: tuple[Digest, ...] = ()  # the answers in it that are mine, as an owner
    mine: UpdateSettlement | None = None  # None: what it counts, if anything, is this life's


class RollbackState(msgspec.Struct, frozen=True):
    """What the shared state becomes where the run goes back: an earlier one, at the place in the data reached now.

    Written durably -> Advanced; fails if the earlier state is not on this disk.
    """

    round: int
    before: Digest  # the head's state: it knows how much of the data was handed out
    back_to: Digest
    steps: int  # inner steps of one worker in this round
    shards: int  # workers that the data was handed out to
    batch: int = 0


class FindState(msgspec.Struct, frozen=True):
    """Is this earlier state here, byte for byte? From now on it is kept, also if it comes later -> bool."""

    state: Digest


class RoundSettlement(msgspec.Struct, frozen=True):
    """How the round that I left open counted me after all; what nobody knows any more is taken for counted."""

    counted: tuple[bool, ...] | None  # per part; None if I encoded nothing
    late: bool  # my late work is in it, or may be
    afresh: bool = False  # the run went back since: whatever I owe is of another past, drop it


class RestoreState(msgspec.Struct, frozen=True):
    """Load this agreed state from disk as the head, with my private state if it fits -> Restored, or None.

    `left`: the round in which I was until now, where what it owes is still to be told.
    `mine`: what this vertex and the one before it count of mine, the newest first; it ends where the run went back.
    """

    round: int
    vertex: Digest
    state: Digest
    left: RoundSettlement | None = None
    mine: tuple[UpdateSettlement, ...] = ()


class StateRestored(msgspec.Struct, frozen=True):
    """The agreed state is the head."""

    size_bytes: int = 0  # that fetching one like it takes; 0: rounds are followed for more than their state


class ReadVertices(msgspec.Struct, frozen=True):
    """Consecutive vertices from round `first`, as they were kept -> tuple[bytes, ...], as many as fit."""

    first: int
    bytes_max: int


class CutState(msgspec.Struct, frozen=True):
    """Name all n pieces of this state and write piece `index` durably -> Names; None if the state is not here."""

    state: Digest
    k: int
    n: int
    index: int


class RebuildState(msgspec.Struct, frozen=True):
    """Make a state, or piece `index` of it, from k pieces that are here, durably -> bool: it is `goal`."""

    goal: Digest
    size_bytes: int  # of the state
    k: int
    n: int
    pieces: tuple[tuple[int, Digest], ...]  # their numbers and names
    index: int | None = None


class HoldPieces(msgspec.Struct, frozen=True):
    """Keep these pieces, and of the older states these whole and no others, the newest first -> the pieces that are
    not here."""

    pieces: tuple[Digest, ...]
    whole: tuple[Digest, ...]


class PinBlobs(msgspec.Struct, frozen=True):
    """These blobs are needed: keep them on disk, and no longer those named before for the same reason -> None."""

    blobs: tuple[Digest, ...]
    why: Literal["audits", "validation", "scores", "twins", "verdicts"] = "audits"
    """Of verdicts the newest first, and only as many as there is room for."""


class ValidateState(msgspec.Struct, frozen=True):
    """Measure the loss of this agreed state on all data that is held out, while my trainer rests -> Losses."""

    round: int
    state: Digest


class ValidationLosses(msgspec.Struct, frozen=True):
    losses: tuple[float, ...]  # nats, mean, one per set of data; may be infinite or not a number
    right: tuple[float, ...] = ()  # share of right answers, one per set; none: they were not counted


class ShowUpdate(msgspec.Struct, frozen=True):
    """Lay out, as a blob, the parts of my update of this round as I sent them -> Exhibited."""

    round: int


class ScoreUpdate(msgspec.Struct, frozen=True):
    """Take a step along another's update, out of this blob, and look at the loss, while my trainer rests -> Fell.

    Everything but the blob is agreed on: it comes from vertices and from the plan of the round.
    """

    blob: Digest
    round: int
    peer: PeerId
    before: Digest  # the state that the round began with
    shard: int
    shards: int
    shares: tuple[int, ...]  # relative sizes of the parts of its update
    steps: int  # of the round, that it says it took
    steps_max: int  # that were assigned
    root: Digest  # of its encoded parts, as committed
    drawn: Digest  # by the vertex that closed the round: which samples are looked at
    batch: int = 0


class ScoreResult(msgspec.Struct, frozen=True):
    falls: tuple[int, ...]  # as `ScoreReport` has them
    why: str = ""  # of none


class TwinUpdate(msgspec.Struct, frozen=True):
    """One of two updates that were to come of the same samples."""

    peer: PeerId
    blob: Digest  # that holds its parts
    root: Digest  # of them, as committed
    steps: int  # that it says it took, and could


class ReplayBoth(msgspec.Struct, frozen=True):
    """Hold these against each other, and if they differ take the steps that they should be made of -> Apart.

    Everything but the blobs is agreed on: it comes from vertices and from the plan of the round.
    """

    round: int
    before: Digest  # the state that the round began with
    shard: int
    shards: int
    shares: tuple[int, ...]  # relative sizes of the parts of an update
    rows: tuple[TwinUpdate, TwinUpdate]
    batch: int = 0


class UpdateDistances(msgspec.Struct, frozen=True):
    apart: tuple[int, int]  # as `RedundancyReport` has them
    why: str = ""  # of the most


class BuildExhibit(msgspec.Struct, frozen=True):
    """Lay out, as a blob, what shows that I took this segment of the round as assigned -> Exhibited."""

    round: int
    segment: int


class ExhibitBuilt(msgspec.Struct, frozen=True):
    blob: Digest


class JudgeReplay(msgspec.Struct, frozen=True):
    """Take a segment of another's round again, from what lies in this blob, while my trainer rests -> Judged.

    Everything but the blob is agreed on: it comes from vertices and from the plan of the round.
    """

    blob: Digest
    round: int
    peer: PeerId
    segment: int
    before: Digest  # the state that the round began with
    steps_max: int  # that were assigned
    shard: int
    shards: int
    shares: tuple[int, ...]  # relative sizes of the parts of its update
    steps: int  # that it committed to
    root: Digest  # of its encoded parts, as committed
    claim: Digest  # as committed
    last_claim: Digest | None  # of the last of its rounds that was counted; None: there was none
    last_whole: bool  # every part of that round counted it
    batch: int = 0


class JudgmentResult(msgspec.Struct, frozen=True):
    finding: Finding
    why: str = ""
    others: tuple[
        SignedStatement, ...
    ] = ()  # of an opening: commitments that it rests on and that the vertex does not hold


class BuildOpening(msgspec.Struct, frozen=True):
    """Lay out, as a blob for each draw, these blocks of my answer and of the rows that I made it of -> LaidOpen."""

    round: int
    answer: Payload
    rows: tuple[TaskRow, ...]  # in the order of its contributors
    paths: tuple[tuple[Digest, ...], ...]  # of each, to the root that its author committed to
    others: tuple[SignedStatement, ...]  # commitments of theirs that are not those in the vertex
    draws: tuple[tuple[int, ...], ...]


class OpeningBuilt(msgspec.Struct, frozen=True):
    blobs: tuple[Digest, ...]


class JudgeOpening(msgspec.Struct, frozen=True):
    """Make the drawn blocks of an answer again, of the rows that this blob shows -> Judged."""

    blob: Digest
    round: int
    trained: int  # training rounds before it: which stretch of the model the round carried
    shares: tuple[int, ...]  # relative sizes of the parts
    answered: OwnerResult
    commits: tuple[SignedStatement, ...]  # of its contributors, as the vertex holds them
    blocks: tuple[int, ...]
    statistic: str
    liars: int
    weights: RowWeights  # of the contributors, where distances made them


class ExhibitRow(msgspec.Struct, frozen=True):
    """This committed row does not decode: lay out, as a blob, what shows it to others -> RowLooked."""

    round: int
    trained: int  # training rounds before it: which stretch of the model the round carried
    shares: tuple[int, ...]  # relative sizes of the parts
    statement: SignedStatement  # its author's commitment
    part: int
    path: tuple[Digest, ...]  # from the payload's digest to the root in the commitment
    payload: Payload


class JudgeRow(msgspec.Struct, frozen=True):
    """Can the row be read that this is shown of? Kept as a blob if it cannot -> RowLooked."""

    round: int
    trained: int
    shares: tuple[int, ...]
    shown: bytes = b""  # as `verification/malformed_updates/messages.py` has it


class RowJudged(msgspec.Struct, frozen=True):
    why: str = ""  # it cannot be read; nothing if it can, or nothing says whose it is
    fault: str = ""  # of what was shown
    statement: SignedStatement | None = None  # of a row that I held: its author's commitment
    shown: bytes = b""  # what shows it; nothing where it is too large
    blob: Digest | None = None  # that, here


class ArchivedRow(msgspec.Struct, frozen=True):
    """A row of a round that is over: the bytes that its author committed to, and what shows that it did."""

    part: int
    peer: PeerId  # who committed to it
    path: tuple[Digest, ...]  # from the payload's digest to the root in its commitment
    payload: Payload


class KeepRows(msgspec.Struct, frozen=True):
    """Write these rows durably, each as a blob -> their names, tuple[Digest, ...], in the same order."""

    rows: tuple[ArchivedRow, ...]


class HoldRows(msgspec.Struct, frozen=True):
    """Keep these rows on disk and no others, the most important first if there is little room -> those not here."""

    blobs: tuple[Digest, ...]


class ReadRow(msgspec.Struct, frozen=True):
    """A kept row, to be shown to somebody -> Payload; None if it is not here (any more)."""

    blob: Digest
    digest: Digest  # that its author committed to


class PartRows(msgspec.Struct, frozen=True):
    """What the answer of one part was made of."""

    rows: tuple[tuple[PeerId, int, Digest], ...]  # author, weight, blob
    weights: RowWeights = ()  # of each, where distances made them


class LeaveOneOut(msgspec.Struct, frozen=True):
    """Make the state of a round again of its kept rows, then without each contributor in turn, and measure the loss
    of all these states on what the run holds out, while my trainer rests -> LeftOut."""

    round: int
    before: Digest  # the state that the round began with
    state: Digest  # that it led to
    shares: tuple[int, ...]  # relative sizes of the parts
    parts: tuple[PartRows | None, ...]  # None: it counts for nobody here
    statistic: str
    liars: int
    steps: int
    samples: int
    shards: int
    batch: int = 0


class LossWithout(msgspec.Struct, frozen=True):
    """What the round would have led to without this peer."""

    peer: PeerId
    loss: float | None  # None: nothing can be made without it, for the reason in `why`
    why: str = ""


class LeaveOneOutResult(msgspec.Struct, frozen=True):
    """Losses in nats; may be infinite or not a number."""

    exact: bool  # with all rows the very state came out that was agreed on
    before: float
    whole: float  # with all rows
    without: tuple[LossWithout, ...]
