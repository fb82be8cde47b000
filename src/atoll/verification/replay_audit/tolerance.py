"""Audit tolerance: the profile of a replay, and the noise between honest replays.

Two honest replays of a segment differ by the order of sums, which AdamW magnifies. Below the tolerance no auditor
can tell noise from a lie. So the tolerance is calibrated on honest noise, as in NAO (2510.16028), per model family
and optimizer (`bench/audit.py`). A round without a measured tolerance, or with other differences between replays,
is unauditable, and the text names the reason.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import torch

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import SEGMENT_STEPS
from atoll.training.models import spec_of
from atoll.training.recipe.gradient import PLAIN, ComputeOptions
from atoll.training.recipe.recipes import Recipe
from atoll.verification.replay_audit.replay import TrainingAssignment

FLOATS_MAX = 2**28  # largest model with an exhibit: its state is 3 GiB, and a wire field has at most 4 GiB
MARGIN = 10  # times the noise of 99 in 100 honest pairs: other machines are noisier than the measured ones
TOLERANCE_LEAST = 1e-4  # three machines do not show all noise there is
PINS = {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}

TOLERANCES = {("gpt", "AdamW"): 1e-3, ("llama", "AdamW"): 1e-3}
"""Tolerances by family and optimizer, for segments of at most SEGMENT_STEPS: ten times the measured noise.

The built-in models showed up to 1.8e-5 (`bench/audit.py`), another transformer of 1 M with GELU 1.05e-4.
Networks with ReLU and max pooling are not here. If one activation changes sign, the gradient jumps: honest replays
of cnn-mnist were up to 2.3e-2 apart, as far as a lazy cheat. They are audited only between machines that give the
same bits.
"""


class TrainingProfile(msgspec.Struct, frozen=True):
    """Conditions under which a trainer took its steps, by its own report: a lie gains at most the tolerance."""

    torch: str
    threads: int
    pins: tuple[str, ...]  # values of PINS, in their order; empty string: not set
    device: str = "cpu"
    precision: str = "fp32"  # or amp, bf16, …
    compiled: bool = False


def profile_here(computing: ComputeOptions = PLAIN) -> TrainingProfile:
    """Profile of this process with these options; torch reads the environment once, so set it before Python
    starts."""
    return TrainingProfile(
        str(torch.__version__),
        torch.get_num_threads(),
        tuple(os.environ.get(name, "") for name in PINS),
        precision=computing.precision,
        compiled=computing.compiled,
    )


def pinned(one: TrainingProfile, other: TrainingProfile) -> bool:
    """Whether both profiles give the same bits: steps are then compared by bits, not by a tolerance."""
    exact = one.threads == 1 and one.pins == tuple(PINS.values()) and one.device == "cpu"
    return exact and one == other


def why_unreplayable(profile: TrainingProfile) -> str:
    """Why no auditor can reproduce a trainer of this profile; empty if one can."""
    if profile.precision != "fp32":
        return f"{profile.precision}: AdamW makes of its rounding what a skipped step makes; audits are for fp32"
    if profile.device != "cpu":
        return f"tolerances were measured on CPUs, not on {profile.device}"
    if profile.compiled:
        return "a compiled model adds in an order of its own machine's"
    return ""


def why_unauditable(
    assignment: TrainingAssignment,
    profile: TrainingProfile,
    here: TrainingProfile,
    *,
    tolerance: float | None = None,
) -> str:
    """Why this round cannot be replayed `here`; empty if it can be. `tolerance`: a run's own, calibrated."""
    recipe = assignment.recipe
    if recipe.model == "attached":
        return "an attached loop is its owner's own code: no other member can take its steps"
    if assignment.data == ZERO_DIGEST:
        return "its data never leaves its peer"
    if recipe.own_anchors or recipe.merge != "replace" or recipe.schedule.fragments > 1 or recipe.hidden_steps:
        return "with overlap, fragments, parameters or anchors of its own, no round starts from one agreed anchor"
    if any(recipe.schedule.moments):
        return "members take in moments that others have a part in, which no chain holds"
    if recipe.schedule.closing:
        return "its last round is a closing average, in a codec of its own"
    asked = recipe.computing or PLAIN
    for one in (profile, msgspec.structs.replace(profile, precision=asked.precision, compiled=asked.compiled)):
        if why := why_unreplayable(one):
            return why
    if tolerance is not None or pinned(profile, here):
        return ""
    if assignment.segment_steps > SEGMENT_STEPS:
        return f"segments of {assignment.segment_steps} steps; tolerances hold for at most {SEGMENT_STEPS}"
    if tolerance_of(assignment) is None:
        family, inner = _kind(assignment)
        return f"no tolerance tells noise from a lie for {family} under {inner}; audit it where bits are the same"
    return ""


def recipe_problem(recipe: Recipe, floats: int) -> str:
    """Why rounds of this recipe cannot be audited between any two machines; empty if they can."""
    if floats > FLOATS_MAX:
        return f"a model of {floats} values is too large to be shown: {FLOATS_MAX} are the most"
    some = Digest(b"\1" * 32)
    assignment = TrainingAssignment(some, 0, PeerId(""), recipe, some, some, 0, 1, 0, 0, 1)
    return why_unauditable(assignment, TrainingProfile("", 1, ()), TrainingProfile("", 1, ()))


def tolerance_of(assignment: TrainingAssignment) -> float | None:
    """Tolerance of the relative L2 distance for this model family and optimizer; None: not measured."""
    return TOLERANCES.get(_kind(assignment))


def tolerance_from(noise: Sequence[float]) -> float:
    """Tolerance from distances between honest pairs, of at least three kinds of machine or setting."""
    assert noise
    ordered = sorted(noise)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return max(TOLERANCE_LEAST, MARGIN * p99)


def _kind(assignment: TrainingAssignment) -> tuple[str, str]:
    recipe = assignment.recipe
    return spec_of(recipe.model).family, type(recipe.inner).__name__
