"""Every family of built-in models: what it computes, that it learns, and what its tensors become between peers."""

import math

import numpy as np
import pytest
import torch
from advancing import advance
from torch.nn import functional

from atoll.training.codec import codec_named
from atoll.training.data.images import ImageDataset
from atoll.training.data.text import TextDataset
from atoll.training.exchange.layout import bind, flatten, layout_of, unflatten
from atoll.training.experiment.api import ExperimentSimulator, FaultSpec
from atoll.training.models import build_model, generate_text, loss_of, misfit, shape_of, spec_of, task_of
from atoll.training.models.llama import rotations, turned
from atoll.training.recipe.inner import AdamW, fresh_inner, inner_step
from atoll.training.recipe.methods import data_parallel
from atoll.training.recipe.outer import Nesterov
from atoll.training.recipe.state import initial_state

SMALL = {
    "gpt:d=32,l=2,h=2,t=16": (16,),
    "llama:d=32,l=2,h=4,kv=2,t=16": (16,),
    "llama:d=32,l=1,h=2,t=16,v=300,tie=0": (16,),
    "resnet18:w=4,i=1": (28, 28),
    "resnet18:w=4,c=7": (32, 32, 3),
    "vgg11:w=4,i=1": (28, 28),
    "vgg11:w=4,c=7": (40, 36, 3),
}


