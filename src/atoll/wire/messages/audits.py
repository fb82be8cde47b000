"""Verification messages: locate the evidence of a replay audit, a sum check or a loss score.

Evidence is a blob, fetched like any other. Evidence of a malformed row is small and sent without a request.
These messages prove nothing; an auditor's finding is a signed report.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from atoll.base.ids import Digest
from atoll.base.limits import MALFORMED_ROW_BYTES_MAX
from atoll.base.machine import Message


class ExhibitRequest(Message, frozen=True, tag="ExhibitRequest"):
    """Request of a drawn verifier: which blob holds the receiver's evidence for this round?"""

    round: int
    opening: int | UnsetType = UNSET  # number of the opening, if a sum opening is requested
    update: bool | UnsetType = UNSET  # True: the whole encoded update is requested, to score it


class ExhibitResponse(Message, frozen=True, tag="ExhibitResponse"):
    """Blob with the evidence; None while it is being created, or if it is lost."""

    round: int
    blob: Digest | None
    opening: int | UnsetType = UNSET
    update: bool | UnsetType = UNSET


class MalformedRowShown(Message, frozen=True, tag="MalformedRowShown"):
    """Evidence of a commitment to an unreadable row, sent to all voters.

    verification/malformed_updates/messages.py defines its content.
    """

    shown: Annotated[bytes, Meta(max_length=MALFORMED_ROW_BYTES_MAX)]
