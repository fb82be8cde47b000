"""Placement of pieces, from vertices: drawn, reported, agreed, replaced."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.crypto.digest import digest
from atoll.features.archive.policy import NOBODY, PieceSet, PlacementBook, PlacementLedger
from atoll.policy.capability_terms import ErasureParams
from atoll.policy.plan import QuorumRule
from atoll.wire.codec import encode
from atoll.wire.messages.statements import PiecesStored, SignedStatement
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, VertexBody

PEERS = tuple(PeerId(f"p{i}") for i in range(8))
CODED = ErasureParams(2, 4, every_rounds=5, lost_s=100.0)
TRUE = PieceSet(1000, tuple(digest(bytes([i])) for i in range(4)))
FALSE = replace(TRUE, size_bytes=999)


def placed_by(round: int, index: int, names: PieceSet, drawn: int) -> PiecesStored:
    return PiecesStored(round, index, names.size_bytes, names.pieces, UNSET if drawn == round else drawn)


class Chain:
    """Vertices one after the other, ten seconds apart, and a ledger that follows them."""

    def __init__(
        self, peers: Iterable[PeerId] = PEERS, assembling: int = -1, rule: QuorumRule = "majority"
    ) -> None:
        self.assembling = assembling  # rounds that do not train yet
        self.ahead_s = 0.0  # of the clocks that date rounds now
        self.members = {p: Member(p, b"", (), "trainer", "member", -1, 0.0, p) for p in peers}
        self.ids: dict[int, Digest] = {}
        self.bodies: dict[int, VertexBody] = {}
        self.ledger = PlacementLedger(CODED, rule)
        self.grow()

    def grow(self, *words: tuple[PeerId, PiecesStored], rounds: int = 1) -> Chain:
        for _ in range(rounds):
            round = len(self.bodies) - 1
            reports = tuple(SignedStatement(by, encode(word), b"") for by, word in words)
            state = digest(f"state {round}".encode())
            self.bodies[round] = VertexBody(
                ZERO_DIGEST, round, 0, ZERO_DIGEST, 10.0 * round + self.ahead_s, PEERS[0], (), state, (),
                tuple(self.members.values()), (), reports, SwarmRoundMetrics(0.0, 0, 0), max(0, round -
                self.assembling),
            )  # fmt: skip
            self.ids[round] = digest(f"vertex {round}".encode())
            self.ledger.follow(round, self.ids, self.bodies)
            words = ()
        return self

    def stands(self, peer: PeerId, standing: str) -> Chain:
        self.members[peer] = replace(self.members[peer], standing=standing)
        return self

    @property
    def entry(self):
        return self.ledger.entries[0]

    def words(self, names: PieceSet = TRUE) -> list[tuple[PeerId, PiecesStored]]:
        holders = enumerate(self.entry.holders)
        drawn = self.entry.drawn
        return [(p, placed_by(4, i, names, drawn[i])) for i, p in holders if p != NOBODY]

    def placed(self) -> Chain:
        return self.grow(rounds=5).grow(*self.words())


def test_every_fifth_round_draws_one_holder_for_every_piece():
    """Round 4 is the first; another vertex id draws others; no member holds two."""
    chain = Chain().grow(rounds=20)
    assert [e.round for e in chain.ledger.entries] == [4, 9, 14, 19]
    assert all(len(set(e.holders)) == 4 and set(e.holders) <= set(PEERS) for e in chain.ledger.entries)
    assert len({tuple(e.holders) for e in chain.ledger.entries}) > 1


def test_states_from_before_the_first_training_are_not_cut():
    """All members with genesis have them; members that assemble would fetch them for nothing."""
    assert [e.round for e in Chain(assembling=5).grow(rounds=12).ledger.entries] == [9]


def test_a_state_need_not_lie_whole_when_all_holders_have_named_the_same_pieces():
    chain = Chain().grow(rounds=5)
    chain.grow(*chain.words()[:3])
    assert not chain.entry.placed and chain.entry.here == 3
    chain.grow(chain.words()[3])
    assert chain.entry.placed and chain.entry.names == TRUE


def test_a_holder_that_lies_about_names_keeps_the_state_whole_and_loses_its_piece():
    """One of four names other pieces; as soon as three agree it is replaced, and the newcomer completes them."""
    chain = Chain().grow(rounds=5)
    (liar, lie), *honest = chain.words()
    chain.grow((liar, replace(lie, size_bytes=999)), *honest[:2])
    assert liar in chain.entry.holders  # two against one of four: not decided
    chain.grow(honest[2])
    assert liar not in chain.entry.holders and not chain.entry.placed
    chain.grow(chain.words()[0])
    assert chain.entry.placed and chain.entry.names == TRUE


def test_where_members_may_lie_names_need_more_voices_than_liars_to_replace_anybody():
    """Thirteen members, four may lie: three of four holders could all be liars, so the honest one stays."""
    chain = Chain((PeerId(f"p{i}") for i in range(13)), rule="two-thirds").grow(rounds=5)
    (honest, truth), *liars = chain.words()
    chain.grow((honest, truth), *((p, replace(word, size_bytes=999)) for p, word in liars)).grow(rounds=5)
    assert honest in chain.entry.holders and not chain.entry.placed and chain.entry.here == 4


def test_who_is_away_for_long_is_replaced_and_who_sleeps_a_while_is_not():
    chain = Chain().placed()
    holder = chain.entry.holders[2]
    chain.stands(holder, "away").grow(rounds=10)  # seen away from second 60 on, 90 seconds later
    assert chain.entry.holders[2] == holder
    chain.stands(holder, "member").grow().stands(holder, "away").grow(rounds=10)  # counted anew
    assert chain.entry.holders[2] == holder and chain.entry.placed
    chain.grow()
    assert chain.entry.holders[2] != holder and chain.entry.here == 3
    assert chain.entry.placed, "its names stand for good, and nobody needs the whole state again"


def test_who_was_replaced_keeps_its_piece_until_the_next_one_has_it():
    """It may come back, and with enough others gone no other member could make it."""
    chain = Chain().placed()
    holder, index = chain.entry.holders[2], 2
    chain.stands(holder, "away").grow(rounds=11)
    new = chain.entry.holders[index]
    assert new != holder and chain.entry.sources(index) == (holder,) and chain.entry.keeps(holder, index)
    chain.stands(holder, "member").stands(chain.entry.holders[0], "expelled").grow()
    assert holder not in chain.entry.holders, "it holds one of this state already"
    chain.grow(*(w for w in chain.words() if w[0] == new))
    assert chain.entry.sources(index) == (new,) and not chain.entry.keeps(holder, index)


@pytest.mark.parametrize("how", ["expelled", "forgotten", "silent"])
def test_who_is_out_or_never_says_that_its_piece_is_there_is_replaced(how: str):
    chain = Chain().grow(rounds=5)
    holder, rest = chain.entry.holders[0], chain.words()[1:]
    chain.grow(*rest)
    if how == "expelled":
        chain.stands(holder, "expelled").grow()
    elif how == "forgotten":
        del chain.members[holder]
        chain.grow()
    else:
        chain.grow(rounds=9)
    assert chain.entry.holders[0] != holder and chain.entry.holders[1:] == [p for p, _ in rest]


def test_with_too_few_members_the_rest_of_the_pieces_waits_for_newcomers():
    chain = Chain(PEERS[:3]).grow(rounds=5)
    assert chain.entry.holders.count(NOBODY) == 1
    chain.grow(*chain.words())
    assert not chain.entry.placed
    chain.members[PEERS[7]] = replace(chain.members[PEERS[0]], peer=PEERS[7])
    chain.grow()
    assert PEERS[7] in chain.entry.holders
    chain.grow(*(w for w in chain.words() if w[0] == PEERS[7]))
    assert chain.entry.placed


def test_only_the_holder_speaks_of_its_piece_once_and_in_the_agreed_names():
    chain = Chain().grow(rounds=5)
    by, word = chain.words()[0]
    other = next(p for p in PEERS if p not in chain.entry.holders)
    why = chain.ledger.problem
    assert why(by, word) is None
    assert why(other, word) and why(by, replace(word, round=3)) and why(by, replace(word, index=4))
    assert why(by, replace(word, index=-1)) and why(by, replace(word, pieces=TRUE.pieces[:3]))
    short = (*TRUE.pieces[:3], Digest(b"short"))
    assert why(by, replace(word, pieces=short)) and why(by, replace(word, size_bytes=-1))
    chain.grow(*chain.words())
    assert why(by, word) == "was said already"
    chain.stands(by, "expelled").grow()
    (new, again), *_ = chain.words()
    assert why(new, again) is None and why(new, replace(again, size_bytes=999)) is not None
    assert PlacementLedger(None).problem(by, word) is not None


def test_a_book_that_was_written_down_goes_on_where_it_was():
    """Also where the vertices since then are at hand only from some round on: nothing that changed it was
    missed."""
    import msgspec

    chain = Chain().placed()
    chain.stands(chain.entry.holders[1], "away").grow()
    book = msgspec.msgpack.decode(msgspec.msgpack.encode(chain.ledger.book), type=PlacementBook)
    chain.grow(rounds=30)
    later = PlacementLedger(CODED, book=book)
    later.follow(max(chain.bodies), chain.ids, {r: b for r, b in chain.bodies.items() if r >= 4})
    assert later.book == chain.ledger.book and not later.book.lacks
    blank = PlacementLedger(CODED)
    blank.follow(max(chain.bodies), chain.ids, {r: b for r, b in chain.bodies.items() if r >= 9})
    assert blank.book.lacks and blank.problem(*chain.words()[0]) is None  # no judge of what it cannot know
    assert blank.unknown(*chain.words()[0]), "and nobody who would propose it"
    again = PlacementLedger(
        CODED, book=msgspec.msgpack.decode(msgspec.msgpack.encode(blank.book), type=PlacementBook)
    )
    assert again.problem(*chain.words()[0]) is None, "nor after a restart"


def test_only_the_newest_64_states_are_followed():
    chain = Chain().grow(rounds=5 * 70)
    assert len(chain.ledger.entries) == 64 and chain.entry.round == 4 + 5 * 6


def test_who_comes_back_to_a_run_without_spare_members_gets_its_piece_again():
    """Four members for four pieces: its place is still free, and what it holds is what is missing."""
    chain = Chain(PEERS[:4]).placed()
    holder = chain.entry.holders[2]
    chain.stands(holder, "away").grow(rounds=11)
    assert chain.entry.holders[2] == NOBODY and chain.entry.sources(2) == (holder,)
    chain.stands(holder, "member").grow()
    assert chain.entry.holders[2] == holder
    chain.grow(*(w for w in chain.words() if w[0] == holder))
    assert chain.entry.here == 4 and chain.entry.former[2] == []


def test_who_came_back_without_its_piece_gives_way_to_somebody_else():
    """It keeps silent: it is not drawn again and again while others are free."""
    chain = Chain(PEERS[:4]).placed()
    holder = chain.entry.holders[2]
    chain.stands(holder, "away").grow(rounds=11).stands(holder, "member").grow()
    chain.members[PEERS[7]] = replace(chain.members[PEERS[0]], peer=PEERS[7])
    chain.grow(rounds=11)
    assert chain.entry.holders[2] == PEERS[7] and chain.entry.keeps(holder, 2)


def test_a_large_piece_may_take_as_long_as_a_polite_repair_takes():
    """A state of 10 GB that has to be made of others' pieces: its new holder is silent for hours, and stays."""
    chain = Chain().grow(rounds=5)
    large = replace(TRUE, size_bytes=10 * 2**30)
    chain.grow(*chain.words(large))
    assert chain.entry.placed
    chain.stands(chain.entry.holders[0], "expelled").grow()
    new = chain.entry.holders[0]
    held = {chain.grow(rounds=5).entry.holders[0] for _ in range(40)}  # twenty times lost_s
    assert held == {new}
    held = {chain.grow(rounds=5).entry.holders[0] for _ in range(200)}
    assert len(held) > 1, "three hours are enough"


