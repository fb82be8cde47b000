"""What of a model travels, and that the rest, its base, is named, watched and refused where it is another."""

import struct

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import atoll
from atoll.crypto.digest import digest
from atoll.training.data import TextDataset
from atoll.training.exchange.layout import base_digest, difference, flatten, layout_digest, layout_of, unflatten
from atoll.training.exchange.parameter_selection import FrozenBaseGuard, check_optimizer, exchanged_names
from atoll.training.models import build_model
from atoll.training.recipe.methods import diloco

GOLDEN = (
    "85a5736c6f74739195a462696173a9706172616d657465729101a7666c6f6174333200aa706172616d657465727301a6666c6f61747301a8"
    "636f756e7465727300a4626173659194a6776569676874920102a7666c6f61743332c42054847fa2028a3457068a78ba8e6a086cccf672de"
    "f025d7e4cb2761b538edbf3f"
)  # the digest in it is blake3(b"\0\0\x80\x3f\0\0\0\xc0")


class Lora(nn.Module):
    """A frozen linear layer and two small factors beside it."""

    def __init__(self, inner: nn.Linear, rank: int) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, inner.in_features) / inner.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x @ self.lora_a.T @ self.lora_b.T


def tuned(seed: int = 0) -> nn.Module:
    """Frozen layers with a batch norm between them, factors beside the first, a head that trains with its own."""
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).requires_grad_(False)
    body[0] = Lora(body[0], 2)
    return nn.ModuleDict({"body": body, "norm": nn.BatchNorm1d(4), "head": nn.Linear(4, 2)})


def test_a_frozen_base_does_not_travel():
    """Factors, head and its norm with statistics: 8·2·2 + 8 + 10 parameters, 8 floats; the body is named only."""
    layout = layout_of(tuned())
    assert [slot.name for slot in layout.slots if slot.kind == "parameter"] == [
        *("body.0.lora_a", "body.0.lora_b", "norm.weight", "norm.bias", "head.weight", "head.bias")
    ]
    assert (layout.parameters, layout.floats, layout.counters) == (50, 58, 1)
    assert [one.name for one in layout.held if "running" in one.name] == [
        *("body.1.running_mean", "body.1.running_var")
    ]
    model = tuned()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    unflatten(torch.ones(58), torch.ones(1, dtype=torch.int64), model, layout)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert moved <= {slot.name for slot in layout.slots} and "head.weight" in moved


def test_a_layout_without_a_base_has_the_bytes_it_always_had():
    """A model that trains whole: nothing about bases in what genesis binds, and the digest of every run so far."""
    layout = layout_of(build_model("gpt-nano", 0))
    assert b"base" not in msgspec.msgpack.encode(layout)
    assert layout_digest(layout).hex()[:16] == "9984371bae941158"
    frozen = build_model("gpt-nano", 0).requires_grad_(False)
    assert layout_of(frozen, only=["*"]) == layout, "named whole, a frozen model travels whole"


def test_golden_bytes_of_a_layout_with_a_base():
    """specs/layout.md: one exchanged tensor, one that stays."""
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0]]))
    model.weight.requires_grad_(False)
    assert msgspec.msgpack.encode(layout_of(model)).hex() == GOLDEN
    assert layout_of(model).held[0].digest == digest(struct.pack("<2f", 1.0, -2.0))


def test_another_base_is_named():
    """One value of one frozen tensor differs: that tensor, and no other, is in the words."""
    ours, theirs = tuned(), tuned()
    with torch.no_grad():
        theirs["body"][2].weight[0, 0] += 1e-3
        theirs["head"].weight.add_(1)  # exchanged, so it may differ
    here, there = layout_of(ours), layout_of(theirs)
    assert difference(here, there) == "! base body.2.weight [4, 8] has other values here than there"
    assert layout_digest(here) != layout_digest(there) and base_digest(here) != base_digest(there)
    assert layout_of(tuned()) == here


def test_frozen_here_and_trained_there_is_said_as_such():
    whole = tuned().requires_grad_(True)
    text = difference(layout_of(whole), layout_of(tuned()))
    assert "parameter body.2.bias [4] float32 is exchanged here, and frozen there" in text


def test_a_base_in_another_dtype_is_another_base():
    """Halved by one member: its base computes otherwise, whatever the values are."""
    half = tuned()
    half["body"][2].to(torch.bfloat16)
    assert "base body.2.weight [4, 8] float32 here, [4, 8] bfloat16 there" in difference(
        layout_of(tuned()), layout_of(half)
    )


