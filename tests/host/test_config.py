"""run.toml: every key explains itself, every slip is named, nothing is silently ignored."""

from __future__ import annotations

import asyncio
import re
import socket
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

import atoll.reduce
from atoll.base.effort import Batches, Effort
from atoll.base.errors import NetworkError, PeerFault, RefusedError, UsageError
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import COMMITTEE_MOST
from atoll.cli.watch import Quiet
from atoll.host.config import data_of, forgone, load_config, recipe_of, settings_of
from atoll.host.learning import built_in, decode_learning, found, with_room
from atoll.host.member import Invitation, Listening, found_run, holds_run, join_run, resume_run, training
from atoll.host.running import Start, run_up
from atoll.host.store import Store
from atoll.keys.identity import Identity
from atoll.learn.inner import Accumulate, AdamW, Muon
from atoll.learn.methods import METHODS, cooperative
from atoll.learn.recipes import Recipe, diloco, in_swarm, over_tokens, sample_problem, swarm_problem
from atoll.learn.schedule import Phase
from atoll.node.body import write_genesis
from atoll.node.config.about import ABOUT, RECIPE
from atoll.node.config.meaning import chosen_statistic
from atoll.node.config.page import commented_toml, reference
from atoll.node.config.reading import decode_config
from atoll.node.config.sections import Config, keys, of_the_run
from atoll.node.config.sense import EXPERIMENTS, NOT_YET, RECIPES
from atoll.node.settings import RULES, RunSettings, decode_settings, encode_settings
from atoll.policy.apart import Apart
from atoll.policy.pieces import Coded
from atoll.policy.plan import Acceptance, RoundSettings
from atoll.policy.presets import PRESETS
from atoll.policy.sampling import Sample
from atoll.policy.trust import DISTANCES
from atoll.policy.validation import Rule
from atoll.wire.codec import encode, vertex_id
from atoll.wire.messages.vertex import Member, Vertex
from atoll.wire.ticket import issue

DOCS = Path(__file__).parents[2] / "docs" / "config.md"


def trouble(*sets: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load_config(None, sets, {})
    return caught.value


def value_of(config: Config, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


# ---- what wins ---------------------------------------------------------------------------------------------


def test_the_command_line_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path):
    """One key is set in one more place each time; the batch stays the file's."""
    file = tmp_path / "run.toml"
    file.write_text("[train]\nlr = 0.001\nbatch = 8\n")
    environment = {"ATOLL_TRAIN__LR": "0.002", "ATOLL_TICKET": "not config", "HOME": "/"}
    assert load_config(None, (), {}).train.lr is None
    assert load_config(file, (), {}).train.lr == 0.001
    assert load_config(file, (), environment).train.lr == 0.002
    config = load_config(file, ("train.lr=0.003",), environment)
    assert (config.train.lr, config.train.batch) == (0.003, 8)


def test_words_need_no_quotes_on_the_command_line():
    config = load_config(None, ("run.name=coral", "consensus.timeout=1min", "run.rounds=7"), {})
    assert (config.run.name, config.consensus.timeout, config.run.rounds) == ("coral", 60.0, 7)


# ---- slips -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("train.iner_steps=3", "train.inner_steps"),
        ("trian.lr=1", "train.lr"),
        ("listen_addresses=[]", "network.listen_addresses"),
        ("run.lr=0.1", "train.lr"),
        ("consensus.time_out=3", "consensus.timeout"),
    ],
)
def test_an_unknown_key_is_answered_with_the_one_that_was_meant(slip: str, meant: str):
    assert f"did you mean {meant}?" in trouble(slip).what


def test_names_from_elsewhere_are_answered_with_ours():
    """The surprise: `sync_frequency` is no slip of any key of ours, it is another word for one."""
    assert "train.inner_steps" in trouble("sync_frequency=50").fix
    assert "atoll join" in trouble("network.initial_peers=[]").fix


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("train.lr=fast", "train.lr: expected a number, got text"),
        ("train.batch=2.5", "expected a whole number, got a number"),
        ("train.lr=inf", "train.lr: expected a finite number"),
        ("run.train_max=inf", "run.train_max: expected a finite number"),
        ("network.listen_addresses=everywhere", "expected a list, got text"),
        ("train.batch=0", "train.batch"),
        ("sync.compression_level=4", "sync.compression_level"),
        ("run.trust=none", "run.trust"),
        ("run.trust=comunity", "did you mean 'community'?"),
        ("sync.statistic='nnm+trimmed_mean'", "did you mean 'nnm + trimmed_mean'?"),
        ("consensus.timeout='12 parsec'", "not a duration"),
        ("run.byzantine_tolerance=0.4", "a third of liars"),
        ("run.byzantine_tolerance=0.2", "community"),
        ("run.byzantine_tolerance=0.0000001", "withstands nobody"),
        ("run.min_peers=5", "run.start_peers"),
        ("run.beat=3", "run.suspect"),
        ("consensus.timeout=20", "run.suspect"),
        ("consensus.protocol=paxos", "no protocol"),
        ("consensus.protocol=snow", "2,000 peers with k = 10, alpha = 8 and beta = 150"),
        ("train.lr", "no value"),
    ],
)
def test_a_value_that_cannot_be_names_its_key_and_what_to_do(given: str, says: str):
    told = trouble(given)
    assert says in str(told) and told.fix and told.exit_status == 2


@pytest.mark.parametrize("key", NOT_YET)
def test_what_does_not_exist_yet_says_so_instead_of_being_ignored(key: str):
    """Every such key takes its default and refuses anything else."""
    default = value_of(Config(), key)
    other = {bool: "true", int: "5", float: "0.5", str: "snow"}[type(default)]
    assert "not yet" in trouble(f"{key}={other}").what
    assert "not yet" in ABOUT[key].lower()
    assert value_of(load_config(None, (f"{key}={str(default).lower()}",), {}), key) == default


