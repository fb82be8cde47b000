"""Sum check tasks: openings by the makers of a result and judgments by checkers, from agreed vertices.

Everything but the shown bytes follows from the vertex that closes the round and from its plan. So every checker
works from the same numbers, and none of them comes from the peer that shows the opening. Not responsible for: draws
(`verification/sum_check/policy.py`), messages (`verification/replay_audit/machine.py`), contents of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.peer.round.context import RoundContext
from atoll.peer.tasks import BuildSumOpening, JudgeSumOpening
from atoll.protocol.allreduce.buffers import ComputedResult, ComputedResults, weights_of
from atoll.protocol.allreduce.tasks import TaskRow
from atoll.verification.sum_check.policy import SumSpotCheck
from atoll.wire.messages.statements import SignedStatement
from atoll.wire.messages.vertex import VertexBody
from atoll.wire.weights import RowWeights


def lay_open(
    openings: Sequence[SumSpotCheck], body: VertexBody, made: ComputedResults
) -> list[tuple[int, BuildSumOpening]]:
    """(part, work) for each part of these openings, all of locally made results, in their order."""
    by_part: dict[int, list[SumSpotCheck]] = {}
    for opening in openings:
        by_part.setdefault(opening.answered.part, []).append(opening)
    held = {signed.signer: signed for signed in body.commits}
    return [
        (part, _work(made[part, drawn[0].answered.digest], drawn, held)) for part, drawn in sorted(by_part.items())
    ]


def made_here(opening: SumSpotCheck, made: ComputedResults) -> bool:
    """True if the local peer made the same result from the same rows: as its owner or another owner of its part."""
    answered = opening.answered
    mine = made.get((answered.part, answered.digest))
    return mine is not None and replace(mine.answered, owner_index=answered.owner_index) == answered


def makers(opening: SumSpotCheck, ground: RoundContext) -> tuple[PeerId, ...]:
    """Peers that can open the result, if they made the same: its owner, then others that combined the part."""
    first = ground.owners[opening.answered.part][: ground.witnesses + 1]
    return tuple(dict.fromkeys((opening.peer, *first)))


def _work(
    mine: ComputedResult, drawn: Sequence[SumSpotCheck], held: Mapping[PeerId, SignedStatement]
) -> BuildSumOpening:
    answered = mine.answered
    each = list(zip(answered.contributors, mine.rows, strict=True))
    others = [
        row.statement
        for peer, row in each
        if row.statement is not None and (peer not in held or row.statement.body != held[peer].body)
    ]
    return BuildSumOpening(
        answered.round,
        mine.payload,
        tuple(TaskRow(peer, row.weight, row.payload, (peer,)) for peer, row in each),
        tuple(row.path for _, row in each),
        tuple(others),
        tuple(opening.blocks for opening in drawn),
    )


def judge_opening(
    opening: SumSpotCheck, blob: Digest, body: VertexBody, ground: RoundContext
) -> JudgeSumOpening | None:
    """None if the vertex does not name the inputs of the result."""
    answered = opening.answered
    weights: RowWeights = ()
    if ground.weighs:
        if body.weighing is UNSET or not set(body.weighing.peers).issuperset(answered.contributors):
            return None
        weights = weights_of(body.weighing, answered.contributors)
    named = set(answered.contributors)
    return JudgeSumOpening(
        blob=blob,
        round=opening.round,
        trained=ground.parent.trained,
        shares=ground.shares,
        answered=answered,
        commits=tuple(signed for signed in body.commits if signed.signer in named),
        blocks=opening.blocks,
        statistic=ground.trust.statistic,
        liars=ground.liars,
        weights=weights,
    )
