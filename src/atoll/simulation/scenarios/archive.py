"""Older states in pieces: placed without transfer, restored from any k, repaired when holders leave."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Fact, Payload
from atoll.crypto.digest import digest
from atoll.features.archive.policy import PlacementLedger
from atoll.peer.events import ArchivedStateRebuilt, ErasurePieceStored
from atoll.policy.capability_terms import ErasureParams
from atoll.protocol.transfer.download import CorruptBlobSourceDetected
from atoll.protocol.transfer.tasks import ReadChunk
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.signatures import peer_name
from atoll.simulation.swarm import SwarmKnobs
from atoll.simulation.worker import VirtualWorker, WorkerKnobs
from atoll.simulation.world import VirtualComputer

CODED = ErasureParams(6, 10, every_rounds=3, lost_s=15.0)
STATES_KEPT = 8  # blobs beside those that are held: fewer than the rounds of the scenario
LIAR = 2  # index of the member with a disk that returns wrong bytes
LEAVERS = 2


@dataclass
class CorruptArchiveWorker(VirtualWorker):
    """Worker that claims to hold its pieces, and serves other bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.handlers[ReadChunk] = self._read_wrong

    def _read_wrong(self, work: ReadChunk) -> Payload | None:
        chunk = self._read_chunk(work)
        if chunk is None or work.blob not in self.pieces:
            return chunk
        return Payload(digest(b"wrong"), chunk.size_bytes, b"wrong")


class ArchiveRecorder:
    def __init__(self, stage: ScenarioContext) -> None:
        self.stage = stage
        self.truth: dict[Digest, bytes] = {}  # digest → every state that ever existed
        self.named: Counter[PeerId] = Counter()
        self.repaired: list[tuple[int, int]] = []
        self.rebuilt: set[tuple[PeerId, Digest]] = set()
        self.wrong: list[Digest] = []

    def watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        self.truth.update((n, b) for n, b in node.island.blobs.items() if n == node.island.head)
        match fact:
            case CorruptBlobSourceDetected(peer=peer):
                self.named[peer] += 1
            case ErasurePieceStored(of=of, index=index, repaired=True):
                self.repaired.append((of, index))
            case ArchivedStateRebuilt(state=state):
                self.rebuilt.add((node.name, state))
                self.wrong += [state] if node.island.blobs[state] != self.truth.get(state) else []
            case _:
                pass

    @property
    def ledger(self) -> PlacementLedger:
        pools = [n.machine.pool for n in self.stage.swarm.honest if n.machine is not None]
        return max(
            (p.ledgers.get(PlacementLedger) for p in pools if p is not None), key=lambda ledger: ledger.book.head
        )

    def until(self, true: Callable[[], bool], within_s: Seconds, what: str) -> None:
        """Check once per virtual second: a check at every event would cost more than the scenario."""
        world, end = self.stage.world, self.stage.world.now + within_s
        while not true() and world.now < end:
            world.run(world.now + 1.0)
        self.stage.until(true, 0.0, what)

    def full(self, entries: int) -> bool:
        """True if at least this many states are placed, with every piece at its holder."""
        found = [e for e in self.ledger.entries if e.here == CODED.n and e.placed]
        return len(found) >= entries and all(e.here == CODED.n for e in self.ledger.entries[:-1])


def pieces(stage: ScenarioContext) -> None:
    """Thirteen members, 6 of 10: states are placed without a byte; two leave and six pieces each repair them.

    Then three vanish and one lies, and every older state comes back, bit for bit, although no member holds it
    whole.
    """
    told = ArchiveRecorder(stage)

    def island(me: PeerId, knobs: WorkerKnobs, draw: random.Random) -> VirtualWorker:
        return (CorruptArchiveWorker if me == peer_name(LIAR) else VirtualWorker)(me, knobs, draw)

    knobs = SwarmKnobs(stage.peers, island=WorkerKnobs(states_kept=STATES_KEPT), run=stage.settings(coded=CODED))
    swarm = stage.gather(knobs, island=island)
    stage.world.watchers.append(told.watch)
    stage.until_round(stage.rounds - 1)
    told.until(lambda: told.full(stage.rounds // CODED.every_rounds - 1), 60.0, "not every piece was placed")
    older = [e.state for e in told.ledger.entries if e.round < stage.rounds - STATES_KEPT]
    _demand(bool(older), "the story is too short to have older states")
    whole = [n.name for n in swarm.honest for state in older if state in n.island.blobs]
    _demand(not whole, f"{whole} still hold older states whole")
    _demand(_given(swarm.world.nodes) == 0, f"placing took {_given(swarm.world.nodes)} bytes")

    leavers = [p for p in told.ledger.entries[0].holders if p != peer_name(LIAR)][:LEAVERS]
    for peer in leavers:
        stage.fault("leave")
        swarm.world.leave(peer)
    lost = [(e.round, i) for e in told.ledger.entries for i, p in enumerate(e.holders) if p in leavers]
    told.until(
        lambda: all(
            (of, i) in told.repaired or not told.ledger.entry(of) for of, i in lost if _old(told, of, older)
        ),
        300.0,
        "pieces of who left were not made anew",
    )
    told.until(lambda: told.full(1), 60.0, "not every piece is placed again")

    vanish = stage.draw.sample([n.name for n in swarm.honest if n.name != peer_name(LIAR)], CODED.n - CODED.k - 1)
    for peer in vanish:
        stage.fault("vanish")
        swarm.world.crash(peer)
    left = [n for n in swarm.honest if n.name != peer_name(LIAR)]
    seeker = stage.draw.choice(left)
    for state in older:
        _seek(seeker, state, stage)
    told.until(
        lambda: all((seeker.name, state) in told.rebuilt for state in older),
        120.0,
        f"{len(older)} older states were not made again",
    )
    _demand(not told.wrong, "a state came back other than it was")
    _demand(set(told.named) <= {peer_name(LIAR)}, f"honest holders were named: {told.named}")


def restore_everything(stage: ScenarioContext) -> None:
    """At the end a drawn member restores every state that is stored in pieces."""
    told = ArchiveRecorder(stage)
    stage.world.watchers.append(told.watch)
    seeker = stage.draw.choice(stage.swarm.honest)
    told.until(lambda: any(e.placed for e in told.ledger.entries), 120.0, "no state was ever placed")
    states = [entry.state for entry in told.ledger.entries if entry.placed]

    def again() -> bool:
        left = [state for state in states if (seeker.name, state) not in told.rebuilt]
        for state in left:
            _seek(seeker, state, stage)
        return not left

    told.until(again, 120.0, f"not each of {len(states)} older states could be made again")


def _old(told: ArchiveRecorder, of: int, older: list[Digest]) -> bool:
    entry = told.ledger.entry(of)
    return entry is not None and entry.state in older


def _seek(node: VirtualComputer, state: Digest, stage: ScenarioContext) -> None:
    assert node.machine is not None
    effects = node.machine.downloads.fetch_state(state, node.clock.local(stage.world.now))
    stage.world.carry_out(node, effects)


def _given(nodes: dict[PeerId, VirtualComputer]) -> int:
    return sum(node.island.given_bytes for node in nodes.values())


def _demand(true: bool, what: str) -> None:
    if not true:
        raise InvariantBroken(what)
