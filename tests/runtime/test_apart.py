"""What a member does while it is cut off, in real tensors: it comes back once, shortened, and never in half."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import torch
from members import Inside, Members, recipe_for, story
from msgspec.structs import replace

from atoll.base.errors import RunFailedError, UsageError
from atoll.features.partition_training.tensors import (
    FORMAT,
    UpdateWithoutQuorum,
    carried,
    late_bytes,
    late_from_bytes,
)
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import AbandonedRoundSettlement, AdoptState, RestoreState, TrainWithoutQuorum
from atoll.policy.capability_terms import PartitionPolicy
from atoll.runtime.storage.private_state import read_private
from atoll.runtime.training_spec import founding_blobs, start_of_built_in
from atoll.training.exchange.tensorfile import dump
from atoll.training.recipe.merge import MixMerge
from atoll.training.recipe.methods import data_parallel
from atoll.training.recipe.reducer import ReductionSettings

PLAIN = {"fragments": 1, "overlap": 0}
OVERLAP = {"fragments": 1, "overlap": 5, "merge": "delta"}
OUT = 2  # who is cut off
REST = (0, 1)
STEPS = 12  # of a round
FOR_GOOD = 10 * STEPS


def swarm(tmp_path, book, how=PLAIN, up="fp32", down="fp32") -> Members:
    return Members(tmp_path, recipe_for(how, up=up, down=down, rounds=40), book, peers=3)


def alone(members: Members, steps=STEPS, merge=True, steps_max=FOR_GOOD) -> TrainWithoutQuorum:
    return TrainWithoutQuorum(members.round, steps, steps_max, 600.0, OUT, 3, merge)


async def cut_off(members: Members, rounds: int, worths: int, merge: bool = True) -> torch.Tensor:
    """It sent its update in vain and went on for so many rounds' worth; the others closed theirs. Returns its x."""
    await members.train(OUT)
    left = members.round
    for _ in range(worths):
        work = msgspec.structs.replace(alone(members, merge=merge), round=left)
        assert (await members.islands[OUT].run(work)).steps == STEPS
    for _ in range(rounds):
        await members.play(here=REST)
    return members.trainers[OUT].child.x_F.clone()


async def by_blob(members: Members, left: AbandonedRoundSettlement) -> None:
    members.stores[OUT].put_blob(members.stores[0].read_blob(members.state))
    assert await members.islands[OUT].run(RestoreState(members.round - 1, members.vertex(), members.state, left))


NOT_COUNTED = AbandonedRoundSettlement((False,) * 3, late=False)


@pytest.mark.parametrize("how", [PLAIN, OVERLAP], ids=["plain", "overlap"])
def test_all_that_it_did_alone_waits_as_late_work(tmp_path, book, how):
    """Cut off in round 1, two rounds' worth more, back by the blob: from the anchor it left to where x was."""

    async def tell(members: Members) -> None:
        await members.play()
        anchor_F = members.islands[OUT].head.anchor_F
        x_F = await cut_off(members, rounds=3, worths=2)
        await by_blob(members, NOT_COUNTED)
        held = members.islands[OUT].away.held
        assert torch.allclose(held.delta_F, anchor_F - x_F, atol=1e-6)
        assert (held.since, held.steps, held.samples) == (1, 3 * STEPS, 3 * STEPS * members.recipe.batch)
        assert torch.equal(members.islands[OUT].head.anchor_F, members.islands[0].head.anchor_F)

    story(tell, swarm(tmp_path, book, how))


def test_what_it_did_alone_moves_the_agreed_model_its_way(tmp_path, book):
    """The same story twice, merged and dropped: the models differ by a third of what rode, not at all before."""
    heads: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    rode: list[torch.Tensor] = []

    def told(merge: bool):
        async def tell(members: Members) -> None:
            await members.play()
            await cut_off(members, rounds=3, worths=2, merge=merge)
            await by_blob(members, NOT_COUNTED)
            for late in (False, True):  # first as a newcomer, whose row weighs nothing
                await members.play(weights={} if late else {OUT: 0}, late=late)
                rode.extend([members.rode] if late and merge else [])
                heads[merge].append(members.islands[0].head.anchor_F)
                assert torch.equal(heads[merge][-1], members.islands[OUT].head.anchor_F)
            assert members.islands[OUT].away.held is None

        return tell

    class Watched(Members):
        async def train(self, index, late=False):
            encoded = await super().train(index, late)
            if index == OUT:
                self.rode = self.islands[OUT].away.riding_F
            return encoded

    for merge in (True, False):
        recipe = recipe_for(PLAIN, up="fp32", down="fp32", rounds=40)
        story(told(merge), Watched(tmp_path / str(merge), recipe, book, peers=3))
    assert torch.equal(heads[True][0], heads[False][0])
    outer = recipe.outer
    moved_F, expected_F = heads[False][1] - heads[True][1], rode[0] / 3 * (outer.lr * (1 + outer.momentum))
    assert float(expected_F.norm()) > 0
    assert float((moved_F - expected_F).norm()) < 1e-3 * float(expected_F.norm())


