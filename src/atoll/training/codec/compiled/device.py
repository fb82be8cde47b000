"""Codecs on a GPU: vectors are encoded and decoded on the device; only wires cross to the host.

    on_devices(codec)   the codec with `encode` and `decode_into` for vectors on any device, if it has a form
    works_on            whether they do for this one

Codecs without a form work on the CPU: fp32 (its wire is as long as the vector) and all that select indices,
transform vectors or compress. `encode` takes a copy to the host. Received wires are validated on the CPU. All work
is in the current stream of the device; `encode` waits for it, `decode_into` does not.
Invariants:
- Bytes and values are those of the CPU (specs/codecs.md). Forms use only operations with one result in IEEE 754 or
  in integers: quotients of two tensors (a quotient by a number is a product with its inverse on a GPU), maxima,
  sums of integers below 2^24, roots in fp64 of values that fit fp32, bits. Each operation is one kernel, so nothing
  is fused. No decoded value and no scale is a denormal number.
- Before a device is used, it must reproduce the bytes and values of a sample. Otherwise the work stays on the CPU,
  and the log has a line about it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.crypto.digest import Buffer
from atoll.training.codec import e3m0, int4, int8, sign, two_bit
from atoll.training.codec.blocks import (
    BLOCK,
    SCALE_MAX_BITS,
    SCALE_MIN_BITS,
    VALUE_MAX,
    OpenedBlocks,
    as_blocks,
    refuse,
    times_scales,
)
from atoll.training.codec.core import Codec
from atoll.training.codec.half_precision import FP16_MAX, LEAST_BITS
from atoll.training.codec.packed import level_table, mean_of, pack_codes, to_grid

log = logging.getLogger(__name__)
SAMPLE_BLOCKS = 143  # from 2^-90, which becomes zero, to 2^60
_agreed: dict[tuple[str, torch.device], bool] = {}  # whether this device reproduces this codec's CPU results


class DeviceCodes(NamedTuple):
    largest: Tensor  # (), the input of `refuse`
    scales_B: Tensor  # (B,) 16 bits each; empty if a codec has none
    codes_Q: Tensor


class DeviceCodec(NamedTuple):
    """A codec as operations on whole vectors, on any device."""

    encode: Callable[[Tensor], DeviceCodes]
    decode: Callable[[OpenedBlocks, Tensor], None]


def on_devices(codec: Codec) -> Codec:
    form = FORMS.get(codec.name)
    if form is None:
        return codec
    encode, decodes = partial(_encode, codec, form), partial(_decode, codec, form)
    return replace(codec, encode=encode, decode_whole=decodes, on_devices=True)


def is_supported_on(codec: Codec, like: Tensor) -> bool:
    """Whether this codec works on the tensor's device, and that is a GPU. The first call tests it there."""
    form = FORMS.get(codec.name)
    if form is None or not like.is_cuda:
        return False
    key = codec.name, like.device
    if key not in _agreed:
        _agreed[key] = _reproduces_cpu(codec, form, like)
        if not _agreed[key]:
            log.warning("%s works on the CPU: %s computes different bits", codec.name, like.device)
    return _agreed[key]


def pack_on_device(codec: Codec, x_N: Tensor, owed_N: Tensor, left_N: Tensor) -> Buffer:
    """`pack` (beta = 1) on the device of all three vectors; the encoding error is written into `left_N`."""
    wire = codec.encode(torch.add(x_N, owed_N, out=left_N))
    decoded_N = torch.empty_like(left_N)
    codec.decode_into(wire, decoded_N)
    left_N.sub_(decoded_N)
    return wire


def pinned(size: int, dtype: torch.dtype) -> Tensor:
    """(size,) of pinned host memory, for asynchronous copies.

    torch keeps such memory for the next request of the same size, rounded up to a power of two. It does not reuse
    memory while an asynchronous copy is in progress (ATen/core/CachingHostAllocator.h), so every call requests it
    anew. `torch.accelerator.empty_host_cache` releases it.
    """
    return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)


def _encode(codec: Codec, form: DeviceCodec, x: Tensor) -> Buffer:
    return _made(form, x) if is_supported_on(codec, x) else codec.encode(x)


def _decode(codec: Codec, form: DeviceCodec, wire: Buffer, out_N: Tensor) -> None:
    if is_supported_on(codec, out_N):
        _read(codec, form, wire, out_N)
    elif out_N.is_cuda:
        out_N.copy_(codec.decode(wire, len(out_N)))
    else:
        codec.decode_into(wire, out_N)


