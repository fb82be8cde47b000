"""Opening of a few blocks of a part: Merkle leaves of wires, the shown rows, and the check of the sum.

Where results are opened, a wire is named by the root of a Merkle tree instead of the digest of its bytes. The
leaves are stretches of 4096 values, each encoded as a wire of these values alone. Commitments name wires, and
results hold one, so both can be opened block by block. Every codec that can be cut rounds block by block, so the
rows' leaves alone make the result's leaf, to the bit, on any machine.

Invariants:
- Every holder of the vertex judges alike.
- An opening that does not lead to signed data is never held against a peer as a lie.
Not responsible for: requests, messages, draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from blake3 import blake3
from msgspec import UNSET

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.crypto.digest import Buffer, MerkleTree, digest, merkle_holds, merkle_top
from atoll.training.codec import Codec, codec_named
from atoll.training.exchange.combine import combine
from atoll.training.exchange.statistic import RowCombinationRule
from atoll.training.recipe.recipes import Recipe
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import Commitment, OwnerResult, SignedStatement
from atoll.wire.opening import SumOpening, SumOpeningBlock, opening_from_bytes, rows_digest

LEAF_VALUES = 4096  # fp32: 16 KiB; at two bits a path of 15 digests is half as long as its leaf
FAN = 4  # children of a node: a third of the calls of two; eight would make paths half as long again

Verdict: TypeAlias = Literal["accepted", "mismatch", "withheld"]
Finding: TypeAlias = tuple[Verdict, str]


def opening_problem(up: str, down: str) -> str | None:
    """Why results of a run with these codecs cannot be opened by blocks; None if they can."""
    for way, name in (("up", up), ("down", down)):
        try:
            codec = codec_named(name)
        except ValueError:  # it needs more than its name, so it is no plain codec
            codec = None
        if codec is None or not codec.sections:
            return f"sync.{way} = {name!r} has no wire that can be cut into blocks of values"
    return None


def unopened(recipe: Recipe) -> str | None:
    """`opening_problem` for a run with this recipe."""
    if recipe.schedule.closing:
        return "its last round is a closing average, in codecs of its own"
    return opening_problem(recipe.coding.up, recipe.coding.down)


@dataclass(frozen=True)
class LeafLayout:
    """Wires of one codec, cut into leaves."""

    codec: Codec
    leaf_values: int = LEAF_VALUES

    def __post_init__(self) -> None:
        assert self.codec.sections and all(self.leaf_values % values == 0 for values, _ in self.codec.sections)

    @property
    def leaf_bytes(self) -> int:
        return self.codec.wire_bytes(self.leaf_values)

    def count(self, size_bytes: int) -> int:
        """Number of leaves of a wire of this length; an empty wire has one."""
        return max(1, -(-size_bytes // self.leaf_bytes))

    def leaf(self, wire: Buffer, index: int) -> Buffer:
        """One stretch of values as a wire of its own. A wire that no values make is one leaf."""
        return self._leaf(memoryview(wire).cast("B"), self._lengths(len(wire)), index)

    def tree(self, wire: Buffer) -> MerkleTree:
        leaves = WireLeaves(self)
        leaves.update(wire)
        return leaves.tree()

    def name(self, wire: Buffer) -> Digest:
        """Digest of this wire in commitments and results."""
        return self.tree(wire).root

    def leaves(self, view: memoryview) -> list[memoryview] | list[bytes]:
        """All leaves; a hundred megabytes have six thousand, and hashing one takes three microseconds."""
        lengths, sections, at = self._lengths(len(view)), list[list[memoryview]](), 0
        for (values, size), length in zip(self.codec.sections, lengths, strict=bool(lengths)):
            section, stride = view[at : at + length], self.leaf_values // values * size
            sections.append([section[lo : lo + stride] for lo in range(0, length, stride)])
            at += length
        if len(sections) > 1:
            return [b"".join(pieces) for pieces in zip(*sections, strict=True)]
        return sections[0] if sections else [view]

    def _leaf(self, view: memoryview, lengths: Sequence[int], index: int) -> Buffer:
        if not lengths:
            return view
        pieces, at = list[memoryview](), 0
        for (values, size), length in zip(self.codec.sections, lengths, strict=True):
            stride = self.leaf_values // values * size
            pieces.append(view[at + index * stride : at + min((index + 1) * stride, length)])
            at += length
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _lengths(self, size_bytes: int) -> list[int]:
        """Lengths of the sections of a wire of this length; empty if no values make one.

        Different numbers of values may fit, if values share a byte: their sections have the same lengths.
        """
        leaf_bytes = self.leaf_bytes
        full = max(0, -(-size_bytes // leaf_bytes) - 1)
        rest, low, high = size_bytes - full * leaf_bytes, 0, self.leaf_values
        if rest == leaf_bytes:  # true of every slab except the last
            low = high
        while low < high:  # search for the fewest values in the last leaf
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.codec.wire_bytes(middle) < rest else (low, middle)
        if low == 0 or self.codec.wire_bytes(low) != rest:
            return []
        return [full * (self.leaf_values // v) * size + -(-low // v) * size for v, size in self.codec.sections]


class WireLeaves:
    """The Merkle tree of one wire that arrives in stretches, in order, each while a core's cache holds it.

    Every stretch except the last has whole leaves; a wire with several sections is one stretch.
    """

    def __init__(self, cut: LeafLayout) -> None:
        self._cut, self._hashed = cut, list[bytes]()

    def update(self, stretch: Buffer) -> None:
        self._hashed += [blake3(leaf).digest() for leaf in self._cut.leaves(memoryview(stretch).cast("B"))]

    def tree(self) -> MerkleTree:
        return MerkleTree(self._hashed or [digest(b"")], FAN)


class OpenedRow(NamedTuple):
    """A row that an owner combined or (without a path) the result."""

    wire: Buffer
    path: tuple[Digest, ...]  # from its name to the root that its author committed to
    tree: MerkleTree | None = None  # over its leaves, if it was kept


def lay_out(
    rows: Sequence[OpenedRow],
    answer: OpenedRow,
    others: tuple[SignedStatement, ...],
    draws: Sequence[Sequence[int]],
    up: LeafLayout,
    down: LeafLayout,
) -> list[SumOpening]:
    """Openings of a part by its owner, one for each draw of blocks. Wires without a tree are hashed again."""
    answer_tree, trees = answer.tree or down.tree(answer.wire), [row.tree or up.tree(row.wire) for row in rows]
    paths = tuple(row.path for row in rows)

    def block(index: int) -> SumOpeningBlock:
        return SumOpeningBlock(
            index,
            bytes(down.leaf(answer.wire, index)),
            answer_tree.path(index),
            tuple(bytes(up.leaf(row.wire, index)) for row in rows),
            tuple(tree.path(index) for tree in trees),
        )

    return [SumOpening(tuple(map(block, draw)), paths, others) for draw in draws]


@dataclass(frozen=True)
class PartResultClaim:
    """A part according to the vertex: contributors of the result, and how it was made."""

    answered: OwnerResult
    commits: tuple[SignedStatement, ...]  # of its contributors, as in the vertex
    values: int  # number of values in the part
    blocks: tuple[int, ...]  # drawn blocks
    statistic: RowCombinationRule


def judge(
    claimed: PartResultClaim, shown: Buffer, up: LeafLayout, down: LeafLayout
) -> tuple[Finding, tuple[SignedStatement, ...]]:
    """Judge whether the rows make the result in the drawn blocks. Also returns commitments that differ from the
    vertex's.

    "mismatch": the opening leads to signed data of the owner and the contributors, but makes other bytes. That is a
    lie, no matter which peer shows it, if the authors signed these other commitments; the caller checks that.
    "withheld": it does not lead there. That makes no peer a liar.
    """
    try:
        opening = opening_from_bytes(shown)
        commits = _commits(claimed, opening)
        _check_paths(claimed, opening, commits, down)
    except PeerFault as fault:
        return ("withheld", fault.what), ()
    answered = claimed.answered
    if answered.size_bytes != down.codec.wire_bytes(claimed.values):
        return ("mismatch", f"its answer has {answered.size_bytes} bytes"), opening.others
    for block in opening.blocks:
        made = _made(claimed, block, commits, up, down)
        if made is None:
            return ("mismatch", f"block {block.index}: a row that it lists has none"), opening.others
        if made != block.answer:
            return ("mismatch", f"block {block.index} is not what its rows make"), opening.others
    return ("accepted", ""), opening.others


def _commits(claimed: PartResultClaim, opening: SumOpening) -> list[Commitment]:
    """Commitments that the owner claims to have combined, by contributor."""
    answered, known = claimed.answered, dict[PeerId, Commitment]()
    for signed in (*claimed.commits, *opening.others):  # those from the owner come last, and count
        commit = decode_statement(signed.body, signed.signer)
        if not isinstance(commit, Commitment) or (commit.round, commit.attempt) != (
            answered.round,
            answered.attempt,
        ):
            raise PeerFault("", "a commitment is for something else")
        known[signed.signer] = commit
    if known.keys() != set(answered.contributors):
        raise PeerFault("", "commitments are not exactly those of the contributors")
    commits = [known[peer] for peer in answered.contributors]
    if answered.made_of is UNSET or rows_digest(commits) != answered.made_of:
        raise PeerFault("", "it was made of other commitments than are shown")
    return commits


def _check_paths(
    claimed: PartResultClaim, opening: SumOpening, commits: list[Commitment], down: LeafLayout
) -> None:
    answered, rows = claimed.answered, len(commits)
    if tuple(block.index for block in opening.blocks) != claimed.blocks:
        raise PeerFault("", "other blocks are shown than were drawn")
    if len(opening.part_paths) != rows or any(
        len(block.rows) != rows or len(block.row_paths) != rows for block in opening.blocks
    ):
        raise PeerFault("", "not every row is shown")
    count = down.count(answered.size_bytes)
    for block in opening.blocks:
        at = block.index
        if merkle_top(digest(block.answer), at, count, block.answer_path, FAN) != answered.digest:
            raise PeerFault("", f"block {at} of the answer is not the one that was signed")
        each = zip(answered.contributors, commits, block.rows, block.row_paths, opening.part_paths, strict=True)
        for peer, commit, row, path, part_path in each:
            name = merkle_top(digest(row), at, count, path, FAN)
            if name is None or not merkle_holds(commit.root, name, answered.part, commit.parts, part_path):
                raise PeerFault("", f"block {at} of {peer}'s row is not what it committed to")


def _made(
    claimed: PartResultClaim, block: SumOpeningBlock, commits: list[Commitment], up: LeafLayout, down: LeafLayout
) -> bytes | None:
    """Bytes of the result's block, by the arithmetic of the whole; None if a row does not decode."""
    values = min(down.leaf_values, claimed.values - block.index * down.leaf_values)
    rows = [(commit.weight, row) for commit, row in zip(commits, block.rows, strict=True)]
    done = combine(rows, values, up.codec, down.codec, claimed.statistic)
    return None if done.wire is None or done.faults else bytes(done.wire)
