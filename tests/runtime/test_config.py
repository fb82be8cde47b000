"""run.toml: every key explains itself, every slip is named, nothing is silently ignored."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace
from written import trouble

import atoll.reduce
from atoll.base.errors import UsageError
from atoll.peer.config.defaults import chosen_statistic, min_peers_of
from atoll.peer.config.docs import ABOUT, RECIPE
from atoll.peer.config.reading import decode_config
from atoll.peer.config.render import commented_toml, reference
from atoll.peer.config.sections import RunConfig, keys, of_the_run
from atoll.peer.config.validate import NOT_YET
from atoll.peer.settings import RunSettings, encode_settings
from atoll.policy.capability_terms import ErasureParams
from atoll.policy.presets import PRESETS, looked_every
from atoll.runtime.config import data_of, load_config, recipe_of, settings_of
from atoll.runtime.training_spec import check_vertex_room, founding_blobs, start_of_built_in
from atoll.training.recipe.recipes import diloco

DOCS = Path(__file__).parents[2] / "docs" / "config.md"


def value_of(config: RunConfig, key: str) -> object:
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
        ("train.lr=inf", "train.lr: expected a number <= 1000000.0"),
        ("run.train_max=inf", "run.train_max: expected a number <= 1000000000.0"),
        ("network.listen_addresses=everywhere", "expected a list, got text"),
        ("train.batch=0", "train.batch"),
        ("sync.compression_level=4", "sync.compression_level"),
        ("run.trust=none", "run.trust"),
        ("run.trust=comunity", "did you mean 'community'?"),
        ("sync.statistic='nnm+trimmed_mean'", "did you mean 'nnm + trimmed_mean'?"),
        ("consensus.timeout='12 parsec'", "not a duration"),
        ("run.byzantine_tolerance=0.4", "a third of liars"),
        ("run.byzantine_tolerance=0.2", "community"),
        ("run.byzantine_tolerance=0.0000001", "withstands no liar"),
        ("run.min_peers=5", "run.start_peers"),
        ("run.beat=3", "run.suspect"),
        ("consensus.timeout=20", "run.suspect"),
        ("consensus.protocol=paxos", "no protocol"),
        ("consensus.protocol=snow", "2,000 peers"),
        ("train.lr", "no value"),
    ],
)
def test_a_value_that_cannot_be_names_its_key_and_what_to_do(given: str, says: str):
    told = trouble(given)
    assert says in str(told) and told.fix and told.exit_status == 2


@pytest.mark.parametrize("key", NOT_YET)
def test_what_does_not_exist_yet_says_so_instead_of_being_ignored(key: str):
    """Every such key takes its default and refuses anything else."""
    default = value_of(RunConfig(), key)
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
    """After a change: python -c 'from atoll.peer.config.render import reference; print(reference(), end="")'."""
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
    recipe = recipe_of(RunConfig())
    assert {
        "run.rounds": recipe.schedule.rounds,
        "run.min_peers": min_peers_of(RunConfig()),
        "run.byzantine_tolerance": PRESETS["private"].tolerance,
        "run.audit_rate": PRESETS["private"].audit_rate,
        "run.reputation": PRESETS["private"].reputation,
        "run.validate_every": looked_every(PRESETS["private"], 50),
        "sync.statistic": chosen_statistic(RunConfig()),
        "run.vote_after_rounds": 0,
        "run.sponsor_rounds": 0,
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
    config = load_config(None, ("run.trust=community", "run.start_peers=4", "consensus.timeout=60s"), {})
    round = settings_of(config, recipe_of(config)).round
    assert (round.quorum, round.owner_s, round.agree_s) == ("two-thirds", 12.0, 24.0)
    assert settings_of(RunConfig(), recipe_of(RunConfig())).round.quorum == "majority"


def test_windows_shrink_to_a_fifth_of_the_shortest_timeout_unless_it_is_the_longest():
    """As long as consensus.timeout: they never shrink, and genesis says nothing of it."""
    quick = load_config(None, ("consensus.timeout_min=10s",), {})
    assert settings_of(quick, recipe_of(quick)).round.window_min_s == 2.0
    fixed = load_config(None, ("consensus.timeout_min=30s",), {})
    assert settings_of(fixed, recipe_of(fixed)).round.window_min_s is UNSET


def test_a_run_is_private_unless_it_says_that_it_is_public():
    for said, is_public in (((), False), (("run.public=true",), True), (("run.open_to_all=true",), True)):
        config = load_config(None, said, {})
        assert settings_of(config, recipe_of(config)).is_public == is_public


def test_a_run_without_an_end_still_has_a_schedule():
    config = load_config(None, ("run.rounds=0",), {})
    assert settings_of(config, recipe_of(config)).rounds == 0
    assert recipe_of(config).inner.total_steps > 10_000


def test_a_codec_or_model_that_does_not_exist_is_named():
    for wrong in ("sync.up=int3", "model.name=gpt-9"):
        with pytest.raises(UsageError, match="known are"):
            recipe_of(load_config(None, (wrong,), {}))


def test_a_codec_takes_the_ratio_and_the_level_that_it_leaves_open():
    """A number in the codec's own name wins; a number that no codec asks for is an error."""
    sets = ("sync.up=topk+int8+zstd", "sync.compression_ratio=0.05", "sync.compression_level=9")
    assert recipe_of(load_config(None, sets, {})).coding.up == "topk:0.05+int8+zstd:9"
    named = load_config(None, ("sync.up=topk:0.2+int8+zstd",), {})
    assert recipe_of(named).coding.up == "topk:0.2+int8+zstd:3"
    later = load_config(None, (*sets[1:], "sync.phases=0.5:8:topk,0.8:8:topk:0.1+zstd"), {})
    phases = recipe_of(later).schedule.phases
    assert [(p.up, p.down) for p in phases] == [("topk:0.05", ""), ("topk:0.1+zstd:9", "")]
    assert "topk+int8" in trouble("sync.compression_ratio=0.05", "sync.phases=0.8:8:topk:0.1").fix
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


