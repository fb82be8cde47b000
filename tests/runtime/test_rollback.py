"""What a real island does when the run goes back, and which states stay on its disk for that."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from members import Members, recipe_for
from members import story as told
from msgspec.structs import replace
from torch import nn

from atoll.base.errors import RunFailedError
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.peer.config.sections import KeepSection
from atoll.peer.tasks import AdoptState, CheckStateStored, RestoreEarlierState, TrainRound
from atoll.runtime.control.rollback import roll_back, rounds_here
from atoll.runtime.storage.blob_retention import STATES_KEPT_S, BlobRetention
from atoll.runtime.storage.retention import SPACED_MAX, StateRetention
from atoll.runtime.storage.state_files import FileStateStore
from atoll.runtime.storage.store import PeerStore
from atoll.training.exchange.layout import layout_of
from atoll.training.recipe.methods import des_loc, eager
from atoll.training.recipe.recipes import Recipe, for_real_run
from atoll.training.recipe.state import initial_state, rolled_back, state_from_bytes
from atoll.wire.codec import encode
from atoll.wire.messages.vertex import SwarmRoundMetrics, Vertex, VertexBody
from atoll.worker.shared_states import AgreedStateCache

RECIPES = {
    "plain": recipe_for({"overlap": 0, "fragments": 1}, rounds=9),
    "overlap": recipe_for({"overlap": 4, "fragments": 1, "merge": "delta"}, rounds=9),
    "fragments": recipe_for({"overlap": 2, "fragments": 2, "merge": "delta"}, rounds=9),
    "eager": for_real_run(replace(eager("gpt-nano", rounds=9, inner_steps=12, batch=2, seq_len=16)), "int8"),
}

AVERAGED = for_real_run(des_loc("gpt-nano", rounds=9, inner_steps=12, batch=2, seq_len=16), "int8")


async def to(members: Members, back_to: Digest) -> None:
    """A round that everybody trained in goes back instead."""
    recipe = members.recipe
    work = RestoreEarlierState(
        members.round, members.state, back_to, recipe.schedule.turn_steps, len(members.islands)
    )
    states = {(await island.run(work)).state for island in members.islands}
    assert len(states) == 1
    (members.state,) = states
    members.round += 1
    for island in members.islands:
        await island.run(AdoptState(members.round - 1, members.vertex(), members.state, None, afresh=True))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_an_island_goes_on_with_nothing_of_its_own(tmp_path: Path, book: str, recipe: Recipe):
    """Three rounds, back to the first; then both islands train on as two that just came, to the bit.

    Error feedback, moments, own anchors and steps under way led to the state that was left: none is there any more.
    """

    async def story() -> None:
        members = Members(tmp_path / "a", recipe, book)
        await members.begin()
        await members.play()
        first = members.state
        await members.play()
        await members.play()
        before = members.islands[0].head
        await to(members, first)
        head = members.islands[0].head
        (tmp_path / "b").mkdir()
        then = state_from_bytes(members.stores[0].read_blob(first), members.learning.layout)
        assert torch.equal(head.anchor_F, then.anchor_F) and torch.equal(head.momentum_P, then.momentum_P)
        assert (head.round, head.steps, head.tokens) == (then.round, then.steps, then.tokens)
        assert head.samples == before.samples + recipe.schedule.turn_steps * recipe.batch * 2 > then.samples
        for island in members.islands:
            assert island.mine.memory_F is None and island.live.inner == b"" and island.mine.update is None
        fresh = Members(tmp_path / "b", recipe, book)
        fresh.state = {store.put_blob(members.stores[0].read_blob(members.state)) for store in fresh.stores}.pop()
        fresh.round = members.round
        await fresh.begin()
        for _ in range(2):
            await members.play()
            await fresh.play()
            assert members.state == fresh.state

    asyncio.run(story())


@pytest.mark.parametrize("back", [True, False], ids=["the run went back", "they were averaged"])
def test_moments_of_a_past_that_is_gone_do_not_come_back_with_a_round_of_others(
    tmp_path: Path, book: str, back: bool
):
    """Its trainer is there again, for a validation say; then the others train and it rests."""

    async def story(members: Members) -> None:
        await members.play()
        first = members.state
        await members.play()
        await members.play()
        if back:
            await to(members, first)
        rests = members.islands[1]
        await rests._ready()
        does = rests.run

        async def run(work: object) -> object:
            return None if isinstance(work, TrainRound) else await does(work)

        rests.run = run
        await members.play(encoding=[0])
        assert rests.live.inner == await rests.trainer.inner_state()

    told(story, Members(tmp_path, RECIPES["plain"] if back else AVERAGED, book))


@pytest.mark.parametrize("at", ["start", "set_inner_state"])
@pytest.mark.parametrize("recipe", [RECIPES["plain"], RECIPES["eager"]], ids=["plain", "eager"])
def test_a_trainer_that_is_starting_holds_nobody_up_and_begins_from_there(
    tmp_path: Path, book: str, recipe: Recipe, at: str, monkeypatch: pytest.MonkeyPatch
):
    """Its imports take minutes, say, or it is just being given moments that led elsewhere."""

    async def story() -> None:
        members = Members(tmp_path / "a", recipe, book)
        await members.begin()
        await members.play()
        first = members.state
        await members.play()
        island = members.islands[0]
        island.live.inner = await island.trainer.inner_state()  # of the state that is left
        begun, goes_on = asyncio.Event(), asyncio.Event()
        where = island.tended if at == "start" else island.trainer
        does, given = getattr(where, at), []

        async def slow(value: object) -> None:
            given.append(value)
            begun.set()
            await goes_on.wait()
            await does(value)

        monkeypatch.setattr(where, at, slow)
        island.tended.ready = False
        warm = asyncio.create_task(island.warm_up())
        await begun.wait()
        await asyncio.wait_for(to(members, first), 10)
        goes_on.set()
        await warm
        assert island.tended.ready and torch.equal(island.trainer.read_x(), island.head.anchor_F)
        assert at == "start" or given[-1] == b""
        await members.play()

    asyncio.run(story())


def test_a_state_that_is_not_here_or_not_whole_is_not_gone_back_to(tmp_path: Path, book: str):
    """Damaged bytes are set aside when they are looked for; nobody is sent to them."""

    async def story() -> None:
        members = Members(tmp_path / "a", RECIPES["plain"], book)
        await members.begin()
        first = members.state
        for _ in range(6):  # until it is not in memory any more
            await members.play()
        island, store = members.islands[0], members.stores[0]
        assert await island.run(CheckStateStored(first))
        path = store.blob_path(first)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert not await island.run(CheckStateStored(first)) and not path.exists()
        with pytest.raises(RunFailedError, match="not on this disk"):
            await island.run(RestoreEarlierState(members.round, members.state, first, 12, 2))

    asyncio.run(story())


# ---- which states stay ---------------------------------------------------------------------------------------


class History:
    """A store whose rounds agreed on states of one kilobyte."""

    def __init__(self, folder: Path, keep: KeepSection) -> None:
        self.store, self.keep = PeerStore(folder, durable=False), keep
        self.model = nn.Linear(2, 2)
        self.layout = layout_of(self.model)
        self.retention = BlobRetention(self.store, keep)
        self.state: dict[int, Digest] = {}

    def goes_on(self, rounds: int) -> None:
        for _ in range(rounds):
            round = len(self.state) - 1
            state = rolled_back(initial_state(self.model), initial_state(self.model), len(self.state))
            states = FileStateStore(self.store, self.retention)
            self.state[round] = AgreedStateCache(states).stage(state, self.layout)
            states.commit(self.state[round])
            body = VertexBody(
                *(ZERO_DIGEST, round, 0, ZERO_DIGEST, 0.0, PeerId("ada"), (), self.state[round], (), (), (), ()),
                SwarmRoundMetrics(0.0, 0, 0),
            )
            self.store.keep([("genesis" if round == -1 else f"vertex/{round}", encode(Vertex(encode(body), None)))])
            self.retention.tidy({self.state[round]}, round)

    def here(self) -> list[int]:
        return [round for round, state in self.state.items() if self.store.has_blob(state)]

    def forget_lately(self) -> None:
        """As after a restart a minute later: only what stays for long, and the head, has a reason."""
        self.store.close()
        self.store = PeerStore(self.store.folder, durable=False)
        self.retention = BlobRetention(self.store, self.keep)
        head = max(self.state)
        self.retention.tidy({self.state[head]}, head)


def test_the_newest_states_and_some_older_ones_outlive_a_restart(tmp_path: Path):
    """Genesis, after every tenth round, three before the head; nothing else, also after months."""
    history = History(tmp_path, KeepSection(newest=3, every_rounds=10))
    history.goes_on(36)
    history.forget_lately()
    assert history.here() == [-1, 9, 19, 29, 31, 32, 33, 34]
    assert (
        len(StateRetention(history.store, KeepSection(newest=3, every_rounds=10)).rounds(10**6 + 5))
        == 3 + SPACED_MAX
    )


def test_older_states_take_no_more_room_than_they_may(tmp_path: Path):
    """Room for four: the oldest gave way. Without any room the head stays."""
    history = History(tmp_path, KeepSection(newest=3, every_rounds=10))
    history.goes_on(36)
    size = history.store.blob_path(history.state[34]).stat().st_size
    history.keep = KeepSection(newest=3, every_rounds=10, bytes_max=4 * size)
    history.forget_lately()
    assert history.here() == [29, 31, 32, 33, 34]
    history.keep = KeepSection(bytes_max=0)
    history.forget_lately()
    assert history.here() == [34]


def test_states_of_the_last_minute_leave_room_for_those_to_go_back_to(tmp_path: Path):
    """Rounds of a moment and room for seven states: the spaced ones stay, the rest is of the last minute."""
    history = History(tmp_path, KeepSection(newest=2, every_rounds=10))
    history.goes_on(1)
    size_bytes = history.store.blob_path(history.state[-1]).stat().st_size
    history.retention = BlobRetention(history.store, KeepSection(2, 10, bytes_max=7 * size_bytes))
    history.goes_on(24)
    assert history.here() == [-1, 9, 18, 19, 20, 21, 22, 23]


def test_a_state_stays_while_members_fetch_it_and_a_request_alone_keeps_none(tmp_path: Path):
    """Requests for what is not here, or stays anyway, take the place of none that is fetched."""
    history = History(tmp_path, KeepSection(newest=0, every_rounds=1000, bytes_max=0))
    history.goes_on(1)
    history.store.note_served(history.state[-1])
    history.goes_on(4)
    assert history.here() == [-1, 2, 3], "the head and the one before it stay anyway"
    for name in (history.state[0], history.state[3], Digest(b"?" * 32)):
        history.store.note_served(name)
    history.goes_on(1)
    assert history.here() == [-1, 3, 4]


def test_a_state_that_was_looked_for_stays_though_nothing_else_wants_it(tmp_path: Path):
    """It may be on its way from a member for longer than the minute that others stay."""
    history = History(tmp_path, KeepSection(newest=1, every_rounds=1000))
    history.goes_on(12)
    assert STATES_KEPT_S > 1
    history.retention.pin_state(history.state[3])
    history.retention._kept_since.clear()
    history.retention._replaced.clear()
    history.retention.tidy(set(), 10)
    assert 3 in history.here() and 4 not in history.here()


def test_a_round_whose_vertex_is_damaged_is_named_and_stands_in_nobodys_way(tmp_path: Path):
    store = PeerStore(tmp_path, durable=False)
    store.keep([("vertex/3", b"\xc1 no vertex")])
    host = SimpleNamespace(may_recover=True, store=store, folder=tmp_path)
    with pytest.raises(RunFailedError, match=r"E-CHK-02.*round 3"):
        asyncio.run(roll_back(host, 3, 1.0))
    assert rounds_here(store) == []
    store.close()
