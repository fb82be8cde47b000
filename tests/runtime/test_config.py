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
from atoll.base.units import parse_duration_s, seconds_text
from atoll.peer.config.other_keys import OTHER_KEYS
from atoll.peer.config.reading import decode_config
from atoll.peer.config.render import commented_toml, first_toml
from atoll.peer.config.sections import RunConfig, declarations, default_of, keys, of_the_run, usual_of, value_of
from atoll.peer.settings import RunSettings, encode_settings
from atoll.policy.capability_terms import ErasureParams
from atoll.policy.plan import RoundSettings
from atoll.runtime.config import data_of, load_config, recipe_of, settings_in_effect, settings_of
from atoll.runtime.training_spec import check_vertex_room, founding_blobs, start_of_built_in
from atoll.training.recipe.recipes import diloco

KEY = re.compile(r"(?<![\w./])(?:run|model|data|train|sync|consensus|network|keep|node)\.\w+")
ELSEWHERE = """
enable_nat_traversal enable_relay alpha compression_level outer_lr inner_steps sync_every h num_peers max_peers
learning_rate batch_size target_batch_size compression bootstrap_peers initial_peers port host listen seed
heartbeat_interval timeout byzantine quantization overlap_steps backend"""


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


@pytest.mark.parametrize("name", ELSEWHERE.split())
def test_a_key_of_another_system_is_answered_with_the_key_that_does_the_same(name: str):
    """In a section or without one: the answer names a key, or says why there is none."""
    for slip in (f"{name}=3", f"node.{name}=3"):
        refused = trouble(slip)
        assert KEY.search(refused.what.partition("did you mean")[2] + refused.fix) or "leave it out" in refused.fix


def test_answers_about_other_systems_name_keys_that_exist_and_no_key_of_ours():
    assert {key for answer in OTHER_KEYS.values() for key in KEY.findall(answer)} <= set(keys())
    assert not OTHER_KEYS.keys() & {key.partition(".")[2] for key in keys()}
    assert "train.inner_steps" in trouble("sync_frequency=50").fix
    assert "atoll join" in trouble("network.initial_peers=[]").fix


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("train.lr=fast", "train.lr: expected a number, not 'fast'"),
        ("train.batch=2.5", "expected a whole number, not 2.5"),
        ("train.lr=inf", "train.lr: expected a number <= 1000000.0"),
        ("run.train_max=inf", "run.train_max: expected a number <= 1000000000.0"),
        ("network.listen_addresses=everywhere", "expected a list, not 'everywhere'"),
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


def test_a_refused_value_is_shown_with_its_file_and_line_or_its_variable(tmp_path: Path):
    """A header, a dotted key and the environment; `--set` needs no place, and a table on one line has only keys."""
    file = tmp_path / "run.toml"
    for text, sets, environment, told in (
        (
            "# mine\n[run]\nname = 'a'\nrounds = \"many\"\n",
            (),
            {},
            f"{file}:4: run.rounds: expected a whole number",
        ),
        ("[train]\nlr=1\n[node]\nlr = 1\n", (), {}, f"{file}:4: unknown key node.lr"),
        ("run.rounds = -2\n", (), {}, f"{file}:1: run.rounds"),
        ("[train]\nlearning_rate = 1\n", (), {}, f"{file}:2: train.learning_rate is not a key of Atoll"),
        ("[run]\nrounds = 3\n", (), {"ATOLL_RUN__ROUNDS": "many"}, "$ATOLL_RUN__ROUNDS: run.rounds"),
        ("[run]\nrounds = 3\n", ("run.rounds=many",), {}, "run.rounds: expected a whole number, not 'many'"),
        ("run = {rounds = 'many'}\n", (), {}, "run.rounds: expected a whole number, not 'many'"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError) as refused:
            load_config(file, sets, environment)
        assert refused.value.what.startswith(told)


def test_only_a_name_that_is_near_is_guessed():
    assert "did you mean" not in trouble("train.foo=3").what
    assert trouble('train.recipe="dilocco"').what.endswith('did you mean "diloco"?')
    with pytest.raises(UsageError, match=r"E-CFG-02 model\.name: .* \(did you mean 'gpt-tiny'\?\); known are"):
        recipe_of(load_config(None, ("model.name=gpt-tinny",), {}))
    with pytest.raises(UsageError, match=r"E-RUN-18 [\s\S]*private"):
        settings_in_effect(None, ("train.recipe=sparseloco", "run.trust=community", "run.start_peers=6"))


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("3days", 259200), ("3 days", 259200), ("5minutes", 300), ("1 week", 604800), ("2h", 7200)],
)
def test_durations_may_be_written_in_words(written: str, seconds: float):
    assert parse_duration_s(written) == seconds
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration_s("3 fortnights")


