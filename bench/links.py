"""Rounds of attached loops over equal links: how much of its time a loop trains, and how owners share the update.

Four members, each in a network namespace of its own, on one bridge; `tbf` limits both ways of every link from the
first step on. Their loops sleep, which stands for a GPU. Figures come from the peers' records and histories; the
first round of each recipe (of `auto` the first of every fragment) is left out.

    utilization           share of the time in which a loop trains
    allowed_utilization   the same if a round took its steps and the seconds that its bytes need on the wire
    share_s, wire_s       median round: from the first row to the last part, at the slowest member; what its bytes
                          need on the busiest link
    shares                of the update, by member, in each round
    idle_cpu              share of all cores; without much of it the cores are the limit, and not the links

    sudo python bench/links.py [--quick] [--json] [--mbit 50] [--recipes diloco,auto] [--rounds 6]
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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from form import asking, congestion, report, versions
from torch import nn

import atoll
from atoll.cli.stored_vertices import read_vertex
from atoll.cli.verify import kept_in
from atoll.runtime.event_log import entries_in
from atoll.training.recipe import methods
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import OwnerResult

PEERS, TENSORS, STEP_S, PORT = 4, 30, 0.03, 7071
BURST, QUEUE = "64kb", "100ms"  # of every link, each way
PATIENCE_S = 900.0


class SleepingOptimizer(torch.optim.Optimizer):
    """Changes one tensor per step, so that updates are no zeros, and sleeps."""

    def __init__(self, model: nn.Module, seed: int, step_s: float = STEP_S) -> None:
        super().__init__(model.parameters(), {})
        self.step_s = step_s
        self.turn, self.noise = 0, torch.randn(65536, generator=torch.Generator().manual_seed(seed)) * 1e-3

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        parameters = self.param_groups[0]["params"]
        values = parameters[self.turn % len(parameters)].view(-1)
        self.turn += 1
        for begin in range(0, len(values), len(self.noise)):
            values[begin : begin + len(self.noise)] += self.noise[: len(values) - begin]
        time.sleep(self.step_s)


def member(wish: dict[str, Any]) -> None:
    """One loop. It prints a line as its first round begins; before that a founder prints how others join."""
    torch.set_num_threads(1)
    model = nn.ParameterList(torch.zeros(wish["values"] // TENSORS) for _ in range(TENSORS))
    listen = (f"/ip4/{address_of(wish['index'])}/tcp/{PORT}",)
    if wish["index"]:
        run = atoll.join(sys.stdin.readline().strip(), folder=wish["folder"], listen=listen)
    else:
        method = {"diloco": methods.diloco, "auto": methods.auto}[wish["recipe"]]
        recipe = method(rounds=wish["rounds"], inner_steps=wish["inner_steps"])
        options = atoll.RunOptions(listen=listen, min_peers=PEERS)
        run = atoll.found(recipe=recipe, start_peers=PEERS, folder=wish["folder"], options=options)
    optimizer = SleepingOptimizer(model, wish["index"])
    run.attach(model, optimizer)
    print("began", flush=True)
    while not run.done:
        optimizer.step()
        run.report(1.0)
    run.close()


# ---- the network -----------------------------------------------------------------------------------------------


def address_of(host: int) -> str:
    return f"10.78.0.{host + 1}"


class BridgedHosts:
    """Hosts on one bridge. Namespaces have no names: they end with the processes that hold them."""

    def __enter__(self) -> BridgedHosts:
        hold = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"]
        self.holders = [subprocess.Popen(hold, stdout=subprocess.PIPE, text=True) for _ in range(PEERS + 1)]
        for holder in self.holders:
            assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        self._do(PEERS, "ip link add br0 type bridge", "ip link set br0 up")
        for host in range(PEERS):
            pid = self.holders[host].pid
            self._do(PEERS, f"ip link add port{host} type veth peer name eth0 netns {pid}")
            self._do(PEERS, f"ip link set port{host} master br0 up")
            self._do(
                host, "ip link set lo up", f"ip addr add {address_of(host)}/24 dev eth0", "ip link set eth0 up"
            )
        return self

    def __exit__(self, *exception: object) -> None:
        for holder in self.holders:
            holder.kill()
            holder.communicate()

    def limit(self, mbit: float, *hosts: int) -> None:
        """Both ways of the links of these hosts, or of all."""
        limit = f"root tbf rate {mbit}mbit burst {BURST} latency {QUEUE}"
        for host in hosts or range(PEERS):
            self._do(host, f"tc qdisc replace dev eth0 {limit}")
            self._do(PEERS, f"tc qdisc replace dev port{host} {limit}")

    def entered(self, host: int) -> list[str]:
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/proc/{self.holders[host].pid}/ns/net", "--"]

    def _do(self, host: int, *commands: str) -> None:
        for command in commands:
            subprocess.run([*self.entered(host), *command.split()], check=True)


# ---- one recipe ------------------------------------------------------------------------------------------------


def played(recipe: str, mbit: float, values: int, inner_steps: int, rounds: int) -> dict[str, Any]:
    """The row of this recipe."""
    fragments = 4 if recipe == "auto" else 1
    wish = {"recipe": recipe, "values": values, "inner_steps": inner_steps, "rounds": rounds}
    with tempfile.TemporaryDirectory() as base, BridgedHosts() as hosts:
        folders = [Path(base) / f"peer-{index}" for index in range(PEERS)]
        loops: list[subprocess.Popen[str]] = []
        try:
            ticket = ""
            for index, folder in enumerate(folders):
                said = json.dumps(wish | {"index": index, "folder": str(folder)})
                command = [*hosts.entered(index), sys.executable, __file__, "--member", said]
                loop = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                loops.append(loop)
                assert loop.stdin is not None and loop.stdout is not None
                if index == 0:
                    ticket = next(line.split("'")[1] for line in loop.stdout if "atoll.join(" in line)
                else:
                    loop.stdin.write(ticket)
                    loop.stdin.close()
            for loop in loops:
                assert loop.stdout is not None
                if "began\n" not in loop.stdout:
                    raise RuntimeError("a member ended before the first round; what it said stands above")
            hosts.limit(mbit)
            psutil.cpu_times_percent()
            for loop in loops:
                if loop.wait(PATIENCE_S):
                    raise RuntimeError(f"a member ended with {loop.returncode}; what it said stands above")
            idle = psutil.cpu_times_percent().idle / 100
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
        return {"recipe": recipe, "mbit": mbit} | measured(folders, mbit * 1e6 / 8, fragments) | {"idle_cpu": idle}


def measured(folders: Sequence[Path], rate_bytes_s: float, warm_up: int) -> dict[str, Any]:
    """From what the peers recorded: rounds by number, then member by member."""
    entries = [list(entries_in(folder / "facts.jsonl")) for folder in folders]
    closed = [{e["round"]: e for e in own if e["fact"] == "RoundClosed" and e["steps"]} for own in entries]
    numbers = sorted(set.intersection(*map(set, closed)))
    kept, shares, shared = numbers[warm_up:], shares_of(folders[0]), [spans(own) for own in entries]
    trained_s = [closed[0][number]["steps"] / PEERS * STEP_S for number in kept]
    wire_s, took_s = list[float](), list[float]()
    for before, number in zip(numbers[warm_up - 1 :], kept, strict=False):
        change = [
            {name: own[number][name] - own[before][name] for name in ("at", "bytes_out", "bytes_in")}
            for own in closed
        ]
        took_s.append(max(one["at"] for one in change))
        wire_s.append(max(max(one["bytes_out"], one["bytes_in"]) for one in change) / rate_bytes_s)
    share_s = [max(own[number] for own in shared if number in own) for number in kept]
    return {
        "utilization": sum(trained_s) / sum(took_s),
        "allowed_utilization": sum(trained_s) / (sum(trained_s) + sum(wire_s)),
        "share_s": statistics.median(share_s),
        "wire_s": statistics.median(wire_s),
        "share_s_by_round": [round(seconds, 2) for seconds in share_s],
        "shares": [shares[number] for number in kept],
    }


def spans(entries: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Round → seconds from the first row to the last part at this member, first attempts only."""
    began = {e["round"]: e["at"] for e in reversed(entries) if e["fact"] == "UpdateSharingBegan"}
    ended = {
        e["round"]: e["at"] for e in reversed(entries) if e["fact"] in ("PartsReduced", "PrepareQuorumReached")
    }
    return {number: ended[number] - at for number, at in began.items() if number in ended}


