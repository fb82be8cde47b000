"""Ranges of samples in the shards of a data set: as bytes in a commitment, joined and subtracted.

The bytes are the digest that names the data set and its order, a space, and the ranges as text, such as
`3:80-96! 5:0-496`; `!` marks the end of a shard. So they are longer than the digest of another claim.

Not responsible for: which shard is read by which member (policy/data/positions.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec

from atoll.base.ids import DIGEST_BYTES, Digest
from atoll.base.limits import DATA_RANGES_MAX

PLACE_MAX = 2**40  # of a shard, or of a sample in a shard
DataPlace = Annotated[int, msgspec.Meta(ge=0, le=PLACE_MAX)]
CLAIM_BYTES_MAX = DIGEST_BYTES + DATA_RANGES_MAX * 44  # three numbers of 13 digits for each range
ClaimBytes = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=CLAIM_BYTES_MAX)]
_RANGE = re.compile(rb"(\d{1,13}):(\d{1,13})-(\d{1,13})(!?)")


class DataRange(NamedTuple):
    """Samples `first` to `until` − 1 of a shard of the data set. `ends`: the shard has no further sample."""

    shard: int
    first: int
    until: int
    ends: bool = False


class DataClaim(NamedTuple):
    """Samples behind an update, for runs whose members share one data set."""

    name: Digest  # of the data set and of its order
    ranges: tuple[DataRange, ...] = ()


class AssignedShard(NamedTuple):
    """A shard of the local member, and the first sample that it reads next."""

    shard: int
    position: int


class RoundDataShards(NamedTuple):
    """The shards of the local member in one round."""

    ahead: tuple[AssignedShard, ...]
    again: tuple[AssignedShard, ...] = ()
    """Whole ones behind an update that was not counted: to read if the others are too few for one step. Without a
    step nothing is sent, so they would stay uncounted."""


def claim_bytes(claim: DataClaim) -> bytes:
    """The claim as bytes."""
    ranges = " ".join(f"{r.shard}:{r.first}-{r.until}{'!' * r.ends}" for r in claim.ranges)
    return claim.name + b" " + ranges.encode()


def claim_in(data: bytes) -> DataClaim | None:
    """The claim in these bytes; None if it is none that an honest member makes."""
    name, space, text = data[:DIGEST_BYTES], data[DIGEST_BYTES : DIGEST_BYTES + 1], data[DIGEST_BYTES + 1 :]
    words = text.split(b" ") if text else []
    found = [m for word in words if (m := _RANGE.fullmatch(word)) is not None]
    ranges = tuple(DataRange(int(m[1]), int(m[2]), int(m[3]), bool(m[4])) for m in found)
    valid = (r.first <= r.until <= PLACE_MAX and r.shard <= PLACE_MAX for r in ranges)
    if space != b" " or not len(found) == len(words) <= DATA_RANGES_MAX or not all(valid):
        return None
    return DataClaim(Digest(name), ranges)


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
