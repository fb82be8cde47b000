"""Recipes: which six pieces one training run is made of, as plain values that travel in genesis.

A recipe names the model, the work of a round and the pieces INNER, SCHEDULE, CODEC, REDUCER, OUTER, MERGE
(inner, schedule, coding, reducer, outer, merge). Here are its shape, what makes sense, what a real run can do so
far, and the recipe of real runs, DiLoCo; `methods` has the others. Numbers have a reason or a source.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from torch import empty

from atoll.base.arguments import Count, Share, Whole
from atoll.base.workload import Batch
from atoll.training.codec import SharedKnowledge, check_name, codec_named
from atoll.training.models import spec_of
from atoll.training.recipe.gradient import ComputeOptions
from atoll.training.recipe.inner import QUEUE_MAX, AdamW, GradientAccumulation, Inner, PipelinedGradients
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
from atoll.training.recipe.reducer import SCALED, RecipeReducer
from atoll.training.recipe.schedule import SyncSchedule, check_schedule, phase_at

BATCH = 4  # samples per step of one peer, small for two cores
SEQ_LEN = 64  # tokens per sample where nobody says: enough to learn words from bytes
LOOPS_OWN = AdamW(lr=1.0, warmup_steps=0, total_steps=1)  # never used: a loop of one's own has its optimizer


class UpdateCoding(msgspec.Struct, frozen=True):
    """How updates travel. Error feedback is the sender's; an owner's, of its answers, is `remembered`."""

    up: str = "int8"  # member to part owner
    down: str = "int8"  # part owner to all; strong codecs need `remembered`, or their error is never made good
    beta: Share = 1.0  # share of the error-feedback memory that survives a round; 0 switches it off
    answer: Literal["once", "remembered", "gathered"] = "once"
    """`once`: the owner encodes the mean. `remembered`: the same under error feedback of the owner. `gathered`: no
    answers, everybody decodes everybody's rows (members - 1 times the bytes, no second loss)."""


class Recipe(msgspec.Struct, frozen=True):
    model: str
    seed: Whole  # of the first weights and of the order of the data
    batch: Batch  # samples per inner step of one peer
    seq_len: Count  # tokens per sample; ignored for images
    inner: Inner
    schedule: SyncSchedule
    coding: UpdateCoding
    outer: Outer
    merge: Merge
    reducer: RecipeReducer = RecipeReducer()
    computing: ComputeOptions | UnsetType = UNSET  # of gradients; left out: in fp32, as the model is written

    @property
    def own_anchors(self) -> bool:
        """Members have anchors of their own, so a round does not end with one state hash."""
        return self.paired or self.reducer.own == "fresh"

    @property
    def paired(self) -> bool:
        """Members exchange two by two: a round has no common result at all."""
        return self.reducer.group == "pair"

    @property
    def hidden_steps(self) -> int:
        """Steps that members take between sending an update and having what became of it, beside eager ones."""
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
        raise ValueError("a closing average is a mean: statistic='mean'")
    if isinstance(recipe.outer, GossipNesterov) != (recipe.reducer.group == "pair"):
        raise ValueError("random pairs and the gossip outer step need each other")
    if isinstance(recipe.outer, RegionalNesterov) and recipe.reducer.group != "one":
        raise ValueError("servers of regions take updates as they come: group='one'")
    if recipe.reducer.own == "fresh" and not isinstance(recipe.outer, PLAIN):
        raise ValueError("eager updates move an anchor twice a round: outer=Nesterov(), Sign() or Agreeing()")
    if isinstance(recipe.inner, PipelinedGradients) and not 1 <= recipe.inner.depth <= QUEUE_MAX:
        raise ValueError(f"a queue of {recipe.inner.depth} gradients: it holds 1 to {QUEUE_MAX}")
    if isinstance(recipe.inner, PipelinedGradients) and recipe.reducer != RecipeReducer():
        raise ValueError("a queue of gradients is of means of all members: Reducer()")
    if _moments_odd(recipe):
        raise ValueError(
            "moments are plain means in fp32 that the outer step keeps, second ones in some rounds of the first: "
            "moments=(3, 6), outer=Moments(), Coding('fp32', 'fp32', 0.0), Reducer(), no fragments or overlap"
        )
    alone = recipe.reducer.group == "one"
    whole = recipe.own_anchors or alone or isinstance(recipe.outer, DelayedNesterov | MomentAverage | AdamW)
    if whole and (recipe.schedule.fragments > 1 or recipe.schedule.overlap or recipe.schedule.closing):
        raise ValueError("this reducer or outer step works on whole models: fragments=1, overlap=0, closing=''")
    if whole and recipe.merge != "replace":
        raise ValueError("this reducer or outer step starts every round from its anchor: merge='replace'")
    if isinstance(recipe.inner, GradientAccumulation) and (recipe.merge != "replace" or recipe.schedule.overlap):
        raise ValueError("accumulated gradients leave x where it is: merge='replace', overlap=0")
    if isinstance(recipe.inner, GradientAccumulation) and recipe.schedule.closing:
        raise ValueError("accumulated gradients leave no live parameters to average: closing=''")
    if _swaps_more(recipe):
        raise ValueError("merge='swap' replaces what moved, so only what was sent may move: plain averages, beta=0")


