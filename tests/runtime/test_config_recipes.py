"""What a run.toml makes of a recipe: which real runs can do, what each takes, and how much work a round is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from written import trouble, trusted

from atoll.base.errors import PeerFault, UsageError
from atoll.base.workload import AdaptiveWorkloadPolicy, LossAdaptiveBatchSize
from atoll.peer.config.sections import RunConfig
from atoll.peer.config.validate import EXPERIMENTS, RECIPES
from atoll.peer.settings import RULES, RunSettings, decode_settings, encode_settings
from atoll.policy.plan import RoundSettings, StragglerPolicy
from atoll.runtime.config import load_config, recipe_of, settings_of
from atoll.runtime.training_spec import founding_blobs, parse_training_spec, start_of_built_in
from atoll.training.recipe.inner import AdamW, GradientSumOptimizer, Muon
from atoll.training.recipe.methods import METHODS, cooperative
from atoll.training.recipe.recipes import Recipe, diloco, for_real_run, over_tokens, swarm_problem
from atoll.training.recipe.schedule import SyncSchedulePhase


@pytest.mark.parametrize("name", ["auto", "streaming", "muloco"])
def test_owners_remember_what_their_answers_left_out_where_they_are_believed(name: str):
    """Two bits both ways and the same owners every round; elsewhere answers are finer, and owners drawn."""

    def founded(*sets: str) -> tuple[Recipe, RunSettings]:
        config = load_config(None, (f"train.recipe={name}", "model.name=gpt-tiny", *sets), {})
        recipe = recipe_of(config)
        return recipe, founding_blobs(start_of_built_in(recipe, "stdlib"), settings_of(config, recipe)).settings

    recipe, settings = founded()
    assert (recipe.coding.down, recipe.coding.answer) == ("2bit", "remembered")
    assert settings.steady is True and settings.topology == "butterfly"
    for sets in (("run.trust=community", "run.start_peers=4"), ("sync.topology=tree",)):
        recipe, elsewhere = founded(*sets)
        assert (recipe.coding.down, recipe.coding.answer) == ("int8", "once")
        assert b"steady" not in encode_settings(elsewhere)
    lying = replace(settings, round=replace(settings.round, quorum="two-thirds"))
    with pytest.raises(PeerFault, match="no member could check their owners"):
        parse_training_spec(lying)


def test_a_parameter_server_is_a_star():
    def founded(topology: str) -> RunSettings:
        sets = ("train.recipe=parameter_server", "model.name=gpt-tiny", f"sync.topology={topology}")
        config = load_config(None, sets, {})
        recipe = recipe_of(config)
        return founding_blobs(start_of_built_in(recipe, "stdlib"), settings_of(config, recipe)).settings

    assert founded("auto").topology == founded("star").topology == "star"
    slip = trouble("train.recipe=parameter_server", "sync.topology=tree")
    assert "one owner of everything" in slip.what and "data_parallel" in slip.fix


def test_recipes_are_those_that_exist_and_what_real_runs_cannot_do_is_refused():
    """Every method stands in one of the two lists, in the right one; those of the second are answered `not yet`."""
    assert set(RECIPES) | set(EXPERIMENTS) == {*METHODS, "demo"} and not set(RECIPES) & set(EXPERIMENTS)
    for name in set(RECIPES) - {"demo"}:
        assert swarm_problem(for_real_run(METHODS[name]())) == ""
    for name in EXPERIMENTS:
        assert swarm_problem(for_real_run(METHODS[name]()))
        refused = trouble(f"train.recipe={name}")
        assert refused.code == "E-CFG-04" and "atoll.experiment" in refused.cause
    assert trouble("train.recipe=sgd").code == "E-CFG-02"


def test_a_recipe_of_another_name_takes_what_the_file_says():
    sets = ("train.recipe=opendiloco", "train.inner_steps=20", "run.rounds=10", "train.lr=0.001")
    recipe = recipe_of(load_config(None, sets, {}))
    assert (recipe.coding.up, recipe.outer.momentum, recipe.inner.lr) == ("fp16", 0.9, 0.001)
    assert (recipe.inner.total_steps, recipe.inner.warmup_steps) == (200, 20)


def test_the_rate_of_a_recipe_with_muon_inside_is_that_of_what_muon_leaves_alone():
    """Its own follows in proportion."""
    sets = ("train.recipe=muloco", "run.rounds=80", "train.lr=0.001", "train.weight_decay=0.05")
    recipe = recipe_of(load_config(None, sets, {}))
    assert isinstance(recipe.inner, Muon)
    assert (recipe.inner.rest.lr, recipe.inner.lr) == (0.001, 0.005)
    assert (recipe.inner.weight_decay, recipe.inner.rest.weight_decay) == (0.05, 0.05)
    assert (recipe.outer.momentum, recipe.inner.rest.total_steps) == (0.7, 80 * 30)


def test_a_number_that_the_inner_optimizer_does_not_have_is_refused():
    assert recipe_of(load_config(None, ("train.recipe=fedavg", "train.lr=0.2"), {})).inner.lr == 0.2
    refused = pytest.raises(UsageError, match="SGD has no weight_decay")
    with refused:
        recipe_of(load_config(None, ("train.recipe=fedavg", "train.weight_decay=0.1"), {}))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"round": RoundSettings(quorum="two-thirds")}, "no member could check their owners"),
        ({"statistic": "median"}, "median is another statistic"),
        ({"topology": "tree"}, "cannot be made of partial sums"),
    ],
)
def test_a_recipe_whose_owners_must_be_believed_is_founded_only_where_they_are(change: dict[str, Any], why: str):
    """And it goes through a butterfly, whatever `auto` would choose, with as many members as it needs."""
    beginning = start_of_built_in(cooperative("gpt-nano"), "stdlib")
    settings = founding_blobs(beginning, RunSettings(topology="auto")).settings
    assert (settings.topology, settings.min_peers, settings.start_peers) == ("butterfly", 3, 3)
    with pytest.raises(UsageError, match=why) as refused:
        founding_blobs(beginning, RunSettings(**change))
    assert refused.value.code == "E-RUN-18"
    forged = replace(settings, **change)
    with pytest.raises(PeerFault, match=why):
        parse_training_spec(forged)


def test_cooperative_runs_keep_the_records_that_their_rows_weigh_by_unless_told_not_to():
    def records(*sets: str) -> bool:
        config = load_config(None, ("model.name=gpt-nano", *sets), {})
        return settings_of(config, recipe_of(config)).reputed

    assert records("train.recipe=cooperative") and not records("train.recipe=diloco")
    assert not records("train.recipe=cooperative", "run.reputation=false")


def test_changes_of_rhythm_travel_in_rounds_and_are_refused_where_rounds_have_one_length(book: str):
    """Ten rounds of 50 in three of 50 and fifty of 7; genesis says both ways, and neither may be changed alone."""
    sets = ("model.name=gpt-nano", "run.rounds=10", "train.inner_steps=50", f"data.source={book}")
    config = load_config(None, (*sets, "sync.phases=0.3:7:topk:0.1+2bit"), {})
    recipe = recipe_of(config)
    assert recipe.schedule.phases == (SyncSchedulePhase(0.3, 7, "topk:0.1+2bit"),)
    settings = founding_blobs(start_of_built_in(recipe, book), settings_of(config, recipe)).settings
    assert settings.round.rhythm == ((1, 50), (2, 50), (1, 7), (49, 7)) and settings.rounds == 53
    steps = [settings.round.steps_after(trained) for trained in (0, 2, 3, 52, 53)]
    assert steps == [50, 50, 7, 7, 50]
    forged = replace(settings, round=replace(settings.round, rhythm=UNSET))
    with pytest.raises(PeerFault, match="round lengths in the recipe and in the settings"):
        parse_training_spec(forged)
    for more, why in {
        "sync.overlap=2": "whole models and synchronous rounds",
        "sync.apart=merge": "rounds of one length",
        "train.round_time=60": "rounds that follow the run",
        "run.rounds=0": "no end",
    }.items():
        config = load_config(None, (*sets, "sync.phases=0.3:7", more), {})
        recipe = recipe_of(config)
        with pytest.raises(UsageError, match=why):
            founding_blobs(start_of_built_in(recipe, book), settings_of(config, recipe))
    with pytest.raises(UsageError, match="is no phase"):
        recipe_of(load_config(None, (*sets, "sync.phases=later"), {}))


def test_rounds_that_wait_for_a_quorum_are_founded_only_among_friends():
    """Decoupled as its paper has it, diloco with a quorum of one's own; nowhere where the first one may lie."""
    sets = ("train.recipe=decoupled", "sync.quorum=2", "sync.fragments=2", "model.name=gpt-nano")
    config = load_config(None, sets, {})
    recipe = recipe_of(config)
    assert (recipe.reducer.quorum, recipe.reducer.grace, recipe.reducer.statistic) == (2, 2, "radial")
    assert (recipe.merge, recipe.schedule.overlap, recipe.schedule.turn_steps) == ("delta", 2, 12)
    settings = founding_blobs(start_of_built_in(recipe, "stdlib"), settings_of(config, recipe)).settings
    assert settings.round.acceptance == StragglerPolicy(2, 2) and settings.topology == "butterfly"
    assert decode_settings(encode_settings(settings)) == settings
    assert b"\xaaacceptance\x82\xa6quorum\x02\xa5grace\x02" in encode_settings(settings), "as specs/round.md has it"
    lying = replace(settings.round, quorum="two-thirds")
    for change in ({"topology": "tree"}, {"audit_rate": 0.1}, {"round": lying}):
        with pytest.raises(PeerFault, match="quorum of updates"):
            decode_settings(encode_settings(replace(settings, **change)))

    sets = ("sync.quorum=3", "sync.grace=4", "model.name=gpt-nano", "run.start_peers=4")
    assert "first to commit" in (refused := trouble(*sets, "run.trust=community")).cause
    assert refused.code == "E-CFG-11" and "sync.quorum = 0" in refused.fix
    recipe = recipe_of(load_config(None, sets, {}))
    with pytest.raises(UsageError, match="first to commit") as refused:
        founding_blobs(start_of_built_in(recipe, "stdlib"), RunSettings(round=RoundSettings(quorum="two-thirds")))
    assert refused.value.code == "E-RUN-19"
    mean = founding_blobs(start_of_built_in(recipe, "stdlib"), RunSettings(topology="auto")).settings
    assert mean.round.acceptance == StragglerPolicy(3, 4) and mean.topology == "butterfly"
    assert swarm_problem(recipe_of(load_config(None, ("train.recipe=eager", "sync.quorum=2"), {})))
    with pytest.raises(UsageError, match="changes nothing"):
        recipe_of(load_config(None, ("sync.grace=2",), {}))
    everybody = recipe_of(load_config(None, ("train.recipe=decoupled", "sync.quorum=0"), {}))
    assert (everybody.reducer.quorum, everybody.reducer.grace) == (0, 0)
    plain = recipe_of(load_config(None, ("model.name=gpt-nano",), {}))
    assert b"acceptance" not in encode_settings(
        founding_blobs(start_of_built_in(plain, "stdlib"), RunSettings()).settings
    )


