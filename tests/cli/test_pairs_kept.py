"""A folder of a run whose members exchange in pairs: what is said of its rounds, and whose state is given away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.base.errors import UsageError
from atoll.base.ids import Digest, PeerId
from atoll.cli import checkpoint
from atoll.cli.verify import verify
from atoll.host.retention import Retention
from atoll.host.store import Store
from atoll.host.visitor import Taken, _Shelf
from atoll.node.config.sections import Keep
from atoll.node.jobs import OthersStates, Restore
from atoll.node.settings import RunSettings
from atoll.policy.plan import RoundSettings
from atoll.sim.paired import PairedIsland
from atoll.sim.signatures import RealKeys
from atoll.sim.swarm import Swarm, SwarmKnobs
from atoll.wire.pairs import Roll, is_roll, roll_from_bytes

ROUNDS = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the first of three virtual members has kept, on a real disk."""
    settings = RunSettings(
        open_to_all=True, topology="pairs", round=RoundSettings(inner_steps=20, first_train_s=10)
    )
    swarm = Swarm(3, SwarmKnobs(peers=3, run=settings), keys=RealKeys(3), island=PairedIsland)
    swarm.world.run(1e3, stop=lambda: min(swarm.heads()) >= ROUNDS)
    node = swarm.world.nodes[swarm.founders[0]]
    store = Store(tmp_path / "peer", durable=False)
    store.keep([("run", swarm.run_id), *((name, value) for name, value in node.kept.items())])
    for data in node.island.blobs.values():
        store.put_blob(data)
    store.close()
    return tmp_path / "peer"


def roll_in(folder: Path, round: int) -> tuple[Digest, Roll]:
    with checkpoint.kept_in(folder) as kept:
        state = checkpoint.read_vertex(kept, folder, round)[1].state
    return state, roll_from_bytes((folder / "blobs" / state.hex()).read_bytes())


def test_the_history_holds_and_the_list_speaks_of_this_peers_own_model(folder: Path, capsys):
    assert verify(folder, deep=True) == 0
    checkpoint.listing(folder)
    said = capsys.readouterr().out
    assert f"this peer's own model is here of rounds -1…{ROUNDS}" in said and "gone back" not in said
    checkpoint.show(ROUNDS, folder)
    said = capsys.readouterr().out
    _, roll = roll_in(folder, ROUNDS)
    assert all(entry.state.hex() in said for entry in roll.states) and len(roll.states) == 3


def test_export_writes_a_members_state_says_whose_and_never_a_roll(folder: Path, tmp_path: Path, capsys):
    """Once its blob is gone there is nothing to export, though the roll is still there."""
    _, roll = roll_in(folder, ROUNDS)
    (mine,) = [entry for entry in roll.states if (folder / "blobs" / entry.state.hex()).exists()]
    checkpoint.export(ROUNDS, tmp_path / "out", folder)
    written = (tmp_path / "out").read_bytes()
    assert written == (folder / "blobs" / mine.state.hex()).read_bytes() and not is_roll(written)
    assert "that" in capsys.readouterr().out
    (folder / "blobs" / mine.state.hex()).unlink()
    with pytest.raises(UsageError, match="E-CHK-03"):
        checkpoint.export(ROUNDS, tmp_path / "other", folder)


def test_a_visitor_takes_the_roll_and_then_the_state_of_one(folder: Path):
    async def tell() -> None:
        store = Store(folder, durable=False)
        state, roll = roll_in(folder, ROUNDS)
        (mine,) = [entry for entry in roll.states if store.has_blob(entry.state)]
        data = store.read_blob(mine.state)
        store.drop_blobs({state})
        shelf = _Shelf(store, newest=True)
        asked = await shelf.do(Restore(ROUNDS, Digest(b"v" * 32), state))
        assert isinstance(asked, OthersStates)
        assert set(asked.held) == {(entry.peer, entry.state) for entry in roll.states}
        store.put_blob(data)
        waiting = asyncio.create_task(shelf.do(Restore(ROUNDS, Digest(b"v" * 32), state)))
        assert await shelf.taken == Taken(ROUNDS, mine.state, mine.peer)
        waiting.cancel()
        await shelf.close()
        store.close()

    asyncio.run(tell())


def test_of_the_rounds_that_stay_my_own_state_stays(folder: Path):
    store = Store(folder, durable=False)
    retention = Retention(store, Keep(newest=2, every_rounds=100))
    rolls = retention.states(ROUNDS)
    assert all(is_roll(store.read_blob(name)) for name in rolls if name != _genesis(folder))
    entries = [roll_in(folder, ROUNDS - back)[1].states for back in (1, 2)]
    (me,) = {entry.peer for states in entries for entry in states if store.has_blob(entry.state)}
    retention.me = PeerId(me)
    mine = {entry.state for states in entries for entry in states if entry.peer == me}
    assert retention.states(ROUNDS) == rolls | mine and len(mine) == 2
    store.close()


def _genesis(folder: Path) -> Digest:
    with checkpoint.kept_in(folder) as kept:
        return checkpoint.read_vertex(kept, folder, -1)[1].state
