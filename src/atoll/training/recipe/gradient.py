"""The gradient of a batch: what a step does before its optimizer, in the precision that the run asks for.

bf16: matrix products and convolutions under `torch.autocast`; parameters, gradients, moments and the loss stay
fp32. Compiled: forward and loss are one graph of `torch.compile`, backward another.
Promises: what cannot be compiled is computed as it is written, which `told` and the log say; `gradient_P` then
holds this gradient alone. Never touches parameters. Looks at the model (evaluation, validation, scores) do not come
here: they are in fp32 and as written, so that members see the same losses.
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
    """How gradients are computed. Part of a run's recipe: all members do it alike."""

    precision: Precision = "fp32"
    compiled: bool = False


PLAIN = ComputeOptions()  # in fp32, as the model is written


class GradientComputer:
    def __init__(
        self, model: nn.Module, gradient_P: Tensor, computing: ComputeOptions = PLAIN, loss: Loss = loss_of
    ) -> None:
        """`gradient_P` is what the gradients of `model` are views of (`training/exchange/layout.bind`)."""
        self.model, self.gradient_P = model, gradient_P
        self._notice = ""
        self._loss = loss if computing.precision == "fp32" else _in_bf16(loss, gradient_P.device.type)
        # one whole graph or none: half a forward pass must not have run when the rest fails to compile
        self._compiled = torch.compile(self._loss, fullgraph=True) if computing.compiled else None

    def of(self, batch: Batch) -> float:
        """The mean loss of it; its gradient is then in `gradient_P`."""
        if self._compiled is not None:
            try:
                return self._computed(self._compiled, batch)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as why:  # a compiler has many ways to fail, and none is worth a round
                self._compiled, self._notice = None, f"steps run uncompiled: {_reason(why)}"
                log.warning("%s", self._notice)
        return self._computed(self._loss, batch)

    def told(self) -> str:
        """Once, why it is not compiled though it was to be; empty if there is nothing to tell."""
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
    said, _, _ = str(why).strip().partition("\n\n")  # hints for torch's own developers follow
    return f"{type(why).__name__}: {' '.join(said.split())[:300]}"
