import pytest
import torch
from torch import nn

from atoll.training.exchange.layout import (
    bind,
    check_same,
    difference,
    flatten,
    layout_digest,
    layout_of,
    tensors_by_name,
    unflatten,
)
from atoll.training.exchange.parameter_selection import exchanged_names
from atoll.training.models import MODELS, build_model, shape_of
from atoll.training.recipe.user_optimizer import GradientSums


def test_every_built_in_model_survives_the_trip_through_one_vector():
    """Flatten, overwrite with zeros, unflatten: the same outputs; large models are left out for time."""
    for name in [name for name in MODELS if shape_of(name).floats < 2e6]:
        model = build_model(name, 1)
        layout = layout_of(model)
        flat, counters = flatten(model, layout)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        unflatten(torch.zeros_like(flat), counters, model, layout)
        unflatten(flat, counters, model, layout)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_model_is_copied_to_the_host_whatever_new_tensors_are_told():
    """As in a loop that begins with torch.set_default_device("cuda")."""
    model = nn.BatchNorm1d(3)
    layout = layout_of(model)
    with torch.device("meta"):
        flat_F, counters_K = flatten(model, layout)
        assert GradientSums(model, layout).sum_P.is_cpu
    assert flat_F.tolist() == [*[1.0] * 3, *[0.0] * 6, *[1.0] * 3] and counters_K.tolist() == [0]


def test_tied_weights_appear_once():
    """The second name of a tensor has no slot, and writing the first writes both."""
    model = nn.ModuleDict({"read": nn.Embedding(5, 3), "write": nn.Linear(3, 5, bias=False)})
    model["write"].weight = model["read"].weight
    layout = layout_of(model)
    assert [slot.name for slot in layout.slots] == ["read.weight"] and layout.floats == 15
    unflatten(torch.ones(15), torch.zeros(0, dtype=torch.int64), model, layout)
    assert torch.equal(model["write"].weight, torch.ones(5, 3))


def test_running_statistics_are_floats_after_the_parameters_and_counters_are_apart():
    """Batch norm: mean and variance are averaged like parameters but get no momentum; the count is an integer."""
    layout = layout_of(nn.BatchNorm1d(4))
    assert [slot.kind for slot in layout.slots] == ["parameter", "parameter", "buffer", "buffer", "counter"]
    assert (layout.parameters, layout.floats, layout.counters) == (8, 16, 1)


def test_a_local_buffer_stays_local():
    """persistent=False: every member rebuilds it, no member sends it."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(7), persistent=False)
    assert layout_of(model).floats == 6


def test_two_layouts_that_differ_say_where():
    """A wider layer and an extra one: two lines, in words, and no others."""
    ours = layout_of(nn.Sequential(nn.Linear(2, 3, bias=False)))
    theirs = layout_of(nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 1, bias=False)))
    text = difference(ours, theirs)
    assert "0.weight [3, 2] float32 here, parameter 0.weight [4, 2] float32 there" in text
    assert "1.weight [1, 4] float32 is only there" in text and len(text.splitlines()) == 2
    with pytest.raises(ValueError, match="not the model of the run"):
        check_same(ours, theirs)
    assert difference(ours, ours) == "" and layout_digest(ours) != layout_digest(theirs)


def test_the_same_tensors_in_another_order_are_not_the_same_layout():
    first = layout_of(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(3, 3)}))
    second = layout_of(nn.ModuleDict({"b": nn.Linear(3, 3), "a": nn.Linear(2, 2)}))
    assert difference(first, second) == "the same tensors in another order"


def test_a_dtype_that_fp32_cannot_carry_is_refused():
    """A double would lose bits in silence, so it is named with the way out."""
    with pytest.raises(ValueError, match=r"weight is torch.float64.*model.float"):
        layout_of(nn.Linear(2, 2).double())


def test_a_bound_model_lives_in_one_vector():
    """Changing x changes the model, and a backward pass fills the one gradient vector."""
    model = build_model("gpt-nano", 0)
    layout = layout_of(model)
    x, gradient = bind(model, layout)
    x.zero_()
    assert all(bool((parameter == 0).all()) for parameter in model.parameters())
    x.add_(0.01)
    model(torch.zeros(1, 4, dtype=torch.int64)).square().sum().backward()
    assert gradient.shape == (layout.parameters,) and bool((gradient != 0).any())


def test_tensors_by_name_keep_their_dtype():
    model = nn.BatchNorm1d(2)
    layout = layout_of(model)
    tensors = tensors_by_name(*flatten(model, layout), layout)
    assert set(tensors) == set(model.state_dict()) and tensors["num_batches_tracked"].dtype == torch.int64


def test_torch_compile_leaves_no_trace_in_names():
    """Around the whole model, around a block of it, or not at all: one layout, and values go in and out alike."""
    plain, whole, block = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(3))
    block[0] = torch.compile(block[0], backend="eager")
    wrapped = [torch.compile(whole, backend="eager"), block]
    layout = layout_of(plain)
    assert layout.counters == 1
    for model in wrapped:
        assert difference(layout, layout_of(model)) == ""
        unflatten(*flatten(plain, layout), model, layout)
        assert torch.equal(flatten(model, layout)[0], flatten(plain, layout)[0])
        assert exchanged_names(model, only=["0.weight"]) == {"0.weight"}