def test_a_file_that_is_no_toml_says_where(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("[train]\nlr = \n")
    with pytest.raises(UsageError, match="line 2"):
        load_config(file, (), {})
    with pytest.raises(UsageError, match="atoll init"):
        load_config(tmp_path / "other.toml", (), {})


# ---- the pages are the code --------------------------------------------------------------------------------


def test_every_key_is_explained_and_nothing_else_is():
    assert sorted(ABOUT) == sorted(keys())
    assert set(RECIPE) <= set(keys())


def test_the_reference_page_is_what_the_code_says():
    """After a change: python -c 'from atoll.node.config.page import reference; print(reference(), end="")'."""
    assert DOCS.read_text() == reference()


def test_the_commented_file_is_the_default_run():
    """With every comment sign taken away it must decode, and be the run that an empty file describes."""
    bare = re.sub(r"^#(\w+ = )", r"\1", commented_toml(), flags=re.MULTILINE)
    tree = tomllib.loads(bare)
    assert {f"{s}.{k}" for s, table in tree.items() for k in table} == set(keys())
    config, empty = decode_config(tree), decode_config({})
    assert recipe_of(config) == recipe_of(empty)
    assert settings_of(config, recipe_of(config)) == settings_of(empty, recipe_of(empty))


# ---- what it becomes ---------------------------------------------------------------------------------------


def test_what_the_recipe_is_said_to_have_is_what_it_has():
    recipe = recipe_of(Config())
    assert {
        "run.rounds": recipe.schedule.rounds,
        "run.byzantine_tolerance": PRESETS["private"].tolerance,
        "run.audit_rate": PRESETS["private"].audit_rate,
        "run.reputation": PRESETS["private"].reputation,
        "sync.statistic": chosen_statistic(Config()),
        "run.openings": 0.0,
        "run.captured_parts": 0.0,
        "model.name": recipe.model,
        "train.inner_steps": recipe.schedule.inner_steps,
        "train.batch": recipe.batch,
        "train.seq_len": recipe.seq_len,
        "train.lr": recipe.inner.lr,
        "train.weight_decay": recipe.inner.weight_decay,
        "train.clip_norm": recipe.inner.clip_norm,
        "train.warmup_steps": recipe.inner.warmup_steps,
        "train.outer_lr": recipe.outer.lr,
        "train.outer_momentum": recipe.outer.momentum,
        "train.seed": recipe.seed,
        "sync.up": recipe.coding.up,
        "sync.down": recipe.coding.down,
        "sync.error_feedback": recipe.coding.beta,
        "sync.overlap": recipe.schedule.overlap,
        "sync.fragments": recipe.schedule.fragments,
        "sync.quorum": recipe.reducer.quorum,
        "sync.grace": recipe.reducer.grace,
    } == RECIPE


def test_a_tuned_recipe_keeps_what_is_not_mentioned():
    """The demo's recipe with half the rounds: its schedule shrinks with them, its learning rate stays."""
    whole = recipe_of(load_config(None, ("train.recipe=demo",), {}))
    half = recipe_of(load_config(None, ("train.recipe=demo", f"run.rounds={whole.schedule.rounds // 2}"), {}))
    assert half.inner.total_steps == half.schedule.rounds * half.schedule.inner_steps
    assert (half.inner.lr, half.outer, half.coding) == (whole.inner.lr, whole.outer, whole.coding)


def test_trust_decides_the_quorum_and_the_timeout_its_windows():
    config = load_config(None, ("run.trust=community", "consensus.timeout=60s"), {})
    round = settings_of(config, recipe_of(config)).round
    assert (round.quorum, round.owner_s, round.agree_s) == ("two-thirds", 12.0, 24.0)
    assert settings_of(Config(), recipe_of(Config())).round.quorum == "majority"


def test_windows_shrink_to_a_fifth_of_the_shortest_timeout_unless_it_is_the_longest():
    """As long as consensus.timeout: they never shrink, and genesis says nothing of it."""
    quick = load_config(None, ("consensus.timeout_min=10s",), {})
    assert settings_of(quick, recipe_of(quick)).round.window_min_s == 2.0
    fixed = load_config(None, ("consensus.timeout_min=30s",), {})
    assert settings_of(fixed, recipe_of(fixed)).round.window_min_s is UNSET


def test_a_run_without_an_end_still_has_a_schedule():
    config = load_config(None, ("run.rounds=0",), {})
    assert settings_of(config, recipe_of(config)).rounds == 0
    assert recipe_of(config).inner.total_steps > 10_000


def test_a_codec_or_model_that_does_not_exist_is_named():
    for wrong in ("sync.up=int3", "model.name=gpt-9"):
        with pytest.raises(UsageError, match="there are"):
            recipe_of(load_config(None, (wrong,), {}))


def test_a_codec_takes_the_ratio_and_the_level_that_it_leaves_open():
    """A number in the codec's own name wins; a number that no codec asks for is an error."""
    sets = ("sync.up=topk+int8+zstd", "sync.compression_ratio=0.05", "sync.compression_level=9")
    assert recipe_of(load_config(None, sets, {})).coding.up == "topk:0.05+int8+zstd:9"
    named = load_config(None, ("sync.up=topk:0.2+int8+zstd",), {})
    assert recipe_of(named).coding.up == "topk:0.2+int8+zstd:3"
    assert "topk+int8" in trouble("sync.compression_ratio=0.05").fix
    assert "zstd" in trouble("sync.compression_level=5", "sync.up=topk").fix


def test_data_is_looked_for_beside_the_file(tmp_path: Path):
    (tmp_path / "corpus.txt").write_text("x" * 10)
    config = load_config(None, ("data.source=corpus.txt",), {})
    assert data_of(config, tmp_path / "run.toml") == str(tmp_path / "corpus.txt")
    with pytest.raises(UsageError, match="nothing at"):
        data_of(config, tmp_path / "elsewhere" / "run.toml")


def test_config_survives_its_own_encoding():
    config = load_config(None, ("train.lr=0.01", "network.announce_addresses=['/dns4/a.org/tcp/1']"), {})
    assert decode_config(msgspec.to_builtins(config)) == config


@pytest.mark.parametrize("name", ["auto", "streaming", "muloco"])
def test_owners_remember_what_their_answers_left_out_where_they_are_believed(name: str):
    """Two bits both ways and the same owners every round; elsewhere answers are finer, and owners drawn."""

    def founded(*sets: str) -> tuple[Recipe, RunSettings]:
        config = load_config(None, (f"train.recipe={name}", "model.name=gpt-tiny", *sets), {})
        recipe = recipe_of(config)
        return recipe, found(built_in(recipe, "stdlib"), settings_of(config, recipe)).settings

    recipe, settings = founded()
    assert (recipe.coding.down, recipe.coding.answer) == ("2bit", "remembered")
    assert settings.steady is True and settings.topology == "butterfly"
    for sets in (("run.trust=community",), ("sync.topology=tree",)):
        recipe, elsewhere = founded(*sets)
        assert (recipe.coding.down, recipe.coding.answer) == ("int8", "once")
        assert b"steady" not in encode_settings(elsewhere)
    lying = replace(settings, round=replace(settings.round, quorum="two-thirds"))
    with pytest.raises(PeerFault, match="nobody could check their owners"):
        decode_learning(lying)


def test_a_parameter_server_is_a_star():
    def founded(topology: str) -> RunSettings:
        sets = ("train.recipe=parameter_server", "model.name=gpt-tiny", f"sync.topology={topology}")
        config = load_config(None, sets, {})
        recipe = recipe_of(config)
        return found(built_in(recipe, "stdlib"), settings_of(config, recipe)).settings

    assert founded("auto").topology == founded("star").topology == "star"
    slip = trouble("train.recipe=parameter_server", "sync.topology=tree")
    assert "one owner of everything" in slip.what and "data_parallel" in slip.fix


def test_recipes_are_those_that_exist_and_what_real_runs_cannot_do_is_refused():
    """Every method stands in one of the two lists, in the right one; those of the second are answered `not yet`."""
    assert set(RECIPES) | set(EXPERIMENTS) == {*METHODS, "demo"} and not set(RECIPES) & set(EXPERIMENTS)
    for name in set(RECIPES) - {"demo"}:
        assert swarm_problem(in_swarm(METHODS[name]())) == ""
    for name in EXPERIMENTS:
        assert swarm_problem(in_swarm(METHODS[name]()))
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
        ({"round": RoundSettings(quorum="two-thirds")}, "nobody could check their owners"),
        ({"statistic": "median"}, "median is another statistic"),
        ({"topology": "tree"}, "cannot be made of partial sums"),
    ],
)
def test_a_recipe_whose_owners_must_be_believed_is_founded_only_where_they_are(change: dict[str, Any], why: str):
    """And it goes through a butterfly, whatever `auto` would choose, with as many members as it needs."""
    beginning = built_in(cooperative("gpt-nano"), "stdlib")
    settings = found(beginning, RunSettings(topology="auto")).settings
    assert (settings.topology, settings.min_peers, settings.start_peers) == ("butterfly", 3, 3)
    with pytest.raises(UsageError, match=why) as refused:
        found(beginning, RunSettings(**change))
    assert refused.value.code == "E-RUN-18"
    forged = replace(settings, **change)
    with pytest.raises(PeerFault, match=why):
        decode_learning(forged)


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
    assert recipe.schedule.phases == (Phase(0.3, 7, "topk:0.1+2bit"),)
    settings = found(built_in(recipe, book), settings_of(config, recipe)).settings
    assert settings.round.rhythm == ((1, 50), (2, 50), (1, 7), (49, 7)) and settings.rounds == 53
    steps = [settings.round.steps_after(trained) for trained in (0, 2, 3, 52, 53)]
    assert steps == [50, 50, 7, 7, 50]
    forged = replace(settings, round=replace(settings.round, rhythm=UNSET))
    with pytest.raises(PeerFault, match="other lengths by its recipe"):
        decode_learning(forged)
    for more, why in {
        "sync.overlap=2": "whole models that all wait for",
        "sync.apart=merge": "rounds of one length",
        "train.round_time=60": "rounds that follow the run",
        "run.rounds=0": "no end",
    }.items():
        config = load_config(None, (*sets, "sync.phases=0.3:7", more), {})
        recipe = recipe_of(config)
        with pytest.raises(UsageError, match=why):
            found(built_in(recipe, book), settings_of(config, recipe))
    with pytest.raises(UsageError, match="is no phase"):
        recipe_of(load_config(None, (*sets, "sync.phases=later"), {}))


