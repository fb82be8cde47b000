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
from typing import Any, NamedTuple

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


class TensorFileEntry(NamedTuple):
    dtype: torch.dtype
    shape: list[int]
    begin: int  # offset of its bytes in the file
    end: int


def dump(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Canonical safetensors bytes. Any safetensors reader opens them."""
    return b"".join(pieces_of(tensors, metadata))


def pieces_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[Buffer]:
    """The same bytes in pieces, as views of the tensors: a large model is written to disk without a copy."""
    kinds, pieces = {name: (value.dtype, list(value.shape)) for name, value in tensors.items()}, []
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        pieces.append(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return [header_of(kinds, metadata)[0], *pieces]


def header_of(
    kinds: Mapping[str, tuple[torch.dtype, list[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorFileEntry]]:
    """(header with its length, place of each tensor) of the file of tensors with these dtypes and shapes."""
    header, at, spans = {"__metadata__": dict(sorted(metadata.items()))}, 0, {}
    for name in sorted(kinds):
        dtype, shape = kinds[name]
        spans[name] = TensorFileEntry(dtype, shape, at, at + prod(shape) * dtype.itemsize)
        header[name], at = _entry(NAMES[dtype], shape, at, spans[name].end), spans[name].end
    text = _header_bytes(header)
    body = 8 + len(text)
    moved = {name: span._replace(begin=body + span.begin, end=body + span.end) for name, span in spans.items()}
    return len(text).to_bytes(8, "little") + text, moved


def load(data: Buffer) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata); the tensors are read-only views of `data`. PeerFault unless the bytes are canonical."""
    view = memoryview(data).cast("B")
    spans, metadata = read_header(view)
    return {name: tensor_over(view[s.begin : s.end], s.dtype).view(s.shape) for name, s in spans.items()}, metadata


def read_header(view: memoryview) -> tuple[dict[str, TensorFileEntry], dict[str, str]]:
    """(place of each tensor, metadata) of these bytes. PeerFault unless their header is canonical."""
    size_bytes, header_bytes = len(view), int.from_bytes(view[:8], "little")
    if size_bytes < 8 or header_bytes > min(HEADER_MAX, size_bytes - 8):
        raise PeerFault("", "tensor file: the header is longer than the file")
    body = 8 + header_bytes
    text = bytes(view[8:body])
    try:
        header = json.loads(text)
        metadata = {str(key): str(value) for key, value in header["__metadata__"].items()}
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        spans, at = {}, body
        for name in sorted(entries):
            spans[name] = span = _span_of(entries[name], body, at, size_bytes)
            at = span.end
        canonical = at == size_bytes and _header_bytes({"__metadata__": metadata, **_sorted(entries)}) == text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, RuntimeError) as why:
        raise PeerFault("", f"tensor file: the header does not describe the file ({why})") from why
    if not canonical:
        raise PeerFault("", "tensor file: not in canonical form")
    return spans, metadata


def _span_of(entry: dict[str, Any], body: int, at: int, size_bytes: int) -> TensorFileEntry:
    dtype, shape = DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
    if min(shape, default=0) < 0 or len(shape) > 16:
        raise ValueError("bad shape")
    end = at + prod(shape) * dtype.itemsize
    if end > size_bytes or entry != _entry(entry["dtype"], shape, at - body, end - body):
        raise ValueError("bad offsets")
    torch.empty(shape, dtype=dtype, device="meta")  # RuntimeError if torch has no such shape
    return TensorFileEntry(dtype, shape, at, end)


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _sorted(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: entries[name] for name in sorted(entries)}


def _header_bytes(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    return text + b" " * (-len(text) % ALIGN)
