"""Sampling of trainers: even turns for groups and members, and no gain from absence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import pytest
from msgspec.structs import replace

from atoll.base.fair_draw import CREDIT_MAX, TURN_COST, draw_sample
from atoll.base.ids import Digest, PeerId
from atoll.policy.membership import RecentVertices, VerifiedReport, admissible
from atoll.policy.membership_change import next_members
from atoll.policy.participation import ParticipationPolicy, group_of, named, next_credits
from atoll.policy.plan import RoundSettings, plan_round
from atoll.wire.codec import encode
from atoll.wire.messages.statements import RoundOptOutNotice, SignedStatement
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, VertexBody

ROUNDS = 100
SIX = ParticipationPolicy(peers=6)


def head(round: int, seed: int = 0) -> Digest:
    return Digest(bytes([seed, round % 251, round // 251]) * 10 + b"hh")


def swarm(*groups: str) -> VertexBody:
    """One member per group named, "" for none, in the order given."""
    members = tuple(
        Member(PeerId(f"p{i:03}"), b"", (), "trainer", "member", 0, 0.1, named(f"n{i}", group))
        for i, group in enumerate(groups)
    )
    return VertexBody(
        head(0), 0, 0, head(0), 1.0, PeerId("p000"), (), head(0), (), members, (), (), SwarmRoundMetrics(0.0, 0, 0)
    )


TWENTY = swarm(*"a" * 11, *"b" * 6, *"c" * 3)


class Told:
    """This many rounds of a swarm, and the turns of each member."""

    def __init__(self, body: VertexBody, sample: ParticipationPolicy, trusted: bool = True) -> None:
        rule = "majority" if trusted else "two-thirds"
        self.settings, self.trusted = RoundSettings(sample=sample, quorum=rule), trusted
        self.body, self.round = body, 0
        self.drawn: Counter[PeerId] = Counter()
        self.counted: Counter[PeerId] = Counter()

    def play(
        self,
        rounds: int = ROUNDS,
        fails: Callable[[PeerId], bool] = lambda peer: False,
        rests: Collection[int] = (),
        away: Collection[int] = (),
    ) -> Told:
        for _ in range(rounds):
            before = self.body
            members = tuple(
                replace(m, standing="away" if i in away else "member") for i, m in enumerate(before.members)
            )
            words = tuple(
                SignedStatement(before.members[i].peer, encode(RoundOptOutNotice(before.round + 1)), b"")
                for i in rests
            )
            before = replace(before, members=members, reports=words)
            drawn = plan_round(head(self.round), before, self.settings).drawn
            assert drawn is not None
            counted = {peer for peer in drawn if not fails(peer)}
            credits = next_credits(before, members, drawn, counted, self.trusted)
            assert all(0 <= n <= CREDIT_MAX for pair in credits for n in pair)
            self.body = replace(before, round=before.round + 1, members=members, credits=credits, reports=())
            self.drawn.update(drawn)
            self.counted.update(counted)
            self.round += 1
        return self

    def apart(self, turns: Counter[PeerId], key: Callable[[Member], str]) -> int:
        """Differences between the groups' turns."""
        of: Counter[str] = Counter()
        for m in self.body.members:
            of[key(m)] += turns[m.peer]
        return max(of.values()) - min(of.values())

    def turns_of(self, *places: int) -> int:
        return sum(self.counted[self.body.members[i].peer] for i in places)


def by_group(member: Member) -> str:
    return group_of(member.name)


def by_peer(member: Member) -> str:
    return member.peer


def test_groups_of_any_size_come_to_equally_many_turns_and_so_do_the_members_of_each():
    """Eleven, six and three members, six of them per round: within a turn after every one of a hundred rounds."""
    told = Told(TWENTY, SIX)
    for _ in range(ROUNDS):
        assert told.play(1).apart(told.counted, by_group) <= 1
    assert sum(told.counted.values()) == 6 * ROUNDS and told.turns_of(*range(11)) == 2 * ROUNDS
    for group in "abc":
        inside = [told.counted[m.peer] for m in told.body.members if group_of(m.name) == group]
        assert max(inside) - min(inside) <= 1


def test_without_groups_everybody_trains_equally_often():
    assert Told(swarm(*[""] * 20), ParticipationPolicy(thousandths=300)).play().apart(Counter(), by_peer) == 0
    told = Told(swarm(*[""] * 20), ParticipationPolicy(thousandths=300)).play()
    assert told.apart(told.counted, by_peer) <= 1 and sum(told.counted.values()) == 6 * ROUNDS


def test_a_group_that_was_away_catches_up_and_not_for_ever():
    """Two of five train; one is away for ten rounds, then for a hundred: it makes good ten turns, then sixteen."""
    told = Told(swarm(*[""] * 5), ParticipationPolicy(peers=2)).play(10, away=[4])
    assert told.turns_of(4) == 0
    assert told.play(15).apart(told.counted, by_peer) <= 1
    before = told.play(100, away=[4]).turns_of(4)
    assert told.play(100).turns_of(4) - before == pytest.approx(0.4 * 100 + 0.6 * 16, abs=6)


