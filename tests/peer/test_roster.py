"""The roster: which connections follow the agreed membership, and when those of members that left end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from atoll.base.ids import PeerId
from atoll.base.machine import Connect, Disconnect, Effect, SetTimer
from atoll.peer.membership.roster import LAST_WORDS_S, MemberRoster
from atoll.wire.messages.vertex import Member, Standing


def roster_of(**standings: Standing) -> tuple[MemberRoster, Any]:
    """`me` among these members, and a history whose head the test sets."""
    history = SimpleNamespace(head=7, head_body=body_with(**standings), bodies={})
    return MemberRoster(PeerId("me"), cast(Any, history), client=False), history


def body_with(**standings: Standing) -> Any:
    lines = [Member(PeerId(p), b"", (), "trainer", s, 0, 0.0, p) for p, s in standings.items()]
    return SimpleNamespace(members=lines, epoch=0)


def ended(effects: list[Effect]) -> list[str]:
    assert all(isinstance(e, Connect | Disconnect) for e in effects)
    return [e.peer for e in effects if isinstance(e, Disconnect)]


def test_a_member_that_left_stays_connected_for_its_last_words():
    roster, history = roster_of(me="member", ada="away", bob="away", eve="expelled")
    timer = roster.keep_leavers([PeerId("bob"), PeerId("eve")], 10.0)
    assert timer == [SetTimer("leavers/7", 10.0 + LAST_WORDS_S)]
    assert ended(roster.contacts()) == ["ada", "eve"]  # ada left earlier, and eve is expelled
    history.head = 8
    assert ended(roster.disconnect_leavers(7)) == ["bob", "eve"]
    assert ended(roster.contacts()) == ["ada", "bob", "eve"]


def test_every_member_that_left_is_disconnected_also_if_others_leave_after_it():
    """Also one whose line gave way to a newcomer's meanwhile."""
    roster, history = roster_of(me="member", ada="away")
    roster.keep_leavers([PeerId("ada")], 10.0)
    history.head, history.head_body = 8, body_with(me="member", bob="away", cid="member")
    roster.keep_leavers([PeerId("bob")], 12.0)
    assert ended(roster.contacts()) == []
    assert ended(roster.disconnect_leavers(7)) == ["ada"] and ended(roster.disconnect_leavers(8)) == ["bob"]


def test_a_member_that_is_back_keeps_its_connection():
    roster, history = roster_of(me="member", ada="away")
    roster.keep_leavers([PeerId("ada")], 10.0)
    history.head, history.head_body = 8, body_with(me="member", ada="new")
    assert ended(roster.disconnect_leavers(7)) == [] and roster.keep_leavers([], 13.0) == []
