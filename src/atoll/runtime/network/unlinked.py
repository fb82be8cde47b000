"""Connections without a link: strangers in a handshake, and guests that only use served protocols.

Invariants: both kinds are bounded, and a slow stranger cannot lock others out.
"""

from __future__ import annotations

from atoll.runtime.network.control_channel import ControlChannel

HALF_OPEN_MAX = 512  # strangers in a handshake; each holds 64 kB and may cost this peer one signature (1 ms)
HALF_OPEN_PER_SOURCE_MAX = 64  # strangers from one host: a full mesh that starts on one machine
GUESTS_MAX = 64  # foreign peers; when full, the oldest connection is closed


class UnlinkedConnections:
    """Strangers and guests of one connection manager, oldest first."""

    def __init__(self) -> None:
        self._half_open: dict[ControlChannel, None] = {}
        self._guests: dict[ControlChannel, None] = {}

    def add_stranger(self, control: ControlChannel) -> None:
        """Raises ConnectionAbortedError above the bound per source; above the total, the oldest is closed."""
        source = control.connection.source
        if sum(c.connection.source == source for c in self._half_open) >= HALF_OPEN_PER_SOURCE_MAX:
            raise ConnectionAbortedError("too many strangers from one source")
        if len(self._half_open) >= HALF_OPEN_MAX:
            next(iter(self._half_open)).connection.abort()
        self._half_open[control] = None

    def add_guest(self, control: ControlChannel) -> None:
        self._half_open.pop(control, None)
        if len(self._guests) >= GUESTS_MAX:
            next(iter(self._guests)).connection.abort()
        self._guests[control] = None

    def end_handshake(self, control: ControlChannel) -> None:
        self._half_open.pop(control, None)

    def discard(self, control: ControlChannel) -> None:
        self._half_open.pop(control, None)
        self._guests.pop(control, None)

    def abort_all(self) -> None:
        for control in [*self._half_open, *self._guests]:
            control.connection.abort()
