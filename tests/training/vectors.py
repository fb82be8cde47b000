"""Vectors to try codecs with, and what of them comes out again."""

import numpy as np
import torch
from hypothesis import strategies as st

from atoll.training.codec import SharedKnowledge, codec_named
from atoll.training.codec.blocks import SPAN

lengths = st.sampled_from([0, 1, 2, 3, 5, 7, 255, 256, 257, 511, 1000, 4097, SPAN, SPAN + 259])


@st.composite
def vectors(draw):
    """All kinds of fp32: of one size, of every size, tiny, huge, equal, with ties, few of them, not finite."""
    n, generator = draw(lengths), np.random.default_rng(draw(st.integers(0, 2**32)))
    normal = generator.standard_normal(n).astype(np.float32)
    x = draw(
        st.sampled_from(
            [
                normal * np.float32(2.0) ** draw(st.integers(-149, 61)),
                generator.integers(0, 2**32, n, np.uint32).view(np.float32),  # any bits at all
                np.exp2(generator.uniform(-149, 60, n)).astype(np.float32) * np.sign(normal),
                np.rint(normal * 3),  # ties, zeros and minus zeros
                np.full(
                    n, np.uint32(draw(st.integers(0x2000, 0x5E00)) << 16 | 0x8000).view(np.float32)
                ),  # half way
                np.full(n, draw(st.floats(-(2.0**62), 2.0**62, width=32)), np.float32),
            ]
        )
    )
    for place in draw(st.lists(st.floats(0, 1), max_size=2)) if n else ():
        x[int(place * (n - 1))] = draw(st.floats(width=32))
    return torch.from_numpy(x)


def gaussian(n: int, magnitude: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * magnitude


def through(name: str, x: torch.Tensor, known: SharedKnowledge | None = None) -> torch.Tensor:
    codec = codec_named(name, known or SharedKnowledge())
    return codec.decode(codec.encode(x), len(x))


def relative_error(name: str, x: torch.Tensor) -> float:
    return float((through(name, x) - x).norm() / x.norm())
