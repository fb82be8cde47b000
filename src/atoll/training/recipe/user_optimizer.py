"""The user's optimizer as a source of gradients, or of Adam moments, for a recipe.

If members agree on the gradient of every step (`GradientSumOptimizer`), the recipe's outer optimizer takes the
step. Every member computes it to the same bits, moments included, so joiners and members with other processors stay
identical. The user's `step()` then only marks the time: gradients are summed and hidden from the optimizer, so it
moves nothing. If members average Adam's moments (`outer.MomentAverage`), these are read from and written to the
optimizer's own state.
Invariants:
- After a step `.grad` is what it was before.
- A step that GradScaler makes a fused optimizer skip does not count.
- Tensors that the run does not exchange are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from atoll.training.exchange.layout import ModelLayout, TensorSlot
from atoll.training.exchange.parameter_names import parameters_of
from atoll.training.exchange.parameter_selection import join_names
from atoll.training.recipe.inner import GradientSumOptimizer, InnerState, fresh_inner
from atoll.training.recipe.outer import MomentAverage
from atoll.training.recipe.recipes import Recipe

Held = list[tuple[TensorSlot, nn.Parameter]]  # exchanged parameters and their slots
MOMENTS = ("exp_avg", "exp_avg_sq")  # names in torch's Adam and AdamW


def optimizer_problem(
    recipe: Recipe, optimizer: torch.optim.Optimizer, model: nn.Module, layout: ModelLayout
) -> str:
    """Why the recipe cannot work with this optimizer, and the remedy; empty if it can."""
    gathers, moments = isinstance(recipe.inner, GradientSumOptimizer), isinstance(recipe.outer, MomentAverage)
    if not (gathers or moments):
        return ""
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [slot.name for slot, p in exchanged_parameters(model, layout) if id(p) not in ids]:
        return (
            f"members of this run agree on {'gradients' if gathers else 'moments'}, and the optimizer does not "
            f"hold {join_names(missing)}; make it from all parameters that are exchanged, or name fewer in only="
        )
    if gathers:
        return ""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return (
            f"members of this run average both moments of Adam, and {type(optimizer).__name__} has others; "
            "attach torch.optim.AdamW or Adam, or found the run with local_sgd(), which leaves moments alone"
        )
    if any(group["amsgrad"] for group in optimizer.param_groups):
        return "members of this run average both moments of Adam, and amsgrad=True has a third; leave it out"
    return ""


def exchanged_parameters(model: nn.Module, layout: ModelLayout) -> Held:
    own = dict(parameters_of(model))
    return [(slot, own[slot.name]) for slot in layout.slots if slot.kind == "parameter"]


def is_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether GradScaler found an infinite gradient, so that a fused optimizer takes no step."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


class GradientSums:
    """Sums of an optimizer's gradients, in place of its steps."""

    def __init__(self, model: nn.Module, layout: ModelLayout) -> None:
        self.sum_P = torch.zeros(layout.parameters, dtype=torch.float32, device="cpu")
        self._held = exchanged_parameters(model, layout)
        # parameters with their gradients and versions
        self._kept: list[tuple[nn.Parameter, Tensor | None, int]] = []

    def take_gradients(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Hook before the optimizer's step: add its gradients and hide them. A closure is called here, once."""
        if self._kept and all(p.grad is None for _, p in self._held):
            return None  # nested call by super().step(): the gradients are already taken
        closure: Callable[[], Any] | None = kwargs.get("closure") or next(iter(args[1:]), None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not is_skipped(optimizer):
            self._add(getattr(optimizer, "grad_scale", None))
        self._kept = [(p, p.grad, p._version) for _, p in self._held]
        for _, p in self._held:
            p.grad = None  # optimizers skip parameters without a gradient
        return None if closure is None else ((optimizer, lambda: loss), {})

    @torch.no_grad()
    def _add(self, scale: Tensor | None) -> None:
        for slot, p in self._held:
            if p.grad is None:
                continue
            grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
            value_N = grad.detach().reshape(-1).float()
            if scale is not None:
                value_N = value_N / scale.to(value_N.device)
            self.sum_P[slot.at : slot.at + slot.size].add_(value_N.to(self.sum_P.device))

    def restore_gradients(self) -> bool:
        """Restore the gradients after the step. False if the optimizer moved parameters without a gradient."""
        kept, self._kept = self._kept, []
        for p, grad, _ in kept:
            p.grad = grad
        return all(p._version == version for p, _, version in kept)

    def pop_sum(self) -> Tensor:
        """Return the sum (P,) and start a new one."""
        sum_P, self.sum_P = self.sum_P, torch.zeros_like(self.sum_P)
        return sum_P


class TorchAdamAdapter:
    """Moments of a torch.optim.Adam or AdamW as an `InnerState`. State that the optimizer has not created yet is
    zero.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, layout: ModelLayout) -> None:
        self._optimizer, self._layout, self._held = optimizer, layout, exchanged_parameters(model, layout)

    def read(self) -> InnerState:
        inner = fresh_inner(self._layout.parameters)
        for here, state in self._states():
            for vector_P, name in zip((inner.first_P, inner.second_P), MOMENTS, strict=True):
                vector_P[here].copy_(state[name].detach().reshape(-1))
            inner.steps = max(inner.steps, int(state["step"]))
        return inner

    @torch.no_grad()
    def write(self, inner: InnerState) -> None:
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for slot, p in self._held:
            state: dict[str, Any] = self._optimizer.state[p]
            if not state:  # as torch initializes it at the first step
                kept_there = groups[id(p)]["capturable"] or groups[id(p)]["fused"]
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device=p.device if kept_there else "cpu")
            for vector_P, name in zip((inner.first_P, inner.second_P), MOMENTS, strict=True):
                value_N = vector_P[slot.at : slot.at + slot.size].view(slot.shape)
                state.setdefault(name, torch.zeros_like(p)).copy_(value_N)
            state["step"].fill_(float(inner.steps))

    def _states(self) -> Iterator[tuple[slice, dict[str, Any]]]:
        for slot, p in self._held:
            if state := self._optimizer.state.get(p):
                yield slice(slot.at, slot.at + slot.size), state
