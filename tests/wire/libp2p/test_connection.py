"""Two connections against each other, and one against remotes that lie, cut, replay and flood."""

from __future__ import annotations

import contextlib
import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p_pair import ALICE, BOB, Pair, pair, terms

from atoll.base.draw import draw_below, draw_bytes
from atoll.base.errors import PeerFault
from atoll.base.limits import CONTROL_FRAME_MAX
from atoll.base.machine import Lane
from atoll.crypto.frames import framed
from atoll.crypto.identity import Identity
from atoll.crypto.noise_pattern import HYBRID, HandshakeRole
from atoll.wire.libp2p import multistream, yamux
from atoll.wire.libp2p.connection import BULK_PROTOCOL, CONTROL_PROTOCOL, Libp2pConnection
from atoll.wire.libp2p.events import (
    ConnectionReady,
    GoAwayReceived,
    PingAnswered,
    StreamData,
    StreamHalfClosed,
    StreamOpened,
    StreamReset,
)
from atoll.wire.libp2p.framing import LengthPrefixedFrames, frame
from atoll.wire.libp2p.streams import NegotiatedYamuxSession
from atoll.wire.libp2p.yamux_frame import DATA, FIN, PROTOCOL_ERROR, SYN, WINDOW_UPDATE, pack

FUZZ = int(os.environ.get("ATOLL_FUZZ", "300"))  # hostile inputs per fuzz test


def echo(connection: Libp2pConnection, event: object) -> None:
    """Bob sends back what comes and closes when Alice does; Alice only reads."""
    match event:
        case StreamData(stream, data):
            connection.consumed(stream, len(data))
            if connection._role is HandshakeRole.RESPONDER:
                assert connection.send(stream, data)
        case StreamHalfClosed(stream):
            connection.close(stream)
        case _:
            pass


# ---- the way in --------------------------------------------------------------------------------------------


def test_two_members_meet_by_the_hybrid_suite_and_know_each_other():
    both = pair().run()
    ((at_alice,), (at_bob,)) = both.events
    assert isinstance(at_alice, ConnectionReady) and isinstance(at_bob, ConnectionReady)
    assert (at_alice.established.peer, at_bob.established.peer) == (BOB.peer, ALICE.peer)
    assert at_alice.established.identity == BOB.public
    assert at_alice.established.suite is HYBRID
    assert at_alice.established.handshake_hash == at_bob.established.handshake_hash
    offered = multistream.message(multistream.HEADER) + multistream.message("/atoll/noise-xxhfs/1")
    assert both.carried[0].startswith(offered)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.booleans())
@settings(max_examples=25)
def test_however_the_wire_cuts_the_bytes_the_same_story_happens(cuts: list[int], foreign: bool):
    """Handshake, one echo of 100 kB, an orderly end: hybrid, and classical with the muxer agreed inside Noise."""
    both = (classical_pair() if foreign else pair()).run()
    both.cuts = itertools.cycle(cuts)
    both.on_event = echo
    stream = both.alice.open_stream("/echo/1")
    assert stream is not None
    both.run()
    question = draw_bytes(b"", "question", 100_000)
    assert both.alice.send(stream, question)
    both.alice.close(stream)
    both.run()
    answer = [event.data for event in both.events[0] if isinstance(event, StreamData)]
    assert b"".join(answer) == question
    assert both.events[0][-1] == StreamHalfClosed(stream)


def classical_pair() -> Pair:
    """Alice is a foreign peer: she dials with libp2p's own Noise only, as js-libp2p would."""
    bob = Libp2pConnection(HandshakeRole.RESPONDER, terms(BOB, foreign=True))
    alice = Libp2pConnection(HandshakeRole.INITIATOR, terms(ALICE, foreign=True))
    alice._select = multistream.MultistreamDialer(["/noise"])
    alice._out = [alice._select.start()]
    return Pair(alice, bob)


