"""Byzantine members of an experiment: forged updates computed from the honest ones (omniscient attackers).

A Byzantine member trains, receives and owns parts like any other member. Only its update is forged, by one of the
attacks in `robust/attacks`. The attack reads the decoded honest updates; the forged row is encoded like any other.
A row that no codec encodes (a NaN, an infinity, 1e30) is sent as raw fp32. Owners refuse such a wire, and the
remaining rows count without it.
Not responsible for:
- data poisoning (`label_flip`, `backdoor`): give the member its own data set instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.training.codec import Codec
from atoll.training.recipe.error_feedback import EncodedUpdate, encode_update
from atoll.training.recipe.update import Bounds
from atoll.training.robust import aggregate
from atoll.training.robust.attacks import Rule, attack_rows


def forge_updates(
    updates: Mapping[int, EncodedUpdate],
    villains: Mapping[int, str],
    bounds: Bounds,
    ups: Sequence[Codec],
    rule: Rule,
) -> dict[int, EncodedUpdate]:
    """Forged updates of the Byzantine members. Members with the same attack collude.

    `rule`: rows (n, d) -> (d,), the owners' aggregation, for attacks that search their strength against it.
    """
    honest = [decoded(update, bounds, ups) for peer, update in updates.items() if peer not in villains]
    if not honest:
        return {}
    honest_HN, forged = torch.stack(honest), {}
    for name in sorted({villains[peer] for peer in updates if peer in villains}):
        liars = [peer for peer in updates if villains.get(peer) == name]
        for peer, row_N in zip(liars, attack_rows(name, honest_HN, len(liars), rule), strict=True):
            forged[peer] = encode_or_raw(row_N, bounds, ups)
    return forged


def is_readable(update: EncodedUpdate, bounds: Bounds, ups: Sequence[Codec]) -> bool:
    """Whether the owners of all parts accept these wires."""
    try:
        for up, wire, (lo, hi) in zip(ups, update.wires, bounds, strict=True):
            up.open_wire(wire, hi - lo)
    except PeerFault:
        return False
    return True


def decoded(update: EncodedUpdate, bounds: Bounds, ups: Sequence[Codec]) -> Tensor:
    wires = zip(ups, update.wires, bounds, strict=True)
    return torch.cat([up.decode(wire, hi - lo) for up, wire, (lo, hi) in wires])


def encode_or_raw(row_N: Tensor, bounds: Bounds, ups: Codec | Sequence[Codec]) -> EncodedUpdate:
    """The row as an update: encoded by the codecs, or as raw fp32 if they refuse it."""
    nothing_N = torch.zeros_like(row_N)
    try:
        return encode_update(row_N, nothing_N, None, bounds, ups, 0.0)
    except ValueError:
        raw = [row_N[lo:hi].numpy().data.cast("B") for lo, hi in bounds]
        return EncodedUpdate(tuple(raw), nothing_N, bounds)


def aggregation_rule(statistic: str, liars: int) -> Rule:
    """Aggregation of whole rows (n, d) in a run with this statistic that tolerates `liars` Byzantine rows."""
    if statistic == "mean":
        return lambda rows_ND: rows_ND.mean(dim=0)
    plain = statistic.removeprefix("nnm + ")
    name = {"robust": "caf", "median": "coordinate_median"}.get(plain, plain)
    pre = ["nnm"] if plain != statistic else []
    return lambda rows_ND: torch.as_tensor(aggregate(name, rows_ND, f=liars, pre=pre))
