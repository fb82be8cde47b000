"""Branch poll: which branch of a forked run most members prefer, by repeated small samples.

Driving contract: call `look` at each heartbeat, `hear` for each preference message and `fired` for each timer.
Messages about unknown polls change nothing.

Once another branch was seen (`features/forks/detect.py`), every peer at first prefers its own. It repeatedly asks a
few random members that voted before the fork for their current preference (`features/forks/snowball.py`).
Preferences follow each other, so all converge to the branch of most members.

Invariants:
- Only members known to the histories of both branches count, once per query, by the identity of their link. So
  newcomers of either side have no weight.
- One query per `PAUSE_S`, one response per `ANSWER_S` and asker.
- If members come within reach later, the poll restarts once: earlier results covered fewer members.
- No vote, plan or state depends on the result, and no peer changes branch by it.
Not responsible for: choosing a branch; people decide.
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

ASKED = 10  # members per query, or all within reach
PAUSE_S = 2.0  # seconds between two queries; no round waits for a response
QUERY_S = 2.0  # seconds to wait for the responses to one query
# successful queries that settle it: with a fifth of liars on the other side, 19 of 20 polls are right
IN_A_ROW = 20
ANSWER_S = 1.0
LEAST = 3  # least number of members to ask; with one or two, no third one can tip the balance


class BranchPoll:
    """The poll about one fork of the run."""

    def __init__(
        self, me: PeerId, run: Digest, round: int, sides: tuple[Digest, Digest], known: Set[PeerId]
    ) -> None:
        self.me, self.run, self.round, self.sides, self.known = me, run, round, sides, known
        self.met: set[PeerId] = set()  # members within reach since the poll began
        self.snow = self._new(0)

    def _new(self, number: int) -> SnowballPoll:
        k = min(ASKED, len(self.known))
        params = SnowParams(k, k // 2 + 1, IN_A_ROW, QUERY_S, PAUSE_S)
        snow = SnowballPoll(
            self.me, list(self.known), f"branch/{self.round}", self.run, params, preference_only=True
        )
        snow.number = number  # a response to the poll before does not count for this one
        return snow

    def reach(self, peers: Set[PeerId], now: Seconds) -> list[Effect]:
        """Set the reachable members. Begins the poll, or restarts it."""
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
        """Emit findings in terms of branches; a preference is no promise, so it is not kept."""
        out: list[Effect] = []
        for effect in effects:
            match effect:
                case Send() | SetTimer():
                    out.append(effect)
                case Emit(ChoicePreferred(choice=choice)) if choice != self.snow.last:
                    pass  # the initial preference
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
    """`linked`: peers connected to the local one; the caller changes this set."""

    def __init__(self, me: PeerId, history: VertexChain, linked: Set[PeerId]) -> None:
        self.me, self.history, self.linked = me, history, linked
        self.polls: dict[int, BranchPoll] = {}  # by the round of the fork; as many as branches are kept
        self.answered: dict[PeerId, Seconds] = {}

    def look(self, branches: Mapping[int, Vertex], now: Seconds) -> list[Effect]:
        """At every heartbeat: begin polls of known forks with the peers within reach."""
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
        """None if the last common vertex is no longer in memory, or left too few members to ask."""
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
        """Newcomers of the local branch may ask as well; their preference is not requested."""
        return sender in poll.known or any(m.peer == sender and m.present for m in self.history.head_body.members)
