"""int4: per block of 256 one step (bf16) and four bits per value; value = code * step, code in -7 … 7.

The step is max|x| / 7 rounded up, so no value is clipped. The error is at most half a step: a fourteenth of the
block's largest value, and under 1 % more for the rounding of the step. A code is in two's complement; -8 is
invalid. 4.0625 bits per value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.training.codec.blocks import scale_bits
from atoll.training.codec.packed import PackingRule, packed_codec

ONE_7TH = float(torch.tensor(1 / 7, dtype=torch.float32))
LEVELS = tuple(float(code) for code in (0, 1, 2, 3, 4, 5, 6, 7, "nan", -7, -6, -5, -4, -3, -2, -1))


def _step(_magnitude_BK: Tensor, largest_B: Tensor, _size: int) -> Tensor:
    return scale_bits(largest_B * ONE_7TH, up=True)


def _codes(x_BK: Tensor, magnitude_BK: Tensor, step_B: Tensor) -> Tensor:
    divisor_B1 = torch.where(step_B == 0, 1.0, step_B)[:, None]
    code_BK = torch.div(x_BK, divisor_B1, out=magnitude_BK).round_().clamp_(-7, 7)
    return code_BK.to(torch.int8).bitwise_and_(15)


INT4 = packed_codec("int4", PackingRule(LEVELS, _step, _codes, "int4_encode"))
