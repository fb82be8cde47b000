"""What rows weigh: shares of a sum, or mixtures as bits."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from examples import WEIGHING, WEIGHING_MIXED

from atoll.wire.codec import encode
from atoll.wire.messages.statements import AgreedWeights
from atoll.wire.weights import mixtures_in, packed_mixtures, shares_of, weights_of_kept

FOUR = ((0, 1, 2), (0, 1, 3), (), (1, 3, 8))  # of nine rows, so that a line takes two bytes
NINE = (*FOUR, (), (), (), (), (0, 3, 8))


def test_mixtures_are_lines_of_bits_and_the_lowest_is_the_first_row():
    bits = packed_mixtures(NINE)
    assert bits[:2] == b"\x07\x00" and bits[6:8] == b"\x0a\x01" and len(bits) == 18
    assert mixtures_in(bits, 9) == NINE


def test_the_bytes_of_a_weighing_that_mixes_are_frozen():
    """Its place in the list is that of the numbers, so a weighing without mixtures is what it always was."""
    data = encode(WEIGHING_MIXED)
    numbers = encode(WEIGHING_MIXED.weights), encode((0.75, 0.25))
    assert data.replace(*numbers) == encode(WEIGHING) and numbers[0].hex() == "c4020302"
    assert msgspec.msgpack.decode(data, type=AgreedWeights) == WEIGHING_MIXED
    assert WEIGHING_MIXED.shares == (0.25, 0.75)


@pytest.mark.parametrize("bits", [b"", bytes(17), bytes(19), b"\x00\x02" + bytes(16)])
def test_bits_of_other_rows_are_refused(bits: bytes):
    with pytest.raises(ValueError, match="mixtures"):
        mixtures_in(bits, 9)


def test_a_rows_share_is_how_much_of_all_mixtures_it_is():
    assert shares_of((0.25, 0.75), 2) == (0.25, 0.75)
    shares = shares_of(packed_mixtures(NINE), 9)
    assert shares == pytest.approx([1 / 4, 1 / 4, 1 / 12, 1 / 4, 0, 0, 0, 0, 1 / 6])


def test_what_is_left_weighs_as_much_and_mixtures_lose_what_is_lost():
    assert weights_of_kept((0.5, 0.25, 0.25), 3, (0, 1)) == pytest.approx((2 / 3, 1 / 3))
    assert weights_of_kept((0.5, 0.25, 0.25), 3, (0, 1, 2)) == (0.5, 0.25, 0.25)
    left = weights_of_kept(packed_mixtures(NINE), 9, (0, 3, 8))
    assert mixtures_in(left, 3) == ((0,), (1, 2), (0, 1, 2))
