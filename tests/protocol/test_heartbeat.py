"""Run time out of other people's clocks, some of which lie."""

from __future__ import annotations

from math import inf, nan

import pytest

from atoll.base.ids import PeerId
from atoll.base.machine import Emit, LinkDown, LinkUp, Received, Send
from atoll.protocol.membership.failure_detector import FailureDetector, PeerDeparted
from atoll.wire.messages.membership import PingReply

OTHERS = tuple(PeerId(name) for name in "abcd")


def watching(*others: PeerId) -> FailureDetector:
    heart = FailureDetector(PeerId("me"), 2.0, 6.0)
    heart.set_members((PeerId("me"), *others), now=100.0)
    return heart


def told(heart: FailureDetector, by: PeerId, clock_s: float) -> None:
    """An answer after no time at all."""
    heart.on_heartbeat(Received(by, PingReply(100.0, clock_s, head=-1)), now=100.0, head=-1)


@pytest.mark.parametrize("lie", [-1e300, 1e300, -1e9, 1e4, nan, inf])
def test_liars_who_answer_first_do_not_move_run_time(lie: float):
    """Two liars of four are heard before anybody else. With one of them the median was half of what it said: run
    time became -5e299, a second more was no other time, and a timer of a round fired again and again for ever."""
    heart = watching(*OTHERS)
    for count, (who, says) in enumerate(zip(OTHERS, (lie, lie, 100.1, 100.1), strict=True)):
        told(heart, who, says)
        assert abs(heart.offset_s) <= 0.1, f"after {count + 1} answers"


def test_whoever_is_far_off_follows_most_of_those_it_watches():
    """My own clock is two hours slow."""
    heart = watching(*OTHERS)
    for who in OTHERS[:3]:
        told(heart, who, 7300.0)
    assert heart.offset_s == 7200.0


def test_two_alone_meet_halfway_however_far_apart():
    heart = watching(OTHERS[0])
    told(heart, OTHERS[0], 7300.0)
    assert heart.offset_s == 3600.0


def test_who_is_called_and_does_not_answer_is_not_here_and_nobody_accuses_it():
    """Twenty members, four watched: of two others that are called one answers, at the second asking."""
    members = tuple(PeerId(f"p{i:02d}") for i in range(20))
    heart = FailureDetector(members[0], 2.0, 6.0)
    heart.set_members(members, 0.0)
    well, lost = [p for p in members[1:] if p not in heart.watched][-2:]
    asked = [e.to for e in heart.ping_unwatched(members, 0.0, 0) if isinstance(e, Send)]
    assert {well, lost} <= set(asked) and not set(asked) & heart.watched.keys()
    for peer in heart.watched.keys() | set(asked) - {well, lost}:
        heart.record_life(peer, 1.0)
    assert [e.to for e in heart.tick(2.0, 0) if isinstance(e, Send)].count(well) == 1
    heart.record_life(well, 3.0)
    assert heart.is_present(lost, 5.9) and not heart.is_present(lost, 6.0) and heart.is_present(well, 60.0)
    assert not heart.is_gone(lost)
    heart.record_life(lost, 7.0)
    assert heart.is_present(lost, 60.0)


def test_nobody_takes_itself_for_gone_whatever_others_say():
    """It was silent for a while, all say so, and it is back: as a proposer it would vote itself away."""
    heart = watching(*OTHERS)
    heart.accusers_needed = 2
    for by in OTHERS:
        heart.record_suspicion(heart.me, by, 100.0)
    assert not heart.is_gone(heart.me)


def test_if_the_redial_fails_otherwise_the_others_suspicions_end_the_wait():
    """The listener of a dying process hangs up, or a firewall drops the dial: only the others' dials are refused.
    All waited six seconds for that one watcher."""
    heart, dead = watching(*OTHERS), OTHERS[0]
    heart.accusers_needed = 2
    heart.record_suspicion(dead, OTHERS[1], 100.0)
    heart.record_suspicion(dead, OTHERS[2], 100.0)
    assert not heart.is_gone(dead), "its connection stands here: what is heard over it decides"
    heart.on_link_event(LinkDown(dead, refused=False), 100.1)
    assert heart.is_gone(dead)
    heart.on_link_event(LinkUp(dead), 100.2)
    assert not heart.is_gone(dead)


def test_one_suspicion_does_not_end_the_wait_for_a_peer_whose_link_broke():
    heart = watching(*OTHERS)
    heart.accusers_needed = 2
    heart.on_link_event(LinkDown(OTHERS[0], refused=False), 100.0)
    heart.record_suspicion(OTHERS[0], OTHERS[1], 100.0)
    assert not heart.is_gone(OTHERS[0])


@pytest.mark.parametrize(
    "returns",
    [
        lambda heart: heart.record_life(OTHERS[0], 102.0),
        lambda heart: heart.on_link_event(LinkUp(OTHERS[0]), 100.1),
    ],
)
def test_a_peer_whose_redial_was_refused_is_back_with_a_connection_or_with_its_next_heartbeat(returns):
    heart = watching(*OTHERS)
    heart.on_link_event(LinkDown(OTHERS[0], refused=True), 100.0)
    assert returns(heart) and not heart.is_gone(OTHERS[0])


def test_a_message_that_is_read_after_its_author_died_brings_it_not_back():
    """A payload is hashed for some time; the redial was refused meanwhile."""
    heart = watching(*OTHERS)
    heart.on_link_event(LinkDown(OTHERS[0], refused=True), 100.0)
    assert not heart.record_life(OTHERS[0], 101.9) and heart.is_gone(OTHERS[0])


def test_a_peer_whose_process_ends_after_its_farewell_has_departed_once():
    """If it sends anything in between, it still votes on its own farewell, and its end is an ordinary one."""
    heart = watching(*OTHERS)
    gone, voter = OTHERS[:2]
    heart.record_farewell(gone)
    assert heart.is_gone(gone)
    assert heart.on_link_event(LinkDown(gone, refused=True), 101.0) == [Emit(PeerDeparted(peer=gone))]
    assert heart.on_link_event(LinkDown(gone, refused=True), 102.0) == []
    heart.record_farewell(voter)
    heart.record_life(voter, 102.0)
    assert Emit(PeerDeparted(peer=voter)) not in heart.on_link_event(LinkDown(voter, refused=True), 103.0)
