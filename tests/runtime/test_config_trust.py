"""What a run.toml makes of a trust: rules that withstand liars, what is checked, and what is refused beside it."""

from __future__ import annotations

import pytest
from msgspec import UNSET
from msgspec.structs import replace
from written import trouble, trusted

from atoll.base.errors import PeerFault, UsageError
from atoll.base.limits import COMMITTEE_MOST
from atoll.peer.settings import decode_settings, encode_settings
from atoll.policy.capability_terms import PartitionPolicy, StateValidationTerms
from atoll.policy.fault_tolerance import DISTANCES
from atoll.policy.participation import ParticipationPolicy
from atoll.policy.presets import PRESETS
from atoll.runtime.config import load_config, missing_protections, recipe_of, settings_of
from atoll.runtime.training_spec import founding_blobs, start_of_built_in
from atoll.training.recipe.recipes import sample_problem

# ---- robust statistics -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (("run.min_peers=4", "run.start_peers=4"), "this run has none"),
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
        (("sync.statistic=krum", "run.min_peers=7", "run.start_peers=7"), "this run has none"),
        (("sync.statistic=robust", *COMMUNITY, "sync.topology=ring"), "nor compared"),
        (("sync.statistic=robust", "run.trust=community", "run.min_peers=4", "run.start_peers=7"), "it takes 5"),
        (("sync.statistic=krum", "run.trust=community", "run.min_peers=4", "run.start_peers=7"), "it takes 5"),
        (
            ("sync.statistic=nnm + krum", "run.trust=community", "run.min_peers=4", "run.start_peers=7"),
            "it takes 5",
        ),
        (("sync.statistic=nnm + median", "run.min_peers=7", "run.start_peers=7"), "this run has none"),
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


@pytest.mark.parametrize("name", DISTANCES)
def test_every_rule_by_distance_goes_with_owners_that_are_believed_and_not_with_several(name: str):
    """With "open" it is refused by name, with the rules that several owners carry out alike; no default is one."""
    asked = (f"sync.statistic={name}", "run.min_peers=7", "run.start_peers=7")
    settings, _ = trusted(*asked, "run.trust=community")
    assert settings.statistic == name and not settings.witnessed
    refused = trouble(*asked, "run.trust=open")
    assert refused.code == "E-CFG-11" and f'"{name}" cannot work with run.trust = "open"' in refused.what
    assert "which no other member checks" in refused.cause and '"trimmed_mean", "median"' in refused.fix
    assert 'run.trust = "community"' in refused.fix
    assert not any(set(preset.statistics) & {*DISTANCES} for preset in PRESETS.values() if preset.witnessed)


def test_genesis_of_a_peer_that_has_both_is_refused():
    """Its settings are read before anything else: no peer founds, joins or reduces by them."""
    settings, _ = trusted("run.trust=open", "run.min_peers=7", "run.start_peers=7")
    encoded = encode_settings(replace(settings, statistic="robust"))
    with pytest.raises(PeerFault, match="weights by distances and several owners per part"):
        decode_settings(encoded)


@pytest.mark.parametrize("name", ["nnm + mean", "arc + trimmed_mean", "nnm+median", "arc + nnm + median", "bulyan"])
def test_a_rule_that_rounds_do_not_know_is_refused_by_name_with_those_that_they_do(name: str):
    refused = trouble(f"sync.statistic={name}", "run.trust=community", "run.min_peers=7", "run.start_peers=7")
    assert refused.code == "E-CFG-02" and "sync.statistic" in refused.what and "nnm + trimmed_mean" in str(refused)


def test_few_owners_watch_a_part_where_openings_find_what_they_say_together():
    """Else one more than may lie: by word, and where codecs leave nothing that could be opened."""
    asked = ("run.trust=open", *COMMUNITY[1:])
    config = load_config(None, asked, {})
    settings = settings_of(config, recipe_of(config))
    assert settings.captured_share == 0.05 and settings.opened is not None and settings.opened.share == 0.03
    for word in ("run.captured_parts=0", "run.openings=0", "sync.up=topk+int8"):
        config = load_config(None, (*asked, word), {})
        settings = settings_of(config, recipe_of(config))
        assert settings.captured_share == 0 and settings.witnessed and settings.opened is None
    refused = trouble(*asked, "run.captured_parts=0.1", "run.openings=0")
    assert refused.code == "E-CFG-13" and "not opened" in refused.cause
    config = load_config(None, (*asked, "run.captured_parts=0.1", "sync.up=topk+int8"), {})
    with pytest.raises(UsageError, match="E-RUN-17"):
        settings_of(config, recipe_of(config))
    for word, lacks in (("run.rounds=9", True), ("run.captured_parts=0", False), ("run.openings=0", False)):
        config = load_config(None, (*asked, "sync.up=topk+int8", word), {})
        told = missing_protections(config, recipe_of(config), 0)
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
    assert refused.code == "E-CFG-11" and "this run has none" in refused.cause


