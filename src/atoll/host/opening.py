"""An island's side of openings: what wires are called, what it lays out of its answers, what it finds in others'.

Laying out hashes as many bytes as an update has, off the loop and off the arithmetic thread; judging makes a few
blocks of one part. Never decides which blocks, and takes no number from the owner that the vertex says.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest
from atoll.host.learning import Learning
from atoll.host.shelf import Shelf
from atoll.host.store import Store
from atoll.keys.digest import Buffer, digest
from atoll.learn.codec import codec_named
from atoll.learn.opening import Claimed, Cut, Shown, judge, lay_out
from atoll.learn.schedule import turn_of
from atoll.learn.statistic import Statistic
from atoll.learn.update import part_bounds
from atoll.node.jobs import Judged, JudgeOpening, LaidOpen, LayOpen
from atoll.wire.messages.round import Answer, Contribution, PartBytes, RowBytes
from atoll.wire.opening import opening_bytes


class Openings:
    def __init__(
        self, learning: Learning, learning_in: Callable[[int], Learning], store: Store, shelf: Shelf
    ) -> None:
        self.learning_in, self.store, self.shelf = learning_in, store, shelf
        self.up = Cut(codec_named(learning.recipe.coding.up))
        self.down = Cut(codec_named(learning.recipe.coding.down))

    def name_of(self, message: object, payload: Buffer) -> Digest:
        """What arriving bytes are called."""
        match message:
            case Contribution() | RowBytes():
                return self.up.name(payload)
            case Answer():
                return self.down.name(payload)
            case PartBytes(digest=wanted):  # a body is named by its bytes
                plain = digest(payload)
                return plain if plain == wanted else self.down.name(payload)
            case _:
                return digest(payload)

    def lay(self, work: LayOpen) -> LaidOpen:
        rows = [Shown(row.payload.data, path) for row, path in zip(work.rows, work.paths, strict=True)]
        laid = lay_out(rows, work.answer.data, work.others, work.draws, self.up, self.down)
        return LaidOpen(tuple(self.shelf.put_other(opening_bytes(one)) for one in laid))

    def judge(self, work: JudgeOpening) -> Judged:
        shown = self.store.read_blob(work.blob)
        if shown is None:
            raise RunFailedError("E-AUD-03", "what this opening needs is not on this disk any more")
        learning = self.learning_in(work.round)
        schedule, layout = learning.recipe.schedule, learning.layout
        begin, end = turn_of(schedule, layout, work.trained)
        lo, hi = part_bounds(end - begin, work.shares)[work.answered.part]
        statistic = Statistic() if work.weights else Statistic(work.statistic, work.liars)
        claimed = Claimed(work.answered, work.commits, hi - lo, work.blocks, statistic, work.weights)
        (finding, why), others = judge(claimed, shown, self.up, self.down)
        return Judged(finding, why, others)
