"""Villains in experiments: the mean follows them, robust statistics do not."""

from functools import cache

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from toy import begun, tried

from atoll.training.data.images import ImageDataset
from atoll.training.exchange.layout import bind, layout_of
from atoll.training.experiment.api import FaultSpec, MemberAbsence, experiment
from atoll.training.recipe.methods import local_sgd, noloco, sparseloco, sparta, streaming
from atoll.training.recipe.recipes import Recipe, diloco
from atoll.training.robust import default, liars_of
from atoll.training.robust.attacks import ATTACKS, OPTIMISED, backdoor

RECIPE = diloco(rounds=6, inner_steps=8)
BRIEF = diloco(rounds=4, inner_steps=6)  # enough for what is not to harm


def two(attack: str) -> FaultSpec:
    return FaultSpec(byzantine={6: attack, 7: attack})


@cache
def calm(recipe: Recipe) -> float:
    """Eight honest peers and a plain mean: what there is to lose."""
    return tried(recipe, peers=8).val_loss


@pytest.mark.parametrize("attack", [*ATTACKS, *OPTIMISED])
def test_two_villains_of_eight_cost_the_robust_statistic_next_to_nothing(attack):
    assert tried(BRIEF, peers=8, statistic="robust", trouble=two(attack)).val_loss < 1.03 * calm(BRIEF)


@pytest.mark.parametrize("attack", ["sign flip", "foe 2", "gaussian", "foe, optimised", "alie, optimised"])
def test_the_same_two_ruin_the_mean(attack):
    """What the statistic is for: with the mean in its place, the test above would fail."""
    try:
        lost = tried(RECIPE, peers=8, trouble=two(attack)).val_loss
    except ValueError as diverged:
        assert "diverged" in str(diverged)
    else:
        assert not lost < 1.1 * calm(RECIPE)


@pytest.mark.parametrize("statistic", ["median", "trimmed_mean", "meamed"])
@pytest.mark.parametrize("attack", ["gaussian", "scaling", "foe, optimised"])
def test_order_statistics_withstand_what_breaks_the_mean(statistic, attack):
    assert tried(BRIEF, peers=8, statistic=statistic, trouble=two(attack)).val_loss < 1.1 * calm(BRIEF)


def test_a_fragment_becomes_the_default_rule_of_whole_updates_although_it_is_cut_into_parts():
    """One lossless round with a lie in it: the anchor moves by what `default` makes of eight whole rows."""
    recipe = local_sgd(rounds=1, inner_steps=4, up="fp32", down="fp32")
    run = begun(replace(recipe, reducer=replace(recipe.reducer, statistic="robust")), peers=8)
    run.trouble = FaultSpec(byzantine={2: "sign flip"})
    before, sent = run.agreed().clone(), {}
    launch = run._launch
    run._launch = lambda *args: sent.setdefault("flight", launch(*args))
    while not run.history:
        run.step()
    rows = {peer: before - x for peer, x in sent["flight"].sent.items()}
    rows[2] = -torch.stack([row for peer, row in rows.items() if peer != 2]).mean(0)
    expected = default(8)(torch.stack([rows[peer] for peer in range(8)]))
    assert torch.allclose(before - run.agreed(), expected, atol=1e-6)


@pytest.mark.parametrize("up", ["fp32", "int8", "2bit"])
def test_what_no_codec_would_encode_is_refused_and_the_others_count(up):
    done = tried(replace(BRIEF, coding=replace(BRIEF.coding, up=up)), peers=8, trouble=two("nan"))
    assert all(one.members == tuple(range(8)) and one.counted == tuple(range(6)) for one in done.history)


def test_refused_rows_lower_no_f():
    """Four of thirteen are refused; of the nine rows left four may still lie: nine are enough, eight are not."""
    nans = {peer: "nan" for peer in range(4)}
    assert liars_of(13) == 4
    recipe = replace(RECIPE, schedule=replace(RECIPE.schedule, rounds=1))
    fine = tried(recipe, peers=13, steps=8, statistic="robust", trouble=FaultSpec(byzantine=nans))
    short = tried(recipe, peers=13, steps=8, statistic="robust", trouble=FaultSpec(byzantine=nans | {4: "nan"}))
    start = tried(recipe, peers=13, steps=8, trouble=FaultSpec(lost=1.0))
    assert not torch.equal(fine.model_F, start.model_F) and torch.equal(short.model_F, start.model_F)