def _made(form: DeviceCodec, x_N: Tensor) -> Buffer:
    if x_N.dim() != 1 or x_N.dtype != torch.float32:
        raise ValueError(f"codecs take one fp32 vector, got {x_N.dtype} of shape {tuple(x_N.shape)}")
    if len(x_N) == 0:
        return b""
    coded, at = form.encode(x_N.detach().contiguous()), 0
    halves = coded.scales_B, coded.codes_Q
    wire = pinned(sum(half.numel() * half.element_size() for half in halves), torch.uint8)
    for half in halves:
        end = at + half.numel() * half.element_size()
        wire[at:end].view(half.dtype).copy_(half, non_blocking=True)
        at = end
    refuse(float(coded.largest))  # waits for the stream, so for both halves too
    return wire.numpy().data.toreadonly()


def _read(codec: Codec, form: DeviceCodec, wire: Buffer, out_N: Tensor) -> None:
    opened = codec.open_wire(wire, len(out_N))
    if len(out_N):
        form.decode(OpenedBlocks(*(_sent(half, out_N) for half in opened)), out_N)


def _sent(half: Tensor, like: Tensor) -> Tensor:
    """Copy through pinned memory, so the host does not wait for the device."""
    lent = pinned(half.numel(), half.dtype).copy_(half)
    return like.new_empty(half.numel(), dtype=half.dtype).copy_(lent, non_blocking=True)


def _reproduces_cpu(codec: Codec, form: DeviceCodec, like: Tensor) -> bool:
    x_N = sample()
    x_there_N, out_N = (like.new_empty(len(x_N), dtype=torch.float32) for _ in range(2))
    x_there_N.copy_(x_N)
    wire = codec.encode(x_N)
    _read(codec, form, wire, out_N)
    back_N = torch.empty_like(x_N).copy_(out_N)
    same_values = torch.equal(back_N.view(torch.int32), codec.decode(wire, len(x_N)).view(torch.int32))
    return same_values and bytes(_made(form, x_there_N)) == bytes(wire)


def sample() -> Tensor:
    """About 36 000 values on which devices could differ.

    They have all sizes, both zeros, an incomplete last block, and quotients half way between two codes, which a
    rounded inverse moves to either side.
    """
    generator = torch.Generator().manual_seed(1)

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device="cpu").to(torch.float32)

    x_BK = torch.randn(SAMPLE_BLOCKS, BLOCK, generator=generator, dtype=torch.float32, device="cpu")
    for first, most, largest in ((1, 127, 126.7), (2, 7, 6.99)):  # int8 and int4: their steps become 1
        x_BK[first::4] = drawn(-most, most, *x_BK[first::4].shape) + 0.5
        x_BK[first::4, 0] = largest
    x_BK[3::4] = torch.exp2(drawn(-8, 0, *x_BK[3::4].shape)) * 1.5  # e3m0
    x_BK[3::4, 0] = 1.0
    x_BK[::4, 1], x_BK[::4, 2] = 0.0, -0.0
    exponent_B = torch.arange(SAMPLE_BLOCKS, dtype=torch.float32, device="cpu") - 90
    x_BK *= ((drawn(128, 256, SAMPLE_BLOCKS) * 2.0**-7) * torch.exp2(exponent_B))[:, None]
    return x_BK.view(-1)[: -BLOCK + 37].contiguous()


# ---- shared by codecs ------------------------------------------------------------------------------------------


def _scale_bits(scale_B: Tensor, *, up: bool) -> Tensor:
    """See `blocks.scale_bits`."""
    bits_B = (scale_B.view(torch.int32) + (0xFFFF if up else 0x8000)).bitwise_right_shift_(16)
    return bits_B.clamp_(max=SCALE_MAX_BITS).mul_(bits_B >= SCALE_MIN_BITS).to(torch.int16)


def _scales(bits_B: Tensor) -> Tensor:
    return bits_B.to(torch.int32).bitwise_left_shift_(16).view(torch.float32)


def _negative(x_BK: Tensor) -> Tensor:
    """1 if the sign bit is set, also of a zero; else 0."""
    return x_BK.view(torch.int32).bitwise_right_shift(31).bitwise_and_(1)


def _as_it_is(opened: OpenedBlocks, out_N: Tensor) -> None:
    out_N.copy_(opened.codes)


def _times_scales(opened: OpenedBlocks, out_N: Tensor) -> None:
    out_N.copy_(opened.codes)
    times_scales(out_N, opened.scale_B)


# ---- codecs with one number per value --------------------------------------------------------------------------


def _fp16(x_N: Tensor) -> DeviceCodes:
    return DeviceCodes(x_N.abs().amax(), x_N.new_empty(0), x_N.clamp(-FP16_MAX, FP16_MAX).to(torch.float16))


def _bf16(x_N: Tensor) -> DeviceCodes:
    bits_N = x_N.clamp(-VALUE_MAX, VALUE_MAX).to(torch.bfloat16).view(torch.int16)
    bits_N.mul_(bits_N.bitwise_and(0x7FFF) >= int(LEAST_BITS))
    return DeviceCodes(x_N.abs().amax(), x_N.new_empty(0), bits_N)


