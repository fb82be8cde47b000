"""Discovery: finds addresses at which a run can be reached, and announces those of the local peer.

Invariants: a found peer is authenticated when it is dialed; without a peer id, any peer of the run may answer.
Not responsible for: addresses of members, which vertices carry and the peer's machine contacts by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from atoll.base.ids import Digest, PeerId


class FoundAddress(NamedTuple):
    address: str  # multiaddr
    peer: PeerId | None  # peer expected there; None if unknown


class Discovery(Protocol):
    """One source of addresses. Called from the event loop."""

    async def announce(self, run: Digest, addresses: Sequence[str]) -> None:
        """Publish where the local peer listens. Raises OSError."""
        ...

    async def find(self, run: Digest) -> Sequence[FoundAddress]:
        """Addresses known now. Called again while no peer is linked. Raises OSError."""
        ...


class StaticAddressDiscovery:
    """Addresses from the ticket and from the command line. They announce nothing: a ticket holds what it holds."""

    def __init__(self, known: Callable[[], Sequence[tuple[str, PeerId | None]]]) -> None:
        self._known = known

    async def announce(self, run: Digest, addresses: Sequence[str]) -> None:
        return

    async def find(self, run: Digest) -> Sequence[FoundAddress]:
        return [FoundAddress(address, peer) for address, peer in self._known()]
