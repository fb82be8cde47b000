"""Meter of liars' influence on agreed results: every row has a numeric value, and the worker really sorts them.

A virtual row is a digest. Here it also has a value: drawn from the digest between -1 and 1 for an honest author,
chosen by the author otherwise. Owners combine the values with the statistic of real rounds.

`InfluenceMeter` checks every vertex: an honest peer computed each agreed part from rows that their authors sent,
and it lies between the bounds that the honest rows among them allow. For sorted rows the bound is exact: of n rows
with b liars the k-th lowest lies between the honest rows of places k - b and k. A mean of the places f … n - f - 1
therefore lies between two sums of honest rows, whatever the liars send, as long as b <= f.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import torch

from atoll.base.ids import Digest, PeerId
from atoll.peer.events import RoundClosed
from atoll.peer.tasks import (
    BuildSumOpening,
    EncodeUpdate,
    JudgeSumOpening,
    JudgmentResult,
    SumOpeningBuilt,
    UpdateEncoded,
)
from atoll.protocol.allreduce.tasks import CombineRows, RowsCombined
from atoll.simulation import symbolic_openings
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.simulated_audit_chain import VirtualTrainingChain
from atoll.simulation.worker import VirtualWorker, WorkerKnobs
from atoll.training.exchange.statistic import OF_COLUMNS
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import OwnerResult

ROUNDING = 1e-9  # for values up to 1e6, summed in fp64

POISONS: dict[str, Callable[[float], float]] = {  # honest value → value that is sent
    "far": lambda honest: 1e6,
    "flipped": lambda honest: -10.0 * honest,
    "near": lambda honest: 0.95,  # within the spread of the others, all in one direction: no rule can detect it
}


Row = tuple[PeerId, int, int]  # (author, round, part)


@dataclass(frozen=True)
class CombinedResultRecord:
    """One result that a worker computed."""

    rows: tuple[tuple[PeerId, Digest], ...]
    counted: tuple[PeerId, ...]  # contributors with weight
    worth: float
    liars: int  # f that the rule was told


@dataclass
class SimulatedRowValues:
    """Values of all rows of one world by digest, their authors, and the rows of each result."""

    authors: dict[Digest, Row] = field(default_factory=dict[Digest, Row])
    poisoned: dict[Digest, float] = field(default_factory=dict[Digest, float])
    made: dict[Digest, CombinedResultRecord] = field(default_factory=dict[Digest, CombinedResultRecord])

    def worth(self, row: Digest) -> float:
        found = self.poisoned.get(row)
        return int.from_bytes(row[:6], "big") / 2**47 - 1 if found is None else found

    def islands(
        self, poisons: dict[PeerId, str], chains: Callable[[PeerId], VirtualTrainingChain]
    ) -> Callable[[PeerId, WorkerKnobs, Random], VirtualWorker]:
        """Workers of each peer: these send poison, all others honest rows."""

        def make(me: PeerId, knobs: WorkerKnobs, draw: Random) -> VirtualWorker:
            return ScalarRowWorker(me, knobs, draw, self, poisons.get(me), chains(me))

        return make


class ScalarRowWorker(VirtualWorker):
    """Symbolic worker with valued rows."""

    def __init__(
        self,
        me: PeerId,
        knobs: WorkerKnobs,
        draw: Random,
        ledger: SimulatedRowValues,
        poison: str | None,
        chain: VirtualTrainingChain,
    ) -> None:
        super().__init__(me, knobs, draw, chain=chain)
        self.ledger, self.poison = ledger, poison
        self.handlers |= {
            EncodeUpdate: self._encode_valued,
            CombineRows: self._combine_valued,
            BuildSumOpening: self._build_opening,
            JudgeSumOpening: self._judge_opening,
        }

    def _encode_valued(self, work: EncodeUpdate) -> UpdateEncoded:
        done = self._encode_update(work)
        for index, part in enumerate(done.parts):
            self.ledger.authors[part.digest] = self.me, work.round, index
            if self.poison is not None:
                self.ledger.poisoned[part.digest] = POISONS[self.poison](self.ledger.worth(part.digest))
        return done

    def _combine_valued(self, work: CombineRows) -> RowsCombined:
        done = self._combine(work)
        return done if done.payload is None else self._combined(work, done)

    def _build_opening(self, work: BuildSumOpening) -> SumOpeningBuilt:
        return SumOpeningBuilt((self._put(symbolic_openings.lay_out(work)),) * len(work.draws))

    def _judge_opening(self, work: JudgeSumOpening) -> JudgmentResult:
        return symbolic_openings.judged(work, self.blobs[work.blob])

    def _combined(self, work: CombineRows, done: RowsCombined) -> RowsCombined:
        """Result by the rule of real rounds; empty if rows are too few, as there."""
        assert done.payload is not None
        rows = tuple((row.peer, row.payload.digest) for row in work.rows)
        counted = tuple(row.peer for row in work.rows if row.weight > 0)
        if work.statistic != "mean" and len(counted) < 2 * work.liars + 1:
            why = f"{work.statistic} needs {2 * work.liars + 1} rows, {len(counted)} are here"
            return RowsCombined(None, (), (), why)
        if done.payload.digest not in self.ledger.made:
            among = set(counted)
            worths = [self.ledger.worth(digest) for peer, digest in rows if peer in among]
            made = CombinedResultRecord(
                rows, counted, combined_worth(work.statistic, work.liars, worths), work.liars
            )
            self.ledger.made[done.payload.digest] = made
        return done


def combined_worth(statistic: str, liars: int, worths: list[float]) -> float:
    columns = [torch.tensor([worth], dtype=torch.float64) for worth in worths]
    if statistic == "mean":
        return sum(worths) / max(1, len(worths))
    return float(OF_COLUMNS[statistic](columns, liars, None)[0])


def allowed(honest: list[float], lies: int, trim: int) -> tuple[float, float]:
    """Bounds of a mean of the places trim … n - trim - 1 of n = len(honest) + lies rows.

    The k-th lowest of all rows is at least the honest row of place k - lies and at most that of place k (Yin et al.
    2018, Definition 2, where lies <= trim): both ends are means of honest rows. Places outside the honest rows
    belong to liars: then there is no bound.
    """
    rows, n = sorted(honest), len(honest) + lies
    places = range(trim, n - trim)
    if not places or lies > trim:
        return float("-inf"), float("inf")
    low = sum(rows[k - lies] for k in places) / len(places)
    high = sum(rows[k] for k in places) / len(places)
    return low, high


@dataclass
class InfluenceMeter:
    """Checks every vertex once. Sums over all parts of all rounds, in units of the honest rows' values.

    `moved` is the distance between results and the same rule over the honest rows alone; `most` its bound.
    """

    ledger: SimulatedRowValues
    villains: frozenset[PeerId]
    rounds: set[int] = field(default_factory=set[int])
    parts: int = 0
    liars_rows: int = 0  # rows of liars in agreed results
    rows: int = 0
    moved: float = 0.0
    most: float = 0.0

    def look(self, closed: RoundClosed) -> None:
        """Check a vertex. InvariantBroken for a result that no honest peer computed, for unsent rows, and beyond
        the bound.
        """
        if closed.body.round in self.rounds:
            return
        self.rounds.add(closed.body.round)
        for part, signed in enumerate(closed.body.parts):
            if signed is None:
                continue
            answered = decode_statement(signed.body, signed.signer)
            assert isinstance(answered, OwnerResult)
            self._part(closed.body.round, part, answered)

    def _part(self, round: int, part: int, answered: OwnerResult) -> None:
        made, where = self.ledger.made.get(answered.digest), f"part {part} of round {round}"
        if made is None or tuple(peer for peer, _ in made.rows) != answered.contributors:
            raise InvariantBroken(
                f"a false answer was agreed on for {where}: its contributors' rows do not make it"
            )
        for peer, row in made.rows:
            if peer not in self.villains and self.ledger.authors.get(row) != (peer, round, part):
                raise InvariantBroken(f"{where} holds a row that honest {peer} did not send")
        counted = [(peer, row) for peer, row in made.rows if peer in set(made.counted)]
        honest = [self.ledger.worth(row) for peer, row in counted if peer not in self.villains]
        lies = len(counted) - len(honest)
        low, high = allowed(honest, lies, made.liars)
        if lies > made.liars:
            raise InvariantBroken(f"{where} has {lies} rows of liars and withstands {made.liars}")
        if not low - ROUNDING <= made.worth <= high + ROUNDING:
            raise InvariantBroken(
                f"liars moved {where} to {made.worth:.3g}: "
                f"{lies} of {len(counted)} rows allow {low:.3g} to {high:.3g}"
            )
        alone = combined_worth("trimmed_mean", min(made.liars, (len(honest) - 1) // 2), honest)
        self.parts, self.rows, self.liars_rows = self.parts + 1, self.rows + len(counted), self.liars_rows + lies
        self.moved += abs(made.worth - alone)
        self.most += max(high - alone, alone - low)
