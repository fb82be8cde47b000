"""What a loop is told when its peer process cannot go on: killed, or without room for the state of its run."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest
import torch
from loops import found_loop
from torch import nn

import atoll
from atoll.base.errors import AtollError
from atoll.runtime.storage.atomic_files import refused

pytestmark = [pytest.mark.net]


def small_loop() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(64, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()


def test_a_loop_whose_peer_process_is_killed_is_told_how_and_how_much_memory_it_had(tmp_path: Path):
    """As by the kernel when memory is short. The loop notices it when it sends, and again when it waits."""
    model, optimizer = small_loop()
    with atoll.found(folder=tmp_path / "one", inner_steps=1) as run:
        run.attach(model, optimizer)
        (peer,) = [one.pid for one in psutil.Process().children() if "peer_process" in " ".join(one.cmdline())]
        os.kill(peer, signal.SIGKILL)
        os.waitid(os.P_PID, peer, os.WEXITED | os.WNOWAIT)
        killed = r"E-ATT-03 .* killed by SIGKILL; it had used up to \d\.\d+ GB"
        for use in (run.decline, lambda: step(model, optimizer)):
            with pytest.raises(AtollError, match=killed) as told:
                for _ in range(100):
                    use()
            assert "out-of-memory" in told.value.cause and "free memory" in told.value.fix


def test_a_joiner_without_room_for_the_state_is_told_what_to_do(
    tmp_path: Path, peers_in_threads: None, monkeypatch: pytest.MonkeyPatch
):
    """It tried again every second for ever, and said nothing."""

    def no_room(path: Path, size_bytes: int) -> None:
        why = OSError(28, "No space left on device")
        raise refused(f"make room for {size_bytes / 1e9:.2f} GB", why.strerror, path.parent) from why

    monkeypatch.setattr("atoll.runtime.storage.partial_blobs.make_room", no_room)
    over = threading.Event()

    def train(run: atoll.Run) -> None:
        model, optimizer = small_loop()
        with run:
            run.attach(model, optimizer)
            begun.set()
            while not over.is_set():
                step(model, optimizer)

    begun, founder = threading.Event(), found_loop(folder=tmp_path / "one", inner_steps=2)
    thread = threading.Thread(target=train, args=(founder,))
    thread.start()
    try:
        begun.wait()
        no_room_left = r"E-DISK-01 .* make room for 0\.00 GB: No space left on device"
        with (
            atoll.join(founder.ticket, folder=tmp_path / "two") as joiner,
            pytest.raises(AtollError, match=no_room_left) as told,
        ):
            joiner.attach(*small_loop())
        assert f"free some space on the disk of {tmp_path / 'two'}" in told.value.fix
    finally:
        over.set()
        thread.join()
