"""Leave-one-out replay of a round from archived rows: with all, then without each contributor (specs/blame.md).

The arithmetic is the round's own (`worker/arithmetic.py`), on the tensor thread. The trainer measures the losses of
the results, batch by batch, while no round needs it. At most two additional states are in memory.
Not responsible for: which member is at fault.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Payload
from atoll.crypto.digest import digest
from atoll.features.attribution.leave_one_out import state_lacking
from atoll.peer.tasks import AdvanceState, LeaveOneOut, LeaveOneOutLoss, LeaveOneOutResult, PartRows
from atoll.protocol.allreduce.tasks import CombineRows, TaskRow
from atoll.training.codec.blocks import new_wire
from atoll.training.recipe.reply_formats import has_owner_feedback
from atoll.training.recipe.state import SharedState, state_bytes, state_hash
from atoll.training.spec import TrainingSpec
from atoll.wire.weights import weights_of_kept
from atoll.worker.arithmetic import advance_state, combine_rows
from atoll.worker.context import Handlers, WorkerContext
from atoll.worker.downlink_error_feedback import DownlinkErrorFeedback
from atoll.worker.evaluation import SAMPLES, measure_losses
from atoll.worker.trainer_commands import BeginValidation


def handlers(context: WorkerContext) -> Handlers:
    async def leave_one_out(work: LeaveOneOut) -> LeaveOneOutResult:
        return await LeaveOneOutWorker(context, context.spec_of(work.round)).replay(work)

    return {LeaveOneOut: leave_one_out}


@dataclass(frozen=True)
class LeaveOneOutWorker:
    context: WorkerContext
    spec: TrainingSpec  # of the replayed round

    async def replay(self, work: LeaveOneOut) -> LeaveOneOutResult:
        if has_owner_feedback(self.spec.recipe):
            raise RunFailedError(
                "E-BLM-04",
                "no round of this run can be replayed: its owners add to a result what earlier ones left out",
                fix="atoll blame without --round compares what members reported",
            )
        run = self.context.run_tensor_job
        before = await self.context.find_state(work.before, self.spec)
        if before is None:
            raise state_lacking(work.round)
        whole = await run(self._result_without, work, before, None)
        assert isinstance(whole, SharedState)
        name = await asyncio.to_thread(_name_of, whole, self.spec)
        loss_before, loss = await self._loss(before), await self._loss(whole)
        authors = sorted({peer for part in work.parts if part is not None for peer, _, _ in part.rows})
        without = [await self._loss_without(work, before, peer) for peer in authors]
        return LeaveOneOutResult(name == work.state, loss_before, loss, tuple(without))

    async def _loss_without(self, work: LeaveOneOut, before: SharedState, peer: PeerId) -> LeaveOneOutLoss:
        made = await self.context.run_tensor_job(self._result_without, work, before, peer)
        if isinstance(made, str):
            return LeaveOneOutLoss(peer, None, made)
        return LeaveOneOutLoss(peer, await self._loss(made))

    def _result_without(self, work: LeaveOneOut, before: SharedState, left_out: PeerId | None) -> SharedState | str:
        """The state of the round without this peer, or why there is none."""
        common = self.spec.round_inputs(work.round, before, work.before)
        results: list[Payload | None] = []
        for part, rows in enumerate(work.parts):
            task = None if rows is None else self._combine_task(work, part, rows, left_out)
            done = None if task is None else combine_rows(task, self.spec, common, DownlinkErrorFeedback(), digest)
            if done is not None and done.payload is None and left_out is not None:
                return done.why
            results.append(None if done is None else done.payload)
        step = AdvanceState(
            work.round,
            work.before,
            tuple(results),
            work.steps,
            work.samples,
            work.shards,
            work.shares,
            batch=work.batch,
        )
        return advance_state(step, self.spec, before, new_wire)[0]

    def _combine_task(
        self, work: LeaveOneOut, part: int, of: PartRows, left_out: PeerId | None
    ) -> CombineRows | None:
        """None if the part has no other contributor: then it counts for no member."""
        kept = [index for index, (peer, _, _) in enumerate(of.rows) if peer != left_out]
        rows = tuple(
            TaskRow(peer, weight, self._row(blob), (peer,)) for peer, weight, blob in map(of.rows.__getitem__, kept)
        )
        weights = weights_of_kept(of.weights, len(of.rows), kept) if of.weights else ()
        if not rows or (of.weights and not any(weights)):
            return None
        return CombineRows(work.round, part, work.shares, rows, False, work.statistic, work.liars, weights)

    def _row(self, blob: Digest) -> Payload:
        data = self.context.blobs.read_blob(blob)
        if data is None:
            raise RunFailedError(
                "E-BLM-06",
                "an archived row was lost on this disk since it was counted",
                cause="the disk damaged it, or keep.bytes_max was reached",
                fix="run the same command again: the row is fetched anew",
            )
        return Payload(digest(data), len(data), data)

    async def _loss(self, state: SharedState) -> float:
        return (await measure_losses(self.context, BeginValidation(SAMPLES), state.anchor_F)).losses[0]


def _name_of(state: SharedState, spec: TrainingSpec) -> Digest:
    return state_hash(state_bytes(state, spec.layout))
