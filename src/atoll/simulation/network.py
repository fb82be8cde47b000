"""Simulated links: latency, jitter, loss, duplicates, bandwidth, partitions. Named knobs, one seed.

Latency is drawn once per pair, jitter per message, so messages overtake each other as on real paths. Bulk payloads
queue at the sender's uplink, where a newer payload of the same slot replaces a waiting one. At the receiver's
downlink they queue by arrival of their first bytes (cut-through), as in policy/topology_cost. Control messages only
pay latency.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass, field

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Received

ACKED_AT_ONCE_MIN = 0.5  # least share of new acknowledgments in a sample; the rest comes with later ones


@dataclass(frozen=True)
class NetworkKnobs:
    latency_min_s: Seconds = 0.010
    latency_max_s: Seconds = 0.080
    jitter_s: Seconds = 0.010
    loss_rate: float = 0.0  # share of lost messages; the real host loses only what a broken connection loses
    duplicate_rate: float = 0.0
    uplink_bytes_s: float = 12.5e6  # 100 Mbit/s
    downlink_bytes_s: float = 12.5e6
    measured: bool = False  # peers measure their uplinks by their transfers; otherwise they know them


@dataclass(slots=True)
class QueuedMessage:
    """Message with a payload until it has left; a newer message of its slot replaces it."""

    event: Received
    begins: Seconds  # time at which it starts to leave
    whole_at: Seconds = 0.0  # end at the receiver's downlink, if that is free

    @property
    def size_bytes(self) -> int:
        return self.event.payload.size_bytes if self.event.payload is not None else 0


@dataclass
class UploadProgress:
    """Bulk from one peer to another: what a real sender can see of it."""

    sent_bytes: int = 0
    passing: list[tuple[Seconds, Seconds, int]] = field(default_factory=list)  # at the receiver: begin, end, size
    passed_bytes: int = 0
    acked_bytes: int = 0
    reported_bytes: int = 0  # acknowledgments that have reached the sender

    def unacked_bytes(self, now: Seconds) -> int:
        """Bytes that have passed the receiver's downlink and are not acknowledged."""
        self.passed_bytes += sum(size for _, end, size in self.passing if end <= now)
        self.passing = [transfer for transfer in self.passing if transfer[1] > now]
        part = sum(size * max(0.0, now - begin) / (end - begin) for begin, end, size in self.passing)
        return self.passed_bytes + int(part) - self.acked_bytes


