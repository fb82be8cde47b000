"""Gradient computation of one batch, in the precision of the run, optionally with torch.compile.

bf16: matrix products and convolutions run under `torch.autocast`; parameters, gradients, moments and the loss stay
fp32. Compiled: forward and loss are one graph of `torch.compile`, backward another.
Invariants:
- If compilation fails, the step runs uncompiled; `told` and the log report it. `gradient_P` then holds only this
  gradient.
- Parameters are never changed.
Not responsible for:
- evaluation, validation and scores: these run in fp32 and uncompiled, so members get the same losses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn

from atoll.training.models import loss_of

Batch = tuple[Tensor, Tensor]  # inputs, targets
Loss = Callable[[nn.Module, Batch], Tensor]
Precision = Literal["fp32", "bf16"]

log = logging.getLogger(__name__)


class ComputeOptions(msgspec.Struct, frozen=True):
    """How gradients are computed. Part of a run's recipe: all members use the same options."""

    precision: Precision = "fp32"
    compiled: bool = False


PLAIN = ComputeOptions()  # fp32, uncompiled


class GradientComputer:
    def __init__(
        self, model: nn.Module, gradient_P: Tensor, computing: ComputeOptions = PLAIN, loss: Loss = loss_of
    ) -> None:
        """`gradient_P`: the vector behind the gradients of `model` (`exchange/layout.bind`)."""
        self.model, self.gradient_P = model, gradient_P
        self._notice = ""
        self._loss = loss if computing.precision == "fp32" else _in_bf16(loss, gradient_P.device.type)
        # one whole graph or none: if the rest fails to compile, no part of a forward pass may have run
        self._compiled = torch.compile(self._loss, fullgraph=True) if computing.compiled else None

    def compute(self, batch: Batch) -> float:
        """The mean loss of the batch; its gradient is then in `gradient_P`."""
        if self._compiled is not None:
            try:
                return self._computed(self._compiled, batch)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as why:  # compilers fail in many ways, and no failure is worth a round
                self._compiled, self._notice = None, f"steps run uncompiled: {_reason(why)}"
                log.warning("%s", self._notice)
        return self._computed(self._loss, batch)

    def take_notice(self) -> str:
        """The notice why a step runs uncompiled, returned once; empty if there is none."""
        notice, self._notice = self._notice, ""
        return notice

    def _computed(self, loss: Loss, batch: Batch) -> float:
        self.gradient_P.zero_()
        value = loss(self.model, batch)
        value.backward()
        return value.item()


def _in_bf16(loss: Loss, device: str) -> Loss:
    def under_autocast(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return loss(model, batch)

    return under_autocast


def _reason(why: BaseException) -> str:
    said, _, _ = str(why).strip().partition("\n\n")
    return f"{type(why).__name__}: {' '.join(said.split())[:300]}"
