"""One example of every message, statement and body, written out by hand: the wire as it is promised."""

from __future__ import annotations

from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.base.workload import Reached
from atoll.crypto.digest import Manifest, digest
from atoll.verification.malformed_updates.messages import UnreadableRow
from atoll.wire.messages.audits import ExhibitIs, Unreadable, WantExhibit
from atoll.wire.messages.history import (
    Chunk,
    EraSignature,
    EraSigned,
    ManifestIs,
    Vertices,
    WantChunk,
    WantEra,
    WantManifest,
    WantVertices,
)
from atoll.wire.messages.membership import Beat, BeatBack, Hello, JoinRefused, MemberReport
from atoll.wire.messages.preference import PreferenceIs, WantPreference
from atoll.wire.messages.round import (
    Answer,
    Committed,
    Comparison,
    Contribution,
    Declined,
    Handed,
    Heard,
    PartBytes,
    PreVote,
    Propose,
    Repeat,
    RowBytes,
    TimedOut,
    Voted,
    WantCommit,
    WantPart,
    WantRow,
    WantWords,
)
from atoll.wire.messages.statements import (
    Amend,
    Answered,
    Audited,
    Caught,
    Certificate,
    Commit,
    Compared,
    Complaint,
    Draws,
    Invite,
    Join,
    Late,
    Leave,
    Numbers,
    Pause,
    Placed,
    Proposed,
    Ready,
    Rests,
    Scored,
    Signed,
    Suspect,
    Timeout,
    Tune,
    Tuned,
    Twinned,
    Validated,
    Vote,
    Weighing,
)
from atoll.wire.messages.vertex import Body, Invited, Member, Metrics, TicketUse, Vertex
from atoll.wire.opening import OpenedBlock, Opening

ALICE, BOB = PeerId("12D3KooWAlice"), PeerId("12D3KooWBob")
A, B = Digest(bytes([0xAA]) * 32), Digest(bytes([0xBB]) * 32)
SIGNED = Signed(ALICE, b"body", b"signature")
CERTIFICATE = Certificate(7, 9, "prepare", A, ((ALICE, b"one"), (BOB, b"two")))
MEMBER = Member(
    ALICE, b"key", ("/ip4/10.0.0.1/tcp/4001",), "trainer", "member", 3, 0.25, "alice", missed=1, identity=B
)
BODY = Body(
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
    tickets=(TicketUse(b"ticket", b"key", "trainer", 2, 2000.0),),
    reports=(SIGNED,),
    metrics=Metrics(2.5, 32, 512),
    trained=6,
    epoch=1,
    settings=b"settings",
)
BODY_PACED = replace(BODY, window_s=1.5)
WEIGHING = Weighing((ALICE, BOB), (0.75, 0.25), A, (1,))
VERTEX = Vertex(b"body", CERTIFICATE, b"recovery")

STATEMENTS = (
    Commit(7, 1, A, 2, 32, 512, 2.5, 0.25, 512, "why"),
    Answered(7, 1, 0, 2, A, 4096, (ALICE, BOB), B),
    Compared(7, 1, 0, 2, (ALICE, BOB), bytes(24)),
    Proposed(7, 9, A),
    Vote(7, 9, "commit", A),
    Timeout(7, 9, 8, A),
    Join(ALICE, b"key", b"certificate", ("/ip4/10.0.0.1/tcp/4001",), "trainer", "alice", B, b"admission"),
    Ready(A, B),
    Leave(7, "enough for today"),
    Rests(8),
    Suspect(7, BOB, "silent"),
    Caught(SIGNED, SIGNED),
    Complaint(7, BOB, "withheld"),
    Audited(7, BOB, "mismatch"),
    Validated(7, A, (2_500_000,)),
    Scored(7, BOB, (41_250, -1_030, 9_400)),
    Twinned(7, BOB, (120, 410_000)),
    Placed(19, 3, 1_000_003, (bytes(31) + b"\1", bytes(31) + b"\2")),
    Invite(b"ticket", b"key", "observer", 3, 2000.0),
    Amend(A, 3, B, A, 2, b"signature"),
    Pause(A, True, b"signature"),
    Tune(A, Numbers(rounds=60, lr=0.002), b"signature"),
)

