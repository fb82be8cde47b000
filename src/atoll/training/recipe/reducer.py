"""Whose updates become one, and how: the group, who is waited for, and what is made of the rows.

Acceptance: everybody, or a quorum and a grace period. Statistic: the weighted mean, or one that looks at rows
as wholes, or one that withstands lies. Part owners compute it and ship bytes, so reductions over a row need no
agreement about their bits; a statistic sees the part that its owner holds, never the whole update. Only `robust`
does: it needs distances between whole updates, which are sums over their parts (training/robust/gram).
The mean itself is `training/exchange/combine`, the very function of real rounds.
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
ROBUST: dict[Statistic, Callable[[Tensor, int], Tensor]] = {  # of (rows, members of the round)
    "median": lambda rows_GN, _: columns.median(list(rows_GN)),
    "trimmed_mean": lambda rows_GN, n: columns.trimmed_mean(list(rows_GN), liars_of(n)),
    "meamed": lambda rows_GN, n: columns.mean_around_median(list(rows_GN), len(rows_GN) - liars_of(n)),
    "robust": lambda rows_GN, n: torch.as_tensor(default(n)(rows_GN)),
}
"""What withstands `liars_of` the members, whoever of them is heard; a row that does not come lowers no f, and with
fewer than 2f + 1 a part counts for nobody. Each row counts once, whatever samples it claims
(training/exchange/statistic)."""
PEERS_MIN = 5  # that withstand one liar
SCALED: tuple[Statistic, ...] = ("mean", "radial", "clipped")
"""Sums of rows, each tensor of a row times one number (`scales_of`)."""


class RecipeReducer(msgspec.Struct, frozen=True):
    group: Literal["all", "server", "pair", "one"] = "all"
    """`server`: one member owns everything, as in a star. `pair`: random pairs, every member has an anchor of its
    own. `one`: each arrives alone, nobody waits."""
    quorum: Annotated[int, msgspec.Meta(ge=0, le=PEERS_MAX)] = 0  # updates that are waited for; 0: all of them
    grace: Whole = 0  # steps that others may be later than the quorum's last
    statistic: Statistic = "mean"
    weight: Literal["samples", "tokens"] = "samples"  # tokens: tokens^2 / steps (2604.21428), so pace counts, too
    own: Literal["sent", "fresh"] = "sent"
    """`fresh`: a round is applied while the next one ends, my own stale share of it exchanged for my new one."""
    peers_min: Peers = 1  # below so many members there is no round


def weight_of(reducer: RecipeReducer, samples: int, tokens: int, steps: int) -> int:
    if reducer.weight == "samples":
        return samples
    return round(tokens * tokens / steps) if steps else 0


def arrived(reducer: RecipeReducer, late: Sequence[int], overlap: int) -> tuple[list[bool], int]:
    """(who counts, steps until the round is closed) of updates that take so many steps each."""
    in_order = sorted(late)
    close = in_order[-1]
    if 0 < reducer.quorum < len(late):
        close = min(close, in_order[reducer.quorum - 1] + reducer.grace)
    close = max(close, overlap)
    return [steps <= close for steps in late], close


class ReducedAnswer(NamedTuple):
    value_N: Tensor | None  # what every member ends with; None if no row had any weight
    sent_bytes: int  # of the answer to one member; 0 where rows were gathered
    memory_N: Tensor | None  # the owner's, of what its answers left out


def reduced(
    reducer: RecipeReducer,
    rows: Sequence[tuple[int, Buffer]],
    n: int,
    up: Codec,
    down: Codec | None,
    memory_N: Tensor | None = None,
    remember: bool = False,
    sizes: Sequence[int] = (),
    members: int = 0,
) -> ReducedAnswer:
    """The owner's work for one part. Without `down` everybody decodes everybody and there is no answer.

    `sizes`: how many values of the part belong to each tensor in it; a row's length and direction are tensor-wise.
    `members` of the round, heard or not: how many may lie follows from it.
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
    """What becomes of a part's value on its way back."""
    if down is None or value_N is None:
        return ReducedAnswer(value_N, 0, memory_N)
    wire, left_N = pack(down, value_N, memory_N, 1.0)
    return ReducedAnswer(down.decode(wire, len(value_N)), len(wire), left_N if remember else None)


def statistic_of(
    which: Statistic, rows: Sequence[tuple[int, Buffer]], n: int, up: Codec, sizes: Sequence[int], members: int = 0
) -> Tensor | None:
    """(n,), or None if no row has any weight, or too few have."""
    return made_of(which, [(weight, up.decode(wire, n)) for weight, wire in rows], sizes, members)


def made_of(
    which: Statistic, rows: Sequence[tuple[int, Tensor]], sizes: Sequence[int], members: int = 0
) -> Tensor | None:
    """The statistic of (weight, row (n,)), or None if no row has any weight, or too few have."""
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
    """(G, tensors): what every row's tensors are multiplied with, so that their sum is the statistic."""
    scale = {"radial": radial_scales, "clipped": clipped_scales}.get(which, lambda _, share_G: share_G)
    return torch.stack([scale(piece_GN, share_G) for piece_GN in rows_GN.split(list(sizes), 1)], 1)


def radial_scales(rows_GN: Tensor, share_G: Tensor) -> Tensor:
    """Mean length times mean direction (Decoupled DiLoCo 2604.21428): one long row turns the mean no further."""
    length_G = rows_GN.norm(dim=1)
    return share_G / length_G.clamp(min=1e-30) * (length_G * share_G).sum()


def support_mean(rows_GN: Tensor, share_G: Tensor) -> Tensor:
    """Per value, the mean over those who sent it (2509.22418): sparse supports hardly overlap."""
    weight_N = ((rows_GN != 0) * share_G[:, None]).sum(0)
    return (rows_GN * share_G[:, None]).sum(0) / weight_N.clamp(min=1e-30)


def clipped_scales(rows_GN: Tensor, share_G: Tensor) -> Tensor:
    """Mean of rows cut to the median length (Covenant 2603.08163): nobody pulls further than half the others."""
    length_G = rows_GN.norm(dim=1)
    return share_G * (length_G.median() / length_G.clamp(min=1e-30)).clamp(max=1.0)


def agreement(rows: Sequence[tuple[int, Buffer]], n: int, up: Codec) -> float:
    """Mean cosine between two members' updates of one part, cut to 0 … 1; 1 for a single member."""
    return agreement_of(torch.stack([up.decode(wire, n) for _, wire in rows]))


def agreement_of(rows_GN: Tensor) -> float:
    """The same of rows that are decoded already."""
    count = len(rows_GN)
    if count < 2:
        return 1.0
    direction_GN = rows_GN / rows_GN.norm(dim=1).clamp(min=1e-30)[:, None]
    total = float(direction_GN.sum(0).square().sum())
    return min(1.0, max(0.0, (total - count) / (count * (count - 1))))
