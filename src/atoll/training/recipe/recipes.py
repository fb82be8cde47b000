"""Recipes: the six pieces of a training run, as plain values that travel in genesis.

A recipe names the model, the work of a round and six pieces: inner, schedule, coding, reducer, outer, merge. This
module has their type, the checks, the limits of real runs, and the default recipe of real runs, DiLoCo; `methods`
has the others. Numbers have a reason or a source.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from torch import empty

from atoll.base.arguments import Count, Share, Whole
from atoll.base.workload import Batch
from atoll.training.codec import SharedKnowledge, check_codec_name, codec_named
from atoll.training.models import label_of, spec_of
from atoll.training.recipe.gradient import ComputeOptions
from atoll.training.recipe.inner import QUEUE_MAX, AdamW, GradientSumOptimizer, Inner, PipelinedGradients
from atoll.training.recipe.inner import lasting as inner_lasting
from atoll.training.recipe.merge import Merge
from atoll.training.recipe.outer import (
    AVERAGE,
    PLAIN,
    SHARED,
    AgreementNesterov,
    DelayedNesterov,
    GossipNesterov,
    MomentAverage,
    Nesterov,
    Outer,
    RegionalNesterov,
    SignOuter,
)
from atoll.training.recipe.reducer import SCALED, ReductionSettings
from atoll.training.recipe.schedule import SyncSchedule, check_schedule, phase_at

BATCH = 4  # samples per step of one peer, small for two cores
SEQ_LEN = 64  # default tokens per sample: enough to learn words from bytes
LOOPS_OWN = AdamW(lr=1.0, warmup_steps=0, total_steps=1)  # placeholder: a custom loop has its own optimizer


class UpdateCoding(msgspec.Struct, frozen=True):
    """Encoding of updates and results. `beta` is the sender's error feedback; `remembered` adds the owner's."""

    up: str = "int8"  # member to part owner
    down: str = "int8"  # part owner to all; strong codecs need `remembered`, or their error is never corrected
    beta: Share = 1.0  # share of the error-feedback memory that survives a round; 0 switches it off
    answer: Literal["once", "remembered", "gathered"] = "once"
    """`once`: the owner encodes the mean. `remembered`: the same under error feedback of the owner. `gathered`: no
    results, every member decodes all rows (members - 1 times the bytes, no second loss).
    """


class Recipe(msgspec.Struct, frozen=True):
    model: str
    seed: Whole  # seed of the first weights and of the order of the data
    batch: Batch  # samples per inner step of one peer
    seq_len: Count  # tokens per sample; ignored for images
    inner: Inner
    schedule: SyncSchedule
    coding: UpdateCoding
    outer: Outer
    merge: Merge
    reducer: ReductionSettings = ReductionSettings()
    computing: ComputeOptions | UnsetType = UNSET  # gradient computation; unset: fp32, uncompiled

    @property
    def own_anchors(self) -> bool:
        """Whether members have anchors of their own, so a round does not end with one state hash."""
        return self.paired or self.reducer.own == "fresh"

    @property
    def paired(self) -> bool:
        """Whether members exchange in pairs, so a round has no common result."""
        return self.reducer.group == "pair"

    @property
    def hidden_steps(self) -> int:
        """Steps between sending an update and applying its round's result, without those of eager updates."""
        if isinstance(self.inner, PipelinedGradients):
            return self.inner.depth * self.schedule.inner_steps
        return self.schedule.overlap


