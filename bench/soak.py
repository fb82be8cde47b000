"""A small run among real peers to which something happens all the time: does it end as if nothing had happened?

    python bench/soak.py [--minutes N] [--seed S] [--lab] [--set KEY=VALUE ...] [--dir FOLDER] [--quick] [--json]

Five to seven `atoll` processes train a tiny model. Every few seconds one of these happens, drawn by the seed: a
peer is killed (SIGKILL) and started again from its folder, a process is stopped for up to 20 s, a trainer alone is
killed, a newcomer joins by ticket, a member leaves with Ctrl-C and may come back, all are killed at once, a disk is
full for a while (a small tmpfs, as root), and with `--lab` (root, too) a link between two hosts, or all links of
one, are cut.
Then everything is mended, and `soak_judge.py` says what is not as it should be. Exit status 1 if anything is; the
folders of such a run stay, with what was done to it in `trouble.jsonl`.

The seed fixes what is drawn; whom it meets, and what the processes were doing at that moment, it cannot fix.
"""

from __future__ import annotations

import heapq
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from form import asking, report, versions
from lab import Lab, Network
from real_swarm import Fact, Swarm
from soak_judge import Judged, Life, judged

from atoll.base.errors import AtollError
from atoll.runtime.control.socket import send_request

PEERS, PEERS_MIN, PEERS_MAX = 6, 5, 7
HOSTS = 16  # newcomers are new peers with folders of their own, so many in one run at most
SMALL = ("model.name=gpt-nano", "train.seq_len=32", "train.batch=2", "train.inner_steps=16", "run.rounds=0")
EVERY_S = (2.0, 9.0)  # between two troubles
SETTLED_ROUNDS = 4  # at the end, undisturbed, in which everybody counts
SETTLE_S = 300.0  # until they have happened
MISSED = "could not agree on this farewell"  # what a peer says that leaves a run without a quorum
GONE_S = 100.0  # for a farewell, with the minute that it may take
LOOKED_EVERY_S = 5.0  # at memory and open files
DISK_MB = 48  # of the peer whose disk is full now and then
WEIGHTS = {
    "kill": 6,
    "freeze": 6,
    "trainer": 4,
    "join": 3,
    "leave": 3,
    "blackout": 1,
    "disk": 2,
    "cut": 4,
    "alone": 2,
}


