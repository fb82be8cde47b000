"""Config validation: recipes that do not exist yet, keys without effect, and conflicts between keys.

Invariants:
- A recipe without support in real runs is refused with "not yet".
- Every refusal gives a reason and what to write instead.
Not responsible for: limits that follow from a model or from other members.
"""

from __future__ import annotations

import difflib
import re

from atoll.base.errors import UsageError
from atoll.base.limits import PEERS_MAX
from atoll.base.units import counted_text
from atoll.peer.config.defaults import coded_of, is_validated, keeps_records, min_peers_of, sample_of, tolerance_of
from atoll.peer.config.recipe_names import EXPERIMENTS, RECIPES
from atoll.peer.config.sections import RunConfig, RunSection, default_of, toml_text, value_of
from atoll.policy.compatibility import conflicts_among
from atoll.policy.fault_tolerance import DISTANCES, StatisticName, peers_for_one_liar


def demand_sense(config: RunConfig) -> None:
    """Raise UsageError for the first setting that would not do what it says."""
    _check_made(config)
    _check_sense(config)


def _check_made(config: RunConfig) -> None:
    """Refuse what does not exist yet."""
    recipe = config.train.recipe
    if recipe in EXPERIMENTS:
        raise UsageError(
            "E-CFG-04",
            f'train.recipe = "{recipe}": not yet',
            cause="it runs in one process so far: atoll.experiment",
            fix=f"choose one of {', '.join(RECIPES)}",
        )
    if recipe not in RECIPES:
        near = difflib.get_close_matches(recipe, RECIPES, 1, 0.6)
        guess = f'; did you mean "{near[0]}"?' if near else ""
        raise UsageError(
            "E-CFG-02",
            f'train.recipe: no recipe is called "{recipe}"{guess}',
            fix=f"choose one of {', '.join(RECIPES)}",
        )
    protocol = config.consensus.protocol
    if protocol == "snow":  # specs/raft.md: what a preference gadget would decide
        raise UsageError(
            "E-CFG-11",
            'consensus.protocol = "snow" decides no round: a preference is final with a probability only',
            cause="the probability holds for 2,000 peers with k = 10, alpha = 8 and beta = 150 (arXiv 1906.08936), "
            "but a run begins with one peer; strangers could also check no certificate. In a "
            "run with two branches this poll reports the preferred one with any protocol",
            fix='leave it at "bft", or write "raft" where run.trust = "private"',
        )
    if protocol not in ("bft", "raft"):
        raise UsageError(
            "E-CFG-02", f'consensus.protocol: there is no protocol called "{protocol}"', fix='leave it at "bft"'
        )


def _check_sense(config: RunConfig) -> None:
    coded_of(config.keep)
    for check in (
        _check_updates,
        _check_tolerance,
        _check_features,
        _check_statistic,
        _check_topology,
        _check_sample,
        _check_codec_options,
        _check_effort,
        _check_partition_training,
        _check_validation,
        _check_order,
    ):
        check(config)


def _check_tolerance(config: RunConfig) -> None:
    run, tolerance = config.run, config.run.byzantine_tolerance
    if tolerance is not None and not 0 <= tolerance <= 1 / 3 + 0.004:
        raise UsageError(
            "E-CFG-05",
            f"run.byzantine_tolerance = {tolerance:g} is impossible",
            cause="no agreement survives more than a third of liars (Pease, Shostak, Lamport 1980)",
            fix="write 0 (trust = private) or 0.33 (trust = community or open)",
        )
    if tolerance and tolerance * PEERS_MAX < 1:
        raise UsageError(
            "E-CFG-05",
            f"run.byzantine_tolerance = {tolerance:g} withstands no liar: it is less than one of {PEERS_MAX} "
            "members, the most that a run has",
            fix="write 0.33, or leave it out",
        )
    if tolerance is not None and (tolerance > 0) == (run.trust == "private"):
        raise UsageError(
            "E-CFG-05",
            f'run.byzantine_tolerance = {tolerance:g} does not fit run.trust = "{run.trust}"',
            fix=f'write run.trust = "{"community" if tolerance > 0 else "private"}"',
        )


