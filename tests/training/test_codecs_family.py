"""Codecs that turn, compare or leave out values, and how chains of them are named."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vectors import gaussian, relative_error, through

from atoll.base.errors import PeerFault
from atoll.training.codec import CODECS, SharedKnowledge, codec_named
from atoll.training.codec.blocks import SPAN
from atoll.training.codec.changed_tensors import PAGE
from atoll.training.codec.dct import SIDE, SQUARE, VALUE_BITS, WAVE_BITS, WAVE_KI

# --- turned, compared, left out ---


def test_the_dct_of_a_wave_is_one_number():
    """A product of two cosines fills a square; one coefficient of 4096 brings it back, plain top-k nothing."""
    angle = np.pi / SIDE * (np.arange(SIDE) + 0.5)
    x = torch.from_numpy(np.outer(np.cos(3 * angle), np.cos(7 * angle)).astype(np.float32)).view(-1)
    assert relative_error("dct+topk:16/4096+fp32", x) < 1e-3
    assert relative_error("topk:16/4096+fp32", x) > 0.9


@given(n=st.sampled_from([1, 4095, 4096, 9000]), exponent=st.floats(-70, 50), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_the_dct_there_and_back_loses_almost_nothing(n, exponent, seed):
    assert relative_error("dct+fp32", gaussian(n, 2.0**exponent, seed)) < 2.5e-4


@pytest.mark.parametrize("x", [gaussian(SQUARE), gaussian(SQUARE).sign() * (2.0 - 2.0**-15)], ids=["any", "worst"])
def test_the_sums_of_the_dct_are_exact_in_any_order(x):
    """Python's whole numbers agree to the last bit at corners and in the middle, at the worst magnitudes too."""
    exponent = int(torch.frexp(x.abs().max()).exponent)
    coefficient = np.frombuffer(codec_named("dct+fp32").encode(x), np.float32).reshape(SIDE, SIDE)
    wave = WAVE_KI.to(torch.int64).tolist()
    whole = (x.double() * 2.0 ** (VALUE_BITS - exponent)).round().to(torch.int64).view(SIDE, SIDE).tolist()
    for k in (0, 31, 63):
        for j in (0, 17, 63):
            total = sum(wave[k][a] * wave[j][b] * whole[a][b] for a in range(SIDE) for b in range(SIDE))
            exact = np.float32(total * 2.0 ** (exponent - VALUE_BITS - 2 * WAVE_BITS))
            assert float(coefficient[k, j]) == float(exact)


def test_no_wave_is_near_a_rounding_border():
    """Or another library's cosine could round to another whole number, and peers would disagree for ever."""
    angle = np.outer(np.arange(SIDE), 2 * np.arange(SIDE) + 1) * (np.pi / (2 * SIDE))
    wave = np.cos(angle) * np.sqrt(2 / SIDE) * 2.0**WAVE_BITS
    assert np.abs(wave - np.floor(wave) - 0.5).min() > 1e-6
    squares = WAVE_KI @ WAVE_KI.T / 4.0**WAVE_BITS
    assert float((squares - torch.eye(SIDE, dtype=torch.float64)).abs().max()) < 1.4e-4


def test_delta_sends_the_difference():
    """A vector near what the receiver holds comes back a hundred times closer, in the same bytes."""
    reference = gaussian(5000)
    x = reference + gaussian(5000, 0.01, 1)
    error = (through("delta+int8", x, SharedKnowledge(reference_N=reference)) - x).norm()
    assert float(error) < float((through("int8", x) - x).norm()) / 50


def test_a_difference_from_something_else_is_a_fault():
    """One value of the reference differs in its last bit."""
    reference = gaussian(5000)
    wire = codec_named("delta+int8", SharedKnowledge(reference_N=reference)).encode(gaussian(5000, 1.0, 1))
    other = reference.clone()
    other[4999] = torch.nextafter(other[4999], torch.tensor(9.0))
    with pytest.raises(PeerFault, match="a reference that this peer does not hold"):
        codec_named("delta+int8", SharedKnowledge(reference_N=other)).decode(wire, 5000)
    with pytest.raises(ValueError, match="delta needs the vector"):
        codec_named("delta+int8")
    with pytest.raises(ValueError, match="from a reference of 5000"):
        codec_named("delta+int8", SharedKnowledge(reference_N=other)).decode(wire, 4000)