def test_rounds_that_wait_for_a_quorum_are_founded_only_among_friends():
    """Decoupled as its paper has it, diloco with a quorum of one's own; nowhere where the first one may lie."""
    sets = ("train.recipe=decoupled", "sync.quorum=2", "sync.fragments=2", "model.name=gpt-nano")
    config = load_config(None, sets, {})
    recipe = recipe_of(config)
    assert (recipe.reducer.quorum, recipe.reducer.grace, recipe.reducer.statistic) == (2, 2, "radial")
    assert (recipe.merge, recipe.schedule.overlap, recipe.schedule.turn_steps) == ("delta", 2, 12)
    settings = found(built_in(recipe, "stdlib"), settings_of(config, recipe)).settings
    assert settings.round.acceptance == Acceptance(2, 2) and settings.topology == "butterfly"
    assert decode_settings(encode_settings(settings)) == settings
    assert b"\xaaacceptance\x82\xa6quorum\x02\xa5grace\x02" in encode_settings(settings), "as specs/round.md has it"
    lying = replace(settings.round, quorum="two-thirds")
    for change in ({"topology": "tree"}, {"audit_rate": 0.1}, {"round": lying}):
        with pytest.raises(PeerFault, match="quorum of updates"):
            decode_settings(encode_settings(replace(settings, **change)))

    config = load_config(None, ("sync.quorum=3", "sync.grace=4", "model.name=gpt-nano", "run.trust=community"), {})
    recipe = recipe_of(config)
    with pytest.raises(UsageError, match="whoever commits first") as refused:
        found(built_in(recipe, "stdlib"), settings_of(config, recipe))
    assert refused.value.code == "E-RUN-19"
    mean = found(built_in(recipe, "stdlib"), RunSettings(topology="auto")).settings
    assert mean.round.acceptance == Acceptance(3, 4) and mean.topology == "butterfly"
    assert swarm_problem(recipe_of(load_config(None, ("train.recipe=eager", "sync.quorum=2"), {})))
    with pytest.raises(UsageError, match="changes nothing"):
        recipe_of(load_config(None, ("sync.grace=2",), {}))
    everybody = recipe_of(load_config(None, ("train.recipe=decoupled", "sync.quorum=0"), {}))
    assert (everybody.reducer.quorum, everybody.reducer.grace) == (0, 0)
    plain = recipe_of(load_config(None, ("model.name=gpt-nano",), {}))
    assert b"acceptance" not in encode_settings(found(built_in(plain, "stdlib"), RunSettings()).settings)


def test_recipes_that_agree_on_every_step_take_the_numbers_of_their_outer_step_and_no_others():
    """Data parallelism's optimizer is the outer one; DeMo's has a rate and a warm-up; neither has inner steps."""
    sets = ("train.recipe=data_parallel", "train.lr=0.01", "train.clip_norm=0.5", "run.rounds=300")
    config = load_config(None, (*sets, "model.name=gpt-nano"), {})
    recipe = recipe_of(config)
    assert isinstance(recipe.inner, Accumulate) and isinstance(recipe.outer, AdamW)
    outer = recipe.outer
    assert (outer.lr, outer.clip_norm, outer.total_steps, outer.warmup_steps) == (0.01, 0.5, 300, 30)
    settings = found(built_in(recipe, "stdlib"), settings_of(config, recipe)).settings
    assert (settings.rounds, settings.round.inner_steps, settings.topology) == (300, 1, "auto")
    demo = recipe_of(load_config(None, ("train.recipe=demo_", "train.lr=0.002", "train.warmup_steps=7"), {}))
    assert (demo.coding.up, demo.coding.beta) == ("demo", 0.999)
    assert (demo.outer.lr, demo.outer.warmup_steps) == (0.002, 7)
    with pytest.raises(UsageError, match="nobody could check their owners"):
        found(built_in(demo, "stdlib"), RunSettings(round=RoundSettings(quorum="two-thirds")))
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
        found(built_in(unequal, "stdlib"), RunSettings())
    crowded = recipe_of(load_config(None, ("sync.overlap=25", "sync.fragments=2"), {}))
    with pytest.raises(UsageError, match="needs more than 50 steps"):
        found(built_in(crowded, "stdlib"), RunSettings())
    tiny = recipe_of(load_config(None, ("sync.fragments=10", "model.name=gpt-nano"), {}))
    with pytest.raises(UsageError, match="cannot be cut into 10 fragments"):
        found(built_in(tiny, "stdlib"), RunSettings())