def test_late_work_that_no_vertex_took_is_held_and_error_feedback_has_none_of_it(tmp_path, book):
    """2-bit updates: one with late work is not counted, the next is. What was owed is sent once, all of it."""

    async def tell(members: Members) -> None:
        await members.play()
        await cut_off(members, rounds=2, worths=1)
        await by_blob(members, NOT_COUNTED)
        island, held = members.islands[OUT], members.islands[OUT].away.held
        fresh_F = await fresh_of(members)
        await members.play(counted=REST, late=True)
        assert island.away.held is held and island.away.riding_F is None
        assert torch.allclose(island.mine.memory_F, fresh_F, atol=1e-6), (
            "the round's own message returned, and no more"
        )
        owed_F = island.mine.memory_F.clone()
        fresh_F = await fresh_of(members)
        await members.play(late=True)
        rode_F = carried(held, fresh_F)
        sent_F = members.sent
        assert island.away.held is None
        assert torch.allclose(sent_F + island.mine.memory_F, owed_F + fresh_F + rode_F, atol=1e-5)

    async def fresh_of(members: Members) -> torch.Tensor:
        """The pseudo-gradient that the coming round will have: the very steps, taken by a copy of its trainer."""
        members.watch = True
        return members.fresh_F

    class Watched(Members):
        watch = False
        fresh_F = sent = None

        async def train(self, index, late=False):
            encoded = await super().train(index, late)
            if index == OUT and self.watch:
                island = self.islands[OUT]
                self.fresh_F.copy_(island.head.anchor_F - self.trainers[OUT].read_x())
                wires = zip(island.mine.up, island.mine.update.wires, island.mine.update.bounds, strict=True)
                self.sent.copy_(torch.cat([up.decode(wire, hi - lo) for up, wire, (lo, hi) in wires]))
            return encoded

    members = Watched(tmp_path, recipe_for(PLAIN, up="2bit", down="int8", rounds=40), book, peers=3)
    floats = members.learning.layout.floats
    members.fresh_F, members.sent = torch.zeros(floats), torch.zeros(floats)
    story(tell, members)


def test_a_partition_that_heals_within_the_round_costs_nobody_anything(tmp_path, book):
    """Its update was counted after all: x is the new anchor, and only the steps taken alone come later."""

    async def tell(members: Members) -> None:
        await members.play()
        island = members.islands[OUT]
        await members.train(OUT)
        sent_F = members.trainers[OUT].child.x_F.clone()
        await island.run(alone(members))
        x_F = members.trainers[OUT].child.x_F.clone()
        await members.play(here=REST, encoding=REST)
        after = AdoptState(members.round - 1, members.vertex(), members.state, (True,) * 3)
        members.stores[OUT].put_blob(members.stores[0].read_blob(members.state))
        await island.run(after)
        assert torch.equal(island.away.held.delta_F, sent_F - x_F) and island.away.held.steps == STEPS
        assert torch.equal(members.trainers[OUT].child.x_F, island.head.anchor_F)

    story(tell, swarm(tmp_path, book))


def test_what_the_round_counted_after_all_is_no_late_work(tmp_path, book):
    """It left the round open and fetched a later state: the vertex held its message, in all parts or in some."""

    async def tell(members: Members) -> None:
        for counted, more in ((True, True, True), 0), ((True, False, False), 0), ((False, False, False), STEPS):
            await members.play()
            await cut_off(members, rounds=1, worths=1)
            await by_blob(members, AbandonedRoundSettlement(counted, late=False))
            assert members.islands[OUT].away.held.steps == STEPS + more, counted
            members.islands[OUT].away.forget()
            await members.play(late=True)

    story(tell, swarm(tmp_path, book))


def test_rounds_that_are_caught_up_one_by_one_bring_the_same_late_work(tmp_path, book):
    """Without the blob: its message of the round that it left comes back as feedback, which weighs nothing yet."""

    async def tell(members: Members) -> None:
        await members.play()
        island, anchor_F = members.islands[OUT], members.islands[OUT].head.anchor_F
        x_F = await cut_off(members, rounds=1, worths=2)
        members.stores[OUT].put_blob(members.stores[0].read_blob(members.state))
        await island.run(AdoptState(members.round - 1, members.vertex(), members.state, (False,) * 3))
        assert island.mine.memory_F is None and island.live.steps_since == 0
        assert torch.allclose(island.away.held.delta_F, anchor_F - x_F, atol=1e-6)
        assert island.away.held.steps == 3 * STEPS

    story(tell, swarm(tmp_path, book))