def test_a_word_of_an_earlier_time_as_its_holder_is_worth_nothing():
    """A holder was away, another one took over, then that one went for good and the first was drawn again.

    A repeated old report states it in its name, before it has the piece.
    """
    chain = Chain(PEERS[:5]).placed()
    holder, old = chain.words()[2]
    chain.stands(holder, "away").grow(rounds=11)
    (other, word) = chain.words()[2]
    assert other != holder
    chain.grow((other, word)).stands(holder, "member").stands(other, "expelled").grow()
    assert chain.entry.holders[2] == holder and chain.entry.keeps(other, 2)
    assert chain.ledger.problem(holder, old) == "is of an earlier time that it held this piece"
    chain.grow((holder, old))
    assert chain.entry.said[2] is None and chain.entry.keeps(other, 2)
    chain.grow(chain.words()[2])
    assert chain.entry.here == 4 and not chain.entry.keeps(other, 2)


@pytest.mark.parametrize("how", ["away", "silent"])
def test_a_clock_that_was_a_year_ahead_keeps_no_lost_holder_for_a_year(how: str):
    """It dates the draw, and the moment when a holder goes away; then a vertex sets the time back."""
    chain = Chain()
    chain.ahead_s = 365 * 86400.0
    chain.grow(rounds=5)
    holder = chain.entry.holders[0]
    if how == "away":
        chain.grow(*chain.words()).stands(holder, "away").grow()
    chain.ahead_s = 0.0
    chain.grow(rounds=9)
    assert chain.entry.holders[0] == holder
    chain.grow(rounds=3)
    assert chain.entry.holders[0] != holder
