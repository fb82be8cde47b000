"""Forks, one peer's side: it detects other branches of the run and polls which one most members prefer.

Not responsible for: choosing a branch. People decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Received, TimerFired
from atoll.features.forks.detect import ChainSplitDetector
from atoll.features.forks.poll import BranchPolls
from atoll.peer.sync.fork_monitor import ForkMonitor
from atoll.protocol.history.chain import VertexChain
from atoll.wire.messages.vertex import Vertex


class ChainSplitMachine(ForkMonitor):
    def __init__(self, me: PeerId, history: VertexChain, linked: Set[PeerId]) -> None:
        super().__init__(me, history, linked)
        self.branches, self.sides = ChainSplitDetector(history), BranchPolls(me, history, linked)

    def restore(self, kept: Mapping[str, bytes]) -> None:
        self.branches.restore(kept)

    def check_past_vertex(self, vertex: Vertex, who: PeerId, members: Sequence[PeerId] = ()) -> list[Effect]:
        return self.branches.check_past_vertex(vertex, who, members)

    def answer_other_branch(self, vertex: Vertex, who: PeerId) -> list[Effect] | None:
        return self.branches.answer_other_branch(vertex, who)

    def on_peer_connected(self, peer: PeerId, put_away: Set[PeerId]) -> list[Effect]:
        return self.branches.on_peer_connected(peer, put_away)

    def on_heartbeat(self, now: Seconds) -> list[Effect]:
        return self.sides.on_heartbeat(self.branches.known, now)

    def on_message(self, event: Received, now: Seconds) -> list[Effect]:
        return self.sides.on_message(event, now)

    def on_timer(self, event: TimerFired, now: Seconds) -> list[Effect]:
        return self.sides.on_timer(event, now)
