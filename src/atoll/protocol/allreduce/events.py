"""Facts that an all-reduce reports to its round: parts with a result, parts without one, and why."""

from __future__ import annotations

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Fact
from atoll.wire.messages.statements import AgreedWeights


class PartResultAccepted(Fact, frozen=True, kw_only=True, tag="PartResultAccepted"):
    """The result of a part is here."""

    phase = "share"
    attempt: int
    part: int
    owner_index: int
    owner: PeerId
    digest: Digest
    contributors: tuple[PeerId, ...]


class PartMissing(Fact, frozen=True, kw_only=True, tag="PartMissing"):
    """No owner in the plan answered in time."""

    phase = "share"
    attempt: int
    part: int


class PartsReduced(Fact, frozen=True, kw_only=True, tag="PartsReduced"):
    """Every part has a result or is missing."""

    phase = "share"
    attempt: int


class RowDecodeFailed(Fact, frozen=True, kw_only=True, tag="RowDecodeFailed"):
    """This author's committed bytes do not decode, so its row does not count."""

    phase = "share"
    peer: PeerId
    part: int


class LocalPartCombineFailed(Fact, frozen=True, kw_only=True, tag="LocalPartCombineFailed"):
    """The local peer owns this part and cannot combine it; without another owner it has no result."""

    phase = "share"
    part: int
    why: str


class RowWeightsComputed(Fact, frozen=True, kw_only=True, tag="RowWeightsComputed"):
    """Weights of the rows of this attempt by their distances, as the local owner computed them."""

    phase = "share"
    attempt: int
    weighing: AgreedWeights