def test_names_choose_what_travels():
    """By pattern, whatever is frozen; a tied tensor by any of its names; a buffer by its own."""
    model = tuned().requires_grad_(True)
    assert exchanged_names(model, ["*lora*"]) == {"body.0.lora_a", "body.0.lora_b"}
    assert "body.1.running_mean" in exchanged_names(model, ["*lora*", "*.running_*"])
    tied = nn.ModuleDict({"read": nn.Embedding(5, 3), "body": nn.Linear(3, 3), "write": nn.Linear(3, 5, False)})
    tied["write"].weight = tied["read"].weight
    layout = layout_of(tied, ["write.*"])
    assert [slot.name for slot in layout.slots] == ["read.weight"]
    assert [one.name for one in layout.held] == ["body.weight", "body.bias"]


def test_a_choice_that_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match=r"matches hed\.\*; its parameters are called"):
        exchanged_names(tuned(), ["*lora*", "hed.*"])
    with pytest.raises(ValueError, match="none of its parameters requires a gradient; unfreeze"):
        exchanged_names(tuned().requires_grad_(False))
    with pytest.raises(ValueError, match="only buffers are named"):
        exchanged_names(tuned(), ["*.running_mean"])


def test_an_optimizer_that_trains_what_nobody_sends_is_refused():
    """Frozen parameters in its groups are harmless; one that trains, or one made before the adapters, is not."""
    model = tuned()
    going = exchanged_names(model)
    check_optimizer(model, going, model.parameters())
    model["body"][2].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"trains body\.2\.bias, which this run does not exchange"):
        check_optimizer(model, going, model.parameters())
    with pytest.raises(ValueError, match="holds none of the parameters"):
        check_optimizer(model, going, [model["body"][2].weight])


def change_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model["body"][2].weight.add_(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model["body"].requires_grad_(True), "requires_grad changed after"),
        (lambda model: model["head"].requires_grad_(False), r"head\.weight, head\.bias: requires_grad changed"),
        (change_weight, r"body\.2\.weight changed, but"),
        (lambda model: model["body"][1](torch.randn(4, 8)), r"running_mean.*call \.eval\(\)"),
        (lambda model: model["body"][2].to(torch.bfloat16), r"body\.2\.weight"),
    ],
)
def test_a_base_that_moves_is_noticed(change, words):
    """Unfrozen, frozen, written to, statistics that go on, another dtype: each by its name and with a way out."""
    model = tuned()
    base = FrozenBaseGuard(model, exchanged_names(model), by_name=False)
    with torch.no_grad():
        model["head"].weight.add_(1)
        model["norm"](torch.randn(4, 4))
    assert base.problem() == ""
    change(model)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(base.problem())


def test_what_is_named_may_be_frozen_for_a_while():
    """Generator and discriminator in turn: with names, requires_grad says nothing about what is exchanged."""
    model = tuned()
    base = FrozenBaseGuard(model, exchanged_names(model, ["head.*", "*lora*"]), by_name=True)
    model["head"].requires_grad_(False)
    assert base.problem() == ""


def tuned_gpt() -> nn.Module:
    torch.manual_seed(0)
    model = build_model("gpt-nano", 0).requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.up, block.down = (Lora(one, 16) for one in (block.qkv, block.up, block.down))
    return model


LETTERS = np.frombuffer(b"the ring of islands " * 400, dtype=np.uint8)
WORDS = TextDataset(LETTERS, LETTERS[:2000])


def test_an_experiment_counts_adapters_only():
    """One frozen base under all workers, as it was; bytes are those of a model as small as the adapters."""
    model = tuned_gpt()
    layout = layout_of(model)
    before = model.token.weight.clone()
    recipe = diloco("gpt-nano", rounds=2, inner_steps=4)
    done = atoll.experiment(recipe, model, WORDS, peers=2, samples=64)
    whole = atoll.experiment(recipe, "gpt-nano", WORDS, peers=2, samples=64)
    assert torch.equal(model.token.weight, before) and done.model_F.numel() == layout.floats
    assert not torch.equal(done.model_F, flatten(model, layout)[0])
    share = layout.floats / whole.model_F.numel()
    assert done.upload_bytes == pytest.approx(share * whole.upload_bytes, rel=0.05)
    assert done.val_loss < 5.55


def test_an_experiment_trains_what_is_named_and_no_frozen_one():
    model = build_model("gpt-nano", 0)
    recipe = diloco("gpt-nano", rounds=1, inner_steps=2)
    done = atoll.experiment(
        recipe,
        model,
        WORDS,
        peers=2,
        samples=32,
        options=atoll.ExperimentOptions(only=["blocks.*.up.*", "blocks.*.down.*"]),
    )
    assert done.model_F.numel() == 2 * 4 * 32 * 32 and all(p.requires_grad for p in model.parameters())
    model.blocks.requires_grad_(False)
    with pytest.raises(ValueError, match="names frozen parameters"):
        atoll.experiment(recipe, model, WORDS, peers=2, options=atoll.ExperimentOptions(only=["blocks.*.up.*"]))
