"""What rows weigh in the answers of a round, where distances between whole updates say so.

Either shares of a sum, one number for each row. Or mixtures, as bits: row i of them says of which rows mixture i is
the mean, and a statistic by value then looks at the mixtures in the place of the rows. A row that weighs nothing
has no mixture and is in none. n rows take n times ⌈n / 8⌉ bytes; the lowest bit of the first byte is the first row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import fsum
from typing import TypeAlias

RowWeights: TypeAlias = tuple[float, ...] | bytes
Mixtures: TypeAlias = tuple[tuple[int, ...], ...]  # of each row those of its mixture, in rising order


def packed_mixtures(mixtures: Sequence[Collection[int]]) -> bytes:
    width = _width(len(mixtures))
    return b"".join(sum(1 << row for row in mixture).to_bytes(width, "little") for mixture in mixtures)


def mixtures_in(bits: bytes, rows: int) -> Mixtures:
    """ValueError unless these are mixtures of so many rows."""
    width = _width(rows)
    if len(bits) != rows * width:
        raise ValueError(f"mixtures of {rows} rows take {rows * width} bytes, not {len(bits)}")
    lines = [int.from_bytes(bits[at : at + width], "little") for at in range(0, len(bits), width)]
    if any(line >> rows for line in lines):
        raise ValueError(f"mixtures hold rows beyond the {rows} that there are")
    return tuple(tuple(row for row in range(rows) if line >> row & 1) for line in lines)


def shares_of(weights: RowWeights, rows: int) -> tuple[float, ...]:
    """How much of the answer each row is; of mixtures, how much of all of them on average."""
    if not isinstance(weights, bytes):
        return weights
    mixtures = [mixture for mixture in mixtures_in(weights, rows) if mixture]
    parts: list[list[float]] = [[] for _ in range(rows)]
    for mixture in mixtures:
        for row in mixture:
            parts[row].append(1 / len(mixture))
    return tuple(fsum(part) / len(mixtures) if part else 0.0 for part in parts)


def weights_left(weights: RowWeights, rows: int, kept: Sequence[int]) -> RowWeights:
    """What these rows weigh where the others are lost: shares scaled up to the same sum, means of what is left."""
    if isinstance(weights, bytes):
        place, mixtures = {row: at for at, row in enumerate(kept)}, mixtures_in(weights, rows)
        return packed_mixtures([[place[row] for row in mixtures[one] if row in place] for one in kept])
    total, left = fsum(weights), fsum(weights[row] for row in kept)
    scale = total / left if left and len(kept) < rows else 1.0
    return tuple(weights[row] * scale for row in kept)


def _width(rows: int) -> int:
    return -(-rows // 8)
