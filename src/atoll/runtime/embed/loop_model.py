"""The loop's model and optimizer, read and written as the flat values that members exchange.

Invariants:
- The model's tensors stay the same objects; only their values change.
- The optimizer's state is never touched, except where a recipe averages its moments.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsFloat

import torch
from torch import nn

from atoll.base.errors import UsageError
from atoll.runtime.embed.messages import mailbox_room_bytes
from atoll.runtime.network.file_memory import unnamed_file
from atoll.runtime.system import anonymous_file
from atoll.runtime.trainer.protocol import CommandFailed, LossesMeasured, MergeAnchorIntoParameters, Taken
from atoll.runtime.trainer.shared_memory import SharedMailbox
from atoll.training.exchange.device_copies import copy_across, device_copies
from atoll.training.exchange.layout import base_digest, layout_of, tensors_of
from atoll.training.exchange.parameter_selection import FrozenBaseGuard, check_optimizer, exchanged_names
from atoll.training.recipe.inner import (
    GradientSumOptimizer,
    PipelinedGradients,
    fresh_inner,
    inner_from_bytes,
    inner_pieces,
)
from atoll.training.recipe.merge import merge
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.user_optimizer import GradientSums, TorchAdamAdapter, optimizer_problem

WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")  # .step() calls .optimizer.step()
MERGED_AT_ONCE = 2**22  # values: 16 MiB of copies, made for tensors of another dtype or on a GPU


@dataclass(frozen=True)
class HandoverSnapshot:
    """Values of the model as they were handed over, from `begin` on."""

    begin: int
    values_N: torch.Tensor


class LoopModel:
    """Model and optimizer of one loop, with the mailbox through which their values travel."""

    mailbox: SharedMailbox

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, only: Sequence[str] = ()) -> None:
        """`only`: shell-style names of what is exchanged. UsageError if nothing could be exchanged."""
        optimizer = plain_optimizer(optimizer)
        try:
            names = exchanged_names(model, only)
            self.layout = layout_of(model, only)
            check_optimizer(model, names, (p for g in optimizer.param_groups for p in g["params"]))
        except ValueError as why:
            raise UsageError("E-ATT-05", str(why)) from None
        self.model, self.optimizer = model, optimizer
        self.gradients: GradientSums | None = None  # set if members agree on gradients
        self.queue_rounds = 0  # rounds of queued gradients at most
        self._moments: TorchAdamAdapter | None = None  # set if members average moments
        self._base = FrozenBaseGuard(model, names, by_name=bool(only))

    def open_mailbox(self, folder: Path | None = None) -> int:
        """Create the shared mailbox; returns its descriptor, which the caller closes.

        `folder`: the mailbox is a file there instead of memory.
        """
        room_bytes = mailbox_room_bytes(self.layout)
        memory = anonymous_file() if folder is None else unnamed_file(folder, 4 * self.layout.floats)
        self.mailbox = SharedMailbox(memory, self.layout.floats, room_bytes)
        self.mailbox.pin(tensors_of(self.model, self.layout)[0][1].device)
        return memory

    @property
    def threads(self) -> int:
        """Number of torch's threads if they compute this model; 0 if it is on a GPU."""
        return torch.get_num_threads() if tensors_of(self.model, self.layout)[0][1].device.type == "cpu" else 0

    def use_recipe(self, recipe: Recipe) -> None:
        """Prepare what this recipe takes from the optimizer. UsageError if the optimizer does not fit."""
        if problem := optimizer_problem(recipe, self.optimizer, self.model, self.layout):
            raise UsageError("E-ATT-13", problem)
        inner = recipe.inner
        self.gradients = GradientSums(self.model, self.layout) if isinstance(inner, GradientSumOptimizer) else None
        self.queue_rounds = inner.depth if isinstance(inner, PipelinedGradients) else 0
        averages = any(recipe.schedule.moments)
        self._moments = TorchAdamAdapter(self.optimizer, self.model, self.layout) if averages else None

    @property
    def base_digest(self) -> str:
        """Hex digest of the values that are not exchanged; empty if all are."""
        return base_digest(self.layout).hex() if self.layout.held else ""

    def check_base(self) -> None:
        """UsageError if values that are not exchanged were changed or unfrozen."""
        if problem := self._base.problem():
            raise UsageError("E-ATT-06", problem)

    @torch.no_grad()
    def copy_out(self, into_F: torch.Tensor, lo: int, hi: int) -> None:
        """Copy values lo … hi of the model into this vector (F,)."""
        spans = [*self._spans(lo, hi)]
        with device_copies([into_F, *(tensor for _, _, tensor, _ in spans)]):
            for a, b, tensor, at in spans:
                copy_across(into_F[a:b], tensor.detach().reshape(-1)[at : at + b - a])

    @torch.no_grad()
    def copy_in(self, from_F: torch.Tensor) -> None:
        """Copy this vector (F,) into the model."""
        spans = [*self._spans(0, self.layout.floats)]
        with device_copies([from_F, *(tensor for _, _, tensor, _ in spans)]):
            for a, b, tensor, _ in spans:
                copy_across(tensor, from_F[a:b].view(tensor.shape))

    def _spans(self, lo: int, hi: int) -> Iterator[tuple[int, int, torch.Tensor, int]]:
        """Values lo … hi, tensor by tensor: (begin, end, tensor, place of the first of them in the tensor)."""
        for slot, tensor in tensors_of(self.model, self.layout):
            a, b = max(lo, slot.at), min(hi, slot.at + slot.size)
            if slot.kind != "counter" and a < b:
                yield a, b, tensor, a - slot.at

    def take_update(self, into_F: torch.Tensor, lo: int, hi: int) -> None:
        """Values lo … hi of the model; the parameters' places hold the gradient sums if members agree on them."""
        self.copy_out(into_F, lo, hi)
        if self.gradients is not None:
            into_F[: self.layout.parameters] = self.gradients.pop_sum()

    def drop_gradients(self) -> None:
        if self.gradients is not None:
            self.gradients.pop_sum()

    def write_agreed(self) -> None:
        """Copy the mailbox into the model."""
        self.copy_in(self.mailbox.x_F)

    @torch.no_grad()
    def merge(self, message: MergeAnchorIntoParameters, sent: HandoverSnapshot | None) -> None:
        """Merge agreed values [lo, hi) of the mailbox; `sent`: values handed over, if steps were taken since."""
        for a, b, tensor, at in self._spans(message.lo, message.hi):
            flat = tensor.detach().reshape(-1)  # a view, unless the tensor has gaps
            for lo in range(a, b, MERGED_AT_ONCE):
                hi = min(lo + MERGED_AT_ONCE, b)
                here_S = flat[at + lo - a : at + hi - a]
                x_S = here_S.to("cpu", torch.float32)
                _merge_span(message.how, x_S, sent, lo, self.mailbox.x_F[lo:hi])
                if x_S is not here_S:
                    here_S.copy_(x_S)
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))

    def evaluate(self, validate: Callable[[], SupportsFloat]) -> LossesMeasured | CommandFailed:
        """Held-out loss of the model in the mailbox. Parameters, modes and CPU random numbers are restored."""
        own = [(tensor, tensor.detach().clone()) for _, tensor in tensors_of(self.model, self.layout)]
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            with torch.random.fork_rng([]), torch.no_grad():
                self.copy_in(self.mailbox.shown())
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