def test_a_foreign_peer_comes_in_by_classical_noise_only_where_the_policy_says_so():
    both = classical_pair().run()
    (at_bob,) = both.events[1]
    assert isinstance(at_bob, ConnectionReady)
    assert at_bob.established.identity is None
    assert at_bob.established.muxers == (yamux.PROTOCOL,)  # and no second negotiation followed
    refused = classical_pair()
    refused.bob = Libp2pConnection(HandshakeRole.RESPONDER, terms(BOB, foreign=False))
    with pytest.raises(PeerFault, match="accepts none of"):
        refused.run()


def test_a_member_is_not_dialled_and_not_let_in_by_the_classical_suite():
    known = {ALICE.peer: ALICE.public, BOB.peer: BOB.public}.get
    dialer = Libp2pConnection(HandshakeRole.INITIATOR, terms(ALICE, foreign=True, known=known), expected=BOB.peer)
    assert b"/noise\n" not in b"".join(dialer.take_outgoing())
    both = classical_pair()
    both.bob = Libp2pConnection(HandshakeRole.RESPONDER, terms(BOB, foreign=True, known=known))
    with pytest.raises(PeerFault, match="must not use the classical suite"):
        both.run()


def test_a_stripped_offer_is_noticed():
    """Somebody in the middle answers `na` for the hybrid suite; the dialer's membership knows better."""
    middle = multistream.MultistreamListener({"/noise"}.__contains__)
    dialer = Libp2pConnection(
        HandshakeRole.INITIATOR, terms(ALICE, foreign=True, known={BOB.peer: BOB.public}.get), expected=BOB.peer
    )
    answer = middle.receive(b"".join(dialer.take_outgoing())).reply
    with pytest.raises(PeerFault, match="accepts none of"):
        dialer.receive(answer)


@pytest.mark.parametrize("changes", [{"expected": ALICE.peer}, {"bob": terms(BOB, network=b"another net")}])
def test_the_wrong_peer_or_the_wrong_network_is_a_fault(changes: dict[str, object]):
    with pytest.raises(PeerFault):
        pair(alice=terms(Identity.from_seeds(b"c" * 32, b"C" * 32)), **changes).run()


# ---- the bulk lane -----------------------------------------------------------------------------------------


def test_a_bulk_connection_is_handed_over_with_fresh_keys_and_every_byte_that_came_early():
    both = pair(lane=Lane.BULK)
    while not both.events[1]:
        for end, other, events in ((both.alice, both.bob, both.events[1]), (both.bob, both.alice, both.events[0])):
            wire = b"".join(end.take_outgoing())
            early = b"first record" if events is both.events[0] and both.events[1] else b""
            events += other.receive(wire + early)
    at_alice, at_bob = both.events[0][0], both.events[1][0]
    assert (at_alice.lane, at_bob.lane) == (Lane.BULK, Lane.BULK)
    assert (at_alice.rest, at_bob.rest) == (b"first record", b"")
    box = at_alice.established.bulk_send.seal(b"tensor")
    assert at_bob.established.bulk_receive.open(box) == b"tensor"
    assert both.alice.receive(b"not ours any more") == []
    assert both.alice.open_stream("/echo/1") is None


def test_foreign_peers_get_no_bulk_lane():
    both = classical_pair()
    both.alice._lane = Lane.BULK
    both.run()
    assert [event.lane for event in both.events[1]] == [Lane.CONTROL]
    assert BULK_PROTOCOL.encode() not in both.carried[0]


# ---- streams -----------------------------------------------------------------------------------------------


def test_a_stream_is_for_the_first_protocol_both_speak_and_data_waits_for_it():
    both = pair().run()
    stream = both.alice.open_stream("/echo/2", "/echo/1")
    assert stream is not None
    assert not both.alice.send(stream, b"too early") and both.alice.room(stream) == 0
    both.run()
    assert both.events[0][-1] == StreamOpened(stream, "/echo/1", by_remote=False)
    assert both.events[1][-1] == StreamOpened(stream, "/echo/1", by_remote=True)
    assert both.alice.send(stream, b"now")
    both.run()
    assert both.events[1][-1] == StreamData(stream, b"now")


