"""Owners of parts compare their rows, and the sum of that weighs whole updates: the library's rules in pieces."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from atoll.policy.fault_tolerance import DISTANCES, MIXED, liars_among, rows_needed
from atoll.training.codec import CODECS
from atoll.training.codec.blocks import SPAN
from atoll.training.codec.compiled import native
from atoll.training.codec.deterministic_dot import CHUNK
from atoll.training.exchange.combine import combine
from atoll.training.exchange.distance_weights import (
    SOLVES,
    compare_rows,
    find_outliers,
    packed,
    unpack_products,
    weigh_rows,
)
from atoll.training.exchange.statistic import AFTER_MIXING, RowCombinationRule
from atoll.training.recipe.update import part_bounds
from atoll.training.robust import RULES, default
from atoll.training.robust.attacks import alie, sign_flip
from atoll.wire.weights import packed_mixtures, shares_of

FP32, INT8 = CODECS["fp32"], CODECS["int8"]
N = 5000
SHARES = (3, 1, 1, 2)
BOUNDS = part_bounds(N, SHARES)


def updates(poison: str = "", honest: int = 5, offset: float = 0.0) -> torch.Tensor:
    """(7, N): honest rows around one point, two liars; all about `offset`."""
    rows = torch.randn(honest, N, generator=torch.Generator().manual_seed(3)) * 0.1 + 1.0
    lies = {"sign flip": sign_flip, "a little is enough": lambda rows, f: alie(rows, f, 1.5)}
    bad = lies[poison](rows, 2) * (10 if poison == "sign flip" else 1) if poison else rows[:2] * 0.9 + 0.1
    return torch.cat([rows, bad]) + offset


def names_of(count: int) -> list[str]:
    return [f"p{k}" for k in range(count)]


def weighed(rows: torch.Tensor, statistic: str, codec=FP32, order=None) -> tuple[dict[str, float], torch.Tensor]:
    """As owners do it: compare every part, weigh, combine every part. `order` of the peers' names over the rows."""
    names = order or names_of(len(rows))
    row_of = dict(zip(names, rows, strict=True))
    parts, held = [], []
    for lo, hi in BOUNDS:
        wires = [(1, codec.encode(row_of[name][lo:hi].clone())) for name in sorted(names)]
        held.append(wires)
        parts.append((sorted(names), compare_rows(wires, hi - lo, codec).products))
    weights = weigh_rows(statistic, 2, sorted(names), parts)
    pieces = zip(BOUNDS, held, strict=True)
    rule = RowCombinationRule(statistic, 2, weights)
    answers = [combine(wires, hi - lo, codec, FP32, rule).wire for (lo, hi), wires in pieces]
    whole = torch.cat([FP32.decode(wire, hi - lo) for wire, (lo, hi) in zip(answers, BOUNDS, strict=True)])
    return dict(zip(sorted(names), shares_of(weights, len(names)), strict=True)), whole


def library(statistic: str, rows: torch.Tensor) -> torch.Tensor:
    if statistic == "robust":
        return default(7, 2)(rows)
    *pre, rule = statistic.split(" + ")
    return RULES["coordinate_median" if rule == "median" else rule](rows, f=2, pre=pre)


@pytest.mark.parametrize("poison", ["", "sign flip", "a little is enough"])
@pytest.mark.parametrize("statistic", DISTANCES)
def test_parts_that_are_weighed_together_make_what_the_rule_makes_of_whole_rows(statistic: str, poison: str):
    """The same choice of rows, and the same values except for the order of fp32 sums."""
    rows = updates(poison)
    _, whole = weighed(rows, statistic)
    torch.testing.assert_close(whole, library(statistic, rows), rtol=2e-6, atol=2e-6)


def test_whoever_lies_loudly_weighs_nothing():
    """Rules that choose drop both; those that iterate leave them a few per cent of what honest rows have.

    Each has a mixture of its own, which a statistic by value drops: in two of seven mixtures two of five rows.
    """
    few = dict.fromkeys(("geometric_median", "centered_clipping", "nnm + geometric_median"), 0.05)
    few |= dict.fromkeys(MIXED, 4 / 35 + 1e-9) | {"nnm + centered_clipping": 4 / 35, "clipped_caf": 1e-4}
    for statistic in DISTANCES:
        weights, _ = weighed(updates("sign flip"), statistic)
        loud = weights["p5"] + weights["p6"]
        assert loud < few.get(statistic, 1e-12), (statistic, loud)


def test_every_name_of_a_rule_by_distance_can_be_weighed():
    assert set(DISTANCES) == {*SOLVES, *AFTER_MIXING} and set(MIXED) == set(AFTER_MIXING)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("n", [300, SPAN + 777])
