"""What one round of a recipe sends, before there is a run: sizes alone, no tensors.

Counts with what counts in experiments and real rounds: fragments, parts and codecs are cut and named by their own
functions, and `TrafficCounter` adds up. A codec whose wires vary counts with its longest. Left out, as there:
headers,
agreement, downloads of joiners; and what happens once in a run (a closing average, changes of rhythm).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

import torch
from torch import Tensor

from atoll.base.ids import Digest
from atoll.training.exchange.layout import ModelLayout, TensorSlot
from atoll.training.experiment.traffic import TrafficCounter
from atoll.training.recipe.outer import AgreementNesterov, RegionalNesterov, momentum_of
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.schedule import fragments_of
from atoll.training.recipe.state import SharedState
from atoll.training.recipe.update import Bounds, RoundInputs, moved, part_bounds, part_codecs

SIDE_PER_LAYER = (
    128  # a GPT of L layers is about 128 L wide and has 12 L width² values (Kaplan et al. 2020, fig. 5)
)
COUNT_MIN = 10_000  # values; a run wants at least PARTS_MAX blocks


@dataclass(frozen=True)
class SliceExchange:
    """One synchronisation of one slice."""

    dense_bytes: int  # of the slice in fp32
    row_bytes: int  # what one member says, all parts
    answer_bytes: int  # what it is answered, all parts; 0 where rows are gathered
    sent_bytes: float  # by an average peer, every copy counted
    heard_bytes: float
    every: int = 1  # rounds


@dataclass(frozen=True)
class TrafficForecast:
    exchanges: tuple[SliceExchange, ...]
    up_bytes: float  # per round, an average peer
    down_bytes: float
    up_ratio: float | None  # times less than ring data parallelism in fp32; None where nothing is sent
    down_ratio: float | None


def forecast(recipe: Recipe, layout: ModelLayout, peers: int) -> TrafficForecast:
    """What one round of this recipe sends for a model of this layout. ValueError if it cannot be cut like that."""
    if peers < max(1, recipe.reducer.peers_min):
        raise ValueError(f"this recipe needs at least {recipe.reducer.peers_min} peers, not {peers}")
    whole = TrafficCounter(peers)
    every = [rounds for rounds in recipe.schedule.moments if rounds]
    rounds = lcm(1, *every, recipe.outer.every if isinstance(recipe.outer, RegionalNesterov) else 1)
    exchanges = [
        _exchange(recipe, layout, lo, hi, peers) for lo, hi in fragments_of(layout, recipe.schedule.fragments)
    ]
    exchanges += [replace(_exchange(recipe, layout, 0, layout.parameters, peers), every=often) for often in every]
    if isinstance(
        recipe.outer, RegionalNesterov
    ):  # so many updates of a region take so many rounds of all, on average
        traffic, size = TrafficCounter(peers), 4 * layout.floats
        for peer in range(peers):
            traffic.above([peer], range(peers), size)
        exchanges.append(
            SliceExchange(size, size, size, traffic.upload_bytes, traffic.download_bytes, recipe.outer.every)
        )
    for one in exchanges:
        for peer in range(peers):
            whole.sent[peer] += round(one.sent_bytes * (rounds // one.every))
            whole.heard[peer] += round(one.heard_bytes * (rounds // one.every))
    up, down = whole.ratios(layout.parameters, recipe.schedule.inner_steps * rounds)
    return TrafficForecast(tuple(exchanges), whole.upload_bytes / rounds, whole.download_bytes / rounds, up, down)


def layout_of_size(parameters: int) -> ModelLayout:
    """Matrices of about the shape that a GPT with so many parameters has. ValueError if that is no model."""
    if parameters < COUNT_MIN:
        raise ValueError(f"{parameters} parameters are too few to share; give at least {COUNT_MIN}")
    layers = max(1.0, (parameters / (12 * SIDE_PER_LAYER**2)) ** (1 / 3))
    side = min(round(SIDE_PER_LAYER * layers), int(parameters**0.5) // 4)
    slots, at = [], 0
    while at < parameters:
        shape = (side, side) if parameters - at >= side * side else (parameters - at,)
        slots.append(TensorSlot(f"{len(slots)}", "parameter", shape, "float32", at))
        at += slots[-1].size
    return ModelLayout(tuple(slots), parameters, parameters, 0)


def _exchange(recipe: Recipe, layout: ModelLayout, lo: int, hi: int, peers: int) -> SliceExchange:
    traffic, coding, group = TrafficCounter(peers), recipe.coding, recipe.reducer.group
    regions = recipe.outer.regions if isinstance(recipe.outer, RegionalNesterov) else 1
    owners = 1 if group in ("pair", "server") else -(-peers // regions)
    bounds = part_bounds(hi - lo, (1,) * owners)
    rows = _sizes(recipe, layout, coding.up, bounds, lo)
    answers = [0] * len(rows)
    match group:
        case "pair":
            for peer in range(peers - peers % 2):
                traffic.pair(peer, (peer, peer ^ 1), rows[0] + 4 * (hi - lo), True)
        case "one":
            answers = [4 * (hi - lo) // len(rows)] * len(rows)
            for peer in range(peers):
                traffic.alone(peer, range(peer % regions, peers, regions), rows, 4 * (hi - lo))
        case "all" | "server":
            if coding.answer != "gathered":
                extra = 4 if isinstance(recipe.outer, AgreementNesterov) else 0
                answers = [size + extra for size in _sizes(recipe, layout, coding.down, bounds, lo)]
            for owner, (row, answer) in enumerate(zip(rows, answers, strict=True)):
                traffic.part(owner, dict.fromkeys(range(peers), row), range(peers), answer or None)
    sent, heard = traffic.upload_bytes, traffic.download_bytes
    return SliceExchange(4 * (hi - lo), sum(rows), sum(answers), sent, heard)


def _sizes(recipe: Recipe, layout: ModelLayout, name: str, bounds: Bounds, lo: int) -> list[int]:
    """Bytes of every part's wire. What codecs may build on is there in shape only: nothing is encoded."""

    def empty(values: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(values, dtype=dtype, device="meta")

    state = SharedState(empty(layout.floats), empty(layout.parameters), empty(layout.counters, torch.int64))
    common = RoundInputs(0, state, Digest(bytes(32)), layout, momentum_of(recipe.outer))
    codecs = part_codecs(name, common, moved(bounds, lo))
    return [codec.wire_bytes(b - a) for codec, (a, b) in zip(codecs, bounds, strict=True)]
