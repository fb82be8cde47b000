"""multistream-select 1.0, alone: two ends agree, disagree, or are lied to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import PeerFault
from atoll.wire.libp2p import multistream
from atoll.wire.libp2p.multistream import (
    HEADER,
    MESSAGE_MAX,
    PROPOSALS_MAX,
    MultistreamDialer,
    MultistreamListener,
    message,
)


def test_na_in_the_bytes_of_the_specification():
    """libp2p/specs connections, "multistream-select": "na" is sent as 0x036e610a."""
    assert message("na").hex() == "036e610a"
    assert message(HEADER) == b"\x13/multistream/1.0.0\n"


@given(st.data())
def test_the_dialers_first_wish_that_the_listener_shares_is_agreed_however_the_bytes_are_cut(data: st.DataObject):
    names = st.lists(st.sampled_from(["/a", "/b", "/c", "/d"]), min_size=1, unique=True)
    wishes, spoken = data.draw(names), set(data.draw(names))
    dialer, listener = MultistreamDialer(wishes), MultistreamListener(spoken.__contains__)
    to_listener, to_dialer = bytearray(dialer.start()), bytearray()
    accepted = chosen = None
    while accepted is None or (chosen is None and to_dialer):
        if to_listener and accepted is None:
            size = data.draw(st.integers(1, len(to_listener)))
            step = listener.receive(bytes(to_listener[:size]))
            del to_listener[:size]
            to_dialer += step.reply
            accepted = step.agreed
        elif to_dialer:
            size = data.draw(st.integers(1, len(to_dialer)))
            step = dialer.receive(bytes(to_dialer[:size]))
            del to_dialer[:size]
            to_listener += step.reply
            if step.refused:
                assert not spoken.intersection(wishes)
                return
            chosen = step.agreed
        else:
            pytest.fail("both wait")
    assert accepted == next(wish for wish in wishes if wish in spoken)
    assert chosen in (None, accepted)


def test_the_first_bytes_of_the_agreed_protocol_come_back_untouched():
    listener = MultistreamListener({"/a"}.__contains__)
    assert listener.receive(MultistreamDialer(["/a"]).start() + b"\xff\x00body") == multistream.NegotiationStep(
        message(HEADER) + message("/a"), agreed="/a", rest=b"\xff\x00body"
    )
    dialer = MultistreamDialer(["/x", "/a"])
    step = dialer.receive(message(HEADER) + message("na") + message("/a") + b"\xff")
    assert (step.agreed, step.rest) == ("/a", b"\xff")


def test_a_listener_does_not_list_its_protocols():
    step = MultistreamListener({"/secret"}.__contains__).receive(message(HEADER) + message("ls"))
    assert step.reply == message(HEADER) + message("na")


@pytest.mark.parametrize(
    "data",
    [
        message("/multistream/2.0.0"),
        b"GET / HTTP/1.1\r\nHost: a.example.org\r\nUser-Agent: a-curious-browser/1.0 (and more)\r\n\r\n",
        b"\x00",
        b"\x81\x08" + b"a" * 1024 + b"\n",  # 1025 bytes
        message(HEADER) + b"\x02ab",  # no newline
        message(HEADER) + b"\x02\xff\n",
        b"\x93\x80\x00",
        message(HEADER) + message("/x") * (PROPOSALS_MAX + 1),
    ],
)
def test_what_is_not_multistream_is_a_fault_at_either_end(data: bytes):
    with pytest.raises(PeerFault):
        MultistreamListener({"/a"}.__contains__).receive(data)
    with pytest.raises(PeerFault):
        MultistreamDialer(["/a"]).receive(data)


def test_a_half_message_is_held_only_up_to_the_bound():
    listener = MultistreamListener({"/a"}.__contains__)
    listener.receive(message(HEADER))
    listener.receive(b"\x80\x08" + b"a" * (MESSAGE_MAX - 1))  # the longest message, one byte missing
    assert listener.receive(b"\n").reply == message("na")
