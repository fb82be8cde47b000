"""The examples of the libraries: they train as a plain loop does, and a member that is killed comes back."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import PATIENCE_S, answer_of, atoll
from safetensors.torch import load_file
from warm import WarmPeer

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.net, pytest.mark.timeout(150)]
NAMES = ["trainer", "lightning_module", "accelerate_loop", "plain"]
STEPS = 5  # of a round of every example
LINES = {"trainer": r"\{'loss': "}  # begin of the line of one step, where it is not the usual one


def steps_of(process: WarmPeer, name: str, count: int) -> list[str]:
    """The lines of the next steps."""
    found = list[str]()
    for line in process.stdout:
        found += [line] * bool(re.match(LINES.get(name, "step "), line))
        if len(found) == count:
            return found
    raise AssertionError(f"it ended after {len(found)} of {count} steps: {process.stderr.read()}")


def ticket_of(process: WarmPeer) -> str:
    for line in process.stdout:
        if found := re.search(r"ATOLL1:[^')]+", line):
            return found[0]
    raise AssertionError(process.stderr.read())


def ends(process: WarmPeer) -> None:
    process.stdout.read()
    assert process.wait(PATIENCE_S) == 0, process.stderr.read()


def model_of(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """What the example left of its model, beside its folder."""
    if name == "trainer":
        return load_file(f"{folder}-model/model.safetensors")
    if name == "lightning_module":
        return torch.load(f"{folder}.ckpt", weights_only=False)["state_dict"]
    return torch.load(f"{folder}-model.pt")


def state_of(folder: Path) -> dict[str, Any]:
    """The Trainer's state in its newest checkpoint."""
    states = [json.loads(file.read_text()) for file in Path(f"{folder}-trainer").glob("*/trainer_state.json")]
    return max(states, key=lambda state: state["global_step"])


def saved_step(name: str, folder: Path) -> int:
    """The step after which the member would go on."""
    match name:
        case "trainer":
            return state_of(folder)["global_step"]
        case "lightning_module":
            return torch.load(f"{folder}.ckpt", weights_only=False)["global_step"]
        case "accelerate_loop":
            return int(Path(f"{folder}-state", "last-step").read_text())
    return torch.load(f"{folder}.pt")["step"]


@pytest.mark.parametrize("name", NAMES)
def test_a_member_is_killed_amid_a_round_and_comes_back(name: str, tmp_path: Path, begun: Callable[..., WarmPeer]):
    """The other goes on alone; the killed one continues at the step after its last round; one model is left."""
    script, one, two = EXAMPLES / f"{name}.py", tmp_path / "one", tmp_path / "two"
    assert len(script.read_text().splitlines()) <= 40
    founder = begun(script, ATOLL_DIR="one", ROUNDS="100000", ATOLL_START_PEERS="2")
    joins = {"ATOLL_DIR": "two", "ATOLL_TICKET": ticket_of(founder), "ROUNDS": "100000"}
    killed = begun(script, **joins)
    steps_of(killed, name, 3 * STEPS + 2)
    killed.kill()
    killed.stdout.read()  # until its peer has ended, too
    step = saved_step(name, two)
    assert step and step % STEPS == 0
    steps_of(founder, name, 3 * STEPS)
    back = begun(script, **joins)
    first = steps_of(back, name, 3 * STEPS)[0]
    assert name == "trainer" or int(first.split()[1]) == step + 1
    trained = answer_of("status", "--dir", one)["trained"]
    last = atoll("amend", f"run.rounds={trained + 6}", "--dir", one)
    assert last.returncode == 0, last.stderr
    ends(founder)
    ends(back)
    counted = [
        len(row["contributors"]) for row in answer_of("checkpoint", "list", "--dir", one) if row["contributors"]
    ]
    assert [count for count, _ in groupby(counted)] == [2, 1, 2]
    models = [model_of(name, folder) for folder in (one, two)]
    assert all(torch.equal(value, models[1][key]) for key, value in models[0].items())


def losses_of(name: str, folder: Path, process: WarmPeer) -> dict[int, float]:
    """Step -> loss, as the Trainer keeps them or the other examples print them."""
    lines = process.stdout.read().splitlines()
    assert process.wait(PATIENCE_S) in (0, -signal.SIGKILL), process.stderr.read()
    if name == "trainer":
        return {row["step"]: row["loss"] for row in state_of(folder)["log_history"] if "loss" in row}
    words = [line.split() for line in lines if line.startswith("step ")]
    return {int(word[1]): float(word[3]) for word in words}


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_one_that_is_killed_amid_a_round_continues_with_the_same_numbers(
    name: str, tmp_path: Path, begun: Callable[..., WarmPeer]
):
    """Killed in step 13, it begins again after step 10. Each loss is the one of a run that was never killed."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for place in (whole, broken):
        place.mkdir()
    wish = {"ATOLL_DIR": "one", "ROUNDS": "4"}
    expected = losses_of(name, whole / "one", begun(EXAMPLES / f"{name}.py", folder=whole, **wish))
    begun(EXAMPLES / f"{name}.py", folder=broken, prints=13, **wish).stdout.read()
    assert saved_step(name, broken / "one") == 10
    back = begun(EXAMPLES / f"{name}.py", folder=broken, **wish)
    found = losses_of(name, broken / "one", back)
    assert "agreed rounds" not in back.stderr.read()  # the checkpoint and the run are at the same round
    assert list(expected) == list(range(1, 21)) and [*found][-10:] == list(range(11, 21))
    assert max(abs(expected[step] - loss) for step, loss in found.items()) <= 1e-6
    model = model_of(name, broken / "one")
    ends(begun(EXAMPLES / f"{name}.py", folder=broken, **wish))  # after the end nothing is trained any more
    assert all(torch.equal(value, model[key]) for key, value in model_of(name, broken / "one").items())
