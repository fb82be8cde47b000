"""Islands whose members exchange in pairs, beside the experiment: the test hands round what the protocol would."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from members import Members, story

from atoll.base.draw import in_pairs
from atoll.base.ids import PeerId
from atoll.base.machine import Payload
from atoll.host.island import Island
from atoll.host.paired import Held
from atoll.keys.digest import digest
from atoll.learn.data import load_data
from atoll.learn.experiment import Experiment, Trouble
from atoll.learn.methods import noloco
from atoll.learn.models import build_model, loss_of
from atoll.learn.recipes import Recipe
from atoll.node.jobs import Adopt, Advance, Encoded, OthersStates, Restore, Restored
from atoll.node.settings import RunSettings
from atoll.protocol.reduce.work import Combine, Combined, Row
from atoll.wire.pairs import Roll, roll_from_bytes


def recipe_for(up: str = "fp32") -> Recipe:
    return noloco("gpt-nano", rounds=4, inner_steps=4, batch=2, seq_len=16, up=up)


class Paired(Members):
    """Each owns the one part that its pair's rows are in."""

    settings = RunSettings(topology="auto")

    def island(self, index: int) -> Island:
        island = super().island(index)
        island.be_paired(PeerId(str(index)))
        return island

    def roll(self) -> Roll:
        return roll_from_bytes(self.stores[0].read_blob(self.state))

    async def play(self, silent: Collection[int] = (), unheard: Collection[int] = ()) -> None:
        """One round. The silent encode nothing; the answers of the unheard come to nobody."""
        peers = range(self.peers)
        updates = {k: await self.train(k) for k in peers if k not in silent}
        made: dict[int, Payload] = {}
        for pair in in_pairs(self.round, peers):
            for k in {*pair} & updates.keys():
                done = await self.combine(k, {other: updates[other] for other in pair if other in updates})
                assert done.payload is not None and not done.undecodable
                made[k] = done.payload
        parts = tuple(made.get(k) if k not in unheard else None for k in peers)
        names = tuple(PeerId(str(k)) for k in peers)
        steps, samples = self.recipe.schedule.inner_steps, 2 * self.recipe.schedule.inner_steps * len(updates)
        work = Advance(self.round, self.state, parts, steps, samples, self.peers, self.shares, names, names)
        states = {(await island.do(work)).state for island in self.islands}
        (self.state,) = states
        self.round += 1
        for island in self.islands:
            await island.do(Adopt(self.round - 1, self.vertex(), self.state, (True,) * self.peers))

    async def combine(self, index: int, updates: dict[int, Encoded]) -> Combined:
        rows = tuple(
            Row(PeerId(str(k)), 8, update.parts[index], (PeerId(str(k)),)) for k, update in sorted(updates.items())
        )
        return await self.islands[index].do(Combine(self.round, index, self.shares, rows))


@pytest.mark.parametrize(("up", "peers"), [("fp32", 4), ("int8", 3)])
def test_members_end_with_the_anchors_of_the_experiment_bit_for_bit(tmp_path: Path, book: str, up: str, peers: int):
    """Four rounds, every anchor and momentum after each; of three one is alone. The draw is the same function."""
    recipe = recipe_for(up)
    run = Experiment(
        recipe, build_model("gpt-nano", 0), load_data(book), peers, recipe.schedule.steps, Trouble(), loss_of
    )

    async def tell(members: Paired) -> None:
        for turn in range(1, 5):
            await members.play()
            while run.now < 4 * turn:
                run.step()
            for island, anchor_F, (outer,) in zip(members.islands, run.anchors, run.outers, strict=True):
                assert torch.equal(island.head.anchor_F, anchor_F), turn
                assert torch.equal(island.head.momentum_P, outer.momentum_P), turn
                assert (island.head.round, island.head.steps) == (turn, 4 * turn)
        assert not torch.equal(run.anchors[0], run.anchors[1])
        roll = members.roll()
        assert (roll.round, roll.steps, roll.samples) == (4, 16, 4 * 4 * 2 * peers)
        assert len({entry.state for entry in roll.states}) == peers

    torch.manual_seed(0)
    story(tell, Paired(tmp_path, recipe, book, peers))


def test_who_misses_a_round_keeps_its_anchor_and_its_steps(tmp_path: Path, book: str):
    """Member 1 encodes nothing, then is not heard: twice its anchor stays, and the third update is of all steps."""

    async def tell(members: Paired) -> None:
        await members.play()
        island = members.islands[1]
        before, named = island.head.anchor_F, members.roll().of(PeerId("1"))
        await members.play(unheard=[1])
        x_F = island.trainer.read_x().clone()
        assert island.head.anchor_F is before and island.live.steps_since == 4
        assert not torch.equal(x_F, before), "its steps are still in x"
        assert members.roll().of(PeerId("1")) == named and members.roll().round == 2 == island.head.round
        others = [other.head.anchor_F for k, other in enumerate(members.islands) if k != 1]
        assert not any(torch.equal(before, theirs) for theirs in others)
        await members.play()
        assert island.live.steps_since == 0 and not torch.equal(island.head.anchor_F, before)
        assert torch.equal(island.trainer.read_x(), island.head.anchor_F)

    story(tell, Paired(tmp_path, recipe_for(), book, 4))


