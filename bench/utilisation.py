"""How much of their time trainers train: two in a swarm against the same two that never synchronise.

    python bench/utilisation.py [--json] [--quick] [--overlap 8] [--fragments 1] [--network loopback,100mbit]
                                [--repeat 3] [--warm-up 1]

Two peers, as a person would start them, one thread each; before and after each such swarm two trainers alone, at
the same time, on the same computer. All figures come from the run itself: steps and their seconds from
`LocalTrainingEnded`, the time between two of them from the peer's clock. The first round is left out, it waits for
imports; with `--warm-up 10` those as well in which files and memory are made that later rounds use again. Medians
over the swarms.

    throughput_ratio      steps per second in the swarm / alone, mean of before and after. Everything counts:
                          waiting, and the processor time that encoding, hashing and talking take from steps where
                          cores are scarce
    compute_utilisation   share of the time in which a step was under way
    trainer_cpu_share     of the processor time of a peer and its trainer; where every core has a trainer, nothing
                          gets better than this, and other load on the computer does not change it much

`100mbit` runs the peers in the lab (bench/lab.py: root, /dev/net/tun), 20 ms apart; the router's processor time
then comes from the same cores, so only compute_utilisation means something there.
Never sleeps to wait for something.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch
from lab import Lab, Network
from real_swarm import Fact, Swarm

import atoll
from atoll.runtime.trainer import TrainerClient, TrainerSpec
from atoll.training.recipe.inner import AdamW

PEERS = 2
INNER_STEPS = 32
PATIENCE_S = 300.0
NETWORKS = {
    "loopback": None,
    "100mbit": Network.flat(hosts=PEERS, rtt_s=0.02, rate_bytes_s=12.5e6),
}


def alone(model: str, batch: int, seq_len: int, steps: int) -> float:
    """Steps per second of one of two trainers side by side, once both are warm."""

    async def both() -> float:
        trainers = [TrainerClient() for _ in range(PEERS)]
        spec = TrainerSpec(model, 0, "stdlib", batch, seq_len, AdamW(), 1)
        job = {"shards": PEERS, "global_step": 0}
        try:
            await asyncio.gather(*(t.start(spec) for t in trainers))
            warm = [t.train(4, cursor=0, shard=k, **job) for k, t in enumerate(trainers)]
            await asyncio.gather(*warm)
            done = await asyncio.gather(*(t.train(steps, cursor=0, shard=k, **job) for k, t in enumerate(trainers)))
            return statistics.mean(d.steps / d.seconds for d in done)
        finally:
            await asyncio.gather(*(t.stop() for t in trainers))

    return asyncio.run(both())


def spent(swarm: Swarm, index: int) -> tuple[float, float]:
    """Processor seconds of (the trainer, the peer) so far."""
    trainer, peer = swarm.peers[index].trainer(), psutil.Process(swarm.peers[index].process.pid)
    used = [process.cpu_times() for process in (trainer, peer)]
    return used[0].user + used[0].system, used[1].user + used[1].system


def together(network: str, settings: list[str], rounds: int, warm_up: int) -> dict[str, float]:
    """Steps per second of a member, and the share of its time in which it trained, over so many rounds."""
    with ExitStack() as stack:
        shaped = NETWORKS[network]
        lab = None if shaped is None else stack.enter_context(Lab(shaped))
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        swarm = stack.enter_context(Swarm(base, settings, lab))
        swarm.found()
        swarm.join(1)
        ended: dict[int, list[Fact]] = {k: [] for k in range(PEERS)}
        cpu_s: dict[int, list[tuple[float, float]]] = {}
        seen = 0
        while min(map(len, ended.values())) < warm_up + rounds + 1:
            fact = swarm.wait(
                lambda f: f["fact"] in ("LocalTrainingEnded", "Exit", "LocalContributionSkipped"), seen, PATIENCE_S
            )
            seen = swarm.facts.index(fact) + 1
            if fact["fact"] == "Exit":
                raise RuntimeError(f"peer {fact['by']} ended")
            if fact["fact"] == "LocalTrainingEnded":
                ended[fact["by"]].append(fact)
                if len(ended[fact["by"]]) in (warm_up + 1, warm_up + rounds + 1):
                    cpu_s.setdefault(fact["by"], []).append(spent(swarm, fact["by"]))
        late = lab.counted().late_s if lab is not None else 0.0
    rates, shares = [], []
    for facts in ended.values():
        kept = facts[warm_up : warm_up + rounds + 1]
        wall_s = kept[-1]["at"] - kept[0]["at"]
        rates.append(sum(f["steps"] for f in kept[1:]) / wall_s)
        shares.append(sum(f["steps"] * f["step_s"] for f in kept[1:]) / wall_s)
    trainer_s = sum(after[0] - before[0] for before, after in cpu_s.values())
    peer_s = sum(after[1] - before[1] for before, after in cpu_s.values())
    return {
        "steps_per_s": statistics.mean(rates),
        "trainer_cpu_share": trainer_s / (trainer_s + peer_s),
        "compute_utilisation": statistics.mean(shares),
        "router_late_s": late,
    }


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--json", action="store_true")
    asked.add_argument("--quick", action="store_true", help="two rounds, loopback alone")
    asked.add_argument("--model", default="gpt-10m")
    asked.add_argument("--overlap", type=int, default=8, help="0: training waits for agreement")
    asked.add_argument("--fragments", type=int, default=1)
    asked.add_argument("--rounds", type=int, default=0, help="measured ones; default 5, quick 2")
    asked.add_argument("--warm-up", type=int, default=1, help="rounds that are left out first")
    asked.add_argument("--network", default="loopback,100mbit")
    asked.add_argument("--repeat", type=int, default=0, help="swarms per network; default 3, quick 1")
    options = asked.parse_args()
    batch, rounds = 4, options.rounds or (2 if options.quick else 5)
    networks = ["loopback"] if options.quick else options.network.split(",")
    seq_len, fragments = 64, options.fragments
    settings = [
        "run.rounds=0",
        f"run.start_peers={PEERS}",
        f"run.min_peers={PEERS}",
        f"model.name={options.model}",
        f"train.inner_steps={INNER_STEPS * fragments}",
        f"train.batch={batch}",
        f"train.seq_len={seq_len}",
        "train.lr=0.0004",
        f"sync.overlap={options.overlap}",
        f"sync.fragments={fragments}",
    ]
    repeat = options.repeat or (1 if options.quick else 3)
    figures: dict[str, Any] = {}
    for network in networks:
        tail = "" if network == "loopback" else f"_{network}"
        found: list[dict[str, float]] = []
        before = alone(options.model, batch, seq_len, INNER_STEPS)
        for _ in range(repeat):
            swarm = together(network, settings, rounds, options.warm_up)
            after = alone(options.model, batch, seq_len, INNER_STEPS)
            reference, before = (before + after) / 2, after
            ratio = swarm["steps_per_s"] / reference
            found.append(swarm | {"alone_steps_per_s": reference, "throughput_ratio": ratio})
        for name in found[0]:
            figures[name + tail] = round(statistics.median(one[name] for one in found), 4)
    report = {
        "bench": "utilisation",
        "settings": {
            "peers": PEERS,
            "cores": len(os.sched_getaffinity(0)),
            "model": options.model,
            "inner_steps": INNER_STEPS,
            "batch": batch,
            "seq_len": seq_len,
            "overlap": options.overlap,
            "fragments": fragments,
            "rounds": rounds,
            "warm_up": options.warm_up,
            "repeat": repeat,
        },
        "figures": figures,
        "versions": {"atoll": atoll.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    if options.json:
        print(json.dumps(report))
        return
    for name, value in figures.items():
        print(f"{name:32s} {value:.3f}")


if __name__ == "__main__":
    main()
