"""Training spec: the training part of genesis, its compatibility checks, and the genesis of a new run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import UNSET, UnsetType
from torch import nn

from atoll.base.errors import UNREADABLE, PeerFault, UsageError
from atoll.base.ids import ATTACHED
from atoll.base.limits import CONTROL_FRAME_MAX, MIB
from atoll.base.workload import AdaptiveWorkloadPolicy
from atoll.crypto.digest import Buffer
from atoll.peer.round.topology_choice import parts_planned
from atoll.peer.settings import (
    PIECES_BY_SIZE,
    RunSettings,
    decode_settings,
    encode_settings,
    features_of,
    pacing_problem,
)
from atoll.policy.capability_terms import SumCheckTerms
from atoll.policy.compatibility import problem_with
from atoll.policy.plan import StragglerPolicy
from atoll.policy.vertex_capacity import members_most
from atoll.training.codec import CODECS, codec_named
from atoll.training.data import (
    STDLIB,
    all_held_out,
    data_blob,
    epoch_samples,
    load_data,
    validation,
)
from atoll.training.data.records import COLUMN
from atoll.training.data.tokens import vocabulary_of
from atoll.training.exchange.layout import ModelLayout, layout_of
from atoll.training.models import build_model, exchanged_patterns, misfit, tokens_misfit
from atoll.training.models.frozen_base import base_bytes
from atoll.training.models.weights import load_weights
from atoll.training.recipe.inner import GradientSumOptimizer
from atoll.training.recipe.recipes import Recipe, check_recipe, sample_problem, swarm_problem
from atoll.training.recipe.reply_formats import has_owner_feedback, needs_reply_format
from atoll.training.recipe.schedule import fragments_of, longest_turn, phase_rounds
from atoll.training.recipe.state import initial_state, state_hash, state_pieces
from atoll.training.spec import TrainingSpec
from atoll.verification.loss_scoring.tensors import scoring_problem
from atoll.verification.redundant_training.tensors import twins_problem
from atoll.verification.replay_audit.tolerance import recipe_problem
from atoll.verification.sum_check.tensors import LeafLayout, unopened

_LEARNING = msgspec.msgpack.Decoder(TrainingSpec)


def parse_training_spec(settings: RunSettings) -> TrainingSpec:
    try:
        learning = _LEARNING.decode(settings.learning)
        check_recipe(_ending(learning.recipe))
    except UNREADABLE as why:
        raise PeerFault("", f"invalid training spec in genesis for this version: {why}") from None
    except ValueError as why:
        raise PeerFault("", f"invalid recipe in genesis: {why}") from None
    if problem := swarm_problem(learning.recipe):
        raise PeerFault("", f"this run's recipe asks for what this version cannot do: {problem}")
    if learning.recipe.schedule.epochs is not UNSET and learning.data != ATTACHED:
        raise PeerFault("", "this run counts passes over data of members' own, and all have the same")
    if (learning.base is not UNSET) != (bool(learning.layout.held) and learning.recipe.model != ATTACHED):
        raise PeerFault("", "this run names a base that its model does not have, or has one that it does not name")
    if problem := size_problem(learning.recipe, learning.layout):
        raise PeerFault("", f"this run cannot be cut into parts: {problem}")
    if problem := answers_problem(learning.recipe, settings):
        raise PeerFault("", f"this run's answers are more than encoded means, and {problem[0]}")
    if settings.audited_share and (problem := audit_problem(learning.recipe, learning.layout)):
        raise PeerFault("", f"this run's rounds cannot be audited: {problem}")
    if settings.scored_share and (problem := scoring_problem(learning.recipe)):
        raise PeerFault("", f"this run's updates cannot be scored: {problem}")
    if settings.twinned_share and (problem := twins_problem(learning.recipe)):
        raise PeerFault("", f"this run's updates cannot be compared: {problem}")
    if settings.apart_terms is not None and (problem := apart_problem(learning.recipe)):
        raise PeerFault("", f"members of this run cannot train apart: {problem}")
    if settings.round.sample is not UNSET and (problem := sample_problem(learning.recipe)):
        raise PeerFault("", f"members cannot be sampled in this run: {problem}")
    if problem := effort_misfit(learning.recipe, settings.round.effort):
        raise PeerFault("", f"rounds of this run cannot follow it: {problem}")
    if problem := rhythm_problem(learning.recipe, settings):
        raise PeerFault("", f"rounds of this run cannot change their length: {problem}")
    if settings.round.rhythm != _rhythm(learning.recipe):
        raise PeerFault("", "round lengths in the recipe and in the settings of the run differ")
    if settings.validated is not None and settings.validated.sets != 1 + (learning.canary is not UNSET):
        raise PeerFault("", "this run validates on other sets of data than it names")
    if (terms := settings.opened) is not None:
        if problem := unopened(learning.recipe):
            raise PeerFault("", f"this run's answers cannot be opened: {problem}")
        if terms.leaf_bytes != LeafLayout(codec_named(learning.recipe.coding.down)).leaf_bytes:
            raise PeerFault("", f"this run's answers have no blocks of {terms.leaf_bytes} bytes")
    return learning


def _ending(recipe: Recipe) -> Recipe:
    """Give the endless schedule of an attached loop one round, so that it can be checked."""
    schedule = recipe.schedule
    if recipe.model != ATTACHED or schedule.rounds:
        return recipe
    return msgspec.structs.replace(recipe, schedule=msgspec.structs.replace(schedule, rounds=1))


UNMEASURED = "adapters train beside a base, and how far honest machines differ in them was never measured"


def audit_problem(recipe: Recipe, layout: ModelLayout) -> str:
    """Reason why this recipe and layout cannot be audited; empty if they can."""
    return UNMEASURED if layout.held else recipe_problem(recipe, layout.floats)


def effort_misfit(recipe: Recipe, effort: AdaptiveWorkloadPolicy | UnsetType) -> str:
    """Reason why this recipe cannot have this effort; empty if it can."""
    schedule = recipe.schedule
    bounded = effort is not UNSET and effort.bounded is True
    if bounded != (schedule.total_tokens is not UNSET):
        return "its recipe has rates follow what was learned, and nothing bounds what one member says it learned"
    if bounded and schedule.steps < 1:
        return "its recipe has no steps over which rates could fall"
    if effort is UNSET:
        return ""
    if recipe.model == ATTACHED and (bounded or effort.batches is not UNSET):
        return "batches and rates are the business of its members' own loops"
    if recipe.model != ATTACHED and effort.batch != recipe.batch:
        return f"it begins with batches of {effort.batch}, and its recipe with {recipe.batch}"
    changing = effort.samples is not UNSET or effort.by_loss is True or effort.by_speed is True
    growing = effort.batches is not UNSET
    if (changing or effort.train_s is not UNSET) and (
        isinstance(recipe.inner, GradientSumOptimizer) or schedule.turn_steps < 2
    ):
        return "every step is a round, which can be neither longer nor shorter"
    if (changing or growing) and recipe.own_anchors:
        return "trainers run on for a whole round before they know what the next one asks for"
    if changing and schedule.overlap and effort.steps_min <= schedule.overlap:
        key = _words(recipe, "train.inner_steps_min", "inner_steps_min")
        return f"an overlap of {schedule.overlap} steps needs rounds of more ({key})"
    if growing and recipe.hidden_steps:
        return "steps that are taken ahead have the batch of the round before"
    if growing and recipe.reducer.quorum:
        return "a late update has the batch size of its own round, so batch growth excludes a quorum"
    return ""


def _words(recipe: Recipe, keys: str, arguments: str) -> str:
    """Names of the settings to change: keys of run.toml, or arguments of `atoll.found`."""
    return arguments if recipe.model == ATTACHED else keys


def rhythm_problem(recipe: Recipe, settings: RunSettings) -> str:
    """Reason why rounds cannot change their length as the recipe requires; empty if they can or need not."""
    if not recipe.schedule.phases:
        return ""
    if settings.rounds == 0:
        return "it has no end, of which a phase could be a share"
    return problem_with("phases of several lengths", features_of(settings))


def _rhythm(recipe: Recipe) -> tuple[tuple[int, int], ...] | UnsetType:
    return phase_rounds(recipe.schedule) if recipe.schedule.phases else UNSET


def apart_problem(recipe: Recipe) -> str:
    """Reason why partitioned members cannot train under this recipe; empty if they can."""
    if recipe.schedule.fragments > 1:
        return "rounds carry fragments in turn, and late work is of the whole model"
    if recipe.own_anchors:
        return "members have anchors of their own, which go on by themselves"
    if any(recipe.schedule.moments):
        return "members' moments are averaged, and late work has none"
    if recipe.merge not in ("replace", "delta"):
        return "members keep a share of their own parameters, in which late work would be for a second time"
    if isinstance(recipe.inner, GradientSumOptimizer):
        return "one step is a round, and its gradient is of an anchor that is gone when the member is back"
    if recipe.reducer.quorum:
        return "rounds that go on without the slow carry their steps over in another way"
    return ""


def terms_of(recipe: Recipe, share: float) -> SumCheckTerms | msgspec.UnsetType:
    """Terms of sum checks for this recipe. Raises UsageError if its codecs have no blocks."""
    if not share:
        return msgspec.UNSET
    if problem := unopened(recipe):
        raise UsageError(
            "E-RUN-17",
            f"owners of parts cannot be checked in this run: {problem}",
            cause="blocks of their answers are to be opened and made again (run.openings, run.captured_parts)",
            fix=f"choose {', '.join(sorted(CODECS))} for sync.up and sync.down; or write run.openings = 0: "
            'owners are then believed with run.trust = "community", and more of them make every part with "open"',
        )
    return SumCheckTerms(share, LeafLayout(codec_named(recipe.coding.down)).leaf_bytes)


def size_problem(recipe: Recipe, layout: ModelLayout) -> str:
    """Reason why the model cannot be cut into the recipe's fragments, of a value or more each; empty if it can."""
    try:
        smallest = min(hi - lo for lo, hi in fragments_of(layout, recipe.schedule.fragments))
    except ValueError as why:
        return str(why)
    return "" if smallest else "a fragment of what is exchanged has no values"


