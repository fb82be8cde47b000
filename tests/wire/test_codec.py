"""The wire as it is promised: golden bytes of everything that crosses it, and nonsense that harms nobody.

ATOLL_FUZZ sets how many inputs are tried per kind; `ATOLL_GOLDEN=write` freezes the bytes of a new word.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parent))
from examples import (
    AMEND_TUNED,
    AMEND_WITHOUT,
    ANSWER_WEIGHED,
    AUDITED_NAMED,
    BODY,
    BODY_ASKING,
    BODY_EXTENDED,
    BODY_INVITED,
    BODY_MEASURED,
    BODY_PACED,
    BODY_PAUSED,
    BODY_READING,
    BODY_REPUTED,
    BODY_SAMPLED,
    BODY_TUNED,
    BODY_WEIGHED,
    CAUGHT_SHOWN,
    COMMIT_DRAWN,
    COMMIT_LATE,
    COMMIT_MEASURED,
    COMMIT_READING,
    HANDED_AROUND,
    JOIN_EXTENDED,
    MALFORMED_ROW,
    MANIFEST_PARTLY,
    MESSAGES,
    OPENED,
    OPENING,
    PLACED_AGAIN,
    READY_UNAUDITED,
    SCORED,
    STATEMENTS,
    TUNE_ALL,
    VALIDATED_RIGHT,
    VERTEX,
    VOTED_PROVEN,
    WANT_MANIFEST_KNOWN,
    WEIGHING,
    WEIGHING_MIXED,
)

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.limits import CONTROL_FRAME_MAX, MALFORMED_ROW_BYTES_MAX, OPENED_BLOCKS_MAX, ROW_SHOWN_MAX
from atoll.base.machine import Message
from atoll.crypto.digest import digest
from atoll.verification.malformed_updates.messages import malformed_row_bytes, malformed_row_from_bytes
from atoll.wire.codec import AnyMessage, decode_body, decode_message, decode_statement, decode_vertex, encode
from atoll.wire.messages.statements import AgreedWeights, AnyStatement, OwnerResult
from atoll.wire.messages.vertex import Vertex, VertexBody
from atoll.wire.opening import opening_bytes, opening_from_bytes

GOLDEN = Path(__file__).parent / "golden"
FUZZ = int(os.environ.get("ATOLL_FUZZ", "3000"))
WHO = PeerId("stranger")
WEIGHING_IN = msgspec.msgpack.Decoder(AgreedWeights).decode
READERS = {"message": decode_message, "statement": decode_statement, "body": decode_body, "vertex": decode_vertex}


def kind_of(value: object) -> str:
    match value:
        case Message():
            return "message"
        case VertexBody():
            return "body"
        case Vertex():
            return "vertex"
        case AgreedWeights():
            return "weighing"
        case _:
            return "statement"


def decode(value: object, data: bytes) -> object:
    return WEIGHING_IN(data) if isinstance(value, AgreedWeights) else READERS[kind_of(value)](data, WHO)


EVERYTHING = (*MESSAGES, *STATEMENTS, BODY, VERTEX, WEIGHING)
ADDED = (  # the same words with a field that only some runs have
    (ANSWER_WEIGHED, "weighing", "weighed"),
    (BODY_WEIGHED, "weighing", "weighed"),
    (BODY_REPUTED, "reputation", "reputed"),
    (BODY_SAMPLED, "credits", "sampled"),
    (BODY_ASKING, "effort", "asking"),
    (BODY_PAUSED, "paused", "paused"),
    (BODY_TUNED, "tuned", "tuned"),
    (BODY_INVITED, "invited", "invited"),
    (BODY_EXTENDED, "extensions", "extended"),
    (JOIN_EXTENDED, "extensions", "extended"),
    (READY_UNAUDITED, "unaudited", "unaudited"),
    (HANDED_AROUND, "by", "around"),
    (PLACED_AGAIN, "since", "again"),
    (COMMIT_LATE, "claim", "late"),
    (COMMIT_READING, "claim", "reading"),
    (BODY_READING, "data", "reading"),
    (COMMIT_DRAWN, "claim", "drawn"),
    (AMEND_WITHOUT, "without", "without"),
    (VALIDATED_RIGHT, "right", "right"),
    (AUDITED_NAMED, "exhibit", "named"),
    (CAUGHT_SHOWN, "exhibit", "shown"),
    (AMEND_TUNED, "tuned", "tuned"),
    (VOTED_PROVEN, "proof", "proven"),
    (WANT_MANIFEST_KNOWN, "known", "known"),
    (MANIFEST_PARTLY, "here", "partly"),
    *((value, "made_of" if isinstance(value, OwnerResult) else "opening", "opened") for value in OPENED),
    *((value, "update", "scored") for value in SCORED),
)
MEASURED = (COMMIT_MEASURED, BODY_MEASURED, TUNE_ALL, WEIGHING_MIXED)
SPOKEN = (*EVERYTHING, *(value for value, _, _ in ADDED), BODY_PACED, *MEASURED)


def golden_of(name: str, data: bytes) -> bytes:
    """The frozen bytes of this name; `data` becomes them, if they are to be written and are not there yet."""
    path = GOLDEN / f"{name}.hex"
    if os.environ.get("ATOLL_GOLDEN") == "write" and not path.exists():
        path.write_text(data.hex() + "\n")
    return bytes.fromhex(path.read_text())


@pytest.mark.parametrize("value", EVERYTHING, ids=lambda v: type(v).__name__)
def test_the_bytes_of_every_word_are_frozen(value):
    """Old bytes decode to the same value, and the same value encodes to the old bytes."""
    golden = golden_of(type(value).__name__, encode(value))
    assert encode(value) == golden
    assert decode(value, golden) == value


@pytest.mark.parametrize(
    ("value", "field", "kind"),
    ADDED,
    ids=[f"{type(value).__name__}.{kind}" for value, _, kind in ADDED],
)
def test_what_only_some_runs_have_is_one_more_field_and_nothing_elsewhere(value, field: str, kind: str):
    """Weights, scores, holders drawn later: where there are none, bytes are what they were before."""
    golden = golden_of(f"{type(value).__name__}.{kind}", encode(value))
    assert encode(value) == golden and decode(value, golden) == value
    bare = encode(msgspec.structs.replace(value, **{field: msgspec.UNSET}))
    assert msgspec.msgpack.decode(golden).keys() - msgspec.msgpack.decode(bare).keys() == {field}


@pytest.mark.parametrize("score", [-1, 10_001, 0.5, "much"])
def test_a_score_is_a_whole_number_of_ten_thousandths(score: object):
    word = msgspec.msgpack.decode(encode(BODY_REPUTED))
    with pytest.raises(PeerFault):
        decode_body(msgspec.msgpack.encode({**word, "reputation": [score]}), WHO)


def test_a_window_that_follows_the_pace_is_one_more_field_and_nothing_where_none_does():
    golden = golden_of("VertexBody.paced", encode(BODY_PACED))
    assert encode(BODY_PACED) == golden and decode(BODY_PACED, golden) == BODY_PACED
    assert msgspec.msgpack.decode(golden).keys() - msgspec.msgpack.decode(encode(BODY)).keys() == {"window_s"}


def test_the_bytes_of_an_opening_are_frozen():
    golden = golden_of("Opening", opening_bytes(OPENING))
    assert opening_bytes(OPENING) == golden and opening_from_bytes(golden) == OPENING
    with pytest.raises(PeerFault):
        opening_from_bytes(golden[:-1])
    many = msgspec.structs.replace(OPENING, blocks=OPENING.blocks * (OPENED_BLOCKS_MAX + 1))
    with pytest.raises(PeerFault):
        opening_from_bytes(opening_bytes(many))


def test_the_bytes_of_an_unreadable_row_are_frozen():
    golden = golden_of("MalformedRow", malformed_row_bytes(MALFORMED_ROW))
    assert malformed_row_bytes(MALFORMED_ROW) == golden and malformed_row_from_bytes(golden) == MALFORMED_ROW
    for flaw in ({"leaf": b"gold"}, {"leaf": bytes(ROW_SHOWN_MAX + 1)}, {"index": -1}, {"name": b"short"}):
        with pytest.raises(PeerFault):
            malformed_row_from_bytes(malformed_row_bytes(replace(MALFORMED_ROW, **flaw)))


def test_nonsense_about_a_row_is_a_fault_or_leaves_that_are_what_they_are_called():
    """Whatever is read is bounded, can be said again, and holds the very leaf that it names, or none."""
    draw, golden = random.Random("fuzz/unreadable"), malformed_row_bytes(MALFORMED_ROW)
    read = 0
    for _ in range(FUZZ):
        data = bytearray(golden)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(data))
            data[at : at + draw.choice((0, 1, 1, 8))] = draw.randbytes(draw.choice((0, 1, 1, 4)))
        try:
            row = malformed_row_from_bytes(bytes(data))
        except PeerFault:
            continue
        read += 1
        assert malformed_row_from_bytes(malformed_row_bytes(row)) == row
        assert row.leaf is None or (digest(row.leaf) == row.name and len(row.leaf) <= ROW_SHOWN_MAX)
    assert read > FUZZ // 100
    with pytest.raises(PeerFault, match="allowed"):
        malformed_row_from_bytes(golden + bytes(MALFORMED_ROW_BYTES_MAX))


def test_there_is_an_example_of_every_message_and_statement():
    """A new word on the wire without golden bytes is noticed here."""
    assert {type(m) for m in MESSAGES} == set(AnyMessage.__args__)
    assert {type(s) for s in STATEMENTS} == set(AnyStatement.__args__)


def test_nonsense_is_made_of_every_field():
    """A new field on the wire that no example has is noticed here, too."""
    said = {field for value in SPOKEN for field in fields_said(value)}
    assert {field for kind in (AnyMessage, AnyStatement, VertexBody, Vertex) for field in fields_of(kind)} <= said


def fields_said(value: object) -> Iterator[tuple[type, str]]:
    """Those of a word, and of what is in it, that say more than where they are left out."""
    for one in value if isinstance(value, tuple) else ():
        yield from fields_said(one)
    for field in msgspec.structs.fields(value) if isinstance(value, msgspec.Struct) else ():
        if (here := getattr(value, field.name)) != field.default:
            yield type(value), field.name
            yield from fields_said(here)


def fields_of(kind: object) -> Iterator[tuple[type, str]]:
    for inside in get_args(kind):
        yield from fields_of(inside)
    for field in (
        msgspec.structs.fields(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else ()
    ):
        yield kind, field.name
        yield from fields_of(field.type)


def test_a_newer_peer_may_say_more():
    """Unknown fields are skipped, unknown words are a fault."""
    word = msgspec.msgpack.decode(encode(MESSAGES[0]))
    assert decode_message(msgspec.msgpack.encode({**word, "mood": "sunny"}), WHO) == MESSAGES[0]
    with pytest.raises(PeerFault):
        decode_message(msgspec.msgpack.encode({**word, "type": "Rumour"}), WHO)


def test_too_long_a_message_is_not_even_read():
    with pytest.raises(PeerFault, match="bytes"):
        decode_message(bytes(CONTROL_FRAME_MAX + 1), WHO)


def test_deep_nesting_is_a_fault_and_no_crash():
    for opening in (b"\x91", b"\x81\xa1x", b"\xdc\x00\x01"):
        for read in (decode_message, decode_statement, decode_body):
            with pytest.raises(PeerFault):
                read(opening * 100_000, WHO)


@pytest.mark.parametrize("kind", READERS)
def test_nonsense_is_a_fault_and_nothing_else(kind: str):
    """Bytes flipped, cut, doubled, swapped, lengths that lie: a PeerFault, or something that can be said again."""
    read, draw = READERS[kind], random.Random(f"fuzz/{kind}")
    wires = [encode(value) for value in SPOKEN if kind_of(value) == kind]
    understood = 0
    for _ in range(FUZZ):
        data = bytearray(draw.choice(wires))
        for _ in range(draw.randint(1, 4)):
            mangle(draw, data, wires)
        try:
            said = encode(read(bytes(data), WHO))
        except PeerFault as fault:
            assert fault.who == WHO
        else:
            assert encode(read(said, WHO)) == said
            understood += 1
    assert 0 < understood < FUZZ


def mangle(draw: random.Random, data: bytearray, wires: list[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    what = draw.randrange(6)
    if what == 0 and at < len(data):
        data[at] = draw.randrange(256)
    elif what == 1:
        del data[at:]
    elif what == 2:
        data[at:at] = draw.randbytes(draw.randint(1, 9))
    elif what == 3:
        data[at:at] = draw.choice([b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
    elif what == 4:
        other = draw.choice(wires)
        data[at:] = other[draw.randrange(len(other)) :]
    elif at < len(data):
        data[at] ^= 1 << draw.randrange(8)
    if not data:
        data += b"\xc0"


@pytest.mark.long
@pytest.mark.parametrize("kind", READERS)
def test_a_great_deal_of_nonsense(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[__name__], "FUZZ", max(FUZZ, 100_000))
    test_nonsense_is_a_fault_and_nothing_else(kind)


def test_what_a_caller_asked_for_is_fit_for_a_terminal():
    """It is shown to the others' users, and its author may be anybody."""
    commit = replace(COMMIT_LATE, why="codec=\x1b[2Jfp16\r\n")
    assert commit.asked.isprintable() and "fp16" in commit.asked
    assert replace(commit, parts=0).asked == "", "of a pass it is the reason"