def swarm_problem(recipe: Recipe) -> str:
    """What of a recipe real runs cannot do yet; empty if they can do it all."""
    schedule, reducer, coding = recipe.schedule, recipe.reducer, recipe.coding
    # a run has one size of batch, so tokens^2 / steps weighs rows as samples do
    ours = msgspec.structs.replace(reducer, group="server" if reducer.group == "server" else "all", own="sent")
    fresh = RecipeReducer(own="fresh", quorum=reducer.quorum, grace=reducer.grace)
    cannot = {
        "gradients that are accumulated for one fragment after the other": (
            isinstance(recipe.inner, GradientAccumulation) and schedule.fragments > 1
        ),
        f"{schedule.fragments} fragments in rounds of {schedule.inner_steps} steps (they must divide them)": (
            schedule.inner_steps % schedule.fragments != 0
        ),
        f"an overlap of {schedule.overlap} steps in turns of {schedule.turn_steps}, so that one is under way while "
        f"the next is sent (it needs more than {schedule.overlap * schedule.fragments} steps per round)": (
            schedule.overlap >= schedule.turn_steps
        ),
        "a change of rhythm beside anything but whole models that all wait for": bool(schedule.phases)
        and (
            schedule != SyncSchedule(schedule.inner_steps, schedule.rounds, phases=schedule.phases)
            or recipe.hidden_steps > 0
            or isinstance(recipe.inner, GradientAccumulation)
            or recipe.own_anchors
            or reducer.quorum > 0
        ),
        "owners that remember what answers of more than a mean left out": (
            coding.answer == "remembered"
            and (reducer.statistic != "mean" or recipe.own_anchors or isinstance(recipe.outer, AgreementNesterov))
        ),
        f"answers in {coding.down}": coding.answer != "gathered" and not _needs_a_seed_at_most(coding.down),
        f"a closing average in {schedule.closing}": bool(schedule.closing) and not _stands_alone(schedule.closing),
        "a reducer other than a mean of all members' rows": (
            reducer.statistic not in SCALED or reducer not in (ours, fresh)
        ),
        "eager updates in rounds that go on without the slow": reducer.own == "fresh" and reducer.quorum > 0,
        "eager updates whose answers are gathered": reducer.own == "fresh" and coding.answer == "gathered",
        "this outer step": (
            not isinstance(recipe.outer, SHARED)
            or (reducer.own == "fresh" and isinstance(recipe.outer, AgreementNesterov | AdamW | DelayedNesterov))
        ),
        "a delayed step that comes after nothing": isinstance(recipe.outer, DelayedNesterov)
        and recipe.outer.every < 1,
        "an outer AdamW whose numbers divide by zero": isinstance(recipe.outer, AdamW) and not _steps(recipe.outer),
        "a precision, or compiled steps, in loops of members' own": (
            recipe.model == "attached" and recipe.computing is not UNSET
        ),
    }
    return ", ".join(what for what, asked in cannot.items() if asked)


def coding_at(recipe: Recipe, step: int, steps: int) -> UpdateCoding:
    """How what is sent after so many of the run's steps travels."""
    coding, (_, phase) = recipe.coding, phase_at(recipe.schedule, step, steps)
    return msgspec.structs.replace(coding, up=phase.up or coding.up, down=phase.down or coding.down)


def closing(recipe: Recipe) -> Recipe:
    """What the last round is made of where the schedule has it average all live parameters once."""
    coding = UpdateCoding(recipe.schedule.closing, recipe.schedule.closing, beta=0.0)
    return msgspec.structs.replace(recipe, coding=coding, outer=AVERAGE)