def test_it_stops_at_its_bound_and_a_late_question_is_refused(tmp_path, book):
    """Fifteen steps at most, asked for twelve at a time; once its round is over, none."""

    async def tell(members: Members) -> None:
        await members.train(OUT)
        island = members.islands[OUT]
        taken = [(await island.run(alone(members, steps_max=15))).steps for _ in range(3)]
        assert taken == [STEPS, 3, 0]
        await by_blob(members, NOT_COUNTED)
        with pytest.raises(RunFailedError, match="is over"):
            await island.run(msgspec.structs.replace(alone(members), round=members.round - 1))

    story(tell, swarm(tmp_path, book))


def test_dropped_steps_leave_nothing(tmp_path, book):
    async def tell(members: Members) -> None:
        await cut_off(members, rounds=2, worths=1, merge=False)
        await by_blob(members, NOT_COUNTED)
        assert members.islands[OUT].away.held is None

    story(tell, swarm(tmp_path, book))


def test_what_was_done_apart_before_the_run_went_back_is_dropped(tmp_path, book):
    """Neither the steps, nor the message of the round that it left, nor what it held from another time."""

    async def tell(members: Members) -> None:
        await members.play()
        await cut_off(members, rounds=2, worths=1)
        await by_blob(members, replace(NOT_COUNTED, afresh=True))
        island = members.islands[OUT]
        assert island.away.held is None and island.mine.memory_F is None

    story(tell, swarm(tmp_path, book))


def test_a_crash_costs_no_whole_worth_of_steps_and_counts_none_twice(tmp_path, book):
    """Killed while apart, and again when its late work was sent: the disk says what it owes, or the vertex."""

    async def tell(members: Members) -> None:
        await members.play()
        x_F = await cut_off(members, rounds=0, worths=1)
        sent_F = members.islands[OUT].away.base_F
        island = await again(members)
        assert torch.allclose(island.away.held.delta_F, sent_F - x_F) and island.away.held.steps == STEPS
        await members.play(encoding=REST, late=True)  # it trains, but its update comes too late
        held = island.away.held
        encoded = await members.train(OUT, late=True)
        assert encoded.late.steps == held.steps
        island = await again(members)
        assert torch.equal(island.away.held.delta_F, held.delta_F)
        await members.play(here=REST)
        members.stores[OUT].put_blob(members.stores[0].read_blob(members.state))
        await island.run(AdoptState(members.round - 1, members.vertex(), members.state, None, late=True))
        assert island.away.held is None
        floats = members.learning.layout.floats
        assert read_private(members.stores[OUT], floats)[0].late is None

    async def again(members: Members):
        await members.islands[OUT].close()
        members.trainers[OUT] = Inside()
        island = members.islands[OUT] = members.island(OUT)
        assert await island.run(members.restore(OUT))
        return island

    story(tell, swarm(tmp_path, book))


def test_a_trainer_that_dies_apart_costs_its_last_worth_of_steps(tmp_path, book):
    """Another one begins from the head; what the first had handed over is late work already."""

    async def tell(members: Members) -> None:
        await members.train(OUT)
        island = members.islands[OUT]
        await island.run(alone(members))
        first_F = island.away.base_F - members.trainers[OUT].child.x_F
        island.tended.ready = False
        await island.run(alone(members))
        assert torch.equal(island.away.held.delta_F, first_F)
        second_F = island.head.anchor_F - members.trainers[OUT].child.x_F
        await by_blob(members, NOT_COUNTED)
        assert island.away.held.steps == 3 * STEPS
        assert float((island.away.held.delta_F - first_F - second_F).norm()) > 0, "and the round's own message"

    story(tell, swarm(tmp_path, book))


def test_a_round_that_is_over_before_its_trainer_has_started_is_not_gone_on_with(tmp_path, book):
    """Another trainer is starting for steps apart, and meanwhile the round closes: were these steps taken, they
    would be in the next update, and with all of that once more in late work.
    """

    async def tell(members: Members) -> None:
        starts, started = asyncio.Event(), asyncio.Event()

        class Slow(Inside):
            async def start(self, spec):
                starts.set()
                await started.wait()
                return await super().start(spec)

        await members.train(OUT)
        island = members.islands[OUT]
        island.tended.ready, island.tended.trainer = False, Slow()
        members.trainers[OUT] = island.trainer = island.tended.trainer
        asked = asyncio.create_task(island.run(alone(members)))
        await starts.wait()
        await members.play(here=REST)
        members.stores[OUT].put_blob(members.stores[0].read_blob(members.state))
        await island.run(AdoptState(members.round - 1, members.vertex(), members.state, (True,) * 3))
        started.set()
        with pytest.raises(RunFailedError, match="is over"):
            await asked
        await members.play(late=True)
        assert island.away.base_F is None and island.away.held is None

    story(tell, swarm(tmp_path, book))


