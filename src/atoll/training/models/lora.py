"""Low-rank adapters (LoRA) beside the linear layers of a built-in model.

y = W x + B (A x) (Hu et al. 2021, equation 3, with alpha = rank). B begins at zero, so the output does not change
at first. Tensors keep their names, so weights of the plain model load unchanged: beside `X.weight` are `X.lora_a`
and `X.lora_b`. `merged` adds the adapters to the weights and returns the plain model, for other programs. The
embedding and the output layer are never adapted.
Not responsible for: freezing (`models/frozen_base.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

HEAD = "lm_head"  # often the embedding table, under another name
A, B = ADAPTER = ".lora_a", ".lora_b"  # name endings of its tensors


class LoraLinear(nn.Module):
    """A linear layer without bias, and its adapter."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        assert linear.bias is None
        self.weight = linear.weight
        self.lora_a = nn.Parameter(torch.randn(rank, linear.in_features) * linear.in_features**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) + functional.linear(functional.linear(x, self.lora_a), self.lora_b)


def add_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Add adapters of this rank to the model, in place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != HEAD:
                setattr(module, name, LoraLinear(child, rank))
    return model


def merge_adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of an adapted model by name -> those of the plain model."""
    plain = {name: value for name, value in tensors.items() if not name.endswith(ADAPTER)}
    for name in (name.removesuffix(A) for name in tensors if name.endswith(A)):
        plain[f"{name}.weight"] = plain[f"{name}.weight"] + tensors[name + B] @ tensors[name + A]
    return plain
