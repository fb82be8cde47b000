"""What wires are called where answers are opened, and the trees behind those names.

Promises: whoever lays an answer open hashes nothing a second time, as long as the trees of its rows are here. Any
thread may ask. Never keeps the tree of another member's answer, nor more than `LEAVES_MAX` leaves of all.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from atoll.base.ids import Digest
from atoll.crypto.digest import Buffer, MerkleTree, digest
from atoll.peer.tasks import LayOpen
from atoll.training.codec import Codec, codec_named
from atoll.verification.sum_check.tensors import Cut, Leaves, Shown, lay_out
from atoll.wire.messages.round import Answer, Contribution, PartBytes, RowBytes
from atoll.wire.opening import Opening

Encode = Callable[[Codec], Buffer]
"""Makes a wire by this codec, which shows it as it grows."""

LEAVES_MAX = 2**17  # of rows that may be shown: of 2 GiB in fp32, which makes 20 MB of digests


class Names:
    def __init__(self, up: str, down: str) -> None:
        self.up, self.down = Cut(codec_named(up)), Cut(codec_named(down))
        self._trees: dict[Digest, MerkleTree] = {}  # oldest first
        self._leaves = 0  # of all of them
        self._changing = Lock()

    def of_arrived(self, message: object, payload: Buffer) -> Digest:
        match message:
            case Contribution() | RowBytes():
                return self.of_row(payload)
            case Answer():
                return self.down.name(payload)
            case PartBytes(digest=wanted):  # a body is named by its bytes
                plain = digest(payload)
                return plain if plain == wanted else self.down.name(payload)
            case _:
                return digest(payload)

    def of_row(self, wire: Buffer) -> Digest:
        return self._kept(self.up.tree(wire))

    def of_mine(self, codec: Codec, encode: Encode) -> tuple[Buffer, Digest]:
        """A row or an answer that is encoded now, hashed as far as a core's cache still holds it."""
        leaves = Leaves(Cut(codec))
        wire = encode(codec.showing(leaves.update))
        return wire, self._kept(leaves.tree())

    def of_my_answer(self, wire: Buffer) -> Digest:
        return self._kept(self.down.tree(wire))

    def lay_out(self, work: LayOpen) -> list[Opening]:
        rows = [
            Shown(row.payload.data, path, self._trees.get(row.payload.digest))
            for row, path in zip(work.rows, work.paths, strict=True)
        ]
        answer = Shown(work.answer.data, (), self._trees.get(work.answer.digest))
        return lay_out(rows, answer, work.others, work.draws, self.up, self.down)

    def _kept(self, tree: MerkleTree) -> Digest:
        with self._changing:
            if tree.root not in self._trees:
                self._trees[tree.root] = tree
                self._leaves += len(tree.levels[0])
            while self._leaves > LEAVES_MAX:
                self._leaves -= len(self._trees.pop(next(iter(self._trees))).levels[0])
        return tree.root
