"""An island's side of openings: what it lays out of its answers, what it finds in others'.

Laying out hashes what names do not remember, off the loop and off the arithmetic thread; judging makes a few blocks
of one part. Never decides which blocks, and takes no number from the owner that the vertex says.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.errors import RunFailedError
from atoll.crypto.digest import Buffer
from atoll.peer.tasks import Judged, JudgeOpening, LaidOpen, LayOpen
from atoll.runtime.storage.state_cache import Shelf
from atoll.runtime.storage.store import Store
from atoll.runtime.training_spec import Learning
from atoll.training.exchange.statistic import Statistic
from atoll.training.exchange.update import part_bounds
from atoll.training.recipe.schedule import turn_of
from atoll.verification.sum_check.tensors import Claimed, judge
from atoll.verification.sum_check.wire_digests import Names
from atoll.wire.opening import opening_bytes


class Openings:
    def __init__(
        self, learning: Learning, learning_in: Callable[[int], Learning], store: Store, shelf: Shelf
    ) -> None:
        self.learning_in, self.store, self.shelf = learning_in, store, shelf
        coding = learning.recipe.coding
        self.names = Names(coding.up, coding.down)

    def lay(self, work: LayOpen) -> LaidOpen:
        return LaidOpen(tuple(self.shelf.put_other(opening_bytes(one)) for one in self.names.lay_out(work)))

    def judge(self, work: JudgeOpening) -> Judged:
        shown = self.store.read_blob(work.blob)
        if shown is None:
            raise RunFailedError("E-AUD-03", "what this opening needs is not on this disk any more")
        return judge_opening(work, shown, self.learning_in(work.round), self.names)


def judge_opening(work: JudgeOpening, shown: Buffer, learning: Learning, names: Names) -> Judged:
    """By a checker, or by whoever reads the history later: what is found false leads to what was signed, whoever
    shows it, if its authors signed `Judged.others`."""
    schedule, layout = learning.recipe.schedule, learning.layout
    begin, end = turn_of(schedule, layout, work.trained)
    lo, hi = part_bounds(end - begin, work.shares)[work.answered.part]
    statistic = Statistic(work.statistic, work.liars, work.weights)
    claimed = Claimed(work.answered, work.commits, hi - lo, work.blocks, statistic)
    (finding, why), others = judge(claimed, shown, names.up, names.down)
    return Judged(finding, why, others)
