"""A round made again out of its kept rows: with all of them, and without each contributor in turn (specs/blame.md).

The arithmetic is the round's own (`arithmetic.py`), on its thread; the trainer looks at what comes out, batch by
batch, whenever no round wants it. Holds two states more at most. Never says whose fault anything is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Payload
from atoll.crypto.digest import digest
from atoll.features.attribution.command import state_lacking
from atoll.peer.tasks import AdvanceState, LeaveOneOut, LeaveOneOutResult, LossWithout, PartRows
from atoll.protocol.allreduce.tasks import CombineRows, TaskRow
from atoll.runtime.storage.state_cache import StateCache
from atoll.runtime.storage.store import PeerStore
from atoll.runtime.trainer.protocol import BeginValidation
from atoll.runtime.training_spec import TrainingSpec
from atoll.runtime.worker.arithmetic import advanced, answer
from atoll.runtime.worker.downlink_error_feedback import DownlinkErrorFeedback
from atoll.runtime.worker.trainer_supervisor import TrainerSupervisor
from atoll.training.codec.blocks import new_wire
from atoll.training.recipe.reply_formats import remembers
from atoll.training.recipe.state import SharedState, state_bytes, state_hash
from atoll.verification.state_validation.worker import SAMPLES, looked
from atoll.wire.weights import weights_left

T = TypeVar("T")


@dataclass
class LeaveOneOutWorker:
    learning: TrainingSpec
    store: PeerStore
    shelf: StateCache
    tended: TrainerSupervisor
    arithmetic: Executor
    ready: Callable[[], Awaitable[None]]  # the trainer runs; to be called in its turn

    async def left_out(self, work: LeaveOneOut) -> LeaveOneOutResult:
        if remembers(self.learning.recipe):
            raise RunFailedError(
                "E-BLM-04",
                "no round of this run can be made again: its owners add to an answer what earlier ones left out",
                fix="atoll blame without --round compares what members reported",
            )
        before = await self._on_thread(self.shelf.find, work.before, self.learning.layout)
        if before is None:
            raise state_lacking(work.round)
        whole = await self._on_thread(self._made, work, before, None)
        assert isinstance(whole, SharedState)
        name = await asyncio.to_thread(_name_of, whole, self.learning)
        loss_before, loss = await self._loss(before), await self._loss(whole)
        authors = sorted({peer for part in work.parts if part is not None for peer, _, _ in part.rows})
        without = [await self._left_out(work, before, peer) for peer in authors]
        return LeaveOneOutResult(name == work.state, loss_before, loss, tuple(without))

    async def _left_out(self, work: LeaveOneOut, before: SharedState, peer: PeerId) -> LossWithout:
        made = await self._on_thread(self._made, work, before, peer)
        if isinstance(made, str):
            return LossWithout(peer, None, made)
        return LossWithout(peer, await self._loss(made))

    def _made(self, work: LeaveOneOut, before: SharedState, left_out: PeerId | None) -> SharedState | str:
        """The state without this peer; why there is none, if that is so."""
        common = self.learning.common(work.round, before, work.before)
        answers: list[Payload | None] = []
        for part, rows in enumerate(work.parts):
            combine = None if rows is None else self._combine(work, part, rows, left_out)
            done = (
                None if combine is None else answer(combine, self.learning, common, DownlinkErrorFeedback(), digest)
            )
            if done is not None and done.payload is None and left_out is not None:
                return done.why
            answers.append(None if done is None else done.payload)
        step = AdvanceState(
            work.round,
            work.before,
            tuple(answers),
            work.steps,
            work.samples,
            work.shards,
            work.shares,
            batch=work.batch,
        )
        return advanced(step, self.learning, before, new_wire)[0]

    def _combine(self, work: LeaveOneOut, part: int, of: PartRows, left_out: PeerId | None) -> CombineRows | None:
        """None if the part has nobody else: then it counts for nobody."""
        kept = [index for index, (peer, _, _) in enumerate(of.rows) if peer != left_out]
        rows = tuple(
            TaskRow(peer, weight, self._row(blob), (peer,)) for peer, weight, blob in map(of.rows.__getitem__, kept)
        )
        weights = weights_left(of.weights, len(of.rows), kept) if of.weights else ()
        if not rows or (of.weights and not any(weights)):
            return None
        return CombineRows(work.round, part, work.shares, rows, False, work.statistic, work.liars, weights)

    def _row(self, blob: Digest) -> Payload:
        data = self.store.read_blob(blob)
        if data is None:
            raise RunFailedError(
                "E-BLM-06",
                "a kept row was lost on this disk since it was counted",
                cause="the disk damaged it, or keep.bytes_max was reached",
                fix="the same command again: it is fetched anew",
            )
        return Payload(digest(data), len(data), data)

    async def _on_thread(self, of: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.arithmetic, of, *args)

    async def _loss(self, state: SharedState) -> float:
        return (await looked(self.tended, self.ready, BeginValidation(SAMPLES), state.anchor_F)).losses[0]


def _name_of(state: SharedState, learning: TrainingSpec) -> Digest:
    return state_hash(state_bytes(state, learning.layout))