def _swaps_more(recipe: Recipe) -> bool:
    """Values would move that nobody drew, or be sent again though they were replaced."""
    return recipe.merge == "swap" and (recipe.outer != AVERAGE or recipe.coding.beta != 0.0)


def _moments_odd(recipe: Recipe) -> bool:
    """Inner moments are averaged, but not as the vector behind a whole model, or nobody would remember them."""
    schedule, remembered = recipe.schedule, isinstance(recipe.outer, MomentAverage)
    first, second = schedule.moments
    if not (first or second or remembered):
        return False
    whole = (schedule.fragments, schedule.overlap, schedule.closing, recipe.merge) == (1, 0, "", "replace")
    plain = recipe.coding == UpdateCoding("fp32", "fp32", beta=0.0) and recipe.reducer == RecipeReducer()
    sums = isinstance(recipe.inner, GradientAccumulation)
    return not (whole and plain and remembered and first > 0 and second > 0 and second % first == 0) or sums


def sample_problem(recipe: Recipe) -> str:
    """Why rounds cannot be sampled under this recipe: who is not drawn has to stand at the anchor; empty if so."""
    if recipe.schedule.fragments > 1:
        return "rounds carry fragments in turn, and who is drawn for one has steps in all of them"
    if recipe.hidden_steps:
        return "trainers go on ahead of a round that they may not be drawn for"
    if recipe.reducer.quorum:
        return "rounds that do not wait for the slow take up their steps later, when they may not be drawn"
    if recipe.own_anchors:
        return "members have anchors of their own, which go on by themselves"
    if isinstance(recipe.outer, MomentAverage):
        return "members' moments are averaged, and those of who is not drawn are old"
    if recipe.merge != "replace":
        return "members keep a share of their own parameters, which would be old when they are drawn"
    return ""


def in_swarm(recipe: Recipe, down: str = "int8", believed: bool = True) -> Recipe:
    """The nearest that a real run can do. Where owners are not `believed`, or say more than a mean, they remember
    nothing of their answers, which nobody could check; these are finer instead."""
    if isinstance(recipe.outer, DelayedNesterov) and recipe.reducer.group == "one":
        return _in_rounds(recipe, recipe.outer)
    if recipe.coding.answer != "remembered" or (believed and not swarm_problem(recipe)):
        return recipe
    coding = msgspec.structs.replace(recipe.coding, answer="once", down=down)
    nearest = msgspec.structs.replace(recipe, coding=coding)
    return recipe if swarm_problem(nearest) else nearest


def _in_rounds(recipe: Recipe, outer: DelayedNesterov) -> Recipe:
    """Updates as they come, several in one: a round begins to share with the first, and counts by what all learned.
    What comes too late for it waits in the feedback."""
    tokens = recipe.schedule.inner_steps * recipe.batch * recipe.seq_len  # behind a whole update
    return msgspec.structs.replace(
        recipe,
        outer=msgspec.structs.replace(outer, every=outer.every * tokens),
        coding=msgspec.structs.replace(recipe.coding, beta=1.0),
        reducer=RecipeReducer(quorum=1),
    )


def overlapping(recipe: Recipe, overlap: int | None, fragments: int | None) -> Recipe:
    """The same with so many steps of overlap and so many fragments; what is None stays. ValueError if that is none.

    A merge that would throw away the steps of the overlap gives way to the one that keeps them.
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
    """Every peer takes this step with the founder's numbers: none of them may end its process."""
    return 0 <= outer.beta1 < 1 and 0 <= outer.beta2 < 1 and outer.eps > 0 and outer.clip_norm > 0


def _stands_alone(codec: str) -> bool:
    """It needs to know nothing beside its name."""
    return _is_made_of(codec, SharedKnowledge())


def _needs_a_seed_at_most(codec: str) -> bool:
    return _is_made_of(codec, SharedKnowledge(seed=b"any"))


def _is_made_of(codec: str, known: SharedKnowledge) -> bool:
    try:
        codec_named(codec, known)
    except ValueError:
        return False
    return True


def lasting(recipe: Recipe, steps: int) -> Recipe:
    """The same recipe for a run of so many steps: schedules of rates follow."""
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
    """The same, but rates fall over so many tokens of all members together (training/recipe/lr_position.py), not
    over steps."""
    if total < 1:
        raise ValueError(f"rates cannot fall over {total} tokens")
    return msgspec.structs.replace(recipe, schedule=msgspec.structs.replace(recipe.schedule, total_tokens=total))