def test_who_is_drawn_in_vain_is_drawn_more_often_and_four_times_as_often_at_most():
    told = Told(swarm(*[""] * 20), ParticipationPolicy(peers=5)).play(200, fails=lambda peer: peer == "p000")
    usual = sum(told.drawn[PeerId(f"p{i:03}")] for i in range(1, 20)) / 19
    assert 2 * usual < told.drawn[PeerId("p000")] <= 4 * usual + 1


def test_who_rests_is_not_drawn_and_another_is():
    told = Told(swarm(*[""] * 6), ParticipationPolicy(peers=3)).play(4, rests=[0, 1])
    assert told.turns_of(0, 1) == 0 and told.turns_of(2, 3, 4, 5) == 12
    assert told.play(1, rests=range(6)).turns_of(*range(6)) == 15, "if all rest the draw is as if nobody did"


def test_where_members_may_lie_nobody_comes_to_be_drawn_sooner_by_what_it_does():
    """Declining costs a whole turn, absence brings none, and an invented group is none."""
    liar = PeerId("p000")
    told = Told(swarm("alone", *["all"] * 11), ParticipationPolicy(peers=4, least=4), trusted=False)
    assert told.play(30, fails=lambda peer: peer == liar).apart(told.drawn, by_peer) <= 1
    told.play(30, away=[0])
    told.drawn.clear()
    assert told.play(12).drawn[liar] <= 5, "of 48 turns of twelve: it is owed none"


def test_a_newcomer_waits_for_its_second_round_and_then_for_its_turn():
    told = Told(swarm(*[""] * 8), ParticipationPolicy(peers=2)).play(8)
    new = replace(told.body.members[0], peer=PeerId("p900"), standing="new", name="late")
    body = replace(told.body, members=(*told.body.members, new), credits=(*(told.body.credits or ()), (0, 0)))
    assert all(new.peer not in (plan_round(head(k, 1), body, told.settings).drawn or ()) for k in range(20))
    told.body = body
    first = next(k for k in range(20) if told.play(1).drawn[new.peer])
    assert first <= 4, "it begins level with whoever had the most turns"


def test_the_plan_of_a_sampled_round_is_one_of_those_that_are_drawn():
    settings = RoundSettings(sample=ParticipationPolicy(peers=4, least=4), quorum="two-thirds")
    body = swarm(*[""] * 12)
    plan = plan_round(head(1), body, settings)
    assert plan == plan_round(head(1), body, settings) and len(plan.trainers) == 4
    assert len(plan.voters) == 12 and {plan.shard(m.peer) for m in plan.trainers} == {(k, 4) for k in range(4)}
    assert len({plan_round(head(k), body, settings).drawn for k in range(20)}) > 15
    everybody = plan_round(head(1), body, RoundSettings())
    assert everybody.drawn is None and len(everybody.trainers) == 12


@pytest.mark.parametrize(
    ("sample", "of_twenty", "of_three"),
    [
        (ParticipationPolicy(thousandths=500), 10, 2),
        (ParticipationPolicy(thousandths=1), 1, 1),
        (ParticipationPolicy(thousandths=100, least=4), 4, 3),
        (ParticipationPolicy(peers=10), 10, 3),
    ],
)
def test_a_share_is_rounded_up_and_never_below_what_withstands_a_liar(sample, of_twenty, of_three):
    assert (sample.of(20), sample.of(3)) == (of_twenty, of_three)


def test_the_word_to_rest_is_for_this_round_or_the_next_and_for_who_trains():
    body = replace(swarm("", ""), round=7)
    body = replace(body, members=(body.members[0], replace(body.members[1], role="observer")))
    said = {
        r: admissible(
            VerifiedReport(PeerId("p000"), RoundOptOutNotice(r)), body, RecentVertices({}), head(0), False, None
        )
        for r in range(12)
    }
    assert [r for r, wrong in said.items() if wrong is None] == [8, 9]
    assert admissible(
        VerifiedReport(PeerId("p001"), RoundOptOutNotice(8)), body, RecentVertices({}), head(0), False, None
    )
    assert admissible(
        VerifiedReport(PeerId("p777"), RoundOptOutNotice(8)), body, RecentVertices({}), head(0), False, None
    )


def test_a_round_is_missed_by_those_alone_that_it_waited_for():
    body = swarm("", "", "")
    names = [m.peer for m in body.members]
    members, *_ = next_members(body, {}, set(), [], "majority", True, awaited={names[0]})
    assert [m.missed for m in members] == [1, 0, 0]


def test_equal_credits_are_drawn_by_the_seed_and_unequal_ones_are_not():
    groups = [f"g{i}" for i in range(10)]
    level = {tuple(draw_sample(bytes([k]) * 32, groups, [(0, 0)] * 10, 3)) for k in range(40)}
    assert len(level) > 25
    ahead = [(0, TURN_COST if i in (2, 5, 7) else 0) for i in range(10)]
    assert {tuple(draw_sample(bytes([k]) * 32, groups, ahead, 3)) for k in range(40)} == {(2, 5, 7)}


def test_a_name_carries_its_group_and_stays_within_its_length():
    assert group_of(named("eu/ada", "hospital-a")) == "hospital-a" and group_of("eu/ada") == ""
    assert named("n" * 80, "g") == "n" * 62 + "@g" and group_of(named("me@home", "g")) == "g"
