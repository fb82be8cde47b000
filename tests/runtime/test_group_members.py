"""Members of a group come, go, die, are late or lose their place: who is in a mean, and who is told what."""

from __future__ import annotations

import threading
from functools import partial
from queue import SimpleQueue

import pytest
import torch
from grouped import PATIENCE_S, groups, together
from msgspec.structs import replace

import atoll.reduce
from atoll.base.errors import RefusedError, RunFailedError
from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Event, Received, Send
from atoll.peer.events import LocalContributionSkipped, MembershipChanged, RoundBegan
from atoll.peer.round import adaptive_timeout
from atoll.runtime.allreduce import parts
from atoll.runtime.allreduce.driver import MEMBERSHIP_CHANGE, GroupDriver
from atoll.wire.codec import decode_statement
from atoll.wire.messages.round import (
    PartResponse,
    PartResult,
    RowContribution,
    RowResponse,
    UpdateCommitmentMessage,
    VoteMessage,
)

pytestmark = [pytest.mark.net]


def dies(member: atoll.reduce.Group) -> None:
    """Without a word, as if its process had been killed."""

    async def silenced() -> None:
        member._host.machine.handle = lambda event, now: []  # it hears nothing more
        member._host._carry_out_all = lambda effects: None
        await member._host.links.close()

    member._run(silenced())


def test_survivors_of_a_death_agree_and_name_who_is_in_the_result():
    """One of four is gone in the middle of calls that no other member waits for any longer than it takes
    to notice.
    """
    with groups(4) as members:
        tensors = [torch.full((500_000,), float(i)) for i in range(4)]
        together(members, [t.clone() for t in tensors])
        works = [m.all_reduce_async(t) for m, t in zip(members[1:], tensors[1:], strict=True)]
        dies(members[0])
        for work, member in zip(works, members[1:], strict=True):
            done = work.wait(PATIENCE_S)
            assert member.me in done.contributors and members[0].me not in done.contributors
        assert torch.equal(tensors[1], torch.full((500_000,), 2.0))
        assert torch.equal(tensors[1], tensors[2]) and torch.equal(tensors[1], tensors[3])


def test_whoever_comes_late_is_let_in_while_nobody_calls_and_counts_from_its_first_call():
    with groups(2) as members:
        together(members, [torch.ones(10), torch.ones(10)])
        members.append(atoll.reduce.join(members[0].ticket))
        tensors = [torch.full((10,), float(i)) for i in range(3)]
        for done in together(members, tensors):
            assert len(done.contributors) == 3 and done.complete
        assert all(torch.equal(t, torch.ones(10)) for t in tensors)


def test_a_newcomer_finds_the_group_by_any_member_when_the_founder_is_gone():
    with groups(3) as members:
        together(members, [torch.ones(10) for _ in members])
        dies(members[0])
        survivors = members[1:]
        together(survivors, [torch.ones(10), torch.ones(10)])
        members.append(atoll.reduce.join(members[0].ticket, via=members[1].addresses))
        tensors = [torch.full((10,), float(i)) for i in range(3)]
        for done in together(members[1:], tensors):
            assert len(done.contributors) == 3
        assert torch.equal(tensors[2], torch.ones(10))


def test_a_call_that_waits_while_a_newcomer_is_let_in_counts_everybody():
    """Ada has called, Bob has not; Cleo joins meanwhile. No member's call is answered without Bob."""
    with groups(2) as members:
        together(members, [torch.ones(10), torch.ones(10)])
        tensors = [torch.full((10,), float(i)) for i in range(3)]
        first = members[0].all_reduce_async(tensors[0])
        members.append(atoll.reduce.join(members[0].ticket))
        works = [first, *(m.all_reduce_async(t) for m, t in zip(members[1:], tensors[1:], strict=True))]
        assert all(len(work.wait(PATIENCE_S).contributors) == 3 for work in works)
        assert all(torch.equal(t, torch.ones(10)) for t in tensors)


