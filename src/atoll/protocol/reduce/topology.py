"""Reduce topologies as data: for every part of an update, who combines it and through whose hands it goes.

Pure functions of the agreed peers, a seed and agreed upload rates, so that every peer computes the same. Each
part is a tree whose root is the owner: rows go up, are combined on the way, and the answer comes down the same
tree. A tree reaches everybody once, so nobody is counted twice by construction. Never knows a tensor or a clock;
whether the people on the way may be trusted with partial sums is the planner's question, not asked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum, gcd, inf

from atoll.base.draw import shuffled
from atoll.base.ids import PeerId
from atoll.base.limits import OWNERS_PER_PART, PARTS_MAX

SHARE_UNITS = 4096  # shares are whole 4096ths of an update: finer than any measurement of an uplink

Weights = Mapping[PeerId, float]  # upload rate; only ratios matter. Zero, or not named: owns and hands on nothing


@dataclass(frozen=True)
class Part:
    """One slice of every update and the tree over which it is combined."""

    owners: tuple[PeerId, ...]  # who combines it, and who takes over, in order; at most OWNERS_PER_PART
    share: int  # relative size of this part, at least 1
    # Who hands its row to whom on the way up, instead of to the owner; whoever is not listed sends to the owner
    # directly, and nobody is listed with the owner as parent. A parent combines its children's rows with its own
    # into one row (weighted mean, summed weight, contributors) and hands it on. Answers come down the same tree.
    parents: Mapping[PeerId, PeerId]


@dataclass(frozen=True)
class Topology:
    """How one update is reduced. All peers that are not listed anywhere send every part to its owner."""

    name: str
    parts: tuple[Part, ...]


# ---- one function per topology -------------------------------------------------------------------------------


def butterfly(peers: tuple[PeerId, ...], seed: bytes, weights: Weights | None = None, pieces: int = 1) -> Topology:
    """Every peer owns one part, up to PARTS_MAX owners; all send to owners directly (reduce-scatter, all-gather).

    With `weights` the parts are as large as balance the uplinks, and above PARTS_MAX peers the fastest own.
    """
    order = _fastest(_carriers(peers, seed, "owners", weights), weights)[:PARTS_MAX]
    shares = _shares([weights[p] for p in order], len(peers)) if weights else [1] * len(order)
    order = [peer for peer, share in zip(order, shares, strict=True) if share]
    shares = [share for share in shares if share]
    parts = tuple(
        Part(_chain(order, first), share, {}) for first, share in list(enumerate(shares)) * _positive(pieces)
    )
    return Topology("butterfly", parts)


# ---- who carries, and how much -------------------------------------------------------------------------------


def _carriers(peers: tuple[PeerId, ...], seed: bytes, purpose: str, weights: Weights | None) -> list[PeerId]:
    """Peers that may own parts and hand rows on, in a drawn order. Raises ValueError if there are none."""
    able = [p for p in shuffled(seed, purpose, peers) if weights is None or 0 < weights.get(p, 0) < inf]
    if not able:
        raise ValueError("nobody can own a part: at least one peer needs a positive upload rate")
    return able


def _fastest(order: list[PeerId], weights: Weights | None) -> list[PeerId]:
    """Fastest first; equals stay in the drawn order, so that they take turns from round to round."""
    return sorted(order, key=lambda p: -weights[p]) if weights else order


def _chain(order: list[PeerId], first: int) -> tuple[PeerId, ...]:
    return tuple(order[(first + k) % len(order)] for k in range(min(OWNERS_PER_PART, len(order))))


def _positive(pieces: int) -> int:
    if pieces < 1:
        raise ValueError(f"an update cannot be cut into {pieces} pieces per part; use 1 or more")
    return pieces


def _shares(rates: list[float], peers: int) -> list[int]:
    """Shares that let the slowest uplink finish first, in SHARE_UNITS over their common divisor; may be 0.

    A peer with share s of the update sends 1 - s of it to other owners and s to peers - 1 listeners, so its
    uplink is busy for (1 + (peers - 2) s) / rate. The least level t that all reach gives
    s = max(0, (t rate - 1) / (peers - 2)) with shares that add up to 1: water-filling (Boyd & Vandenberghe 2004,
    example 5.2). Of two peers both send one update whatever the shares; they are cut by rate.
    """
    if peers <= 2:
        total = fsum(rates)
        parts = [rate / total for rate in rates]
    else:
        fast = sorted(rates, reverse=True)
        levels = [(peers - 2 + k) / fsum(fast[:k]) for k in range(1, len(fast) + 1)]
        level = min(levels)  # one more owner lowers the level as long as its own share is positive
        parts = [max(0.0, level * rate - 1) / (peers - 2) for rate in rates]
    units = [round(part * SHARE_UNITS) for part in parts]
    divisor = gcd(*units)
    return [u // divisor for u in units]
