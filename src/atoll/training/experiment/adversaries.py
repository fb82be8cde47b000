"""Villains of an experiment: members that know what all honest ones send, and send something else.

A villain trains, hears and owns parts like everybody; only its update is a lie, one of `aggregate/attacks`, made
from what the honest updates decode to and encoded like any other. What no codec would encode (a NaN, an infinity,
1e30) it sends as raw fp32; owners refuse such a wire, and the others count without it.
Who poisons what it learns from (`label_flip`, `backdoor`) needs none of this: give that member data of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.training.codec import Codec
from atoll.training.recipe.update import Bounds, EncodedUpdate, encode_update
from atoll.training.robust import aggregate
from atoll.training.robust.attacks import Rule, lies


def lying(
    updates: Mapping[int, EncodedUpdate],
    villains: Mapping[int, str],
    bounds: Bounds,
    ups: Sequence[Codec],
    rule: Rule,
) -> dict[int, EncodedUpdate]:
    """Updates of the villains among the members, who agree with each other where they share an attack.

    `rule`: rows (n, d) -> (d,), what the owners will do, for attacks that search their strength against it.
    """
    honest = [decoded(update, bounds, ups) for peer, update in updates.items() if peer not in villains]
    if not honest:
        return {}
    honest_HN, told = torch.stack(honest), {}
    for name in sorted({villains[peer] for peer in updates if peer in villains}):
        liars = [peer for peer in updates if villains.get(peer) == name]
        for peer, row_N in zip(liars, lies(name, honest_HN, len(liars), rule), strict=True):
            told[peer] = encoded_anyway(row_N, bounds, ups)
    return told


def readable(update: EncodedUpdate, bounds: Bounds, ups: Sequence[Codec]) -> bool:
    """Owners of all parts would take these wires."""
    try:
        for up, wire, (lo, hi) in zip(ups, update.wires, bounds, strict=True):
            up.open_wire(wire, hi - lo)
    except PeerFault:
        return False
    return True


def decoded(update: EncodedUpdate, bounds: Bounds, ups: Sequence[Codec]) -> Tensor:
    wires = zip(ups, update.wires, bounds, strict=True)
    return torch.cat([up.decode(wire, hi - lo) for up, wire, (lo, hi) in wires])


def encoded_anyway(row_N: Tensor, bounds: Bounds, ups: Codec | Sequence[Codec]) -> EncodedUpdate:
    """The update that says this row: as a codec has it, or as raw fp32 where none would encode it."""
    nothing_N = torch.zeros_like(row_N)
    try:
        return encode_update(row_N, nothing_N, None, bounds, ups, 0.0)
    except ValueError:
        raw = [row_N[lo:hi].numpy().data.cast("B") for lo, hi in bounds]
        return EncodedUpdate(tuple(raw), nothing_N, bounds)


def rule_of(statistic: str, liars: int) -> Rule:
    """What owners make of whole rows (n, d) in a run of this statistic that reckons with so many liars."""
    if statistic == "mean":
        return lambda rows_ND: rows_ND.mean(dim=0)
    name = {"robust": "caf", "median": "coordinate_median"}.get(statistic, statistic)
    return lambda rows_ND: torch.as_tensor(aggregate(name, rows_ND, f=liars))
