"""Shared state of a run: all that peers must hold identically after a round, and its canonical bytes.

The state is the anchor, the outer momentum, buffers, counters and the progress of the run. Equal states have equal
bytes, so the state hash is the blob id of those bytes. A joiner downloads the blob that the vertex names.
`apply_update` is the only way from one round to the next, `rolled_back` the only way back.
Invariants:
- Nothing private is part of it: each peer keeps its own error feedback, inner state and data cursor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
import torch
from torch import Tensor, nn

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest
from atoll.crypto.digest import Buffer, blob_id, manifest_of
from atoll.training.codec import Codec
from atoll.training.codec.blocks import SPAN, Room, largest_of, lend_spans, new_wire, spans_of, tensor_over
from atoll.training.exchange.layout import (
    ModelLayout,
    base_digest,
    flatten,
    layout_digest,
    layout_of,
    tensors_by_name,
)
from atoll.training.exchange.tensorfile import TensorFileEntry, header_of, load, pieces_of
from atoll.training.recipe.inner import AdamW
from atoll.training.recipe.outer import SHARED, DelayedNesterov, agreed_moments, delayed_step, outer_step
from atoll.training.recipe.outer_adamw import adamw_step

FORMAT = "atoll/state/2"
COUNTS = ("round", "steps", "samples", "tokens")
COUNT_MAX = 2**62


@dataclass(frozen=True)
class SharedState:
    anchor_F: Tensor  # parameters, then float buffers, fp32
    momentum_P: Tensor  # outer momentum; buffers have none
    counters_K: Tensor  # integer buffers, int64
    round: int = 0  # rounds since genesis
    steps: int = 0  # inner steps of one worker since genesis: position of rates without a horizon
    samples: int = 0  # samples handed out to all workers: position in the data
    tokens: int = 0  # tokens learned by all workers: position of rates with a horizon
    second_P: Tensor | None = None
    """AdamW's second moment, from its first step on; `momentum_P` is then the first moment. With
    `outer.MomentAverage` both are means over the members, this one since it was first averaged.
    """


def initial_state(model: nn.Module, layout: ModelLayout | None = None) -> SharedState:
    """The state at the start of a run. It becomes a blob in genesis: the same seed gives other bits on other
    machines.

    `layout`: exchanged tensors; None: those that require a gradient.
    """
    layout = layout or layout_of(model)
    anchor_F, counters_K = flatten(model, layout)
    return SharedState(anchor_F, torch.zeros(layout.parameters, dtype=torch.float32), counters_K)


def apply_update(
    combined_N: Tensor,
    state: SharedState,
    outer: SHARED,
    *,
    steps: int,
    samples: int,
    tokens: int,
    counters: Sequence[Sequence[int]] = (),
    turn: tuple[int, int] | None = None,
    agreement_N: Tensor | float = 1.0,
    step: int | None = None,
    room: Room = new_wire,
) -> SharedState:
    """The state after a round: outer step on the parameters, plain average of the buffers, maximum of counters.

    Only the range `turn` of the vector moves (None: everything), by `combined_N`; momentum outside it stays. Values
    of the range beyond the vector are the members' moments. `counters` are the contributors' integer buffers.
    `steps`, `samples` and `tokens` are increments. `step`: the run's step for the outer rate; None: that of the
    state. Anchor and momentum are allocated in `room`.
    """
    lo, hi = turn or (0, len(state.anchor_F))
    step = state.steps if step is None else step
    end = max(lo, min(hi, len(state.momentum_P)))  # end of the parameters in the range; buffers follow
    agreed_N = agreement_N[: end - lo] if isinstance(agreement_N, Tensor) else agreement_N
    second_P, given_N = state.second_P, combined_N[: end - lo]
    anchor_F, momentum_P = (_but_for(old, lo, end, room) for old in (state.anchor_F, state.momentum_P))
    before_N, into_N = (state.anchor_F[lo:end], state.momentum_P[lo:end]), (anchor_F[lo:end], momentum_P[lo:end])
    if isinstance(outer, AdamW):
        assert turn is None, "AdamW outside needs whole models"
        squares_P = torch.zeros_like(momentum_P) if second_P is None else second_P
        *moved, second_P = adamw_step(outer, *before_N, squares_P, given_N, step, state.round)
        for into, value in zip(into_N, moved, strict=True):
            into.copy_(value)
    elif isinstance(outer, DelayedNesterov):
        for into, value in zip(into_N, delayed_step(outer, *before_N, given_N, state.tokens, tokens), strict=True):
            into.copy_(value)
    else:
        outer_step(outer, *before_N, given_N, step, agreed_N, into_N)
    floats = min(hi, len(state.anchor_F))
    torch.sub(state.anchor_F[end:floats], combined_N[end - lo : floats - lo], out=anchor_F[end:floats])
    if hi > floats:
        first_P, second_P = agreed_moments(state.momentum_P, second_P, combined_N[floats - lo :])
        momentum_P.copy_(first_P)
    counters_K = state.counters_K
    for row in counters:
        counters_K = torch.maximum(counters_K, torch.tensor(row, dtype=torch.int64))
    return SharedState(
        anchor_F,
        momentum_P,
        counters_K,
        state.round + 1,
        state.steps + steps,
        state.samples + samples,
        state.tokens + tokens,
        second_P,
    )


def advanced_spans(
    updates: Iterable[tuple[int, Tensor]],
    state: SharedState,
    outer: SHARED,
    *,
    tokens: int,
    step: int,
) -> Iterator[tuple[int, SharedState]]:
    """`apply_update`, span by span, with the same bits: (begin of a span in the vector, a state of its values).

    `updates`: combined values, at most `SPAN` at once, and where they begin. A state is valid until the
    next. For outer steps that are elementwise: not for AdamW, whose norm needs all values, and not for moments
    behind the vector.
    """
    assert not isinstance(outer, AdamW)
    parameters = len(state.momentum_P)
    with lend_spans(2) as lent:
        turns = cycle(one.numpy().data.cast("B") for one in lent)  # anchor, momentum
        for lo, combined_S in updates:
            hi = lo + len(combined_S)
            momentum_S = state.momentum_P[min(lo, parameters) : min(hi, parameters)]
            part = replace(state, anchor_F=state.anchor_F[lo:hi], momentum_P=momentum_S)
            after = apply_update(
                combined_S,
                part,
                outer,
                steps=0,
                samples=0,
                tokens=tokens,
                step=step,
                room=lambda size: next(turns)[:size],
            )
            yield lo, after


def untouched_zeros(values: int) -> Tensor:
    """Zeros (values,) that take no memory until they are written; those of torch do."""
    return torch.from_numpy(np.zeros(values, np.float32))


def unchanged(state: SharedState, *, steps: int, samples: int, tokens: int) -> SharedState:
    """The state after a round without counted updates: the run's counters advance, the model stays.

    An outer step without an update would move the model by the momentum alone in every such round. If all members
    die at once, the model would drift while no member trains.
    """
    return replace(
        state,
        round=state.round + 1,
        steps=state.steps + steps,
        samples=state.samples + samples,
        tokens=state.tokens + tokens,
    )


def _but_for(old: Tensor, lo: int, hi: int, room: Room) -> Tensor:
    """A copy of `old` with values lo … hi uninitialized."""
    if len(old) == 0:
        return old
    new = tensor_over(room(old.nbytes), torch.float32)
    for rest in (slice(0, lo), slice(hi, None)):
        new[rest] = old[rest]
    return new


def rolled_back(earlier: SharedState, before: SharedState, samples: int) -> SharedState:
    """The earlier state, bit for bit, at the run's current position in the data: no sample is used twice.

    `before` is the head's state, `samples` the number handed out since. Outer momentum, buffers, counters, the
    position in the learning-rate schedule and the learned tokens are those of the earlier state, because they
    belong to its model.
    """
    return replace(earlier, samples=before.samples + samples)


def decode_parts(
    parts: Sequence[Buffer | None],
    bounds: Sequence[tuple[int, int]],
    codecs: Sequence[Codec],
    floats: int,
    room: Room = new_wire,
) -> Tensor:
    """The combined update (F,), each part in its codec; zero for a part without a result. PeerFault if one does not
    decode.
    """
    assert len(parts) == len(bounds) and (not bounds or bounds[-1][1] == floats)
    combined_F = tensor_over(room(4 * floats), torch.float32)
    for part, codec, (lo, hi) in zip(parts, codecs, bounds, strict=True):
        if part is not None:
            codec.decode_into(part, combined_F[lo:hi])
        else:
            combined_F[lo:hi] = 0
    return combined_F


def decoded_spans(
    parts: Sequence[Buffer | None], bounds: Sequence[tuple[int, int]], codecs: Sequence[Codec]
) -> Iterator[tuple[int, Tensor]]:
    """`decode_parts`, span by span: (begin, values), each valid until the next. PeerFault as above."""
    room_S = torch.empty(max((min(hi - lo, SPAN) for lo, hi in bounds), default=0), dtype=torch.float32)
    for part, codec, (lo, hi) in zip(parts, codecs, bounds, strict=True):
        opened = None if part is None else codec.open_wire(part, hi - lo)
        for a, b in spans_of(hi - lo):
            value_S = room_S[: b - a].zero_() if part is None else codec.read_span(opened, a, room_S[: b - a])
            yield lo + a, value_S


def state_bytes(state: SharedState, layout: ModelLayout) -> bytes:
    """Canonical bytes: equal states give equal bytes. Any safetensors reader opens them."""
    return b"".join(state_pieces(state, layout))


def state_pieces(state: SharedState, layout: ModelLayout) -> list[Buffer]:
    """The same bytes in pieces, mostly views of the state's own memory."""
    return pieces_of(tensors_in(state), _metadata(state, layout))


