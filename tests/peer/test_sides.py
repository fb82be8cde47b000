"""Fork preference poll: which members are polled, answered and counted; it costs little and decides nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.machine import Effect, Emit, Received, Send, SetTimer, TimerFired
from atoll.crypto.digest import digest
from atoll.features.forks.poll import ASKED, IN_A_ROW, PAUSE_S, BranchPolls
from atoll.peer.events import BranchPollResult
from atoll.wire.codec import encode, vertex_id
from atoll.wire.messages.preference import PreferenceRequest, PreferenceResponse
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, Vertex, VertexBody

ROUND, SLOT, OURS = 5, "branch/5", digest(b"ours")
NAMES = [PeerId(f"p{i:02d}") for i in range(21)]
ME, OTHERS = NAMES[0], NAMES[1:]


def member(peer: PeerId) -> Member:
    return Member(peer, b"", (), "trainer", "member", 0, 0.0, "")


def body(round: int, *members: PeerId) -> VertexBody:
    lines = tuple(map(member, members))
    return VertexBody(
        ZERO_DIGEST, round, 0, ZERO_DIGEST, 0.0, ME, (), ZERO_DIGEST, (), lines, (), (), SwarmRoundMetrics(0, 0, 0)
    )


THEIRS = Vertex(encode(body(ROUND, *NAMES)), None, b"recovery")


class Room:
    """One peer's room, and the clock; newcomer joined our branch after the two parted."""

    def __init__(self, *linked: PeerId, voters: list[PeerId] = NAMES) -> None:
        self.linked = set(linked)
        history: Any = SimpleNamespace(
            bodies={ROUND - 1: body(ROUND - 1, *voters)},
            ids={ROUND: OURS},
            head_body=body(ROUND + 3, *voters, PeerId("newcomer")),
            notary=SimpleNamespace(run=ZERO_DIGEST),
        )
        self.history, self.now, self.due = history, 0.0, 0.0
        self.sides = BranchPolls(ME, history, self.linked)
        self.facts: list[BranchPollResult] = []

    def beat(self) -> list[Send]:
        return self.sent(self.sides.on_heartbeat({ROUND: THEIRS}, self.now))

    def hear(self, sender: PeerId, message: PreferenceRequest | PreferenceResponse) -> list[Send]:
        return self.sent(self.sides.on_message(Received(sender, message), self.now))

    def next_query(self) -> list[Send]:
        self.now = self.due
        return self.sent(self.sides.on_timer(TimerFired(f"snow/{SLOT}"), self.now))

    def sent(self, effects: list[Effect]) -> list[Send]:
        self.facts += [e.fact for e in effects if isinstance(e, Emit) and isinstance(e.fact, BranchPollResult)]
        self.due = next((e.at for e in effects if isinstance(e, SetTimer) and e.at is not None), self.due)
        return [e for e in effects if isinstance(e, Send)]

    def answer(self, asked: list[Send], choice: Digest | None) -> None:
        for send in asked:
            assert isinstance(send.message, PreferenceRequest)
            self.hear(send.to, PreferenceResponse(SLOT, send.message.number, choice))


def test_it_asks_a_few_of_those_whom_both_histories_know_and_pauses():
    """Twenty reachable voters, one expelled since, and a newcomer: ten are polled, then none for a while."""
    room = Room(*OTHERS, PeerId("newcomer"), PeerId("stranger"))
    lines = room.history.head_body.members
    expelled = tuple(replace(m, standing="expelled") if m.peer == NAMES[7] else m for m in lines)
    room.history.head_body = replace(room.history.head_body, members=expelled)
    asked = {send.to for send in room.beat()}
    assert len(asked) == ASKED and asked <= set(OTHERS) - {NAMES[7]}
    every = set(asked)
    for _ in range(30):
        assert room.beat() == []
        every |= {send.to for send in room.next_query()}  # no answers, or the pause after that
    assert every == set(OTHERS) - {NAMES[7]}


def test_a_preference_follows_the_answers_and_is_told_when_it_changes_and_when_it_is_settled():
    room, theirs = Room(*OTHERS), vertex_id(THEIRS.body)
    room.answer(room.beat(), theirs)
    (first,) = room.facts
    assert (first.vertex, first.ours, first.named, first.asked, first.settled) == (
        theirs,
        False,
        ASKED,
        ASKED,
        False,
    )
    began = room.now
    while not room.facts[-1].settled:
        room.answer(room.next_query(), theirs)
        assert room.now - began < 2 * PAUSE_S * IN_A_ROW
    assert len(room.facts) == 2 and room.facts[1].queries == IN_A_ROW
    assert room.now - began == PAUSE_S * (IN_A_ROW - 1) and room.next_query() == []
    assert [s.message for s in room.hear(NAMES[3], PreferenceRequest(SLOT, 9, OURS))] == [
        PreferenceResponse(SLOT, 9, theirs)
    ]


def test_each_counts_once_and_only_if_it_was_asked():
    """One liar answers ten times, the others report ours.

    Members not polled, newcomers and strangers report theirs.
    """
    room, theirs = Room(*OTHERS), vertex_id(THEIRS.body)
    asked = room.beat()
    number = asked[0].message.number
    lying, *honest = asked
    for who in [lying.to] * 10 + [PeerId("newcomer"), PeerId("stranger"), *set(OTHERS) - {s.to for s in asked}]:
        room.hear(who, PreferenceResponse(SLOT, number, theirs))
    room.hear(honest[0].to, PreferenceResponse(SLOT, number + 1, theirs))
    room.answer(honest, OURS)
    found, of = room.sides.polls[ROUND].found
    assert (found[theirs], found[OURS], of) == (1, ASKED - 1, ASKED) and room.facts == []


def test_a_flood_of_questions_gets_one_answer_a_second_and_strangers_none():
    room = Room(*OTHERS)
    room.beat()
    for who, answers in ((NAMES[1], 1), (PeerId("newcomer"), 1), (PeerId("stranger"), 0)):
        sent = [s for k in range(1000) for s in room.hear(who, PreferenceRequest(SLOT, k, digest(b"%d" % k)))]
        assert len(sent) == answers
    assert not room.hear(NAMES[2], PreferenceRequest("branch/6", 1, OURS))
    assert len(room.sides.answered) == 2 and not room.sides.polls[ROUND].answers
    room.now += 1.0
    assert room.hear(NAMES[1], PreferenceRequest(SLOT, 1, OURS))


def test_who_comes_within_reach_later_is_asked_too_and_only_once_for_that_reason():
    """At first only the local side is reachable, and agrees; that shows nothing about the other."""
    room, theirs = Room(*NAMES[1:5]), vertex_id(THEIRS.body)
    asked = room.beat()
    while not room.facts:
        room.answer(asked, OURS)
        asked = room.next_query()
    assert room.facts[-1].ours and room.facts[-1].settled and room.facts[-1].asked == 4
    room.linked |= set(OTHERS)
    asked = room.beat()
    assert len(asked) == ASKED and room.sides.polls[ROUND].is_settled is False
    room.answer(asked, theirs)
    assert not room.facts[-1].ours
    room.linked -= {NAMES[9]}
    room.beat()
    room.linked |= {NAMES[9]}
    assert room.beat() == [] and room.sides.polls[ROUND].preference == theirs


def test_too_few_are_not_asked():
    assert Room(*NAMES[1:3]).beat() == []
    assert Room(*NAMES[1:3], voters=NAMES[:3]).beat() == []
    room = Room(*OTHERS)
    room.history.bodies.clear()  # parted longer ago than memory reaches
    assert room.beat() == [] and room.sides.polls == {}
