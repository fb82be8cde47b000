"""Virtual loop that reads the run's data set, and the checker of its positions.

The loop reads with the real `AssignedShardsDataset` and claims with the real `UncountedSampleRanges`; its samples
are virtual. It notes which samples are in its updates. The checker counts these by name, without the code of the
positions.

Invariants that are checked:
- A commitment claims exactly the samples behind its update.
- Samples in counted updates = `counted`, and positions = counted − repeated + dropped.
- A sample behind a position that no counted update holds is in `dropped`; one that several hold is in `repeated`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import UNSET

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Fact
from atoll.crypto.digest import digest, merkle_root
from atoll.peer.events import LocalStateCaughtUp, RoundClosed
from atoll.peer.governance.orders import amend_of
from atoll.peer.tasks import EncodeUpdate, TrainingResult, TrainRound, UpdateEncoded
from atoll.policy.data.claims import CarriedOverSamples, UncountedSampleRanges
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.worker import VirtualWorker
from atoll.simulation.world import VirtualComputer
from atoll.training.data.shards.dataset import AssignedShardsDataset
from atoll.wire.codec import statement_in
from atoll.wire.data_ranges import DataRange
from atoll.wire.messages.statements import Commitment
from atoll.wire.messages.vertex import SharedDataProgress, VertexBody

Sample = tuple[int, int]  # shard, number in it
READ = 4  # samples per step


def length_of(shard: int) -> int:
    """Samples of a shard: some are shorter than a round, some longer."""
    return 10 + shard * 37 % 150


class _VirtualSource:
    name = digest(b"virtual data")

    def read(self, shard: int, first: int) -> Iterator[tuple[Any, bool]]:
        for number in range(first, length_of(shard)):
            yield (shard, number), number + 1 == length_of(shard)


class DatasetReadingWorker(VirtualWorker):
    """A virtual worker whose trainer is a loop that reads the run's data set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sent: dict[Digest, Counter[Sample]] = {}  # root of an update → its samples; for the checker
        self._held = Counter[Sample]()  # samples in live parameters or error feedback that no vertex counts
        self._held_on_disk = Counter[Sample]()
        self._claims = UncountedSampleRanges()
        self._made = set[Digest]()  # roots of this process
        self._begin()
        train, encode = self.handlers[TrainRound], self.handlers[EncodeUpdate]
        self.handlers |= {
            TrainRound: lambda work: self._read(work, train(work)),
            EncodeUpdate: lambda work: self._note(encode(work)),
        }

    def crash(self) -> None:
        super().crash()
        durable, self._claims = self._claims.stored, UncountedSampleRanges()
        self._claims.stored, self._held = durable, Counter()
        self._made.clear()
        self._begin()

    def _begin(self) -> None:
        self._shards, self._round = AssignedShardsDataset(_VirtualSource(), 0, lambda: False), -1

    def _read(self, work: TrainRound, trained: TrainingResult) -> TrainingResult:
        if work.round < self._round:  # a real loop ends this training before it begins the next one
            return trained
        self._round = work.round
        self._shards.assign(self._claims.begin(work.data), ())
        if self._shards.is_waiting:
            self._shards.read_again()
        samples, ranges, steps = iter(self._shards), list[DataRange](), 0
        while steps < trained.steps and len(found := [one for _, one in zip(range(READ), samples, strict=False)]):
            ranges += self._shards.take_step()
            self._held.update(found)
            steps += 1
        ranges += self._shards.take_step()
        claim = self._claims.add(_VirtualSource.name, tuple(ranges))
        if not steps:  # its shards are used up, and the next vertex brings others
            return TrainingResult(0, 0, 0.0, 0.0, data=claim)
        return TrainingResult(steps, steps * READ, trained.loss, trained.step_s, data=claim)

    def _note(self, encoded: UpdateEncoded) -> UpdateEncoded:
        root = merkle_root(tuple(part.digest for part in encoded.parts))
        self.sent[root] = Counter(self._held)
        self._made.add(root)
        return encoded

    def on_closed(self, fact: RoundClosed) -> None:
        """Error feedback keeps an update that is not counted; claims and feedback reach the disk together."""
        body, remembers = fact.body, amend_of(fact.body) is None
        if (root := _roots(body).get(self.me)) is not None:
            self._held -= self.sent[root] if root in self._made else Counter(self._held)
        elif not remembers:
            self._held.clear()
        self._claims.settle(fact.id, body, self.me, remembers)
        self._held_on_disk = Counter(self._held)

    def on_restored(self, vertex: Digest, body: VertexBody) -> None:
        was = self._claims.stored
        is_valid = was.vertex in (vertex.hex(), body.parent.hex() if self.me not in _roots(body) else "-")
        self._held = Counter(self._held_on_disk) if is_valid else Counter()
        self._claims.restore(vertex, body, self.me)
        if not is_valid:
            self._claims.stored, self._held_on_disk = CarriedOverSamples(""), Counter()


