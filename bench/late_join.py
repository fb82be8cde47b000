"""A member that comes late over a slow link: how long until a round counts it, and what the others lose meanwhile.

Two members train over fast links with loops that sleep, which stands for a GPU. A third one joins in the middle,
limited by `tbf` both ways. It fetches the state and then the rounds agreed on meanwhile. Each member is in a
network namespace of its own.

    counted_after_s   from the joiner's first fact to the end of the first round that counts it
    fetch_s           seconds from there to the complete state
    floor_s           what the state's bytes need on its link
    rounds_ratio      median round of the others while it joins, beside the median before
    downloads         states that it began to fetch; more than one means that members dropped one too early

    sudo python bench/late_join.py [--quick] [--json] [--values 200M] [--mbit 100] [--recipe diloco] [--round-s 20]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from form import asking, report, versions
from links import PEERS, PORT, TENSORS, BridgedHosts, SleepingOptimizer, address_of
from torch import nn

import atoll
from atoll.runtime.event_log import entries_in
from atoll.training.recipe import methods

INNER_STEPS, BEFORE, AFTER = 32, 4, 3  # rounds before the joiner comes, and after a round counted it
PATIENCE_S = 1500.0
LATE = 2  # host of the joiner


def member(wish: dict[str, Any]) -> None:
    """One loop, until its folder holds a file `stop`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(wish["values"] // TENSORS) for _ in range(TENSORS))
    listen = (f"/ip4/{address_of(wish['index'])}/tcp/{PORT}",)
    if wish["index"]:
        run = atoll.join(sys.stdin.readline().strip(), folder=wish["folder"], listen=listen)
    else:
        recipe = {"diloco": methods.diloco, "auto": methods.auto}[wish["recipe"]](
            rounds=1000, inner_steps=INNER_STEPS
        )
        options = atoll.RunOptions(listen=listen, min_peers=2)
        run = atoll.found(recipe=recipe, start_peers=2, folder=wish["folder"], options=options)
    optimizer = SleepingOptimizer(model, wish["index"], wish["round_s"] / INNER_STEPS)
    run.attach(model, optimizer)
    while not run.done and not Path(wish["folder"], "stop").exists():
        optimizer.step()
        run.report(1.0)
    run.close()


def closed_rounds(folder: Path) -> list[dict[str, Any]]:
    record = folder / "facts.jsonl"
    return [e for e in entries_in(record) if e["fact"] == "RoundClosed" and e["steps"]] if record.exists() else []


def wait_for(told: str, loops: list[subprocess.Popen[str]], is_met: Any) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_met():
        if time.monotonic() > until or any(loop.poll() for loop in loops):
            raise RuntimeError(f"in vain: {told}; what the members said stands above")
        time.sleep(0.2)


def played(values: int, mbit: float, recipe: str, round_s: float) -> dict[str, Any]:
    """The row of one joiner."""
    with tempfile.TemporaryDirectory() as base, BridgedHosts() as hosts:
        folders = [Path(base) / f"peer-{index}" for index in range(LATE + 1)]
        loops: list[subprocess.Popen[str]] = []

        def begin(index: int, ticket: str) -> subprocess.Popen[str]:
            wish = {"recipe": recipe, "values": values, "round_s": round_s, "index": index}
            said = json.dumps(wish | {"folder": str(folders[index])})
            command = [*hosts.entered(index), sys.executable, __file__, "--member", said]
            loop = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            loops.append(loop)
            assert loop.stdin is not None
            if ticket:
                loop.stdin.write(ticket)
                loop.stdin.close()
            return loop

        try:
            founder = begin(0, "")
            assert founder.stdout is not None
            ticket = next(line.split("'")[1] for line in founder.stdout if "atoll.join(" in line)
            begin(1, ticket)
            wait_for("the first rounds", loops, lambda: len(closed_rounds(folders[0])) > BEFORE)
            hosts.limit(mbit, LATE)
            begin(LATE, ticket)
            wait_for("a round that counts the joiner", loops, lambda: counted_rounds(folders) >= AFTER)
            for folder in folders:
                (folder / "stop").touch()
            for loop in loops:
                loop.wait(PATIENCE_S)
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
        return {"values": values, "mbit": mbit, "recipe": recipe, "round_s": round_s} | measured(folders, mbit)


def counted_rounds(folders: list[Path]) -> int:
    """Rounds with three members that counted."""
    return sum(len(entry["counted"]) > LATE for entry in closed_rounds(folders[0]))


def measured(folders: list[Path], mbit: float) -> dict[str, Any]:
    rounds, own = closed_rounds(folders[0]), list(entries_in(folders[LATE] / "facts.jsonl"))
    came = own[0]["at"]
    counted = next(entry["at"] for entry in rounds if len(entry["counted"]) > LATE)
    lengths = [(b["at"], b["at"] - a["at"]) for a, b in pairwise(rounds)]
    before = [took for at, took in lengths if at < came][1:]
    meanwhile = [took for at, took in lengths if came <= at - took and at < counted]
    fetched = next(entry for entry in own if entry["fact"] == "BlobFetched")
    return {
        "counted_after_s": counted - came,
        "fetch_s": fetched["at"] - came,
        "floor_s": fetched["size_bytes"] / (mbit * 1e6 / 8),
        "rounds_ratio": statistics.median(meanwhile) / statistics.median(before) if meanwhile else None,
        "downloads": sum(entry["fact"] == "StateDownloadBegan" for entry in own),
    }


def main() -> None:
    asked = asking(__doc__, "5 M values over 25 Mbit/s, rounds of 2 s")
    asked.add_argument("--values", default="", help="200M, the default, or less")
    asked.add_argument("--mbit", type=float, default=0.0)
    asked.add_argument("--recipe", default="diloco", choices=("diloco", "auto"))
    asked.add_argument("--round-s", type=float, default=0.0, help="seconds that a loop trains in a round")
    asked.add_argument("--member", help=SUPPRESS)
    options = asked.parse_args()
    if options.member:
        member(json.loads(options.member))
        return
    if os.geteuid() != 0:
        raise PermissionError("network namespaces need root (sudo), in a container CAP_NET_ADMIN and CAP_SYS_ADMIN")
    values = int(float((options.values or ("5M" if options.quick else "200M")).rstrip("M")) * 1e6)
    mbit, round_s = (
        options.mbit or (25.0 if options.quick else 100.0),
        options.round_s or (2 if options.quick else 20),
    )
    row = played(values, mbit, options.recipe, round_s)
    if options.json:
        print(report("late_join", {"peers": PEERS, "inner_steps": INNER_STEPS}, [row], versions("torch")))
    else:
        print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
