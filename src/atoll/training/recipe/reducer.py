"""Reducer: the group of a reduction, the acceptance of late updates, and the statistic of the rows.

Acceptance: all members, or a quorum and a grace period. Statistic: the weighted mean, or one over whole rows, or a
Byzantine-robust one. Part owners compute it and send bytes, so reductions over a row need not have the same bits on
all peers. A statistic sees only the owner's part. The exception is `robust`: it needs distances between whole
updates, which are sums over their parts (robust/gram). The mean itself is `exchange/combine`, as in real rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from atoll.base.arguments import Peers, Whole
from atoll.base.limits import PEERS_MAX
from atoll.crypto.digest import Buffer
from atoll.training.codec import Codec, pack
from atoll.training.exchange.combine import combine, combine_remembering, gather
from atoll.training.robust import columns, default, liars_of

# G rows, N values of one part

Statistic = Literal["mean", "radial", "support", "clipped", "median", "trimmed_mean", "meamed", "robust"]
ROBUST: dict[Statistic, Callable[[Tensor, int], Tensor]] = {  # (rows, members of the round) -> value
    "median": lambda rows_GN, _: columns.median(list(rows_GN)),
    "trimmed_mean": lambda rows_GN, n: columns.trimmed_mean(list(rows_GN), liars_of(n)),
    "meamed": lambda rows_GN, n: columns.mean_around_median(list(rows_GN), len(rows_GN) - liars_of(n)),
    "robust": lambda rows_GN, n: torch.as_tensor(default(n)(rows_GN)),
}
"""Statistics that tolerate `liars_of` the members, whichever of them send rows. A missing row does not lower f, and
with fewer than 2f + 1 rows a part has no result. Each row counts once, whatever number of samples it claims
(exchange/statistic).
"""
PEERS_MIN = 5  # members needed to tolerate one liar
SCALED: tuple[Statistic, ...] = ("mean", "radial", "clipped")
"""Sums of rows, each tensor of a row times one number (`scales_of`)."""


class ReductionSettings(msgspec.Struct, frozen=True):
    group: Literal["all", "server", "pair", "one"] = "all"
    """`server`: one member owns all parts, as in a star. `pair`: random pairs, every member has its own anchor.
    `one`: each update is applied alone on arrival.
    """
    quorum: Annotated[int, msgspec.Meta(ge=0, le=PEERS_MAX)] = 0  # updates to wait for; 0: all of them
    grace: Whole = 0  # steps that later updates may follow the last one of the quorum
    statistic: Statistic = "mean"
    weight: Literal["samples", "tokens"] = "samples"  # tokens: tokens^2 / steps (2604.21428), so pace counts too
    own: Literal["sent", "fresh"] = "sent"
    """`fresh`: a round is applied while the next one ends; the member's stale share is replaced by its new one."""
    peers_min: Peers = 1  # minimum number of members for a round


def weight_of(reducer: ReductionSettings, samples: int, tokens: int, steps: int) -> int:
    if reducer.weight == "samples":
        return samples
    return round(tokens * tokens / steps) if steps else 0


def arrived(reducer: ReductionSettings, late: Sequence[int], overlap: int) -> tuple[list[bool], int]:
    """(counted?, steps until the round closes) for updates that are in flight for `late` steps each."""
    in_order = sorted(late)
    close = in_order[-1]
    if 0 < reducer.quorum < len(late):
        close = min(close, in_order[reducer.quorum - 1] + reducer.grace)
    close = max(close, overlap)
    return [steps <= close for steps in late], close


class ReducedAnswer(NamedTuple):
    value_N: Tensor | None  # value at every member; None if no row had any weight
    sent_bytes: int  # bytes of the result to one member; 0 if rows are gathered
    memory_N: Tensor | None  # error feedback of the owner


def reduced(
    reducer: ReductionSettings,
    rows: Sequence[tuple[int, Buffer]],
    n: int,
    up: Codec,
    down: Codec | None,
    memory_N: Tensor | None = None,
    remember: bool = False,
    *,
    sizes: Sequence[int] = (),
    members: int = 0,
) -> ReducedAnswer:
    """The owner's work for one part. Without `down`, every member decodes all rows and there is no encoded result.

    `sizes`: values of the part in each tensor; norm and direction of a row are per tensor. `members` of the round,
    with or without a row: the number of tolerated liars follows from it.
    """
    if reducer.statistic != "mean":
        mean_N = statistic_of(reducer.statistic, rows, n, up, sizes or (n,), members)
        return answered(mean_N, down, memory_N, remember)
    if down is None:
        return ReducedAnswer(gather(rows, n, up).mean_N, 0, memory_N)
    if remember:
        done, memory_N = combine_remembering(rows, n, up, down, memory_N, 1.0)
    else:
        done = combine(rows, n, up, down)
    if done.wire is None:
        return ReducedAnswer(None, 0, memory_N)
    return ReducedAnswer(down.decode(done.wire, n), len(done.wire), memory_N)


