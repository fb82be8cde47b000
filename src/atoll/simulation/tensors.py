"""Simulated worker with real numbers: a small vector that learns through the real codecs and rules.

The loss of every peer is the squared distance to one point, with noise of its own. A poisoner commits to its row
and signs it like an honest update: only a rule that compares values can detect it. Nothing is faster or slower here
than with the symbolic worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from math import inf, nan

import msgspec
import torch
from torch import Tensor

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Payload
from atoll.crypto.digest import digest
from atoll.peer.tasks import (
    AdvanceState,
    BuildMalformedRowEvidence,
    BuildSumOpening,
    EncodeUpdate,
    JudgeMalformedRow,
    JudgeSumOpening,
    JudgmentResult,
    MalformedRowJudged,
    RestoreEarlierState,
    StateAdvanced,
    SumOpeningBuilt,
    UpdateEncoded,
)
from atoll.protocol.allreduce.tasks import (
    CombineRows,
    ComputedWeights,
    ComputeRowProducts,
    ProductsComputed,
    RowsCombined,
    WeighRows,
)
from atoll.simulation.worker import GENESIS_STATE, VirtualWorker, WorkerKnobs
from atoll.training.codec import CODECS
from atoll.training.exchange.combine import combine
from atoll.training.exchange.distance_weights import compare_rows
from atoll.training.exchange.statistic import RowCombinationRule
from atoll.training.recipe.update import part_bounds
from atoll.verification.malformed_updates.machine import inspect_malformed_row
from atoll.verification.malformed_updates.tensors import ExpectedRow, due_in, show
from atoll.verification.malformed_updates.tensors import judge as judge_row
from atoll.verification.sum_check.tensors import LeafLayout, OpenedRow, PartResultClaim, judge, lay_out
from atoll.wire.opening import opening_bytes
from atoll.worker.arithmetic import compute_weights

VALUES = 16 * 256  # one block for each of up to 16 parts
STEP = 0.5  # share of the distance to the point per round
NOISE = 0.1  # noise of one peer's update, per value
FP32 = CODECS["fp32"]

Poison = Callable[[Tensor], Tensor]  # honest update → update that is sent
Sends = Callable[[int, Tensor, Tensor], Tensor]  # (round, anchor, learned update) → update that is sent

POISONS: dict[str, Poison] = {
    "sign flip": lambda delta_V: -delta_V,
    "scaling": lambda delta_V: delta_V * -10.0,
    "not a number": lambda delta_V: torch.full_like(delta_V, nan),
    "infinity": lambda delta_V: torch.full_like(delta_V, inf),
    "1e30": lambda delta_V: torch.full_like(delta_V, 1e30),
    # within the spread of the others, every value in one direction
    "a little is enough": lambda delta_V: delta_V - 1.5 * NOISE,
    "huge": lambda delta_V: torch.full_like(delta_V, 1e17),  # largest values that a codec accepts
}


class VirtualUpdate(msgspec.Struct, frozen=True, array_like=True):
    round: int
    values: bytes


_LEARNED = msgspec.msgpack.Decoder(VirtualUpdate)


class TensorWorker(VirtualWorker):
    """Worker with the anchor itself as state.

    `poison` twists the peer's updates in these rounds (None: in all), `sends` replaces them, `says` twists the loss
    that it reports as a validator. With `cut` results can be opened.
    """

    def __init__(
        self,
        me: PeerId,
        knobs: WorkerKnobs,
        draw: random.Random,
        poison: Poison | None = None,
        rounds: Container[int] | None = None,
        *,
        says: Callable[[float], float] | None = None,
        cut: LeafLayout | None = None,
        values: int = VALUES,
        sends: Sends | None = None,
    ) -> None:
        super().__init__(me, knobs, draw)
        self.poison, self.rounds, self.says = poison, rounds, says
        self.cut, self.values, self.sends = cut, values, sends
        self.point_V = torch.ones(values, dtype=torch.float32)
        self.generator = torch.Generator().manual_seed(draw.getrandbits(62))
        self.handlers |= {
            EncodeUpdate: self._encode,
            CombineRows: self._combined,
            ComputeRowProducts: self._compared,
            WeighRows: self._weigh,
            AdvanceState: self._advanced,
            RestoreEarlierState: self._rolled_back,
            BuildMalformedRowEvidence: self._look_at_row,
            JudgeMalformedRow: self._look_at_row,
        }
        if cut is not None:
            self.handlers |= {
                BuildSumOpening: lambda work: self._lay_open(work, cut),
                JudgeSumOpening: lambda work: self._judge_opening(work, cut),
            }

    def distance(self, state: Digest | None = None) -> float:
        """Distance of the head (or this state) from the point to learn, per value."""
        return float((self.anchor(state or self.head) - self.point_V).abs().mean())

    def losses(self, state: bytes) -> tuple[float, ...]:
        """Squared distance to the point, per value."""
        loss = float((self._values(state) - self.point_V).square().mean())
        return (loss if self.says is None else self.says(loss),)

    def _weigh(self, work: WeighRows) -> ComputedWeights:
        return compute_weights(work)

    def _rolled_back(self, work: RestoreEarlierState) -> StateAdvanced:
        return self._put_values(work.round, self.anchor(work.back_to))

    def _encode(self, work: EncodeUpdate) -> UpdateEncoded:
        anchor_V = self.anchor(self.head)
        delta_V = self._learnt(anchor_V, self.generator)
        if self.poison is not None and (self.rounds is None or work.round in self.rounds):
            delta_V = self.poison(delta_V)
        if self.sends is not None:
            delta_V = self.sends(work.round, anchor_V, delta_V)
        bounds = part_bounds(self.values, work.shares)
        return UpdateEncoded(tuple(self._payload(delta_V[lo:hi].numpy().tobytes()) for lo, hi in bounds))

    def _learnt(self, anchor_V: Tensor, generator: torch.Generator) -> Tensor:
        noise_V = torch.randn(self.values, dtype=torch.float32, generator=generator) * NOISE
        return (anchor_V - self.point_V) * STEP + noise_V

    def ahead(self, anchor_V: Tensor) -> Tensor:
        """(V,) next update from this anchor."""
        return self._learnt(anchor_V, self.generator.clone_state())

    def _combined(self, work: CombineRows) -> RowsCombined:
        lo, hi = part_bounds(self.values, work.shares)[work.part]
        rows = [(row.weight, row.payload.data) for row in work.rows]
        done = combine(rows, hi - lo, FP32, FP32, RowCombinationRule(work.statistic, work.liars, work.weights))
        counted = tuple(work.rows[i].peer for i in done.counted)
        faulty = tuple(work.rows[i].peer for i, _ in done.faults)
        return RowsCombined(
            None if done.wire is None else self._payload(bytes(done.wire)), counted, faulty, done.why
        )

    def _compared(self, work: ComputeRowProducts) -> ProductsComputed:
        lo, hi = part_bounds(self.values, work.shares)[work.part]
        done = compare_rows([(row.weight, row.payload.data) for row in work.rows], hi - lo, FP32)
        counted = tuple(work.rows[i].peer for i in done.counted)
        return ProductsComputed(done.products, counted, tuple(work.rows[i].peer for i, _ in done.faults))

    def _advanced(self, work: AdvanceState) -> StateAdvanced:
        anchor_V = self.anchor(work.before).clone()
        bounds = part_bounds(self.values, work.shares)
        for (lo, hi), payload in zip(bounds, work.parts, strict=True):
            if payload is not None:
                anchor_V[lo:hi] -= FP32.decode(payload.data, hi - lo)
        return self._put_values(work.round, anchor_V)

    def _put_values(self, round: int, anchor_V: Tensor) -> StateAdvanced:
        return self.stage_state(msgspec.msgpack.encode(VirtualUpdate(round, anchor_V.numpy().tobytes())))

    def anchor(self, state: Digest | None) -> Tensor:
        return self._values(self.read_state(state) if state is not None else GENESIS_STATE)

    def _values(self, state: bytes) -> Tensor:
        if state == GENESIS_STATE:
            return torch.zeros(self.values, dtype=torch.float32)
        values = _LEARNED.decode(state).values
        return torch.frombuffer(bytearray(values), dtype=torch.float32)

    def _lay_open(self, work: BuildSumOpening, cut: LeafLayout) -> SumOpeningBuilt:
        each = zip(work.rows, work.paths, strict=True)
        rows = [OpenedRow(row.payload.data, path) for row, path in each]
        laid = lay_out(rows, OpenedRow(work.answer.data, ()), work.others, work.draws, cut, cut)
        return SumOpeningBuilt(tuple(self._put(opening_bytes(opening)) for opening in laid))

    def _judge_opening(self, work: JudgeSumOpening, cut: LeafLayout) -> JudgmentResult:
        lo, hi = part_bounds(self.values, work.shares)[work.answered.part]
        statistic = RowCombinationRule(work.statistic, work.liars, work.weights)
        claimed = PartResultClaim(work.answered, work.commits, hi - lo, work.blocks, statistic)
        (finding, why), others = judge(claimed, self.blobs[work.blob], cut, cut)
        return JudgmentResult(finding, why, others)

    def _look_at_row(self, work: BuildMalformedRowEvidence | JudgeMalformedRow) -> MalformedRowJudged:
        def due(part: int) -> ExpectedRow:
            return due_in(work.round, self.values, work.shares, part, FP32, self.cut)

        return inspect_malformed_row(work, due, judge_row, show, self._put)

    def _payload(self, wire: bytes) -> Payload:
        return Payload(digest(wire) if self.cut is None else self.cut.name(wire), len(wire), wire)