def test_late_work_does_not_ride_in_the_round_that_it_left(tmp_path, book):
    """Killed while apart, it takes up the same round again, which is still open: voters would refuse it there."""

    async def tell(members: Members) -> None:
        island = members.islands[OUT]
        island.away.held = UpdateWithoutQuorum(
            torch.ones(members.learning.layout.floats), members.round, STEPS, STEPS * 2
        )
        assert (await members.train(OUT, late=True)).late is None and island.away.riding_F is None
        await members.play(encoding=REST)
        assert (await members.train(OUT, late=True)).late.steps == STEPS

    story(tell, swarm(tmp_path, book))


def test_steps_apart_are_taken_on_data_that_nobody_else_has(tmp_path, book, monkeypatch):
    """Two members cut off for three rounds' worth, one that goes on: half an epoch lies between their data."""
    read: dict[bool, set[int]] = {True: set(), False: set()}
    taken: list[tuple[int, int]] = []

    async def tell(members: Members) -> None:
        from atoll.runtime.trainer import process
        from atoll.training.data import epoch_samples

        batch = process.batch

        def watched(data, shard, shards, cursor, size, seq_len, seed):
            places = {(cursor + k) * shards + shard for k in range(size)}
            half = epoch_samples(data, seq_len) // 2
            read[min(places) >= half] |= places
            taken.extend((place, shard) for place in places)
            return batch(data, shard, shards, cursor, size, seq_len, seed)

        monkeypatch.setattr(process, "batch", watched)
        for index in (1, OUT):
            await members.train(index)
            for _ in range(3):
                await members.islands[index].run(msgspec.structs.replace(alone(members), shard=index))
        for _ in range(4):
            await members.play(here=(0,))

    story(tell, swarm(tmp_path, book))
    assert len(read[True]) == 2 * 3 * STEPS * 2 and len(read[False]) == (2 + 4) * STEPS * 2
    assert len(taken) == len({place for place, _ in taken}), "a sample was read twice"


def test_what_rides_is_never_longer_than_the_round_itself():
    """Ten rounds in one direction come as one more; less than that comes whole; nothing comes as nothing."""
    late, fresh_F = UpdateWithoutQuorum(torch.tensor([30.0, 40.0]), 3, 10, 20), torch.tensor([0.0, 5.0])
    assert torch.allclose(carried(late, fresh_F), torch.tensor([3.0, 4.0]))
    assert torch.equal(carried(late, fresh_F * 100), late.delta_F)
    assert torch.equal(carried(UpdateWithoutQuorum(torch.zeros(2), 3, 10, 20), fresh_F), torch.zeros(2))


def test_late_work_on_disk_is_read_back_or_refused():
    """Of another size, or damaged: a ValueError, which costs this member its late work and nothing else."""
    late = UpdateWithoutQuorum(torch.tensor([1.0, -2.0]), 3, 10, 20)
    again = late_from_bytes(late_bytes(late), 2)
    assert torch.equal(again.delta_F, late.delta_F) and (again.since, again.steps, again.samples) == (3, 10, 20)
    infinite, nothing = (
        UpdateWithoutQuorum(torch.tensor([1.0, float("inf")]), 3, 10, 20),
        UpdateWithoutQuorum(late.delta_F, 3, 0, 20),
    )
    nameless = dump({"late": late.delta_F}, {"format": FORMAT})
    damaged = late_bytes(late)[:-1], b"", nameless, late_bytes(infinite), late_bytes(nothing)
    for data, floats in ((late_bytes(late), 3), *((data, 2) for data in damaged)):
        with pytest.raises(ValueError):
            late_from_bytes(data, floats)


WHOLE = recipe_for({"fragments": 1, "overlap": 0})
UNFIT = {
    "fragments": recipe_for({"fragments": 2, "overlap": 0}),
    "mix": recipe_for({"fragments": 1, "overlap": 3, "merge": MixMerge(0.5)}),
    "gradients": data_parallel("gpt-nano", rounds=3),
    "quorum": replace(WHOLE, reducer=ReductionSettings(quorum=2, grace=2)),
}


@pytest.mark.parametrize("recipe", UNFIT.values(), ids=UNFIT)
def test_recipes_that_cannot_take_late_work_are_refused_when_the_run_is_founded(book, recipe):
    settings = RunSettings(apart=PartitionPolicy("merge", 10))
    assert founding_blobs(start_of_built_in(WHOLE, book), settings).settings.apart == settings.apart
    with pytest.raises(UsageError, match="cannot train apart") as refused:
        founding_blobs(start_of_built_in(recipe, book), settings)
    assert refused.value.code == "E-RUN-20"
