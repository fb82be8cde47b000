"""Preference poll messages: the preferred branch, asked of sampled members (specs/branches.md).

Not signed: a response counts for the peer of its link and proves nothing to other peers.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from atoll.base.ids import Digest
from atoll.base.machine import Message

SlotName = Annotated[str, msgspec.Meta(max_length=64)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class PreferenceRequest(Message, frozen=True, tag="PreferenceRequest"):
    """Request for the receiver's preference in this slot. `choice`: the sender's own preference."""

    slot: SlotName
    number: Number
    choice: Digest


class PreferenceResponse(Message, frozen=True, tag="PreferenceResponse"):
    """The sender's current preference; None: none yet."""

    slot: SlotName
    number: Number
    choice: Digest | None