def batch_for(name: str, shape: tuple[int, ...], size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if task_of(name) == "text":
        tokens = torch.randint(0, 250, (size, shape[0] + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    return torch.rand(size, *shape, generator=generator), torch.arange(size) % 7


@pytest.mark.parametrize(("name", "shape"), SMALL.items())
def test_every_family_learns_a_tiny_batch_by_heart(name, shape):
    """Scores have the promised shape, and eight steps on the same six samples lower the loss."""
    model, batch = build_model(name, 0), batch_for(name, shape)
    numbers = spec_of(name).numbers
    wanted = (6, *shape[:1], numbers["v"]) if task_of(name) == "text" else (6, numbers["c"])
    assert model(batch[0]).shape == wanted
    layout = layout_of(model)
    x_F, gradient_P = bind(model, layout)
    x_P, state = x_F[: layout.parameters], fresh_inner(layout.parameters)
    losses = []
    for step in range(8):
        gradient_P.zero_()
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
        inner_step(AdamW(lr=1e-2, warmup_steps=0, total_steps=100), state, x_P, gradient_P, step)
    assert losses[-1] < 0.9 * losses[0]
    model.eval()
    assert math.isfinite(loss_of(model, batch).item())


@pytest.mark.parametrize("name", SMALL)
def test_every_family_travels_as_one_vector_and_a_seed_says_it_all(name):
    first, again, other = (build_model(name, seed) for seed in (5, 5, 6))
    layout = layout_of(first)
    assert layout == shape_of(name)
    assert torch.equal(flatten(first, layout)[0], flatten(again, layout)[0])
    assert not torch.equal(flatten(first, layout)[0], flatten(other, layout)[0])
    unflatten(*flatten(first, layout), other, layout)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in first.state_dict().items())


# ---- llama -----------------------------------------------------------------------------------------------------


def test_a_tied_table_travels_once():
    tied, two = (shape_of(f"llama:d=32,l=1,h=2,t=16,tie={tie}") for tie in (1, 0))
    assert [slot.name for slot in tied.slots if slot.shape == (256, 32)] == ["model.embed_tokens.weight"]
    assert two.floats - tied.floats == 256 * 32


def test_grouped_queries_are_attention_with_shared_keys():
    """Four heads on two groups: the same as four groups with weights that repeat pairwise."""
    grouped, full = (build_model(f"llama:d=32,l=1,h=4,kv={kv},t=16", 0) for kv in (2, 4))
    weights = grouped.state_dict()
    for name in ("k_proj", "v_proj"):
        key = f"model.layers.0.self_attn.{name}.weight"
        weights[key] = weights[key].view(2, 8, 32).repeat_interleave(2, 0).reshape(32, 32)
    full.load_state_dict(weights)
    tokens = torch.arange(16).view(1, 16)
    assert torch.allclose(grouped(tokens), full(tokens), atol=1e-5)


def test_rotary_scores_depend_on_distance_alone():
    """Two fixed vectors, three apart, at the beginning and further on: the same product, and another one closer."""
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = rotations(10_000, 8, 20, q)
    score = [
        float((turned(q, cos[i : i + 1], sin[i : i + 1]) * turned(k, cos[j : j + 1], sin[j : j + 1])).sum())
        for i, j in ((3, 0), (19, 16), (17, 16))
    ]
    assert score[0] == pytest.approx(score[1], abs=1e-4) and abs(score[0] - score[2]) > 1e-2


def test_no_model_of_text_sees_the_future():
    for name in ("gpt:d=32,l=2,h=2,t=16", "llama:d=32,l=2,h=4,kv=2,t=16"):
        model = build_model(name, 0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))
        tokens = torch.arange(16).view(1, 16)
        changed = tokens.clone()
        changed[0, 9] = 200
        before, after = model(tokens)[0], model(changed)[0]
        assert torch.equal(before[:9], after[:9]) and not torch.equal(before[9:], after[9:])


def test_a_llama_writes_and_one_of_another_alphabet_says_why_not():
    assert generate_text(build_model("llama:d=32,l=1,h=2,t=8", 0), "def ", 12, seed=1).startswith("def ")
    with pytest.raises(ValueError, match="not bytes"):
        generate_text(build_model("llama:d=32,l=1,h=2,t=8,v=300", 0), "def ", 1, seed=1)


# ---- batch norm ------------------------------------------------------------------------------------------------


def test_running_statistics_are_averaged_and_counters_take_the_maximum():
    """Two peers see different pixels: after the round their statistics are halfway, the count is the larger."""
    name = "resnet18:w=4,i=1"
    start = build_model(name, 0)
    layout, state = layout_of(start), initial_state(start)
    seen = []
    for peer, steps in ((0, 1), (1, 3)):
        model = build_model(name, 0).train()
        for _ in range(steps):
            model(torch.full((4, 28, 28), 0.2 + 0.6 * peer) + 0.1 * torch.rand(4, 28, 28))
        seen.append(flatten(model, layout))
    mean_F = state.anchor_F - (seen[0][0] + seen[1][0]) / 2
    fp32, whole = codec_named("fp32"), ((0, layout.floats),)
    counters = [counters_K.tolist() for _, counters_K in seen]
    after = advance(
        state,
        [fp32.encode(mean_F)],
        whole,
        fp32,
        Nesterov(1.0, 0.9),
        steps=1,
        samples=1,
        tokens=1,
        counters=counters,
    )
    buffers = slice(layout.parameters, layout.floats)
    assert layout.floats > layout.parameters and layout.counters == 20
    assert torch.allclose(after.anchor_F[buffers], (seen[0][0][buffers] + seen[1][0][buffers]) / 2, atol=1e-6)
    assert set(after.counters_K.tolist()) == {3}


def test_a_variance_that_a_codec_pushed_below_zero_counts_as_zero():
    model = build_model("resnet18:w=4,i=1", 0)
    model(torch.rand(4, 28, 28))
    model.bn1.running_var[0] = -1e-3
    assert bool(model.eval()(torch.rand(2, 28, 28)).isfinite().all())


def test_gradients_are_gathered_and_statistics_averaged_side_by_side():
    """Data parallelism of one worker: the buffers of the agreed model are the worker's own after its step."""
    labels = np.arange(40, dtype=np.uint8) % 4
    pixels = np.random.default_rng(0).integers(0, 255, (40, 16, 16, 3), np.uint8)
    run = ExperimentSimulator(
        data_parallel("resnet18:w=4,c=4", rounds=2),
        build_model("resnet18:w=4,c=4", 0),
        *(ImageDataset(pixels, labels, pixels, labels), 1, 2, FaultSpec(), loss_of),
    )
    before, x_F = run.agreed().clone(), run.workers[0].x_F
    run.step()
    buffers = slice(run.layout.parameters, None)
    assert not torch.equal(run.agreed()[buffers], before[buffers])
    assert torch.allclose(run.agreed()[buffers], x_F[buffers]) and not torch.equal(run.agreed(), before)


def test_small_images_stand_in_the_middle_of_a_black_frame():
    model = build_model("vgg11:w=4,i=1", 0).eval()
    images = torch.rand(2, 28, 28)
    assert torch.allclose(model(images), model(functional.pad(images, (2, 2, 2, 2))), atol=1e-5)


# ---- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bert", "no built-in model is called 'bert'; known are gpt-nano"),
        ("gpt", "lacks d, width; write gpt:d=<width>"),
        ("gpt:d=64,l=3,h=4", "lacks t, tokens read at once"),
        ("gpt:d=64,l=3,h=4,t=64,x=1", "'x=1' is no option of gpt"),
        ("gpt:d=64,d=64,l=3,h=4,t=64", "'d=64' is no option of gpt, or repeated"),
        ("gpt:d=64,l=0,h=4,t=64", "l=0, layers, must be 1 to 256"),
        ("gpt:d=99999,l=3,h=4,t=64", "d=99999, width, must be 1 to 16384"),
        ("gpt:d=٦٤,l=3,h=4,t=64", "is no option of gpt"),
        ("resnet18:", "'' is no option of resnet18"),
        ("cnn", "no built-in model is called 'cnn'"),
    ],
)
def test_a_name_that_stands_for_nothing_says_what_to_write(name, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        spec_of(name)


def test_numbers_that_do_not_divide_are_refused_before_anything_is_built():
    """By the name alone, so that a founder hears it, not its trainer."""
    for name, words in (
        ("gpt:d=64,l=1,h=3,t=8", "h=3 does not divide d=64"),
        ("llama:d=64,l=1,h=4,kv=3,t=8", "kv=3 does not divide h=4"),
        ("llama:d=36,l=1,h=4,t=8", "cannot be rotated in pairs"),
    ):
        with pytest.raises(ValueError, match=words):
            spec_of(name)


def test_a_model_and_data_that_do_not_fit_are_told_apart():
    text = TextDataset(np.array([3, 299], np.uint16), np.array([5], np.uint16))
    gray = np.zeros((4, 28, 28), np.uint8)
    colors, labels = np.zeros((4, 32, 32, 3), np.uint8), np.array([0, 1, 2, 11], np.uint8)
    digits, photos = (
        ImageDataset(gray, labels % 10, gray, labels % 10),
        ImageDataset(colors, labels, colors, labels),
    )
    assert not misfit("cnn-mnist", digits) and not misfit("resnet18-mnist", digits)
    assert not misfit("vgg11:c=12", photos) and not misfit("gpt:d=32,l=1,h=2,t=8,v=300", text)
    for name, data, words in (
        ("gpt-nano", digits, "learns from text, the data is images"),
        ("cnn-mnist", text, "learns from images, the data is text"),
        ("gpt-nano", text, "token 299; set v="),
        ("cnn-mnist", photos, "28 x 28"),
        ("resnet18-mnist", photos, "set i=3"),
        ("vgg11-cifar", photos, "set c=12"),
    ):
        assert words in misfit(name, data)
