"""Data that an all-reduce holds: the local update, rows of other peers, and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import fsum
from typing import NamedTuple

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Payload
from atoll.crypto.digest import MerkleTree, digest, merkle_tree
from atoll.wire.codec import encode
from atoll.wire.messages.statements import AgreedWeights, OwnerResult, SignedStatement
from atoll.wire.weights import RowWeights, weights_of_kept


@dataclass(frozen=True)
class LocalRow:
    """The encoded local update: one payload per part, and the signed commitment to exactly these."""

    statement: SignedStatement
    parts: tuple[Payload, ...]

    @property
    def digests(self) -> tuple[Digest, ...]:
        return tuple(p.digest for p in self.parts)

    def path(self, part: int) -> tuple[Digest, ...]:
        """The Merkle path from this part to the committed root."""
        return self._tree.path(part)

    @cached_property
    def _tree(self) -> MerkleTree:
        return merkle_tree(self.digests)


@dataclass(frozen=True)
class GatheredRow:
    """A row of one part: one author's, or the sum of a relay."""

    names: frozenset[PeerId]
    weight: int
    payload: Payload
    path: tuple[Digest, ...] = ()  # of one author: the proof that it committed to these bytes
    statement: SignedStatement | None = None

    @property
    def handed(self) -> bool:
        """Whether the row is a sum of a relay: no peer committed to these bytes."""
        return self.statement is None


@dataclass
class PartRowCollector:
    """Rows of one part that the local peer gathers, as an owner or relay."""

    owner_index: int  # ONWARD for a relay
    below: frozenset[PeerId] | None = None  # authors of the rows; None: all members
    rows: dict[PeerId, GatheredRow] = field(default_factory=dict[PeerId, GatheredRow])  # by sender
    names: set[PeerId] = field(default_factory=set[PeerId])  # contributors of all rows
    closed: bool = False  # no more rows: they are being combined, or were
    done: GatheredRow | None = None  # the sum of a relay

    def add(self, sender: PeerId, held: GatheredRow) -> None:
        """Add a row; the first one of each sender counts."""
        if sender not in self.rows:
            self.rows[sender] = held
            self.names |= held.names

    def disjoint_rows(self) -> dict[PeerId, GatheredRow]:
        """Rows that count no contributor twice: larger rows are preferred. In order of senders."""
        chosen: dict[PeerId, GatheredRow] = {}
        named: set[PeerId] = set()
        for sender, held in sorted(self.rows.items(), key=lambda item: (-len(item[1].names), item[0])):
            if named.isdisjoint(held.names):
                chosen[sender] = held
                named |= held.names
        return {sender: chosen[sender] for sender in sorted(chosen)}


@dataclass(frozen=True)
class ReceivedResult:
    """A signed result with its bytes."""

    statement: SignedStatement
    result: OwnerResult
    payload: Payload


class RemotePartResult(NamedTuple):
    """A checked result from another peer: with its bytes, or only the statement that the holder has them."""

    holder: PeerId
    statement: SignedStatement
    answered: OwnerResult
    payload: Payload | None = None


@dataclass(frozen=True)
class ComputedResult:
    """An own result and its rows, in the order of contributors.

    A relay's sum stands under the relay's name; the authors below it are left out.
    """

    answered: OwnerResult
    payload: Payload
    rows: tuple[GatheredRow, ...]


# by part and digest: an owner's results for two parts may have equal bytes
ComputedResults = dict[tuple[int, Digest], ComputedResult]


def weights_digest(weighing: AgreedWeights) -> Digest:
    """The digest of exactly these rows with these weights, which results name."""
    return digest(encode(weighing))


def weights_left_of(weighing: AgreedWeights, names: Sequence[PeerId]) -> RowWeights | None:
    """Weights of the rows that are left, scaled up to the same sum. None if half of the weight or more is lost.

    A few rows never stand for all.
    """
    shares = dict(zip(weighing.peers, weighing.shares, strict=True))
    left = fsum(shares[name] for name in names)
    return weights_of(weighing, names) if left > fsum(shares.values()) / 2 else None


def weights_of(weighing: AgreedWeights, names: Sequence[PeerId]) -> RowWeights:
    """Weights of these rows in a part without others, scaled up to the same sum."""
    place = {peer: index for index, peer in enumerate(weighing.peers)}
    return weights_of_kept(weighing.weights, len(place), [place[name] for name in names])
