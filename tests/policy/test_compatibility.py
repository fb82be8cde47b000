"""Compatibility of a run's features: one table for genesis, run.toml and docs/status.md."""

from __future__ import annotations

from pathlib import Path

from atoll.peer.config.render import compatibility_table
from atoll.peer.config.sections import RunConfig, RunSection
from atoll.peer.config.validate import features_in
from atoll.peer.settings import RunSettings, features_of
from atoll.policy.compatibility import FEATURES, conflicts_among, problem_with

STATUS = Path(__file__).parents[2] / "docs" / "status.md"


def test_the_page_shows_the_table_that_runs_are_judged_by():
    """After a change: print(compatibility_table()), between the two comments of the page."""
    _, _, rest = STATUS.read_text().partition("<!-- table: compatibility -->\n")
    assert rest.partition("<!-- end of table -->")[0] == compatibility_table()


def test_every_property_is_needed_by_one_feature_and_removed_by_another():
    needed = {name for feature in FEATURES.values() for name in feature.needs}
    assert needed == {name for feature in FEATURES.values() for name in feature.removes}
    assert all(conflict.remover != conflict.needer for conflict in conflicts_among(FEATURES))


def test_genesis_and_config_name_features_of_the_table():
    assert features_of(RunSettings()) <= FEATURES.keys() and features_in(RunConfig()).keys() <= FEATURES.keys()
    assert not list(conflicts_among(features_of(RunSettings()))) and not list(
        conflicts_among(features_in(RunConfig()))
    )


def test_a_conflict_names_both_settings_its_cause_and_what_to_write():
    config = RunConfig(run=RunSection(audit_rate=0.1, twin_rate=0.2, reputation=True))
    assert features_in(config)["replay audits"] == "run.audit_rate = 0.1"
    (conflict,) = conflicts_among(features_in(config))
    assert (conflict.remover, conflict.needer) == ("redundant training", "replay audits")
    assert "another member's samples" in conflict.cause
    assert conflict.fix == "write run.audit_rate = 0, or run.twin_rate = 0"
    assert problem_with("replay audits", ["redundant training"]) == conflict.cause
    assert not problem_with("Raft", ["replay audits", "redundant training"])
