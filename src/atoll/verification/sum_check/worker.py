"""Sum checks by a worker: openings of own results, and judgments of other owners' openings.

Building an opening hashes only what the digest cache does not hold; it runs off the event loop and off the tensor
thread. A judgment recomputes a few blocks of one part.
Invariants:
- No number that a vertex has is taken from the owner.
Not responsible for: which blocks are opened.
"""

from __future__ import annotations

import asyncio

from atoll.base.errors import RunFailedError
from atoll.crypto.digest import Buffer
from atoll.peer.tasks import BuildSumOpening, JudgeSumOpening, JudgmentResult, SumOpeningBuilt
from atoll.training.exchange.statistic import RowCombinationRule
from atoll.training.recipe.schedule import turn_of
from atoll.training.recipe.update import part_bounds
from atoll.training.spec import TrainingSpec
from atoll.verification.sum_check.tensors import PartResultClaim, judge
from atoll.verification.sum_check.wire_digests import WireDigestCache
from atoll.wire.opening import opening_bytes
from atoll.worker.context import Handlers, WorkerContext


class SumCheckWorker:
    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        coding = context.genesis_spec().recipe.coding
        self.names = WireDigestCache(coding.up, coding.down)

    def handlers(self) -> Handlers:
        return {BuildSumOpening: self._build, JudgeSumOpening: self._judge}

    async def _build(self, work: BuildSumOpening) -> SumOpeningBuilt:
        return await asyncio.to_thread(self._build_openings, work)

    def _build_openings(self, work: BuildSumOpening) -> SumOpeningBuilt:
        put = self._context.pins.put_blob
        return SumOpeningBuilt(tuple(put(opening_bytes(one)) for one in self.names.lay_out(work)))

    async def _judge(self, work: JudgeSumOpening) -> JudgmentResult:
        return await self._context.run_tensor_job(self._judge_stored, work)

    def _judge_stored(self, work: JudgeSumOpening) -> JudgmentResult:
        shown = self._context.blobs.read_blob(work.blob)
        if shown is None:
            raise RunFailedError("E-AUD-03", "the opening to judge is no longer on this disk")
        return judge_opening(work, shown, self._context.spec_of(work.round), self.names)


def judge_opening(
    work: JudgeSumOpening, shown: Buffer, spec: TrainingSpec, names: WireDigestCache
) -> JudgmentResult:
    """The judgment of a checker, or of a later reader of the history.

    A refuted opening is bound to what was signed if the authors of `JudgmentResult.others` signed them, no matter
    which peer shows it.
    """
    schedule, layout = spec.recipe.schedule, spec.layout
    begin, end = turn_of(schedule, layout, work.trained)
    lo, hi = part_bounds(end - begin, work.shares)[work.answered.part]
    statistic = RowCombinationRule(work.statistic, work.liars, work.weights)
    claimed = PartResultClaim(work.answered, work.commits, hi - lo, work.blocks, statistic)
    (finding, why), others = judge(claimed, shown, names.up, names.down)
    return JudgmentResult(finding, why, others)
