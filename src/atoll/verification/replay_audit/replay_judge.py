"""Replay of an audited update from its exhibit, in a worker or offline; `judge.py` gives the verdict.

The assignment follows from the agreed state and from `JudgeReplay`, which follows from vertices.
Invariants:
- No number that follows from agreed state is taken from the exhibit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.crypto.digest import Buffer
from atoll.peer.tasks import JudgeReplay, JudgmentResult
from atoll.training.codec import Codec
from atoll.training.data import cursor_after
from atoll.training.recipe.lr_position import position_of
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.state import SharedState
from atoll.training.recipe.update import Bounds, part_bounds, part_codecs
from atoll.training.spec import TrainingSpec
from atoll.verification.replay_audit.binding import why_states_unbound, why_update_unbound
from atoll.verification.replay_audit.exhibit import (
    SegmentExhibit,
    states_of,
    vector_from_bytes,
    why_contradicts,
    why_not_said,
)
from atoll.verification.replay_audit.judge import (
    ExhibitHashMismatch,
    ReplayAccepted,
    ReplayImpossible,
    ReplayMismatch,
    Verdict,
    judge_segment,
    judge_update,
)
from atoll.verification.replay_audit.replay import ReplayReplica, TrainingAssignment, name_of_x
from atoll.verification.replay_audit.tolerance import PINS, pinned, profile_here


@dataclass(frozen=True)
class ReplayJudge:
    """One exhibit and the facts to judge it by. `name` computes the name of a wire in commitments of this run."""

    run: Digest
    learning: TrainingSpec  # training rules of the round
    work: JudgeReplay
    shown: SegmentExhibit
    before: SharedState  # agreed state at the start of the round
    name: Callable[[Buffer], Digest]

    def __post_init__(self) -> None:
        """PeerFault if the peer's commitments do not name it."""
        if why := why_not_said(self.shown, self.work.claim, self.work.last_claim):
            raise PeerFault(self.work.peer, why)

    def assignment(self) -> TrainingAssignment:
        """The peer's assignment, with the start that its claim before allows."""
        work, last = self.work, self.shown.last
        told = assigned(
            self.run,
            self.learning,
            work.round,
            work.peer,
            work.shard,
            work.shards,
            work.steps_max,
            self.before,
            work.batch,
        )
        carried = ZERO_DIGEST if last is None else last.ends
        memory = ZERO_DIGEST if last is None else last.left if work.last_whole else None
        return msgspec.structs.replace(told, carried=carried, memory=memory)

    def codecs(self) -> tuple[Bounds, Sequence[Codec]]:
        """Bounds and codecs of the parts of its update."""
        learning, work = self.learning, self.work
        bounds = part_bounds(learning.layout.floats, work.shares)
        common = learning.round_inputs(work.round, self.before, work.before)
        return bounds, part_codecs(learning.recipe.coding.up, common, bounds)

    def update(self, assignment: TrainingAssignment) -> Verdict:
        """Whether its update follows from its last state. Takes no step."""
        shown, work, layout = self.shown, self.work, self.learning.layout
        if (wrong := why_contradicts(shown, work.steps, work.root)) is not None:
            return wrong
        bounds, codecs = self.codecs()
        return judge_update(
            assignment,
            shown.claim,
            shown.links,
            self.before.anchor_F,
            vector_from_bytes(shown.x, layout.floats),
            vector_from_bytes(shown.memory, layout.floats) if shown.memory else None,
            bounds,
            codecs,
            layout,
            shown.wires,
            self.name,
        )


class OfflineJudgment(NamedTuple):
    """Result of judging an exhibit a second time."""

    said: JudgmentResult
    proven: bool  # the peer's signature fixes the judged bytes: no other peer can have made them


def judge_again(trial: ReplayJudge, replica: Callable[[Recipe], ReplayReplica]) -> OfflineJudgment:
    """Judge the whole exhibit, without trust in any report that the peer showed it.

    `replica` is called only if steps are to be replayed. PeerFault for bytes without a commitment.
    """
    work, shown, layout = trial.work, trial.shown, trial.learning.layout
    assignment, (_, codecs) = trial.assignment(), trial.codecs()
    unbound = why_update_unbound(shown, assignment, work.claim, work.last_claim, codecs, layout, trial.name)
    if unbound:
        return OfflineJudgment(JudgmentResult("withheld", unbound), proven=False)
    verdict = trial.update(assignment)
    if isinstance(verdict, ReplayAccepted):
        if unbound := why_states_unbound(shown, work.segment, layout):
            return OfflineJudgment(JudgmentResult("withheld", unbound), proven=False)
        begin, end = states_of(shown, layout)
        verdict = judge_segment(
            assignment, shown.claim, shown.links, work.segment, begin, end, replica(assignment.recipe)
        )
    profile = shown.claim.profile
    by_bits = pinned(profile, profile) and not pinned(
        profile, profile_here()
    )  # bits are comparable there, and not here
    if isinstance(verdict, ReplayAccepted) and verdict.distance * 2 > verdict.tolerance > 0:
        verdict = ReplayImpossible(
            f"its distance here, {verdict.distance:.1e}, is within the tolerance of {verdict.tolerance:.1e}, and "
            "too near to it to say what other machines find"
        )
    elif isinstance(verdict, ReplayAccepted) and verdict.distance and by_bits:
        verdict = ReplayImpossible(
            f"it is within the tolerance here ({verdict.distance:.1e}), and auditors may have compared bits: those "
            f"come out alike only with torch {profile.torch}, one thread and "
            + " ".join(f"{name}={value}" for name, value in PINS.items())
        )
    return OfflineJudgment(in_words(verdict), proven=True)


def in_words(verdict: Verdict) -> JudgmentResult:
    """The finding that an auditor signs, with its reason."""
    match verdict:
        case ReplayAccepted(distance=distance):
            return JudgmentResult("accepted", f"distance {distance:.1e}")
        case ReplayMismatch(distance=distance, what=what):
            return JudgmentResult("mismatch", f"{what}, distance {distance:.1e}")
        case ExhibitHashMismatch(why=why):
            return JudgmentResult("wrong", why)
        case ReplayImpossible(why=why):
            return JudgmentResult("unauditable", why)
        case _:
            return JudgmentResult("unauditable", "the replay came to no end")


def assigned(
    run: Digest,
    learning: TrainingSpec,
    round: int,
    peer: PeerId,
    shard: int,
    shards: int,
    steps: int,
    head: SharedState,
    batch: int,
) -> TrainingAssignment:
    """One trainer's assignment from genesis, the agreed state and the plan."""
    recipe = learning.recipe
    if batch:
        recipe = msgspec.structs.replace(recipe, batch=batch)
    return TrainingAssignment(
        run=run,
        round=round,
        peer=peer,
        recipe=recipe,
        data=learning.data_blob,
        anchor=name_of_x(head.anchor_F),
        shard=shard,
        shards=shards,
        cursor=cursor_after(head.samples, shards),
        global_step=position_of(recipe, head),
        steps=steps,
    )
