"""Names of wires whose blocks are opened: what is remembered of them changes nothing of what is shown."""

from __future__ import annotations

import pytest
import torch

from atoll.base.ids import PeerId
from atoll.base.machine import Payload
from atoll.peer.tasks import LayOpen
from atoll.protocol.allreduce.tasks import Row
from atoll.training.codec import codec_named
from atoll.verification.sum_check import wire_digests
from atoll.verification.sum_check.tensors import Cut
from atoll.verification.sum_check.wire_digests import Names
from atoll.wire.messages.round import Contribution
from atoll.wire.messages.statements import Signed

ARRIVED = Contribution(7, 0, "", 0, 0, (), Signed(PeerId("p0"), b"", b""))


@pytest.mark.parametrize("kept", [0, 100])
def test_rows_are_hashed_once_and_shown_alike_if_they_must_be_hashed_again(
    kept: int, monkeypatch: pytest.MonkeyPatch
):
    """Three rows of eleven blocks and their answer: nothing is hashed to show them, or all of it is."""
    monkeypatch.setattr(wire_digests, "LEAVES_MAX", kept)
    mine, trees, tree = Names("int8", "fp32"), [], Cut.tree
    monkeypatch.setattr(Cut, "tree", lambda cut, wire: trees.append(cut) or tree(cut, wire))
    rows = []
    for index in range(3):
        wire = codec_named("int8").encode(torch.randn(45_000, generator=torch.Generator().manual_seed(index)))
        name = mine.of_arrived(ARRIVED, wire) if index else mine.of_row(wire)
        rows.append(Row(PeerId(f"p{index}"), 1, Payload(name, len(wire), wire), (PeerId(f"p{index}"),)))
    wire = codec_named("fp32").encode(torch.ones(45_000))
    answer = Payload(mine.of_my_answer(wire), len(wire), wire)
    work = LayOpen(7, answer, tuple(rows), ((), (), ()), (), ((0, 10), (3,)))
    hashed, shown = len(trees), mine.lay_out(work)
    assert len(trees) - hashed == (0 if kept else 4) and hashed == 4
    assert shown == Names("int8", "fp32").lay_out(work)