def _merge_span(how: Taken, x_S: torch.Tensor, sent: HandoverSnapshot | None, lo: int, new_S: torch.Tensor) -> None:
    """Merge agreed values from `lo` on into x, in place."""
    if how == "shift":
        x_S.add_(new_S)
        return
    assert how != "afresh"  # the caller writes the agreed values instead
    assert sent is None or sent.begin <= lo
    sent_S = x_S if sent is None else sent.values_N[lo - sent.begin :][: len(x_S)]
    merge(how, x_S, sent_S, new_S)


def plain_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer in a wrapper of Accelerate or Lightning. UsageError if its steps cannot be followed."""
    inner = optimizer
    while _is_wrapped(inner):
        inner = getattr(inner, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and hasattr(inner, "_optimizer_step_pre_hooks"):
        return inner
    raise UsageError(
        "E-ATT-18",
        f"the steps of a {type(inner).__name__} cannot be followed: it takes no step hooks of torch",
        cause="a wrapper of another library (DeepSpeed), or a subclass that never called Optimizer.__init__",
        fix="attach the torch.optim.Optimizer inside it, if every step of it is a whole step of the wrapper",
    )


def _is_wrapped(optimizer: object) -> bool:
    return any(kind.__module__.partition(".")[0] in WRAPPERS for kind in type(optimizer).__mro__)


def hugging_face_config(model: nn.Module) -> str:
    """JSON of the configuration from which `transformers` builds this model; empty for other models."""
    to_json_string = getattr(getattr(model, "config", None), "to_json_string", None)
    if to_json_string is None:
        return ""
    return json.dumps(
        {"architectures": [type(getattr(model, "_orig_mod", model)).__name__]} | json.loads(to_json_string())
    )


def number_of(loss: SupportsFloat) -> float:
    """The loss as a float, detached from its graph."""
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
