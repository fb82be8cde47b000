"""Tasks of a peer for its worker: training, tensor work and blob work, with their results.

Executed off the event loop by `runtime/worker/training_worker.py` on tensors and by `simulation/worker.py` on
multisets of names.

Invariants:
- Every task gets exactly one result, given after `->`.
- Work that changes durable state is durable when its result arrives.
"""

from __future__ import annotations

import msgspec

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Payload
from atoll.protocol.allreduce.tasks import TaskRow
from atoll.wire.data_ranges import AssignedShard, DataClaim
from atoll.wire.messages.statements import Finding, OwnerResult, SignedStatement, StepsTakenWhilePartitioned
from atoll.wire.weights import RowWeights


class TrainRound(msgspec.Struct, frozen=True):
    """Take up to `steps` inner steps on this slice of the data, for at most `seconds_max` -> TrainingResult."""

    round: int
    steps: int
    seconds_max: Seconds
    shard: int
    shards: int
    batch: int = 0  # samples per step; 0: the recipe's, here and below
    limit_s: Seconds | None = None  # training time limit from when the trainer runs; None: no limit
    data: tuple[AssignedShard, ...] = ()  # shards of the shared data set, for loops that read it


class EndTrainingEarly(msgspec.Struct, frozen=True):
    """End the training of this round at its next step, as enough others have their updates -> None.

    Its `TrainRound` still gets its result, soon. Harmless before or after that training.
    """

    round: int


class TrainWithoutQuorum(msgspec.Struct, frozen=True):
    """Train on alone from the live parameters, as no quorum is reachable -> TrainingResult, of these steps
    alone.

    At most `steps`, and at most `steps_max` in all that no vertex holds; 0 steps: that bound is reached.
    """

    round: int  # round that cannot be closed
    steps: int
    steps_max: int
    seconds_max: Seconds
    shard: int
    shards: int
    merge: bool  # True: the steps are sent with a later update; False: they are dropped then


class TrainingResult(msgspec.Struct, frozen=True):
    steps: int  # since the last counted update: spans failed rounds
    samples: int
    loss: float  # mean over those steps
    step_s: Seconds
    values: int = 0  # number of values in the update, where genesis does not fix it
    asked: str = ""  # options of the caller that differ from genesis, where callers may choose them
    data: DataClaim | None = None  # samples of the shared data set behind it; None: it reads none


class EncodeUpdate(msgspec.Struct, frozen=True):
    """Pseudo-gradient of the live parameters against the anchor, with error feedback -> UpdateEncoded."""

    round: int
    shares: tuple[int, ...]  # relative sizes of the parts of the update
    late: bool = False  # may carry late work, if there is any: the row has weight

    @property
    def parts(self) -> int:
        return len(self.shares)


class UpdateEncoded(msgspec.Struct, frozen=True):
    parts: tuple[Payload, ...]
    claim: Digest | None = None  # claim about how it was trained, where rounds are audited
    late: StepsTakenWhilePartitioned | None = None  # late work in it


class AdvanceState(msgspec.Struct, frozen=True):
    """The shared state after these combined parts, written durably -> StateAdvanced."""

    round: int
    before: Digest  # state blob to start from, the head's
    parts: tuple[Payload | None, ...]
    steps: int  # inner steps of one worker in this round
    samples: int  # sum over all contributors
    shards: int  # workers that share the data
    shares: tuple[int, ...] = ()  # relative sizes of the parts
    batch: int = 0


class StateAdvanced(msgspec.Struct, frozen=True):
    state: Digest


class LocalUpdateOutcome(msgspec.Struct, frozen=True):
    """How a vertex counts the local update of its round, also one sent before a restart."""

    before: Digest  # parent vertex
    root: Digest | None = None  # Merkle root of the update's parts; None: the vertex holds no local update
    parts: tuple[bool, ...] = ()
    claim: Digest | None = None