class Soak(Swarm):
    """A swarm that knows who should be there, and what was done to whom."""

    def __init__(
        self,
        base: Path,
        settings: list[str],
        seed: int,
        lab: Lab | None,
        tell: Callable[[str], None],
        small_disk: int | None,
    ) -> None:
        """`small_disk` is the peer that has one."""
        super().__init__(base, settings, lab)
        self.tell, self.small_disk = tell, small_disk
        self.draw = random.Random(seed)
        self.began = time.time()
        self.alive: set[int] = set()
        self.busy: set[int] = set()  # something is being done to them already
        self.asked_to_end: Counter[int] = Counter()
        self.ids: dict[int, str] = {}
        self.members: set[int] = set()  # whose folder holds the run
        self.lives: list[Life] = []
        self.later: list[tuple[float, int, Callable[[], None]]] = []
        self.wrong: list[str] = []  # what was wrong while it ran
        self.done: Counter[str] = Counter()
        self.missed: set[int] = set()  # who left although the others need its vote
        self.next_index = PEERS
        self.closing = False

    # ---- time ----------------------------------------------------------------------------------------------

    def hear(self, until: float) -> None:
        """Take in what peers tell; do what is due."""
        while (now := time.time()) < until:
            while self.later and self.later[0][0] <= now:
                heapq.heappop(self.later)[2]()
            due = min(until, self.later[0][0] if self.later else until, now + LOOKED_EVERY_S)
            self._take(max(0.0, due - now))
            self._look()

    def _take(self, seconds: float) -> None:
        try:
            raw = self.news.get(timeout=max(0.01, seconds))
        except queue.Empty:
            return
        fact: Fact = {"by": raw["by"], "heard": raw["heard"]} | raw["line"]
        self.facts.append(fact)
        index = fact["by"]
        match fact["fact"]:
            case "Opened":
                self.ids[index] = fact["peer"]
            case "GenesisKnown":
                self.members.add(index)
            case "Notice":
                self.note(f"peer {index} says: {fact['text']}")
                if MISSED in fact["text"]:
                    self.missed.add(index)
            case "Exit" if self.asked_to_end[index]:
                self.asked_to_end[index] -= 1
            case "Exit":
                self._ended_by_itself(index)
            case _:
                pass

    def _ended_by_itself(self, index: int) -> None:
        status = self.peers[index].process.wait()
        words = self.last_words(index)
        self.alive.discard(index)
        if index == self.small_disk and "E-DISK" in words:
            self.note(f"peer {index} ended with status {status}: its disk was full, and it said so")
        else:
            self.wrong.append(f"peer {index} ended by itself with status {status}: {words}")
            self.note(self.wrong[-1])
        if not self.closing:
            self.busy.add(index)
            self.at(self.draw.uniform(3.0, 8.0), lambda: self.start(index))

    def last_words(self, index: int) -> str:
        return (self.base / f"peer-{index}.stderr").read_text(errors="replace").strip()[-600:]

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.later, (time.time() + seconds, len(self.later) + self.draw.randrange(1 << 30), do))

    def note(self, what: str) -> None:
        at_s = time.time() - self.began
        self.tell(f"{at_s:7.1f} s  {what}")
        with (self.base / "trouble.jsonl").open("a") as file:
            file.write(json.dumps({"at": time.time(), "what": what}) + "\n")

    def _look(self) -> None:
        """At what every process takes, now and then."""
        now = time.time()
        for life in self.lives:
            if life.over or now < life.looked + LOOKED_EVERY_S:
                continue
            life.looked = now
            with suppress(psutil.Error):
                process = psutil.Process(life.process)
                size_mb = process.memory_info().rss / 1e6
                life.seen.append((now - life.began, size_mb, process.num_fds(), process.num_threads()))

    # ---- life and death ------------------------------------------------------------------------------------

    def start(self, index: int) -> None:
        """As its owner would: with the ticket until it is a member, then from its folder."""
        self.busy.discard(index)
        if index in self.members:
            self.resume(index)
        else:
            addresses = [f["addresses"] for f in self.facts if f["fact"] == "Opened" and f["by"] in self.alive]
            near = [word for one in {a for some in addresses for a in some} for word in ("--bootstrap", one)]
            self._start(index, ["join", self.ticket, *near])
        self.alive.add(index)
        self.lives.append(Life(index, self.peers[index].process.pid, time.time()))

    def _over(self, index: int) -> None:
        self.alive.discard(index)
        for life in self.lives:
            life.over = life.over or life.index == index

    def slay(self, index: int) -> None:
        self.asked_to_end[index] += 1
        self.kill(index)
        self._over(index)

    @property
    def calm(self) -> list[int]:
        """To whom nothing is done just now."""
        return sorted(self.alive - self.busy)

    def some(self, among: list[int]) -> int:
        return self.draw.choice(among)

    # ---- trouble -------------------------------------------------------------------------------------------

    def trouble(self) -> None:
        kinds = [kind for kind in WEIGHTS if getattr(self, f"_may_{kind}")()]
        if not kinds:
            return
        kind = self.draw.choices(kinds, [WEIGHTS[k] for k in kinds])[0]
        self.done[kind] += 1
        getattr(self, f"_{kind}")()

    def _may_kill(self) -> bool:
        return bool(self.calm)

    _may_freeze = _may_trainer = _may_kill

    def _kill(self) -> None:
        index, away_s = self.some(self.calm), self.draw.uniform(0.0, 9.0)
        self.note(f"kill peer {index}, start it again after {away_s:.1f} s")
        self.busy.add(index)
        self.slay(index)
        self.at(away_s, lambda: self.start(index))

    def _freeze(self) -> None:
        index, away_s = self.some(self.calm), self.draw.uniform(1.0, 20.0)
        whole = self.draw.random() < 0.5
        self.note(f"stop peer {index} for {away_s:.1f} s{', and its trainer' if whole else ''}")
        self.busy.add(index)
        process = psutil.Process(self.peers[index].process.pid)
        stopped = [process, *(process.children(recursive=True) if whole else [])]
        for one in stopped:
            with suppress(psutil.Error):
                one.suspend()

        def go_on() -> None:
            self.busy.discard(index)
            for one in stopped:
                with suppress(psutil.Error):
                    one.resume()

        self.at(away_s, go_on)

    def _trainer(self) -> None:
        index = self.some(self.calm)
        with suppress(StopIteration, psutil.Error):
            self.peers[index].trainer().kill()
            self.note(f"kill the trainer of peer {index}")

    def _may_join(self) -> bool:
        return len(self.alive | self.busy) < PEERS_MAX and self.next_index < HOSTS and bool(self.calm)

    def _join(self) -> None:
        index, self.next_index = self.next_index, self.next_index + 1
        self.note(f"peer {index} joins")
        self.start(index)

    def _may_leave(self) -> bool:
        return len(self.alive | self.busy) > PEERS_MIN and bool(self._leavers())

    def _leavers(self) -> list[int]:
        return [index for index in self.calm if index in self.members]

    def _leave(self) -> None:
        index, back_s = self.some(self._leavers()), self.draw.uniform(4.0, 20.0)
        back = self.draw.random() < 0.6
        self.note(f"peer {index} leaves with Ctrl-C{f', comes back {back_s:.1f} s later' if back else ''}")
        self.busy.add(index)
        self.asked_to_end[index] += 1
        process = self.peers[index].process
        process.send_signal(signal.SIGINT)
        until = time.time() + GONE_S

        def gone() -> None:
            if process.poll() is None and time.time() < until:
                self.at(0.5, gone)
                return
            if process.poll() is None:
                self.wrong.append(f"peer {index} did not end within {GONE_S:.0f} s of Ctrl-C")
                process.kill()
            elif process.returncode not in (0, 130):  # 130: it had not begun yet
                self.wrong.append(f"peer {index} left with status {process.returncode}: {self.last_words(index)}")
            self._over(index)
            self.busy.discard(index)
            # it is needed: the others may be paused without it, as it said, or it ended before it could say so
            if back or index in self.missed or process.returncode == 130:
                self.missed.discard(index)
                self.busy.add(index)
                self.at(back_s, lambda: self.start(index))

        self.at(0.5, gone)

    def _may_blackout(self) -> bool:
        return len(self.calm) >= 3

    def _blackout(self) -> None:
        victims = self.calm
        self.note(f"all are killed at once: {victims}")
        for index in victims:
            self.busy.add(index)
            self.slay(index)
        for index in victims:
            self.at(self.draw.uniform(0.0, 4.0), lambda index=index: self.start(index))

    def _may_disk(self) -> bool:
        return self.small_disk in self.calm

    def _disk(self) -> None:
        index = self.small_disk
        assert index is not None
        away_s, left = self.draw.uniform(3.0, 15.0), self.draw.choice([0, 4096, 200_000])
        self.note(f"the disk of peer {index} is full but for {left} bytes for {away_s:.1f} s")
        self.busy.add(index)
        ballast = self.base / f"peer-{index}" / "ballast"
        with suppress(OSError), ballast.open("wb") as file:
            with suppress(OSError):
                while True:
                    file.seek(0, os.SEEK_END)
                    file.write(bytes(65536))
                    file.flush()
            file.truncate(max(0, file.seek(0, os.SEEK_END) - left))

        def freed() -> None:
            ballast.unlink(missing_ok=True)
            self.note(f"the disk of peer {index} has room again")
            self.busy.discard(index)

        self.at(away_s, freed)

    def _may_cut(self) -> bool:
        return self.lab is not None and len(self.calm) >= 2

    _may_alone = _may_cut

    def _cut(self) -> None:
        a, b = self.draw.sample(self.calm, 2)
        self._cut_for({(a, b)}, self.draw.uniform(2.0, 25.0), f"the link between {a} and {b} is cut")

    def _alone(self) -> None:
        index = self.some(self.calm)
        links = {(index, other) for other in range(HOSTS) if other != index}
        self._cut_for(links, self.draw.uniform(2.0, 25.0), f"peer {index} is cut off from all")

    def _cut_for(self, links: set[tuple[int, int]], away_s: float, what: str) -> None:
        lab = self.lab
        assert lab is not None
        self.note(f"{what} for {away_s:.1f} s")
        for a, b in links:
            lab.cut(a, b)

        def mend() -> None:
            for a, b in links:
                lab.mend(a, b)

        self.at(away_s, mend)

    # ---- the whole story -----------------------------------------------------------------------------------

    def all_begin(self) -> None:
        self.found()
        for index in range(1, PEERS):
            self.start(index)
        self.closed(2, peer=0, patience_s=SETTLE_S)
        self.ids |= {f["by"]: f["peer"] for f in self.facts if f["fact"] == "Opened"}  # `closed` heard them
        self.members |= {f["by"] for f in self.facts if f["fact"] == "GenesisKnown"}

    def found(self) -> None:
        super().found()
        self.members.add(0)
        self.alive.add(0)
        self.lives.append(Life(0, self.peers[0].process.pid, time.time()))

    def disturb(self, seconds: float) -> None:
        until = time.time() + seconds
        while time.time() < until:
            self.hear(min(until, time.time() + self.draw.uniform(*EVERY_S)))
            self.trouble()

    def settle(self) -> bool:
        """No trouble any more; true when rounds in which all count have followed each other."""
        self.note("no more trouble")
        until = time.time() + SETTLE_S
        while self.later and time.time() < until + GONE_S:
            self.hear(time.time() + 1.0)
        since, calm_from = len(self.facts), time.time()
        while time.time() < until:
            self.hear(time.time() + 1.0)
            if self._all_count(since):
                self.note(f"all count again, {time.time() - calm_from:.1f} s after the last trouble was over")
                return True
        return False

    def _all_count(self, since: int) -> bool:
        """Every living peer closed the same last rounds, and each of them counted in all."""
        ids = {self.ids.get(index) for index in self.alive}
        counted: dict[int, list[set[str]]] = {}
        for fact in self.facts[since:]:
            if fact["fact"] == "RoundClosed":
                counted.setdefault(fact["round"], []).append(set(fact["counted"]))
        good = [r for r, said in counted.items() if len(said) >= len(ids) and all(ids == one for one in said)]
        newest = max(good, default=0)
        return all(newest - back in good for back in range(SETTLED_ROUNDS))

    def finish(self) -> None:
        """Whoever started them is gone: they end at once."""
        self.closing = True
        for index in sorted(self.alive):
            self.asked_to_end[index] += 1
            stdin = self.peers[index].process.stdin
            assert stdin is not None
            stdin.close()
        for index in sorted(self.alive):
            try:
                status = self.peers[index].process.wait(timeout=60.0)
            except subprocess.TimeoutExpired:
                self.wrong.append(f"peer {index} did not end within a minute of its starter's end")
                continue
            if status:
                self.wrong.append(f"peer {index} ended with status {status}: {self.last_words(index)}")


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A tmpfs of DISK_MB, where this process may mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            kept = folder.with_name(folder.name + "-kept")
            shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("ballast"), dirs_exist_ok=True)
            subprocess.run(["umount", "-l", str(folder)], check=False)
            shutil.rmtree(folder, ignore_errors=True)
            kept.rename(folder)


