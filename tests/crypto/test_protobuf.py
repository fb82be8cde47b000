"""Protobuf fields: what the encoding guide shows, what is skipped, and what makes no sense."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.crypto.protobuf import FIELDS_MAX, protobuf_field, protobuf_fields

from .conftest import FUZZ


def test_protobuf_fields_of_the_encoding_guide():
    """protobuf.dev, "Encoding": `int32 a = 1` of 150 is 08 96 01, `string b = 2` of "testing" is 12 07 74…"""
    assert protobuf_field(2, b"testing").hex() == "120774657374696e67"
    assert protobuf_fields(bytes.fromhex("089601120774657374696e67")) == [(1, 150), (2, b"testing")]


def test_fixed_protobuf_fields_are_skipped_and_negative_numbers_are_read():
    minus_one = bytes.fromhex("08ffffffffffffffffff01")
    message = bytes.fromhex("19" + "00" * 8 + "25" + "00" * 4) + minus_one
    assert protobuf_fields(message) == [(1, 2**64 - 1)]


def test_unknown_protobuf_fields_stand_among_the_known_ones():
    """A number, a fixed64, a fixed32 and an unknown field stand around the two we look for."""
    data = b"\x08\xac\x02" + b"\x11" + bytes(8) + protobuf_field(2, b"signature") + b"\x1d" + bytes(4)
    data += protobuf_field(1000, b"later") + protobuf_field(1, b"key" * 100)
    assert protobuf_fields(data) == [(1, 300), (2, b"signature"), (1000, b"later"), (1, b"key" * 100)]


@pytest.mark.parametrize(
    "message",
    [
        *("0a", "0a0261", "0a05aa", "08", "80"),  # ends too early
        *("0200", "0b", "0c", "0e"),  # no number, kinds that do not exist
        *("0900", "19aa", "0affffffff0f", "ff" * 11),  # longer than the message
        *("088000", "8800", "0a8100aa"),  # numbers that are longer than they need be
        "0800" * (FIELDS_MAX + 1),
    ],
)
def test_protobuf_that_makes_no_sense_is_refused(message: str):
    with pytest.raises(ValueError, match="protobuf"):
        protobuf_fields(bytes.fromhex(message))


@pytest.mark.timeout(3600)  # with ATOLL_FUZZ=100000
@settings(max_examples=FUZZ, database=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_protobuf_or_a_value_error(data: bytes):
    try:
        fields = protobuf_fields(data)
    except ValueError:
        return
    assert sum(len(value) for _, value in fields if isinstance(value, bytes)) <= len(data)
