"""Blocks of a part, opened by themselves: the same bits as the whole, and nothing that can be shown instead."""

from __future__ import annotations

import os
import random

import pytest
import torch
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.crypto.digest import MerkleTree, digest, merkle_path, merkle_root, merkle_top, merkle_tree
from atoll.training.codec import CODECS
from atoll.training.exchange.combine import combine
from atoll.training.exchange.statistic import RowCombinationRule
from atoll.verification.sum_check.policy import SumSpotCheck as Drawn
from atoll.verification.sum_check.tensors import (
    LeafLayout,
    OpenedRow,
    PartResultClaim,
    judge,
    lay_out,
    opening_problem,
)
from atoll.wire.codec import encode
from atoll.wire.messages.statements import Commitment, OwnerResult, SignedStatement
from atoll.wire.opening import SumOpening, opening_bytes, opening_from_bytes, rows_digest
from atoll.wire.weights import packed_mixtures

FUZZ = int(os.environ.get("ATOLL_FUZZ", "1000"))
LEAF = 4096
NAMES = tuple(PeerId(name) for name in ("ada", "bob", "cid", "dan"))
WEIGHTS = (35, 1, 70, 0)


class Part:
    """Part 1 of three, of four contributors: `answer` is what the owner signs, whatever its rows make."""

    def __init__(self, up: str, down: str, n: int, statistic: RowCombinationRule = RowCombinationRule()) -> None:
        self.up, self.down, self.n, self.statistic = LeafLayout(CODECS[up]), LeafLayout(CODECS[down]), n, statistic
        generator = torch.Generator().manual_seed(n)
        self.wires = [bytes(CODECS[up].encode(torch.randn(n, generator=generator) * 10.0**-k)) for k in range(4)]
        leaves = [(ZERO_DIGEST, self.up.name(wire), ZERO_DIGEST) for wire in self.wires]
        self.rows = [OpenedRow(wire, merkle_path(names, 1)) for wire, names in zip(self.wires, leaves, strict=True)]
        each = zip(leaves, WEIGHTS, strict=True)
        self.commits = [Commitment(7, 0, merkle_root(names), 3, 5, w, 1.0, 0.1, w) for names, w in each]
        rows = list(zip(WEIGHTS, self.wires, strict=True))
        done = combine(rows, n, CODECS[up], CODECS[down], statistic)
        assert done.wire is not None
        self.answer = bytes(done.wire)

    def claimed(self, *blocks: int) -> PartResultClaim:
        made_of, size = rows_digest(self.commits), len(self.answer)
        answered = OwnerResult(7, 0, 1, 0, self.down.name(self.answer), size, NAMES, made_of=made_of)
        commits = tuple(SignedStatement(p, encode(c), b"") for p, c in zip(NAMES, self.commits, strict=True))
        return PartResultClaim(answered, commits, self.n, blocks, self.statistic)

    def shown(self, *blocks: int) -> SumOpening:
        return lay_out(self.rows, OpenedRow(self.answer, ()), (), [blocks], self.up, self.down)[0]

    def found(self, *blocks: int, shown: SumOpening | None = None) -> tuple[str, str]:
        data = opening_bytes(shown or self.shown(*blocks))
        return judge(self.claimed(*blocks), data, self.up, self.down)[0]


