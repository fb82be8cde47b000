"""Snowball poll of a forked run: which branch most members prefer, by repeated small samples.

Driving contract: call `on_heartbeat` at each heartbeat, `on_message` for each preference message and `on_timer` at
each timer. Messages about unknown polls change nothing.

Once another branch was seen (`features/forks/detect.py`), every peer at first prefers its own. It repeatedly asks
ten random members that voted before the fork for their current preference. A branch that six of ten name gains
confidence; the branch with more confidence is preferred. `IN_A_ROW` queries in a row for one branch settle it. Each
peer responds with its current preference, so a small lead grows until all prefer one branch.

Invariants:
- Only members known to the histories of both branches count, once per query, by the identity of their link. So
  newcomers of either side have no weight.
- Only members that were asked count, once each.
- One query per `PAUSE_S`, one response per `ANSWER_S` and asker.
- If members come within reach later, the poll restarts once: earlier results covered fewer members.
- A poll that does not settle is reported.
- No vote, plan or state depends on the result, and no peer changes branch by it.
Not responsible for: choosing a branch (people decide); finality (quorum certificates, `protocol/agreement/`).

Known limits: with a fifth of arbitrary liars, a clear majority still converges to one choice. About sqrt(n) liars
that watch the swarm and respond to balance it keep even preferences apart. A quarter breaks safety within hundreds
of queries (Kniep et al. 2024, arXiv 2409.02217).

Source: Team Rocket, Yin, Sekniqi, van Renesse, Sirer 2019, arXiv 1906.08936, figure 3 (Snowball) with its queries
as messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

from atoll.base.draw import draw_bytes
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import PEERS_MAX
from atoll.base.machine import Effect, Emit, Received, Send, SetTimer, TimerFired
from atoll.peer.events import BranchPollResult
from atoll.protocol.history.chain import VertexChain
from atoll.wire.codec import vertex_id
from atoll.wire.messages.preference import PreferenceRequest, PreferenceResponse
from atoll.wire.messages.vertex import Vertex

ASKED = 10  # members per query, or all within reach: k of the paper
AGREED = 6  # of ten asked, that must name one branch: alpha of the paper
# successful queries that settle it (beta): with a fifth of liars on the other side, 19 of 20 polls are right
IN_A_ROW = 20
UNSETTLED_AFTER = 4 * IN_A_ROW  # queries without settling, after each of which that is reported
PAUSE_S = 2.0  # seconds between two queries; no round waits for a response
QUERY_S = 2.0  # seconds to wait for the responses to one query
ANSWER_S = 1.0
LEAST = 3  # least number of members to ask; with one or two, no third one can tip the balance


class SnowballPoll:
    """One peer's preference between the branches of one fork; the first of `sides` is the local branch."""

    def __init__(
        self, me: PeerId, run: Digest, round: int, sides: tuple[Digest, Digest], known: Set[PeerId]
    ) -> None:
        self.me, self.run, self.round, self.sides, self.known = me, run, round, sides, known
        self.slot = f"branch/{round}"
        self.timer = f"snow/{self.slot}"
        self.met: set[PeerId] = set()  # members within reach since the poll began
        self.others: tuple[PeerId, ...] = ()  # members within reach
        self.preference = sides[0]
        self.number = 0  # number of the query in progress; a restart goes on counting
        self.asked: frozenset[PeerId] = frozenset()
        self.answers: dict[PeerId, Digest | None] = {}
        self.found: tuple[Counter[Digest], int] = Counter(), 0  # last query: peers per choice, and number asked
        self._clear()

    def _clear(self) -> None:
        self.is_settled = False
        self.confidence: Counter[Digest] = Counter()
        self.last: Digest | None = None  # choice of the last successful query
        self.row = 0  # queries in a row that named it

    def reach(self, peers: Set[PeerId], now: Seconds) -> list[Effect]:
        """Set the reachable members. Begins the poll, or restarts it."""
        fresh = peers - self.met
        self.met |= fresh
        self.others = tuple(sorted(self.known & peers))
        if not fresh or len(self.met) < LEAST:
            return []
        self._clear()
        return self._ask(now)

    def resume(self, now: Seconds) -> list[Effect]:
        """The timer fired: close the query in progress, or begin the next one after a pause."""
        if self.asked:
            return self._conclude(now)
        return [] if self.is_settled else self._ask(now)

    def _ask(self, now: Seconds) -> list[Effect]:
        self.number += 1
        sample = self._sample()
        self.asked, self.answers = frozenset(sample), {}
        query = PreferenceRequest(self.slot, self.number, self.preference)
        return [SetTimer(self.timer, now + QUERY_S), *(Send(p, query) for p in sample)]

    def _sample(self) -> list[PeerId]:
        """Members to ask, none twice; the draw costs no more in a larger swarm (Floyd 1987)."""
        count = len(self.others)
        k = min(ASKED, count)
        words = draw_bytes(self.run, f"snow/{self.me}/{self.slot}/{self.number}", 8 * k)
        chosen: list[int] = []
        for i in range(k):
            top = count - k + i
            drawn = int.from_bytes(words[8 * i : 8 * i + 8], "big") % (top + 1)
            chosen.append(top if drawn in chosen else drawn)
        return [self.others[i] for i in chosen]

    def count(self, sender: PeerId, answer: PreferenceResponse, now: Seconds) -> list[Effect]:
        if answer.number != self.number or sender not in self.asked or sender in self.answers:
            return []
        self.answers[sender] = answer.choice
        return self._conclude(now) if len(self.answers) == len(self.asked) else []

    def _conclude(self, now: Seconds) -> list[Effect]:
        """Close one query: figure 3, lines 7 to 19."""
        before = self.preference
        named = (c for c in self.answers.values() if c is not None and c in self.sides)
        self.found = Counter(named), len(self.asked)
        needed = -(-AGREED * len(self.asked) // 10)
        self.asked = frozenset()
        winner = next((c for c, count in self.found[0].items() if count >= needed), None)
        if winner is None:
            # otherwise both sides of a partition would settle, each with the few samples that fell on it
            self.row = 0
        else:
            self.confidence[winner] += 1
            if self.confidence[winner] > self.confidence[self.preference]:
                self.preference = winner
            self.row = self.row + 1 if winner == self.last else 1
            self.last = winner
            if self.row >= IN_A_ROW:
                self.is_settled, self.preference = True, winner
                return [SetTimer(self.timer, None), Emit(self._fact())]
        is_news = self.preference != before or self.number % UNSETTLED_AFTER == 0
        return [*([Emit(self._fact())] if is_news else []), SetTimer(self.timer, now + PAUSE_S)]

    def _fact(self) -> BranchPollResult:
        found, asked = self.found
        return BranchPollResult(
            round=self.round,
            vertex=self.preference,
            ours=self.preference == self.sides[0],
            named=found[self.preference],
            asked=asked,
            queries=self.number,
            settled=self.is_settled,
        )


class BranchPolls:
    """`linked`: peers connected to the local one; the caller changes this set."""

    def __init__(self, me: PeerId, history: VertexChain, linked: Set[PeerId]) -> None:
        self.me, self.history, self.linked = me, history, linked
        self.polls: dict[int, SnowballPoll] = {}  # by the round of the fork; as many as branches are kept
        self.answered: dict[PeerId, Seconds] = {}

    def on_heartbeat(self, branches: Mapping[int, Vertex], now: Seconds) -> list[Effect]:
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

    def _poll(self, round: int, vertex: Vertex) -> SnowballPoll | None:
        """None if the last common vertex is no longer in memory, or left too few members to ask."""
        parent, ours = self.history.bodies.get(round - 1), self.history.ids.get(round)
        if parent is None or ours is None:
            return None
        known = {m.peer for m in parent.members if m.votes} - {self.me}
        if len(known) < LEAST:
            return None
        return SnowballPoll(self.me, self.history.notary.run, round, (ours, vertex_id(vertex.body)), known)

    def on_message(self, event: Received, now: Seconds) -> list[Effect]:
        sender, message = event.sender, event.message
        assert isinstance(message, PreferenceRequest | PreferenceResponse)
        poll = next((p for p in self.polls.values() if p.slot == message.slot), None)
        if poll is None:
            return []
        if isinstance(message, PreferenceResponse):
            return poll.count(sender, message, now)
        if now - self.answered.get(sender, -1e9) < ANSWER_S or not self._knows(sender, poll):
            return []
        if len(self.answered) >= PEERS_MAX:
            self.answered.clear()
        self.answered[sender] = now
        return [Send(sender, PreferenceResponse(message.slot, message.number, poll.preference))]

    def on_timer(self, event: TimerFired, now: Seconds) -> list[Effect]:
        poll = next((p for p in self.polls.values() if p.timer == event.name), None)
        return poll.resume(now) if poll is not None else []

    def _knows(self, sender: PeerId, poll: SnowballPoll) -> bool:
        """Newcomers of the local branch may ask as well; their preference is not requested."""
        return sender in poll.known or any(
            m.peer == sender and m.is_present for m in self.history.head_body.members
        )
