import math

import msgspec
import pytest
import torch

from atoll.training.data import batch, load_data
from atoll.training.exchange.layout import bind, layout_of
from atoll.training.models import build_model, generate_text, loss_of, spec_of
from atoll.training.recipe.inner import (
    SPAN,
    AdamW,
    fresh_inner,
    inner_from_bytes,
    inner_pieces,
    inner_step,
    rate_at,
)
from atoll.training.recipe.merge import MixMerge, merge, where_moved
from atoll.training.recipe.recipes import Recipe, demo_recipe, diloco


def test_the_inner_step_is_torchs_adamw():
    """Twenty steps beside torch.optim.AdamW on one vector, with the schedule held flat."""
    spec = AdamW(lr=1e-2, warmup_steps=0, floor=1.0, clip_norm=1e9, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, generator=generator)
    theirs = torch.nn.Parameter(x.clone())
    adamw = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    state = fresh_inner(300)
    for step in range(20):
        gradient = torch.randn(300, generator=generator)
        theirs.grad = gradient.clone()
        adamw.step()
        inner_step(spec, state, x, gradient, step)
    assert torch.allclose(x, theirs.detach(), atol=1e-6)


def test_the_rate_follows_the_runs_step_and_ends_at_the_floor():
    spec = AdamW(lr=1.0, warmup_steps=10, total_steps=110, floor=0.1)
    assert rate_at(spec, 0) == 0.1 and rate_at(spec, 9) == 1.0
    assert rate_at(spec, 60) == pytest.approx(0.55)
    assert rate_at(spec, 110) == rate_at(spec, 10_000) == pytest.approx(0.1)


def test_one_bad_batch_moves_no_further_than_the_clip_allows():
    spec = AdamW(warmup_steps=0)
    state, gradient = fresh_inner(4), torch.full((4,), 1e6)
    inner_step(spec, state, torch.zeros(4), gradient, 0)
    assert float(gradient.norm()) == pytest.approx(1.0, rel=1e-4)


def test_training_goes_on_from_saved_bytes_as_if_nothing_had_happened():
    spec, generator = AdamW(), torch.Generator().manual_seed(0)
    gradients = [torch.randn(50, generator=generator) for _ in range(6)]
    x, state = torch.ones(50), fresh_inner(50)
    y, other = torch.ones(50), fresh_inner(50)
    for step, gradient in enumerate(gradients):
        inner_step(spec, state, x, gradient.clone(), step)
        other = inner_from_bytes(b"".join(inner_pieces(other)), 50)
        inner_step(spec, other, y, gradient.clone(), step)
    assert torch.equal(x, y)
    with pytest.raises(ValueError, match="not the inner state"):
        inner_from_bytes(b"".join(inner_pieces(other)), 51)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt-nano", 21_504), ("gpt-tiny", 167_936), ("gpt-small", 1_032_192), ("cnn-mnist", 99_550)],
)
def test_a_model_has_the_size_its_name_promises(name, parameters):
    assert layout_of(build_model(name, 0)).floats == parameters


def test_an_unknown_model_names_those_that_exist():
    with pytest.raises(ValueError, match=r"no built-in model is called 'bert'; known are gpt-nano"):
        build_model("bert", 0)


def test_building_a_model_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = build_model("gpt-nano", 1), build_model("gpt-nano", 1)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.token.weight, second.token.weight)


def test_an_untrained_gpt_knows_nothing_and_says_so():
    """The first loss is that of a uniform guess over bytes, ln 256 = 5.545."""
    tokens = torch.arange(64).view(2, 32)
    loss = loss_of(build_model("gpt-nano", 0), (tokens, tokens + 100)).item()
    assert loss == pytest.approx(math.log(256), abs=0.3)


