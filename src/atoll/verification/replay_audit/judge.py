"""Judgment of one audit: from assignment, claim and exhibit to a verdict.

Hashes are exact: an exhibit that contradicts its own chain is an `ExhibitHashMismatch`. Replays are not: a
`ReplayMismatch` may be the auditor's fault, so alone it accuses no member: `policy/membership.py` (`convicted`)
counts the auditors.
Invariants:
- Comparisons are relative to the *auditor's* numbers, never to claimed ones. NaN is a mismatch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import msgspec
import torch
from torch import Tensor

from atoll.base.ids import ZERO_DIGEST, Digest
from atoll.crypto.digest import Buffer, digest, merkle_root
from atoll.training.codec import Codec
from atoll.training.exchange.layout import ModelLayout
from atoll.training.recipe.error_feedback import encode_update
from atoll.training.recipe.gradient import PLAIN
from atoll.training.recipe.update import Bounds
from atoll.verification.replay_audit.replay import (
    ChainLink,
    ReplayReplica,
    TrainerSnapshot,
    TrainingAssignment,
    fresh_private,
    name_of,
    name_of_x,
    segments,
    why_no_state,
    without_pauses,
)
from atoll.verification.replay_audit.state_chain import ChainClaim, chain_head, memory_name
from atoll.verification.replay_audit.tolerance import (
    TrainingProfile,
    pinned,
    profile_here,
    tolerance_of,
    why_unauditable,
    why_unreplayable,
)


class ReplayAccepted(msgspec.Struct, frozen=True, tag="ReplayAccepted"):
    distance: float  # 0: the same bits
    tolerance: float


class ReplayMismatch(msgspec.Struct, frozen=True, tag="ReplayMismatch"):
    """The replay gave another result. It means nothing without a third replica."""

    distance: float  # relative L2; infinite if exact values differ, or the end state is missing
    tolerance: float  # 0: bits were compared
    what: str  # the differing component of the state


class ExhibitHashMismatch(msgspec.Struct, frozen=True, tag="ExhibitHashMismatch"):
    """The exhibit does not hash to the commitment, or starts from another state than the agreed one."""

    why: str


class ReplayImpossible(msgspec.Struct, frozen=True, tag="ReplayImpossible"):
    why: str


class EndStateNeeded(msgspec.Struct, frozen=True, tag="EndStateNeeded"):
    """The bits differ, as is allowed: the distance can be measured only with the state at the segment's end."""


Verdict = ReplayAccepted | ReplayMismatch | ExhibitHashMismatch | ReplayImpossible | EndStateNeeded


def judging(
    assignment: TrainingAssignment,
    claim: ChainClaim,
    links: Sequence[ChainLink],
    segment: int,
    begin: TrainerSnapshot,
    end: TrainerSnapshot | None,
    replica: ReplayReplica,
    *,
    here: TrainingProfile | None = None,
    tolerance: float | None = None,
) -> Generator[None, None, Verdict]:
    """Replay the steps of one segment. `assignment` is the auditor's own; the rest is the trainer's.

    `end` may be left out at first: equal bits need none. Changes the replica's state. Pauses after every step.
    """
    here = here or profile_here()
    asked = assignment.recipe.computing or PLAIN
    if asked == PLAIN and (why := why_unreplayable(claim.profile)):
        return ExhibitHashMismatch(f"it is no unaudited member, and claims what cannot be replayed: {why}")
    if why := why_unauditable(assignment, claim.profile, here, tolerance=tolerance):
        return ReplayImpossible(why)
    if replica.data_name != assignment.data or replica.recipe != assignment.recipe:
        return ReplayImpossible("this auditor holds other data or another recipe than the run's")
    if why := _why_wrong(assignment, claim, links, replica.layout):
        return ExhibitHashMismatch(why)
    assert 0 <= segment < len(links) - 1
    for which, live, link in (("begin", begin, links[segment]), ("end", end, links[segment + 1])):
        if live is not None and (why := why_no_state(live, replica.layout)):
            return ExhibitHashMismatch(f"the state at the segment's {which} is none: {why}")
        if live is not None and name_of(live) != link:
            return ExhibitHashMismatch(f"the state at the segment's {which} is not the one in the chain")
    bits = pinned(claim.profile, here)
    bound = 0.0 if bits else tolerance_of(assignment) if tolerance is None else tolerance
    assert bound is not None, "why_unauditable has looked"
    replayed = yield from replica.replaying(assignment, begin, *segments(assignment, claim.steps)[segment])
    if name_of(replayed) == links[segment + 1]:
        return ReplayAccepted(0.0, bound)
    if end is None:
        return ReplayMismatch(float("inf"), 0.0, "bits") if bits else EndStateNeeded()
    what, distance = furthest(begin, replayed, end)
    return ReplayAccepted(distance, bound) if distance <= bound else ReplayMismatch(distance, bound, what)


judge_segment = without_pauses(judging)


