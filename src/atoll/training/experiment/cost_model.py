"""Traffic forecast: bytes that one round of a recipe sends, computed from sizes alone, without tensors or a run.

Fragments, parts and codecs are cut by the functions of real rounds, and `TrafficCounter` adds up the bytes. A codec
with wires of varying length counts with its longest wire.
Not responsible for:
- headers, agreement and downloads of joiners, which experiments also leave out;
- one-time traffic: a closing average, schedule phases.
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
from atoll.training.recipe.update import Bounds, RoundCodingInputs, moved, part_bounds, part_codecs

SIDE_PER_LAYER = (
    128  # a GPT of L layers is about 128 L wide and has 12 L width² values (Kaplan et al. 2020, fig. 5)
)
COUNT_MIN = 10_000  # values: below it the shapes of a GPT mean nothing


@dataclass(frozen=True)
class SliceTraffic:
    """One synchronization of one slice of the flat vector."""

    dense_bytes: int  # slice in fp32
    row_bytes: int  # upload of one member, all parts
    answer_bytes: int  # download of one member, all parts; 0 if rows are gathered
    sent_bytes: float  # upload of an average peer, every copy counted
    heard_bytes: float
    every: int = 1  # rounds between two of these exchanges


@dataclass(frozen=True)
class TrafficForecast:
    exchanges: tuple[SliceTraffic, ...]
    up_bytes: float  # per round, average peer
    down_bytes: float
    up_ratio: float | None  # reduction factor against ring data parallelism in fp32; None if no byte is sent
    down_ratio: float | None


def forecast(recipe: Recipe, layout: ModelLayout, peers: int) -> TrafficForecast:
    """Traffic of one round of `recipe` for a model of this layout. ValueError if the model cannot be cut so."""
    if peers < max(1, recipe.reducer.peers_min):
        raise ValueError(f"this recipe needs at least {recipe.reducer.peers_min} peers, not {peers}")
    whole = TrafficCounter(peers)
    every = [rounds for rounds in recipe.schedule.moments if rounds]
    rounds = lcm(1, *every, recipe.outer.every if isinstance(recipe.outer, RegionalNesterov) else 1)
    exchanges = [
        _exchange(recipe, layout, lo, hi, peers) for lo, hi in fragments_of(layout, recipe.schedule.fragments)
    ]
    exchanges += [replace(_exchange(recipe, layout, 0, layout.parameters, peers), every=often) for often in every]
    if isinstance(recipe.outer, RegionalNesterov):  # `every` updates of a region take `every` rounds on average
        traffic, size = TrafficCounter(peers), 4 * layout.floats
        for peer in range(peers):
            traffic.count_region([peer], range(peers), size)
        exchanges.append(
            SliceTraffic(size, size, size, traffic.upload_bytes, traffic.download_bytes, recipe.outer.every)
        )
    for one in exchanges:
        for peer in range(peers):
            whole.sent[peer] += round(one.sent_bytes * (rounds // one.every))
            whole.received[peer] += round(one.heard_bytes * (rounds // one.every))
    up, down = whole.ratios(layout.parameters, recipe.schedule.inner_steps * rounds)
    return TrafficForecast(tuple(exchanges), whole.upload_bytes / rounds, whole.download_bytes / rounds, up, down)


def layout_of_size(parameters: int) -> ModelLayout:
    """Layout with matrices of about the shapes of a GPT of this size. ValueError below COUNT_MIN parameters."""
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


def _exchange(recipe: Recipe, layout: ModelLayout, lo: int, hi: int, peers: int) -> SliceTraffic:
    traffic, coding, group = TrafficCounter(peers), recipe.coding, recipe.reducer.group
    regions = recipe.outer.regions if isinstance(recipe.outer, RegionalNesterov) else 1
    owners = 1 if group in ("pair", "server") else -(-peers // regions)
    bounds = part_bounds(hi - lo, (1,) * owners)
    rows = _sizes(recipe, layout, coding.up, bounds, lo)
    answers = [0] * len(rows)
    match group:
        case "pair":
            for peer in range(peers - peers % 2):
                traffic.count_pair(peer, (peer, peer ^ 1), rows[0] + 4 * (hi - lo), True)
        case "one":
            answers = [4 * (hi - lo) // len(rows)] * len(rows)
            for peer in range(peers):
                traffic.count_single(peer, range(peer % regions, peers, regions), rows, 4 * (hi - lo))
        case "all" | "server":
            if coding.answer != "gathered":
                extra = 4 if isinstance(recipe.outer, AgreementNesterov) else 0
                answers = [size + extra for size in _sizes(recipe, layout, coding.down, bounds, lo)]
            for owner, (row, answer) in enumerate(zip(rows, answers, strict=True)):
                traffic.count_part(owner, dict.fromkeys(range(peers), row), range(peers), answer or None)
    sent, heard = traffic.upload_bytes, traffic.download_bytes
    return SliceTraffic(4 * (hi - lo), sum(rows), sum(answers), sent, heard)


def _sizes(recipe: Recipe, layout: ModelLayout, name: str, bounds: Bounds, lo: int) -> list[int]:
    """Bytes of every part's wire. The codecs' tensors exist in shape only (device "meta"): nothing is encoded."""

    def empty(values: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(values, dtype=dtype, device="meta")

    state = SharedState(empty(layout.floats), empty(layout.parameters), empty(layout.counters, torch.int64))
    common = RoundCodingInputs(0, state, Digest(bytes(32)), layout, momentum_of(recipe.outer))
    codecs = part_codecs(name, common, moved(bounds, lo))
    return [codec.wire_bytes(b - a) for codec, (a, b) in zip(codecs, bounds, strict=True)]
