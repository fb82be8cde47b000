"""Pieces of older states from a peer's side, and as whoever reads the history later sees them."""

from __future__ import annotations

from functools import cache

import pytest
from msgspec.structs import replace

from atoll.base.ids import Digest
from atoll.node.verify import Kept, verify_history
from atoll.policy.pieces import Coded
from atoll.protocol.dag import history as dag
from atoll.sim.signatures import VirtualVerifier
from atoll.sim.swarm import Swarm, SwarmKnobs, peer_name
from atoll.wire.codec import decode_body, decode_vertex, encode, vertex_id

pytest.importorskip("pyeclib")

CODED = Coded(2, 4, every_rounds=3, lost_s=15.0)


@cache
def history() -> tuple[Digest, bytes, dict[int, bytes]]:
    """Thirty rounds of five whose states lie in four pieces; a holder goes for good."""
    knobs = SwarmKnobs(peers=5)
    knobs.run = replace(knobs.run, coded=CODED)
    swarm = Swarm(3, knobs)
    world = swarm.world
    world.run(1e3, stop=lambda: min(swarm.heads()) >= 10)
    world.leave(peer_name(3))
    world.run(1e3, stop=lambda: swarm.head(peer_name(0)) >= 30)
    node = world.nodes[peer_name(0)]
    rows = {int(k[7:]): v for k, v in node.kept.items() if k.startswith("vertex/")}
    return swarm.run_id, node.kept["genesis"], rows


def problems(rows: dict[int, bytes], trusted: Digest | None = None) -> list[tuple[int, str, str]]:
    run, genesis, _ = history()
    audit = verify_history(Kept(run, genesis, sorted(rows), rows.get), VirtualVerifier(), trusted)
    return [(p.round, p.kind, p.what) for p in audit.problems]


def placing() -> list[int]:
    """Rounds whose vertex holds words of holders."""
    bodies = {r: decode_body(decode_vertex(v).body) for r, v in history()[2].items()}
    return [r for r, body in bodies.items() if any(b"Placed" in s.body for s in body.reports)]


def test_a_history_with_pieces_is_intact():
    assert problems(history()[2]) == [] and len(placing()) >= 8


def test_whoever_trusts_a_late_vertex_finds_the_rest_intact(monkeypatch: pytest.MonkeyPatch):
    """Memory holds fewer vertices than lie before the trusted one; those that drew holders are among them."""
    monkeypatch.setattr(dag, "WINDOW", 4)
    rows = history()[2]
    trusted = next(r - 1 for r in placing() if r > 12)
    assert problems(rows, vertex_id(decode_vertex(rows[trusted]).body)) == []


def test_one_damaged_word_is_one_problem():
    """The vertex holds what is no statement any more; those after it are not blamed."""
    rows = dict(history()[2])
    round = placing()[1]
    vertex = decode_vertex(rows[round])
    body = decode_body(vertex.body)
    damaged = tuple(replace(signed, body=b"\xc1" + signed.body[1:]) for signed in body.reports)
    rows[round] = encode(replace(vertex, body=encode(replace(body, reports=damaged))))
    assert [(r, kind) for r, kind, _ in problems(rows)] == [(round, "body")]
