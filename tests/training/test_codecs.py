import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import PeerFault
from atoll.training.codec import CODECS, Codec, SharedKnowledge, codec_named, pack
from atoll.training.codec.blocks import BLOCK, REFUSE_ABOVE, SCALE_MAX, SCALE_MIN, SPAN, VALUE_MAX
from atoll.training.codec.two_bit import OUTER

lengths = st.sampled_from([0, 1, 2, 3, 4, 5, 255, 256, 257, 511, 1000, SPAN, SPAN + 1, SPAN + 259])
magnitudes = st.floats(-40, 30).map(lambda exponent: 2.0**exponent)
CHAINS = (
    *(
        "topk:0.1",
        "topk:0.1+int8",
        "sparseloco",
        "randk:0.1+int8",
        "sparse+int8",
        "dct+int8",
        "demo",
        "dct+topk:0.1",
    ),
    *("topk-rice:0.1+int8", "lowrank:2", "lowrank:2+int8", "int8+auto", "lowrank:1+topk-rice:0.5+fp16+auto"),
    *("delta+int8", "changed+int8", "fp32+zstd", "int8+zstd:5", "2bit+zstd:9", "int4+lz4", "2bit+snappy"),
    *("sparse+int8+zstd", "changed+topk:0.1+2bit+lz4", "delta+sparse+fp16", "delta+dct+topk:0.1+int8+zstd:3"),
)
CHANGES_MOST = (
    "dct+topk",
    "demo",
    "randk",
    "topk-rice:0.5",
)  # a value may be lost altogether, until error feedback brings it
every_name = pytest.mark.parametrize("name", [*CODECS, *CHAINS])


def made(name: str, n: int) -> Codec:
    """The codec of that name for vectors of n values, with all it may want to know."""
    known = SharedKnowledge(seed=b"round 4012", reference_N=gaussian(n, 1e-6, 5), shapes=matrix_of(n))
    return codec_named(name, known)


