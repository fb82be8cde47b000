"""One story per codec: what makes it that codec, and what a stranger may try with it."""

import tracemalloc
from fractions import Fraction

import cramjam
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import PeerFault
from atoll.learn.codec import CODECS, Known, chain, codec_named
from atoll.learn.codec.blocks import BLOCK, SPAN
from atoll.learn.codec.changed import PAGE
from atoll.learn.codec.dct import SIDE, SQUARE, VALUE_BITS, WAVE_BITS, WAVE_KI
from atoll.learn.codec.places import GAPS, PLACES, encode_places, places_bytes
from atoll.learn.codec.squeeze import METHODS, pays
from atoll.learn.codec.top_k import CHUNK


def gaussian(n: int, magnitude: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * magnitude


def through(name: str, x: torch.Tensor, known: Known | None = None) -> torch.Tensor:
    codec = codec_named(name, known or Known())
    return codec.decode(codec.encode(x), len(x))


def relative_error(name: str, x: torch.Tensor) -> float:
    return float((through(name, x) - x).norm() / x.norm())


# --- one value, few bits ---


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
    with pytest.raises(PeerFault, match="a code means nothing"):
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


# --- which values ---


@given(n=st.integers(1, 9000), share=st.floats(0.01, 1), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_topk_keeps_the_largest_of_every_chunk(n, share, seed):
    """Against a plain sort, chunk by chunk; everything else is zero."""
    ratio = max(Fraction(1, 256), Fraction(round(share * 1000), 1000))
    x = gaussian(n, 1.0, seed)
    decoded = through(f"topk:{ratio}+fp32", x)
    per_chunk = round(ratio * CHUNK)
    for lo in range(0, n, CHUNK):
        chunk = x[lo : lo + CHUNK]
        k = -(-len(chunk) * per_chunk // CHUNK)
        kept = decoded[lo : lo + CHUNK] != 0
        border = float(chunk.abs().sort(descending=True).values[k - 1])
        assert torch.equal(kept, chunk.abs() >= border)
        assert torch.equal(decoded[lo : lo + CHUNK], torch.where(kept, chunk, 0.0))


def test_topk_gives_ties_to_the_earlier_value():
    """Otherwise owners with other processors would keep others; and never more than were agreed."""
    x = torch.ones(2 * CHUNK)
    x[100:4096:2] = -2.0
    decoded = through("topk:64/4096+fp32", x)
    assert decoded.nonzero()[:, 0].tolist() == [*range(100, 228, 2), *range(4096, 4160)]


both_forms = pytest.mark.parametrize("form", [PLACES, GAPS], ids=["places", "gaps"])


@both_forms
@given(n=st.integers(1, 3000), share=st.floats(0, 1), seed=st.integers(0, 99))
@settings(max_examples=80)
def test_places_take_the_announced_bytes_and_come_back(form, n, share, seed):
    m = max(1, int(share * n))
    place_M = np.sort(np.random.default_rng(seed).permutation(n)[:m])
    data = form.encode(place_M, n)
    assert len(data) == form.most_bytes(n, m) if form.fixed else len(data) <= form.most_bytes(n, m)
    assert np.array_equal(form.decode(data, n, m), place_M)


@pytest.mark.parametrize("place_M", [[0], [2999], [0, 2999], [*range(2990, 3000)], [*range(10)]])
def test_gaps_stay_within_their_announced_bytes_wherever_the_places_are(place_M):
    """All at the end, all at the beginning, as far apart as can be: what is rounded off never adds up to more."""
    data = GAPS.encode(np.array(place_M), 3000)
    assert len(data) <= GAPS.most_bytes(3000, len(place_M))
    assert GAPS.decode(data, 3000, len(place_M)).tolist() == place_M


@both_forms
@given(data=st.data(), n=st.integers(1, 200), m=st.integers(1, 40))
@settings(max_examples=300)
def test_places_have_one_spelling(form, data, n, m):
    """Whatever bytes are accepted, encoding what they mean gives the same bytes."""
    m = min(n, m)
    wire = bytearray(form.encode(np.arange(m) * (n // m), n))
    for _ in range(data.draw(st.integers(0, 3))):
        wire[data.draw(st.integers(0, len(wire) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    change = 0 if form.fixed else data.draw(st.integers(-2, 2))
    wire = wire[:change] if change < 0 else wire + bytes(change)
    try:
        place_M = form.decode(bytes(wire), n, m)
    except PeerFault:
        return
    assert form.encode(place_M, n) == wire and bool((np.diff(place_M) > 0).all()) and 0 <= place_M[-1] < n


def plain_gaps(data: bytes, n: int, m: int) -> list[int]:
    """Gaps as specs/codecs.md says, in plain Python."""
    low = min(8, max(0, (98 * n // (100 * m)).bit_length() - 1))
    cut = -(-m * low // 8)
    lows, unary = int.from_bytes(data[:cut], "little"), int.from_bytes(data[cut:], "little")
    places, before, bit = [], -1, 0
    for j in range(m):
        high = 0
        while not unary >> bit & 1:
            high, bit = high + 1, bit + 1
        bit += 1
        before += (high << low | lows >> j * low & (1 << low) - 1) + 1
        places.append(before)
    return places


@given(n=st.integers(1, 900), share=st.floats(0, 1), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_the_specification_alone_suffices_to_read_gaps(n, share, seed):
    m = max(1, int(share * n))
    place_M = np.sort(np.random.default_rng(seed).permutation(n)[:m])
    assert plain_gaps(GAPS.encode(place_M, n), n, m) == place_M.tolist()


def test_rice_takes_half_a_bit_off_every_place():
    """Of random places, at SparseLoCo's share and at a tenth; the values come back as with `topk`."""
    x = gaussian(4096 * 64)
    for ratio, saved in (("64/4096", 0.4), ("0.1", 0.4)):
        plain, rice = codec_named(f"topk:{ratio}+int8"), codec_named(f"topk-rice:{ratio}+int8")
        kept = len(x) * Fraction(ratio)
        assert 8 * (len(plain.encode(x)) - len(rice.encode(x))) / kept > saved
        assert torch.equal(rice.decode(rice.encode(x), len(x)), plain.decode(plain.encode(x), len(x)))
    with pytest.raises(ValueError, match="nobody could tell where places end"):
        codec_named("topk-rice+sparse+int8")


def plain_places(data: bytes, n: int, m: int) -> list[int]:
    """Places as specs/codecs.md says, in plain Python."""
    low = min(8, (n // m).bit_length() - 1)
    cut = -(-m * low // 8)
    lows, unary = int.from_bytes(data[:cut], "little"), int.from_bytes(data[cut:], "little")
    ones = [bit for bit in range(8 * len(data)) if unary >> bit & 1]
    return [(one - j << low) + (lows >> j * low & (1 << low) - 1) for j, one in enumerate(ones)]


def test_the_specification_alone_suffices_to_find_the_values_of_a_sparse_wire():
    """A reader of the page puts the fp32 values of `topk` where we put them."""
    n, x = 5000, gaussian(5000)
    wire = codec_named("topk:0.1+fp32").encode(x)
    kept = 410 + -(-904 * 410 // 4096)
    cut, expected = len(wire) - 4 * kept, torch.zeros(n)
    for place, value in zip(plain_places(wire[:cut], n, kept), np.frombuffer(wire[cut:], np.float32), strict=True):
        expected[place] = float(value)
    assert torch.equal(codec_named("topk:0.1+fp32").decode(wire, n), expected)


def test_places_of_sparseloco_cost_eight_bits():
    assert 8 * places_bytes(4096 * 64, 64 * 64) / 4096 == pytest.approx(8.0, abs=0.01)


def test_a_chunk_with_too_many_values_is_a_fault():
    """The right number in all, but chunk 0 has one of chunk 1's."""
    codec, n = codec_named("topk:64/4096+fp32"), 2 * CHUNK
    place_M = np.concatenate([np.arange(65), 4096 + np.arange(63)])
    wire = encode_places(place_M, n) + bytes(4 * 128)
    with pytest.raises(PeerFault, match="a chunk holds more or less than 64"):
        codec.decode(wire, n)


@both_forms
def test_a_value_of_the_last_shorter_chunk_may_not_stand_in_the_one_before(form):
    """100 values behind a whole chunk keep 2; here one of the two is in the whole chunk, which then holds 65."""
    name, n = ("topk" if form is PLACES else "topk-rice") + ":64/4096+fp32", CHUNK + 100
    codec, values = codec_named(name), bytes(4 * 66)
    honest = np.array([*range(64), CHUNK, CHUNK + 99])
    codec.decode(form.encode(honest, n) + values, n)
    honest[64] = CHUNK - 1
    with pytest.raises(PeerFault, match="a chunk holds more or less than 64"):
        codec.decode(form.encode(honest, n) + values, n)


def test_randk_draws_the_same_places_for_one_seed_and_others_for_the_next():
    """Ten values of a hundred, one of each stretch of ten; over many rounds every value gets its turn."""
    x, turns = torch.ones(100), torch.zeros(100)
    for round_index in range(400):
        known = Known(seed=b"round %d" % round_index)
        first = through("randk:0.1+fp32", x, known)
        assert torch.equal(first, through("randk:0.1+fp32", x, known))
        assert first.view(10, 10).sum(1).tolist() == [1.0] * 10
        turns += first
    assert float(turns.min()) >= 15 and float(turns.max()) <= 75  # 40 expected, 6 the standard deviation


def test_randk_without_a_seed_is_refused():
    """With a constant mask nine tenths of the model would never be trained."""
    with pytest.raises(ValueError, match="a seed that all members know"):
        codec_named("randk:0.1+int8")


def test_sparse_costs_what_is_there():
    """Two values among a hundred thousand: a bit per 64 values, two words, and the values."""
    x = torch.zeros(100_000)
    x[5], x[70_000] = 1.5, -2.5
    codec = codec_named("sparse+fp32")
    wire = codec.encode(x)
    assert len(wire) == 196 + 2 * 8 + 2 * 4
    assert torch.equal(codec.decode(wire, len(x)), x)
    dense = gaussian(1000)
    assert len(codec.encode(dense)) == codec.wire_bytes(1000) and torch.equal(through("sparse+fp32", dense), dense)


def test_a_sparse_mask_has_one_spelling():
    """Empty words, words that are not there and values behind the end are faults."""
    codec = codec_named("sparse+fp32")
    value = np.float32(1).tobytes()
    good = bytes([1]) + (1 << 3).to_bytes(8, "little") + value
    assert codec.decode(good, 70)[3] == 1.0
    for bad in (
        bytes([1]) + bytes(8),  # an empty word
        bytes([4]) + (1).to_bytes(8, "little") + value,  # word 2 of 2
        bytes([2]) + (1 << 6).to_bytes(8, "little") + value,  # value 70 of 70
        bytes([3]) + (1).to_bytes(8, "little") + value,  # two words promised
        good + value,  # a value too many
    ):
        with pytest.raises(PeerFault):
            codec.decode(bad, 70)


@pytest.mark.parametrize("name", ["sparse+int8", "topk:1+int8", "topk-rice:1+int8", "randk:1+int8"])
def test_the_densest_sparse_wire_takes_bounded_room(name):
    """Nothing is left out, as a stranger may choose: 8 bytes per agreed value stay, 36 while it is opened."""
    n = SPAN
    codec = codec_named(name, Known(seed=b"dense"))
    wire = codec.encode(gaussian(n))
    tracemalloc.start()  # counts what numpy holds: the places; the values are 4 bytes each
    opened = codec.open_wire(wire, n)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert opened.place_M.nbytes + opened.value_M.nbytes <= 12 * n and held < 9 * n and peak < 36 * n


@pytest.mark.parametrize("name", ["sparse+int8", "topk:1+int8", "randk:1+int8"])
def test_reading_one_span_of_a_sparse_wire_does_not_touch_the_other_spans(name):
    """Sixteen dense spans are open; reading the last takes room for one, or a part would cost its square."""
    n, out = 16 * SPAN, torch.empty(SPAN)
    codec = codec_named(name, Known(seed=b"dense"))
    opened = codec.open_wire(codec.encode(gaussian(n)), n)
    codec.decode_span(opened, 0, out)
    tracemalloc.start()
    codec.decode_span(opened, n - SPAN, out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * SPAN and bool(out.any())


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
    error = (through("delta+int8", x, Known(reference_N=reference)) - x).norm()
    assert float(error) < float((through("int8", x) - x).norm()) / 50


def test_a_difference_from_something_else_is_a_fault():
    """One value of the reference differs in its last bit."""
    reference = gaussian(5000)
    wire = codec_named("delta+int8", Known(reference_N=reference)).encode(gaussian(5000, 1.0, 1))
    other = reference.clone()
    other[4999] = torch.nextafter(other[4999], torch.tensor(9.0))
    with pytest.raises(PeerFault, match="a vector that we do not hold"):
        codec_named("delta+int8", Known(reference_N=other)).decode(wire, 5000)
    with pytest.raises(ValueError, match="delta needs the vector"):
        codec_named("delta+int8")
    with pytest.raises(ValueError, match="from a reference of 5000"):
        codec_named("delta+int8", Known(reference_N=other)).decode(wire, 4000)


def test_changed_sends_tensors_whose_norm_is_above_a_millionth():
    """Four tensors: one changed, one just below, one just above though no value of it is, one still."""
    sizes = (300, 100, 100, SPAN)
    x = torch.cat([gaussian(300), torch.full((100,), 0.99e-7), torch.full((100,), 1.01e-7), torch.zeros(SPAN)])
    codec = codec_named("changed+fp32", Known(sizes=sizes))
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
        codec = codec_named(f"{stage}+fp32", Known(sizes=sizes))
        assert codec.encode(x)[0] == flags, stage
        assert codec_named(codec.name, Known(sizes=sizes)).encode(x) == codec.encode(x)
    assert codec_named("changed:1e-6").name == codec_named("changed").name == "changed+bf16"


def test_changed_without_sizes_looks_at_pages():
    x = torch.zeros(SPAN + 3 * PAGE + 5)
    x[PAGE], x[-1] = 1.0, 2.0
    wire = codec_named("changed+fp32").encode(x)
    assert len(wire) == -(-68 // 8) + 4 * (PAGE + 5)
    assert torch.equal(through("changed+fp32", x), x)
    with pytest.raises(ValueError, match="in a vector of"):
        codec_named("changed+fp32", Known(sizes=(1, 2))).encode(x)
    with pytest.raises(PeerFault, match="unused bits"):
        codec_named("changed+fp32").decode(bytes([2]), 10)


# --- factors ---


def matrix(rows: int, columns: int, rank: int, seed: int = 0) -> torch.Tensor:
    """A random matrix of this rank, as the vector that it travels as."""
    return (
        gaussian(rows * rank, seed=seed).view(rows, rank) @ gaussian(rank * columns, seed=seed + 1).view(rank, -1)
    ).view(-1)


def in_shapes(*shapes: tuple[int, int], near: torch.Tensor | None = None) -> Known:
    return Known(shapes=shapes, reference_N=near)


@given(rows=st.integers(20, 90), columns=st.integers(20, 90), rank=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_a_matrix_of_low_rank_comes_back_from_its_factors(rows, columns, rank, seed):
    x = matrix(rows, columns, rank, seed)
    decoded = through("lowrank:4+fp32", x, in_shapes((rows, columns)))
    assert float((decoded - x).norm()) <= 1e-4 * float(x.norm())


def test_factors_cost_what_they_hold_and_vectors_travel_as_they_are():
    """A 300 x 200 matrix at rank 4 between two vectors, and a matrix too small to gain: 2000 values and 150."""
    shapes = ((1, 50), (300, 200), (1, 70), (5, 6))
    n = sum(rows * columns for rows, columns in shapes)
    x = torch.cat([gaussian(50), matrix(300, 200, 2), gaussian(70), gaussian(30)])
    codec = codec_named("lowrank:4+fp32", in_shapes(*shapes))
    assert codec.wire_bytes(n) == 4 * (50 + 4 * 500 + 70 + 30) == len(codec.encode(x))
    decoded = codec.decode(codec.encode(x), n)
    assert torch.equal(decoded[:50], x[:50]) and torch.equal(decoded[-100:], x[-100:])
    with pytest.raises(ValueError, match="in a vector of 10"):
        codec.encode(torch.zeros(10))


def test_factors_are_nearly_the_best_there_are():
    """Eckart and Young 1936: no matrix of that rank is closer than the largest singular values make it."""
    x = matrix(120, 100, 30) + 0.3 * gaussian(12_000, seed=9)
    values = torch.linalg.svdvals(x.view(120, 100))
    best = float(values[8:].norm())
    error = float((through("lowrank:8+fp32", x, in_shapes((120, 100))) - x).norm())
    assert best * (1 - 1e-5) <= error < 1.1 * best


def test_a_start_from_what_was_expected_finds_directions_that_a_single_pass_would_not():
    """The paper's warm start: the reference holds the right rows, the update is noise around them."""
    signal = matrix(200, 150, 4)
    x = signal * 0.2 + gaussian(30_000, seed=5) * 0.3
    known = in_shapes((200, 150), near=signal)
    best = float(torch.linalg.svdvals(x.view(200, 150))[4:].norm())
    assert float((through("lowrank:4+fp32", x, known) - x).norm()) < 1.01 * best


@given(seed=st.integers(0, 99), rows=st.integers(3, 50), columns=st.integers(3, 3000), rank=st.integers(1, 5))
@settings(max_examples=30)
def test_factors_multiply_in_plain_order(seed, rows, columns, rank):
    """numpy, one rank after another, rounding each product and each sum: the same bits, across spans of any cut."""
    x = gaussian(rows * columns, 1e-3, seed)
    codec = codec_named(f"lowrank:{rank}+fp32", in_shapes((rows, columns)))
    wire = codec.encode(x)
    if len(wire) == 4 * len(x):
        assert torch.equal(codec.decode(wire, len(x)), x)  # factors would not have been smaller
        return
    factors = np.frombuffer(wire, np.float32)
    p, q = factors[: rank * rows].reshape(rank, rows), factors[rank * rows :].reshape(rank, columns)
    expected = np.multiply.outer(p[0], q[0])
    for k in range(1, rank):
        expected = expected + np.multiply.outer(p[k], q[k])
    assert np.array_equal(codec.decode(wire, len(x)).numpy(), expected.reshape(-1))


def test_a_strangers_factors_cannot_overflow():
    """Every factor at its ceiling is a large finite vector; one beyond it is a fault."""
    shapes, n = in_shapes((64, 64)), 4096
    codec = codec_named("lowrank:8+fp32", shapes)
    count = codec.wire_bytes(n) // 4
    most = codec.decode(CODECS["fp32"].encode(torch.full((count,), 2.0**40)), n)
    assert bool((most == 2.0**60).all())
    with pytest.raises(PeerFault, match="a factor of the matrix at 0 is too large"):
        codec.decode(CODECS["fp32"].encode(torch.full((count,), 2.0**41)), n)


def test_factors_are_no_answer_to_compare():
    """Products of matrices differ between processors, so two owners need not find the same ones."""
    assert not codec_named("lowrank:2+int8", in_shapes((64, 64))).same_everywhere
    with pytest.raises(ValueError, match="lowrank needs the matrices"):
        codec_named("lowrank:2+int8")


# --- compressors ---


@pytest.mark.parametrize("method", ["zstd:3", "zstd:5", "zstd:9", "lz4", "snappy"])
def test_a_compressor_is_used_where_it_shrinks_and_costs_a_byte_where_not(method):
    """Zeros shrink; random bits do not, and travel as they are."""
    codec = codec_named(f"fp32+{method}")
    zeros, noise = torch.zeros(100_000), gaussian(100_000)
    assert len(codec.encode(zeros)) < 20_000 and torch.equal(through(codec.name, zeros), zeros)
    fast = Known(link_bytes_s=1e12)
    assert codec_named(f"2bit+{method}", fast).encode(zeros) == b"\0" + CODECS["2bit"].encode(zeros)
    assert len(codec_named(f"fp16+{method}").encode(noise)) <= 200_001


def test_whether_compressing_pays_depends_on_the_link():
    """Ten per cent less at 0.5 GB/s each way: worth it on 10 MB/s, not on 1 GB/s; never when nothing is saved."""
    assert pays(0.9, 0.5, 0.5, 10e6)
    assert not pays(0.9, 0.5, 0.5, 1e9)
    assert not pays(1.0, 0.5, 0.5, 1e6)


@given(
    ratio=st.floats(0.01, 1),
    encode_gb_s=st.floats(0.01, 100),
    decode_gb_s=st.floats(0.01, 100),
    link_bytes_s=st.floats(1e3, 1e11),
)
def test_what_pays_on_a_link_pays_on_every_slower_one(ratio, encode_gb_s, decode_gb_s, link_bytes_s):
    """And better compression or a faster processor never make it pay less."""
    if pays(ratio, encode_gb_s, decode_gb_s, link_bytes_s):
        assert pays(ratio, encode_gb_s, decode_gb_s, link_bytes_s / 2)
        assert pays(ratio / 2, 2 * encode_gb_s, 2 * decode_gb_s, link_bytes_s)


def test_auto_takes_the_strongest_on_a_slow_link_and_nothing_on_a_fast_one():
    """The same vector over four links; the receiver knows none of them and reads all four wires."""
    x = gaussian(200_000) * (gaussian(200_000, seed=1) > 1.0)
    receiver, sizes, codes = codec_named("int8+auto"), [], []
    for link_bytes_s in (1e5, 5e6, 120e6, 10e9):
        wire = codec_named("int8+auto", Known(link_bytes_s=link_bytes_s)).encode(x)
        assert torch.equal(receiver.decode(wire, len(x)), through("int8", x))
        sizes.append(len(wire))
        codes.append(wire[0])
    assert codes[:2] == [METHODS["zstd:9"].code] * 2 and codes[2] == METHODS["lz4"].code and codes[3] == 0
    assert sizes == sorted(sizes) and sizes[0] < sizes[2] < sizes[3]


def test_a_named_compressor_is_not_another_one():
    """A wire that lz4 packed is a fault where zstd was agreed on, and fine where the sender may choose."""
    wire = codec_named("int8+lz4").encode(torch.zeros(1000))
    assert wire[0] == METHODS["lz4"].code and not codec_named("int8+auto").decode(wire, 1000).any()
    with pytest.raises(PeerFault, match="no wire of 1000 values"):
        codec_named("int8+zstd").decode(wire, 1000)


def test_a_link_that_carries_nothing_is_refused():
    with pytest.raises(ValueError, match="a link carries 0"):
        codec_named("int8+auto", Known(link_bytes_s=0.0))


@pytest.mark.parametrize("method", ["zstd:3", "lz4", "snappy"])
def test_a_bomb_is_a_fault_before_it_goes_off(method):
    """64 MiB of zeros, packed, honest and lying about their size: no room is made for them."""
    bomb = {
        "zstd:3": lambda data: cramjam.zstd.compress(data, 3),
        "lz4": lambda data: cramjam.lz4.compress_block(data, store_size=False),
        "snappy": cramjam.snappy.compress_raw,
    }[method](bytes(64 << 20))
    codecs, n = (codec_named(f"int8+{method}"), codec_named("int8+auto")), 1000
    most = CODECS["int8"].wire_bytes(n)
    tracemalloc.start()
    for declared in (0, most - 1, most, most + 1, 64 << 20, 2**32 - 1):
        wire = bytes([METHODS[method].code]) + declared.to_bytes(4, "little") + bytes(bomb)
        for tried in (wire, wire[: most - 100]):
            for codec in codecs:
                with pytest.raises(PeerFault):
                    codec.decode(tried, n)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * len(bytes(bomb)) + (1 << 20)  # copies made here


@pytest.mark.parametrize("method", ["zstd:3", "lz4", "snappy"])
def test_compressed_bytes_that_hold_less_than_promised_are_a_fault(method):
    codec, short = codec_named(f"int8+{method}"), codec_named(f"int8+{method}").encode(torch.zeros(900))
    inner = CODECS["int8"].wire_bytes(1000)
    with pytest.raises(PeerFault, match="compressed bytes"):
        codec.decode(short[:1] + inner.to_bytes(4, "little") + short[5:], 1000)


def test_a_compressed_wire_is_no_answer_to_compare():
    """Libraries differ in what they write: owners of one part could not be told from liars."""
    assert not codec_named("int8+zstd").same_everywhere and not codec_named("int8+lz4").fixed
    assert codec_named("demo").same_everywhere and codec_named("sparseloco").fixed


# --- names ---


def test_a_chain_is_named_by_its_parts():
    assert chain("topk:0.1", "int8", "zstd:3") == "topk:0.1+int8+zstd:3"
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
        ("int8+topk", "int8 stands in the wrong place"),
        ("zstd:3+int8", "zstd:3 stands in the wrong place"),
        ("int8+zstd:22", "no codec is called 'zstd:22'"),
        ("dct:0.5+int8", "no codec is called 'dct:0.5'"),
        ("topk:0+int8", "keeps no share between 1/256 and 1"),
        ("topk:2/1+int8", "keeps no share between 1/256 and 1"),
        ("topk:1e-9999999+int8", "keeps no share between 1/256 and 1"),
        ("topk:1/0+int8", "keeps no share between 1/256 and 1"),
        ("changed:2+int8", "names no norm between 0 and 1, such as changed:1e-5"),
        ("changed:1e-999+int8", "names no norm between 0 and 1"),
        ("changed:nan+int8", "names no norm between 0 and 1"),
        ("changed:+int8", "names no norm between 0 and 1"),
        ("+".join(["topk:1"] * 9), "chains more than 6"),
    ],
)
def test_a_name_that_makes_no_sense_is_refused_in_words(name, complaint):
    with pytest.raises(ValueError, match=complaint):
        codec_named(name)