def check_recipe(recipe: Recipe) -> None:
    """ValueError if the pieces do not fit each other."""
    check_schedule(recipe.schedule)
    if min(recipe.batch, recipe.seq_len) < 1:
        raise ValueError("rounds, inner_steps, batch and seq_len must all be at least 1")
    codings = [(recipe.coding.up, recipe.coding.down)]
    codings += [(p.up or recipe.coding.up, p.down or recipe.coding.down) for p in recipe.schedule.phases]
    codings += [(recipe.schedule.closing, recipe.schedule.closing)] if recipe.schedule.closing else []
    for up, down in codings:
        _check_codecs(up, down)
    if recipe.schedule.closing and recipe.reducer.statistic != "mean":
        raise ValueError("a closing average needs statistic='mean'")
    if isinstance(recipe.outer, GossipNesterov) != (recipe.reducer.group == "pair"):
        raise ValueError("group='pair' and outer=GossipNesterov() need each other")
    if isinstance(recipe.outer, RegionalNesterov) and recipe.reducer.group != "one":
        raise ValueError("outer=RegionalNesterov() applies updates on arrival: group='one'")
    if recipe.reducer.own == "fresh" and not isinstance(recipe.outer, PLAIN):
        raise ValueError(
            "eager updates move an anchor twice a round: outer=Nesterov(), SignOuter() or AgreementNesterov()"
        )
    if isinstance(recipe.inner, PipelinedGradients) and not 1 <= recipe.inner.depth <= QUEUE_MAX:
        raise ValueError(f"depth={recipe.inner.depth} is not between 1 and {QUEUE_MAX} gradients")
    if isinstance(recipe.inner, PipelinedGradients) and recipe.reducer != ReductionSettings():
        raise ValueError("pipelined gradients are means over all members: reducer=ReductionSettings()")
    if _moments_odd(recipe):
        raise ValueError(
            "moments are plain means in fp32, the second ones in some rounds of the first: "
            "moments=(3, 6), outer=MomentAverage(), UpdateCoding('fp32', 'fp32', 0.0), ReductionSettings(), "
            "no fragments or overlap"
        )
    alone = recipe.reducer.group == "one"
    whole = recipe.own_anchors or alone or isinstance(recipe.outer, DelayedNesterov | MomentAverage | AdamW)
    if whole and (recipe.schedule.fragments > 1 or recipe.schedule.overlap or recipe.schedule.closing):
        raise ValueError("this reducer or outer step needs whole models: fragments=1, overlap=0, closing=''")
    if whole and recipe.merge != "replace":
        raise ValueError("this reducer or outer step starts every round from the anchor: merge='replace'")
    if isinstance(recipe.inner, GradientSumOptimizer) and (recipe.merge != "replace" or recipe.schedule.overlap):
        raise ValueError("accumulated gradients do not move x: merge='replace', overlap=0")
    if isinstance(recipe.inner, GradientSumOptimizer) and recipe.schedule.closing:
        raise ValueError("accumulated gradients leave no live parameters to average: closing=''")
    if _swaps_more(recipe):
        raise ValueError("merge='swap' replaces moved values, so only sent values may move: outer=AVERAGE, beta=0")


def swarm_problem(recipe: Recipe) -> str:
    """What real runs cannot do of a recipe yet; empty if they can do all of it."""
    schedule, reducer, coding = recipe.schedule, recipe.reducer, recipe.coding
    # a run has one batch size, so tokens^2 / steps weighs rows as samples do
    ours = msgspec.structs.replace(reducer, group="server" if reducer.group == "server" else "all", own="sent")
    fresh = ReductionSettings(own="fresh", quorum=reducer.quorum, grace=reducer.grace)
    cannot = {
        "accumulated gradients with fragments": (
            isinstance(recipe.inner, GradientSumOptimizer) and schedule.fragments > 1
        ),
        f"{schedule.fragments} fragments in rounds of {schedule.inner_steps} steps (they must divide them)": (
            schedule.inner_steps % schedule.fragments != 0
        ),
        f"an overlap of {schedule.overlap} steps in turns of {schedule.turn_steps}, so that one is under way while "
        f"the next is sent (it needs more than {schedule.overlap * schedule.fragments} steps per round)": (
            schedule.overlap >= schedule.turn_steps
        ),
        "schedule phases with anything but whole models and synchronous rounds": bool(schedule.phases)
        and (
            schedule != SyncSchedule(schedule.inner_steps, schedule.rounds, phases=schedule.phases)
            or recipe.hidden_steps > 0
            or isinstance(recipe.inner, GradientSumOptimizer)
            or recipe.own_anchors
            or reducer.quorum > 0
        ),
        "error feedback of owners for anything but a mean": (
            coding.answer == "remembered"
            and (reducer.statistic != "mean" or recipe.own_anchors or isinstance(recipe.outer, AgreementNesterov))
        ),
        f"results in {coding.down}": coding.answer != "gathered" and not _needs_a_seed_at_most(coding.down),
        f"a closing average in {schedule.closing}": bool(schedule.closing) and not _stands_alone(schedule.closing),
        "a reducer other than a mean of all members' rows": (
            reducer.statistic not in SCALED or reducer not in (ours, fresh)
        ),
        "eager updates in rounds with a quorum": reducer.own == "fresh" and reducer.quorum > 0,
        "eager updates with gathered rows": reducer.own == "fresh" and coding.answer == "gathered",
        "this outer step": (
            not isinstance(recipe.outer, SHARED)
            or (reducer.own == "fresh" and isinstance(recipe.outer, AgreementNesterov | AdamW | DelayedNesterov))
        ),
        "a delayed outer step with every < 1": isinstance(recipe.outer, DelayedNesterov) and recipe.outer.every < 1,
        "an outer AdamW with hyperparameters that divide by zero": isinstance(recipe.outer, AdamW)
        and not _steps(recipe.outer),
        "a precision, or compiled steps, in custom loops": (
            recipe.model == "attached" and recipe.computing is not UNSET
        ),
    }
    return ", ".join(what for what, asked in cannot.items() if asked)