class RunStart(msgspec.Struct, frozen=True):
    """Start of a new run: recipe, model and data."""

    recipe: Recipe
    layout: ModelLayout
    state: tuple[Buffer, ...]  # canonical bytes of the first shared state, in pieces
    data: str
    blob: bytes  # data set; empty if data stays at its peer
    canary: bytes = b""  # held-out data for validators; may be empty
    tokenizer: bytes = b""  # tokenizer.json; empty if bytes are tokens
    base: bytes = b""  # frozen part of a built-in model; may be empty


class FoundingBlobs(msgspec.Struct, frozen=True):
    """Settings of a new run, and the blobs that its members fetch from each other."""

    settings: RunSettings
    state: tuple[Buffer, ...]  # the first shared state, in pieces
    data: bytes = b""  # data set; empty if data stays at its peer
    canary: bytes = b""  # held-out data for validators
    tokenizer: bytes = b""  # tokenizer.json
    base: bytes = b""  # frozen part of the model


def start_of_built_in(
    recipe: Recipe,
    data: str,
    canary: str = "",
    tokenizer: bytes = b"",
    column: str = COLUMN,
    weights: str = "",
    only: Sequence[str] = (),
) -> RunStart:
    """Start of a run with a built-in model. The first weights are sent as a blob, never as a seed.

    `weights`: a folder to take them from, else they are fresh. `only`: patterns of what is exchanged, the rest
    stays as it is; without any, a model's adapters if it has some, else everything.

    UsageError if the model cannot learn from this data, ValueError if the data cannot be read or are too short.
    """
    if tokenizer and (problem := tokens_misfit(recipe.model, vocabulary_of(tokenizer))):
        raise UsageError("E-RUN-13", problem[0], fix=problem[1])
    loaded = load_data(data, tokenizer, column)
    if problem := misfit(recipe.model, loaded):
        raise UsageError("E-RUN-13", problem, fix="choose another model.name or data.source")
    epoch_samples(loaded, recipe.seq_len)
    next(validation(loaded, 1, 1, recipe.seq_len), None)
    watched = _canary(recipe, canary, tokenizer, column) if canary else b""
    torch.manual_seed(recipe.seed)
    model = build_model(recipe.model, recipe.seed)
    if weights:
        load_weights(model, recipe.model, Path(weights))
    layout, base = _exchanged(model, exchanged_patterns(recipe.model, only))
    state = tuple(state_pieces(initial_state(model, layout), layout))
    return RunStart(recipe, layout, state, _label(data), data_blob(loaded), watched, tokenizer, base)


