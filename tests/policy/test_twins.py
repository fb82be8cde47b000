"""Redundant training: guests, hosts, referees, and what their reports mean, from vertices alone."""

from __future__ import annotations

import pytest

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import SCORE_OPEN
from atoll.crypto.digest import digest
from atoll.policy.ledger import LedgerSet
from atoll.policy.membership import RecentVertices, VerifiedReport, admissible
from atoll.policy.reputation import FLOOR, shift_bounds
from atoll.verification.redundant_training.policy import (
    APART_MOST,
    TOLERANCE,
    RedundancyDraw,
    RedundancyLedger,
    host_of,
    seal_of,
)
from atoll.wire.codec import encode
from atoll.wire.messages.statements import CheckReport, Commitment, SealedDraw, SignedStatement
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, VertexBody

PEERS = tuple(PeerId(f"peer {i}") for i in range(7))  # two of them may lie: five referees
RUN = digest(b"run")
NEAR, FAR = TOLERANCE, TOLERANCE + 1


def secret_of(peer: PeerId, round: int) -> bytes:
    return digest(f"{peer} {round}".encode())


class Story:
    """Vertices one after the other, in which all count and reveal their draw secrets."""

    def __init__(self, share: float = 0.3, same_rows: bool = False) -> None:
        self.share, self.same_rows = share, same_rows
        self.twins = RedundancyLedger(share, "two-thirds")
        self.bodies, self.ids, self.round = dict[int, VertexBody](), dict[int, Digest](), -1
        self.goes_on()

    def commit(self, peer: PeerId) -> Commitment:
        revealed = secret_of(peer, self.round - 1) if peer in (self.twins.owed or {}) else b""
        root = digest(b"row" if self.same_rows else f"row of {peer}".encode())
        draws = SealedDraw(revealed, seal_of(secret_of(peer, self.round + 1)))
        return Commitment(self.round, 0, root, 2, 20, 80, 2.0, 0.1, 80, claim=draws)

    def goes_on(self, *reports: SignedStatement, silent: tuple[PeerId, ...] = ()) -> None:
        members = tuple(Member(p, b"key", (), "trainer", "member", 0, 0.1, p) for p in PEERS)
        giving = [p for p in PEERS if p not in silent] if self.round >= 0 else []
        commits = tuple(SignedStatement(p, encode(self.commit(p)), b"") for p in giving)
        numbers = SwarmRoundMetrics(1.0, 1, 1)
        self.bodies[self.round] = VertexBody(
            RUN, self.round, 0, ZERO_DIGEST, 1.0, PEERS[0], (), ZERO_DIGEST, commits, members, (), reports, numbers
        )
        self.ids[self.round] = digest(b"vertex %d" % self.round)
        self.twins.follow(self.round, self.ids, self.bodies)
        self.round += 1

    def drawn(self, round: int) -> dict[PeerId, PeerId | None]:
        head, body = self.ids[round - 1], self.bodies[round - 1]
        return {p: host_of(p, secret_of(p, round), head, body, self.share) for p in PEERS}

    def until_a_case(self) -> tuple[int, PeerId]:
        while not self.twins.cases:
            self.goes_on()
        return min(self.twins.cases)

    def words(self, key: tuple[int, PeerId], *apart: tuple[int, int]) -> list[SignedStatement]:
        referees = self.twins.cases[key].judges
        return [
            SignedStatement(by, encode(CheckReport("twins", *key, each)), b"")
            for by, each in zip(referees, apart, strict=False)
        ]


def test_so_many_are_guests_as_the_run_says_and_nobody_of_itself():
    story = Story(share=0.25)
    for _ in range(200):
        story.goes_on()
    drawn = [(p, host) for round in range(1, 200) for p, host in story.drawn(round).items() if host is not None]
    assert 0.2 < len(drawn) / (199 * len(PEERS)) < 0.3
    assert all(guest != host for guest, host in drawn) and {host for _, host in drawn} == set(PEERS)


def test_a_pair_is_a_guest_and_a_host_that_was_none_itself_and_both_have_revealed():
    """Of every round in turn what follows from its draws; then the host is silent, and no member is accused."""
    story = Story()
    while story.round < 30:
        story.goes_on()
        of, opened = story.round - 2, {c.authors for c in story.twins.cases.values() if c.round == story.round - 2}
        if of >= 1:
            drawn = story.drawn(of)
            assert opened == {(p, h) for p, h in drawn.items() if h is not None and drawn[h] is None}
    assert story.twins.cases
    while not (pairs := [(p, h) for p, h in story.drawn(story.round - 1).items() if h is not None]):
        story.goes_on()
    host = pairs[0][1]
    assert host is not None
    story.goes_on(silent=(host,))
    assert all(host not in case.authors for case in story.twins.cases.values() if case.round == story.round - 2)


