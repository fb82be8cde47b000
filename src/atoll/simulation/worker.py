"""Virtual worker: executes tasks of a simulated peer. Updates are multisets of names, so counts are exact.

A shared state is a few bytes: a hash chain over the combined parts, and how often each peer was counted. As with
real states, two peers hold the same state exactly if they applied the same parts in the same order. Work takes
virtual time. What is durable when the answer arrives survives a crash; everything else is lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import SEGMENT_STEPS
from atoll.base.machine import Payload
from atoll.crypto.digest import BlobManifest, blob_id, digest, manifest_of, merkle_root
from atoll.features.archive.policy import PieceSet
from atoll.features.archive.reed_solomon import cut, rebuild
from atoll.peer.tasks import (
    AdoptState,
    AdvanceState,
    BuildExhibit,
    BuildUpdateExhibit,
    CheckStateStored,
    DecodeErasurePieces,
    EncodeErasurePieces,
    EncodeUpdate,
    EndTrainingEarly,
    ExhibitBuilt,
    JudgeReplay,
    JudgmentResult,
    MeasureValidationLoss,
    MovePartsToDisk,
    PinBlobs,
    ReadRow,
    ReadVertices,
    RestoreEarlierState,
    RestoreState,
    RetainArchivedRows,
    RetainErasurePieces,
    StateAdvanced,
    StateRestored,
    StoreArchivedRows,
    TrainingResult,
    TrainRound,
    TrainWithoutQuorum,
    UpdateEncoded,
    ValidationLosses,
)
from atoll.policy.fault_tolerance import MIXED
from atoll.protocol.allreduce.tasks import (
    CombineRows,
    ComputedWeights,
    ComputeRowProducts,
    ProductsComputed,
    RowsCombined,
    WeighRows,
)
from atoll.protocol.history.era_signatures import ReadEraSignatures
from atoll.protocol.transfer.tasks import (
    BlobStoragePrepared,
    CloseBlob,
    DropBlob,
    PrepareBlobStorage,
    ReadChunk,
    ReadManifest,
    StoreChunk,
)
from atoll.simulation.partition_training import OfflineSteps
from atoll.simulation.simulated_audit_chain import VirtualTrainingChain, judged
from atoll.wire.weights import RowWeights, packed_mixtures
from atoll.worker.state_store import MemoryStateStore, stage


class VirtualState(msgspec.Struct, frozen=True, array_like=True):
    round: int
    chain: Digest
    steps: int
    counted: dict[PeerId, int]


_SHARED = msgspec.msgpack.Decoder(VirtualState)

BATCH = 16  # samples per step
VALIDATION_STEPS = 4  # a validation takes as long as this number of steps
GENESIS_STATE = msgspec.msgpack.encode(VirtualState(-1, digest(b"genesis"), 0, {}))


def counts_in(state: bytes) -> dict[PeerId, int] | None:
    """Parts that count each peer in this state; None for a state of real numbers."""
    try:
        return _SHARED.decode(state).counted
    except msgspec.MsgspecError:
        return None


def whole_of(rows: Sequence[Digest], round: int, part: int) -> Digest:
    """Digest of the result of these rows, in this order."""
    return digest(b"".join(rows) + str((round, part)).encode())


def _most_s(work: TrainRound) -> Seconds:
    """Most seconds of training; a virtual trainer is always ready."""
    return work.seconds_max if work.limit_s is None else min(work.seconds_max, work.limit_s)


@dataclass
class _SimulatedTrainingTask:
    work: TrainRound
    began: Seconds
    step_s: Seconds
    ahead: int  # steps taken before the task arrived


@dataclass
class WorkerKnobs:
    step_s: Seconds = 0.05
    step_jitter: float = 0.1
    update_bytes: int = 1_000_000
    state_bytes: int = 0  # reported size of a state; only names travel
    train_failure_rate: float = 0.0
    overlap: int = 0  # steps taken while a round is agreed; they count in the next round
    carries: bool = False  # steps that no update holds count in the next one, as in real runs
    states_kept: int = 16  # newest states on disk, besides those that were looked for


class UpdateExhibit(msgspec.Struct, frozen=True, array_like=True):
    """What a virtual author shows to judges of its update."""

    parts: tuple[Digest, ...]
    learned: str  # data behind a virtual update, in plain text; real updates only imply it


@dataclass
class VirtualWorker:
    """`kept`, `blobs` and `partial` are durable. Everything else dies with the process."""

    me: PeerId
    knobs: WorkerKnobs
    draw: random.Random
    kept: dict[str, bytes] = field(default_factory=dict)  # named values of the peer, on the same disk
    blobs: dict[Digest, bytes] = field(default_factory=lambda: {blob_id(manifest_of(GENESIS_STATE)): GENESIS_STATE})
    partial: dict[Digest, tuple[BlobManifest, dict[int, bytes]]] = field(default_factory=dict)
    steps_done: int = 0  # since the last counted update
    now: Callable[[], Seconds] = lambda: 0.0  # the world's clock, for steps taken ahead
    training: _SimulatedTrainingTask | None = None  # current training
    hurried: bool = False  # whether the training has to hand over early
    handed_over: Seconds | None = None  # time from which it steps ahead
    merged: Seconds | None = None  # time of the last merge
    looked_for: set[Digest] = field(default_factory=set)  # earlier states to which the run may roll back
    encoded: dict[int, tuple[Digest, ...]] = field(default_factory=dict)  # round -> parts; read by the checkers
    miscounted: list[str] = field(default_factory=list)  # read by the checkers
    chain: VirtualTrainingChain | None = None  # of runs with replay audits
    needed: dict[str, tuple[Digest, ...]] = field(default_factory=dict)  # purpose -> blobs that stay
    pieces: tuple[Digest, ...] = ()  # pieces of older states, in runs with an archive
    whole: tuple[Digest, ...] = ()  # older states that have to stay, in runs with an archive
    rows: dict[Digest, Payload] = field(default_factory=dict)  # archived rows by blob
    given_bytes: int = 0  # bytes of blobs served to others
    alone: OfflineSteps = field(default_factory=OfflineSteps)  # steps taken without a quorum

    def crash(self) -> None:
        self.steps_done, self.training = 0, None
        self.alone.crash()
        self.handed_over = self.merged = None
        if self.chain is not None:
            self.chain.crash()

    def takes_s(self, work: Any) -> Seconds:
        match work:
            case TrainRound():
                step_s = self._step_s()
                if (
                    self.training is not None and self.knobs.carries
                ):  # its round is over: the steps count in the next one
                    self.steps_done += self._taken(self.training)
                    self.handed_over = None  # includes the steps taken ahead
                ahead = self._taken_ahead(step_s) if self.knobs.overlap else 0
                left = work.steps - ahead
                self.training, self.hurried = _SimulatedTrainingTask(work, self.now(), step_s, ahead), False
                return min(step_s * max(left, 0), max(_most_s(work), 0.0))
            case EncodeUpdate() | ComputeRowProducts() | CombineRows() | AdvanceState() | AdoptState():
                return 0.002 + self.knobs.update_bytes / 1e9
            case TrainWithoutQuorum():
                return self._step_s() * self.alone.may_take(work)
            case BuildExhibit() | JudgeReplay():
                return SEGMENT_STEPS * self._step_s()
            case MeasureValidationLoss():
                return VALIDATION_STEPS * self.knobs.step_s
            case _:
                return 0.002

    def __post_init__(self) -> None:
        self.states = MemoryStateStore(self.blobs)
        self.handlers: dict[type, Callable[[Any], Any]] = {
            TrainRound: self._train,
            EndTrainingEarly: self._hand_over,
            TrainWithoutQuorum: self._train_apart,
            EncodeUpdate: self._encode_update,
            CombineRows: self._combine,
            ComputeRowProducts: self._compare_rows,
            WeighRows: self._weigh_rows,
            AdvanceState: self._advance,
            AdoptState: self._adopt,
            RestoreEarlierState: self._go_back,
            CheckStateStored: self._find_state,
            RestoreState: self._restore,
            PinBlobs: self._pin_blobs,
            MeasureValidationLoss: self._validate,
            BuildExhibit: self._build_exhibit,
            BuildUpdateExhibit: self._show_update,
            JudgeReplay: self._judge_replay,
            MovePartsToDisk: lambda work: work.parts,
            StoreArchivedRows: self._keep_rows,
            RetainArchivedRows: self._hold_rows,
            ReadRow: lambda work: self.rows.get(work.blob),
            EncodeErasurePieces: self._cut,
            DecodeErasurePieces: self._rebuild,
            RetainErasurePieces: self._hold_pieces,
            ReadVertices: self._read_vertices,
            ReadEraSignatures: lambda work: self.kept.get(f"sealed/{work.round}"),
            PrepareBlobStorage: self._open_blob,
            StoreChunk: self._store_chunk,
            CloseBlob: self._close_blob,
            DropBlob: self._drop_blob,
            ReadManifest: self._read_manifest,
            ReadChunk: self._read_chunk,
        }

    @property
    def head(self) -> Digest | None:
        return self.states.head

    def run(self, work: Any) -> Any:
        """The answer to a task. RuntimeError where a real worker would fail."""
        handler = self.handlers.get(type(work))
        if handler is None:
            raise RuntimeError(f"a virtual worker cannot do {type(work).__name__}")
        return handler(work)

    def _hand_over(self, work: EndTrainingEarly) -> None:
        self.hurried = True

    def _train_apart(self, work: TrainWithoutQuorum) -> TrainingResult:
        steps = self.alone.take(work)
        return TrainingResult(steps, steps * BATCH, 5.0 / (1 + work.round), self.knobs.step_s)

    def _encode_update(self, work: EncodeUpdate) -> UpdateEncoded:
        parts = tuple(self._part(work, index) for index in range(work.parts))
        self.encoded[work.round] = tuple(part.digest for part in parts)
        late = self.alone.late(work.round, BATCH) if work.late else None
        return UpdateEncoded(parts, self._claim(work.round), late)

    def _compare_rows(self, work: ComputeRowProducts) -> ProductsComputed:
        """Names have no distances: all rows are at the same distance."""
        count = sum(row.weight > 0 for row in work.rows)
        return ProductsComputed(bytes(8 * (count * (count + 1) // 2)), tuple(row.peer for row in work.rows), ())

    def _weigh_rows(self, work: WeighRows) -> ComputedWeights:
        return ComputedWeights(_weights_of_alike(work))

    def _adopt(self, work: AdoptState) -> None:
        self.states.commit(work.state)
        self.alone.back(work.round, work.counted, work.late, self.steps_done)
        self.alone.kept(work.vertex)
        self.merged = self.now()
        if self.chain is not None:
            self.chain.adopt(work.round, work.vertex, work.claim, work.afresh)
        lost = work.counted is None and not self.knobs.carries
        if lost or any(work.counted or ()) or self.chain is not None:
            self.steps_done = 0
        if work.afresh:  # the trainer starts over: nothing private belongs to this history
            self.steps_done, self.handed_over, self.merged = 0, None, None
            self.alone.forget()
        self._prune(work.state)

    def _find_state(self, work: CheckStateStored) -> bool:
        self.looked_for.add(work.state)
        return self.states.is_recoverable(work.state)

    def _restore(self, work: RestoreState) -> StateRestored | None:
        if work.left is not None:
            self.alone.back(work.round, work.left.counted, work.left.late, self.steps_done)
            if work.left.afresh:
                self.alone.forget()
        if not self.states.is_recoverable(work.state):
            return None
        self.states.commit(work.state)
        self.alone.restored(work.round, work.vertex)
        if self.chain is not None:
            self.chain.restore(work.vertex)
        return StateRestored(self.knobs.state_bytes)

    def _pin_blobs(self, work: PinBlobs) -> None:
        self.needed[work.why] = work.blobs

    def _validate(self, work: MeasureValidationLoss) -> ValidationLosses:
        return ValidationLosses(self.losses(self.read_state(work.state)))

    def _show_update(self, work: BuildUpdateExhibit) -> ExhibitBuilt:
        if work.round not in self.encoded:
            raise RuntimeError(f"nothing is left of round {work.round}")
        shown = UpdateExhibit(self.encoded[work.round], self.data_behind(work.round))
        return ExhibitBuilt(self._put(msgspec.msgpack.encode(shown)))

    def data_behind(self, round: int) -> str:
        """The data that the update of this round was made from; scenarios of reviews define it."""
        del round
        return ""

    def _build_exhibit(self, work: BuildExhibit) -> ExhibitBuilt:
        if self.chain is None:
            raise RuntimeError("rounds of this run are not audited")
        return ExhibitBuilt(self._put(self.chain.exhibit(work.round)))

    def _judge_replay(self, work: JudgeReplay) -> JudgmentResult:
        self.states.view(work.before)  # raises MissingStateError
        return judged(work, self.blobs[work.blob])

    def _keep_rows(self, work: StoreArchivedRows) -> tuple[Digest, ...]:
        names = tuple(digest(row.payload.digest) for row in work.rows)
        self.rows |= zip(names, (row.payload for row in work.rows), strict=True)
        return names

    def _hold_rows(self, work: RetainArchivedRows) -> tuple[Digest, ...]:
        self.rows = {name: row for name, row in self.rows.items() if name in work.blobs}
        return tuple(name for name in work.blobs if name not in self.rows)

    def _hold_pieces(self, work: RetainErasurePieces) -> tuple[Digest, ...]:
        self.pieces, self.whole = work.pieces, work.whole
        return tuple(name for name in work.pieces if name not in self.blobs)

    # ---- blobs ---------------------------------------------------------------------------------------------

    def _open_blob(self, work: PrepareBlobStorage) -> BlobStoragePrepared:
        _, chunks = self.partial.setdefault(work.blob, (work.manifest, {}))
        return BlobStoragePrepared(frozenset(chunks))

    def _store_chunk(self, work: StoreChunk) -> None:
        self.partial[work.blob][1][work.index] = bytes(work.payload.data)

    def _close_blob(self, work: CloseBlob) -> None:
        manifest, chunks = self.partial.pop(work.blob)
        data = b"".join(chunks[i] for i in range(len(manifest.chunks)))
        assert blob_id(manifest_of(data)) == work.blob
        self.blobs[work.blob] = data

    def _drop_blob(self, work: DropBlob) -> None:
        self.partial.pop(work.blob, None)

    def _read_manifest(self, work: ReadManifest) -> BlobManifest | None:
        data = self.blobs.get(work.blob)  # never partial: states fit one chunk
        return None if data is None else manifest_of(data)

    def _read_chunk(self, work: ReadChunk) -> Payload | None:
        data = self.blobs.get(work.blob)
        if data is None:
            return None
        self.given_bytes += len(data)
        return Payload(digest(data), len(data), data)  # states fit one chunk

    # ---- states --------------------------------------------------------------------------------------------

    def read_state(self, name: Digest) -> bytes:
        return bytes(self.states.view(name))

    def stage_state(self, data: bytes) -> StateAdvanced:
        return StateAdvanced(stage(self.states, data))

    # ---- small helpers -------------------------------------------------------------------------------------

    def losses(self, state: bytes) -> tuple[float, ...]:
        """Losses that a validator measures: all states of names are equal."""
        return (1.0,)

    def _claim(self, round: int) -> Digest | None:
        if self.chain is None or self.head is None:
            return None
        return self.chain.claim(round, self.head, merkle_root(self.encoded[round]))

    def _put(self, data: bytes) -> Digest:
        name = blob_id(manifest_of(data))
        self.blobs[name] = data
        return name

    def _read_vertices(self, work: ReadVertices) -> tuple[bytes, ...]:
        chosen: list[bytes] = []
        size = 0
        for round in count(work.first):
            vertex = self.kept.get(f"vertex/{round}")
            size += len(vertex or b"")
            if vertex is None or (chosen and size > work.bytes_max):
                return tuple(chosen)
            chosen.append(vertex)
        raise AssertionError("unreachable")

    def _step_s(self) -> Seconds:
        return self.knobs.step_s * (1 + self.draw.uniform(-1, 1) * self.knobs.step_jitter)

    def _taken_ahead(self, step_s: Seconds) -> int:
        """Steps of the next round taken ahead: at most `overlap` of them before the last merge."""
        if self.handed_over is None:
            return 0
        merged = self.now() if self.merged is None else self.merged
        under_way = min(self.knobs.overlap, int((merged - self.handed_over) / step_s))
        return under_way + int((self.now() - merged) / step_s)

    def step_ends_s(self) -> Seconds:
        """Seconds until the current step ends."""
        if self.training is None:
            return 0.0
        return self.training.step_s - (self.now() - self.training.began) % self.training.step_s

    def _taken(self, training: _SimulatedTrainingTask) -> int:
        """Steps taken by now."""
        return min(training.work.steps, training.ahead + round((self.now() - training.began) / training.step_s))

    def _train(self, work: TrainRound) -> TrainingResult:
        if self.draw.random() < self.knobs.train_failure_rate:
            raise RuntimeError("the virtual trainer crashed")
        steps = min(work.steps, max(0, int(_most_s(work) / self.knobs.step_s)))
        if self.knobs.carries:
            if self.training is None or self.training.work.round != work.round:
                return TrainingResult(0, 0, 0.0, 0.0)  # the round is over: the result is ignored
            steps = self._taken(self.training) if self.hurried else steps
        self.training = None
        self.handed_over, self.merged = self.now(), None
        self.steps_done += steps
        if self.chain is not None:
            self.steps_done = self.chain.taken[work.round] = steps
        loss = 5.0 / (1 + work.round) + self.draw.random() * 0.1
        since = self.steps_done if self.knobs.carries else steps
        return TrainingResult(since, self.steps_done * (work.batch or BATCH), loss, self.knobs.step_s)

    def _part(self, work: EncodeUpdate, index: int) -> Payload:
        name = digest(f"{self.me}/{work.round}/{index}/{self.draw.random()}".encode())
        return Payload(name, self.knobs.update_bytes // work.parts, (self.me,))

    def _combine(self, work: CombineRows) -> RowsCombined:
        names: list[PeerId] = []
        for row in work.rows:
            if tuple(sorted(row.payload.data)) != row.names:
                self.miscounted.append(
                    f"part {work.part} of round {work.round} holds {row.payload.data} as {row.names}"
                )
            names += row.payload.data
        whole = whole_of([row.payload.digest for row in work.rows], work.round, work.part)
        payload = Payload(whole, self.knobs.update_bytes // work.parts, tuple(names))
        return RowsCombined(payload, tuple(row.peer for row in work.rows), ())

    def _advance(self, work: AdvanceState) -> StateAdvanced:
        before = _SHARED.decode(self.read_state(work.before))
        counted, chain = dict(before.counted), before.chain
        for payload in work.parts:
            if payload is None:
                chain = digest(chain + b"missing")
                continue
            for name in payload.data:
                counted[name] = counted.get(name, 0) + 1
            chain = digest(chain + payload.digest)
        after = VirtualState(work.round, chain, before.steps + work.steps, dict(sorted(counted.items())))
        return self.stage_state(msgspec.msgpack.encode(after))

    def _go_back(self, work: RestoreEarlierState) -> StateAdvanced:
        """Counts of the earlier state; the chain continues from both, like the data position in real runs."""
        before = _SHARED.decode(self.read_state(work.before))
        old = _SHARED.decode(self.read_state(work.back_to))
        place = f"back/{work.round}/{work.steps * work.shards}".encode()
        data = msgspec.msgpack.encode(replace(old, chain=digest(old.chain + before.chain + place)))
        return self.stage_state(data)

    def _cut(self, work: EncodeErasurePieces) -> PieceSet | None:
        data = self.blobs.get(work.state)
        if data is None:
            return None
        units: list[list[bytes]] = [[] for _ in range(work.n)]
        names = cut(
            lambda at, count: data[at : at + count],
            len(data),
            work.k,
            work.n,
            lambda i, unit: units[i].append(unit),
        )
        self._put(b"".join(units[work.index]))
        return PieceSet(len(data), names)

    def _rebuild(self, work: DecodeErasurePieces) -> bool:
        pieces = {index: self.blobs[name] for index, name in work.pieces}
        read = lambda i, at, count: pieces[i][at : at + count]  # noqa: E731
        made = b"".join(rebuild(read, list(pieces), work.size_bytes, work.k, work.n, work.index))
        if blob_id(manifest_of(made)) != work.goal:
            return False
        self._put(made)
        return True

    def _prune(self, head: Digest) -> None:
        """Like the real store: the last states stay, so that slow peers and restarts find theirs."""
        needed = {head, *self.looked_for, *self.pieces, *self.whole}.union(*self.needed.values())
        for old in list(self.blobs)[: -self.knobs.states_kept]:
            if old not in needed:
                del self.blobs[old]


def _weights_of_alike(work: WeighRows) -> RowWeights:
    """Weights of rows at equal distances: each row is mixed with those that follow it."""
    rows = len(work.rows)
    if work.statistic not in MIXED:
        return (1 / rows,) * rows
    return packed_mixtures([{(row + k) % rows for k in range(rows - work.liars)} for row in range(rows)])
