"""Signed statements: commitments, owner results, votes, timeouts, member reports.

A statement travels only inside `SignedStatement`. The signature covers the run's name and the exact bytes, so no
statement can be replayed into another run. Replay inside a run is harmless: the first statement for (round,
attempt, kind, sender) counts, and a different second one is evidence against its signer.
Never holds a tensor: digests and numbers only.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec

from atoll.base.ids import DIGEST_BYTES, ZERO_DIGEST, Digest, PeerId, one_line
from atoll.base.limits import (
    ADMISSION_BYTES_MAX,
    CHECK_NAME_MAX,
    CHECK_NUMBERS_MAX,
    EXTENSIONS_BYTES_MAX,
    FACTOR_MOST,
    PEERS_MAX,
    SIGNATURE_BYTES_MAX,
    TICKET_BYTES_MAX,
    WINDOW_LEAST_S,
)
from atoll.base.workload import Steps
from atoll.crypto.identity import CERTIFICATE_BYTES_MAX, MLDSA65_KEY_BYTES
from atoll.wire.data_ranges import ClaimBytes, DataClaim, claim_in
from atoll.wire.weights import RowWeights, shares_of

Signature = Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES_MAX)]
VoteKeyBytes = Annotated[bytes, msgspec.Meta(max_length=MLDSA65_KEY_BYTES)]
TicketBytes = Annotated[bytes, msgspec.Meta(max_length=TICKET_BYTES_MAX)]
Secret = Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)]


# the bounds refuse NaN too: it never equals itself, so no voter could derive a body that holds it
Finite = Annotated[float, msgspec.Meta(ge=-(2**53), le=2**53)]
TicketUses = Annotated[int, msgspec.Meta(ge=0, le=PEERS_MAX)]
TicketEnd = Annotated[float, msgspec.Meta(ge=0, le=2**53)]  # seconds, wall clock


class BaseStatement(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Base of all signed statements."""


