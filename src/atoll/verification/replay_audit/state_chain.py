"""State chain of a trainer's round: the chain that it commits to, and the record from which it shows a segment.

The chain hashes the assignment, and at every boundary between segments the step and the name of the state. Its head
has 32 bytes; the links are shown on request. The record keeps the links and few states. The trainer recomputes any
other state from the nearest kept one before it: the bits are equal on the same machine with the same settings.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import msgspec
from msgspec.structs import replace
from torch import Tensor

from atoll.base.errors import RunFailedError
from atoll.base.ids import ZERO_DIGEST, Digest
from atoll.crypto.digest import digest
from atoll.verification.replay_audit.replay import (
    ChainLink,
    ReplayReplica,
    TrainerSnapshot,
    TrainingAssignment,
    at_once,
    name_of,
    name_of_x,
    segments,
)
from atoll.verification.replay_audit.tolerance import TrainingProfile

KEEP_EVERY = 3  # boundaries from one kept state to the next: a round of 50 steps keeps three states of six


class ChainClaim(msgspec.Struct, frozen=True):
    """A trainer's statement about its round, made before the draw."""

    head: Digest  # of the chain
    steps: int  # taken, at most those assigned
    root: Digest  # Merkle root over the digests of the encoded parts, as in its commitment
    profile: TrainingProfile
    memory: Digest = ZERO_DIGEST  # name of the error feedback before encoding; zero: none
    left: Digest = ZERO_DIGEST  # name of the error feedback afterwards, if every part is counted
    ends: Digest = ZERO_DIGEST  # `ChainLink.private` of the last link; the next round may begin with it


def claim_name(claim: ChainClaim) -> Digest:
    """The claim's name in a commitment."""
    return digest(b"atoll/audit/claim/1" + msgspec.msgpack.encode(claim))


def memory_name(memory_F: Tensor | None) -> Digest:
    return ZERO_DIGEST if memory_F is None else name_of_x(memory_F)


def chain_head(assignment: TrainingAssignment, steps: int, links: Sequence[ChainLink]) -> Digest:
    """The head over the links at the start and after each segment of a round of `steps` steps."""
    cuts = segments(assignment, steps)
    assert len(links) == len(cuts) + 1
    told = replace(
        assignment, carried=ZERO_DIGEST, memory=None
    )  # the trainer's own start is no part of its assignment
    head = digest(b"atoll/audit/chain/1" + digest(msgspec.msgpack.encode(told)) + b"".join(links[0]))
    for (_, end), link in zip(cuts, links[1:], strict=True):
        cursor = assignment.cursor + end * assignment.recipe.batch
        place = (assignment.global_step + end).to_bytes(8, "big") + cursor.to_bytes(8, "big")
        head = digest(head + place + b"".join(link))
    return head


class StateChain:
    """One round of one trainer. It needs the state before the first step, at each `is_due`, and after the last."""

    def __init__(
        self, assignment: TrainingAssignment, begin: TrainerSnapshot, keep_every: int = KEEP_EVERY
    ) -> None:
        self.assignment, self.keep_every = assignment, keep_every
        self.steps = 0
        self.links = [name_of(begin)]
        self.kept: dict[int, TrainerSnapshot] = {0: begin}  # by boundary

    def is_due(self, steps: int) -> bool:
        """Whether a boundary lies after this number of steps."""
        return steps % self.assignment.segment_steps == 0

    def note(self, live: TrainerSnapshot, steps: int) -> None:
        """Add the state after this number of steps."""
        assert segments(self.assignment, steps)[-1][0] == self.steps, "a boundary was missed"
        boundary = len(self.links)
        self.links.append(name_of(live))
        self.steps = steps
        if (boundary - 1) % self.keep_every:
            del self.kept[boundary - 1]  # kept only as the newest
        self.kept[boundary] = live  # the newest is kept: the update is made of it

    @property
    def head(self) -> Digest:
        return chain_head(self.assignment, self.steps, self.links)

    def state_at(self, boundary: int, replica: ReplayReplica) -> TrainerSnapshot:
        """The state that a link names, recomputed if it was not kept. Changes the replica's state."""
        return at_once(self.making(boundary, replica))

    def making(self, boundary: int, replica: ReplayReplica) -> Generator[None, None, TrainerSnapshot]:
        """`state_at` that pauses after every step.

        RunFailedError if this machine does not repeat its own steps. A state that is not in the chain is never
        shown: auditors would refute it.
        """
        nearest = max(kept for kept in self.kept if kept <= boundary)
        live = self.kept[nearest]
        if nearest < boundary:
            cuts = segments(self.assignment, self.steps)
            live = yield from replica.replaying(self.assignment, live, cuts[nearest][0], cuts[boundary - 1][1])
        if name_of(live) != self.links[boundary]:
            raise RunFailedError(
                "E-AUD-01",
                f"this trainer cannot repeat its steps to boundary {boundary} of round {self.assignment.round}",
                cause="threads, instruction set or torch changed, or a kernel of its device adds in any order",
                fix="keep every state (keep_every=1), or audit under the settings it trained with",
            )
        return live

    def retaken_steps(self, segment: int) -> int:
        """Steps to recompute before the two states around a segment can be shown."""
        cuts = segments(self.assignment, self.steps)
        begin = max(kept for kept in self.kept if kept <= segment)
        if segment + 1 in self.kept:
            return sum(end - first for first, end in cuts[begin:segment])
        return sum(end - first for first, end in cuts[begin : segment + 1])
