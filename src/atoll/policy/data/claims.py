"""Data claims: samples that the local loop has learned from and no vertex counts.

An update that is not counted returns to error feedback, so its samples belong to the next claim as well. The list
is valid for one vertex, like private state.

Invariants:
- A range leaves the list when a vertex counts it, or when its steps are lost: then its samples are read again.
Not responsible for: positions (policy/data/positions.py), the file of the list (runtime/embed/peer_process.py).
"""

from __future__ import annotations

import msgspec

from atoll.base.ids import Digest, PeerId
from atoll.base.limits import DATA_RANGES_MAX
from atoll.policy.contributions import contribution_of
from atoll.wire.data_ranges import AssignedShard, DataClaim, DataRange, RoundDataShards, joined, without
from atoll.wire.messages.vertex import VertexBody


class CarriedOverSamples(msgspec.Struct, frozen=True):
    """Samples in error feedback as of one vertex, for the file from which a restarted loop claims them."""

    vertex: str  # id of the vertex in hex; empty: none yet
    ranges: tuple[DataRange, ...] = ()


class UncountedSampleRanges:
    def __init__(self) -> None:
        self.name: Digest | None = None  # of the data set that the loop reads; None: it reads none
        self.stored = CarriedOverSamples("")
        self._left: tuple[DataRange, ...] = ()
        self._said: DataClaim | None = None  # last claim of this process

    def begin(self, assigned: tuple[AssignedShard, ...]) -> RoundDataShards:
        """Where the loop goes on in each shard: behind what is left over."""
        ahead, again = list[AssignedShard](), list[AssignedShard]()
        for shard, position in assigned:
            mine = [left for left in self._left if left.shard == shard]
            if any(left.ends for left in mine):
                again.append(AssignedShard(shard, position))
            else:
                ahead.append(AssignedShard(shard, max([position, *(left.until for left in mine)])))
        return RoundDataShards(tuple(ahead), tuple(again))

    def add(self, name: Digest, ranges: tuple[DataRange, ...]) -> DataClaim:
        """The claim of an update with these samples."""
        self.name, self._left = name, joined((*self._left, *ranges))
        self._said = DataClaim(name, self._left[:DATA_RANGES_MAX])
        return self._said

    def settle(self, vertex: Digest, body: VertexBody, me: PeerId, remembers: bool) -> None:
        """A round is over. `remembers`: error feedback holds an update that is not counted."""
        mine = contribution_of(body, me)
        if mine is None or mine.commit is None:
            self._left = self._left if remembers else ()
        elif self._said is not None and mine.commit.data == self._said:
            self._left = without(self._left, self._said.ranges)
        else:  # an earlier process sent it, and what this one trained since is dropped
            self._left = ()
        self.stored = CarriedOverSamples(vertex.hex(), self._left)

    def restore(self, vertex: Digest, body: VertexBody, me: PeerId) -> None:
        """The local state was restored, or downloaded, for this vertex; error feedback on disk may fit it."""
        mine = contribution_of(body, me)
        is_before = body.parent.hex() == self.stored.vertex and (mine is None or mine.commit is None)
        self._left = self.stored.ranges if is_before or vertex.hex() == self.stored.vertex else ()
