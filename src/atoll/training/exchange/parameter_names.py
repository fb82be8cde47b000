"""A model's tensors under the names that its own code gives them, whether or not torch.compile has wrapped it.

`torch.compile(model)` puts the model, or a block of it, into a module whose only child is called `_orig_mod`.
Members of a run may compile or not as they like, so that word is in no name which leaves the process.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

WRAPPED = "_orig_mod."


def parameters_of(model: nn.Module, every: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """In model order; tied ones once, under their first name, or under `every` one."""
    for name, value in model.named_parameters(remove_duplicate=not every):
        yield name.replace(WRAPPED, ""), value


def buffers_of(model: nn.Module, every: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The same of buffers, those that are not kept included."""
    for name, value in model.named_buffers(remove_duplicate=not every):
        yield name.replace(WRAPPED, ""), value


def kept_of(model: nn.Module) -> set[str]:
    """Names of what a checkpoint holds: all but buffers that are not persistent."""
    return {name.replace(WRAPPED, "") for name in model.state_dict(keep_vars=True)}
