"""Addresses as text and as bytes, and what is said to somebody who typed one wrongly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import PeerFault
from atoll.crypto.identity import Identity
from atoll.wire.libp2p import multiaddr
from atoll.wire.libp2p.multiaddr import DialAddress

WSS = (("tcp", "443"), ("wss", ""))
PEER = Identity.from_seeds(bytes(32), bytes(32)).peer


def test_the_example_of_the_specification():
    """multiformats/multiaddr test/multiaddr.feature: /ip4/192.0.2.42/tcp/443 is 0x04c000022a0601bb."""
    assert multiaddr.to_bytes("/ip4/192.0.2.42/tcp/443").hex() == "04c000022a0601bb"
    assert multiaddr.from_bytes(bytes.fromhex("04c000022a0601bb")) == "/ip4/192.0.2.42/tcp/443"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("/ip4/192.0.2.7/tcp/7071", DialAddress.of_host("192.0.2.7", 7071)),
        (f"/ip6/2001:db8::7/tcp/1/p2p/{PEER}", DialAddress.of_host("2001:db8::7", 1, "tcp", PEER)),
        ("/dns/a-b.example.org/tcp/80/ws", DialAddress.of_host("a-b.example.org", 80, "tcp/ws")),
        (
            f"/dns4/example.org/tcp/443/wss/p2p/{PEER}",
            DialAddress((("dns4", "example.org"), *WSS), PEER),
        ),
        ("/dns6/example.org/tcp/443/tls/ws", DialAddress((("dns6", "example.org"), *WSS))),
        ("/ip4/192.0.2.7/udp/9/quic-v1", DialAddress.of_host("192.0.2.7", 9, "udp/quic-v1")),
        (f"/unix/%2Frun%2Fa.sock/p2p/{PEER}", DialAddress((("unix", "%2Frun%2Fa.sock"),), PEER)),
    ],
)
def test_an_address_says_where_and_whom_to_dial(text: str, where: DialAddress):
    assert multiaddr.endpoint(text) == where
    assert multiaddr.from_bytes(multiaddr.to_bytes(text)) == text
    assert multiaddr.endpoint(multiaddr.text_of(where)) == where


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("127.0.0.1:7071", "write /ip4/127.0.0.1/tcp/7071"),
        ("[::1]:7071", "write /ip6/::1/tcp/7071"),
        ("wss://example.org:443/", "write /dns/example.org/tcp/443/wss"),
        ("example.org", "write for example /ip4/192.0.2.7/tcp/7071"),
        ("/ip4/300.1.1.1/tcp/1", "write /ip4/192.0.2.7, not /ip4/300.1.1.1"),
        ("/ip6/fe80::1%eth0/tcp/1", "write /ip6/2001:db8::7, not /ip6/fe80::1%eth0"),
        ("/ip4/192.0.2.7/tcp/65536", "write /tcp/7071, not /tcp/65536; a port is a number from 1 to 65535"),
        (
            "192.0.2.7:99999",
            "write for example /ip4/192.0.2.7/tcp/7071 or /dns/peer.example.org/tcp/7071; a port is",
        ),
        ("/ip4/192.0.2.7/tcp", "ends too early; write /tcp/7071"),
        ("/ip4/192.0.2.7/sctp/7071", "/sctp is not one of /ip4, /tcp"),
        ("/tcp/7071", "write a host, a port and perhaps the peer"),
        ("/ip4/192.0.2.7/tcp/1/tcp/2", "write a host, a port and perhaps the peer"),
        ("/ip4/192.0.2.7/ws", "write a host, a port and perhaps the peer"),
        ("/", "names no host and no port; write for example /ip4/192.0.2.7"),
        ("/memory/" + 200 * "é", "has 404 bytes, allowed are 1 to 256"),
        ("/unix/%00", "write /unix/%2Frun%2Fatoll.sock, not /unix/%00"),
        ("/ip4/192.0.2.7", "write a host, a port and perhaps the peer"),
        (f"/ip4/192.0.2.7/tcp/1/p2p/{PEER[:-1]}", "write /p2p/12D3KooW"),
        ("/dns/-bad-/tcp/1", "write /dns/peer.example.org, not /dns/-bad-"),
    ],
)
def test_a_wrong_address_is_answered_with_the_one_to_write(text: str, advice: str):
    with pytest.raises(ValueError, match="/") as caught:
        multiaddr.endpoint(text)
    assert advice in str(caught.value)


@given(st.binary(max_size=300))
def test_bytes_of_strangers_are_an_address_or_a_fault(data: bytes):
    try:
        text = multiaddr.from_bytes(data, "stranger")
    except PeerFault:
        return
    assert multiaddr.from_bytes(multiaddr.to_bytes(text)) == text
