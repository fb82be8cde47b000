"""Bounds of every codec in specs/codecs.md, for any finite update: bytes and error bound, name by name.

Both are repeated here in plain numbers from the page, so that code and page cannot be wrong together unless this
file changes as well.
"""

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor, log2

import cramjam
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.base.draw import draw_bytes
from atoll.training.codec import CODECS, SharedKnowledge, codec_named
from atoll.training.codec.blocks import BLOCK, SPAN
from atoll.training.codec.chain import COMPRESSORS, WRAPS
from atoll.training.codec.changed_tensors import PAGE
from atoll.training.codec.dct import SIDE, SQUARE
from atoll.training.codec.top_k import CHUNK
from atoll.training.codec.two_means import GROUP

TINY = 2.0**-73  # 127 of the smallest scales, rounded up: what is below a codec's range may be lost
SEED = b"any"
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
    "topk:0.1+fp32": lambda x, _: (x - only(x, top_places(x, 410))).abs(),
    "topk-rice:0.1+fp32": lambda x, _: (x - only(x, top_places(x, 410))).abs(),
    "topk:0.1+int8": lambda x, _: torch.maximum(x.abs(), step(everything(x), 127)),
    "randk:0.1+fp32": lambda x, _: (x - only(x, drawn_places(len(x), ceil(len(x) / 10), SEED))).abs(),
    "sparse+fp32": lambda x, _: torch.zeros_like(x),
    "sparse+int8": lambda x, _: torch.where(x == 0, 0.0, step(everything(x), 127)),
    "delta+int8": lambda x, r: step(everything(x - r), 127) + 2.0**-22 * (x.abs() + r.abs()),
    "changed+fp32": lambda x, _: torch.clamp(x.abs(), max=1.0001e-6),
}
NORM: dict[str, tuple[int, float]] = {  # block size, largest share of its norm that the error's norm may be
    "dct+fp32": (SQUARE, 2.3e-3),  # one large value among small ones; a tenth of it for a Gaussian
    "demo": (SQUARE, 1.01),
    "sparseloco": (4096, 1.01),
    "lowrank:2+fp32": (SPAN * 2, 1.001),
    # small and large factors in one block: rounding takes at most all of each entry, so of each of two products
    "lowrank:2+int8": (SPAN * 2, 2**0.5),
}


def kept(n: int, per_chunk: int) -> int:
    """Values that `topk` sends."""
    return n // CHUNK * per_chunk + ceil(Fraction(n % CHUNK * per_chunk, CHUNK))


