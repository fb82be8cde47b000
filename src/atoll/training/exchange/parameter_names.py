"""Tensor names of a model, independent of torch.compile.

`torch.compile(model)` wraps the model, or a block of it, in a module with one child named `_orig_mod`. Each member
decides whether to compile, so names that leave the process do not contain `_orig_mod`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

WRAPPED = "_orig_mod."


def parameters_of(model: nn.Module, every: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters in model order; tied ones once, under their first name, or with `every` under each name."""
    for name, value in model.named_parameters(remove_duplicate=not every):
        yield name.replace(WRAPPED, ""), value


def buffers_of(model: nn.Module, every: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Buffers in model order, including non-persistent ones; `every` as above."""
    for name, value in model.named_buffers(remove_duplicate=not every):
        yield name.replace(WRAPPED, ""), value


def kept_of(model: nn.Module) -> set[str]:
    """Names in a checkpoint: all tensors except non-persistent buffers."""
    return {name.replace(WRAPPED, "") for name in model.state_dict(keep_vars=True)}
