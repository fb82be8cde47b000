"""Fork monitor: what a peer does about other branches of its run.

Invariants:
- The hooks do nothing by default: a peer then knows its own branch alone.
Not responsible for: accepting vertices; the chain does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Received, TimerFired
from atoll.protocol.history.chain import VertexChain
from atoll.wire.messages.vertex import Vertex


class ForkMonitor:
    """`linked`: peers connected to the local one; the caller changes this set."""

    def __init__(self, me: PeerId, history: VertexChain, linked: Set[PeerId]) -> None:
        self.me, self.history, self.linked = me, history, linked

    def restore(self, kept: Mapping[str, bytes]) -> None:
        """Restore known branches after a restart."""

    def check_past_vertex(self, vertex: Vertex, who: PeerId, members: Sequence[PeerId] = ()) -> list[Effect]:
        """Compare a vertex of a past round with the local one. PeerFault if it differs and is forged."""
        return []

    def answer_other_branch(self, vertex: Vertex, who: PeerId) -> list[Effect] | None:
        """Messages to the sender of a vertex that does not follow the head; None if it is on no other branch."""
        return None

    def on_peer_connected(self, peer: PeerId, put_away: Set[PeerId]) -> list[Effect]:
        """A peer has connected; `put_away`: members that a recovery removed."""
        return []

    def on_heartbeat(self, now: Seconds) -> list[Effect]:
        """A heartbeat is due."""
        return []

    def on_message(self, event: Received, now: Seconds) -> list[Effect]:
        """A message about preferred branches arrived."""
        return []

    def on_timer(self, event: TimerFired, now: Seconds) -> list[Effect]:
        """A timer of this monitor fired; their names begin with "snow/"."""
        return []