MESSAGES = (
    Committed(7, 1, "abcd", SIGNED, asks=True),
    WantCommit(7, 1, "abcd", BOB),
    Contribution(7, 1, "abcd", 0, 2, (A, B), SIGNED),
    Answer(7, 1, "abcd", SIGNED),
    Comparison(7, 1, "abcd", SIGNED),
    WantPart(7, 1, "abcd", A),
    PartBytes(7, 1, "abcd", A),
    Repeat(7, 1, "abcd"),
    Handed(7, 1, "abcd", 2, -1, 96, (PeerId("ada"), PeerId("bob"))),
    Declined(7, 1, "abcd", 2),
    Heard(7, 1, "abcd", 2, BOB),
    WantRow(7, 1, "abcd", 2, BOB),
    WantWords(7, 1, "abcd", 2),
    RowBytes(7, 1, "abcd", 2, (A, B), SIGNED),
    Propose(7, 1, "abcd", SIGNED, b"body", (SIGNED,), CERTIFICATE),
    Voted(7, 1, "abcd", SIGNED),
    TimedOut(7, 1, "abcd", SIGNED, None),
    PreVote(7, 1, "abcd", 3),
    WantVertices(-1),
    Vertices((VERTEX,), 7),
    WantManifest(A),
    ManifestIs(A, Manifest(5, (B,))),
    WantChunk(A, 3),
    Chunk(A, 3),
    EraSigned(99, A, (EraSignature(ALICE, b"identity", b"signature"),)),
    WantEra(99, (ALICE, BOB)),
    Beat(12.5, 7),
    BeatBack(12.5, 13.25, 7),
    MemberReport(SIGNED),
    JoinRefused("E-JOIN-01"),
    WantExhibit(7),
    ExhibitIs(7, A),
    Unreadable(b"shown"),
    WantPreference("branch/7", 3, A),
    PreferenceIs("branch/7", 3, B),
    Hello(A, 7, b"redemption"),
)

CAUGHT_SHOWN = Caught(SIGNED, exhibit=A)
AUDITED_NAMED = Audited(7, BOB, "mismatch", exhibit=A)
VALIDATED_RIGHT = Validated(7, A, (2_500_000,), (431_000,))
TUNED = Tuned(Numbers(rounds=60, owner_s=12.0, lr=0.002), 7, 224)
AMEND_TUNED = Amend(A, 3, B, A, 2, b"signature", tuned=TUNED)
AMEND_WITHOUT = Amend(A, 3, B, A, 2, b"signature", (BOB,))
COMMIT_DRAWN = Commit(7, 1, A, 2, 96, 1536, 2.5, 0.25, 512, claim=Draws(A, B))
COMMIT_LATE = Commit(7, 1, A, 2, 96, 1536, 2.5, 0.25, 512, claim=Late(3, 64, 1024))
MANIFEST_PARTLY = ManifestIs(A, None, b"\x05")
WANT_MANIFEST_KNOWN = WantManifest(A, True)
HANDED_AROUND = Handed(7, 1, "abcd", 2, 0, 96, (PeerId("ada"), PeerId("bob")), PeerId("bob"))
VOTED_PROVEN = Voted(7, 1, "abcd", SIGNED, CERTIFICATE)
PLACED_AGAIN = Placed(19, 3, 1_000_003, (bytes(31) + b"\1", bytes(31) + b"\2"), since=57)
WEIGHING_MIXED = replace(WEIGHING, weights=b"\x03\x02")  # of whose rows the mixtures of both are the mean
ANSWER_WEIGHED = Answer(7, 1, "abcd", SIGNED, WEIGHING)
BODY_WEIGHED = replace(BODY, weighing=WEIGHING)
BODY_REPUTED = replace(BODY, reputation=(7750,))
BODY_SAMPLED = replace(BODY, credits=((0, 64),))
BODY_ASKING = replace(BODY, effort=Reached(24, 12, 10, 5.5))
BODY_PAUSED = replace(BODY, paused=7)
BODY_TUNED = replace(BODY, tuned=TUNED)
BODY_INVITED = replace(BODY, invited=Invited((0, 1), (0, 300), (0, 1)))
READY_UNAUDITED = Ready(A, B, True)
# what no word above has
COMMIT_MEASURED = replace(COMMIT_LATE, offset_s=0.125, values=4096, links=bytes(range(8)))
BODY_MEASURED = replace(BODY, members=(replace(MEMBER, offset_s=0.125, links=bytes(range(8))),))
TUNE_ALL = Tune(A, Numbers(60, 4, 2, 0.5, 60.0, 12.0, 1.0, 3, 2, 30.0, 25, 10**9, 0.002, 0.7), b"signature")

OPENED = (  # the same words where blocks of answers are opened
    Answered(7, 1, 0, 2, A, 4096, (ALICE, BOB), made_of=B),
    Audited(7, BOB, "withheld", 5),
    WantExhibit(7, 5),
    ExhibitIs(7, A, 5),
)
SCORED = (WantExhibit(7, update=True), ExhibitIs(7, A, update=True))  # of updates that are scored
OPENING = Opening(
    (OpenedBlock(3, b"sum", (A,), (b"row", b"row2"), ((A, B), ())),),
    ((A,), (A,)),
    (Signed(ALICE, b"commit", b"signature"),),
)
UNREADABLE_ROW = UnreadableRow(SIGNED, 2, (A, B), 5, 3, digest(b"leaf"), (B,), b"leaf")
