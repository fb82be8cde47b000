"""Positions in a shared data set: who reads which shard, and what a vertex records of samples behind updates."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.policy.data.claims import UncountedSampleRanges
from atoll.policy.data.positions import next_positions, positions_text, positions_told, shards_of
from atoll.wire.codec import encode
from atoll.wire.data_ranges import DataClaim, DataRange, claim_bytes, claim_in, joined, without
from atoll.wire.messages.statements import Commitment, SignedStatement
from atoll.wire.messages.vertex import Member, SharedDataProgress, SwarmRoundMetrics, UnfinishedShard, VertexBody

ANNA, BOB, CARL = (PeerId(name) for name in ("anna", "bob", "carl"))
NAME, OTHER = Digest(b"d" * 32), Digest(b"o" * 32)


def members(*names: PeerId, **standing: str) -> tuple[Member, ...]:
    return tuple(Member(p, b"", (), "trainer", standing.get(p, "member"), 0, 0.1, p) for p in names)  # type: ignore[arg-type]


def body(*names: PeerId, data: SharedDataProgress | Any = UNSET) -> VertexBody:
    zero = ZERO_DIGEST
    none: tuple[Any, ...] = ()
    metrics = SwarmRoundMetrics(0.0, 0, 0)
    return VertexBody(
        zero, 3, 0, zero, 0.0, ANNA, none, zero, none, members(*names), none, none, metrics, data=data
    )


def claims(weight: int = 8, name: bytes = NAME, **ranges: list[DataRange]) -> dict[PeerId, Commitment]:
    def commit(found: list[DataRange]) -> Commitment:
        said = claim_bytes(DataClaim(name, tuple(found)))
        return Commitment(3, 0, ZERO_DIGEST, 1, 1, 8, 0.0, 0.1, weight, claim=said)

    return {PeerId(peer): commit(found) for peer, found in ranges.items()}


def fold(parent: VertexBody, commits: dict[PeerId, Commitment], *names: PeerId, undone: bool = False) -> VertexBody:
    here = names or tuple(m.peer for m in parent.members)
    return replace(body(*here), data=next_positions(parent, commits, members(*here), undone))


def test_a_shard_stays_with_its_reader_and_goes_to_another_from_where_counted_work_was():
    """Anna finishes one and gets more; Bob leaves in the middle of his, and Carl, who comes, goes on there."""
    begun = body(ANNA, BOB)
    assert [s.shard for s in shards_of(begun, ANNA)] == [0, 1] and [s.shard for s in shards_of(begun, BOB)] == [
        2,
        3,
    ]
    one = fold(begun, claims(anna=[DataRange(0, 0, 50, True), DataRange(1, 0, 14)], bob=[DataRange(2, 0, 40)]))
    assert shards_of(one, ANNA) == ((1, 14), (4, 0), (5, 0)) and shards_of(one, BOB) == ((2, 40), (3, 0), (6, 0))
    two = fold(one, claims(anna=[DataRange(1, 14, 30)]), ANNA, CARL)
    assert shards_of(two, ANNA) == ((1, 30), (4, 0), (5, 0)) and shards_of(two, CARL) == ((2, 40), (3, 0), (6, 0))
    assert (two.data.counted, two.data.dropped, two.data.repeated) == (120, 0, 0)
    assert fold(two, {}).data == two.data


def test_what_is_passed_over_is_dropped_and_what_comes_twice_is_repeated():
    """Positions are always counted − repeated + dropped; a row without weight moves nothing."""
    begun = fold(body(ANNA, BOB), claims(anna=[DataRange(0, 0, 10)]))
    gap = fold(begun, claims(anna=[DataRange(0, 15, 20)]))
    assert (gap.data.counted, gap.data.dropped, gap.data.repeated) == (15, 5, 0)
    over = fold(begun, claims(anna=[DataRange(0, 4, 16)]))
    assert (over.data.counted, over.data.dropped, over.data.repeated) == (22, 0, 6)
    foreign = fold(begun, claims(bob=[DataRange(0, 10, 30), DataRange(99, 0, 5)]))
    assert (foreign.data.counted, foreign.data.repeated) == (35, 25) and shards_of(foreign, ANNA)[0] == (0, 10)
    undone = fold(begun, claims(anna=[DataRange(0, 10, 30)]), undone=True)
    assert (undone.data.counted, undone.data.dropped) == (10, 20) and shards_of(undone, ANNA)[0] == (0, 30)
    weightless = fold(begun, claims(weight=0, anna=[DataRange(0, 10, 30, True)]))
    assert weightless.data == begun.data
    for one in (gap, over, foreign, undone):
        past = sum(s.position for s in one.data.open)
        assert past == one.data.counted - one.data.repeated + one.data.dropped


def test_who_reads_something_else_holds_no_shard_and_moves_none():
    """A counted update without a claim, or of another data set, gives its shards back. An old vertex has none."""
    assert fold(body(ANNA, BOB), {ANNA: replace(claims(anna=[])[ANNA], claim=UNSET)}).data is UNSET
    begun = fold(body(ANNA, BOB), claims(anna=[DataRange(0, 0, 10)], bob=[]))
    other = fold(begun, claims(name=OTHER, bob=[DataRange(2, 0, 10)]) | claims(anna=[]))
    assert shards_of(other, BOB) == () and other.data.counted == 10
    silent = fold(begun, {BOB: replace(claims(bob=[])[BOB], claim=UNSET)})
    assert shards_of(silent, BOB) == () and shards_of(fold(silent, {}), BOB) == ((2, 0), (3, 0))


def test_shards_that_were_left_in_the_middle_come_beside_untouched_ones():
    """Many leave: a step of the last member must not end with the few samples that they left."""
    left = SharedDataProgress(NAME, 9, tuple(UnfinishedShard(shard, 40, 1) for shard in range(9)), 360)
    held = shards_of(fold(body(ANNA, BOB, data=left), {}, ANNA), ANNA)
    assert held == (*((shard, 40) for shard in range(6)), (9, 0), (10, 0))


def test_a_member_that_leaves_shards_again_and_again_does_not_fill_the_vertex():
    """A liar begins its shards, gives them back by an update without a claim, and asks for others."""
    found = fold(body(ANNA, BOB), claims(anna=[DataRange(0, 0, 8)]))
    for _ in range(30):
        found = fold(found, claims(anna=[], bob=[]))
        begun = [DataRange(shard, 0, 1) for shard, at in shards_of(found, BOB) if not at]
        found = fold(found, claims(anna=[], bob=begun))
        found = fold(found, {BOB: replace(claims(bob=[])[BOB], claim=UNSET)})
    assert len(found.data.open) <= 16 and found.data.next > 30 and shards_of(found, ANNA)[0] == (0, 8)


def test_a_row_without_weight_does_not_name_the_data_set():
    """A newcomer in the first round could else name one that no other member has, and all would have to leave."""
    liar = claims(weight=0, name=Digest(b"\xff" * 32), bob=[DataRange(2, 0, 8)])
    assert fold(body(ANNA, BOB), liar).data is UNSET
    assert fold(body(ANNA, BOB), claims(anna=[DataRange(0, 0, 8)]) | liar).data.name == NAME


def test_a_shard_without_a_reader_is_shown_as_such():
    told = positions_told(
        body(ANNA, data=SharedDataProgress(NAME, 9, (UnfinishedShard(7, 40, 0), UnfinishedShard(8, 0, -1)), 1600))
    )
    assert told is not None and told["used_up"] == 7
    assert positions_text(told).endswith("7 shards used up, open: 7 at 40 (anna), 8 at 0 (no reader)")
    assert positions_told(body(ANNA)) is None


def test_an_update_that_is_not_counted_is_claimed_again_and_survives_a_restart():
    """Error feedback holds it. Where nothing remembers it, its samples are read again."""
    first, second = Digest(bytes([1]) * 32), Digest(bytes([2]) * 32)
    uncounted, loop = replace(body(ANNA), parent=first), UncountedSampleRanges()
    loop.add(NAME, (DataRange(0, 0, 8),))
    loop.settle(first, uncounted, ANNA, remembers=True)
    assert loop.begin(((0, 0), (1, 0))).ahead == ((0, 8), (1, 0))  # type: ignore[arg-type]
    assert loop.add(NAME, (DataRange(0, 8, 16),)).ranges == (DataRange(0, 0, 16),)
    loop.add(NAME, (DataRange(0, 16, 30, True),))
    assert loop.begin(((0, 0),)) == ((), ((0, 0),))  # type: ignore[arg-type]  # better twice than never
    again = UncountedSampleRanges()
    again.stored = loop.stored
    again.restore(second, uncounted, ANNA)
    assert again.begin(((0, 0),)).ahead == ((0, 8),)  # type: ignore[arg-type]
    again.restore(second, replace(uncounted, parent=second), ANNA)
    assert again.begin(((0, 0),)).ahead == ((0, 0),)  # type: ignore[arg-type]
    loop.settle(second, uncounted, ANNA, remembers=False)
    assert loop.begin(((0, 0),)).ahead == ((0, 0),)  # type: ignore[arg-type]


def test_an_update_of_an_earlier_process_takes_its_samples_with_it():
    """A process that is killed after it sent them leaves them over; the vertex that counts them settles that."""
    first, second = Digest(bytes([1]) * 32), Digest(bytes([2]) * 32)
    loop = UncountedSampleRanges()
    loop.add(NAME, (DataRange(0, 0, 8),))
    loop.settle(first, replace(body(ANNA), parent=first), ANNA, remembers=True)
    again = UncountedSampleRanges()
    again.stored = loop.stored
    again.restore(first, body(ANNA), ANNA)
    assert again.begin(((0, 0),)).ahead == ((0, 8),)  # type: ignore[arg-type]
    sent = SignedStatement(ANNA, encode(claims(anna=[DataRange(0, 0, 16)])[ANNA]), b"")
    again.settle(second, replace(body(ANNA), parent=first, commits=(sent,)), ANNA, remembers=True)
    assert again.begin(((0, 16),)).ahead == ((0, 16),) and again.stored.ranges == ()  # type: ignore[arg-type]


def test_a_claim_is_text_that_has_one_meaning():
    """Anything else is a fault of its sender; a long number or a range that ends before it begins as well."""
    claim = DataClaim(NAME, (DataRange(3, 80, 96, True), DataRange(5, 0, 2**40)))
    assert claim_in(claim_bytes(claim)) == claim and claim_in(claim_bytes(DataClaim(NAME))) == DataClaim(NAME)
    for wrong in (
        "1:5-3",
        f"1:0-{2**40 + 1}",
        f"1:0-{10**13}",
        "x",
        "1:0-1 ",
        "1:0-1  2:0-1",
        "1:0-1 " * 12 + "1:0-1",
    ):
        assert claim_in(NAME + b" " + wrong.encode()) is None
    assert claim_in(NAME + b"!") is None


def test_ranges_are_joined_and_subtracted():
    assert joined([DataRange(0, 0, 4), DataRange(1, 0, 2), DataRange(0, 4, 9, True)]) == (
        DataRange(0, 0, 9, True),
        DataRange(1, 0, 2),
    )
    left = [DataRange(0, 0, 9, True), DataRange(1, 0, 2)]
    assert without(left, [DataRange(0, 2, 4)]) == (DataRange(0, 0, 2), DataRange(0, 4, 9, True), DataRange(1, 0, 2))
    assert without(left, [DataRange(0, 0, 9)]) == (DataRange(0, 9, 9, True), DataRange(1, 0, 2))
    assert without(left, left) == ()
