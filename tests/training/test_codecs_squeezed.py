"""Compressors behind a codec: where they pay, and bytes that are not what they say."""

import tracemalloc

import cramjam
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vectors import gaussian, through

from atoll.base.errors import PeerFault
from atoll.training.codec import CODECS, SharedKnowledge, codec_named
from atoll.training.codec.byte_compression import METHODS, saves_time


@pytest.mark.parametrize("method", ["zstd:3", "zstd:5", "zstd:9", "lz4", "snappy"])
def test_a_compressor_is_used_where_it_shrinks_and_costs_a_byte_where_not(method):
    """Zeros shrink; random bits do not, and travel as they are."""
    codec = codec_named(f"fp32+{method}")
    zeros, noise = torch.zeros(100_000), gaussian(100_000)
    assert len(codec.encode(zeros)) < 20_000 and torch.equal(through(codec.name, zeros), zeros)
    fast = SharedKnowledge(link_bytes_s=1e12)
    assert codec_named(f"2bit+{method}", fast).encode(zeros) == b"\0" + CODECS["2bit"].encode(zeros)
    assert len(codec_named(f"fp16+{method}").encode(noise)) <= 200_001


def test_whether_compressing_pays_depends_on_the_link():
    """Ten per cent less at 0.5 GB/s each way: worth it on 10 MB/s, not on 1 GB/s; never when nothing is saved."""
    assert saves_time(0.9, 0.5, 0.5, 10e6)
    assert not saves_time(0.9, 0.5, 0.5, 1e9)
    assert not saves_time(1.0, 0.5, 0.5, 1e6)


@given(
    ratio=st.floats(0.01, 1),
    encode_gb_s=st.floats(0.01, 100),
    decode_gb_s=st.floats(0.01, 100),
    link_bytes_s=st.floats(1e3, 1e11),
)
def test_what_pays_on_a_link_pays_on_every_slower_one(ratio, encode_gb_s, decode_gb_s, link_bytes_s):
    """And better compression or a faster processor never make it pay less."""
    if saves_time(ratio, encode_gb_s, decode_gb_s, link_bytes_s):
        assert saves_time(ratio, encode_gb_s, decode_gb_s, link_bytes_s / 2)
        assert saves_time(ratio / 2, 2 * encode_gb_s, 2 * decode_gb_s, link_bytes_s)


def test_auto_takes_the_strongest_on_a_slow_link_and_nothing_on_a_fast_one():
    """The same vector over four links; the receiver knows none of them and reads all four wires."""
    x = gaussian(200_000) * (gaussian(200_000, seed=1) > 1.0)
    receiver, sizes, codes = codec_named("int8+auto"), [], []
    for link_bytes_s in (1e5, 5e6, 120e6, 10e9):
        wire = codec_named("int8+auto", SharedKnowledge(link_bytes_s=link_bytes_s)).encode(x)
        assert torch.equal(receiver.decode(wire, len(x)), through("int8", x))
        sizes.append(len(wire))
        codes.append(wire[0])
    assert codes[:2] == [METHODS["zstd:9"].code] * 2 and codes[2] == METHODS["lz4"].code and codes[3] == 0
    assert sizes == sorted(sizes) and sizes[0] < sizes[2] < sizes[3]


def test_a_named_compressor_is_not_another_one():
    """A wire that lz4 packed is a fault where zstd was agreed on, and fine where the sender may choose."""
    wire = codec_named("int8+lz4").encode(torch.zeros(1000))
    assert wire[0] == METHODS["lz4"].code and not codec_named("int8+auto").decode(wire, 1000).any()
    with pytest.raises(PeerFault, match="not a wire of 1000 values"):
        codec_named("int8+zstd").decode(wire, 1000)


def test_a_link_that_carries_nothing_is_refused():
    with pytest.raises(ValueError, match="link_bytes_s is 0"):
        codec_named("int8+auto", SharedKnowledge(link_bytes_s=0.0))


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
