"""Recipes that agree on what an optimizer has in its hands, in loops of a member's own, beside the experiment."""

from __future__ import annotations

import select
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
import torch
from loops import Loop, Loops, found_loop
from members import PEERS, story
from msgspec import UNSET
from test_every_step import gradient_at, sums_sent
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import atoll
from atoll.base.workload import AdaptiveWorkloadPolicy, LossAdaptiveBatchSize, workload_of
from atoll.runtime.embed.loop_model import LoopModel
from atoll.runtime.embed.messages import AttachLoopRequest, DeclineRounds, RoundsBegin, RunRequest
from atoll.runtime.embed.peer_process import _run_start
from atoll.runtime.embed.run import Run
from atoll.runtime.trainer.protocol import MergeAnchorIntoParameters, TrainerCommandCompleted
from atoll.runtime.training_spec import effort_misfit, founding_blobs, parse_training_spec
from atoll.training.data import batch, load_data
from atoll.training.exchange.layout import layout_of
from atoll.training.experiment.api import ExperimentSimulator, FaultSpec
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.inner import AdamW, InnerState, inner_from_bytes, inner_step
from atoll.training.recipe.methods import (
    data_parallel,
    delayed_nesterov,
    demo_,
    des_loc,
    eager,
    parameter_server,
    pipelined,
    powersgd,
)
from atoll.training.recipe.recipes import Recipe, for_custom_loop, for_real_run

SMALL = {"batch": 2, "seq_len": 16}


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class Ours(torch.optim.AdamW):
    """The inner step of built-in trainers, with its moments where torch's AdamW has them."""

    inner, taken = AdamW(), 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        held = self.param_groups[0]["params"]
        for p in held:
            if not self.state[p]:
                fresh = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.state[p] = {"step": torch.tensor(0.0)} | fresh
        x_P, gradient_P = parameters_to_vector(held), parameters_to_vector([p.grad for p in held])
        first_P, second_P = (
            parameters_to_vector([self.state[p][name] for p in held]) for name in ("exp_avg", "exp_avg_sq")
        )
        inner = InnerState(first_P, second_P, int(self.state[held[0]]["step"]))
        inner_step(self.inner, inner, x_P, gradient_P, self.taken)
        self.taken += 1
        vector_to_parameters(x_P, held)
        vector_to_parameters(first_P, [self.state[p]["exp_avg"] for p in held])
        vector_to_parameters(second_P, [self.state[p]["exp_avg_sq"] for p in held])
        for p in held:
            self.state[p]["step"].fill_(inner.steps)


