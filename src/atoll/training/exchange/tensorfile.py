"""Canonical safetensors bytes of named tensors.

The safetensors library may write metadata in any order. Here equal dictionaries give equal bytes, so bytes can be
compared by digest. Only the canonical form is read back: sorted names, no gaps, no spare keys. No two files hold
the same tensors.
Invariants:
- Every length is checked against the available bytes before memory is allocated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import tensor_over

HEADER_MAX = 16 * 2**20  # bytes; a model of 100 000 tensors has a header of ~10 MB
ALIGN = 8  # bytes; the format requires data to begin at a multiple of 8

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dump(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Canonical safetensors bytes. Any safetensors reader opens them."""
    return b"".join(pieces_of(tensors, metadata))


def pieces_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[Buffer]:
    """The same bytes in pieces, as views of the tensors: a large model is written to disk without a copy."""
    header, at, pieces = {"__metadata__": dict(sorted(metadata.items()))}, 0, []
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        size_bytes = value.numel() * value.element_size()
        header[name] = _entry(NAMES[value.dtype], list(value.shape), at, at + size_bytes)
        pieces.append(value.reshape(-1).view(torch.uint8).numpy().data if size_bytes else b"")
        at += size_bytes
    text = _header_bytes(header)
    return [len(text).to_bytes(8, "little") + text, *pieces]


def load(data: Buffer) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata); the tensors are read-only views of `data`. PeerFault unless the bytes are canonical."""
    view = memoryview(data).cast("B")
    header_bytes = int.from_bytes(view[:8], "little")
    if len(view) < 8 or header_bytes > min(HEADER_MAX, len(view) - 8):
        raise PeerFault("", "tensor file: the header is longer than the file")
    text, body = bytes(view[8 : 8 + header_bytes]), view[8 + header_bytes :]
    try:
        header = json.loads(text)
        metadata = {str(key): str(value) for key, value in header["__metadata__"].items()}
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors, at = {}, 0
        for name in sorted(entries):
            tensors[name], at = _read(entries[name], body, at)
        canonical = at == len(body) and _header_bytes({"__metadata__": metadata, **_sorted(entries)}) == text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, RuntimeError) as why:
        raise PeerFault("", f"tensor file: the header does not describe the file ({why})") from why
    if not canonical:
        raise PeerFault("", "tensor file: not in canonical form")
    return tensors, metadata


def _read(entry: dict[str, Any], body: memoryview, at: int) -> tuple[Tensor, int]:
    dtype, shape = DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
    if min(shape, default=0) < 0 or len(shape) > 16:
        raise ValueError("bad shape")
    end = at + prod(shape) * dtype.itemsize
    if end > len(body) or entry != _entry(entry["dtype"], shape, at, end):
        raise ValueError("bad offsets")
    return tensor_over(body[at:end], dtype).view(shape), end


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _sorted(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: entries[name] for name in sorted(entries)}


def _header_bytes(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    return text + b" " * (-len(text) % ALIGN)
