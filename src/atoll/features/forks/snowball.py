"""Snowball: which of conflicting vertices a large open swarm prefers, found by asking few of many again and again.

A peer asks `k` peers, drawn anew each time, what they prefer. If `alpha` of them name the same choice, that choice
gains confidence, and the one with the most confidence is my preference; `beta` such queries in a row that name the
same choice settle it for me. Everybody answers with what it prefers at that moment, so a small lead anywhere grows
everywhere. A peer that prefers nothing yet tells its host what it was asked about, and prefers what that offers.

Promises: what is settled stays settled here, also after a restart; only choices that the host has judged are ever
preferred; only those who were asked are counted, each once; not settling is said (`ChoiceUnsettled`). Work per
query does
not grow with the swarm. Never finality: nothing that must not be taken back may rest on this. Below `SAFE_SIZE`
peers it can only be built as `preference_only`; certificates by a quorum (`agreement.py`) are what decides.

Known limits: with a fifth of liars that answer as they like, a clear majority still comes to prefer one choice, but
a third of all samples of 10 then hold three liars or more: 150 successes in a row do not come, and nobody settles.
About sqrt(n) liars that watch the swarm and answer so as to balance it keep even preferences apart, and a quarter
breaks safety within hundreds of queries (Kniep et al. 2024, arXiv 2409.02217).

Source: Team Rocket, Yin, Sekniqi, van Renesse, Sirer 2019, arXiv 1906.08936, figure 3 (Snowball) with its queries
as messages; the conflict set of figure 4 (Avalanche) is one slot here, there is no DAG of transactions.
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

SAFE_SIZE = 2000  # peers; the population that the published analyses of safety compute with
CHOICES_MAX = 16  # judged choices of one slot; further ones are not taken, nor more heard from one peer
UNSETTLED_AFTER = 4  # times beta queries without settling, before that is said, again and again


class SnowParams(msgspec.Struct, frozen=True):
    """k, alpha, beta as in the paper's evaluation (section 5: k = 10, alpha = 0.8 k, beta = 150 under conflict)."""

    k: int = 10  # peers asked per query
    alpha: int = 8  # of them, that must name the same choice; above k / 2
    beta: int = 150  # such queries in a row that settle it
    query_s: Seconds = 1.0  # an answer later than this counts for nothing; keep above 3 x the median round trip
    pause_s: Seconds = 0.0  # between two queries: what nobody waits for need not be asked as fast as it can be


class ChoiceHeard(Fact, frozen=True, kw_only=True, tag="Heard"):
    """Others name a choice that is unknown here: judge it, then `offer` it if it is right."""

    phase = "snow"
    choice: Digest


class ChoicePreferred(Fact, frozen=True, kw_only=True, tag="Preferred"):
    phase = "snow"
    choice: Digest


class ChoiceSettled(Fact, frozen=True, kw_only=True, tag="Settled"):
    """I shall not prefer another one. `safe` is False below the size for which the paper says how sure that is."""

    phase = "snow"
    choice: Digest
    queries: int
    safe: bool


class ChoiceUnsettled(Fact, frozen=True, kw_only=True, tag="Unsettled"):
    """So many queries, and no choice that a sample named `beta` times in a row: the swarm is split, or cut off."""

    phase = "snow"
    queries: int
    answers: dict[str, int]  # to the last query: choice in hex ("" for none) -> how many


class SnowballPoll:
    """One peer's preference in one slot. `peers` are all whom it may ask; `seed` must differ from peer to peer."""

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
        self.heard: set[Digest] = set()  # not judged, told of
        self.named: Counter[PeerId] = Counter()  # of those, how many a peer was the first to name
        self.preference: Digest | None = None
        self.settled: Digest | None = None
        self.confidence: Counter[Digest] = Counter()
        self.last: Digest | None = None  # what the last successful query named
        self.row = 0  # queries in a row that named it
        self.number = 0  # of the query in progress
        self.asked: frozenset[PeerId] = frozenset()
        self.answers: dict[PeerId, Digest | None] = {}
        self.found: tuple[Counter[Digest], int] = Counter(), 0  # by the last query: who named what, of how many

    @property
    def timer(self) -> str:
        return f"snow/{self.slot}"

    # ---- what the host calls -------------------------------------------------------------------------------

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        """Raises PeerFault, before anything changed, for words of somebody who is not of this swarm."""
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
        """The host has judged this choice: it may be preferred. The first one is, and others are asked about it."""
        if choice in self.judged or len(self.judged) >= CHOICES_MAX:
            return []
        self.judged.append(choice)
        if self.preference is not None:
            return []
        self.preference = choice
        return [Emit(ChoicePreferred(choice=choice)), *self._ask(now)]

    def among(self, peers: Set[PeerId]) -> None:
        """From now on ask only those of the swarm that are within reach; a preference, since they may be few.

        Where fewer than k are, all of them are asked, and as large a share must agree.
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
            return effects  # may still become a majority; or nobody is in a hurry, and all are heard
        return [*effects, *self._conclude(now)]

    @property
    def _alpha(self) -> int:
        """Of those asked: alpha of k, or the same share where fewer can be asked."""
        return -(-self.params.alpha * len(self.asked) // self.params.k)

    def _counts(self) -> Counter[Digest]:
        return Counter(c for c in self.answers.values() if c is not None and c in self.judged)

    def _conclude(self, now: Seconds) -> list[Effect]:
        """One query is over: figure 3, lines 7 to 19."""
        effects: list[Effect] = []
        self.found = self._counts(), len(self.asked)
        winner = next((c for c, count in self.found[0].items() if count >= self._alpha), None)
        if winner is None:
            self.row = 0  # else both sides of a partition would settle, each with the few samples that fell on it
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
        """The ceiling is each peer's own: a liar that names many choices makes nobody deaf to the others."""
        if choice is None or choice in self.judged or choice in self.heard or self.named[sender] >= CHOICES_MAX:
            return []
        self.heard.add(choice)
        self.named[sender] += 1
        return [Emit(ChoiceHeard(choice=choice))]

    def _member(self, sender: PeerId) -> PeerId:
        if sender not in self.known:
            raise PeerFault(sender, "speaks in a swarm that it is not of")
        return sender