def test_pairs_rest_in_a_round_that_counts_nobody(tmp_path: Path, book: str):
    """Nobody's answer is heard: anchors stay, and so does the momentum, which would move them by itself."""

    async def tell(members: Paired) -> None:
        await members.play()
        before = [island.head for island in members.islands]
        await members.play(unheard=range(members.peers))
        for island, then in zip(members.islands, before, strict=True):
            assert torch.equal(island.head.anchor_F, then.anchor_F)
            assert torch.equal(island.head.momentum_P, then.momentum_P) and float(then.momentum_P.abs().max()) > 0

    story(tell, Paired(tmp_path, recipe_for(), book, 2))


def test_a_vertex_that_averaged_nothing_counts_nothing(tmp_path: Path, book: str):
    """Its roll is the one before, which says what was made a round ago: an update under way is not in that."""

    async def tell(members: Paired) -> None:
        await members.play()
        island = members.islands[1]
        await members.train(1)
        head, x_F = island.head, island.trainer.read_x().clone()
        await island.do(Adopt(1, members.vertex(), members.state, None))
        assert island.head.anchor_F is head.anchor_F and island.live.steps_since == 4
        assert torch.equal(island.trainer.read_x(), x_F), "its steps are still in x"

    story(tell, Paired(tmp_path, recipe_for(), book, 4))


def test_what_a_life_before_made_of_a_round_is_mine_once_a_roll_names_it(tmp_path: Path, book: str):
    """Restarted between its answer and the vertex: it goes on from what it said it holds."""

    async def tell(members: Paired) -> None:
        await members.play()
        before, vertex = members.state, members.vertex()
        await members.play()
        island = members.island(3)
        assert await island.do(Restore(0, vertex, before)) == Restored(0)
        assert not torch.equal(island.head.anchor_F, members.islands[3].head.anchor_F)
        await island.do(Adopt(1, members.vertex(), members.state, None))
        assert torch.equal(island.head.anchor_F, members.islands[3].head.anchor_F) and island.head.steps == 8

    story(tell, Paired(tmp_path, recipe_for(), book, 4))


def test_a_garbled_row_is_named_and_left_out_and_nobody_goes_on_without_its_own(tmp_path: Path, book: str):
    async def tell(members: Paired) -> None:
        good = {k: await members.train(k) for k in (0, 1)}
        head = members.islands[0].head
        alone = await members.combine(0, {0: good[0]})
        for bad in (b"", b"\xff" * 40, bytes(good[1].parts[0].data)[:-1], _with_nan(bytes(good[1].parts[0].data))):
            torn = Encoded((Payload(digest(bad), len(bad), bad),) * 4)
            done = await members.combine(0, {0: good[0], 1: torn})
            assert (done.counted, done.undecodable) == (("0",), ("1",))
            assert done.payload.data == alone.payload.data, "as if it had been alone"
        without = await members.combine(0, {1: good[1]})
        assert without.payload is None and "my own row" in without.why
        assert members.islands[0].head is head

    story(tell, Paired(tmp_path, recipe_for(), book, 4))


def _with_nan(row: bytes) -> bytes:
    return row[:-4] + b"\0\0\xc0\x7f"


def test_a_restarted_member_finds_its_own_and_one_that_lost_it_asks_for_anothers(tmp_path: Path, book: str):
    """Its disk says which of the two; whoever is fetched is checked by its name, and moments begin anew."""

    async def tell(members: Paired) -> None:
        await members.play()
        await members.play()
        again = Restore(1, members.vertex(), members.state)
        mine = members.islands[2].head.anchor_F
        island = members.island(2)
        assert await island.do(again) == Restored(0) and torch.equal(island.head.anchor_F, mine)
        assert island.head.steps == 8, "as far as the roll"
        own = members.roll().of(PeerId("2"))
        members.stores[2].drop_blobs({members.state})
        island = members.island(2)
        others = await island.do(again)
        assert isinstance(others, OthersStates) and {peer for peer, _ in others.held} == {"0", "1", "3"}
        assert island.head is None
        peer, state = others.held[0]
        members.stores[2].put_blob(members.stores[int(peer)].read_blob(state))
        assert await island.do(again) == Restored(0)
        assert torch.equal(island.head.anchor_F, members.islands[int(peer)].head.anchor_F)
        assert island.paired.own == state != own and island.mine.memory_F is None
        members.stores[2].drop_blobs(set())
        assert await island.do(again) is None, "first the roll itself"
        assert isinstance(members.islands[0].paired.held(members.state, members.learning), Held)

    story(tell, Paired(tmp_path, recipe_for("int8"), book, 4))
