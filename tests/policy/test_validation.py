"""State validation: validators, the meaning of their reports, and rollback targets, from vertices alone."""

from __future__ import annotations

from itertools import pairwise
from math import inf, nan

import pytest

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import VALIDATION_OPEN, VALIDATION_ROUNDS
from atoll.crypto.digest import digest
from atoll.policy.capability_terms import StateValidationTerms
from atoll.policy.ledger import LedgerSet
from atoll.policy.membership import RecentVertices, VerifiedReport, admissible
from atoll.verification.state_validation.policy import (
    ALL,
    COOL_ROUNDS,
    LASTING,
    LOSS_MOST,
    NAT,
    ValidationCandidate,
    ValidationLedger,
    fixed_point,
    fixed_share,
    voices,
)
from atoll.wire.codec import encode
from atoll.wire.messages.statements import HeldOutLossReport, RollbackOrder, SignedStatement
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, VertexBody

PEERS = tuple(PeerId(f"peer {i}") for i in range(7))  # two of them may lie: three voices of five drawn
HONEST = 2 * NAT
RUN = digest(b"run")


def state_of(round: int) -> Digest:
    return digest(b"state %d" % round)


def id_of(round: int) -> Digest:
    return digest(b"vertex %d" % round)


class Story:
    """Vertices one after the other; `said` gives every drawn validator's loss of the round before."""

    def __init__(
        self,
        rule: StateValidationTerms | None = None,
        quorum: str = "two-thirds",
        peers: tuple[PeerId, ...] = PEERS,
    ) -> None:
        self.validations = ValidationLedger(rule or StateValidationTerms(), quorum)
        self.peers, self.bodies, self.ids = peers, {}, {}
        self.round, self.trained = -1, 0
        self.goes_on()

    def goes_on(self, *reports: SignedStatement) -> ValidationCandidate | None:
        """One vertex more, with these reports; the candidate that it is, if it is one."""
        members = tuple(Member(p, b"key", (), "trainer", "member", 0, 0.1, p) for p in self.peers)
        back = [r for r in reports if b"RollbackOrder" in r.body]
        parts = (None,) if self.round >= 0 else ()
        state = digest(b"gone back") if back else state_of(self.round)
        numbers = SwarmRoundMetrics(1.0, 1, 1)
        body = VertexBody(
            RUN, self.round, 0, ZERO_DIGEST, 1.0, self.peers[0], parts, state, (), members, (), reports, numbers
        )
        self.bodies[self.round] = VertexBody(
            **{f: getattr(body, f) for f in body.__struct_fields__} | {"trained": self.trained}
        )
        self.ids[self.round] = id_of(self.round)
        self.validations.follow(self.round, self.ids, self.bodies)
        self.round, self.trained = self.round + 1, self.trained + 1
        return self.validations.candidates.get(self.round - 1)

    def words(self, round: int, *losses: int) -> list[SignedStatement]:
        """This many of those drawn for this round report these, in their order."""
        drawn = self.validations.candidates[round].validators
        return [report(by, round, loss) for by, loss in zip(drawn, losses, strict=False)]

    def plays(self, rounds: int, loss: int = HONEST) -> None:
        """All honest, one vertex later."""
        for _ in range(rounds):
            self.goes_on(*self.words(self.round - 1, *[loss] * 5))

    def demands(self) -> int | None:
        found = self.validations.demanded(self.validations.head)
        return None if found is None else found.round

    def returns(self) -> None:
        """The next vertex does what is demanded."""
        amend = self.validations.demanded(self.validations.head)
        assert amend is not None
        self.trained = amend.trained
        self.goes_on(SignedStatement(self.peers[0], encode(amend), b""))
        self.trained = amend.trained + 1


def report(by: PeerId, round: int, *losses: int, state: Digest | None = None) -> SignedStatement:
    return SignedStatement(by, encode(HeldOutLossReport(round, state or state_of(round), losses)), b"")


