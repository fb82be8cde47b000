"""BLAKE3: names of blobs, Merkle roots over parts of an update or stretches of a wire, and proofs that one belongs
to a root.

A blob is named by the digest of its manifest (size and the digest of every chunk), so that each chunk can be
verified alone while it is fetched from many peers. Inner nodes are hashed under a key that leaves are not hashed
under, so that an inner node can never pass for a leaf.
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


class BlobManifest(msgspec.Struct, frozen=True, array_like=True):
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


def manifest_of(*pieces: Buffer) -> BlobManifest:
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
    return BlobManifest(size_bytes, tuple(chunks))


def blob_id(manifest: BlobManifest) -> Digest:
    return digest(b"atoll/blob/1" + manifest.size_bytes.to_bytes(8, "big") + b"".join(manifest.chunks))


def merkle_root(leaves: tuple[Digest, ...]) -> Digest:
    """Root over the leaves in order; an odd node moves up unchanged. The number of leaves is part of the root."""
    return merkle_tree(leaves).root


def merkle_path(leaves: tuple[Digest, ...], index: int) -> tuple[Digest, ...]:
    """The siblings that lead from leaf `index` to the root; at most log2(len(leaves)) rounded up."""
    return merkle_tree(leaves).path(index)


def merkle_tree(leaves: Sequence[Digest]) -> MerkleTree:
    """Of names of parts, which somebody else may have made of anything: so they are hashed as leaves first."""
    return MerkleTree([blake3(leaf, key=_LEAF).digest() for leaf in leaves])


class MerkleTree:
    """All levels over hashed leaves, `fan` nodes under each: for whoever shows more than one of them."""

    def __init__(self, hashed: list[bytes], fan: int = 2) -> None:
        assert hashed
        self.levels, self.fan = [hashed], fan
        while len(self.levels[-1]) > 1:
            self.levels.append(_up(self.levels[-1], fan))
        self.root = _sealed(self.levels[-1][0], len(hashed))

    def path(self, index: int) -> tuple[Digest, ...]:
        assert 0 <= index < len(self.levels[0])
        path: list[Digest] = []
        for level in self.levels[:-1]:
            first = index - index % self.fan
            beside = level[first:index] + level[index + 1 : first + self.fan]
            path += map(Digest, beside)
            index //= self.fan
        return tuple(path)


def merkle_top(hashed: bytes, index: int, count: int, path: tuple[Digest, ...], fan: int = 2) -> Digest | None:
    """The root over which this leaf stands at `index` of `count`; None if no path of this length leads there.

    Never raises on a stranger's path.
    """
    if not 0 <= index < count:
        return None
    node, width, at = hashed, count, 0
    while width > 1:
        before, together = index % fan, min(fan, width - index + index % fan)
        beside = path[at : at + together - 1]
        if len(beside) < together - 1 or any(len(sibling) != DIGEST_BYTES for sibling in beside):
            return None  # one as long as two would move the leaf to another place
        (node,) = _up([*beside[:before], node, *beside[before:]], fan)
        at, index, width = at + together - 1, index // fan, -(-width // fan)
    return None if at < len(path) else _sealed(node, count)


def merkle_holds(root: Digest, leaf: Digest, index: int, count: int, path: tuple[Digest, ...]) -> bool:
    """True if this part stands at `index` of the `count` under `root`. Never raises on a stranger's path."""
    return merkle_top(blake3(leaf, key=_LEAF).digest(), index, count, path) == root


def _up(level: list[bytes], fan: int) -> list[bytes]:
    """A node that stands alone moves up as it is."""
    nodes = [blake3(b"".join(level[at : at + fan]), key=_NODE).digest() for at in range(0, len(level), fan)]
    return [*nodes[:-1], level[-1]] if len(level) % fan == 1 else nodes


def _sealed(top: bytes, count: int) -> Digest:
    return Digest(blake3(top + count.to_bytes(8, "big"), key=_NODE).digest())
