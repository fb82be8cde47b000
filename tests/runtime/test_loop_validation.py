"""Members' own loops look at agreed states: what a liar did to a mean is left behind, and a look harms nothing."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from loops import Loops, found_loop
from members import recipe_for
from torch import nn

import atoll
from atoll.peer.tasks import MeasureValidationLoss
from atoll.runtime.event_log import entries_in
from atoll.runtime.trainer import TrainerCommandError
from atoll.worker.trainer_commands import ContinueMeasurement
from training import network

LOOPS, ROUNDS = 4, 8
HELD_OUT = torch.randn(256, 64, generator=torch.Generator().manual_seed(99))


def loss_at(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))


def learned(run: atoll.Run, liar: bool = False) -> float:
    """The agreed model's loss on held-out data in the end. A liar hands over its model, inverted, in one round."""
    torch.manual_seed(5)
    model = network(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with run:
        run.attach(model, optimizer, batch=16, validate=lambda: loss_at(model, HELD_OUT))
        draw = torch.Generator().manual_seed(run.shard_index)
        while not run.done:
            loss = loss_at(model, torch.randn(16, 64, generator=draw))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if liar and run.trained == 3:
                liar = False
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(-40)
            optimizer.step()
        model.eval()
        return loss_at(model, HELD_OUT).item()


@pytest.mark.net
def test_a_mean_that_a_liar_ruined_is_left_by_loops_that_look_at_it(
    tmp_path: Path, peers_in_threads: None, monkeypatch: pytest.MonkeyPatch
):
    """Nothing but trust is written: validation is on. The liar's row counts fully; the run goes back behind it."""
    monkeypatch.setenv("ATOLL_TICKET_USES", f"{LOOPS}")
    wish = {"trust": "community", "statistic": "mean", "rounds": ROUNDS, "inner_steps": 40, "start_peers": LOOPS}
    founder = found_loop(folder=tmp_path / "0", **wish)
    with ThreadPoolExecutor(LOOPS) as pool:
        ends = [pool.submit(learned, founder)]
        while not founder.ticket and not ends[0].done():
            wait(ends, 0.02)
        for k in range(1, LOOPS):
            run = atoll.join(founder.ticket, folder=tmp_path / f"{k}")
            ends.append(pool.submit(learned, run, liar=k == 1))
        losses = [end.result() for end in ends]
    told = list(entries_in(tmp_path / "0" / "facts.jsonl"))
    bad = next(e for e in told if e["fact"] == "StateValidationDecided" and e["opinion"] == "bad")
    back = next(e for e in told if e["fact"] == "BadStateRolledBack")
    assert back["back_to"] < bad["of"] < back["round"] and bad["of"] in back["refused"]
    print("LOSS", losses, bad["values"])
    assert len(set(losses)) == 1 and losses[0] < 0.7 < 2.0 < bad["values"][0], (losses, bad)


class Watched(Loops):
    """Loops that measure something: `measure` of the model."""

    def __init__(self, *how, measure) -> None:
        self.measure = measure
        super().__init__(*how)

    def trainer(self):
        loop = super().trainer()
        loop.held_out, loop.validates = self.measure, self.measure is not None
        return loop


RECIPE = recipe_for({"overlap": 0, "fragments": 1}, rounds=9)


def stepping(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def test_a_loop_that_looks_at_older_states_trains_as_if_it_never_did(tmp_path: Path, book: str):
    """It measures that very state, in eval mode. What it does to mode, numbers and parameters is undone."""
    seen: list[tuple[bool, torch.Tensor]] = []

    def measure(model: nn.Module) -> float:
        seen.append((model.training, torch.cat([p.flatten() for p in model.parameters()])))
        for p in model.parameters():
            p.mul_(7)
        model.train()
        return torch.rand(1) + 3.0

    async def story() -> None:
        watched = Watched(tmp_path / "a", RECIPE, book, stepping, measure=measure)
        plain = Loops(tmp_path / "b", RECIPE, book, stepping)
        await watched.begin()
        await plain.begin()
        first = watched.state
        for _ in range(3):
            for k in range(2):
                said = await watched.islands[k].run(MeasureValidationLoss(0, first))
                assert 3.0 <= said.losses[0] < 4.0 and said.right == ()
            await watched.play()
            await plain.play()
            assert watched.state == plain.state
        with pytest.raises(TrainerCommandError, match="validate="):
            await plain.islands[0].run(MeasureValidationLoss(0, first))
        with pytest.raises(TrainerCommandError, match="validate="):
            await watched.trainers[0].validate(ContinueMeasurement())
        await watched.close()
        await plain.close()
        assert len(seen) == 6 and not any(training for training, _ in seen)
        assert all(torch.equal(values, seen[0][1]) for _, values in seen)

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    asyncio.run(story())


@pytest.mark.parametrize("measure", [lambda model: {}["gone"], lambda model: "low", lambda model: torch.ones(3)])
def test_a_held_out_loss_that_fails_costs_a_look_and_not_the_loop(tmp_path: Path, book: str, measure, capfd):
    async def story() -> None:
        (tmp_path / "a").mkdir()
        watched = Watched(tmp_path / "a", RECIPE, book, stepping, measure=measure)
        await watched.begin()
        await watched.play()
        with pytest.raises(TrainerCommandError, match="validate= failed"):
            await watched.islands[0].run(MeasureValidationLoss(0, watched.state))
        await watched.play()
        await watched.close()

    asyncio.run(story())
    assert "Traceback" in (told := capfd.readouterr().err) and "does not evaluate this state" in told