def test_changed_sends_tensors_whose_norm_is_above_a_millionth():
    """Four tensors: one changed, one just below, one just above though no value of it is, one still."""
    sizes = (300, 100, 100, SPAN)
    x = torch.cat([gaussian(300), torch.full((100,), 0.99e-7), torch.full((100,), 1.01e-7), torch.zeros(SPAN)])
    codec = codec_named("changed+fp32", SharedKnowledge(sizes=sizes))
    wire = codec.encode(x)
    assert wire[0] == 0b0101 and len(wire) == 1 + 4 * 400
    expected = x.clone()
    expected[300:400] = 0
    assert torch.equal(codec.decode(wire, len(x)), expected)


def test_changed_goes_by_the_norm_that_its_name_says():
    """The same tensors at five thresholds; one that is all zeros is never sent, and 1e-6 is what holds without."""
    sizes, x = (300, 100, 100, 10), torch.cat([gaussian(300), torch.full((200,), 0.999e-7), torch.zeros(10)])
    x[300] = 2e-6
    for stage, flags in (
        ("changed:0", 0b0111),
        ("changed:9.98e-7", 0b0111),
        ("changed", 0b0011),
        ("changed:0.000001", 0b0011),
        ("changed:1e-5", 0b0001),
    ):
        codec = codec_named(f"{stage}+fp32", SharedKnowledge(sizes=sizes))
        assert codec.encode(x)[0] == flags, stage
        assert codec_named(codec.name, SharedKnowledge(sizes=sizes)).encode(x) == codec.encode(x)
    assert codec_named("changed:1e-6").name == codec_named("changed").name == "changed+bf16"


def test_changed_without_sizes_looks_at_pages():
    x = torch.zeros(SPAN + 3 * PAGE + 5)
    x[PAGE], x[-1] = 1.0, 2.0
    wire = codec_named("changed+fp32").encode(x)
    assert len(wire) == -(-68 // 8) + 4 * (PAGE + 5)
    assert torch.equal(through("changed+fp32", x), x)
    with pytest.raises(ValueError, match="in a vector of"):
        codec_named("changed+fp32", SharedKnowledge(sizes=(1, 2))).encode(x)
    with pytest.raises(PeerFault, match="unused bits"):
        codec_named("changed+fp32").decode(bytes([2]), 10)


# --- names ---


def test_a_chain_is_named_by_its_parts():
    x = gaussian(5000)
    assert torch.equal(through("topk:0.25+int8+zstd:3", x), through("topk:1024/4096+int8", x))
    assert codec_named("topk").name == "topk:410/4096+bf16"
    assert codec_named("sparseloco").name == "topk:64/4096+2means"


def test_a_chains_name_names_it_again():
    for name in (*CODECS, "topk:0.3+int4", "dct+topk+2means+zstd:9", "changed:0.00002+sparse+fp16+lz4", "demo"):
        assert codec_named(codec_named(name).name).name == codec_named(name).name


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "no codec is called ''"),
        ("topk:0.1+", "no codec is called ''"),
        ("int8+topk", "int8 is in the wrong position"),
        ("zstd:3+int8", "zstd:3 is in the wrong position"),
        ("int8+zstd:22", "no codec is called 'zstd:22'"),
        ("dct:0.5+int8", "no codec is called 'dct:0.5'"),
        ("topk:0+int8", "needs a share between 1/256 and 1"),
        ("topk:2/1+int8", "needs a share between 1/256 and 1"),
        ("topk:1e-9999999+int8", "needs a share between 1/256 and 1"),
        ("topk:1/0+int8", "needs a share between 1/256 and 1"),
        ("changed:2+int8", "needs a norm between 0 and 1, such as changed:1e-5"),
        ("changed:1e-999+int8", "needs a norm between 0 and 1"),
        ("changed:nan+int8", "needs a norm between 0 and 1"),
        ("changed:+int8", "needs a norm between 0 and 1"),
        ("+".join(["topk:1"] * 9), "chains more than 6"),
    ],
)
def test_a_name_that_makes_no_sense_is_refused_in_words(name, complaint):
    with pytest.raises(ValueError, match=complaint):
        codec_named(name)
