"""BLAKE3 digests, blob ids and Merkle trees with inclusion proofs.

A blob is named by the digest of its manifest (size and the digest of every chunk). Each chunk can thus be verified
alone while the blob is fetched from several peers. Merkle trees cover the parts of an update, or ranges of a wire.
Inner nodes and leaves are hashed under different keys, so an inner node can never pass for a leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    """Size of a blob and the digest of each chunk of `BLOB_CHUNK` bytes, in order."""

    size_bytes: int
    chunks: tuple[Digest, ...]

    def check(self) -> None:
        """Raise ValueError if size and number of chunks do not match, or the size is above BLOB_MAX."""
        if not 0 <= self.size_bytes <= BLOB_MAX:
            raise ValueError(f"blob size of {self.size_bytes} bytes is outside 0…{BLOB_MAX}")
        expected = -(-self.size_bytes // BLOB_CHUNK)
        if len(self.chunks) != expected or any(len(c) != DIGEST_BYTES for c in self.chunks):
            raise ValueError(f"blob of {self.size_bytes} bytes has {expected} chunks, not {len(self.chunks)}")

    def chunk_bytes(self, index: int) -> int:
        """Size of chunk `index` in bytes; only the last one may be shorter than BLOB_CHUNK."""
        assert 0 <= index < len(self.chunks)
        return min(BLOB_CHUNK, self.size_bytes - index * BLOB_CHUNK)


def manifest_of(*pieces: Buffer) -> BlobManifest:
    """Manifest of the concatenated pieces, with chunk borders independent of piece borders."""
    return manifest_of_spans(pieces)


def manifest_of_spans(pieces: Iterable[Buffer]) -> BlobManifest:
    """`manifest_of` pieces that are made one by one."""
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
    """Root over the leaves in order; an odd node moves up unchanged. The root covers the number of leaves."""
    return merkle_tree(leaves).root


def merkle_path(leaves: tuple[Digest, ...], index: int) -> tuple[Digest, ...]:
    """Siblings from leaf `index` to the root, at most log2(len(leaves)) rounded up."""
    return merkle_tree(leaves).path(index)


def merkle_tree(leaves: Sequence[Digest]) -> MerkleTree:
    """Merkle tree over part digests, hashed as leaves first since another peer may have chosen them."""
    return MerkleTree([blake3(leaf, key=_LEAF).digest() for leaf in leaves])


class MerkleTree:
    """All levels over hashed leaves, with `fan` children per node, for several proofs from one tree."""

    def __init__(self, hashed: list[bytes], fan: int = 2) -> None:
        assert hashed
        self.levels, self.fan = [hashed], fan
        while len(self.levels[-1]) > 1:
            self.levels.append(_next_level(self.levels[-1], fan))
        self.root = _root_of(self.levels[-1][0], len(hashed))

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
    """Root of a tree with this leaf at `index` of `count`, by its path; None if the path has a wrong length.

    Never raises on an untrusted path.
    """
    if not 0 <= index < count:
        return None
    node, width, at = hashed, count, 0
    while width > 1:
        before, together = index % fan, min(fan, width - index + index % fan)
        beside = path[at : at + together - 1]
        if len(beside) < together - 1 or any(len(sibling) != DIGEST_BYTES for sibling in beside):
            return None  # a sibling as long as two would move the leaf to another index
        (node,) = _next_level([*beside[:before], node, *beside[before:]], fan)
        at, index, width = at + together - 1, index // fan, -(-width // fan)
    return None if at < len(path) else _root_of(node, count)


def merkle_holds(root: Digest, leaf: Digest, index: int, count: int, path: tuple[Digest, ...]) -> bool:
    """Whether this part is at `index` of `count` under `root`. Never raises on an untrusted path."""
    return merkle_top(blake3(leaf, key=_LEAF).digest(), index, count, path) == root


def _next_level(level: list[bytes], fan: int) -> list[bytes]:
    """Next level of nodes; a single last node moves up unchanged."""
    nodes = [blake3(b"".join(level[at : at + fan]), key=_NODE).digest() for at in range(0, len(level), fan)]
    return [*nodes[:-1], level[-1]] if len(level) % fan == 1 else nodes


def _root_of(top: bytes, count: int) -> Digest:
    return Digest(blake3(top + count.to_bytes(8, "big"), key=_NODE).digest())
