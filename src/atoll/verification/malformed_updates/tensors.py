"""Evidence of malformed rows on real bytes: the owner shows it, and other members judge it.

A row is malformed if the run's own codec cannot decode the number of values that the round's plan gives the part.
If wires have leaves, one leaf is decoded: every codec that can be cut decodes its leaves one by one. If wires have
no leaves, the whole wire is decoded, if it is small.
Invariants:
- An honest encoder's row is never called malformed, on any machine and in any version.
- The same bytes and vertices have the same judgment everywhere. So no row is judged if its decoder needs more than
  vertices hold, or belongs to a library that may read it in one version only.
Not responsible for: sending.
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
    malformed_row_bytes,
    malformed_row_from_bytes,
)
from atoll.verification.sum_check.tensors import FAN, LeafLayout
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import Commitment, SignedStatement

UNJUDGED = "no member is held to rows in this codec: whether they can be read does not follow from vertices alone"


def judged_by(up: str) -> Codec | None:
    """The codec of this name, if the bytes alone decide whether it can decode them; else None.

    `delta`, `lowrank`, `randk` and `changed` depend on a state or a layout: a broken disk would make an honest
    member a liar. Compressors belong to a library, and its versions may differ in what they read.
    """
    if any(stage.partition(":")[0] == "changed" for stage in up.split("+")):
        return None
    try:
        codec = codec_named(up)
    except ValueError:  # a codec that needs more than its name
        return None
    return codec if codec.same_everywhere else None


@dataclass(frozen=True)
class ExpectedRow:
    """The form of a part's row, by vertices alone."""

    round: int
    parts: int
    values: int  # number of values of the part
    codec: Codec
    cut: LeafLayout | None  # None: wires have no leaves

    def flaw(self, wire: Buffer, values: int) -> str:
        """Why it is no wire of this many values; empty if it is one."""
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
    """The form of a row of this part with this many values. PeerFault if the round had no such part."""
    bounds = part_bounds(values, shares)
    if part >= len(bounds):
        raise PeerFault("", f"the round had no part {part}")
    return ExpectedRow(round, len(bounds), bounds[part][1] - bounds[part][0], codec, cut)


DueOf = Callable[[int], ExpectedRow]  # form of a part's row; PeerFault: no such part, or its rows are not judged


def show(
    wire: Buffer, statement: SignedStatement, part: int, path: tuple[Digest, ...], due: ExpectedRow
) -> tuple[str, bytes]:
    """(flaw of this committed row, evidence); no flaw: it can be decoded; no evidence: it would be too large.

    PeerFault if its author did not commit to these bytes: local memory changed them since they came. For evidence
    that is too large to show, no other member would see that.
    """
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
            return _miscounted(leaves, expected), malformed_row_bytes(row)
        each = enumerate(due.cut.leaves(memoryview(wire).cast("B")))
        flaws = ((due.flaw(leaf, due.values_in(due.cut, index)), index, leaf) for index, leaf in each)
        flaw, index, leaf = next((found for found in flaws if found[0]), ("", 0, b""))
        leaf_path = tree.path(index)
    if not flaw or len(leaf) > ROW_SHOWN_MAX:
        return flaw, b""
    row = MalformedRowEvidence(statement, part, path, leaves, index, digest(leaf), leaf_path, bytes(leaf))
    return flaw, malformed_row_bytes(row)


def judge(shown: Buffer, due_of: DueOf) -> str:
    """Why the shown row cannot be decoded; empty if it can.

    PeerFault if it does not lead to the signed root: that proves nothing against the signer. The caller checks the
    signature.
    """
    row = malformed_row_from_bytes(shown)
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
