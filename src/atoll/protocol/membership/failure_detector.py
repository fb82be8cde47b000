"""Who is alive, and what time it is: heartbeats among watchers, suspicion by silence, run time by median.

A peer asks those it watches "are you there?" every `beat_s`; anything it hears from them counts as life. Silence
of `suspect_s`, or a link whose redial was refused, makes a peer *gone*: nobody waits for it any more. Only an
agreed vertex removes a member. Run time is the median of the watched peers' clocks and my own, each estimated
from the exchange with the smallest round trip (Cristian 1989), so one wrong clock moves nobody; one that is far
from mine is believed only where most of those I watch have answered. Every beat one more member is asked, in turn,
so that in time the latency to all of them is known.
When it matters who of all members is here, those whom I do not watch are *called*: asked at every beat until they
answer. Whoever does not, for as long as silence takes, is not here; that alone accuses nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, median_high, median_low
from typing import Literal

from atoll.base.draw import shuffled
from atoll.base.ids import PeerId, Seconds
from atoll.base.limits import CLOCK_BOUND_S, CLOCK_FAR_S, CLOCK_MOST_S
from atoll.base.machine import Effect, Emit, Fact, LinkDown, LinkUp, Received, Send, SetTimer
from atoll.wire.messages.membership import Ping, PingReply

WATCH_ALL_UP_TO = 8  # members; up to here everybody watches everybody
MINDED_MAX = 8  # watched beside those since my link to them broke: more at once is no broken link, but my own
WATCHED = 4  # peers that each one watches above that size: load per peer stays constant
SAMPLES = 8  # clock exchanges remembered per peer; the one with the smallest round trip counts


class PeerSuspected(Fact, frozen=True, kw_only=True, tag="Suspected"):
    phase = "membership"
    peer: PeerId
    why: Literal["silent", "refused"]


class PeerReturned(Fact, frozen=True, kw_only=True, tag="Returned"):
    """A peer that was given up is heard again."""

    phase = "membership"
    peer: PeerId


class ClockOff(Fact, frozen=True, kw_only=True, tag="ClockOff"):
    """My clock differs from run time by more than the bound."""

    phase = "membership"
    offset_s: Seconds


@dataclass
class WatchedPeer:
    heard_s: Seconds  # local clock at which I last heard from it
    samples: deque[tuple[Seconds, Seconds]] = field(
        default_factory=lambda: deque[tuple[Seconds, Seconds]](maxlen=SAMPLES)
    )
    """(round trip, its run time minus my local clock)"""


class FailureDetector:
    """One peer's watch over some others. Works in the driver's local clock; `offset_s` leads to run time."""

    def __init__(self, me: PeerId, beat_s: Seconds, suspect_s: Seconds) -> None:
        self.me, self.beat_s, self.suspect_s = me, beat_s, suspect_s
        self.watched: dict[PeerId, WatchedPeer] = {}
        self.chosen: frozenset[PeerId] = frozenset()  # of those, the ones that are mine to watch by the plan
        self.others: tuple[PeerId, ...] = ()  # members that I do not watch
        self.minded: set[PeerId] = set()  # of these, those to whom my link broke: I watch them, too
        self.beats = 0
        self.trips: dict[PeerId, deque[Seconds]] = {}  # recent round trips to any member
        self.refused: set[PeerId] = set()
        self.silent: set[PeerId] = set()
        self.called: dict[PeerId, Seconds] = {}  # since when each owes the answer, by the local clock
        self.accused: dict[PeerId, set[PeerId]] = {}  # gone according to other members' signed suspicions
        self.accusers_needed = 1
        self.offset_s: Seconds = 0.0

    def gone(self, peer: PeerId) -> bool:
        if peer in self.refused or peer in self.silent:
            return True
        return peer not in self.chosen and len(self.accused.get(peer, ())) >= self.accusers_needed

    def unheard(self, peer: PeerId) -> bool:
        """Gone, but only for its silence: it may be the link between us that is broken."""
        return peer in self.silent and peer not in self.refused

    def here(self, peer: PeerId, now: Seconds) -> bool:
        """As far as anybody can know: not gone, and not called in vain."""
        return not self.gone(peer) and now - self.called.get(peer, now) < self.suspect_s

    def call(self, members: Sequence[PeerId], now: Seconds, head: int) -> list[Effect]:
        """Are these there, too? Asked until they answer."""
        fresh = [p for p in members if p != self.me and p not in self.watched and p not in self.called]
        self.called |= dict.fromkeys(fresh, now)
        return [Send(peer, Ping(now, head)) for peer in fresh]

    def watch(self, members: tuple[PeerId, ...], now: Seconds) -> None:
        """Follow the agreed membership: watch the next ones on a ring that everybody draws alike."""
        if len(members) <= WATCH_ALL_UP_TO:
            chosen = [p for p in members if p != self.me]
        else:
            ring = shuffled(b"watchers", str(len(members)), sorted(members))
            at = ring.index(self.me) if self.me in ring else 0
            chosen = [p for p in (ring[(at + k + 1) % len(ring)] for k in range(WATCHED)) if p != self.me]
        self.chosen = frozenset(chosen)
        self.minded &= set(members) - self.chosen
        self.watched = {p: self.watched.get(p) or WatchedPeer(now) for p in (*chosen, *sorted(self.minded))}
        self.others = tuple(p for p in members if p != self.me and p not in self.chosen)
        self.trips = {p: trips for p, trips in self.trips.items() if p in members}
        self.silent &= self.watched.keys()
        self.refused &= set(members)
        self.called = {p: since for p, since in self.called.items() if p in self.others}
        self.accused = {p: who & set(members) for p, who in self.accused.items() if p in members}

    def tick(self, now: Seconds, head: int) -> list[Effect]:
        """Ask everybody I watch whether they are there, and one other. Called every `beat_s`."""
        asked = list(self.watched | self.called)
        if self.others:
            self.beats += 1
            asked += {self.others[self.beats % len(self.others)]} - set(asked)
        asks: list[Effect] = [Send(peer, Ping(now, head)) for peer in asked]
        return asks + self.look(now)

    def latencies(self) -> dict[PeerId, Seconds]:
        """One way, to each member that has answered: half of the shortest recent round trip."""
        return {peer: min(trips) / 2 for peer, trips in self.trips.items()}

    def look(self, now: Seconds) -> list[Effect]:
        """See who has been silent for too long, and look again the moment that the next silence gets so long."""
        effects: list[Effect] = []
        for peer, record in self.watched.items():
            if now - record.heard_s >= self.suspect_s and not self.gone(peer):
                self.silent.add(peer)
                effects.append(Emit(PeerSuspected(peer=peer, why="silent")))
        due = min((r.heard_s for p, r in self.watched.items() if not self.gone(p)), default=now) + self.suspect_s
        return [*effects, SetTimer("silence", due)] if now < due < now + self.beat_s else effects

    def heard(self, peer: PeerId, now: Seconds) -> list[Effect]:
        """Any message is a sign of life."""
        record = self.watched.get(peer)
        if record is not None:
            record.heard_s = now
        self.called.pop(peer, None)
        if peer in self.silent or peer in self.refused or peer in self.accused:
            was_gone = self.gone(peer)
            self.silent.discard(peer)
            self.refused.discard(peer)
            self.accused.pop(peer, None)
            return [Emit(PeerReturned(peer=peer))] if was_gone else []
        return []

    def accuse(self, peer: PeerId, by: PeerId, now: Seconds) -> None:
        """A member's signed suspicion; enough of them let me stop waiting for a peer that I do not watch.

        From now on I watch it too: its few watchers alone may be fewer than a vertex needs to remove it.
        I am here, whoever does not hear me: else I would send myself away where I propose.
        """
        if peer != self.me:
            self.accused.setdefault(peer, set()).add(by)
            self.watched.setdefault(peer, WatchedPeer(now))

    def link(self, event: LinkUp | LinkDown, now: Seconds) -> list[Effect]:
        match event:
            case LinkUp(peer):
                self.refused.discard(peer)
                self.minded.discard(peer)
                return self.heard(peer, now)
            case LinkDown(peer, refused=True) if peer not in self.refused:
                was_gone = self.gone(peer)
                self.refused.add(peer)
                return [] if was_gone else [Emit(PeerSuspected(peer=peer, why="refused"))]
            case LinkDown(peer):
                if peer in self.others and len(self.minded) < MINDED_MAX:
                    self.minded.add(peer)
                    self.watched.setdefault(peer, WatchedPeer(now))
                return []  # the network may be back before the silence is long enough

    def beat(self, event: Received, now: Seconds, head: int) -> list[Effect]:
        match event.message:
            case Ping(sent_s):
                return [Send(event.sender, PingReply(sent_s, now + self.offset_s, head))]
            case PingReply(sent_s, clock_s):
                return self._learn_clock(event.sender, sent_s, clock_s, now)
            case _:
                return []

    def slept(self, now: Seconds) -> None:
        """My own clock jumped: the others were not silent, I was deaf."""
        for record in self.watched.values():
            record.heard_s = now
            record.samples.clear()
        self.called = dict.fromkeys(self.called, now)
        self.trips.clear()

    def _learn_clock(self, peer: PeerId, sent_s: Seconds, clock_s: Seconds, now: Seconds) -> list[Effect]:
        record = self.watched.get(peer)
        round_trip = now - sent_s
        if not 0 <= round_trip <= self.suspect_s or not abs(clock_s - now) <= CLOCK_MOST_S:
            return []  # an invented or ancient question, or an answer that is no time
        if record is not None or peer in self.others:
            self.trips.setdefault(peer, deque(maxlen=SAMPLES)).append(round_trip)
        if record is None:
            return []
        record.samples.append((round_trip, clock_s + round_trip / 2 - now))
        best = [min(r.samples)[1] for r in self.watched.values() if r.samples]
        before = self.offset_s
        self.offset_s = self._middle(best)
        if abs(self.offset_s) > CLOCK_BOUND_S >= abs(before):
            return [Emit(ClockOff(offset_s=self.offset_s))]
        return []

    def _middle(self, theirs: list[Seconds]) -> Seconds:
        """Between these offsets and mine. Far from mine the first to answer may be liars: then I wait for most of
        those I watch, and of two clocks in the middle take the nearer, since their mean is nobody's time."""
        every, mine = [*theirs, self.offset_s], self.offset_s
        middle = median(every)
        if abs(middle - mine) <= CLOCK_FAR_S or len(self.watched) == 1:  # two alone meet halfway
            return middle
        if 2 * len(theirs) <= len(self.watched):
            return mine
        return min(median_low(every), median_high(every), key=lambda offset: abs(offset - mine))