def test_mixtures_are_the_sums_that_the_page_has_to_the_bit(n: int, kernels: bool, monkeypatch):
    """Rows in their order, one product, sorted: done by numpy's own fp32, value by value of whole vectors. A
    newcomer's row stands between the others, and is in nothing."""
    monkeypatch.setattr(native, "kernels", None)
    if kernels and not native.load():
        pytest.skip("without the extra `fast` there are no kernels")
    draw = np.random.default_rng(n)
    rows = (draw.standard_normal((8, n)) * 10.0 ** draw.integers(-3, 3, (8, 1))).astype(np.float32)
    settled, others = [0, 1, 2, 4, 5, 6, 7], lambda one: [row for row in settled if row != one]
    chosen = [sorted([one, *draw.choice(others(one), 4, replace=False).tolist()]) for one in settled]
    mixtures = [next((c for s, c in zip(settled, chosen, strict=True) if s == row), ()) for row in range(8)]
    sums = [sum((rows[row] for row in some[1:]), rows[some[0]]) * np.float32(1 / 5) for some in chosen]
    ranked = np.sort(np.stack(sums), axis=0)
    wires = [(int(k in settled), FP32.encode(torch.from_numpy(row.copy()))) for k, row in enumerate(rows)]
    made = combine(wires, n, FP32, FP32, RowCombinationRule("nnm + median", 2, packed_mixtures(mixtures)))
    assert FP32.decode(made.wire, n).numpy().tobytes() == (ranked[3] + np.float32(0)).tobytes()
    trimmed = combine(wires, n, FP32, FP32, RowCombinationRule("nnm + trimmed_mean", 2, packed_mixtures(mixtures)))
    np.testing.assert_allclose(FP32.decode(trimmed.wire, n), ranked[2:5].mean(axis=0), rtol=1e-5, atol=1e-5)


def test_rows_that_weigh_nothing_make_nothing_and_are_not_sorted_instead():
    """A witness then refutes a result that stands on less than half of the weighed rows, unlike honest ones."""
    wires = [(1, FP32.encode(torch.full((10,), float(k)))) for k in range(5)]
    made = combine(wires, 10, FP32, FP32, RowCombinationRule("nnm + median", 2, (0.0,) * 5))
    assert not FP32.decode(made.wire, 10).any()


def test_too_few_mixtures_are_no_answer():
    wires = [(1, FP32.encode(torch.full((10,), float(k)))) for k in range(4)]
    made = combine(
        wires, 10, FP32, FP32, RowCombinationRule("nnm + median", 2, packed_mixtures([(0, 1, 2, 3)] * 4))
    )
    assert made.wire is None and "needs 5 rows to withstand 2 liars, not 4" in made.why


def test_a_mean_that_all_rows_share_does_not_blur_who_is_near_to_whom():
    """Products are about the origin: rows a thousandth of their length apart, cut in parts, in fp64."""
    rows = updates("", offset=300.0)
    torch.testing.assert_close(weighed(rows, "krum")[1], RULES["krum"](rows, f=2), rtol=1e-6, atol=0)


def test_the_largest_row_that_codecs_let_through_leaves_the_others_distances_alone():
    """1e17 in every value: squares of 1e34, and honest rows are a tenth apart."""
    rows = updates("sign flip")
    rows[5:] = 1e17
    for statistic in DISTANCES:
        whole = weighed(rows, statistic)[1]
        assert float((whole - 1.0).abs().mean()) < 0.1, statistic


def test_weights_follow_rows_and_not_their_names():
    """Peers named the other way round: each row has the weight that it had."""
    rows, names = updates(""), names_of(7)
    for statistic in DISTANCES:
        one, _ = weighed(rows, statistic)
        other, _ = weighed(rows, statistic, order=names[::-1])
        assert [one[name] for name in names] == pytest.approx([other[name] for name in names[::-1]], abs=1e-9)


def test_rows_that_not_all_parts_have_are_weighed_as_if_they_had_not_come():
    rows, names = updates("sign flip"), names_of(7)
    parts = []
    for k, (lo, hi) in enumerate(BOUNDS):
        here = names if k else names[1:]
        wires = [(1, FP32.encode(rows[int(name[1:]), lo:hi].clone())) for name in here]
        parts.append((here, compare_rows(wires, hi - lo, FP32).products))
    without = [
        (
            names[1:],
            compare_rows([(1, FP32.encode(row[lo:hi].clone())) for row in rows[1:]], hi - lo, FP32).products,
        )
        for lo, hi in BOUNDS
    ]
    assert weigh_rows("robust", 2, names[1:], parts) == pytest.approx(
        weigh_rows("robust", 2, names[1:], without), abs=1e-12
    )


