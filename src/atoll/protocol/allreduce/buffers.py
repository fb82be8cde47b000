"""What a reduce holds: my own update, rows of others on their way into an answer, and answers."""

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
from atoll.wire.weights import RowWeights, weights_left


@dataclass(frozen=True)
class LocalRow:
    """My own encoded update: one payload per part, and my signed commitment to exactly these."""

    statement: SignedStatement
    parts: tuple[Payload, ...]

    @property
    def digests(self) -> tuple[Digest, ...]:
        return tuple(p.digest for p in self.parts)

    def path(self, part: int) -> tuple[Digest, ...]:
        """What shows that I committed to this part."""
        return self._tree.path(part)

    @cached_property
    def _tree(self) -> MerkleTree:
        return merkle_tree(self.digests)


@dataclass(frozen=True)
class StoredRow:
    """A row of this part: one peer's, or several peers' combined on the way."""

    names: frozenset[PeerId]
    weight: int
    payload: Payload
    path: tuple[Digest, ...] = ()  # of one peer's: what shows others that it committed to exactly this
    statement: SignedStatement | None = None

    @property
    def handed(self) -> bool:
        """Combined on the way: nobody committed to these bytes."""
        return self.statement is None


@dataclass
class PartAccumulator:
    """What I hold of one part that I am in charge of, as its owner or on the way to it."""

    owner_index: int  # or ONWARD
    below: frozenset[PeerId] | None = None  # whose rows come through me, or alone are taken; None: everybody's
    rows: dict[PeerId, StoredRow] = field(default_factory=dict[PeerId, StoredRow])  # by sender
    names: set[PeerId] = field(default_factory=set[PeerId])  # in any of the rows
    closed: bool = False  # its rows are being combined, or were
    done: StoredRow | None = None  # what I hand on

    def add(self, sender: PeerId, held: StoredRow) -> None:
        """The first word of each sender counts."""
        if sender not in self.rows:
            self.rows[sender] = held
            self.names |= held.names

    def chosen(self) -> dict[PeerId, StoredRow]:
        """Rows that name nobody twice, the largest first."""
        chosen: dict[PeerId, StoredRow] = {}
        named: set[PeerId] = set()
        for sender, held in sorted(self.rows.items(), key=lambda item: (-len(item[1].names), item[0])):
            if named.isdisjoint(held.names):
                chosen[sender] = held
                named |= held.names
        return {sender: chosen[sender] for sender in sorted(chosen)}


@dataclass(frozen=True)
class ReceivedResult:
    statement: SignedStatement
    answered: OwnerResult
    payload: Payload


class HeardResult(NamedTuple):
    """A checked result from another peer: with its bytes, or only the statement that the holder has them."""

    holder: PeerId
    statement: SignedStatement
    answered: OwnerResult
    payload: Payload | None = None


@dataclass(frozen=True)
class ComputedResult:
    """An answer of mine, and the rows that it was made of, in the order of its contributors; what a parent handed
    on comes under the parent's name, and those below it are left out."""

    answered: OwnerResult
    payload: Payload
    rows: tuple[StoredRow, ...]


def name_of(weighing: AgreedWeights) -> Digest:
    """What answers made with it call it: exactly these rows with these weights."""
    return digest(encode(weighing))


def shares_left(weighing: AgreedWeights, names: Sequence[PeerId]) -> RowWeights | None:
    """What the rows of these weigh where the others' are lost; None if most of what weighs anything is lost.

    Few rows are never blown up to stand for all.
    """
    shares = dict(zip(weighing.peers, weighing.shares, strict=True))
    left = fsum(shares[name] for name in names)
    return weights_in(weighing, names) if left > fsum(shares.values()) / 2 else None


def weights_in(weighing: AgreedWeights, names: Sequence[PeerId]) -> RowWeights:
    """What the rows of these weigh in a part that has no others."""
    place = {peer: index for index, peer in enumerate(weighing.peers)}
    return weights_left(weighing.weights, len(place), [place[name] for name in names])