def ours(recipe: Recipe, model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = Ours(model.parameters())
    optimizer.inner = recipe.inner
    return optimizer


@pytest.mark.parametrize(
    "recipe",
    [
        data_parallel("gpt-nano", rounds=3, **SMALL),
        parameter_server("gpt-nano", rounds=3, **SMALL),
        demo_("gpt-nano", rounds=3, **SMALL),
        powersgd("gpt-nano", rounds=3, **SMALL),
    ],
    ids=["data_parallel", "parameter_server", "demo_", "powersgd"],
)
def test_every_step_of_two_loops_is_the_experiments_bit_for_bit(tmp_path, book, recipe: Recipe):
    """Three rounds of one step; the loops' own optimizers, which only say when, keep no state."""
    run = ExperimentSimulator(recipe, build_model("gpt-nano", 0), load_data(book), PEERS, 3, FaultSpec(), loss_of)

    async def tell(members: Loops) -> None:
        for turn in range(3):
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


def test_delayed_momentum_counts_the_samples_of_loops_as_tokens_of_trainers(tmp_path, book):
    """Two members, a round that one of them misses: the renewal waits as the experiment's does."""
    recipe = delayed_nesterov("gpt-nano", rounds=4, inner_steps=2, every=2, **SMALL)
    run = ExperimentSimulator(
        for_real_run(recipe), build_model("gpt-nano", 0), load_data(book), PEERS, 8, FaultSpec(), loss_of
    )

    async def tell(members: Loops) -> None:
        for turn in range(1, 5):
            late = turn == 2
            await members.play(counted=(0,) if late else (0, 1))
            run.trouble = FaultSpec(late=(0, 50) if late else ())
            while run.now < turn * 2:
                run.step()
            head = members.islands[0].head
            assert torch.equal(head.anchor_F, run.agreed()) and torch.equal(head.momentum_P, run.momentum_P), turn
            assert head.tokens == sum(2 * 2 * (1 if played == 2 else 2) for played in range(1, turn + 1))

    torch.manual_seed(0)
    story(tell, Loops(tmp_path, recipe, book, partial(ours, recipe)))


def by_closure(loop: Loop, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    losses = []

    def closure() -> torch.Tensor:
        losses.append(loss_of(loop.model, found))
        losses[-1].backward()
        return losses[-1]

    assert loop.optimizer.step(closure) is losses[0] and len(losses) == 1, "called once, and its loss returned"
    assert all(p.grad is not None for p in loop.model.parameters()), "as they were before the step"


def by_fused_scaler(loop: Loop, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    """First an infinite gradient, which GradScaler leaves to the fused optimizer to pass over; then two halves."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for infinite in (True, False):
        loop.optimizer.zero_grad()
        for _ in range(2):
            scaler.scale(loss_of(loop.model, found) / 2).backward()
        if infinite:
            next(loop.model.parameters()).grad.fill_(float("inf"))
        scaler.step(loop.optimizer)
        scaler.update()


def test_closures_accumulated_gradients_and_scaled_ones_come_to_the_same(tmp_path, book):
    """A loop of closures beside one of two half gradients under a GradScaler, each of whose steps is skipped once:
    the experiment's parameters, bit for bit."""
    recipe = data_parallel("gpt-nano", rounds=3, **SMALL)
    run = ExperimentSimulator(recipe, build_model("gpt-nano", 0), load_data(book), PEERS, 3, FaultSpec(), loss_of)

    async def tell(members: Loops) -> None:
        for _ in range(3):
            await members.play()
            run.step()
        assert torch.equal(members.islands[0].head.anchor_F, run.agreed())

    torch.manual_seed(0)
    members = Loops(tmp_path, recipe, book, lambda model: torch.optim.AdamW(model.parameters(), fused=True))
    for trainer, step in zip(members.trainers, (by_closure, by_fused_scaler), strict=True):
        trainer.step = partial(step, trainer)
    story(tell, members)


@pytest.mark.parametrize(
    ("method", "make"),
    [
        (data_parallel, sgd),
        (delayed_nesterov, partial(ours, delayed_nesterov())),
        (des_loc, lambda model: torch.optim.AdamW(model.parameters())),
    ],
)
def test_what_torch_is_told_about_new_tensors_is_not_what_members_agree_in(tmp_path, book, method, make):
    """A loop of doubles, whose model is of single precision."""

    async def tell(members: Loops) -> None:
        torch.set_default_dtype(torch.float64)
        for _ in range(3):
            await members.play()
        one, two = (island.head for island in members.islands)
        assert one.anchor_F.dtype == one.momentum_P.dtype == torch.float32
        assert torch.equal(one.anchor_F, two.anchor_F) and torch.equal(one.momentum_P, two.momentum_P)

    try:
        story(tell, Loops(tmp_path, method("gpt-nano", rounds=9, **SMALL), book, make))
    finally:
        torch.set_default_dtype(torch.float32)


def test_rounds_of_loops_are_as_long_as_the_run_asks(tmp_path):
    """Genesis has it; what changes nothing, or has no meaning in a member's own loop, is refused in words."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 128) for _ in range(4)))
    asked = {"round_time": 60.0, "target_samples": 4096, "adaptive_steps": True, "inner_steps_min": 4}
    run = found_loop(folder=tmp_path, inner_steps=32, **asked)
    layout = layout_of(model)
    beginning, settings = _run_start(AttachLoopRequest(run._request, layout, batch=16), torch.zeros(layout.floats))
    effort = founding_blobs(beginning, settings).settings.round.effort
    assert effort == AdaptiveWorkloadPolicy(16, train_s=60.0, samples=4096, steps_min=4, by_loss=True)
    assert parse_training_spec(founding_blobs(beginning, settings).settings).recipe == run._request.recipe
    assert workload_of(effort, 32, UNSET, 16).steps == 16, "4096 samples of 16 members whose steps have 16 each"
    for wrong, why in (
        ({"inner_steps_min": 4}, "inner_steps_min changes nothing"),
        ({"target_samples": 64, "inner_steps_min": 60}, "at least 60 steps cannot have at most 50"),
        ({"round_time": 60.0, "recipe": data_parallel()}, "every step is a round"),
        ({"adaptive_steps": True, "recipe": eager()}, "trainers run on for a whole round"),
    ):
        with pytest.raises(atoll.UsageError, match=f"E-ATT-12 .*{why}"):
            found_loop(folder=tmp_path, **wrong)
    with pytest.raises(atoll.UsageError, match=r"E-ATT-11 .*batch=4194304"):
        run.attach(model, sgd(model), batch=2**22)
    grows = msgspec.structs.replace(effort, batches=LossAdaptiveBatchSize(2.0, 1, 64))
    assert "members' own loops" in effort_misfit(run._request.recipe, grows)


class Restless(torch.optim.SGD):
    """It decays parameters whether or not they have gradients."""

    def step(self, closure: object = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(0.99)


def test_an_optimizer_that_a_recipe_cannot_work_with_is_refused_in_words(tmp_path):
    """A founder's before anything is written, a joiner's before its first step; nothing is guessed."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 4))
    part, whole = list(model[0].parameters()), list(model.parameters())
    for recipe, optimizer, why in (
        (data_parallel(), torch.optim.SGD(part, lr=0.1), r"gradients, and the optimizer does not hold 1\.weight"),
        (des_loc(), torch.optim.AdamW(part), r"moments, and the optimizer does not hold 1\.weight"),
        (des_loc(), torch.optim.SGD(whole, lr=0.1), "both moments of Adam, and SGD has others"),
        (des_loc(), torch.optim.AdamW(whole, amsgrad=True), "amsgrad=True has a third"),
    ):
        with pytest.raises(atoll.UsageError, match=f"E-ATT-13 .*{why}"):
            atoll.found(recipe=recipe, folder=tmp_path / "one").attach(model, optimizer)
        joiner = Run(RunRequest(str(tmp_path / "one"), ticket="a ticket"))
        joiner._local = LoopModel(model, optimizer)
        with pytest.raises(atoll.UsageError, match=f"E-ATT-13 .*{why}"):
            joiner._handle(RoundsBegin(for_custom_loop(recipe)))
    assert not (tmp_path / "one").exists()


def restless(model: torch.nn.Module) -> torch.optim.Optimizer:
    return Restless(model.parameters(), lr=0.1)


def infinite(loop: Loop, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    next(loop.model.parameters()).grad = torch.full_like(next(loop.model.parameters()), float("inf"))
    loop.optimizer.step()


@pytest.mark.parametrize(
    ("make", "step", "why"),
    [
        (restless, Loop.step, "E-ATT-13 .*Restless also moves parameters that have none"),
        (sgd, infinite, "E-ATT-10 a gradient is not finite in the first round, step 1"),
    ],
)
def test_a_loop_whose_step_would_be_nobodys_is_stopped(tmp_path, book, make, step, why: str):
    """Steps of its optimizer would come on top of the agreed ones; a gradient that is none would be
    every member's.
    """
    members = Loops(tmp_path, data_parallel("gpt-nano", **SMALL), book, make)
    for trainer in members.trainers:
        trainer.step = partial(step, trainer)
    with pytest.raises(atoll.AtollError, match=why):
        story(Loops.play, members)


def slow(loop: Loop, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    """It takes no step ahead before there is something new to take in."""
    if loop.run._job is None and loop.run._merging is None:
        select.select([loop.channel._socket], [], [], 60.0)  # only a failing test waits so long
    Loop.step(loop, found)


def test_gradients_that_wait_in_a_loops_queue_are_the_experiments(tmp_path, book):
    """Pipelined: each is of parameters three steps old, however slow one loop is to fill its queue."""
    recipe, depth, steps = pipelined("gpt-nano", rounds=7, **SMALL), 3, 7
    run = ExperimentSimulator(
        recipe, build_model("gpt-nano", 0), load_data(book), PEERS, steps, FaultSpec(), loss_of
    )

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
    members.trainers[1].step = partial(slow, members.trainers[1])
    story(tell, members)
    assert all(trainer.steps >= steps + depth - 1 for trainer in members.trainers)


@pytest.mark.parametrize(("method", "dropped"), [(data_parallel, 2), (pipelined, 5)])
def test_a_loops_gradient_that_comes_too_late_is_dropped(tmp_path, book, method, dropped: int):
    """It is one of another anchor, and so are those in the queue. The next update is a gradient of the new one."""

    async def tell(members: Loops) -> None:
        await members.play()
        await members.play(encoding=(0,), counted=(0,))
        await members.train(1)
        of_the_next = batch(load_data(book), 1, PEERS, dropped * 2, 2, 16, 0)
        expected_P = gradient_at(members.islands[1].head.anchor_F, of_the_next)
        assert torch.equal(sums_sent(members, 1), expected_P)

    story(tell, Loops(tmp_path, method("gpt-nano", rounds=9, **SMALL), book, sgd))


DES_LOC = des_loc("gpt-nano", rounds=6, inner_steps=2, **SMALL)


def moment(trainer: Loop, name: str) -> torch.Tensor:
    return parameters_to_vector([trainer.optimizer.state[p][name] for p in trainer.model.parameters()])


def test_moments_of_two_loops_are_averaged_on_their_clocks(tmp_path, book):
    """Six rounds beside the experiment: the first moments in the third, both in the sixth, in the optimizers' own
    state. A loop that comes with an empty disk begins with those that were agreed on, and with their count."""
    run = ExperimentSimulator(DES_LOC, build_model("gpt-nano", 0), load_data(book), PEERS, 12, FaultSpec(), loss_of)
    seen = []

    async def tell(members: Loops) -> None:
        for turn in range(1, 7):
            await members.play()
            while run.now < turn * 2:
                run.step()
            for index, worker in enumerate(run.workers):
                assert torch.equal(members.islands[index].head.anchor_F, run.agreed()), turn
                assert torch.equal(moment(members.trainers[index], "exp_avg"), worker.inner.first_P), turn
                assert torch.equal(moment(members.trainers[index], "exp_avg_sq"), worker.inner.second_P), turn
            pairs = [[moment(t, name) for t in members.trainers] for name in ("exp_avg", "exp_avg_sq")]
            seen.append(tuple(torch.equal(one, two) for one, two in pairs))
        head = members.islands[0].head
        again = await members.anew(1)
        assert await again.run(members.restore(1))
        await members.train(1)
        fresh = members.trainers[1]
        assert {int(state["step"]) for state in fresh.optimizer.state.values()} == {head.steps + 2}
        before_P = inner_from_bytes(again.live.inner, len(head.momentum_P)).first_P
        assert torch.equal(before_P, head.momentum_P)

    torch.manual_seed(0)
    story(tell, Loops(tmp_path, DES_LOC, book, partial(ours, DES_LOC)))
    neither = (False, False)
    assert seen == [neither, neither, (True, False), neither, neither, (True, True)]


def test_a_loop_that_declines_takes_in_first_what_waits_for_its_queue(tmp_path):
    """Its peer waits for the word; without it no round would ever ask this loop again."""
    model, said = torch.nn.Linear(64, 64), []
    run = atoll.found(recipe=pipelined(rounds=9), folder=tmp_path / "one")
    run._local = LoopModel(model, sgd(model))
    run._local.use_recipe(run._request.recipe)
    run._local.mailbox, run._steps_ahead, run._steps_ahead_next = SimpleNamespace(x_F=torch.ones(64 * 65)), 3, 3
    run._channel = SimpleNamespace(is_open=True, send=said.append)
    run._wait_for_turn = lambda: None
    run._handle(MergeAnchorIntoParameters(0, 64 * 65, "replace"))
    assert not said and not bool((model.weight == 1).all()), "three gradients are of the old parameters"
    run.decline()
    assert [type(word) for word in said] == [TrainerCommandCompleted, DeclineRounds] and bool(
        (model.weight == 1).all()
    )


class Derived(torch.optim.SGD):
    """Torch calls hooks around its step, and around the one within it once a plain SGD was made."""

    def step(self, closure: object = None) -> None:
        return super().step(closure)


def test_an_optimizer_is_the_loops_again_once_its_run_is_closed_or_over(tmp_path, peers_in_threads: None):
    """Closed: its own steps; attached again: none is taken twice; over: whatever other hooks it has."""
    model = torch.nn.Linear(64, 64)
    torch.optim.SGD(model.parameters())
    optimizer, steps = Derived(model.parameters(), lr=1.0), 0

    def gradient_of_a_step() -> float:
        """What it moved by, where the optimizer moves by gradients of one."""
        before = model.bias.detach().clone()
        optimizer.zero_grad()
        model(torch.zeros(1, 64)).sum().backward()
        optimizer.step()
        assert bool((model.bias.grad == 1).all())
        return float((before - model.bias).mean().detach())

    recipe = data_parallel(rounds=3)
    run = atoll.found(folder=tmp_path / "one", recipe=recipe).attach(model, optimizer)
    assert gradient_of_a_step() < 0.5, "the recipe's"
    run.close()
    assert gradient_of_a_step() == pytest.approx(1.0)
    with atoll.found(folder=tmp_path / "one", recipe=recipe).attach(model, optimizer) as run:
        optimizer.register_step_post_hook(lambda *_: None)
        while not run.done:
            gradient_of_a_step()
            steps += 1
        assert steps == 2, "one each"
        assert gradient_of_a_step() == pytest.approx(1.0)
