"""Compatibility of a run's features: what each one needs of the run, and what each one takes away.

Two features exclude each other if one takes away what the other needs. `docs/status.md` holds the table of pairs.

Invariants:
- Genesis and run.toml are judged by this one table.
- The table is part of the rules of a run, so it names features that a program may lack.
Not responsible for: values of one setting, limits that follow from a recipe or from other members.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RunFeature:
    """One choice of a run. `needs` and `removes` map a property of the run to the reason."""

    instead: str  # what a founder writes to do without it
    needs: Mapping[str, str] = field(default_factory=dict[str, str])
    removes: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class FeatureConflict:
    """Two features of a run that exclude each other."""

    remover: str
    needer: str
    cause: str

    @property
    def fix(self) -> str:
        return f"write {FEATURES[self.needer].instead}, or {FEATURES[self.remover].instead}"


FEATURES: dict[str, RunFeature] = {
    "members that are trusted": RunFeature(
        'run.trust = "community" or "open"', removes={"members that may lie": "this run has none"}
    ),
    "members that may lie": RunFeature(
        'run.trust = "private"',
        {"readable rows": "a sum of rows can neither be sorted nor compared"},
        {"trusted members": "members of this run may lie"},
    ),
    "Raft": RunFeature('consensus.protocol = "bft"', {"trusted members": "one phase of votes withstands no liar"}),
    "statistics against liars": RunFeature(
        'sync.statistic = "mean"', {"members that may lie": "the statistic withstands liars"}
    ),
    "weights by distances": RunFeature(
        'sync.statistic = "trimmed_mean", "median" or "meamed"',
        removes={"repeatable results": "an owner alone reports the distances, which no other member checks"},
    ),
    "several owners per part": RunFeature(
        'run.trust = "community", where openings check the owners\' sums',
        {"repeatable results": "the owners of a part repeat each other's results"},
    ),
    "one owner per part": RunFeature(
        'run.trust = "open"', removes={"several owners": "the owners of a part do not check each other"}
    ),
    "openings": RunFeature(
        "run.openings = 0",
        {
            "members that may lie": "openings find owners that lie",
            "one codec": "blocks of results are of one codec",
        },
    ),
    "results that are not opened": RunFeature(
        "run.openings = 0.03", removes={"opened results": "results are not opened"}
    ),
    "parts that liars own alone": RunFeature(
        "run.captured_parts = 0",
        {
            "several owners": "other owners of a part find most lies",
            "opened results": "openings find the lies that no other owner finds",
        },
    ),
    "sums of rows on the way": RunFeature(
        'sync.topology = "butterfly"',
        removes={
            "readable rows": "this topology combines rows on the way",
            "own timing": "a row waits for the rows of all members on its way",
        },
    ),
    "no reputations": RunFeature("run.reputation = true", removes={"reputations": "this run keeps none"}),
    "replay audits": RunFeature(
        "run.audit_rate = 0",
        {
            "assigned steps": "an auditor replays the steps that a member was assigned",
            "own samples": "an auditor replays the samples that a member was assigned",
            "plain arithmetic": "an auditor replays steps on another machine, in plain fp32",
            "one codec": "auditors know one codec",
        },
    ),
    "loss scores": RunFeature(
        "run.score_rate = 0",
        {
            "own samples": "a scorer uses the samples that a member was assigned",
            "reputations": "scores change nothing but reputations",
            "one codec": "scorers know one codec",
        },
    ),
    "redundant training": RunFeature(
        "run.twin_rate = 0",
        {
            "assigned steps": "two members take the same steps",
            "reputations": "comparisons change nothing but reputations",
        },
        {"own samples": "redundant training gives some members another member's samples"},
    ),
    "bf16 or compiled steps": RunFeature(
        'train.precision = "fp32" and train.compile = false; run.score_rate can check other steps instead',
        removes={"plain arithmetic": "machines round bf16 and compiled steps differently"},
    ),
    "members that train apart": RunFeature(
        'sync.apart = "wait"',
        {
            "next update": "late work is sent with the next update",
            "whole rounds": "late work is counted in whole rounds",
            "one round length": "partitioned members count in rounds of one length",
        },
        {
            "assigned steps": "steps taken apart are not assigned",
            "one batch size": "members that train apart use a batch size that the others have left behind",
        },
    ),
    "a quorum of updates": RunFeature(
        "sync.quorum = 0",
        {
            "trusted members": "the first to commit ends the training of all",
            "next update": "late steps are sent with the next update",
            "own timing": "a round goes on without its slow members",
        },
        {
            "assigned steps": "slow members send steps of two rounds",
            "whole rounds": "slow members carry steps over from other rounds",
            "one batch size": "slow members send steps of two batch sizes",
        },
    ),
    "sampled trainers": RunFeature(
        "run.sample = 0 and run.sample_peers = 0", removes={"next update": "the member may not be drawn for it"}
    ),
    "batches that grow": RunFeature(
        "train.adaptive_batching = false", {"one batch size": "all members use the batch size of the round"}
    ),
    "rounds that follow the run": RunFeature(
        "no key by which rounds follow the run",
        {"one round length": "rounds that follow the run have a length of their own"},
    ),
    "phases of several lengths": RunFeature(
        'sync.phases = ""',
        removes={
            "one codec": "codecs change between phases",
            "one round length": "rounds change their length between phases",
        },
    ),
}


def conflicts_among(features: Collection[str]) -> Iterator[FeatureConflict]:
    """Every conflict between two of these features, in the order of the table."""
    on = [name for name in FEATURES if name in features]
    for needer in on:
        for wanted, why in FEATURES[needer].needs.items():
            for remover in on:
                if (how := FEATURES[remover].removes.get(wanted)) is not None:
                    yield FeatureConflict(remover, needer, f"{why}, and {how}")


def problem_with(feature: str, others: Collection[str]) -> str:
    """Why these features exclude this one; empty if they do not."""
    found = conflicts_among({feature, *others})
    return "; ".join(conflict.cause for conflict in found if feature in (conflict.remover, conflict.needer))
