"""Ranges of samples in the shards of a data set, as lists that are joined and subtracted.

Not responsible for: which shard is read by which member (policy/data_positions.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from atoll.wire.messages.statements import DataRange


class AssignedShard(NamedTuple):
    """A shard of the local member, and the first sample that it reads next."""

    shard: int
    position: int


def without(ranges: Iterable[DataRange], taken: Iterable[DataRange]) -> tuple[DataRange, ...]:
    """The parts of these ranges that `taken` does not hold."""
    left = tuple(ranges)
    for done in taken:
        cut: list[DataRange] = []
        for one in left:
            if one.shard != done.shard or one.until < done.first or one.first > done.until:
                cut.append(one)
                continue
            if one.first < done.first:
                cut.append(DataRange(one.shard, one.first, done.first))
            if one.until > done.until or (one.ends and not done.ends):
                cut.append(DataRange(one.shard, min(one.until, done.until), one.until, one.ends))
        left = tuple(cut)
    return left


def joined(ranges: Iterable[DataRange]) -> tuple[DataRange, ...]:
    """The same samples; a range that continues the one before it is joined to it."""
    found: list[DataRange] = []
    for one in ranges:
        last = next((at for at in range(len(found) - 1, -1, -1) if found[at].shard == one.shard), None)
        if last is not None and found[last].until == one.first and not found[last].ends:
            found[last] = DataRange(one.shard, found[last].first, one.until, one.ends)
        else:
            found.append(one)
    return tuple(found)