class AdoptState(msgspec.Struct, frozen=True):
    """Adopt a final vertex: make `state` the head, settle error feedback, merge the live parameters -> None.

    `counted`: per part, whether it includes the local row; None if nothing was encoded in this round, so that the
    live parameters keep their own progress on top of the new anchor.
    """

    round: int
    vertex: Digest
    state: Digest
    counted: tuple[bool, ...] | None
    claim: Digest | None = None  # local claim in the vertex, which the next round must begin with
    afresh: bool = False  # after a rollback: drop live parameters, feedback and moments
    late: bool = False  # the vertex holds local late work, also if it was committed before a restart
    led: tuple[Digest, ...] = ()  # digests of its results that the local peer computed as an owner
    mine: LocalUpdateOutcome | None = None  # None: whatever it counts is from this process


class RestoreEarlierState(msgspec.Struct, frozen=True):
    """The shared state after a rollback: an earlier state at the current position in the data -> StateAdvanced.

    Written durably; fails if the earlier state is not on this disk.
    """

    round: int
    before: Digest  # the head's state, which holds the position in the data
    back_to: Digest
    steps: int  # inner steps of one worker in this round
    shards: int  # workers that share the data
    batch: int = 0


class CheckStateStored(msgspec.Struct, frozen=True):
    """Whether this earlier state is stored here, byte for byte -> bool.

    From now on it is kept, also if it comes later.
    """

    state: Digest


class AbandonedRoundSettlement(msgspec.Struct, frozen=True):
    """How an abandoned round counted the local update; if no vertex is at hand it is taken as counted."""

    counted: tuple[bool, ...] | None  # per part; None if nothing was encoded
    late: bool  # the local late work is in it, or may be
    afresh: bool = False  # the run rolled back since: drop all that is owed


class RestoreState(msgspec.Struct, frozen=True):
    """Load this agreed state from disk as the head, with the private state if it fits -> StateRestored, or None.

    `left`: settlement of the round in progress until now, if it is still to be applied. `mine`: what this vertex
    and the one before it count locally, newest first; ends at a rollback.
    """

    round: int
    vertex: Digest
    state: Digest
    left: AbandonedRoundSettlement | None = None
    mine: tuple[LocalUpdateOutcome, ...] = ()


class StateRestored(msgspec.Struct, frozen=True):
    """The agreed state is the head."""

    size_bytes: int = 0  # size of a state to fetch; 0: rounds are followed for more than their state


class ReadVertices(msgspec.Struct, frozen=True):
    """Consecutive vertices from round `first`, as stored -> tuple[bytes, ...], as many as fit into `bytes_max`."""

    first: int
    bytes_max: int


class EncodeErasurePieces(msgspec.Struct, frozen=True):
    """Name all n pieces of this state and write piece `index` durably -> PieceSet.

    None if the state is not here.
    """

    state: Digest
    k: int
    n: int
    index: int


class DecodeErasurePieces(msgspec.Struct, frozen=True):
    """Make a state, or piece `index` of it, from k stored pieces, durably -> bool: it is `goal`."""

    goal: Digest
    size_bytes: int  # of the state
    k: int
    n: int
    pieces: tuple[tuple[int, Digest], ...]  # (piece number, digest)
    index: int | None = None


class RetainErasurePieces(msgspec.Struct, frozen=True):
    """Keep exactly these pieces and these whole older states, newest first -> the pieces that are not here."""

    pieces: tuple[Digest, ...]
    whole: tuple[Digest, ...]


class PinBlobs(msgspec.Struct, frozen=True):
    """Keep these blobs on disk, and release those pinned before for the same reason -> None."""

    blobs: tuple[Digest, ...]
    why: str = "audits"
    """Name of the check that needs them. For "verdicts" newest first, and only as many as there is room for."""


class MeasureValidationLoss(msgspec.Struct, frozen=True):
    """Measure the loss of this agreed state on all held-out data while the local trainer pauses ->
    ValidationLosses.
    """

    round: int
    state: Digest


class ValidationLosses(msgspec.Struct, frozen=True):
    losses: tuple[float, ...]  # mean in nats, one per data set; may be infinite or NaN
    right: tuple[float, ...] = ()  # share of correct predictions, one per data set; empty: not counted


