"""Recipes that agree on what an optimizer has in its hands, in loops of somebody's own, beside the experiment."""

from __future__ import annotations

import pytest
import torch
from loops import Loops
from members import PEERS, story

from atoll.learn.data import load_data
from atoll.learn.experiment import Experiment, Trouble
from atoll.learn.methods import data_parallel, demo_, parameter_server, pipelined, powersgd
from atoll.learn.models import build_model, loss_of
from atoll.learn.recipes import Recipe

SMALL = {"batch": 2, "seq_len": 16}


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize(
    "recipe",
    [
        data_parallel("gpt-nano", rounds=5, **SMALL),
        parameter_server("gpt-nano", rounds=5, **SMALL),
        demo_("gpt-nano", rounds=5, **SMALL),
        powersgd("gpt-nano", rounds=5, **SMALL),
    ],
    ids=["data_parallel", "parameter_server", "demo_", "powersgd"],
)
def test_every_step_of_two_loops_is_the_experiments_bit_for_bit(tmp_path, book, recipe: Recipe):
    """Five rounds of one step; the loops' own optimizers, which only say when, keep no state."""
    run = Experiment(recipe, build_model("gpt-nano", 0), load_data(book), PEERS, 5, Trouble(), loss_of)

    async def tell(members: Loops) -> None:
        for turn in range(5):
            await members.play()
            run.step()
            for island in members.islands:
                assert torch.equal(island.head.anchor_F, run.agreed()), turn

    torch.manual_seed(0)
    members = Loops(tmp_path, recipe, book, sgd)
    story(tell, members)
    for trainer in members.trainers:
        assert not trainer.optimizer.state
        assert torch.equal(torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()]), run.agreed())


def test_gradients_that_wait_in_a_loops_queue_are_the_experiments(tmp_path, book):
    """Pipelined: each is of parameters three steps old, however slow the loop is to fill its queue."""
    recipe, depth, steps = pipelined("gpt-nano", rounds=7, **SMALL), 3, 7
    run = Experiment(recipe, build_model("gpt-nano", 0), load_data(book), PEERS, steps, Trouble(), loss_of)

    async def tell(members: Loops) -> None:
        for turn in range(1, steps + 1):
            await members.play()
            while run.now < min(turn + depth, steps):
                run.step()
            if turn + depth < steps or turn == steps:
                heads = [island.head.anchor_F for island in members.islands]
                assert torch.equal(heads[0], run.agreed()) and torch.equal(heads[1], run.agreed()), turn

    torch.manual_seed(0)
    members = Loops(tmp_path, recipe, book, sgd)
    story(tell, members)
    assert all(trainer.steps >= steps + depth - 1 for trainer in members.trainers)
