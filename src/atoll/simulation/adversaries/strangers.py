"""Strangers: peers that know a run's id and members' addresses, but have no usable ticket.

A stranger requests, claims and refuses everything, twice a second, at every member.

Invariants:
- It signs with its own key only.
Not responsible for: what must hold beside it (`scenarios/strangers.py`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import get_args

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import (
    Connect,
    Effect,
    Event,
    LinkDown,
    LinkUp,
    Message,
    Received,
    Send,
    SetTimer,
    Start,
    TimerFired,
    tag_of,
)
from atoll.crypto.digest import digest
from atoll.peer.peer import Peer
from atoll.simulation.adversaries.byzantine import MISCHIEF_S, disguised
from atoll.wire.messages.audits import ExhibitRequest
from atoll.wire.messages.history import (
    ChunkRequest,
    EraSignaturesRequest,
    ManifestRequest,
    VerticesRequest,
    VerticesResponse,
)
from atoll.wire.messages.membership import Hello, JoinRefused, Ping, RefusalCode, ReportMessage
from atoll.wire.messages.preference import PreferenceRequest
from atoll.wire.messages.round import PartRequest, RowRequest
from atoll.wire.messages.statements import JoinRequest
from atoll.wire.messages.vertex import Vertex

HARMLESS = (
    Hello | JoinRefused | VerticesRequest | ManifestRequest | ChunkRequest | EraSignaturesRequest
)  # handshakes, refusals, requests
ROUNDS = 64  # rounds that it guesses


class StrangerAdversary:
    """Takes the place of a peer. `blobs`: digests of blobs that it knows from elsewhere."""

    def __init__(self, peer: Peer, members: Sequence[PeerId], blobs: Sequence[Digest]) -> None:
        self.peer, self.notary = peer, peer.notary  # the honest peer inside receives no message
        self.members, self.blobs = members, blobs
        self.linked: set[PeerId] = set()
        self.draw = random.Random(f"stranger/{peer.me}")
        self.told: Counter[str] = Counter()  # kind → messages that members sent to it
        self.leaked: list[Message] = []  # messages among them that no stranger may receive

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Start():
                return [SetTimer("mischief", now + MISCHIEF_S), *(Connect(peer, ()) for peer in self.members)]
            case LinkUp(peer):
                self.linked.add(peer)
            case LinkDown(peer):
                self.linked.discard(peer)
            case Received(message=message):
                self._hear(message)
            case TimerFired():
                said = [Send(peer, word) for peer in sorted(self.linked) for word in self._words(now)]
                return [SetTimer("mischief", now + MISCHIEF_S), *said]
            case _:
                pass
        return []

    def _hear(self, message: Message) -> None:
        self.told[tag_of(message)] += 1
        if not isinstance(message, HARMLESS) or (isinstance(message, Hello) and message.head >= -1):
            self.leaked.append(message)

    def _words(self, now: Seconds) -> list[Message]:
        run, me, round = self.peer.run, self.peer.me, self.draw.randrange(ROUNDS)
        signer, invented = self.notary.signer, digest(self.draw.randbytes(8))
        blob = self.draw.choice([*self.blobs, invented])
        join = JoinRequest(
            me, signer.vote_key, signer.certificate, (), "trainer", "", invented, self.peer.wish.admission
        )
        return [
            Hello(run, self.draw.choice([-2, 2**40]), self.peer.wish.admission),
            *(JoinRefused(code) for code in get_args(RefusalCode)),
            *(VerticesRequest(first) for first in (-1, 0, round)),
            Ping(now, round),
            ManifestRequest(blob),
            ChunkRequest(blob, 0),
            EraSignaturesRequest(round, ()),
            ExhibitRequest(round),
            PreferenceRequest(f"branch/{round}", 0, invented),
            PartRequest(round, 0, "", invented),
            RowRequest(round, 0, "", 0, self.draw.choice(self.members)),
            VerticesResponse((Vertex(self.draw.randbytes(30), None),), 2**40),
            ReportMessage(self.notary.sign(join)),
        ]


def stranger(members: Sequence[PeerId], blobs: Sequence[Digest]) -> Callable[..., Peer]:
    """Maker of a stranger, for a swarm."""
    return disguised(lambda peer: StrangerAdversary(peer, members, blobs))
