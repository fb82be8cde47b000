"""Rows that cannot be read: no honest one is ever called so, and every other one is, by one leaf of it."""

from __future__ import annotations

import dataclasses
import os
import random
import struct
from math import inf, nan

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.limits import MALFORMED_ROW_BYTES_MAX, ROW_SHOWN_MAX
from atoll.crypto.digest import digest, merkle_path, merkle_root
from atoll.training.codec import CODECS, Codec, codec_named
from atoll.verification.malformed_updates import tensors
from atoll.verification.malformed_updates.messages import (
    MalformedRowEvidence,
    malformed_row_bytes,
    malformed_row_from_bytes,
)
from atoll.verification.malformed_updates.tensors import ExpectedRow, judge, judged_by, show
from atoll.verification.sum_check.tensors import LeafLayout
from atoll.wire.codec import encode
from atoll.wire.messages.statements import Commitment, SignedStatement

FUZZ = int(os.environ.get("ATOLL_FUZZ", "1000"))
WHOLE = ("topk:0.1+int8", "topk-rice:64/4096+2means", "sparse+bf16", "dct+topk:32/4096+2means", "fp32", "int8")
SIZES = (0, 1, 5, 255, 4095, 4096, 4097, 3 * 4096 + 771)


class Row:
    """Part 1 of three of a peer's update, as it committed to it."""

    def __init__(self, name: str, wire: bytes, values: int, cut: bool) -> None:
        self.wire, codec = wire, codec_named(name)
        self.due = ExpectedRow(7, 3, values, codec, LeafLayout(codec) if cut else None)
        own = self.due.cut.name(wire) if self.due.cut is not None else digest(wire)
        names = (digest(b"first"), own, digest(b"last"))
        commit = Commitment(7, 0, merkle_root(names), 3, 5, 80, 1.0, 0.1, 80)
        self.statement, self.path = SignedStatement(PeerId("ada"), encode(commit), b""), merkle_path(names, 1)

    def shown(self) -> tuple[str, bytes]:
        return show(self.wire, self.statement, 1, self.path, self.due)

    def judged(self, shown: bytes, due: ExpectedRow | None = None) -> str:
        return judge(shown, lambda part: due or self.due)

    def leaf(self, index: int) -> MalformedRowEvidence:
        """One of its leaves, whatever is in it."""
        assert self.due.cut is not None
        tree, leaf = self.due.cut.tree(self.wire), bytes(self.due.cut.leaf(self.wire, index))
        count = len(tree.levels[0])
        return MalformedRowEvidence(
            self.statement, 1, self.path, count, index, digest(leaf), tree.path(index), leaf
        )


def honest(codec: Codec, x_N: Tensor) -> bytes:
    return bytes(codec.encode(x_N))


def vectors(n: int) -> list[Tensor]:
    """Of every kind that training leads to, and the ends of what may be encoded."""
    generator = torch.Generator().manual_seed(n)
    x_N = torch.randn(n, generator=generator)
    wild_N = x_N * torch.pow(2.0, torch.randint(-120, 60, (n,), generator=generator).float())
    return [x_N * 1e-3, wild_N, torch.zeros(n), torch.full((n,), 2.0**62), torch.full((n,), -(2.0**-149))]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", sorted(CODECS))
def test_no_honest_row_of_any_codec_can_be_shown_to_be_unreadable(name: str, n: int):
    """Neither as a whole nor by any leaf, however it is chosen."""
    for x_N in vectors(n):
        for cut in (True, False):
            row = Row(name, honest(CODECS[name], x_N), n, cut)
            assert row.shown() == ("", b"")
        row = Row(name, row.wire, n, cut=True)
        for index in range(row.due.leaves(row.due.cut)):
            assert row.judged(malformed_row_bytes(row.leaf(index))) == ""