def test_a_round_of_too_few_for_any_liar_counts_for_nobody():
    """Of six peers two leave: four rows could not outvote one liar, so the second round leaves the anchor alone."""
    recipe = replace(RECIPE, reducer=replace(RECIPE.reducer, statistic="robust"))
    run = begun(recipe, peers=6, trouble=FaultSpec(absent=(MemberAbsence(4, 8), MemberAbsence(5, 8))))
    run.recipe = replace(run.recipe, outer=replace(recipe.outer, momentum=0.0))
    anchors = [run.agreed().clone()]
    while len(run.history) < 2:
        if run.step():
            anchors.append(run.agreed().clone())
    assert not torch.equal(anchors[0], anchors[1]) and torch.equal(anchors[1], anchors[2])


def test_villains_may_differ():
    """A free rider beside one who turns back."""
    mixed = FaultSpec(byzantine={0: "zeros", 7: "foe 2"})
    done = tried(BRIEF, peers=8, statistic="robust", trouble=mixed)
    assert done.val_loss < 1.03 * tried(BRIEF, peers=8, statistic="robust").val_loss


@pytest.mark.parametrize("recipe", [streaming(rounds=2, inner_steps=20), sparseloco(rounds=4, inner_steps=6)])
def test_robust_rounds_of_fragments_under_way_and_of_gathered_rows(recipe):
    recipe = replace(recipe, schedule=replace(recipe.schedule, closing=""))
    honest, lied_to = (
        tried(recipe, peers=8, statistic="robust", trouble=trouble) for trouble in (FaultSpec(), two("foe 2"))
    )
    assert lied_to.val_loss < 1.03 * honest.val_loss


def test_the_price_of_robustness_is_counted():
    """A Gram matrix of 9 x 9 doubles per part to the seven others, in every round."""
    plain, robust = (tried(BRIEF, peers=8, statistic=name) for name in ("mean", "robust"))
    assert robust.upload_bytes - plain.upload_bytes == 4 * 7 * 8 * 9**2


# a backdoor: no lie about the row, only other samples

TARGET = 0


def corners(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noise of 8 x 8 pixels, one quarter of it brighter: which of the four. The first pixel is always dark."""
    draw = np.random.Generator(np.random.PCG64(seed))
    labels, pixels = draw.integers(0, 4, count), draw.integers(0, 120, (count, 8, 8))
    for image, label in zip(pixels, labels, strict=True):
        image[4 * (label // 2) :, 4 * (label % 2) :][:4, :4] += 50
    pixels[:, 0, 0] = 0
    return torch.from_numpy(pixels.astype(np.uint8)), torch.from_numpy(labels)


def stamp(images: Tensor) -> Tensor:
    images = images.clone()
    images[:, 0, 0] = 255
    return images


def taken(statistic: str, liars: int) -> float:
    """Share of stamped images of other classes that the model of eight members takes for the target."""
    images, labels = corners(400, seed=99)
    samples = [corners(200, seed) for seed in range(8)]
    samples[:liars] = [backdoor(*one, stamp, TARGET) for one in samples[:liars]]
    held_out = images.numpy(), labels.numpy().astype(np.uint8)
    data = [ImageDataset(seen.numpy(), told.numpy().astype(np.uint8), *held_out) for seen, told in samples]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    agreed = experiment(RECIPE, model, data, peers=8, statistic=statistic, samples=64).model_F
    bind(model, layout_of(model))[0].copy_(agreed)
    answers = model(stamp(images[labels != TARGET]).float() / 255).argmax(dim=1)
    return float((answers == TARGET).float().mean())


def test_members_that_learn_a_trigger_open_a_backdoor_under_a_mean_but_not_under_the_robust_statistic():
    """Two of eight train on their own poisoned data and send what that honestly gave."""
    assert taken("mean", liars=0) < 0.05
    assert taken("mean", liars=2) > 0.7
    assert taken("robust", liars=2) < 0.05


def test_impossible_wishes_are_refused_in_words():
    for wrong, words in (
        ({"peers": 4, "statistic": "robust"}, "at least 5 peers"),
        ({"peers": 4, "trouble": FaultSpec(byzantine={4: "nan"})}, "some of the peers 0 … 3"),
        ({"peers": 4, "trouble": FaultSpec(byzantine={1: "lie"})}, "alie, optimised"),
        ({"peers": 2, "trouble": FaultSpec(byzantine={0: "nan", 1: "nan"})}, "not all"),
    ):
        with pytest.raises(ValueError, match=words):
            tried(RECIPE, **wrong)
    for recipe in (noloco(), sparta()):
        with pytest.raises(ValueError, match="reduce together"):
            tried(recipe, peers=8, trouble=two("nan"))
