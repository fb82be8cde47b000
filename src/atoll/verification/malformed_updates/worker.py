"""An island's side of rows that cannot be read: what it shows of one, and what it makes of what others show.

Cheap beside a round: a row is hashed again, or one leaf of it is decoded. Takes no number from whoever shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest
from atoll.peer.tasks import ExhibitRow, JudgeRow, RowJudged
from atoll.runtime.training_spec import TrainingSpec
from atoll.training.recipe.schedule import turn_of
from atoll.verification.malformed_updates.machine import row_looked
from atoll.verification.malformed_updates.tensors import UNJUDGED, ExpectedRow, due_in, judge, judged_by, show
from atoll.verification.sum_check.tensors import LeafLayout


def looked_at_row(
    work: ExhibitRow | JudgeRow, learning: TrainingSpec, up: LeafLayout | None, put: Callable[[bytes], Digest]
) -> RowJudged:
    """`up`: rows of this run are cut into leaves. `put` keeps what shows it."""
    return row_looked(work, partial(_due, work, learning, up), judge, show, put)


def judged(work: JudgeRow, learning: TrainingSpec, up: LeafLayout | None) -> str:
    """Why the row cannot be read; nothing if it can. PeerFault if what is shown is none, or of something else."""
    return judge(work.shown, partial(_due, work, learning, up))


def _due(work: ExhibitRow | JudgeRow, learning: TrainingSpec, up: LeafLayout | None, part: int) -> ExpectedRow:
    """What a row of this part has to be. PeerFault where nobody can be held to it."""
    recipe = learning.recipe_at(work.trained)
    codec = judged_by(recipe.coding.up)  # `up` cuts by the same: where wires have leaves it is one for all rounds
    if codec is None:
        raise PeerFault("", UNJUDGED)
    begin, end = turn_of(recipe.schedule, learning.layout, work.trained)
    return due_in(work.round, end - begin, work.shares, part, codec, up)
