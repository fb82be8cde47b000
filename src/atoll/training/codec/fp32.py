"""fp32: the values themselves, little-endian. Lossless; for small runs, references and closing averages.

A vector's wire is its own memory, read-only and without a copy, unless a value had to be clipped. Received values
are read in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import (
    VALUE_MAX,
    OpenedBlocks,
    Room,
    check_input,
    check_length,
    copy_span,
    largest_in,
    largest_of,
    new_wire,
    refuse,
    spans_of,
    tensor_over,
)
from atoll.training.codec.compiled import native
from atoll.training.codec.core import Codec, Show

STRETCH = 2**16  # values checked, then hashed: 11 ms per 100 MB for both; span by span 13 ms, in two passes 19 ms


def _wire_bytes(n: int) -> int:
    return 4 * n


def _show_nothing(wire: Buffer) -> None:
    """No-op for callers that do not hash the wire."""


def _encode(x: Tensor, show: Show = _show_nothing) -> Buffer:
    x_N = wire_N = check_input(x)
    if len(x_N) == 0:
        return b""
    values, wire = x_N.numpy(), _bytes_of(x_N)
    for lo in range(0, len(x_N), STRETCH):
        largest = largest_in(values[lo : lo + STRETCH])
        refuse(largest)
        if largest > VALUE_MAX and wire_N is x_N:
            wire_N = x_N.clamp(-VALUE_MAX, VALUE_MAX)  # bytes already shown stay unchanged
            wire = _bytes_of(wire_N)
        show(wire[4 * lo : 4 * (lo + STRETCH)])
    return wire


def _bytes_of(x_N: Tensor) -> memoryview:
    return x_N.numpy().data.cast("B").toreadonly()


def _encode_spans(n: int, spans: Iterable[Tensor], room: Room = new_wire, show: Show = _show_nothing) -> Buffer:
    if n == 0:
        return b""
    wire = room(_wire_bytes(n))
    values = tensor_over(wire, torch.float32)
    for (lo, hi), x_S in zip(spans_of(n), spans, strict=True):
        largest = largest_of(x_S)
        refuse(largest)
        if largest > VALUE_MAX:
            x_S = x_S.clamp(-VALUE_MAX, VALUE_MAX)
        values[lo:hi] = x_S
        show(_bytes_of(values[lo:hi]))
    return wire


def _open_wire(wire: Buffer, n: int) -> OpenedBlocks:
    check_length(wire, _wire_bytes(n))
    values = tensor_over(wire, torch.float32)
    for lo, hi in spans_of(n):
        _check_span(values[lo:hi], lo)
    return OpenedBlocks(torch.empty(0, dtype=torch.float32), values)


def _check_span(value_S: Tensor, lo: int) -> None:
    if not largest_of(value_S) <= VALUE_MAX:
        raise PeerFault("", f"a value in {lo}…{lo + len(value_S)} is not finite or too large")


def _decode_into(wire: Buffer, out_N: Tensor) -> None:
    check_length(wire, _wire_bytes(len(out_N)))
    values = tensor_over(wire, torch.float32)
    for lo, hi in spans_of(len(out_N)):
        _check_span(values[lo:hi], lo)
        out_N[lo:hi] = values[lo:hi]


def _at_hand(opened: OpenedBlocks, lo: int, hi: int) -> Tensor:
    return opened.codes[lo:hi]


def _add_span(opened: OpenedBlocks, lo: int, share: float, sum_S: Tensor) -> bool:
    if native.kernels is None:
        return False
    native.kernels.fp32_add(_at_hand(opened, lo, lo + len(sum_S)).numpy(), share, sum_S.numpy())
    return True


def _showing(codec: Codec, show: Show) -> Codec:
    return replace(codec, encode=partial(_encode, show=show), spanwise=partial(_encode_spans, show=show))


FP32 = Codec(
    "fp32",
    _wire_bytes,
    _encode,
    _open_wire,
    copy_span,
    spanwise=_encode_spans,
    view_values=_at_hand,
    add_span=_add_span,
    hashing_codec=_showing,
    decode_whole=_decode_into,
    sections=((1, 4),),
)


def _open_trusted(wire: Buffer, n: int) -> OpenedBlocks:
    check_length(wire, _wire_bytes(n))
    return OpenedBlocks(torch.empty(0, dtype=torch.float32), tensor_over(wire, torch.float32))


TRUSTED_FP32 = replace(FP32, open_wire=_open_trusted, decode_whole=None)
"""fp32 for wires of a trusted sender: values were checked there and are not checked again (saves 2 passes)."""
