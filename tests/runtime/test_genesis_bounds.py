"""No number of genesis, or amended later, spins, overflows or stalls a member: its decoder enforces bounds."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isfinite, nan
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import UNSET, inspect
from msgspec.structs import replace

from atoll.base.errors import AtollError, PeerFault, UsageError
from atoll.base.workload import AdaptiveWorkloadPolicy, LossAdaptiveBatchSize
from atoll.peer.settings import RunSettings, decode_settings, encode_settings
from atoll.policy.capability_terms import ErasureParams, SumCheckTerms
from atoll.policy.plan import RoundSettings, StragglerPolicy
from atoll.runtime.config import load_config
from atoll.runtime.training_spec import founding_blobs, start_of_built_in
from atoll.training.recipe.recipes import diloco
from atoll.training.spec import TrainingSpec
from atoll.wire.messages.statements import ChangeableSettings

WILD = (0, 0.0, -1, -1.0, nan, inf, -inf, 1e300, 1e-300, 2**62)


def structs_in(*types: Any) -> list[Any]:
    """Every kind of value with fields that these types may hold."""
    found: dict[type, Any] = {}

    def walk(kind: Any) -> None:
        if isinstance(kind, inspect.StructType | inspect.NamedTupleType):
            if kind.cls in found:
                return
            found[kind.cls] = kind
        for part in parts_of(kind):
            walk(part)

    for kind in inspect.multi_type_info(types):
        walk(kind)
    return list(found.values())


def parts_of(kind: Any) -> Iterator[Any]:
    for name in ("types", "fields", "item_types"):
        for part in getattr(kind, name, ()):
            yield part.type if isinstance(part, inspect.Field) else part
    for name in ("item_type", "key_type", "value_type", "type"):
        if isinstance(part := getattr(kind, name, None), inspect.Type):
            yield part


def numbers_in(kind: Any) -> Iterator[Any]:
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        yield kind
    elif not isinstance(kind, inspect.StructType | inspect.NamedTupleType):
        for part in parts_of(kind):
            yield from numbers_in(part)


FIELDS = [
    (f"{struct.cls.__name__}.{field.encode_name}", kind)
    for struct in structs_in(RunSettings, TrainingSpec, ChangeableSettings)
    for field in struct.fields
    for kind in numbers_in(field.type)
]


def test_every_number_of_genesis_has_a_lowest_and_a_highest_value():
    """Of all structs that its settings and its recipe may hold; a new field without bounds is found here."""
    assert len(FIELDS) > 90
    assert [name for name, k in FIELDS if (k.ge, k.gt) == (None, None) or (k.le, k.lt) == (None, None)] == []


@pytest.mark.parametrize(("name", "kind"), FIELDS, ids=[name for name, _ in FIELDS])
def test_a_wild_number_is_refused_or_within_bounds(name: str, kind: Any):
    """The decoder of the field's own type says so; NaN and infinity are never within."""
    bounds = msgspec.Meta(**{k: v for k in ("ge", "gt", "le", "lt") if (v := getattr(kind, k)) is not None})
    plain = int if isinstance(kind, inspect.IntType) else float
    decoder = msgspec.msgpack.Decoder(Annotated[plain, bounds])
    for wild in WILD:
        try:
            value = decoder.decode(msgspec.msgpack.encode(wild))
        except msgspec.ValidationError:
            continue
        assert isfinite(value) and 0 <= value < 2**62, (name, wild)


ROUND = RoundSettings(
    window_min_s=1.0,
    acceptance=StragglerPolicy(1, 1),
    effort=AdaptiveWorkloadPolicy(1, train_s=1.0, batches=LossAdaptiveBatchSize(1.0, 1, 2)),
)
SETTINGS = RunSettings(round=ROUND, coded=ErasureParams(1, 2), openings=SumCheckTerms(0.5, 64), audit_rate=0.5)


def changed(value: Any, wild: object) -> Iterator[tuple[str, Any]]:
    """The same with one number replaced, once for each number in it."""
    for name in value.__struct_fields__:
        one = getattr(value, name)
        if isinstance(one, msgspec.Struct):
            yield from ((f"{name}.{path}", replace(value, **{name: other})) for path, other in changed(one, wild))
        elif isinstance(one, int | float) and not isinstance(one, bool):
            yield name, replace(value, **{name: wild})


@pytest.mark.parametrize("wild", [nan, inf, -inf, -1, 1e300, 2**62])
def test_settings_with_one_wild_number_are_a_fault(wild: float):
    """Wherever it stands, and before anything else of them is used."""
    found = 0
    for path, settings in changed(SETTINGS, wild):
        with pytest.raises(PeerFault, match=r"invalid settings|rules"):
            decode_settings(encode_settings(settings))
        found += 1
        assert path
    assert found > 25


@pytest.mark.parametrize("name", ["beat_s", "suspect_s", "owner_s", "agree_s", "first_train_s", "train_max_s"])
def test_a_time_of_zero_is_a_fault(name: str):
    """A beat of 0 s kept a member's processor busy for ever."""
    with pytest.raises(PeerFault, match="invalid settings"):
        decode_settings(encode_settings(RunSettings(round=replace(RoundSettings(), **{name: 0.0}))))


@pytest.mark.parametrize(
    "key", ["run.beat", "run.suspect", "run.train_max", "run.first_train", "consensus.timeout"]
)
def test_a_founder_is_told_the_bounds(key: str):
    """What its own genesis would refuse is refused in run.toml, with the key in the message."""
    for value in ("0.001", "1e10"):
        with pytest.raises(AtollError, match=key.rpartition(".")[2]):
            load_config(None, (f"{key}={value}",), {})


def test_a_founder_with_a_recipe_that_members_refuse_is_told_so_before_the_run_begins(tmp_path: Path):
    (tmp_path / "text.txt").write_text("so many words of a language\n" * 4000)
    recipe = diloco("gpt-nano", rounds=1, inner_steps=4, seq_len=16)
    recipe = replace(recipe, inner=replace(recipe.inner, lr=nan))
    with pytest.raises(UsageError, match=r"E-RUN-39 .*\.lr"):
        founding_blobs(start_of_built_in(recipe, str(tmp_path / "text.txt")), RunSettings())


def test_what_is_left_out_stays_out():
    assert decode_settings(encode_settings(RunSettings())).round.window_min_s is UNSET
