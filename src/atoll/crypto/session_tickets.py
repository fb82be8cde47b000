"""Store of session tickets: the rights to resume the current sessions of one peer.

Invariants:
- One session per remote has tickets: one to present and one to accept.
- A ticket is used once, within `TICKET_S` of the handshake that made it, and ends with its session.
Not responsible for: the handshake (noise.py), the session's messages (runtime/network/message_log.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from atoll.base.ids import PeerId, Seconds
from atoll.crypto.noise import NoiseHandshakeResult, SessionTicket

TICKET_S: Final = 3600.0  # bounds the time in which a stolen memory image of one end is worth a session


class SessionTicketPair(NamedTuple):
    """Tickets of the session with one remote; None: used."""

    expires_s: Seconds
    present: SessionTicket | None
    accept: SessionTicket | None


class TicketStore:
    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self._clock = clock
        self._kept: dict[PeerId, SessionTicketPair] = {}
        self._presenters: dict[bytes, PeerId] = {}  # identifier of a ticket to accept -> its remote

    def keep(self, established: NoiseHandshakeResult) -> None:
        """Replace the tickets of this remote by those of its newest connection."""
        self.discard(established.peer)
        present, accept = established.tickets
        self._kept[established.peer] = SessionTicketPair(self._clock() + TICKET_S, present, accept)
        self._presenters[accept.identifier] = established.peer

    def discard(self, peer: PeerId) -> None:
        """The session has ended."""
        kept = self._kept.pop(peer, None)
        if kept is not None and kept.accept is not None:
            del self._presenters[kept.accept.identifier]

    def take_for(self, peer: PeerId) -> SessionTicket | None:
        """Use the ticket to present to this peer."""
        kept = self._valid(peer)
        if kept is None or kept.present is None:
            return None
        self._kept[peer] = kept._replace(present=None)
        return kept.present

    def find(self, identifier: bytes) -> SessionTicket | None:
        """The ticket that a remote presents. `spend` follows once its secret is proven."""
        kept = self._valid(self._presenters.get(identifier, PeerId("")))
        return kept.accept if kept is not None else None

    def spend(self, ticket: SessionTicket) -> None:
        peer = self._presenters.pop(ticket.identifier)
        self._kept[peer] = self._kept[peer]._replace(accept=None)

    def _valid(self, peer: PeerId) -> SessionTicketPair | None:
        kept = self._kept.get(peer)
        if kept is not None and self._clock() >= kept.expires_s:
            self.discard(peer)
            return None
        return kept
