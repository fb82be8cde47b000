"""fp32: the values themselves, little-endian. Lossless; for small runs, references and closing averages."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.keys.digest import Buffer
from atoll.learn.codec.blocks import SPAN, VALUE_MAX, check_input, check_length, refuse, tensor_over


def wire_bytes(n: int) -> int:
    return 4 * n


def encode(x: Tensor) -> bytes:
    x = check_input(x)
    if x.numel() == 0:
        return b""
    refuse(float(x.abs().max()))
    return x.clamp(-VALUE_MAX, VALUE_MAX).numpy().tobytes()


def check(wire: Buffer, n: int) -> None:
    check_length(wire, wire_bytes(n))
    values = tensor_over(wire, torch.float32)
    for lo in range(0, n, SPAN):
        if not bool((values[lo : lo + SPAN].abs() <= VALUE_MAX).all()):
            raise PeerFault("", f"a value in {lo}…{lo + SPAN} is not finite or too large")


def decode_span(wire: Buffer, n: int, lo: int, out_S: Tensor) -> None:
    out_S.copy_(tensor_over(wire, torch.float32)[lo : lo + out_S.numel()])
