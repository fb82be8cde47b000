"""The slow work that a reduce asks for. Carried out off the loop; the machine never looks into a payload."""

from __future__ import annotations

import msgspec

from atoll.base.ids import PeerId
from atoll.base.machine import Payload


class Row(msgspec.Struct, frozen=True):
    peer: PeerId
    weight: int
    payload: Payload


class Combine(msgspec.Struct, frozen=True):
    """Decode the rows, average them by weight in the given order, encode the result once -> Combined."""

    round: int
    part: int
    parts: int
    rows: tuple[Row, ...]


class Combined(msgspec.Struct, frozen=True):
    payload: Payload | None  # None: no row could be decoded
    counted: tuple[PeerId, ...]
    undecodable: tuple[PeerId, ...]
