"""What the terminal of a user's program shows while its loop takes part in a run, and when it ends early."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from loops import found_loop
from torch import nn

import atoll
from atoll.runtime.embed.program_end import on_interrupt
from atoll.runtime.embed.shared_cores import SharedCoresAdvice
from atoll.runtime.event_log import RunStatus

# what runs in the background of a shell inherits that SIGINT is ignored
INTERRUPTIBLE = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
SWARM = (
    INTERRUPTIBLE
    + """
import sys
import atoll

atoll.local(sys.argv[1], sys.argv[2] + "/peer-1", peers=1, folder=sys.argv[2])
"""
)
LOOP = (
    INTERRUPTIBLE
    + """
import sys
import torch
import atoll

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = atoll.found(folder=sys.argv[1], inner_steps=5)
run.attach(model, optimizer, batch=4)
while not run.done:
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.report(loss)
"""
)


def trains(folder: Path, quiet: bool = False, batch: int | None = 4) -> None:
    """The only member of a run of two rounds."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with found_loop(folder=folder, inner_steps=2, rounds=2, name="ada") as run:
        run.attach(model, optimizer, batch=batch, quiet=quiet)
        while not run.done:
            loss = model(torch.ones(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            run.report(loss)
            optimizer.step()


def expected(folder: Path) -> str:
    return (
        r"attached to run ada as ada, after 0 of 2 rounds; other members: none yet\n"
        r"round 1 of 2: loss \d+\.\d{4}, 1 member\nround 2 of 2: loss \d+\.\d{4}, 1 member\n"
        rf"the run is over after 2 rounds; the agreed model is in {re.escape(str(folder))}/model\.safetensors\n"
    )


def test_a_program_that_configured_no_logging_prints_members_and_rounds(
    tmp_path: Path,
    peers_in_threads: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Each message once, on stderr: by itself, or by the handlers that the program has. `quiet` prints problems."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    trains(tmp_path / "one", batch=None)
    no_batch, *lines = capsys.readouterr().err.splitlines(keepends=True)
    assert no_batch.startswith("attach got no batch=, so a step counts as one sample;")
    assert re.fullmatch(expected(tmp_path / "one"), "".join(lines))
    trains(tmp_path / "two", quiet=True)
    monkeypatch.setenv("ATOLL_QUIET", "1")
    trains(tmp_path / "three")
    logging.getLogger("atoll").warning("a problem")
    assert capsys.readouterr().err == "a problem\n"
    monkeypatch.delenv("ATOLL_QUIET")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    trains(tmp_path / "four")
    assert re.fullmatch(expected(tmp_path / "four"), capsys.readouterr().err)
    logging.basicConfig(force=True, level=logging.WARNING)  # warnings only, as the program decided
    trains(tmp_path / "five")
    assert capsys.readouterr().err == ""


def test_ctrl_c_ends_the_loop_without_a_traceback_and_its_peer(tmp_path: Path):
    """A whole program. Its last lines say where it stopped and how it comes back."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    words = [sys.executable, str(script), str(tmp_path / "one")]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        begun = next(line for line in program.stderr if line.startswith("round 2: "))
        peers = psutil.Process(program.pid).children()
        program.send_signal(signal.SIGINT)
        *rounds, last, where = program.stderr.read().splitlines()
    assert program.returncode == -signal.SIGINT and begun
    assert all(line.startswith("round ") for line in rounds)
    assert last.startswith("stopped by Ctrl-C; the same command goes on as the same member")
    assert str(tmp_path / "one") in last and where.startswith(f"  at {script}, line ")
    assert len(peers) == 1 and not peers[0].is_running()


def test_ctrl_c_ends_a_swarm_on_this_computer_with_one_message(tmp_path: Path):
    """The interrupt reaches all processes of a terminal; the one that called `atoll.local` reports it for all."""
    loop, script = tmp_path / "loop.py", tmp_path / "swarm.py"
    loop.write_text(LOOP + "    print(run.trained, flush=True)\n")
    script.write_text(SWARM)
    words = [sys.executable, str(script), str(loop), str(tmp_path / "swarm")]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as program:
        assert program.stdout is not None and program.stderr is not None
        assert next(line for line in program.stdout if line == "2\n")
        os.killpg(program.pid, signal.SIGINT)
        last, where = program.stderr.read().splitlines()
    assert last == f"stopped by Ctrl-C; the same call goes on with the run in {tmp_path / 'swarm'}"
    assert where.startswith(f"  at {script}, line ")


def test_an_error_that_ends_a_program_prints_its_text_and_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """Python's own hook prints all other exceptions, and a hook of the program stays."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    on_interrupt(None)
    with pytest.raises(atoll.UsageError) as refused:
        atoll.join("ATOLL1:ABC", folder=tmp_path)
    sys.excepthook(refused.type, refused.value, refused.tb)
    told = capsys.readouterr().err
    assert told.startswith(f"{refused.value}\n  at {__file__}, line ")
    assert told.endswith(': atoll.join("ATOLL1:ABC", folder=tmp_path)\n') and "Traceback" not in told
    for kind in (ValueError, KeyboardInterrupt):  # no loop is attached: there is nothing to come back to
        sys.excepthook(kind, kind("other"), None)
        assert capsys.readouterr().err.startswith(kind.__name__)
    seen: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *why: seen.append(why))
    with pytest.raises(atoll.UsageError):
        atoll.join("ATOLL1:ABC", folder=tmp_path)
    sys.excepthook(ValueError, ValueError("other"), None)
    assert len(seen) == 1


def test_a_download_that_turns_to_a_newer_state_is_reported_once():
    """Another line follows if no member could serve it, and for the next download."""
    progress, told = RunStatus(), list[str]()
    lack, newer = "the agreed state is not on this disk", "a newer state was agreed on"
    unserved = f"{lack}; no other member could serve it"
    for why in (lack, newer, unserved, unserved, lack, "", "3 rounds behind", newer):
        entry = {"fact": "StateDownloadBegan", "why": why} if why else {"fact": "LocalStateCaughtUp"}
        progress.fold(entry)
        told += [progress.download_text] if why and progress.download_text else []
    assert told == [f"downloading the agreed model ({why})" for why in (lack, unserved, "3 rounds behind")]


@pytest.mark.parametrize(
    ("threads", "cores", "peers", "share"),
    [(2, 2, 2, 1), (8, 8, 2, 4), (4, 8, 2, 0), (2, 2, 1, 0), (1, 2, 3, 0), (0, 2, 2, 0)],
    ids=["two of two cores", "half of eight", "room for both", "alone", "one thread", "on a GPU"],
)
def test_loops_that_outnumber_the_cores_are_advised_once(threads: int, cores: int, peers: int, share: int):
    """Peers and cores of this computer are given; the advice names the share of one loop, or there is none."""
    advice = SharedCoresAdvice(threads, cores, lambda: peers)
    told = advice.text_once()
    assert (f"OMP_NUM_THREADS={share}," in told) if share else told == ""
    assert advice.text_once() == ""


def test_both_loops_of_a_computer_hear_that_their_threads_outnumber_its_cores(
    tmp_path: Path, peers_in_threads: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The founder trains alone at first, without the advice; it hears it once another loop has joined."""
    caplog.set_level(logging.INFO, "atoll")
    monkeypatch.setattr("atoll.runtime.embed.shared_cores.usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    models = [nn.Linear(8, 1) for _ in range(2)]
    first, second = (torch.optim.SGD(model.parameters(), lr=0.01) for model in models)
    with found_loop(folder=tmp_path / "one", inner_steps=2) as founder:
        founder.attach(models[0], first, batch=1)
        while founder.trained < 1:
            first.step()
        assert "OMP_NUM_THREADS" not in caplog.text
        with atoll.join(founder.ticket, folder=tmp_path / "two") as other, ThreadPoolExecutor(1) as pool:
            joining = pool.submit(other.attach, models[1], second, batch=1)
            while not joining.done() or caplog.text.count("OMP_NUM_THREADS=1, ") < 2:
                first.step()
    assert caplog.text.count("2 peers share the 2 cores of this computer") == 2


@pytest.mark.parametrize("end", ["", "1 / 0"])
def test_a_program_that_ends_by_an_error_does_not_print_its_ticket(end: str, tmp_path: Path):
    """The line with the ticket is shown as the place of the error, or in the traceback of another exception."""
    script = tmp_path / "loop.py"
    ticket = "ATOLL1:" + "A2B3" * 85
    call = f'atoll.join("{ticket}", folder="one")' if not end else f'str("{ticket}"), {end}'
    script.write_text(
        f"import atoll\nfrom atoll.runtime.embed.program_end import end_plainly\nend_plainly()\n{call}\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1 and "line 4" in done.stderr and "ATOLL1:A2B3A2B3…" in done.stderr
    assert ticket not in done.stderr
