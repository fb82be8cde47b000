"""Trees of real islands: what is combined on the way decodes at the owner, in every pair of codecs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from members import PEERS, SHARES, Members, recipe_for, story

from atoll.base.ids import PeerId
from atoll.peer.tasks import EncodeUpdate
from atoll.peer.tasks import TrainRound as TrainAsked
from atoll.protocol.allreduce.tasks import CombineRows, TaskRow
from atoll.training.codec import codec_named
from atoll.training.recipe.update import part_bounds

A, B, C = (PeerId(name) for name in "abc")


@pytest.mark.parametrize(("up", "down"), [("2bit", "int8"), ("int8", "int8"), ("topk:0.1+int8", "fp32")])
def test_a_sum_made_on_the_way_counts_at_the_owner_beside_updates(tmp_path: Path, book: str, up: str, down: str):
    """a and b are combined by a relay, c sends directly; the answer is the mean of all three, weighted.

    What the relay loses it loses once, in the finer codec of answers: nobody feeds its error back.
    """
    recipe = recipe_for({"fragments": 1, "overlap": 0}, up=up, down=down)

    async def tell(members: Members) -> None:
        for index, island in enumerate(members.islands):
            await island.run(TrainAsked(0, recipe.schedule.turn_steps, 600.0, index, PEERS))
        updates = [await island.run(EncodeUpdate(0, SHARES)) for island in members.islands]
        first, second = (u.parts[0] for u in updates[:2])
        relay, owner = members.islands[:2]
        below = (TaskRow(A, 1, first, (A,)), TaskRow(B, 2, second, (B,)))
        sum_ = await relay.run(CombineRows(0, 0, SHARES, below, onward=True))
        assert sum_.counted == (A, B) and sum_.payload is not None
        rows = (TaskRow(A, 3, sum_.payload, (A, B), handed=True), TaskRow(C, 1, first, (C,)))
        done = await owner.run(CombineRows(0, 0, SHARES, rows))
        assert done.counted == (A, C) and done.undecodable == () and done.payload is not None
        ((lo, hi), *_), rough, fine = (
            part_bounds(len(relay.head.anchor_F), SHARES),
            codec_named(up),
            codec_named(down),
        )
        x, y = (rough.decode(payload.data, hi - lo) for payload in (first, second))
        made = fine.decode(done.payload.data, hi - lo)
        wanted = (2 * x + 2 * y) / 4
        assert (made - wanted).norm() < 0.02 * wanted.norm()
        assert torch.isfinite(made).all()

    story(tell, Members(tmp_path, recipe, book))