def soak(
    base: Path, seed: int, seconds: float, settings: list[str], lab: bool, tell: Callable[[str], None]
) -> Judged:
    """One run, from its founding to the judgement."""
    with ExitStack() as stack:
        disk = 1 if stack.enter_context(small_disk(base / "peer-1")) else None
        network = stack.enter_context(Lab(Network.flat(HOSTS, rtt_s=0.02, rate_bytes_s=12.5e6))) if lab else None
        words = [*settings, f"run.start_peers={PEERS}"]
        swarm = stack.enter_context(Soak(base, words, seed, network, tell, disk))
        swarm.all_begin()
        swarm.disturb(seconds)
        settled = swarm.settle()
        if not settled:
            swarm.wrong.append(f"not all counted in {SETTLED_ROUNDS} rounds in a row within {SETTLE_S:.0f} s")
            for index in sorted(swarm.alive):
                with suppress(AtollError):
                    s: dict[str, Any] = send_request(base / f"peer-{index}", "status")
                    told = {k: s[k] for k in ("trained", "phase", "paused", "trouble", "standing", "present")}
                    swarm.wrong.append(f"peer {index} says: {told}")
        swarm.finish()
        return judged(base, swarm.facts, swarm.ids, swarm.lives, swarm.wrong, swarm.done, sorted(swarm.alive))


