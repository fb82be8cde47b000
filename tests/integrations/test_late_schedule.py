"""A member that joins late trains with the rate of the others, not with the first rate of its own schedule."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import answer_of, atoll
from test_examples import EXAMPLES, state_of, steps_of, ticket_of
from warm import WarmPeer

from atoll.integrations import lightning
from atoll.integrations.late_schedule import advance_schedule


def rate_of(schedule: torch.optim.lr_scheduler.LRScheduler) -> float:
    return schedule.optimizer.param_groups[0]["lr"]


def decaying() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)


@pytest.mark.parametrize(
    ("counted", "done", "rate"),
    [(None, False, 0.6), (3, False, 0.95), (8, False, 1.0), (9, False, 1.0), (None, True, 1.0)],
    ids=["joins late", "was away", "as far as the run", "of a round that was taken back", "after the end"],
)
@pytest.mark.filterwarnings("error")
def test_a_schedule_moves_on_by_the_rounds_that_it_lacks(counted: int | None, done: bool, rate: float):
    """The run has trained 8 rounds of 5 steps, or 4 rounds if this schedule counted 3 before."""
    schedule, trained = decaying(), 4 if counted == 3 else 8
    advance_schedule(SimpleNamespace(trained=trained, round_steps=5, done=done), schedule, counted)
    assert rate_of(schedule) == pytest.approx(rate)


def test_a_schedule_that_a_checkpoint_moved_on_is_not_moved_on_twice():
    schedule = decaying()
    for _ in range(30):
        schedule.optimizer.step()
        schedule.step()
    advance_schedule(SimpleNamespace(trained=8, round_steps=5, done=False), schedule, None)
    assert rate_of(schedule) == pytest.approx(0.6)


def test_a_schedule_that_ends_before_the_run_or_needs_measurements_does_no_harm():
    run: Any = SimpleNamespace(trained=8, round_steps=5, done=False)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    once = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=20)
    advance_schedule(run, once, None)
    for _ in range(19):  # all steps of the library; one more would fail
        optimizer.step()
        once.step()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    )
    advance_schedule(run, plateau, None)
    advance_schedule(run, None, None)
    assert rate_of(plateau) == 1.0


def test_schedules_of_lightning_move_on_if_they_follow_steps():
    """One moves after every second step. One follows the member's own passes over its data and stays."""
    run = SimpleNamespace(attach=lambda *_, **__: None, round=9, trained=8, round_steps=5, done=False)
    configs = [
        SimpleNamespace(scheduler=decaying(), interval=interval, frequency=frequency)
        for interval, frequency in (("step", 1), ("step", 2), ("epoch", 1))
    ]
    trainer = SimpleNamespace(
        world_size=1,
        optimizers=[None],
        train_dataloader=None,
        accumulate_grad_batches=1,
        global_step=0,
        lr_scheduler_configs=configs,
    )
    lightning.AtollLightningCallback(run).on_train_start(trainer, None)
    assert [rate_of(config.scheduler) for config in configs] == pytest.approx([0.6, 0.8, 1.0])


@pytest.mark.net
@pytest.mark.timeout(150)
def test_a_trainer_that_joins_late_has_the_rate_of_the_others(tmp_path: Path, begun: Callable[..., WarmPeer]):
    """The founder of the example trains alone until its linear schedule has fallen; the joiner's begins there."""
    founder = begun(EXAMPLES / "trainer.py", ATOLL_DIR="one", ROUNDS="400")
    ticket = ticket_of(founder)
    steps_of(founder, "trainer", 100)
    late = begun(EXAMPLES / "trainer.py", ATOLL_DIR="two", ATOLL_TICKET=ticket, ROUNDS="400")
    first = float(re.findall(r"'learning_rate': '?([\d.e-]+)", steps_of(late, "trainer", 1)[0])[0])
    assert first <= 1e-2 * (1 - 95 / 2000)  # after at least 19 rounds of 5 steps, of 2000 in all
    trained = answer_of("status", "--dir", tmp_path / "one")["trained"]
    assert atoll("amend", f"run.rounds={trained + 4}", "--dir", tmp_path / "one").returncode == 0
    for member in (founder, late):
        member.stdout.read()
    last = [
        [row["learning_rate"] for row in state_of(tmp_path / name)["log_history"] if "loss" in row][-1]
        for name in ("one", "two")
    ]
    assert last[0] == pytest.approx(last[1], abs=1e-2 * 50 / 2000)  # a joiner may miss its first rounds
