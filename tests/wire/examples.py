"""One example of every message, statement and body, written out by hand: the wire as it is promised."""

from __future__ import annotations

from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.base.workload import AdaptiveWorkloadState
from atoll.crypto.digest import BlobManifest, digest
from atoll.verification.malformed_updates.messages import MalformedRowEvidence
from atoll.wire.messages.audits import ExhibitRequest, ExhibitResponse, MalformedRowShown
from atoll.wire.messages.history import (
    ChunkRequest,
    ChunkResponse,
    EraSignature,
    EraSignatures,
    EraSignaturesRequest,
    ManifestRequest,
    ManifestResponse,
    VerticesRequest,
    VerticesResponse,
)
from atoll.wire.messages.membership import Hello, JoinRefused, Ping, PingReply, ReportMessage
from atoll.wire.messages.preference import PreferenceRequest, PreferenceResponse
from atoll.wire.messages.round import (
    CommitmentRequest,
    PartialSum,
    PartReductionDeclined,
    PartRequest,
    PartResponse,
    PartResult,
    PartRowProducts,
    PartStatementsRequest,
    ProposalMessage,
    ResendRequest,
    RowContribution,
    RowRequest,
    RowReroutedHint,
    RowResponse,
    TimeoutMessage,
    UpdateCommitmentMessage,
    ViewChangePreVote,
    VoteMessage,
)
from atoll.wire.messages.statements import (
    Accusation,
    AgreedWeights,
    AuditReport,
    ChangeableSettings,
    ChangedSettings,
    ChangeSettings,
    CheckReport,
    Commitment,
    HeldOutLossReport,
    JoinRequest,
    LeaveReport,
    MemberRecordExtension,
    OwnerComplaint,
    OwnerResult,
    PauseOrder,
    PiecesStored,
    Proposal,
    QuorumCertificate,
    ReadyReport,
    RollbackOrder,
    RoundOptOutNotice,
    RowInnerProducts,
    SealedDraw,
    SignedStatement,
    StepsTakenWhilePartitioned,
    SuspicionReport,
    TicketInvite,
    ViewTimeout,
    Vote,
)
from atoll.wire.messages.vertex import (
    EarnedVoteRecord,
    IssuedTicketRecord,
    Member,
    MemberExtensions,
    SharedDataProgress,
    SwarmRoundMetrics,
    UnfinishedShard,
    Vertex,
    VertexBody,
)
from atoll.wire.opening import SumOpening, SumOpeningBlock

ALICE, BOB = PeerId("12D3KooWAlice"), PeerId("12D3KooWBob")
A, B = Digest(bytes([0xAA]) * 32), Digest(bytes([0xBB]) * 32)
SIGNED = SignedStatement(ALICE, b"body", b"signature")
CERTIFICATE = QuorumCertificate(7, 9, "prepare", A, ((ALICE, b"one"), (BOB, b"two")))
MEMBER = Member(
    ALICE, b"key", ("/ip4/10.0.0.1/tcp/4001",), "trainer", "member", 3, 0.25, "alice", missed=1, identity=B
)
BODY = VertexBody(
    run=A,
    round=7,
    attempt=1,
    parent=B,
    time_s=1234.5,
    proposer=ALICE,
    parts=(SIGNED, None),
    state=A,
    commits=(SIGNED,),
    members=(MEMBER,),
    tickets=(IssuedTicketRecord(b"ticket", b"key", "trainer", 2, 2000.0),),
    reports=(SIGNED,),
    metrics=SwarmRoundMetrics(2.5, 32, 512),
    trained=6,
    epoch=1,
    settings=b"settings",
)
BODY_PACED = replace(BODY, window_s=1.5)
WEIGHING = AgreedWeights((ALICE, BOB), (0.75, 0.25), A, (1,))
VERTEX = Vertex(b"body", CERTIFICATE, b"recovery")

