"""What a run of two members costs by model size: memory of peer and loop, time of a round beside `atoll.reduce`.

    python bench/model_scale.py [--parameters 10M,50M,200M] [--rounds 12] [--recipe diloco,cooperative]
                                [--state-memory memory,disk] [--limit] [--dtype bf16]
                                [--quick] [--json]

Two loops on loopback, each with its peer process, train as many values with SGD for two steps a
round, int8 both ways. Peers live in memory cgroups of their own (Linux, cgroup v1, root).

    peer_memory_ratio    peak of anonymous and shared memory of the greediest peer, less that of an empty peer,
                         beside the fp32 model; what it shares with its loop counts here, files do not
    peer_limit_mb        memory that the cgroup allows, page cache included, if `--limit` is given:
                         3 models + 2 encoded updates + 256 MiB, or 1.6 models + 256 MiB with `disk`
    loop_extra_ratio     what the loop takes at most beyond its memory before `attach`, beside the fp32 model
    round_s              from the last inner step of a round to the next step, median of the rounds after the fourth
    round_ratio_to_reduce  the same beside the time of `atoll.reduce` for a vector of that size and codec, same run
    attach_s             from `attach` to the ticket at the founder, or to the first step at the other: the longer
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from form import asking, report, versions

MIB = 2**20
CGROUPS = Path("/sys/fs/cgroup/memory")
TENSORS = 16
EMPTY_VALUES = 8192  # model of the "empty" peer
SETTLED = 4  # rounds before the figures count
REDUCTIONS = 5
SAMPLE_S = 0.02


def count(text: str) -> int:
    """`200M` -> 200,000,000."""
    return int(float(text.rstrip("MBK")) * {"K": 10**3, "M": 10**6, "B": 10**9}.get(text[-1], 1))


# ---- a member ----------------------------------------------------------------------------------------------


def member(told: dict[str, Any]) -> None:
    """One loop; reports as JSON lines on stdout, and takes the ticket or `go` from stdin."""
    if told["cgroup"]:
        sys.executable = told["launcher"]  # the peer process begins in its cgroup
    import torch

    import atoll

    torch.set_num_threads(1)
    values = told["values"]
    reduce_s = [] if told["reductions"] == 0 else reductions(told)
    dtype = getattr(torch, told["dtype"])
    model = torch.nn.ParameterDict(
        {f"x{i}": torch.full((values // TENSORS,), 0.5, dtype=dtype) for i in range(TENSORS)}
    )
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    say("ready", pid=os.getpid(), reduce_s=reduce_s)
    ticket = sys.stdin.readline().strip()
    if ticket == "found":
        run = found(atoll, told)
    else:
        run = atoll.join(ticket, folder=told["folder"])
    begin = time.monotonic()
    threading.Thread(target=tell_ticket, args=(run, begin), daemon=True).start()
    run.attach(model, optimizer, state_memory=told["state_memory"], feedback_precision=told["feedback"])
    say("attached", seconds=time.monotonic() - begin)
    plain_s, closing_s, turn = [], [], run.round
    while not run.done:
        for parameter in model.parameters():
            parameter.grad.neg_()
        begin = time.monotonic()
        optimizer.step()
        seconds = time.monotonic() - begin
        if run.round != turn or run.done:
            turn = run.round
            closing_s.append(seconds)
            say("round", round=run.trained, seconds=seconds)
        else:
            plain_s.append(seconds)
    run.close()
    say("over", closing_s=closing_s, plain_s=statistics.median(plain_s or [0.0]))


def tell_ticket(run: Any, begin: float) -> None:
    while not run.ticket:
        time.sleep(SAMPLE_S)
    say("ticket", ticket=run.ticket, seconds=time.monotonic() - begin)


def found(atoll: Any, told: dict[str, Any]) -> Any:
    from atoll.training.recipe import methods

    rounds, how = told["rounds"], told["recipe"]
    if how == "diloco":
        return atoll.found(rounds=rounds, inner_steps=2, start_peers=2, folder=told["folder"])
    recipe = methods.cooperative(rounds=rounds) if how == "cooperative" else getattr(methods, how)(rounds=rounds)
    return atoll.found(recipe=recipe, start_peers=2, folder=told["folder"])


def reductions(told: dict[str, Any]) -> list[float]:
    """Seconds of `atoll.reduce` for as many values, once the first has warmed it up."""
    import torch

    import atoll.reduce

    if told["index"] == 0:
        group = atoll.reduce.found(peers=2, codec="int8")
        say("group", ticket=group.ticket)
    else:
        say("wants")
        group = atoll.reduce.join(sys.stdin.readline().strip())
    group.wait_for_peers(2)
    seconds = []
    values_F = torch.randn(told["values"])
    for _ in range(told["reductions"] + 1):
        begin = time.monotonic()
        group.all_reduce(values_F)
        seconds.append(time.monotonic() - begin)
    group.close()
    return seconds[1:]


def say(what: str, **more: Any) -> None:
    print(json.dumps({"what": what, **more}), flush=True)


# ---- from outside ------------------------------------------------------------------------------------------


class Cgroup:
    """Memory of one peer process and what it may take."""

    def __init__(self, name: str, limit_bytes: int | None) -> None:
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
        above = CGROUPS / own.split(":", 2)[2].lstrip("/")
        self.path = (above if above.is_dir() else CGROUPS) / f"atoll-{os.getpid()}-{name}"
        self.path.mkdir()
        if limit_bytes is not None:
            (self.path / "memory.limit_in_bytes").write_text(str(limit_bytes))
            with suppress(OSError):
                (self.path / "memory.swappiness").write_text("0")

    def held_bytes(self) -> int:
        """Anonymous and shared memory; neither is backed by a file that could be read again."""
        figures = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        return int(figures["rss"]) + int(figures.get("shmem", 0))

    def close(self) -> None:
        for _ in range(100):
            try:
                self.path.rmdir()
            except OSError:
                time.sleep(0.05)
            else:
                return


def loop_bytes(pid: int) -> tuple[int, int]:
    """(anonymous memory of a process without its children, what it shares with its peer)."""
    with suppress(OSError, KeyError):
        figures = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        anonymous, shared = (int(figures[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
        return anonymous, shared
    return 0, 0


class Member:
    def __init__(self, index: int, base: Path, told: dict[str, Any], limit_bytes: int | None) -> None:
        self.group = Cgroup(f"{told['values']}-{index}", limit_bytes)
        launcher = base / f"python{index}"
        launcher.write_text(
            f'#!/bin/sh\necho $$ > {self.group.path}/cgroup.procs\nexec {sys.executable} "$@"\n', encoding="utf-8"
        )
        launcher.chmod(0o700)
        told |= {"index": index, "folder": str(base / f"member{index}"), "launcher": str(launcher), "cgroup": True}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--member", json.dumps(told)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin: TextIO = self.process.stdin
        self.told: dict[str, dict[str, Any]] = {}
        self.rounds: list[float] = []
        self.peak_bytes = self.shared_bytes = self.loop_peak_bytes = self.loop_before_bytes = 0
        self.by_round: list[int] = []
        self.changed = threading.Condition()
        threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True).start()
        threading.Thread(target=self._sample, daemon=True).start()

    def _listen(self, lines: TextIO) -> None:
        for line in lines:
            if not line.startswith('{"what"'):
                continue
            said = json.loads(line)
            with self.changed:
                if said["what"] == "ready":
                    self.loop_before_bytes, _ = loop_bytes(self.process.pid)
                    self.loop_peak_bytes = 0
                if said["what"] == "round":
                    self.rounds.append(said["seconds"])
                    self.by_round.append(self.group.held_bytes() + self.shared_bytes)
                self.told[said["what"]] = said
                self.changed.notify_all()
        with self.changed:
            self.told["ended"] = {"what": "ended"}
            self.changed.notify_all()

    def _sample(self) -> None:
        while self.process.poll() is None:
            anonymous, self.shared_bytes = loop_bytes(self.process.pid)
            with suppress(OSError, KeyError):
                self.peak_bytes = max(self.peak_bytes, self.group.held_bytes() + self.shared_bytes)
            if "ready" in self.told:
                self.loop_peak_bytes = max(self.loop_peak_bytes, anonymous)
            time.sleep(SAMPLE_S)

    def wait(self, what: str, seconds: float = 3600.0) -> dict[str, Any]:
        with self.changed:
            self.changed.wait_for(lambda: what in self.told or "ended" in self.told, seconds)
            if what not in self.told:
                raise RuntimeError(f"member did not reach {what!r}")
            return self.told[what]

    def tell(self, line: str) -> None:
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        with suppress(OSError):
            for pid in (self.group.path / "cgroup.procs").read_text().split():
                os.kill(int(pid), 9)
        self.group.close()


@contextmanager
def members(told: dict[str, Any], limit_bytes: int | None) -> Iterator[list[Member]]:
    with tempfile.TemporaryDirectory(dir=told.pop("where")) as folder:
        pair = [Member(index, Path(folder), dict(told), limit_bytes) for index in (0, 1)]
        try:
            yield pair
        finally:
            for one in pair:
                one.close()


def measure(told: dict[str, Any], limit_bytes: int | None) -> dict[str, Any]:
    """One run of two members."""
    with members(dict(told), limit_bytes) as pair:
        if told["reductions"]:
            pair[1].wait("wants")
            pair[1].tell(pair[0].wait("group")["ticket"])
        for one in pair:
            one.wait("ready")
        pair[0].tell("found")
        pair[1].tell(pair[0].wait("ticket")["ticket"])
        completed = True
        for one in pair:
            try:
                one.wait("over")
            except RuntimeError:
                completed = False
        for one in pair:
            one.by_round = one.by_round or [0]
        return {
            "completed": completed,
            "rounds": min(len(one.rounds) for one in pair),
            "peak_bytes": max(one.peak_bytes for one in pair),
            "by_round": max((one.by_round for one in pair), key=max),
            "loop_extra_bytes": max(one.loop_peak_bytes - one.loop_before_bytes for one in pair),
            "closing_s": [max(pair_s) for pair_s in zip(*(one.rounds for one in pair), strict=False)],
            "plain_s": pair[0].told.get("over", {}).get("plain_s", 0.0),
            "reduce_s": max((statistics.median(one.told["ready"]["reduce_s"] or [0.0]) for one in pair), default=0),
            "attach_s": max(
                one.told.get(what, {}).get("seconds", 0.0)
                for one, what in zip(pair, ("ticket", "attached"), strict=True)
            ),
        }


def row(values: int, recipe: str, memory: str, options: Any, empty_bytes: int) -> dict[str, Any]:
    model_bytes, encoded_bytes = 4 * values, values + values // 128
    limit = (1.6 if memory == "disk" else 3.0) * model_bytes + 256 * MIB
    limit += 0 if memory == "disk" else 2 * encoded_bytes
    found = measure(terms(values, recipe, memory, options), int(limit) if options.limit else None)
    settled = found["closing_s"][SETTLED:] or found["closing_s"] or [0.0]
    round_s = statistics.median(settled) - found["plain_s"]
    return {
        "parameters": values,
        "members": 2,
        "state_memory": memory,
        "feedback": options.feedback,
        "recipe": recipe,
        "rounds": found["rounds"],
        "completed": found["completed"],
        "peer_memory_ratio": round((found["peak_bytes"] - empty_bytes) / model_bytes, 2),
        "peer_peak_mb": round(found["peak_bytes"] / MIB),
        "peer_by_round_mb": [round(b / MIB) for b in found["by_round"]],
        "peer_limit_mb": round(limit / MIB),
        "loop_extra_ratio": round(found["loop_extra_bytes"] / model_bytes, 2),
        "round_s": round(round_s, 3),
        "reduce_s": round(found["reduce_s"], 3),
        "round_ratio_to_reduce": round(round_s / found["reduce_s"], 2) if found["reduce_s"] else None,
        "attach_s": round(found["attach_s"], 1) if found["attach_s"] else None,
    }


def terms(values: int, recipe: str, memory: str, options: Any) -> dict[str, Any]:
    return {
        "values": values,
        "recipe": recipe,
        "rounds": options.rounds,
        "reductions": 0 if options.no_reduce or values <= EMPTY_VALUES else REDUCTIONS,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[options.dtype],
        "where": options.where,
        "state_memory": memory,
        "feedback": options.feedback,
    }


def main() -> None:
    if "--member" in sys.argv:
        member(json.loads(sys.argv[-1]))
        return
    parser = asking(__doc__, "10 M values, six rounds")
    parser.add_argument("--parameters", default="10M,50M,200M", help="comma between them; K, M, B")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--recipe", default="diloco", help="diloco, or names of atoll.training.recipe.methods")
    parser.add_argument("--state-memory", default="memory", help="memory, disk, or both with a comma")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"), help="of the loops' models")
    parser.add_argument("--feedback", default="fp32", choices=("fp32", "bf16"), help="precision of error feedback")
    parser.add_argument("--limit", action="store_true", help="peers may not take more than the limit")
    parser.add_argument("--no-reduce", action="store_true", help="measure no atoll.reduce")
    parser.add_argument("--where", default=None, help="folder for the members' folders")
    options = parser.parse_args()
    if options.quick:
        options.parameters, options.rounds = "10M", 6
    empty = measure(terms(EMPTY_VALUES, "diloco", "memory", options), None)["peak_bytes"]
    rows = []
    for size in options.parameters.split(","):
        for recipe in options.recipe.split(","):
            for memory in options.state_memory.split(","):
                rows.append(row(count(size), recipe, memory, options, empty))
                if not options.json:
                    print(json.dumps(rows[-1]), flush=True)
    if options.json:
        told = {"rounds": options.rounds, "empty_peer_mb": round(empty / MIB), "inner_steps": 2, "codec": "int8"}
        print(report("model_scale", told, rows, versions("torch", "numpy")))


if __name__ == "__main__":
    main()
