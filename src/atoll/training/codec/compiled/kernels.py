"""Inner loops of codecs, compiled by numba: one pass over a block while it is in the first-level cache.

Called through `native` only. Callers pass spans of matching lengths (scales: one per block), opened wires, and
indices in range; nothing is checked here. The kernels release Python's lock and use one thread. Compiled code is
cached on disk if numba finds a writable folder; a change of this file recompiles it.
Invariants:
- Every function returns the bits of the torch code at its call site: the same operations on fp32 in the same order,
  each rounded once. Fast math is off, so the compiler neither fuses nor reorders them. Exceptions are `add_gram`
  and `squared_length`, with last bits that are used locally only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types

from atoll.training.codec.blocks import BLOCK, REFUSE_ABOVE, SCALE_MAX_BITS, SCALE_MIN, SCALE_MIN_BITS
from atoll.training.codec.deterministic_dot import CHUNK
from atoll.training.codec.int4 import ONE_7TH
from atoll.training.codec.int8 import ONE_127TH
from atoll.training.codec.two_bit import BORDER, GRID, ONE_255TH

HOW: dict[str, Any] = {"nogil": True, "error_model": "numpy"}  # division by zero is a value, not an exception
STRETCH = 512  # columns at a time: four rows of fp64 fit the first-level cache, sixteen of fp32
ROWS = 8  # `largest_places` first checks only the largest of every ROWS values
LESS = np.int32(2**19)  # 1/16 of a power of two: the usual difference between chunks of one vector
SIGNLESS = np.int32(0x7FFFFFFF)
REFUSED_BITS = int(np.float32(REFUSE_ABOVE).view(np.int32))


def _vector(dtype: Any, *, written: bool = False) -> Any:
    return types.Array(dtype, 1, "C", readonly=not written, aligned=False)  # a wire may lie at any address


VALUES, CODES, BYTES, PLACES = map(_vector, (types.float32, types.int8, types.uint8, types.int32))
SUM, NEW_CODES, NEW_BYTES, NEW_SCALES, CHOSEN = (
    _vector(dtype, written=True) for dtype in (types.float32, types.int8, types.uint8, types.int16, types.int64)
)
ENCODER = types.float32(VALUES, NEW_SCALES, NEW_BYTES)  # returns the largest magnitude, the input of `refuse`


def compiled(signature: Any) -> Callable[[Any], Any]:
    def compile_now(function: Any) -> Any:
        try:
            return njit([signature], cache=True, **HOW)(function)
        except (RuntimeError, OSError):  # no cache folder: every process compiles anew
            return njit([signature], **HOW)(function)

    return compile_now


part = njit(**HOW)  # part of a kernel
reordered = njit(fastmath={"reassoc", "nsz", "contract"}, **HOW)  # sums in any order that suits the processor


# ---- encode --------------------------------------------------------------------------------------------------


@part
def _largest_bits(bits: Any) -> Any:
    """Bits of the largest magnitude. Magnitudes are ordered like their bits, with NaN above all."""
    most = np.int32(0)
    for i in range(len(bits)):
        magnitude = np.int32(bits[i] & 0x7FFFFFFF)
        if magnitude > most:
            most = magnitude
    return most


@part
def _scale_bits(scale: Any, rounding: Any) -> Any:
    """See `blocks.scale_bits`."""
    bits = (np.float32(scale).view(np.int32) + rounding) >> 16
    return min(bits, SCALE_MAX_BITS) if bits >= SCALE_MIN_BITS else 0


@part
def _fp32(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@part
def _divide(x: Any, step_bits: Any, most: Any, codes: Any) -> Any:
    divisor = _fp32(step_bits << 16) if step_bits else np.float32(1)
    for i in range(len(x)):
        codes[i] = np.int8(min(max(np.rint(x[i] / divisor), np.float32(-most)), np.float32(most)))


@part
def _sum_of_squares(x: Any, per_grid: Any) -> Any:
    total = np.int32(0)
    for i in range(len(x)):
        k = np.int32(np.rint(np.abs(x[i]) * per_grid))
        total = np.int32(total + np.int32(k * k))
    return total


@part
def _two_bit_codes(x: Any, bits: Any, border: Any, codes: Any) -> Any:
    for i in range(len(x)):
        negative = np.uint8(np.uint32(bits[i]) >> np.uint32(31))
        codes[i] = np.uint8(negative << 1) | np.uint8(np.abs(x[i]) > border)


@part
def _fours(words: Any, packed: Any) -> Any:
    """Four bytes that hold two bits each -> one byte. See `packed._GATHER`."""
    for q in range(len(packed)):
        packed[q] = np.uint32(words[q] * np.uint32(2**24 + 2**18 + 2**12 + 2**6)) >> np.uint32(24)


@part
def _pairs(codes: Any, packed: Any) -> Any:
    for q in range(len(packed)):
        packed[q] = np.uint8(codes[2 * q] & 15) | np.uint8(codes[2 * q + 1] << 4)


@compiled(types.float32(VALUES))
def largest(x):
    return _fp32(_largest_bits(x.view(np.int32)))


@compiled(types.float32(VALUES, NEW_SCALES, NEW_CODES))
def int8_encode(x, steps, codes):
    bits, worst = x.view(np.int32), np.int32(0)
    for b in range(len(steps)):
        at = slice(b * BLOCK, (b + 1) * BLOCK)
        most = _largest_bits(bits[at])
        worst = max(worst, most)
        if most <= REFUSED_BITS:
            steps[b] = _scale_bits(_fp32(most) * np.float32(ONE_127TH), 0xFFFF)
            _divide(x[at], steps[b], 127, codes[at])
    return _fp32(worst)


@compiled(ENCODER)
def int4_encode(x, steps, packed):
    bits, worst = x.view(np.int32), np.int32(0)
    codes = np.zeros(BLOCK, np.int8)
    for b in range(len(steps)):
        at = slice(b * BLOCK, (b + 1) * BLOCK)
        most = _largest_bits(bits[at])
        worst = max(worst, most)
        if most <= REFUSED_BITS:
            steps[b] = _scale_bits(_fp32(most) * np.float32(ONE_7TH), 0xFFFF)
            _divide(x[at], steps[b], 7, codes)
            codes[len(x[at]) :] = 0
            _pairs(codes, packed[b * BLOCK // 2 : (b + 1) * BLOCK // 2])
    return _fp32(worst)


@compiled(ENCODER)
def two_bit_encode(x, scales, packed):
    bits, worst = x.view(np.int32), np.int32(0)
    codes = np.zeros(BLOCK, np.uint8)
    for b in range(len(scales)):
        at = slice(b * BLOCK, (b + 1) * BLOCK)
        x_K = x[at]
        most = _largest_bits(bits[at])
        worst = max(worst, most)
        if most <= REFUSED_BITS:
            largest = _fp32(most)
            per_grid = np.float32(GRID) / (largest if largest >= np.float32(SCALE_MIN) else np.float32(1))
            mean = np.float32(_sum_of_squares(x_K, per_grid)) / np.float32(len(x_K))
            scales[b] = _scale_bits(np.sqrt(mean) * np.float32(ONE_255TH) * largest, 0x8000)
            _two_bit_codes(x_K, bits[at], _fp32(scales[b] << 16) * np.float32(BORDER), codes)
            codes[len(x_K) :] = 0
            _fours(codes.view(np.uint32), packed[b * BLOCK // 4 : (b + 1) * BLOCK // 4])
    return _fp32(worst)


@part
def _count_from(magnitudes: Any, border: Any) -> Any:
    count = np.int32(0)
    for i in range(len(magnitudes)):
        count = np.int32(count + np.int32(magnitudes[i] >= border))
    return count


@part
def _most(magnitudes: Any) -> Any:
    most = np.int32(0)
    for i in range(len(magnitudes)):
        most = max(most, magnitudes[i])
    return most


@part
def _kth_largest(numbers: Any, k: Any) -> Any:
    """The k-th largest of non-negative numbers, or a smaller border that exactly k numbers reach.

    It tests one bit at a time, from the highest; each pass only compares and counts.
    """
    border = np.int32(0)
    for bit in range(31):
        higher = np.int32(border | (1 << (30 - bit)))
        count = _count_from(numbers, higher)
        if count >= k:
            border = higher
        if count == k:
            break
    return border


@part
def _peaks(bits: Any, peaks: Any) -> None:
    """The largest magnitude of every column, with values laid out in rows as long as `peaks`."""
    width = len(peaks)
    for c in range(width):
        peaks[c] = bits[c] & SIGNLESS
    for lo in range(width, len(bits), width):
        row = bits[lo : lo + width]
        for c in range(width):
            peaks[c] = max(peaks[c], np.int32(row[c] & SIGNLESS))


@part
def _from(border: Any, bits: Any, peaks: Any, columns: Any, few: Any) -> Any:
    """Count the magnitudes at or above the border; write their indices, increasing, to `few`."""
    width, high, count = np.uint64(len(peaks)), np.uint64(0), np.uint64(0)
    for c in range(len(peaks)):
        columns[high] = c
        high += np.uint64(peaks[c] >= border)
    for row in range(np.uint64(ROWS)):
        for j in range(high):
            at = row * width + columns[j]
            few[count] = at
            count += np.uint64(np.int32(bits[at] & SIGNLESS) >= border)
    return np.int64(count)


@compiled(types.float32(VALUES, types.int64, types.int64, CHOSEN))
def largest_places(x, k, chunk, places):
    """Indices of the k largest magnitudes of every chunk, increasing; of equal ones the earlier.

    Returns the largest magnitude of all, the input of `refuse`. Eight values of a chunk form a column with one
    largest. If k magnitudes or more reach a border, nothing below it is chosen, and only columns with a largest
    value at the border hold chosen values. So 41 of 4096 are among 41 times eight, or a few more. The border is
    slightly below the final border of the previous chunk. If it admits too few or too many values, it is the k-th
    largest column maximum, which k magnitudes reach.
    """
    width = chunk // ROWS
    in_rows = width * ROWS == chunk and 2 * k <= width
    peaks, columns = np.empty(width, np.int32), np.empty(width + 1, np.uint64)
    few, magnitudes = np.empty(chunk + 1, np.uint64), np.empty(chunk, np.int32)
    m, worst, guess = 0, np.int32(0), SIGNLESS
    for lo in range(0, len(x), chunk):
        bits = x[lo : lo + chunk].view(np.int32)
        count = 0
        if in_rows:
            _peaks(bits, peaks)
            worst = max(worst, _most(peaks))
            if _count_from(peaks, guess) < k + width // 4:  # more values cost more than a better border
                count = _from(guess, bits, peaks, columns, few)
            if count < k:
                count = _from(_kth_largest(peaks, k), bits, peaks, columns, few)
        else:
            for i in range(len(bits)):
                few[i] = i
            count = len(bits)
        for i in range(count):
            magnitudes[i] = bits[few[i]] & SIGNLESS
        left = magnitudes[:count]
        worst = worst if in_rows else max(worst, _most(left))
        border = _kth_largest(left, k)
        guess = max(np.int32(0), np.int32(border - LESS))
        room = k - _count_from(left, np.int32(border + 1))  # number to take at the border: the first ones
        for i in range(count):
            if left[i] >= border and (left[i] > border or room > 0):
                room -= left[i] == border
                places[m] = lo + np.int64(few[i])
                m += 1
    return _fp32(worst)


# ---- decode, and decode * share added to a sum ------------------------------------------------------------------


@part
def _times(codes: Any, step: Any, out: Any) -> Any:
    for i in range(len(out)):
        out[i] = np.float32(codes[i]) * step


@part
def _add_times(codes: Any, step: Any, share: Any, total: Any) -> Any:
    for i in range(len(total)):
        total[i] += (np.float32(codes[i]) * step) * share


@compiled(types.void(CODES, VALUES, SUM))
def int8_decode(codes, scales, out):
    for b in range(len(scales)):
        at = slice(b * BLOCK, (b + 1) * BLOCK)
        _times(codes[at], scales[b], out[at])


@compiled(types.void(CODES, VALUES, types.float32, SUM))
def int8_add(codes, scales, share, total):
    for b in range(len(scales)):
        at = slice(b * BLOCK, (b + 1) * BLOCK)
        _add_times(codes[at], scales[b], share, total[at])


@compiled(types.void(VALUES, types.float32, SUM))
def fp32_add(x, share, total):
    for i in range(len(total)):
        total[i] += x[i] * share


@compiled(types.void(VALUES, VALUES, VALUES, VALUES, VALUES, SUM))
def fp32_add_four(x_0, x_1, x_2, x_3, shares, total):
    """The bits of four calls of `fp32_add`, with one read and one write of the sum."""
    s_0, s_1, s_2, s_3 = shares[0], shares[1], shares[2], shares[3]
    for i in range(len(total)):
        total[i] = (((total[i] + x_0[i] * s_0) + x_1[i] * s_1) + x_2[i] * s_2) + x_3[i] * s_3


@compiled(types.void(VALUES, VALUES, VALUES, types.float32, types.float32, SUM, SUM))
def nesterov(anchor, momentum, update, share, rate, new_anchor, new_momentum):
    """`outer.outer_step`, with one read and one write of memory."""
    for i in range(len(anchor)):
        moved = momentum[i] * share + update[i]
        new_momentum[i] = moved
        new_anchor[i] = anchor[i] - (moved * share + update[i]) * rate


@compiled(types.void(PLACES, VALUES, types.int64, SUM))
def scatter(places, values, lo, out):
    for i in range(len(out)):
        out[i] = np.float32(0)
    for m in range(len(places)):
        out[places[m] - lo] = values[m]


@compiled(types.void(PLACES, VALUES, types.int64, types.float32, SUM))
def scatter_add(places, values, lo, share, total):
    for m in range(len(places)):
        total[places[m] - lo] += values[m] * share


# ---- increasing indices as bytes: see index_coding.py ----------------------------------------------------------


@compiled(types.void(CHOSEN, types.int64, NEW_BYTES, NEW_BYTES))
def encode_places(places, low_bits, lows, unary):
    """Both outputs begin as zeros. A low part of up to eight bits lies in one or two bytes."""
    for j in range(len(places)):
        high = (places[j] >> low_bits) + j
        unary[high >> 3] |= np.uint8(1 << (high & 7))
        at, low = j * low_bits, places[j] & ((1 << low_bits) - 1)
        if low:
            low <<= at & 7
            lows[at >> 3] |= np.uint8(low & 255)
            if low >> 8:
                lows[(at >> 3) + 1] |= np.uint8(low >> 8)


@compiled(types.int64(BYTES, BYTES, types.int64, CHOSEN))
def decode_places(lows, unary, low_bits, places):
    """Number of ones; if it exceeds the number of indices, only the first are decoded."""
    count = 0
    for byte in range(len(unary)):
        for bit in range(8):
            if unary[byte] >> bit & 1:
                if count < len(places):
                    at, low = count * low_bits, 0
                    if low_bits:
                        low = np.int64(lows[at >> 3])
                        if (at & 7) + low_bits > 8:
                            low |= np.int64(lows[(at >> 3) + 1]) << 8
                        low = low >> (at & 7) & ((1 << low_bits) - 1)
                    places[count] = (byte * 8 + bit - count) << low_bits | low
                count += 1
    return count


# ---- inner products: see codec/deterministic_dot ---------------------------------------------------------------


@part
def _quarter_products(x: Any, y: Any, lanes: Any) -> Any:
    """Products, halved twice before they are stored."""
    n = len(lanes)
    x_0, x_1, x_2, x_3 = x[:n], x[n : 2 * n], x[2 * n : 3 * n], x[3 * n :]
    y_0, y_1, y_2, y_3 = y[:n], y[n : 2 * n], y[2 * n : 3 * n], y[3 * n :]
    for k in range(n):
        even = np.float64(x_0[k]) * np.float64(y_0[k]) + np.float64(x_2[k]) * np.float64(y_2[k])
        lanes[k] = even + (np.float64(x_1[k]) * np.float64(y_1[k]) + np.float64(x_3[k]) * np.float64(y_3[k]))


@part
def _quarter(lanes: Any) -> Any:
    n = len(lanes) // 4
    lanes_0, lanes_1, lanes_2, lanes_3 = lanes[:n], lanes[n : 2 * n], lanes[2 * n : 3 * n], lanes[3 * n :]
    for k in range(n):
        lanes_0[k] = (lanes_0[k] + lanes_2[k]) + (lanes_1[k] + lanes_3[k])


@compiled(types.void(types.float32[:, ::1], types.float64[::1]))
def add_inner_products(rows, total):
    count, lanes = len(rows), np.empty(CHUNK // 4)
    for at in range(0, rows.shape[1], CHUNK):
        pair = 0
        for i in range(count):
            for j in range(i, count):
                _quarter_products(rows[i, at : at + CHUNK], rows[j, at : at + CHUNK], lanes)
                left = CHUNK // 4
                while left > 1:
                    _quarter(lanes[:left])
                    left //= 4
                total[pair] += lanes[0]
                pair += 1


# ---- norms and the Gram matrix: see training/robust ------------------------------------------------------------


@reordered
def _sum_of_squares_fp32(x: Any) -> Any:
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    return total


@compiled(types.float64(VALUES))
def squared_length(x):
    """Squared norm: fp32 within a chunk, fp64 over chunks."""
    total = 0.0
    for at in range(0, len(x), CHUNK):
        total += np.float64(_sum_of_squares_fp32(x[at : at + CHUNK]))
    return total


@compiled(types.void(VALUES, VALUES, types.float64[::1]))
def about(x, center, out):
    for k in range(len(x)):
        out[k] = np.float64(x[k]) - np.float64(center[k])


@reordered
def _four_products(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Four sums with one read of each input, all computed alike, so equal rows have equal products."""
    ac = ad = bc = bd = 0.0
    for k in range(len(a)):
        ac += a[k] * c[k]
        ad += a[k] * d[k]
        bc += b[k] * c[k]
        bd += b[k] * d[k]
    return ac, ad, bc, bd