def test_control_messages_cross_and_a_ping_overtakes_a_long_one():
    """The longest message is queued, then a ping: the pong is back before half of the message has arrived."""
    both = pair().run()
    stream = both.alice.open_stream(CONTROL_PROTOCOL)
    assert stream is not None
    both.run()
    messages, frames = [b"vote", bytes(CONTROL_FRAME_MAX), b"heartbeat"], LengthPrefixedFrames(ALICE.peer)
    got: list[bytes] = []
    for message in messages:
        assert both.alice.send(stream, frame(message))
    both.alice.ping(1)
    arrived = ponged_after = 0
    while len(got) < len(messages):
        for data in both.alice.take_outgoing(budget=100_000):
            for event in both.bob.receive(data):
                if isinstance(event, StreamData):
                    got += frames.receive(event.data)
                    arrived += len(event.data)
                    both.bob.consumed(stream, len(event.data))
        for data in both.bob.take_outgoing():
            if PingAnswered(1) in both.alice.receive(data):
                ponged_after = arrived
    assert got == messages
    assert 0 < ponged_after < CONTROL_FRAME_MAX / 2


def test_a_protocol_that_the_remote_does_not_speak_costs_the_stream_only():
    both = pair().run()
    stream = both.alice.open_stream("/chess/1")
    both.run()
    assert isinstance(both.events[0][-1], StreamReset) and both.events[0][-1].stream == stream
    assert len(both.events[1]) == 1  # Bob's user never heard of it
    assert both.alice.open_stream("/echo/1")
    both.run()
    assert isinstance(both.events[1][-1], StreamOpened)


def test_resets_pings_and_farewells_reach_the_other_end():
    both = pair().run()
    stream = both.alice.open_stream("/echo/1")
    both.run()
    both.bob.reset(stream)
    both.alice.ping(5)
    both.bob.go_away()
    both.run()
    assert {type(e) for e in both.events[0][2:]} == {StreamReset, GoAwayReceived, PingAnswered}
    assert both.alice.open_stream("/echo/1") is None


# ---- remotes that break the rules --------------------------------------------------------------------------


class Mallory:
    """Has shaken hands honestly and can now put anything into sealed frames towards Bob."""

    def __init__(self) -> None:
        self.pair = pair().run()
        self.bob = self.pair.bob
        self._seal = self.pair.events[0][0].established.send

    def says(self, plain: bytes) -> list[object]:
        return self.bob.receive(framed(self._seal.seal(plain)))


def test_a_replayed_or_reordered_frame_ends_the_connection():
    for order in ([0, 0], [1, 0]):
        both = pair().run()
        frames = [b"".join(both.alice.take_outgoing()) for n in range(2) if both.alice.ping(n) is None]
        with pytest.raises(PeerFault, match="does not open"):
            for position in order:
                both.bob.receive(frames[position])


def test_after_a_fault_the_connection_says_why_and_is_dead():
    mallory = Mallory()
    with pytest.raises(PeerFault) as caught:
        mallory.says(pack(DATA, SYN, 2, 0))
    assert caught.value.who == ALICE.peer
    last_words = b"".join(mallory.bob.take_outgoing())
    assert mallory.pair.alice.receive(last_words) == [GoAwayReceived(PROTOCOL_ERROR)]
    assert mallory.says(pack(DATA, SYN, 1, 0)) == []
    assert mallory.bob.take_outgoing() == []
    assert mallory.bob.open_stream("/echo/1") is None
    assert not mallory.bob.send(1, b"x")


def test_data_behind_a_refused_proposal_costs_the_stream_only():
    """go-libp2p sends data with a proposal it is sure of; the `na` crosses it on the way."""
    mallory = Mallory()
    proposal = multistream.message(multistream.HEADER) + multistream.message("/chess/1")
    assert mallory.says(pack(DATA, SYN, 1, len(proposal)) + proposal) == []
    assert mallory.says(pack(DATA, 0, 1, 9) + b"\xff" * 9) == []
    assert mallory.says(pack(DATA, FIN, 1, 4) + b"more") == []
    with pytest.raises(PeerFault):  # noise from the start is no accident
        mallory.says(pack(DATA, SYN, 3, 9) + b"\xff" * 9)


def test_streams_that_never_name_a_protocol_are_bounded():
    mallory = Mallory()
    syns = b"".join(pack(WINDOW_UPDATE, SYN, 2 * n + 1, 0) for n in range(yamux.STREAMS_MAX * 2))
    assert mallory.says(syns) == []
    assert len(mallory.bob._streams._negotiating) == yamux.STREAMS_MAX


