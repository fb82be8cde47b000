"""Systematic Reed-Solomon code over GF(2^8): any k of n pieces make a blob again, one stripe at a time.

The bytes of a piece depend on the blob, k and n alone, so any holder of the blob can name all pieces
(`specs/pieces.md` says how to make them without this program). The arithmetic is ISA-L's Cauchy code, through
PyECLib. Its headers contain a library version and never leave this file.

Invariants:
- At most one stripe (n MiB) is in memory.
Not responsible for: checking pieces; the reader compares their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from atoll.base.errors import UsageError
from atoll.base.ids import Digest
from atoll.base.limits import BLOB_CHUNK, CODED_PIECES_MAX
from atoll.crypto.digest import BlobManifest, Buffer, blob_id, digest

UNIT = BLOB_CHUNK  # bytes of a piece in one stripe: a unit is a chunk of the piece, so its digest is at hand
_HEADER = 80  # bytes that liberasurecode puts before every fragment


def ready() -> bool:
    """True if this computer can code."""
    return find_spec("pyeclib") is not None


def demand_ready() -> None:
    """Raise UsageError with what to install, if this computer cannot."""
    if not ready():
        raise UsageError(
            "E-PCS-01",
            "older states of this run are kept in coded pieces, and this computer cannot code",
            cause="PyECLib is not installed; it has wheels for Linux",
            fix="pip install pyeclib",
        )


def piece_bytes(size_bytes: int, k: int) -> int:
    """Bytes of each piece of a blob of this size: whole units, then one as short as the rest allows."""
    whole, rest = divmod(size_bytes, k * UNIT)
    return whole * UNIT + -(-rest // k)


def stripes(size_bytes: int, k: int) -> Iterator[tuple[int, int, int]]:
    """(offset in the blob, bytes of the blob, bytes of each unit) of every stripe."""
    for at in range(0, size_bytes, k * UNIT):
        count = min(k * UNIT, size_bytes - at)
        yield at, count, -(-count // k)


def cut_stripe(data: Buffer, k: int, n: int) -> list[bytes]:
    """The n units of up to k MiB; the first k of them are the data itself, filled up with zeros."""
    unit = -(-len(data) // k)
    filled = bytes(data).ljust(k * unit, b"\0")
    coded = [fragment[_HEADER:] for fragment in _driver(k, n).encode(filled)[k:]]
    return [filled[i * unit : (i + 1) * unit] for i in range(k)] + coded


def join_stripe(units: Mapping[int, Buffer], k: int, n: int, count: int) -> bytes:
    """The `count` bytes that these units, at least k by number, were cut from."""
    assert len(units) >= k
    unit = -(-count // k)
    if any(i not in units for i in range(k)):
        return _driver(k, n).decode(_fragments(units, k, n, unit))[:count]
    return b"".join(bytes(units[i]) for i in range(k))[:count]


def unit_of(units: Mapping[int, Buffer], k: int, n: int, index: int) -> bytes:
    """Unit `index` out of at least k others, without the data as a whole."""
    assert len(units) >= k
    if index in units:
        return bytes(units[index])
    unit = len(next(iter(units.values())))
    return _driver(k, n).reconstruct(_fragments(units, k, n, unit), [index])[0][_HEADER:]


def cut(
    read: Callable[[int, int], Buffer], size_bytes: int, k: int, n: int, keep: Callable[[int, bytes], None]
) -> tuple[Digest, ...]:
    """Names of the n pieces, which are blobs. `read(offset, count)` reads the blob; `keep(index, unit)` gets units
    in order.
    """
    chunks: list[list[Digest]] = [[] for _ in range(n)]
    for at, count, _ in stripes(size_bytes, k):
        for index, unit in enumerate(cut_stripe(read(at, count), k, n)):
            chunks[index].append(digest(unit))
            keep(index, unit)
    size = piece_bytes(size_bytes, k)
    return tuple(blob_id(BlobManifest(size, tuple(each))) for each in chunks)


def rebuild(
    read: Callable[[int, int, int], Buffer],
    have: Sequence[int],
    size_bytes: int,
    k: int,
    n: int,
    index: int | None = None,
) -> Iterator[bytes]:
    """The blob, or piece `index` of it, stripe by stripe, from any k pieces: `read(piece, offset, count)`."""
    used = sorted(have)[:k]  # pieces of the data itself first: joining them costs nothing
    at = 0
    for _, count, unit in stripes(size_bytes, k):
        units = {i: read(i, at, unit) for i in used}
        yield join_stripe(units, k, n, count) if index is None else unit_of(units, k, n, index)
        at += unit


@lru_cache(maxsize=8)
def _driver(k: int, n: int) -> Any:
    assert 1 <= k < n <= CODED_PIECES_MAX
    demand_ready()
    from pyeclib.ec_iface import ECDriver  # pyright: ignore[reportMissingTypeStubs]

    return ECDriver(k=k, m=n - k, ec_type="isa_l_rs_cauchy")


@lru_cache(maxsize=16)
def _headers(k: int, n: int, unit: int) -> tuple[bytes, ...]:
    """Headers that this computer's library puts before units of this size."""
    return tuple(fragment[:_HEADER] for fragment in _driver(k, n).encode(bytes(k * unit)))


def _fragments(units: Mapping[int, Buffer], k: int, n: int, unit: int) -> list[bytes]:
    heads = _headers(k, n, unit)
    return [heads[i] + units[i] for i in sorted(units)[:k]]
