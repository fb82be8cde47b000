"""topk: of every chunk of 4096 values only the largest few, by magnitude; what they are is another codec's matter.

`topk:0.1` keeps a tenth, `topk:64/4096` SparseLoCo's 64 per chunk (2508.15706); ties go to the earlier value.
The rest decodes to zero, so it needs error feedback, and many rounds: a value is sent about once per 1/ratio.
Wire: the places of all kept values, chunk by chunk (`places`), then the wire of the kept values.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import numpy as np
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.keys.digest import Buffer
from atoll.learn.codec.blocks import SPAN, check_input, check_length, largest_of, refuse, spans_of
from atoll.learn.codec.core import Codec
from atoll.learn.codec.places import Placed, decode_places, encode_places, places_bytes, scatter_span, taken

CHUNK = 4096  # small enough to spread the choice over the model, large enough for the largest to stand out
assert SPAN % CHUNK == 0


def top_k(ratio: Fraction, values: Codec) -> Codec:
    per_chunk = max(1, round(ratio * CHUNK))
    return Codec(
        f"topk:{per_chunk}/{CHUNK}+{values.name}",
        partial(_wire_bytes, per_chunk, values),
        partial(_encode, per_chunk, values),
        partial(_open_wire, per_chunk, values),
        scatter_span,
        values.fixed,
        values.same_everywhere,
    )


def _kept(per_chunk: int, n: int) -> int:
    """How many of n values are kept; a last, shorter chunk keeps the same share of its values, rounded up."""
    return n // CHUNK * per_chunk + -(-(n % CHUNK) * per_chunk // CHUNK)


def _wire_bytes(per_chunk: int, values: Codec, n: int) -> int:
    kept = _kept(per_chunk, n)
    return places_bytes(n, kept) + values.wire_bytes(kept)


def _encode(per_chunk: int, values: Codec, x: Tensor) -> bytes:
    x = check_input(x)
    n = x.numel()
    refuse(largest_of(x))
    pieces = [np.empty(0, np.int64)]
    for lo, hi in spans_of(n):
        whole = lo + (hi - lo) // CHUNK * CHUNK
        if lo < whole:
            pieces.append(lo + _largest(x[lo:whole], per_chunk, CHUNK))
        if whole < hi:
            pieces.append(whole + _largest(x[whole:hi], _kept(per_chunk, hi - whole), hi - whole))
    place_M = np.concatenate(pieces)
    return encode_places(place_M, n) + values.encode(taken(x, place_M))


def _largest(x_S: Tensor, k: int, chunk: int) -> np.ndarray:
    """Places of the k largest magnitudes of each chunk, increasing. On bit patterns, which are ordered alike."""
    magnitude_CK = x_S.abs().numpy().view(np.int32).reshape(-1, chunk)
    border_C1 = np.partition(magnitude_CK, chunk - k, axis=1)[:, chunk - k, None]
    chosen_CK = magnitude_CK >= border_C1
    if np.count_nonzero(chosen_CK) > k * len(chosen_CK):  # several values at the border: the first ones
        above_CK = magnitude_CK > border_C1
        room_C1 = k - above_CK.sum(1, keepdims=True)
        at_border_CK = magnitude_CK == border_C1
        chosen_CK = above_CK | (at_border_CK & (at_border_CK.cumsum(1) <= room_C1))
    return np.flatnonzero(chosen_CK)


def _open_wire(per_chunk: int, values: Codec, wire: Buffer, n: int) -> Placed:
    kept = _kept(per_chunk, n)
    cut = places_bytes(n, kept)
    if values.fixed or len(wire) < cut:
        check_length(wire, cut + values.wire_bytes(kept))
    view = memoryview(wire)
    place_M = decode_places(view[:cut], n, kept)
    last = n // CHUNK * per_chunk
    chunk_CK = place_M[:last].reshape(-1, per_chunk)
    start_C = np.arange(len(chunk_CK)) * CHUNK
    if (chunk_CK[:, 0] < start_C).any() or (chunk_CK[:, -1] >= start_C + CHUNK).any():
        raise PeerFault("", f"a chunk holds more or less than {per_chunk} values")
    return Placed(place_M.astype(np.int32), values.decode(view[cut:], kept))
