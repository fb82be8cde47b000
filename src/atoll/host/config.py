"""run.toml from this computer: file, environment and `--set`, in this order, and the run it describes.

    defaults < file < ATOLL_TRAIN__LR=0.002 < --set train.lr=0.003

Never imports torch before the recipe is asked for, so that mistakes in a file are answered at once.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import UsageError
from atoll.host.learning import terms_of
from atoll.node.config import CHANGE_OF_SCHEDULE, Config, Sync, decode_config, share_opened, tolerance_of
from atoll.node.settings import RunSettings
from atoll.policy.plan import RoundSettings

if TYPE_CHECKING:
    from atoll.learn.recipes import Recipe

ENVIRONMENT = "ATOLL_"
BUILT = (
    "diloco",
    "streaming",
    "auto",
    "eager",
)  # made as the config says; others are only adjusted


def load_config(
    path: Path | None, sets: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Config:
    """Defaults, then the file, then ATOLL_SECTION__KEY, then `--set section.key=value`. UsageError with the key."""
    tree: dict[str, Any] = _read(path) if path is not None else {}
    found = environment if environment is not None else os.environ
    for name in sorted(found):
        section, two, key = name.removeprefix(ENVIRONMENT).partition("__")
        if name.startswith(ENVIRONMENT) and two:
            _put(tree, f"{section}.{key}".lower(), found[name])
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError("E-CFG-07", f"--set {text} has no value", fix="write --set train.lr=0.002")
        _put(tree, key.strip(), value.strip())
    return decode_config(tree)


def recipe_of(config: Config) -> Recipe:
    """The six pieces that this config asks for: the recipe's, but for what the config says."""
    from atoll.learn.methods import METHODS
    from atoll.learn.recipes import demo_recipe, in_swarm, overlapping

    train, sync = config.train, config.sync
    schedule = config.run.rounds if config.run.rounds is not None else None
    rounds = CHANGE_OF_SCHEDULE if schedule == 0 else schedule
    wanted = {
        "rounds": rounds,
        "inner_steps": train.inner_steps,
        "batch": train.batch,
        "seq_len": train.seq_len,
        "lr": train.lr,
        "outer_lr": train.outer_lr,
        "outer_momentum": train.outer_momentum,
        "seed": train.seed,
        "up": _with_numbers(sync.up, sync),
        "down": _with_numbers(sync.down, sync),
    }
    given = {k: v for k, v in wanted.items() if v is not None}
    try:
        if train.recipe in BUILT:
            recipe = in_swarm(METHODS[train.recipe](config.model.name or "gpt-tiny", **given), sync.down or "int8")
        else:
            tuned = demo_recipe() if train.recipe == "demo" else METHODS[train.recipe]()
            recipe = _adjusted(tuned, given, config.model.name)
        recipe = overlapping(recipe, sync.overlap, sync.fragments)
    except ValueError as why:
        raise UsageError("E-CFG-08", f"no such recipe: {why}", fix="docs/config.md has every key") from None
    inner = {"weight_decay": train.weight_decay, "clip_norm": train.clip_norm, "warmup_steps": train.warmup_steps}
    recipe = replace(recipe, inner=replace(recipe.inner, **{k: v for k, v in inner.items() if v is not None}))
    if sync.error_feedback is not None:
        recipe = replace(recipe, coding=replace(recipe.coding, beta=sync.error_feedback))
    return recipe


def _with_numbers(codec: str | None, sync: Sync) -> str | None:
    """A codec's name with the ratio and the level that it leaves open."""
    if codec is None:
        return None
    ratio = f"{sync.compression_ratio:.6f}".rstrip("0").rstrip(".")
    numbers = {"topk": f"topk:{ratio}", "randk": f"randk:{ratio}", "zstd": f"zstd:{sync.compression_level}"}
    return "+".join(numbers.get(stage, stage) for stage in codec.split("+"))


def settings_of(config: Config, recipe: Recipe) -> RunSettings:
    """What genesis fixes beside the recipe."""
    run, owner_s = config.run, config.consensus.timeout / 5
    return RunSettings(
        name=run.name,
        rounds=recipe.schedule.turns if run.rounds is None else run.rounds * recipe.schedule.fragments,
        start_peers=run.start_peers,
        min_peers=run.min_peers,
        open_to_all=run.open_to_all,
        era_rounds=run.era_rounds,
        topology=config.sync.topology,
        statistic=config.sync.statistic,
        tolerance=tolerance_of(run),
        witnessed=run.trust == "open",
        audit_rate=run.audit_rate or UNSET,
        openings=terms_of(recipe, share_opened(run)),
        round=RoundSettings(
            inner_steps=recipe.schedule.turn_steps,
            first_train_s=run.first_train,
            train_max_s=run.train_max,
            owner_s=owner_s,
            agree_s=2 * owner_s,
            quorum="majority" if run.trust == "private" else "two-thirds",
            suspect_s=run.suspect,
            beat_s=run.beat,
        ),
    )


def data_of(config: Config, beside: Path | None) -> str:
    """`stdlib`, or a path; a relative one counts from the config file."""
    source = config.data.source
    if source == "stdlib":
        return source
    path = Path(source).expanduser()
    if beside is not None and not path.is_absolute():
        path = beside.parent / path
    if not path.exists():
        raise UsageError(
            "E-DATA-01", f"data.source: there is nothing at {path}", fix='name a file or folder, or write "stdlib"'
        )
    return str(path)


def _adjusted(recipe: Recipe, given: dict[str, Any], model: str) -> Recipe:
    """A tuned recipe with some of its numbers replaced; its schedule follows its length."""
    from atoll.learn.recipes import check_recipe, fitting_seq_len, lasting

    schedule = replace(recipe.schedule, **{k: given[k] for k in ("rounds", "inner_steps") if k in given})
    inner = replace(recipe.inner, lr=given.get("lr", recipe.inner.lr))
    outer = replace(
        recipe.outer,
        lr=given.get("outer_lr", recipe.outer.lr),
        momentum=given.get("outer_momentum", recipe.outer.momentum),
    )
    coding = replace(recipe.coding, **{k: given[k] for k in ("up", "down") if k in given})
    rest = {k: given[k] for k in ("batch", "seed") if k in given}
    rest["model"] = model or recipe.model
    rest["seq_len"] = fitting_seq_len(rest["model"], given.get("seq_len"))
    adjusted = replace(recipe, schedule=schedule, inner=inner, outer=outer, coding=coding, **rest)
    check_recipe(adjusted)
    return lasting(adjusted, schedule.steps)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as why:
        raise UsageError(
            "E-CFG-09", f"cannot read {path}: {why.strerror}", fix="atoll init writes a commented one"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as why:
        raise UsageError("E-CFG-09", f"{path} is not TOML: {why}", fix="mend that line") from None


def _put(tree: dict[str, Any], key: str, text: str) -> None:
    """Set one dotted key; the text is a TOML value, or else just text."""
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