@compiled(types.void(types.float64[:, ::1], types.int64, types.float64[:, ::1]))
def add_gram(rows, width, sums):
    """sums[i, j] += <x_i, x_j>, at least the upper triangle, of the first `width` columns."""
    last = len(rows) - 1
    for at in range(0, width, STRETCH):
        to = min(at + STRETCH, width)
        for i in range(0, len(rows), 2):
            for j in range(i, len(rows), 2):
                after_i, after_j = min(i + 1, last), min(j + 1, last)
                ac, ad, bc, bd = _four_products(
                    rows[i, at:to], rows[after_i, at:to], rows[j, at:to], rows[after_j, at:to]
                )
                sums[i, j] += ac
                if after_j > j:
                    sums[i, after_j] += ad
                if after_i > i:
                    sums[after_i, j] += bc
                if after_i > i and after_j > j:
                    sums[after_i, after_j] += bd


# ---- sorted columns: see training/robust/columns ---------------------------------------------------------------


@part
def _compare(low: Any, high: Any) -> None:
    for k in range(len(low)):
        x, y = low[k], high[k]
        low[k] = x if x < y else y
        high[k] = y if x < y else x


@part
def _lesser(low: Any, high: Any) -> None:
    for k in range(len(low)):
        low[k] = low[k] if low[k] < high[k] else high[k]


