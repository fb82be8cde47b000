"""Agreed tensor arithmetic of a round: owners combine rows into results, all members advance the state by results.

    combine_rows      the rows of a part become one result
    compare_rows      inner products of its rows, for weights by distance; `compute_weights` derives the weights
    stage_advance     the state that all results of a round lead to, the same bytes at every member, into its store
    advance_state     the same in memory

Invariants:
- Functions of the task, genesis and the round's state; the only other input is an owner's error feedback.
- Runs on one thread, off the event loop.
Not responsible for: the local update of this peer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atoll.base.ids import Digest
from atoll.base.machine import Payload
from atoll.crypto.digest import Buffer
from atoll.peer.tasks import AdvanceState, RestoreEarlierState, StateAdvanced
from atoll.protocol.allreduce.tasks import (
    CombineRows,
    ComputedWeights,
    ComputeRowProducts,
    ProductsComputed,
    RowsCombined,
    WeighRows,
)
from atoll.training.codec.blocks import Room
from atoll.training.data import position_after
from atoll.training.exchange import distance_weights
from atoll.training.exchange.combine import combine
from atoll.training.exchange.distance_weights import find_outliers, weigh_rows
from atoll.training.exchange.statistic import RowCombinationRule
from atoll.training.recipe.inner import AdamW
from atoll.training.recipe.lr_position import step_of_run
from atoll.training.recipe.outer import SHARED
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.reply_formats import has_owner_feedback, needs_reply_format, reply_format_of
from atoll.training.recipe.state import (
    SharedState,
    advanced_spans,
    apply_update,
    decode_parts,
    decoded_spans,
    rolled_back,
    unchanged,
)
from atoll.training.recipe.update import Bounds, RoundCodingInputs, moved, part_bounds, part_codec, part_codecs
from atoll.training.spec import TrainingSpec
from atoll.worker.downlink_error_feedback import DownlinkErrorFeedback
from atoll.worker.shared_states import AgreedStateCache

Namer = Callable[[Buffer], Digest]  # digest of a wire


def payload_of(wire: Buffer, name: Namer) -> Payload:
    return Payload(name(wire), len(wire), wire)


def shared_outer(recipe: Recipe) -> SHARED:
    assert isinstance(recipe.outer, SHARED), "decode_learning refuses the others"
    return recipe.outer


# ---- an owner ----------------------------------------------------------------------------------------------


def combine_rows(
    work: CombineRows, learning: TrainingSpec, common: RoundCodingInputs, owing: DownlinkErrorFeedback, name: Namer
) -> RowsCombined:
    """The result of a part. If owners keep error feedback, the error of the result is staged in `owing`."""
    recipe, bounds = learning.recipe_after(common.state), _bounds(work.shares, learning, common.state)
    up, down = (part_codec(one, common, bounds, work.part) for one in (recipe.coding.up, recipe.coding.down))
    at, values = bounds[work.part][0], bounds[work.part][1] - bounds[work.part][0]
    left_N: Tensor | None = None
    rows = [(row.weight, row.payload.data) for row in work.rows]
    if work.weights:
        done = combine(rows, values, up, down, RowCombinationRule(work.statistic, work.liars, work.weights))
    elif needs_reply_format(recipe):
        done = reply_format_of(recipe, common, bounds, work.part).encode(rows)
    elif has_owner_feedback(recipe):  # rows come directly from members here
        done, left_N = owing.combine(rows, at, values, up, down)
    elif any(row.handed for row in work.rows):
        done = combine(rows, values, [down if row.handed else up for row in work.rows], down)
    else:
        done = combine(rows, values, up, down, RowCombinationRule(work.statistic, work.liars))
    counted = tuple(work.rows[i].peer for i in done.counted)
    faulty = tuple(work.rows[i].peer for i, _ in done.faults)
    payload = None
    if done.wire is not None:
        payload = payload_of(done.wire, name)
        is_last = common.state.round + 1 == learning.recipe.schedule.turns
        if left_N is not None and not is_last:
            owing.stage(payload.digest, at, left_N)
    return RowsCombined(payload, counted, faulty, done.why)


def compare_rows(work: ComputeRowProducts, learning: TrainingSpec, common: RoundCodingInputs) -> ProductsComputed:
    """Inner products of the rows of a part."""
    recipe, bounds = learning.recipe_after(common.state), _bounds(work.shares, learning, common.state)
    up, (lo, hi) = part_codec(recipe.coding.up, common, bounds, work.part), bounds[work.part]
    done = distance_weights.compare_rows([(row.weight, row.payload.data) for row in work.rows], hi - lo, up)
    counted = tuple(work.rows[i].peer for i in done.counted)
    return ProductsComputed(done.products, counted, tuple(work.rows[i].peer for i, _ in done.faults))


def compute_weights(work: WeighRows) -> ComputedWeights:
    weights = weigh_rows(work.statistic, work.liars, work.rows, work.parts)
    return ComputedWeights(weights, find_outliers(work.rows, work.parts))


def _bounds(shares: tuple[int, ...], learning: TrainingSpec, before: SharedState) -> Bounds:
    """Bounds of the parts of the round after this state, as indices of the whole vector."""
    begin, end = learning.turn(before)
    return moved(part_bounds(end - begin, shares), begin)


# ---- all members -------------------------------------------------------------------------------------------


def advance_state(
    work: AdvanceState, learning: TrainingSpec, before: SharedState, room: Room
) -> tuple[SharedState, Tensor | None]:
    """The state after a round with these results, and the combined update (N,) of its span; both in `room`.

    The update is None if the round counts no member.
    """
    recipe, layout, (lo, hi) = learning.recipe_after(before), learning.layout, learning.turn(before)
    adds = _increments(work, recipe, before)
    if all(part is None for part in work.parts):
        return unchanged(before, **adds), None
    combined_N, agreement_N = _combined_update(work, learning, before, room)
    after = apply_update(
        combined_N,
        before,
        shared_outer(recipe),
        **adds,
        turn=None if hi - lo == layout.floats else (lo, hi),
        agreement_N=agreement_N,
        step=step_of_run(recipe, before),
        room=room,
    )
    return after, combined_N


def stage_advance(
    work: AdvanceState,
    learning: TrainingSpec,
    before: SharedState,
    states: AgreedStateCache,
    room: Room,
    needs_update: bool = False,
) -> tuple[Digest, Tensor | None]:
    """Stage `advance_state`: (its name, the combined update (N,) if `needs_update` and the round counts a member).

    If the outer step is elementwise, neither the state nor the update is ever in memory as a whole.
    """
    recipe, layout, turn = learning.recipe_after(before), learning.layout, learning.turn(before)
    outer = shared_outer(recipe)
    whole = needs_update or isinstance(outer, AdamW) or needs_reply_format(recipe) or turn[1] > layout.floats
    if whole or all(part is None for part in work.parts):
        after, combined_N = advance_state(work, learning, before, room)
        return states.stage(after, layout), combined_N
    adds, places = _increments(work, recipe, before), moved(part_bounds(turn[1] - turn[0], work.shares), turn[0])
    downs = part_codecs(recipe.coding.down, learning.round_inputs(work.round, before, work.before), places)
    updates = decoded_spans([None if p is None else p.data for p in work.parts], places, downs)
    step = step_of_run(recipe, before)
    spans = advanced_spans(updates, before, outer, tokens=adds["tokens"], step=step)
    return states.stage_spans(unchanged(before, **adds), layout, turn, spans), None


def stage_rollback(work: RestoreEarlierState, learning: TrainingSpec, states: AgreedStateCache) -> StateAdvanced:
    """Stage the earlier state at the run's current position in the data."""
    before, earlier = (states.load(name, learning.layout) for name in (work.before, work.back_to))
    taken = work.steps * (work.batch or learning.recipe.batch)
    samples = position_after(before.samples, work.shards, taken) - before.samples
    return StateAdvanced(states.stage(rolled_back(earlier, before, samples), learning.layout))


