"""Codecs that build on what members of a round hold alike: one encodes, owners decode, each from its own copy."""

from itertools import pairwise

import pytest
import torch
from advancing import advance
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest
from atoll.crypto.digest import digest
from atoll.training.codec import CODECS, SharedKnowledge, check_codec_name, codec_named
from atoll.training.exchange.combine import combine
from atoll.training.exchange.layout import ModelLayout, TensorSlot, layout_of
from atoll.training.models import build_model
from atoll.training.recipe.error_feedback import encode_update, settle_error_feedback
from atoll.training.recipe.outer import Nesterov
from atoll.training.recipe.recipes import diloco
from atoll.training.recipe.state import (
    SharedState,
    initial_state,
    state_bytes,
    state_from_bytes,
    state_hash,
)
from atoll.training.recipe.update import RoundCodingInputs, part_bounds, part_codec, part_codecs

PEERS, ROUNDS = 2, 3
NAMES = ("randk:0.1", "randk:0.1+int8", "delta+int8", "changed+int8", "lowrank:2+int8", "topk-rice:0.1+2means+auto")


def noise(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 1e-3


class Member:
    """One peer's own copy of everything: nothing is shared with the others but bytes."""

    def __init__(self, name: str) -> None:
        model = build_model("gpt-nano", 0)
        self.name, self.layout, self.state = name, layout_of(model), initial_state(model)
        self.bounds = part_bounds(self.layout.floats, (1,) * PEERS)
        self.memory_F: torch.Tensor | None = None

    def common(self, round_index: int) -> RoundCodingInputs:
        name = state_hash(state_bytes(self.state, self.layout))
        return RoundCodingInputs(round_index, self.state, name, self.layout, 0.5)

    def encode(self, round_index: int, seed: int) -> tuple[bytes, ...]:
        self.codecs = part_codecs(self.name, self.common(round_index), self.bounds)
        x_F = self.state.anchor_F - noise(self.layout.floats, seed)
        self.update = encode_update(self.state.anchor_F, x_F, self.memory_F, self.bounds, self.codecs, 1.0)
        return tuple(map(bytes, self.update.wires))

    def answer(self, round_index: int, part: int, wires: list[bytes]) -> bytes:
        lo, hi = self.bounds[part]
        up = part_codec(self.name, self.common(round_index), self.bounds, part)
        done = combine([(1, wire) for wire in wires], hi - lo, up, CODECS["int8"])
        assert done.faults == () and done.wire is not None
        return bytes(done.wire)

    def adopt(self, answers: list[bytes], counted: list[bool]) -> None:
        after = advance(
            *(self.state, answers, self.bounds, CODECS["int8"], Nesterov(1.0, 0.5)), steps=1, samples=1, tokens=1
        )
        self.memory_F = settle_error_feedback(self.update, counted, self.codecs)
        self.state = state_from_bytes(state_bytes(after, self.layout), self.layout)  # as from another's disk


@pytest.mark.parametrize("name", NAMES)
def test_members_and_owners_agree_on_every_bit_for_several_rounds(name):
    """Three rounds, two members, every part answered by either of them: equal answers, equal states."""
    members = [Member(name) for _ in range(PEERS)]
    for round_index in range(ROUNDS):
        wires = [member.encode(round_index, 10 * round_index + i) for i, member in enumerate(members)]
        answers = []
        for part in range(PEERS):
            both = [member.answer(round_index, part, [wire[part] for wire in wires]) for member in members]
            assert both[0] == both[1]
            answers.append(both[0])
        for member in members:
            member.adopt(answers, [True] * PEERS)
    states = {state_hash(state_bytes(member.state, member.layout)) for member in members}
    assert len(states) == 1 and members[0].state.round == ROUNDS


@pytest.mark.parametrize("name", NAMES)
def test_what_was_not_counted_goes_back_into_error_feedback(name):
    """Part 1 was lost: what it carried is in the memory again, to a rounding."""
    member = Member(name)
    member.encode(0, 1)
    told = sum_of(member)
    settled = settle_error_feedback(member.update, [True, False], member.codecs)
    lo, hi = member.bounds[1]
    assert torch.equal(settled[:lo], member.update.memory_F[:lo])
    assert torch.allclose(settled[lo:hi], told[lo:hi], atol=1e-7)


def sum_of(member: Member) -> torch.Tensor:
    """What the update was before it was encoded: the decoded wires and what they left over."""
    pairs = zip(member.codecs, member.update.wires, member.bounds, strict=True)
    decoded = torch.cat([codec.decode(wire, hi - lo) for codec, wire, (lo, hi) in pairs])
    return decoded + member.update.memory_F


def test_random_places_change_with_round_part_and_state():
    """Four draws of one member: no draw can be reused, and no peer knows it before the vertex."""
    member = Member("randk:0.1+fp32")
    common = member.common(0)
    moved = RoundCodingInputs(0, common.state, Digest(digest(b"another state")), common.layout, 0.5)
    masks = []
    for shared, part in ((common, 0), (common, 1), (member.common(1), 0), (moved, 0)):
        codec = part_codec("randk:0.1+fp32", shared, member.bounds, part)
        masks.append(codec.decode(codec.encode(torch.ones(10_000)), 10_000))
    overlaps = [float((masks[i] * masks[j]).sum()) for i in range(4) for j in range(i)]
    assert all(mask.sum() == 1000 for mask in masks) and max(overlaps) < 200  # 100 expected


def test_a_member_with_another_head_is_a_fault_to_delta_not_noise():
    """After one round the references differ by that round; the wire says which one it was made from."""
    ahead, behind = Member("delta+int8"), Member("delta+int8")
    answers = [ahead.answer(0, part, [wire]) for part, wire in enumerate(ahead.encode(0, 1))]
    ahead.adopt(answers, [True] * PEERS)
    wire = ahead.encode(1, 2)[0]
    lo, hi = behind.bounds[0]
    with pytest.raises(PeerFault, match="a reference that this peer does not hold"):
        part_codec("delta+int8", behind.common(1), behind.bounds, 0).decode(wire, hi - lo)


def test_an_update_like_the_last_ones_travels_with_less_error_against_what_was_expected():
    """Members that repeat themselves: delta knows a part of what they say, int8 alone nothing."""
    errors = {}
    for name in ("int8", "delta+int8"):
        member = Member(name)
        for round_index in range(ROUNDS):
            wires = member.encode(round_index, 7)
            member.memory_F = None
            member.adopt([member.answer(round_index, part, [wire]) for part, wire in enumerate(wires)], [True] * 2)
            member.memory_F = None
        errors[name] = float(member.update.memory_F.norm())
    assert errors["delta+int8"] < 0.9 * errors["int8"]


def test_changed_leaves_out_tensors_that_did_not_move_across_part_borders():
    """Only one tensor moved, and the border of the parts cuts it: both parts send their piece of it and no more."""
    slots = (
        TensorSlot("still", "parameter", (1000,), "float32", 0),
        TensorSlot("moved", "parameter", (20, 100), "float32", 1000),
        TensorSlot("also still", "buffer", (1000,), "float32", 3000),
    )
    layout = ModelLayout(slots, 3000, 4000, 0)
    state = SharedState(torch.zeros(4000), torch.zeros(3000), torch.zeros(0, dtype=torch.int64))
    bounds = part_bounds(4000, (1,) * 2)
    common = RoundCodingInputs(0, state, Digest(digest(b"state")), layout, 0.5)
    x_F = torch.zeros(4000)
    x_F[1000:3000] = 1.0
    codecs = part_codecs("changed+fp32", common, bounds)
    update = encode_update(state.anchor_F, x_F, None, bounds, codecs, 1.0)
    cut = bounds[0][1]
    assert 1000 < cut < 3000
    assert [len(wire) for wire in update.wires] == [1 + 4 * (cut - 1000), 1 + 4 * (3000 - cut)]
    assert not update.memory_F.any()


@pytest.mark.parametrize(("length", "flags"), [(1.001e-6, [0b11, 0b1, 0b1, 0b01]), (0.999e-6, [0b01, 0, 0, 0b00])])
def test_a_tensor_that_parts_cut_is_judged_as_if_it_were_whole(length: float, flags: list[int]):
    """It moved by a millionth and a bit in 13000 values alike, of which no part has more than a third."""
    slots = (
        TensorSlot("moved a lot", "parameter", (2000,), "float32", 0),
        TensorSlot("moved little", "parameter", (130, 100), "float32", 2000),
        TensorSlot("still", "buffer", (1000,), "float32", 15000),
    )
    layout, bounds = ModelLayout(slots, 15000, 16000, 0), part_bounds(16000, (1,) * 4)
    state = SharedState(torch.zeros(16000), torch.zeros(15000), torch.zeros(0, dtype=torch.int64))
    codecs = part_codecs("changed+fp32", RoundCodingInputs(0, state, Digest(digest(b"state")), layout, 0.5), bounds)
    x_F = torch.zeros(16000)
    x_F[:2000], x_F[2000:15000] = 1.0, length / 13000**0.5
    update = encode_update(state.anchor_F, x_F, None, bounds, codecs, 1.0)
    assert [wire[0] for wire in update.wires] == flags
    left = float(update.memory_F.double().norm())
    assert left == 0 if flags[1] else left == pytest.approx(length)


@given(cuts=st.lists(st.integers(1, 999), max_size=5, unique=True), seed=st.integers(0, 99))
def test_no_more_than_the_threshold_is_left_out_of_a_tensor_however_it_is_cut(cuts: list[int], seed: int):
    """Also where it moved unevenly: by a factor of up to a thousand from one value to the next."""
    generator = torch.Generator().manual_seed(seed)
    x_N = torch.randn(1000, generator=generator) * 10 ** (torch.rand(1000, generator=generator) * 3 - 9.8)
    left = 0.0
    for lo, hi in pairwise([0, *sorted(cuts), 1000]):
        codec = codec_named("changed+fp32", SharedKnowledge(sizes=(hi - lo,), wholes=(1000,)))
        left += float((x_N[lo:hi] - codec.decode(codec.encode(x_N[lo:hi]), hi - lo)).double().square().sum())
    assert left**0.5 <= 1e-6 * (1 + 1000**0.5 / 8190)


@given(rows=st.integers(1, 40), columns=st.integers(1, 400), before=st.integers(0, 700), parts=st.integers(1, 9))
@settings(max_examples=60)
def test_every_part_of_any_layout_is_covered_by_its_pieces(rows, columns, before, parts):
    """A vector, a matrix and a convolution, cut anywhere: the codecs of the parts take exactly their values."""
    n = before + rows * columns + 2 * 3 * 3 * rows
    slots = (
        *((TensorSlot("bias", "parameter", (before,), "float32", 0),) if before else ()),
        TensorSlot("matrix", "parameter", (rows, columns), "float32", before),
        TensorSlot("conv", "buffer", (2, rows, 3, 3), "float32", before + rows * columns),
    )
    layout = ModelLayout(slots, before + rows * columns, n, 0)
    state = SharedState(noise(n, 1), noise(layout.parameters, 2), torch.zeros(0, dtype=torch.int64))
    common, bounds = RoundCodingInputs(3, state, Digest(digest(b"any")), layout, 0.9), part_bounds(n, (1,) * parts)
    x_F = noise(n, 3)
    for name in ("lowrank:1+fp32", "changed+fp32"):
        codecs = part_codecs(name, common, bounds)
        update = encode_update(state.anchor_F, x_F, None, bounds, codecs, 1.0)
        sizes = [codec.wire_bytes(hi - lo) for codec, (lo, hi) in zip(codecs, bounds, strict=True)]
        assert all(len(wire) <= size for wire, size in zip(update.wires, sizes, strict=True))
        assert float(update.memory_F.norm()) <= 1.001 * float((state.anchor_F - x_F).norm())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_may_name_them_for_the_way_up(name):
    check_codec_name(name)
    assert diloco(up=name).coding.up == name


@pytest.mark.parametrize("name", ["randk:0.1", "delta+int8", "lowrank:4", "int8+auto"])
def test_a_recipe_may_not_name_them_for_the_way_down(name):
    """An answer must not depend on what only some hold, or on a library's version."""
    with pytest.raises(ValueError, match=r"needs|cannot encode results"):
        diloco(down=name)


def test_a_name_is_checked_before_anybody_knows_anything():
    with pytest.raises(ValueError, match="no codec is called"):
        check_codec_name("randq:0.1")
    with pytest.raises(ValueError, match="needs a rank"):
        check_codec_name("lowrank:65")
    assert codec_named("changed+int8").name == "changed+int8"
