"""Varints, length-prefixed messages, ping, identify: the small formats of libp2p."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import PeerFault
from atoll.base.limits import CONTROL_FRAME_MAX
from atoll.crypto.identity import Identity, libp2p_public_key
from atoll.wire.libp2p import framing, identify, multiaddr, ping, varint

# ---- varint ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "wire"),
    [  # multiformats/unsigned-varint, "Spec": the table of examples
        (1, "01"),
        (127, "7f"),
        (128, "8001"),
        (255, "ff01"),
        (300, "ac02"),
        (16384, "808001"),
        (2**63 - 1, "ffffffffffffffff7f"),
    ],
)
def test_varints_of_the_specification(value: int, wire: str):
    assert varint.encode(value).hex() == wire
    assert varint.decode(bytes.fromhex(wire)) == (value, len(wire) // 2)


@given(st.integers(0, 2**63 - 1), st.binary(max_size=3), st.binary(max_size=3))
def test_a_varint_is_read_where_it_stands_and_waits_for_its_last_byte(value: int, before: bytes, after: bytes):
    wire = varint.encode(value)
    assert varint.decode(before + wire + after, len(before)) == (value, len(before) + len(wire))
    assert varint.decode(before + wire[:-1], len(before)) is None


@pytest.mark.parametrize("wire", ["8000", "818000", "80" * 9, "ff" * 9 + "01", "ff" * 10])
def test_a_varint_of_another_spelling_or_of_ten_bytes_is_a_fault(wire: str):
    with pytest.raises(PeerFault):
        varint.decode(bytes.fromhex(wire))


# ---- messages on a stream ----------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300), max_size=6), st.lists(st.integers(1, 50)), st.booleans())
def test_however_a_stream_is_cut_the_same_messages_come_out(messages: list[bytes], cuts: list[int], wide: bool):
    wire = b"".join((framing.frame if wide else framing.varint_frame)(m) for m in messages)
    frames = framing.LengthPrefixedFrames(read_length=framing.u32_length if wide else framing.varint_length)
    out: list[bytes] = []
    for size in [*cuts, len(wire) + 1]:
        out += frames.receive(memoryview(wire)[:size])
        wire = wire[size:]
    assert out == messages


def test_a_message_above_the_bound_is_refused_by_its_length_alone():
    assert framing.LengthPrefixedFrames().receive(framing.frame(bytes(CONTROL_FRAME_MAX))) == [
        bytes(CONTROL_FRAME_MAX)
    ]
    with pytest.raises(PeerFault, match="longer than"):
        framing.LengthPrefixedFrames("liar").receive((CONTROL_FRAME_MAX + 1).to_bytes(4, "big"))


# ---- ping --------------------------------------------------------------------------------------------------


def test_ping_comes_back_byte_for_byte_however_it_is_cut():
    echo = ping.PingResponder()
    for payload in (bytes(range(32)), b"\xff" * 32):
        assert echo.receive(payload[:31]) == b""  # whole payloads only
        assert echo.receive(payload[31:]) == payload


# ---- identify ----------------------------------------------------------------------------------------------


def test_identify_survives_the_wire_with_every_field():
    identity = Identity.from_seeds(bytes(32), bytes(32))
    said = identify.IdentifyMessage(
        public_key=libp2p_public_key(identity.public.ed25519),
        listen_addresses=(multiaddr.to_bytes("/ip4/127.0.0.1/tcp/7071"), b"\x91\x02\x04\xd2"),
        protocols=("/ipfs/id/1.0.0", "/atoll/control/1"),
        observed_address=multiaddr.to_bytes("/ip6/::1/tcp/9"),
        protocol_version="atoll/1",
        agent_version="atoll/0.1.0",
        signed_peer_record=b"sealed",
    )
    (body,) = identify.frames().receive(identify.encode(said))
    assert identify.decode(body) == said
    assert said.dialable() == ("/ip4/127.0.0.1/tcp/7071",)  # the other one is /udp: passed over


def test_an_identify_message_in_its_golden_bytes():
    said = identify.IdentifyMessage(public_key=b"\x08\x01", protocols=("/a",), agent_version="x")
    assert identify.encode(said).hex() == "0b" + "0a020801" + "1a022f61" + "320178"


@pytest.mark.parametrize(
    "body", [b"\x0a\x05a", b"\x1a\x01\xff", b"\x08\x01", b"\x12\x00" * (identify.LISTED_MAX + 1)]
)
def test_a_broken_identify_message_is_a_fault(body: bytes):
    with pytest.raises(PeerFault):
        identify.decode(body, "liar")
