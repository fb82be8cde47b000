"""Cache of wire digests and their Merkle trees, for runs with sum checks.

Invariants:
- An owner that opens a result hashes no row again while the cache holds the row's tree.
- At most `LEAVES_MAX` leaves are held, and no tree of another member's result.
Thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from atoll.base.ids import Digest
from atoll.crypto.digest import Buffer, MerkleTree, digest
from atoll.peer.tasks import BuildSumOpening
from atoll.training.codec import Codec, codec_named
from atoll.verification.sum_check.tensors import LeafLayout, OpenedRow, WireLeaves, lay_out
from atoll.wire.messages.round import PartResponse, PartResult, RowContribution, RowResponse
from atoll.wire.opening import SumOpening

Encode = Callable[[Codec], Buffer]
"""Encodes a wire with this codec, which exposes it as it grows."""

LEAVES_MAX = 2**17  # leaves of rows that can be opened: 2 GiB in fp32, 20 MB of digests


class WireDigestCache:
    def __init__(self, up: str, down: str) -> None:
        self.up, self.down = LeafLayout(codec_named(up)), LeafLayout(codec_named(down))
        self._trees: dict[Digest, MerkleTree] = {}  # oldest first
        self._leaves = 0  # number of leaves in all trees
        self._changing = Lock()

    def of_arrived(self, message: object, payload: Buffer) -> Digest:
        match message:
            case RowContribution() | RowResponse():
                return self.of_row(payload)
            case PartResult():
                return self.down.name(payload)
            case PartResponse(digest=wanted):  # a vertex body is named by its bytes
                plain = digest(payload)
                return plain if plain == wanted else self.down.name(payload)
            case _:
                return digest(payload)

    def of_row(self, wire: Buffer) -> Digest:
        return self._kept(self.up.tree(wire))

    def of_mine(self, codec: Codec, encode: Encode) -> tuple[Buffer, Digest]:
        """Encode a row or a result and hash it leaf by leaf, while the processor's cache holds it."""
        leaves = WireLeaves(LeafLayout(codec))
        wire = encode(codec.with_hashing(leaves.update))
        return wire, self._kept(leaves.tree())

    def of_my_answer(self, wire: Buffer) -> Digest:
        return self._kept(self.down.tree(wire))

    def lay_out(self, work: BuildSumOpening) -> list[SumOpening]:
        rows = [
            OpenedRow(row.payload.data, path, self._trees.get(row.payload.digest))
            for row, path in zip(work.rows, work.paths, strict=True)
        ]
        answer = OpenedRow(work.answer.data, (), self._trees.get(work.answer.digest))
        return lay_out(rows, answer, work.others, work.draws, self.up, self.down)

    def _kept(self, tree: MerkleTree) -> Digest:
        with self._changing:
            if tree.root not in self._trees:
                self._trees[tree.root] = tree
                self._leaves += len(tree.levels[0])
            while self._leaves > LEAVES_MAX:
                self._leaves -= len(self._trees.pop(next(iter(self._trees))).levels[0])
        return tree.root
