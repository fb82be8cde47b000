"""Config loader: run.toml, environment and `--set`, in this order, and the run they describe.

    defaults < file < ATOLL_TRAIN__LR=0.002 < --set train.lr=0.003

Invariants: torch is imported only once the recipe is needed, so that mistakes in a file are reported at once.
"""

from __future__ import annotations

import os
import tomllib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType, convert
from msgspec.structs import fields, replace

from atoll.base.errors import UsageError
from atoll.base.limits import COMMITTEE_MOST
from atoll.base.workload import AdaptiveWorkloadPolicy, LossAdaptiveBatchSize
from atoll.capabilities import CAPABILITIES
from atoll.features.archive.reed_solomon import demand_ready
from atoll.peer.config.defaults import (
    chosen_statistic,
    coded_of,
    from_trust,
    keeps_records,
    min_peers_of,
    sample_of,
    tolerance_of,
)
from atoll.peer.config.reading import ALL_KEYS, decode_config, decode_values, paths_in
from atoll.peer.config.sections import (
    RunConfig,
    TrainSection,
    UpdateExchangeSection,
    declarations,
    default_of,
    keys,
    toml_text,
    usual_of,
    value_of,
)
from atoll.peer.settings import CheckShare, RunSettings
from atoll.peer.verify.registry import unknown_check
from atoll.policy.capability_terms import PartitionPolicy, StateValidationTerms, SumCheckTerms
from atoll.policy.fault_tolerance import rows_needed
from atoll.policy.plan import RoundSettings
from atoll.policy.presets import PRESETS, UNLIKE, looked_every
from atoll.runtime.config_places import ENVIRONMENT, named_places

if TYPE_CHECKING:
    from atoll.training.recipe.recipes import Recipe

CHANGE_OF_SCHEDULE = 1000  # rounds over which the learning rate falls when a run has no end
# recipes that agree on the gradient of every step
EVERY_STEP = ("data_parallel", "parameter_server", "demo_", "powersgd", "pipelined")
DILOCO = ("diloco", "streaming", "auto", "eager", "muloco", "decoupled", "des_loc", "delayed_nesterov")
BUILT = (*DILOCO, *EVERY_STEP)  # built from the config; other recipes are only adjusted