def _label(data: str) -> str:
    """Public label of a data source, without folders of the founder's disk."""
    name = Path(data).name
    return data if data == STDLIB else "own data" if name in (STDLIB, ATTACHED, "") else name


def _exchanged(model: nn.Module, only: Sequence[str]) -> tuple[ModelLayout, bytes]:
    """Layout of the tensors that these patterns name, and the blob of the others. Raises UsageError."""
    try:
        layout = layout_of(model, only)
        return layout, base_bytes(model, layout)
    except ValueError as why:
        raise UsageError(
            "E-RUN-24",
            f"this run cannot exchange a part of its model: {why}",
            cause="model.only names what is trained and travels",
            fix="name what the model has, or leave it empty: everything travels; model.lora_rank = 8 gives it "
            "adapters, which then travel alone",
        ) from None


def _canary(recipe: Recipe, canary: str, tokenizer: bytes, column: str) -> bytes:
    """Blob of the canary data, checked against this model. Raises ValueError or UsageError."""
    loaded = load_data(canary, tokenizer, column)
    if problem := misfit(recipe.model, loaded):
        raise UsageError("E-RUN-13", f"data.canary: {problem}", fix="choose another model.name or data.canary")
    next(validation(all_held_out(loaded), 1, 1, recipe.seq_len))
    return data_blob(loaded)


