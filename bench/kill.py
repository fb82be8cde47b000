"""What a death in the middle of an all-reduce costs, and whether the survivors tell the truth about it.

    python bench/kill.py [--peers 4] [--megabytes 100] [--kill 1] [--trials 100] [--codec fp32] [--quick] [--json]
                         [--topology butterfly] [--system atoll|torchft|hivemind] [--seed 4012] [--patience 60]

A trial: an undisturbed all-reduce is timed; in the next one `--kill` peers get SIGKILL at a random moment of the
time that the undisturbed one took. Fresh processes, started before they were needed, then join in place of the dead
and warm up. The vectors are patterns by which a result shows of whom each value is the mean (systems/patterns.py),
so what survivors report is compared with what the numbers say.

    trials          that were made
    recovery_s      the disturbed all-reduce minus the undisturbed one, slowest survivor: _median, _p90, _max
    hangs           trials in which a survivor had no result after `--patience` s; a busy computer wants more of it
    failures        trials in which a survivor got an error instead of a result
    not_replaced    trials after which fresh peers could not join; those that killed Atoll's founder are not tried
    disagreements   trials after which two survivors held different bits
    wrong_reports   trials in which the named contributors do not explain the numbers
    stood_still     trials without a time, because this program itself was stopped meanwhile
    kept, partly    dead peers that the survivors named as counted in full, or in some parts
"""

from __future__ import annotations

import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from operator import and_, itemgetter, or_
from typing import Any

from allreduce import LEAD_S, MB, all_versions, available, enter_own_network, note, surroundings
from form import asking, report
from systems import Task, patterns
from systems.crew import START_S, CrewError, Process, Silence, start
from systems.probe import Watch

HANG_S = 60.0  # on a computer of its own; an all-reduce of 100 MB there takes half a second
TRIALS, QUICK_TRIALS = 100, 8
MEGABYTES, QUICK_MEGABYTES = 100.0, 20.0
SPARES = 3  # times those killed per trial: started together, while nothing is timed
NEWS_TRIALS = 10  # between two lines of progress
FOUNDED = {"atoll"}  # its ticket holds the founder's address alone: when rank 0 dies, nobody can take its place
ANCHORED = {"torchft"}  # rank 0 holds what the group cannot lose, so it is never killed


@dataclass
class Trial:
    """One line of the record."""

    killed: list[int]  # slots
    stood_still: bool = False  # all of us were stopped for a while, so the times mean nothing
    killed_after_s: float = 0.0  # from the start of the all-reduce
    undisturbed_s: float = 0.0
    disturbed_s: float = 0.0
    hang: bool = False
    failure: str = ""
    disagreement: bool = False
    wrong_reports: list[str] = field(default_factory=list)  # one survivor's report and what the numbers say
    replaced: bool = True
    kept: int = 0
    partly: int = 0


class Swarm:
    """The peers by slot; a slot outlives the process in it."""

    def __init__(
        self, system: str, peers: int, values: int, kill: int, codec: str, topology: str, patience_s: float
    ) -> None:
        self.system, self.peers, self.values, self.kill = system, peers, values, kill
        self.codec, self.topology, self.patience_s = codec, topology, patience_s
        self.started = 0
        self.slots: list[Process] = []
        self.names: list[str] = []  # how each slot's peer is called in reports
        self.spares: list[Process] = []

    def open(self) -> None:
        self.slots = self._start(self.peers)
        where = self.slots[0].ask("invite")["where"]
        for process in self.slots:
            process.tell("enter", where=where)
        self.names = [process.hear()["me"] for process in self.slots]
        self._settle()
        for process in self.slots:
            process.hear()

    def replace(self, dead: list[int]) -> None:
        """Fresh peers take the places of the dead; returns when an all-reduce had everybody."""
        if len(self.spares) < len(dead):
            self.spares += self._start(SPARES * self.kill)
        where = next(process for slot, process in enumerate(self.slots) if slot not in dead).ask("invite")["where"]
        for slot in dead:
            self.slots[slot].bury()
            self.slots[slot] = self.spares.pop()
            self.slots[slot].tell("enter", where=where)
        self._settle()  # those inside do not wait: some systems let newcomers in with an all-reduce only
        for slot in dead:
            self.names[slot] = self.slots[slot].hear()["me"]
        for process in self.slots:
            process.hear()

    def all_reduce(
        self, trial: int, victims: Sequence[int] = (), after_s: float = 0.0
    ) -> tuple[float, dict[int, dict[str, Any]]]:
        """Seconds until the slowest survivor had its result, and what each said. CrewError if one has none."""
        for slot, process in enumerate(self.slots):
            process.tell("paint", slot=slot, trial=trial)
        for process in self.slots:
            process.hear()
        at = time.monotonic() + LEAD_S
        for process in self.slots:
            process.tell("average", at=at)
        if victims:
            time.sleep(max(0.0, at + after_s - time.monotonic()))
        for slot in victims:
            self.slots[slot].kill()
        heard = {
            slot: process.hear(self.patience_s) for slot, process in enumerate(self.slots) if slot not in victims
        }
        return max(each["ended"] for each in heard.values()) - at, {
            slot: each["done"] for slot, each in heard.items()
        }

    def recognise(self, trial: int, slots: Sequence[int]) -> dict[int, dict[str, Any]]:
        for slot in slots:
            self.slots[slot].tell("recognise", trial=trial)
        return {slot: self.slots[slot].hear() for slot in slots}

    def _settle(self) -> None:
        for process in self.slots:
            process.tell("settle")

    def _start(self, count: int) -> list[Process]:
        processes = []
        for _ in range(count):
            rank, self.started = self.started, self.started + 1
            processes.append(
                start(Task(self.system, rank, self.peers, self.values, self.codec, self.topology, "", self.kill))
            )
        for process in processes:
            process.hear(START_S)
        return processes

    def end(self) -> None:
        """Without good-byes: a hung group would not hear them."""
        for process in (*self.slots, *self.spares):
            process.bury()
        self.slots, self.spares = [], []


