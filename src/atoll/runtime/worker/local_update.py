"""Local update state: error feedback and the in-flight update, settled when the round's vertex is final.

    encode           the pseudo-gradient plus error feedback becomes the wires of an update
    settle           after agreement: error feedback takes what the round did not count
    on_round_agreed  agreed values move the local anchor, or replace some private parameters

Invariants:
- A value is in one place only: the feedback, the in-flight update, late work or a vertex.
Not responsible for: commands to the trainer; which updates count (vertices decide).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import torch
from torch import Tensor

from atoll.base.ids import Digest
from atoll.features.partition_training.worker import PartitionedTrainer
from atoll.peer.tasks import AbandonedRoundSettlement, AdoptState, EncodeUpdate
from atoll.runtime.storage.private_state import PrivateState, write_span
from atoll.training.codec import Codec
from atoll.training.codec.blocks import Room, tensor_over
from atoll.training.codec.compiled import native
from atoll.training.recipe.error_feedback import EncodedUpdate, encode_update, settle_error_feedback
from atoll.training.recipe.inner import GradientSumOptimizer
from atoll.training.recipe.local_anchor import EagerUpdateAnchor
from atoll.training.recipe.lr_position import step_of_run
from atoll.training.recipe.moments import padded
from atoll.training.recipe.outer import PLAIN
from atoll.training.recipe.private_parameters import PrivateModelCopy
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.state import SharedState
from atoll.training.recipe.update import RoundCodingInputs, gradient_sum_span, moved, part_bounds, part_codecs
from atoll.training.spec import TrainingSpec
from atoll.wire.messages.statements import StepsTakenWhilePartitioned

MEANS_HELD = 4  # means of the newest proposals


def gathers(recipe: Recipe) -> bool:
    """Whether trainers hand over sums of gradients instead of parameters."""
    return isinstance(recipe.inner, GradientSumOptimizer)


class LocalUpdateState:
    def __init__(
        self, away: PartitionedTrainer, arithmetic: Executor, room: Room, kept_as: torch.dtype = torch.float32
    ) -> None:
        self.memory_F: Tensor | None = None  # error feedback
        self.update: EncodedUpdate | None = None  # in flight
        self.up: tuple[Codec, ...] = ()  # codecs of the in-flight update
        self.own: EagerUpdateAnchor | None = None  # local anchor, if the recipe gives every member one
        self.kept: PrivateModelCopy | None = (
            None  # private parameters as of the last update, if the recipe has them
        )
        self._steps = 0  # in the in-flight update, without late work
        self._means: OrderedDict[Digest, Tensor | None] = (
            OrderedDict()
        )  # with a local anchor: state -> the mean that led to it
        self.uplink_bytes_s: Callable[[], float | None] = lambda: None  # measured rate; None: unknown
        self._away = away
        self._arithmetic, self._room = arithmetic, room
        self.kept_as = kept_as  # precision of error feedback between rounds

    def start_point(self, head: SharedState) -> Tensor:
        """The x (F,) with which a trainer begins at this head."""
        return self._anchor(head) if self.kept is None else self.kept.x_F

    def _anchor(self, head: SharedState) -> Tensor:
        return head.anchor_F if self.own is None else self.own.anchor_F

    def encode(
        self,
        work: EncodeUpdate,
        learning: TrainingSpec,
        common: RoundCodingInputs,
        x_F: Tensor,
        steps: int,
        members: int,
    ) -> tuple[EncodedUpdate, StepsTakenWhilePartitioned | None]:
        """The update of `steps` steps, from the anchor to this x (F,), and the late work attached to it.

        The moments that are due lie behind x. `members` updates make the mean that moves the local anchor.
        """
        head, (lo, hi) = common.state, learning.turn(common.state)
        coding = learning.recipe_after(head).coding
        native.load_for(hi - lo)
        bounds, anchor_F = part_bounds(hi - lo, work.shares), self._anchor(head)
        memory_N = self.memory_F[lo:hi] if self.memory_F is not None and coding.beta else None
        if learning.recipe.merge == "swap":
            self.kept = PrivateModelCopy(x_F.clone(), common.name)
        if hi > len(anchor_F):
            anchor_F = padded(anchor_F, hi)
        if gathers(learning.recipe):
            anchor_F, x_F = gradient_sum_span(x_F, anchor_F, learning.layout.parameters)
        self.up = part_codecs(coding.up, common, moved(bounds, lo), self.uplink_bytes_s())
        x_N = x_F[lo:hi]
        self._away.riding_F = None
        late = self._away.attach(anchor_F[lo:hi] - x_N, work.round) if work.late else None
        if self._away.riding_F is not None:
            x_N = x_N - self._away.riding_F
        spans = anchor_F[lo:hi], x_N, memory_N
        update = self.update = encode_update(*spans, bounds, self.up, coding.beta, self._new_memory)
        self._steps = steps
        if self.own is not None:
            wires = zip(self.up, update.wires, bounds, strict=True)
            mine_F = torch.cat([up.decode(wire, b - a) for up, wire, (a, b) in wires])
            self.own.apply_own_share(_outer(learning), mine_F, members, step_of_run(learning.recipe, head))
        return update, late

    def _new_memory(self, values: int) -> Tensor:
        return tensor_over(self._room(self.kept_as.itemsize * values), self.kept_as)

    def uncounted_steps(self, counted: Sequence[bool] | None) -> int:
        """Steps of the in-flight update, if a vertex counts none of its parts; else 0."""
        return self._steps if self.update is not None and counted is not None and not any(counted) else 0

    async def settle(self, work: AdoptState, learning: TrainingSpec, before: SharedState | None) -> bool:
        """Update error feedback after a round on this state; True if a local update was encoded for it."""
        update, self.update = self.update, None
        counted = work.counted
        if counted is None and self.own is not None and update is not None:
            counted = (False,) * len(update.wires)  # the local anchor has it already: the feedback corrects this
        if counted is None or update is None:
            return False
        left_N = self._away.settled(await self._left(update, counted), work.late)
        assert before is not None
        self.memory_F = write_span(self.memory_F, left_N, learning.turn(before)[0], len(before.anchor_F))
        return True

    def use_mapped(self, written: PrivateState, mapped: PrivateState) -> None:
        """Use the values of `written` that are still in use from the file that has them now, `mapped`."""
        if self.kept is written.kept:
            self.kept = mapped.kept
        if self.memory_F is written.memory_F:
            self.memory_F = mapped.memory_F
        if written.sent is not None and mapped.sent is not None and self.update is written.sent.update:
            self.update = mapped.sent.update

    def restore_feedback(self, memory_F: Tensor | None) -> None:
        """Go on with the error feedback of an earlier process, whose precision may have been another one."""
        self.memory_F = memory_F.to(self.kept_as) if memory_F is not None else None

    def restore_sent(self, update: EncodedUpdate, up: tuple[Codec, ...]) -> None:
        """Restore an update that an earlier process sent and that the next vertex counts."""
        self.update, self.up, self._steps = update, up, 0

    async def abandon_round(self, left: AbandonedRoundSettlement) -> None:
        """Abandon the open round: a later state replaces its result."""
        if left.late:
            self._away.forget()
        was_apart, update = await self._away.rejoin(), self.update
        if was_apart and update is not None and left.counted is not None:
            self.memory_F = self._away.settled(await self._left(update, left.counted), given=left.late)
            self.defer_feedback(0 if any(left.counted) else self._steps)
        if left.afresh:
            self._away.forget()
        self.update, self._away.riding_F = None, None

    async def _left(self, update: EncodedUpdate, counted: Sequence[bool]) -> Tensor:
        """What the uncounted parts of the update leave to the feedback, (N,)."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._arithmetic, settle_error_feedback, update, counted, self.up)

    def defer_feedback(self, steps: int) -> None:
        """Move error feedback into late work after a round that ended without this peer.

        For one round this peer is a newcomer, and a newcomer's update has no weight.
        """
        if self._away.merge and self.memory_F is not None:
            self._away.add_uncounted(self.memory_F.float(), steps)
            self.memory_F = None

    def record_mean(self, state: Digest, mean_F: Tensor | None) -> None:
        """Remember that this mean (F,), or none, leads to this state, in case it is agreed."""
        if self.own is not None:
            self._means[state] = mean_F
            while len(self._means) > MEANS_HELD:
                self._means.popitem(last=False)

    def on_round_agreed(
        self, state: Digest, learning: TrainingSpec, before: SharedState | None, after: SharedState
    ) -> Tensor | None:
        """Apply an agreed round; returns the move (F,) of the local anchor, None if it did not move at once."""
        own = self.own
        if self.kept is not None and before is not None:
            self.kept = self.kept.with_moved(before.anchor_F, after.anchor_F, state)
        if own is None or before is None or after.round == before.round:
            return None
        before_F = own.anchor_F
        if state not in self._means:  # agreed without this peer: the agreed anchor has all updates
            self.own = own = EagerUpdateAnchor(after.anchor_F, after.momentum_P)
            return own.anchor_F - before_F
        mean_F = self._means[state]
        if mean_F is None:
            moved = own.take_back()
        else:
            moved = own.apply_mean(_outer(learning), mean_F, step_of_run(learning.recipe, before))
        return own.anchor_F - before_F if moved else None

    def begin_afresh(
        self, learning: TrainingSpec, state: SharedState, kept: PrivateModelCopy | None = None
    ) -> None:
        """Start from this state; only the private parameters `kept` survive."""
        if learning.recipe.reducer.own == "fresh":
            self.own = EagerUpdateAnchor(state.anchor_F, state.momentum_P)
        self.memory_F, self.update, self.kept = None, None, kept


def _outer(learning: TrainingSpec) -> PLAIN:
    outer = learning.recipe.outer
    assert isinstance(outer, PLAIN), "decode_learning refuses the others"
    return outer
