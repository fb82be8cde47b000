"""What I answered as an owner in a round, and what of that outlives its attempts and itself.

A body may hold an answer of an attempt that is over, and whoever doubts it later asks for the rows that it was made
of. So answers stay while a body may hold them, and those of the vertex when the round is over: with their rows for
audits and for blame, with what others signed of them.
Never keeps a row that nobody can ask for: rows are several updates' worth of memory.
"""

from __future__ import annotations

from collections.abc import Container

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Payload
from atoll.features.attribution.row_archive import worth_keeping
from atoll.peer.round.candidate import opened
from atoll.peer.tasks import ArchivedRow
from atoll.protocol.allreduce.buffers import ComputedResult
from atoll.protocol.allreduce.engine import AllReduce
from atoll.wire.messages.statements import SignedStatement
from atoll.wire.messages.vertex import VertexBody


class OwnedResults:
    def __init__(self, me: PeerId, keeps_rows: bool) -> None:
        """`keeps_rows`: those that counted are wanted when the round is over."""
        self.me, self.keeps_rows = me, keeps_rows
        self.made: dict[Digest, ComputedResult] = {}  # with their rows, while a body may hold them
        self.seconded: dict[
            int, tuple[SignedStatement, ...]
        ] = {}  # parts: what others than its owner signed of its answer
        self.made_again: frozenset[int] = frozenset()  # parts whose answers I doubted, and made again
        self.rows: tuple[
            ArchivedRow, ...
        ] = ()  # then: of those that counted the ones that I hold, once it is closed

    def attempt_over(self, reduce: AllReduce | None, needed: Container[Digest]) -> None:
        """`needed`: by bodies that may still become final. The last one's is perhaps on its way."""
        self._keep_only(needed)
        self.made |= reduce.made if reduce is not None else {}

    def close(self, body: VertexBody, reduce: AllReduce | None, mine: tuple[Payload, ...] | None) -> None:
        """The round is over with this body; `reduce` is its last attempt's, `mine` the parts of my own update."""
        self.made |= reduce.made if reduce is not None else {}
        answers = [opened(signed) for signed in body.parts if signed is not None]
        if reduce is not None and reduce.plan.attempt == body.attempt:
            self.seconded = {answered.part: reduce.seconded(answered) for answered in answers}
            self.made_again = frozenset(a.part for a in answers if reduce.made_again(a))
        self._keep_only({answered.digest for answered in answers})
        if self.keeps_rows:
            self.rows = worth_keeping(body, self.made.values(), self.me, mine)

    def _keep_only(self, names: Container[Digest]) -> None:
        self.made = {name: made for name, made in self.made.items() if name in names}