def test_a_run_whose_founders_no_vertex_could_list_is_not_founded():
    """30 billion values in fp32 are 2,300 parts, and a vertex says of each who is in it."""
    thirty = RunSettings(update_bytes=120 * 10**9, start_peers=3)
    assert check_vertex_room(thirty) is thirty
    with pytest.raises(UsageError, match=r"E-RUN-14 .*120 GB.*waits for 32\n.*\n.*wait for \d+ members at most"):
        check_vertex_room(replace(thirty, start_peers=32))
    with pytest.raises(UsageError, match="choose a smaller model"):
        check_vertex_room(replace(thirty, update_bytes=10**12))
    with pytest.raises(UsageError, match="E-RUN-14"):
        founding_blobs(start_of_built_in(diloco("gpt-nano"), "stdlib"), RunSettings(min_peers=4000))
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
        check_vertex_room(replace(settings, update_bytes=28 * 10**9, start_peers=3))
    assert 'run.votes = "ed25519"' in refused.value.fix


def test_what_a_resumed_run_does_not_hear_is_known():
    """`atoll up --set` in a folder that holds a run says so, but for what may differ at every start."""
    for own in ("node.threads=1", "node.device=cuda:1", "keep.newest=9", "network.upload_bytes_s=9"):
        assert of_the_run(load_config(None, (own,), {})) == RunConfig()
    for common in ("run.rounds=9", "keep.coded=6/10"):
        assert of_the_run(load_config(None, (common,), {})) != RunConfig()


@pytest.mark.parametrize("text", ["6", "10/6", "6/6", "0/4", "6/33", "a/b", "6/10/3"])
def test_what_is_no_code_of_pieces_is_refused(text: str):
    refused = trouble(f'keep.coded="{text}"')
    assert refused.code == "E-CFG-12" and 'keep.coded = "6/10"' in refused.fix


def test_genesis_fixes_how_older_states_are_cut_and_nothing_where_they_are_not():
    """A run without pieces has the genesis that it had before there were any."""
    pytest.importorskip("pyeclib")
    config = load_config(None, ("keep.coded=6/10", "keep.every_rounds=5", "keep.repair_after=1min"), {})
    assert settings_of(config, recipe_of(config)).coded == ErasureParams(6, 10, 5, 60.0)
    plain = load_config(None, (), {})
    assert b"coded" not in encode_settings(settings_of(plain, recipe_of(plain)))