def test_sixty_steps_learn_something_from_the_standard_library():
    """The smallest model, from 5.5 to below 3.6 nats per byte of Python."""
    data, model = load_data("stdlib"), build_model("gpt-nano", 0)
    layout = layout_of(model)
    x, gradient = bind(model, layout)
    state, spec = fresh_inner(layout.parameters), AdamW(lr=1e-2, warmup_steps=10, total_steps=60)
    for step in range(60):
        gradient.zero_()
        loss = loss_of(model, batch(data, 0, 1, step * 8, 8, 32, seed=0))
        loss.backward()
        inner_step(spec, state, x, gradient, step)
    assert loss.item() < 3.6


def test_a_long_vector_steps_as_its_pieces_do():
    """A step goes over it span by span; where spans end changes no bit."""
    spec, n = AdamW(clip_norm=1e9), 2 * SPAN + 77
    draw = torch.Generator().manual_seed(0)
    x, gradient = torch.randn(n, generator=draw), torch.randn(n, generator=draw)
    pieces = [value.clone() for value in x.split(SPAN - 1000)]
    state, states = fresh_inner(n), [fresh_inner(len(piece)) for piece in pieces]
    for step in range(2):
        inner_step(spec, state, x, gradient.clone(), step)
        for piece, own, part in zip(pieces, states, gradient.split(SPAN - 1000), strict=True):
            inner_step(spec, own, piece, part.clone(), step)
    assert torch.equal(x, torch.cat(pieces)) and torch.equal(
        state.second_P, torch.cat([s.second_P for s in states])
    )


def test_text_is_the_prompt_and_so_many_bytes_more():
    model = build_model("gpt-nano", 0)
    text = generate_text(model, "def ", 40, seed=1)
    assert text.startswith("def ") and text == generate_text(model, "def ", 40, seed=1)
    assert spec_of("gpt-nano").seq_len < 44  # the window slid


def test_merging_replaces_or_keeps_what_was_learned_meanwhile():
    x, sent, anchor = torch.tensor([5.0]), torch.tensor([4.0]), torch.tensor([1.0])
    for how, merged in (("replace", 1.0), ("delta", 2.0), (MixMerge(0.25), 2.0)):
        live = x.clone()
        merge(how, live, sent, anchor)
        assert live.tolist() == [merged]


def test_a_swap_takes_what_moved_and_leaves_the_rest_alone():
    """Of three values the anchor moved in one; with the steps taken meanwhile, as `delta` has them."""
    before, after = torch.tensor([1.0, 2.0, -0.0]), torch.tensor([1.0, 3.0, 0.0])
    x, sent = torch.tensor([5.0, 6.0, 7.0]), torch.tensor([5.0, 5.5, 6.0])
    merge("swap", x, sent, where_moved(before, after))
    assert x.tolist() == [5.0, 3.5, 7.0]


def test_a_recipe_travels_as_plain_values():
    for recipe in (diloco(), demo_recipe()):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(recipe), type=Recipe) == recipe


def test_the_outer_momentum_follows_the_number_of_rounds():
    """Effective step lr / (1 - momentum): about 2 for a short run, more for a long one."""
    assert [diloco(rounds=rounds).outer.momentum for rounds in (30, 80, 200)] == [0.5, 0.7, 0.8]
    assert diloco(rounds=200, outer_momentum=0.9).outer.momentum == 0.9


def test_an_impossible_recipe_is_refused_in_words():
    for wrong, words in (
        ({"up": "int3"}, "no codec"),
        ({"model": "x"}, "no built-in"),
        ({"batch": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            diloco(**wrong)


def test_a_recipe_cannot_change_under_anybodys_hands():
    with pytest.raises(AttributeError):
        diloco().outer.lr = 2.0


def test_answers_may_not_be_compressed_by_bytes_that_differ_between_machines():
    with pytest.raises(ValueError, match="cannot encode results"):
        diloco(down="int8+zstd:3")


def test_a_recipe_asks_no_model_for_more_context_than_it_has():
    """gpt-nano reads 32 tokens: the recipe's default is 32, and a request for more is refused."""
    assert diloco("gpt-nano").seq_len == 32
    assert diloco("gpt-small").seq_len == 64
    with pytest.raises(ValueError, match="reads at most 32 tokens"):
        diloco("gpt-nano", seq_len=64)
