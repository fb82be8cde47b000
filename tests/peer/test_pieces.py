"""Pieces of older states at a peer, and as later readers of the history see them."""

from __future__ import annotations

from functools import cache

import pytest
from msgspec.structs import replace

from atoll.base.ids import Digest
from atoll.base.machine import Effect, Emit, Send, Start, TaskFailed, TimerFired
from atoll.capabilities import CAPABILITIES
from atoll.features.archive.machine import ArchiveMachine, PieceJob
from atoll.features.archive.policy import PlacementLedger
from atoll.peer.events import ArchivedStateRebuildFailed
from atoll.peer.verify.chain import StoredHistory, verify_history
from atoll.policy.capability_terms import ErasureParams
from atoll.protocol.history import chain as dag
from atoll.simulation.signatures import VirtualSignatureVerifier
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.wire.codec import decode_body, decode_vertex, encode, vertex_id

pytest.importorskip("pyeclib")

CODED = ErasureParams(2, 4, every_rounds=3, lost_s=15.0)


def swarm_of(peers: int, coded: ErasureParams = CODED) -> VirtualSwarm:
    knobs = SwarmKnobs(peers=peers)
    knobs.run = replace(knobs.run, coded=coded)
    return VirtualSwarm(3, knobs)


@cache
def history() -> tuple[Digest, bytes, dict[int, bytes]]:
    """Thirty rounds of five members with states cut into four pieces; a holder leaves for good."""
    swarm = swarm_of(5)
    world = swarm.world
    world.run(1e3, stop=lambda: min(swarm.heads()) >= 10)
    world.leave(peer_name(3))
    world.run(1e3, stop=lambda: swarm.head(peer_name(0)) >= 30)
    node = world.nodes[peer_name(0)]
    rows = {int(k[7:]): v for k, v in node.kept.items() if k.startswith("vertex/")}
    return swarm.run_id, node.kept["genesis"], rows


def problems(rows: dict[int, bytes], trusted: Digest | None = None) -> list[tuple[int, str, str]]:
    run, genesis, _ = history()
    audit = verify_history(
        StoredHistory(run, genesis, sorted(rows), rows.get),
        VirtualSignatureVerifier(),
        CAPABILITIES.verifiers,
        trusted,
    )
    return [(p.round, p.kind, p.what) for p in audit.problems]


def placing() -> list[int]:
    """Rounds with holders' reports in their vertex."""
    bodies = {r: decode_body(decode_vertex(v).body) for r, v in history()[2].items()}
    return [r for r, body in bodies.items() if any(b"PiecesStored" in s.body for s in body.reports)]


def test_a_history_with_pieces_is_intact():
    assert problems(history()[2]) == [] and len(placing()) >= 8


def test_whoever_trusts_a_late_vertex_finds_the_rest_intact(monkeypatch: pytest.MonkeyPatch):
    """Memory holds fewer vertices than lie before the trusted one; those that drew holders are among them."""
    monkeypatch.setattr(dag, "WINDOW", 4)
    rows = history()[2]
    trusted = next(r - 1 for r in placing() if r > 12)
    assert problems(rows, vertex_id(decode_vertex(rows[trusted]).body)) == []


def test_one_damaged_word_is_one_problem():
    """The vertex holds bytes that are no statement any more; those after it are not blamed."""
    rows = dict(history()[2])
    round = placing()[1]
    vertex = decode_vertex(rows[round])
    body = decode_body(vertex.body)
    damaged = tuple(replace(signed, body=b"\xc1" + signed.body[1:]) for signed in body.reports)
    rows[round] = encode(replace(vertex, body=encode(replace(body, reports=damaged))))
    assert [(r, kind) for r, kind, _ in problems(rows)] == [(round, "body")]


def test_who_starts_again_before_the_first_state_is_cut_lacks_nothing():
    """Rounds with cut states are far apart, and memory holds only the newest vertices: still it may judge."""
    swarm = swarm_of(4, ErasureParams(2, 4, every_rounds=500, lost_s=1e6))
    swarm.world.run(1e3, stop=lambda: min(swarm.heads()) >= 20)
    node = swarm.world.nodes[peer_name(1)]
    given = {k: v for k, v in node.kept.items() if not k.startswith("vertex/") or int(k[7:]) > 12}
    again = node.make()
    again.handle(Start(given), 100.0)
    assert again.pool is not None and not again.pool.ledgers.get(PlacementLedger).book.lacks


def making(swarm: VirtualSwarm) -> tuple[ArchiveMachine, PieceJob]:
    """A holder that is just about to cut the newest state."""
    pieces = swarm.world.nodes[peer_name(0)].machine.pieces
    entry = next(e for e in reversed(pieces.ledger.entries) if pieces.me in e.holders)
    pieces.making = PieceJob(entry, entry.index_of(pieces.me))
    return pieces, pieces.making


def test_a_disk_that_is_full_is_no_reason_to_fetch_anything():
    """The state is here and cannot be cut: whatever came from others could not be written either."""
    swarm = swarm_of(4)
    swarm.world.run(1e3, stop=lambda: min(swarm.heads()) >= 12)
    pieces, made = making(swarm)
    job = f"pieces/cut/{made.entry.round}/{made.index}"
    effects = pieces.on_task_done(TaskFailed(job, "no space left on device"), [peer_name(1), peer_name(2)], 100.0)
    assert not any(isinstance(e, Send) for e in effects) and pieces.making is None
    (lost,) = [e.fact for e in effects if isinstance(e, Emit) and isinstance(e.fact, ArchivedStateRebuildFailed)]
    assert lost.why == "no space left on device" and pieces.again_at[made.entry.round] > 100.0


def test_whoever_waits_for_a_state_that_became_too_old_is_told():
    """It waited in the queue behind another one; by its turn no member keeps its pieces any more."""
    swarm = swarm_of(4)
    swarm.world.run(1e3, stop=lambda: min(swarm.heads()) >= 16)
    pieces = swarm.world.nodes[peer_name(0)].machine.pieces
    first, second = [e for e in pieces.ledger.entries if e.placed][:2]
    pieces.rebuild(first.state, 100.0)
    pieces.rebuild(second.state, 100.0)
    pieces.ledger.book.entries.remove(second)
    effects: list[Effect] = []
    for silent in range(1, 200):
        effects += pieces.on_download_event(TimerFired(f"gather/{first.state.hex()}"), True, 100.0 + silent)
    told = [e.fact.state for e in effects if isinstance(e, Emit) and isinstance(e.fact, ArchivedStateRebuildFailed)]
    assert told == [first.state, second.state] and not pieces.sought
