"""Rows and rolls of members that exchange in pairs: golden bytes, and nonsense that harms nobody."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.base.limits import STATE_KEPT_ROUNDS
from atoll.wire.pairs import (
    MAGIC,
    Entry,
    Roll,
    is_roll,
    roll_bytes,
    roll_from_bytes,
    row_bytes,
    row_parts,
    state_named,
)

GOLDEN = Path(__file__).parent / "golden"


def name(n: int) -> Digest:
    return Digest(bytes([n]) * 32)


ROLL = Roll(3, 60, 1920, 61440, (Entry(PeerId("ada"), name(7), 3), Entry(PeerId("bob"), name(9), 2)))
ROW = row_bytes(b"an update", b"\0\0\x80\x3f" * 3)


@pytest.mark.parametrize(("kind", "data"), [("roll", roll_bytes(ROLL)), ("row", ROW)])
def test_bytes_are_as_they_were_promised(kind: str, data: bytes):
    path = GOLDEN / f"pairs-{kind}.hex"
    if os.environ.get("ATOLL_GOLDEN") == "write" and not path.exists():
        path.write_text(data.hex() + "\n")
    assert data == bytes.fromhex(path.read_text())


def test_a_roll_comes_back_and_a_row_falls_into_its_two_parts():
    assert is_roll(roll_bytes(ROLL)) and roll_from_bytes(roll_bytes(ROLL)) == ROLL
    assert not is_roll(b"") and not is_roll((200).to_bytes(8, "little") + b'{"__metadata__"')
    assert tuple(map(bytes, row_parts(ROW, 12))) == (b"an update", b"\0\0\x80\x3f" * 3)
    assert state_named(name(5)) == name(5)


def test_the_next_roll_names_what_was_made_and_forgets_who_stays_away():
    """Ada made a new state, bob trains and made none, cleo went away: forgotten after 32 rounds, bob never."""
    roll = ROLL.next({PeerId("cleo"): name(1)}, ["ada", "bob", "cleo"], steps=20, samples=640, tokens=640)
    assert roll.of(PeerId("cleo")) == name(1) and roll.of(PeerId("bob")) == name(9) and roll.round == 4
    for k in range(STATE_KEPT_ROUNDS):
        assert roll.of(PeerId("cleo")) == name(1), k
        roll = roll.next({PeerId("ada"): name(k + 10)}, ["ada", "bob"], steps=20, samples=640, tokens=640)
    assert roll.of(PeerId("cleo")) == name(1)
    roll = roll.next({}, ["ada", "bob"], steps=20, samples=640, tokens=640)
    assert [entry.peer for entry in roll.states] == ["ada", "bob"] and roll.of(PeerId("bob")) == name(9)
    assert (roll.round, roll.steps) == (4 + STATE_KEPT_ROUNDS + 1, 60 + 20 * (STATE_KEPT_ROUNDS + 2))


OTHERWISE = (
    roll_bytes(ROLL) + b"\0",
    roll_bytes(ROLL)[:-1],
    roll_bytes(Roll(3, 60, 1920, 61440, ROLL.states[::-1])),
    roll_bytes(Roll(3, 60, 1920, 61440, ROLL.states[:1] * 2)),
    roll_bytes(Roll(3, 60, 1920, 61440, (Entry(PeerId("ada"), Digest(b"short"), 3),))),
    roll_bytes(Roll(-1, 60, 1920, 61440, ())),
    roll_bytes(ROLL).replace(b"ada", b"\xffda"),
    MAGIC + b"\x96" + roll_bytes(ROLL)[len(MAGIC) + 1 :] + b"\x91" * 5000 + b"\x90",
)


@pytest.mark.parametrize("data", OTHERWISE)
def test_there_is_one_way_to_write_a_roll(data: bytes):
    with pytest.raises(PeerFault):
        roll_from_bytes(data)


@given(st.binary(max_size=80), st.integers(0, 64))
def test_nonsense_is_a_fault_of_its_sender_or_what_it_says(data: bytes, anchor_bytes: int):
    for read in (lambda: roll_from_bytes(MAGIC + data), lambda: state_named(data)):
        with suppress(PeerFault):
            read()
    try:
        wire, anchor = row_parts(data, anchor_bytes)
    except PeerFault:
        return
    assert row_bytes(wire, anchor) == data and len(anchor) == anchor_bytes