def features_in(config: RunConfig) -> dict[str, str]:
    """Features that this config turns on, each with its setting. A recipe may turn on more."""
    run, sync, train = config.run, config.sync, config.train
    believes, sample = run.trust == "private", "run.sample_peers" if run.sample_peers else "run.sample"
    keys = {
        "members that are trusted": ("run.trust", believes),
        "members that may lie": ("run.trust", not believes),
        "Raft": ("consensus.protocol", config.consensus.protocol == "raft"),
        "statistics against liars": ("sync.statistic", sync.statistic not in (None, "mean")),
        "weights by distances": ("sync.statistic", sync.statistic in DISTANCES),
        "several owners per part": ("run.trust", run.trust == "open"),
        "one owner per part": ("run.trust", run.trust != "open"),
        "openings": ("run.openings", run.openings),
        "results that are not opened": ("run.openings", run.openings == 0),
        "parts that liars own alone": ("run.captured_parts", run.captured_parts),
        "sums of rows on the way": ("sync.topology", sync.topology in ("ring", "tree", "hierarchical")),
        "no reputations": ("run.trust" if run.reputation is None else "run.reputation", not keeps_records(config)),
        "replay audits": ("run.audit_rate", run.audit_rate),
        "loss scores": ("run.score_rate", run.score_rate),
        "redundant training": ("run.twin_rate", run.twin_rate),
        "bf16 or compiled steps": (
            "train.compile" if train.compile else "train.precision",
            train.compile or train.precision != "fp32",
        ),
        "members that train apart": ("sync.apart", sync.apart != "wait"),
        "a quorum of updates": ("sync.quorum", sync.quorum),
        "sampled trainers": (sample, sample_of(config)),
        "batches that grow": ("train.adaptive_batching", train.adaptive_batching),
    }
    return {name: f"{key} = {toml_text(value_of(config, key))}" for name, (key, on) in keys.items() if on}


def _check_features(config: RunConfig) -> None:
    on = features_in(config)
    for conflict in conflicts_among(on):
        pair = sorted((on[conflict.remover], on[conflict.needer]), key=lambda setting: "run.trust" in setting)
        raise UsageError(
            "E-CFG-11" if "run.trust" in pair[1] else "E-CFG-13",
            f"{pair[0]} cannot work with {pair[1]}",
            cause=conflict.cause,
            fix=conflict.fix,
        )


def _check_codec_options(config: RunConfig) -> None:
    used = f"{config.sync.up or ''}+{config.sync.down or ''}+{config.sync.phases}"
    for key, words, like in (
        ("sync.compression_ratio", ("topk", "randk"), "topk+int8"),
        ("sync.compression_level", ("zstd",), "int8+zstd"),
    ):
        value = getattr(config.sync, key.removeprefix("sync."))
        if value != default_of(key) and not any(re.search(rf"\b{word}\b(?!:\d)", used) for word in words):
            raise UsageError(
                "E-CFG-10",
                f"{key} = {value} changes nothing: no codec of this run uses it",
                fix=f'write sync.up = "{like}", or leave {key} at {toml_text(default_of(key))}',
            )


def _check_partition_training(config: RunConfig) -> None:
    if config.sync.apart == "wait" and config.sync.apart_rounds != default_of("sync.apart_rounds"):
        raise UsageError(
            "E-CFG-10",
            "sync.apart_rounds changes nothing: members of this run without a quorum wait",
            fix='write sync.apart = "merge", or leave sync.apart_rounds at '
            + toml_text(default_of("sync.apart_rounds")),
        )


def _check_validation(config: RunConfig) -> None:
    run = config.run
    if not is_validated(run) and (config.data.canary or run.validate_margin != default_of("run.validate_margin")):
        key = "data.canary" if config.data.canary else "run.validate_margin"
        raise UsageError(
            "E-CFG-10",
            f"{key} changes nothing: members of this run do not evaluate its model",
            fix=f"write run.validate_every = 1, or leave {key} at {toml_text(default_of(key))}",
        )


def _check_order(config: RunConfig) -> None:
    """Refuse pairs of settings in the wrong order of size."""
    run, consensus = config.run, config.consensus
    for small, large, low, high in (
        ("run.min_peers", "run.start_peers", min_peers_of(config), run.start_peers),
        ("run.first_train", "run.train_max", run.first_train, run.train_max),
        ("train.round_time", "run.train_max", config.train.round_time, run.train_max),
        ("3 x run.beat", "run.suspect", 3 * run.beat, run.suspect),
        ("run.suspect", "a fifth of consensus.timeout", run.suspect, consensus.timeout / 5),
    ):
        if low > high:
            raise UsageError(
                "E-CFG-06",
                f"{small} ({low:g}) must not be more than {large} ({high:g})",
                fix=f"lower {small.split(' x ')[-1]} or raise {large.rsplit(' ', 1)[-1]}",
            )


