"""Yamux alone: frames as published, two ends through a wire that cuts at will, and remotes that break the rules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import PeerFault
from atoll.wire.libp2p.events import (
    GoAwayReceived,
    PingAnswered,
    StreamData,
    StreamHalfClosed,
    StreamReset,
    UnnegotiatedStreamOpened,
)
from atoll.wire.libp2p.yamux import (
    FRAME_DATA_MAX,
    QUEUED_MAX,
    QUEUED_STREAM_MAX,
    REPLIES_MAX,
    STREAMS_MAX,
    UNREAD_MAX,
    WINDOW,
    WINDOW_MAX,
    YamuxMuxer,
)
from atoll.wire.libp2p.yamux_frame import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    NORMAL,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    YamuxHeader,
    pack,
    unpack,
)


def all_of(machine: YamuxMuxer) -> bytes:
    return b"".join(machine.take_outgoing(1 << 40))


def frames_of(wire: bytes) -> list[tuple[YamuxHeader, bytes]]:
    """What is on the wire, read by somebody who does not share the machine's code."""
    frames: list[tuple[YamuxHeader, bytes]] = []
    while wire:
        header = unpack(wire[:12], "")
        size = header.length if header.kind == DATA else 0
        frames.append((header, wire[12 : 12 + size]))
        wire = wire[12 + size :]
    return frames


# ---- published frames --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "wire"),
    [  # the headers of js-libp2p-yamux test/codec.spec.ts, written out by the layout of the specification
        (YamuxHeader(PING, SYN, 0, 1), "000200010000000000000001"),
        (YamuxHeader(WINDOW_UPDATE, SYN, 1, 1), "000100010000000100000001"),
        (YamuxHeader(GO_AWAY, 0, 0, NORMAL), "000300000000000000000000"),
        (YamuxHeader(PING, ACK, 0, 100), "000200020000000000000064"),
        (YamuxHeader(WINDOW_UPDATE, 0, 99, 1000), "0001000000000063000003e8"),
        (YamuxHeader(WINDOW_UPDATE, 0, 0xFFFFFFFF, 0xFFFFFFFF), "00010000ffffffffffffffff"),
        (
            YamuxHeader(WINDOW_UPDATE, ACK | 16, 1234, 4321),
            "00010012000004d2000010e1",
        ),  # hashicorp/yamux const_test.go
    ],
)
def test_headers_as_published(header: YamuxHeader, wire: str):
    assert pack(*header).hex() == wire
    assert unpack(bytes.fromhex(wire), "") == header


@pytest.mark.parametrize("wire", ["01" + "00" * 11, "0004" + "00" * 10, "0002000100000001" + "00" * 4, "00" * 12])
def test_a_header_that_nobody_may_send_is_a_fault(wire: str):
    """Another version, a fifth type, a ping on a stream, data on the session."""
    with pytest.raises(PeerFault):
        YamuxMuxer(dialer=True).receive(bytes.fromhex(wire))


def test_a_stream_from_its_first_to_its_last_frame():
    """Spec "Opening a stream", "Closing a stream": SYN and ACK ride on the first frame, FIN ends each half."""
    alice, bob = YamuxMuxer(dialer=True), YamuxMuxer(dialer=False)
    stream = alice.open()
    assert stream == 1  # "The client side should use odd ID's"
    assert alice.send(stream, b"question")
    wire = all_of(alice)
    assert frames_of(wire) == [(YamuxHeader(DATA, SYN, 1, 8), b"question")]
    assert bob.receive(wire) == [UnnegotiatedStreamOpened(1), StreamData(1, b"question")]
    bob.consumed(1, 8)
    bob.send(1, b"answer")
    bob.close(1)
    wire = all_of(bob)
    assert [h for h, _ in frames_of(wire)] == [YamuxHeader(DATA, ACK, 1, 6), YamuxHeader(WINDOW_UPDATE, FIN, 1, 0)]
    assert alice.receive(wire) == [StreamData(1, b"answer"), StreamHalfClosed(1)]
    alice.consumed(1, 6)
    alice.close(1)
    assert bob.receive(all_of(alice)) == [StreamHalfClosed(1)]
    assert bob.open() == 2
    assert alice.open() == 3
    assert not alice.send(1, b"more")  # closed on both sides: gone


def test_pings_are_echoed_and_matched():
    alice, bob = YamuxMuxer(dialer=True), YamuxMuxer(dialer=False)
    alice.ping(77)
    assert bob.receive(all_of(alice)) == []
    assert alice.receive(all_of(bob)) == [PingAnswered(77)]
    with pytest.raises(PeerFault, match="pong without"):
        alice.receive(pack(PING, ACK, 0, 77))


def test_who_went_away_takes_no_more_streams():
    alice = YamuxMuxer(dialer=True)
    assert alice.receive(pack(GO_AWAY, 0, 0, NORMAL)) == [GoAwayReceived(NORMAL)]
    assert alice.open() is None


# ---- flow control and fairness -----------------------------------------------------------------------------