def _why_wrong(
    assignment: TrainingAssignment, claim: ChainClaim, links: Sequence[ChainLink], layout: ModelLayout
) -> str:
    """Where a chain contradicts itself or agreed state, checked without a step; empty if nowhere."""
    if not 0 < claim.steps <= assignment.steps:
        return f"{claim.steps} steps are claimed, {assignment.steps} were assigned"
    if len(links) != len(segments(assignment, claim.steps)) + 1:
        return f"{len(links)} links are no chain of {claim.steps} steps"
    if chain_head(assignment, claim.steps, links) != claim.head:
        return "the links do not hash to the head, or the trainer was told something else to do"
    if links[0].x != assignment.anchor:
        return "it starts from other parameters than the agreed ones"
    if links[0].private not in (assignment.carried, fresh_private(layout)):
        return "its moments are neither those that its last round ended with nor fresh"
    if claim.ends not in (ZERO_DIGEST, links[-1].private):
        return "its claim ends with other moments than its chain"
    return ""


def furthest(begin: TrainerSnapshot, replayed: TrainerSnapshot, shown: TrainerSnapshot) -> tuple[str, float]:
    """(name, distance) of the component that is furthest from the replay: x, first or second moments.

    ‖shown − replayed‖ / ‖replayed − begin‖. All three count: false moments change the next segment's steps.
    """
    if shown.inner.steps != replayed.inner.steps or not torch.equal(shown.counters_K, replayed.counters_K):
        return "counters", float("inf")
    found = {
        "x": _apart(begin.x_F, replayed.x_F, shown.x_F),
        "first moments": _apart(begin.inner.first_P, replayed.inner.first_P, shown.inner.first_P),
        "second moments": _apart(begin.inner.second_P, replayed.inner.second_P, shown.inner.second_P),
    }
    what = max(found, key=lambda name: found[name])
    return what, found[what]


def _apart(begin_N: Tensor, replayed_N: Tensor, shown_N: Tensor) -> float:
    moved = float(torch.linalg.vector_norm(replayed_N - begin_N, dtype=torch.float64))
    off = float(torch.linalg.vector_norm(shown_N - replayed_N, dtype=torch.float64))
    if off == 0.0:
        return 0.0
    distance = off / moved if moved > 0.0 else float("inf")
    return distance if distance == distance else float("inf")  # not a number: the replay itself diverged


def judge_update(
    assignment: TrainingAssignment,
    claim: ChainClaim,
    links: Sequence[ChainLink],
    anchor_F: Tensor,
    x_F: Tensor,
    memory_F: Tensor | None,
    bounds: Bounds,
    codec: Codec | Sequence[Codec],
    layout: ModelLayout,
    wires: Sequence[Buffer] = (),
    named: Callable[[Buffer], Digest] = digest,
) -> Verdict:
    """Whether the payload follows exactly from the committed fp32 delta, anchor − x at the chain's end.

    No step is replayed, and there is no tolerance: int8 alone is as far from its delta as a cheat. If encoded bytes
    differ between machines (compressors), the `wires` are needed and their values are compared. `named` computes
    the name of a wire in commitments of this run.
    """
    if why := _why_wrong(assignment, claim, links, layout):
        return ExhibitHashMismatch(why)
    for name, shown, owed in (
        ("the anchor", name_of_x(anchor_F), assignment.anchor),
        ("x", name_of_x(x_F), links[-1].x),
        ("the error feedback", memory_name(memory_F), claim.memory),
    ):
        if shown != owed:
            return ExhibitHashMismatch(f"{name} is not the one in the chain")
    if claim.memory not in (ZERO_DIGEST, assignment.memory) and assignment.memory is not None:
        return ExhibitHashMismatch("its error feedback is neither what its last update left nor fresh")
    try:
        update = encode_update(anchor_F, x_F, memory_F, bounds, codec, assignment.recipe.coding.beta)
    except ValueError as why:
        return ReplayMismatch(float("inf"), 0.0, f"update: {why}")
    if claim.left != memory_name(update.memory_F):
        return ReplayMismatch(float("inf"), 0.0, "error feedback")
    codecs = [codec] * len(bounds) if isinstance(codec, Codec) else list(codec)
    if all(one.same_everywhere for one in codecs):
        same = _root(update.wires, named) == claim.root
    elif len(wires) != len(bounds) or _root(wires, named) != claim.root:
        return ExhibitHashMismatch("the parts shown are not those committed to")
    else:
        each = zip(codecs, bounds, update.wires, wires, strict=True)
        same = all(torch.equal(c.decode(a, hi - lo), c.decode(b, hi - lo)) for c, (lo, hi), a, b in each)
    return ReplayAccepted(0.0, 0.0) if same else ReplayMismatch(float("inf"), 0.0, "update")


def _root(wires: Sequence[Buffer], name: Callable[[Buffer], Digest]) -> Digest:
    return merkle_root(tuple(name(wire) for wire in wires))
