from dataclasses import replace

import pytest
import safetensors.torch
import torch
from advancing import advance
from torch import nn

from atoll.base.errors import PeerFault
from atoll.training.codec import CODECS
from atoll.training.codec.blocks import BLOCK
from atoll.training.exchange.layout import layout_of
from atoll.training.exchange.tensorfile import dump, load
from atoll.training.models import build_model
from atoll.training.recipe.error_feedback import encode_update, settle_error_feedback
from atoll.training.recipe.outer import AgreementNesterov, DelayedNesterov, Nesterov, SignOuter, outer_step
from atoll.training.recipe.state import (
    SharedState,
    advanced_spans,
    apply_update,
    decode_parts,
    decoded_spans,
    export_pieces,
    initial_state,
    state_bytes,
    state_from_bytes,
    state_hash,
    unchanged,
)
from atoll.training.recipe.update import moved, part_bounds
from atoll.worker.shared_states import AgreedStateCache
from atoll.worker.state_store import MemoryStateStore

FP32, TWO_BIT = CODECS["fp32"], CODECS["2bit"]


def nano():
    model = build_model("gpt-nano", 0)
    return layout_of(model), initial_state(model)


def random(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_the_outer_step_is_pytorchs_nesterov():
    """Five steps beside torch.optim.SGD(nesterov=True): equal up to rounding, which is all that may differ."""
    outer = Nesterov(lr=0.7, momentum=0.9)
    theirs = nn.Parameter(random(1000, 0))
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    anchor, momentum = theirs.detach().clone(), torch.zeros(1000)
    for step in range(5):
        theirs.grad = random(1000, step + 1)
        sgd.step()
        anchor, momentum = outer_step(outer, anchor, momentum, random(1000, step + 1))
    assert torch.allclose(anchor, theirs.detach(), atol=1e-5)


def test_plain_averaging_lands_on_the_mean():
    """lr 1 and no momentum: anchor - mean(anchor - x) is mean(x), up to one rounding."""
    layout, state = nano()
    x = state.anchor_F + 0.01 * random(layout.floats, 1)
    wire = FP32.encode(state.anchor_F - x)
    after = advance(state, [wire], [(0, layout.floats)], FP32, Nesterov(1.0, 0.0), steps=3, samples=8, tokens=9)
    assert torch.allclose(after.anchor_F, x, atol=1e-6)
    assert (after.round, after.steps, after.samples, after.tokens) == (1, 3, 8, 9)


def test_a_part_that_nobody_answered_moves_by_momentum_alone():
    """Its combined update is zero: the first round leaves it where it was, the second coasts."""
    layout, state = nano()
    bounds = part_bounds(layout.floats, (1,) * 2)
    (_, cut), outer = bounds[0], Nesterov(1.0, 0.5)
    wires = [FP32.encode(torch.full((hi - lo,), 0.25)) for lo, hi in bounds]
    go = {"steps": 1, "samples": 1, "tokens": 1}
    after = advance(state, [wires[0], None], bounds, FP32, outer, **go)
    assert torch.equal(after.anchor_F[cut:], state.anchor_F[cut:])
    assert not torch.equal(after.anchor_F[:cut], state.anchor_F[:cut])
    coasted = advance(after, [None, None], bounds, FP32, outer, **go)
    assert torch.allclose(coasted.anchor_F[:cut], after.anchor_F[:cut] - 0.5 * 0.125, atol=1e-6)


def test_buffers_are_averaged_without_momentum_and_counters_take_the_maximum():
    """Batch norm after a round in which two members counted 7 and 9 batches."""
    model = nn.BatchNorm1d(3)
    layout, state = layout_of(model), initial_state(model)
    delta = torch.ones(layout.floats)
    after = advance(
        *(state, [FP32.encode(delta)], [(0, layout.floats)], FP32, Nesterov(1.0, 0.9)),
        **{"steps": 1, "samples": 1, "tokens": 1, "counters": [[7], [9]]},
    )
    assert torch.allclose(after.anchor_F[:6], state.anchor_F[:6] - 1.9)
    assert torch.allclose(after.anchor_F[6:], state.anchor_F[6:] - 1.0)
    assert after.counters_K.tolist() == [9]


def test_equal_states_have_equal_bytes_and_one_changed_bit_has_another_name():
    layout, state = nano()
    copy = SharedState(state.anchor_F.clone(), state.momentum_P.clone(), state.counters_K.clone())
    data = state_bytes(state, layout)
    assert data == state_bytes(copy, layout)
    copy.momentum_P[5] = 1e-45
    assert state_hash(state_bytes(copy, layout)) != state_hash(data)


def test_a_state_survives_the_trip_through_bytes():
    layout, state = nano()
    state = advance(state, [None], [(0, layout.floats)], FP32, Nesterov(), steps=5, samples=6, tokens=7)
    data = state_bytes(state, layout)
    back = state_from_bytes(data, layout)
    assert state_bytes(back, layout) == data and back.tokens == 7
    assert torch.equal(back.anchor_F, state.anchor_F)


def test_the_state_is_a_safetensors_file_for_everybody_else():
    """Read by the library itself, the state as well as the exported model. A first state has no momentum."""
    layout, state = nano()
    assert set(safetensors.torch.load(state_bytes(state, layout))) == {"anchor", "counters"}
    later = replace(state, round=1)
    assert set(safetensors.torch.load(state_bytes(later, layout))) == {"anchor", "momentum", "counters"}
    model = build_model("gpt-nano", 5)
    model.load_state_dict(safetensors.torch.load(b"".join(export_pieces(state, layout))))
    assert torch.equal(initial_state(model).anchor_F, state.anchor_F)


def test_a_strangers_state_is_believed_only_in_canonical_form():
    """Another model, NaN, spare metadata, a cut file, rubbish, a lying header: each is a fault of the peer."""
    layout, state = nano()
    data = state_bytes(replace(state, round=1), layout)
    tensors, metadata = load(data)
    poisoned = tensors["anchor"].clone()
    poisoned[0] = float("nan")
    other = layout_of(build_model("cnn-mnist", 0))
    bad = [
        dump({**tensors, "anchor": poisoned}, metadata),
        dump(tensors, {**metadata, "note": "hello"}),
        dump(tensors, {**metadata, "round": "-1"}),
        dump(tensors, {**metadata, "round": "007"}),
        dump(tensors, {**metadata, "round": "0"}),  # a zero momentum that belongs left out
        dump({**tensors, "momentum": tensors["momentum"][:-1]}, metadata),
        *(data[:-1], data + b"\0", data[:40], b"", b"\xff" * 100),
        (2**40).to_bytes(8, "little") + data[8:],
        data.replace(b'"shape":[21504]', b'"shape":[21504.0]'),
        data.replace(b'"shape":[21504]', b'"shape":[-1504]  '),
    ]
    for wrong in bad:
        with pytest.raises(PeerFault):
            state_from_bytes(wrong, layout)
    with pytest.raises(PeerFault, match="not a state of this model"):
        state_from_bytes(data, other)


def test_parts_cover_the_vector_between_blocks_and_only_those_beyond_its_blocks_are_empty():
    for floats in (1, 255, 256, 257, 21504, 99550, 167936):
        for parts in (1, 2, 3, 4, 7, 16):
            bounds = part_bounds(floats, (1,) * parts)
            assert bounds[0][0] == 0 and bounds[-1][1] == floats and len(bounds) == parts
            filled = min(parts, -(-floats // 256))
            assert all(lo < hi and lo % 256 == 0 for lo, hi in bounds[:filled])
            assert all(lo == hi for lo, hi in bounds[filled:])
            assert all(bounds[i][1] == bounds[i + 1][0] for i in range(len(bounds) - 1))


def test_what_was_not_counted_goes_back_into_the_memory():
    """Part 1 of 3 was not counted: there, memory and pseudo-gradient are as if nothing had been sent."""
    layout, state = nano()
    bounds = part_bounds(layout.floats, (1,) * 3)
    x = state.anchor_F - 0.001 * random(layout.floats, 1)
    memory = 0.0005 * random(layout.floats, 2)
    update = encode_update(state.anchor_F, x, memory, bounds, TWO_BIT, beta=1.0)
    settled = settle_error_feedback(update, [True, False, True], TWO_BIT)
    (_, a), (_, b) = bounds[0], bounds[1]
    owed = memory + (state.anchor_F - x)
    assert torch.allclose(settled[a:b], owed[a:b], atol=1e-7)
    assert torch.equal(settled[:a], update.memory_F[:a]) and torch.equal(settled[b:], update.memory_F[b:])


def test_error_feedback_in_bf16_is_what_fp32_leaves_rounded_once():
    """So nothing but the rounding between rounds is lost, and the wires are made of fp32 values."""
    layout, state = nano()
    bounds, x = part_bounds(layout.floats, (1,) * 3), state.anchor_F - 0.001 * random(layout.floats, 1)
    memory = (0.0005 * random(layout.floats, 2)).bfloat16()
    exact = encode_update(state.anchor_F, x, memory.float(), bounds, TWO_BIT, beta=0.9)
    half = encode_update(state.anchor_F, x, memory, bounds, TWO_BIT, beta=0.9, memory_of=memory.new_empty)
    assert [*map(bytes, half.wires)] == [*map(bytes, exact.wires)]
    assert torch.equal(half.memory_F, exact.memory_F.bfloat16())
    back, given = (settle_error_feedback(one, [False] * 3, TWO_BIT).float() for one in (half, exact))
    assert (back - given).abs().max() < 2**-7 * given.abs().max()


def test_encoding_commits_to_nothing():
    """The arguments are untouched, so a failed attempt simply forgets the update and goes on."""
    layout, state = nano()
    x, memory = state.anchor_F + 0.01, torch.ones(layout.floats)
    kept = [t.clone() for t in (state.anchor_F, x, memory)]
    encode_update(state.anchor_F, x, memory, part_bounds(layout.floats, (1,) * 2), TWO_BIT, beta=0.95)
    assert all(torch.equal(now, then) for now, then in zip((state.anchor_F, x, memory), kept, strict=True))


@pytest.mark.parametrize("codec", ["fp32", "int8", "2bit"])
@pytest.mark.parametrize(
    "outer",
    [Nesterov(0.7, 0.9, 0.5, 0.5, 10), SignOuter(0.01), DelayedNesterov(0.7, 0.9, 4), AgreementNesterov(0.7, 0.9)],
    ids=lambda outer: type(outer).__name__,
)
@pytest.mark.parametrize("fragment", [False, True], ids=["whole", "fragment"])
def test_a_state_that_is_staged_span_by_span_has_the_bytes_of_the_step_in_memory(codec: str, outer, fragment: bool):
    """Three rounds of several parts, one without a result; values, buffers and momentum outside a fragment stay."""
    model = nn.Sequential(nn.Linear(700, 800), nn.BatchNorm1d(800))
    layout, before = layout_of(model), initial_state(model)
    states = AgreedStateCache(MemoryStateStore({}))
    lo, hi = (200 * BLOCK, 2000 * BLOCK) if fragment else (0, layout.floats)
    for round in range(3):
        bounds = moved(part_bounds(hi - lo, (3, 1, 2)), lo)
        wires = [CODECS[codec].encode(random(b - a, round * 10 + a)) for a, b in bounds[:2]]
        parts, codecs = [*wires, None], [CODECS[codec]] * 3
        adds = {"steps": 2, "samples": 8, "tokens": 3}
        combined_N = decode_parts(parts, moved(bounds, -lo), codecs, hi - lo)
        after = apply_update(combined_N, before, outer, **adds, turn=(lo, hi))
        spans = advanced_spans(
            decoded_spans(parts, bounds, codecs), before, outer, tokens=adds["tokens"], step=before.steps
        )
        name = states.stage_spans(unchanged(before, **adds), layout, (lo, hi), spans)
        assert states.store.view(name) == state_bytes(after, layout)
        before = states.commit(name, layout)
