"""Codecs on a GPU are the codecs of the CPU, bit for bit: their forms here, on tensors of the CPU, and there.

The same operations of torch run in both cases; that a GPU rounds them alike is what the last tests look at, where
there is one.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vectors import lengths, vectors

from atoll.base.errors import PeerFault
from atoll.training.codec import CODECS, codec_named, pack
from atoll.training.codec.blocks import SPAN
from atoll.training.codec.compiled import device, native

every_form = pytest.mark.parametrize("name", device.FORMS)


@pytest.fixture(autouse=True)
def pages_of_the_host(monkeypatch: pytest.MonkeyPatch):
    """Without a GPU there is no device to pin memory for, and wires are made by torch alone."""
    monkeypatch.setattr(native, "kernels", None)
    if not torch.cuda.is_available():
        monkeypatch.setattr(device, "pinned", lambda size, dtype: torch.empty(size, dtype=dtype))


def bits(x: torch.Tensor) -> bytes:
    return x.numpy().tobytes()


@every_form
@given(x=vectors())
@settings(max_examples=80)
def test_a_form_makes_the_bytes_of_its_codec_or_refuses_the_same_vectors(name: str, x: torch.Tensor):
    codec = codec_named(name)
    try:
        wire = bytes(codec.encode(x))
    except ValueError:
        with pytest.raises(ValueError, match="training diverged"):
            device._made(device.FORMS[name], x)
        return
    assert bytes(device._made(device.FORMS[name], x)) == wire


@every_form
@given(n=lengths, seed=st.integers(0, 2**32), scale=st.sampled_from([None, 0x3F80, 0x1780, 0x5A00, 0]))
@settings(max_examples=60)
def test_a_form_reads_any_codes_as_its_codec_does_or_finds_the_same_fault(name: str, n, seed, scale):
    """Wires of a stranger: random codes under random scales and under the least and largest ones."""
    codec = codec_named(name)
    wire = bytearray(np.random.default_rng(seed).bytes(codec.wire_bytes(n)))
    if scale is not None:
        wire[: 2 * -(-n // 256)] = scale.to_bytes(2, "little") * -(-n // 256)

    def read(decode: Callable[[torch.Tensor], None]) -> bytes | str:
        out_N = torch.empty(n)
        try:
            decode(out_N)
        except PeerFault as fault:
            return fault.what
        return bits(out_N)

    by_form = read(lambda out_N: device._read(codec, device.FORMS[name], wire, out_N))
    assert by_form == read(lambda out_N: codec.decode_into(wire, out_N))


@every_form
def test_the_sample_by_which_devices_are_judged_tells_roundings_apart(name: str, monkeypatch: pytest.MonkeyPatch):
    """It is judged alike by its own form, and otherwise by one that divides by way of the inverse, as a GPU does by
    numbers. Two codecs take means before they round, so there it makes no difference; others do not divide."""
    x_N, codec = device.sample(), codec_named(name)
    assert len(x_N) % 256 and bool((x_N == 0).any())
    assert device._reproduces_cpu(codec, device.FORMS[name], x_N)
    divided = torch.div

    def by_inverse(x, y, out=None):  # with `out` it is the CPU's own
        return x * divided(torch.ones_like(y), y) if out is None else divided(x, y, out=out)

    monkeypatch.setattr(torch, "div", by_inverse)
    assert device._reproduces_cpu(codec, device.FORMS[name], x_N) == (name not in ("int8", "int4", "e3m0"))


def test_codecs_without_a_form_are_as_they_were():
    assert {name for name, codec in CODECS.items() if codec.on_devices} == set(device.FORMS)
    assert not codec_named("topk:0.1+int8").on_devices and not codec_named("int8+lz4").on_devices


@every_form
def test_error_feedback_there_is_that_of_the_cpu(name: str):
    torch.manual_seed(0)
    codec, x_N, owed_N = codec_named(name), torch.randn(3 * SPAN // 2), torch.randn(3 * SPAN // 2) / 8
    wire, left_N = pack(codec, x_N, owed_N, 1.0)
    left_there_N = torch.empty_like(x_N)
    assert bytes(device.pack_on_device(codec, x_N, owed_N, left_there_N)) == bytes(wire)
    assert bits(left_there_N) == bits(left_N)


# ---- where there is a GPU ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_form
@given(x=vectors())
@settings(max_examples=200, deadline=None)
def test_a_gpu_makes_the_same_bytes(name: str, x: torch.Tensor):
    codec = codec_named(name)
    assert device.is_supported_on(codec, x.cuda())
    try:
        wire = bytes(codec.encode(x))
    except ValueError:
        with pytest.raises(ValueError, match="training diverged"):
            codec.encode(x.cuda())
        return
    assert bytes(codec.encode(x.cuda())) == wire
    there_N = torch.empty(len(x), device="cuda")
    codec.decode_into(wire, there_N)
    assert bits(there_N.cpu()) == bits(codec.decode(wire, len(x)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CODECS, "topk:0.1+int8", "dct+int8", "2bit+zstd:3"])
def test_a_gpu_gets_the_same_bits_of_large_vectors_by_every_codec(name: str):
    torch.manual_seed(0)
    codec, x_N = codec_named(name), torch.randn(5 * SPAN + 77)
    wire, there_N = bytes(codec.encode(x_N)), torch.empty(len(x_N), device="cuda")
    assert bytes(codec.encode(x_N.cuda())) == wire
    codec.decode_into(wire, there_N)
    assert bits(there_N.cpu()) == bits(codec.decode(wire, len(x_N)))
