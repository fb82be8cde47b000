"""topk: only the largest values, by magnitude, of every chunk of 4096; another codec encodes them.

`topk:0.1` keeps a tenth, `topk:64/4096` SparseLoCo's 64 per chunk (2508.15706); of equal magnitudes the earlier
value is kept. All others decode to zero, so it needs error feedback and many rounds: a value is sent about once per
1/ratio rounds.
Wire: the indices of all kept values, chunk by chunk (`index_coding`), then the wire of the kept values. `topk-rice`
sends gaps instead of indices: some 4 % fewer bytes in all, with a length that depends on the data.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import partial

import numpy as np
import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import SPAN, Room, largest_of, new_wire, refuse, spans_of
from atoll.training.codec.compiled import native
from atoll.training.codec.core import Codec, whole
from atoll.training.codec.index_coding import PLACES, IndexFormat, SparseValues, scatter_add, scatter_span, taken

CHUNK = 4096  # small enough to spread the choice over the model, large enough for the largest to stand out
assert SPAN % CHUNK == 0


def top_k(ratio: Fraction, values: Codec, form: IndexFormat = PLACES) -> Codec:
    if not (form.fixed or values.fixed):
        raise ValueError(f"topk-rice needs a value codec of fixed length; the length of {values.name} varies")
    per_chunk = max(1, round(ratio * CHUNK))
    return Codec(
        f"{'topk' if form is PLACES else 'topk-rice'}:{per_chunk}/{CHUNK}+{values.name}",
        partial(_wire_bytes, per_chunk, values, form),
        whole(partial(_encode_spans, per_chunk, values, form)),
        partial(_open_wire, per_chunk, values, form),
        scatter_span,
        values.fixed and form.fixed,
        values.same_everywhere,
        spanwise=partial(_encode_spans, per_chunk, values, form),
        add_span=scatter_add,
    )


def _kept(per_chunk: int, n: int) -> int:
    """Number of kept values out of n; a last, shorter chunk keeps the same share of its values, rounded up."""
    return n // CHUNK * per_chunk + -(-(n % CHUNK) * per_chunk // CHUNK)


def _wire_bytes(per_chunk: int, values: Codec, form: IndexFormat, n: int) -> int:
    kept = _kept(per_chunk, n)
    return form.most_bytes(n, kept) + values.wire_bytes(kept)


def _encode_spans(
    per_chunk: int, values: Codec, form: IndexFormat, n: int, spans: Iterable[Tensor], room: Room = new_wire
) -> Buffer:
    """The kept values are a new vector anyway: `room` is not used."""
    kept, m = _kept(per_chunk, n), 0
    place_M, value_M = np.empty(kept, np.int64), torch.empty(kept, dtype=torch.float32)
    for (lo, hi), x_S in zip(spans_of(n), spans, strict=True):
        cut = (hi - lo) // CHUNK * CHUNK
        for start, end, chunk in ((0, cut, CHUNK), (cut, hi - lo, hi - lo - cut)):
            if start < end:
                places, most = _largest(x_S[start:end], _kept(per_chunk, chunk), chunk)
                refuse(most)
                these = slice(m, m + len(places))
                place_M[these] = places + (lo + start)
                value_M[these] = taken(x_S[start:end], places)
                m += len(places)
    return form.encode(place_M, n) + values.encode(value_M)


def _largest(x_S: Tensor, k: int, chunk: int) -> tuple[np.ndarray, float]:
    """Indices of the k largest magnitudes of each chunk, increasing, and the largest of all; NaN is above all.

    It works on bit patterns, which have the same order.
    """
    if native.kernels is not None:
        place_M = np.empty(len(x_S) // chunk * k, np.int64)
        return place_M, native.kernels.largest_places(x_S.numpy(), k, chunk, place_M)
    magnitude_CK = x_S.abs().numpy().view(np.int32).reshape(-1, chunk)
    border_C1 = np.partition(magnitude_CK, chunk - k, axis=1)[:, chunk - k, None]
    chosen_CK = magnitude_CK >= border_C1
    if np.count_nonzero(chosen_CK) > k * len(chosen_CK):  # several values at the border: the first ones
        above_CK = magnitude_CK > border_C1
        room_C1 = k - above_CK.sum(1, keepdims=True)
        at_border_CK = magnitude_CK == border_C1
        chosen_CK = above_CK | (at_border_CK & (at_border_CK.cumsum(1) <= room_C1))
    return np.flatnonzero(chosen_CK), largest_of(x_S)


def _open_wire(per_chunk: int, values: Codec, form: IndexFormat, wire: Buffer, n: int) -> SparseValues:
    kept, view = _kept(per_chunk, n), memoryview(wire)
    most = form.most_bytes(n, kept)
    if form.fixed:
        cut = most
    else:
        cut = len(view) - values.wire_bytes(kept)
    if not 0 <= cut <= min(most, len(view)):
        raise PeerFault("", f"{len(view)} bytes are not a wire of {kept} of {n} values")
    place_M = form.decode(view[:cut], n, kept)
    last = n // CHUNK * per_chunk
    chunk_CK = place_M[:last].reshape(-1, per_chunk)
    start_C = np.arange(len(chunk_CK)) * CHUNK
    is_early = last < kept and place_M[last] < n // CHUNK * CHUNK  # the last, shorter chunk's first
    if is_early or (chunk_CK[:, 0] < start_C).any() or (chunk_CK[:, -1] >= start_C + CHUNK).any():
        raise PeerFault("", f"a chunk holds more or less than {per_chunk} values")
    return SparseValues(place_M.astype(np.int32), values.decode(view[cut:], kept))
