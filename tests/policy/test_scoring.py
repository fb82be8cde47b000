"""Loss scoring: which updates are scored, by which members, and what their reports mean, from vertices alone."""

from __future__ import annotations

import pytest

from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.base.limits import SCORE_OPEN
from atoll.crypto.digest import digest
from atoll.policy.duplicate_updates import alike_in
from atoll.policy.ledger import LedgerSet
from atoll.policy.membership import RecentVertices, VerifiedReport, admissible
from atoll.policy.reputation import CLAIMED_UNTAUGHT, FLOOR, MemberConduct, shift_bounds
from atoll.verification.loss_scoring.policy import FALL_MOST, ScoreLedger, opinion_of
from atoll.verification.review_ledger import judges_drawn
from atoll.wire.codec import encode
from atoll.wire.messages.statements import CheckReport, Commitment, SignedStatement, StepsTakenWhilePartitioned
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, VertexBody

PEERS = tuple(PeerId(f"peer {i}") for i in range(7))  # two of them may lie: five scorers
ADA = PEERS[0]
TAUGHT, HOLLOW, UNCLEAR = (300, 200, 40), (200, 201, 40), (270, 200, 40)
RUN = digest(b"run")


def commit(round: int, **more) -> bytes:
    return encode(Commitment(round, 0, ZERO_DIGEST, 2, 20, 80, 2.0, 0.1, 80, **more))


class Story:
    """Vertices one after the other, in each of which Ada's update counts, and only hers."""

    def __init__(self, share: float = 1.0, quorum: str = "two-thirds") -> None:
        self.scores = ScoreLedger(share, quorum)
        self.bodies, self.ids, self.round = {}, {}, -1
        self.goes_on()

    def goes_on(self, *reports: SignedStatement, **more) -> None:
        members = tuple(Member(p, b"key", (), "trainer", "member", 0, 0.1, p) for p in PEERS)
        commits = (SignedStatement(ADA, commit(self.round, **more), b""),) if self.round >= 0 else ()
        numbers = SwarmRoundMetrics(1.0, 1, 1)
        self.bodies[self.round] = VertexBody(
            RUN, self.round, 0, ZERO_DIGEST, 1.0, ADA, (), ZERO_DIGEST, commits, members, (), reports, numbers
        )
        self.ids[self.round] = digest(b"vertex %d" % self.round)
        self.scores.follow(self.round, self.ids, self.bodies)
        self.round += 1

    def words(self, of: int, *falls: tuple[int, ...]) -> list[SignedStatement]:
        drawn = self.scores.cases[of, ADA].judges
        return [word(by, of, each) for by, each in zip(drawn, falls, strict=False)]


def word(by: PeerId, of: int, falls: tuple[int, ...]) -> SignedStatement:
    return SignedStatement(by, encode(CheckReport("score", of, ADA, falls)), b"")


def test_scorers_are_drawn_among_the_others_so_many_that_liars_are_fewer_than_half():
    story = Story()
    story.goes_on()
    scorers = story.scores.cases[0, ADA].judges
    assert len(set(scorers)) == 5 and ADA not in scorers
    assert [judges_drawn(n, "two-thirds") for n in (2, 4, 7, 10, 100)] == [3, 3, 5, 5, 5]
    assert judges_drawn(100, "majority") == 3


def test_so_many_are_scored_as_the_run_says_but_none_with_late_work():
    story = Story(share=0.25)
    for _ in range(200):
        story.goes_on()
    assert 0.15 * SCORE_OPEN <= len(story.scores.cases) <= 0.6 * SCORE_OPEN
    story = Story()
    story.goes_on(claim=StepsTakenWhilePartitioned(0, 5, 20))
    assert not story.scores.cases


@pytest.mark.parametrize("lie", [TAUGHT, HOLLOW, (), (FALL_MOST, -FALL_MOST, 0), (-FALL_MOST, FALL_MOST, 0)])
@pytest.mark.parametrize(("honest", "opinion"), [(TAUGHT, "taught"), (HOLLOW, "hollow"), (UNCLEAR, "unclear")])
def test_two_liars_of_five_move_no_median_beyond_an_honest_word(lie, honest, opinion):
    story = Story()
    story.goes_on()
    story.goes_on(*story.words(0, lie, lie, honest, honest, honest))
    (score,) = story.scores.settled
    assert (score.round, score.authors, score.opinion) == (0, (ADA,), opinion)
    story.goes_on()
    assert not any(score.round == 0 for score in story.scores.settled), "once, and no more"


def test_nobody_waits_for_silent_scorers_for_ever_and_of_two_opinions_silence_buys_the_worse():
    story = Story()
    story.goes_on()
    story.goes_on(*story.words(0, TAUGHT, TAUGHT))
    story.goes_on(*story.words(1, TAUGHT, TAUGHT, HOLLOW, HOLLOW))
    settled = {}
    for _ in range(SCORE_OPEN):
        story.goes_on()
        settled |= {score.round: score.opinion for score in story.scores.settled}
    assert settled == {1: "hollow"}, "two of five are too few to say anything of round 0"


