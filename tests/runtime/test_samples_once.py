"""No sample of the run is learned from twice, whatever becomes of rounds and members."""

from __future__ import annotations

import torch
from members import Members, recipe_for, story

from atoll.peer.tasks import AdvanceState


def test_the_place_in_the_data_is_where_a_round_of_other_members_ended(tmp_path, book):
    """Three members take 12 steps of 2 samples; then five do, who begin at the next multiple of five."""
    members = Members(tmp_path, recipe_for({"overlap": 0, "fragments": 1}), book)

    async def tell(m: Members) -> None:
        island = m.islands[0]
        nothing = (None,) * m.peers
        three = await island.run(AdvanceState(0, m.state, nothing, 12, 72, 3, m.shares))
        five = await island.run(AdvanceState(1, three.state, nothing, 12, 120, 5, m.shares))
        assert island.states.load(three.state, m.learning.layout).samples == 72
        assert island.states.load(five.state, m.learning.layout).samples == 75 + 120

    story(tell, members)


def test_a_round_that_counts_nobody_leaves_model_momentum_and_place_in_the_data(tmp_path, book):
    """As when all members are killed at once: the outer momentum of the round before must not go on by itself."""
    members = Members(tmp_path, recipe_for({"overlap": 0, "fragments": 1}), book)

    async def tell(m: Members) -> None:
        await m.play()
        before = m.islands[0].head
        assert float(before.momentum_P.abs().max()) > 0
        nobody = AdvanceState(1, m.state, (None,) * m.peers, 0, 0, m.peers, m.shares)
        done = await m.islands[0].run(nobody)
        after = m.islands[0].states.load(done.state, m.learning.layout)
        assert torch.equal(after.anchor_F, before.anchor_F) and torch.equal(after.momentum_P, before.momentum_P)
        assert (after.round, after.samples, after.tokens) == (before.round + 1, before.samples, before.tokens)

    story(tell, members)
