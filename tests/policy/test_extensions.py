"""Extensions of a member's record: bounded, changed only by its own join, and in every roster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.base.limits import EXTENSION_NAME_MAX, EXTENSIONS_BYTES_MAX, EXTENSIONS_MAX
from atoll.peer.membership.admission import code_of
from atoll.policy.extensions import extensions_bytes
from atoll.policy.membership import RecentVertices, VerifiedReport, admissible
from atoll.policy.membership_change import next_members
from atoll.wire.codec import decode_statement, encode
from atoll.wire.messages.statements import Extensions, JoinRequest, LeaveReport, MemberRecordExtension
from atoll.wire.messages.vertex import Member, MemberExtensions, SwarmRoundMetrics, VertexBody

RUN, HEAD, STATE = Digest(bytes(32)), Digest(b"h" * 32), Digest(b"s" * 32)
ADA, BOB = PeerId("ada"), PeerId("bob")
RELAY, PAYOUT = MemberRecordExtension("relay", b"1"), MemberRecordExtension("payout", b"0x12")
VALID = st.dictionaries(
    st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=EXTENSION_NAME_MAX),
    st.binary(max_size=32),
    min_size=1,
    max_size=EXTENSIONS_MAX,
).map(lambda found: tuple(MemberRecordExtension(*pair) for pair in sorted(found.items())))
ANY = st.lists(
    st.builds(
        MemberRecordExtension,
        st.text(max_size=EXTENSION_NAME_MAX + 2),
        st.binary(max_size=EXTENSIONS_BYTES_MAX // 2),
    ),
    max_size=EXTENSIONS_MAX + 2,
).map(tuple)


def member(peer: PeerId, standing: str = "member") -> Member:
    return Member(peer, peer.encode(), (), "trainer", standing, 0, 0.1, peer)  # type: ignore[arg-type]


def body(*members: Member, extensions: tuple[MemberExtensions, ...] = ()) -> VertexBody:
    return VertexBody(
        *(RUN, 5, 0, HEAD, 0.0, ADA, (), STATE, (), members, (), (), SwarmRoundMetrics(0.0, 0, 0)),
        extensions=extensions or UNSET,
    )


def join(peer: PeerId, extensions: Extensions | None, key: bytes = b"") -> VerifiedReport:
    more = UNSET if extensions is None else extensions
    return VerifiedReport(peer, JoinRequest(peer, key or peer.encode(), b"", (), "trainer", peer, HEAD, b"", more))


def after(parent: VertexBody, *reports: VerifiedReport) -> dict[PeerId, Extensions]:
    found = next_members(parent, {}, set(), reports, "majority", False).extensions
    return {} if found is UNSET else dict(found)


@given(VALID | ANY)
def test_a_join_is_admitted_exactly_within_the_bounds(extensions: Extensions):
    """Whatever a peer sends: the wire keeps it, and voters refuse what is too much, unsorted or badly named."""
    joined = join(BOB, extensions)
    assert decode_statement(encode(joined.statement), BOB) == joined.statement
    names = [name for name, _ in extensions]
    fits = (
        len(names) <= EXTENSIONS_MAX
        and names == sorted(set(names))
        and all(1 <= len(name) <= EXTENSION_NAME_MAX and all(" " <= c <= "~" for c in name) for name in names)
        and sum(len(name) + len(data) for name, data in extensions) <= EXTENSIONS_BYTES_MAX
    )
    why = admissible(joined, body(member(ADA)), RecentVertices({HEAD: STATE}), RUN, True, None)
    assert (why is None) == fits
    assert why is None or ("extension" in why and code_of(why) == "E-JOIN-05")


@given(VALID)
def test_the_room_of_extensions_is_what_they_take(extensions: Extensions):
    bare, parent = body(member(ADA)), body(member(ADA), extensions=(MemberExtensions(ADA, extensions),))
    taken = len(encode(parent)) - len(encode(bare))
    assert 0 <= extensions_bytes(parent.extensions or ()) - taken < 8


def test_bytes_that_are_no_extensions_are_not_decoded():
    with pytest.raises(PeerFault):
        decode_statement(encode(join(BOB, ((1, b"x"),)).statement), BOB)  # type: ignore[arg-type]


def test_a_member_changes_its_extensions_by_a_join_and_keeps_them_by_one_without():
    """Also while it is away: the record stays as long as its line does."""
    parent = body(member(ADA), member(BOB), extensions=(MemberExtensions(BOB, (RELAY,)),))
    assert after(parent) == after(parent, join(BOB, None, b"new key")) == {BOB: (RELAY,)}
    assert after(parent, VerifiedReport(BOB, LeaveReport(6, ""))) == {BOB: (RELAY,)}
    assert after(parent, join(BOB, (PAYOUT, RELAY))) == {BOB: (PAYOUT, RELAY)}
    assert after(parent, join(BOB, ())) == {}
    assert after(parent, join(ADA, (PAYOUT,))) == {ADA: (PAYOUT,), BOB: (RELAY,)}


def test_a_present_member_joins_again_only_to_change_something():
    parent = body(member(ADA), member(BOB), extensions=(MemberExtensions(BOB, (RELAY,)),))

    def why(report: VerifiedReport) -> str | None:
        return admissible(report, parent, RecentVertices({HEAD: STATE}), RUN, True, None)

    assert why(join(BOB, (RELAY,))) == why(join(BOB, None)) == "it is a member already"
    assert why(join(BOB, (PAYOUT,))) is None and why(join(BOB, ())) is None


def test_records_without_extensions_take_no_byte():
    assert encode(body(member(ADA))) == encode(replace(body(member(ADA)), extensions=UNSET))
    assert extensions_bytes(()) == 0