STATEMENTS = (
    Commitment(7, 1, A, 2, 32, 512, 2.5, 0.25, 512, "why"),
    OwnerResult(7, 1, 0, 2, A, 4096, (ALICE, BOB), B),
    RowInnerProducts(7, 1, 0, 2, (ALICE, BOB), bytes(24)),
    Proposal(7, 9, A),
    Vote(7, 9, "commit", A),
    ViewTimeout(7, 9, 8, A),
    JoinRequest(ALICE, b"key", b"certificate", ("/ip4/10.0.0.1/tcp/4001",), "trainer", "alice", B, b"admission"),
    ReadyReport(A, B),
    LeaveReport(7, "enough for today"),
    RoundOptOutNotice(8),
    SuspicionReport(7, BOB, "silent"),
    Accusation(SIGNED, SIGNED),
    OwnerComplaint(7, BOB, "withheld"),
    AuditReport(7, BOB, "mismatch"),
    HeldOutLossReport(7, A, (2_500_000,)),
    CheckReport("score", 7, BOB, (41_250, -1_030, 9_400)),
    PiecesStored(19, 3, 1_000_003, (bytes(31) + b"\1", bytes(31) + b"\2")),
    TicketInvite(b"ticket", b"key", "observer", 3, 2000.0),
    RollbackOrder(A, 3, B, A, 2, b"signature"),
    PauseOrder(A, True, b"signature"),
    ChangeSettings(A, ChangeableSettings(rounds=60, lr=0.002), b"signature"),
)

MESSAGES = (
    UpdateCommitmentMessage(7, 1, "abcd", SIGNED, asks=True),
    CommitmentRequest(7, 1, "abcd", BOB),
    RowContribution(7, 1, "abcd", 0, 2, (A, B), SIGNED),
    PartResult(7, 1, "abcd", SIGNED),
    PartRowProducts(7, 1, "abcd", SIGNED),
    PartRequest(7, 1, "abcd", A),
    PartResponse(7, 1, "abcd", A),
    ResendRequest(7, 1, "abcd"),
    PartialSum(7, 1, "abcd", 2, -1, 96, (PeerId("ada"), PeerId("bob"))),
    PartReductionDeclined(7, 1, "abcd", 2),
    RowReroutedHint(7, 1, "abcd", 2, BOB),
    RowRequest(7, 1, "abcd", 2, BOB),
    PartStatementsRequest(7, 1, "abcd", 2),
    RowResponse(7, 1, "abcd", 2, (A, B), SIGNED),
    ProposalMessage(7, 1, "abcd", SIGNED, b"body", (SIGNED,), CERTIFICATE),
    VoteMessage(7, 1, "abcd", SIGNED),
    TimeoutMessage(7, 1, "abcd", SIGNED, None),
    ViewChangePreVote(7, 1, "abcd", 3),
    VerticesRequest(-1),
    VerticesResponse((VERTEX,), 7),
    ManifestRequest(A),
    ManifestResponse(A, BlobManifest(5, (B,))),
    ChunkRequest(A, 3),
    ChunkResponse(A, 3),
    EraSignatures(99, A, (EraSignature(ALICE, b"identity", b"signature"),)),
    EraSignaturesRequest(99, (ALICE, BOB)),
    Ping(12.5, 7),
    PingReply(12.5, 13.25, 7),
    ReportMessage(SIGNED),
    JoinRefused("E-JOIN-01"),
    ExhibitRequest(7),
    ExhibitResponse(7, A),
    MalformedRowShown(b"shown"),
    PreferenceRequest("branch/7", 3, A),
    PreferenceResponse("branch/7", 3, B),
    Hello(A, 7, b"redemption"),
)

