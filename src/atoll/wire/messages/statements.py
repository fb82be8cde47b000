"""What peers sign: commitments, owners' answers, votes, timeouts, and reports about members.

A statement is never sent bare: it travels inside `SignedStatement`, whose signature covers the run's name and the
exact
bytes, so nothing can be replayed into another run. Replay inside a run is harmless by slot: the first statement
for (round, attempt, kind, sender) counts, a different second one is evidence against its signer.
Never holds a tensor: digests and numbers only.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec

from atoll.base.ids import DIGEST_BYTES, ZERO_DIGEST, Digest, PeerId, one_line
from atoll.base.limits import (
    ADMISSION_BYTES_MAX,
    FACTOR_MOST,
    PEERS_MAX,
    SIGNATURE_BYTES_MAX,
    TICKET_BYTES_MAX,
    WINDOW_LEAST_S,
)
from atoll.base.workload import Steps
from atoll.crypto.identity import CERTIFICATE_BYTES_MAX, MLDSA65_KEY_BYTES
from atoll.wire.weights import RowWeights, shares_of

Signature = Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES_MAX)]
VoteKeyBytes = Annotated[bytes, msgspec.Meta(max_length=MLDSA65_KEY_BYTES)]
TicketBytes = Annotated[bytes, msgspec.Meta(max_length=TICKET_BYTES_MAX)]
Secret = Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)]


# bounds refuse what is no number, too: it never equals itself, so no voter could derive a body that holds it
Finite = Annotated[float, msgspec.Meta(ge=-(2**53), le=2**53)]
TicketUses = Annotated[int, msgspec.Meta(ge=0, le=PEERS_MAX)]
TicketEnd = Annotated[float, msgspec.Meta(ge=0, le=2**53)]  # seconds, wall clock


class Statement(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The base of everything that is signed."""