def _reducing(recipe: Recipe, settings: RunSettings) -> RunSettings:
    """Settings completed for this recipe's reducer and results. Raises UsageError if they conflict."""
    demand_mean(recipe, settings)
    reducer, direct = (
        recipe.reducer,
        needs_reply_format(recipe) or has_owner_feedback(recipe) or recipe.reducer.quorum,
    )
    topology = "butterfly" if direct and settings.topology == "auto" else settings.topology
    if reducer.group == "server":
        topology = "star"
    accepted = StragglerPolicy(reducer.quorum, reducer.grace) if reducer.quorum else UNSET
    settings = msgspec.structs.replace(
        settings,
        min_peers=max(reducer.peers_min, settings.min_peers),
        start_peers=max(reducer.peers_min, settings.start_peers),
        topology=topology,
        steady=True if has_owner_feedback(recipe) else UNSET,
        round=msgspec.structs.replace(settings.round, acceptance=accepted, rhythm=_rhythm(recipe)),
    )
    if reducer.quorum and (problem := problem_with("a quorum of updates", features_of(settings))):
        raise UsageError(
            "E-RUN-19",
            f"rounds of this run cannot go on without those that are slow: {problem}",
            cause=f"its recipe waits for {reducer.quorum} updates and a grace "
            + _words(recipe, "(sync.quorum, sync.grace)", "(its quorum and grace)"),
            fix=_words(
                recipe,
                'write run.trust = "private" and sync.topology = "butterfly", and no run.audit_rate; '
                "or sync.quorum = 0: rounds then wait for all members",
                'trust="private", or a recipe of quorum=0: rounds then wait for all members',
            ),
        )
    return settings


