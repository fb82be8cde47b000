import pytest
import torch

from atoll.training.codec import CODECS
from atoll.training.codec.blocks import SCALE_MAX, SPAN, lend_spans
from atoll.training.exchange.combine import WEIGHT_MAX, combine
from atoll.training.exchange.statistic import RowCombinationRule
from atoll.training.robust import RULES

FP32, INT8, TWO_BIT = CODECS["fp32"], CODECS["int8"], CODECS["2bit"]


def rows_of(count: int, n: int, codec=FP32, weights=None):
    generator = torch.Generator().manual_seed(count)
    xs = [torch.randn(n, generator=generator) for _ in range(count)]
    return xs, [(1 if weights is None else weights[i], codec.encode(x)) for i, x in enumerate(xs)]


def test_the_answer_is_the_weighted_mean():
    """Weights 1, 2, 5 over a vector longer than one span."""
    n = SPAN + 777
    xs, rows = rows_of(3, n, weights=[1, 2, 5])
    answer = combine(rows, n, FP32, FP32)
    expected = (xs[0] * 1 + xs[1] * 2 + xs[2] * 5) / 8
    assert torch.allclose(FP32.decode(answer.wire, n), expected, atol=1e-6)
    assert answer.counted == (0, 1, 2) and answer.faults == ()


def test_sums_are_made_in_the_same_memory_again_and_again():
    """An order of sums that is broken off lends its spans to the next; two at once never share one."""
    _, rows = rows_of(2, 2 * SPAN)
    with lend_spans(2) as mine:
        places = {span_S.data_ptr() for span_S in mine}
    for faulty in (rows, [(1, b"short"), *rows], [(1, FP32.encode(torch.full((2 * SPAN,), 2.0**60)))]):
        assert combine(faulty, 2 * SPAN, FP32, FP32).wire is not None
    with lend_spans(2) as later, lend_spans(2) as beside:
        assert {span_S.data_ptr() for span_S in later} == places
        assert places.isdisjoint(span_S.data_ptr() for span_S in beside)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_the_same_rows_in_the_same_order_give_the_same_bytes(codec):
    """Twice, and from other buffers; the return codec is applied once."""
    _, rows = rows_of(4, 3000, codec)
    again = [(weight, memoryview(bytearray(wire))) for weight, wire in rows]
    assert combine(rows, 3000, codec, INT8) == combine(again, 3000, codec, INT8)


def test_a_row_that_does_not_decode_is_named_and_the_others_count():
    """Rows 1 and 3 of five are rubbish; the answer is that of the other three alone."""
    _, rows = rows_of(5, 1000, INT8)
    good = [rows[0], rows[2], rows[4]]
    rows[1] = (1, b"short")
    rows[3] = (1, b"\xff" * len(rows[3][1]))
    answer = combine(rows, 1000, INT8, INT8)
    assert answer.counted == (0, 2, 4)
    assert [index for index, _ in answer.faults] == [1, 3]
    assert "5 bytes instead of" in answer.faults[0][1] and "scale of block 0" in answer.faults[1][1]
    assert answer.wire == combine(good, 1000, INT8, INT8).wire


def test_an_absurd_weight_is_a_fault_of_its_row():
    _, rows = rows_of(3, 100)
    rows[0], rows[1] = (-1, rows[0][1]), (WEIGHT_MAX + 1, rows[1][1])
    assert combine(rows, 100, FP32, FP32).counted == (2,)


def test_a_newcomer_of_weight_zero_is_counted_and_changes_nothing():
    """Its message was received and can be settled, but the mean is that of the others."""
    _, rows = rows_of(3, 100)
    with_newcomer = [*rows, (0, FP32.encode(torch.full((100,), 1e6)))]
    answer = combine(with_newcomer, 100, FP32, FP32)
    assert answer.counted == (0, 1, 2, 3) and answer.wire == combine(rows, 100, FP32, FP32).wire


def test_nobody_with_any_weight_is_no_answer():
    assert combine([], 100, FP32, FP32).wire is None
    assert combine([(0, FP32.encode(torch.ones(100)))], 100, FP32, FP32).wire is None


def test_the_largest_lie_that_decodes_cannot_break_the_owner():
    """Every scale at its ceiling, every byte -128: the answer is still a finite wire."""
    scale = int(torch.tensor(SCALE_MAX).view(torch.int32)) >> 16
    lie = scale.to_bytes(2, "little") * 2 + b"\x80" * 300
    answer = combine([(WEIGHT_MAX, lie), (1, lie)], 300, INT8, INT8)
    assert bool(INT8.decode(answer.wire, 300).isfinite().all())


# ---- order statistics --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "meamed"])
def test_a_sorted_part_is_the_rule_on_the_decoded_rows(name: str):
    """Over more than one span, and whatever the order of the rows. One row claims to weigh 2^40: it counts once."""
    n = SPAN + 777
    _, rows = rows_of(5, n, INT8, weights=[1, 2**40, 3, 1, 7])
    decoded = [INT8.decode(wire, n) for _, wire in rows]
    expected = RULES["coordinate_median" if name == "median" else name](decoded, f=2)
    answer = combine(rows, n, INT8, FP32, RowCombinationRule(name, 2))
    assert torch.equal(FP32.decode(answer.wire, n), expected + 0.0)
    assert combine(rows[::-1], n, INT8, FP32, RowCombinationRule(name, 2)).wire == answer.wire


def test_a_newcomer_is_named_and_does_not_move_a_sorted_part():
    """Weight 0, with values that would be every maximum."""
    _, rows = rows_of(3, 1000)
    late = (0, FP32.encode(torch.full((1000,), 1e6)))
    answer = combine([*rows, late], 1000, FP32, FP32, RowCombinationRule("median", 1))
    assert answer.counted == (0, 1, 2, 3)
    assert answer.wire == combine(rows, 1000, FP32, FP32, RowCombinationRule("median", 1)).wire


def test_too_few_rows_have_no_answer_and_say_how_many_are_needed():
    """Five rows, of which one is rubbish and one a newcomer's: three are left, and two liars need five."""
    _, rows = rows_of(5, 1000, weights=[1, 1, 0, 1, 1])
    rows[4] = (1, b"rubbish")
    answer = combine(rows, 1000, FP32, FP32, RowCombinationRule("trimmed_mean", 2))
    assert answer.wire is None and answer.counted == (0, 1, 2, 3)
    assert answer.why == "trimmed_mean needs 5 rows to withstand 2 liars, not 3"


def test_the_sign_of_a_zero_is_not_left_to_chance():
    """The least of 0 and -0 may be either; the answer's bytes must not follow it."""
    rows = [(1, FP32.encode(torch.tensor(zeros))) for zeros in ([0.0, -0.0], [-0.0, 0.0], [-0.0, -0.0])]
    assert combine(rows, 2, FP32, FP32, RowCombinationRule("median", 1)).wire == bytes(8)