def main() -> int:
    asked = asking(__doc__, "25 seconds of trouble", json="one object instead of lines")
    asked.add_argument("--minutes", type=float, default=10.0, help="of trouble; what follows takes some more")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument(
        "--lab", action="store_true", help="in namespaces with shaped links, which are cut, too (root)"
    )
    asked.add_argument("--set", action="append", default=[], help="a setting of the run, as in `atoll up --set`")
    asked.add_argument("--dir", type=Path, help="where the folders of the peers stay in any case")
    given = asked.parse_args()
    base = given.dir or Path(tempfile.mkdtemp(prefix=f"atoll-soak-{given.seed}-"))
    base.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is born deaf to Ctrl-C
    seconds = 25.0 if given.quick else 60.0 * given.minutes
    tell: Callable[[str], None] = (lambda line: None) if given.json else (lambda line: print(line, flush=True))
    found = soak(base, given.seed, seconds, [*SMALL, *given.set], given.lab, tell)
    if given.json:
        told = {"seed": given.seed, "minutes": seconds / 60, "lab": given.lab, "set": given.set}
        print(report("soak", told, found.figures | {"wrong": found.wrong}, versions("torch")))
    else:
        print("\n".join(found.lines()))
    if found.wrong:
        print(f"wrong with seed {given.seed}; the folders are in {base}", file=sys.stderr)
    elif given.dir is None:
        shutil.rmtree(base)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