def demand_mean(recipe: Recipe, settings: RunSettings) -> None:
    """Raise UsageError if the recipe's results are more than encoded means, and these settings exclude that."""
    if problem := answers_problem(recipe, settings):
        why, fix = problem
        raise UsageError("E-RUN-18", f"this recipe's answers are more than encoded means, and {why}", fix=fix)


def answers_problem(recipe: Recipe, settings: RunSettings) -> tuple[str, str] | None:
    """Conflict of settings with results beyond an encoded mean, and its fix; None if there is none."""
    if not (needs_reply_format(recipe) or has_owner_feedback(recipe)):
        return None
    if settings.round.quorum != "majority":
        fix = _words(
            recipe,
            'write run.trust = "private", or choose another train.recipe',
            'trust="private", or another recipe; without one it is DiLoCo',
        )
        return "no member could check their owners", fix
    if settings.statistic != "mean":
        return f"{settings.statistic} is another statistic", 'write sync.statistic = "mean"'
    if settings.topology not in ("auto", "butterfly", "star"):
        return "they cannot be made of partial sums", 'write sync.topology = "butterfly"'
    return None


def check_vertex_room(settings: RunSettings) -> RunSettings:
    """Check that a vertex has room for the members that the run waits for. Raises UsageError."""
    parts, founders = parts_planned(settings), max(settings.start_peers, settings.min_peers, 1)
    most = members_most(parts, settings.round.signing)
    if most >= founders:
        return settings
    shorter = ', or write run.votes = "ed25519"' if settings.round.signing.kind == "ml-dsa-65" else ""
    raise UsageError(
        "E-RUN-14",
        f"an update of {settings.update_bytes / 1e9:.3g} GB is cut into up to {parts} parts: "
        f"a vertex has room for {most} members then, and this run waits for {founders}",
        cause=f"every vertex lists who is in each part, in one message of {CONTROL_FRAME_MAX // MIB} MiB at most",
        fix=(f"wait for {most} members at most, or " if most else "") + "choose a smaller model" + shorter,
    )