@dataclass
class VirtualNetwork:
    """Decides when, and how often, a message arrives."""

    knobs: NetworkKnobs
    draw: random.Random
    blocked: set[tuple[PeerId, PeerId]] = field(default_factory=set)  # directed: (from, to)
    uplink_free: dict[PeerId, Seconds] = field(default_factory=dict)
    downlink_free: dict[PeerId, Seconds] = field(default_factory=dict)
    latency: dict[tuple[PeerId, PeerId], Seconds] = field(default_factory=dict)
    uplink_bytes_s: dict[PeerId, float] = field(default_factory=dict)  # peers with a special uplink
    downlink_bytes_s: dict[PeerId, float] = field(default_factory=dict)
    # sender → messages that have not left
    waiting: dict[PeerId, dict[tuple[PeerId, Hashable], QueuedMessage]] = field(default_factory=dict)
    uploads: dict[PeerId, dict[PeerId, UploadProgress]] = field(default_factory=dict)  # by sender, if measured
    sent: int = 0
    lost: int = 0
    bytes: int = 0

    def arrivals(self, now: Seconds, to: PeerId, event: Received) -> tuple[QueuedMessage, list[Seconds]]:
        """(message, world times at which its copies arrive): none, one or two.

        For a payload it is the time of its first byte at the receiver's downlink: see `through`.
        """
        sender, payload = event.sender, event.payload
        said = QueuedMessage(event, now)
        if payload is not None and (place := event.message.replaces_key) is not None:
            if self.uplink_free.get(sender, 0.0) <= now:
                self.waiting[sender] = {}  # all of it has left
            waiting = self.waiting.setdefault(sender, {})
            older = waiting.get((to, place))
            if older is not None and older.begins > now and older.size_bytes == payload.size_bytes:
                older.event = event
                return older, []
            waiting[to, place] = said
        self.sent += 1
        if (sender, to) in self.blocked or self.draw.random() < self.knobs.loss_rate:
            self.lost += 1
            return said, []
        way_s = self.one_way_s(sender, to)
        if payload is not None:
            self.bytes += payload.size_bytes
            said.begins = max(now, self.uplink_free.get(sender, 0.0))
            left = self._queue(self.uplink_free, sender, now, payload.size_bytes / self.uplink_of(sender))
            said.whole_at = left + way_s
            if self.knobs.measured:
                to_all = self.uploads.setdefault(sender, {})
                to_all.setdefault(to, UploadProgress()).sent_bytes += payload.size_bytes
        copies = [said.begins + way_s]
        if self.knobs.duplicate_rate and self.draw.random() < self.knobs.duplicate_rate:
            copies.append(copies[0] + self.draw.uniform(0, 10 * self.knobs.jitter_s))
        return said, copies

    def through(self, now: Seconds, to: PeerId, said: QueuedMessage) -> Seconds:
        """Time at which a payload is complete, if its first byte reaches the receiver's downlink now."""
        begins = max(now, self.downlink_free.get(to, 0.0))
        worked_off = self._queue(self.downlink_free, to, now, said.size_bytes / self.downlink_of(to))
        ends = max(said.whole_at, worked_off)
        if self.knobs.measured:
            self.uploads[said.event.sender][to].passing.append((begins, ends, said.size_bytes))
        return ends

    def upload_progress(self, sender: PeerId, since: Seconds, now: Seconds) -> dict[PeerId, tuple[int, bool]]:
        """Per receiver: bytes acknowledged so far, and whether some still wait.

        A real sender keeps what a full downlink does not take, so no more is acknowledged than its uplink carries.
        Acknowledgments come in bursts, since they share its downlink with other traffic.
        """
        to_all = self.uploads.get(sender, {})
        passed = {to: upload.unacked_bytes(now) for to, upload in to_all.items()}
        most = min(1.0, self.uplink_of(sender) * (now - since) / max(1, sum(passed.values())))
        here = self.draw.uniform(ACKED_AT_ONCE_MIN, 1.0)
        for to, upload in to_all.items():
            upload.acked_bytes += int(most * passed[to])
            upload.reported_bytes += int(here * (upload.acked_bytes - upload.reported_bytes))
        return {
            to: (upload.reported_bytes, upload.acked_bytes < upload.sent_bytes) for to, upload in to_all.items()
        }

    def uplink_of(self, peer: PeerId) -> float:
        return self.uplink_bytes_s.get(peer, self.knobs.uplink_bytes_s)

    def downlink_of(self, peer: PeerId) -> float:
        return self.downlink_bytes_s.get(peer, self.knobs.downlink_bytes_s)

    def one_way_s(self, sender: PeerId, to: PeerId) -> Seconds:
        pair = (sender, to) if sender < to else (to, sender)
        base = self.latency.get(pair)
        if base is None:
            base = self.draw.uniform(self.knobs.latency_min_s, self.knobs.latency_max_s)
            self.latency[pair] = base
        return base + self.knobs.jitter_s * self.draw.random()

    def split(self, side: set[PeerId], others: set[PeerId], both_ways: bool = True) -> None:
        """Block messages from `side` to `others`, and back unless the partition is asymmetric."""
        for a in side:
            for b in others:
                self.blocked.add((a, b))
                if both_ways:
                    self.blocked.add((b, a))

    def heal(self) -> None:
        self.blocked.clear()

    @staticmethod
    def _queue(free: dict[PeerId, Seconds], who: PeerId, now: Seconds, takes_s: Seconds) -> Seconds:
        done = max(now, free.get(who, 0.0)) + takes_s
        free[who] = done
        return done