def one_trial(swarm: Swarm, trial: int, dice: random.Random, watch: Watch) -> Trial:
    """Time, kill, judge, replace."""
    killable = range(1 if swarm.system in ANCHORED else 0, swarm.peers)
    record = Trial(killed=sorted(dice.sample(killable, swarm.kill)))
    moment, stops = dice.random(), watch.stops
    try:
        record.undisturbed_s, said = swarm.all_reduce(2 * trial)
        if any(done["count"] < swarm.peers for done in said.values()):
            raise CrewError(f"somebody was missing before anybody was killed: {said}")
        record.killed_after_s = moment * record.undisturbed_s
        record.disturbed_s, said = swarm.all_reduce(2 * trial + 1, record.killed, record.killed_after_s)
        record.stood_still = watch.stops != stops
        judge(swarm.names, said, swarm.recognise(2 * trial + 1, list(said)), record)
    except CrewError as trouble:
        record.hang, record.failure = isinstance(trouble, Silence), str(trouble)
        note(f"trial {trial}: {trouble}")
    renew(swarm, record)
    return record


def renew(swarm: Swarm, record: Trial) -> None:
    """Back to all peers: fresh ones for the dead, or a fresh swarm where that cannot be."""
    try:
        if not record.failure and (0 not in record.killed or swarm.system not in FOUNDED):
            swarm.replace(record.killed)
            return
    except CrewError as trouble:
        record.replaced = False
        note(f"after trial with {record.killed} killed, fresh peers did not come in: {trouble}")
    swarm.end()
    swarm.open()


def judge(names: list[str], said: dict[int, Any], seen: dict[int, Any], record: Trial) -> None:
    """Compare the survivors with each other, and each one's report with its numbers."""
    record.disagreement = len({each["digest"] for each in seen.values()}) > 1
    for slot, done in said.items():
        if not explains(done, seen[slot]["seen"], names, slot):
            record.wrong_reports.append(f"slot {slot} {told(done, names)}; its values {shown(seen[slot]['seen'])}")
    dead = {names[slot] for slot in record.killed}
    done = next(iter(said.values()))  # the others' reports are the same, or wrong
    record.partly = len(dead & set(done["partly"]))
    record.kept = len(dead & set(done["contributors"] or ()) - set(done["partly"]))


def explains(done: dict[str, Any], seen: dict[str, Any], names: list[str], me: int) -> bool:
    """Whether the values are means of exactly those who were named.

    Of a system that names contributors per part, each part is looked at; a part that names nobody must hold the
    survivor's own values. One that names them once must have the full ones everywhere and the partial ones
    somewhere. One that only counts them is taken at its count.
    """
    subsets = {mask for _, mask in seen["runs"]}
    if seen["unexplained"] or not subsets:
        return False
    if done["contributors"] is None:
        return {mask.bit_count() for mask in subsets} == {done["count"]}
    bit = {name: 1 << slot for slot, name in enumerate(names)}
    if done["parts"]:
        said = [(hi - lo, sum(bit[name] for name in named) or 1 << me) for lo, hi, named in done["parts"]]
        return merged(said) == merged(seen["runs"])
    partly = sum(bit[name] for name in done["partly"])
    full = sum(bit[name] for name in done["contributors"] if name not in done["partly"])
    return reduce(and_, subsets) == full and reduce(or_, subsets) == full | partly


