"""Rows that cannot be read: what shows it to others, and what whoever is shown it makes of it.

Decoding is the judge, by the run's own codec and for the number of values that the round's plan gives the part: of
one leaf where wires have leaves, since every codec that can be cut decodes its leaves one by one, and of the whole
wire where they have none and it is small.
Promises: what an honest encoder made is never called unreadable, by whatever machine or version; the same bytes and
vertices are judged alike everywhere. So a row in a codec whose decoder knows more than vertices say, or that a
library may read in one version and not in another, is never held against anybody. Never asks, never sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest
from atoll.base.limits import ROW_SHOWN_MAX
from atoll.crypto.digest import Buffer, digest, merkle_holds, merkle_top
from atoll.training.codec import Codec, codec_named
from atoll.training.recipe.update import part_bounds
from atoll.verification.malformed_updates.messages import (
    MalformedRowEvidence,
    unreadable_bytes,
    unreadable_from_bytes,
)
from atoll.verification.sum_check.tensors import FAN, LeafLayout
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import Commitment, SignedStatement

UNJUDGED = "nobody is held to rows in this codec: whether they can be read does not follow from vertices alone"


def judged_by(up: str) -> Codec | None:
    """The codec of this name, if its bytes alone say whether they can be read; else None.

    `delta`, `lowrank`, `randk` and `changed` go by what a state or a layout says, so an honest member whose disk
    went wrong would be a liar; compressors are a library's, and versions may differ in what they read.
    """
    if any(stage.partition(":")[0] == "changed" for stage in up.split("+")):
        return None
    try:
        codec = codec_named(up)
    except ValueError:  # it needs to know more than its name
        return None
    return codec if codec.same_everywhere else None


@dataclass(frozen=True)
class ExpectedRow:
    """What a row of a part has to be, by vertices alone."""

    round: int
    parts: int
    values: int  # of the part
    codec: Codec
    cut: LeafLayout | None  # None: wires have no leaves

    def flaw(self, wire: Buffer, values: int) -> str:
        """Why it is no wire of so many values; nothing if it is."""
        try:
            self.codec.open_wire(wire, values)
        except PeerFault as fault:
            return fault.what or "it does not decode"
        return ""

    def leaves(self, cut: LeafLayout) -> int:
        return cut.count(self.codec.wire_bytes(self.values))

    def values_in(self, cut: LeafLayout, leaf: int) -> int:
        return min(cut.leaf_values, self.values - leaf * cut.leaf_values)


def due_in(
    round: int, values: int, shares: Sequence[int], part: int, codec: Codec, cut: LeafLayout | None
) -> ExpectedRow:
    """What a row of this part of so many values has to be. PeerFault where the round had no such part."""
    bounds = part_bounds(values, shares)
    if part >= len(bounds):
        raise PeerFault("", f"the round had no part {part}")
    return ExpectedRow(round, len(bounds), bounds[part][1] - bounds[part][0], codec, cut)


DueOf = Callable[[int], ExpectedRow]  # of a part. PeerFault where the round had none, or nobody is held to its rows


def show(
    wire: Buffer, statement: SignedStatement, part: int, path: tuple[Digest, ...], due: ExpectedRow
) -> tuple[str, bytes]:
    """(why this committed row cannot be read, what shows it to others); the first is empty if it can be, the second
    where it would be too large to show. PeerFault if these are not the bytes that its author committed to: my own
    memory changed them since they came, and for what is too large to show nobody else would see that."""
    commit = decode_statement(statement.body, statement.signer)
    tree = due.cut.tree(wire) if due.cut is not None else None
    name = tree.root if tree is not None else digest(wire)
    if not isinstance(commit, Commitment) or not merkle_holds(commit.root, name, part, commit.parts, path):
        raise PeerFault("", "the row here is not what its author committed to")
    if due.cut is None or tree is None:
        flaw, leaves, index, leaf, leaf_path = due.flaw(wire, due.values), 1, 0, wire, ()
    else:
        leaves, expected = len(tree.levels[0]), due.leaves(due.cut)
        if leaves != expected:
            name = digest(due.cut.leaf(wire, 0))
            row = MalformedRowEvidence(statement, part, path, leaves, 0, name, tree.path(0))
            return _miscounted(leaves, expected), unreadable_bytes(row)
        each = enumerate(due.cut.leaves(memoryview(wire).cast("B")))
        flaws = ((due.flaw(leaf, due.values_in(due.cut, index)), index, leaf) for index, leaf in each)
        flaw, index, leaf = next((found for found in flaws if found[0]), ("", 0, b""))
        leaf_path = tree.path(index)
    if not flaw or len(leaf) > ROW_SHOWN_MAX:
        return flaw, b""
    row = MalformedRowEvidence(statement, part, path, leaves, index, digest(leaf), leaf_path, bytes(leaf))
    return flaw, unreadable_bytes(row)


def judge(shown: Buffer, due_of: DueOf) -> str:
    """Why what is shown is of a row that cannot be read; nothing if it can be.

    PeerFault if it does not lead to what was signed: that says nothing of whoever signed it. The signature is the
    caller's to check.
    """
    row = unreadable_from_bytes(shown)
    commit, due = decode_statement(row.statement.body, row.statement.signer), due_of(row.part)
    if not isinstance(commit, Commitment) or (commit.round, commit.parts) != (due.round, due.parts):
        raise PeerFault("", "what was shown is under no commitment to an update of that round")
    if due.cut is None:
        name = row.name if (row.leaves, row.index, row.leaf_path) == (1, 0, ()) else None
    else:
        name = merkle_top(row.name, row.index, row.leaves, row.leaf_path, FAN)
    if name is None or not merkle_holds(commit.root, name, row.part, commit.parts, row.part_path):
        raise PeerFault("", "what was shown of a row is not what its author committed to")
    if due.cut is not None and row.leaves != (expected := due.leaves(due.cut)):
        return _miscounted(row.leaves, expected)
    if row.leaf is None:
        raise PeerFault("", "the bytes are lacking that would have to be read")
    return due.flaw(row.leaf, due.values if due.cut is None else due.values_in(due.cut, row.index))


def _miscounted(leaves: int, expected: int) -> str:
    return f"it is {leaves} blocks long, a row of this part {expected}"
