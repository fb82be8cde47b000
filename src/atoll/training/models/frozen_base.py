"""Frozen base of a named run's model: the tensors that are not exchanged, as one blob.

A built-in model comes from a seed or from a folder that only the founder has. Neither gives other machines the same
bits. Genesis therefore names the base as a blob, which a joiner downloads once; afterwards only the other tensors
travel. In custom loops (`attach`) members load the base themselves, and it never travels.
Invariants:
- The blob is not trusted: its tensors are compared with the run's layout one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.exchange.layout import ModelLayout, layout_of
from atoll.training.exchange.tensorfile import dump, load
from atoll.training.models import build_model

FORMAT = "atoll/base/1"


def base_bytes(model: nn.Module, layout: ModelLayout) -> bytes:
    """The base as bytes; empty if every tensor is exchanged. ValueError if a base tensor would change by itself."""
    moving = {name for name, _ in model.named_buffers()}
    if moved := [one.name for one in layout.held if one.name in moving]:
        raise ValueError(
            f"{moved[0]} is not exchanged, but its layer updates running statistics: name that layer in only= too"
        )
    parameters = dict(model.named_parameters())
    return dump({one.name: parameters[one.name] for one in layout.held}, {"format": FORMAT}) if layout.held else b""


def read_base_tensors(data: Buffer) -> dict[str, Tensor]:
    """Base tensors by name, read-only. PeerFault if `data` is no base."""
    tensors, told = load(data)
    if told != {"format": FORMAT}:
        raise PeerFault("", f"not the base of a model: format {told.get('format')}")
    return tensors


@torch.no_grad()
def build_with_base(name: str, seed: int, base: Buffer = b"") -> tuple[nn.Module, ModelLayout]:
    """A built-in model with this base, frozen, and the layout of the other tensors; without a base every tensor
    trains.

    PeerFault if the base belongs to another model.
    """
    model = build_model(name, seed)
    parameters = dict(model.named_parameters())
    for frozen, value in read_base_tensors(base).items() if base else ():
        here = parameters.get(frozen)
        if here is None or here.shape != value.shape or here.dtype != value.dtype:
            raise PeerFault("", f"the base holds {frozen[:80]!r}, which {name} does not have")
        here.copy_(value)
        here.requires_grad_(False)
    return model, layout_of(model)