def merged(runs: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(values, mask) with neighbours of the same mask as one."""
    return [(sum(count for count, _ in group), mask) for mask, group in groupby(runs, key=itemgetter(1))]


def told(done: dict[str, Any], names: list[str]) -> str:
    if done["contributors"] is None:
        return f"counts {done['count']}"

    def slots(named: Sequence[str]) -> list[int]:
        return sorted(names.index(name) for name in named)

    parts = [f"{hi - lo} x {slots(named)}" for lo, hi, named in done["parts"]]
    return f"names {slots(done['contributors'])}, partly {slots(done['partly'])}, parts {', '.join(parts)}"


def shown(seen: dict[str, Any]) -> str:
    """Per run of values the slots that they are the mean of."""
    runs = [
        f"{count} x {[slot for slot in range(mask.bit_length()) if mask >> slot & 1]}"
        for count, mask in seen["runs"]
    ]
    return f"are {', '.join(runs)}; {seen['unexplained']} unexplained"


def figures(trials: list[Trial]) -> dict[str, Any]:
    timed = [t for t in trials if not (t.hang or t.failure or t.stood_still)]
    found: dict[str, Any] = {
        "trials": len(trials),
        "stood_still": sum(t.stood_still for t in trials),
        "hangs": sum(t.hang for t in trials),
        "failures": sum(bool(t.failure) and not t.hang for t in trials),
        "not_replaced": sum(not t.replaced for t in trials),
        "disagreements": sum(t.disagreement for t in trials),
        "wrong_reports": sum(bool(t.wrong_reports) for t in trials),
        "kept": sum(t.kept for t in trials),
        "partly": sum(t.partly for t in trials),
    }
    times = ("recovery_s_median", "recovery_s_p90", "recovery_s_max", "undisturbed_s_median")
    found |= dict.fromkeys(times)  # nothing, where no trial came to its end
    if timed:
        recovery_s = sorted(t.disturbed_s - t.undisturbed_s for t in timed)
        found |= {
            "recovery_s_median": round(statistics.median(recovery_s), 3),
            "recovery_s_p90": round(recovery_s[int(0.9 * (len(recovery_s) - 1))], 3),
            "recovery_s_max": round(recovery_s[-1], 3),
            "undisturbed_s_median": round(statistics.median(t.undisturbed_s for t in timed), 3),
        }
    return found


def main() -> None:
    asked = asking(__doc__, "about a minute on two cores", json="one object, with every trial, instead of a table")
    asked.add_argument("--system", default="atoll", choices=["atoll", "torchft", "hivemind"])
    asked.add_argument("--peers", type=int, default=4)
    asked.add_argument("--megabytes", type=float, help=f"{MEGABYTES:g}, with --quick {QUICK_MEGABYTES:g}")
    asked.add_argument("--kill", type=int, default=1)
    asked.add_argument("--trials", type=int, help=f"{TRIALS}, with --quick {QUICK_TRIALS}")
    asked.add_argument("--codec", default="fp32")
    asked.add_argument("--topology", default="butterfly")
    asked.add_argument("--seed", type=int, default=4012, help="of who is killed when")
    asked.add_argument("--patience", type=float, default=HANG_S, help="seconds until silence is a hang")
    options = asked.parse_args()
    trials = options.trials or (QUICK_TRIALS if options.quick else TRIALS)
    megabytes = options.megabytes or (QUICK_MEGABYTES if options.quick else MEGABYTES)
    if not 0 < options.kill < options.peers - (options.system in ANCHORED):
        raise ValueError(
            f"of {options.peers} peers {options.kill} cannot be killed and leave survivors; raise --peers"
        )
    patterns.check(options.peers, options.codec)  # before anything is started
    network = enter_own_network(sys.argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no peer is left behind
    if options.system not in available([options.system]):
        return
    values = round(megabytes * MB / 4)
    swarm = Swarm(
        options.system,
        options.peers,
        values,
        options.kill,
        options.codec,
        options.topology,
        options.patience,
    )
    dice, watch, done = random.Random(options.seed), Watch(), []
    try:
        swarm.open()
        for trial in range(trials):
            done.append(one_trial(swarm, trial, dice, watch))
            if (trial + 1) % NEWS_TRIALS == 0:
                note(f"{figures(done)}")
    finally:
        swarm.end()
    settings = {
        "system": options.system,
        "peers": options.peers,
        "megabytes": megabytes,
        "kill": options.kill,
        "codec": options.codec,
        "topology": options.topology,
        "seed": options.seed,
        "patience_s": options.patience,
        "network": network,
    }
    if options.json:
        print(report("kill", settings | surroundings(), figures(done), all_versions(), trials=done))
        return
    for name, figure in figures(done).items():
        print(f"{name:22}{figure}")
    for each in done:
        for line in each.wrong_reports:
            print(line)


if __name__ == "__main__":
    main()
