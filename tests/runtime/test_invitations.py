"""What `atoll invite` lists, revokes and refuses: only tickets that can still be used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atoll.base.errors import RefusedError, UsageError
from atoll.runtime.control.invitations import InviteArguments, _invitation, _revocation, list_invitations
from atoll.wire.messages.vertex import IssuedTicketRecord

GOOD = IssuedTicketRecord(b"good ticket 1234", b"key", "trainer", 1, 1e6)
OVER = IssuedTicketRecord(b"used up ticket 1", b"key", "trainer", 0, 1e6)


def host() -> Any:
    head = SimpleNamespace(tickets=(GOOD, OVER))
    history = SimpleNamespace(head_body=head)
    return SimpleNamespace(machine=SimpleNamespace(history=history), clock=SimpleNamespace(now=lambda: 0.0))


def test_a_ticket_that_is_used_up_is_neither_listed_nor_revoked():
    """Its line stays in the vertices until it expires, so that no old invitation brings it back."""
    assert [found["id"] for found in list_invitations(host())] == [GOOD.ticket.hex()]
    assert _revocation(host(), GOOD.ticket.hex())[0].uses == 0
    with pytest.raises(RefusedError, match="0 tickets"):
        _revocation(host(), OVER.ticket.hex())


def test_a_ticket_for_longer_than_members_take_is_refused_before_it_is_made():
    with pytest.raises(UsageError, match="more than a year"):
        _invitation(host(), InviteArguments(lasts_s=400 * 86400.0))