def shares_of(folder: Path) -> dict[int, list[float]]:
    """Round → shares of its agreed results by owner, in the order of members."""
    found = dict[int, list[float]]()
    with kept_in(folder) as kept:
        for number in kept.rounds:
            _, body = read_vertex(kept, folder, number)
            owned: Counter[str] = Counter()
            for signed in body.parts:
                if signed is None:
                    continue
                result = decode_statement(signed.body, signed.signer)
                if isinstance(result, OwnerResult):
                    owned[signed.signer] += result.size_bytes
            whole = sum(owned.values()) or 1
            found[number] = [round(owned[m.peer] / whole, 3) for m in body.members]
    return found


def main() -> None:
    asked = asking(__doc__, "a tenth of the values, a quarter of the steps, three rounds of diloco")
    asked.add_argument("--mbit", type=float, default=50.0)
    asked.add_argument("--recipes", default="")
    asked.add_argument("--rounds", type=int, default=0, help="of all fragments, the first left out")
    asked.add_argument("--member", help=SUPPRESS)
    options = asked.parse_args()
    if options.member:
        member(json.loads(options.member))
        return
    if os.geteuid() != 0:
        raise PermissionError("network namespaces need root (sudo), in a container CAP_NET_ADMIN and CAP_SYS_ADMIN")
    values, inner_steps = (3_000_000, 32) if options.quick else (30_000_000, 128)
    recipes = (options.recipes or ("diloco" if options.quick else "diloco,auto")).split(",")
    rounds = options.rounds or (4 if options.quick else 6)
    rows: list[dict[str, Any]] = []
    for recipe in recipes:
        row = played(recipe, options.mbit, values, inner_steps, rounds)
        rows.append(row)
        if not options.json:
            print(
                "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
                flush=True,
            )
    settings = {"peers": PEERS, "values": values, "inner_steps": inner_steps, "step_s": STEP_S, "rounds": rounds}
    settings |= {"congestion": congestion(), "cores": len(os.sched_getaffinity(0))}
    if options.json:
        print(report("links", settings, rows, versions("torch")))


if __name__ == "__main__":
    main()
