"""What a reduce tells the round around it: which parts are answered, which are missing, and why. Values only."""

from __future__ import annotations

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Fact
from atoll.wire.messages.statements import AgreedWeights


class PartAnswered(Fact, frozen=True, kw_only=True, tag="PartAnswered"):
    """The combined bytes of a part are here."""

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


class PartsReduced(Fact, frozen=True, kw_only=True, tag="Reduced"):
    """Every part is answered or missing."""

    phase = "share"
    attempt: int


class RowUndecodable(Fact, frozen=True, kw_only=True, tag="Garbage"):
    """This peer's committed bytes do not decode; it does not count."""

    phase = "share"
    peer: PeerId
    part: int


class OwnerFailed(Fact, frozen=True, kw_only=True, tag="NoAnswer"):
    """I own this part and cannot answer for it: somebody else may, else it counts for nobody."""

    phase = "share"
    part: int
    why: str


class RowsWeighed(Fact, frozen=True, kw_only=True, tag="RowsWeighed"):
    """What the rows of this attempt weigh by their distances, as this owner computed it."""

    phase = "share"
    attempt: int
    weighing: AgreedWeights