def test_recipes_that_agree_on_every_step_take_the_numbers_of_their_outer_step_and_no_others():
    """Data parallelism's optimizer is the outer one; DeMo's has a rate and a warm-up; neither has inner steps."""
    sets = ("train.recipe=data_parallel", "train.lr=0.01", "train.clip_norm=0.5", "run.rounds=300")
    config = load_config(None, (*sets, "model.name=gpt-nano"), {})
    recipe = recipe_of(config)
    assert isinstance(recipe.inner, GradientSumOptimizer) and isinstance(recipe.outer, AdamW)
    outer = recipe.outer
    assert (outer.lr, outer.clip_norm, outer.total_steps, outer.warmup_steps) == (0.01, 0.5, 300, 30)
    settings = founding_blobs(start_of_built_in(recipe, "stdlib"), settings_of(config, recipe)).settings
    assert (settings.rounds, settings.round.inner_steps, settings.topology) == (300, 1, "auto")
    demo = recipe_of(load_config(None, ("train.recipe=demo_", "train.lr=0.002", "train.warmup_steps=7"), {}))
    assert (demo.coding.up, demo.coding.beta) == ("demo", 0.999)
    assert (demo.outer.lr, demo.outer.warmup_steps) == (0.002, 7)
    with pytest.raises(UsageError, match="no member could check their owners"):
        founding_blobs(start_of_built_in(demo, "stdlib"), RunSettings(round=RoundSettings(quorum="two-thirds")))
    for wrong, what in (
        ("train.inner_steps=4", "data_parallel has no train.inner_steps"),
        ("sync.up=int8", "data_parallel has no sync.up"),
        ("sync.overlap=1", "overlap"),
    ):
        with pytest.raises(UsageError, match=what):
            recipe_of(load_config(None, ("train.recipe=data_parallel", wrong), {}))
    with pytest.raises(UsageError, match=r"demo_ has no train\.weight_decay"):
        recipe_of(load_config(None, ("train.recipe=demo_", "train.weight_decay=0.1"), {}))