def elias_fano(n: int, m: int) -> int:
    """E(n, m) of the page: bytes of m places."""
    low = min(8, floor(log2(n // m))) if m else 0
    return ceil(m * low / 8) + ceil((m + (n - 1) // 2**low) / 8) if m else 0


def pieces(n: int, rank: int) -> int:
    """Values of the factors of rows of COLUMNS, or of the rows where factors are no fewer."""
    rows, rest = divmod(n, COLUMNS)
    return min(rank * (rows + COLUMNS), rows * COLUMNS) + rest


PLAIN: dict[str, Callable[[int], int]] = {  # n values -> bytes, exactly
    "fp32": lambda n: 4 * n,
    "fp16": lambda n: 2 * n,
    "bf16": lambda n: 2 * n,
    "int8": lambda n: 2 * ceil(n / 256) + n,
    "int4": lambda n: 2 * ceil(n / 256) + ceil(n / 2),
    "e3m0": lambda n: 2 * ceil(n / 256) + ceil(n / 2),
    "2bit": lambda n: 2 * ceil(n / 256) + ceil(n / 4),
    "2means": lambda n: 4 * ceil(n / 64) + ceil(n / 4),
    "sign": lambda n: 2 * ceil(n / 256) + ceil(n / 8),
    "topk:0.1+fp32": lambda n: elias_fano(n, kept(n, 410)) + 4 * kept(n, 410),
    "topk:0.1+int8": lambda n: elias_fano(n, kept(n, 410)) + PLAIN["int8"](kept(n, 410)),
    "sparseloco": lambda n: elias_fano(n, kept(n, 64)) + PLAIN["2means"](kept(n, 64)),
    "demo": lambda n: elias_fano(filled(n), kept(filled(n), 32)) + PLAIN["2means"](kept(filled(n), 32)),
    "dct+fp32": lambda n: 4 * filled(n),
    "randk:0.1+fp32": lambda n: 4 * ceil(Fraction(n, 10)),
    "delta+int8": lambda n: 16 + PLAIN["int8"](n) if n else 0,
    "lowrank:2+fp32": lambda n: 4 * pieces(n, 2),
    "lowrank:2+int8": lambda n: PLAIN["int8"](pieces(n, 2)),
}
VARIES: dict[str, Callable[[Tensor], int]] = {  # where the values decide, too
    "sparse+fp32": lambda x: mask_bytes(x) + 4 * int(x.count_nonzero()),
    "sparse+int8": lambda x: mask_bytes(x) + PLAIN["int8"](int(x.count_nonzero())),
    "topk-rice:0.1+fp32": lambda x: rice(top_places(x, 410), len(x)) + 4 * kept(len(x), 410),
    "changed+fp32": lambda x: ceil(len(x) / PAGE / 8) + 4 * int((norm(x.double(), PAGE) > 1e-6).sum()),
}


def filled(n: int) -> int:
    return ceil(n / SQUARE) * SQUARE


def mask_bytes(x: Tensor) -> int:
    """Of `sparse`: a bit per word of 64 values, and 8 bytes for each that holds any."""
    return ceil(ceil(len(x) / 64) / 8) + 8 * len(np.unique(np.flatnonzero(x.numpy()) // 64))


def rice(place_M: np.ndarray, n: int) -> int:
    """Bytes of the gaps between these places."""
    if not (m := len(place_M)):
        return 0
    low = max(0, min(8, floor(log2(max(1, 98 * n // (100 * m))))))
    gap_M = np.diff(place_M, prepend=-1) - 1
    return ceil(m * low / 8) + ceil((m + int((gap_M >> low).sum())) / 8)


def top_places(x: Tensor, per_chunk: int) -> np.ndarray:
    """Places of the largest magnitudes of every chunk, the earlier of equals, by a plain sort."""
    found = [np.empty(0, np.int64)]
    for lo in range(0, len(x), CHUNK):
        chunk = x[lo : lo + CHUNK].abs().numpy()
        found.append(lo + np.sort(np.argsort(-chunk, kind="stable")[: kept(len(chunk), per_chunk)]))
    return np.concatenate(found)


def drawn_places(n: int, m: int, seed: bytes) -> np.ndarray:
    """Those of `randk`, as the page says it: one of every stretch, by the little-endian numbers of the draw."""
    draw = draw_bytes(seed, f"randk {n}", 4 * m)
    numbers = (int.from_bytes(draw[4 * j : 4 * j + 4], "little") for j in range(m))
    edges = (j * n // max(1, m) for j in range(m + 1))
    places = [lo + (d * (hi - lo) >> 32) for (lo, hi), d in zip(pairwise(edges), numbers, strict=True)]
    return np.array(places, np.int64)


def only(x: Tensor, place_M: np.ndarray) -> Tensor:
    """x at these places, zero elsewhere."""
    out = torch.zeros_like(x)
    out[place_M] = x[place_M]
    return out


def squares(x: Tensor) -> Tensor:
    """Of every chunk, in fp64: the sum of its values' squares."""
    return torch.cat([x, x.new_zeros(-len(x) % CHUNK)]).double().view(-1, CHUNK).square().sum(1)


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
    codec = codec_named(name, SharedKnowledge(seed=SEED, reference_N=reference, shapes=shapes))
    wire = codec.encode(x)
    if name in PLAIN:
        assert codec.fixed and len(wire) == codec.wire_bytes(n) == PLAIN[name](n)
    else:
        assert not codec.fixed and len(wire) == VARIES[name](x) <= codec.wire_bytes(n)
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


@pytest.mark.parametrize("name", ["topk:{}+fp32", "topk-rice:{}+fp32"])
@given(x=updates(), per_chunk=st.sampled_from([16, 64, 410, 2048, 4096]))
@settings(max_examples=30)
def test_the_k_largest_of_every_chunk_are_exact_and_what_is_lost_is_the_rest(name, x, per_chunk):
    """So of a chunk's d values the error's square is that of the d - k smallest: at most 1 - k / d of all."""
    decoded = codec_named(name.format(f"{per_chunk}/4096"))
    decoded = decoded.decode(decoded.encode(x), len(x))
    assert torch.equal(decoded, only(x, top_places(x, per_chunk)))
    lost, all_of_it = squares(x - decoded), squares(x)
    for i, lo in enumerate(range(0, len(x), CHUNK)):
        d = min(CHUNK, len(x) - lo)
        assert float(lost[i]) <= (1 - kept(d, per_chunk) / d) * float(all_of_it[i]) * (1 + 1e-12)


@given(x=updates(), ratio=st.sampled_from([Fraction(1, 256), Fraction(1, 10), Fraction(1, 3), Fraction(1)]))
@settings(max_examples=15)
def test_the_values_that_a_seed_draws_are_exact_and_the_others_zero(x, ratio):
    """Not scaled: what is left out comes with error feedback."""
    for seed in (b"round 1", b"round 2"):
        codec = codec_named(f"randk:{ratio.numerator}/{ratio.denominator}+fp32", SharedKnowledge(seed=seed))
        wire = codec.encode(x)
        place_M = drawn_places(len(x), ceil(ratio * len(x)), seed)
        assert len(wire) == 4 * len(place_M)
        assert torch.equal(codec.decode(wire, len(x)), only(x, place_M))


@given(x=updates(), per_square=st.sampled_from([32, 64, 410]))
@settings(max_examples=30)
def test_of_every_square_the_largest_waves_travel(x, per_square):
    """Cosines in double precision: the error is as long as all waves but the k largest, to what `dct` loses."""
    codec = codec_named(f"dct+topk:{per_square}/4096+fp32")
    error = codec.decode(codec.encode(x), len(x)).double() - x.double()
    angle = np.outer(np.arange(SIDE), 2 * np.arange(SIDE) + 1) * (np.pi / (2 * SIDE))
    wave = torch.from_numpy(np.cos(angle) * np.where(np.arange(SIDE) == 0, SIDE**-0.5, (2 / SIDE) ** 0.5)[:, None])
    square_QSS = torch.cat([x, x.new_zeros(-len(x) % SQUARE)]).double().view(-1, SIDE, SIDE)
    power_QN = (wave @ square_QSS @ wave.T).view(-1, SQUARE).square().sort(1).values
    smallest_Q = power_QN[:, : SQUARE - per_square].sum(1).sqrt()
    for i, lo in enumerate(range(0, len(x), SQUARE)):
        all_of_it, lost = float(square_QSS[i].norm()), float(error[lo : lo + SQUARE].norm())
        assert lost <= float(smallest_Q[i]) + 5e-3 * all_of_it + 2.0**-52
        if len(x) - lo >= SQUARE:  # in a shorter one the error also lies in padding values
            assert lost >= float(smallest_Q[i]) - 5e-3 * all_of_it - 2.0**-52


@given(
    exponents=st.lists(st.floats(-12, -4), min_size=1, max_size=9),
    threshold=st.sampled_from(["1e-6", "1e-5", "0.001"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_a_tensor_whose_norm_is_above_the_threshold_is_exact_and_any_other_zero(exponents, threshold, seed):
    """Norms are computed on a grid of 4095 steps of the largest value: those nearer than sqrt(n) / 8190 may go
    either way, to the same one everywhere."""
    size, limit, generator = 1000, float(threshold), torch.Generator().manual_seed(seed)
    x = torch.cat([torch.randn(size, generator=generator) * 10**exponent for exponent in exponents])
    codec = codec_named(f"changed:{threshold}+fp32", SharedKnowledge(sizes=(size,) * len(exponents)))
    decoded, near = codec.decode(codec.encode(x), len(x)), size**0.5 / 8190
    for tensor, got in zip(x.split(size), decoded.split(size), strict=True):
        length = float(tensor.double().norm())
        is_sent = bool(got.any())
        assert torch.equal(got, tensor) or not is_sent
        assert is_sent or length <= limit * (1 + near)
        assert not is_sent or length >= limit * (1 - near)


PACK: dict[str, tuple[int, Callable[[bytes], object]]] = {
    "zstd:3": (1, lambda data: cramjam.zstd.compress(data, 3)),
    "zstd:5": (1, lambda data: cramjam.zstd.compress(data, 5)),
    "zstd:9": (1, lambda data: cramjam.zstd.compress(data, 9)),
    "lz4": (2, lambda data: cramjam.lz4.compress_block(data, store_size=False)),
    "snappy": (3, cramjam.snappy.compress_raw),
}


@pytest.mark.parametrize("inner", ["fp32", "int8", "2bit"])
@pytest.mark.parametrize("method", [*PACK, "auto"])
@given(x=updates(), link_bytes_s=st.sampled_from([1e3, 2.5e6, 1e12]))
@settings(max_examples=12)
def test_a_compressor_loses_nothing_and_its_wire_is_one_of_two(method, inner, x, link_bytes_s):
    """A zero and the inner wire, or the method, a length and what the library makes of it, if that is shorter."""
    codec, plain = (
        codec_named(f"{inner}+{method}", SharedKnowledge(link_bytes_s=link_bytes_s)),
        CODECS[inner].encode(x),
    )
    wire = bytes(codec.encode(x))
    if len(x):
        packs = [PACK[one] for one in ([method] if method in PACK else PACK)]
        packed = {bytes([code]) + len(plain).to_bytes(4, "little") + bytes(pack(plain)) for code, pack in packs}
        assert wire in {b"\0" + bytes(plain), *(one for one in packed if len(one) <= len(plain))}
    assert len(wire) <= codec.wire_bytes(len(x)) == (1 + PLAIN[inner](len(x)) if len(x) else 0)
    assert torch.equal(codec.decode(wire, len(x)), CODECS[inner].decode(plain, len(x)))
    if link_bytes_s == 1e12:
        assert wire[:1] in (b"", b"\0")


def test_every_codec_stands_in_the_table():
    assert set(CODECS) <= set(EACH) and set(CODECS) <= set(PLAIN)
    stages = {stage.partition(":")[0] for name in (*PLAIN, *VARIES) for stage in name.split("+")}
    assert set(WRAPS) <= stages and set(PACK) == set(COMPRESSORS) - {"auto"}
