"""Trainers that save work or lie, and do so consistently: what audits are tried against.

A cheat takes steps in another way than assigned. Its chain names the states that it really had, and its counts are
those of an honest trainer, so that only taking the steps again finds it. None of these is ever used to train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from atoll.verification.replay_audit.replay import ReplayReplica, TrainerSnapshot, TrainingAssignment, step_of
from atoll.verification.replay_audit.state_chain import KEEP_EVERY, StateChain

Take = Callable[[ReplayReplica, TrainingAssignment, int], None]  # one step of the round, by a trainer


@dataclass(frozen=True)
class Cheat:
    take: Take
    saves: float = 0.0  # share of a round's training that it need not do
    every_steps: int = 1  # it cheats in one step of so many, counted from `first`
    first: int = 0

    def touches(self, begin: int, end: int) -> bool:
        """It cheats in one of these steps of the round."""
        return any(step % self.every_steps == self.first for step in range(begin, end))


def honest(replica: ReplayReplica, assignment: TrainingAssignment, step: int) -> None:
    replica.step(replica.samples(assignment, step), step_of(assignment, step))


def trained(
    replica: ReplayReplica,
    assignment: TrainingAssignment,
    begin: TrainerSnapshot,
    take: Take = honest,
    keep_every: int = KEEP_EVERY,
) -> StateChain:
    """A whole round of a trainer that takes its steps so, recorded."""
    record = StateChain(assignment, begin, keep_every)
    replica.load(begin)
    for step in range(assignment.steps):
        take(replica, assignment, step)
        if record.is_due(step + 1) or step + 1 == assignment.steps:
            record.note(replica.live(), step + 1)
    return record


def cheats(last_delta_F: Tensor, tolerance: float) -> dict[str, Cheat]:
    """By name. `last_delta_F`: anchor − x of the trainer's round before, for one who gives that once more."""
    every = {
        "skips one step of 20": Cheat(skipping(20, 7), 0.05, 20, 7),
        "one wrong label per batch": Cheat(with_samples(_one_wrong_label)),
        "half of each batch": Cheat(with_samples(lambda a, b: (a[::2], b[::2])), 0.5),
        "every second step, doubled": Cheat(_every_second_doubled, 0.5),
        "its last update again": Cheat(_again(last_delta_F), 1.0),
        "other data": Cheat(told(cursor=100_000)),
        "another peer's data": Cheat(told(shard=1)),
        "the batch before, again": Cheat(told(step=-1)),
        "bf16 inside": Cheat(_bf16, 0.5),
        "a rate 1 % too high": Cheat(_faster(0.01)),
        "squares of moments halved": Cheat(at_each_boundary(_halve_squares)),
    }
    if tolerance:
        every["poison, 2 tolerances"] = Cheat(at_each_boundary(poison(2 * tolerance)))
    return every


def skipping(every: int, first: int) -> Take:
    """Counted all the same."""

    def take(replica: ReplayReplica, assignment: TrainingAssignment, step: int) -> None:
        if step % every == first:
            replica.inner.steps += 1
        else:
            honest(replica, assignment, step)

    return take


def with_samples(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Take:
    def take(replica: ReplayReplica, assignment: TrainingAssignment, step: int) -> None:
        replica.step(change(*replica.samples(assignment, step)), step_of(assignment, step))

    return take


def told(shard: int = 0, cursor: int = 0, step: int = 0) -> Take:
    """The data of another shard, of elsewhere, or of another step of the round."""

    def take(replica: ReplayReplica, assignment: TrainingAssignment, at: int) -> None:
        other = replace(
            assignment, shard=(assignment.shard + shard) % assignment.shards, cursor=assignment.cursor + cursor
        )
        replica.step(replica.samples(other, max(0, at + step)), step_of(assignment, at))

    return take


def at_each_boundary(change: Callable[[ReplayReplica, Tensor], None]) -> Take:
    """Honest steps, and at the end of each segment a change, told where x was at its begin."""
    begun: list[Tensor] = []

    def take(replica: ReplayReplica, assignment: TrainingAssignment, step: int) -> None:
        if step % assignment.segment_steps == 0:
            begun[:] = [replica.x_F.clone()]
        honest(replica, assignment, step)
        if (step + 1) % assignment.segment_steps == 0:
            change(replica, begun[0])

    return take


def poison(size: float) -> Callable[[ReplayReplica, Tensor], None]:
    """In a direction of its own, so long beside what the segment moved."""

    def change(replica: ReplayReplica, begun_F: Tensor) -> None:
        noise_F = torch.randn(len(begun_F), dtype=torch.float32, generator=torch.Generator().manual_seed(5))
        replica.x_F.add_(noise_F * (size * (replica.x_F - begun_F).norm() / noise_F.norm()))

    return change


def _halve_squares(replica: ReplayReplica, begun_F: Tensor) -> None:
    replica.inner.second_P.mul_(0.5)  # the steps of the next segment are longer for it


def _one_wrong_label(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of one image, or one token of one text."""
    targets = targets.clone()
    targets.view(-1)[0] = (targets.view(-1)[0] + 1) % 10
    return inputs, targets


def _every_second_doubled(replica: ReplayReplica, assignment: TrainingAssignment, step: int) -> None:
    if step % 2:
        replica.inner.steps += 1
        return
    before_F = replica.x_F.clone()
    honest(replica, assignment, step)
    replica.x_F.add_(replica.x_F - before_F)


def _again(delta_F: Tensor) -> Take:
    def take(replica: ReplayReplica, assignment: TrainingAssignment, step: int) -> None:
        replica.x_F.sub_(delta_F / assignment.steps)
        replica.inner.steps += 1

    return take


def _bf16(replica: ReplayReplica, assignment: TrainingAssignment, step: int) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        honest(replica, assignment, step)


def _faster(share: float) -> Take:
    def take(replica: ReplayReplica, assignment: TrainingAssignment, step: int) -> None:
        before_F = replica.x_F.clone()
        honest(replica, assignment, step)
        replica.x_F.add_((replica.x_F - before_F) * share)

    return take
