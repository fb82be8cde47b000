"""Parts of recent rounds, for a member that fetches a state while others agree on several rounds."""

from __future__ import annotations

from atoll.base.ids import Digest, PeerId
from atoll.base.limits import ROUNDS_ON_DISK
from atoll.base.machine import Payload, RunTask, Send, TaskDone, TaskFailed
from atoll.crypto.digest import digest
from atoll.peer.events import UpdateSharingBegan
from atoll.peer.participation import RunParticipationMachine
from atoll.peer.settings import RunSettings
from atoll.peer.sync.part_cache import RecentPartCache
from atoll.peer.tasks import MovePartsToDisk
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.worker import WorkerKnobs
from atoll.wire.messages.round import PartRequest

LARGE = 100_000_000  # bytes of a part; memory has room for one


def part(round: int, size_bytes: int = LARGE) -> Payload:
    return Payload(digest(f"part of round {round}".encode()), size_bytes, "in memory")


def played(rounds: int, is_behind: bool, size_bytes: int = LARGE) -> RecentPartCache:
    """As many rounds of one part, each closed before the next begins; files take it if a member is behind."""
    cache = RecentPartCache()
    for round in range(rounds):
        cache.begin(round)[part(round).digest] = part(round, size_bytes)
        for effect in cache.move_to_disk(round) if is_behind else ():
            assert isinstance(effect, RunTask) and isinstance(effect.work, MovePartsToDisk)
            moved = tuple(Payload(p.digest, p.size_bytes, "on disk") for p in effect.work.parts)
            cache.on_moved(TaskDone(effect.job, moved))
    cache.begin(rounds)
    return cache


def given(cache: RecentPartCache, round: int) -> list[str]:
    """What a member that requests the part of a round gets."""
    wish = PartRequest(round, 0, Digest(bytes(32)), part(round).digest)
    return [
        e.payload.data for e in cache.give(PeerId("late"), wish) if isinstance(e, Send) and e.payload is not None
    ]


def test_rounds_without_room_in_memory_are_on_disk_while_a_member_is_behind():
    late = played(20, is_behind=True)
    assert [given(late, round) for round in (19, 18, 19 - ROUNDS_ON_DISK)] == [
        ["in memory"],
        ["on disk"],
        ["on disk"],
    ]
    assert not given(late, 18 - ROUNDS_ON_DISK) and len(late.on_disk) == ROUNDS_ON_DISK
    assert given(played(20, is_behind=False), 17) == []


def test_small_rounds_stay_in_memory():
    assert given(played(20, is_behind=True, size_bytes=1_000_000), 5) == ["in memory"]


def test_a_full_disk_costs_older_rounds_only():
    cache = RecentPartCache()
    for round in range(4):
        cache.begin(round)[part(round).digest] = part(round)
        for effect in cache.move_to_disk(round):
            assert isinstance(effect, RunTask)
            cache.on_moved(TaskFailed(effect.job, "the disk is full"))
    cache.begin(4)
    assert [given(cache, round) for round in (3, 2)] == [["in memory"], []]


def test_a_round_that_is_dropped_meanwhile_does_not_come_back():
    cache = RecentPartCache()
    cache.begin(0)[part(0).digest] = part(0)
    cache.begin(1)
    (effect,) = cache.move_to_disk(1)
    cache.keep_only(1)
    cache.on_moved(TaskDone(effect.job, (part(0),)))
    assert sorted(cache.held) == [1] and not cache.on_disk


def test_members_keep_parts_on_disk_for_a_newcomer_and_for_nobody_else():
    """The newcomer's link takes minutes for the parts of a round."""
    work = WorkerKnobs(1.0, update_bytes=200_000_000, state_bytes=1_600_000_000)
    run = RunSettings(open_to_all=True, update_bytes=800_000_000)
    swarm = VirtualSwarm(1, SwarmKnobs(2, NetworkKnobs(0.002, 0.004), work, run=run))
    ada, far = peer_name(0), peer_name(3)
    moved: list[int] = []

    def watch(now: float, node, fact) -> None:
        if node.name == ada and isinstance(fact, UpdateSharingBegan):
            moved.append(len(peer_of(swarm, ada).old_parts.on_disk))

    swarm.world.watchers.append(watch)
    swarm.world.run(1000, stop=lambda: swarm.head(ada) >= 3)
    assert not any(moved)
    swarm.world.network.downlink_bytes_s[far] = 2e6
    swarm.join(3, via=ada)
    before = swarm.head(ada)
    swarm.world.run(swarm.world.now + 1000, stop=lambda: swarm.head(ada) >= before + 6)
    assert any(moved)


def peer_of(swarm: VirtualSwarm, name: PeerId) -> RunParticipationMachine:
    return swarm.world.nodes[name].machine.participation