def _int8(x_N: Tensor) -> DeviceCodes:
    x_BK = as_blocks(x_N)
    largest_B = x_BK.abs().amax(1)
    bits_B = _scale_bits(largest_B * int8.ONE_127TH, up=True)
    code_BK = _whole_steps(x_BK, _scales(bits_B), 127)
    return DeviceCodes(largest_B.amax(), bits_B, code_BK.view(-1)[: len(x_N)])


def _whole_steps(x_BK: Tensor, step_B: Tensor, most: int) -> Tensor:
    divisor_B1 = torch.where(step_B == 0, 1.0, step_B)[:, None]
    return torch.div(x_BK, divisor_B1).round_().clamp_(-most, most).to(torch.int8)


# ---- codecs with a few bits per value: the rules of packed.py --------------------------------------------------


class LevelCodec(NamedTuple):
    levels: tuple[float, ...]
    scale: Callable[[Tensor, Tensor, int], Tensor]  # (magnitude_BK, largest_B, size) -> (B,) before rounding
    up: bool  # direction of rounding
    codes: Callable[[Tensor, Tensor, Tensor], Tensor]  # (x_BK, magnitude_BK, scale_B) -> (B, K) uint8


def _few(few: LevelCodec) -> DeviceCodec:
    table = level_table(few.levels)
    bits = (len(few.levels) - 1).bit_length()

    def encode(x_N: Tensor) -> DeviceCodes:
        x_BK = as_blocks(x_N)
        magnitude_BK = x_BK.abs()
        largest_B = magnitude_BK.amax(1)
        bits_B = _scale_bits(few.scale(magnitude_BK, largest_B, len(x_N)), up=few.up)
        code_BK = few.codes(x_BK, magnitude_BK, _scales(bits_B)).to(torch.uint8)
        return DeviceCodes(largest_B.amax(), bits_B, pack_codes(code_BK.view(-1)[: len(x_N)], bits))

    def decode(opened: OpenedBlocks, out_N: Tensor) -> None:
        level_QR = out_N.new_empty(table.shape).copy_(torch.from_numpy(table))
        value_QR = level_QR.index_select(0, opened.codes.to(torch.int32))
        out_N.copy_(value_QR.view(-1)[: len(out_N)])
        times_scales(out_N, opened.scale_B)

    return DeviceCodec(encode, decode)


def _int4_codes(x_BK: Tensor, _magnitude_BK: Tensor, step_B: Tensor) -> Tensor:
    return _whole_steps(x_BK, step_B, 7).bitwise_and_(15)


def _e3m0_codes(x_BK: Tensor, magnitude_BK: Tensor, scale_B: Tensor) -> Tensor:
    ratio_BK = torch.div(magnitude_BK, torch.where(scale_B == 0, float("inf"), scale_B)[:, None])
    exponent_BK = (ratio_BK * e3m0.FOUR_THIRDS).view(torch.int32).bitwise_right_shift_(23).sub_(127)
    code_BK = exponent_BK.clamp_(e3m0.LOWEST, 0).sub_(e3m0.LOWEST - 1).bitwise_or_(_negative(x_BK) * 8)
    return code_BK.mul_(ratio_BK >= 2.0 ** (e3m0.LOWEST - 1))


def _root_mean_square(magnitude_BK: Tensor, largest_B: Tensor, size: int) -> Tensor:
    """The fp64 root of a 24-bit number, however rounded, gives the correctly rounded fp32 root."""
    grid_BK = to_grid(magnitude_BK, largest_B, two_bit.GRID)
    mean_B = mean_of(grid_BK.mul_(grid_BK).sum(1), size)
    return mean_B.to(torch.float64).sqrt_().to(torch.float32) * two_bit.ONE_255TH * largest_B


def _two_bit_codes(x_BK: Tensor, magnitude_BK: Tensor, scale_B: Tensor) -> Tensor:
    return _negative(x_BK).mul_(2).bitwise_or_(magnitude_BK > (scale_B * two_bit.BORDER)[:, None])


def _mean_magnitude(magnitude_BK: Tensor, largest_B: Tensor, size: int) -> Tensor:
    sum_B = to_grid(magnitude_BK, largest_B, sign.GRID).sum(1)
    return mean_of(sum_B, size) * sign.ONE_65535TH * largest_B


FORMS = {
    "fp16": DeviceCodec(_fp16, _as_it_is),
    "bf16": DeviceCodec(_bf16, _as_it_is),
    "int8": DeviceCodec(_int8, _times_scales),
    "int4": _few(LevelCodec(int4.LEVELS, lambda _, largest_B, size: largest_B * int4.ONE_7TH, True, _int4_codes)),
    "e3m0": _few(LevelCodec(e3m0.LEVELS, lambda _, largest_B, size: largest_B, False, _e3m0_codes)),
    "2bit": _few(LevelCodec(two_bit.LEVELS, _root_mean_square, False, _two_bit_codes)),
    "sign": _few(LevelCodec(sign.LEVELS, _mean_magnitude, False, lambda x_BK, *_: _negative(x_BK))),
}