def test_a_long_handshake_message_is_refused_by_its_length_alone():
    bob = Libp2pConnection(HandshakeRole.RESPONDER, terms(BOB))
    bob.receive(multistream.message(multistream.HEADER) + multistream.message(HYBRID.protocol))
    with pytest.raises(PeerFault, match="65535"):
        bob.receive(b"\xff\xff")


def held_bytes(connection: Libp2pConnection) -> int:
    """What a remote has made this connection keep."""
    streams = connection._streams
    held = len(connection._frames._buffer) + sum(len(piece) for piece in connection._out)
    if streams is not None:
        held += streams._mux._unread + streams._mux._queued + 12 * len(streams._mux._replies)
        held += sum(len(machine._lines._buffer) for machine in streams._negotiating.values())
    return held


def drawn(seed: int, what: str, bound: int) -> int:
    return draw_below(seed.to_bytes(8, "big"), what, bound)


def hostile_frames(seed: int) -> bytes:
    """Yamux frames that are nearly right: right kinds, wrong flags, ids, lengths and bodies."""
    out = b""
    for n in range(drawn(seed, "count", 12)):
        kind, flags = drawn(seed, f"kind{n}", 4), drawn(seed, f"flags{n}", 16)
        stream = 0 if kind > 1 else (1, 3, 5, 2, 0xFFFFFFFF)[drawn(seed, f"stream{n}", 5)]
        body = draw_bytes(seed.to_bytes(8, "big"), f"body{n}", drawn(seed, f"size{n}", 60))
        if drawn(seed, f"sane{n}", 2):
            name = ("/echo/1", "na", "ls")[len(body) % 3]
            body = multistream.message(multistream.HEADER) + multistream.message(name)
        length = (len(body), len(body), 2**32 - 1, 1)[drawn(seed, f"length{n}", 4)]
        out += pack(kind, flags, stream, length) + (body if kind == DATA else b"")
    return out


def fuzz_inside(seeds: range) -> None:
    """One honest handshake serves many attacks: a fresh muxer each time, the sealed frames taken as read."""
    mallory = Mallory()
    for seed in seeds:
        mallory.bob._streams = NegotiatedYamuxSession(False, {"/echo/1"}.__contains__, "mallory")
        mallory.bob._step = mallory.bob._receive_sealed
        with contextlib.suppress(PeerFault):
            mallory.says(hostile_frames(seed))
            mallory.says(hostile_frames(seed + 1_000_000_007))
        assert held_bytes(mallory.bob) < 300_000, f"seed {seed}"
        mallory.bob._out.clear()


def fuzz_outside(seeds: range) -> None:
    """Random bytes, and true transcripts with bytes changed, cut, doubled, before any key exists."""
    recorded = pair().run()
    true = bytes(recorded.carried[0])
    for seed in seeds:
        raw = bytearray(true[: drawn(seed, "cut", 4000)])
        for n in range(drawn(seed, "flips", 4)):
            if raw:
                raw[drawn(seed, f"at{n}", len(raw))] ^= 1 + drawn(seed, f"with{n}", 255)
        if drawn(seed, "noise", 2):
            raw += draw_bytes(seed.to_bytes(8, "big"), "tail", drawn(seed, "tail length", 300))
        bob = Libp2pConnection(HandshakeRole.RESPONDER, terms(BOB))
        with contextlib.suppress(PeerFault):
            for at in range(0, len(raw), 700):
                bob.receive(bytes(raw[at : at + 700]))
        assert held_bytes(bob) < 70_000, f"seed {seed}"


def test_strangers_bytes_inside_sealed_frames_are_events_or_one_fault():
    fuzz_inside(range(FUZZ))


def test_strangers_bytes_before_any_key_are_nothing_or_one_fault():
    fuzz_outside(range(FUZZ // 4))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_a_hundred_thousand_hostile_inputs(part: int):
    fuzz_inside(range(part * 10_000, (part + 1) * 10_000))
    fuzz_outside(range(part * 10_000, (part + 1) * 10_000))