@pytest.mark.parametrize("name", WHOLE)
def test_nor_one_of_a_chain_that_has_no_leaves(name: str):
    for n in SIZES[1:]:
        for x_N in vectors(n)[:3]:
            row = Row(name, honest(codec_named(name), x_N), n, cut=False)
            assert row.shown() == ("", b"")
            whole = MalformedRowEvidence(row.statement, 1, row.path, 1, 0, digest(row.wire), (), row.wire)
            if len(row.wire) <= ROW_SHOWN_MAX:
                assert row.judged(malformed_row_bytes(whole)) == ""


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("name", sorted(CODECS))
def test_what_does_not_decode_as_a_whole_is_shown_by_a_leaf_and_all_else_is_not(name: str, cut: bool):
    """Bytes changed, added, removed at random: a part's owner and a peer that sees one leaf agree."""
    draw, n = random.Random(f"rows/{name}"), 2 * 4096 + 300
    wire, found = honest(CODECS[name], torch.randn(n, generator=torch.Generator().manual_seed(5))), 0
    for _ in range(max(40, FUZZ // 20)):
        data = bytearray(wire)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            data[at : at + draw.choice((1, 1, 1, 0, 40))] = draw.randbytes(draw.choice((1, 1, 1, 0, 40)))
        row = Row(name, bytes(data), n, cut)
        why, shown = row.shown()
        try:
            CODECS[name].decode(row.wire, n)
            assert (why, shown) == ("", b"")
        except PeerFault:
            assert why and shown and len(shown) <= MALFORMED_ROW_BYTES_MAX
            assert row.judged(shown)
            found += 1
    assert found > 5


@pytest.mark.parametrize("value", [nan, inf, 1e30, -inf])
def test_one_value_that_is_no_number_is_enough_and_its_leaf_alone_is_shown(value: float):
    n, at = 5 * 4096, 3 * 4096 + 17
    wire = bytearray(4 * n)
    struct.pack_into("<f", wire, 4 * at, value)
    row = Row("fp32", bytes(wire), n, cut=True)
    why, shown = row.shown()
    seen = malformed_row_from_bytes(shown)
    assert why and seen.index == 3 and seen.leaf == row.wire[4 * 3 * 4096 : 4 * 4 * 4096]
    assert row.judged(shown) == why


def test_a_wire_of_another_length_is_shown_without_a_byte_of_it():
    """However long it is: the number of its leaves is in the name that its author signed."""
    n = 4 * 4096
    for length in (0, 4, 4 * n + 1, 4 * n + 4, 40 * n):
        row = Row("fp32", bytes(length), n, cut=True)
        why, shown = row.shown()
        assert why and row.judged(shown) == why and len(shown) < 1000
    for length in (4 * n - 4, 4 * n - 16000):  # as many leaves: the last one says it
        row = Row("fp32", bytes(length), n, cut=True)
        assert row.judged(row.shown()[1])


def test_what_is_too_large_to_be_shown_is_only_said():
    n = 40_000
    row = Row("topk:0.9+fp32", b"\xff" * (ROW_SHOWN_MAX + 1), n, cut=False)
    assert row.shown()[0] and row.shown()[1] == b""
    small = Row("int8", b"\xff" * (16 * 4128 + 1), 300, cut=True)  # that no values make: one leaf, and a long one
    assert small.shown()[0] and small.shown()[1] == b""


@pytest.mark.parametrize("cut", [True, False])
def test_who_holds_other_bytes_than_were_committed_to_accuses_nobody(cut: bool, monkeypatch: pytest.MonkeyPatch):
    """A bit of the owner's memory flips after receipt; in a wire too large to show, no peer would see it."""
    n = 5000
    row = Row("fp32", honest(CODECS["fp32"], torch.ones(n)), n, cut)
    row.wire = row.wire[:-4] + struct.pack("<f", nan)
    monkeypatch.setattr(tensors, "ROW_SHOWN_MAX", 0)
    with pytest.raises(PeerFault, match="committed to"):
        row.shown()


def test_nothing_else_than_what_was_committed_to_can_be_shown():
    """Every field of a true exhibit of an honest leaf, and of a false one, is changed: it leads nowhere."""
    n = 3 * 4096
    row = Row("int8", honest(CODECS["int8"], torch.randn(n, generator=torch.Generator().manual_seed(3))), n, True)
    leaf, junk = row.leaf(1), b"\xff" * 4128
    other = encode(Commitment(7, 0, digest(b"another"), 3, 5, 80, 1.0, 0.1, 80))
    for changed in (
        {"leaf": junk, "name": digest(junk)},
        {"index": 0},
        {"leaves": 4},
        {"leaves": 2},
        {"leaves": 1, "index": 0, "leaf_path": ()},
        {"part": 0},
        {"part_path": leaf.part_path[::-1]},
        {"leaf_path": leaf.leaf_path[:-1]},
        {"leaf_path": (*leaf.leaf_path, digest(b"more"))},
        {"leaf": None},
        {"statement": replace(row.statement, body=other)},
    ):
        with pytest.raises(PeerFault):
            row.judged(malformed_row_bytes(replace(leaf, **changed)))
    with pytest.raises(PeerFault):
        row.judged(malformed_row_bytes(leaf), dataclasses.replace(row.due, round=8))
    with pytest.raises(PeerFault):
        row.judged(malformed_row_bytes(leaf), dataclasses.replace(row.due, parts=4))
    with pytest.raises(PeerFault):
        row.judged(malformed_row_bytes(leaf), dataclasses.replace(row.due, cut=None))


UNJUDGED = ("int8+zstd:3", "lz4", "topk:0.1+int8+auto", "delta", "delta+int8", "lowrank:4", "randk", "changed:0")


@pytest.mark.parametrize("name", UNJUDGED)
def test_nobody_is_held_to_a_row_whose_bytes_do_not_say_by_themselves_whether_they_can_be_read(name: str):
    assert judged_by(name) is None


def test_all_codecs_that_can_be_cut_are_judged_and_chains_of_places():
    assert all(judged_by(name) is not None for name in (*CODECS, *WHOLE, "sparseloco", "demo"))
