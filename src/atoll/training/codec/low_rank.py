"""lowrank: low-rank approximation of every matrix of a vector, as two thin factors P Q^T (PowerSGD).

PowerSGD (Vogels et al. 2019, 1905.13727, algorithm 1): P = orthonormal(M Q), then Q = M^T P, the second of the two
phases; error feedback keeps the error of M. The paper sums both factors in transit, which takes two exchanges. Here
the sender runs both phases and sends P and Q, and receivers average the decoded matrices. The search starts from
the rows of `SharedKnowledge.reference_N` (the paper's warm start, from shared instead of private state), or from a
draw.
Matrix products differ in their last bits between processors, so only senders compute them. Decoding adds up
rank-one products in order, one multiplication and one addition per value, each rounded once. Two owners need not
encode alike, so it never encodes results.
Invariants:
- |M - decoded| <= |M| (Frobenius), up to the inner codec's error in the factors, and exactness up to that for a
  matrix of no higher rank; error feedback needs no more (Karimireddy et al. 2019, 1901.09847).

Wire: that of the factors, matrix by matrix: r rows of P^T, r rows of Q^T, each pair scaled by a power of two so
that both have about the same largest value. Pieces that factors would not shrink (vectors) travel unchanged.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.base.draw import draw_bytes
from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import VALUE_MAX, check_input, largest_of, refuse
from atoll.training.codec.core import Codec

RANK_MAX = 64  # PowerSGD's largest; decoding takes 2 r operations per value
MATRIX_MIN = 2.0**-60  # a matrix with a smaller largest value counts as zero: its factors would be zero too
FACTOR_MIN, FACTOR_MAX = 2.0**-45, 2.0**40
"""Accepted range of factor values: products stay normal numbers, and 64 of them stay finite. Smaller ones count as
zero.
"""

Shapes = tuple[tuple[int, int], ...]


class MatrixPiece(NamedTuple):
    """A range of the vector, rows x columns from `at`, and the position of its values in the inner vector."""

    at: int
    rows: int
    columns: int
    rank: int  # 0: travels unchanged
    source: int

    @property
    def end(self) -> int:
        return self.at + self.rows * self.columns

    @property
    def sent(self) -> int:
        return self.rank * (self.rows + self.columns) if self.rank else self.rows * self.columns


class OpenedFactors(NamedTuple):
    pieces: tuple[MatrixPiece, ...]
    sent_M: Tensor


def low_rank(rank: int, factors: Codec, shapes: Shapes | None, reference_N: Tensor | None) -> Codec:
    if shapes is None:
        raise ValueError("lowrank needs the matrices of the vector: SharedKnowledge(shapes=((rows, columns), …))")
    pieces = pieces_of(shapes, rank)
    return Codec(
        f"lowrank:{rank}+{factors.name}",
        lambda n: factors.wire_bytes(_sent(pieces, n)),
        partial(_encode, pieces, factors, reference_N),
        partial(_open_wire, pieces, factors),
        _decode_span,
        factors.fixed,
        False,
    )


def pieces_of(shapes: Shapes, rank: int) -> tuple[MatrixPiece, ...]:
    """The pieces of the vector. A matrix travels as factors only if these have fewer values."""
    pieces, at, source = [], 0, 0
    for rows, columns in shapes:
        thin = rank * (rows + columns) < rows * columns
        piece = MatrixPiece(at, rows, columns, rank if thin else 0, source)
        pieces.append(piece)
        at, source = piece.end, source + piece.sent
    return tuple(pieces)


def _sent(pieces: tuple[MatrixPiece, ...], n: int) -> int:
    """Number of values that travel."""
    end = pieces[-1].end if pieces else 0
    if end != n:
        raise ValueError(f"matrices with {end} values in total, in a vector of {n}")
    return pieces[-1].source + pieces[-1].sent if pieces else 0


def _encode(pieces: tuple[MatrixPiece, ...], factors: Codec, reference_N: Tensor | None, x: Tensor) -> Buffer:
    x = check_input(x)
    refuse(largest_of(x))
    sent_M = torch.zeros(_sent(pieces, len(x)), dtype=torch.float32)
    for piece in pieces:
        own, into = x[piece.at : piece.end], sent_M[piece.source : piece.source + piece.sent]
        if piece.rank == 0:
            into.copy_(own)
        elif largest_of(own) >= MATRIX_MIN:
            start = None if reference_N is None else reference_N[piece.at : piece.end]
            _factorize(own.view(piece.rows, piece.columns), piece.rank, start, into)
    return factors.encode(sent_M)


def _factorize(matrix_RC: Tensor, rank: int, start: Tensor | None, into: Tensor) -> None:
    """r rows of P^T, then r rows of Q^T. In units of the largest value, so that no square leaves fp32."""
    rows, columns = matrix_RC.shape
    largest = largest_of(matrix_RC)
    matrix_RC = matrix_RC / largest
    q_CK = _drawn(columns, rank)
    if start is not None and (size := largest_of(start)) >= MATRIX_MIN:
        q_CK = (start.view(rows, columns) / size).T @ _drawn(rows, rank)
    else:  # without a warm start, one more iteration
        q_CK = matrix_RC.T @ _orthonormal(matrix_RC @ _orthonormal(q_CK))
    p_RK = _orthonormal(matrix_RC @ _orthonormal(q_CK))
    q_CK = (matrix_RC.T @ p_RK).mul_(largest)
    shift_K = 0.5 * (q_CK.abs().amax(0).clamp_(min=MATRIX_MIN).log2() - p_RK.abs().amax(0).log2())
    power_K = torch.exp2(shift_K.round_())
    into[: rank * rows] = (p_RK * power_K).T.reshape(-1)
    into[rank * rows :] = (q_CK / power_K).T.reshape(-1)


def _orthonormal(matrix_NK: Tensor) -> Tensor:
    return torch.linalg.qr(matrix_NK.double()).Q.float()  # double: columns may be almost parallel


def _drawn(size: int, rank: int) -> Tensor:
    numbers = np.frombuffer(draw_bytes(b"lowrank", f"{size} x {rank}", size * rank), np.int8)
    return torch.from_numpy(numbers.astype(np.float32)).view(size, rank)


def _open_wire(pieces: tuple[MatrixPiece, ...], factors: Codec, wire: Buffer, n: int) -> OpenedFactors:
    sent_M = factors.decode(wire, _sent(pieces, n))
    for piece in pieces:
        if piece.rank:
            factor_F = sent_M[piece.source : piece.source + piece.sent]
            if largest_of(factor_F) > FACTOR_MAX:
                raise PeerFault("", f"a factor of the matrix at {piece.at} is too large")
            factor_F.masked_fill_(factor_F.abs() < FACTOR_MIN, 0.0)
    return OpenedFactors(pieces, sent_M)


def _decode_span(opened: OpenedFactors, lo: int, out_S: Tensor) -> None:
    hi = lo + len(out_S)
    first = int(np.searchsorted([piece.end for piece in opened.pieces], lo, side="right"))
    for piece in opened.pieces[first:]:
        if piece.at >= hi:
            return
        begin, end = max(lo, piece.at), min(hi, piece.end)
        out = out_S[begin - lo : end - lo]
        if piece.rank == 0:
            out.copy_(opened.sent_M[piece.source + begin - piece.at : piece.source + end - piece.at])
        else:
            _multiply(opened.sent_M[piece.source : piece.source + piece.sent], piece, begin, end, out)


def _multiply(factor_F: Tensor, piece: MatrixPiece, begin: int, end: int, out: Tensor) -> None:
    """Values begin … end of the vector, which lie in this matrix: p1 q1 + p2 q2 + …, from left to right."""
    first, last = (begin - piece.at) // piece.columns, -((piece.at - end) // piece.columns)
    cut = piece.rank * piece.rows
    p_KR1 = factor_F[:cut].view(piece.rank, piece.rows)[:, first:last, None]
    q_KC = factor_F[cut:].view(piece.rank, piece.columns)
    sum_RC = p_KR1[0] * q_KC[0]
    work_RC = torch.empty_like(sum_RC)
    for k in range(1, piece.rank):
        torch.mul(p_KR1[k], q_KC[k], out=work_RC)
        sum_RC.add_(work_RC)
    at = piece.at + first * piece.columns
    torch.clamp(sum_RC.view(-1)[begin - at : end - at], -VALUE_MAX, VALUE_MAX, out=out)