@pytest.mark.parametrize("calls", [False, True], ids=["idle", "with a call that waits"])
def test_of_two_members_one_may_leave_and_the_other_goes_on(calls: bool):
    """Two voters agree on nothing without each other: a member that leaves stays until it is agreed that it is
    gone.
    """
    with groups(2) as members:
        together(members, [torch.ones(10), torch.ones(10)])
        mine, yours = torch.ones(10), torch.zeros(10)
        work = members[0].all_reduce_async(mine) if calls else None
        members[0].close()
        done = members[1].all_reduce(yours, timeout_s=PATIENCE_S)
        assert done.contributors == members[1].peers == (members[1].me,) and not done.missing
        assert mine.all() and not yours.any()
        if work is not None:
            with pytest.raises(RunFailedError, match="E-RED-04"):
                work.wait(PATIENCE_S)


def test_who_leaves_stays_until_the_other_holds_the_vertex_that_lets_it_go():
    """The votes that make it final get lost, so only the leaver has it; alone the other would have no quorum."""
    with groups(2, silence_s=0.6) as members:
        together(members, [torch.ones(10), torch.ones(10)])
        leaver = members[0]._host
        send = leaver._send

        def loses_final_votes(effect: Send) -> None:
            vote = effect.message.statement if isinstance(effect.message, VoteMessage) else None
            if vote is None or decode_statement(vote.body, vote.signer).stage == "prepare":
                send(effect)

        leaver._send = loses_final_votes
        members[0].close()
        done = members[1].all_reduce(torch.ones(10), timeout_s=PATIENCE_S)
        assert done.contributors == (members[1].me,)


def test_whoever_is_left_alone_by_a_death_is_told_though_it_would_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "atoll.runtime.allreduce.driver.FAREWELL_S", 0.0
    )  # the dead one cannot know that it is alone
    with groups(2, timeout_s=0.3, silence_s=0.6) as members:
        together(members, [torch.ones(10), torch.ones(10)])
        dies(members[0])
        mine = torch.zeros(10)
        for _ in range(2):
            with pytest.raises(
                RunFailedError, match="E-RED-18 too few members are left to agree: m0 cannot be heard"
            ):
                members[1].all_reduce(mine, timeout_s=PATIENCE_S)
        assert not mine.any()


def test_a_group_that_shrinks_below_what_its_rule_needs_waits_for_others_and_says_so():
    """Four withstand one liar, three no member. A fourth comes, and the call that it finds waiting is done."""
    with groups(4, trust="community", statistic="trimmed_mean", timeout_s=0.5) as members:
        together(members, [torch.ones(10) for _ in members])
        members.pop().close()
        mine = torch.zeros(10)
        with pytest.raises(RunFailedError, match="E-RED-21 3 members are left, and 4 are needed"):
            members[0].all_reduce(mine, timeout_s=PATIENCE_S)
        assert not mine.any()
        members.append(atoll.reduce.join(members[0].ticket))
        assert all(len(done.contributors) == 4 for done in together(members, [torch.ones(10) for _ in members]))


def test_nobody_is_left_out_where_one_alone_has_heard_of_a_newcomer():
    """It passes, and the round closes before its proposer hears of any member. The surprise: the others' call was
    done without that member, whose user then called for the first time where theirs did so for the second.
    """
    with groups(3) as members:
        together(members, [torch.ones(10) for _ in members])
        round = members[0]._host.machine.round
        first = round.agreement.proposer(0)
        knows, *others = sorted(members, key=lambda m: m.me == first)
        passed: SimpleQueue[LocalContributionSkipped] = SimpleQueue()
        knows._host.listeners.append(
            lambda fact: passed.put(fact) if isinstance(fact, LocalContributionSkipped) else None
        )
        tensors = [torch.full((10,), float(i)) for i in range(3)]
        works = [m.all_reduce_async(t, topology="ring") for m, t in zip(others, tensors[1:], strict=True)]
        knows._loop.call_soon_threadsafe(knows._host.island.pass_round, MEMBERSHIP_CHANGE)
        passed.get(timeout=PATIENCE_S)
        works.append(knows.all_reduce_async(tensors[0], topology="ring"))
        assert all(len(work.wait(PATIENCE_S).contributors) == 3 for work in works)
        assert all(torch.equal(t, torch.ones(10)) for t in tensors)


