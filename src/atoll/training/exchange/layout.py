"""Flat-vector layout of a model: names, shapes, dtypes and offsets of the exchanged tensors.

The fp32 vector holds the parameters first, then the float buffers. Integer buffers (counters) form a second vector
of int64. A tensor with two names (tied weights) appears once, under its first name. Tensors that a run does not
exchange (`parameter_selection`) are its base. They are in no vector, but the layout has the digest of their values,
since adapters of another base are another model. Peers agree on a layout at genesis; `difference` lists where two
layouts differ.
Invariants:
- Tensors are never reordered or cast silently: a dtype that fp32 cannot represent exactly is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import UNSET, UnsetType
from torch import Tensor, nn

from atoll.base.arguments import Amount
from atoll.base.ids import Digest
from atoll.crypto.digest import digest
from atoll.training.exchange.device_copies import copy_across, device_copies, host_vector
from atoll.training.exchange.parameter_names import buffers_of, kept_of, parameters_of
from atoll.training.exchange.parameter_selection import as_bytes, exchanged_names

# F floats in the flat vector, P of them parameters (they come first), K counters

EXACT_IN_FP32 = (torch.float32, torch.float16, torch.bfloat16)
# about 120 bytes each, and genesis is one frame of 2 MiB; a Llama of 405 billion parameters has 1137
BASE_TENSORS_MAX = 8192
COUNTER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


LINES_TOLD = 8  # lines in a report of differences
DIMENSIONS_MAX = 16  # of one tensor; convolutions have 5
Shape = Annotated[tuple[Amount, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]
Kind = Literal["parameter", "buffer", "counter"]


class TensorSlot(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of the model and its place: `at` counts elements of its own vector."""

    name: str
    kind: Kind
    shape: Shape
    dtype: str
    at: Amount

    @property
    def size(self) -> int:
        return prod(self.shape)


class BaseTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of the base: loaded by every member separately, with identical bytes."""

    name: str
    shape: Shape
    dtype: str
    digest: Digest  # digest of its bytes, row-major


class ModelLayout(msgspec.Struct, frozen=True):
    slots: tuple[TensorSlot, ...]
    parameters: Amount  # P: leading elements of the flat vector; length of the outer momentum
    floats: Amount  # F: length of the flat vector, parameters and float buffers
    counters: Amount  # K: length of the int64 vector
    base: tuple[BaseTensor, ...] | UnsetType = UNSET  # tensors that are not exchanged; unset if all are

    @property
    def held(self) -> tuple[BaseTensor, ...]:
        return () if isinstance(self.base, UnsetType) else self.base

    @property
    def base_values(self) -> int:
        return sum(prod(one.shape) for one in self.held)

    def text(self) -> str:
        buffers = self.floats - self.parameters
        return f"{self.parameters} parameters, {buffers} buffer floats, {self.counters} counters"


def layout_of(model: nn.Module, only: Sequence[str] = (), bound: bool = True) -> ModelLayout:
    """Layout of the exchanged tensors: parameters in model order, then float buffers, then integer buffers.

    `only`: as in `exchanged`. `bound=False`: without the base, for a model without values. Non-persistent buffers
    stay local. ValueError for a tensor that fp32 cannot carry, or a base tensor without plain bytes.
    """
    kept, going = kept_of(model), exchanged_names(model, only)
    all_buffers = [(name, value) for name, value in buffers_of(model) if name in kept]
    buffers = [(name, value) for name, value in all_buffers if name in going]
    tensors: list[tuple[str, Kind, Tensor]] = [
        *((name, "parameter", value) for name, value in parameters_of(model) if name in going),
        *((name, "buffer", value) for name, value in buffers if value.is_floating_point()),
        *((name, "counter", value) for name, value in buffers if not value.is_floating_point()),
    ]
    slots, floats, parameters, counters = [], 0, 0, 0
    for name, kind, value in tensors:
        allowed = COUNTER_DTYPES if kind == "counter" else EXACT_IN_FP32
        if value.dtype not in allowed:
            raise ValueError(
                f"{kind} {name} is {value.dtype}, which one fp32 vector cannot carry without loss; "
                "convert it with model.float(), or register the buffer with persistent=False"
            )
        at = counters if kind == "counter" else floats
        slot = TensorSlot(name, kind, tuple(value.shape), str(value.dtype).removeprefix("torch."), at)
        slots.append(slot)
        counters += slot.size if kind == "counter" else 0
        floats += slot.size if kind != "counter" else 0
        parameters += slot.size if kind == "parameter" else 0
    still = [(n, v) for n, v in [*parameters_of(model), *all_buffers] if n not in going]
    if len(still) > BASE_TENSORS_MAX:
        raise ValueError(
            f"{len(still)} tensors are not exchanged; genesis names each of them and has room for "
            f"{BASE_TENSORS_MAX}: stack tensors of one kind into one tensor"
        )
    base = tuple(_held(name, value) for name, value in still if bound) or UNSET
    return ModelLayout(tuple(slots), parameters, floats, counters, base)


def _held(name: str, value: Tensor) -> BaseTensor:
    try:
        data = as_bytes(value).cpu().numpy().data
    except (RuntimeError, NotImplementedError, TypeError) as why:
        raise ValueError(
            f"{name} is not exchanged, and a {type(value).__name__} has no plain bytes to compare: {why}"
        ) from None
    return BaseTensor(name, tuple(value.shape), str(value.dtype).removeprefix("torch."), digest(data))


def base_digest(layout: ModelLayout) -> Digest:
    """Digest of the whole base: a model card names it as the base of the adapters."""
    return digest(b"atoll/base/1" + msgspec.msgpack.encode(layout.held))


def layout_digest(layout: ModelLayout) -> Digest:
    """Digest of names, shapes, dtypes and order: genesis binds it."""
    return digest(b"atoll/layout/1" + msgspec.msgpack.encode(layout))


def difference(ours: ModelLayout, theirs: ModelLayout) -> str:
    """Differences of two layouts, one line per tensor, at most LINES_TOLD; empty if they are equal."""
    if ours == theirs:
        return ""
    here, there = ({slot.name: slot for slot in side.slots} for side in (ours, theirs))
    held, held_there = ({one.name: one for one in side.held} for side in (ours, theirs))
    lines = [
        f"- {_slot_text(slot)} is {'exchanged here, and frozen there' if name in held_there else 'only here'}"
        for name, slot in here.items()
        if name not in there
    ]
    lines += [
        f"+ {_slot_text(slot)} is {'exchanged there, and frozen here' if name in held else 'only there'}"
        for name, slot in there.items()
        if name not in here
    ]
    for name in here.keys() & there.keys():
        if msgspec.structs.replace(here[name], at=0) != msgspec.structs.replace(there[name], at=0):
            lines.append(f"! {_slot_text(here[name])} here, {_slot_text(there[name])} there")
    lines += _base_lines(held, held_there, set(here) | set(there))
    if not lines:
        lines = ["the same tensors in another order"]
    lines.sort()
    rest = [f"… and {len(lines) - LINES_TOLD} more"] if len(lines) > LINES_TOLD else []
    return "\n".join(lines[:LINES_TOLD] + rest)


def _base_lines(here: dict[str, BaseTensor], there: dict[str, BaseTensor], slots: set[str]) -> list[str]:
    lines = []
    for name in (here.keys() | there.keys()) - slots:
        ours, theirs = here.get(name), there.get(name)
        if ours is None or theirs is None:
            lines.append(f"! base {name} is only {'there' if ours is None else 'here'}")
        elif (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            texts = [f"{list(one.shape)} {one.dtype}" for one in (ours, theirs)]
            lines.append(f"! base {name} {texts[0]} here, {texts[1]} there")
        elif ours.digest != theirs.digest:
            lines.append(f"! base {name} {list(ours.shape)} has other values here than there")
    return lines


def check_same(ours: ModelLayout, theirs: ModelLayout) -> None:
    """ValueError with the differences unless both layouts are equal."""
    if parting := difference(ours, theirs):
        raise ValueError(f"this model is not the model of the run:\n{parting}")


@torch.no_grad()
def flatten(model: nn.Module, layout: ModelLayout) -> tuple[Tensor, Tensor]:
    """Copy the model out: (flat fp32 vector (F,), counters int64 (K,)), both on the CPU."""
    pairs = tensors_of(model, layout)
    tensors = [tensor for _, tensor in pairs]
    flat_F = host_vector(layout.floats, tensors)
    # the device is explicit, since a loop may set another default one
    counters_K = torch.empty(layout.counters, dtype=torch.int64, device="cpu")
    with device_copies(tensors):
        for slot, tensor in pairs:
            into = counters_K if slot.kind == "counter" else flat_F
            copy_across(into[slot.at : slot.at + slot.size], tensor.detach().reshape(-1))
    return flat_F, counters_K


@torch.no_grad()
def unflatten(flat_F: Tensor, counters_K: Tensor, model: nn.Module, layout: ModelLayout) -> None:
    """Copy (flat (F,), counters (K,)) into the model's own tensors."""
    assert flat_F.shape == (layout.floats,) and counters_K.shape == (layout.counters,)
    pairs = tensors_of(model, layout)
    with device_copies([flat_F, *(tensor for _, tensor in pairs)]):
        for slot, tensor in pairs:
            source = counters_K if slot.kind == "counter" else flat_F
            copy_across(tensor, source[slot.at : slot.at + slot.size].view(slot.shape))