def state_header(state: SharedState, layout: ModelLayout) -> tuple[bytes, dict[str, TensorFileEntry]]:
    """(first bytes, place of each tensor) of the canonical bytes of a state with these counters and shapes."""
    kinds = {name: (value.dtype, list(value.shape)) for name, value in tensors_in(state).items()}
    return header_of(kinds, _metadata(state, layout))


def size_bytes_of(state: SharedState, layout: ModelLayout) -> int:
    """Length of the canonical bytes."""
    return max(span.end for span in state_header(state, layout)[1].values())


def tensors_in(state: SharedState) -> dict[str, Tensor]:
    """The tensors of a state by their name in its bytes.

    The momentum of a first state is zero and left out: every joiner of a beginning run fetches that state.
    """
    tensors = {"anchor": state.anchor_F, "counters": state.counters_K}
    if state.round > 0 or largest_of(state.momentum_P) > 0:
        tensors["momentum"] = state.momentum_P
    return tensors if state.second_P is None else tensors | {"second": state.second_P}


def _metadata(state: SharedState, layout: ModelLayout) -> dict[str, str]:
    counts = {name: str(getattr(state, name)) for name in COUNTS}
    return {"format": FORMAT, "layout": layout_digest(layout).hex(), **counts}


def state_hash(data: Buffer) -> Digest:
    """State hash: the blob id of its bytes."""
    return blob_id(manifest_of(data))


