"""randk: a random share of the values, with the same indices at all members, so that no index is sent.

The vector is cut into as many ranges as values are kept, and one value of each range is drawn. No value is drawn
twice, all are about equally likely, and the indices increase. The draw is BLAKE3 of a seed that all members know
and that changes every round (`SharedKnowledge.seed`, the id of the last vertex): with a constant seed the other
values would never be trained. Values are not scaled up: error feedback delivers the rest later (Stich et al. 2018,
1809.07599, section 2.1).
Wire: the wire of the kept values.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache, partial

import numpy as np
from torch import Tensor

from atoll.base.draw import draw_bytes
from atoll.crypto.digest import Buffer
from atoll.training.codec.blocks import check_input, largest_of, refuse
from atoll.training.codec.core import Codec
from atoll.training.codec.index_coding import SparseValues, scatter_add, scatter_span, taken


def random_k(ratio: Fraction, values: Codec, seed: bytes | None) -> Codec:
    if not seed:
        raise ValueError(
            "randk needs a seed that all members know and that changes every round; "
            "give codec_named the id of the last vertex: SharedKnowledge(seed=…)"
        )
    return Codec(
        f"randk:{ratio}+{values.name}",
        lambda n: values.wire_bytes(_kept(ratio, n)),
        partial(_encode, ratio, values, seed),
        partial(_open_wire, ratio, values, seed),
        scatter_span,
        values.fixed,
        values.same_everywhere,
        add_span=scatter_add,
    )


def _kept(ratio: Fraction, n: int) -> int:
    return -(-n * ratio.numerator // ratio.denominator)


@lru_cache(maxsize=4)  # the parts of one round have few sizes, and every member sends a row of each
def _places(ratio: Fraction, seed: bytes, n: int) -> np.ndarray:
    kept = _kept(ratio, n)
    edge = np.arange(kept + 1) * n // max(1, kept)
    width_M = np.diff(edge).astype(np.uint64)
    drawn_M = np.frombuffer(draw_bytes(seed, f"randk {n}", 4 * kept), np.uint32).astype(np.uint64)
    return (edge[:-1] + (drawn_M * width_M >> np.uint64(32)).astype(np.int64)).astype(np.int32)


def _encode(ratio: Fraction, values: Codec, seed: bytes, x: Tensor) -> Buffer:
    x = check_input(x)
    refuse(largest_of(x))
    return values.encode(taken(x, _places(ratio, seed, x.numel())))


def _open_wire(ratio: Fraction, values: Codec, seed: bytes, wire: Buffer, n: int) -> SparseValues:
    place_M = _places(ratio, seed, n)
    return SparseValues(place_M, values.decode(wire, len(place_M)))
