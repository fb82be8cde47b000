"""Codecs that say each value in few bits: what they lose, and what a stranger may try with them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vectors import gaussian, relative_error, through

from atoll.base.errors import PeerFault
from atoll.training.codec import CODECS
from atoll.training.codec.blocks import BLOCK


@given(values=st.lists(st.floats(-60000, 60000, width=32), max_size=50))
@settings(max_examples=60)
def test_fp16_errs_by_a_2048th_or_half_its_smallest_step(values):
    x = torch.tensor(values, dtype=torch.float32)
    error = (through("fp16", x) - x).abs()
    assert bool((error <= torch.clamp(x.abs() * 2.0**-11, min=2.0**-25)).all())


def test_fp16_saturates_and_refuses_infinities_of_others():
    assert through("fp16", torch.tensor([1e6, -1e6])).tolist() == [65504.0, -65504.0]
    for infinity in (0x7C00, 0xFC00, 0x7E01, 0xFE01):
        with pytest.raises(PeerFault, match="not finite"):
            CODECS["fp16"].decode(infinity.to_bytes(2, "little"), 1)


@given(values=st.lists(st.floats(-(2.0**60), 2.0**60, width=32), max_size=50))
@settings(max_examples=60)
def test_bf16_errs_by_a_256th_over_the_whole_range(values):
    """Down to 2^-80; what is smaller becomes zero."""
    x = torch.tensor(values, dtype=torch.float32)
    error = (through("bf16", x) - x).abs()
    assert bool((error <= torch.clamp(x.abs() * 2.0**-8, min=2.0**-80)).all())


def test_bf16_rounds_ties_to_even_and_cuts_at_its_ends():
    half_steps = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0**-81, -(2.0**61)])
    assert through("bf16", half_steps).tolist() == [1.0, 1 + 2.0**-6, 0.0, -(2.0**60)]


def test_fp32_keeps_every_bit_and_cuts_at_two_to_the_sixtieth():
    """What is cut stands beside what is not; minus zero and a denormal number are values like any other."""
    kept = [2.0**59, -(2.0**60), 1 + 2.0**-23, 2.0**-149, -0.0]
    decoded = through("fp32", torch.tensor([*kept, 2.0**61, -(2.0**61)]))
    assert decoded.tolist() == [*kept, 2.0**60, -(2.0**60)] and bool(decoded[4].signbit())


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x8000, 0x0001, ((127 - 81) << 7), ((127 + 61) << 7)])
def test_a_bf16_that_encode_never_makes_is_a_fault(bits):
    """Infinities, NaN, minus zero, denormal, too small, too large; in the last of many values."""
    wire = CODECS["bf16"].encode(gaussian(1000))[:-2] + bits.to_bytes(2, "little")
    with pytest.raises(PeerFault, match="not finite, too small or too large"):
        CODECS["bf16"].decode(wire, 1000)


@given(n=st.sampled_from([1, 255, 257, 3000]), exponent=st.floats(-40, 30), seed=st.integers(0, 999))
@settings(max_examples=40)
def test_int4_errs_by_at_most_half_a_step_of_its_block(n, exponent, seed):
    x = gaussian(n, 2.0**exponent, seed)
    error = (through("int4", x) - x).abs()
    for lo in range(0, n, BLOCK):
        step = float(x[lo : lo + BLOCK].abs().max()) / 7 * (1 + 1 / 127)
        assert float(error[lo : lo + BLOCK].max()) <= 0.5001 * step


def test_int4_does_not_cut_the_largest_value_of_a_block():
    """The step is rounded up, so the largest comes back no smaller, whatever its last bits."""
    x = gaussian(200 * BLOCK, 1e-3)
    decoded = through("int4", x)
    assert bool((decoded.abs().view(-1, BLOCK).amax(1) >= x.abs().view(-1, BLOCK).amax(1)).all())


@given(n=st.sampled_from([1, 255, 257, 3000]), exponent=st.floats(-40, 30), seed=st.integers(0, 999))
@settings(max_examples=40)
def test_e3m0_takes_the_nearest_of_its_fifteen_levels(n, exponent, seed):
    """Against a search over all levels, in double precision, with the scale that the wire has."""
    x = gaussian(n, 2.0**exponent, seed)
    decoded = through("e3m0", x).double()
    for lo in range(0, n, BLOCK):
        block, got = x[lo : lo + BLOCK].double(), decoded[lo : lo + BLOCK]
        scale = float(got.abs().max())  # the largest value is sent as the scale itself
        assert scale == pytest.approx(float(block.abs().max()), rel=2.0**-8)
        powers = scale * 2.0 ** torch.arange(-6, 1, dtype=torch.float64)
        levels = torch.cat([-powers, torch.zeros(1, dtype=torch.float64), powers])
        nearest = (block[:, None] - levels).abs().amin(1)
        assert bool(((block - got).abs() <= nearest + 1e-6 * scale).all())


@pytest.mark.parametrize("name", ["int4", "e3m0"])
@pytest.mark.parametrize("place", [0, 1, 500, 998, 999])
def test_the_sixteenth_code_means_nothing(name, place):
    """int4 has no -8 and e3m0 no minus zero: a message has one spelling."""
    wire = bytearray(CODECS[name].encode(gaussian(1000)))
    at, shift = 8 + place // 2, 4 * (place % 2)
    wire[at] = wire[at] & ~(15 << shift) | 8 << shift
    with pytest.raises(PeerFault, match="a code is invalid"):
        CODECS[name].decode(wire, 1000)


def test_sign_sends_the_mean_magnitude_of_a_block():
    """Karimireddy et al. 2019: ||x||_1 / d * sign(x). Exact to a bf16, in a short block too."""
    x = gaussian(300, 1e-3)
    decoded = through("sign", x)
    assert torch.equal(decoded < 0, x < 0)
    for block, got in ((x[:256], decoded[:256]), (x[256:], decoded[256:])):
        assert len(set(got.abs().tolist())) == 1
        assert float(got[0].abs()) == pytest.approx(float(block.abs().mean()), rel=2.0**-8)


@pytest.mark.parametrize(
    ("name", "error", "bits"),
    [
        ("fp16", 0.0002, 16),
        ("bf16", 0.0017, 16),
        ("int4", 0.1265, 4.0625),
        ("e3m0", 0.1945, 4.0625),
        ("2means", 0.346, 2.5),
        ("sign", 0.6028, 1.0625),  # sqrt(1 - 2 / pi)
    ],
)
def test_what_a_gaussian_loses(name, error, bits):
    x = gaussian(1_024_000, 1e-3)
    assert relative_error(name, x) == pytest.approx(error, rel=0.05)
    assert 8 * CODECS[name].wire_bytes(len(x)) / len(x) == bits


def test_two_means_find_the_two_magnitudes():
    """Blocks of ± 1 and ± 3, in any mixture, come back exactly; one magnitude alone too."""
    x = torch.where(gaussian(640, seed=1) > 0.7, 3.0, 1.0) * gaussian(640, seed=2).sign()
    x[64:128] = -5.0
    assert torch.equal(through("2means", x), x)