def test_a_word_that_somebody_comes_or_goes_holds_up_nobody_for_ever():
    """One member says so in every round, and no member ever comes: the others' call is done without it."""
    with groups(3) as members:
        together(members, [torch.ones(10) for _ in members])
        liar, *others = members
        says = partial(liar._host.island.pass_round, MEMBERSHIP_CHANGE)
        liar._host.listeners.append(lambda fact: says() if isinstance(fact, RoundBegan) else None)
        liar._loop.call_soon_threadsafe(says)
        works = [m.all_reduce_async(torch.ones(10)) for m in others]
        assert all(len(work.wait(10.0).contributors) == 2 for work in works)


def test_a_call_that_waits_while_somebody_leaves_still_waits_for_everybody_else():
    """Ada has called, Bob has not; Cleo leaves. Ada's call is answered with Bob's."""
    with groups(3) as members:
        together(members, [torch.ones(10) for _ in members])
        tensors = [torch.full((10,), float(i)) for i in range(2)]
        first = members[0].all_reduce_async(tensors[0])
        members[2].close()
        second = members[1].all_reduce_async(tensors[1])
        assert all(len(work.wait(PATIENCE_S).contributors) == 2 for work in (first, second))
        assert all(torch.equal(t, torch.full((10,), 0.5)) for t in tensors)


def test_whoever_is_left_alone_by_one_that_could_not_stay_is_told_who_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atoll.runtime.allreduce.driver.FAREWELL_S", 0.0)
    with groups(2) as members:
        together(members, [torch.ones(10), torch.ones(10)])
        passed: SimpleQueue[LocalContributionSkipped] = SimpleQueue()
        members[1]._host.listeners.append(
            lambda fact: passed.put(fact) if isinstance(fact, LocalContributionSkipped) else None
        )
        members[0].close()
        passed.get(timeout=PATIENCE_S)
        with pytest.raises(RunFailedError, match=r"E-RED-03 .*\n.*too few members are left to agree: m0 left\n"):
            members[1].all_reduce(torch.ones(10), timeout_s=0.1)


def test_a_member_that_only_dials_out_counts_and_gets_the_mean():
    """It listens nowhere, owns no part and has no vote; the others need not wait for it to leave."""
    with groups(2) as members:
        together(members, [torch.ones(10), torch.ones(10)])
        members.append(atoll.reduce.join(members[0].ticket, client=True))
        members[0].wait_for_peers(3)
        assert members[2].addresses == () and members[2].me in members[0].peers
        for size in (10, 300_000):
            tensors = [torch.full((size,), float(i)) for i in range(3)]
            assert all(len(done.contributors) == 3 and done.complete for done in together(members, tensors))
            assert all(torch.equal(t, torch.ones(size)) for t in tensors)
        members.pop().close()
        assert all(len(done.contributors) == 2 for done in together(members, tensors[:2]))


def test_a_member_that_does_not_call_passes_and_is_named():
    with groups(3, timeout_s=0.5) as members:
        tensors = [torch.full((10,), float(i)) for i in range(3)]
        together(members, [t.clone() for t in tensors])
        for done in together(members[:2], tensors[:2]):
            assert done.missing == (members[2].me,) and len(done.contributors) == 2
        assert torch.equal(tensors[0], torch.full((10,), 0.5))


