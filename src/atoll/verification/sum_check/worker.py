"""An island's side of openings: what it lays out of its answers, what it finds in others'.

Laying out hashes what names do not remember, off the loop and off the arithmetic thread; judging makes a few blocks
of one part. Never decides which blocks, and takes no number from the owner that the vertex says.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.errors import RunFailedError
from atoll.crypto.digest import Buffer
from atoll.peer.tasks import BuildOpening, JudgeOpening, JudgmentResult, OpeningBuilt
from atoll.runtime.storage.state_cache import StateCache
from atoll.runtime.storage.store import PeerStore
from atoll.runtime.training_spec import TrainingSpec
from atoll.training.exchange.statistic import RowStatistic
from atoll.training.recipe.schedule import turn_of
from atoll.training.recipe.update import part_bounds
from atoll.verification.sum_check.tensors import ExpectedPart, judge
from atoll.verification.sum_check.wire_digests import WireDigestCache
from atoll.wire.opening import opening_bytes


class SumCheckWorker:
    def __init__(
        self,
        learning: TrainingSpec,
        learning_in: Callable[[int], TrainingSpec],
        store: PeerStore,
        shelf: StateCache,
    ) -> None:
        self.learning_in, self.store, self.shelf = learning_in, store, shelf
        coding = learning.recipe.coding
        self.names = WireDigestCache(coding.up, coding.down)

    def lay(self, work: BuildOpening) -> OpeningBuilt:
        return OpeningBuilt(tuple(self.shelf.put_other(opening_bytes(one)) for one in self.names.lay_out(work)))

    def judge(self, work: JudgeOpening) -> JudgmentResult:
        shown = self.store.read_blob(work.blob)
        if shown is None:
            raise RunFailedError("E-AUD-03", "what this opening needs is not on this disk any more")
        return judge_opening(work, shown, self.learning_in(work.round), self.names)


def judge_opening(
    work: JudgeOpening, shown: Buffer, learning: TrainingSpec, names: WireDigestCache
) -> JudgmentResult:
    """By a checker, or by whoever reads the history later: what is found false leads to what was signed, whoever
    shows it, if its authors signed `Judged.others`."""
    schedule, layout = learning.recipe.schedule, learning.layout
    begin, end = turn_of(schedule, layout, work.trained)
    lo, hi = part_bounds(end - begin, work.shares)[work.answered.part]
    statistic = RowStatistic(work.statistic, work.liars, work.weights)
    claimed = ExpectedPart(work.answered, work.commits, hi - lo, work.blocks, statistic)
    (finding, why), others = judge(claimed, shown, names.up, names.down)
    return JudgmentResult(finding, why, others)