@pytest.mark.parametrize("n", [1, 5, 255, 4095, 4096, 4097, 3 * LEAF + 771])
@pytest.mark.parametrize("name", sorted(CODECS))
def test_leaves_are_wires_of_their_values_alone(name: str, n: int):
    """Every leaf decodes to its stretch of the vector, and together they are all bytes of the wire."""
    cut, codec = LeafLayout(CODECS[name]), CODECS[name]
    wire = bytes(codec.encode(torch.randn(n, generator=torch.Generator().manual_seed(n))))
    whole, leaves = codec.decode(wire, n), cut.count(len(wire))
    assert leaves == -(-n // LEAF)
    for index in range(leaves):
        stretch = whole[index * LEAF : (index + 1) * LEAF]
        assert torch.equal(codec.decode(cut.leaf(wire, index), len(stretch)), stretch)
    assert sum(len(cut.leaf(wire, index)) for index in range(leaves)) == len(wire)


def test_a_wire_that_no_values_make_has_a_name_too():
    cut = LeafLayout(CODECS["int8"])
    for size in (0, 1, 2, 4128 + 2, 2 * 4128 + 1):
        assert len(cut.tree(bytes(size)).levels[0]) == 1


@pytest.mark.parametrize("down", sorted(CODECS))
@pytest.mark.parametrize("up", ["int8", "2bit", "fp32"])
def test_rows_of_a_block_make_the_block_of_the_answer(up: str, down: str):
    """Mean, order statistics, weights by distance and mixtures; blocks of the middle and the short last one."""
    n = 2 * LEAF + 1027
    sorts = [RowCombinationRule(name, 1) for name in ("median", "trimmed_mean", "meamed")]
    weighed = RowCombinationRule("robust", 1, (0.2, 0.0, 0.7, 0.1))
    mixed = RowCombinationRule("nnm + trimmed_mean", 1, packed_mixtures([(0, 1), (1, 2), (0, 2), ()]))
    for statistic in (RowCombinationRule(), *sorts, weighed, mixed):
        assert Part(up, down, n, statistic).found(0, 1, 2) == ("accepted", "")


def test_one_byte_in_one_block_is_found_where_that_block_is_drawn_and_nowhere_else():
    part = Part("int8", "int8", 3 * LEAF)
    at = len(part.answer) - LEAF - 100  # a level of block 1
    part.answer = part.answer[:at] + bytes([part.answer[at] ^ 1]) + part.answer[at + 1 :]
    assert part.found(0) == part.found(2) == part.found(0, 2) == ("accepted", "")
    assert part.found(1)[0] == part.found(0, 1)[0] == "mismatch"


def test_a_row_that_is_listed_and_not_summed_or_summed_and_not_listed_is_found():
    part = Part("fp32", "fp32", 2 * LEAF)
    rows = list(zip(WEIGHTS, part.wires, strict=True))
    for left in (0, 1):  # 35 and 1 of 106 samples
        fewer = [row for k, row in enumerate(rows) if k != left]
        part.answer = bytes(combine(fewer, part.n, CODECS["fp32"], CODECS["fp32"]).wire or b"")
        assert part.found(0)[0] == "mismatch"
    other = Part("fp32", "fp32", 2 * LEAF)
    claimed = other.claimed(1)
    names, commits = NAMES[1:], claimed.commits[1:]
    answered = replace(claimed.answered, contributors=names, made_of=rows_digest(other.commits[1:]))
    honest = lay_out(other.rows[1:], OpenedRow(other.answer, ()), (), [(1,)], other.up, other.down)[0]
    said, _ = judge(
        PartResultClaim(answered, commits, other.n, (1,), RowCombinationRule()),
        opening_bytes(honest),
        other.up,
        other.down,
    )
    assert said[0] == "mismatch"


def test_a_weight_that_is_not_the_committed_one_is_found():
    part = Part("fp32", "int8", LEAF)
    rows = list(zip((35, 1, 71, 0), part.wires, strict=True))
    part.answer = bytes(combine(rows, part.n, CODECS["fp32"], CODECS["int8"]).wire or b"")
    assert part.found(0)[0] == "mismatch"


def test_what_does_not_lead_to_what_was_signed_proves_nothing():
    """Other bytes, other paths, other blocks, fewer rows: withheld, never a lie, and never accepted."""
    part, blocks = Part("int8", "int8", 3 * LEAF), (0, 2)
    true = part.shown(*blocks)
    first = true.blocks[0]
    row = bytes([first.rows[0][0] ^ 1]) + first.rows[0][1:]
    twisted = [
        replace(first, rows=(row, *first.rows[1:])),
        replace(first, answer=row),
        replace(first, answer_path=()),
        replace(first, answer_path=(*first.answer_path, ZERO_DIGEST)),
        replace(first, row_paths=first.row_paths[::-1]),
        replace(first, rows=first.rows[:-1]),
        replace(first, row_paths=first.row_paths[:-1]),
        replace(first, index=1),
        replace(first, index=-1),
    ]
    shown = [replace(true, blocks=(block, true.blocks[1])) for block in twisted]
    shown += [replace(true, blocks=true.blocks[:1]), replace(true, part_paths=()), replace(true, blocks=())]
    assert {part.found(*blocks, shown=one)[0] for one in shown} == {"withheld"}
    whole = opening_bytes(replace(true, others=(SignedStatement(PeerId("eve"), b"", b""),)))
    no_word, nested = whole.replace(b"eve", b"\xffve"), b"\x94" + whole[1:] + b"\x91" * 5000 + b"\x90"
    for data in (b"", b"\xc1", b"\x93\x90\x90", opening_bytes(true)[:-1], no_word, nested):
        assert judge(part.claimed(*blocks), data, part.up, part.down)[0][0] == "withheld"


@pytest.mark.parametrize("up", sorted(CODECS))
def test_what_is_shown_is_never_longer_than_a_checker_takes(up: str):
    """A peer that shows more wastes no other peer's link."""
    part = Part(up, "fp32", 5 * LEAF)
    answered = part.claimed(0, 2).answered
    bound = Drawn(7, PeerId("ada"), 0, answered, (0, 2), (), 2).bytes_most
    assert len(opening_bytes(part.shown(0, 2))) <= bound


def test_an_owner_is_judged_by_the_commitments_that_it_named():
    """Bob promised twice: the owner shows the other promise, and it counts, if it is what the answer names."""
    part = Part("int8", "int8", LEAF)
    claimed, true = part.claimed(0), part.shown(0)
    vertex = replace(part.commits[1], root=ZERO_DIGEST)
    commits = (claimed.commits[0], SignedStatement(NAMES[1], encode(vertex), b"b"), *claimed.commits[2:])
    seen = PartResultClaim(claimed.answered, commits, part.n, (0,), RowCombinationRule())
    promised = (claimed.commits[1],)
    judged = judge(seen, opening_bytes(replace(true, others=promised)), part.up, part.down)
    assert judged == (("accepted", ""), promised)
    assert judge(seen, opening_bytes(true), part.up, part.down)[0][0] == "withheld"
    stranger = SignedStatement(PeerId("eve"), claimed.commits[1].body, b"")
    shown = opening_bytes(replace(true, others=(*promised, stranger)))
    assert judge(seen, shown, part.up, part.down)[0][0] == "withheld"


def test_codecs_that_look_beyond_a_block_are_named():
    assert opening_problem("int8", "fp32") is None and opening_problem("2bit", "2means") is None
    for name in ("topk:0.1+int8", "randk:0.1", "int8+zstd:3", "dct", "delta", "lowrank:4", "sparse", "changed"):
        assert "sync.up" in (opening_problem(name, "int8") or "")
        assert "sync.down" in (opening_problem("int8", name) or "")


def test_paths_of_a_tree_are_those_of_its_leaves_one_by_one():
    for count in (1, 2, 3, 7, 16, 33):
        leaves = tuple(bytes([k]) * 32 for k in range(count))
        tree = merkle_tree(leaves)
        assert tree.root == merkle_root(leaves)
        assert [tree.path(k) for k in range(count)] == [merkle_path(leaves, k) for k in range(count)]


@pytest.mark.parametrize("fan", [2, 3, 4])
def test_a_leaf_stands_at_one_place_of_a_tree(fan: int):
    """Its path leads to the root from nowhere else, nor does one that a stranger cuts into other pieces."""
    for count in (1, 2, 3, 4, 5, 16, 17, 21, 64, 65):
        leaves = [digest(bytes([k])) for k in range(count)]
        tree = MerkleTree(list[bytes](leaves), fan)
        for index, leaf in enumerate(leaves):
            path = tree.path(index)
            tops = [merkle_top(leaf, at, count, path, fan) for at in range(count)]
            assert [at for at, top in enumerate(tops) if top == tree.root] == [index]
            merged = [(*path[:at], path[at] + path[at + 1], b"", *path[at + 2 :]) for at in range(len(path) - 1)]
            strange = [*merged, path[:-1], (*path, leaf)] if path else [(leaf,)]
            for other in strange:
                assert tree.root not in [merkle_top(leaf, at, count, other, fan) for at in range(count)]


def test_strangers_bytes_in_the_place_of_an_opening_never_make_a_lie():
    """Flipped, cut, doubled and invented bytes: read as the shown bytes, or held against no peer."""
    part = Part("2bit", "2bit", 700)
    true, claimed = opening_bytes(part.shown(0)), part.claimed(0)
    draw = random.Random(1)
    for _ in range(FUZZ):
        data, at = bytearray(true), draw.randrange(len(true))
        match draw.randrange(4):
            case 0:
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = data[at : at + draw.randrange(40)]
            case _:
                data[at : at + 8] = draw.randbytes(draw.randrange(16))
        assert judge(claimed, data, part.up, part.down)[0][0] in ("withheld", "accepted")
    assert opening_from_bytes(true) == part.shown(0)
