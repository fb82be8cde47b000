"""The fine-tuning story at a tiny size: every stage, a member that is killed, and the adapter that is left."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import PATIENCE_S
from safetensors.torch import load_file
from warm import WarmPeer

STORY = Path(__file__).parents[2] / "examples" / "finetune.py"
BASE = ["--steps", "4", "--batch", "2", "--tokens", "300", "--width", "32", "--layers", "1"]
ROUNDS = ["--rounds", "6", "--inner-steps", "3"]
pytestmark = [pytest.mark.net, pytest.mark.timeout(150)]


def line_with(process: WarmPeer, pattern: str) -> str:
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found[0]
    raise AssertionError(process.stderr.read())


def said_by(process: WarmPeer) -> str:
    said = process.stdout.read()
    assert process.wait(PATIENCE_S) == 0, process.stderr.read()
    return said


def test_members_go_on_without_one_and_leave_an_adapter_that_loads(tmp_path: Path, begun: Callable[..., WarmPeer]):
    """Three members; one dies after the first round. The others' adapters are equal, and `score` loads them all."""
    said_by(begun(STORY, "pretrain", *BASE))
    founder = begun(STORY, "member", *ROUNDS, ATOLL_DIR="finetune/run-0/peer-1", ATOLL_START_PEERS="3")
    ticket = line_with(founder, r"ATOLL1:[^')]+")
    joined = [
        begun(STORY, "member", "--part", str(part), ATOLL_DIR=f"peer-{part}", ATOLL_TICKET=ticket)
        for part in (1, 2)
    ]
    line_with(founder, "round 1 ")
    joined[1].kill()
    assert "round 6 " in said_by(founder)
    assert "Warning" not in founder.stderr.read()
    assert "the base of hash" in said_by(joined[0])
    ours, theirs = (
        load_file(tmp_path / place / "adapter_model.safetensors")
        for place in ("finetune/run-0/peer-1-adapter", "peer-1-adapter")
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())
    for stage in ("twin", "single"):
        assert "round 6 loss" in said_by(begun(STORY, stage, *ROUNDS))
    rows = said_by(begun(STORY, "score", "--questions", "20")).splitlines()[1:]
    found = [re.fullmatch(r"(\D+?) +1 +(\d\.\d{3}) +\d+\.\d%", row) for row in rows]
    assert [row and row[1] for row in found] == ["base", "four members", "data parallel", "single"], rows
    assert len({row[2] for row in found if row}) == 4, rows
    alone = begun(STORY, "large", *BASE, ATOLL_DIR="size")
    assert re.search(r"values, of which [\d,]+ travel: [\d,]+ bytes sent per round; [\d,]+ MiB", said_by(alone))


@pytest.mark.long
def test_four_members_tune_at_one_command(tmp_path: Path, begun: Callable[..., WarmPeer]):
    said_by(begun(STORY, "pretrain", *BASE))
    assert "round 6 loss" in said_by(begun(STORY, "tune", *ROUNDS))
    assert (tmp_path / "finetune" / "run-0" / "peer-4-adapter" / "adapter_model.safetensors").exists()