def test_spans_of_time_have_two_units_at_most():
    spans = {0.25: "250 ms", 59.4: "59.4 s", 300: "5 min", 75: "1 min 15 s", 3599.9: "1 h", 86390: "24 h"}
    spans |= {5400: "1 h 30 min", 604_790: "7 d", 183_600: "2 d 3 h"}
    assert {span: seconds_text(span) for span in spans} == spans


def test_a_file_that_is_no_toml_says_where(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("[train]\nlr = \n")
    with pytest.raises(UsageError, match="line 2"):
        load_config(file, (), {})
    with pytest.raises(UsageError, match="atoll init"):
        load_config(tmp_path / "other.toml", (), {})


# ---- the pages are the code --------------------------------------------------------------------------------


def test_every_declaration_is_complete_and_names_keys_that_exist():
    """An explanation, a value for a key that may be left out, and twelve keys that most people change."""
    for key, setting in declarations().items():
        assert setting.about.endswith("."), key
        assert {k for k in KEY.findall(setting.about) if not k.endswith(".toml")} <= set(keys()), key
        assert usual_of(key) is not None and (default_of(key) is None) >= bool(setting.trust), key
    assert sum(setting.level == "first" for setting in declarations().values()) == 12


def test_the_short_file_is_the_default_run_in_25_lines():
    text = first_toml()
    assert len(text.splitlines()) <= 25 and decode_config(tomllib.loads(text)) == RunConfig()
    written = re.sub(r"^#(\w+ = )", r"\1", text, flags=re.MULTILINE)
    assert recipe_of(decode_config(tomllib.loads(written))) == recipe_of(RunConfig())
    assert all("#" in line for line in text.splitlines() if " = " in line)


def test_the_commented_file_is_the_default_run():
    """With every comment sign taken away it must decode, and be the run that an empty file describes."""
    bare = re.sub(r"^#(\w+ = )", r"\1", commented_toml(), flags=re.MULTILINE)
    tree = tomllib.loads(bare)
    assert {f"{s}.{k}" for s, table in tree.items() for k in table} == set(keys())
    config, empty = decode_config(tree), decode_config({})
    assert recipe_of(config) == recipe_of(empty)
    assert settings_of(config, recipe_of(config)) == settings_of(empty, recipe_of(empty))


# ---- what it becomes ---------------------------------------------------------------------------------------


def test_values_of_omitted_keys_are_those_of_the_default_run():
    """The page and the commented file show what the recipe, the trust and genesis then have."""
    shown = {key: value for key, value, _ in settings_in_effect(None, ())}
    assert shown == {key: usual_of(key) for key in keys()}


def test_genesis_holds_the_settings_that_it_copies_unchanged():
    """Every declared place exists, and another value in run.toml is the one in genesis."""
    other = {bool: "true", int: "7", float: "0.5", str: "star"}
    for key, setting in declarations().items():
        name = setting.genesis.removeprefix("round.").partition(".")[0]
        kind = RoundSettings if setting.genesis.startswith("round.") else RunSettings
        assert not name or name in kind.__struct_fields__, key
        if name and default_of(key) is not None:
            written = "6s" if key == "run.suspect" else other[type(default_of(key))]
            config = load_config(None, (f"{key}={written}", "run.reputation=true", "run.train_max=200"), {})
            genesis = settings_of(config, recipe_of(config))
            assert getattr(genesis.round if kind is RoundSettings else genesis, name) == value_of(config, key), key


def test_settings_in_effect_have_a_source(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('[run]\ntrust = "community"\nstart_peers = 7\n[train]\nrecipe = "data_parallel"\n')
    found = {key: (value, source) for key, value, source in settings_in_effect(file, ("train.lr=0.1",))}
    assert found["train.lr"] == (0.1, "set") and found["run.name"] == ("run", "default")
    assert found["run.min_peers"] == (5, "run.trust") and found["run.openings"] == (0.03, "run.trust")
    assert found["sync.up"] == ("fp32", "train.recipe") and found["train.outer_lr"] == (None, "train.recipe")


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
