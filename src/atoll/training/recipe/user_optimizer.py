"""What of somebody's own optimizer a recipe works with: the gradients that it would step with, or its moments.

Members that agree on the gradient of every step (`GradientAccumulation`) take that step with the recipe's outer
optimizer,
which every one of them computes to the same bits, moments included; so whoever comes, comes back or has another
processor is where the others are. The loop's optimizer then only says when: in its `step()` the gradients are
summed up and it is shown none, so that it moves nothing. Members that average the moments of Adam
(`outer.MomentAverage`)
read and write them in the optimizer's own state.
Promises: after a step `.grad` is what it was before; a step that GradScaler has a fused optimizer skip is no step.
Never touches what the run does not exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from atoll.training.exchange.layout import ModelLayout, TensorSlot
from atoll.training.exchange.parameter_names import parameters_of
from atoll.training.exchange.parameter_selection import some
from atoll.training.recipe.inner import GradientAccumulation, InnerState, fresh_inner
from atoll.training.recipe.outer import MomentAverage
from atoll.training.recipe.recipes import Recipe

Held = list[tuple[TensorSlot, nn.Parameter]]  # exchanged parameters, and where they lie
MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch's Adam and AdamW name them


def optimizer_problem(
    recipe: Recipe, optimizer: torch.optim.Optimizer, model: nn.Module, layout: ModelLayout
) -> str:
    """Why this recipe cannot work with this optimizer, and what to do; empty if it can."""
    gathers, moments = isinstance(recipe.inner, GradientAccumulation), isinstance(recipe.outer, MomentAverage)
    if not (gathers or moments):
        return ""
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [slot.name for slot, p in held(model, layout) if id(p) not in ids]:
        return (
            f"members of this run agree on {'gradients' if gathers else 'moments'}, and the optimizer does not "
            f"hold {some(missing)}; make it from all parameters that are exchanged, or name fewer in only="
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


def held(model: nn.Module, layout: ModelLayout) -> Held:
    own = dict(parameters_of(model))
    return [(slot, own[slot.name]) for slot in layout.slots if slot.kind == "parameter"]


def skipped(optimizer: torch.optim.Optimizer) -> bool:
    """GradScaler found an infinite gradient, and leaves it to a fused optimizer to take no step."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


class GradientSums:
    """Sums of an optimizer's gradients, in the place of its steps."""

    def __init__(self, model: nn.Module, layout: ModelLayout) -> None:
        self.sum_P = torch.zeros(layout.parameters, dtype=torch.float32, device="cpu")
        self._held = held(model, layout)
        self._kept: list[tuple[nn.Parameter, Tensor | None, int]] = []  # with their gradients and versions

    def take(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A hook before the optimizer's step. A closure is called here, once."""
        if self._kept and all(p.grad is None for _, p in self._held):
            return None  # its super().step(): they are taken
        closure: Callable[[], Any] | None = kwargs.get("closure") or next(iter(args[1:]), None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not skipped(optimizer):
            self._add(getattr(optimizer, "grad_scale", None))
        self._kept = [(p, p.grad, p._version) for _, p in self._held]
        for _, p in self._held:
            p.grad = None  # what has none is passed over
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

    def give_back(self) -> bool:
        """After the step; False if the optimizer has moved parameters that it saw no gradient of."""
        kept, self._kept = self._kept, []
        for p, grad, _ in kept:
            p.grad = grad
        return all(p._version == version for p, _, version in kept)

    def end(self) -> Tensor:
        """The sum (P,); the next one begins."""
        sum_P, self.sum_P = self.sum_P, torch.zeros_like(self.sum_P)
        return sum_P


class AdamMoments:
    """The state of a torch.optim.Adam or AdamW, as trainers write theirs down. What it has not begun is zero."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, layout: ModelLayout) -> None:
        self._optimizer, self._layout, self._held = optimizer, layout, held(model, layout)

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
            if not state:  # as torch begins it, at the first step
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