def test_overlap_and_fragments_stretch_over_the_plan_as_they_do_over_the_schedule():
    """Streaming: 4 fragments of 32 steps are 188 rounds of 8."""
    config = load_config(None, ("train.recipe=streaming", "sync.overlap=3"), {})
    recipe = recipe_of(config)
    assert (recipe.schedule.fragments, recipe.schedule.overlap, recipe.merge) == (4, 3, "delta")
    settings = settings_of(config, recipe)
    assert (settings.rounds, settings.round.inner_steps) == (188, 8)
    plain = recipe_of(load_config(None, ("sync.overlap=5", "sync.fragments=2", "train.inner_steps=20"), {}))
    assert (plain.schedule.overlap, plain.schedule.turn_steps, plain.merge) == (5, 10, "delta")
    unequal = recipe_of(load_config(None, ("sync.fragments=3",), {}))
    with pytest.raises(UsageError, match="3 fragments in rounds of 50 steps"):
        founding_blobs(start_of_built_in(unequal, "stdlib"), RunSettings())
    crowded = recipe_of(load_config(None, ("sync.overlap=25", "sync.fragments=2"), {}))
    with pytest.raises(UsageError, match="needs more than 50 steps"):
        founding_blobs(start_of_built_in(crowded, "stdlib"), RunSettings())
    tiny = recipe_of(load_config(None, ("sync.fragments=10", "model.name=gpt-nano"), {}))
    with pytest.raises(UsageError, match="cannot be cut into 10 fragments"):
        founding_blobs(start_of_built_in(tiny, "stdlib"), RunSettings())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_run_with_a_recipe_that_real_runs_cannot_do_is_not_founded(name: str):
    """Neither from Python, nor by believing a genesis that another version made."""
    beginning = start_of_built_in(METHODS[name]("gpt-nano"), "stdlib")
    with pytest.raises(UsageError, match="this outer step") as refused:
        founding_blobs(beginning, RunSettings())
    assert "atoll.experiment" in refused.value.cause and "diloco" in refused.value.fix
    good = founding_blobs(start_of_built_in(diloco("gpt-nano"), "stdlib"), RunSettings()).settings
    learning = replace(parse_training_spec(good), recipe=beginning.recipe)
    with pytest.raises(PeerFault, match="this outer step"):
        parse_training_spec(replace(good, learning=msgspec.msgpack.encode(learning)))


