"""Messages of an audit, an opening or a score: how one learns where the other laid out what it has to show.

What is shown is a blob, fetched like any other; what shows that a row cannot be read is small, and comes unasked.
Who says what in these words proves nothing; what an auditor found is a signed report.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from atoll.base.ids import Digest
from atoll.base.limits import UNREADABLE_BYTES_MAX
from atoll.base.machine import Message


class ExhibitRequest(Message, frozen=True, tag="WantExhibit"):
    """I was drawn to look at your segment of this round, your answer or your update: where is what you show?"""

    round: int
    opening: int | UnsetType = UNSET  # the number of the opening, where it is one
    update: bool | UnsetType = UNSET  # True: the whole encoded update, to score it


class ExhibitResponse(Message, frozen=True, tag="ExhibitIs"):
    """It lies in this blob; None while it is being made, or if it is lost."""

    round: int
    blob: Digest | None
    opening: int | UnsetType = UNSET
    update: bool | UnsetType = UNSET


class MalformedRowShown(Message, frozen=True, tag="Unreadable"):
    """Somebody committed to a row that cannot be read. To all who vote; verification/malformed_updates/messages.py
    says what is shown."""

    shown: Annotated[bytes, Meta(max_length=UNREADABLE_BYTES_MAX)]