def answered(value_N: Tensor | None, down: Codec | None, memory_N: Tensor | None, remember: bool) -> ReducedAnswer:
    """A part's value after encoding and decoding with `down`."""
    if down is None or value_N is None:
        return ReducedAnswer(value_N, 0, memory_N)
    wire, left_N = pack(down, value_N, memory_N, 1.0)
    return ReducedAnswer(down.decode(wire, len(value_N)), len(wire), left_N if remember else None)


def statistic_of(
    which: Statistic, rows: Sequence[tuple[int, Buffer]], n: int, up: Codec, sizes: Sequence[int], members: int = 0
) -> Tensor | None:
    """Statistic of (weight, wire) rows, (n,). None if no row, or too few, have any weight."""
    return made_of(which, [(weight, up.decode(wire, n)) for weight, wire in rows], sizes, members)


def made_of(
    which: Statistic, rows: Sequence[tuple[int, Tensor]], sizes: Sequence[int], members: int = 0
) -> Tensor | None:
    """Statistic of (weight, row (n,)) rows. None if no row, or too few, have any weight."""
    kept = [(weight, row_N) for weight, row_N in rows if weight]
    robust = which in ROBUST
    if len(kept) < (2 * liars_of(members) + 1 if robust else 1) or (robust and members < PEERS_MIN):
        return None
    rows_GN = torch.stack([row_N for _, row_N in kept])
    if robust:
        return ROBUST[which](rows_GN, members)
    total = sum(weight for weight, _ in kept)
    share_G = torch.tensor([weight / total for weight, _ in kept], dtype=torch.float32)
    if which == "mean":
        return (rows_GN * share_G[:, None]).sum(0)
    if which == "support":
        return support_mean(rows_GN, share_G)
    scale_GT = scales_of(which, rows_GN, share_G, sizes)
    return (rows_GN * scale_GT.repeat_interleave(torch.tensor(sizes), 1)).sum(0)


def scales_of(which: Statistic, rows_GN: Tensor, share_G: Tensor, sizes: Sequence[int]) -> Tensor:
    """(G, tensors): factors of every row's tensors; the scaled rows sum up to the statistic."""
    if not sizes:  # an empty part of a small model
        return rows_GN.new_zeros(len(rows_GN), 0)
    scale = {"radial": radial_scales, "clipped": clipped_scales}.get(which, lambda _, share_G: share_G)
    return torch.stack([scale(piece_GN, share_G) for piece_GN in rows_GN.split(list(sizes), 1)], 1)


def radial_scales(rows_GN: Tensor, share_G: Tensor) -> Tensor:
    """Mean norm times mean direction (Decoupled DiLoCo 2604.21428): a long row does not turn the mean further."""
    length_G = rows_GN.norm(dim=1)
    return share_G / length_G.clamp(min=1e-30) * (length_G * share_G).sum()


def support_mean(rows_GN: Tensor, share_G: Tensor) -> Tensor:
    """Per value, the mean over the members that sent it (2509.22418): sparse supports hardly overlap."""
    weight_N = ((rows_GN != 0) * share_G[:, None]).sum(0)
    return (rows_GN * share_G[:, None]).sum(0) / weight_N.clamp(min=1e-30)


def clipped_scales(rows_GN: Tensor, share_G: Tensor) -> Tensor:
    """Mean of rows clipped to the median norm (Covenant 2603.08163): no row pulls further than half of them."""
    length_G = rows_GN.norm(dim=1)
    return share_G * (length_G.median() / length_G.clamp(min=1e-30)).clamp(max=1.0)


def agreement(rows: Sequence[tuple[int, Buffer]], n: int, up: Codec) -> float:
    """Mean cosine between two members' updates of one part, clipped to 0 … 1; 1 for a single member."""
    return agreement_of(torch.stack([up.decode(wire, n) for _, wire in rows]))


def agreement_of(rows_GN: Tensor) -> float:
    """`agreement` of decoded rows."""
    count = len(rows_GN)
    if count < 2:
        return 1.0
    direction_GN = rows_GN / rows_GN.norm(dim=1).clamp(min=1e-30)[:, None]
    total = float(direction_GN.sum(0).square().sum())
    return min(1.0, max(0.0, (total - count) / (count * (count - 1))))
