import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import PeerFault
from atoll.learn.codec import CODECS, codec_named, pack
from atoll.learn.codec.blocks import BLOCK, REFUSE_ABOVE, SCALE_MAX, SCALE_MIN, SPAN, VALUE_MAX
from atoll.learn.codec.two_bit import OUTER

lengths = st.sampled_from([0, 1, 2, 3, 4, 5, 255, 256, 257, 511, 1000, SPAN, SPAN + 1, SPAN + 259])
magnitudes = st.floats(-40, 30).map(lambda exponent: 2.0**exponent)
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def gaussian(n: int, magnitude: float, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * magnitude


@every_codec
@given(n=lengths, magnitude=magnitudes, seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_wire_has_the_announced_length_and_decodes_twice_to_the_same_bits(codec, n, magnitude, seed):
    x = gaussian(n, magnitude, seed)
    wire = codec.encode(x)
    assert len(wire) == codec.wire_bytes(n)
    first, second = codec.decode(wire, n), codec.decode(bytearray(wire), n)
    assert first.shape == (n,) and torch.equal(first, second) and bool(first.isfinite().all())


@given(n=lengths, magnitude=magnitudes, seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_int8_errs_by_at_most_half_a_step_of_its_block(n, magnitude, seed):
    """A step is max|x| / 127, up to 1/128 more for the rounding of the scale to bf16."""
    x = gaussian(n, magnitude, seed)
    error = (CODECS["int8"].decode(CODECS["int8"].encode(x), n) - x).abs()
    for lo in range(0, n, BLOCK):
        step = x[lo : lo + BLOCK].abs().max() / 127 * (1 + 1 / 127)
        assert float(error[lo : lo + BLOCK].max()) <= 0.5001 * float(step) + SCALE_MIN * 127


def test_int8_of_a_gaussian_errs_by_less_than_the_bar():
    """Relative RMS of an all-reduce leg must stay below 0.009."""
    x = gaussian(1_000_000, 1e-3, 0)
    error = CODECS["int8"].decode(CODECS["int8"].encode(x), len(x)) - x
    assert 0.005 < float(error.norm() / x.norm()) < 0.009


def test_two_bits_of_a_gaussian_keep_what_max_promises():
    """Max 1960, table I: mean squared error 0.1175 of the variance for four levels."""
    x = gaussian(1_000_000, 1e-3, 0)
    error = CODECS["2bit"].decode(CODECS["2bit"].encode(x), len(x)) - x
    assert float(error.square().mean() / x.square().mean()) == pytest.approx(0.1175, abs=0.003)


@every_codec
def test_nothing_becomes_nothing(codec):
    assert codec.encode(torch.empty(0)) == b"" and codec.decode(b"", 0).shape == (0,)


@every_codec
def test_zeros_stay_zeros(codec):
    assert not codec.decode(codec.encode(torch.zeros(700)), 700).any()


@every_codec
def test_a_single_value_comes_back_close(codec):
    """Even 2 bits: alone in its block, a value is its own root mean square."""
    decoded = float(codec.decode(codec.encode(torch.tensor([-3e-5])), 1))
    assert -3e-5 * 1.52 < decoded < -3e-5 * 0.45


@every_codec
def test_denormal_numbers_do_no_harm(codec):
    """They are below every scale: blocks become zero, and error feedback would keep them."""
    x = torch.full((300,), 1e-42)
    assert codec.name == "fp32" or not codec.decode(codec.encode(x), 300).any()


@every_codec
def test_a_huge_range_within_a_block_keeps_the_largest(codec):
    x = torch.zeros(256)
    x[0], x[1], x[2] = 1e12, -1e-30, 1e-44
    decoded = codec.decode(codec.encode(x), 256)
    assert bool(decoded.isfinite().all()) and float(decoded[0]) > 1e11 / 1.1


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_an_update_that_is_not_finite_is_refused_in_words(codec, bad):
    """In the last, short block too, where padding could hide it."""
    x = gaussian(SPAN + 300, 1e-3, 0)
    x[-1] = bad
    with pytest.raises(ValueError, match="training diverged before it was encoded"):
        codec.encode(x)


@every_codec
def test_anything_but_one_fp32_vector_is_refused(codec):
    for wrong in (torch.zeros(2, 2), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match="one fp32 vector"):
            codec.encode(wrong)


@every_codec
@given(wire=st.binary(max_size=700), n=st.integers(0, 600))
@settings(max_examples=200, deadline=None)
def test_a_strangers_bytes_are_a_fault_or_a_bounded_vector(codec, wire, n):
    """No other exception, no NaN, nothing larger than the bound."""
    try:
        decoded = codec.decode(wire, n)
    except PeerFault:
        return
    assert decoded.shape == (n,) and bool((decoded.abs() <= VALUE_MAX).all())


@pytest.mark.parametrize("name", ["int8", "2bit"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, SCALE_MAX * 2, SCALE_MIN / 2, 1e-40])
def test_a_poisoned_scale_is_a_fault(name, scale):
    """The honest wire decodes; with one scale replaced it names the block."""
    codec = CODECS[name]
    wire = bytearray(codec.encode(gaussian(600, 1.0, 0)))
    bits = int(np.float32(scale).view(np.uint32)) >> 16
    wire[2:4] = bits.to_bytes(2, "little")
    with pytest.raises(PeerFault, match="scale of block 1 is out of range"):
        codec.decode(wire, 600)


def test_spare_bits_are_zero_so_that_a_message_has_one_spelling():
    wire = bytearray(CODECS["2bit"].encode(gaussian(5, 1.0, 0)))
    wire[-1] |= 0x80
    with pytest.raises(PeerFault, match="unused bits"):
        CODECS["2bit"].decode(wire, 5)


@every_codec
def test_the_largest_decodable_values_can_be_averaged_and_encoded_again(codec):
    """Otherwise one hostile but well-formed wire would break the honest owner of the part."""
    x = torch.full((300,), REFUSE_ABOVE)
    once = codec.decode(codec.encode(x), 300)
    again = codec.decode(codec.encode(once * 1.0001), 300)
    assert bool((again.abs() <= VALUE_MAX).all())


def test_two_bit_levels_are_exact_products():
    """Level times scale needs no rounding: it equals the product taken in double precision."""
    x = gaussian(4096, 1.234e-5, 3)
    decoded = CODECS["2bit"].decode(CODECS["2bit"].encode(x), 4096).double()
    scales = decoded.abs().view(-1, BLOCK).amax(1) / OUTER
    assert torch.equal(scales, scales.to(torch.bfloat16).double())


def test_error_feedback_delivers_everything_in_the_end():
    """Forty rounds of the same update through 2 bits: what was decoded plus the memory is the whole sum."""
    codec, delta = CODECS["2bit"], gaussian(5000, 1e-3, 1)
    memory, delivered = None, torch.zeros(5000)
    for _ in range(40):
        wire, memory = pack(codec, delta, memory, 1.0)
        delivered += codec.decode(wire, 5000)
    assert torch.allclose(delivered + memory, 40 * delta, atol=1e-6)
    assert float((delivered / 40 - delta).norm() / delta.norm()) < 0.05  # one round alone errs by 0.34


def test_without_feedback_nothing_is_remembered():
    """beta = 0 forgets: the second wire does not know the first."""
    codec, delta = CODECS["2bit"], gaussian(500, 1e-3, 1)
    first, memory = pack(codec, delta, None, 0.0)
    assert pack(codec, delta, memory, 0.0)[0] == first


def test_an_unknown_codec_names_those_that_exist():
    with pytest.raises(ValueError, match="no codec is called 'int4'; there are fp32, int8, 2bit"):
        codec_named("int4")


def plain_decode(name: str, wire: bytes, n: int) -> list[float]:
    """The page specs/codecs.md in a dozen lines of plain Python, without torch or numpy."""
    blocks = -(-n // 256)
    halves = struct.unpack(f"<{blocks}H", wire[: 2 * blocks])
    scales = [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
    codes = wire[2 * blocks :]
    if name == "int8":
        return [struct.unpack("<b", codes[i : i + 1])[0] * scales[i // 256] for i in range(n)]
    levels = (464 / 1024, 1546 / 1024, -464 / 1024, -1546 / 1024)
    return [levels[codes[i // 4] >> 2 * (i % 4) & 3] * scales[i // 256] for i in range(n)]


@pytest.mark.parametrize("name", ["int8", "2bit"])
def test_the_specification_alone_suffices_to_decode(name):
    """A reader of the page gets our bits; doubles show that no product needed rounding."""
    wire = CODECS[name].encode(gaussian(1003, 3.7e-4, 5))
    assert CODECS[name].decode(wire, 1003).tolist() == plain_decode(name, wire, 1003)
