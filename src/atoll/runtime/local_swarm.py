"""Swarm on one computer, from a script or a notebook: `atoll.local("train.py", peers=4)`, or a function.

The script would run on any computer: it joins by its environment. Here the environment makes the first process
found the run and the others join it. A function runs in processes of its own as well (`local_function.py`).

Invariants:
- No process outlives the call.
- One call at a time uses a folder.
- A script that fails before the run has begun ends the others, which would wait for it forever. Later they go on
  without it, as members of any run do.
- The output of the scripts is not read.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from atoll.base.arguments import Peers, arguments
from atoll.base.errors import RunFailedError, UsageError
from atoll.runtime.embed.program_end import end_plainly, on_interrupt
from atoll.runtime.event_log import RunStatus, entries_in
from atoll.runtime.local_function import forget_failures, read_failure, read_result, write_call
from atoll.runtime.local_progress import SwarmProgress
from atoll.runtime.storage.atomic_files import unusable
from atoll.runtime.storage.ownership import lock_folder, safe_folder

CALL, RESULT = "function.pickle", "result-{}.pickle"  # files in the folder of a swarm
CHOOSE = "choose another one: atoll.local(…, folder='swarm')"
MEND = "mend the script or function, then call atoll.local again"
CALLS = "let it call run = atoll.join(or_found={…}), then run.attach(model, optimizer)"
LOOK_S = 0.1
TICKET_S = 120.0  # seconds for the founder to import and open its control socket on a busy computer
STAY_AFTER_S = 10.0  # seconds after a process has ended, in which its peer stayed for those that were connected
END_S = 15.0  # seconds for a process to end after the signal
_mine: set[Path] = set()  # folders of this process's calls; its second lock on one would succeed

Child = subprocess.Popen[bytes]


@arguments("atoll.local", "E-USE-08")
def local(
    script: str | Path | Callable[..., Any], *arguments: str, peers: Peers = 4, folder: str | Path = ""
) -> list[Any]:
    """Run a training script or a function in `peers` processes on this computer that form one private swarm.

    Either calls `run = atoll.join(or_found={…})`, then `run.attach(model, optimizer)`. A function of a notebook
    takes along what it refers to (cloudpickle). Returns what it returned in each process; of a script, nothing.
    Peers live in `folder`, by default atoll-local/NAME for NAME.py or the function NAME: a second call with the
    same folder resumes the run, also after an interrupt. Raises RunFailedError if a process fails, UsageError if
    the script does not exist.
    """
    name = Path(script).stem if isinstance(script, str | Path) else getattr(script, "__name__", "function")
    base = Path(folder or Path("atoll-local", name))
    if isinstance(script, str | Path) and not Path(script).is_file():
        raise UsageError(
            "E-USE-07",
            f"there is no script {str(script)!r}",
            cause=f"paths begin in {Path.cwd()}",
            fix="atoll.local('train.py'), once %%writefile train.py or an editor has made it",
        )
    try:
        safe_folder(base, CHOOSE)
    except (OSError, ValueError) as why:
        raise unusable(base, why, CHOOSE) from None
    with _exclusive(base):
        return _run_in(base, script, arguments, peers)


@contextmanager
def _exclusive(base: Path) -> Iterator[None]:
    """Hold the folder. UsageError while another call uses it: both would write the same call and results."""
    in_use = UsageError(
        "E-DIR-01",
        f"another Atoll process is using {base}",
        cause="another atoll.local is running in this folder, and its results would be overwritten",
        fix=f"call again once it has ended; or {CHOOSE}",
    )
    place = base.resolve()
    if place in _mine:
        raise in_use
    try:
        handle = lock_folder(base, in_use)
    except OSError as why:
        raise unusable(base, why, CHOOSE) from None
    _mine.add(place)
    try:
        yield
    finally:
        _mine.remove(place)
        os.close(handle)


def _run_in(base: Path, script: str | Path | Callable[..., Any], arguments: Sequence[str], peers: int) -> list[Any]:
    founder = base / "peer-1"
    commands = _commands(script, arguments, base, peers)
    children: list[Child] = []
    before = _trained(founder)
    if (founder / "kept.sqlite").exists():
        print(
            f"{base} holds a run already, which goes on as it was founded; another folder= begins one", flush=True
        )
    progress = SwarmProgress(founder / "facts.jsonl", peers)
    end_plainly()
    on_interrupt(lambda: f"stopped by Ctrl-C; the same call goes on with the run in {base}")
    try:
        first = {"ATOLL_START_PEERS": str(peers), "ATOLL_TICKET_USES": str(peers)}
        children.append(_started(commands[0], founder, **first))
        ticket = _ticket_in(base, children[0])
        for n in range(2, peers + 1):
            children.append(_started(commands[n - 1], base / f"peer-{n}", ATOLL_TICKET=ticket))
        _wait(children, lambda: _trained(founder) > before, progress, base)
        on_interrupt(None)
    finally:
        _end(children)
        progress.close()
    if failed := [n for n, child in enumerate(children, 1) if child.returncode]:
        raise RunFailedError(
            "E-LOC-01", f"{len(failed)} of {peers} processes failed", cause=_cause(base, failed[0])
        )
    is_script = isinstance(script, str | Path)
    return [] if is_script else [read_result(base / RESULT.format(n)) for n in range(1, peers + 1)]


def _commands(
    script: str | Path | Callable[..., Any], arguments: Sequence[str], base: Path, peers: int
) -> list[list[str]]:
    """The command of each process; a function is written into the folder of the swarm first."""
    if isinstance(script, str | Path):
        return [[sys.executable, str(script), *arguments]] * peers
    forget_failures(base)
    write_call(script, arguments, base / CALL)
    module = [sys.executable, "-m", "atoll.runtime.local_function", str(base / CALL)]
    return [[*module, str(base / RESULT.format(n))] for n in range(1, peers + 1)]


def _started(words: Sequence[str], folder: Path, output: int | None = None, /, **said: str) -> Child:
    paths = os.pathsep.join(path for path in sys.path if path)
    own = {"PYTHONPATH": paths, "ATOLL_DIR": str(folder), "ATOLL_NAME": folder.name, "OMP_NUM_THREADS": "1"}
    own |= {"ATOLL_LISTEN": "", "ATOLL_TICKET": ""}  # they cannot share a port, and the first one founds
    default = {"ATOLL_QUIET": "1"}  # all would print the same rounds below the bar
    env = default | os.environ | own | said
    return subprocess.Popen(words, env=env, stdout=output, stderr=output)  # noqa: S603  # the caller's script, no shell


def _cause(base: Path, n: int) -> str:
    """Why process `n` failed: the exception of its function, or its own output."""
    failure = read_failure(base / RESULT.format(n))
    return f"peer-{n} ended with {failure}" if failure else "what it printed stands above"


def _ticket_in(base: Path, founder: Child) -> str:
    """Ticket that the founder leaves in its folder."""
    folder = base / "peer-1"
    deadline = time.monotonic() + TICKET_S
    while time.monotonic() < deadline and founder.poll() is None:
        with suppress(sqlite3.Error):
            database = sqlite3.connect(f"file:{folder / 'kept.sqlite'}?mode=ro", uri=True)
            try:
                row = database.execute("SELECT value FROM kept WHERE name = 'ticket'").fetchone()
            finally:
                database.close()
            if row is not None:
                return row[0].decode()
        time.sleep(LOOK_S)
    raise RunFailedError(
        "E-LOC-02",
        "the first process founded no run",
        cause=_cause(base, 1),
        fix=MEND if founder.returncode else CALLS,
    )


def _wait(children: Sequence[Child], has_begun: Callable[[], bool], progress: SwarmProgress, base: Path) -> None:
    """Wait until all have ended. RunFailedError if one fails while the others still wait for it.

    A process that came so late that the run had ended without it gets the end from the folder of one that has it.
    """
    begun, ended_at, server = False, 0.0, list[Child]()
    try:
        while any(child.poll() is None for child in children):
            failed = [n for n, child in enumerate(children, 1) if child.poll()]
            begun = begun or (bool(failed) and has_begun())
            if failed and not begun:
                raise RunFailedError(
                    "E-LOC-03",
                    f"the program of peer-{failed[0]} failed before the run had begun; the others were ended",
                    cause=_cause(base, failed[0]),
                    fix=MEND,
                )
            if ended := [n for n, child in enumerate(children, 1) if child.poll() == 0]:
                ended_at = ended_at or time.monotonic()
                if not server and time.monotonic() - ended_at > STAY_AFTER_S:
                    place = base / f"peer-{ended[0]}"
                    words = [sys.executable, "-m", "atoll", "up", "--stay", "--dir", str(place)]
                    server.append(_started(words, place, subprocess.DEVNULL))
            progress.update()
            time.sleep(LOOK_S)
    finally:
        _end(server)


def _trained(folder: Path) -> int:
    """Agreed training rounds in this peer's event log."""
    with suppress(FileNotFoundError):
        return RunStatus.of(entries_in(folder / "facts.jsonl")).trained
    return 0


def _end(children: Sequence[Child]) -> None:
    for child in children:
        child.terminate()
    for child in children:
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