def _check_updates(config: RunConfig) -> None:
    keep = config.keep
    if keep.updates > keep.newest:
        raise UsageError(
            "E-CFG-13",
            f"keep.updates = {keep.updates} cannot work with keep.newest = {keep.newest}",
            cause="a round is recomputed from its updates and the state before it",
            fix=f"write keep.newest = {keep.updates} or more, or fewer updates",
        )


def _check_effort(config: RunConfig) -> None:
    """Conflicts of rounds that adapt their work. Conflicts with the recipe are found where the recipe is known."""
    train = config.train
    for keys, needs, used in (
        (("target_loss", "batch_min", "batch_max"), ("adaptive_batching = true",), train.adaptive_batching),
        (
            ("inner_steps_min",),
            ("adaptive_steps = true", "train.steps_by_speed = true", "train.target_samples"),
            train.adaptive_steps or train.steps_by_speed or train.target_samples,
        ),
    ):
        for key in keys:
            default = default_of(f"train.{key}")
            if not used and getattr(train, key) != default:
                raise UsageError(
                    "E-CFG-10",
                    f"train.{key} = {toml_text(getattr(train, key))} changes nothing in this run",
                    fix=f"write train.{' or '.join(needs)}, or leave train.{key} at {toml_text(default)}",
                )
    if not train.adaptive_batching:
        return
    if not train.target_loss:
        raise UsageError(
            "E-CFG-14",
            "train.adaptive_batching = true has no target loss",
            cause="the batch grows while the loss is above 1.1 x train.target_loss, and shrinks below 0.9 x",
            fix="write train.target_loss = 2.0 (nats), or the loss that your run should reach",
        )
    if train.batch_min > train.batch_max:
        raise UsageError(
            "E-CFG-06",
            f"train.batch_min ({train.batch_min}) must not be more than train.batch_max ({train.batch_max})",
            fix="lower train.batch_min or raise train.batch_max",
        )


def _check_sample(config: RunConfig) -> None:
    run, sample = config.run, sample_of(config)
    if sample is None:
        return
    if run.sample and run.sample_peers:
        raise UsageError(
            "E-CFG-10",
            f"run.sample = {run.sample:g} changes nothing beside run.sample_peers = {run.sample_peers}",
            fix="write one of the two",
        )
    if 0 < run.sample_peers < sample.least:
        raise UsageError(
            "E-CFG-11",
            f"run.sample_peers = {run.sample_peers} draws rounds that cannot withstand one liar",
            cause=f'with run.trust = "{run.trust}" {sample.least} updates are needed to withstand one',
            fix=f'write run.sample_peers = {sample.least} or more, or run.trust = "private"',
        )
    if config.node.group and run.trust != "private":
        raise UsageError(
            "E-CFG-10",
            f'node.group = "{config.node.group}" changes nothing with run.trust = "{run.trust}"',
            cause="members claim their own group: a liar in a group of its own would be drawn most often",
            fix='leave node.group empty, or write run.trust = "private"',
        )


def _check_topology(config: RunConfig) -> None:
    recipe, topology = config.train.recipe, config.sync.topology
    if recipe == "parameter_server" and topology not in ("auto", "star"):
        raise UsageError(
            "E-CFG-11",
            f'train.recipe = "{recipe}" has one owner of everything, but sync.topology = "{topology}" has others',
            fix='write sync.topology = "star", or train.recipe = "data_parallel"',
        )


def _check_statistic(config: RunConfig) -> None:
    """Refuse an order statistic that withstands no liar or cannot see the rows: it would be a disguised mean."""
    run, name = config.run, config.sync.statistic
    if run.trust != "private":
        _check_enough(run, f'run.trust = "{run.trust}"')
    if name is not None and name != "mean":
        _check_enough(run, f'sync.statistic = "{name}"', name)


def _check_enough(run: RunSection, what: str, statistic: StatisticName = "mean") -> None:
    least = peers_for_one_liar(tolerance_of(run), statistic)
    key, members = (
        ("run.start_peers", run.start_peers) if run.min_peers is None else ("run.min_peers", run.min_peers)
    )
    if members < least:
        raise UsageError(
            "E-CFG-11",
            f"{what} withstands no liar among {counted_text(members, 'member')} ({key})",
            cause=f"at run.byzantine_tolerance = {tolerance_of(run):g} it takes {least} to withstand one liar",
            fix=f"write run.start_peers = {least} or more, and run.min_peers no lower than {least}, or not at all; "
            'or run.trust = "private", if members do not lie',
        )