def test_a_sender_stops_at_the_window_and_goes_on_when_the_reader_has_read():
    alice, bob = YamuxMuxer(dialer=True), YamuxMuxer(dialer=False)
    stream = alice.open()
    assert alice.send(stream, bytes(3 * WINDOW))
    arrived = sum(len(e.data) for e in bob.receive(all_of(alice)) if isinstance(e, StreamData))
    assert arrived == WINDOW
    assert alice.take_outgoing(1 << 30) == []
    bob.consumed(stream, WINDOW // 2 - 1)
    assert all_of(bob) == b""  # not worth a frame yet
    bob.consumed(stream, 1)
    alice.receive(all_of(bob))
    assert sum(len(b) for _, b in frames_of(all_of(alice))) == WINDOW // 2


def test_a_heartbeat_passes_a_long_message_after_one_frame():
    """A megabyte is queued first, yet the 20 bytes of another stream are in the second frame."""
    alice = YamuxMuxer(dialer=True)
    long, short = alice.open(), alice.open()
    assert alice.send(long, bytes(1 << 20))
    assert alice.send(short, b"heartbeat")
    first = frames_of(b"".join(alice.take_outgoing(100_000)))
    assert [(h.stream, h.length) for h, _ in first] == [(long, FRAME_DATA_MAX), (short, 9), (long, FRAME_DATA_MAX)]
    assert FRAME_DATA_MAX <= 64 * 1024


def test_a_remote_that_does_not_read_costs_us_a_bounded_queue():
    alice = YamuxMuxer(dialer=True)
    streams = [alice.open() for _ in range(STREAMS_MAX)]
    assert alice.open() is None
    mega = bytes(1 << 20)
    taken = {stream: sum(alice.send(stream, mega) for _ in range(9)) for stream in streams if stream}
    assert max(taken.values()) == QUEUED_STREAM_MAX // len(mega)
    assert sum(taken.values()) == QUEUED_MAX // len(mega)
    assert alice.room(1) == 0
    alice.reset(1)  # gives its queue back
    assert alice.room(streams[-1]) == QUEUED_STREAM_MAX


class Wire:
    """Two ends and the bytes between them, moved in whatever pieces the test draws."""

    def __init__(self) -> None:
        self.ends = YamuxMuxer(dialer=True, who="bob"), YamuxMuxer(dialer=False, who="alice")
        self.between = bytearray(), bytearray()  # towards end 0, towards end 1
        self.unread: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self.got: tuple[dict[int, bytearray], dict[int, bytearray]] = ({}, {})
        self.closed: tuple[set[int], set[int]] = (set(), set())

    def take(self, end: int, budget: int) -> None:
        for piece in self.ends[end].take_outgoing(budget):
            self.between[1 - end].extend(piece)

    def move(self, end: int, size: int) -> None:
        piece = bytes(self.between[end][:size])
        del self.between[end][:size]
        for event in self.ends[end].receive(piece):
            match event:
                case StreamData(stream, data):
                    self.unread[end][stream] = self.unread[end].get(stream, 0) + len(data)
                    self.got[end].setdefault(stream, bytearray()).extend(data)
                    assert self.unread[end][stream] <= WINDOW
                case StreamHalfClosed(stream):
                    self.closed[end].add(stream)
                case other:
                    assert isinstance(other, UnnegotiatedStreamOpened)

    def read(self, end: int, stream: int, share: float) -> None:
        count = int(self.unread[end].get(stream, 0) * share)
        if count:
            self.unread[end][stream] -= count
            self.ends[end].consumed(stream, count)


@given(st.data())
@settings(max_examples=60)
def test_whatever_the_pace_everything_arrives_in_order_and_no_window_is_overrun(data: st.DataObject):
    """Both ends open streams and send; bytes move, are read and are framed in drawn portions; then all drains.

    The surprise is in `TcpConnection.move`: the receiving machine raises PeerFault if its window is overrun, and
    the
    reader itself counts.
    """
    wire = Wire()
    sent: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})
    for turn in range(data.draw(st.integers(1, 25))):
        end = data.draw(st.integers(0, 1))
        match data.draw(st.sampled_from(["open", "send", "take", "take", "move", "move", "read"])):
            case "open" if len(sent[end]) < 4:
                stream = wire.ends[end].open()
                assert stream is not None
                sent[end][stream] = b""
            case "send" if sent[end]:
                stream = data.draw(st.sampled_from(sorted(sent[end])))
                blob = bytes([turn]) * data.draw(st.sampled_from([1, 500, 70_000, 600_000]))
                if wire.ends[end].send(stream, blob):
                    sent[end][stream] += blob
            case "take":
                wire.take(end, data.draw(st.sampled_from([1, 13, 5000, 200_000])))
            case "move":
                wire.move(end, data.draw(st.sampled_from([1, 11, 12, 13, 4096, 300_000])))
            case "read" if wire.unread[end]:
                wire.read(end, data.draw(st.sampled_from(sorted(wire.unread[end]))), data.draw(st.floats(0, 1)))
            case _:
                pass
    for end in (0, 1):
        for stream in sent[end]:
            wire.ends[end].close(stream)
    for _ in range(200):
        for end in (0, 1):
            wire.take(end, 1 << 20)
            wire.move(1 - end, 1 << 30)
            for stream in list(wire.unread[1 - end]):
                wire.read(1 - end, stream, 1)
    for end in (0, 1):
        assert {s: bytes(wire.got[1 - end].get(s, b"")) for s in sent[end]} == sent[end]
        assert wire.closed[1 - end] == set(sent[end])