def coding_at_step(recipe: Recipe, step: int, steps: int) -> UpdateCoding:
    """Coding of updates sent after `step` of the run's `steps` steps."""
    coding, (_, phase) = recipe.coding, phase_at(recipe.schedule, step, steps)
    return msgspec.structs.replace(coding, up=phase.up or coding.up, down=phase.down or coding.down)


def closing_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the last round if the schedule ends with an average of all live parameters."""
    coding = UpdateCoding(recipe.schedule.closing, recipe.schedule.closing, beta=0.0)
    return msgspec.structs.replace(recipe, coding=coding, outer=AVERAGE)


def _swaps_more(recipe: Recipe) -> bool:
    """Whether undrawn values would move under `swap`, or replaced values would be sent again."""
    return recipe.merge == "swap" and (recipe.outer != AVERAGE or recipe.coding.beta != 0.0)


def _moments_odd(recipe: Recipe) -> bool:
    """Whether inner moments are averaged in an unsupported way.

    Supported: as the vector behind a whole model, kept by the outer step.
    """
    schedule, remembered = recipe.schedule, isinstance(recipe.outer, MomentAverage)
    first, second = schedule.moments
    if not (first or second or remembered):
        return False
    whole = (schedule.fragments, schedule.overlap, schedule.closing, recipe.merge) == (1, 0, "", "replace")
    plain = recipe.coding == UpdateCoding("fp32", "fp32", beta=0.0) and recipe.reducer == ReductionSettings()
    sums = isinstance(recipe.inner, GradientSumOptimizer)
    return not (whole and plain and remembered and first > 0 and second > 0 and second % first == 0) or sums


def sample_problem(recipe: Recipe) -> str:
    """Why rounds cannot be sampled under this recipe: a member that is not drawn must stay at the anchor. Empty if
    they can.
    """
    if recipe.schedule.fragments > 1:
        return "rounds carry fragments in turn, but a drawn member has steps in all of them"
    if recipe.hidden_steps:
        return "trainers run ahead into a round that they may not be drawn for"
    if recipe.reducer.quorum:
        return "rounds with a quorum count slow members' steps later, when they may not be drawn"
    if recipe.own_anchors:
        return "members have anchors of their own, which move in every round"
    if isinstance(recipe.outer, MomentAverage):
        return "members' moments are averaged, and members that are not drawn have old ones"
    if recipe.merge != "replace":
        return "members keep a share of their own parameters, which are old when they are drawn"
    return ""


def for_real_run(recipe: Recipe, down: str = "int8", believed: bool = True) -> Recipe:
    """The nearest recipe that a real run can do.

    If owners are not trusted (`believed`), or reply with more than a mean, they keep no error feedback, because no
    other peer could check it. Their results get the finer codec `down` instead.
    """
    if isinstance(recipe.outer, DelayedNesterov) and recipe.reducer.group == "one":
        return _in_rounds(recipe, recipe.outer)
    if recipe.coding.answer != "remembered" or (believed and not swarm_problem(recipe)):
        return recipe
    coding = msgspec.structs.replace(recipe.coding, answer="once", down=down)
    nearest = msgspec.structs.replace(recipe, coding=coding)
    return recipe if swarm_problem(nearest) else nearest


def _in_rounds(recipe: Recipe, outer: DelayedNesterov) -> Recipe:
    """Asynchronous updates as rounds: a round begins with the first finished member and counts by all learned
    tokens.

    Late updates wait in the error feedback.
    """
    tokens = recipe.schedule.inner_steps * recipe.batch * recipe.seq_len  # tokens behind a whole update
    return msgspec.structs.replace(
        recipe,
        outer=msgspec.structs.replace(outer, every=outer.every * tokens),
        coding=msgspec.structs.replace(recipe.coding, beta=1.0),
        reducer=ReductionSettings(quorum=1),
    )


def with_overlap(recipe: Recipe, overlap: int | None, fragments: int | None) -> Recipe:
    """The same recipe with this overlap (steps) and number of fragments; None keeps the present value.

    `replace` drops the steps of the overlap, so it becomes `delta`. ValueError if the result is invalid.
    """
    schedule = recipe.schedule
    overlap = schedule.overlap if overlap is None else overlap
    fragments = schedule.fragments if fragments is None else fragments
    merge = "delta" if overlap and recipe.merge == "replace" else recipe.merge
    schedule = msgspec.structs.replace(schedule, overlap=overlap, fragments=fragments)
    recipe = msgspec.structs.replace(recipe, schedule=schedule, merge=merge)
    check_recipe(recipe)
    return recipe


def _steps(outer: AdamW) -> bool:
    """Whether the numbers are valid: every peer computes this step, so they must not end its process."""
    return 0 <= outer.beta1 < 1 and 0 <= outer.beta2 < 1 and outer.eps > 0 and outer.clip_norm > 0


def _stands_alone(codec: str) -> bool:
    """Whether the codec needs no shared knowledge."""
    return _can_build(codec, SharedKnowledge())


def _needs_a_seed_at_most(codec: str) -> bool:
    return _can_build(codec, SharedKnowledge(seed=b"any"))


def _can_build(codec: str, known: SharedKnowledge) -> bool:
    try:
        codec_named(codec, known)
    except ValueError:
        return False
    return True


def with_length(recipe: Recipe, steps: int) -> Recipe:
    """The same recipe for a run of `steps` steps: rate schedules follow."""
    outer, schedule = recipe.outer, recipe.schedule
    match outer:
        case AdamW():
            outer = inner_lasting(outer, steps)
        case Nesterov() if outer.floor != 1.0 or outer.settle:
            outer = msgspec.structs.replace(outer, total_steps=steps)
        case SignOuter():
            warmup_steps = min(outer.warmup_steps, steps // 10)
            outer = msgspec.structs.replace(outer, total_steps=steps, warmup_steps=warmup_steps)
        case Nesterov() | DelayedNesterov() | GossipNesterov() | AgreementNesterov() | MomentAverage():
            pass
    rounds = -(-steps // schedule.inner_steps)
    return msgspec.structs.replace(
        recipe,
        inner=inner_lasting(recipe.inner, steps),
        outer=outer,
        schedule=msgspec.structs.replace(schedule, rounds=rounds),
    )


def over_tokens(recipe: Recipe, total: int) -> Recipe:
    """The same recipe, with rates over `total` tokens of all members (`lr_position.py`), not over steps."""
    if total < 1:
        raise ValueError(f"rates cannot fall over {total} tokens")
    return msgspec.structs.replace(recipe, schedule=msgspec.structs.replace(recipe.schedule, total_tokens=total))


def nesterov_for(
    rounds: int, lr: float, momentum: float | None = None, floor: float = 1.0, settle: float = 0.0
) -> Nesterov:
    """Nesterov step of a run of `rounds` rounds; the default momentum follows their number.

    With an outer rate of 1 the effective step should grow with the number of rounds. The paper's (0.7, 0.9) needs
    hundreds of rounds; with 30–50 it leaves +11.9 % loss, (1.0, 0.5–0.6) leaves +8 %.
    """
    following = 0.5 if rounds <= 50 else 0.7 if rounds <= 100 else 0.8
    return Nesterov(lr, following if momentum is None else momentum, floor, settle)


def diloco(
    model: str = "gpt-tiny",
    *,
    rounds: int = 30,
    inner_steps: int = 50,
    batch: int = BATCH,
    seq_len: int | None = None,
    lr: float = 4e-3,
    outer_lr: float = 1.0,
    outer_momentum: float | None = None,
    up: str = "int8",
    down: str = "int8",
    seed: int = 0,
) -> Recipe:
    """DiLoCo (2311.08105, algorithm 1): AdamW inside, Nesterov outside, compressed pseudo-gradients.

    The outer momentum follows the number of rounds unless it is given.
    """
    codec_named(down)  # stands alone: sparse results would not fit whole updates
    return recipe_for(
        model,
        batch=batch,
        seq_len=seq_len,
        seed=seed,
        inner=AdamW(lr=lr),
        schedule=SyncSchedule(inner_steps=inner_steps, rounds=rounds),
        coding=UpdateCoding(up=up, down=down),
        outer=nesterov_for(rounds, outer_lr, outer_momentum),
    )


def recipe_for(
    model: str,
    *,
    inner: Inner,
    schedule: SyncSchedule,
    coding: UpdateCoding,
    outer: Outer,
    merge: Merge = "replace",
    reducer: ReductionSettings | None = None,
    batch: int = BATCH,
    seq_len: int | None = None,
    seed: int = 0,
) -> Recipe:
    """A checked recipe for a built-in model, with rates set to the length of its run.

    Default merge and reducer: x becomes the new anchor, moved by the mean over all members.
    """
    seq_len = fitting_seq_len(model, seq_len)
    recipe = Recipe(
        model, seed, batch, seq_len, inner, schedule, coding, outer, merge, reducer or ReductionSettings()
    )
    check_recipe(recipe)
    return with_length(recipe, schedule.steps)


def fitting_seq_len(model: str, seq_len: int | None) -> int:
    """Tokens per sample: the requested number, or by default SEQ_LEN or the model's maximum.

    ValueError if the model's maximum is lower than the requested number.
    """
    longest = spec_of(model).seq_len  # raises for an unknown model, here rather than in every trainer
    if seq_len is None:
        return min(SEQ_LEN, longest or SEQ_LEN)
    if longest and seq_len > longest:
        raise ValueError(f"{label_of(model)} reads at most {longest} tokens at once, seq_len is {seq_len}")
    return seq_len


def for_custom_loop(recipe: Recipe, believed: bool = True) -> Recipe:
    """A recipe's outer part for a custom loop, which brings its own model, data and optimizer.

    Members still send sums of gradients if the recipe accumulates them (`recipe/user_optimizer.py`). ValueError
    if the recipe needs more of the loop; `believed`: see `in_swarm`.
    """
    why = ""
    if recipe.schedule.total_tokens is not UNSET:
        why = "its rates follow the tokens of all members, but in a custom loop your scheduler sets the rate"
    inner = recipe.inner if isinstance(recipe.inner, GradientSumOptimizer) else LOOPS_OWN
    recipe = msgspec.structs.replace(recipe, model="attached", seed=0, batch=1, seq_len=1, inner=inner)
    recipe = for_real_run(recipe, believed=believed)  # an update then counts by samples instead of tokens
    if why:
        raise ValueError(f"this recipe cannot run in a custom loop: {why}")
    if problem := swarm_problem(recipe):
        raise ValueError(
            f"this recipe runs only in atoll.experiment, not in a custom loop: {problem}; diloco runs in both"
        )
    return recipe


def custom_loop_recipe(
    *,
    rounds: int,
    inner_steps: int,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.6,
    up: str = "int8",
    down: str = "int8",
    fragments: int = 1,
    overlap: int = 0,
    epochs: int = 0,
    share: float = 0.0,
) -> Recipe:
    """DiLoCo rounds around a custom training loop, which brings model, data and inner optimizer.

    With a `share`, SPARTA rounds: that share of the values is averaged, drawn anew in every round, and nothing
    else.
    """
    outer, coding = Nesterov(lr=outer_lr, momentum=outer_momentum), UpdateCoding(up=up, down=down)
    if share:
        outer, coding = AVERAGE, drawn_share(share)
    else:
        codec_named(down)
    _check_codecs(coding.up, coding.down)
    passes, last = epochs or UNSET, "fp16" if share else ""
    schedule = SyncSchedule(inner_steps, rounds, fragments, overlap, closing=last, epochs=passes)
    check_schedule(msgspec.structs.replace(schedule, rounds=max(1, rounds)))  # 0 rounds: without end
    return Recipe(
        model="attached",
        seed=0,
        batch=1,
        seq_len=1,
        inner=LOOPS_OWN,
        schedule=schedule,
        coding=coding,
        outer=outer,
        merge="swap" if share else "delta" if overlap else "replace",
    )


def drawn_share(share: float) -> UpdateCoding:
    """A random share of the values, drawn alike by all members, both ways, without error feedback: values are
    replaced.
    """
    codec = f"randk:{share:g}+fp16"
    return UpdateCoding(codec, codec, beta=0.0)


def _check_codecs(up: str, down: str) -> None:
    check_codec_name(up)
    check_codec_name(down)
    if not codec_named(down, SharedKnowledge(seed=b"any", reference_N=empty(0), shapes=())).same_everywhere:
        raise ValueError(
            f"{down!r} cannot encode results: its bytes may differ between owners' machines; "
            "choose a `down` codec without zstd, lz4 or snappy"
        )


def demo_recipe() -> Recipe:
    """`atoll demo`: four peers on one ordinary computer learn Python's standard library in one to two minutes.

    Measured (bench/RESULTS.md, "demo"): validation loss 5.36 -> 1.68 nats per byte; one peer alone, 1.84. One step
    takes 13 ms of one core, so four peers on two cores train for about half a minute.
    """
    return diloco("gpt-tiny", rounds=24, inner_steps=40, batch=8, lr=6e-3, up="2bit", down="int8")