def test_a_genesis_that_no_version_could_have_made_is_a_fault_and_not_our_end():
    """Words that are no UTF-8, lists in lists in lists, rounds of no steps or no fragments."""
    good = founding_blobs(start_of_built_in(diloco("gpt-nano"), "stdlib"), RunSettings()).settings
    learning = parse_training_spec(good)
    nested = b"\xa1z" + b"\x91" * 5000 + b"\x90"
    for data in (good.learning.replace(b"gpt-nano", b"gpt-\xff\xffno"), b"\x81" + nested):
        with pytest.raises(PeerFault, match="invalid training spec"):
            parse_training_spec(replace(good, learning=data))
    for none in ({"fragments": 0}, {"inner_steps": 0}, {"overlap": -1}):
        recipe = replace(learning.recipe, schedule=replace(learning.recipe.schedule, **none))
        forged = replace(good, learning=msgspec.msgpack.encode(replace(learning, recipe=recipe)))
        with pytest.raises(PeerFault, match=r"at least|>= [01] - at"):
            parse_training_spec(forged)
    settings = encode_settings(replace(good, name="a run of ours"))
    for data in (settings.replace(b"of ours", b"of \xff\xffrs"), b"\x82\xa5rules" + bytes([RULES]) + nested):
        with pytest.raises(PeerFault, match="invalid settings"):
            decode_settings(data)


