"""Private swarm on this computer: real peers in their own processes, as `atoll up` and `atoll join` start them.

The demo does what a person could do with two commands per peer: it founds, joins by ticket, follows the facts that
every peer prints, and queries their control sockets. Nothing is simulated: keys, sockets and disks are real. Never
imports torch.

Invariants:
- No child survives the demo, however it ends. A child leaves when its stdin closes, so even a killed demo leaves
  none behind.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from atoll.base.errors import AtollError, RunFailedError, UsageError
from atoll.base.version import VERSION
from atoll.runtime.control.socket import send_request_async
from atoll.runtime.event_log import RunStatus
from atoll.runtime.storage.ownership import open_private, private_folder, safe_folder

PEERS_MAX = 16  # trainers share this computer's cores; more would only wait for each other
LEAVE_S = 8.0  # seconds to leave the run; then the child is killed
KILLED_S = 3.0  # seconds until a killed process is gone
START_S = 120.0  # seconds until the first output of a child on a busy computer
QUIET_S = 240.0  # the demo has failed after this many seconds without a fact from any peer
LINE_MAX = 2**20  # bytes of one fact
LOSS_BAR = 1.9  # nats per byte after WHOLE_ROUNDS rounds of the unchanged demo; a table of byte pairs reaches 2.30
WHOLE_ROUNDS = 20
SHARE_BAR = 0.75  # bar as a share of the first validation loss, for other demos of SHORT_ROUNDS rounds or more
SHORT_ROUNDS = 4  # shorter demos must only not get worse
PROMPT = "def "
SAMPLE_BYTES = 240


@dataclass(frozen=True)
class DemoSettings:
    peers: int = 4
    rounds: int | None = None  # None: the recipe's
    seed: int = 0
    chaos: bool = False
    solo: bool = False
    sets: tuple[str, ...] = ()
    device: str = "cpu"  # node.device of every peer

    def __post_init__(self) -> None:
        if not 1 <= self.peers <= PEERS_MAX:
            raise UsageError(
                "E-ARG-07",
                f"a demo has between 1 and {PEERS_MAX} peers, not {self.peers}",
                cause="they all share this computer",
                fix="atoll demo --peers 4",
            )
        if self.chaos and self.peers < 3:
            raise UsageError(
                "E-ARG-11",
                f"with --chaos a demo needs at least 3 peers, not {self.peers}",
                cause="more than half must be left to agree when one is killed",
                fix="atoll demo --chaos --peers 3",
            )


@dataclass
class DemoProcess:
    """One peer process."""

    name: str
    folder: Path
    process: asyncio.subprocess.Process
    progress: RunStatus = field(default_factory=RunStatus)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    news: dict[str, Any] = field(default_factory=dict)  # first output of the process: ticket, addresses
    gone: str = ""  # reason why it ended

    @property
    def here(self) -> bool:
        return not self.gone


@dataclass
class DemoResult:
    figures: dict[str, Any]
    sample: str  # text that the model writes; empty if it is not a text model
    unit: str  # unit of what it learned from: tokens or samples
    model: Path
    record: Path  # folder with the facts.jsonl of the run
    bar: float  # validation loss that had to be reached
    reached: bool


class DemoRun:
    """One demo. `on_change` is called with a line for people, or with "" when only numbers changed."""

    def __init__(self, settings: DemoSettings, folder: Path, on_change: Callable[[str], None]) -> None:
        self.settings, self.folder, self.on_change = settings, folder, on_change
        self.children: list[DemoProcess] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.changed = asyncio.Event()
        self.heard_at = time.monotonic()

    # ---- the story -----------------------------------------------------------------------------------------

    async def run(self) -> DemoResult:
        """Found, join, train, measure. No child survives, whatever happens."""
        began = time.monotonic()
        safe_folder(self.folder)
        try:
            return await self._run(began)
        finally:
            await self._end_all()

    async def _run(self, began: float) -> DemoResult:
        s = self.settings
        self.on_change("peer-1 starts: each peer loads torch, the model and the data first, for some seconds")
        founder = await self._found("peer-1", s.peers, self._sets())
        ticket = founder.news["ticket"]
        self.on_change(f"peer-1 founded a run; {s.peers - 1} more join with its ticket")
        for k in range(2, s.peers + 1):
            await self._start(f"peer-{k}", ["join"], ticket)
        meanwhile = "; training begins when all are members" if s.peers > 1 else ""
        self.on_change(f"measuring the validation loss before training{meanwhile}")
        start = await send_request_async(founder.folder, "evaluate")
        self.on_change(f"before training: validation loss {start['loss']:.3f}")
        if s.chaos:
            await self._chaos()
        await self._until(lambda: all(c.progress.over for c in self.children if c.here))
        wall_s = time.monotonic() - began
        finished, teller = [c for c in self.children if c.here], self.teller
        end = await send_request_async(teller.folder, "evaluate")
        sample = await self._sample(teller.folder) if teller.progress.unit == "tokens" else ""
        model = await send_request_async(
            teller.folder, "export", path=str((self.folder / "model.safetensors").absolute())
        )
        totals = [await send_request_async(c.folder, "status") for c in finished]
        sent = sum(t["bytes_out"] for t in totals) + sum(c.progress.bytes_out for c in self.children if c.gone)
        hashes = {t["state"] for t in totals}
        p = teller.progress
        figures = {
            "val_loss_start": start["loss"],
            "val_loss_end": end["loss"],
            "val_loss_solo": None,
            "val_accuracy_end": end["accuracy"],
            "state_hashes_equal": len(hashes) == 1 and all(t["over"] for t in totals),
            "rounds": p.trained,
            "peers_at_the_end": len(finished),
            "tokens": p.tokens,
            "bytes_sent": sent,
            "bytes_data_parallel": self.data_parallel,
            "wall_s": wall_s,
        }
        await self._end_all()
        if s.solo:
            figures["val_loss_solo"] = await self._solo()
        bar = self._bar(start["loss"], p.trained)
        reached = bool(figures["state_hashes_equal"]) and end["loss"] <= bar
        return DemoResult(figures, sample, p.unit, Path(model["path"]), teller.folder, bar, reached)

    async def _sample(self, folder: Path) -> str:
        """Text that the model writes; empty if its tokens are not bytes."""
        try:
            wish = {"prompt": PROMPT, "count": SAMPLE_BYTES, "seed": self.settings.seed}
            return (await send_request_async(folder, "sample", **wish))["text"]
        except AtollError as refused:
            if refused.code != "E-TRN-05":
                raise
            return ""

    def _bar(self, start: float, rounds: int) -> float:
        """Validation loss that this demo must reach."""
        if rounds >= WHOLE_ROUNDS and not self.settings.sets:
            return LOSS_BAR
        return start * (SHARE_BAR if rounds >= SHORT_ROUNDS else 1.0)

    async def _chaos(self) -> None:
        """Kill the founder in the middle of a round: no server has to stay up. Then admit a new peer."""
        victim, witness = self.children[0], self.children[1]
        rounds = max(2, victim.progress.rounds)
        await self._until(lambda: witness.progress.trained >= max(1, rounds // 4))
        await self._until(lambda: 0 < victim.progress.step < victim.progress.inner_steps)
        at = witness.progress.trained + 1
        victim.process.send_signal(signal.SIGKILL)
        self.on_change(f"! {victim.name}, the founder, was killed (SIGKILL) in the middle of round {at}")
        await self._until(lambda: witness.progress.trained >= min(rounds - 1, at + 1))
        invitation = await send_request_async(witness.folder, "invite")
        late = f"peer-{len(self.children) + 1}"
        self.on_change(f"{late} joins late, invited by {witness.name}")
        await self._start(late, ["join"], invitation["ticket"])

    async def _solo(self) -> float:
        """Train one peer alone: the same number of steps, batch and schedule, plain AdamW, without averaging.

        It trains on slice 0 of 1 of the data, so none of its samples repeats: the best a peer could do alone.
        """
        self.on_change("one peer alone, the same steps, for comparison")
        plain = ["train.outer_lr=1", "train.outer_momentum=0", "sync.up=fp32", "sync.down=fp32"]
        alone = await self._found("alone", 1, [*self._sets(), *plain])
        await self._until(lambda: alone.progress.over)
        found = await send_request_async(alone.folder, "evaluate")
        return found["loss"]

    # ---- numbers -------------------------------------------------------------------------------------------

    @property
    def teller(self) -> DemoProcess:
        """First running peer among the original ones; its facts stand for all."""
        return next((c for c in self.children if c.here), self.children[0])

    @property
    def shown(self) -> RunStatus:
        """Status of the peer that is furthest."""
        here = [c.progress for c in self.children if c.here] or [c.progress for c in self.children]
        return max(here, key=lambda p: (p.trained, p.tokens)) if here else RunStatus()

    @property
    def sent(self) -> int:
        return sum(c.progress.bytes_out for c in self.children)

    @property
    def data_parallel(self) -> int:
        """Bytes of all peers under data-parallel training: one ring all-reduce of fp32 gradients per step."""
        return max((c.progress.bytes_data_parallel_all for c in self.children), default=0)

    def _sets(self) -> list[str]:
        s = self.settings
        rounds = [f"run.rounds={s.rounds}"] if s.rounds is not None else []
        return [f"train.seed={s.seed}", *rounds, *s.sets]

    # ---- children ------------------------------------------------------------------------------------------

    async def _found(self, name: str, peers: int, sets: list[str]) -> DemoProcess:
        own = [f"run.name=demo-{peers}", f"run.start_peers={peers}", "train.recipe=demo"]
        words = [word for text in [*own, *sets] for word in ("--set", text)]
        child = await self._start(name, ["up", *words])
        async with asyncio.timeout(START_S):
            await self._until(lambda: child.opened.is_set() and child.progress.holds_model)
        return child

    async def _start(self, name: str, words: list[str], ticket: str = "") -> DemoProcess:
        folder = self.folder / name
        private_folder(folder)
        threads = max(1, (os.cpu_count() or 1) // self.settings.peers)
        # -P: no module comes from the working directory, which `-m` would search first
        verb, *options = words
        words = [verb, "--set", f"node.device={self.settings.device}", *options]  # a later --set replaces it
        command = [sys.executable, "-P", "-m", "atoll", *words, "--dir", str(folder), "--name", name]
        own = {"OMP_NUM_THREADS": str(threads), "ATOLL_TICKET": ticket}
        own["ATOLL_LISTEN"] = ""  # every process at a port of its own
        errors = open_private(folder / "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--threads", str(threads), "--facts", "--stay"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C reaches the demo only, which ends its children
            limit=LINE_MAX,
            env=os.environ | own,
        )
        os.close(errors)
        child = DemoProcess(name, folder, process)
        self.children.append(child)
        self.tasks.append(asyncio.create_task(self._listen(child)))
        return child

    async def _listen(self, child: DemoProcess) -> None:
        """Fold a child's facts into the picture until its output ends."""
        assert child.process.stdout is not None
        async for line in child.process.stdout:
            with suppress(msgspec.DecodeError):
                entry = msgspec.json.decode(line)
                self.heard_at = time.monotonic()
                self._hear(child, entry)
        code = await child.process.wait()
        child.gone = "killed" if code < 0 else "left" if code == 0 else f"failed ({code})"
        self._change("" if code <= 0 else f"! {child.name} ended with exit status {code}")

    def _hear(self, child: DemoProcess, entry: dict[str, Any]) -> None:
        match entry["fact"]:
            case "Opened":
                child.news = entry
                child.opened.set()
            case "Ended" | "Notice":
                pass
            case _:
                child.progress.fold(entry)
        self._change(self._line(child, entry))

    def _line(self, child: DemoProcess, entry: dict[str, Any]) -> str:
        """Line to print above the picture, empty if none; one peer stands for all."""
        if child is not self.teller or child.progress.over:
            return ""
        name = child.progress.name_of
        match entry["fact"]:
            case "PeerSuspected":
                return f"! {name(entry['peer'])} does not answer; the others go on without it"
            case "MembershipChanged" if entry["left"]:
                return f"the members agreed that {', '.join(name(p) for p in entry['left'])} is gone"
            case "MembershipChanged" if entry["joined"]:
                return f"{', '.join(name(p) for p in entry['joined'])} joined"
            case "RoundClosed" if child.progress.missing and entry["counted"]:
                absent = ", ".join(name(p) for p in child.progress.missing)
                return f"round {entry['trained']} closed with {len(entry['counted'])} peers, without {absent}"
            case _:
                return ""

    def _change(self, line: str) -> None:
        self.on_change(line)
        self.changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for facts. The demo fails if its founder ends or all peers fall silent."""
        while not condition():
            self.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await self.changed.wait()
            broken = next((c for c in self.children if c.gone.startswith("failed")), None)
            if broken is not None:
                raise self._failed(broken)
            if self.children and not any(c.here for c in self.children):
                raise self._failed(self.children[0])
            if time.monotonic() - self.heard_at > QUIET_S:
                raise RunFailedError(
                    "E-DEMO-01",
                    f"no peer has said anything for {QUIET_S:.0f} s",
                    cause="this computer is overloaded or swaps",
                    fix=f"look into {self.folder}, then try atoll demo --peers 2",
                )

    def _failed(self, child: DemoProcess) -> AtollError:
        words = (child.folder / "stderr.txt").read_text(errors="replace").strip().splitlines()
        return RunFailedError(
            "E-DEMO-02",
            f"{child.name} ended ({child.gone})",
            cause="\n  ".join(words[-4:]) or "it was ended from outside",
            fix=f"look into {child.folder}",
        )

    def tidy(self, outcome: DemoResult) -> None:
        """Keep the model and one event log; the folders of a swarm hold 200 MB that are no longer needed."""
        shutil.copy(outcome.record / "facts.jsonl", self.folder / "facts.jsonl")
        outcome.record = self.folder
        for child in self.children:
            shutil.rmtree(child.folder, ignore_errors=True)

    async def _end_all(self) -> None:
        """End the children by closing their stdin; kill those that do not leave, with their trainers."""
        here = [c for c in self.children if c.process.returncode is None]
        for child in here:
            if child.process.stdin is not None:
                child.process.stdin.close()
        waits = [asyncio.create_task(c.process.wait()) for c in here]
        if waits:
            await asyncio.wait(waits, timeout=LEAVE_S)
        for child in here:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
        ends = [*waits, *self.tasks]
        if ends:
            _, silent = await asyncio.wait(ends, timeout=KILLED_S)
            for task in silent:  # another process still holds a child's stdout, which no longer matters
                task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        for child in here:
            child.gone = child.gone or "left"


def versions() -> dict[str, str]:
    """Versions behind the figures."""
    from importlib.metadata import version

    return {
        "atoll": VERSION,
        "torch": version("torch"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
    }
