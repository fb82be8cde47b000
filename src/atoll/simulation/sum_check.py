"""Simulated owners that lie about their sums, and checkers that lie about owners, where blocks are opened.

one_block    result with one wrong value, in one block
all_blocks   result with wrong values in every block
forger       leaves one contributor out of the sum, and lists it anyway
smuggler     sums a contributor that it does not list
hider        wrong values in every block, and never serves its openings
juggler      wrong values in every block, and shows rows that lead to them
joker        right result, and points to a blob that is not an opening
accuser      right result, and reports every result that it checks as wrong
accomplice   wrong values where only liars of its kind own the part, agreed among them; else right. Reports every
             result that it checks as right
buried       the same, and never serves its openings
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.peer.tasks import BuildSumOpening, JudgeSumOpening, JudgmentResult, SumOpeningBuilt
from atoll.protocol.allreduce.tasks import CombineRows, RowsCombined
from atoll.simulation.adversaries.byzantine import Twist
from atoll.simulation.replay_audits import as_it_is, joke, refuse
from atoll.simulation.tensors import TensorWorker
from atoll.simulation.worker import WorkerKnobs
from atoll.training.codec import CODECS
from atoll.verification.sum_check.tensors import LeafLayout
from atoll.wire.weights import weights_of_kept

LEAF_VALUES = 64  # small, as the virtual model is
VALUES = 7 * 4096
CUT = LeafLayout(CODECS["fp32"], LEAF_VALUES)
BY = 2.0**-10  # error that a lie adds to a value: the smallest parts of an update are larger

PROVEN = ("one_block", "all_blocks", "forger", "smuggler")  # kinds that their own openings prove guilty
UNSHOWN = ("hider", "juggler", "joker")
CHEATS = (*PROVEN, "hider", "juggler")  # kinds that sum wrongly
# kinds that lie only if no honest peer owns the part, where owners watch each other
TOGETHER = ("accomplice", "buried")
TWISTS: dict[str, Twist] = {"hider": refuse, "joker": joke, "buried": refuse}


class LyingOwnerWorker(TensorWorker):
    """Worker that sums as its kind does; honest without a kind."""

    def __init__(self, me: PeerId, knobs: WorkerKnobs, draw: random.Random, kind: str = "") -> None:
        super().__init__(me, knobs, draw, cut=CUT, values=VALUES)
        self.kind = kind
        self.captures: Callable[[int], bool] = lambda part: False  # whether liars alone own this part
        self.false: set[Digest] = set()  # digests of wrong results that it signed
        if kind in CHEATS:
            self.handlers[CombineRows] = self._miscombined
        if kind in TOGETHER:
            self.handlers[CombineRows] = self._combined_together
            self.handlers[JudgeSumOpening] = lambda work: JudgmentResult("accepted", "I say so")
        if kind == "juggler":
            self.handlers[BuildSumOpening] = self._juggled
        if kind == "accuser":
            self.handlers[JudgeSumOpening] = lambda work: JudgmentResult("mismatch", "I say so")

    def _combined_together(self, work: CombineRows) -> RowsCombined:
        if not self.captures(work.part):
            return self._combined(work)
        false = self._miscombined(work)
        self.false |= {false.payload.digest} if false.payload is not None else set()
        return false

    def _miscombined(self, work: CombineRows) -> RowsCombined:
        others = [row for row in work.rows if row.peer != self.me]
        if self.kind in ("forger", "smuggler") and len(others) > 1:
            left = others[0]
            if self.kind == "forger":
                kept = [k for k, row in enumerate(work.rows) if row is not left]
                rows = tuple(work.rows[k] for k in kept)
                weights = weights_of_kept(work.weights, len(work.rows), kept) if work.weights else ()
                fewer = self._combined(replace(work, rows=rows, weights=weights))
                return replace(fewer, counted=tuple(row.peer for row in work.rows))
            whole = self._combined(work)
            return replace(whole, counted=tuple(peer for peer in whole.counted if peer != left.peer))
        true = self._combined(work)
        if true.payload is None:
            return true
        values_P = torch.frombuffer(bytearray(true.payload.data), dtype=torch.float32)
        if self.kind == "one_block":
            values_P[self.draw.randrange(len(values_P))] += BY
        else:
            values_P += BY
        return replace(true, payload=self._payload(values_P.numpy().tobytes()))

    def _juggled(self, work: BuildSumOpening) -> SumOpeningBuilt:
        """Open with a first row that leads to the wrong result."""
        first = work.rows[0]
        share = first.weight / sum(row.weight for row in work.rows)
        row_P = torch.frombuffer(bytearray(first.payload.data), dtype=torch.float32) + BY / share
        other = replace(first, payload=self._payload(row_P.numpy().tobytes()))
        return self._lay_open(replace(work, rows=(other, *work.rows[1:])), CUT)


def islands(kinds: dict[PeerId, str]) -> Callable[[PeerId, WorkerKnobs, random.Random], LyingOwnerWorker]:
    """Workers of a swarm with opened results."""
    return lambda me, knobs, draw: LyingOwnerWorker(me, knobs, draw, kinds.get(me, ""))


def twist_of(kind: str) -> Twist:
    """Lie of this kind in messages."""
    return TWISTS.get(kind, as_it_is)