def load_config(
    path: Path | None, sets: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> RunConfig:
    """Merge defaults, file, ATOLL_SECTION__KEY and `--set section.key=value`. Raises UsageError with the key."""
    tree = _merged(path, sets, environment)
    with named_places(path, sets, os.environ if environment is None else environment):
        return decode_config(tree)


def settings_in_effect(path: Path | None, sets: Sequence[str] = ()) -> list[tuple[str, Any, str]]:
    """Key, value and source of all settings: set, default, or the setting that decides it. Raises UsageError.

    A value of None: the recipe does not use the key.
    """
    from atoll.runtime.training_spec import demand_mean

    tree = _merged(path, sets, None)
    with named_places(path, sets, os.environ):
        config, written = decode_config(tree), {*paths_in(tree)}
    recipe = recipe_of(config)
    genesis, found = settings_of(config, recipe), list[tuple[str, Any, str]]()
    demand_mean(recipe, genesis)
    for key, setting in declarations().items():
        value, source = value_of(config, key), "set" if key in written else "default"
        if value in (None, "") and setting.recipe:
            value, source = _in_recipe(config, recipe, setting.recipe), "train.recipe"
        elif value is None:
            value, source = _at(genesis, setting.genesis), "run.trust"
            value = type(usual_of(key))() if value is UNSET else value
        found.append((key, value, source))
    return found


def _in_recipe(config: RunConfig, recipe: Recipe, place: str) -> Any:
    """Value at a place of the recipe; None if it does not use the setting."""
    if config.train.recipe in EVERY_STEP and place.startswith(("inner.", "outer.")):
        place = place.replace("inner.", "outer.") if place.startswith("inner.") else ""
    rest = getattr(recipe.inner, "rest", recipe.inner)  # Muon: the optimizer of the other parameters
    return _at(replace(recipe, inner=rest), place) if place else None


def _at(value: Any, place: str) -> Any:
    """Attribute at a dotted place; UNSET or None where a part of it is missing."""
    for name in place.split("."):
        value = value if value is UNSET else getattr(value, name, None)
    return value


def _merged(path: Path | None, sets: Sequence[str], environment: Mapping[str, str] | None) -> dict[str, Any]:
    tree: dict[str, Any] = _read(path) if path is not None else {}
    found = environment if environment is not None else os.environ
    for name in sorted(found):
        section, two, key = name.removeprefix(ENVIRONMENT).partition("__")
        if name.startswith(ENVIRONMENT) and two:
            _put(tree, f"{section}.{key}".lower(), found[name])
    _put_all(tree, sets, "--set ")
    return tree


def numbers_of(sets: Sequence[str]) -> dict[str, Any]:
    """Parse section.key=value pairs, each checked as in a file. Raises UsageError with the key."""
    tree: dict[str, Any] = {}
    _put_all(tree, sets)
    config = decode_values(tree)
    return {key: value_of(config, key) for key in paths_in(tree)}


def recipe_of(config: RunConfig) -> Recipe:
    """The recipe of this config: the named one with the changes that the config has. Raises UsageError."""
    from atoll.training.recipe.gradient import PLAIN, ComputeOptions
    from atoll.training.recipe.inner import tuned
    from atoll.training.recipe.methods import METHODS
    from atoll.training.recipe.recipes import check_recipe, demo_recipe, for_real_run, over_tokens, with_overlap
    from atoll.training.recipe.schedule import parse_phases

    train, sync = config.train, config.sync
    given, numbers = _passed(config, "builder"), _passed(config, "optimizer")
    if config.run.rounds == 0:
        given["rounds"] = CHANGE_OF_SCHEDULE
    given |= {way: _with_numbers(given[way], sync) for way in ("up", "down") if given.get(way)}
    try:
        if train.recipe in BUILT:
            if train.recipe in EVERY_STEP:
                _check_given(train.recipe, given)
            if train.recipe == "des_loc":  # plain means in fp32
                _check_given("des_loc", given, given.keys() - {"up", "down", "outer_lr", "outer_momentum"})
            if train.recipe == "delayed_nesterov":
                _check_given("delayed_nesterov", given, given.keys() - {"down"})
                given["every"] = max(1, config.run.start_peers)
            recipe = METHODS[train.recipe](_model(config), **given)
            recipe = for_real_run(recipe, sync.down or "int8", _owners_believed(config))
        else:
            published = demo_recipe() if train.recipe == "demo" else METHODS[train.recipe]()
            recipe = _adjusted(published, given, _model(config, published.model))
        recipe = with_overlap(recipe, sync.overlap, sync.fragments)
        if sync.phases:
            phases = tuple(
                replace(phase, up=_with_numbers(phase.up, sync), down=_with_numbers(phase.down, sync))
                for phase in parse_phases(sync.phases)
            )
            recipe = replace(recipe, schedule=replace(recipe.schedule, phases=phases))
            check_recipe(recipe)
        if train.recipe in EVERY_STEP:  # the outer step is the optimizer
            _check_given(train.recipe, numbers, recipe.outer.__struct_fields__)
            recipe = replace(recipe, outer=replace(recipe.outer, **numbers))
        else:
            recipe = replace(recipe, inner=tuned(recipe.inner, **numbers))
        if sync.error_feedback is not None:
            recipe = replace(recipe, coding=replace(recipe.coding, beta=sync.error_feedback))
            check_recipe(recipe)
    except ValueError as why:
        raise UsageError(
            "E-CFG-08",
            f"no recipe follows from {_wishes(config)}",
            cause=str(why),
            fix=f"remove or change the keys in the cause; {ALL_KEYS}",
        ) from None
    if train.total_tokens:
        recipe = over_tokens(recipe, train.total_tokens)
    if (computing := ComputeOptions(train.precision, train.compile)) != PLAIN:
        recipe = replace(recipe, computing=computing)
    return _accepting(recipe, sync)


def _model(config: RunConfig, default: str = "gpt-tiny") -> str:
    """Model name with the adapters of the config.

    Raises UsageError if there is no such model, ValueError if it cannot have adapters.
    """
    from atoll.training.models import MODELS, spec_of, with_adapters

    name = config.model.name or default
    try:
        spec_of(name)
    except ValueError as why:
        fix = f"choose one of {', '.join(MODELS)}; atoll config --all explains sizes of your own"
        raise UsageError("E-CFG-02", f"model.name: {why}", fix=fix) from None
    return with_adapters(name, config.model.lora_rank) if config.model.lora_rank else name


def _passed(config: RunConfig, way: str) -> dict[str, Any]:
    """Written settings that the recipe's builder, or its optimizer, takes by their names."""
    found = {k.partition(".")[2]: value_of(config, k) for k, s in declarations().items() if s.passed == way}
    return {name: value for name, value in found.items() if value is not None}


def _wishes(config: RunConfig) -> str:
    """Recipe options that the config sets."""
    wishes = [f"train.recipe = {toml_text(config.train.recipe)}"]
    for section, said, usual in (
        ("train", config.train, TrainSection()),
        ("sync", config.sync, UpdateExchangeSection()),
    ):
        for key in said.__struct_fields__:
            if key != "recipe" and (value := getattr(said, key)) != getattr(usual, key):
                wishes.append(f"{section}.{key} = {toml_text(value)}")
    return ", ".join(wishes)


def _owners_believed(config: RunConfig) -> bool:
    """Results with owner-side error feedback cannot be recomputed, and rows cannot move to another owner."""
    told, direct = config.sync.statistic or "mean", ("auto", "butterfly", "star")
    return config.run.trust == "private" and told == "mean" and config.sync.topology in direct


def _check_given(
    name: str, given: Mapping[str, Any], known: Collection[str] = ("rounds", "batch", "seq_len", "lr", "seed")
) -> None:
    """Raise ValueError for keys that a recipe without inner steps does not have."""
    if unknown := given.keys() - set(known):
        keys = (k for k, s in declarations().items() if s.passed and k.partition(".")[2] in unknown)
        raise ValueError(f"{name} has no {', '.join(keys)}")


def _accepting(recipe: Recipe, sync: UpdateExchangeSection) -> Recipe:
    """Set quorum and grace as in the config. Raises UsageError."""
    told = {k: v for k, v in (("quorum", sync.quorum), ("grace", sync.grace)) if v is not None}
    reducer = replace(recipe.reducer, **told)
    if reducer.grace and not reducer.quorum:
        if sync.grace:
            raise UsageError(
                "E-CFG-10",
                f"sync.grace = {sync.grace} changes nothing: rounds of this run wait for all members",
                fix="write sync.quorum as well: so many updates are enough",
            )
        reducer = replace(reducer, grace=0)
    return replace(recipe, reducer=reducer)


def _with_numbers(codec: str, sync: UpdateExchangeSection) -> str:
    """Codec name with its ratio and level filled in."""
    ratio = f"{sync.compression_ratio:.6f}".rstrip("0").rstrip(".")
    numbers = {"topk": f"topk:{ratio}", "randk": f"randk:{ratio}", "zstd": f"zstd:{sync.compression_level}"}
    return "+".join(numbers.get(stage, stage) for stage in codec.split("+"))


def settings_of(config: RunConfig, recipe: Recipe, floats: int = 0) -> RunSettings:
    """Run settings in genesis, for a model of `floats` values."""
    run, consensus, preset = config.run, config.consensus, PRESETS[config.run.trust]
    owner_s = consensus.timeout / 5
    if coded := coded_of(config.keep):
        demand_ready()
    return RunSettings(
        **_copied(config, RunSettings),
        rounds=0 if run.rounds == 0 else recipe.schedule.turns,
        min_peers=min_peers_of(config),
        statistic=chosen_statistic(config),
        tolerance=tolerance_of(run),
        witnessed=preset.witnessed,
        audit_rate=_audit_rate(config, recipe, floats) or UNSET,
        checks=checks_of(run.checks) or UNSET,
        reputation=keeps_records(config) or UNSET,
        vote_after_rounds=from_trust(config, "run.vote_after_rounds") or UNSET,
        sponsor_rounds=from_trust(config, "run.sponsor_rounds") or UNSET,
        validation=_rule(config, recipe),
        coded=coded or UNSET,
        openings=_openings(config, recipe),
        captured=_captured(config, recipe) or UNSET,
        protocol="raft" if consensus.protocol == "raft" else UNSET,
        apart=PartitionPolicy(config.sync.apart, config.sync.apart_rounds)
        if config.sync.apart != "wait"
        else UNSET,
        round=RoundSettings(
            **_copied(config, RoundSettings, "round."),
            inner_steps=recipe.schedule.turn_steps,
            owner_s=owner_s,
            agree_s=2 * owner_s,
            quorum=preset.quorum,
            committee=UNSET if run.trust == "private" else COMMITTEE_MOST,
            votes=UNSET if run.votes == "ed25519" else run.votes,
            sample=sample_of(config) or UNSET,
            window_min_s=UNSET if consensus.timeout_min >= consensus.timeout else consensus.timeout_min / 5,
            effort=_effort(config, recipe),
        ),
    )


def checks_of(text: str) -> tuple[CheckShare, ...]:
    """The checks that `run.checks` names. Raises UsageError if the text has another form or a name is unknown."""
    checks = list[CheckShare]()
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, _, share = (word.strip() for word in item.partition("="))
        try:
            checks.append(convert((name, float(share)), CheckShare))
        except ValueError:
            raise UsageError(
                "E-CFG-16",
                f"run.checks has {item!r}, which is not a name and a share above 0 and at most 1",
                fix='write it as in run.checks = "NAME = 0.1, OTHER = 0.05"',
            ) from None
    if problem := unknown_check(CAPABILITIES.verifiers, RunSettings(checks=tuple(checks))):
        raise UsageError(
            "E-CFG-17", f"run.checks = {text!r}: {problem}", fix='name other checks, or run.checks = ""'
        )
    return tuple(checks)


def _copied(config: RunConfig, kind: type[RunSettings | RoundSettings], place: str = "") -> dict[str, Any]:
    """Settings that genesis holds unchanged, by their fields in `kind`; off is unset where genesis has that."""
    found, unset = dict[str, Any](), {f.name for f in fields(kind) if f.default is UNSET}
    for key, setting in declarations().items():
        name = setting.genesis.removeprefix(place)
        if setting.genesis == place + name and name in kind.__struct_fields__ and default_of(key) is not None:
            found[name] = value_of(config, key) or UNSET if name in unset else value_of(config, key)
    return found


def _effort(config: RunConfig, recipe: Recipe) -> AdaptiveWorkloadPolicy | UnsetType:
    """Policy of adaptive workloads; unset if there is none."""
    train = config.train
    batches = (
        LossAdaptiveBatchSize(train.target_loss, train.batch_min, train.batch_max)
        if train.adaptive_batching
        else UNSET
    )
    effort = AdaptiveWorkloadPolicy(
        recipe.batch,
        train_s=train.round_time or UNSET,
        samples=train.target_samples or UNSET,
        steps_min=train.inner_steps_min,
        by_loss=train.adaptive_steps or UNSET,
        by_speed=train.steps_by_speed or UNSET,
        batches=batches,
        bounded=bool(train.total_tokens) or UNSET,
    )
    return UNSET if effort == AdaptiveWorkloadPolicy(recipe.batch) else effort


def _audit_rate(config: RunConfig, recipe: Recipe, floats: int) -> float:
    """Audit rate of the config; else the default of its trust, if audits are possible.

    Raises UsageError if strangers could not be audited and the config does not accept that."""
    if config.run.audit_rate is not None:
        if config.run.audit_rate and (device := _device(config)) != "cpu":
            raise UsageError(
                "E-RUN-16",
                f'node.device = "{device}" cannot be audited, and run.audit_rate asks for audits',
                cause="a founder votes from the beginning, and its work could not be replayed",
                fix='write node.device = "cpu", or run.audit_rate = 0',
            )
        return config.run.audit_rate
    rate = PRESETS[config.run.trust].audit_rate
    if not rate or not (problem := _unauditable(config, recipe, floats)):
        return rate
    if config.run.trust == "open":
        raise UsageError(
            "E-RUN-16",
            f"rounds of this run cannot be audited: {problem}",
            cause=f'run.trust = "open" has {rate:.0%} of them audited: strangers could count without working',
            fix=f"write run.audit_rate = 0 to say that this is meant{_scores_instead(config, recipe)}; or take "
            "back what stands against it: gpt and llama models are audited, under diloco without overlap, in fp32",
        )
    return 0.0


def _scores_instead(config: RunConfig, recipe: Recipe) -> str:
    """Advice to score updates instead; empty if that is impossible or already set."""
    from atoll.verification.loss_scoring.tensors import scoring_problem

    can = keeps_records(config) and not config.run.score_rate and not scoring_problem(recipe)
    return ", and run.score_rate = 0.05: others then look whether updates teach" if can else ""


def _unauditable(config: RunConfig, recipe: Recipe, floats: int) -> str:
    from atoll.runtime.training_spec import UNMEASURED
    from atoll.training.models import spec_of
    from atoll.verification.replay_audit.tolerance import recipe_problem

    if (device := _device(config)) != "cpu":
        return f"its founder trains on {device}, and no other machine comes to the same numbers"
    if config.model.only or spec_of(recipe.model).numbers.get("lora"):
        return UNMEASURED
    if config.sync.apart != "wait":
        return f'sync.apart = "{config.sync.apart}" has members take steps that were not assigned'
    return recipe_problem(recipe, floats)


def _device(config: RunConfig) -> str:
    from atoll.runtime.trainer import chosen_device

    return chosen_device(config.node.device)


def _openings(config: RunConfig, recipe: Recipe) -> SumCheckTerms | UnsetType:
    """Sum check rate of the config; else the default of its trust, if codecs have blocks. Raises UsageError."""
    from atoll.runtime.training_spec import terms_of

    if config.run.openings is not None:
        return terms_of(recipe, config.run.openings)
    preset = PRESETS[config.run.trust]
    share = preset.openings
    if preset.witnessed and config.run.captured_parts == 0:
        share = 0.0  # one more owner combines than may lie: sum checks would find nothing
    return UNSET if not share or _unopened(recipe) else terms_of(recipe, share)


def _captured(config: RunConfig, recipe: Recipe) -> float:
    """Captured parts of the config; else the default of its trust, if sum checks would detect lies there.

    Raises UsageError.
    """
    from atoll.runtime.training_spec import terms_of

    if (asked := config.run.captured_parts) is not None:
        if asked:
            terms_of(recipe, PRESETS[config.run.trust].openings)
        return asked
    return 0.0 if _openings(config, recipe) is UNSET else PRESETS[config.run.trust].captured


def _unopened(recipe: Recipe) -> str:
    from atoll.verification.sum_check.tensors import unopened

    return unopened(recipe) or ""


def missing_protections(config: RunConfig, recipe: Recipe, floats: int) -> list[str]:
    """Notices about protections that the trust level implies and this run lacks."""
    preset, said = PRESETS[config.run.trust], list[str]()
    members, least = config.run.start_peers, rows_needed("krum", 1)
    if config.train.recipe == "cooperative" and members < least:
        said.append(
            f"cooperative weighs members by their records, and {members} cannot outvote a liar: to withstand f "
            f"liars Krum asks for n >= 2f + 3 members, {least} for one; write run.start_peers = {least} with "
            'another recipe and run.trust = "community", or trust all who train'
        )
    if sample_of(config) and config.sync.statistic is None and chosen_statistic(config) != "mean":
        community = "" if config.run.trust == "community" else 'run.trust = "community" and '
        said.append(f'{UNLIKE}; write {community}sync.statistic = "clipped_caf" for such a run')
    if preset.audit_rate and config.run.audit_rate is None and (why := _unauditable(config, recipe, floats)):
        said.append(f"no work is audited: {why}; write run.audit_rate = 0 to say that this is meant")
    train = config.train
    if (train.round_time or train.target_samples or train.adaptive_steps) and not train.total_tokens:
        said.append(
            f"learning rates fall over {recipe.schedule.steps} steps of the longest member, and rounds may be "
            "shorter; write train.total_tokens to have them follow what is learned"
        )
    meant = config.run.openings is not None or (preset.witnessed and config.run.captured_parts == 0)
    if preset.openings and not meant and (why := _unopened(recipe)):
        lacks = (
            "as many owners combine every part as may lie" if preset.witnessed else "sums of owners are believed"
        )
        said.append(f"{lacks}: {why}; write run.openings = 0 to say that this is meant")
    return said


def _rule(config: RunConfig, recipe: Recipe) -> StateValidationTerms | UnsetType:
    run, sets = config.run, 2 if config.data.canary else 1
    usual = looked_every(PRESETS[run.trust], recipe.schedule.turn_steps)
    every = usual if run.validate_every is None else run.validate_every
    return (
        UNSET
        if not every
        else StateValidationTerms(every=every, margin_percent=round(100 * run.validate_margin), sets=sets)
    )


def data_of(config: RunConfig, beside: Path | None) -> str:
    """`stdlib` or a path, relative to the config file."""
    source = config.data.source
    return source if source == "stdlib" else _path("data.source", source, beside, 'or write "stdlib"')


def canary_of(config: RunConfig, beside: Path | None) -> str:
    """A path, or nothing."""
    canary = config.data.canary
    return _path("data.canary", canary, beside, "or leave it empty") if canary else ""


def weights_of(config: RunConfig, beside: Path | None) -> str:
    """A path, or nothing."""
    named = config.model.weights
    return _path("model.weights", named, beside, "or leave it empty: fresh weights") if named else ""


def tokenizer_of(config: RunConfig, beside: Path | None) -> str:
    """A path, or nothing."""
    named = config.data.tokenizer
    return _path("data.tokenizer", named, beside, "or leave it empty: bytes are tokens") if named else ""


def own_data_of(config: RunConfig, beside: Path | None) -> str:
    """A path, or nothing."""
    named = config.node.data
    return _path("node.data", named, beside, "or leave it empty: the run's data") if named else ""


def _path(key: str, source: str, beside: Path | None, instead: str) -> str:
    path = Path(source).expanduser()
    if beside is not None and not path.is_absolute():
        path = beside.parent / path
    if not path.exists():
        raise UsageError("E-DATA-01", f"{key}: there is nothing at {path}", fix=f"name a file or folder, {instead}")
    return str(path)


def _adjusted(recipe: Recipe, given: dict[str, Any], model: str) -> Recipe:
    """Replace numbers of a tuned recipe; its schedule follows its length."""
    from atoll.training.recipe.inner import tuned
    from atoll.training.recipe.recipes import check_recipe, fitting_seq_len, with_length

    parts = defaultdict[str, dict[str, Any]](dict)
    for key, setting in declarations().items():
        if setting.passed and (name := key.partition(".")[2]) in given:
            part, _, field = setting.recipe.rpartition(".")
            parts[part][field] = given[name]
    rest, schedule = parts[""], replace(recipe.schedule, **parts["schedule"])
    inner, outer = tuned(recipe.inner, **parts["inner"]), replace(recipe.outer, **parts["outer"])
    coding = replace(recipe.coding, **parts["coding"])
    rest["model"] = model or recipe.model
    rest["seq_len"] = fitting_seq_len(rest["model"], given.get("seq_len"))
    adjusted = replace(recipe, schedule=schedule, inner=inner, outer=outer, coding=coding, **rest)
    check_recipe(adjusted)
    return with_length(adjusted, schedule.steps)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as why:
        raise UsageError(
            "E-CFG-09", f"cannot read {path}: {why.strerror}", fix="atoll init run.toml writes one"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as why:
        fix = 'correct that line; text stands in quotes: name = "ada"'
        raise UsageError("E-CFG-09", f"{path} is not TOML: {why}", fix=fix) from None


def _put_all(tree: dict[str, Any], sets: Sequence[str], option: str = "") -> None:
    """Split key=value texts; `option` is their prefix on the command line. Raises UsageError."""
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals:
            usual = usual_of(text) if text in keys() else None
            example = f"{text}={toml_text(usual)}" if isinstance(usual, int | float) else "train.lr=0.002"
            raise UsageError("E-CFG-07", f"{option}{text} has no value", fix=f"write {option}{example}")
        _put(tree, key.strip(), value.strip())


def _put(tree: dict[str, Any], key: str, text: str) -> None:
    """Set one dotted key to a TOML value, or to plain text if it is none."""
    try:
        value: Any = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    section, dot, name = key.partition(".")
    if not dot:
        tree[key] = value
        return
    inside = tree.setdefault(section, {})
    if isinstance(inside, dict):
        inside[name] = value