def test_a_run_with_a_recipe_that_real_runs_cannot_do_is_not_founded():
    """Neither from Python, nor by believing a genesis that a newer version made."""
    beginning = built_in(METHODS["halos"]("gpt-nano"), "stdlib")
    with pytest.raises(UsageError, match="this outer step"):
        found(beginning, RunSettings())
    good = found(built_in(diloco("gpt-nano"), "stdlib"), RunSettings()).settings
    learning = replace(decode_learning(good), recipe=beginning.recipe)
    with pytest.raises(PeerFault, match="this outer step"):
        decode_learning(replace(good, learning=msgspec.msgpack.encode(learning)))


def test_a_genesis_that_no_version_could_have_made_is_a_fault_and_not_our_end():
    """Words that are no UTF-8, lists in lists in lists, rounds of no steps or no fragments."""
    good = found(built_in(diloco("gpt-nano"), "stdlib"), RunSettings()).settings
    learning = decode_learning(good)
    nested = b"\xa1z" + b"\x91" * 5000 + b"\x90"
    for data in (good.learning.replace(b"gpt-nano", b"gpt-\xff\xffno"), b"\x81" + nested):
        with pytest.raises(PeerFault, match="learns nothing"):
            decode_learning(replace(good, learning=data))
    for none in ({"fragments": 0}, {"inner_steps": 0}, {"overlap": -1}):
        recipe = replace(learning.recipe, schedule=replace(learning.recipe.schedule, **none))
        forged = replace(good, learning=msgspec.msgpack.encode(replace(learning, recipe=recipe)))
        with pytest.raises(PeerFault, match="at least"):
            decode_learning(forged)
    settings = encode_settings(replace(good, name="a run of ours"))
    for data in (settings.replace(b"of ours", b"of \xff\xffrs"), b"\x82\xa5rules" + bytes([RULES]) + nested):
        with pytest.raises(PeerFault, match="not valid"):
            decode_settings(data)


PAIRED = ("train.recipe=noloco", "model.name=gpt-nano", "train.inner_steps=4", "run.rounds=3")


def paired(*sets: str) -> RunSettings:
    config = load_config(None, (*PAIRED, *sets), {})
    recipe = recipe_of(config)
    return found(built_in(recipe, "stdlib"), settings_of(config, recipe, 21504)).settings


def test_noloco_is_a_run_in_pairs_and_takes_the_numbers_that_it_has():
    settings = paired("sync.up=int8", "train.outer_lr=0.5", "train.outer_momentum=0.4")
    learning = decode_learning(decode_settings(encode_settings(settings)))
    assert settings.topology == "pairs" and settings.update_bytes == 8 * 21504
    assert (learning.recipe.outer.lr, learning.recipe.outer.momentum, learning.recipe.outer.gamma) == (
        0.5,
        0.4,
        0.7,
    )
    assert (learning.recipe.coding.up, learning.recipe.coding.beta) == ("int8", 1.0)
    with pytest.raises(UsageError, match=r"noloco has no sync\.down"):
        recipe_of(load_config(None, (*PAIRED, "sync.down=int8"), {}))


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("run.trust=community",), "do not trust each other"),
        (("sync.topology=ring",), "a ring has a common result"),
        (("run.audit_rate=0.1",), "audits take rounds again|audited"),
        (("run.validate_every=1",), "validators look at a common model"),
        (("run.reputation=true",), "records weigh rows"),
        (("sync.apart=merge",), "train apart|common model"),
        (("sync.quorum=2",), "a reducer other than a mean|waits for both"),
        (("sync.up=delta+int8",), "updates in delta"),
        (("model.name=gpt:d=512,l=3,h=8,t=64,v=256",), "members in pairs send whole models"),
    ],
)
def test_what_needs_a_common_model_is_refused_in_pairs(sets, words):
    with pytest.raises(UsageError, match=words):
        paired(*sets)


def test_a_genesis_in_pairs_that_asks_for_a_common_model_is_not_believed():
    """Each of the settings that stand against it, as a newer version or a liar might write them."""
    settings = paired()
    wrong = (
        {"round": replace(settings.round, quorum="two-thirds")},
        {"statistic": "median"},
        {"audit_rate": 0.1},
        {"reputation": True},
        {"reputation": True, "score_rate": 0.1},
        {"validation": Rule()},
        {"coded": Coded(2, 3)},
        {"apart": Apart("merge", 3)},
        {"round": replace(settings.round, acceptance=Acceptance(2, 1))},
        {"steady": True},
        {"pieces": 2},
    )
    for more in wrong:
        with pytest.raises(PeerFault, match=r"in pairs, but|a pairs topology waits"):
            decode_settings(encode_settings(replace(settings, **more)))
    with pytest.raises(PeerFault, match="not both"):
        decode_learning(replace(settings, topology="butterfly"))


def test_a_run_whose_founders_no_vertex_could_list_is_not_founded():
    """30 billion values in fp32 are 2,300 parts, and a vertex says of each who is in it."""
    thirty = RunSettings(update_bytes=120 * 10**9, start_peers=3)
    assert with_room(thirty) is thirty
    with pytest.raises(UsageError, match=r"E-RUN-14 .*120 GB.*waits for 32\n.*\n.*wait for \d+ members at most"):
        with_room(replace(thirty, start_peers=32))
    with pytest.raises(UsageError, match="choose a smaller model"):
        with_room(replace(thirty, update_bytes=10**12))
    with pytest.raises(UsageError, match="E-RUN-14"):
        found(built_in(diloco("gpt-nano"), "stdlib"), RunSettings(min_peers=4000))
    with pytest.raises(UsageError, match="E-RUN-14"):
        atoll.reduce.found(peers=4000)


def test_what_sessions_sign_with_is_fixed_in_genesis():
    """Nothing is said of it where it is as ever; a run of 573 parts has no room for signatures that long."""
    config = load_config(None, ("run.votes=ml-dsa-65",), {})
    settings = settings_of(config, recipe_of(config))
    assert settings.round.signing.kind == "ml-dsa-65"
    assert settings_of(load_config(None, (), {}), recipe_of(config)).round.votes is UNSET
    assert "run.votes" in trouble("run.votes=rsa").what
    with pytest.raises(UsageError, match="E-RUN-14") as refused:
        with_room(replace(settings, update_bytes=28 * 10**9, start_peers=3))
    assert 'run.votes = "ed25519"' in refused.value.fix


def test_a_folder_of_a_run_of_other_rules_is_told_so_and_left_as_it_is(tmp_path: Path):
    """Its own program may still read it; `atoll up` does not begin to serve what it would judge wrongly."""
    settings = RunSettings(rules=RULES + 1)
    founder = Member(PeerId("ada"), b"", (), "trainer", "member", 0, 0.0, "ada")
    raw = encode(write_genesis(settings, ZERO_DIGEST, founder, (), 0.0))
    store = Store(tmp_path)
    store.keep([("run", vertex_id(raw)), ("genesis", encode(Vertex(raw, None)))])
    store.close()
    with pytest.raises(RefusedError, match=rf"E-RUN-15 .*rules {RULES + 1}(.*\n)+.*atoll up"):
        asyncio.run(resume_run(tmp_path, "", Listening((), ()), lambda _: None))
    assert holds_run(tmp_path)


