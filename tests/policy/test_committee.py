"""Proposer turns that no member can choose, and committees drawn by reputation: equal at every peer, as often as
scores require, and never in favor of a new name.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from atoll.base.draw import shuffled
from atoll.base.ids import Digest, PeerId
from atoll.base.limits import SCORE_ONE
from atoll.policy.committee import CIRCLE_ROUNDS, chances, draw_committee, on_circle, whose_turn
from atoll.policy.plan import RoundSettings, plan_round
from atoll.policy.reputation import FLOOR
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, VertexBody

HEAD = Digest(b"h" * 32)

VOTERS = tuple(PeerId(f"p{i:03}") for i in range(90))


def body() -> VertexBody:
    members = tuple(Member(peer, b"", (), "trainer", "member", 0, 0.1, "") for peer in VOTERS)
    return VertexBody(
        HEAD, 5, 0, HEAD, 1000.0, VOTERS[0], (), HEAD, (), members, (), (), SwarmRoundMetrics(0.0, 0, 0)
    )


def with_first(most: int, scores: dict[PeerId, int]) -> tuple[PeerId, ...]:
    """The first proposer votes; the others are drawn."""
    first = plan_round(HEAD, body(), RoundSettings()).turns()[0]
    others = [peer for peer in VOTERS if peer != first]
    return tuple(sorted((first, *draw_committee(HEAD, others, most, scores))))


def heads(count: int) -> list[Digest]:
    return [Digest(k.to_bytes(32, "big")) for k in range(count)]


def records(seed: int, voters: tuple[PeerId, ...] = VOTERS) -> dict[PeerId, int]:
    draw = random.Random(seed)
    return {peer: draw.choice([FLOOR, draw.randint(FLOOR, SCORE_ONE), SCORE_ONE]) for peer in voters}


@pytest.mark.parametrize("seed", range(20))
def test_everybody_draws_the_same_of_the_right_size_whatever_the_scores_and_their_order(seed: int):
    scores, most = records(seed), random.Random(seed).choice([1, 2, 7, 32, 60, 61, 89])
    drawn = draw_committee(HEAD, VOTERS, most, scores)
    turned = dict(reversed(scores.items()))
    assert drawn == draw_committee(HEAD, VOTERS, most, turned) == tuple(sorted(set(drawn)))
    assert len(drawn) == most and draw_committee(HEAD, VOTERS, 90, scores) == VOTERS
    assert {draw_committee(head, VOTERS, most, scores) for head in heads(4)} != {drawn}


def test_without_records_nothing_changes_and_equal_ones_are_equal_chances():
    assert draw_committee(HEAD, VOTERS, 32, {}) == tuple(sorted(shuffled(HEAD, "committee", VOTERS)[:32]))
    assert plan_round(HEAD, body(), RoundSettings()).committee == with_first(31, {})
    assert len(set(chances(VOTERS, 32, dict.fromkeys(VOTERS, 7_000)).values())) == 1


def test_a_plan_draws_by_the_scores_of_its_vertex():
    scored = replace(body(), reputation=tuple(records(1).values()))
    assert plan_round(HEAD, scored, RoundSettings()).committee == with_first(31, records(1))


@pytest.mark.parametrize("places", [7, 32, 61, 80])
def test_nobody_votes_more_often_than_half_as_much_again_as_an_equal_chance(places: int):
    """Exactly, from the weights: also for a third with the best records among newcomers, and one among all."""
    for old in (1, 30, 89):
        scores = {peer: SCORE_ONE if i < old else FLOOR for i, peer in enumerate(VOTERS)}
        weights = chances(VOTERS, places, scores)
        total = sum(weights.values())
        assert all(2 * len(VOTERS) * w <= 3 * total and places * w <= total for w in weights.values())
        assert max(weights[p] for p in VOTERS[old:]) <= min(weights[p] for p in VOTERS[:old])


def test_members_vote_as_often_as_their_scores_say():
    """6000 draws of 20 of 90: each count is within five deviations of places · weight / sum."""
    scores, rounds = records(3), 6000
    weights = chances(VOTERS, 20, scores)
    counts = Counter(p for head in heads(rounds) for p in draw_committee(head, VOTERS, 20, scores))
    for peer, weight in weights.items():
        share = 20 * weight / sum(weights.values())
        assert abs(counts[peer] - rounds * share) < 5 * (rounds * share * (1 - share)) ** 0.5 + 1, peer


def test_a_new_name_never_votes_more_often_than_the_old_one_did():
    """A member that leaves its reputation behind, however bad, gets the floor, and a score is never below it."""
    for seed in range(20):
        scores = records(seed)
        washed = {**scores, VOTERS[0]: FLOOR}
        before, after = (chances(VOTERS, 32, s) for s in (scores, washed))
        assert after[VOTERS[0]] * sum(before.values()) <= before[VOTERS[0]] * sum(after.values())
        assert chances((*VOTERS, PeerId("new")), 32, scores)[PeerId("new")] == FLOOR


# ---- turns -------------------------------------------------------------------------------------------------


def writers(rounds: int, since: dict[PeerId, int], first: int = 0) -> list[PeerId]:
    """Proposers of this many rounds without failures."""
    wrote = [VOTERS[0]]
    for round in range(first, first + rounds):
        wrote.append(whose_turn(HEAD, round, since, wrote[-1]))
    return wrote[1:]


def test_everybody_has_one_turn_in_each_time_round_and_vertices_have_no_part_in_it():
    since = dict.fromkeys(VOTERS[:9], -1)
    turns = writers(27, since)
    assert turns[:9] == turns[9:18] == turns[18:] and set(turns) == since.keys()
    heads_plans = [
        plan_round(head, replace(body(), members=body().members[:9]), RoundSettings()) for head in heads(9)
    ]
    assert len({plan.turns() for plan in heads_plans}) == 1


def test_whoever_is_sent_away_or_comes_back_moves_nobody_elses_turn():
    since = dict.fromkeys(VOTERS[:9], -1)
    turns = writers(9, since)
    for gone in turns:
        rest = {peer: came for peer, came in since.items() if peer != gone}
        for at, wrote in enumerate(turns):
            following = [p for p in (turns * 2)[at + 1 :] if p != gone]
            assert whose_turn(HEAD, 20, rest, wrote) == following[0]


def test_new_names_just_behind_the_writer_wait_for_as_many_rounds_as_there_are_voters():
    """Of a thousand names the closest one behind: otherwise a proposer could admit the next proposer, again and
    again.
    """
    old = dict.fromkeys(VOTERS[:9], -1)
    names = [PeerId(f"new{i:04}") for i in range(1000)]
    circle = on_circle(HEAD, 40, [*old, *names])
    wrote = VOTERS[3]
    new = circle[(circle.index(wrote) + 1) % len(circle)]
    assert new in names
    assert [whose_turn(HEAD, 40, old | {new: came}, wrote) == new for came in (39, 30, 29, 20)] == [False] * 2 + [
        True
    ] * 2
    assert whose_turn(HEAD, 40, {new: 39}, wrote) == new  # one member has to


def test_who_sits_side_by_side_does_not_stay_there():
    circles = {tuple(on_circle(HEAD, k * CIRCLE_ROUNDS, VOTERS[:9])) for k in range(20)}
    assert len(circles) == 20
    assert on_circle(HEAD, 0, VOTERS) == on_circle(HEAD, CIRCLE_ROUNDS - 1, VOTERS)
