"""The slow work that a reduce asks for. Carried out off the loop; the machine never looks into a payload."""

from __future__ import annotations

import msgspec

from atoll.base.ids import PeerId
from atoll.base.machine import Payload


class Row(msgspec.Struct, frozen=True):
    peer: PeerId  # who sent it
    weight: int
    payload: Payload
    names: tuple[PeerId, ...]  # whose updates are in it


class Combine(msgspec.Struct, frozen=True):
    """Decode the rows, average them by weight in the given order, encode the result once -> Combined."""

    round: int
    part: int
    shares: tuple[int, ...]  # relative sizes of all parts
    rows: tuple[Row, ...]
    onward: bool = False  # the result is a row again: encode it as an update, not as an answer

    @property
    def parts(self) -> int:
        return len(self.shares)


class Combined(msgspec.Struct, frozen=True):
    payload: Payload | None  # None: no row could be decoded
    counted: tuple[PeerId, ...]
    undecodable: tuple[PeerId, ...]