class SignedStatement(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """`body` is an encoded Statement; `signature` is by `signer`'s session key over domain, run and body."""

    signer: PeerId
    body: bytes
    signature: Signature


# ---- the round ---------------------------------------------------------------------------------------------


class StepsTakenWhilePartitioned(msgspec.Struct, frozen=True):
    """Steps and samples of an update that were taken while partitioned (specs/apart.md)."""

    since: int  # first round that the author could not close
    steps: int
    samples: int


class SealedDraw(NamedTuple):
    """Secrets that decide whether a member trains on another member's samples (specs/twins.md)."""

    revealed: Secret  # secret for the previous round; empty: there was none
    sealed: Digest  # digest of the secret for the next round


class Commitment(BaseStatement, frozen=True, tag="Commitment"):
    """The signer has an update of this round with root `root`; sent before it receives other updates."""

    round: int
    attempt: int
    root: Digest  # Merkle root over the digests of the encoded parts
    parts: int  # number of parts; 0: the signer skips this round, for the reason in `why`
    steps: int  # inner steps of this update
    samples: int
    loss: float  # mean training loss over the samples that are not late, in nats per token; 0: none
    step_s: float  # seconds per inner step, for the next plan
    weight: int  # weight of this update in the mean: its samples, or 0 for a newcomer
    why: str = ""  # reason of a skipped round, or options of the caller, see `asked`
    offset_s: float = 0.0  # seconds of the signer's clock from run time; beyond CLOCK_BOUND_S it owns no part
    values: int = 0  # number of values in the update, if the caller chooses it and not genesis
    links: bytes = b""  # measured uplink, and latency to each member: policy/links.py
    claim: ClaimBytes | StepsTakenWhilePartitioned | SealedDraw | msgspec.UnsetType = msgspec.UNSET
    """Training claim: digest of the training in audited runs, late share of a partitioned member, sealed draw in
    runs with redundancy checks, or a digest with more bytes: samples of the data set that user loops share; else
    unset. They exclude each other and share one field, since a msgpack map with more than 15 keys has another
    header."""

    @property
    def asked(self) -> str:
        """Options of the caller that differ from genesis, such as `codec=fp16`; usually empty.

        One line that is safe for a terminal, since other callers see it.
        """
        return one_line(self.why) if self.parts else ""

    @property
    def claimed(self) -> Digest | None:
        """Digest of the training that an audit compares with."""
        claim = self.claim
        return Digest(claim) if isinstance(claim, bytes) and not self.claims_data else None

    @property
    def late(self) -> StepsTakenWhilePartitioned | None:
        """Steps and samples of earlier rounds."""
        return self.claim if isinstance(self.claim, StepsTakenWhilePartitioned) else None

    @property
    def draws(self) -> SealedDraw | None:
        """Secrets that decide on which member's samples it was trained."""
        return self.claim if isinstance(self.claim, SealedDraw) else None

    @property
    def data(self) -> DataClaim | None:
        """Samples of the shared data set behind it; None if it claims none, or in no valid form."""
        return claim_in(self.claim) if isinstance(self.claim, bytes) and self.claims_data else None

    @property
    def claims_data(self) -> bool:
        """Whether it claims samples of the shared data set, in a valid form or not."""
        return isinstance(self.claim, bytes) and len(self.claim) > DIGEST_BYTES

    @property
    def steps_now(self) -> int:
        """Steps of this round alone, used for the row's weight, records and windows."""
        return self.steps - (0 if self.late is None else self.late.steps)

    @property
    def samples_now(self) -> int:
        return self.samples - (0 if self.late is None else self.late.samples)


class OwnerResult(BaseStatement, frozen=True, tag="OwnerResult"):
    """Result of owner number `owner_index` of `part`: digest of the contributors' combined rows."""

    round: int
    attempt: int
    part: int
    owner_index: int
    digest: Digest
    size_bytes: int
    contributors: tuple[PeerId, ...]
    rows: Digest = ZERO_DIGEST
    """With cross-checks: digest of the contributors' commitments as received. With distance weights: digest of the
    AgreedWeights."""
    made_of: Digest | msgspec.UnsetType = msgspec.UNSET
    """With sum openings: digest of the contributors' commitments as combined."""


class RowInnerProducts(BaseStatement, frozen=True, tag="RowInnerProducts"):
    """Inner products of the contributors' rows, by owner number `owner_index` of `part`."""

    round: int
    attempt: int
    part: int
    owner_index: int
    contributors: tuple[PeerId, ...]  # peers with a row that this owner holds and can decode
    products: bytes  # fp64, little-endian: <x_i, x_j> of all but newcomers, i <= j, row by row


class AgreedWeights(msgspec.Struct, frozen=True, array_like=True):
    """Weights of all rows of an attempt, from their distances. Not signed: signed results name its digest."""

    peers: tuple[PeerId, ...]  # peers with a row in every part
    weights: RowWeights
    """Weight of each peer's row in the sum; 0 for newcomers and rows that the rule excludes. Bytes for rules that
    sort values after mixing neighbors: the rows in each row's mixture."""
    compared: bytes
    """Digest of the signed comparisons that it was made of, in the order of parts."""
    without: tuple[int, ...] = ()  # parts without a comparison, which have no result

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of each row in the results. Raises ValueError if the bytes are no valid mixtures."""
        return shares_of(self.weights, len(self.peers))


Stage = Literal["prepare", "commit"]
Lapse = Literal["withheld", "censored", "unopened"]  # result missing; rows left out; contributing rows not served
Finding = Literal["accepted", "mismatch", "wrong", "withheld", "unauditable"]
Role = Literal["trainer", "client", "observer"]  # a client trains but cannot be dialed: no part, no vote


class Proposal(BaseStatement, frozen=True, tag="Proposal"):
    """Body proposed by the proposer of this view. Two different ones are evidence."""

    round: int
    view: int
    digest: Digest


class Vote(BaseStatement, frozen=True, tag="Vote"):
    """Vote for a body at one stage of a view."""

    round: int
    view: int
    stage: Stage
    digest: Digest


class QuorumCertificate(msgspec.Struct, frozen=True, array_like=True):
    """Proof that a quorum voted for this body at this stage. Votes: (signer, signature) pairs in signer order."""

    round: int
    view: int
    stage: Stage
    digest: Digest
    votes: tuple[tuple[PeerId, Signature], ...]


class ViewTimeout(BaseStatement, frozen=True, tag="ViewTimeout"):
    """The signer has closed this view and holds this highest prepare certificate.

    With Raft (specs/raft.md): a ballot for the leader of the next view, naming the newest accepted body.
    """

    round: int
    view: int
    high_view: int  # -1: none
    high_digest: Digest  # zero digest: none


# ---- reports that a vertex may carry -----------------------------------------------------------------------


class MemberRecordExtension(NamedTuple):
    """Named bytes that a member adds to its record. Peers that do not know the name keep them unread."""

    name: str
    data: Annotated[bytes, msgspec.Meta(max_length=EXTENSIONS_BYTES_MAX)]


Extensions = tuple[MemberRecordExtension, ...]  # sorted by name; bounds: policy/extensions.py


class JoinRequest(BaseStatement, frozen=True, tag="JoinRequest"):
    """Request to join. The vertex that records it makes the signer an observer of the next rounds."""

    peer: PeerId
    vote_key: VoteKeyBytes
    certificate: Annotated[bytes, msgspec.Meta(max_length=CERTIFICATE_BYTES_MAX)]
    addresses: tuple[str, ...]
    role: Role
    name: str
    after: Digest  # newest vertex at the signer: a join expires after a few rounds
    admission: Annotated[bytes, msgspec.Meta(max_length=ADMISSION_BYTES_MAX)]
    """Ticket redemption; empty in an open run or for a returning member."""
    extensions: Extensions | msgspec.UnsetType = msgspec.UNSET  # unset: a former member keeps those of its record


class ReadyReport(BaseStatement, frozen=True, tag="ReadyReport"):
    """The signer holds the state agreed in this vertex, bit for bit, and is ready to train.

    In audited runs it also reports whether its work can be replayed, and sends it again when that changes.
    """

    vertex: Digest
    state: Digest
    unaudited: bool | msgspec.UnsetType = msgspec.UNSET  # True: no auditor can replay the signer's steps


class LeaveReport(BaseStatement, frozen=True, tag="LeaveReport"):
    """The signer leaves on purpose."""

    round: int
    why: str


class RoundOptOutNotice(BaseStatement, frozen=True, tag="RoundOptOutNotice"):
    """The signer does not train in this round. Sent before it, another member is drawn; during it, no penalty."""

    round: int


class SuspicionReport(BaseStatement, frozen=True, tag="SuspicionReport"):
    """The signer suspects this peer: silent for longer than the run allows, or its redial was refused."""

    round: int
    peer: PeerId
    why: Literal["silent", "refused"]


class Accusation(BaseStatement, frozen=True, tag="Accusation"):
    """A signed result is wrong: the signer of this report recomputed it from the contributors' committed rows.

    With `other`, a different statement by the same signer for the same slot, every peer can check the proof. For a
    commitment alone: a row under it is unreadable.
    """

    answer: SignedStatement  # OwnerResult or Commitment; with `other` any statement with a slot
    other: SignedStatement | None = None
    exhibit: Digest | msgspec.UnsetType = msgspec.UNSET  # for a commitment: blob with the evidence, if it is small


class OwnerComplaint(BaseStatement, frozen=True, tag="OwnerComplaint"):
    """An owner that was present failed in this round, and not for the first time."""

    round: int
    peer: PeerId
    why: Lapse


class AuditReport(BaseStatement, frozen=True, tag="AuditReport"):
    """Finding of an auditor that was drawn to replay this peer's segment or to check its sum opening."""

    round: int
    peer: PeerId
    finding: Finding
    opening: int | msgspec.UnsetType = msgspec.UNSET  # number of the sum opening; unset: a segment
    exhibit: Digest | msgspec.UnsetType = msgspec.UNSET  # blob that was judged; unset: none was served


class HeldOutLossReport(BaseStatement, frozen=True, tag="HeldOutLossReport"):
    """Mean loss of this round's state on held-out data, measured by a drawn validator."""

    round: int
    state: Digest
    losses: tuple[int, ...]
    """Millionths of a nat, one per held-out set; LOSS_MOST of verification/state_validation/policy: none."""
    right: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """Correctly predicted tokens or pictures, in millionths, one per set; unset: not counted."""


class CheckReport(BaseStatement, frozen=True, tag="CheckReport"):
    """Numbers that a drawn member found about this peer's update of a round, in a check of this name.

    The check's ledger says which members may send it, about which rounds, and what the numbers mean.
    """

    check: Annotated[str, msgspec.Meta(min_length=1, max_length=CHECK_NAME_MAX)]
    round: int
    peer: PeerId
    numbers: Annotated[tuple[int, ...], msgspec.Meta(max_length=CHECK_NUMBERS_MAX)]


class PiecesStored(BaseStatement, frozen=True, tag="PiecesStored"):
    """The signer stores piece `index` of the state agreed in this round. `pieces` names all pieces."""

    round: int
    index: int
    size_bytes: int  # size of the state
    pieces: tuple[Digest, ...]  # blob ids in order, computable by every holder of the state
    since: int | msgspec.UnsetType = msgspec.UNSET  # round of the vertex that drew the signer, if it is later


class TicketInvite(BaseStatement, frozen=True, tag="TicketInvite"):
    """Invitation by a ticket, valid until it expires or is used up; `uses=0` revokes it."""

    ticket: TicketBytes
    key: TicketBytes  # public half of the ticket's one-time secret
    role: Literal["trainer", "observer"]
    uses: TicketUses
    expires_s: TicketEnd


Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Many = Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
Peers = Annotated[int, msgspec.Meta(ge=1, le=PEERS_MAX)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1)]
Above0 = Annotated[float, msgspec.Meta(gt=0, le=FACTOR_MOST)]
Lasting = Annotated[float, msgspec.Meta(ge=WINDOW_LEAST_S, le=1e6)]  # seconds; longer windows would be no limit


class ChangeableSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Settings of a run that its members may agree to change. Unset ones stay; no other settings ever change."""

    rounds: Whole | msgspec.UnsetType = msgspec.UNSET  # training rounds of the run; 0: no end
    start_peers: Peers | msgspec.UnsetType = msgspec.UNSET
    min_peers: Peers | msgspec.UnsetType = msgspec.UNSET
    audit_rate: Rate | msgspec.UnsetType = msgspec.UNSET
    train_max_s: Lasting | msgspec.UnsetType = msgspec.UNSET
    owner_s: Lasting | msgspec.UnsetType = msgspec.UNSET  # an owner's window; agreement gets twice as long
    window_min_s: Lasting | msgspec.UnsetType = msgspec.UNSET
    updates: Peers | msgspec.UnsetType = msgspec.UNSET  # number of updates after which the grace period begins
    grace: Whole | msgspec.UnsetType = msgspec.UNSET  # grace period for stragglers, in steps
    round_time_s: Lasting | msgspec.UnsetType = msgspec.UNSET
    inner_steps: Steps | msgspec.UnsetType = msgspec.UNSET  # steps per round
    total_tokens: Many | msgspec.UnsetType = msgspec.UNSET
    lr: Above0 | msgspec.UnsetType = msgspec.UNSET
    outer_lr: Above0 | msgspec.UnsetType = msgspec.UNSET


class ChangedSettings(msgspec.Struct, frozen=True, array_like=True):
    """Settings that differ from genesis, from a vertex on."""

    to: ChangeableSettings
    trained: int  # training rounds before the newest change
    steps: (
        int  # steps of one worker in these rounds, by the settings of the time; learning rates decay over all steps
    )


class RollbackOrder(BaseStatement, frozen=True, tag="RollbackOrder"):
    """Order of the recovery identity: the run continues from an earlier vertex of its own chain.

    A forwarding peer signs around it as around any report; the inner signature counts. Without an inner signature
    the order follows from validators' reports in vertices, which every member can compute.
    """

    after: Digest  # head when it was signed: valid for a few rounds, and not after another order took effect
    round: int  # round of the vertex to return to
    back_to: Digest  # id of that vertex
    state: Digest  # state agreed in that vertex
    trained: int  # training rounds up to that vertex
    signature: (
        Signature  # recovery identity's signature over domain, run and all other fields; empty: by validators
    )
    without: tuple[PeerId, ...] | msgspec.UnsetType = msgspec.UNSET
    """Members that are expelled with it; unset: none."""
    tuned: ChangedSettings | msgspec.UnsetType = msgspec.UNSET  # changed settings of that vertex, valid again

    @property
    def sent_away(self) -> tuple[PeerId, ...]:
        return () if self.without is msgspec.UNSET else self.without


class PauseOrder(BaseStatement, frozen=True, tag="PauseOrder"):
    """Order of the recovery identity: training pauses or resumes from the vertex that records it on."""

    after: Digest  # head when it was signed: valid for a few rounds, and not after another order took effect
    paused: bool
    signature: Signature  # recovery identity's signature over domain, run and all other fields


class ChangeSettings(BaseStatement, frozen=True, tag="ChangeSettings"):
    """Order of the recovery identity: these settings change from the vertex that records it on."""

    after: Digest  # head when it was signed: valid for a few rounds, and not after another order took effect
    to: ChangeableSettings
    signature: Signature  # recovery identity's signature over domain, run and all other fields


AnyStatement = (
    Commitment
    | OwnerResult
    | RowInnerProducts
    | Proposal
    | Vote
    | ViewTimeout
    | JoinRequest
    | ReadyReport
    | LeaveReport
    | RoundOptOutNotice
    | SuspicionReport
    | Accusation
    | OwnerComplaint
    | AuditReport
    | HeldOutLossReport
    | CheckReport
    | PiecesStored
    | TicketInvite
    | RollbackOrder
    | PauseOrder
    | ChangeSettings
)