def test_codecs_whose_answers_cannot_be_opened_are_refused_by_name():
    """The way out is said: another codec, or owners that are believed."""
    for codecs in (("sync.up=topk+int8",), ("sync.down=sparse+int8",), ("sync.up=randk",)):
        asked = load_config(None, (*COMMUNITY, *codecs, "run.openings=0.05"), {})
        with pytest.raises(UsageError, match="E-RUN-17") as refused:
            settings_of(asked, recipe_of(asked))
        assert "2bit" in refused.value.fix and "run.openings = 0" in refused.value.fix
        config = load_config(None, (*COMMUNITY, *codecs), {})  # nobody asked: the run has none, with a word
        assert settings_of(config, recipe_of(config)).opened is None
        assert any("run.openings = 0" in text for text in missing_protections(config, recipe_of(config), 0))
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


# ---- what a trust stands for ---------------------------------------------------------------------------------


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
    [((4, 4), "trimmed_mean"), ((5, 5), "robust"), ((5, 65), "trimmed_mean")],
)
def test_a_default_rule_is_one_that_the_run_can_keep(members: tuple[int, int], statistic: str):
    """More than 64: no distances."""
    least, most = members
    settings, lacks = trusted("run.trust=community", f"run.min_peers={least}", f"run.start_peers={most}")
    assert settings.statistic == statistic and settings.reputed and lacks == []


@pytest.mark.parametrize(
    ("start", "statistic", "least"),
    [(4, "trimmed_mean", 4), (6, "robust", 5), (65, "trimmed_mean", 4)],
)
def test_who_says_only_how_many_members_to_wait_for_has_the_rule_for_so_many(
    start: int, statistic: str, least: int
):
    """`run.start_peers = 6` is enough to withstand a liar, and nobody need know `run.min_peers` for that."""
    settings, lacks = trusted("run.trust=community", f"run.start_peers={start}")
    assert (settings.statistic, settings.min_peers) == (statistic, least) and lacks == []
    assert trusted(f"run.start_peers={start}")[0].min_peers == 1, "where nobody lies nobody waits for a rule"


@pytest.mark.parametrize("trust", ["community", "open"])
@pytest.mark.parametrize("more", [(), ("run.min_peers=1", "run.start_peers=6"), ("sync.statistic=mean",)])
def test_a_run_whose_members_may_lie_is_refused_below_four_with_both_ways_out(trust: str, more: tuple[str, ...]):
    """The surprise: "community" used to take a mean there, and one liar moved the loss from 2.8 to 160."""
    refused = trouble(f"run.trust={trust}", *more)
    assert refused.code == "E-CFG-11" and "withstands no liar among 1 member (run." in refused.what
    assert "run.start_peers = 4" in refused.fix and 'run.trust = "private"' in refused.fix
    asked = (f"run.trust={trust}", "sync.statistic=mean", "run.start_peers=4")
    assert trusted(*asked)[0].statistic == "mean", "four that agree on a mean have said so"


@pytest.mark.parametrize("trust", PRESETS)
def test_members_look_at_the_model_where_they_may_lie_about_every_hundred_steps(trust: str):
    """Whatever is written stands; a private run looks only where that is written."""
    for steps, every in ((1, 16), (50, 2), (400, 1)):
        rule = trusted(f"run.trust={trust}", "run.start_peers=7", f"train.inner_steps={steps}")[0].validated
        assert rule == (None if trust == "private" else StateValidationTerms(every=every))
    for written in (0, 3):
        rule = trusted(f"run.trust={trust}", "run.start_peers=7", f"run.validate_every={written}")[0].validated
        assert rule == (StateValidationTerms(every=written) if written else None)


