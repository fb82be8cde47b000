"""Low-rank adapters beside the linear layers of a built-in model: few values that train while the rest stays.

y = W x + B (A x) (Hu et al. 2021, equation 3, with alpha = rank). B begins at zero, so nothing changes at first.
Tensors keep their names, so that weights of the plain model load as ever: beside `X.weight` stand `X.lora_a` and
`X.lora_b`. `merged` puts what they learned into the weights: the plain model again, for programs that know it.
Never adapts what reads or writes tokens. What is frozen is not decided here (`training/models/frozen_base.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

HEAD = "lm_head"  # often the table that reads tokens, under another name
A, B = ADAPTER = ".lora_a", ".lora_b"  # how names of its tensors end


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


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """The same model, in place, with adapters of this rank."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != HEAD:
                setattr(module, name, LoraLinear(child, rank))
    return model


def merged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of an adapted model by name -> those of the plain one."""
    plain = {name: value for name, value in tensors.items() if not name.endswith(ADAPTER)}
    for name in (name.removesuffix(A) for name in tensors if name.endswith(A)):
        plain[f"{name}.weight"] = plain[f"{name}.weight"] + tensors[name + B] @ tensors[name + A]
    return plain
