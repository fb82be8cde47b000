"""Results computed as a part owner in a round, kept beyond their attempt while they may be needed.

A body may hold a result of an earlier attempt, and a voter that disputes it requests the rows behind it. So results
stay while a body may hold them. Those in the vertex also outlive the round: rows for audits and attribution, and
the signatures of other peers.

Invariants:
- No row stays that no peer can request: rows take the memory of several updates.
"""

from __future__ import annotations

from collections.abc import Container

from atoll.base.ids import Digest
from atoll.base.machine import Payload
from atoll.peer.round.candidate import opened
from atoll.protocol.allreduce.buffers import ComputedResults
from atoll.protocol.allreduce.engine import AllReduce
from atoll.wire.messages.statements import SignedStatement
from atoll.wire.messages.vertex import VertexBody


class OwnedResults:
    def __init__(self) -> None:
        self.made: ComputedResults = {}  # results with their rows, while a body may hold them
        self.seconded: dict[
            int, tuple[SignedStatement, ...]
        ] = {}  # part → signatures of peers other than its owner under its result
        self.made_again: frozenset[int] = frozenset()  # parts with a disputed result that was recomputed here
        self.mine: tuple[Payload, ...] | None = None  # parts of the local update, once the round is closed

    def attempt_over(self, reduce: AllReduce | None, needed: Container[Digest]) -> None:
        """End an attempt; `needed`: digests in bodies that may still become final, perhaps the last attempt's."""
        self._keep_only(needed)
        self.made |= reduce.computed_results if reduce is not None else {}

    def close(self, body: VertexBody, reduce: AllReduce | None, mine: tuple[Payload, ...] | None) -> None:
        """Close the round with this body.

        `reduce` is from its last attempt, `mine` the parts of the local update, if they are kept.
        """
        self.made |= reduce.computed_results if reduce is not None else {}
        answers = [opened(signed) for signed in body.parts if signed is not None]
        if reduce is not None and reduce.plan.attempt == body.attempt:
            self.seconded = {answered.part: reduce.matching_statements(answered) for answered in answers}
            self.made_again = frozenset(a.part for a in answers if reduce.is_recomputed(a))
        self._keep_only({answered.digest for answered in answers})
        self.mine = mine

    def _keep_only(self, names: Container[Digest]) -> None:
        self.made = {key: made for key, made in self.made.items() if key[1] in names}
