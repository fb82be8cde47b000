"""Results of reserves that arrive before their turn, kept until it comes.

Peers notice deaths at different times. If members may lie, a reserve may answer only when all owners are gone:
otherwise any reserve could answer, and not only the six owners that were drawn for the part.

Invariants:
- At most one result per part and owner index is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from atoll.base.ids import PeerId
from atoll.protocol.allreduce.buffers import ReceivedResult, RemotePartResult
from atoll.protocol.allreduce.routing import AttemptRouting
from atoll.wire.messages.statements import OwnerResult


class DeferredReserveResults:
    """One peer's side of one attempt."""

    def __init__(
        self, route: AttemptRouting, gone: Callable[[PeerId], bool], answers: Mapping[int, ReceivedResult]
    ) -> None:
        self.route, self.gone, self.answers = route, gone, answers
        self._kept: dict[int, dict[int, RemotePartResult]] = {}  # part -> owner index of a reserve -> its result

    def is_in_turn(self, answered: OwnerResult) -> bool:
        """Whether the signer may answer now, in the view of the local peer.

        If members may lie, a reserve replaces neither a live owner nor an owner that has answered.
        """
        plan, part, index = self.route.plan, answered.part, answered.owner_index
        if not plan.may_lie or not plan.stands_in(part, index):
            return True
        held = self.answers.get(part)
        if held and not plan.stands_in(part, held.result.owner_index) and not self.gone(held.statement.signer):
            return False
        return answered.attempt == plan.attempt and self.route.turn[part] >= index

    def keep(self, heard: RemotePartResult) -> None:
        """Keep the statement without its bytes, which may be large; they are requested from the holder later.

        The reserve itself is the preferred holder: others may not have the bytes.
        """
        kept, index = self._kept.setdefault(heard.answered.part, {}), heard.answered.owner_index
        if index not in kept or heard.holder == heard.statement.signer:
            kept[index] = heard._replace(payload=None)

    def pop_due(self, part: int) -> list[RemotePartResult]:
        """Results of this part that are in turn now."""
        kept = self._kept.get(part, {})
        return [kept.pop(index) for index in sorted(kept) if self.is_in_turn(kept[index].answered)]
