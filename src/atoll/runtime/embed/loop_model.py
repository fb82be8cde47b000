"""The loop's model and optimizer, read and written as the flat values that members exchange.

Invariants:
- The model's tensors stay the same objects; only their values change.
- The optimizer's state is never touched, except where a recipe averages its moments.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import SupportsFloat

import torch
from torch import nn

from atoll.base.errors import UsageError
from atoll.runtime.embed.messages import mailbox_room_bytes
from atoll.runtime.trainer.protocol import CommandFailed, LossesMeasured, MergeAnchorIntoParameters
from atoll.runtime.trainer.shared_memory import SharedMailbox, anonymous
from atoll.training.exchange.layout import base_digest, flatten, layout_of, tensors_of, unflatten
from atoll.training.exchange.parameter_selection import FrozenBaseGuard, check_optimizer, exchanged_names
from atoll.training.recipe.inner import (
    GradientAccumulation,
    PipelinedGradients,
    fresh_inner,
    inner_from_bytes,
    inner_pieces,
)
from atoll.training.recipe.merge import merge
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.user_optimizer import AdamMoments, GradientSums, optimizer_problem


class LoopModel:
    """Model and optimizer of one loop, with the mailbox through which their values travel."""

    mailbox: SharedMailbox

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, only: Sequence[str] = ()) -> None:
        """`only`: shell-style names of what is exchanged. UsageError if nothing could be exchanged."""
        try:
            names = exchanged_names(model, only)
            self.layout = layout_of(model, only)
            check_optimizer(model, names, (p for g in optimizer.param_groups for p in g["params"]))
        except ValueError as why:
            raise UsageError("E-ATT-05", str(why)) from None
        self.model, self.optimizer = model, optimizer
        self.gradients: GradientSums | None = None  # set if members agree on gradients
        self.queue_rounds = 0  # rounds of queued gradients at most
        self._moments: AdamMoments | None = None  # set if members average moments
        self._base = FrozenBaseGuard(model, names, by_name=bool(only))

    def open_mailbox(self) -> int:
        """Create the shared mailbox; returns its descriptor, which the caller closes."""
        memory = anonymous()
        self.mailbox = SharedMailbox(memory, self.layout.floats, mailbox_room_bytes(self.layout))
        self.mailbox.pin(tensors_of(self.model, self.layout)[0][1].device)
        return memory

    def use_recipe(self, recipe: Recipe) -> None:
        """Prepare what this recipe takes from the optimizer. UsageError if the optimizer does not fit."""
        if problem := optimizer_problem(recipe, self.optimizer, self.model, self.layout):
            raise UsageError("E-ATT-13", problem)
        inner = recipe.inner
        self.gradients = GradientSums(self.model, self.layout) if isinstance(inner, GradientAccumulation) else None
        self.queue_rounds = inner.depth if isinstance(inner, PipelinedGradients) else 0
        averages = any(recipe.schedule.moments)
        self._moments = AdamMoments(self.optimizer, self.model, self.layout) if averages else None

    @property
    def base_digest(self) -> str:
        """Hex digest of the values that are not exchanged; empty if all are."""
        return base_digest(self.layout).hex() if self.layout.held else ""

    def check_base(self) -> None:
        """UsageError if values that are not exchanged were changed or unfrozen."""
        if problem := self._base.problem():
            raise UsageError("E-ATT-06", problem)

    def values(self) -> torch.Tensor:
        """(F,) current values of the model."""
        return flatten(self.model, self.layout)[0]

    def take_update(self) -> torch.Tensor:
        """(F,) values of the model; the parameters' places hold the gradient sums if members agree on them."""
        x_F = self.values()
        if self.gradients is not None:
            x_F[: self.layout.parameters] = self.gradients.pop_sum()
        return x_F

    def drop_gradients(self) -> None:
        if self.gradients is not None:
            self.gradients.pop_sum()

    def write_agreed(self) -> None:
        """Copy the mailbox into the model."""
        counters_K = flatten(self.model, self.layout)[1]
        unflatten(self.mailbox.x_F, counters_K, self.model, self.layout)

    def merge(self, message: MergeAnchorIntoParameters, sent_F: torch.Tensor | None) -> None:
        """Merge agreed values [lo, hi) of the mailbox; `sent_F`: values handed over, if steps were taken since."""
        x_F, counters_K = flatten(self.model, self.layout)
        here = slice(message.lo, message.hi)
        x_N, new_N = x_F[here], self.mailbox.x_F[here]
        if message.how == "shift":
            x_N.add_(new_N)
        else:
            assert message.how != "afresh"  # the caller writes the agreed values instead
            merge(message.how, x_N, x_N if sent_F is None else sent_F[here], new_N)
        unflatten(x_F, counters_K, self.model, self.layout)

    def evaluate(self, validate: Callable[[], SupportsFloat]) -> LossesMeasured | CommandFailed:
        """Held-out loss of the model in the mailbox. Parameters, modes and CPU random numbers are restored."""
        own = [(tensor, tensor.detach().clone()) for _, tensor in tensors_of(self.model, self.layout)]
        modes = [(module, module.training) for module in self.model.modules()]
        counters_K = flatten(self.model, self.layout)[1]
        try:
            with torch.random.fork_rng([]), torch.no_grad():
                unflatten(self.mailbox.shown(), counters_K, self.model, self.layout)
                self.model.eval()
                return LossesMeasured(True, (number_of(validate()),))
        except Exception as why:
            traceback.print_exc()
            print("validate= failed: this member does not evaluate this state", file=sys.stderr, flush=True)
            return CommandFailed("refused", f"validate= failed: {type(why).__name__}")
        finally:
            with torch.no_grad():
                for tensor, value in own:
                    tensor.copy_(value)
            for module, training in modes:
                module.training = training

    def save_moments(self) -> int:
        """Put the optimizer's moments into the mailbox; returns their size in bytes."""
        assert self._moments is not None
        return self.mailbox.put(*inner_pieces(self._moments.read()))

    def load_moments(self, size_bytes: int) -> None:
        """Load the optimizer's moments from the mailbox; 0 bytes: fresh ones."""
        assert self._moments is not None
        parameters, data = self.layout.parameters, self.mailbox.take(size_bytes)
        self._moments.write(inner_from_bytes(data, parameters) if data else fresh_inner(parameters))


def number_of(loss: SupportsFloat) -> float:
    """The loss as a float, detached from its graph."""
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