@part
def _greater(low: Any, high: Any) -> None:
    for k in range(len(low)):
        high[k] = high[k] if low[k] < high[k] else low[k]


@compiled(types.void(types.float32[:, ::1], types.int64, types.int64[:, ::1]))
def sort_columns(rows, width, comparators):
    """Sort the first `width` columns in place; a comparator is (low, high, wants low, wants high). No NaN."""
    for at in range(0, width, STRETCH):
        to = min(at + STRETCH, width)
        for c in range(len(comparators)):
            low, high = rows[comparators[c, 0], at:to], rows[comparators[c, 1], at:to]
            if comparators[c, 2] and comparators[c, 3]:
                _compare(low, high)
            elif comparators[c, 2]:
                _lesser(low, high)
            else:
                _greater(low, high)


def _packed(per_byte: int) -> tuple[Any, Any]:
    """decode and add for `per_byte` codes per byte: row b of the table has the levels of byte b."""
    bytes_a_block = BLOCK // per_byte

    @compiled(types.void(BYTES, VALUES, VALUES, SUM))
    def decode(packed, table, scales, out):
        for b in range(len(scales)):
            scale, out_K = scales[b], out[b * BLOCK : (b + 1) * BLOCK]
            packed_Q = packed[b * bytes_a_block : (b + 1) * bytes_a_block]
            for q in range(len(out_K) // per_byte):
                row = np.intp(packed_Q[q]) * per_byte
                for i in range(per_byte):
                    out_K[q * per_byte + i] = table[row + i] * scale
            for i in range(len(out_K) // per_byte * per_byte, len(out_K)):
                out_K[i] = table[np.intp(packed_Q[i // per_byte]) * per_byte + i % per_byte] * scale

    @compiled(types.void(BYTES, VALUES, VALUES, types.float32, SUM))
    def add(packed, table, scales, share, total):
        for b in range(len(scales)):
            scale, total_K = scales[b], total[b * BLOCK : (b + 1) * BLOCK]
            packed_Q = packed[b * bytes_a_block : (b + 1) * bytes_a_block]
            for q in range(len(total_K) // per_byte):
                row = np.intp(packed_Q[q]) * per_byte
                for i in range(per_byte):
                    total_K[q * per_byte + i] += (table[row + i] * scale) * share
            for i in range(len(total_K) // per_byte * per_byte, len(total_K)):
                total_K[i] += (table[np.intp(packed_Q[i // per_byte]) * per_byte + i % per_byte] * scale) * share

    return decode, add


_PACKED = {per_byte: _packed(per_byte) for per_byte in (2, 4, 8)}
packed_decode = {per_byte: decode for per_byte, (decode, _) in _PACKED.items()}
packed_add = {per_byte: add for per_byte, (_, add) in _PACKED.items()}
