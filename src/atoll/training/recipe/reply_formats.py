"""Reply formats beyond an encoded mean: gathered rows, rows scaled by their norms, agreement of the rows.

Most recipes need `combine` alone. Some need values that only the owner of a part can compute. SparseLoCo forwards
every row, so there is no second loss, and clips long rows. Cooperative SGD needs the agreement of the updates. The
owner computes these few numbers once and sends them, because sums differ between machines. The later steps are
elementwise and give the same bits everywhere.
Invariants:
- Parsing of a peer's bytes raises PeerFault and nothing else.
- A reply is never larger than the part in fp32 plus a header: instead of longer rows the owner sends their sum.

    answer   kind u8, agreement fp32, then by kind                                              (little-endian)
    0        the mean in the codec of answers
    1        rows u16, tensors u16, scales fp32 [rows x tensors], wire lengths u32 [rows], wires
    2        the sum of the rows, fp32
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.crypto.digest import Buffer
from atoll.training.codec import Codec, codec_named
from atoll.training.codec.blocks import SPAN, spans_of
from atoll.training.exchange.combine import CombinedPart, opened_rows
from atoll.training.recipe.outer import AgreementNesterov
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.reducer import Statistic, agreement_of, scales_of
from atoll.training.recipe.update import Bounds, RoundCodingInputs, part_codec, tensor_sizes, tensors_of

# G rows, T tensors that the part touches, N values of the part

HEAD = struct.Struct("<Bf")
COUNTS = struct.Struct("<HH")
MEAN, ROWS, EXACT = 0, 1, 2


class DecodedReply(NamedTuple):
    value_N: Tensor
    agreement: float  # 0 … 1; 1 if the recipe does not need it


@dataclass(frozen=True)
class ReplyFormat:
    """Reply of one part: `answer` builds it at the owner, `read` decodes it at every member."""

    up: Codec
    down: Codec | None  # None: rows are gathered
    statistic: Statistic
    agreeing: bool  # the outer step needs the agreement of the updates
    sizes: tuple[int, ...]  # values of the part in each tensor

    def encode(self, rows: Sequence[tuple[int, Buffer]]) -> CombinedPart:
        """The reply for (weight, wire) rows. Holds every row decoded if row norms matter."""
        n = sum(self.sizes)
        kept = opened_rows(rows, n, self.up)
        if kept.total == 0:
            return CombinedPart(None, kept.counted, kept.faults, "no row has any weight")
        weighed = [
            (index, opened) for index, (weight, opened) in zip(kept.counted, kept.opened, strict=True) if weight
        ]
        share_G = torch.tensor([rows[index][0] / kept.total for index, _ in weighed], dtype=torch.float32)
        scale_GT, agree = share_G[:, None].expand(-1, len(self.sizes)), 1.0
        if self.agreeing or self.statistic != "mean":
            rows_GN = torch.stack([self.up.decode(rows[index][1], n) for index, _ in weighed])
            agree = agreement_of(rows_GN) if self.agreeing else 1.0
            scale_GT = scales_of(self.statistic, rows_GN, share_G, self.sizes)
        wires = [rows[index][1] for index, _ in weighed]
        sums = self._sums([opened for _, opened in weighed], scale_GT)
        kind, body = MEAN, b""
        if self.down is not None:
            body = bytes(self.down.encode_spans(n, sums))
        elif sum(map(len, wires)) < 4 * n and len(wires) < 2**16:
            kind, body = ROWS, _packed(wires, scale_GT)
        else:
            # fp32 refuses values that no member would accept
            kind, body = EXACT, bytes(codec_named("fp32").encode_spans(n, sums))
        return CombinedPart(HEAD.pack(kind, agree) + body, kept.counted, kept.faults)

    def decode(self, wire: Buffer) -> DecodedReply:
        """The decoded reply. PeerFault if `answer` could not have built it."""
        n, view = sum(self.sizes), memoryview(wire).cast("B")
        if len(view) < HEAD.size:
            raise PeerFault("", f"a reply of {len(view)} bytes is too short")
        kind, agree = HEAD.unpack_from(view)
        if not 0.0 <= agree <= 1.0 or (agree != 1.0 and not self.agreeing):  # NaN compares false
            raise PeerFault("", f"a reply with an agreement of {agree}")
        body = view[HEAD.size :]
        if kind == MEAN and self.down is not None:
            return DecodedReply(self.down.decode(body, n), agree)
        if kind == EXACT and self.down is None:
            return DecodedReply(codec_named("fp32").decode(body, n), agree)
        if kind == ROWS and self.down is None:
            opened, scale_GT = self._unpacked(body, n)
            return DecodedReply(torch.cat([sum_S.clone() for sum_S in self._sums(opened, scale_GT)]), agree)
        raise PeerFault("", f"a reply of kind {kind}, which this recipe does not use")

    def _unpacked(self, body: memoryview, n: int) -> tuple[list[Any], Tensor]:
        if len(body) < COUNTS.size:
            raise PeerFault("", "a reply without rows")
        count, tensors = COUNTS.unpack_from(body)
        at = COUNTS.size + 4 * count * tensors
        end = at + 4 * count
        if not count or tensors != len(self.sizes) or end > len(body):
            raise PeerFault("", f"a reply of {count} rows for {tensors} tensors in {len(body)} bytes")
        scales = np.frombuffer(body[COUNTS.size : at], "<f4").astype(np.float32)
        lengths = np.frombuffer(body[at:end], "<u4").astype(np.int64)
        if not np.isfinite(scales).all() or int(lengths.sum()) != len(body) - end:
            raise PeerFault("", "a reply with wrong row lengths, or scales that are not finite")
        edges = end + np.concatenate([[0], np.cumsum(lengths)])
        opened = [self.up.open_wire(body[a:b], n) for a, b in pairwise(edges)]
        return opened, torch.from_numpy(scales.reshape(count, tensors))

    def _sums(self, opened: Sequence[Any], scale_GT: Tensor) -> Iterator[Tensor]:
        """Sum over rows, in order, of value * scale, span by span. A span is valid until the next one is taken."""
        n, sizes_T = sum(self.sizes), torch.tensor(self.sizes)
        sum_S, value_S = torch.empty(2, min(n, SPAN), dtype=torch.float32)
        if len(self.sizes) == 1:  # as in groups: N scales per row would be longer than the rows
            each = [scale_1.expand(n) for scale_1 in scale_GT]
        else:
            each = [scale_T.repeat_interleave(sizes_T) for scale_T in scale_GT.contiguous()]
        for lo, hi in spans_of(n):
            made_S, room_S = sum_S[: hi - lo].zero_(), value_S[: hi - lo]
            for row, scale_N in zip(opened, each, strict=True):
                made_S.add_(self.up.read_span(row, lo, room_S).mul(scale_N[lo:hi]))
            yield made_S


def needs_reply_format(recipe: Recipe) -> bool:
    """Whether the recipe needs more in a reply than an encoded mean."""
    gathered, agreeing = recipe.coding.answer == "gathered", isinstance(recipe.outer, AgreementNesterov)
    return gathered or agreeing or recipe.reducer.statistic != "mean"


def has_owner_feedback(recipe: Recipe) -> bool:
    """Whether owners keep error feedback of their results. No other peer can then compute the same result."""
    return recipe.coding.answer == "remembered"


def reply_format_of(recipe: Recipe, common: RoundCodingInputs, bounds: Bounds, part: int) -> ReplyFormat:
    """Reply format of one part in one round. `bounds` are positions in the whole vector."""
    coding, sizes = recipe.coding, tensor_sizes(tensors_of(common.layout), *bounds[part])
    down = None if coding.answer == "gathered" else part_codec(coding.down, common, bounds, part)
    up = part_codec(coding.up, common, bounds, part)
    return ReplyFormat(up, down, recipe.reducer.statistic, isinstance(recipe.outer, AgreementNesterov), sizes)


def _packed(wires: Sequence[Buffer], scale_GT: Tensor) -> bytes:
    count, tensors = scale_GT.shape
    lengths = np.array([len(wire) for wire in wires], "<u4")
    assert math.isfinite(float(scale_GT.sum()))
    head = COUNTS.pack(count, tensors) + scale_GT.contiguous().numpy().astype("<f4").tobytes() + lengths.tobytes()
    return head + b"".join(bytes(wire) for wire in wires)
