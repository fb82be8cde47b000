"""A forecast is what an experiment counts: the same bytes, before anything is trained."""

import pytest
from msgspec.structs import replace
from toy import model, tried

from atoll.training.exchange.layout import layout_of
from atoll.training.experiment.cost_model import forecast, layout_of_size
from atoll.training.models import build_model, shape_of
from atoll.training.recipe.methods import METHODS, diloco
from atoll.training.recipe.outer import RegionalNesterov

MOMENTS = 6  # rounds until DES-LOC has averaged everything


@pytest.mark.parametrize("name", METHODS)
def test_every_recipe_sends_what_was_forecast(name):
    """Four workers, a few short rounds; every line of the history costs what its fragment was said to.

    Where fragments take turns, the last round carries all of them at once.
    """
    recipe = METHODS[name]()
    regional = isinstance(recipe.outer, RegionalNesterov)
    if regional:
        recipe = replace(recipe, outer=replace(recipe.outer, every=4))
    steps = max(1, min(4, recipe.schedule.inner_steps))
    overlap = min(1, recipe.schedule.overlap)
    schedule = replace(recipe.schedule, inner_steps=steps, rounds=MOMENTS, overlap=overlap, closing="")
    done = tried(replace(recipe, schedule=schedule), peers=4)
    cost = forecast(replace(recipe, schedule=schedule), layout_of(model()), 4)
    turns = len([one for one in cost.exchanges if one.every == 1])
    last = cost.exchanges[:turns] if turns > 1 else ()
    said = [cost.exchanges[one.fragment] for one in done.history[: -1 if last else None]] + list(last)
    alone = recipe.reducer.group == "one"  # then the history has a line for every member's own round
    share, near = (0.25, 0.03) if alone else (1, 1e-6)  # and some have one more than others
    near += 0.06 * regional  # what is left over goes up at the end
    moments = [one for one in cost.exchanges if one.every > 1]
    up = share * sum(one.sent_bytes for one in said) + sum(one.sent_bytes * MOMENTS / one.every for one in moments)
    down = share * sum(one.heard_bytes for one in said) + sum(
        one.heard_bytes * MOMENTS / one.every for one in moments
    )
    assert done.upload_bytes == pytest.approx(up, rel=near)
    assert done.download_bytes == pytest.approx(down, rel=near)


def test_the_ratio_is_that_of_the_experiment():
    recipe = diloco(rounds=3, inner_steps=5)
    done, cost = tried(recipe, peers=4), forecast(recipe, layout_of(model()), 4)
    assert cost.up_ratio == pytest.approx(done.upload_ratio, rel=1e-9)
    assert cost.up_bytes * 3 == pytest.approx(done.upload_bytes)


def test_a_shape_is_the_layout_of_the_model_without_its_numbers():
    assert shape_of("gpt-tiny") == layout_of(build_model("gpt-tiny", 0))
    assert 6e9 < shape_of("llama:d=4096,l=32,h=32,f=11008,t=4096,v=32000,tie=0").floats < 7e9


def test_a_number_of_parameters_is_cut_into_matrices_that_sum_to_it():
    for parameters in (10_000, 123_457, 10**9):
        layout = layout_of_size(parameters)
        assert layout.floats == parameters == sum(slot.size for slot in layout.slots)
        assert len(layout.slots) >= 8
    with pytest.raises(ValueError, match="too few to share"):
        layout_of_size(99)