# ---- remotes that break the rules --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wire", "what"),
    [
        (pack(WINDOW_UPDATE, SYN, 2, 0), "an id of the other end"),
        (pack(WINDOW_UPDATE, SYN, 1, 0) * 2, "twice"),
        (pack(DATA, SYN, 1, WINDOW + 1), "into a window"),
        (pack(DATA, 0, 7, WINDOW + 1), "into a window"),  # not even to a stream that is gone
        (pack(DATA, 0, 2, 5), "not open yet"),
        (pack(DATA, SYN | FIN, 1, 1) + b"x" + pack(DATA, 0, 1, 1), "after closing"),
        (pack(WINDOW_UPDATE, SYN, 1, WINDOW_MAX - WINDOW) + pack(WINDOW_UPDATE, 0, 1, 1), "grants a window"),
        (pack(PING, ACK, 0, 1), "pong without"),
        (pack(PING, 0, 0, 1), "pong without"),
    ],
)
def test_a_broken_rule_is_a_fault(wire: bytes, what: str):
    with pytest.raises(PeerFault, match=what):
        YamuxMuxer(dialer=False, who="liar").receive(wire)


def test_stream_ids_may_overtake_each_other_a_little_but_none_comes_twice():
    """go-yamux may send the SYN of stream 9 before that of 7. A used id never returns, not even after a reset."""
    bob = YamuxMuxer(dialer=False)
    for stream in (1, 9, 7, 3, 1001, 901):
        assert bob.receive(pack(WINDOW_UPDATE, SYN, stream, 0)) == [UnnegotiatedStreamOpened(stream)]
        bob.receive(pack(WINDOW_UPDATE, RST, stream, 0))
    for stream in (9, 3, 1001, 5):  # 5 was never used, but is long past
        with pytest.raises(PeerFault, match="twice"):
            bob.receive(pack(WINDOW_UPDATE, SYN, stream, 0))


def test_a_window_is_not_refilled_by_the_sender_alone():
    bob = YamuxMuxer(dialer=False)
    bob.receive(pack(DATA, SYN, 1, WINDOW) + bytes(WINDOW))
    bob.consumed(1, WINDOW // 2)  # the update is not on the wire yet
    with pytest.raises(PeerFault, match="into a window of 0"):
        bob.receive(pack(DATA, 0, 1, 1))


def test_a_flood_of_streams_is_answered_with_resets_and_then_ends():
    bob = YamuxMuxer(dialer=False)
    events = bob.receive(b"".join(pack(WINDOW_UPDATE, SYN, 2 * i + 1, 0) for i in range(STREAMS_MAX + 10)))
    assert len(events) == STREAMS_MAX
    assert [h.flags for h, _ in frames_of(all_of(bob))][-10:] == [RST] * 10
    with pytest.raises(PeerFault, match="faster than it reads"):
        bob.receive(b"".join(pack(WINDOW_UPDATE, SYN, 2 * i + 1, 0) for i in range(9000, 9002 + REPLIES_MAX)))


def test_a_flood_of_pings_ends():
    with pytest.raises(PeerFault, match="faster than it reads"):
        YamuxMuxer(dialer=False).receive(pack(PING, SYN, 0, 1) * (REPLIES_MAX + 2))


def test_a_stream_opened_and_reset_a_thousand_times_leaves_nothing():
    bob = YamuxMuxer(dialer=False)
    for i in range(1000):
        stream = 2 * i + 1
        events = bob.receive(pack(DATA, SYN, stream, 3) + b"abc" + pack(WINDOW_UPDATE, RST, stream, 0))
        assert events[-1] == StreamReset(stream, "the remote reset it")
    assert not bob._streams and bob._unread == 0 and all_of(bob) == b""


def test_unread_bytes_are_bounded_over_all_streams_at_the_price_of_one_stream():
    """Every stream fills its window; at the bound the fullest one is given up, the connection lives on."""
    bob = YamuxMuxer(dialer=False)
    events = []
    for i in range(UNREAD_MAX // WINDOW + 1):
        events += bob.receive(pack(DATA, SYN, 2 * i + 1, WINDOW) + bytes(WINDOW))
    assert [e.stream for e in events if isinstance(e, StreamReset)] == [1]
    assert bob._unread <= UNREAD_MAX
    assert bob.receive(pack(DATA, 0, 1, 4) + b"late") == []  # sent before the remote heard of the reset
    bob.consumed(1, WINDOW)  # the reader did not know either


def test_a_closed_stream_with_unread_bytes_still_counts():
    bob = YamuxMuxer(dialer=False)
    bob.receive(pack(DATA, SYN | FIN, 1, 9) + b"123456789")
    bob.close(1)
    all_of(bob)
    assert bob._unread == 9 and 1 in bob._streams
    bob.consumed(1, 9)
    assert bob._unread == 0 and not bob._streams
