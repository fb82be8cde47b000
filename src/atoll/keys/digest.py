"""BLAKE3: names of blobs, Merkle roots over the parts of an update, and proofs that a part belongs to a root.

A blob is named by the digest of its manifest (size and the digest of every chunk), so that each chunk can be
verified alone while it is fetched from many peers. Leaves and inner nodes are hashed under different keys,
so that an inner node can never pass for a leaf.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from blake3 import blake3

from atoll.base.ids import DIGEST_BYTES, Digest
from atoll.base.limits import BLOB_CHUNK, BLOB_MAX

_LEAF = blake3(b"atoll/merkle/leaf/1").digest()
_NODE = blake3(b"atoll/merkle/node/1").digest()

Buffer = bytes | bytearray | memoryview


def digest(data: Buffer) -> Digest:
    return Digest(blake3(data).digest())


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """What a blob is made of: its size and the digest of each chunk of `BLOB_CHUNK` bytes, in order."""

    size_bytes: int
    chunks: tuple[Digest, ...]

    def check(self) -> None:
        """Raise ValueError unless size and number of chunks fit each other and the limit."""
        if not 0 <= self.size_bytes <= BLOB_MAX:
            raise ValueError(f"a blob of {self.size_bytes} bytes is outside 0…{BLOB_MAX}")
        expected = -(-self.size_bytes // BLOB_CHUNK)
        if len(self.chunks) != expected or any(len(c) != DIGEST_BYTES for c in self.chunks):
            raise ValueError(f"a blob of {self.size_bytes} bytes has {expected} chunks, not {len(self.chunks)}")

    def chunk_bytes(self, index: int) -> int:
        """Size of chunk `index`; only the last one may be shorter than BLOB_CHUNK."""
        assert 0 <= index < len(self.chunks)
        return min(BLOB_CHUNK, self.size_bytes - index * BLOB_CHUNK)


def manifest_of(*pieces: Buffer) -> Manifest:
    """Of these bytes, one piece after the other: chunks do not end where pieces do."""
    chunks, chunk, lacking, size_bytes = list[Digest](), blake3(), BLOB_CHUNK, 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        size_bytes += len(view)
        while view:
            chunk.update(view[:lacking])
            view, lacking = view[lacking:], max(0, lacking - len(view))
            if not lacking:
                chunks.append(Digest(chunk.digest()))
                chunk, lacking = blake3(), BLOB_CHUNK
    if lacking < BLOB_CHUNK:
        chunks.append(Digest(chunk.digest()))
    return Manifest(size_bytes, tuple(chunks))


def blob_id(manifest: Manifest) -> Digest:
    return digest(b"atoll/blob/1" + manifest.size_bytes.to_bytes(8, "big") + b"".join(manifest.chunks))


def merkle_root(leaves: tuple[Digest, ...]) -> Digest:
    """Root over the leaves in order; an odd node moves up unchanged. The number of leaves is part of the root."""
    return MerkleTree(leaves).root


def merkle_path(leaves: tuple[Digest, ...], index: int) -> tuple[Digest, ...]:
    """The siblings that lead from leaf `index` to the root; at most log2(len(leaves)) rounded up."""
    return MerkleTree(leaves).path(index)


class MerkleTree:
    """All levels over these leaves, for whoever shows more than one of them."""

    def __init__(self, leaves: Sequence[Digest]) -> None:
        assert leaves
        self.levels = [[blake3(leaf, key=_LEAF).digest() for leaf in leaves]]
        while len(self.levels[-1]) > 1:
            self.levels.append(_up(self.levels[-1]))
        self.root = _sealed(self.levels[-1][0], len(leaves))

    def path(self, index: int) -> tuple[Digest, ...]:
        assert 0 <= index < len(self.levels[0])
        path: list[Digest] = []
        for level in self.levels[:-1]:
            if index ^ 1 < len(level):
                path.append(Digest(level[index ^ 1]))
            index //= 2
        return tuple(path)


def merkle_top(leaf: Digest, index: int, count: int, path: tuple[Digest, ...]) -> Digest | None:
    """The root over which `leaf` stands at `index` of `count` leaves; None if no path of this length leads there.

    Never raises on a stranger's path.
    """
    if not 0 <= index < count:
        return None
    node, width, rest = blake3(leaf, key=_LEAF).digest(), count, list(path)
    while width > 1:
        if index ^ 1 < width:
            if not rest:
                return None
            sibling = rest.pop(0)
            pair = sibling + node if index & 1 else node + sibling
            node = blake3(pair, key=_NODE).digest()
        index, width = index // 2, (width + 1) // 2
    return None if rest else _sealed(node, count)


def merkle_holds(root: Digest, leaf: Digest, index: int, count: int, path: tuple[Digest, ...]) -> bool:
    """True if `leaf` stands at `index` of the `count` leaves under `root`. Never raises on a stranger's path."""
    return merkle_top(leaf, index, count, path) == root


def _up(level: list[bytes]) -> list[bytes]:
    nodes = [blake3(left + right, key=_NODE).digest() for left, right in zip(level[::2], level[1::2], strict=False)]
    return nodes if len(level) % 2 == 0 else [*nodes, level[-1]]


def _sealed(top: bytes, count: int) -> Digest:
    return Digest(blake3(top + count.to_bytes(8, "big"), key=_NODE).digest())