def state_from_bytes(data: Buffer, layout: ModelLayout) -> SharedState:
    """The state over its canonical bytes. PeerFault unless they are canonical, finite and of this layout."""
    state, (tensors, _) = state_over(data, layout), load(data)
    floats = [part for name, whole in tensors.items() if name != "counters" for part in whole.split(SPAN)]
    if not all(largest_of(part) < torch.inf for part in floats):
        raise PeerFault("", "the state holds values that are not finite")
    if state.second_P is not None and any(bool((part < 0).any()) for part in state.second_P.split(SPAN)):
        raise PeerFault("", "the state holds a negative second moment")
    return state


def state_over(data: Buffer, layout: ModelLayout) -> SharedState:
    """The state over its canonical bytes, without a copy and without a look at its values.

    PeerFault unless the bytes are canonical and of this layout.
    """
    tensors, metadata = load(data)
    if metadata.get("format") != FORMAT or metadata.get("layout") != layout_digest(layout).hex():
        raise PeerFault("", f"not a state of this model: {metadata.get('format')}, {metadata.get('layout')}")
    expected = {
        "anchor": ([layout.floats], torch.float32),
        "momentum": ([layout.parameters], torch.float32),
        "counters": ([layout.counters], torch.int64),
    }
    if "second" in tensors:
        expected["second"] = expected["momentum"]
    kinds = {name: (value.dtype, list(value.shape)) for name, value in tensors.items()}
    if "momentum" not in tensors:
        tensors["momentum"] = untouched_zeros(layout.parameters)
    if {name: (list(value.shape), value.dtype) for name, value in tensors.items()} != expected:
        raise PeerFault("", "the state's tensors are not those of the layout")
    counts = {name: _count(metadata.get(name, "")) for name in COUNTS}
    counters_K = tensors["counters"].clone()  # not aligned in the bytes
    state = SharedState(
        tensors["anchor"], tensors["momentum"], counters_K, **counts, second_P=tensors.get("second")
    )
    header, _ = header_of(kinds, _metadata(state, layout))
    is_canonical = header == memoryview(data).cast("B")[: len(header)]
    if state.round > 0 or "momentum" in kinds:  # else it lacks the momentum, as it should
        is_canonical &= kinds.keys() == tensors_in(state).keys()
    if not is_canonical:
        raise PeerFault("", "the state is not in canonical form")
    return state


def export_pieces(state: SharedState, layout: ModelLayout) -> list[Buffer]:
    """The agreed model by tensor name, without its base, as a safetensors file for other programs.

    In pieces: a large model is written to disk without a copy.
    """
    told = {"format": "pt", "atoll.round": str(state.round)}
    told |= {"atoll.base": base_digest(layout).hex()} if layout.held else {}
    return pieces_of(tensors_by_name(state.anchor_F, state.counters_K, layout), told)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= COUNT_MAX):
        raise PeerFault("", f"{text[:24]!r} is not a count")
    return int(text)
