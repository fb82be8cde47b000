"""2-bit: per block of 256 the root mean square (bf16) and one of four levels per value.

The levels are the Lloyd-Max quantizer of a Gaussian, ±0.4528 and ±1.510 (Max 1960, table I, N = 4), written as
multiples of 1/1024 so that level * scale is exact in fp32. Use it under error feedback; alone it loses a third of a
Gaussian update. A code's bit 0 means "outer level", bit 1 is the sign. 2.0625 bits per value.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.training.codec.blocks import scale_bits
from atoll.training.codec.packed import PackingRule, mean_of, packed_codec, to_grid

INNER, OUTER = 464 / 1024, 1546 / 1024
LEVELS = (INNER, OUTER, -INNER, -OUTER)
BORDER = (464 + 1546) / 2 / 1024  # Lloyd's condition: half way between the levels
GRID = 255  # 256 squares of integers up to 255 add up to less than 2^24: exact in fp32, in any order
ONE_255TH = float(torch.tensor(1 / 255, dtype=torch.float32))


def _root_mean_square(magnitude_BK: Tensor, largest_B: Tensor, size: int) -> Tensor:
    """Root mean square. The largest value alone makes it at least 1/16 of that, so the grid's rounding does not
    matter.
    """
    grid_BK = to_grid(magnitude_BK, largest_B, GRID)
    mean_B = mean_of(grid_BK.mul_(grid_BK).sum(1), size)
    # numpy uses the processor's own square root, which is correctly rounded; torch may use a library's
    rms_B = torch.from_numpy(np.sqrt(mean_B.numpy())) * ONE_255TH * largest_B
    return scale_bits(rms_B, up=False)


def _codes(x_BK: Tensor, magnitude_BK: Tensor, scale_B: Tensor) -> Tensor:
    border_B1 = (scale_B * BORDER)[:, None]
    is_outer_BK = np.greater(magnitude_BK.numpy(), border_B1.numpy())  # numpy compares three times as fast as torch
    code_BK = np.signbit(x_BK.numpy()).view(np.uint8)
    code_BK += code_BK  # numpy shifts bytes one by one
    code_BK |= is_outer_BK.view(np.uint8)
    return torch.from_numpy(code_BK)


TWO_BIT = packed_codec("2bit", PackingRule(LEVELS, _root_mean_square, _codes, "two_bit_encode"))
