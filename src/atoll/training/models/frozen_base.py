"""The base of a run that was founded by name: what of its model is not exchanged, as one blob.

A built-in model comes from a seed or from a folder that the founder alone has, and neither gives other machines the
same bits. So genesis names the base as a blob, which a newcomer fetches once; after that only the rest travels.
In loops of their own (`attach`) members load the base themselves, and it never travels.
Never believes the blob: what it leads to is compared with the run's layout, tensor by tensor.
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
    """Empty where everything is exchanged. ValueError if something of it would move by itself."""
    moving = {name for name, _ in model.named_buffers()}
    if moved := [one.name for one in layout.held if one.name in moving]:
        raise ValueError(
            f"{moved[0]} is not exchanged, and its layer keeps statistics of what it sees: name that layer, too"
        )
    parameters = dict(model.named_parameters())
    return dump({one.name: parameters[one.name] for one in layout.held}, {"format": FORMAT}) if layout.held else b""


def base_tensors(data: Buffer) -> dict[str, Tensor]:
    """By name, read-only. PeerFault if this is no base."""
    tensors, told = load(data)
    if told != {"format": FORMAT}:
        raise PeerFault("", f"this is no base of a model, but {told.get('format')}")
    return tensors


@torch.no_grad()
def built(name: str, seed: int, base: Buffer = b"") -> tuple[nn.Module, ModelLayout]:
    """A built-in model that holds this base, frozen, and the layout of the rest; without one all of it trains.

    PeerFault if the base is another model's.
    """
    model = build_model(name, seed)
    parameters = dict(model.named_parameters())
    for frozen, value in base_tensors(base).items() if base else ():
        here = parameters.get(frozen)
        if here is None or here.shape != value.shape or here.dtype != value.dtype:
            raise PeerFault("", f"the base holds {frozen[:80]!r}, and no such tensor is in {name}")
        here.copy_(value)
        here.requires_grad_(False)
    return model, layout_of(model)
