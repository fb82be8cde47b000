"""dct: cosine transform of squares of 64 x 64 values; few coefficients (`topk`) represent a smooth update.

DeMo (2411.19870, section 3) takes the largest coefficients of such squares of the momentum. Matrix products usually
differ in bits between processors. Here both directions are *exact* sums of integers: values of 16 bits times waves
of 13, all below 2^53, which double precision holds in any order. Every peer can therefore compute the inverse, and
`dct` may encode results too. The transform changes a value by less than 2^-16 of the largest in its square, and the
waves are orthogonal to 1 in 7000.
A last, shorter square is padded with zeros. Wire: that of the coefficients, square by square.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import SCALE_MIN, SPAN, VALUE_MAX, check_input, largest_of, refuse, spans_of
from atoll.training.codec.core import Codec

SIDE = 64
SQUARE = SIDE * SIDE
VALUE_BITS, WAVE_BITS = 16, 15
# |sum| <= |values| |wave| |wave| <= (64 * 2^16) * 2^15 * 2^15 = 2^52 (Cauchy-Schwarz; so for every partial sum)
_ANGLE = np.outer(np.arange(SIDE), 2 * np.arange(SIDE) + 1) * (np.pi / (2 * SIDE))
_NORM = np.where(np.arange(SIDE) == 0, np.sqrt(1 / SIDE), np.sqrt(2 / SIDE))[:, None]
WAVE_KI = torch.from_numpy(np.rint(np.cos(_ANGLE) * _NORM * 2.0**WAVE_BITS))  # frequency k at position i, float64
assert SPAN % SQUARE == 0


def dct(coefficients: Codec) -> Codec:
    return Codec(
        f"dct+{coefficients.name}",
        lambda n: coefficients.wire_bytes(_filled(n)),
        partial(_encode, coefficients),
        partial(_open_wire, coefficients),
        partial(_decode_span, coefficients),
        coefficients.fixed,
        coefficients.same_everywhere,
    )


def _filled(n: int) -> int:
    return -(-n // SQUARE) * SQUARE


def _encode(coefficients: Codec, x: Tensor) -> Buffer:
    x = check_input(x)
    refuse(largest_of(x))
    out_N = torch.zeros(_filled(x.numel()), dtype=torch.float32)
    for lo, hi in spans_of(x.numel()):
        filled = _filled(hi - lo)
        x_S = torch.cat([x[lo:hi], x.new_zeros(filled - (hi - lo))])
        out_N[lo : lo + filled] = _transformed(x_S, WAVE_KI)
    return coefficients.encode(out_N)


def _open_wire(coefficients: Codec, wire: Buffer, n: int) -> Any:
    return coefficients.open_wire(wire, _filled(n))


def _decode_span(coefficients: Codec, opened: Any, lo: int, out_S: Tensor) -> None:
    coefficient_S = torch.empty(_filled(out_S.numel()), dtype=torch.float32)
    coefficients.decode_span(opened, lo, coefficient_S)
    out_S.copy_(_transformed(coefficient_S, WAVE_KI.T)[: out_S.numel()])


def _transformed(x_S: Tensor, matrix_SS: Tensor) -> Tensor:
    """matrix @ square @ matrix.T of every square, rounded once to fp32."""
    largest_Q = x_S.abs().view(-1, SQUARE).amax(1)
    largest_Q = torch.where(largest_Q < SCALE_MIN, 1.0, largest_Q)
    exponent_Q = (largest_Q.view(torch.int32) >> 23) - 126  # largest < 2^exponent
    whole_QSS = x_S.to(torch.float64).view(-1, SIDE, SIDE)
    whole_QSS.mul_(_power_of_two(VALUE_BITS - exponent_Q)).round_()
    rows_QSS = torch.matmul(whole_QSS.view(-1, SIDE), matrix_SS.T).view(-1, SIDE, SIDE)
    both_QSS = torch.matmul(matrix_SS, rows_QSS)
    both_QSS.mul_(_power_of_two(exponent_Q - VALUE_BITS - 2 * WAVE_BITS))
    return both_QSS.view(-1).clamp_(-VALUE_MAX, VALUE_MAX).to(torch.float32)


def _power_of_two(exponent_Q: Tensor) -> Tensor:
    """2^exponent in double precision, built from its bits; shape (Q, 1, 1)."""
    return (exponent_Q.to(torch.int64) + 1023 << 52).view(torch.float64)[:, None, None]