def test_the_same_row_of_both_needs_no_referees():
    story = Story(same_rows=True)
    alike = 0
    for _ in range(20):
        story.goes_on()
        alike += sum(verdict.opinion == "alike" for verdict in story.twins.settled)
    assert alike > 5 and not story.twins.cases


@pytest.mark.parametrize(
    ("words", "strayed", "hid"),
    [
        ([(NEAR, FAR)] * 5, True, False),
        ([(NEAR, FAR)] * 3, True, False),
        ([(NEAR, FAR)] * 2, False, False),  # all others are silent
        ([(NEAR, FAR)] * 2 + [(NEAR, NEAR)] * 3, False, False),
        ([(0, APART_MOST)] * 3, False, True),
        ([(NEAR, FAR)] * 2 + [(0, APART_MOST)] * 3, False, True),  # the milder one
    ],
)
def test_more_than_half_of_all_referees_decide_and_silence_of_others_helps_no_liar(words, strayed: bool, hid: bool):
    story = Story()
    key = story.until_a_case()
    case = story.twins.cases[key]
    assert len(case.judges) == 5 and not set(case.authors) & set(case.judges)
    story.goes_on(*story.words(key, *words))
    for _ in range(SCORE_OPEN):
        if found := [v for v in story.twins.settled if (v.round, v.authors[0]) == key]:
            break
        story.goes_on()
    (verdict,) = found
    assert verdict.against == ((case.host,) if strayed else ()) and verdict.hid == ((case.host,) if hid else ())


def test_whoever_proposes_the_vertex_that_reveals_a_pair_cannot_try_out_referees_for_it():
    """It may write many bodies, of other ids: each of them draws the same."""
    story = Story()
    key = story.until_a_case()
    for other in range(8):
        twins = RedundancyLedger(story.share, "two-thirds")
        ids = story.ids | {key[0] + 1: digest(b"another body %d" % other)}
        twins.follow(key[0] + 1, ids, story.bodies)
        assert twins.cases[key].judges == story.twins.cases[key].judges


def test_the_first_word_of_a_referee_counts_and_nobody_elses_may_stand():
    story = Story()
    key = story.until_a_case()
    case = story.twins.cases[key]
    (mine,) = story.words(key, (NEAR, NEAR))
    story.goes_on(mine)
    assert story.twins.problem(case.judges[0], CheckReport("twins", *key, (FAR, FAR))) == "was said already"
    assert "not by one who was drawn" in (story.twins.problem(case.guest, CheckReport("twins", *key, (0, 0))) or "")
    assert "distances that are none" in (
        story.twins.problem(case.judges[1], CheckReport("twins", *key, (-1, 0))) or ""
    )
    report = VerifiedReport(case.judges[1], CheckReport("twins", *key, (0, 0)))
    head = story.bodies[story.round - 1]
    assert admissible(report, head, RecentVertices({}, ledgers=LedgerSet([story.twins])), RUN, True, None) is None
    assert admissible(report, head, RecentVertices({}), RUN, True, None) is not None


def test_a_commitment_reveals_what_was_sealed_and_nothing_else():
    story = Story()
    for _ in range(4):
        story.goes_on()
    ada, bob = PEERS[:2]
    story.goes_on(silent=(bob,))
    drawing = RedundancyDraw(0.3, story.ids[story.round - 1], story.bodies[story.round - 1], story.twins.owed)
    good = story.commit(ada)
    assert drawing.flaw(ada, good) is None and drawing.flaw(bob, story.commit(bob)) is None

    def said(revealed: bytes, sealed: bytes = bytes(32)) -> Commitment:
        return Commitment(
            story.round, 0, ZERO_DIGEST, 2, 20, 80, 2.0, 0.1, 80, claim=SealedDraw(revealed, Digest(sealed))
        )

    assert "another secret" in (drawing.flaw(ada, said(secret_of(ada, story.round))) or "")
    assert "another secret" in (drawing.flaw(ada, said(b"")) or "")
    assert "a secret that drew no samples" in (drawing.flaw(bob, said(secret_of(bob, story.round - 1))) or "")
    assert "by which secret" in (drawing.flaw(bob, said(b"", b"short")) or "")


def test_only_who_sealed_it_before_draws():
    story = Story(share=1.0)
    for _ in range(3):
        story.goes_on()
    drawing = RedundancyDraw(1.0, story.ids[story.round - 1], story.bodies[story.round - 1], story.twins.owed)
    ada = PEERS[0]
    assert drawing.host(ada, secret_of(ada, story.round)) in PEERS[1:]
    assert drawing.host(ada, secret_of(ada, 99)) is None


def test_hiding_costs_what_a_round_of_silence_does_and_straying_more():
    silent = shift_bounds(9_000, None, hid=True)
    assert silent == 9_000 - (9_000 - FLOOR) // 4 and shift_bounds(9_000, None, hollow=True) < silent