def test_products_are_those_of_the_decoded_values_over_more_than_one_span():
    n = SPAN + 777
    xs = [torch.randn(n, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    wires = [(1, INT8.encode(x)) for x in xs]
    decoded = torch.stack([INT8.decode(wire, n) for _, wire in wires]).to(torch.float64)
    np.testing.assert_allclose(
        unpack_products(compare_rows(wires, n, INT8).products, 4), decoded @ decoded.T, rtol=1e-12
    )


def test_a_newcomer_and_rubbish_are_told_apart_and_neither_has_products():
    """A newcomer's row decodes and counts for nothing; rubbish is named by its place."""
    good = [(1, FP32.encode(torch.full((10,), float(k)))) for k in (1, 2)]
    done = compare_rows([good[0], (0, FP32.encode(torch.full((10,), 1e6))), (1, b"rubbish"), good[1]], 10, FP32)
    assert done.counted == (0, 1, 3) and [index for index, _ in done.faults] == [2]
    assert unpack_products(done.products, 2).tolist() == [[10.0, 20.0], [20.0, 40.0]]
    assert compare_rows([(1, b"rubbish")], 10, FP32).products == b""


def test_packing_is_the_upper_triangle_row_by_row():
    upper = np.array([1.0, 2.0, 3.0])
    assert packed(upper) == upper.astype("<f8").tobytes()
    assert (unpack_products(packed(upper), 2) == np.array([[1.0, 2.0], [2.0, 3.0]])).all()


@pytest.mark.parametrize("n", [1, CHUNK - 1, CHUNK, 5 * CHUNK + 1, SPAN + 3 * CHUNK + 7])
def test_sums_are_taken_in_the_order_that_the_page_has(n: int):
    """The three lines of training/codec/deterministic_dot, done by Python's own floats, give the same bits."""
    draw = np.random.default_rng(n)
    rows = (draw.standard_normal((3, n)) * 10.0 ** draw.integers(-6, 6, n)).astype(np.float32)
    expected = []
    for i in range(3):
        for j in range(i, 3):
            total, products = 0.0, (rows[i].astype(float) * rows[j].astype(float)).tolist()
            for at in range(0, n, CHUNK):
                tree = products[at : at + CHUNK] + [0.0] * (CHUNK - len(products[at : at + CHUNK]))
                while len(tree) > 1:
                    half = len(tree) // 2
                    tree = [low + high for low, high in zip(tree[:half], tree[half:], strict=True)]
                total += tree[0]
            expected.append(total)
    wires = [(1, FP32.encode(torch.from_numpy(row.copy()))) for row in rows]
    assert np.frombuffer(compare_rows(wires, n, FP32).products).tolist() == expected


def test_equal_shares_are_the_mean_and_a_row_that_spoils_after_it_was_compared_is_no_answer():
    wires = [(1, FP32.encode(torch.full((300,), float(k)))) for k in (1, 2, 4, 5)]
    even_weights = RowCombinationRule("robust", 1, (0.25,) * 4)
    assert combine(wires, 300, FP32, FP32, even_weights).wire == combine(wires, 300, FP32, FP32).wire
    spoilt = combine([*wires[:3], (1, b"rubbish")], 300, FP32, FP32, even_weights)
    assert spoilt.wire is None and "no longer decode" in spoilt.why


@pytest.mark.parametrize("statistic", DISTANCES)
def test_weights_are_shares_for_any_rows_at_all(statistic: str):
    """Identical rows, zeros, one huge, few: finite, not negative, and never more than one together."""
    draw = random.Random(statistic)
    for count in range(5, 9):
        liars = liars_among(count, 0.33)
        while count < rows_needed(statistic, liars):
            liars -= 1
        for kind in ("same", "zeros", "huge", "spread"):
            rows = torch.zeros(count, 40) if kind == "zeros" else torch.ones(count, 40)
            if kind in ("huge", "spread"):
                for row in rows:
                    row *= draw.random() * (1e17 if kind == "huge" and draw.random() < 0.3 else 1.0)
            products = compare_rows([(1, FP32.encode(row.clone())) for row in rows], 40, FP32).products
            weights = shares_of(weigh_rows(statistic, liars, names_of(count), [(names_of(count), products)]), count)
            assert all(0 <= weight <= 1 for weight in weights) and 0 < sum(weights) <= 1 + 1e-9


@pytest.mark.parametrize("statistic", DISTANCES)
def test_products_that_are_none_end_in_weights_too(statistic: str):
    """A lying owner signs any numbers up to 1e60: rules end, with numbers that the machine can judge."""
    draw = np.random.default_rng(5)
    for size in (1e-300, 1.0, 1e30, 1e60):
        for _ in range(20):
            garbage = draw.uniform(-1, 1, 28) * size
            made = weigh_rows(statistic, 2, names_of(7), [(names_of(7), garbage.astype("<f8").tobytes())])
            found = find_outliers(names_of(7), [(names_of(7), garbage.astype("<f8").tobytes())])
            assert {*names_of(7)}.issuperset(found)
            weights = shares_of(made, 7)
            assert len(weights) == 7 and all(isinstance(weight, float) for weight in weights)
