"""Row weights of a round from the distances between whole updates: shares of a sum, or mixtures.

Shares are one number per row. Mixtures are a bit matrix: line i names the rows with mixture i as their mean, and a
coordinate-wise statistic then runs over the mixtures in place of the rows. A row without weight has no mixture and
is in none. n rows take n * ⌈n / 8⌉ bytes; the lowest bit of the first byte is the first row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import fsum
from typing import TypeAlias

RowWeights: TypeAlias = tuple[float, ...] | bytes
Mixtures: TypeAlias = tuple[tuple[int, ...], ...]  # per row the rows of its mixture, in ascending order


def packed_mixtures(mixtures: Sequence[Collection[int]]) -> bytes:
    width = _width(len(mixtures))
    return b"".join(sum(1 << row for row in mixture).to_bytes(width, "little") for mixture in mixtures)


def mixtures_in(bits: bytes, rows: int) -> Mixtures:
    """Unpack the mixtures of `rows` rows. Raises ValueError if the bits do not fit."""
    width = _width(rows)
    if len(bits) != rows * width:
        raise ValueError(f"mixtures of {rows} rows take {rows * width} bytes, not {len(bits)}")
    lines = [int.from_bytes(bits[at : at + width], "little") for at in range(0, len(bits), width)]
    if any(line >> rows for line in lines):
        raise ValueError(f"mixtures name rows beyond the {rows} rows")
    return tuple(tuple(row for row in range(rows) if line >> row & 1) for line in lines)


def shares_of(weights: RowWeights, rows: int) -> tuple[float, ...]:
    """Share of each row in the result; with mixtures, its mean share over all mixtures."""
    if not isinstance(weights, bytes):
        return weights
    mixtures = [mixture for mixture in mixtures_in(weights, rows) if mixture]
    parts: list[list[float]] = [[] for _ in range(rows)]
    for mixture in mixtures:
        for row in mixture:
            parts[row].append(1 / len(mixture))
    return tuple(fsum(part) / len(mixtures) if part else 0.0 for part in parts)


def weights_of_kept(weights: RowWeights, rows: int, kept: Sequence[int]) -> RowWeights:
    """Weights of the `kept` rows if the others are lost: shares scaled to the same sum, or reduced mixtures."""
    if isinstance(weights, bytes):
        place, mixtures = {row: at for at, row in enumerate(kept)}, mixtures_in(weights, rows)
        return packed_mixtures([[place[row] for row in mixtures[one] if row in place] for one in kept])
    total, left = fsum(weights), fsum(weights[row] for row in kept)
    scale = total / left if left and len(kept) < rows else 1.0
    return tuple(weights[row] * scale for row in kept)


def _width(rows: int) -> int:
    return -(-rows // 8)
