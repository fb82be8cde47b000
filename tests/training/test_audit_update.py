"""Audits of what was said: the payload beside the committed delta, and the tolerance."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.crypto.digest import digest, merkle_root
from atoll.training.codec import codec_named
from atoll.training.exchange.layout import layout_of
from atoll.training.models import build_model
from atoll.training.recipe.error_feedback import encode_update, settle_error_feedback
from atoll.training.recipe.inner import fresh_inner
from atoll.training.recipe.recipes import diloco
from atoll.training.recipe.update import part_bounds
from atoll.verification.replay_audit.judge import ExhibitHashMismatch, ReplayAccepted, ReplayMismatch, judge_update
from atoll.verification.replay_audit.replay import TrainerSnapshot, TrainingAssignment, name_of
from atoll.verification.replay_audit.state_chain import ChainClaim, StateChain, memory_name
from atoll.verification.replay_audit.tolerance import profile_here, tolerance_from

RECIPE = diloco("gpt-nano", rounds=3, inner_steps=10)
LAYOUT = layout_of(build_model("gpt-nano", 0))
BOUNDS = part_bounds(LAYOUT.floats, (1, 1, 1))
INT8 = codec_named("int8")


def noise(seed: int, size: float) -> torch.Tensor:
    return torch.randn(LAYOUT.floats, generator=torch.Generator().manual_seed(seed)) * size


class Said:
    """A round with undisputed steps, and the update that a peer made of it."""

    def __init__(self, codec=INT8, memory_F=None, owed=None) -> None:
        self.codec, self.memory_F = codec, memory_F
        self.anchor_F = noise(1, 0.1)
        self.x_F = self.anchor_F + noise(2, 1e-3)
        begin = TrainerSnapshot(self.anchor_F, torch.zeros(0, dtype=torch.int64), fresh_inner(LAYOUT.parameters))
        name, told = name_of(begin), (0, 1, 0, 0, 10)
        memory = owed or memory_name(memory_F)
        data = digest(b"data")
        self.assignment = TrainingAssignment(
            *(b"run", 2, PeerId("ada"), RECIPE, data, name.x, *told), carried=name.private, memory=memory
        )
        record = StateChain(self.assignment, begin)
        record.note(TrainerSnapshot(self.x_F, begin.counters_K, begin.inner), 10)
        self.links = record.links
        self.update = encode_update(self.anchor_F, self.x_F, memory_F, BOUNDS, codec, RECIPE.coding.beta)
        memories = memory_name(memory_F), memory_name(self.update.memory_F)
        self.claim = ChainClaim(record.head, 10, root_of(self.update.wires), profile_here(), *memories)

    def judged(self, **asked):
        told = {"assignment": self.assignment, "claim": self.claim, "links": self.links, "anchor_F": self.anchor_F}
        told |= {"x_F": self.x_F, "memory_F": self.memory_F, "bounds": BOUNDS, "codec": self.codec}
        return judge_update(**told | {"layout": LAYOUT} | asked)


def root_of(wires):
    return merkle_root(tuple(digest(wire) for wire in wires))


@pytest.mark.parametrize("memory_F", [None, noise(3, 1e-4)], ids=["first round", "with error feedback"])
def test_a_payload_is_exactly_what_comes_of_the_committed_delta(memory_F):
    """One bit of one part is enough; quantization itself is further off than the tolerance of a replay."""
    said = Said(memory_F=memory_F)
    assert isinstance(said.judged(), ReplayAccepted)
    wires = [bytearray(wire) for wire in said.update.wires]
    wires[1][-1] ^= 1
    assert isinstance(said.judged(claim=replace(said.claim, root=root_of(wires))), ReplayMismatch)


def test_a_payload_of_another_delta_is_found_although_its_chain_is_honest():
    said = Said()
    other = encode_update(said.anchor_F, said.x_F + noise(4, 1e-5), None, BOUNDS, INT8, 1.0)
    claim = replace(said.claim, root=root_of(other.wires))
    assert isinstance(said.judged(claim=claim), ReplayMismatch)
    assert isinstance(said.judged(x_F=said.x_F + noise(4, 1e-5), claim=claim), ExhibitHashMismatch)
    assert isinstance(said.judged(anchor_F=said.anchor_F * 2), ExhibitHashMismatch)


def test_error_feedback_cannot_carry_poison_from_one_round_to_the_next():
    """What it begins with is what the last claim left, or nothing; what it leaves follows from the update."""
    said, poison_F = Said(memory_F=noise(3, 1e-4)), noise(5, 1e-2)
    poisoned = encode_update(said.anchor_F, said.x_F, poison_F, BOUNDS, INT8, 1.0)
    left = memory_name(poisoned.memory_F)
    claim = replace(said.claim, root=root_of(poisoned.wires), memory=memory_name(poison_F), left=left)
    assert "error feedback" in said.judged(claim=claim, memory_F=poison_F).why
    assert said.judged(claim=replace(said.claim, left=memory_name(poison_F))).what == "error feedback"
    lost = Said(owed=memory_name(poison_F))  # a crash took it, and it began with none
    assert lost.claim.memory == ZERO_DIGEST and isinstance(lost.judged(), ReplayAccepted)


def test_what_a_fully_counted_update_leaves_is_what_the_next_begins_with():
    """So the link between two rounds costs 32 bytes: settling changes nothing where every part was counted."""
    said = Said(memory_F=noise(3, 1e-4))
    assert memory_name(settle_error_feedback(said.update, [True] * 3, INT8)) == said.claim.left
    assert memory_name(settle_error_feedback(said.update, [True, False, True], INT8)) != said.claim.left


def test_compressed_parts_are_compared_by_what_they_hold():
    """zstd's bytes differ between versions: another level packs the same values otherwise, and is honest."""
    said = Said(codec_named("int8+zstd:3"))
    other = encode_update(said.anchor_F, said.x_F, None, BOUNDS, codec_named("int8+zstd:9"), 1.0).wires
    claim = replace(said.claim, root=root_of(other))
    assert isinstance(said.judged(claim=claim, wires=other), ReplayAccepted)
    assert isinstance(said.judged(claim=claim, wires=said.update.wires), ExhibitHashMismatch)
    wrong = encode_update(said.anchor_F, said.x_F * 1.01, None, BOUNDS, codec_named("int8+zstd:9"), 1.0).wires
    assert isinstance(said.judged(claim=replace(said.claim, root=root_of(wrong)), wires=wrong), ReplayMismatch)


def test_an_update_that_is_not_finite_is_a_mismatch_and_no_crash():
    said = Said()
    x_F = said.x_F.clone()
    x_F[0] = float("inf")
    assert isinstance(said.judged(x_F=x_F), ExhibitHashMismatch)
    begin = TrainerSnapshot(said.anchor_F, torch.zeros(0, dtype=torch.int64), fresh_inner(LAYOUT.parameters))
    record = StateChain(said.assignment, begin)
    record.note(TrainerSnapshot(x_F, begin.counters_K, begin.inner), 10)
    claim = replace(said.claim, head=record.head)
    assert isinstance(said.judged(x_F=x_F, claim=claim, links=record.links), ReplayMismatch)


def test_a_tolerance_is_ten_times_the_noise_and_never_below_what_three_machines_can_show():
    assert tolerance_from([1e-6] * 20) == 1e-4
    assert tolerance_from([1e-6] * 50 + [1e-3]) == pytest.approx(1e-2)
    assert tolerance_from([1e-4] * 200 + [0.5]) == pytest.approx(1e-3)  # one freak of two hundred
