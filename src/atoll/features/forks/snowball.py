"""Snowball poll: preference of a large open swarm among conflicting vertices, by repeated random samples.

Driving contract: pass `Start` first, `offer` each choice that the host judged, then messages and timers.
Other events change nothing. A message from outside the swarm raises PeerFault before any change.

A peer asks `k` random peers for their preference. If `alpha` of them name the same choice, that choice gains
confidence; the local preference is the choice with the most confidence. After `beta` such queries in a row for the
same choice, the choice is settled here. Each peer responds with its current preference, so a small lead grows
everywhere. A peer without a preference tells its host about the choice, and prefers what the host offers.

Invariants:
- A settled choice stays settled here, also after a restart.
- Only choices that the host has judged are preferred.
- Only peers that were asked count, once each.
- A poll that does not settle is reported (`ChoiceUnsettled`).
- The work per query does not grow with the swarm.
Not responsible for: finality. Nothing irreversible may depend on this; quorum certificates (`agreement.py`) decide.
Below `SAFE_SIZE` peers it can only be built as `preference_only`.

Known limits: with a fifth of arbitrary liars, a clear majority still converges to one choice. But a third of all
samples of 10 then hold three liars or more: 150 successes in a row do not come, and no peer settles. About sqrt(n)
liars that watch the swarm and respond to balance it keep even preferences apart. A quarter breaks safety within
hundreds of queries (Kniep et al. 2024, arXiv 2409.02217).

Source: Team Rocket, Yin, Sekniqi, van Renesse, Sirer 2019, arXiv 1906.08936, figure 3 (Snowball) with its queries
as messages. The conflict set of figure 4 (Avalanche) is one slot here; there is no DAG of transactions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

import msgspec

from atoll.base.draw import draw_bytes
from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import (
    Effect,
    Emit,
    Event,
    Fact,
    Persist,
    Received,
    Send,
    SetTimer,
    Start,
    TimerFired,
)
from atoll.wire.messages.preference import PreferenceRequest, PreferenceResponse

SAFE_SIZE = 2000  # peers; the population in the published analyses of safety
CHOICES_MAX = 16  # judged choices of one slot; more are not taken, nor more heard from one peer
UNSETTLED_AFTER = 4  # multiples of beta queries without settling, after each of which that is reported


class SnowParams(msgspec.Struct, frozen=True):
    """k, alpha, beta as in the paper's evaluation (section 5: k = 10, alpha = 0.8 k, beta = 150 under conflict)."""

    k: int = 10  # peers per query
    alpha: int = 8  # of them, that must name the same choice; above k / 2
    beta: int = 150  # successful queries in a row that settle a choice
    query_s: Seconds = 1.0  # seconds after which a response does not count; keep above 3 x the median round trip
    pause_s: Seconds = 0.0  # seconds between two queries; a poll that no round waits for can be slow


class ChoiceHeard(Fact, frozen=True, kw_only=True, tag="Heard"):
    """Others name a choice that is unknown here: the host judges it, and calls `offer` if it is right."""

    phase = "snow"
    choice: Digest


class ChoicePreferred(Fact, frozen=True, kw_only=True, tag="Preferred"):
    phase = "snow"
    choice: Digest


class ChoiceSettled(Fact, frozen=True, kw_only=True, tag="Settled"):
    """The local preference is final. `safe` is False below the size for which the paper gives a bound."""

    phase = "snow"
    choice: Digest
    queries: int
    safe: bool


class ChoiceUnsettled(Fact, frozen=True, kw_only=True, tag="Unsettled"):
    """No choice won `beta` queries in a row for a long time: the swarm is split, or the local peer is cut off."""

    phase = "snow"
    queries: int
    answers: dict[str, int]  # to the last query: choice in hex ("" for none) -> number of peers


