"""What specs/codecs.md promises of every codec's error, for any finite update: name by name, its bound."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.learn.codec import CODECS, Known, codec_named
from atoll.learn.codec.blocks import BLOCK, SPAN
from atoll.learn.codec.dct import SQUARE
from atoll.learn.codec.two_means import GROUP

TINY = 2.0**-73  # 127 of the smallest scales, rounded up: what is below a codec's range may be lost
COLUMNS = 64  # of the matrices that low-rank codecs are told of


def largest(x: Tensor, size: int) -> Tensor:
    """Of every value's block of `size`: the largest magnitude, in the place of the value."""
    filled = torch.cat([x.abs(), x.new_zeros(-len(x) % size)]).view(-1, size)
    return filled.amax(1, keepdim=True).expand(-1, size).reshape(-1)[: len(x)]


def norm(x: Tensor, size: int) -> Tensor:
    """Of every value's block of `size`: its Euclidean norm, in the place of the value."""
    filled = torch.cat([x, x.new_zeros(-len(x) % size)]).view(-1, size)
    return filled.norm(dim=1, keepdim=True).expand(-1, size).reshape(-1)[: len(x)]


def step(largest_N: Tensor, levels: int) -> Tensor:
    """Half a step of max / levels, which is rounded up to bf16."""
    return largest_N / levels * (1 + 2.0**-7) * 0.5001 + levels * 2.0**-80


def everything(x: Tensor) -> Tensor:
    return x.abs().amax().expand(len(x)) if len(x) else x


EACH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # (x, reference), both fp64 -> the largest error per value
    "fp32": lambda x, _: torch.zeros_like(x),
    "fp16": lambda x, _: torch.clamp(x.abs() * 2.0**-11, min=2.0**-25).maximum(x.abs() - 65504),
    "bf16": lambda x, _: torch.clamp(x.abs() * 2.0**-8, min=2.0**-80),
    "int8": lambda x, _: step(largest(x, BLOCK), 127),
    "int4": lambda x, _: step(largest(x, BLOCK), 7),
    "e3m0": lambda x, _: torch.maximum(x.abs() / 3, largest(x, BLOCK) / 128) * (1 + 2.0**-7) + TINY,
    "2bit": lambda x, _: 1.52 * largest(x, BLOCK) + TINY,
    "2means": lambda x, _: (1 + 2.0**-7) * largest(x, GROUP) + TINY,
    "sign": lambda x, _: (1 + 2.0**-7) * largest(x, BLOCK) + TINY,
    "topk:0.1+fp32": lambda x, _: x.abs(),
    "topk-rice:0.1+fp32": lambda x, _: x.abs(),
    "topk:0.1+int8": lambda x, _: torch.maximum(x.abs(), step(everything(x), 127)),
    "randk:0.1+fp32": lambda x, _: x.abs(),
    "sparse+int8": lambda x, _: torch.where(x == 0, 0.0, step(everything(x), 127)),
    "delta+int8": lambda x, r: step(everything(x - r), 127) + 2.0**-22 * (x.abs() + r.abs()),
    "changed+fp32": lambda x, _: torch.clamp(x.abs(), max=1.0001e-6),
    "int8+zstd:3": lambda x, _: step(largest(x, BLOCK), 127),
    "2bit+auto": lambda x, _: 1.52 * largest(x, BLOCK) + TINY,
}
NORM: dict[str, tuple[int, float]] = {  # block size, largest share of its norm that the error's norm may be
    "dct+fp32": (SQUARE, 2.3e-3),  # one large value among small ones; a tenth of it for a Gaussian
    "demo": (SQUARE, 1.01),
    "sparseloco": (4096, 1.01),
    "lowrank:2+fp32": (SPAN * 2, 1.001),
    # small and large factors in one block: rounding takes at most all of each entry, so of each of two products
    "lowrank:2+int8": (SPAN * 2, 2**0.5),
}


@st.composite
def updates(draw: st.DrawFn) -> Tensor:
    """Any finite update: empty, one value, all equal, denormal, few values, heavy tails, all of fp32's range."""
    n = draw(st.sampled_from([0, 1, 2, 63, 255, 256, 257, 1000, 4097, 9000, SPAN + 259]))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    magnitude = 2.0 ** draw(st.floats(-45, 45))
    kinds = {
        "normal": lambda: generator.normal(size=n) * magnitude,
        "equal": lambda: np.full(n, magnitude * draw(st.sampled_from([1, -1]))),
        "denormal": lambda: generator.normal(size=n) * 2.0**-130,
        "few": lambda: generator.normal(size=n) * magnitude * (generator.random(n) < 0.01),
        "heavy": lambda: generator.standard_cauchy(n) * 1e-3,
        "all magnitudes": lambda: generator.choice([-1, 1], n) * 2.0 ** generator.uniform(-149, 52, n),
        "largest": lambda: generator.choice([-1, 1], n) * 2.0**52,  # scales end at 2^53
    }
    return torch.from_numpy(kinds[draw(st.sampled_from(list(kinds)))]().astype(np.float32))


def through(name: str, x: Tensor, reference: Tensor) -> Tensor:
    n = len(x)
    shapes = tuple(shape for shape in ((n // COLUMNS, COLUMNS), (1, n % COLUMNS)) if shape[0] * shape[1])
    codec = codec_named(name, Known(seed=b"any", reference_N=reference, shapes=shapes))
    wire = codec.encode(x)
    assert len(wire) == codec.wire_bytes(n) if codec.fixed else len(wire) <= codec.wire_bytes(n)
    return codec.decode(wire, n)


@pytest.mark.parametrize("name", EACH)
@given(x=updates(), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_no_value_errs_by_more_than_its_codec_promises(name, x, seed):
    reference = torch.randn(len(x), generator=torch.Generator().manual_seed(seed)) * 1e-3
    error = (through(name, x, reference).double() - x.double()).abs()
    assert bool((error <= EACH[name](x.double(), reference.double()) * (1 + 1e-6)).all())


@pytest.mark.parametrize("name", NORM)
@given(x=updates(), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_no_square_or_matrix_errs_by_more_than_its_share(name, x, seed):
    """Transforms mix values, so the norm is bounded: by that of the update, or error feedback would grow."""
    reference = torch.randn(len(x), generator=torch.Generator().manual_seed(seed)) * 1e-3
    size, share = NORM[name]
    error = through(name, x, reference).double() - x.double()
    assert bool((norm(error, size) <= share * norm(x.double(), size) + 2.0**-58 * len(x) ** 0.5).all())


def test_every_codec_stands_in_the_table():
    assert set(CODECS) <= set(EACH)
