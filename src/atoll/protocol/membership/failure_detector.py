"""Failure detector and clock synchronization: heartbeats, suspicion by silence, run time by median.

Driving contract: call `set_members` first, and again after each membership change; call `tick` every `beat_s`.
Pass every message's sender to `record_life`; `Ping` and `PingReply` also to `on_heartbeat`; `LinkUp` and `LinkDown`
to `on_link_event`; signed suspicions to `record_suspicion`. Call `check_silence` when the timer "silence" fires.
`now` is the driver's local clock; the driver reports a jump of it by `reset_silence`.

A peer pings the watched peers every `beat_s` seconds; any message from them counts as life. A peer is *gone* after
`suspect_s` seconds of silence or a refused redial: no step waits for it. Only an agreed vertex removes a member.
If a connection ends and its redial fails otherwise (the listener hangs up, a firewall drops the dial), the signed
suspicions of enough members count like a refused redial.

Run time is the median of the watched peers' clocks and the local clock, each estimated from the exchange with the
smallest round trip (Cristian 1989). One wrong clock therefore has no effect. A median far from the local clock is
used only if most watched peers have replied. Each beat also pings one other member, in turns, to measure all
latencies.

If the presence of all members matters, unwatched members are *called*: pinged at every beat until they reply. A
called member that stays silent for `suspect_s` counts as absent, without being suspected.
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

WATCH_ALL_UP_TO = 8  # members; up to this size each peer watches all others
UNREACHABLE_MAX = 8  # peers watched because their link broke: if more break at once, the local network is at fault
WATCHED = 4  # peers watched by each peer above that size: load per peer stays constant
SAMPLES = 8  # clock exchanges stored per peer; the one with the smallest round trip counts


class PeerSuspected(Fact, frozen=True, kw_only=True, tag="PeerSuspected"):
    """A peer is gone: silent for too long, or its redial was refused."""

    phase = "membership"
    peer: PeerId
    why: Literal["silent", "refused"]


class PeerDeparted(Fact, frozen=True, kw_only=True, tag="PeerDeparted"):
    """The process of a peer ended after its farewell, which members may not have agreed on yet."""

    phase = "membership"
    peer: PeerId


class PeerReturned(Fact, frozen=True, kw_only=True, tag="PeerReturned"):
    """A peer that was gone sends messages again."""

    phase = "membership"
    peer: PeerId


class ClockOffsetExceeded(Fact, frozen=True, kw_only=True, tag="ClockOffsetExceeded"):
    """The local clock differs from run time by more than CLOCK_BOUND_S."""

    phase = "membership"
    offset_s: Seconds


@dataclass
class WatchedPeer:
    """Last sign of life and clock samples of one watched peer."""

    heard_s: Seconds  # local time of its last message
    samples: deque[tuple[Seconds, Seconds]] = field(
        default_factory=lambda: deque[tuple[Seconds, Seconds]](maxlen=SAMPLES)
    )
    """(round trip, its run time minus the local clock), in seconds"""


class FailureDetector:
    """The local peer's watch over other members. Local clock plus `offset_s` is run time."""

    def __init__(self, me: PeerId, beat_s: Seconds, suspect_s: Seconds) -> None:
        self.me, self.beat_s, self.suspect_s = me, beat_s, suspect_s
        self.watched: dict[PeerId, WatchedPeer] = {}
        self.chosen: frozenset[PeerId] = frozenset()  # peers to watch by the agreed ring
        self.others: tuple[PeerId, ...] = ()  # all other members
        self.unreachable: set[PeerId] = set()  # other members that are watched because their link broke
        self.beat_count = 0
        self.round_trips: dict[PeerId, deque[Seconds]] = {}  # member -> recent round round_trips
        self.refused: set[PeerId] = set()
        self.leaving: set[PeerId] = set()  # of these: said farewell, and the process may still run
        # members with a connection that ended, until the next one, and when it ended
        self.unlinked: dict[PeerId, Seconds] = {}
        self.silent: set[PeerId] = set()
        self.called: dict[PeerId, Seconds] = {}  # called member -> local time of the first ping
        self.accused: dict[PeerId, set[PeerId]] = {}  # peer -> members with a signed suspicion of it
        self.accusers_needed = 1
        self.offset_s: Seconds = 0.0

    def is_gone(self, peer: PeerId) -> bool:
        if peer in self.refused or peer in self.silent:
            return True
        # a peer that is watched over a connection is judged by what is heard here
        counts = peer not in self.chosen or peer in self.unlinked
        return counts and len(self.accused.get(peer, ())) >= self.accusers_needed

    def is_silent_only(self, peer: PeerId) -> bool:
        """Whether the peer is gone only by silence: the link to it may be broken."""
        return peer in self.silent and peer not in self.refused

    def is_present(self, peer: PeerId, now: Seconds) -> bool:
        """Whether the peer is present as far as known: not gone, and not called without a reply."""
        return not self.is_gone(peer) and now - self.called.get(peer, now) < self.suspect_s

    def ping_unwatched(self, members: Sequence[PeerId], now: Seconds, head: int) -> list[Effect]:
        """Ping these unwatched members until they reply."""
        fresh = [p for p in members if p != self.me and p not in self.watched and p not in self.called]
        self.called |= dict.fromkeys(fresh, now)
        return [Send(peer, Ping(now, head)) for peer in fresh]

    def set_members(self, members: tuple[PeerId, ...], now: Seconds) -> None:
        """Follow the agreed membership: watch the next peers on a ring that is equal at all members."""
        if len(members) <= WATCH_ALL_UP_TO:
            chosen = [p for p in members if p != self.me]
        else:
            ring = shuffled(b"watchers", str(len(members)), sorted(members))
            at = ring.index(self.me) if self.me in ring else 0
            chosen = [p for p in (ring[(at + k + 1) % len(ring)] for k in range(WATCHED)) if p != self.me]
        self.chosen = frozenset(chosen)
        self.unreachable &= set(members) - self.chosen
        self.watched = {p: self.watched.get(p) or WatchedPeer(now) for p in (*chosen, *sorted(self.unreachable))}
        self.others = tuple(p for p in members if p != self.me and p not in self.chosen)
        self.round_trips = {p: round_trips for p, round_trips in self.round_trips.items() if p in members}
        self.silent &= self.watched.keys()
        self.refused &= set(members)
        self.leaving &= self.refused
        self.unlinked = {p: since for p, since in self.unlinked.items() if p in members}
        self.called = {p: since for p, since in self.called.items() if p in self.others}
        self.accused = {p: who & set(members) for p, who in self.accused.items() if p in members}

    def tick(self, now: Seconds, head: int) -> list[Effect]:
        """Ping all watched and called peers and one other member. Called every `beat_s`."""
        asked = list(self.watched | self.called)
        if self.others:
            self.beat_count += 1
            asked += {self.others[self.beat_count % len(self.others)]} - set(asked)
        asks: list[Effect] = [Send(peer, Ping(now, head)) for peer in asked]
        return asks + self.check_silence(now)

    def latencies(self) -> dict[PeerId, Seconds]:
        """One-way latency in seconds to each member that has replied: half of the shortest recent round trip."""
        return {peer: min(round_trips) / 2 for peer, round_trips in self.round_trips.items()}

    def check_silence(self, now: Seconds) -> list[Effect]:
        """Suspect peers that were silent for `suspect_s`, and set a timer for the next such moment."""
        effects: list[Effect] = []
        for peer, record in self.watched.items():
            if now - record.heard_s >= self.suspect_s and not self.is_gone(peer):
                self.silent.add(peer)
                effects.append(Emit(PeerSuspected(peer=peer, why="silent")))
        due = min((r.heard_s for p, r in self.watched.items() if not self.is_gone(p)), default=now) + self.suspect_s
        return [*effects, SetTimer("silence", due)] if now < due < now + self.beat_s else effects

    def record_life(self, peer: PeerId, now: Seconds) -> list[Effect]:
        """Record a sign of life: any message from this peer, unless it was sent before its process ended."""
        if peer in self.refused and now - self.unlinked.get(peer, -1e9) < self.beat_s:
            return []  # read after its connection ended; a live peer sends more than that
        record = self.watched.get(peer)
        if record is not None:
            record.heard_s = now
        self.called.pop(peer, None)
        if peer in self.silent or peer in self.refused or peer in self.accused:
            was_gone = self.is_gone(peer)
            self.silent.discard(peer)
            self.refused.discard(peer)
            self.leaving.discard(peer)
            self.accused.pop(peer, None)
            return [Emit(PeerReturned(peer=peer))] if was_gone else []
        return []

    def record_farewell(self, peer: PeerId) -> None:
        """Wait for this peer no more: it said farewell."""
        self.refused.add(peer)
        self.leaving.add(peer)

    def record_suspicion(self, peer: PeerId, by: PeerId, now: Seconds) -> None:
        """Record a member's signed suspicion. Enough of them make an unwatched peer gone.

        The local peer then watches it too: its few watchers may be fewer than a vertex needs to remove it.
        A suspicion of the local peer is ignored: otherwise its own proposal would remove it.
        """
        if peer != self.me:
            self.accused.setdefault(peer, set()).add(by)
            self.watched.setdefault(peer, WatchedPeer(now))

    def on_link_event(self, event: LinkUp | LinkDown, now: Seconds) -> list[Effect]:
        if isinstance(event, LinkDown):
            self.unlinked[event.peer] = now
        match event:
            case LinkUp(peer):
                self.unlinked.pop(peer, None)
                self.unreachable.discard(peer)
                return self.record_life(peer, now)
            case LinkDown(peer, refused=True) if peer in self.leaving:
                self.leaving.discard(peer)
                return [Emit(PeerDeparted(peer=peer))]
            case LinkDown(peer, refused=True) if peer not in self.chosen and peer not in self.others:
                return []  # it has left, so no member waits for it
            case LinkDown(peer, refused=True) if peer not in self.refused:
                was_gone = self.is_gone(peer)
                self.refused.add(peer)
                return [] if was_gone else [Emit(PeerSuspected(peer=peer, why="refused"))]
            case LinkDown(peer):
                if peer in self.others and len(self.unreachable) < UNREACHABLE_MAX:
                    self.unreachable.add(peer)
                    self.watched.setdefault(peer, WatchedPeer(now))
                return []  # the network may be back before the silence is long enough

    def on_heartbeat(self, event: Received, now: Seconds, head: int) -> list[Effect]:
        match event.message:
            case Ping(sent_s):
                return [Send(event.sender, PingReply(sent_s, now + self.offset_s, head))]
            case PingReply(sent_s, clock_s):
                return self._update_clock(event.sender, sent_s, clock_s, now)
            case _:
                return []

    def reset_silence(self, now: Seconds) -> None:
        """Reset all silence after the local clock jumped: this process did not read messages meanwhile."""
        for record in self.watched.values():
            record.heard_s = now
            record.samples.clear()
        self.called = dict.fromkeys(self.called, now)
        self.round_trips.clear()

    def _update_clock(self, peer: PeerId, sent_s: Seconds, clock_s: Seconds, now: Seconds) -> list[Effect]:
        record = self.watched.get(peer)
        round_trip = now - sent_s
        if not 0 <= round_trip <= self.suspect_s or not abs(clock_s - now) <= CLOCK_MOST_S:
            return []  # an invented or old ping, or an impossible clock value
        if record is not None or peer in self.others:
            self.round_trips.setdefault(peer, deque(maxlen=SAMPLES)).append(round_trip)
        if record is None:
            return []
        record.samples.append((round_trip, clock_s + round_trip / 2 - now))
        best = [min(r.samples)[1] for r in self.watched.values() if r.samples]
        before = self.offset_s
        self.offset_s = self._median_offset(best)
        if abs(self.offset_s) > CLOCK_BOUND_S >= abs(before):
            return [Emit(ClockOffsetExceeded(offset_s=self.offset_s))]
        return []

    def _median_offset(self, theirs: list[Seconds]) -> Seconds:
        """Median of the watched peers' offsets and the local one.

        If it is far from the local clock, the first replies may be lies: most watched peers must have replied. Of
        two middle clocks the nearer counts, since their mean is no clock's time.
        """
        every, mine = [*theirs, self.offset_s], self.offset_s
        middle = median(every)
        if abs(middle - mine) <= CLOCK_FAR_S or len(self.watched) == 1:  # two alone meet halfway
            return middle
        if 2 * len(theirs) <= len(self.watched):
            return mine
        return min(median_low(every), median_high(every), key=lambda offset: abs(offset - mine))
