"""Optimizer steps of a loop after the end of its run: warned of, refused, or without effect.

Invariants:
- A skipped step changes no parameter; an optimizer that moves parameters without gradients gets an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from atoll.base.errors import RunEnded, RunFailedError, UsageError

log = logging.getLogger("atoll")

AfterEnd = Literal["warn", "raise", "skip"]


class PostRunStepHook:
    """What `optimizer.step()` does once the run is over."""

    def __init__(self, choice: AfterEnd) -> None:
        self._choice: AfterEnd = choice
        self._is_told = False
        # parameters with their gradients and versions, while a step is skipped
        self._hidden: list[tuple[Tensor, Tensor | None, int]] = []

    def before_step(
        self, told: str, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Hook before a step. `told`: rounds of the run and place of its model, for people. Raises RunEnded."""
        if self._choice == "raise":
            raise RunEnded("E-ATT-17", f"the run is over {told}", fix="end the loop: while not run.done")
        if self._choice == "skip":
            return self._hide_gradients(optimizer, args, kwargs)
        if not self._is_told:
            self._is_told = True
            instead = 'end the loop at run.done, or attach(…, after_end="raise")'
            log.warning("the run is over %s: this step is yours alone; %s", told, instead)
        return None

    def after_step(self) -> None:
        """Restore the gradients of a skipped step. UsageError if the optimizer moved parameters nevertheless."""
        hidden, self._hidden = self._hidden, []
        for parameter, grad, _ in hidden:
            parameter.grad = grad
        if any(parameter._version != version for parameter, _, version in hidden):
            raise UsageError(
                "E-ATT-17",
                'after_end="skip" cannot hold this optimizer: it moves parameters that have no gradient',
                fix='end the loop at run.done, or attach(…, after_end="raise")',
            )

    def _hide_gradients(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Optimizers skip parameters without a gradient. A closure is called here, for its loss."""
        if self._hidden:
            return None  # nested call by super().step()
        closure: Callable[[], Any] | None = kwargs.get("closure") or next(iter(args[1:]), None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._hidden = [(p, p.grad, p._version) for p in held]
        for p in held:
            p.grad = None
        return None if closure is None else ((optimizer, lambda: loss), {})


def refuse_steps(why: str) -> Callable[..., None]:
    """Hook before a step of a loop that has left its run, since `why` came in the middle of a hand-over."""

    def refuse(*_: object) -> None:
        raise RunFailedError(
            "E-ATT-14",
            f"this loop has left its run: {why} interrupted a merge or a hand-over",
            cause="its model may be half of one state and half of another",
            fix="start the program again in the same folder: it continues from the last agreed state",
        )

    return refuse