def test_losses_travel_in_whole_numbers_and_what_is_none_is_the_largest():
    assert [fixed_point(loss) for loss in (2.5, 0.0, -1e-9, 1.4e-6)] == [2_500_000, 0, 0, 1]
    assert {fixed_point(loss) for loss in (nan, inf, -inf, 1e300, 1e9)} == {LOSS_MOST}


@pytest.mark.parametrize(
    ("voters", "lying", "trusting"), [(1, 1, 1), (2, 2, 2), (3, 2, 2), (4, 2, 2), (7, 3, 2), (31, 11, 2)]
)
def test_more_voices_than_may_lie_decide_and_no_fewer_than_two_where_there_are_two(voters, lying, trusting):
    assert voices(voters, "two-thirds") == lying > (voters - 1) // 3 * (voters > 3)
    assert voices(voters, "majority") == trusting


def test_as_many_are_drawn_as_decide_whoever_lies_and_every_vertex_draws_others():
    story = Story()
    story.plays(6)
    drawn = [c.validators for c in story.validations.candidates.values()]
    assert {len(d) for d in drawn} == {5} and len(set(drawn)) > 1
    assert all(c.needed == 3 for c in story.validations.candidates.values())


def test_a_state_that_enough_find_bad_is_left_for_the_newest_good_one():
    story = Story()
    story.plays(5)
    story.goes_on(*story.words(4, *[3 * NAT] * 5))
    assert story.validations.candidates[4].opinion == "bad"
    assert story.validations.demanded(story.validations.head) == RollbackOrder(
        id_of(5), 3, id_of(3), state_of(3), 4, b""
    )
    story.returns()
    assert story.demands() is None and max(story.validations.candidates) == 3
    story.goes_on()
    story.plays(1)
    assert [c.opinion for c in story.validations.candidates.values()][-3:] == ["good", "good", "open"]


def test_two_liars_among_five_force_nothing_and_prevent_nothing():
    """Crying wolf, saying that all is well, saying nothing: beside three honest voices nothing changes."""
    story = Story()
    story.plays(4)
    for lie in (LOSS_MOST, 0, 10 * NAT):
        story.goes_on(*story.words(story.round - 1, lie, HONEST, lie, HONEST, HONEST))
        assert story.validations.candidates[story.round - 2].opinion == "good" and story.demands() is None
    good = story.round - 2
    for lie in ((), (0, 0), (HONEST, HONEST)):
        again = Story()
        again.plays(good + 2)
        last = again.round - 1
        again.goes_on(*again.words(last, 3 * NAT, 3 * NAT, 3 * NAT, *lie))
        assert again.validations.candidates[last].opinion == "bad" and again.demands() == last - 1


def test_two_voices_of_three_that_are_needed_decide_nothing():
    story = Story()
    story.plays(4)
    story.goes_on(*story.words(3, LOSS_MOST, LOSS_MOST))
    assert story.validations.candidates[3].opinion == "open" and story.demands() is None


