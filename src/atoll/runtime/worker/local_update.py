"""What this peer sends of its own, and what it keeps until a vertex says what became of it.

    encode     the pseudo-gradient and the error feedback become the wires of an update
    settle     the round is agreed: of what it did not count the feedback makes good
    hear       what is agreed moves what is mine: my own anchor, or of parameters that I keep those that it replaces

Promises: a value is in the feedback, in an update under way, in late work (`apart.py`) or in a vertex, never in two
of them. Never asks a trainer for anything, and never decides what counted: vertices do.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import torch
from torch import Tensor

from atoll.base.ids import Digest
from atoll.features.partition_training.worker import OfflineProgress
from atoll.peer.tasks import AdoptState, EncodeUpdate, RoundSettlement
from atoll.runtime.storage.private_state import placed
from atoll.runtime.storage.state_cache import STATES_HELD
from atoll.training.codec import Codec
from atoll.training.codec.blocks import Room
from atoll.training.codec.compiled import native
from atoll.training.recipe.inner import GradientAccumulation
from atoll.training.recipe.local_anchor import LocalAnchor
from atoll.training.recipe.lr_position import step_of_run
from atoll.training.recipe.moments import padded
from atoll.training.recipe.outer import PLAIN
from atoll.training.recipe.private_parameters import PrivateParameters
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.state import SharedState
from atoll.training.recipe.update import (
    EncodedUpdate,
    RoundInputs,
    encode_update,
    gathered_span,
    moved,
    part_bounds,
    part_codecs,
    settle,
)
from atoll.training.spec import TrainingSpec
from atoll.wire.messages.statements import LateShare


def gathers(recipe: Recipe) -> bool:
    """Trainers hand over sums of gradients in the place of parameters."""
    return isinstance(recipe.inner, GradientAccumulation)


class LocalUpdateState:
    def __init__(self, away: OfflineProgress, arithmetic: Executor, room: Room) -> None:
        self.memory_F: Tensor | None = None  # error feedback
        self.update: EncodedUpdate | None = None  # under way
        self.up: tuple[Codec, ...] = ()  # what it was encoded with
        self.own: LocalAnchor | None = None  # my own anchor, where the recipe gives every member one
        self.kept: PrivateParameters | None = (
            None  # my own parameters, where it leaves them to me, as of the last update
        )
        self._steps = 0  # that the update stands for, late work apart
        self._means: OrderedDict[Digest, Tensor | None] = OrderedDict()  # then: state -> the mean that led to it
        self.uplink_bytes_s: Callable[[], float | None] = lambda: None  # what it carries, as far as is known
        self._away = away
        self._arithmetic, self._room = arithmetic, room

    def begins(self, head: SharedState) -> Tensor:
        """The x (F,) that a trainer begins with at this head."""
        return self._anchor(head) if self.kept is None else self.kept.x_F

    def _anchor(self, head: SharedState) -> Tensor:
        return head.anchor_F if self.own is None else self.own.anchor_F

    def encode(
        self, work: EncodeUpdate, learning: TrainingSpec, common: RoundInputs, x_F: Tensor, steps: int, members: int
    ) -> tuple[EncodedUpdate, LateShare | None]:
        """The update of so many steps, from the anchor to this x (F,), and the late work that rides on it.

        Behind x lie moments that are due. `members` send one each; their mean is what my own anchor hears of.
        """
        head, (lo, hi) = common.state, learning.turn(common.state)
        coding = learning.recipe_after(head).coding
        native.load_for(hi - lo)
        bounds, anchor_F = part_bounds(hi - lo, work.shares), self._anchor(head)
        memory_N = self.memory_F[lo:hi] if self.memory_F is not None and coding.beta else None
        if learning.recipe.merge == "swap":
            self.kept = PrivateParameters(x_F.clone(), common.name)
        if hi > len(anchor_F):
            anchor_F = padded(anchor_F, hi)
        if gathers(learning.recipe):
            anchor_F, x_F = gathered_span(x_F, anchor_F, learning.layout.parameters)
        self.up = part_codecs(coding.up, common, moved(bounds, lo), self.uplink_bytes_s())
        x_N = x_F[lo:hi]
        self._away.riding_F = None
        late = self._away.ride(anchor_F[lo:hi] - x_N, work.round) if work.late else None
        if self._away.riding_F is not None:
            x_N = x_N - self._away.riding_F
        spans = anchor_F[lo:hi], x_N, memory_N
        update = self.update = encode_update(*spans, bounds, self.up, coding.beta, self._room)
        self._steps = steps
        if self.own is not None:
            wires = zip(self.up, update.wires, bounds, strict=True)
            mine_F = torch.cat([up.decode(wire, b - a) for up, wire, (a, b) in wires])
            self.own.sent(_outer(learning), mine_F, members, step_of_run(learning.recipe, head))
        return update, late

    def in_vain(self, counted: Sequence[bool] | None) -> int:
        """Steps of the update under way, if this is what a vertex says of it and nothing of it counts."""
        return self._steps if self.update is not None and counted is not None and not any(counted) else 0

    async def settle(self, work: AdoptState, learning: TrainingSpec, before: SharedState | None) -> bool:
        """Error feedback after a round that built on this state; True if something of mine was encoded for it."""
        update, self.update = self.update, None
        counted = work.counted
        if counted is None and self.own is not None and update is not None:
            counted = (False,) * len(update.wires)  # my own anchor has it already: the feedback makes it good
        if counted is None or update is None:
            return False
        left_N = self._away.settled(await self._left(update, counted), work.late)
        assert before is not None
        self.memory_F = placed(self.memory_F, left_N, learning.turn(before)[0], len(before.anchor_F))
        return True

    def take_up(self, update: EncodedUpdate, up: tuple[Codec, ...]) -> None:
        """What a life before sent, and the vertex that comes next counts."""
        self.update, self.up, self._steps = update, up, 0

    async def leave_open(self, left: RoundSettlement) -> None:
        """The round that was under way is settled elsewhere, and a later state takes its place."""
        if left.late:
            self._away.forget()
        was_apart, update = await self._away.come_back(), self.update
        if was_apart and update is not None and left.counted is not None:
            self.memory_F = self._away.settled(await self._left(update, left.counted), given=left.late)
            self.owe(0 if any(left.counted) else self._steps)
        if left.afresh:
            self._away.forget()
        self.update, self._away.riding_F = None, None

    async def _left(self, update: EncodedUpdate, counted: Sequence[bool]) -> Tensor:
        """What these parts of it leave to the feedback, (N,)."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._arithmetic, settle, update, counted, self.up)

    def owe(self, steps: int) -> None:
        """My round was left without me: what error feedback would make good goes with the rest, as late work. The
        update of a newcomer, which I shall be for a round, carries feedback and weighs nothing.
        """
        if self._away.merge and self.memory_F is not None:
            self._away.owe(self.memory_F, steps)
            self.memory_F = None

    def led(self, state: Digest, mean_F: Tensor | None) -> None:
        """This mean (F,), or none, leads to this state, if that is agreed."""
        if self.own is not None:
            self._means[state] = mean_F
            while len(self._means) > STATES_HELD:
                self._means.popitem(last=False)

    def hear(
        self, state: Digest, learning: TrainingSpec, before: SharedState | None, after: SharedState
    ) -> Tensor | None:
        """What is mine hears of an agreed round; by what (F,) my own anchor moved at once, None if it did not."""
        own = self.own
        if self.kept is not None and before is not None:
            self.kept = self.kept.with_moved(before.anchor_F, after.anchor_F, state)
        if own is None or before is None or after.round == before.round:
            return None
        before_F = own.anchor_F
        if state not in self._means:  # agreed without me: the agreed anchor has all that mine would miss
            self.own = own = LocalAnchor(after.anchor_F, after.momentum_P)
            return own.anchor_F - before_F
        mean_F = self._means[state]
        if mean_F is None:
            moved = own.rests()
        else:
            moved = own.agreed(_outer(learning), mean_F, step_of_run(learning.recipe, before))
        return own.anchor_F - before_F if moved else None

    def begin_afresh(
        self, learning: TrainingSpec, state: SharedState, kept: PrivateParameters | None = None
    ) -> None:
        """From this state with nothing of my own but `kept`: my feedback and anchor led elsewhere."""
        if learning.recipe.reducer.own == "fresh":
            self.own = LocalAnchor(state.anchor_F, state.momentum_P)
        self.memory_F, self.update, self.kept = None, None, kept


def _outer(learning: TrainingSpec) -> PLAIN:
    outer = learning.recipe.outer
    assert isinstance(outer, PLAIN), "decode_learning refuses the others"
    return outer