class BuildUpdateExhibit(msgspec.Struct, frozen=True):
    """Write the parts of the local update of this round into one blob, as they were sent -> ExhibitBuilt."""

    round: int


class ScoreUpdate(msgspec.Struct, frozen=True):
    """Take a step along another member's update, from this blob, and measure the loss -> ScoreResult.

    The local trainer pauses meanwhile. Everything but the blob comes from vertices and from the plan of the round.
    """

    blob: Digest
    round: int
    peer: PeerId
    before: Digest  # state at the start of the round
    shard: int
    shards: int
    shares: tuple[int, ...]  # relative sizes of the parts of its update
    steps: int  # steps of the round that the peer claims
    steps_max: int  # steps assigned
    root: Digest  # Merkle root of its encoded parts, as committed
    drawn: Digest  # digest of the vertex that closed the round; selects the samples
    batch: int = 0


class ScoreResult(msgspec.Struct, frozen=True):
    falls: tuple[int, ...]  # numbers of the `CheckReport`
    why: str = ""  # reason for an empty result


class RedundantUpdate(msgspec.Struct, frozen=True):
    """One of two updates that should come from the same samples."""

    peer: PeerId
    blob: Digest  # holds its parts
    root: Digest  # their Merkle root, as committed
    steps: int  # steps claimed, bounded by those possible


class CompareRedundantUpdates(msgspec.Struct, frozen=True):
    """Compare two updates and, if they differ, take the steps that they should be made of.

    Result: RedundantUpdateDistances.

    Everything but the blobs comes from vertices and from the plan of the round.
    """

    round: int
    before: Digest  # state at the start of the round
    shard: int
    shards: int
    shares: tuple[int, ...]  # relative sizes of the parts of an update
    rows: tuple[RedundantUpdate, RedundantUpdate]
    batch: int = 0


class RedundantUpdateDistances(msgspec.Struct, frozen=True):
    apart: tuple[int, int]  # numbers of the `CheckReport`
    why: str = ""  # reason for the largest values


class BuildExhibit(msgspec.Struct, frozen=True):
    """Write the evidence that the local peer took this segment of the round as assigned into a blob ->
    ExhibitBuilt.
    """

    round: int
    segment: int


class ExhibitBuilt(msgspec.Struct, frozen=True):
    blob: Digest


class JudgeReplay(msgspec.Struct, frozen=True):
    """Replay a segment of another member's round from this blob -> JudgmentResult.

    The local trainer pauses meanwhile. Everything but the blob comes from vertices and from the plan of the round.
    """

    blob: Digest
    round: int
    peer: PeerId
    segment: int
    before: Digest  # state at the start of the round
    steps_max: int  # steps assigned
    shard: int
    shards: int
    shares: tuple[int, ...]  # relative sizes of the parts of its update
    steps: int  # steps committed to
    root: Digest  # Merkle root of its encoded parts, as committed
    claim: Digest  # as committed
    last_claim: Digest | None  # claim of its last counted round; None: it has none
    last_whole: bool  # every part of that round counted it
    batch: int = 0


class JudgmentResult(msgspec.Struct, frozen=True):
    finding: Finding
    why: str = ""
    others: tuple[
        SignedStatement, ...
    ] = ()  # of an opening: commitments that it uses and that the vertex does not hold


class BuildSumOpening(msgspec.Struct, frozen=True):
    """Write, one blob per draw, these blocks of a local result and of the rows behind it -> SumOpeningBuilt."""

    round: int
    answer: Payload
    rows: tuple[TaskRow, ...]  # in the order of the result's contributors
    paths: tuple[tuple[Digest, ...], ...]  # Merkle path of each row to its author's committed root
    others: tuple[SignedStatement, ...]  # contributors' commitments that differ from those in the vertex
    draws: tuple[tuple[int, ...], ...]


class SumOpeningBuilt(msgspec.Struct, frozen=True):
    blobs: tuple[Digest, ...]


