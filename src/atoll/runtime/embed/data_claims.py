"""Samples of the shared data set that the local loop has learned from and no vertex counts.

An update that is not counted returns to error feedback, so its samples belong to the next claim as well. They are
kept in a file beside the private state, under the name of the vertex that left them over.

Invariants:
- A claim repeats what is left over; a range leaves the list when a vertex counts it or when its steps are lost.
Not responsible for: positions (policy/data_positions.py), reading (training/data/shards).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import UNSET

from atoll.base.ids import Digest, PeerId
from atoll.base.limits import DATA_RANGES_MAX
from atoll.policy.contributions import contribution_of
from atoll.runtime.storage.atomic_files import write_durably
from atoll.runtime.trainer.protocol import SamplesRead
from atoll.wire.data_ranges import AssignedShard, joined, without
from atoll.wire.messages.statements import DataClaim, DataRange
from atoll.wire.messages.vertex import VertexBody

FILE = "data-claims.json"


class _LeftOver(msgspec.Struct, frozen=True):
    """Content of the file."""

    vertex: str  # id of the newest vertex that did not count them, in hex
    ranges: tuple[DataRange, ...]


class DataClaims:
    def __init__(self) -> None:
        self.name = b""  # of the data set that the loop reads; empty: none
        self._left: tuple[DataRange, ...] = ()
        self._path: Path | None = None
        self._stored: _LeftOver | None = None  # by an earlier process, until the local state is restored
        self._is_empty_on_disk = True

    def open(self, folder: Path) -> None:
        """Read what an earlier process left over."""
        self._path = folder / FILE
        try:
            self._stored = msgspec.json.decode(self._path.read_bytes(), type=_LeftOver)
        except (OSError, msgspec.MsgspecError):
            return
        self._is_empty_on_disk = not self._stored.ranges

    def restore(self, vertex: Digest, body: VertexBody, me: PeerId) -> None:
        """The local state is that of this vertex. Error feedback of an earlier process may be valid for it.

        Nothing else survives a download: the samples are read again.
        """
        stored, self._stored = self._stored, None
        self._left = ()
        if stored is not None:
            fits = body.parent.hex() == stored.vertex and not _counts(body, me)
            self._left = stored.ranges if fits or vertex.hex() == stored.vertex else ()

    def begin(self, assigned: tuple[AssignedShard, ...]) -> tuple[AssignedShard, ...]:
        """Where the loop goes on in each shard: behind what is left over."""
        found: list[AssignedShard] = []
        for shard, position in assigned:
            mine = [left for left in self._left if left.shard == shard]
            if not any(left.ends for left in mine):
                found.append(AssignedShard(shard, max([position, *(left.until for left in mine)])))
        return tuple(found)

    def add(self, read: SamplesRead | None) -> DataClaim | None:
        """The claim of an update with these samples; None if the loop reads no shared data."""
        if read is None:
            return None
        self.name, self._left = read.name, joined((*self._left, *read.ranges))
        return DataClaim(read.name, self._left[:DATA_RANGES_MAX])

    def settle(self, vertex: Digest, body: VertexBody, me: PeerId, remembers: bool) -> None:
        """A round is over. `remembers`: error feedback holds an update that is not counted."""
        if not self.name:
            return
        mine = contribution_of(body, me)
        if mine is None or mine.commit is None:
            self._left = self._left if remembers else ()
        elif mine.commit.data is not UNSET:
            self._left = without(self._left, mine.commit.data.ranges)
        self._keep(vertex)

    def _keep(self, vertex: Digest) -> None:
        if self._path is not None and not (self._is_empty_on_disk and not self._left):
            write_durably(self._path, (msgspec.json.encode(_LeftOver(vertex.hex(), self._left)),))
            self._is_empty_on_disk = not self._left


def _counts(body: VertexBody, me: PeerId) -> bool:
    mine = contribution_of(body, me)
    return mine is not None and mine.commit is not None
