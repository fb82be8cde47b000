"""What a recipe reaches, without any network: all peers of a run in one process, on the real pieces.

    python bench/solo.py peers=4 rounds=30 steps=50 batch=4 up=2bit

Prints one JSON line: validation loss per some rounds, CPU seconds per inner step of one peer at one thread, and
bytes one peer uploads. `peers=1 alone=1` is one worker that never synchronises: the loss to be beaten.
Arguments and defaults stand in DEFAULTS.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import msgspec
import torch

from atoll.learn.codec import codec_named
from atoll.learn.combine import combine
from atoll.learn.data import Data, batch, load_data, validation
from atoll.learn.inner import fresh_inner, inner_step
from atoll.learn.layout import bind, layout_of
from atoll.learn.models import build_model, loss_of
from atoll.learn.recipes import Recipe, diloco
from atoll.learn.state import advance, initial_state
from atoll.learn.update import encode_update, part_bounds, settle

DEFAULTS = {
    "model": "gpt-tiny",
    "data": "stdlib",
    "peers": 4,
    "rounds": 30,
    "steps": 50,
    "batch": 4,
    "seq_len": 64,
    "lr": 4e-3,
    "warmup": 100,
    "floor": 0.1,
    "olr": 1.0,
    "mu": 0.5,
    "up": "int8",
    "down": "int8",
    "beta": 1.0,
    "alone": 0,
    "seed": 0,
    "samples": 2048,
}


class Worker:
    def __init__(self, recipe: Recipe) -> None:
        self.model = build_model(recipe.model, recipe.seed)
        self.layout = layout_of(self.model)
        self.x_F, self.gradient_P = bind(self.model, self.layout)
        self.inner = fresh_inner(self.layout.parameters)
        self.memory_F: torch.Tensor | None = None
        self.cursor = 0

    def train(self, recipe: Recipe, data: Data, shard: int, shards: int, global_step: int) -> None:
        for step in range(recipe.schedule.inner_steps):
            found = batch(data, shard, shards, self.cursor, recipe.batch, recipe.seq_len, recipe.seed)
            self.cursor += recipe.batch
            self.gradient_P.zero_()
            loss_of(self.model, found).backward()
            x_P = self.x_F[: self.layout.parameters]
            inner_step(recipe.inner, self.inner, x_P, self.gradient_P, global_step + step)


@torch.no_grad()
def loss_at(worker: Worker, data: Data, recipe: Recipe, samples: int) -> float:
    found = validation(data, samples, 256, recipe.seq_len)
    losses = [(float(loss_of(worker.model, one)), len(one[0])) for one in found]
    return sum(loss * size for loss, size in losses) / sum(size for _, size in losses)


def main() -> None:
    torch.set_num_threads(1)
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    asked = {name: type(default)(given.pop(name, default)) for name, default in DEFAULTS.items()}
    if given:
        raise SystemExit(f"unknown: {', '.join(given)}; there are {', '.join(DEFAULTS)}")
    recipe = diloco(
        asked["model"],
        rounds=asked["rounds"],
        inner_steps=asked["steps"],
        batch=asked["batch"],
        seq_len=asked["seq_len"],
        lr=asked["lr"],
        outer_lr=asked["olr"],
        outer_momentum=asked["mu"],
        up=asked["up"],
        down=asked["down"],
        seed=asked["seed"],
    )
    inner = msgspec.structs.replace(recipe.inner, warmup_steps=asked["warmup"], floor=asked["floor"])
    recipe = msgspec.structs.replace(recipe, inner=inner)
    changed = {name: value for name, value in asked.items() if value != DEFAULTS[name]}
    print(json.dumps(run(recipe, load_data(asked["data"]), asked) | {"asked": changed}))


def run(recipe: Recipe, data: Data, asked: dict) -> dict:
    peers = asked["peers"]
    workers = [Worker(recipe) for _ in range(peers)]
    state, layout = initial_state(workers[0].model), workers[0].layout
    bounds = part_bounds(layout.floats, (1,) * peers)
    up, down = codec_named(recipe.coding.up), codec_named(recipe.coding.down)
    curve, train_s, sync_s, sent_bytes = [], 0.0, 0.0, 0
    for round_index in range(recipe.schedule.rounds):
        began = time.process_time()
        for shard, worker in enumerate(workers):
            worker.train(recipe, data, shard, peers, state.steps)
        trained = time.process_time()
        if asked["alone"]:
            state = replace(state, steps=state.steps + recipe.schedule.inner_steps)
        else:
            updates = [encode_update(state.anchor_F, w.x_F, w.memory_F, bounds, up, asked["beta"]) for w in workers]
            sent_bytes += sum(map(len, updates[0].wires))
            parts = []
            for part, (lo, hi) in enumerate(bounds):
                parts.append(combine([(1, u.wires[part]) for u in updates], hi - lo, up, down).wire)
            state = advance(
                state, parts, bounds, down, recipe.outer, steps=recipe.schedule.inner_steps, samples=0, tokens=0
            )
            for worker, update in zip(workers, updates, strict=True):
                worker.memory_F = settle(update, [True] * len(bounds), up)
                worker.x_F.copy_(state.anchor_F)
        train_s += trained - began
        sync_s += time.process_time() - trained
        last = round_index + 1 == recipe.schedule.rounds
        if last or round_index % 5 == 4:
            curve.append(round(loss_at(workers[0], data, recipe, asked["samples"] if last else 256), 4))
            print(round_index + 1, curve[-1], file=sys.stderr, flush=True)
    steps = recipe.schedule.rounds * recipe.schedule.inner_steps
    return {
        "validation_loss": curve[-1],
        "curve": curve,
        "step_cpu_ms": round(train_s / steps / peers * 1e3, 2),
        "round_sync_cpu_ms": round(sync_s / recipe.schedule.rounds / peers * 1e3, 1),
        "sent_bytes": sent_bytes,
        "parameters": layout.parameters,
    }


if __name__ == "__main__":
    main()
