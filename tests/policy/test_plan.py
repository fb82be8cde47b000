"""Plans: pure, paced by the clock, and with quorums that overlap."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.base.limits import COMMITTEE_MAX, COMMITTEE_MOST
from atoll.policy.plan import GROWN_ATTEMPTS, RoundSettings, plan_round, quorum
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, VertexBody

HEAD = Digest(b"h" * 32)


def body(count: int, step_s: float = 0.1) -> VertexBody:
    members = tuple(Member(PeerId(f"p{i:03}"), b"", (), "trainer", "member", 0, step_s, "") for i in range(count))
    return VertexBody(
        HEAD, 5, 0, HEAD, 1000.0, PeerId("p000"), (), HEAD, (), members, (), (), SwarmRoundMetrics(0.0, 0, 0)
    )


def test_the_same_vertex_gives_the_same_plan():
    assert plan_round(HEAD, body(9), RoundSettings()) == plan_round(HEAD, body(9), RoundSettings())


@pytest.mark.parametrize("rule", ["majority", "two-thirds"])
def test_two_quorums_share_more_voters_than_may_be_wrong(rule):
    for voters in range(1, 101):
        needed = quorum(voters, rule)
        shared = 2 * needed - voters
        liars = (voters - 1) // 3 if rule == "two-thirds" else 0
        assert needed <= voters and shared > liars, voters
        assert voters - liars >= needed, "the honest alone must be enough"


def test_attempts_follow_each_other_by_the_clock_without_gap_or_overlap():
    """Two peers that lost each other for an hour are in the same attempt when they meet."""
    plan = plan_round(HEAD, body(4), RoundSettings())
    for k, (this, following) in enumerate(pairwise(plan.times(k) for k in range(GROWN_ATTEMPTS + 6))):
        assert this.agree_until == pytest.approx(following.begin)
        assert this.begin < this.train_until < this.answer_until[0] < this.answer_until[-1] < this.agree_until
        assert plan.attempt_at(this.begin + 1e-6) == plan.attempt_at(this.agree_until - 1e-6) == k
    assert plan.attempt_at(0.0) == 0
    later = plan.begin + 3600
    assert plan.times(plan.attempt_at(later)).begin <= later < plan.times(plan.attempt_at(later)).agree_until


def test_a_large_swarm_votes_by_a_committee_that_everybody_draws_alike():
    plan = plan_round(HEAD, body(COMMITTEE_MAX + 40), RoundSettings())
    assert len(plan.committee) == COMMITTEE_MAX == len(set(plan.committee))
    assert sorted(plan.turns()) == list(plan.committee)


def test_genesis_may_let_more_vote_and_says_nothing_where_it_does_not():
    """A hundred voters, all in the committee: 33 of them may lie. Old settings keep their bytes."""
    everybody = RoundSettings(committee=COMMITTEE_MOST)
    plan = plan_round(HEAD, body(100), replace(everybody, quorum="two-thirds"))
    assert len(plan.committee) == 100 and plan.tolerated == 33
    assert len(plan_round(HEAD, body(COMMITTEE_MOST + 1), everybody).committee) == COMMITTEE_MOST
    assert b"committee" not in msgspec.msgpack.encode(RoundSettings())
    for size in (0, COMMITTEE_MOST + 1):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"committee": size}, RoundSettings)


def test_one_member_that_calls_itself_slow_stretches_the_plan_within_reason():
    """Three times the median at most: a word about oneself must not stop the others."""
    fast = body(5)
    slow = fast.members[0].__class__(PeerId("p000"), b"", (), "trainer", "member", 0, 1e6, "")
    with_slow = VertexBody(
        **{**{f: getattr(fast, f) for f in fast.__struct_fields__}, "members": (slow, *fast.members[1:])}
    )
    usual = plan_round(HEAD, fast, RoundSettings()).train_s
    assert usual < plan_round(HEAD, with_slow, RoundSettings()).train_s <= 3 * usual


def test_a_voter_whose_clock_is_off_owns_nothing_until_it_is_right_again():
    """It still votes and contributes; only if every clock is off do they all own again."""
    right = body(4)
    wrong = replace(right, members=(replace(right.members[0], offset_s=-1.0), *right.members[1:]))
    plan = plan_round(HEAD, wrong, RoundSettings())
    assert plan.owners == ("p001", "p002", "p003") and "p000" in plan.committee
    hopeless = replace(right, members=tuple(replace(m, offset_s=9.0) for m in right.members))
    assert plan_round(HEAD, hopeless, RoundSettings()).owners == plan.voters