class SnowballPoll:
    """One peer's preference in one slot. `peers` are all it may ask; `seed` must differ from peer to peer."""

    def __init__(
        self,
        me: PeerId,
        peers: Sequence[PeerId],
        slot: str,
        seed: bytes,
        params: SnowParams | None = None,
        preference_only: bool = False,
    ) -> None:
        p = params or SnowParams()
        others = tuple(sorted({*peers} - {me}))
        timed = p.query_s > 0 and p.pause_s >= 0
        if not 0 < p.k <= len(others) or not p.k < 2 * p.alpha <= 2 * p.k or p.beta < 1 or not timed:
            raise ValueError(
                f"k = {p.k}, alpha = {p.alpha}, beta = {p.beta} do not fit {len(others)} other peers: "
                "k of them are asked, and alpha is more than half of k"
            )
        self.safe = len(others) + 1 >= SAFE_SIZE and p.alpha * 10 >= p.k * 8 and p.k >= 10 and p.beta >= 150
        if not self.safe and not preference_only:
            raise ValueError(
                f"{len(others) + 1} peers with k = {p.k}, alpha = {p.alpha}, beta = {p.beta} are below what was "
                f"analysed ({SAFE_SIZE} peers, k = 10, alpha = 8, beta = 150); say preference_only=True, and let "
                "a quorum decide"
            )
        self.me, self.others, self.slot, self.seed, self.params = me, others, slot, seed, p
        self.preference_only = preference_only
        self.known: set[PeerId] = set(others)
        self.judged: list[Digest] = []
        self.heard: set[Digest] = set()  # choices heard of, not judged
        self.named: Counter[PeerId] = Counter()  # unjudged choices first named by each peer
        self.preference: Digest | None = None
        self.settled: Digest | None = None
        self.confidence: Counter[Digest] = Counter()
        self.last: Digest | None = None  # choice of the last successful query
        self.row = 0  # queries in a row that named it
        self.number = 0  # number of the query in progress
        self.asked: frozenset[PeerId] = frozenset()
        self.answers: dict[PeerId, Digest | None] = {}
        self.found: tuple[Counter[Digest], int] = Counter(), 0  # last query: peers per choice, and number asked

    @property
    def timer(self) -> str:
        return f"snow/{self.slot}"

    # ---- what the host calls -------------------------------------------------------------------------------

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        """Raises PeerFault, before any change, for messages from outside this swarm."""
        match event:
            case Start(kept):
                blob = kept.get(self.timer)
                self.preference = self.settled = Digest(blob) if blob is not None else None
                return []
            case Received(sender, PreferenceRequest() as query) if query.slot == self.slot:
                return self._answer(self._member(sender), query)
            case Received(sender, PreferenceResponse() as answer) if answer.slot == self.slot:
                return self._count(self._member(sender), answer, now)
            case TimerFired(name) if name == self.timer and self.asked:
                return self._conclude(now)
            case TimerFired(name) if name == self.timer and self.preference is not None and self.settled is None:
                return self._ask(now)  # after a pause
            case _:
                return []

    def offer(self, choice: Digest, now: Seconds) -> list[Effect]:
        """Take a choice that the host has judged: it may be preferred. The first one is, and others are asked about
        it.
        """
        if choice in self.judged or len(self.judged) >= CHOICES_MAX:
            return []
        self.judged.append(choice)
        if self.preference is not None:
            return []
        self.preference = choice
        return [Emit(ChoicePreferred(choice=choice)), *self._ask(now)]

    def among(self, peers: Set[PeerId]) -> None:
        """From now on ask only reachable peers of the swarm; this makes it a preference, since they may be few.

        If fewer than k are reachable, all of them are asked, and an equally large share must agree.
        """
        assert self.preference_only
        self.others = tuple(sorted(self.known & peers))

    # ---- asking --------------------------------------------------------------------------------------------

    def _ask(self, now: Seconds) -> list[Effect]:
        assert self.preference is not None
        self.number += 1
        sample = self._sample()
        self.asked, self.answers = frozenset(sample), {}
        query = PreferenceRequest(self.slot, self.number, self.preference)
        return [SetTimer(self.timer, now + self.params.query_s), *(Send(p, query) for p in sample)]

    def _sample(self) -> list[PeerId]:
        """k of the others, none twice; the draw costs no more in a larger swarm (Floyd 1987)."""
        count = len(self.others)
        k = min(self.params.k, count)
        words = draw_bytes(self.seed, f"snow/{self.me}/{self.slot}/{self.number}", 8 * k)
        chosen: list[int] = []
        for i in range(k):
            top = count - k + i
            drawn = int.from_bytes(words[8 * i : 8 * i + 8], "big") % (top + 1)
            chosen.append(top if drawn in chosen else drawn)
        return [self.others[i] for i in chosen]

    def _count(self, sender: PeerId, answer: PreferenceResponse, now: Seconds) -> list[Effect]:
        if answer.number != self.number or sender not in self.asked or sender in self.answers:
            return []
        self.answers[sender] = answer.choice
        effects = self._hear_of(sender, answer.choice)
        counts = self._counts()
        best = max(counts.values(), default=0)
        missing = len(self.asked) - len(self.answers)
        open_still = best < self._alpha and best + missing >= self._alpha
        if missing and (open_still or self.params.pause_s):
            return effects  # a majority is still possible; or there is no hurry, and all responses are awaited
        return [*effects, *self._conclude(now)]

    @property
    def _alpha(self) -> int:
        """Required agreement among those asked: alpha of k, or the same share if fewer can be asked."""
        return -(-self.params.alpha * len(self.asked) // self.params.k)

    def _counts(self) -> Counter[Digest]:
        return Counter(c for c in self.answers.values() if c is not None and c in self.judged)

    def _conclude(self, now: Seconds) -> list[Effect]:
        """Close one query: figure 3, lines 7 to 19."""
        effects: list[Effect] = []
        self.found = self._counts(), len(self.asked)
        winner = next((c for c, count in self.found[0].items() if count >= self._alpha), None)
        if winner is None:
            # otherwise both sides of a partition would settle, each with the few samples that fell on it
            self.row = 0
        else:
            assert self.preference is not None
            self.confidence[winner] += 1
            if self.confidence[winner] > self.confidence[self.preference]:
                self.preference = winner
                effects.append(Emit(ChoicePreferred(choice=winner)))
            self.row = self.row + 1 if winner == self.last else 1
            self.last = winner
            if self.row >= self.params.beta:
                return [*effects, *self._settle(winner)]
        if self.number % (UNSETTLED_AFTER * self.params.beta) == 0:
            named = Counter("" if c is None else c.hex() for c in self.answers.values())
            effects.append(Emit(ChoiceUnsettled(queries=self.number, answers=dict(named))))
        if not self.params.pause_s:
            return [*effects, *self._ask(now)]
        self.asked = frozenset()
        return [*effects, SetTimer(self.timer, now + self.params.pause_s)]

    def _settle(self, choice: Digest) -> list[Effect]:
        self.preference = self.settled = choice
        self.asked, self.answers = frozenset(), {}
        fact = ChoiceSettled(choice=choice, queries=self.number, safe=self.safe)
        return [Persist(self.timer, choice), SetTimer(self.timer, None), Emit(fact)]

    # ---- answering -----------------------------------------------------------------------------------------

    def _answer(self, sender: PeerId, query: PreferenceRequest) -> list[Effect]:
        heard = self._hear_of(sender, query.choice)
        return [*heard, Send(sender, PreferenceResponse(self.slot, query.number, self.preference))]

    def _hear_of(self, sender: PeerId, choice: Digest | None) -> list[Effect]:
        """The limit is per peer: a liar that names many choices does not block the choices of others."""
        if choice is None or choice in self.judged or choice in self.heard or self.named[sender] >= CHOICES_MAX:
            return []
        self.heard.add(choice)
        self.named[sender] += 1
        return [Emit(ChoiceHeard(choice=choice))]

    def _member(self, sender: PeerId) -> PeerId:
        if sender not in self.known:
            raise PeerFault(sender, "speaks in a swarm that it is not of")
        return sender