def test_a_folder_whose_history_the_disk_changed_is_told_so_and_left_as_it_is(tmp_path: Path):
    founder = Member(PeerId("ada"), b"", (), "trainer", "member", 0, 0.0, "ada")
    raw = encode(write_genesis(RunSettings(), ZERO_DIGEST, founder, (), 0.0))
    store = Store(tmp_path)
    store.keep([("run", vertex_id(raw)), ("genesis", encode(Vertex(raw, None))), ("vertex/0", b"torn")])
    store.close()
    with pytest.raises(UsageError, match=r"E-DIR-07 round 0 (.*\n)+.*atoll invite"):
        asyncio.run(resume_run(tmp_path, "", Listening((), ()), lambda _: None))
    assert holds_run(tmp_path)


def test_a_folder_whose_history_a_member_can_mend_is_opened_and_that_of_a_lone_founder_is_not(tmp_path: Path):
    """Round 0 is torn, and round 1 names it: with a second member in round 1 there is somebody to ask."""
    founder = Member(PeerId("ada"), b"", (), "trainer", "member", 0, 0.0, "ada")
    genesis = write_genesis(RunSettings(), ZERO_DIGEST, founder, (), 0.0)
    run = vertex_id(raw := encode(genesis))
    before = vertex_id(encode(replace(genesis, run=run, round=0, parent=run)))
    for alone, members in ((True, (founder,)), (False, (founder, replace(founder, peer=PeerId("bob"))))):
        after = encode(replace(genesis, run=run, round=1, parent=before, members=members))
        store = Store(folder := tmp_path / str(alone))
        store.keep([("run", run), ("genesis", encode(Vertex(raw, None))), ("vertex/0", b"torn")])
        store.keep([("vertex/1", encode(Vertex(after, None)))])
        store.close()

        async def opened(folder: Path = folder) -> None:
            make = training(1, lambda _: None)
            await (await resume_run(folder, "", Listening((), ()), make)).stop(farewell=False)

        if alone:
            with pytest.raises(UsageError, match="E-DIR-07 round 0 of the history"):
                asyncio.run(opened())
        else:
            asyncio.run(opened())


@pytest.mark.parametrize("zeroed", [slice(16, None), slice(4096, None)], ids=["its head", "its pages"])
def test_a_database_that_the_disk_changed_is_told_so(zeroed: slice, tmp_path: Path):
    """The first bytes say that it is one; the rest is gone, at once or behind the first page."""
    store = Store(tmp_path)
    store.keep([("run", b"name"), ("genesis", bytes(9000))])
    store.close()
    data = bytearray((tmp_path / "kept.sqlite").read_bytes())
    data[zeroed] = bytes(len(data[zeroed]))
    (tmp_path / "kept.sqlite").write_bytes(data)
    with pytest.raises(UsageError, match=r"E-DIR-07 kept.sqlite \(.*\) in"):
        holds_run(tmp_path)


def test_a_peer_that_comes_back_is_who_it_was_and_listens_where_it_was_told_to_at_first(tmp_path: Path):
    """Nothing said at the second start: same address, same port, same word to others; said otherwise: that."""
    beginning = found(built_in(diloco("gpt-nano", rounds=2), "stdlib"), RunSettings())
    quiet = Listening(as_before=True)

    names: list[str] = []

    async def addresses(
        listening: Listening, first: bool = False, name: str = ""
    ) -> tuple[list[str], tuple[str, ...]]:
        make = training(1, lambda _: None)
        if first:
            host, _ = await found_run(tmp_path, beginning, "ada@clinic", listening, Invitation(), make)
        else:
            host = await resume_run(tmp_path, name, listening, make)
        told = host.bound, host.addresses
        names.append(host.wish.name)
        await host.stop(farewell=False)
        return told

    told = ("/ip4/192.0.2.7/tcp/7071",)
    begun = asyncio.run(addresses(Listening(("/ip4/127.0.0.2/tcp/0",), told), first=True))
    assert begun[0][0].startswith("/ip4/127.0.0.2/") and begun[1] == told
    assert asyncio.run(addresses(quiet, name="eve")) == begun
    assert asyncio.run(addresses(Listening()))[0][0].startswith("/ip4/127.0.0.1/")
    assert asyncio.run(addresses(quiet, name="bob@lab"))[0][0].startswith("/ip4/127.0.0.1/")
    assert names == ["ada@clinic", "eve@clinic", "eve@clinic", "bob@lab"]


def test_what_a_resumed_run_does_not_hear_is_known():
    """`atoll up --set` in a folder that holds a run says so, but for what may differ at every start."""
    for own in ("node.threads=1", "node.device=cuda:1", "keep.newest=9", "network.upload_bytes_s=9"):
        assert of_the_run(load_config(None, (own,), {})) == Config()
    for common in ("run.rounds=9", "keep.coded=6/10"):
        assert of_the_run(load_config(None, (common,), {})) != Config()


