"""Older states in pieces, in the virtual world: any four of ten may vanish, and repairs cost what they should."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Fact, Send
from atoll.features.archive.policy import PlacementLedger
from atoll.features.archive.reed_solomon import piece_bytes
from atoll.peer.events import ArchivedStateRebuildFailed, ArchivedStateRebuilt, ErasurePieceStored
from atoll.peer.peer import Peer
from atoll.peer.settings import RunSettings
from atoll.policy.capability_terms import ErasureParams
from atoll.policy.plan import RoundSettings
from atoll.simulation.scenarios import run_scenario
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm
from atoll.simulation.worker import WorkerKnobs
from atoll.simulation.world import VirtualComputer
from atoll.wire.messages.history import ChunkRequest

pytest.importorskip("pyeclib")

CODED = ErasureParams(6, 10, every_rounds=3, lost_s=15.0)
DRAWN = random.Random(4).sample(list(combinations(range(10), 4)), 3)


class Placed:
    """A swarm with the states of rounds 2, 5 and 8 in ten pieces and nowhere whole."""

    def __init__(self, peers: int, seed: int = 1) -> None:
        plan = RoundSettings(inner_steps=20, first_train_s=10)
        run = RunSettings(open_to_all=True, round=plan, coded=CODED)
        self.swarm = VirtualSwarm(seed, SwarmKnobs(peers, island=WorkerKnobs(states_kept=4), run=run))
        self.world = self.swarm.world
        self.facts: list[tuple[PeerId, Fact]] = []
        self.truth: dict[Digest, bytes] = {}
        self.world.watchers.append(self.watch)
        self.until(lambda: min(self.swarm.heads(), default=-2) >= 14)
        self.old = [e for e in self.ledger(self.swarm.founders[0]).entries if e.round <= 8]
        assert [e.round for e in self.old] == [2, 5, 8] and all(e.placed for e in self.old)
        for e in self.old:
            assert not any(e.state in n.island.blobs for n in self.swarm.honest)

    def watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        self.truth.update((n, b) for n, b in node.island.blobs.items() if n == node.island.head)
        self.facts.append((node.name, fact))
        if isinstance(fact, ArchivedStateRebuilt):
            assert node.island.blobs[fact.state] == self.truth[fact.state], "bit for bit"

    def until(self, true, within_s: float = 300.0) -> None:
        end = self.world.now + within_s
        while not true() and self.world.now < end:  # looked at once a virtual second: at every event it costs more
            self.world.run(self.world.now + 1.0)
        assert true()

    def ledger(self, peer: PeerId):
        machine = self.world.nodes[peer].machine
        assert machine is not None and machine.pool is not None
        return machine.pool.ledgers.get(PlacementLedger)

    def told(self, kind: type[Fact]) -> list:
        return [fact for _, fact in self.facts if isinstance(fact, kind)]

    def restore(self, seeker: PeerId) -> None:
        node = self.world.nodes[seeker]
        assert isinstance(node.machine, Peer)
        for e in self.old:
            self.world.carry_out(
                node, node.machine.downloads.fetch_state(e.state, node.clock.local(self.world.now))
            )
        states = {e.state for e in self.old}
        self.until(
            lambda: (
                states <= {f.state for who, f in self.facts if who == seeker and type(f) is ArchivedStateRebuilt}
            )
        )

    def idle(self) -> bool:
        """No member is in the middle of making a piece."""
        made = [n.machine.pieces for n in self.swarm.honest if n.machine is not None]
        return all(pieces is not None and pieces.making is None for pieces in made)

    def given(self) -> int:
        return sum(node.island.given_bytes for node in self.world.nodes.values())


@pytest.mark.parametrize(
    "way", [DRAWN[0], *(pytest.param(way, marks=pytest.mark.long) for way in DRAWN[1:])], ids=str
)
def test_ten_members_of_which_any_four_vanish_restore_every_older_state(way: tuple[int, ...]):
    """Drawn from all 210 ways (`tests/crypto/test_erasure.py` has each): a survivor restores all three."""
    placed = Placed(10)
    assert placed.given() == 0, "every holder cut its piece out of the state that it held: placing takes no byte"
    for index in way:
        placed.world.crash(placed.swarm.founders[index])
    placed.restore(placed.swarm.honest[way[0] % 6].name)
    took = sum(5 * piece_bytes(len(placed.truth[e.state]), 6) for e in placed.old)  # one of six is its own
    assert took <= placed.given() <= 2 * took, "spares of holders that were not yet known to be dead, and no more"


def test_with_five_gone_nothing_is_made_up():
    placed = Placed(10)
    for index in range(5):
        placed.world.crash(placed.swarm.founders[index])
    node = placed.swarm.honest[0]
    assert isinstance(node.machine, Peer)
    placed.world.carry_out(
        node, node.machine.downloads.fetch_state(placed.old[0].state, node.clock.local(placed.world.now))
    )
    placed.until(lambda: placed.told(ArchivedStateRebuildFailed))
    assert placed.told(ArchivedStateRebuildFailed)[0].why.startswith("5 of 6 pieces") and not placed.told(
        ArchivedStateRebuilt
    )


def test_who_leaves_for_good_is_made_good_by_six_pieces_for_each(monkeypatch: pytest.MonkeyPatch):
    """Thirteen members, two leave. Old states, whole nowhere, cost exactly k pieces each; the newest cost
    nothing."""
    placed = Placed(13, seed=3)
    leavers = placed.old[0].holders[:2]
    lost = [(e, i) for e in placed.old for i, p in enumerate(e.holders) if p in leavers]
    for peer in leavers:
        placed.world.leave(peer)
    watcher = next(n.name for n in placed.swarm.honest if n.name not in leavers)
    before = placed.given()
    rude: list[PeerId] = []
    send_on = placed.world._send

    def listen(node: VirtualComputer, send: Send) -> None:
        round = node.machine.round if isinstance(node.machine, Peer) else None
        if isinstance(send.message, ChunkRequest) and round is not None and round.patience.sharing:
            rude.append(node.name)
        send_on(node, send)

    monkeypatch.setattr(placed.world, "_send", listen)
    repaired = lambda: {(f.of, f.index) for f in placed.told(ErasurePieceStored) if f.repaired}  # noqa: E731
    placed.until(lambda: {(e.round, i) for e, i in lost} <= repaired())
    placed.until(lambda: all(e.here == 10 for e in placed.ledger(watcher).entries[:3]) and placed.idle())
    sizes = {f.of: f.size_bytes for f in placed.told(ErasurePieceStored)}
    took = placed.given() - before
    assert took == sum(6 * sizes[of] for of, _ in repaired())
    assert not rude, "while a round shares its updates nobody asks for pieces"
    for e in placed.ledger(watcher).entries:
        assert not set(e.holders) & set(leavers)
    for peer in placed.swarm.founders[:9:3]:  # and it holds as before: more vanish
        placed.world.crash(peer)
    placed.restore(placed.swarm.honest[-1].name)


def test_who_comes_back_in_time_keeps_its_pieces_and_nobody_makes_any():
    placed = Placed(11, seed=3)
    holder = placed.old[0].holders[0]
    placed.world.crash(holder)
    placed.world.run(placed.world.now + CODED.lost_s / 2)
    placed.world.start(holder)
    placed.world.run(placed.world.now + CODED.lost_s)
    assert placed.ledger(holder).entries[0].holders[0] == holder
    assert not any(f.repaired for f in placed.told(ErasurePieceStored))


def test_a_holder_whose_disk_lost_a_piece_makes_it_anew_when_it_starts():
    placed = Placed(10)
    entry = placed.old[0]
    holder, names = entry.holders[3], entry.names
    assert names is not None
    placed.world.crash(holder)
    del placed.world.nodes[holder].island.blobs[names.pieces[3]]
    placed.world.start(holder)
    placed.until(lambda: names.pieces[3] in placed.world.nodes[holder].island.blobs)
    assert [f.repaired for who, f in placed.facts if who == holder and type(f) is ErasurePieceStored][-1]


def test_more_than_may_vanish_come_back_late_and_nothing_is_lost():
    """Five of ten holders are away for longer than they are waited for, so their pieces become others', who cannot
    make them out of five. What saves the states: no member drops a piece before another member has it."""
    placed = Placed(14, seed=5)
    away = placed.old[0].holders[:5]
    for peer in away:
        placed.world.leave(peer)
    watcher = next(n.name for n in placed.swarm.honest if n.name not in away)
    placed.until(lambda: not set(placed.ledger(watcher).entries[0].holders) & set(away))
    placed.until(lambda: placed.told(ArchivedStateRebuildFailed))
    assert placed.told(ArchivedStateRebuildFailed)[0].why.startswith("5 of 6 holders")
    for peer in away:
        placed.world.start(peer)
    placed.until(lambda: placed.ledger(watcher).entries[0].here == 10)
    placed.restore(watcher)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_the_story_of_pieces_ends_well(seed: int):
    """Thirteen members, one of which gives out wrong bytes; two leave, then three vanish."""
    report = run_scenario("pieces", seed)
    assert report.rounds >= 14 and report.faults == {"leave": 2, "vanish": 3}


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_in_bad_weather_goes_back_to_states_that_lie_in_pieces(seed: int):
    report = run_scenario("pieces_churn", seed, peers=6, rounds=20)
    assert report.rounds >= 20 and report.faults["rollback"] > 3
