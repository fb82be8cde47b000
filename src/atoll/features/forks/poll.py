"""Which branch the swarm prefers, where a run has two: asked of few members at a time, decided by nobody.

Where another branch was seen (`features/forks/detect.py`) every peer prefers its own at first, and asks a few of
those who
voted before the two parted, drawn anew each time, what they prefer by now (`features/forks/snowball.py`). Answers
follow each other, so all come to name the branch on which most of them are.
Promises: counted are only those whom the histories of both branches know, each once per query, by the identity of
its link, so newcomers of neither side weigh anything; one query in PAUSE_S, one answer in ANSWER_S per asker. Who
comes within reach later has the question begin anew, once: what was asked of fewer said nothing of it.
Never changes sides, and no vote, plan or state rests on it: it is a line for people, who decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import PEERS_MAX
from atoll.base.machine import Effect, Emit, Event, Received, Send, SetTimer, TimerFired
from atoll.features.forks.snowball import ChoicePreferred, ChoiceSettled, ChoiceUnsettled, SnowballPoll, SnowParams
from atoll.peer.events import BranchPreferred
from atoll.protocol.history.chain import VertexChain
from atoll.wire.codec import vertex_id
from atoll.wire.messages.preference import PreferenceRequest, PreferenceResponse
from atoll.wire.messages.vertex import Vertex

ASKED = 10  # at a time, or all within reach
PAUSE_S = 2.0  # between two queries: nobody waits for the answer
QUERY_S = 2.0  # for which one is waited for answers
IN_A_ROW = 20  # queries that settle it: with a fifth of liars on the other side, 19 of 20 come out right
ANSWER_S = 1.0
LEAST = 3  # to ask; two sides of one or two have nobody to tip them


class BranchPoll:
    """The question of one place where the run parted."""

    def __init__(
        self, me: PeerId, run: Digest, round: int, sides: tuple[Digest, Digest], known: Set[PeerId]
    ) -> None:
        self.me, self.run, self.round, self.sides, self.known = me, run, round, sides, known
        self.met: set[PeerId] = set()  # that were within reach since it was asked
        self.snow = self._new(0)

    def _new(self, number: int) -> SnowballPoll:
        k = min(ASKED, len(self.known))
        params = SnowParams(k, k // 2 + 1, IN_A_ROW, QUERY_S, PAUSE_S)
        snow = SnowballPoll(
            self.me, list(self.known), f"branch/{self.round}", self.run, params, preference_only=True
        )
        snow.number = number  # an answer to the question before is none to this
        return snow

    def reach(self, peers: Set[PeerId], now: Seconds) -> list[Effect]:
        """Who can be asked now. Begins the question, or begins it anew."""
        fresh = peers - self.met
        self.met |= fresh
        effects: list[Effect] = []
        if fresh and len(self.met) >= LEAST:
            first = self.snow.preference or self.sides[0]
            self.snow = self._new(self.snow.number)
            self.snow.among(peers)
            for choice in (first, *(side for side in self.sides if side != first)):
                effects += self.snow.offer(choice, now)
        self.snow.among(peers)
        return self._told(effects)

    def hear(self, event: Event, now: Seconds) -> list[Effect]:
        return self._told(self.snow.handle(event, now))

    def _told(self, effects: list[Effect]) -> list[Effect]:
        """What it found, in the words of a branch; a preference is no promise, so none is kept."""
        out: list[Effect] = []
        for effect in effects:
            match effect:
                case Send() | SetTimer():
                    out.append(effect)
                case Emit(ChoicePreferred(choice=choice)) if choice != self.snow.last:
                    pass  # what it began with
                case Emit(ChoicePreferred() | ChoiceSettled() | ChoiceUnsettled()):
                    out.append(Emit(self._fact()))
                case _:
                    pass
        return out

    def _fact(self) -> BranchPreferred:
        choice, found, asked = self.snow.preference, *self.snow.found
        assert choice is not None
        return BranchPreferred(
            round=self.round,
            vertex=choice,
            ours=choice == self.sides[0],
            named=found.get(choice, 0),
            asked=asked,
            queries=self.snow.number,
            settled=self.snow.settled is not None,
        )


class BranchPolls:
    """`linked` is who has a connection to me now; it changes under my hands."""

    def __init__(self, me: PeerId, history: VertexChain, linked: Set[PeerId]) -> None:
        self.me, self.history, self.linked = me, history, linked
        self.polls: dict[int, BranchPoll] = {}  # by the round at which the run parted; as many as branches are kept
        self.answered: dict[PeerId, Seconds] = {}

    def look(self, branches: Mapping[int, Vertex], now: Seconds) -> list[Effect]:
        """With every heartbeat: is there a question, and who can be asked?"""
        effects: list[Effect] = []
        for round, vertex in branches.items():
            if round not in self.polls and (poll := self._poll(round, vertex)) is not None:
                self.polls[round] = poll
        if self.polls:
            expelled = {m.peer for m in self.history.head_body.members if m.standing == "expelled"}
            for poll in self.polls.values():
                effects += poll.reach((self.linked & poll.known) - expelled, now)
        return effects

    def _poll(self, round: int, vertex: Vertex) -> BranchPoll | None:
        """None where the last vertex that both have is not in memory any more, or it left too few to ask."""
        parent, ours = self.history.bodies.get(round - 1), self.history.ids.get(round)
        if parent is None or ours is None:
            return None
        known = {m.peer for m in parent.members if m.votes} - {self.me}
        if len(known) < LEAST:
            return None
        return BranchPoll(self.me, self.history.notary.run, round, (ours, vertex_id(vertex.body)), known)

    def hear(self, event: Received, now: Seconds) -> list[Effect]:
        sender, message = event.sender, event.message
        assert isinstance(message, PreferenceRequest | PreferenceResponse)
        poll = next((p for p in self.polls.values() if p.snow.slot == message.slot), None)
        if poll is None:
            return []
        if isinstance(message, PreferenceResponse):
            return poll.hear(event, now) if sender in poll.known else []
        if now - self.answered.get(sender, -1e9) < ANSWER_S or not self._knows(sender, poll):
            return []
        if len(self.answered) >= PEERS_MAX:
            self.answered.clear()
        self.answered[sender] = now
        return [Send(sender, PreferenceResponse(message.slot, message.number, poll.snow.preference))]

    def fired(self, event: TimerFired, now: Seconds) -> list[Effect]:
        poll = next((p for p in self.polls.values() if p.snow.timer == event.name), None)
        return poll.hear(event, now) if poll is not None else []

    def _knows(self, sender: PeerId, poll: BranchPoll) -> bool:
        """Newcomers of my own branch may ask as well; their answers are not asked for."""
        return sender in poll.known or any(m.peer == sender and m.present for m in self.history.head_body.members)
