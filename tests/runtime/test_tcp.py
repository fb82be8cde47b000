"""Sockets as the host makes them."""

from __future__ import annotations

import asyncio
import socket

import pytest

from atoll.runtime.network import tcp
from atoll.wire.libp2p.multiaddr import DialAddress

pytestmark = pytest.mark.net


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
def test_a_path_that_swallows_everything_ends_the_connection_at_both_ends_while_a_round_can_still_be_saved():
    """Bulk lanes have no heartbeat: without this a dead one holds its part for a quarter of an hour."""

    async def both_ends() -> list[int]:
        server = await tcp.listening(DialAddress.of_host("127.0.0.1", 0), "cubic")
        server.listen(1)
        ours = await tcp.connect(DialAddress.of_host("127.0.0.1", server.getsockname()[1]), "cubic")
        theirs, _ = await asyncio.get_running_loop().sock_accept(server)
        ends = [ours, theirs]
        try:
            return [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for end in ends]
        finally:
            for end in (server, *ends):
                end.close()

    assert asyncio.run(both_ends()) == [60_000, 60_000]


def test_a_forbidden_address_is_not_dialed():
    """Every numeric address of a name is shown to the caller, who forbids all of them."""
    asked = list[str]()

    async def dial() -> None:
        await tcp.connect(DialAddress.of_host("localhost", 1), "cubic", lambda host: bool(asked.append(host)))

    with pytest.raises(OSError, match="another machine at every member"):
        asyncio.run(dial())
    assert "127.0.0.1" in asked