def _increments(work: AdvanceState, recipe: Recipe, before: SharedState) -> dict[str, Any]:
    """What a round adds to the counters of the run."""
    position = position_after(before.samples, work.shards, work.steps * (work.batch or recipe.batch))
    return {
        "steps": work.steps,
        "samples": position - before.samples,
        "tokens": work.samples * recipe.seq_len,
    }


def _combined_update(
    work: AdvanceState, learning: TrainingSpec, before: SharedState, room: Room
) -> tuple[Tensor, Tensor | float]:
    """The combined update of the round's span (N,), and how much the members agreed, per value or for all."""
    recipe, (lo, hi) = learning.recipe_after(before), learning.turn(before)
    bounds, parts = part_bounds(hi - lo, work.shares), [None if p is None else p.data for p in work.parts]
    common, places = learning.round_inputs(work.round, before, work.before), moved(bounds, lo)
    if not needs_reply_format(recipe):
        downs = part_codecs(recipe.coding.down, common, places)
        return decode_parts(parts, bounds, downs, hi - lo, room), 1.0
    combined_N, agreement_N = (make(hi - lo, dtype=torch.float32) for make in (torch.zeros, torch.ones))
    for part, (wire, (a, b)) in enumerate(zip(parts, bounds, strict=True)):
        if wire is not None:
            combined_N[a:b], agreement_N[a:b] = reply_format_of(recipe, common, places, part).decode(wire)
    return combined_N, agreement_N