def nesterov_for(
    rounds: int, lr: float, momentum: float | None = None, floor: float = 1.0, settle: float = 0.0
) -> Nesterov:
    """The Nesterov step of a run of so many rounds; the momentum follows them unless it is given.

    With an outer rate of 1 the effective step should grow with the number of rounds. The paper's (0.7, 0.9) wants
    hundreds of them; with 30–50 it leaves +11.9 % loss where (1.0, 0.5–0.6) leaves +8 %.
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
    codec_named(down)  # it stands alone: answers that leave values out are nothing for whole updates
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
    reducer: RecipeReducer | None = None,
    batch: int = BATCH,
    seq_len: int | None = None,
    seed: int = 0,
) -> Recipe:
    """A checked recipe for a built-in model, its rates set to the length of its run.

    Without a word on merge and reducer, x becomes the new anchor, moved by the mean over all members.
    """
    seq_len = fitting_seq_len(model, seq_len)
    recipe = Recipe(model, seed, batch, seq_len, inner, schedule, coding, outer, merge, reducer or RecipeReducer())
    check_recipe(recipe)
    return lasting(recipe, schedule.steps)


def fitting_seq_len(model: str, seq_len: int | None) -> int:
    """Tokens per sample: what was asked for if the model can read so many, else SEQ_LEN or what it can."""
    longest = spec_of(model).seq_len  # says so if there is no such model: better here than in every trainer
    if seq_len is None:
        return min(SEQ_LEN, longest or SEQ_LEN)
    if longest and seq_len > longest:
        raise ValueError(f"{model} reads at most {longest} tokens at once, seq_len is {seq_len}")
    return seq_len


def in_own_loop(recipe: Recipe, believed: bool = True) -> Recipe:
    """What of a recipe is left to others where the loop is somebody's own, with its model, data and optimizer; sums
    of gradients stay what members hand over (`training/recipe/user_optimizer.py`).

    ValueError if it needs to know more of these; `believed`: see `in_swarm`.
    """
    why = ""
    if recipe.schedule.total_tokens is not UNSET:
        why = "its rates follow the tokens of all, and here the rate is your scheduler's"
    inner = recipe.inner if isinstance(recipe.inner, GradientAccumulation) else LOOPS_OWN
    recipe = msgspec.structs.replace(recipe, model="attached", seed=0, batch=1, seq_len=1, inner=inner)
    recipe = in_swarm(recipe, believed=believed)  # an update counts by samples, where it counts by tokens
    if why:
        raise ValueError(f"this recipe is none for a loop of one's own: {why}")
    if problem := swarm_problem(recipe):
        raise ValueError(
            f"this recipe is none for a loop of one's own, only for atoll.experiment: {problem}; diloco is for both"
        )
    return recipe


def own_loop(
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
    """DiLoCo rounds around somebody's own training loop, which brings model, data and inner optimizer.

    With a `share` SPARTA's: so large a part of the values is averaged, drawn anew in every round, and nothing else.
    """
    outer, coding = Nesterov(lr=outer_lr, momentum=outer_momentum), UpdateCoding(up=up, down=down)
    if share:
        outer, coding = AVERAGE, drawn_share(share)
    else:
        codec_named(down)
    _check_codecs(coding.up, coding.down)
    passes, last = epochs or UNSET, "fp16" if share else ""
    schedule = SyncSchedule(inner_steps, rounds, fragments, overlap, closing=last, epochs=passes)
    check_schedule(msgspec.structs.replace(schedule, rounds=max(1, rounds)))  # 0: without end
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
    """A random share of the values, the same at all, both ways: what replaces leaves nothing to make good."""
    codec = f"randk:{share:g}+fp16"
    return UpdateCoding(codec, codec, beta=0.0)


def _check_codecs(up: str, down: str) -> None:
    check_name(up)
    check_name(down)
    if not codec_named(down, SharedKnowledge(seed=b"any", reference_N=empty(0), shapes=())).same_everywhere:
        raise ValueError(
            f"{down!r} cannot carry answers: its bytes may differ between owners' machines; "
            "name a codec without zstd, lz4 or snappy for the way down"
        )


def demo_recipe() -> Recipe:
    """`atoll demo`: four peers on one ordinary computer learn Python's standard library in a minute or two.

    Measured (bench/RESULTS.md, "demo"): validation loss 5.36 -> 1.68 nats per byte; one peer alone, 1.84.
    One step is 13 ms of one core, so four peers on two cores train for about half a minute.
    """
    return diloco("gpt-tiny", rounds=24, inner_steps=40, batch=8, lr=6e-3, up="2bit", down="int8")