def test_a_folder_holds_a_run_once_its_founder_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The port is taken: nothing is founded, so the next start may say anything else and still gets a ticket.
    Whoever forgot that its environment names the port is told."""
    beginning = found(built_in(diloco("gpt-nano", rounds=2), "stdlib"), RunSettings())

    async def founded(port: int) -> str:
        where = Listening((f"/ip4/127.0.0.1/tcp/{port}",))
        host, ticket = await found_run(tmp_path, beginning, "ada", where, Invitation(), training(1, lambda _: None))
        assert host.ticket_text() == ticket.text
        await host.stop(farewell=False)
        return ticket.text

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("ATOLL_LISTEN", "/ip4/127.0.0.1/tcp/0")
        with pytest.raises(NetworkError, match=r"E-NET-11 .*\n.*another program .*\n.*try: another port"):
            asyncio.run(founded(port))
        monkeypatch.setenv("ATOLL_LISTEN", f"/ip6/::1/tcp/0 /ip4/127.0.0.1/tcp/{port}")
        with pytest.raises(NetworkError, match=r"E-NET-11 (.*\n)+.*try: unset ATOLL_LISTEN, or"):
            asyncio.run(founded(port))
    assert not holds_run(tmp_path)
    assert asyncio.run(founded(0))


def test_a_member_needs_its_ticket_no_more_and_who_never_was_one_may_try_another(tmp_path: Path):
    """An expired ticket is none to a newcomer, and harmless where its run is; a folder is bound once genesis is."""

    def ticket(run: Digest, expires_s: int) -> str:
        return issue(Identity.generate(), genesis=run, role="trainer", expires_wall_s=expires_s, addresses=()).text

    def joined(folder: Path, text: str) -> None:
        async def once() -> None:
            make = training(1, lambda _: None)
            await (await join_run(folder, text, "trainer", "bob", Listening((), ()), make)).stop(farewell=False)

        asyncio.run(once())

    async def founded() -> Digest:
        beginning = found(built_in(diloco("gpt-nano", rounds=2), "stdlib"), RunSettings())
        where = Listening(("/ip4/127.0.0.1/tcp/0",))
        host, _ = await found_run(there, beginning, "ada", where, Invitation(), training(1, lambda _: None))
        await host.stop(farewell=False)
        return host.run_id

    there, here = tmp_path / "there", tmp_path / "here"
    one, two, later = Digest(b"1" * 32), asyncio.run(founded()), 2**31
    with pytest.raises(RefusedError, match="E-TKT-0"):
        joined(here, ticket(one, 1))
    joined(here, ticket(one, later))  # nobody of it is ever reached
    joined(here, ticket(two, later))
    founders, store = Store(there), Store(here)
    store.keep([("genesis", founders.value("genesis"))])
    founders.close()
    store.close()
    joined(here, ticket(two, 1))
    with pytest.raises(UsageError, match="E-DIR-03"):
        joined(here, ticket(one, later))


def test_a_place_that_cannot_be_a_folder_is_told_so(tmp_path: Path):
    """A file of that name stands for a disk that is read-only or full: both refuse the folder."""
    (tmp_path / "taken").touch()
    start = Start(tmp_path / "taken", Config())
    with pytest.raises(UsageError, match=r"E-DIR-05 .*taken cannot be(.*\n)+.*--dir"):
        asyncio.run(run_up(start, Quiet()))


# ---- robust statistics -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (("run.min_peers=4", "run.start_peers=4"), 'run.trust = "private" says that there are none'),
        (("run.trust=community", "run.min_peers=3", "run.start_peers=4"), "it takes 4 to withstand one liar"),
        (
            ("run.trust=community", "run.min_peers=4", "run.start_peers=4", "sync.topology=tree"),
            "neither be sorted",
        ),
        (
            ("run.trust=community", "run.byzantine_tolerance=0.2", "run.min_peers=4", "run.start_peers=4"),
            "it takes 5 to withstand one liar",
        ),
    ],
)
def test_a_statistic_that_would_withstand_nobody_is_refused(sets: tuple[str, ...], says: str):
    """The surprise: three members are too few even for one liar, whatever the tolerance says."""
    refused = trouble("sync.statistic=median", *sets)
    assert refused.code == "E-CFG-11" and says in f"{refused.what} {refused.cause}"


COMMUNITY = ("run.trust=community", "run.min_peers=7", "run.start_peers=7")


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (("sync.statistic=robust", "run.trust=open", "run.min_peers=4", "run.start_peers=7"), "it takes 5"),
        (("sync.statistic=krum", "run.min_peers=7", "run.start_peers=7"), "says that there are none"),
        (("sync.statistic=robust", *COMMUNITY, "sync.topology=ring"), "nor compared"),
        (("sync.statistic=robust", "run.trust=community", "run.min_peers=4", "run.start_peers=7"), "it takes 5"),
        (("sync.statistic=krum", "run.trust=community", "run.min_peers=4", "run.start_peers=7"), "it takes 5"),
        (
            ("sync.statistic=nnm + krum", "run.trust=community", "run.min_peers=4", "run.start_peers=7"),
            "it takes 5",
        ),
        (("sync.statistic=nnm + median", "run.min_peers=7", "run.start_peers=7"), "says that there are none"),
        (
            ("sync.statistic=geometric_median", "run.trust=community", "run.min_peers=3", "run.start_peers=7"),
            "it takes 4",
        ),
    ],
)
def test_a_rule_by_distance_is_refused_where_it_could_not_keep_its_word(sets: tuple[str, ...], says: str):
    refused = trouble(*sets)
    assert refused.code == "E-CFG-11" and says in f"{refused.what} {refused.cause}" and refused.fix


@pytest.mark.parametrize("trust", ["community", "open"])
@pytest.mark.parametrize("asked", ["", "sync.statistic=mean"])
def test_a_topology_that_makes_sums_on_the_way_is_refused_where_members_may_lie(trust: str, asked: str):
    """Whatever the rows become. The surprise: of a mean it used to make a butterfly, without a word."""
    members = ("run.min_peers=7", "run.start_peers=7")
    refused = trouble(f"run.trust={trust}", "sync.topology=tree", *members, *filter(None, (asked,)))
    assert refused.code == "E-CFG-11" and f'"tree" cannot work with run.trust = "{trust}"' in refused.what


@pytest.mark.parametrize("trust", ["community", "open"])
@pytest.mark.parametrize("name", DISTANCES)
def test_every_rule_by_distance_can_be_asked_for(name: str, trust: str):
    asked = (f"sync.statistic={name}", f"run.trust={trust}", "run.min_peers=7", "run.start_peers=7")
    config = load_config(None, asked, {})
    settings = settings_of(config, recipe_of(config))
    assert (settings.statistic, settings.witnessed) == (name, trust == "open")


@pytest.mark.parametrize("name", ["nnm + mean", "arc + trimmed_mean", "nnm+median", "arc + nnm + median", "bulyan"])
def test_a_rule_that_rounds_do_not_know_is_refused_by_name_with_those_that_they_do(name: str):
    refused = trouble(f"sync.statistic={name}", "run.trust=community", "run.min_peers=7", "run.start_peers=7")
    assert refused.code == "E-CFG-02" and "sync.statistic" in refused.what and "nnm + trimmed_mean" in str(refused)


def test_few_owners_watch_a_part_where_openings_find_what_they_say_together():
    """Else one more than may lie: by word, and where codecs or distances leave nothing that could be opened."""
    asked = ("run.trust=open", *COMMUNITY[1:])
    config = load_config(None, asked, {})
    settings = settings_of(config, recipe_of(config))
    assert settings.captured_share == 0.05 and settings.opened is not None and settings.opened.share == 0.03
    for word in ("run.captured_parts=0", "run.openings=0", "sync.up=topk+int8", "sync.statistic=robust"):
        config = load_config(None, (*asked, word), {})
        settings = settings_of(config, recipe_of(config))
        assert settings.captured_share == 0 and settings.witnessed and settings.opened is None
    for word in ("run.openings=0", "sync.statistic=robust"):
        refused = trouble(*asked, "run.captured_parts=0.1", word)
        assert refused.code == "E-CFG-11" and "cannot be had" in refused.what
    config = load_config(None, (*asked, "run.captured_parts=0.1", "sync.up=topk+int8"), {})
    with pytest.raises(UsageError, match="E-RUN-17"):
        settings_of(config, recipe_of(config))
    for word, lacks in (("run.rounds=9", True), ("run.captured_parts=0", False), ("run.openings=0", False)):
        config = load_config(None, (*asked, "sync.up=topk+int8", word), {})
        told = forgone(config, recipe_of(config), 0)
        assert any("as many owners combine every part" in text for text in told) is lacks, word


def test_answers_are_opened_where_members_may_lie():
    for sets, share in ((COMMUNITY, 0.03), ((*COMMUNITY, "run.openings=0.2"), 0.2)):
        config = load_config(None, sets, {})
        opened = settings_of(config, recipe_of(config)).opened
        assert opened is not None and (opened.share, opened.leaf_bytes) == (share, 4096 + 32)
    for sets in ((), (*COMMUNITY, "run.openings=0")):
        config = load_config(None, sets, {})
        assert settings_of(config, recipe_of(config)).opened is None
    refused = trouble("run.trust=private", "run.openings=0.1", *COMMUNITY[1:])
    assert refused.code == "E-CFG-11" and "does nothing" in refused.what


def test_codecs_whose_answers_cannot_be_opened_are_refused_by_name():
    """The way out is said: another codec, or owners that are believed."""
    for codecs in (("sync.up=topk+int8",), ("sync.down=sparse+int8",), ("sync.up=randk",)):
        asked = load_config(None, (*COMMUNITY, *codecs, "run.openings=0.05"), {})
        with pytest.raises(UsageError, match="E-RUN-17") as refused:
            settings_of(asked, recipe_of(asked))
        assert "2bit" in refused.value.fix and "run.openings = 0" in refused.value.fix
        config = load_config(None, (*COMMUNITY, *codecs), {})  # nobody asked: the run has none, with a word
        assert settings_of(config, recipe_of(config)).opened is None
        assert any("run.openings = 0" in text for text in forgone(config, recipe_of(config), 0))
        believed = load_config(None, (*COMMUNITY, *codecs, "run.openings=0"), {})
        assert settings_of(believed, recipe_of(believed)).opened is None


def test_open_needs_enough_members_and_then_has_owners_watch_each_other():
    assert "it takes 4" in trouble("run.trust=open", "run.min_peers=3", "run.start_peers=3").cause
    config = load_config(None, ("run.trust=open", "run.min_peers=4", "run.start_peers=4"), {})
    settings = settings_of(config, recipe_of(config))
    assert settings.witnessed and settings.round.quorum == "two-thirds"
    assert settings.round.committee == COMMITTEE_MOST  # a drawn committee may hold more liars than a third


def test_genesis_fixes_the_statistic_and_how_many_may_lie():
    sets = ("sync.statistic=median", "run.trust=community", "run.min_peers=4", "run.start_peers=4")
    config = load_config(None, sets, {})
    settings = settings_of(config, recipe_of(config))
    assert (settings.statistic, settings.tolerance) == ("median", 0.33)


@pytest.mark.parametrize("text", ["6", "10/6", "6/6", "0/4", "6/33", "a/b", "6/10/3"])
def test_what_is_no_code_of_pieces_is_refused(text: str):
    refused = trouble(f'keep.coded="{text}"')
    assert refused.code == "E-CFG-12" and 'keep.coded = "6/10"' in refused.fix


def test_genesis_fixes_how_older_states_are_cut_and_nothing_where_they_are_not():
    """A run without pieces has the genesis that it had before there were any."""
    pytest.importorskip("pyeclib")
    config = load_config(None, ("keep.coded=6/10", "keep.every_rounds=5", "keep.repair_after=1min"), {})
    assert settings_of(config, recipe_of(config)).coded == Coded(6, 10, 5, 60.0)
    plain = load_config(None, (), {})
    assert b"coded" not in encode_settings(settings_of(plain, recipe_of(plain)))


# ---- what a trust stands for ---------------------------------------------------------------------------------


def trusted(*sets: str) -> tuple[RunSettings, list[str]]:
    config = load_config(None, sets, {})
    recipe = recipe_of(config)
    return settings_of(config, recipe), forgone(config, recipe, 0)


@pytest.mark.parametrize(("peers", "told"), [(3, True), (4, True), (5, False)])
def test_who_averages_by_records_hears_how_many_it_takes_to_outvote_a_liar(peers: int, told: bool):
    """Krum's n >= 2f + 3; where updates are averaged by samples in a private run nobody is told."""
    sets = ("model.name=gpt-nano", f"run.start_peers={peers}", f"run.min_peers={min(peers, 3)}")
    asked = [text for text in trusted("train.recipe=cooperative", *sets)[1] if "run.start_peers = 5" in text]
    assert bool(asked) is told and not any("2f + 3" in text for text in trusted(*sets)[1])