class JudgeSumOpening(msgspec.Struct, frozen=True):
    """Recompute the drawn blocks of a result from the rows in this blob -> JudgmentResult."""

    blob: Digest
    round: int
    trained: int  # training rounds before it: selects the slice of the model in the round
    shares: tuple[int, ...]  # relative sizes of the parts
    answered: OwnerResult
    commits: tuple[SignedStatement, ...]  # contributors' commitments, as in the vertex
    blocks: tuple[int, ...]
    statistic: str
    liars: int
    weights: RowWeights  # of the contributors, where distances weight rows


class BuildMalformedRowEvidence(msgspec.Struct, frozen=True):
    """Write the evidence that this committed row does not decode into a blob -> MalformedRowJudged."""

    round: int
    trained: int  # training rounds before it: selects the slice of the model in the round
    shares: tuple[int, ...]  # relative sizes of the parts
    statement: SignedStatement  # the author's commitment
    part: int
    path: tuple[Digest, ...]  # from the payload's digest to the committed root
    payload: Payload


class JudgeMalformedRow(msgspec.Struct, frozen=True):
    """Check whether the row in this evidence decodes; if not, keep the evidence as a blob -> MalformedRowJudged."""

    round: int
    trained: int
    shares: tuple[int, ...]
    shown: bytes = b""  # encoded as in `verification/malformed_updates/messages.py`


class MalformedRowJudged(msgspec.Struct, frozen=True):
    why: str = ""  # why it does not decode; empty if it does or has no provable author
    fault: str = ""  # flaw of the evidence
    statement: SignedStatement | None = None  # commitment of the author, for a row stored here
    shown: bytes = b""  # evidence; empty where it is too large
    blob: Digest | None = None  # blob of the evidence


class ArchivedRow(msgspec.Struct, frozen=True):
    """A row of a closed round, with the proof that its author committed to it."""

    part: int
    peer: PeerId  # author
    path: tuple[Digest, ...]  # from the payload's digest to the committed root
    payload: Payload


class MovePartsToDisk(msgspec.Struct, frozen=True):
    """Copy combined parts into files without a name -> tuple[Payload, ...], the same parts in the same order.

    They take no memory that the system cannot use otherwise, and are gone with the process.
    """

    parts: tuple[Payload, ...]


class StoreArchivedRows(msgspec.Struct, frozen=True):
    """Write these rows durably, each as a blob -> their digests, tuple[Digest, ...], in the same order."""

    rows: tuple[ArchivedRow, ...]


class RetainArchivedRows(msgspec.Struct, frozen=True):
    """Keep exactly these rows on disk, most important first if there is little room -> those not here."""

    blobs: tuple[Digest, ...]


class ReadRow(msgspec.Struct, frozen=True):
    """An archived row, to be sent to a peer -> Payload; None if it is not here (any more)."""

    blob: Digest
    digest: Digest  # the author's committed digest


class PartRows(msgspec.Struct, frozen=True):
    """Rows behind the result of one part."""

    rows: tuple[tuple[PeerId, int, Digest], ...]  # author, weight, blob
    weights: RowWeights = ()  # one per row, where distances weight rows


class LeaveOneOut(msgspec.Struct, frozen=True):
    """Recompute a round from archived rows, then without each contributor in turn -> LeaveOneOutResult.

    Measures the loss of all these states on held-out data while the local trainer pauses.
    """

    round: int
    before: Digest  # state at the start of the round
    state: Digest  # agreed state after it
    shares: tuple[int, ...]  # relative sizes of the parts
    parts: tuple[PartRows | None, ...]  # None: the part counts no row here
    statistic: str
    liars: int
    steps: int
    samples: int
    shards: int
    batch: int = 0


class LeaveOneOutLoss(msgspec.Struct, frozen=True):
    """Loss of the round's outcome without this peer."""

    peer: PeerId
    loss: float | None  # None: no state can be made without it, for the reason in `why`
    why: str = ""


class LeaveOneOutResult(msgspec.Struct, frozen=True):
    """Losses in nats; may be infinite or NaN."""

    exact: bool  # with all rows the agreed state came out bit for bit
    before: float
    whole: float  # with all rows
    without: tuple[LeaveOneOutLoss, ...]
