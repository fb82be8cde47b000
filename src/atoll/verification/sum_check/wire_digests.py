"""What wires are called where answers are opened, and the trees behind those names.

Promises: whoever lays an answer open hashes nothing a second time, as long as the trees of its rows are here. Any
thread may ask. Never keeps the tree of another member's answer, nor more than `LEAVES_MAX` leaves of all.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from atoll.base.ids import Digest
from atoll.crypto.digest import Buffer, MerkleTree, digest
from atoll.peer.tasks import BuildOpening
from atoll.training.codec import Codec, codec_named
from atoll.verification.sum_check.tensors import LeafLayout, OpenedRow, WireLeaves, lay_out
from atoll.wire.messages.round import PartResponse, PartResult, RowContribution, RowResponse
from atoll.wire.opening import SumOpening

Encode = Callable[[Codec], Buffer]
"""Makes a wire by this codec, which shows it as it grows."""

LEAVES_MAX = 2**17  # of rows that may be shown: of 2 GiB in fp32, which makes 20 MB of digests


class WireDigestCache:
    def __init__(self, up: str, down: str) -> None:
        self.up, self.down = LeafLayout(codec_named(up)), LeafLayout(codec_named(down))
        self._trees: dict[Digest, MerkleTree] = {}  # oldest first
        self._leaves = 0  # of all of them
        self._changing = Lock()

    def of_arrived(self, message: object, payload: Buffer) -> Digest:
        match message:
            case RowContribution() | RowResponse():
                return self.of_row(payload)
            case PartResult():
                return self.down.name(payload)
            case PartResponse(digest=wanted):  # a body is named by its bytes
                plain = digest(payload)
                return plain if plain == wanted else self.down.name(payload)
            case _:
                return digest(payload)

    def of_row(self, wire: Buffer) -> Digest:
        return self._kept(self.up.tree(wire))

    def of_mine(self, codec: Codec, encode: Encode) -> tuple[Buffer, Digest]:
        """A row or an answer that is encoded now, hashed as far as a core's cache still holds it."""
        leaves = WireLeaves(LeafLayout(codec))
        wire = encode(codec.showing(leaves.update))
        return wire, self._kept(leaves.tree())

    def of_my_answer(self, wire: Buffer) -> Digest:
        return self._kept(self.down.tree(wire))

    def lay_out(self, work: BuildOpening) -> list[SumOpening]:
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