class SignedStatement(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """`body` is an encoded Statement; `signature` is by `signer`'s session key over domain, run and body."""

    signer: PeerId
    body: bytes
    signature: Signature


# ---- the round ---------------------------------------------------------------------------------------------


class LateShare(msgspec.Struct, frozen=True):
    """Of an update's steps and samples, those taken apart from the others: see specs/apart.md."""

    since: int  # the round that its author could not close
    steps: int
    samples: int


class SealedDraw(NamedTuple):
    """Of a member that may take another's samples in place of its own: see specs/twins.md."""

    revealed: Secret  # the secret that decided it in the round before this; empty: there was none
    sealed: Digest  # the name of the one that decides it in the round after this


class Commitment(Statement, frozen=True, tag="Commit"):
    """My update of this round exists and its parts hash to `root`; said before I see anybody else's."""

    round: int
    attempt: int
    root: Digest  # Merkle root over the digests of the encoded parts
    parts: int  # 0: I pass this round, for the reason in `why`
    steps: int  # inner steps this update stands for
    samples: int
    loss: float  # mean training loss over those of them that are not late, nats per token
    step_s: float  # seconds per inner step, for the next plan
    weight: int  # how much this update counts in the mean: its samples, or 0 for a newcomer
    why: str = ""  # of a pass, in plain words; of an update, what its caller `asked` for
    offset_s: float = 0.0  # of my clock from run time; beyond CLOCK_BOUND_S I shall own nothing
    values: int = 0  # of the update, where that is the caller's choice and not genesis's
    links: bytes = b""  # what I measured of my uplink and of my latency to each member: policy/links.py
    claim: Digest | LateShare | SealedDraw | msgspec.UnsetType = msgspec.UNSET
    """Of how I trained: a digest of it where rounds are audited, what of it was apart if anything was, by which
    secrets I take whose samples where there are twins; else left out. One field for all, which exclude each other:
    a map that may have more than 15 keys begins otherwise."""

    @property
    def asked(self) -> str:
        """What its caller asked for otherwise than genesis says, such as `codec=fp16`; nothing, mostly. Fit for a
        terminal: other callers are shown it."""
        return one_line(self.why) if self.parts else ""

    @property
    def claimed(self) -> Digest | None:
        """What the audited round is held against."""
        return self.claim if isinstance(self.claim, bytes) else None

    @property
    def late(self) -> LateShare | None:
        """Of its steps and samples, those of rounds before."""
        return self.claim if isinstance(self.claim, LateShare) else None

    @property
    def draws(self) -> SealedDraw | None:
        """Which secrets decide whose samples it is made of."""
        return self.claim if isinstance(self.claim, SealedDraw) else None

    @property
    def steps_now(self) -> int:
        """Of this round alone: what the row's weight, records and windows go by."""
        return self.steps - (0 if self.late is None else self.late.steps)

    @property
    def samples_now(self) -> int:
        return self.samples - (0 if self.late is None else self.late.samples)


class OwnerResult(Statement, frozen=True, tag="Answered"):
    """As owner number `owner_index` of `part` I combined these contributors into the bytes of this digest."""

    round: int
    attempt: int
    part: int
    owner_index: int
    digest: Digest
    size_bytes: int
    contributors: tuple[PeerId, ...]
    rows: Digest = ZERO_DIGEST
    """Where owners check each other: what the contributors had committed to, as I heard it. Where distances weigh
    rows: the name of the Weighing."""
    made_of: Digest | msgspec.UnsetType = msgspec.UNSET
    """Where blocks of answers are opened: what the contributors had committed to, as I combined it."""


class OwnerComparison(Statement, frozen=True, tag="Compared"):
    """As owner number `owner_index` of `part` I compared these contributors' rows: here are their products."""

    round: int
    attempt: int
    part: int
    owner_index: int
    contributors: tuple[PeerId, ...]  # whose rows I hold and can decode
    products: bytes  # fp64, little-endian: <x_i, x_j> of those that are no newcomers, i <= j, row by row


class AgreedWeights(msgspec.Struct, frozen=True, array_like=True):
    """What every row of an attempt weighs by its distances from the others. Not signed itself: answers name it."""

    peers: tuple[PeerId, ...]  # whose rows every part has
    weights: RowWeights
    """Of each in the sum; 0 for newcomers and for whom the rule leaves out. Bytes where values are sorted after
    neighbours were mixed: of whose rows each one's mixture is the mean."""
    compared: bytes
    """Digest of the signed comparisons that it was made of, in the order of parts."""
    without: tuple[int, ...] = ()  # parts that nobody compared: they count for nobody

    @property
    def shares(self) -> tuple[float, ...]:
        """How much of the answers each row is. ValueError if its bytes are no mixtures."""
        return shares_of(self.weights, len(self.peers))


Stage = Literal["prepare", "commit"]
Lapse = Literal["withheld", "censored", "unopened"]  # an answer; rows left out of it; rows it says are in it
Finding = Literal["accepted", "mismatch", "wrong", "withheld", "unauditable"]
Role = Literal["trainer", "client", "observer"]  # a client trains, but nobody can dial it: no part, no vote


class Proposal(Statement, frozen=True, tag="Proposed"):
    """As proposer of this view I put this one body forward; two different ones are evidence."""

    round: int
    view: int
    digest: Digest


class Vote(Statement, frozen=True, tag="Vote"):
    round: int
    view: int
    stage: Stage
    digest: Digest


class QuorumCertificate(msgspec.Struct, frozen=True, array_like=True):
    """A quorum voted for this body at this stage. Votes are (signer, signature) pairs, in signer order."""

    round: int
    view: int
    stage: Stage
    digest: Digest
    votes: tuple[tuple[PeerId, Signature], ...]


class ViewTimeout(Statement, frozen=True, tag="Timeout"):
    """This view is over for me; here is the highest prepare certificate that I hold.

    Where Raft decides (specs/raft.md): a ballot for the leader of the next view, with the newest body I accepted.
    """

    round: int
    view: int
    high_view: int  # -1: none
    high_digest: Digest  # zero digest: none


# ---- reports that a vertex may carry -----------------------------------------------------------------------


class JoinRequest(Statement, frozen=True, tag="Join"):
    """I want to take part. Recorded in a vertex, which makes me an observer of the next rounds."""

    peer: PeerId
    vote_key: VoteKeyBytes
    certificate: Annotated[bytes, msgspec.Meta(max_length=CERTIFICATE_BYTES_MAX)]
    addresses: tuple[str, ...]
    role: Role
    name: str
    after: Digest  # the vertex that I saw last: a join is good for a few rounds, not for ever
    admission: Annotated[bytes, msgspec.Meta(max_length=ADMISSION_BYTES_MAX)]
    """Proof that a ticket was redeemed; empty where the run is open or I am a returning member."""


class ReadyReport(Statement, frozen=True, tag="Ready"):
    """I hold the state agreed in this vertex, bit for bit; count me in.

    Where work is audited it says whether mine can be replayed. A member says it again when that has changed.
    """

    vertex: Digest
    state: Digest
    unaudited: bool | msgspec.UnsetType = (
        msgspec.UNSET
    )  # True: no auditor can take my steps again; left out: it can


class LeaveReport(Statement, frozen=True, tag="Leave"):
    """Farewell: I am going on purpose."""

    round: int
    why: str


class SkipRound(Statement, frozen=True, tag="Rests"):
    """I do not train in this round. Said before it, somebody else is drawn; in it, nobody holds it against me."""

    round: int


class SuspicionReport(Statement, frozen=True, tag="Suspect"):
    """I have not heard from this peer for longer than the run's patience."""

    round: int
    peer: PeerId
    why: Literal["silent", "refused"]


class Accusation(Statement, frozen=True, tag="Caught"):
    """This signed answer is a lie: its contributors' committed rows make something else, as I computed myself.

    With `other`, a different statement by the same signer for the same slot, it proves itself to everybody. Of a
    commitment alone: a row that it is to cannot be read, as I found myself.
    """

    answer: SignedStatement  # Answered or Commit; with `other` anything that may be said once
    other: SignedStatement | None = None
    exhibit: Digest | msgspec.UnsetType = msgspec.UNSET  # of a commitment: the blob that shows it, if it is small


class OwnerComplaint(Statement, frozen=True, tag="Complaint"):
    """An owner that was there failed us in this round, and not for the first time, as far as I could see."""

    round: int
    peer: PeerId
    why: Lapse


class AuditReport(Statement, frozen=True, tag="Audited"):
    """As an auditor drawn for this peer's round I took its segment again, or added its rows up, and found this."""

    round: int
    peer: PeerId
    finding: Finding
    opening: int | msgspec.UnsetType = msgspec.UNSET  # the opened blocks, by their number; left out: a segment
    exhibit: Digest | msgspec.UnsetType = msgspec.UNSET  # the blob that I judged; left out: I was shown none


class ValidationReport(Statement, frozen=True, tag="Validated"):
    """As a validator drawn for this round's state I measured its mean loss on the data that the run holds out."""

    round: int
    state: Digest
    losses: tuple[
        int, ...
    ]  # millionths of a nat, one per set of such data; LOSS_MOST of verification/state_validation/policy: none
    right: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """Millionths of the tokens or pictures whose answer it guessed, one per set; left out: not counted."""


class ScoreReport(Statement, frozen=True, tag="Scored"):
    """As a scorer drawn for this peer's update I took a step along it: so far did the loss fall."""

    round: int
    peer: PeerId
    falls: tuple[int, ...]
    """Millionths of a nat: on samples that were dealt to it in this round, on others, and the standard error of
    the difference. Empty: nothing was shown that fits its commitment."""


class RedundancyReport(Statement, frozen=True, tag="Twinned"):
    """As a referee drawn for two updates that were to come of the same samples I held them against each other, and
    where they differ against what I made of these samples myself."""

    round: int  # of the updates
    peer: PeerId  # who took the other's samples
    apart: tuple[int, int]
    """How far its update and the other's are off, in millionths of the length of what they are held against; the
    most that may be said of one that I was not shown, 0 of one that I was shown alone."""


class PiecesStored(Statement, frozen=True, tag="Placed"):
    """Piece `index` of the state agreed in this round lies on my disk; here are the names of all of its pieces."""

    round: int
    index: int
    size_bytes: int  # of the state
    pieces: tuple[Digest, ...]  # blob ids, in order: whoever holds the state can compute them
    since: int | msgspec.UnsetType = msgspec.UNSET  # the round whose vertex drew me for it, where that is later


class TicketInvite(Statement, frozen=True, tag="Invite"):
    """Tickets with this id are good until they expire or are used up; `uses=0` revokes."""

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
Lasting = Annotated[float, msgspec.Meta(ge=WINDOW_LEAST_S, le=1e6)]  # seconds: a window of 1e7 would be none


class RunNumbers(msgspec.Struct, frozen=True, omit_defaults=True):
    """Numbers of a run that its members may agree to change; what is left out stays. No other ones ever change."""

    rounds: Whole | msgspec.UnsetType = msgspec.UNSET  # training rounds until it is over; 0: without end
    start_peers: Peers | msgspec.UnsetType = msgspec.UNSET
    min_peers: Peers | msgspec.UnsetType = msgspec.UNSET
    audit_rate: Rate | msgspec.UnsetType = msgspec.UNSET
    train_max_s: Lasting | msgspec.UnsetType = msgspec.UNSET
    owner_s: Lasting | msgspec.UnsetType = msgspec.UNSET  # and twice as long to agree
    window_min_s: Lasting | msgspec.UnsetType = msgspec.UNSET
    updates: Peers | msgspec.UnsetType = msgspec.UNSET  # after which the others are waited for no longer than
    grace: Whole | msgspec.UnsetType = msgspec.UNSET  # so many steps
    round_time_s: Lasting | msgspec.UnsetType = msgspec.UNSET
    inner_steps: Steps | msgspec.UnsetType = msgspec.UNSET  # of a round
    total_tokens: Many | msgspec.UnsetType = msgspec.UNSET
    lr: Above0 | msgspec.UnsetType = msgspec.UNSET
    outer_lr: Above0 | msgspec.UnsetType = msgspec.UNSET


class ChangedNumbers(msgspec.Struct, frozen=True, array_like=True):
    """The numbers that hold otherwise than genesis says, from a vertex on."""

    to: RunNumbers
    trained: int  # rounds, when the newest of them was changed
    steps: int  # of one worker in these, as numbers had it then: rates fall over these and those to come


class RollbackOrder(Statement, frozen=True, tag="Amend"):
    """The run goes on from what this earlier vertex of its own chain left behind; said by the recovery identity.

    Whoever passes it on signs around it as around any report: the word that counts is the one inside. Without an
    inner signature it is what validators' reports in vertices demand, and everybody knows what that is.
    """

    after: Digest  # the head when it was said: good for a few rounds, and never after another one took effect
    round: int  # of the vertex that is gone back to
    back_to: Digest  # its id
    state: Digest  # that it agreed on
    trained: int  # training rounds up to it
    signature: Signature  # of the recovery identity, over domain, run and all the rest; empty: of validators
    without: tuple[PeerId, ...] | msgspec.UnsetType = msgspec.UNSET
    """Members that are sent away for good with it; left out where there are none."""
    tuned: ChangedNumbers | msgspec.UnsetType = (
        msgspec.UNSET
    )  # as the earlier vertex says, which holds again with it

    @property
    def sent_away(self) -> tuple[PeerId, ...]:
        return () if self.without is msgspec.UNSET else self.without


class PauseOrder(Statement, frozen=True, tag="Pause"):
    """From the vertex that holds this on rounds train nobody, or train again; said by the recovery identity."""

    after: Digest  # the head when it was said: good for a few rounds, and never after another one took effect
    paused: bool
    signature: Signature  # of the recovery identity, over domain, run and all the rest


class ChangeSettings(Statement, frozen=True, tag="Tune"):
    """From the vertex that holds this on these numbers of the run are others; said by the recovery identity."""

    after: Digest  # the head when it was said: good for a few rounds, and never after another one took effect
    to: RunNumbers
    signature: Signature  # of the recovery identity, over domain, run and all the rest


AnyStatement = (
    Commitment
    | OwnerResult
    | OwnerComparison
    | Proposal
    | Vote
    | ViewTimeout
    | JoinRequest
    | ReadyReport
    | LeaveReport
    | SkipRound
    | SuspicionReport
    | Accusation
    | OwnerComplaint
    | AuditReport
    | ValidationReport
    | ScoreReport
    | RedundancyReport
    | PiecesStored
    | TicketInvite
    | RollbackOrder
    | PauseOrder
    | ChangeSettings
)