def test_who_draws_sites_with_data_of_their_own_hears_of_the_rule_for_data_that_differ():
    """Not where everybody trains on the run's data, where members trust each other, or where a rule was chosen."""
    drawn = ("run.sample_peers=5", "run.min_peers=7", "run.start_peers=7")
    asked = [*drawn, "run.trust=community"]
    for sets, told in (
        (asked, True),
        ((*drawn, "run.trust=open"), True),
        (asked[1:], False),
        (drawn, False),
        ((*asked, "sync.statistic=robust"), False),
        ((*asked, "sync.statistic=clipped_caf"), False),
    ):
        words = " ".join(text for text in trusted(*sets)[1] if 'sync.statistic = "clipped_caf"' in text)
        assert bool(words) is told, sets
        assert ('run.trust = "community"' in words) is ("run.trust=open" in sets), "with open the rule is refused"


def test_what_cannot_be_audited_is_not_unless_somebody_asks_for_it():
    """Streaming overlaps: the default is no audits, with a word; asked for, the founding is refused."""
    sets = ("run.trust=community", "run.min_peers=5", "run.start_peers=5", "train.recipe=streaming")
    settings, lacks = trusted(*sets)
    assert settings.audited_share == 0.0 and len(lacks) == 1 and "run.audit_rate = 0" in lacks[0]
    assert trusted(*sets, "run.audit_rate=0")[1] == []
    asked, _ = trusted(*sets, "run.audit_rate=0.5")
    assert asked.audited_share == 0.5
    with pytest.raises(UsageError, match="E-RUN-16"):
        founding_blobs(start_of_built_in(recipe_of(load_config(None, sets, {})), "stdlib"), asked)


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
        ("sync.apart=merge", "were not assigned", True),
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
    assert trusted(MERGED)[0].apart == PartitionPolicy("merge", 10)
    assert trusted("sync.apart=drop", "sync.apart_rounds=3")[0].apart == PartitionPolicy("drop", 3)
    assert "E-CFG-10" in str(trouble("sync.apart_rounds=3"))
    assert (
        "E-CFG-13" in str(trouble(MERGED, "run.audit_rate=0.1"))
        and "run.audit_rate = 0" in trouble(MERGED, "run.audit_rate=0.1").fix
    )
    settings, lacks = trusted(MERGED, "run.trust=community", "run.min_peers=5", "run.start_peers=5")
    assert settings.audited_share == 0.0 and settings.apart_terms == PartitionPolicy("merge", 10)
    assert any("sync.apart" in text and "run.audit_rate = 0" in text for text in lacks)


def test_who_trains_in_a_round_is_a_word_of_genesis_and_what_cannot_be_sampled_is_refused():
    """Left out it leaves no byte. Where members may lie, as many at least as withstand one."""
    assert trusted()[0].round.sample is UNSET and trusted("run.sample=1")[0].round.sample is UNSET
    assert trusted("run.sample=0.5")[0].round.sample == ParticipationPolicy(thousandths=500)
    assert trusted("run.sample_peers=10", "node.group=hospital-a")[0].round.sample == ParticipationPolicy(peers=10)
    liars = ("run.trust=community", "run.min_peers=9", "run.start_peers=9")
    assert trusted("run.sample=0.1", *liars)[0].round.sample == ParticipationPolicy(thousandths=100, least=5)
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
        founding_blobs(start_of_built_in(recipe_of(config), "stdlib"), settings_of(config, recipe_of(config)))


def test_everything_that_a_trust_stands_for_can_be_written_otherwise():
    sets = ("run.trust=open", "run.min_peers=7", "run.start_peers=7", "sync.statistic=mean", "run.audit_rate=0")
    settings, lacks = trusted(*sets, "run.reputation=false")
    assert (settings.statistic, settings.audited_share, settings.reputed, lacks) == ("mean", 0.0, False, [])
    assert trusted("run.reputation=true")[0].reputed


@pytest.mark.parametrize("trust", ["community", "open"])
def test_raft_is_refused_where_members_may_lie(trust: str):
    """One phase of votes withstands no liar; the error names both settings."""
    refused = trouble(f"run.trust={trust}", "run.min_peers=4", "run.start_peers=4", "consensus.protocol=raft")
    assert "consensus.protocol" in (said := f"{refused.what} {refused.cause}") and "run.trust" in said