@pytest.mark.parametrize("trust", PRESETS)
def test_a_run_of_seven_has_what_its_trust_stands_for(trust: str):
    settings, lacks = trusted(f"run.trust={trust}", "run.min_peers=7", "run.start_peers=7")
    preset = PRESETS[trust]
    statistic = preset.statistics[0] if preset.statistics else "mean"
    assert (settings.statistic, settings.tolerance) == (statistic, preset.tolerance)
    assert (settings.audited_share, settings.reputed) == (preset.audit_rate, preset.reputation)
    assert (settings.witnessed, settings.round.quorum) == (preset.witnessed, preset.quorum)
    assert lacks == []
    assert decode_settings(encode_settings(settings)) == settings


def test_a_private_run_is_the_run_that_it_always_was():
    """Nothing of what keeps records or audits is in its genesis."""
    settings, _ = trusted()
    assert settings.reputation is settings.audit_rate is UNSET


@pytest.mark.parametrize(
    ("members", "statistic"),
    [((1, 1), "mean"), ((4, 4), "trimmed_mean"), ((5, 5), "robust"), ((5, 65), "trimmed_mean")],
)
def test_a_default_rule_is_one_that_the_run_can_keep(members: tuple[int, int], statistic: str):
    """Too few members for any: a mean, and the founder is told what it takes. More than 64: no distances."""
    least, most = members
    settings, lacks = trusted("run.trust=community", f"run.min_peers={least}", f"run.start_peers={most}")
    assert settings.statistic == statistic and settings.reputed
    assert bool(lacks) == (statistic == "mean") and all("run.min_peers = 4" in text for text in lacks)


def test_what_cannot_be_audited_is_not_unless_somebody_asks_for_it():
    """Streaming overlaps: the default is no audits, with a word; asked for, the founding is refused."""
    sets = ("run.trust=community", "run.min_peers=5", "run.start_peers=5", "train.recipe=streaming")
    settings, lacks = trusted(*sets)
    assert settings.audited_share == 0.0 and len(lacks) == 1 and "run.audit_rate = 0" in lacks[0]
    assert trusted(*sets, "run.audit_rate=0")[1] == []
    asked, _ = trusted(*sets, "run.audit_rate=0.5")
    assert asked.audited_share == 0.5
    with pytest.raises(UsageError, match="E-RUN-16"):
        found(built_in(recipe_of(load_config(None, sets, {})), "stdlib"), asked)


