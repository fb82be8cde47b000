"""Judgment of rows that cannot be decoded: show the malformed leaf of a row, or judge another member's exhibit.

Cheap beside a round: one row is hashed again, or one leaf of it is decoded. No number is taken from the member that
shows the row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest
from atoll.peer.tasks import BuildMalformedRowEvidence, JudgeMalformedRow, MalformedRowJudged
from atoll.training.recipe.schedule import turn_of
from atoll.training.spec import TrainingSpec
from atoll.verification.malformed_updates.machine import inspect_malformed_row
from atoll.verification.malformed_updates.tensors import UNJUDGED, ExpectedRow, due_in, judge, judged_by, show
from atoll.verification.sum_check.tensors import LeafLayout
from atoll.worker.context import Handlers, WorkerContext


def handlers(context: WorkerContext, up: LeafLayout | None = None) -> Handlers:
    """`up`: how rows of this run are cut into leaves; None if they are not."""

    async def look(work: BuildMalformedRowEvidence | JudgeMalformedRow) -> MalformedRowJudged:
        put = context.pins.put_blob
        return await context.run_tensor_job(inspect_row, work, context.spec_of(work.round), up, put)

    return {BuildMalformedRowEvidence: look, JudgeMalformedRow: look}


def inspect_row(
    work: BuildMalformedRowEvidence | JudgeMalformedRow,
    spec: TrainingSpec,
    up: LeafLayout | None,
    put: Callable[[bytes], Digest],
) -> MalformedRowJudged:
    """Show or judge a row. `put` stores the exhibit."""
    return inspect_malformed_row(work, partial(_expected, work, spec, up), judge, show, put)


def judge_row(work: JudgeMalformedRow, spec: TrainingSpec, up: LeafLayout | None) -> str:
    """Why the row cannot be read; empty if it can. PeerFault if the exhibit is none, or is of another row."""
    return judge(work.shown, partial(_expected, work, spec, up))


def _expected(
    work: BuildMalformedRowEvidence | JudgeMalformedRow, spec: TrainingSpec, up: LeafLayout | None, part: int
) -> ExpectedRow:
    """What a row of this part has to be. PeerFault if the codec does not allow a judgment."""
    recipe = spec.recipe_at(work.trained)
    codec = judged_by(recipe.coding.up)  # `up` cuts by the same codec: with leaves it is one for all rounds
    if codec is None:
        raise PeerFault("", UNJUDGED)
    begin, end = turn_of(recipe.schedule, spec.layout, work.trained)
    return due_in(work.round, end - begin, work.shares, part, codec, up)