def test_a_member_that_the_mean_does_not_reach_is_told_and_its_next_call_is_with_the_others(monkeypatch):
    """Once its call went into the next round instead, and waited there for calls that no member was
    going to make.
    """
    monkeypatch.setattr(adaptive_timeout, "REPAIR_S", 0.5)
    monkeypatch.setattr(parts, "PART_VALUES_LEAST", 1000)  # so that every member owns a part
    with groups(3) as members:
        behind = members[2]._host
        hear = behind.machine.handle

        def deaf(event, now):
            lost = (
                isinstance(event, Received)
                and isinstance(event.message, PartResult | PartResponse)
                and event.payload
            )
            return [] if lost else hear(event, now)

        behind.machine.handle = deaf
        tensors = [torch.full((3000,), float(i)) for i in range(3)]
        works = [m.all_reduce_async(t) for m, t in zip(members, tensors, strict=True)]
        assert all(work.wait(PATIENCE_S).complete for work in works[:2])
        with pytest.raises(RunFailedError, match="did not reach this member") as told:
            works[2].wait(PATIENCE_S)
        assert told.value.code == "E-RED-13" and torch.equal(tensors[2], torch.full((3000,), 2.0))
        behind.machine.handle = hear
        assert all(len(done.contributors) == 3 for done in together(members, tensors))
        assert all(torch.equal(t, tensors[0]) for t in tensors)


def test_a_mean_of_other_calls_is_not_taken_for_ones_own():
    """The third calls otherwise while it is cut off: the others give it up, and what reaches it is their mean, in
    a codec whose wires are as long and mean something else, or in another number of parts."""
    with groups(3, codec="bf16", topology="butterfly") as members:
        together(members, [torch.ones(1) for _ in members])
        third, cut_off = members[2].me, threading.Event()
        for member in members:
            loses_calls(member._host, third, cut_off)
        for asked in ({"codec": "fp16"}, {"topology": "star"}):
            together(members, [torch.ones(1) for _ in members])  # a member that was missed is here again
            cut_off.set()
            tensors = [torch.full((100_000,), 1.0 + i) for i in range(3)]
            otherwise = members[2].all_reduce_async(tensors[2], **asked)
            for done in together(members[:2], tensors[:2]):
                assert done.missing == (third,)
            with pytest.raises(RunFailedError, match=r"E-RED-10 m[01] called with .*, this member with"):
                otherwise.wait(PATIENCE_S)
            assert torch.equal(tensors[2], torch.full((100_000,), 3.0))
            cut_off.clear()


def loses_calls(host: GroupDriver, third: PeerId, cut_off: threading.Event) -> None:
    """While it is cut off the third hears of no call, and no member hears of its own, or that it is there."""
    hear, gone = host.machine.handle, host.machine.heartbeat.is_gone

    def handle(event: Event, now: float) -> list[Effect]:
        of_calls = isinstance(event, Received) and isinstance(
            event.message, UpdateCommitmentMessage | RowContribution | RowResponse
        )
        lost = of_calls and cut_off.is_set() and third in (host.me, event.sender)
        return [] if lost else hear(event, now)

    host.machine.handle = handle
    host.machine.heartbeat.is_gone = lambda peer: (peer == third and cut_off.is_set()) or gone(peer)
    host.machine.known.gone = host.machine.heartbeat.is_gone


@pytest.mark.parametrize(("standing", "code"), [("away", "E-RED-15"), ("expelled", "E-RED-16")])
def test_a_member_that_lost_its_place_is_told_at_once_and_not_when_its_patience_ends(
    standing: str, code: str, monkeypatch
):
    """Its call waits for another member's; then it hears what the others agreed on meanwhile."""
    monkeypatch.setattr(
        "atoll.runtime.allreduce.driver.FAREWELL_S", 0.0
    )  # the two do not agree on who is there any more
    with groups(2) as members:
        tensors = [torch.full((10,), float(i)) for i in range(2)]
        together(members, [t.clone() for t in tensors])
        work = members[1].all_reduce_async(tensors[1])
        host = members[1]._host

        async def hears() -> None:
            bodies = host.machine.history.bodies
            head, mine = host.machine.history.head, members[1].me
            others = [replace(m, standing=standing) if m.peer == mine else m for m in bodies[head].members]
            bodies[head] = replace(bodies[head], members=tuple(others))
            host._react_to_fact(MembershipChanged(joined=(), left=(mine,), members=tuple(others)))

        members[1]._run(hears())
        with pytest.raises((RunFailedError, RefusedError)) as told:
            work.wait(PATIENCE_S / 2)  # its patience is twice that
        assert told.value.code == code and torch.equal(tensors[1], torch.ones(10))
