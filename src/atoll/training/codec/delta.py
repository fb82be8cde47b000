"""delta: the difference from a vector that the receiver already holds (`SharedKnowledge.reference_N`).

With another reference a receiver would decode nonsense. The wire therefore begins with the first 16 bytes of the
reference's BLAKE3 digest, and another reference is a fault. Value i is reference + difference, rounded once. The
inner codec sets the accuracy of the difference. Wire: 16 bytes, then that of the difference.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer, digest
from atoll.training.codec.blocks import VALUE_MAX, check_input, check_length, largest_of, refuse
from atoll.training.codec.core import Codec

NAME_BYTES = 16


def delta(difference: Codec, reference_N: Tensor | None) -> Codec:
    if reference_N is None:
        raise ValueError("delta needs the vector that the receiver holds: SharedKnowledge(reference_N=…)")
    reference_N = check_input(reference_N).clone()  # copied: later training must not change the named vector
    refuse(largest_of(reference_N))
    name = digest(reference_N.numpy().tobytes())[:NAME_BYTES]
    return Codec(
        f"delta+{difference.name}",
        lambda n: NAME_BYTES + difference.wire_bytes(n) if n else 0,
        partial(_encode, difference, reference_N, name),
        partial(_open_wire, difference, reference_N, name),
        partial(_decode_span, difference, reference_N),
        difference.fixed,
        difference.same_everywhere,
    )


def _encode(difference: Codec, reference_N: Tensor, name: bytes, x: Tensor) -> Buffer:
    x = check_input(x)
    refuse(largest_of(x))
    _check_sizes(reference_N, x.numel())
    return name + difference.encode((x - reference_N).clamp_(-VALUE_MAX, VALUE_MAX)) if len(x) else b""


def _open_wire(difference: Codec, reference_N: Tensor, name: bytes, wire: Buffer, n: int) -> Any:
    _check_sizes(reference_N, n)
    if n == 0:
        check_length(wire, 0)
        return difference.open_wire(b"", 0)
    view = memoryview(wire)
    if bytes(view[:NAME_BYTES]) != name:
        raise PeerFault("", "the difference is from a reference that this peer does not hold")
    return difference.open_wire(view[NAME_BYTES:], n)


def _decode_span(difference: Codec, reference_N: Tensor, opened: Any, lo: int, out_S: Tensor) -> None:
    difference.decode_span(opened, lo, out_S)
    torch.add(out_S, reference_N[lo : lo + len(out_S)], out=out_S).clamp_(-VALUE_MAX, VALUE_MAX)


def _check_sizes(reference_N: Tensor, n: int) -> None:
    if len(reference_N) != n:
        raise ValueError(f"a difference of {n} values from a reference of {len(reference_N)} values")
