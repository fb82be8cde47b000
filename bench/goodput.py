"""Goodput of a swarm of user loops whose members are killed and come back.

    python bench/goodput.py [--json] [--quick] [--seconds 120] [--recipes diloco,auto] [--faults 2,6] [--dir FOLDER]

Eight loops (`run.attach`) train rounds of 20 steps. A step sleeps 50 ms in the place of an accelerator. A fault is
SIGKILL of a loop and its peer process; the loop starts again 5 s later in the same folder. Victims take turns: a
random member, the founder, a random member, the proposer of the newest round. In one swarm, a stretch without
faults comes first, then one of the same length for each number of faults per minute.

    ratio            steps that agreed rounds counted, beside those of the stretch without faults
    alive            share of the members' time in which their loops ran
    counted_after_s  seconds from a restart to the first agreed round that counts it, imports included: median
    of_these_after_s the same from the first fact of the restarted peer, without the imports: median
    longest_pause_s  longest time between two steps of a loop that was not killed, without the step's own 50 ms

Times depend on the other load of the computer; ratios within one swarm depend on it less.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from form import asking, report, versions
from real_swarm import PATIENCE_S, Fact

MEMBERS, STEPS, STEP_S, BACK_S = 8, 20, 0.05, 5.0
FRAGMENTS = 4  # of `auto`
TENSORS = {"diloco": (4, 3_200), "auto": (FRAGMENTS, 6_400)}  # a fragment needs 4096 values
PAUSE_LEAST_S = 0.1  # pauses that a loop writes down
LOOK_S = 0.05


# ---- one loop ----------------------------------------------------------------------------------------------


def loop(recipe: str, folder: Path, ticket: str) -> None:
    """A training loop without training: gradients are drawn, and a step sleeps."""
    import torch

    import atoll
    from atoll.training.recipe.methods import auto

    torch.set_num_threads(1)
    tensors, values = TENSORS[recipe]
    model = torch.nn.ParameterList(torch.zeros(values // 64, 64) for _ in range(tensors))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    named = atoll.RunOptions(name=folder.name)
    if ticket:
        run = atoll.join(ticket, folder=folder / "run", name=folder.name)
    elif recipe == "auto":
        method = auto(rounds=100_000, peers=MEMBERS, inner_steps=FRAGMENTS * STEPS)
        run = atoll.found(recipe=method, start_peers=MEMBERS, folder=folder / "run", options=named)
    else:
        run = atoll.found(inner_steps=STEPS, start_peers=MEMBERS, folder=folder / "run", options=named)
    run.attach(model, optimizer)
    before = time.time()
    with (folder / "pauses.jsonl").open("a") as pauses:
        while not run.done:
            time.sleep(STEP_S)
            for parameter in model:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            now = time.time()
            if now - before - STEP_S > PAUSE_LEAST_S:
                pauses.write(json.dumps({"at": now, "pause_s": now - before - STEP_S}) + "\n")
                pauses.flush()
            before = now


# ---- the swarm ---------------------------------------------------------------------------------------------


class Member:
    def __init__(self, recipe: str, folder: Path) -> None:
        self.recipe, self.folder, self.ticket = recipe, folder, ""
        self.process: subprocess.Popen[bytes] | None = None
        self.peer = ""
        self.starts: list[float] = []
        self.deaths: list[float] = []
        folder.mkdir(parents=True)

    def start(self, *said: str) -> None:
        words = [sys.executable, __file__, "--loop", self.recipe, str(self.folder), self.ticket]
        with (self.folder / "said.txt").open("ab") as out:
            self.process = subprocess.Popen([*words, *said], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        self.starts.append(time.time())

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        assert self.process is not None
        children: list[psutil.Process] = []
        with suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGKILL)
        for child in children:
            with suppress(psutil.Error):
                child.kill()
        self.process.wait()
        self.deaths.append(time.time())

    def facts(self) -> Iterator[Fact]:
        with suppress(OSError):
            for line in (self.folder / "run" / "facts.jsonl").read_text().splitlines():
                with suppress(ValueError):  # a kill in the middle of a line
                    yield json.loads(line)

    def pauses(self) -> list[tuple[float, float]]:
        path = self.folder / "pauses.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(one["at"], one["pause_s"]) for one in map(json.loads, lines)]


class Swarm:
    def __init__(self, recipe: str, base: Path, seed: int) -> None:
        self.members = [Member(recipe, base / recipe / f"loop-{k}") for k in range(MEMBERS)]
        self.draw, self.turn = random.Random(seed), 0

    def open(self) -> None:
        """Start all loops; returns once they have closed a round together."""
        founder = self.members[0]
        founder.start()
        ticket = self._wait(lambda: _ticket(founder.folder / "said.txt"), "the founder's ticket")
        for member in self.members[1:]:
            member.ticket = ticket
            member.start()
        self._wait(lambda: any(len(f["counted"]) == MEMBERS for f in self.rounds()), "a round of all members")
        for member in self.members:
            names = [m for f in member.facts() if f["fact"] == "GenesisKnown" for m in f["members"]]
            changed = [m for f in member.facts() if f["fact"] == "MembershipChanged" for m in f["members"]]
            member.peer = next(m["peer"] for m in [*names, *changed] if m["name"] == member.folder.name)

    def _wait(self, found: Any, what: str) -> Any:
        deadline = time.monotonic() + 2 * PATIENCE_S
        while time.monotonic() < deadline:
            if dead := [member.folder for member in self.members if member.starts and not member.is_running]:
                raise RuntimeError(f"{dead[0]} ended: {(dead[0] / 'said.txt').read_text()[-2000:]}")
            if value := found():
                return value
            time.sleep(LOOK_S)
        raise TimeoutError(f"{what} did not come")

    def rounds(self) -> list[Fact]:
        """Agreed rounds, each as the first member closed it."""
        first: dict[int, Fact] = {}
        for member in self.members:
            for fact in member.facts():
                if fact["fact"] == "RoundClosed":
                    known = first.get(fact["round"])
                    first[fact["round"]] = fact if known is None or fact["at"] < known["at"] else known
        return [first[round] for round in sorted(first)]

    def stretch(self, seconds: float, faults_per_minute: float) -> tuple[float, float]:
        """Run for this long with so many faults; returns when it began and ended."""
        began = time.time()
        every = 60.0 / faults_per_minute if faults_per_minute else seconds + 1.0
        due = began + every / 2 if faults_per_minute else began + every
        back: list[tuple[float, Member]] = []
        while (now := time.time()) < began + seconds:
            if now >= due:
                due += every
                if (victim := self._victim()) is not None:
                    victim.kill()
                    back.append((time.time() + BACK_S, victim))
            while back and back[0][0] <= now:
                back.pop(0)[1].start()
            time.sleep(LOOK_S)
        for _, victim in back:
            victim.start()
        return began, time.time()

    def _victim(self) -> Member | None:
        running = [member for member in self.members if member.is_running]
        kind, self.turn = ("random", "founder", "random", "proposer")[self.turn % 4], self.turn + 1
        named = [m for m in running if m.peer == self.rounds()[-1]["proposer"]]
        if kind == "founder" and self.members[0] in running:
            return self.members[0]
        if kind == "proposer" and named:
            return named[0]
        return self.draw.choice(running) if len(running) > MEMBERS // 2 else None

    def end(self) -> None:
        for member in self.members:
            if member.is_running:
                member.kill()


def _ticket(said: Path) -> str:
    text = said.read_text() if said.exists() else ""
    return text.partition("atoll.join('")[2].partition("'")[0]


# ---- figures -----------------------------------------------------------------------------------------------


def figures(swarm: Swarm, recipe: str, stretches: Sequence[tuple[float, float, float]]) -> list[dict[str, Any]]:
    rounds, rows, calm = swarm.rounds(), list[dict[str, Any]](), 0.0
    for faults, began, ended in stretches:
        samples = sum(f["samples"] for f in rounds if began <= f["at"] < ended)
        rate = samples / (ended - began)
        calm = calm or rate
        down_s, returns, awake, pauses = 0.0, list[float](), list[float](), [0.0]
        for member in swarm.members:
            for death, start in zip(member.deaths, member.starts[1:], strict=False):
                if began <= death < ended:
                    down_s += min(start, ended) - death
                    counted = (f["at"] for f in rounds if f["at"] > start and member.peer in f["counted"])
                    if (at := next(counted, None)) is not None:
                        returns.append(at - start)
                        awake.append(at - next(f["at"] for f in member.facts() if f["at"] > start))
            lives = list(zip(member.starts, [*member.deaths, ended], strict=False))
            for at, pause_s in member.pauses():
                whole = any(start + 2 * BACK_S < at - pause_s and at < death for start, death in lives)
                pauses += [pause_s] if whole and began <= at < ended else []
        rows.append(
            {
                "recipe": recipe,
                "faults_per_minute": faults,
                "steps_per_s": round(rate, 1),
                "ratio": round(rate / calm, 3),
                "alive": round(1 - down_s / MEMBERS / (ended - began), 3),
                "counted_after_s": round(statistics.median(returns), 1) if returns else None,
                "counted_after_max_s": round(max(returns), 1) if returns else None,
                "of_these_after_s": round(statistics.median(awake), 1) if awake else None,
                "longest_pause_s": round(max(pauses), 2),
            }
        )
    return rows


def measured(recipe: str, rates: Sequence[float], seconds: float, base: Path) -> list[dict[str, Any]]:
    swarm = Swarm(recipe, base, seed=4012)
    try:
        swarm.open()
        stretches = []
        for rate in (0.0, *rates):
            began, ended = swarm.stretch(seconds, rate)
            stretches.append((rate, began, ended))
            if rate:  # members that came back last are counted before the next stretch
                swarm._wait(lambda: len(swarm.rounds()[-1]["counted"]) == MEMBERS, "a round of all members")
        return figures(swarm, recipe, stretches)
    finally:
        swarm.end()


def main() -> None:
    asked = asking(__doc__, "one recipe, 40 s, six faults a minute")
    asked.add_argument("--seconds", type=float, default=0.0, help="of each stretch; default 120, quick 40")
    asked.add_argument("--recipes", default="", help="default diloco,auto; quick diloco")
    asked.add_argument("--faults", default="", help="per minute; default 2,6; quick 6")
    asked.add_argument("--dir", type=Path, help="keep the members' folders there")
    asked.add_argument("--loop", nargs=3, help=argparse.SUPPRESS)
    options = asked.parse_args()
    if options.loop:
        loop(options.loop[0], Path(options.loop[1]), options.loop[2])
        return
    recipes = (options.recipes or ("diloco" if options.quick else "diloco,auto")).split(",")
    rates = [float(rate) for rate in (options.faults or ("6" if options.quick else "2,6")).split(",")]
    seconds = options.seconds or (40.0 if options.quick else 120.0)
    base = options.dir or Path(tempfile.mkdtemp())
    try:
        rows = [row for recipe in recipes for row in measured(recipe, rates, seconds, base)]
    finally:
        if options.dir is None:
            shutil.rmtree(base, ignore_errors=True)
    settings = {"members": MEMBERS, "steps": STEPS, "step_s": STEP_S, "back_s": BACK_S, "seconds": seconds}
    if options.json:
        print(report("goodput", settings, rows, versions("torch")))
        return
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")


if __name__ == "__main__":
    main()
