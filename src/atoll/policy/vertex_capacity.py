"""Vertex capacity: how many members a run can hold, as the next body must fit one control frame in any case.

A body lists every member, and for every part its contributors; it travels whole in proposals and in vertex sync. So
a member that may train takes room for its line, its commitment and its name in every part, an observer for its
line. These are counted at their largest size. Scores and credits of three bytes each fit into numbers counted as
nine bytes and into links and commitments that are never full. So do a reader's open shards and claims, which take
less than 600 bytes. A member that is away is counted as present, since it may return at any time. So room depends
only on a member's own data, never on its standing, except that an expelled member keeps just its line.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.base.limits import (
    ANSWER_BYTES_MAX,
    MISSED_MAX,
)
from atoll.policy.links import REPORT_BYTES_MAX as LINKS_BYTES_MAX
from atoll.policy.signing import ED25519, VoteSignatureScheme
from atoll.wire.messages.statements import AgreedWeights, ChangeableSettings, ChangedSettings, SignedStatement
from atoll.wire.messages.vertex import EarnedVoteRecord, IssuedTicketRecord, Member, SwarmRoundMetrics, VertexBody

NOBODY, HUGE = PeerId(""), 2**63 - 1
LIST_BYTES = 4  # bytes by which the header of a long list exceeds that of an empty one


def _bytes(value: object) -> int:
    return len(msgspec.msgpack.encode(value))


# sizes of the structures themselves, without keys, names, addresses and lists
_LINE = Member(
    NOBODY,
    b"",
    (),
    "apprentice",
    "observer",
    HUGE,
    0.5,
    "",
    MISSED_MAX,
    0.5,
    ZERO_DIGEST,
    bytes(LINKS_BYTES_MAX),
)
_BODY = VertexBody(
    ZERO_DIGEST,
    HUGE,
    HUGE,
    ZERO_DIGEST,
    0.5,
    NOBODY,
    (),
    ZERO_DIGEST,
    (),
    (),
    (),
    (),
    SwarmRoundMetrics(0.5, HUGE, HUGE),
    HUGE,
    HUGE,
    b"",
    AgreedWeights((), (), ZERO_DIGEST),
    0.5,
    paused=HUGE,
    invited=EarnedVoteRecord((), (), ()),
    tuned=ChangedSettings(ChangeableSettings(*((HUGE,) * len(ChangeableSettings.__struct_fields__))), HUGE, HUGE),
)
ROOT_BYTES = COUNTED_BYTES = 3  # of a member's invitation root, and of its counted rounds
LINE_BYTES = _bytes(_LINE) + ROOT_BYTES + COUNTED_BYTES
# parts, commits, members, tickets, reports, weights with names, and the last three of members and tickets
FRAME_BYTES = _bytes(_BODY) + 10 * LIST_BYTES
WEIGHT_BYTES = 9  # of a row's weight, where distances weight rows
SIGNED_BYTES = (
    _bytes(SignedStatement(NOBODY, bytes(2**16), b"")) - 2**16 + 1
)  # around a body, a signer and a signature

_USUAL = ("/ip4/192.168.100.100/tcp/40001", "/ip4/203.0.113.200/tcp/40001")


def room_taken(
    members: Sequence[Member],
    tickets: Sequence[IssuedTicketRecord],
    parts: int,
    signing: VoteSignatureScheme = ED25519,
) -> int:
    """Largest body with these members and tickets, without its reports, in bytes."""
    longest = max((name_bytes(m.peer) for m in members if may_train(m)), default=0)
    answers = parts * (ANSWER_BYTES_MAX + signing.signature_bytes + SIGNED_BYTES + longest)
    lines = sum(member_bytes(m, parts, signing) for m in members)
    return FRAME_BYTES + longest + answers + lines + sum(ticket_bytes(t) for t in tickets)


def may_train(member: Member) -> bool:
    """True if the member may train now or later."""
    return member.standing != "expelled" and member.role != "observer"


def member_bytes(member: Member, parts: int, signing: VoteSignatureScheme = ED25519) -> int:
    """Bytes that one member adds: its line, and if it may train a commitment, its name in every part and a
    weight.
    """
    name = name_bytes(member.peer)
    line = (
        LINE_BYTES + signing.key_bytes_max + name + name_bytes(member.name) + sum(map(name_bytes, member.addresses))
    )
    if not may_train(member):
        return line
    return line + signing.commit_bytes_max + SIGNED_BYTES + name * (parts + 1) + name + WEIGHT_BYTES


def ticket_bytes(ticket: IssuedTicketRecord) -> int:
    return _bytes(ticket) + ROOT_BYTES


def name_bytes(name: str) -> int:
    size = len(name.encode())
    return size + (1 if size < 2**5 else 2 if size < 2**8 else 3)


def members_most(parts: int, signing: VoteSignatureScheme = ED25519) -> int:
    """Number of usual members, which train and have two addresses, that fit."""
    usual = Member(PeerId("n" * 52), b"", _USUAL, "trainer", "member", 0, 0.0, "n" * 16)
    free = signing.room_bytes - room_taken((), (), parts, signing) - parts * name_bytes(usual.peer)
    return max(0, free // member_bytes(usual, parts, signing))
