"""e3m0: per block of 256 the largest magnitude (bf16) and four bits per value: 0 or ± a power of two of it.

The wire of Streaming DiLoCo (2501.18512, section 3: E3M0, accumulated in fp32). Levels 0 and 2^-6 … 2^0 times the
scale, rounded to the nearest. The error is at most a quarter of a scale and a third of a value, or a 128th of the
scale for values that become zero. A code's bits 0-2 are 0 for zero, else exponent + 7; bit 3 is the sign, and minus
zero is invalid. 4.0625 bits per value.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.training.codec.blocks import scale_bits
from atoll.training.codec.packed import PackingRule, packed_codec

LOWEST = -6
FOUR_THIRDS = float(torch.tensor(4 / 3, dtype=torch.float32))  # the border between 2^e and 2^(e-1) is 2^e * 3/4
LEVELS = (
    0.0,
    *(2.0**exponent for exponent in range(LOWEST, 1)),
    float("nan"),
    *(-(2.0**exponent) for exponent in range(LOWEST, 1)),
)


def _largest(_magnitude_BK: Tensor, largest_B: Tensor, _size: int) -> Tensor:
    return scale_bits(largest_B, up=False)


def _codes(x_BK: Tensor, magnitude_BK: Tensor, scale_B: Tensor) -> Tensor:
    """The exponent of ratio * 4/3, read from the bits, is that of the nearest power of two."""
    divisor_B1 = torch.where(scale_B == 0, float("inf"), scale_B)[:, None]
    ratio_BK = torch.div(magnitude_BK, divisor_B1, out=magnitude_BK)
    is_not_zero_BK = np.greater_equal(ratio_BK.numpy(), 2.0 ** (LOWEST - 1))  # half way to the lowest level
    exponent_BK = ratio_BK.mul_(FOUR_THIRDS).view(torch.int32).bitwise_right_shift_(23).sub_(127)
    code_BK = exponent_BK.clamp_(LOWEST, 0).sub_(LOWEST - 1).to(torch.uint8)
    sign_BK = torch.from_numpy(np.signbit(x_BK.numpy()).view(np.uint8) * np.uint8(8))
    return code_BK.bitwise_or_(sign_BK).mul_(torch.from_numpy(is_not_zero_BK.view(np.uint8)))


E3M0 = packed_codec("e3m0", PackingRule(LEVELS, _largest, _codes))
