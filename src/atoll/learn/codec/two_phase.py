"""powersgd: the two exchanges of PowerSGD, for members that trust each other and may answer twice.

Vogels et al. 2019, 1905.13727, algorithm 1, of every matrix M_i of member i, with the Q that all start from:

    first    P_i = M_i Q             all hold mean(P); P^ = orthonormal(mean(P)), the same bits at everybody
    second   Q_i = M_i^T P^          all hold mean(Q); the result is P^ mean(Q)^T, and Q starts the next call

So the result is the mean of all M_i, projected on directions that all chose together, in r (rows + columns) values
both ways; `lowrank` ships factors of each member's own directions, whose mean has a higher rank. What one member
gave is P^ Q_i^T: the rest of its M_i is for error feedback (algorithm 2: e = M - decompress(compress(M))).

Products M Q are each sender's own matter. What all make alike of agreed numbers, `basis`, `begun` and `product`,
takes single-rounded elementwise operations in a fixed order only, so the bits are those of everybody.
Vectors of the two halves: of the first r rows of P^T, matrix by matrix; of the second r rows of Q^T, or the values
of what factors would not shrink (vectors), tensor by tensor. How the calls are made: `host/group_halves.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.learn.codec.blocks import SCALE_MIN, SPAN
from atoll.learn.codec.chain import CODECS, rank_in
from atoll.learn.codec.low_rank import FACTOR_MIN, Piece, Shapes, drawn, multiply, pieces_of

WORD = "powersgd"
COLLAPSED = 2.0**-40  # of a row's size is left beside the rows before it: rounding, and no direction of its own


class Place(NamedTuple):
    """A tensor of a call, and where the vectors of the two halves have it."""

    piece: Piece
    first: slice  # empty where it travels as it is
    second: slice


Places = tuple[Place, ...]
Given = Callable[[Piece], Tensor]  # (rows * columns,) what a member gives of this tensor


def two_phase(name: str) -> tuple[int, str] | None:
    """(rank, codec of the factors) of powersgd, powersgd:4 or powersgd:4+bf16; None of other codecs. ValueError for
    what is none."""
    stage, _, inner = name.partition("+")
    if stage.partition(":")[0] != WORD:
        return None
    if inner and inner not in CODECS:
        raise ValueError(f"behind {stage[:40]} stands one of {', '.join(CODECS)}, or nothing")
    return rank_in(stage), inner or "fp32"


def places_of(shapes: Shapes, rank: int) -> Places:
    places, first, second = list[Place](), 0, 0
    for piece in pieces_of(shapes, rank):
        in_first = piece.rank * piece.rows
        in_second = piece.sent - in_first
        places.append(Place(piece, slice(first, first + in_first), slice(second, second + in_second)))
        first, second = first + in_first, second + in_second
    return tuple(places)


# ---- what a member sends -----------------------------------------------------------------------------------


def first_half(places: Places, given: Given, kept_S: Tensor | None) -> Tensor:
    """P_i, (F,). `kept_S`: the second half that all agreed on last, None: nothing yet."""
    sent_F = torch.empty(places[-1].first.stop, dtype=torch.float32)
    for piece, first, second in places:
        if piece.rank:
            q_KC = begun(piece, None if kept_S is None else kept_S[second])
            sent_F[first] = (given(piece).view(piece.rows, piece.columns) @ q_KC.T).T.reshape(-1)
    return sent_F


def second_half(places: Places, given: Given, basis_F: Tensor) -> Tensor:
    """Q_i, and the values of other tensors, (S,)."""
    sent_S = torch.empty(places[-1].second.stop, dtype=torch.float32)
    for piece, first, second in places:
        values = given(piece)
        if piece.rank:
            p_KR = basis_F[first].view(piece.rank, piece.rows)
            values = (p_KR @ values.view(piece.rows, piece.columns)).view(-1)
        sent_S[second] = values
    return sent_S


# ---- what all make alike of what they agreed on ------------------------------------------------------------


def begun(piece: Piece, kept_Q: Tensor | None) -> Tensor:
    """Q that all start from, r orthonormal rows (K, C). A direction that was lost is drawn anew."""
    drawn_KC = drawn(piece.columns, piece.rank).T
    if kept_Q is None:
        return orthonormal(drawn_KC)
    q_KC = orthonormal(kept_Q.view(piece.rank, piece.columns))
    if bool(q_KC.any(1).all()):
        return q_KC
    all_KC = orthonormal(torch.cat([q_KC, drawn_KC]))
    found = sorted(range(len(all_KC)), key=lambda k: not all_KC[k].any())  # stable: zeros go last
    return all_KC[found[: piece.rank]]


def basis(places: Places, agreed_F: Tensor) -> Tensor:
    """P^ of the agreed first half, (F,)."""
    basis_F = torch.empty_like(agreed_F)
    for piece, first, _ in places:
        if piece.rank:
            p_KR = orthonormal(agreed_F[first].view(piece.rank, piece.rows))
            basis_F[first] = p_KR.masked_fill_(p_KR.abs() < FACTOR_MIN, 0.0).view(-1)
    return basis_F


def product(place: Place, basis_F: Tensor, second_S: Tensor, out: Tensor) -> None:
    """P^ Q^T of this matrix, or its values, into (rows * columns,). Products are added up as in `lowrank`."""
    piece, q_M = place.piece, second_S[place.second]
    if piece.rank == 0:
        out.copy_(q_M)
        return
    # P^ is at least 2^-45 or zero, and at most 1, so products with these stay normal numbers
    factor_M = torch.cat([basis_F[place.first], q_M.masked_fill(q_M.abs() < SCALE_MIN, 0.0)])
    for lo in range(piece.at, piece.end, SPAN):
        hi = min(lo + SPAN, piece.end)
        multiply(factor_M, piece, lo, hi, out[lo - piece.at : hi - piece.at])


def orthonormal(rows_KN: Tensor) -> Tensor:
    """Rows of length 1 at right angles to each other, fp32; zeros for a row that the ones before it make up.

    Gram-Schmidt in double precision, each row taken out of all behind it, and all of that twice: once more is
    enough to be at right angles to the last bits (Giraud, Langou, Rozloznik 2005).
    """
    rows_KN = rows_KN.double()
    for _ in range(2):
        before_K = _sums(rows_KN * rows_KN)
        for k in range(len(rows_KN)):
            row_N, behind_KN = rows_KN[k], rows_KN[k + 1 :]
            square = float(_sums((row_N * row_N)[None])[0])
            if square <= COLLAPSED**2 * float(before_K[k]):
                row_N.zero_()
                continue
            row_N /= math.sqrt(square)
            behind_KN -= _sums(behind_KN * row_N)[:, None] * row_N
    return rows_KN.float()


def _sums(x_KN: Tensor) -> Tensor:
    """Of each row, (K,). The back half is added to the front half until one value is left: an order that neither
    threads nor instruction sets change. `x_KN` is written over."""
    size = x_KN.shape[1]
    while size > 1:
        half = size // 2
        x_KN[:, :half] += x_KN[:, size - half : size]
        size -= half
    return x_KN[:, 0]
