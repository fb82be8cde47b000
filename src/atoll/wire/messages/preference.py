"""Messages of a preference: what do you prefer, asked of a few members at a time (specs/branches.md).

Not signed: an answer counts for whoever gives it over its own link, and proves nothing to anybody else.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from atoll.base.ids import Digest
from atoll.base.machine import Message

SlotName = Annotated[str, msgspec.Meta(max_length=64)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class PreferenceRequest(Message, frozen=True, tag="WantPreference"):
    """What do you prefer in this slot? I prefer `choice`."""

    slot: SlotName
    number: Number
    choice: Digest


class PreferenceResponse(Message, frozen=True, tag="PreferenceIs"):
    """I prefer this now; None: nothing yet."""

    slot: SlotName
    number: Number
    choice: Digest | None
