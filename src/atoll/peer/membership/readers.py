"""Readers: the peers that get answers, by the agreed membership, a ticket that they showed, or genesis.

Invariants:
- A peer that may not read gets hellos, refusals and requests, and nothing else.
- The newest vertex decides each time: revocation, the last use of a ticket and expulsion end the right at once.
- An expelled peer receives the vertices up to its expulsion.
Not responsible for: who becomes a member (policy/membership.py).
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Broadcast, Send
from atoll.peer.membership.admission import EXPELLED, code_of
from atoll.peer.run_view import RunView
from atoll.policy.ticket_check import ticket_problem
from atoll.wire.codec import decode_body
from atoll.wire.messages.audits import ExhibitRequest
from atoll.wire.messages.history import (
    ChunkRequest,
    EraSignaturesRequest,
    ManifestRequest,
    VerticesRequest,
    VerticesResponse,
)
from atoll.wire.messages.membership import Hello, JoinRefused, Ping, RefusalCode
from atoll.wire.messages.preference import PreferenceRequest
from atoll.wire.messages.vertex import Vertex, VertexBody

Reads = (
    Ping
    | VerticesRequest
    | ManifestRequest
    | ChunkRequest
    | EraSignaturesRequest
    | ExhibitRequest
    | PreferenceRequest
)
ToStrangers = Hello | JoinRefused | VerticesRequest | ManifestRequest | ChunkRequest | EraSignaturesRequest


class ReadAccessControl:
    def __init__(self) -> None:
        self.shown: dict[PeerId, bytes] = {}  # ticket redemptions of linked peers

    def refusal(self, peer: PeerId, known: RunView | None, wall_s: Seconds) -> RefusalCode | None:
        """Why this peer may read nothing here; None: it may, or there is nothing to read."""
        if known is None or known.settings.is_public:
            return None
        standing = known.roster.standing_of(peer)
        if standing is not None:
            return EXPELLED if standing == "expelled" else None
        tickets, run = known.history.head_body.tickets, known.notary.run
        why = ticket_problem(self.shown.get(peer, b""), peer, tickets, run, wall_s)
        return code_of(why) if why is not None else None

    def may_leave(self, send: Send, known: RunView | None, wall_s: Seconds) -> Send | None:
        """The send, or the part of it that this receiver may read; None: nothing."""
        if isinstance(send.message, ToStrangers):
            return send
        code = self.refusal(send.to, known, wall_s)
        if code == EXPELLED and known is not None and isinstance(send.message, VerticesResponse):
            vertices = _until_expelled(send.message.vertices, send.to, known)
            head = decode_body(vertices[-1].body).round if vertices else 0
            return replace(send, message=VerticesResponse(vertices, head)) if vertices else None
        return send if code is None else None

    def narrow(self, broadcast: Broadcast, known: RunView | None, wall_s: Seconds) -> Broadcast:
        """The broadcast to those of its roster that may read."""
        allowed = (peer for peer in broadcast.roster if self.refusal(peer, known, wall_s) is None)
        return replace(broadcast, roster=tuple(allowed))


def _until_expelled(vertices: tuple[Vertex, ...], peer: PeerId, known: RunView) -> tuple[Vertex, ...]:
    """The vertices up to this peer's expulsion; for the first one its parent shows whether it came later."""
    shown: list[Vertex] = []
    for vertex in vertices:
        body = decode_body(vertex.body)
        before = known.history.bodies.get(body.round - 1)
        is_last = _expels(body, peer)
        if is_last and not shown and (before is None or _expels(before, peer)):
            break
        shown.append(vertex)
        if is_last:
            break
    return tuple(shown)


def _expels(body: VertexBody, peer: PeerId) -> bool:
    return any(m.peer == peer and m.standing == "expelled" for m in body.members)
