"""Real islands compare, weigh and combine real updates: the rule's vector, whatever codecs they go through."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from members import PEERS, SHARES, Members, recipe_for, story

from atoll.base.ids import PeerId
from atoll.peer.tasks import EncodeUpdate
from atoll.peer.tasks import TrainRound as TrainAsked
from atoll.protocol.allreduce.tasks import CombineRows, ComputeRowProducts, TaskRow, WeighRows
from atoll.training.codec import codec_named
from atoll.training.codec.compiled import native
from atoll.training.recipe.update import part_bounds
from atoll.training.robust import RULES

PLAIN = {"fragments": 1, "overlap": 0}


@pytest.mark.parametrize("up", ["fp32", "int8"])
def test_islands_make_what_the_rule_makes_of_the_decoded_updates(tmp_path, book, up):
    """Two updates of two islands, each sent by two peers, and a newcomer's: the geometric median of four rows."""
    recipe = recipe_for(PLAIN, up=up, down="fp32")
    names = tuple(PeerId(f"p{k}") for k in range(5))

    async def tell(members: Members) -> None:
        for index, island in enumerate(members.islands):
            await island.run(TrainAsked(0, recipe.schedule.turn_steps, 600.0, index, PEERS))
        updates = [await island.run(EncodeUpdate(0, SHARES)) for island in members.islands]
        senders = [updates[0], updates[1], updates[1], updates[0], updates[1]]
        rows = [
            tuple(
                TaskRow(p, int(p != "p4"), sent.parts[part], (p,)) for p, sent in zip(names, senders, strict=True)
            )
            for part in range(PEERS)
        ]
        compared = [
            await members.islands[part].run(ComputeRowProducts(0, part, SHARES, rows[part]))
            for part in range(PEERS)
        ]
        assert all(done.counted == names and done.undecodable == () for done in compared)
        given = tuple((names[:4], done.products) for done in compared)
        weights = (await members.islands[0].run(WeighRows(0, "geometric_median", 1, names[:4], given))).weights
        assert (
            await members.islands[1].run(WeighRows(0, "geometric_median", 1, names[:4], given))
        ).weights == weights
        floats = len(members.islands[0].head.anchor_F)
        bounds, codec = part_bounds(floats, SHARES), codec_named(up)
        whole = [
            torch.cat([codec.decode(u.parts[j].data, hi - lo) for j, (lo, hi) in enumerate(bounds)])
            for u in updates
        ]
        expected = RULES["geometric_median"]([whole[0], whole[1], whole[1], whole[0]], f=1)
        for part, (lo, hi) in enumerate(bounds):
            work = CombineRows(0, part, SHARES, rows[part], False, "geometric_median", 1, (*weights, 0.0))
            done = await members.islands[part].run(work)
            made = codec_named("fp32").decode(done.payload.data, hi - lo)
            assert done.counted == names
            torch.testing.assert_close(made, expected[lo:hi], rtol=1e-5, atol=1e-7)

    story(tell, Members(tmp_path, recipe, book))


def test_kernels_load_before_the_first_round_and_nobody_waits_for_them(tmp_path, book, monkeypatch):
    """Where vectors are long enough, while the peer has nothing to sum yet; compiling may take many seconds."""
    compiled, ends = threading.Event(), threading.Event()

    def compile_now() -> bool:
        compiled.set()
        return ends.wait(10)

    monkeypatch.setattr(native, "load", compile_now)
    monkeypatch.setattr(native, "kernels", None)
    monkeypatch.setattr(native, "_loader", None)

    async def tell(members: Members) -> None:
        await members.islands[0].warm_up()
        assert not compiled.is_set()
        monkeypatch.setattr(native, "PAYS_FROM", members.learning.layout.floats)
        await members.islands[0].warm_up()
        assert await asyncio.to_thread(compiled.wait, 10)
        ends.set()

    story(tell, Members(tmp_path, recipe_for(PLAIN), book))
