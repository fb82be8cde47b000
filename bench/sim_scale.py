"""How large a swarm one process can simulate: 64 peers for 50 rounds, 256 for 10, and what peers say to each other.

    python bench/sim_scale.py [--peers 64 --rounds 50 --json --quick]

The peers are those of the real world, message for message; links, clocks, disks and trainers are virtual. Wall time
depends on who else uses the computer, so CPU seconds are given too. The digest names the whole history: a change
that only makes this faster leaves it as it is.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

from form import asking, report, versions

from atoll.base.limits import COMMITTEE_MAX, PARTS_MAX
from atoll.policy.plan import quorum
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm

SIZES = (8, 16, 32, 64, 128, 256)
TABLE_ROUNDS = 3


def run(peers: int, rounds: int, seed: int, weigh: bool = False) -> dict[str, Any]:
    swarm = VirtualSwarm(seed, SwarmKnobs(peers))
    swarm.world.weighs = weigh
    wall, cpu = time.perf_counter(), time.process_time()
    swarm.world.run(1e6, stop=lambda: swarm.checkers.closings >= rounds * peers)
    checkers, network = swarm.checkers, swarm.world.network
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        / (2**20 if sys.platform == "darwin" else 2**10),
        "events": swarm.world.events,
        "virtual_s": swarm.world.now,
        "complete_share": checkers.full / max(1, checkers.training),
        "digest": swarm.world.digest(),
        "messages": network.sent,
        "control_bytes": swarm.world.control_bytes,
        "payload_bytes": network.bytes,
    }


def row(peers: int, seed: int) -> dict[str, Any]:
    """What one peer says in one round, beside the tensors, in a swarm of this size."""
    told = run(peers, TABLE_ROUNDS, seed, weigh=True)
    committee = min(peers, COMMITTEE_MAX)
    per = peers * TABLE_ROUNDS
    return {
        "peers": peers,
        "parts": min(peers, PARTS_MAX),
        "committee": committee,
        "quorum": quorum(committee, "majority"),
        "messages_per_peer_round": told["messages"] / per,
        "control_kb_per_peer_round": told["control_bytes"] / per / 1e3,
        "payload_mb_per_peer_round": told["payload_bytes"] / per / 1e6,
        "virtual_s_per_round": told["virtual_s"] / TABLE_ROUNDS,
        "cpu_ms_per_peer_round": told["cpu_s"] / per * 1e3,
    }


def main() -> None:
    parser = asking(__doc__, "16 peers, 5 rounds, a short table")
    parser.add_argument("--peers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.quick:
        options.peers, options.rounds = 16, 5
    sizes = [n for n in SIZES if n <= (32 if options.quick else 256)]
    figures = run(options.peers, options.rounds, options.seed)
    figures["rows"] = [row(n, options.seed) for n in sizes]
    settings = {"peers": options.peers, "rounds": options.rounds, "seed": options.seed, "update_mb": 1.0}
    ours = versions("msgspec")
    if options.json:
        print(report("sim_scale", settings, figures, ours))
        return
    print(f"{options.peers} peers x {options.rounds} rounds, seed {options.seed}, python {ours['python']}")
    print(
        f"  {figures['wall_s']:.1f} s wall, {figures['cpu_s']:.1f} s CPU, {figures['peak_mib']:.0f} MiB, "
        f"{figures['events']} events, {figures['virtual_s']:.0f} s virtual"
    )
    print(f"  everybody counted in {figures['complete_share']:.1%} of closings, history {figures['digest']}")
    print("one peer in one round (update of 1 MB; all in one group):")
    print("  peers parts committee quorum  messages  control kB  payload MB  virtual s   CPU ms")
    for r in figures["rows"]:
        print(
            f"  {r['peers']:>5} {r['parts']:>5} {r['committee']:>9} {r['quorum']:>6} "
            f"{r['messages_per_peer_round']:>9.0f} {r['control_kb_per_peer_round']:>11.1f} "
            f"{r['payload_mb_per_peer_round']:>11.2f} {r['virtual_s_per_round']:>10.2f} "
            f"{r['cpu_ms_per_peer_round']:>8.1f}"
        )


if __name__ == "__main__":
    main()
