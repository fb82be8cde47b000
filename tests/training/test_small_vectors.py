"""Parts of vectors of any size: cut, encoded and decoded, however small."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.training.codec import codec_named, pack
from atoll.training.codec.blocks import BLOCK
from atoll.training.recipe.update import part_bounds

CODECS = ("fp32", "fp16", "int8", "2bit", "2means", "sign", "topk:0.1+int8", "sparseloco", "demo", "int8+zstd")


@given(floats=st.integers(1, 20 * BLOCK), shares=st.lists(st.integers(1, 4096), min_size=1, max_size=64))
def test_a_vector_of_any_size_has_as_many_parts_as_the_plan(floats: int, shares: list[int]):
    """Members never see the size in a plan. Parts lie one behind the other, the last ones empty."""
    bounds = part_bounds(floats, shares)
    assert len(bounds) == len(shares) and bounds[0][0] == 0 and bounds[-1][1] == floats
    assert all(one[1] == other[0] for one, other in pairwise(bounds))
    sizes = [hi - lo for lo, hi in bounds]
    filled = [size for size in sizes if size]
    assert sizes[: len(filled)] == filled and len(filled) == min(len(shares), -(-floats // BLOCK))
    assert all(size % BLOCK == 0 for size in filled[:-1])


@pytest.mark.parametrize("name", CODECS)
@given(floats=st.integers(1, BLOCK + 1), parts=st.integers(1, 16), seed=st.integers(0, 9))
def test_the_parts_of_a_small_update_travel_by_every_codec(name: str, floats: int, parts: int, seed: int):
    """Empty parts, too. What arrives and what error feedback keeps are together what was to be sent."""
    codec, x_F = codec_named(name), torch.randn(floats, generator=torch.Generator().manual_seed(seed))
    arrived_F, kept_F = torch.empty(floats), torch.empty(floats)
    for lo, hi in part_bounds(floats, (1,) * parts):
        wire, kept_F[lo:hi] = pack(codec, x_F[lo:hi], None, 1.0)
        arrived_F[lo:hi] = codec.decode(wire, hi - lo)
    torch.testing.assert_close(arrived_F + kept_F, x_F)