class DataPositionChecker:
    """Watches all rounds, and compares the newest positions with the samples in counted updates."""

    def __init__(self) -> None:
        self.islands: dict[PeerId, DatasetReadingWorker] = {}
        self.seen = Counter[Sample]()  # sample → counted updates that hold it
        self.bodies: dict[int, Digest] = {}  # rounds that are in `seen`
        self.newest: VertexBody | None = None

    def watch(self, now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        island = node.island
        assert isinstance(island, DatasetReadingWorker)
        self.islands[node.name] = island
        match fact:
            case RoundClosed(body=body):
                if self.bodies.setdefault(body.round, fact.id) == fact.id and self._is_new(body):
                    self._count(body)
                island.on_closed(fact)
            case LocalStateCaughtUp(round=round) if node.machine is not None and node.machine.history is not None:
                vertex = node.machine.history.vertices[round]
                island.on_restored(digest(vertex.body), node.machine.history.bodies[round])
            case _:
                pass

    def _is_new(self, body: VertexBody) -> bool:
        return self.newest is None or body.round > self.newest.round

    def _count(self, body: VertexBody) -> None:
        if self.newest is not None and body.round > self.newest.round + 1:
            raise InvariantBroken(f"no peer closed round {self.newest.round + 1}")
        self.newest = body
        roots = {root: samples for island in self.islands.values() for root, samples in island.sent.items()}
        for signed in body.commits:
            commit = statement_in(signed)
            if not isinstance(commit, Commitment) or commit.data is None:
                raise InvariantBroken(f"a commitment of {signed.signer} in round {body.round} claims nothing")
            claimed = Counter((r.shard, at) for r in commit.data.ranges for at in range(r.first, r.until))
            if claimed != roots[commit.root]:
                odd = (claimed - roots[commit.root]) + (roots[commit.root] - claimed)
                raise InvariantBroken(f"round {body.round}: {signed.signer} claims other samples: {min(odd)}")
            if commit.weight:
                self.seen += claimed
        if body.data is not UNSET:
            check_positions(self.seen, body.data, length_of)
        elif self.seen:
            raise InvariantBroken(f"round {body.round} counts samples, and has no positions")


def check_positions(seen: Counter[Sample], data: SharedDataProgress, length_of: Callable[[int], int]) -> None:
    """Compare the positions with the samples in counted updates, sample → number of updates."""
    at = {s.shard: s.position for s in data.open}
    past = {shard: at[shard] if shard in at else length_of(shard) for shard in range(data.next)}
    counted, passed = sum(seen.values()), sum(past.values())
    if counted != data.counted or passed != data.counted - data.repeated + data.dropped:
        raise InvariantBroken(f"{counted} samples are counted, positions are past {passed}: {data}")
    below = sum(number < past.get(shard, 0) for shard, number in seen)
    lost, again = passed - below, counted - below
    if lost > data.dropped or again > data.repeated:
        raise InvariantBroken(f"{lost} samples are lost, {again} counted again: {data}")


def _roots(body: VertexBody) -> dict[PeerId, Digest]:
    """Roots of the counted updates."""
    said = ((signed.signer, statement_in(signed)) for signed in body.commits)
    return {peer: commit.root for peer, commit in said if isinstance(commit, Commitment)}