@pytest.mark.parametrize(
    ("change", "why", "scored"),
    [
        ("train.precision=bf16", "fp32", True),
        ("train.compile=true", "compiled", True),
        ("train.recipe=muloco", "Muon", True),
        ("train.recipe=streaming", "overlap", True),
        ("sync.up=topk:0.1+int8", "", False),
        ("train.recipe=data_parallel", "no tolerance", False),
        ("model.name=cnn-mnist", "no tolerance", True),
        ("sync.apart=merge", "nobody assigned", True),
    ],
)
def test_among_strangers_work_that_nobody_can_audit_is_refused_unless_that_is_written(
    change: str, why: str, scored: bool
):
    """The cure names loss scores where they can look. The surprise: sparse codecs are no obstacle."""
    sets = ("run.trust=open", "run.min_peers=7", "run.start_peers=7", change)
    if not why:
        assert trusted(*sets)[0].audited_share == 0.05
        return
    with pytest.raises(UsageError, match="E-RUN-16") as refused:
        trusted(*sets)
    assert why in refused.value.what and "run.audit_rate = 0" in refused.value.fix
    assert ("run.score_rate" in refused.value.fix) is scored
    settings, lacks = trusted(*sets, "run.audit_rate=0", "run.score_rate=0.05" if scored else "run.audit_rate=0")
    assert settings.audited_share == 0.0 and settings.scored_share == (0.05 if scored else 0.0) and lacks == []
    with pytest.raises(UsageError, match="E-RUN-16"):
        trusted(*sets, "run.score_rate=0.05" if scored else "run.openings=0")


MERGED = "sync.apart=merge"


def test_training_apart_is_a_word_of_genesis_and_leaves_no_room_for_audits():
    """Left out it leaves no byte; audits that trust stands for give way with a word, asked for they are refused."""
    assert trusted()[0].apart is UNSET
    assert trusted(MERGED)[0].apart == Apart("merge", 10)
    assert trusted("sync.apart=drop", "sync.apart_rounds=3")[0].apart == Apart("drop", 3)
    assert "E-CFG-10" in str(trouble("sync.apart_rounds=3"))
    assert (
        "E-CFG-13" in str(trouble(MERGED, "run.audit_rate=0.1"))
        and "run.audit_rate = 0" in trouble(MERGED, "run.audit_rate=0.1").fix
    )
    settings, lacks = trusted(MERGED, "run.trust=community", "run.min_peers=5", "run.start_peers=5")
    assert settings.audited_share == 0.0 and settings.apart_terms == Apart("merge", 10)
    assert any("sync.apart" in text and "run.audit_rate = 0" in text for text in lacks)


def test_who_trains_in_a_round_is_a_word_of_genesis_and_what_cannot_be_sampled_is_refused():
    """Left out it leaves no byte. Where members may lie, as many at least as withstand one."""
    assert trusted()[0].round.sample is UNSET and trusted("run.sample=1")[0].round.sample is UNSET
    assert trusted("run.sample=0.5")[0].round.sample == Sample(thousandths=500)
    assert trusted("run.sample_peers=10", "node.group=hospital-a")[0].round.sample == Sample(peers=10)
    liars = ("run.trust=community", "run.min_peers=9", "run.start_peers=9")
    assert trusted("run.sample=0.1", *liars)[0].round.sample == Sample(thousandths=100, least=5)
    assert "run.sample_peers = 5" in trouble("run.sample_peers=4", *liars).fix
    assert "E-CFG-10" in str(trouble("run.sample=0.5", "run.sample_peers=3"))
    assert "E-CFG-13" in str(trouble("run.sample_peers=3", "sync.quorum=2"))
    assert "E-CFG-10" in str(trouble("run.sample=0.5", "node.group=a", *liars))
    assert "E-CFG-13" in str(trouble("run.sample=0.5", MERGED))
    for name in ("a@b", "a/b", "x" * 33):
        assert trouble(f"node.group={name}").code.startswith("E-CFG")
    half = ("run.sample=0.5", "run.start_peers=3", "run.min_peers=3")
    for asked in ("sync.overlap=4", "sync.fragments=2", "train.recipe=eager", "train.recipe=cooperative"):
        assert sample_problem(recipe_of(load_config(None, (*half, asked), {})))
    config = load_config(None, (*half, "sync.overlap=4"), {})
    with pytest.raises(UsageError, match="E-RUN-22"):
        found(built_in(recipe_of(config), "stdlib"), settings_of(config, recipe_of(config)))


def test_everything_that_a_trust_stands_for_can_be_written_otherwise():
    sets = ("run.trust=open", "run.min_peers=7", "run.start_peers=7", "sync.statistic=mean", "run.audit_rate=0")
    settings, lacks = trusted(*sets, "run.reputation=false")
    assert (settings.statistic, settings.audited_share, settings.reputed, lacks) == ("mean", 0.0, False, [])
    assert trusted("run.reputation=true")[0].reputed


# ---- rounds whose work follows the run ---------------------------------------------------------------------

TARGET = ("train.adaptive_batching=true", "train.target_loss=2.0")


def effort_of(*sets: str) -> Effort | UnsetType:
    config = load_config(None, sets, {})
    return settings_of(config, recipe_of(config)).round.effort


def test_rounds_follow_the_run_where_it_is_written_and_leave_no_byte_elsewhere():
    """Each key by itself; what trainers need of them stands in the recipe, too."""
    assert effort_of() is UNSET
    assert effort_of("train.round_time=38min") == Effort(4, train_s=2280.0)
    assert effort_of("train.target_samples=4096", "train.inner_steps_min=5") == Effort(4, samples=4096, steps_min=5)
    assert effort_of("train.adaptive_steps=true") == Effort(4, by_loss=True)
    assert effort_of("train.steps_by_speed=true") == Effort(4, by_speed=True)
    assert effort_of(*TARGET, "train.batch=8", "train.batch_max=32") == Effort(8, batches=Batches(2.0, 1, 32))
    assert effort_of("train.total_tokens=5000000000") == Effort(4, bounded=True)
    tied = recipe_of(load_config(None, ("train.total_tokens=5000000000",), {}))
    assert tied == over_tokens(recipe_of(Config()), 5_000_000_000)
    assert found(built_in(tied, "stdlib"), RunSettings(round=RoundSettings(effort=Effort(4, bounded=True))))


def test_who_lets_rounds_be_shorter_is_told_what_rates_then_go_by():
    for sets in (("train.round_time=38min",), ("train.target_samples=99",), ("train.adaptive_steps=true",)):
        assert any("1500 steps" in text and "train.total_tokens" in text for text in trusted(*sets)[1])
        assert trusted(*sets, "train.total_tokens=1000000")[1] == []


@pytest.mark.parametrize(
    ("sets", "code", "says"),
    [
        (("train.adaptive_batching=true",), "E-CFG-14", "no loss to steer by"),
        (("train.target_loss=2.0",), "E-CFG-10", "train.adaptive_batching = true"),
        (("train.batch_max=8",), "E-CFG-10", "train.adaptive_batching = true"),
        (("train.inner_steps_min=4",), "E-CFG-10", "train.target_samples"),
        ((*TARGET, "train.batch_min=65"), "E-CFG-06", "train.batch_max"),
        ((*TARGET, MERGED), "E-CFG-13", "left behind"),
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