def founding_blobs(beginning: RunStart, settings: RunSettings) -> FoundingBlobs:
    """Genesis settings and blobs of a new run. Raises UsageError if model, recipe and settings do not fit."""
    layout = beginning.layout
    if problem := swarm_problem(beginning.recipe):
        raise UsageError(
            "E-RUN-12",
            f"real runs cannot do this recipe yet: {problem}",
            cause="it runs in one process so far: atoll.experiment",
            fix="choose diloco",
        )
    if beginning.recipe.schedule.epochs is not UNSET and beginning.data != ATTACHED:
        raise UsageError(
            "E-RUN-23",
            "this recipe counts passes over data of members' own, and in this run all have the same",
            fix="attach loops of your own (atoll.found(options=RunOptions(epochs=1))), or leave epochs out",
        )
    if problem := size_problem(beginning.recipe, layout):
        few = beginning.recipe.schedule.fragments == 1
        larger = "adapters of a higher rank, or more of the model" if layout.held else "a larger model"
        fragments = _words(beginning.recipe, "sync.fragments", "fragments")
        fix = f"choose {larger}" if few else f"choose {larger}, or fewer {fragments}"
        raise UsageError("E-RUN-01", problem, fix=fix)
    if settings.audited_share and (problem := audit_problem(beginning.recipe, layout)):
        raise UsageError(
            "E-RUN-16",
            f"rounds of this run cannot be audited: {problem}",
            cause="run.audit_rate asks for audits, and an audit takes steps again on another machine",
            fix="write run.audit_rate = 0, or choose a gpt or llama model and the recipe diloco without overlap, "
            'train.precision = "fp32" and train.compile = false',
        )
    if settings.scored_share and (problem := scoring_problem(beginning.recipe)):
        raise UsageError(
            "E-RUN-21",
            f"updates of this run cannot be scored: {problem}",
            cause="run.score_rate asks for scores, and a scorer looks at the loss along another's update",
            fix="write run.score_rate = 0, or train a built-in model with the recipe diloco",
        )
    if settings.twinned_share and (problem := twins_problem(beginning.recipe)):
        raise UsageError(
            "E-RUN-30",
            f"updates of this run cannot be compared: {problem}",
            cause="run.twin_rate asks for it, and twins have to make the same of the same samples",
            fix="write run.twin_rate = 0 and run.score_rate = 0.05, which looks whether updates teach; or "
            'train.recipe = "fedavg": its rounds begin alike everywhere',
        )
    if problem := effort_misfit(beginning.recipe, settings.round.effort) or pacing_problem(settings):
        raise UsageError(
            "E-RUN-22",
            f"rounds of this run cannot follow it: {problem}",
            cause="train.round_time, target_samples, adaptive_steps, adaptive_batching, steps_by_speed or "
            "total_tokens asks for it",
            fix="leave those keys out, or choose the recipe diloco with sync.overlap = 0 and sync.quorum = 0",
        )
    if problem := rhythm_problem(beginning.recipe, settings):
        raise UsageError(
            "E-RUN-22",
            f"rounds of this run cannot change their length: {problem}",
            cause=_words(beginning.recipe, "sync.phases asks for it", "its recipe's schedule has phases"),
            fix=_words(
                beginning.recipe,
                "leave sync.phases out, or give run.rounds and none of run.audit_rate, run.score_rate, "
                "run.openings, sync.apart, and of the keys by which rounds follow the run",
                'a recipe without phases; or trust="private" without round_time, target_samples and adaptive_steps',
            ),
        )
    if settings.apart_terms is not None and (problem := apart_problem(beginning.recipe)):
        raise UsageError(
            "E-RUN-20",
            f"members of this run cannot train apart: {problem}",
            cause=f'sync.apart = "{settings.apart_terms.then}" asks for it',
            fix='write sync.apart = "wait", or choose the recipe diloco, sync.fragments = 1 and sync.quorum = 0',
        )
    if settings.round.sample is not UNSET and (problem := sample_problem(beginning.recipe)):
        raise UsageError(
            "E-RUN-22",
            f"rounds of this run cannot be sampled: {problem}",
            cause=_words(beginning.recipe, "run.sample or run.sample_peers", "sample or sample_peers")
            + " asks for rounds in which some members do not train",
            fix=_words(
                beginning.recipe,
                "write 0 for both, or choose the recipe fedavg or diloco, sync.overlap = 0 and sync.fragments = 1",
                "leave both out, or let rounds be whole: overlap=0, fragments=1 and no share or recipe",
            ),
        )
    settings = _reducing(beginning.recipe, settings)
    canary = state_hash(beginning.canary) if beginning.canary else UNSET
    tokenizer = state_hash(beginning.tokenizer) if beginning.tokenizer else UNSET
    base = state_hash(beginning.base) if beginning.base else UNSET
    blob = state_hash(beginning.blob)
    learning = TrainingSpec(beginning.recipe, beginning.data, blob, layout, canary, tokenizer, base)
    largest = 4 * longest_turn(beginning.recipe.schedule, layout)  # fp32: no codec makes an update larger
    complete = msgspec.structs.replace(
        settings, learning=msgspec.msgpack.encode(learning), update_bytes=largest, pieces=PIECES_BY_SIZE
    )
    beside = beginning.canary, beginning.tokenizer, beginning.base
    try:  # as a joiner will check it
        parse_training_spec(decode_settings(encode_settings(complete)))
    except PeerFault as fault:
        raise UsageError(
            "E-RUN-39",
            f"no member could take part in this run: {fault.what}",
            cause="a number or a combination of the recipe or its settings that every member refuses in a genesis",
            fix="change what is named; atoll config --all has every setting with its unit",
        ) from None
    return FoundingBlobs(check_vertex_room(complete), beginning.state, beginning.blob, *beside)
