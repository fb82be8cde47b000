"""`atoll demo`, small: the promise of the quick start, and that it cleans up after itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from processes import PATIENCE_S, SMALL, started

from atoll.runtime import demo
from atoll.runtime.trainer import TrainerCommandError

pytestmark = [pytest.mark.net, pytest.mark.timeout(400)]


def processes_of(folder: Path) -> list[int]:
    """Processes that were started for peers in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it ended while we looked
            if str(folder).encode() in words and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def test_a_killed_peer_and_a_late_one_end_with_everybody_else_on_the_same_bits(tmp_path: Path):
    """Three peers, the founder killed mid-round, a fourth invited by another: one JSON object, no process left.

    All of them were to choose their device, and the log of each has which one it is.
    """
    words = ("--peers", "3", "--rounds", "6", "--chaos", "--json", "--device", "auto", "--dir", tmp_path)
    done = started("demo", *words, *SMALL, timeout_s=300)
    assert done.returncode == 0, done.stderr
    chosen = f'node.device = "auto": the trainer computes on {"cuda" if torch.cuda.is_available() else "cpu"}'
    logs = [log.read_text() for log in tmp_path.glob("peer-*/atoll.log")]
    assert len(logs) == 4 and all(chosen in log for log in logs)
    told = json.loads(done.stdout)
    assert set(told) == {"bench", "settings", "figures", "versions"} and told["bench"] == "demo"
    figures = told["figures"]
    assert figures["state_hashes_equal"] and figures["rounds"] == 6 and figures["peers_at_the_end"] == 3
    assert figures["val_loss_end"] < figures["val_loss_start"]
    assert figures["val_loss_solo"] is None
    assert figures["bytes_sent"] > 0
    assert figures["wall_s"] > 0 and (tmp_path / "model.safetensors").exists()
    assert processes_of(tmp_path) == []


def test_a_model_of_other_tokens_than_bytes_ends_its_demo_without_a_sample(monkeypatch, tmp_path: Path):
    """Its trainer refuses to write text, which is no failure of the demo; a trainer that died is one."""

    async def refuses(folder: Path, verb: str, **_: object) -> None:
        raise TrainerCommandError(why, "this model writes one of 300 tokens, not bytes")

    monkeypatch.setattr(demo, "send_request_async", refuses)
    swarm, why = demo.DemoRun(demo.DemoSettings(), tmp_path, print), "refused"
    assert asyncio.run(swarm._sample(tmp_path)) == ""
    why = "crashed"
    with pytest.raises(TrainerCommandError):
        asyncio.run(swarm._sample(tmp_path))


def test_a_demo_names_each_peer_that_joins(tmp_path: Path):
    """The founder's log stands for all."""
    told: list[str] = []
    swarm = demo.DemoRun(demo.DemoSettings(), tmp_path, told.append)
    founder = demo.DemoProcess("peer-1", tmp_path, cast(Any, SimpleNamespace(returncode=None)))
    swarm.children.append(founder)
    members = [{"peer": name, "name": name, "standing": "new"} for name in ("peer-1", "peer-2", "peer-3")]
    swarm._hear(
        founder, {"fact": "MembershipChanged", "joined": ["peer-2", "peer-3"], "left": [], "members": members}
    )
    assert told == ["peer-2, peer-3 joined"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_demo_on_a_gpu_ends_with_one_state_for_all(precision: str, tmp_path: Path):
    """Two trainers share the GPU, by its name: if there were none, they would refuse to start."""
    words = ("--peers", "2", "--rounds", "3", "--device", "cuda", "--json", "--dir", tmp_path)
    done = started("demo", *words, *SMALL, "--set", f"train.precision={precision}", timeout_s=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert figures["state_hashes_equal"] and figures["val_loss_end"] < figures["val_loss_start"]
    assert all("the trainer computes on cuda" in log.read_text() for log in tmp_path.glob("peer-*/atoll.log"))


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_demo_leaves_no_process_behind(how: signal.Signals, tmp_path: Path):
    """After SIGTERM the demo ends its peers and clears up, even one that just starts; after SIGKILL the children
    notice that their stdin is closed.
    """
    words = ["demo", "--peers", "1", "--rounds", "500", *SMALL]
    swarm = subprocess.Popen(
        [sys.executable, "-m", "atoll", *words],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert swarm.stdout is not None
    try:
        assert swarm.stdout.readline().startswith("peer-1 starts: ")
        awaited = "peer-1 founded" if how == signal.SIGTERM else "round "
        assert next(line for line in swarm.stdout if line.startswith(awaited)) and processes_of(tmp_path)
        swarm.send_signal(how)
        assert swarm.wait(PATIENCE_S) == (130 if how == signal.SIGTERM else -signal.SIGKILL)
        assert bool(list(tmp_path.glob("atoll-demo-*"))) == (how == signal.SIGKILL)
        until = time.monotonic() + PATIENCE_S
        while processes_of(tmp_path) and time.monotonic() < until:
            time.sleep(0.1)  # other processes' ends are no facts that we are told
        assert processes_of(tmp_path) == []
    finally:
        swarm.kill()
        swarm.wait()
        swarm.stdout.close()