@torch.no_grad()
def bind(model: nn.Module, layout: ModelLayout, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Move the model into one flat vector: (x (F,), gradient (P,)) on `device`.

    Afterwards every float tensor of the model is a view of x and every `.grad` a view of gradient. An optimizer or
    a merge is then one operation on one vector. Clear gradients with `gradient.zero_()`: `zero_grad()` drops the
    views. ValueError if a float tensor is not fp32.
    """
    model.to(device)
    flat_F, _ = flatten(model, layout)
    x_F = flat_F.to(device)
    gradient_P = torch.zeros(layout.parameters, dtype=torch.float32, device=device)
    for slot, tensor in tensors_of(model, layout):
        if slot.kind == "counter":
            continue
        if tensor.dtype != torch.float32:
            raise ValueError(f"{slot.name} is {tensor.dtype}; training needs fp32 tensors: call model.float()")
        tensor.data = x_F[slot.at : slot.at + slot.size].view(slot.shape)
        if slot.kind == "parameter":
            tensor.grad = gradient_P[slot.at : slot.at + slot.size].view(slot.shape)
    return x_F, gradient_P


def tensors_by_name(flat_F: Tensor, counters_K: Tensor, layout: ModelLayout) -> dict[str, Tensor]:
    """The tensors by name, in their own dtype, for export."""
    tensors = {}
    for slot in layout.slots:
        source = counters_K if slot.kind == "counter" else flat_F
        value = source[slot.at : slot.at + slot.size].reshape(slot.shape)
        tensors[slot.name] = value.to(getattr(torch, slot.dtype))
    return tensors


def tensors_of(model: nn.Module, layout: ModelLayout) -> list[tuple[TensorSlot, Tensor]]:
    """The model's exchanged tensors, each with its slot. ValueError if the model does not have this layout."""
    own = dict(parameters_of(model)) | dict(buffers_of(model))
    pairs = [(slot, own.get(slot.name)) for slot in layout.slots]
    if any(tensor is None or tuple(tensor.shape) != slot.shape for slot, tensor in pairs):
        check_same(layout_of(model), layout)
    return [(slot, tensor) for slot, tensor in pairs if tensor is not None]


def _slot_text(slot: TensorSlot) -> str:
    return f"{slot.kind} {slot.name} {list(slot.shape)} {slot.dtype}"