def test_the_first_word_of_a_scorer_counts_and_only_of_those_who_were_drawn():
    story = Story()
    story.goes_on()
    scorers = story.scores.cases[0, ADA].judges
    (other,) = set(PEERS) - set(scorers) - {ADA}
    story.goes_on(word(scorers[0], 0, TAUGHT), word(other, 0, HOLLOW))
    why = story.scores.problem
    assert (
        why(scorers[1], CheckReport("score", 0, ADA, TAUGHT)) is None
        and why(scorers[1], CheckReport("score", 0, ADA, ())) is None
    )
    assert why(scorers[0], CheckReport("score", 0, ADA, HOLLOW)) == "was said already"
    assert why(other, CheckReport("score", 0, ADA, TAUGHT)) == "is not by one who was drawn"
    assert why(scorers[1], CheckReport("score", 0, PEERS[1], TAUGHT)) == "is of no update that is being scored"
    for junk in ((1,), (1, 2), (1, 2, -3), (FALL_MOST + 1, 0, 0), (0, 0, 0, 0)):
        assert why(scorers[1], CheckReport("score", 0, ADA, junk)) == "holds falls that are none"
    said = VerifiedReport(scorers[1], CheckReport("score", 0, ADA, TAUGHT))
    told = admissible(said, story.bodies[1], RecentVertices({}, ledgers=LedgerSet([story.scores])), RUN, True, None)
    assert told is None and admissible(said, story.bodies[1], RecentVertices({}), RUN, True, None) is not None


@pytest.mark.parametrize("junk", [(1,), (1, 2, -3), (FALL_MOST + 1, 0, 0), tuple(range(300))])
def test_junk_in_a_vertex_that_somebody_forged_is_passed_over(junk):
    """`atoll verify` reads such vertices, too."""
    story = Story()
    story.goes_on()
    story.goes_on(*story.words(0, junk, TAUGHT, TAUGHT, TAUGHT))
    for _ in range(SCORE_OPEN):
        story.goes_on()
        if story.scores.settled:
            break
    assert [(score.round, score.opinion) for score in story.scores.settled] == [(0, "taught")]


def test_who_follows_from_the_middle_knows_what_the_others_know():
    """A restarted peer takes in the newest vertices only."""
    story = Story()
    for round in range(60):
        story.goes_on(*(story.words(round - 1, TAUGHT, HOLLOW) if round % 3 and round > 0 else ()))
    late = ScoreLedger(1.0, "two-thirds")
    late.follow(story.round - 1, story.ids, story.bodies)
    assert late.settled == story.scores.settled and late.cases == story.scores.cases


def test_a_lost_vertex_is_taken_at_its_word_as_long_as_it_may_matter():
    story = Story()
    story.goes_on()
    story.scores.lose(1)
    assert story.scores.problem(PEERS[1], CheckReport("score", 0, ADA, TAUGHT)) is None


@pytest.mark.parametrize(
    ("falls", "opinion"),
    [
        ((), "hollow"),
        ((0, 0, 0), "hollow"),
        ((-1, -2, 0), "hollow"),
        ((10, 10, 0), "hollow"),
        ((11, 10, 0), "taught"),
        ((12, 10, 1), "unclear"),
        ((13, 10, 1), "taught"),
    ],
)
def test_taught_is_a_step_forward_that_chance_does_not_explain(falls, opinion):
    assert opinion_of(falls) == opinion


def test_no_words_of_its_own_bring_anybody_off_probation_and_one_hollow_update_costs_half():
    good, score = MemberConduct(4, 4, 20, 20), FLOOR
    for _ in range(50):
        score = shift_bounds(score, good, scored=True)
    assert score == CLAIMED_UNTAUGHT < 6000
    assert shift_bounds(score, good, scored=True, vouched=True) == 6250
    assert shift_bounds(9000, good, scored=True, hollow=True) == 5000
    assert shift_bounds(FLOOR, None, scored=True, hollow=True) == FLOOR


def test_a_copied_update_is_scored_always_and_so_is_the_one_it_was_copied_from():
    """At a rate of a thousandth. The surprise: two members that took no step send the same bits too, without
    harm.
    """
    for steps, times in ((20, 40), (0, 0)):
        scores, bodies = ScoreLedger(0.001, "two-thirds"), {}
        for round in range(40):
            roots = (b"same", b"b", b"same", *(b"%d" % k for k in range(4)))
            said = [Commitment(round, 0, digest(root), 2, steps, 80, 2.0, 0.1, 80) for root in roots]
            signed = tuple(SignedStatement(p, encode(one), b"") for p, one in zip(PEERS, said, strict=True))
            members = tuple(Member(p, b"key", (), "trainer", "member", 0, 0.1, p) for p in PEERS)
            numbers = SwarmRoundMetrics(1.0, 1, 1)
            bodies[round] = VertexBody(
                RUN, round, 0, ZERO_DIGEST, 1.0, ADA, (), ZERO_DIGEST, signed, members, (), (), numbers
            )
            assert alike_in(bodies[round]) == (((PEERS[0], PEERS[2]),) if steps else ())
        drawn = list[PeerId]()
        for round, body in bodies.items():
            scores.follow(round, {round: digest(b"vertex %d" % round)}, {round: body})
            drawn += [peer for of, peer in scores.cases if of == round]
        assert drawn.count(PEERS[0]) == drawn.count(PEERS[2]) == times
        assert len(drawn) < 2 * times + 4
