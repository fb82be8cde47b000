"""Codecs that send some of the values: which, how their places are told, and what a stranger may try with them."""

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vectors import gaussian, through

from atoll.base.errors import PeerFault
from atoll.training.codec import SharedKnowledge, codec_named
from atoll.training.codec.blocks import SPAN
from atoll.training.codec.index_coding import GAPS, PLACES, encode_places, places_bytes
from atoll.training.codec.top_k import CHUNK


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
    with pytest.raises(ValueError, match="a value codec of fixed length"):
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
        known = SharedKnowledge(seed=b"round %d" % round_index)
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
    codec = codec_named(name, SharedKnowledge(seed=b"dense"))
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
    codec = codec_named(name, SharedKnowledge(seed=b"dense"))
    opened = codec.open_wire(codec.encode(gaussian(n)), n)
    codec.decode_span(opened, 0, out)
    tracemalloc.start()
    codec.decode_span(opened, n - SPAN, out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * SPAN and bool(out.any())
