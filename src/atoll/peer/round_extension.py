"""Round extension: what a capability does inside one round, beside the round's own update.

Invariants:
- The hooks do nothing by default.
Not responsible for: the round's update, messages, votes.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, TaskDone, TaskFailed
from atoll.peer.round.context import RoundContext


class RoundHooks:
    """`gone`: unreachable peers. `is_idle`: the update is made, the trainer has no task, and no vertex is known.

    An extension holds no reference to its round: a cycle would keep the rows of closed rounds in memory.
    """

    def __init__(self, ground: RoundContext, me: PeerId, gone: Callable[[PeerId], bool]) -> None:
        self.ground, self.me, self.gone = ground, me, gone

    def on_attempt_failed(self, is_idle: bool) -> list[Effect]:
        """The time of an attempt is over."""
        return []

    def on_task_done(self, event: TaskDone | TaskFailed, is_idle: bool) -> list[Effect] | None:
        """A task has ended; None: it is not one of this extension."""
        return None
