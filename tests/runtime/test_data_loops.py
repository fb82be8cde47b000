"""Loops that read the run's data set, with their peers in threads: overlap, early ends, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Loop, ThreadChannel, found_loop
from msgspec import UNSET
from test_data_kills import bodies_of, counted_in
from torch import nn
from torch.utils.data import DataLoader

import atoll
from atoll.base.errors import AtollError
from atoll.policy.data.claims import UncountedSampleRanges
from atoll.runtime.embed.attached_trainer import AttachedTrainer
from atoll.runtime.embed.messages import RunRequest
from atoll.runtime.embed.run import Run
from atoll.runtime.trainer.protocol import StepsTrained
from atoll.training.exchange.layout import layout_of
from atoll.training.recipe.methods import pipelined, streaming
from atoll.training.recipe.recipes import custom_loop_recipe
from atoll.wire.data_ranges import AssignedShard, DataRange

pytestmark = [pytest.mark.net]
SAMPLES = list(range(1000))


def train(run: atoll.Run, samples: list[int], stop: threading.Event | None = None) -> list[int]:
    """Reads until the run is over or is to stop; returns the samples of all steps."""
    model, found = nn.Linear(64, 64), list[int]()
    with run:
        data = run.data(samples, shards=20, seed=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.attach(model, optimizer, batch=8)
        for batch in DataLoader(data, batch_size=8):
            model(batch[:, None] / 1000 * torch.ones(64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found += batch.tolist()
            if stop is not None and stop.is_set():
                break
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": streaming(rounds=4, inner_steps=6, fragments=1, overlap=2)},
        {"recipe": pipelined(rounds=8)},
        {"rounds": 6, "inner_steps": 30},
    ],
    ids=["overlap", "pipelined", "used up in the middle of a round"],
)
def test_no_sample_counts_twice_however_rounds_overlap(
    tmp_path: Path, peers_in_threads: None, options: dict[str, Any]
):
    """Steps that were taken ahead belong to the next round; a loop without a shard hands over what it has."""
    read = train(found_loop(folder=tmp_path / "one", **options), SAMPLES)
    bodies = bodies_of(tmp_path / "one")
    seen, data = counted_in(bodies), bodies[-1].data
    assert data is not UNSET and (data.dropped, data.repeated) == (0, 0) and set(seen.values()) == {1}
    assert len(read) >= data.counted >= 8 * bodies[-1].trained


def test_a_loop_with_another_data_set_is_refused_and_leaves(tmp_path: Path, peers_in_threads: None):
    """The first counted claims name the run's data. The other loop says farewell, so the founder goes on alone."""
    founder, stop = found_loop(folder=tmp_path / "one", rounds=10**6, inner_steps=4), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(train, founder, SAMPLES, stop)
        try:
            while founder.trained < 2 and not end.done():
                wait([end], 0.02)
            with pytest.raises(AtollError, match=r"E-DATA-07 .*reads the data set"):
                train(atoll.join(founder.ticket, folder=tmp_path / "two"), SAMPLES[:999])
        finally:
            stop.set()
        assert len(end.result()) > 8


class ReadingLoop(Loop):
    """A loop over the run's data set whose peer is the test."""

    def __init__(self) -> None:
        self.model, self.channel, self.failed = nn.Linear(64, 64), ThreadChannel(), None
        self.run = Run(RunRequest("nowhere", "of the run that the test founds"))
        self.run._channel = self.channel
        self.waits, wait = threading.Event(), self.run._wait_for_data
        self.run._wait_for_data = lambda: self.waits.set() or wait()  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._trains)
        AttachedTrainer.__init__(self, None, None, None)  # type: ignore[arg-type]  # once the loop has attached
        self.layout, self.recipe = layout_of(self.model), custom_loop_recipe(rounds=9, inner_steps=12)

    def _trains(self) -> None:
        try:
            train(self.run, SAMPLES)
        except BaseException as why:  # told by the test's own thread
            self.failed = why

    async def round(self, *shards: AssignedShard, ahead: int | None = None):
        return await self.train(12, cursor=0, shard=0, shards=1, global_step=0, data=shards, ahead=ahead)

    @classmethod
    async def play(cls, story: Callable[[ReadingLoop], Awaitable[tuple[StepsTrained, ...]]]):
        """What the story returns; an error of the loop ends it."""
        loop = cls()
        await loop.start(None)  # type: ignore[arg-type]
        try:
            return await story(loop)
        finally:
            await loop.end()
            assert loop.failed is None, loop.failed


def test_a_loop_whose_update_is_not_counted_goes_on_with_what_is_left():
    """Four samples of its shards are left: too few for a step, so it reads earlier ones again, and says so."""

    async def story(loop: ReadingLoop) -> tuple[StepsTrained, ...]:
        shards = AssignedShard(0, 0), AssignedShard(1, 0)
        first = await loop.round(*shards)
        second = await loop.round(*shards)  # as no vertex counts the first one
        return first, second, await loop.round(AssignedShard(2, 0), AssignedShard(3, 0))

    first, second, third = asyncio.run(ReadingLoop.play(story))
    whole, most = DataRange(0, 0, 50, True), DataRange(1, 0, 46)
    assert (first.steps, first.data.ranges) == (12, (whole, most))
    assert second.data.ranges == (whole, DataRange(1, 0, 50, True), DataRange(0, 0, 44)) and second.steps == 6
    assert third.steps == 12


def test_a_step_ahead_that_finds_no_more_samples_waits_for_the_next_round():
    """The loop hands over 96 of 100 samples and goes on with the other four, before new shards come."""

    async def story(loop: ReadingLoop) -> tuple[StepsTrained, ...]:
        first = await loop.round(AssignedShard(0, 0), AssignedShard(1, 0), ahead=4)
        await asyncio.to_thread(loop.waits.wait)
        loop.claims = UncountedSampleRanges()  # a vertex has counted it
        return first, await loop.round(AssignedShard(1, 46), AssignedShard(2, 0), AssignedShard(3, 0))

    first, second = asyncio.run(ReadingLoop.play(story))
    assert first.data.ranges == (DataRange(0, 0, 50, True), DataRange(1, 0, 46))
    assert second.steps == 12 and second.data.ranges[:2] == (DataRange(1, 46, 50, True), DataRange(2, 0, 50, True))


def test_a_step_that_is_skipped_claims_no_samples(monkeypatch: pytest.MonkeyPatch):
    """GradScaler skips the first step of a fused optimizer: no member has learned its samples."""
    skips = iter([True])
    monkeypatch.setattr("atoll.runtime.embed.run.is_skipped", lambda _: next(skips, False))

    async def story(loop: ReadingLoop) -> tuple[StepsTrained, ...]:
        return (await loop.round(AssignedShard(0, 0), AssignedShard(1, 0)),)

    (done,) = asyncio.run(ReadingLoop.play(story))
    assert done.steps == 11 and done.data.ranges == (DataRange(0, 8, 50, True), DataRange(1, 0, 46))


def test_what_cannot_be_read_is_told_before_anything_starts():
    run = Run(RunRequest("nowhere"))
    for wrong, told in (([], "empty"), (iter([1]), "beginning"), ("no/such/file", "no data at")):
        with pytest.raises(atoll.UsageError, match=rf"E-DATA-02 run.data: .*{told}"):
            run.data(wrong)
    with pytest.raises(atoll.UsageError, match=r"E-ATT-05 .*before run.attach"):
        next(iter(run.data(SAMPLES)))