def test_liars_that_speak_first_cannot_lift_the_bound():
    """In every round two liars and one honest word come in: the liars say as much as is just not bad."""
    story = Story()
    story.plays(2)
    for _ in range(30):
        round = story.round - 1
        story.goes_on(*story.words(round, HONEST, HONEST * 5 // 4, HONEST * 5 // 4))
    bounds = {c.bounds for r, c in story.validations.candidates.items() if r > 0}
    assert bounds == {(HONEST * 5 // 4,)}


def test_liars_that_say_nothing_is_lost_cannot_make_honest_losses_look_bad():
    story = Story()
    for _ in range(20):
        story.goes_on(*story.words(story.round - 1, 0, 0, HONEST, HONEST, HONEST))
    assert {c.values for c in story.validations.candidates.values() if c.said} == {(HONEST,)}
    assert story.demands() is None


def test_an_accuracy_is_as_many_answers_as_an_honest_validator_counted():
    """Three voices count. Two liars say all or nothing; who counts none is heard on the loss alone."""
    for lies in ((ALL, ALL), (0, 0)):
        story = Story()
        story.goes_on()
        drawn = story.validations.candidates[0].validators
        shares = dict(zip(drawn, (*lies, 431_000, 430_000, 432_000), strict=True))
        words = {by: HeldOutLossReport(0, state_of(0), (HONEST,), (one,)) for by, one in shares.items()}
        story.goes_on(*(SignedStatement(by, encode(said), b"") for by, said in list(words.items())[:2]))
        assert story.validations.candidates[0].accuracy is None
        story.goes_on(*(SignedStatement(by, encode(said), b"") for by, said in list(words.items())[2:]))
        (agreed,) = story.validations.candidates[0].accuracy or ()
        assert 430_000 <= agreed <= 432_000 and story.validations.candidates[0].values == (HONEST,)
    mute = Story()
    mute.plays(2)
    assert mute.validations.candidates[0].accuracy is None and mute.validations.candidates[0].opinion == "good"
    assert [fixed_share(one) for one in (0.431, 1.0, 7.0, -1.0, nan, inf)] == [431_000, ALL, ALL, 0, 0, 0]


def test_the_first_state_of_all_is_bad_only_if_its_loss_is_none():
    story = Story()
    story.goes_on(*story.words(-1, *[500 * NAT] * 5))
    assert story.validations.candidates[-1].opinion == "good" and story.validations.candidates[-1].bounds is None
    other = Story()
    other.goes_on(*other.words(-1, *[LOSS_MOST] * 5))
    assert other.validations.candidates[-1].opinion == "bad" and other.demands() is None  # nowhere to go


def test_a_loss_near_zero_may_rise_by_a_tenth_of_a_nat():
    story = Story()
    story.plays(3, loss=1000)
    assert story.validations.candidates[1].bounds == (1000 + NAT // 10,)


def test_any_set_of_data_can_tell():
    """Held-out loss falls, canaries are forgotten."""
    story = Story(StateValidationTerms(sets=2))
    for _ in range(3):
        drawn = story.validations.candidates[story.round - 1].validators
        story.goes_on(*[report(by, story.round - 1, HONEST, NAT) for by in drawn])
    drawn = story.validations.candidates[story.round - 1].validators
    story.goes_on(*[report(by, story.round - 1, HONEST // 2, 3 * NAT) for by in drawn])
    assert story.demands() == story.round - 3


def test_returns_come_ever_more_rarely_and_a_demand_that_nobody_follows_ends():
    """Every state after the good one is bad, forever."""
    story = Story()
    story.plays(3)
    went: list[int] = []
    while story.round < 100:
        if story.demands() is not None:
            went.append(story.round)
            story.returns()
            continue
        newest = max(story.validations.candidates)
        story.goes_on(*(story.words(newest, *[9 * NAT] * 5) if newest > 2 else ()))
    gaps = [b - a for a, b in pairwise(went)]
    assert gaps == [COOL_ROUNDS * 2**k + 1 for k in range(len(gaps))] and len(gaps) == 4
    stuck = Story()
    stuck.plays(3)
    demanded = 0
    for _ in range(3 * LASTING):
        stuck.goes_on(*stuck.words(stuck.round - 1, *[9 * NAT] * 5))
        demanded += stuck.demands() is not None
    assert 0 < demanded <= LASTING


@pytest.mark.parametrize("late", [1, 8, VALIDATION_OPEN])
def test_a_demand_lasts_as_long_however_late_the_words_came(late: int):
    """Validators that are slower than rounds: what they say last is in time, and so is what follows."""
    story = Story()
    story.plays(5)
    bad = story.round - 1
    words, demanded = story.words(bad, *[9 * NAT] * 5), 0
    for vertex in range(1, 4 * LASTING):
        story.goes_on(*(words if vertex == late else ()))
        demanded += story.demands() == bad - 1
    assert demanded == LASTING


def test_a_model_that_recovered_is_not_left():
    """A bad round during the cooling, and a good one after it."""
    story = Story()
    story.plays(3)
    story.goes_on(*story.words(2, *[9 * NAT] * 5))
    story.returns()
    story.goes_on()
    story.goes_on(*story.words(story.round - 1, *[9 * NAT] * 5))
    assert story.demands() is None
    story.plays(3)
    assert story.demands() is None and story.validations.good is not None


def test_when_the_founder_sends_the_run_back_what_came_after_sets_no_bound():
    story = Story()
    story.plays(3, loss=4 * NAT)
    story.plays(3, loss=NAT)
    amend = RollbackOrder(id_of(story.round - 1), 1, id_of(1), state_of(1), 2, b"by the founder")
    story.goes_on(SignedStatement(PEERS[0], encode(amend), b""))
    assert max(story.validations.candidates) == 1 and not story.validations.returns
    story.goes_on()
    story.plays(1, loss=4 * NAT)
    assert story.demands() is None and story.validations.candidates[story.round - 2].opinion == "good"


@pytest.mark.parametrize("after", [0, 1, VALIDATION_ROUNDS - 3, VALIDATION_ROUNDS, VALIDATION_ROUNDS + 5])
def test_who_comes_late_reads_the_same_out_of_the_window(after: int):
    """A peer that restarts at any head holds what one that never stopped holds, returns included."""
    story = Story()
    story.plays(VALIDATION_ROUNDS - 20)
    story.goes_on(*story.words(story.round - 1, *[9 * NAT] * 5))
    story.returns()
    story.goes_on()
    story.plays(after)
    fresh = ValidationLedger(StateValidationTerms(), "two-thirds")
    fresh.follow(story.round - 1, story.ids, story.bodies)
    assert fresh.candidates == story.validations.candidates and fresh.returns == story.validations.returns
    assert (
        fresh.demanded(fresh.head) == story.validations.demanded(story.validations.head)
        and len(fresh.candidates) <= VALIDATION_ROUNDS
    )


def test_only_what_trained_is_looked_at_and_only_every_so_many_rounds():
    story = Story(StateValidationTerms(every=4))
    for _ in range(16):
        story.goes_on()
    assert list(story.validations.candidates) == [-1, 3, 7, 11, 15]
    assert ValidationLedger(None, "majority").demanded(-2) is None


def test_a_word_stands_in_a_vertex_once_in_time_by_who_was_drawn_and_of_the_state_that_was_agreed():
    story = Story()
    story.plays(2)
    drawn = story.validations.candidates[1].validators
    other = next(p for p in PEERS if p not in drawn)

    def why(by: PeerId, said: HeldOutLossReport) -> str | None:
        recent = RecentVertices({}, ledgers=LedgerSet([story.validations]))
        return admissible(VerifiedReport(by, said), story.bodies[story.round - 1], recent, RUN, False, None)

    said = HeldOutLossReport(1, state_of(1), (HONEST,))
    assert why(drawn[0], said) is None
    assert "drawn" in why(other, said) and "only voting" in why(PeerId("stranger"), said)
    assert "another state" in why(drawn[0], HeldOutLossReport(1, state_of(2), (HONEST,)))
    assert "no state that is validated" in why(drawn[0], HeldOutLossReport(99, state_of(1), (HONEST,)))
    for losses in ((), (1, 1), (-1,), (LOSS_MOST + 1,)):
        assert "are none" in why(drawn[0], HeldOutLossReport(1, state_of(1), losses))
    for shares in ((), (1, 1), (-1,), (ALL + 1,)):
        assert "are none" in why(drawn[0], HeldOutLossReport(1, state_of(1), (HONEST,), shares))
    story.goes_on(report(drawn[0], 1, HONEST))
    assert why(drawn[0], said) == "was said already" and why(drawn[1], said) is None
    for _ in range(VALIDATION_OPEN):
        story.goes_on()
    assert why(drawn[1], said) == "comes too late"


def test_what_a_damaged_history_holds_ends_nobody():
    """Reports of another length, of unknown members, or unreadable, in a vertex that `atoll verify` walks over."""
    story = Story()
    drawn = story.validations.candidates[-1].validators
    junk = [
        SignedStatement(PEERS[0], b"\xc1 Validated", b""),
        report(drawn[0], -1, 1, 2, 3),
        report(drawn[1], 77, 1),
    ]
    story.goes_on(*junk, report(drawn[2], -1, HONEST))
    assert list(story.validations.candidates[-1].said) == [drawn[2]]