CAUGHT_SHOWN = Accusation(SIGNED, exhibit=A)
AUDITED_NAMED = AuditReport(7, BOB, "mismatch", exhibit=A)
VALIDATED_RIGHT = HeldOutLossReport(7, A, (2_500_000,), (431_000,))
TUNED = ChangedSettings(ChangeableSettings(rounds=60, owner_s=12.0, lr=0.002), 7, 224)
AMEND_TUNED = RollbackOrder(A, 3, B, A, 2, b"signature", tuned=TUNED)
AMEND_WITHOUT = RollbackOrder(A, 3, B, A, 2, b"signature", (BOB,))
COMMIT_DRAWN = Commitment(7, 1, A, 2, 96, 1536, 2.5, 0.25, 512, claim=SealedDraw(A, B))
COMMIT_LATE = Commitment(7, 1, A, 2, 96, 1536, 2.5, 0.25, 512, claim=StepsTakenWhilePartitioned(3, 64, 1024))
COMMIT_READING = Commitment(7, 1, A, 2, 32, 512, 2.5, 0.25, 512, claim=A + b" 3:80-96! 5:0-496")
MANIFEST_PARTLY = ManifestResponse(A, None, b"\x05")
WANT_MANIFEST_KNOWN = ManifestRequest(A, True)
HANDED_AROUND = PartialSum(7, 1, "abcd", 2, 0, 96, (PeerId("ada"), PeerId("bob")), PeerId("bob"))
VOTED_PROVEN = VoteMessage(7, 1, "abcd", SIGNED, CERTIFICATE)
PLACED_AGAIN = PiecesStored(19, 3, 1_000_003, (bytes(31) + b"\1", bytes(31) + b"\2"), since=57)
WEIGHING_MIXED = replace(WEIGHING, weights=b"\x03\x02")  # of whose rows the mixtures of both are the mean
ANSWER_WEIGHED = PartResult(7, 1, "abcd", SIGNED, WEIGHING)
BODY_WEIGHED = replace(BODY, weighing=WEIGHING)
BODY_REPUTED = replace(BODY, reputation=(7750,))
BODY_READING = replace(
    BODY,
    data=SharedDataProgress(A, 7, (UnfinishedShard(5, 496, 0), UnfinishedShard(6, 0, -1)), 2048, 16, 32),
)
BODY_SAMPLED = replace(BODY, credits=((0, 64),))
BODY_ASKING = replace(BODY, effort=AdaptiveWorkloadState(24, 12, 10, 5.5))
BODY_PAUSED = replace(BODY, paused=7)
BODY_TUNED = replace(BODY, tuned=TUNED)
BODY_INVITED = replace(BODY, invited=EarnedVoteRecord((0, 1), (0, 300), (0, 1)))
EXTENSIONS = (MemberRecordExtension("payout", b"\x01\x02"), MemberRecordExtension("relay", b""))
BODY_EXTENDED = replace(BODY, extensions=(MemberExtensions(ALICE, EXTENSIONS),))
JOIN_EXTENDED = JoinRequest(ALICE, b"key", b"certificate", (), "trainer", "alice", B, b"admission", EXTENSIONS)
READY_UNAUDITED = ReadyReport(A, B, True)
# what no word above has
COMMIT_MEASURED = replace(COMMIT_LATE, offset_s=0.125, values=4096, links=bytes(range(8)))
BODY_MEASURED = replace(BODY, members=(replace(MEMBER, offset_s=0.125, links=bytes(range(8))),))
TUNE_ALL = ChangeSettings(
    A, ChangeableSettings(60, 4, 2, 0.5, 60.0, 12.0, 1.0, 3, 2, 30.0, 25, 10**9, 0.002, 0.7), b"signature"
)

OPENED = (  # the same words where blocks of answers are opened
    OwnerResult(7, 1, 0, 2, A, 4096, (ALICE, BOB), made_of=B),
    AuditReport(7, BOB, "withheld", 5),
    ExhibitRequest(7, 5),
    ExhibitResponse(7, A, 5),
)
SCORED = (ExhibitRequest(7, update=True), ExhibitResponse(7, A, update=True))  # of updates that are scored
OPENING = SumOpening(
    (SumOpeningBlock(3, b"sum", (A,), (b"row", b"row2"), ((A, B), ())),),
    ((A,), (A,)),
    (SignedStatement(ALICE, b"commit", b"signature"),),
)
MALFORMED_ROW = MalformedRowEvidence(SIGNED, 2, (A, B), 5, 3, digest(b"leaf"), (B,), b"leaf")
