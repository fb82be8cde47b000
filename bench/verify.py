"""How long it takes to judge a long history offline, with real signatures.

Four peers with real keys agree on their first rounds in a virtual world; the history is then continued by their
keys with the functions that write bodies in real life, for as many vertices as wanted: four commitments, one answer
per part, three votes each. `wall_s` is the walk of `atoll verify` from genesis to the head, without the disk;
`flipped_bit_named` that a bit flipped in the middle is found in its round. Making the history is not measured.

`--sizes` tells instead how long a vertex is among more members, by kind of key: every member trains, every owner of
a part answers for all, and as many vote as are needed. Nobody comes or goes, so there are no reports.

    python bench/verify.py [--quick] [--json] [--sizes]
"""

from __future__ import annotations

import os
import time

from form import asking, lines, report, versions
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.capabilities import CAPABILITIES
from atoll.crypto.digest import digest
from atoll.crypto.signer import VoteKind
from atoll.peer.round.context import context_after
from atoll.peer.round.vertex_body import write_body
from atoll.peer.settings import RunSettings, decode_settings
from atoll.peer.verify.chain import HistoryVerificationReport, StoredHistory, verify_history
from atoll.policy.membership import RECENT, RecentVertices
from atoll.policy.plan import plan_round
from atoll.protocol.history.chain import VertexChain
from atoll.simulation.signatures import RealKeys
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm
from atoll.wire.codec import decode_body, decode_vertex, encode, vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import Commitment, OwnerResult, QuorumCertificate, Vote
from atoll.wire.messages.vertex import Vertex

VERTICES, QUICK_VERTICES = 10_000, 1_500
PEERS = 4
SIZED = ((4, 8, 16, 32, 100), ("ed25519", "ml-dsa-65"))
BEGUN_S = 30.0  # of virtual time, in which the peers agree on their first rounds by themselves


def begin() -> tuple[Digest, RealKeys, bytes, dict[int, bytes]]:
    keys = RealKeys(1)
    swarm = VirtualSwarm(1, SwarmKnobs(peers=PEERS), keys=keys)
    swarm.world.run(BEGUN_S)
    kept = swarm.world.nodes[keys.name(0)].kept
    rows = {int(name[7:]): data for name, data in kept.items() if name.startswith("vertex/")}
    return swarm.run_id, keys, kept["genesis"], rows


def go_on(run: Digest, keys: RealKeys, genesis: bytes, rows: dict[int, bytes], vertices: int) -> RunSettings:
    """Continue the history with what these peers could have signed."""
    first = decode_vertex(genesis)
    settings = decode_settings(decode_body(first.body).settings)
    notaries = {keys.name(i): StatementSigner(run, keys.signer(i, run), keys.verifier) for i in range(PEERS)}
    history = VertexChain(first, notaries[keys.name(0)], lambda head, body: ({}, 1))
    for round in sorted(rows):
        history.restore(decode_vertex(rows[round]))
    while len(rows) < vertices:
        vertex = next_vertex(run, history, settings, notaries)
        history.restore(vertex)
        rows[history.head] = encode(vertex)
    return settings


def next_vertex(
    run: Digest, history: VertexChain, settings: RunSettings, notaries: dict[PeerId, StatementSigner]
) -> Vertex:
    parent, round = history.head_body, history.head + 1
    plan = plan_round(history.head_id, parent, settings.round)
    ground = context_after(settings, plan, parent, RecentVertices(history.recent_states(RECENT)), run)
    root, names = digest(b"%d" % round), tuple(sorted(notaries))
    commits = {}
    for name, notary in notaries.items():
        commit = Commitment(round, 0, root, len(ground.owners), 20, 640, 2.0, 0.1, 640)
        commits[name] = (commit, notary.sign(commit))
    parts = [
        notaries[owners[0]].sign(OwnerResult(round, 0, part, 0, root, 1000, names))
        for part, owners in enumerate(ground.owners)
    ]
    proposer = notaries[plan.committee[round % len(plan.committee)]]
    body = write_body(ground, proposer, 0, parts, commits, (), state=root, now=parent.time_s + 30.0)
    raw = encode(body)
    vote = Vote(round, 0, "commit", vertex_id(raw))
    votes = tuple((name, notaries[name].sign(vote).signature) for name in names[: plan.quorum])
    return Vertex(raw, QuorumCertificate(round, 0, "commit", vote.digest, votes))


def size(peers: int, votes: VoteKind) -> int:
    """Bytes of the second vertex, in which all have a step time."""
    keys = RealKeys(1, votes)
    plan = replace(SwarmKnobs().run.round, votes=votes)
    swarm = VirtualSwarm(1, SwarmKnobs(peers, run=replace(SwarmKnobs().run, round=plan)), keys=keys)
    run, settings = swarm.run_id, swarm.knobs.run
    notaries = {keys.name(i): StatementSigner(run, keys.signer(i, run), keys.verifier) for i in range(peers)}
    history = VertexChain(swarm.genesis, notaries[keys.name(0)], lambda head, body: ({}, 1))
    for _ in range(2):
        vertex = next_vertex(run, history, settings, notaries)
        history.restore(vertex)
    return len(encode(vertex))


def judged(
    run: Digest, keys: RealKeys, genesis: bytes, rows: dict[int, bytes]
) -> tuple[HistoryVerificationReport, float]:
    began_s = time.perf_counter()
    audit = verify_history(
        StoredHistory(run, genesis, sorted(rows), rows.get), type(keys.verifier)(), CAPABILITIES.verifiers
    )
    return audit, time.perf_counter() - began_s


def measure(vertices: int) -> dict[str, object]:
    run, keys, genesis, rows = begin()
    go_on(run, keys, genesis, rows, vertices)
    began_cpu_s = time.process_time()
    audit, wall_s = judged(run, keys, genesis, rows)
    cpu_s = time.process_time() - began_cpu_s
    assert audit.intact, audit.problems[:3]
    middle = sorted(rows)[len(rows) // 2]
    near = {r: data for r, data in rows.items() if r <= middle + 2}
    wrong = bytearray(near[middle])
    wrong[len(wrong) // 2] ^= 4
    flipped, _ = judged(run, keys, genesis, {**near, middle: bytes(wrong)})
    assert [p.round for p in flipped.problems] == [middle], flipped.problems
    return {
        "vertices": len(rows),
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "vertices_per_cpu_s": round(len(rows) / cpu_s),
        "bytes_per_vertex": round(sum(map(len, rows.values())) / len(rows)),
        "flipped_bit_named": flipped.problems[0].round == middle,
    }


def main() -> None:
    wishes = asking(__doc__, f"{QUICK_VERTICES} vertices instead of {VERTICES}")
    wishes.add_argument("--sizes", action="store_true", help="bytes of a vertex among so many members")
    asked = wishes.parse_args()
    if asked.sizes:
        members, kinds = SIZED
        sizes = {f"{kind}/{peers}": size(peers, kind) for kind in kinds for peers in members}
        print(report("verify", {"members": members}, sizes, versions()) if asked.json else lines(sizes))
        return
    vertices = QUICK_VERTICES if asked.quick else VERTICES
    figures = measure(vertices)
    settings = {"vertices": vertices, "peers": PEERS, "cores": os.cpu_count()}
    print(report("verify", settings, figures, versions()) if asked.json else lines(figures))


if __name__ == "__main__":
    main()
