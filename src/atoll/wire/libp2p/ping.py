"""`/ipfs/ping/1.0.0`: 32 bytes there, the same 32 bytes back (libp2p/specs ping/ping.md).

We answer and ask nobody. Promises: what comes back is what came, whole payloads only, however they were cut.
"""

from __future__ import annotations

from atoll.wire.libp2p.varint import Bytes

PROTOCOL = "/ipfs/ping/1.0.0"
PAYLOAD_BYTES = 32
STREAMS_MAX = 2  # "The listening peer SHOULD accept at most two streams per peer"


class PingResponder:
    """The listening side of one stream."""

    def __init__(self) -> None:
        self._part = bytearray()

    def receive(self, data: Bytes) -> bytes:
        """What to send back: every whole payload, in order."""
        self._part += data
        whole = len(self._part) // PAYLOAD_BYTES * PAYLOAD_BYTES
        answer = bytes(self._part[:whole])
        del self._part[:whole]
        return answer
