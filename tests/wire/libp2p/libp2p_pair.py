"""Two connections and the bytes between them, for the tests of this folder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from atoll.base.ids import PeerId
from atoll.base.machine import Lane
from atoll.crypto.identity import Identity
from atoll.crypto.noise_pattern import HandshakeRole
from atoll.wire.libp2p.connection import Libp2pConnection, Libp2pTerms
from atoll.wire.libp2p.events import ConnectionEvent

ALICE = Identity.from_seeds(b"a" * 32, b"A" * 32)
BOB = Identity.from_seeds(b"b" * 32, b"B" * 32)
SPOKEN = {"/echo/1", "/atoll/control/1"}
TERMS = Libp2pTerms(identity=BOB, network=b"test net", speaks=SPOKEN.__contains__)


def terms(identity: Identity, **changes: object) -> Libp2pTerms:
    return replace(TERMS, identity=identity, **changes)


@dataclass
class Pair:
    """Alice dials Bob. `cuts` says in what pieces bytes arrive; events pile up per end."""

    alice: Libp2pConnection
    bob: Libp2pConnection
    cuts: Iterator[int] = field(default_factory=lambda: itertools.repeat(1 << 20))
    events: tuple[list[ConnectionEvent], list[ConnectionEvent]] = field(default_factory=lambda: ([], []))
    carried: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()))
    on_event: Callable[[Libp2pConnection, ConnectionEvent], None] = lambda connection, event: None

    def run(self, rounds: int = 200) -> Pair:
        """Carry bytes both ways until nobody has anything to say."""
        ends = self.alice, self.bob
        for _ in range(rounds):
            moved = False
            for sender, receiver in ((0, 1), (1, 0)):
                wire = b"".join(ends[sender].take_outgoing())
                self.carried[sender].extend(wire)
                while wire:
                    moved = True
                    size = next(self.cuts)
                    events = ends[receiver].receive(memoryview(wire)[:size])
                    wire = wire[size:]
                    self.events[receiver].extend(events)
                    for event in events:
                        self.on_event(ends[receiver], event)
            if not moved:
                return self
        raise AssertionError("they never stop talking")


def pair(
    alice: Libp2pTerms | None = None,
    bob: Libp2pTerms | None = None,
    lane: Lane = Lane.CONTROL,
    expected: PeerId = BOB.peer,
) -> Pair:
    return Pair(
        Libp2pConnection(HandshakeRole.INITIATOR, alice or terms(ALICE), lane=lane, expected=expected),
        Libp2pConnection(HandshakeRole.RESPONDER, bob or terms(BOB)),
    )
