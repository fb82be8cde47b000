"""A run takes in as many members as its vertices have room for: the fullest body still fits its frame."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import (
    ADDRESS_BYTES_MAX,
    ADDRESSES_MAX,
    ANSWER_BYTES_MAX,
    BODY_BYTES_MAX,
    COMMIT_BYTES_MAX,
    COMMITTEE_MAX,
    COMMITTEE_MOST,
    CONTROL_FRAME_MAX,
    MIB,
    MISSED_MAX,
    PEERS_MAX,
    REPORTS_BYTES_MAX,
    SCORE_ONE,
    TICKETS_MAX,
    WORDS_MAX,
)
from atoll.crypto.signer import VoteKind
from atoll.peer.round.topology_choice import parts_planned
from atoll.peer.settings import RunSettings
from atoll.policy.links import REPORT_BYTES_MAX
from atoll.policy.membership import FULL, RecentVertices, VerifiedReport, admissible
from atoll.policy.membership_change import next_members
from atoll.policy.signing import ED25519, VoteSignatureScheme
from atoll.policy.vertex_capacity import members_most, name_bytes, room_taken
from atoll.wire.codec import encode
from atoll.wire.messages.round import ProposalMessage
from atoll.wire.messages.statements import (
    ChangeableSettings,
    ChangedSettings,
    Commitment,
    JoinRequest,
    OwnerResult,
    QuorumCertificate,
    Role,
    SignedStatement,
    TicketInvite,
    ViewTimeout,
)
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, Vertex, VertexBody

RUN, HEAD, SIGNATURE = Digest(bytes(32)), Digest(b"h" * 32), bytes(64)
RECENTLY = RecentVertices({HEAD: ZERO_DIGEST})
LONG = tuple(f"{k:0{ADDRESS_BYTES_MAX}}" for k in range(ADDRESSES_MAX))
HUGE = 2**63 - 1


def peer(k: int) -> PeerId:
    return PeerId(f"12D3KooW{k:044}")


def member(k: int) -> Member:
    return Member(peer(k), bytes(32), (), "trainer", "member", 0, 0.0, f"{k}")


def join(k: int, addresses: tuple[str, ...] = (), key: bytes = bytes(32), role: Role = "trainer") -> VerifiedReport:
    return VerifiedReport(peer(k), JoinRequest(peer(k), key, b"", addresses, role, "n" * 64, HEAD, b""))


def body(*members: Member) -> VertexBody:
    return VertexBody(
        RUN, 5, 0, HEAD, 0.0, peer(0), (), ZERO_DIGEST, (), members, (), (), SwarmRoundMetrics(0.0, 0, 0)
    )


def admitted(
    parent: VertexBody, reports: list[VerifiedReport], parts: int, signing: VoteSignatureScheme = ED25519
) -> VertexBody:
    members, tickets, _ = next_members(
        parent, {}, set(), reports, "majority", True, parts=parts, trainers_most=PEERS_MAX, signing=signing
    )
    return replace(parent, members=members, tickets=tickets)


def refusal(
    parent: VertexBody, reported: VerifiedReport, parts: int, signing: VoteSignatureScheme = ED25519
) -> str | None:
    return admissible(reported, parent, RECENTLY, RUN, True, None, parts=parts, signing=signing)


def filled(parts: int, addresses: tuple[str, ...], signing: VoteSignatureScheme = ED25519) -> VertexBody:
    """A run that strangers joined until none was admitted, a hundred per vertex."""
    key = bytes(32 if signing == ED25519 else signing.key_bytes_max - 1)
    parent, k = body(replace(member(0), vote_key=key)), 1
    while refusal(parent, join(k, addresses, key), parts, signing) is None:
        parent = admitted(parent, [join(k + i, addresses, key) for i in range(100)], parts, signing)
        k = max(int(m.peer[8:]) for m in parent.members) + 1
    return parent


def at_its_longest(parent: VertexBody, parts: int, signing: VoteSignatureScheme = ED25519) -> VertexBody:
    """All members are back and count in every part, with the longest data, and reports fill their room."""
    members = tuple(replace(m, standing="member") if m.standing != "expelled" else m for m in parent.members)
    names = tuple(m.peer for m in members if m.may_train)
    word = Commitment(HUGE, HUGE, ZERO_DIGEST, HUGE, HUGE, HUGE, 0.5, 0.5, HUGE, "", 0.5, HUGE, b"")
    words = encode(replace(word, why="\U0001f3dd" * WORDS_MAX, links=bytes(REPORT_BYTES_MAX)))
    signature = bytes(signing.signature_bytes)
    assert len(words) + len(SIGNATURE) <= COMMIT_BYTES_MAX
    answer = encode(OwnerResult(HUGE, HUGE, HUGE, HUGE, ZERO_DIGEST, HUGE, names, HEAD))
    answer = answer.ljust(ANSWER_BYTES_MAX + sum(name_bytes(name) for name in names))
    assert len(answer) == ANSWER_BYTES_MAX + sum(name_bytes(name) for name in names)
    return replace(
        parent,
        round=HUGE,
        attempt=HUGE,
        parts=tuple(SignedStatement(names[0], answer, signature) for _ in range(parts)),
        commits=tuple(SignedStatement(name, words.ljust(COMMIT_BYTES_MAX - 64), signature) for name in names),
        members=tuple(replace(m, links=bytes(REPORT_BYTES_MAX), missed=MISSED_MAX, since=HUGE) for m in members),
        reports=(SignedStatement(names[0], bytes(REPORTS_BYTES_MAX - 150), SIGNATURE),) if names else (),
        tuned=ChangedSettings(ChangeableSettings(*(0.5,) * len(ChangeableSettings.__struct_fields__)), HUGE, HUGE),
    )


@pytest.mark.parametrize(("parts", "addresses"), [(16, ()), (16, LONG), (300, ()), (900, ()), (2300, LONG)])
def test_the_fullest_body_fits_its_frame_and_so_does_its_proposal(parts: int, addresses: tuple[str, ...]):
    """Strangers join until they are refused; then all of them count, with everything they may say."""
    parent = filled(parts, addresses)
    told = refusal(parent, join(10**6, addresses), parts) or ""
    assert told.startswith(FULL) and str(len(parent.members)) in told
    longest = at_its_longest(parent, parts)
    raw = encode(longest)
    assert len(raw) <= BODY_BYTES_MAX
    assert len(raw) > BODY_BYTES_MAX * 0.85  # the room is used
    timeout = SignedStatement(peer(1), encode(ViewTimeout(HUGE, HUGE, HUGE, ZERO_DIGEST)), SIGNATURE)
    votes = tuple((peer(k), SIGNATURE) for k in range(COMMITTEE_MOST))
    proof = QuorumCertificate(HUGE, HUGE, "prepare", ZERO_DIGEST, votes)
    proposal = ProposalMessage(HUGE, HUGE, "t" * 16, timeout, raw, (timeout,) * COMMITTEE_MOST, proof)
    assert len(encode(proposal)) <= CONTROL_FRAME_MAX
    assert len(encode(Vertex(raw, proof))) <= CONTROL_FRAME_MAX - 100


@pytest.mark.parametrize(
    "signing", [VoteSignatureScheme("ml-dsa-65", COMMITTEE_MAX), VoteSignatureScheme("ml-dsa-65", COMMITTEE_MOST)]
)
def test_so_do_those_of_a_run_that_signs_with_ml_dsa(signing: VoteSignatureScheme):
    """The frame is the same and all signatures are 52 times as long: fewer members find room, none too many."""
    parent = filled(16, LONG, signing)
    assert (refusal(parent, join(10**6, LONG, bytes(1952)), 16, signing) or "").startswith(FULL)
    assert signing.voters_most * 0.6 < len(parent.members) < len(filled(16, LONG).members) / 2
    raw = encode(at_its_longest(parent, 16, signing))
    assert signing.body_bytes_max * 0.85 < len(raw) <= signing.body_bytes_max
    signature = bytes(3309)
    timeout = SignedStatement(peer(1), encode(ViewTimeout(HUGE, HUGE, HUGE, ZERO_DIGEST)), signature)
    proof = QuorumCertificate(
        HUGE, HUGE, "prepare", ZERO_DIGEST, tuple((peer(k), signature) for k in range(signing.voters_most))
    )
    proposal = ProposalMessage(HUGE, HUGE, "t" * 16, timeout, raw, (timeout,) * signing.voters_most, proof)
    assert len(encode(proposal)) <= CONTROL_FRAME_MAX
    assert len(encode(Vertex(raw, proof))) <= CONTROL_FRAME_MAX - 100


@pytest.mark.parametrize("kind", ["ed25519", "ml-dsa-65"])
def test_who_brings_a_key_of_another_kind_is_told_so(kind: VoteKind):
    """Its votes could be forged by the attacker that the run wants to withstand.

    Or its key would fill the vertices.
    """
    parent = body(member(0))
    for length, wanted in ((32, "ed25519"), (1951, ""), (1952, "ml-dsa-65"), (1953, "")):
        told = refusal(parent, join(1, key=bytes(length)), 16, VoteSignatureScheme(kind))
        assert told is None if wanted == kind else f"({kind})" in (told or "")


def test_in_a_full_run_members_may_renew_their_keys_but_not_grow():
    """A restart is no newcomer; eight long addresses in the place of none are 2 kB that are not there."""
    parent = filled(16, ())
    assert refusal(parent, join(1, key=b"another session" * 2), 16) is None
    grown = admitted(parent, [join(k, LONG) for k in range(1, 200)], 16)
    short = next(m for m in grown.members[1:] if not m.addresses)
    assert (refusal(grown, join(int(short.peer[8:]), LONG), 16) or "").startswith(FULL)
    assert refusal(grown, join(int(short.peer[8:]), key=b"k" * 64), 16) is None
    assert len(encode(at_its_longest(grown, 16))) <= BODY_BYTES_MAX


def away(m: Member) -> Member:
    return replace(m, standing="away")


@given(
    st.lists(st.sampled_from(["member", "away", "observer", "expelled"]), min_size=1, max_size=40),
    st.lists(st.sampled_from(["trainer", "client", "observer"]), min_size=40, max_size=40),
    st.sampled_from([(), LONG[:2], LONG]),
    st.sampled_from([0, 1, 16, 600]),
)
def test_room_is_counted_as_the_longest_body_takes_it(standings, roles, addresses, parts):
    """Never less than what honest and other members can make of it, and at most a seventh more."""
    lines = [
        replace(member(k), standing=standing, role=role, addresses=addresses, vote_key=bytes(64), name="n" * k)
        for k, (standing, role) in enumerate(zip(standings, roles, strict=False), 1)
    ]
    lines.insert(0, member(0))  # one member must propose
    longest = replace(at_its_longest(body(*lines), parts), proposer=peer(0), trained=HUGE, epoch=HUGE, reports=())
    longest = replace(longest, metrics=SwarmRoundMetrics(0.5, HUGE, HUGE))
    size, taken = len(encode(longest)), room_taken(lines, (), parts)
    assert size <= taken <= size * 1.15


@given(st.integers(1, 60), st.sampled_from([0, 1, 16]))
def test_scores_find_their_room_in_that_of_numbers_that_never_get_so_long(count: int, parts: int):
    """A score takes three bytes; a line has room for a round of nine, and rounds take five up to 2^32."""
    lines = [replace(member(k), vote_key=bytes(64), name="n" * 16) for k in range(count)]
    longest = replace(at_its_longest(body(*lines), parts), reports=(), round=2**32 - 1, attempt=2**32 - 1)
    longest = replace(longest, members=tuple(replace(m, since=2**32 - 1) for m in longest.members))
    assert len(encode(replace(longest, reputation=(SCORE_ONE,) * count))) <= room_taken(lines, (), parts)


def test_large_models_and_groups_have_room_for_those_who_would_train_them():
    """7 billion values in fp32, and the defaults of `found()` for an unknown number of members."""
    seven, group = RunSettings(update_bytes=28 * 10**9), RunSettings(pieces=16, update_bytes=256 * MIB)
    assert members_most(parts_planned(seven)) >= 32
    assert members_most(parts_planned(group)) >= 100


def test_an_observer_takes_its_line_only():
    """It stands in no part: a thousand of them fit where forty train."""
    parent = body(member(0))
    for k in range(10):
        watching = [join(1 + 100 * k + i, role="observer") for i in range(100)]
        assert all(refusal(parent, one, 600) is None for one in watching)
        parent = admitted(parent, watching, 600)
    assert len(parent.members) == 1001 and refusal(parent, join(10**6), 600) is None
    assert (refusal(filled(600, ()), join(10**6), 600) or "").startswith(FULL)


@pytest.mark.parametrize("addresses", [(), LONG])
def test_strangers_who_come_and_go_do_not_keep_others_out(addresses: tuple[str, ...]):
    """An open run is full of lines of strangers that never trained; founders return, and newcomers come in.

    Away are a founder that trained, a stranger that was caught, and all others that ever joined.
    """
    parent = filled(16, addresses)
    first, founder, liar, *rest = parent.members
    lines = [first, away(replace(founder, step_s=0.5)), replace(liar, standing="expelled"), *map(away, rest)]
    parent = replace(parent, members=tuple(lines))
    back, new = join(int(founder.peer[8:]), founder.addresses, b"another session" * 2), join(10**6, addresses)
    assert refusal(parent, back, 16) is None
    assert refusal(parent, new, 16) is None
    after = admitted(parent, [back, new, join(int(rest[0].peer[8:]), addresses)], 16)
    standing = {m.peer: m.standing for m in after.members}
    assert standing[back.by] == standing[new.by] == standing[rest[0].peer] == "observer"
    assert standing[liar.peer] == "expelled" and standing[first.peer] == "member"
    gone = [m.peer for m in rest if m.peer not in standing]
    assert gone == [m.peer for m in rest[1 : 1 + len(gone)]] and len(gone) <= 2  # the oldest, no more than needed
    assert len(encode(at_its_longest(after, 16))) <= BODY_BYTES_MAX


def test_while_there_is_room_nobody_is_forgotten():
    parent = body(member(0), *(away(member(k)) for k in range(1, 20)))
    after = admitted(parent, [join(100 + k) for k in range(20)], 16)
    assert [m.peer for m in after.members[:20]] == [m.peer for m in parent.members]


def test_a_full_run_keeps_the_place_of_those_who_trained():
    parent = filled(16, ())
    gone = tuple(away(replace(m, step_s=0.5)) if k else m for k, m in enumerate(parent.members))
    parent = replace(parent, members=gone)
    assert (refusal(parent, join(10**6), 16) or "").startswith(FULL)
    assert all(refusal(parent, join(int(m.peer[8:]), key=b"k" * 64), 16) is None for m in gone[1:])
    back = admitted(parent, [join(int(m.peer[8:]), key=b"k" * 64) for m in gone[1:]], 16)
    assert all(m.is_present for m in back.members) and len(encode(at_its_longest(back, 16))) <= BODY_BYTES_MAX


def test_a_run_never_has_more_lines_than_peers_may_be():
    """Lines of observers are short; the oldest that is away and never trained gives its place."""
    lines = [replace(member(k), role="observer") for k in range(1, PEERS_MAX - 1)]
    parent = body(member(0), *lines, away(member(PEERS_MAX - 1)))
    two = [join(10**6, role="observer"), join(10**6 + 1, role="observer")]
    assert [refusal(parent, one, 1) for one in two] == [None, None]
    after = admitted(parent, two, 1)
    assert len(after.members) == PEERS_MAX and after.members[-1].peer == two[0].by
    assert (refusal(after, two[1], 1) or "").startswith(FULL)


def test_invitations_leave_room_for_members():
    """A voter that invites without end fills its list, not every vertex to come."""
    invites = [
        VerifiedReport(peer(0), TicketInvite(k.to_bytes(64, "big"), bytes(64), "trainer", 1, 1e9))
        for k in range(2 * TICKETS_MAX)
    ]
    parent = admitted(body(member(0)), invites, 16)
    assert len(parent.tickets) == TICKETS_MAX
    assert refusal(parent, join(1), 16) is None