TARGET = ("train.adaptive_batching=true", "train.target_loss=2.0")


def effort_of(*sets: str) -> AdaptiveWorkloadPolicy | UnsetType:
    config = load_config(None, sets, {})
    return settings_of(config, recipe_of(config)).round.effort


def test_rounds_follow_the_run_where_it_is_written_and_leave_no_byte_elsewhere():
    """Each key by itself; what trainers need of them stands in the recipe, too."""
    assert effort_of() is UNSET
    assert effort_of("train.round_time=38min") == AdaptiveWorkloadPolicy(4, train_s=2280.0)
    assert effort_of("train.target_samples=4096", "train.inner_steps_min=5") == AdaptiveWorkloadPolicy(
        4, samples=4096, steps_min=5
    )
    assert effort_of("train.adaptive_steps=true") == AdaptiveWorkloadPolicy(4, by_loss=True)
    assert effort_of("train.steps_by_speed=true") == AdaptiveWorkloadPolicy(4, by_speed=True)
    assert effort_of(*TARGET, "train.batch=8", "train.batch_max=32") == AdaptiveWorkloadPolicy(
        8, batches=LossAdaptiveBatchSize(2.0, 1, 32)
    )
    assert effort_of("train.total_tokens=5000000000") == AdaptiveWorkloadPolicy(4, bounded=True)
    tied = recipe_of(load_config(None, ("train.total_tokens=5000000000",), {}))
    assert tied == over_tokens(recipe_of(RunConfig()), 5_000_000_000)
    assert founding_blobs(
        start_of_built_in(tied, "stdlib"),
        RunSettings(round=RoundSettings(effort=AdaptiveWorkloadPolicy(4, bounded=True))),
    )


def test_who_lets_rounds_be_shorter_is_told_what_rates_then_go_by():
    for sets in (("train.round_time=38min",), ("train.target_samples=99",), ("train.adaptive_steps=true",)):
        assert any("1500 steps" in text and "train.total_tokens" in text for text in trusted(*sets)[1])
        assert trusted(*sets, "train.total_tokens=1000000")[1] == []


@pytest.mark.parametrize(
    ("sets", "code", "says"),
    [
        (("train.adaptive_batching=true",), "E-CFG-14", "has no target loss"),
        (("train.target_loss=2.0",), "E-CFG-10", "train.adaptive_batching = true"),
        (("train.batch_max=8",), "E-CFG-10", "train.adaptive_batching = true"),
        (("train.inner_steps_min=4",), "E-CFG-10", "train.target_samples"),
        ((*TARGET, "train.batch_min=65"), "E-CFG-06", "train.batch_max"),
        ((*TARGET, "sync.apart=merge"), "E-CFG-13", "left behind"),
        (("train.round_time=2h",), "E-CFG-06", "run.train_max"),
        (("train.round_time=soon",), "E-CFG-02", "not a duration"),
        (("train.total_tokens=-1",), "E-CFG-02", "train.total_tokens"),
    ],
)
def test_what_cannot_follow_the_run_is_refused_with_what_to_write(sets: tuple[str, ...], code: str, says: str):
    told = trouble(*sets)
    assert told.code == code and says in str(told) and told.fix


def test_updates_are_kept_of_no_more_rounds_than_there_are_states_to_make_them_again_from():
    assert "E-CFG-13" in str(trouble("keep.updates=9")) and "keep.newest = 9" in trouble("keep.updates=9").fix
    assert trusted("keep.updates=9", "keep.newest=9")
