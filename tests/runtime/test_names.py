"""Names of wires whose blocks are opened: what is remembered of them changes nothing of what is shown."""

from __future__ import annotations

import pytest
import torch

from atoll.base.ids import PeerId
from atoll.base.machine import Payload
from atoll.peer.tasks import BuildSumOpening
from atoll.protocol.allreduce.tasks import TaskRow
from atoll.training.codec import codec_named
from atoll.verification.sum_check import wire_digests
from atoll.verification.sum_check.tensors import LeafLayout
from atoll.verification.sum_check.wire_digests import WireDigestCache
from atoll.wire.messages.round import RowContribution
from atoll.wire.messages.statements import SignedStatement

ARRIVED = RowContribution(7, 0, "", 0, 0, (), SignedStatement(PeerId("p0"), b"", b""))


@pytest.mark.parametrize("kept", [0, 100])
def test_rows_are_hashed_once_and_shown_alike_if_they_must_be_hashed_again(
    kept: int, monkeypatch: pytest.MonkeyPatch
):
    """Three rows of eleven blocks and their answer: nothing is hashed to show them, or all of it is."""
    monkeypatch.setattr(wire_digests, "LEAVES_MAX", kept)
    mine, trees, tree = WireDigestCache("int8", "fp32"), [], LeafLayout.tree
    monkeypatch.setattr(LeafLayout, "tree", lambda cut, wire: trees.append(cut) or tree(cut, wire))
    rows = []
    for index in range(3):
        wire = codec_named("int8").encode(torch.randn(45_000, generator=torch.Generator().manual_seed(index)))
        name = mine.of_arrived(ARRIVED, wire) if index else mine.of_row(wire)
        rows.append(TaskRow(PeerId(f"p{index}"), 1, Payload(name, len(wire), wire), (PeerId(f"p{index}"),)))
    wire = codec_named("fp32").encode(torch.ones(45_000))
    answer = Payload(mine.of_my_answer(wire), len(wire), wire)
    work = BuildSumOpening(7, answer, tuple(rows), ((), (), ()), (), ((0, 10), (3,)))
    hashed, shown = len(trees), mine.lay_out(work)
    assert len(trees) - hashed == (0 if kept else 4) and hashed == 4
    assert shown == WireDigestCache("int8", "fp32").lay_out(work)