def matrix_of(n: int) -> tuple[tuple[int, int], ...]:
    """The shapes that low-rank codecs are told of: as many rows of 64 as there are, and what is left."""
    return tuple(shape for shape in ((n // 64, 64), (1, n % 64)) if shape[0] * shape[1])


def gaussian(n: int, magnitude: float, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * magnitude


@every_name
@given(n=lengths, magnitude=magnitudes, seed=st.integers(0, 2**31))
@settings(max_examples=15)
def test_a_wire_has_the_announced_length_and_decodes_twice_to_the_same_bits(name, n, magnitude, seed):
    """Codecs with wires of varying length announce the longest."""
    x, codec = gaussian(n, magnitude, seed), made(name, n)
    wire = codec.encode(x)
    assert len(wire) == codec.wire_bytes(n) if codec.fixed else len(wire) <= codec.wire_bytes(n)
    elsewhere = memoryview(b"_" + wire)[1:]  # a wire may arrive at an odd address
    first, second = codec.decode(wire, n), codec.decode(elsewhere, n)
    assert first.shape == (n,) and torch.equal(first, second) and bool(first.isfinite().all())


@given(n=lengths, magnitude=magnitudes, seed=st.integers(0, 2**31))
@settings(max_examples=40)
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


@every_name
def test_nothing_becomes_nothing(name):
    codec = made(name, 0)
    assert codec.encode(torch.empty(0)) == b"" and codec.decode(b"", 0).shape == (0,)


@pytest.mark.parametrize("name", [name for name in (*CODECS, *CHAINS) if "delta" not in name])
def test_zeros_stay_zeros(name):
    codec = made(name, 700)
    assert not codec.decode(codec.encode(torch.zeros(700)), 700).any()


@pytest.mark.parametrize("name", [n for n in (*CODECS, *CHAINS) if not any(word in n for word in CHANGES_MOST)])
def test_a_single_value_comes_back_close(name):
    """Even 2 bits: alone in its block, a value is its own root mean square."""
    codec = made(name, 1)
    decoded = float(codec.decode(codec.encode(torch.tensor([-3e-5])), 1))
    assert -3e-5 * 1.52 < decoded < -3e-5 * 0.45


@every_name
@pytest.mark.parametrize("value", [1.0, -2.5e-4])
def test_equal_values_come_back_equal_or_not_at_all(name, value):
    """Every block sees the same, so there are few answers: about the value itself, or zero where none was sent."""
    n = 8192
    decoded = made(name, n).decode(made(name, n).encode(torch.full((n,), value)), n) / value
    if "dct" in name:
        assert torch.allclose(decoded, torch.ones(n), atol=0.02)  # one wave says it all
    else:
        assert bool(((decoded.abs() < 0.02) | ((decoded > 0.45) & (decoded < 1.52))).all())


@pytest.mark.parametrize("name", [n for n in (*CODECS, *CHAINS) if "delta" not in n and not n.startswith("fp32")])
def test_denormal_numbers_do_no_harm(name):
    """They are below every scale: blocks become zero, and error feedback would keep them."""
    codec = made(name, 300)
    assert not codec.decode(codec.encode(torch.full((300,), 1e-42)), 300).any()


@every_name
def test_a_huge_range_within_a_block_keeps_the_largest(name):
    """fp16 saturates and one bit tells no sizes: they stay finite, at least."""
    x, codec = torch.zeros(256), made(name, 256)
    x[0], x[1], x[2] = 1e12, -1e-30, 1e-44
    decoded = codec.decode(codec.encode(x), 256)
    assert bool(decoded.isfinite().all())
    if "fp16" not in name and name != "sign" and not any(word in name for word in CHANGES_MOST):
        assert float(decoded[0]) > 1e11 / 1.1


@every_name
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_an_update_that_is_not_finite_is_refused_in_words(name, bad):
    """In the last, short block too, where padding could hide it."""
    x = gaussian(SPAN + 300, 1e-3, 0)
    x[-1] = bad
    with pytest.raises(ValueError, match="diverged before encoding"):
        made(name, len(x)).encode(x)


@every_name
def test_anything_but_one_fp32_vector_is_refused(name):
    for wrong in (torch.zeros(2, 2), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match="one fp32 vector"):
            made(name, 2).encode(wrong)


@every_name
@given(wire=st.binary(max_size=700), n=st.integers(0, 600))
@settings(max_examples=40)
def test_a_strangers_bytes_are_a_fault_or_a_bounded_vector(name, wire, n):
    """No other exception, no NaN, nothing larger than the bound."""
    fault_or_bounded(made(name, n), wire, n)


@every_name
@given(n=st.sampled_from([1, 64, 700, 4097, 9000]), where=st.lists(st.floats(0, 1), max_size=3), data=st.data())
@settings(max_examples=30)
def test_a_damaged_wire_is_a_fault_or_a_bounded_vector(name, n, where, data):
    """An honest wire with a few bytes changed, cut or appended: most of the checks lie behind the length."""
    codec = made(name, n)
    wire = bytearray(codec.encode(gaussian(n, 1e-3, n)))
    for place in where:
        wire[int(place * (len(wire) - 1))] = data.draw(st.integers(0, 255))
    change = data.draw(st.integers(-3, 3))
    fault_or_bounded(codec, bytes(wire[:change] if change < 0 else wire + bytes(max(0, change - 2))), n)


def fault_or_bounded(codec: Codec, wire: bytes, n: int) -> None:
    try:
        decoded = codec.decode(wire, n)
    except PeerFault:
        return
    assert decoded.shape == (n,) and bool((decoded.abs() <= VALUE_MAX).all())


@pytest.mark.parametrize("name", ["int8", "2bit", "int4", "e3m0", "sign"])
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


@every_name
def test_the_largest_decodable_values_can_be_averaged_and_encoded_again(name):
    """Otherwise one hostile but well-formed wire would break the honest owner of the part."""
    x, codec = torch.full((300,), REFUSE_ABOVE), made(name, 300)
    once = codec.decode(codec.encode(x), 300)
    again = codec.decode(codec.encode(once * 1.0001), 300)
    assert bool((again.abs() <= VALUE_MAX).all())


def test_two_bit_levels_are_exact_products():
    """Level times scale needs no rounding: it equals the product taken in double precision."""
    x = gaussian(4096, 1.234e-5, 3)
    decoded = CODECS["2bit"].decode(CODECS["2bit"].encode(x), 4096).double()
    scales = decoded.abs().view(-1, BLOCK).amax(1) / OUTER
    assert torch.equal(scales, scales.to(torch.bfloat16).double())


@every_name
def test_error_feedback_delivers_everything_in_the_end(name):
    """Forty rounds of the same update: what was decoded plus the memory is the whole sum, whatever the codec."""
    n, delta = 5000, gaussian(5000, 1e-3, 1)
    memory, delivered = None, torch.zeros(n)
    for round_index in range(40):
        known = SharedKnowledge(seed=bytes([round_index]), reference_N=torch.zeros(n), shapes=matrix_of(n))
        codec = codec_named(name, known)
        wire, memory = pack(codec, delta, memory, 1.0)
        delivered += codec.decode(wire, n)
    assert torch.allclose(delivered + memory, 40 * delta, atol=1e-6)
    few = any(word in name for word in ("topk", "randk", "sparseloco", "demo", "lowrank"))  # these need more rounds
    assert float((delivered / 40 - delta).norm() / delta.norm()) < (0.7 if few else 0.15)


def test_without_feedback_nothing_is_remembered():
    """beta = 0 forgets: the second wire does not know the first."""
    codec, delta = CODECS["2bit"], gaussian(500, 1e-3, 1)
    first, memory = pack(codec, delta, None, 0.0)
    assert pack(codec, delta, memory, 0.0)[0] == first


@pytest.mark.parametrize(
    "name", ["fp32", "fp16", "bf16", "int8", "int4", "e3m0", "2bit", "2means", "sign", "topk+int8"]
)
@given(n=lengths, magnitude=magnitudes, seed=st.integers(0, 2**31))
@settings(max_examples=15)
def test_span_by_span_gives_the_same_bytes(name, n, magnitude, seed):
    """Every span comes in the same piece of memory, which is overwritten as soon as the next one is asked for.

    The wire goes where other bytes stand already, and none of them is left.
    """
    codec, x, span = codec_named(name), gaussian(n, magnitude, seed), torch.empty(min(n, SPAN))

    def used_room(size):
        return memoryview(bytearray(b"\xa5" * size))

    spans = (span[: min(SPAN, n - lo)].copy_(x[lo : lo + SPAN]) for lo in range(0, n, SPAN))
    assert codec.encode_spans(n, spans, used_room) == codec.encode(x)


@pytest.mark.parametrize("name", ["fp32", "int8", "topk:0.1"])
def test_whoever_hashes_a_wire_is_shown_all_of_it_in_order(name):
    """Three spans; in the second a value is cut, so that what is shown is no longer what was given."""
    n, shown = 2 * SPAN + 259, []
    x, codec = gaussian(n, 1.0, 3), made(name, n)
    x[SPAN + 5] = 2 * VALUE_MAX
    wire = codec.encode(x)
    showing = codec.with_hashing(lambda stretch: shown.append(bytes(memoryview(stretch))))
    assert bytes(showing.encode(x)) == b"".join(shown) == bytes(wire)
    shown.clear()
    again = showing.encode_spans(n, (x[lo : lo + SPAN] for lo in range(0, n, SPAN)))
    assert bytes(again) == b"".join(shown) == bytes(wire)
    x[-1] = float("inf")
    with pytest.raises(ValueError, match="inf"):
        showing.encode(x)


def test_fp32_travels_and_arrives_without_a_copy():
    """The wire lies where the vector lies, and cannot be written through; decoding fills memory that was there."""
    x, out = gaussian(1000, 1.0, 0), torch.empty(1000)
    wire = CODECS["fp32"].encode(x)
    assert isinstance(wire, memoryview) and wire.readonly
    assert np.frombuffer(wire, np.float32).ctypes.data == x.data_ptr()
    CODECS["fp32"].decode_into(wire, out)
    assert torch.equal(out, x)


def test_an_unknown_codec_names_those_that_exist():
    with pytest.raises(
        ValueError,
        match=r"no codec is called 'int5' .did you mean 'int8' or 'int4'..; known are fp32, fp16, bf16, int8",
    ):
        codec_named("int5")


def half(bits: int) -> float:
    """The upper half of an fp32 number."""
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


INT4_LEVELS = (0, 1, 2, 3, 4, 5, 6, 7, None, -7, -6, -5, -4, -3, -2, -1)
E3M0_LEVELS = (0, *(2.0**-e for e in range(6, -1, -1)), None, *(-(2.0**-e) for e in range(6, -1, -1)))
TWO_BIT_LEVELS = (464 / 1024, 1546 / 1024, -464 / 1024, -1546 / 1024)
PACKED = {"int4": (4, INT4_LEVELS), "e3m0": (4, E3M0_LEVELS), "2bit": (2, TWO_BIT_LEVELS), "sign": (1, (1, -1))}


def plain_decode(name: str, wire: bytes, n: int) -> list[float]:
    """The page specs/codecs.md in two dozen lines of plain Python, without torch or numpy."""
    if name == "fp16":
        return list(struct.unpack(f"<{n}e", wire))
    if name == "bf16":
        return [half(bits) for bits in struct.unpack(f"<{n}H", wire)]
    if name == "2means":
        groups = -(-n // 64)
        magnitudes = [half(bits) for bits in struct.unpack(f"<{2 * groups}H", wire[: 4 * groups])]
        codes = [wire[4 * groups + i // 4] >> 2 * (i % 4) & 3 for i in range(n)]
        return [magnitudes[i // 64 * 2 + (code & 1)] * (-1 if code & 2 else 1) for i, code in enumerate(codes)]
    blocks = -(-n // 256)
    scales = [half(bits) for bits in struct.unpack(f"<{blocks}H", wire[: 2 * blocks])]
    codes = wire[2 * blocks :]
    if name == "int8":
        return [struct.unpack("<b", codes[i : i + 1])[0] * scales[i // 256] for i in range(n)]
    bits, levels = PACKED[name]
    places = [divmod(i * bits, 8) for i in range(n)]
    return [levels[codes[byte] >> shift & 2**bits - 1] * scales[i // 256] for i, (byte, shift) in enumerate(places)]


@pytest.mark.parametrize("name", [name for name in CODECS if name != "fp32"])
def test_the_specification_alone_suffices_to_decode(name):
    """A reader of the page gets our bits; doubles show that no product needed rounding."""
    wire = CODECS[name].encode(gaussian(1003, 3.7e-4, 5))
    assert CODECS[name].decode(wire, 1003).tolist() == plain_decode(name, wire, 1003)


@every_name
def test_what_a_process_takes_for_the_usual_dtype_is_in_no_wire(name: str):
    """Loops that make their models in bfloat16 say so to all of torch: codecs work in fp32 all the same."""
    n = 1003
    x = gaussian(n, 1.0, 3)
    codec = made(name, n)
    wire = codec.encode(x)
    value_N = codec.decode(wire, n)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert bytes(codec.encode(x)) == bytes(wire)
        assert torch.equal(codec.decode(wire, n), value_N)
    finally:
        torch.set_default_dtype(torch.float32)
