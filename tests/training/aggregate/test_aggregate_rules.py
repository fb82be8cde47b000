"""Robust rules, each against its paper's own words (naive.py), and what all of them promise."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.training.robust import (
    RULES,
    IncrementalGramRows,
    aggregate,
    arc,
    bucketing,
    centered_clipping,
    clip,
    coordinate_median,
    geometric_median,
    krum,
    mda,
    meamed,
    mean,
    multi_krum,
    outliers,
    scores,
    trimmed_mean,
    weighted_mean,
)

_spec = importlib.util.spec_from_file_location("naive", Path(__file__).with_name("naive.py"))
naive = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(naive)

LEAST = {"krum": lambda f: 2 * f + 3, "multi_krum": lambda f: 2 * f + 3, "bulyan": lambda f: 4 * f + 3}
ROBUST = [name for name in RULES if name not in ("mean", "weighted_mean")]
SIZES = [1, 2, 31, 129]  # coordinates


def drawn(seed: int, n: int, d: int, spread: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, d)) * spread


def settings_of(rule: str, n: int, f: int) -> dict:
    if rule == "weighted_mean":
        return {"weights": [1.0 + i for i in range(n)]}
    return {"f": f} | ({"own": n - 1} if rule == "monna" else {})


def least(rule: str, f: int) -> int:
    return LEAST.get(rule, lambda f: 2 * f + 1)(f)


def close(ours, theirs, tolerance: float = 1e-5) -> None:
    ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs)
    assert np.linalg.norm(ours - theirs) <= tolerance * max(np.linalg.norm(theirs), 1e-12)


@pytest.mark.parametrize("rule", ["krum", "multi_krum", "coordinate_median", "trimmed_mean", "meamed"])
@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize(("n", "f"), [(5, 1), (7, 0), (9, 2), (10, 3), (20, 4)])
def test_a_rule_is_what_its_paper_says(rule, n, f, d):
    """fp32 rows against fp64 loops, relative error of the whole vector below 1e-5."""
    x = drawn(n * d, n, d).astype(np.float32)
    close(aggregate(rule, x, f=f), getattr(naive, rule)(x.astype(np.float64), f))


@pytest.mark.parametrize("rule", ["bulyan", "caf", "blended_caf", "clipped_caf", "centered_clipping"])
@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize(("n", "f"), [(7, 1), (11, 2)])
def test_a_rule_with_a_search_or_a_loop_is_what_its_paper_says(rule, n, f, d):
    """fp64 rows, so that the two differ by rounding only; CAF's eigenpair comes from LAPACK on d × d there."""
    x = drawn(n + d, n, d)
    close(aggregate(rule, x, f=f), getattr(naive, rule)(x, f), 1e-7)


def test_monna_takes_the_rows_nearest_to_ones_own():
    x = drawn(1, 9, 40)
    for own in range(9):
        close(aggregate("monna", x, f=3, own=own), naive.monna(x, 3, own), 1e-9)


def test_monna_refuses_what_groups_its_own_row_with_others():
    """Buckets have places of their own: row 5 was another's, row 8 none at all. Mixing row by row is fine."""
    x = drawn(3, 13, 40)
    for own in (5, 8):
        with pytest.raises(ValueError, match="leave out bucketing"):
            aggregate("monna", x, f=2, own=own, pre=["bucketing"])
        assert np.isfinite(aggregate("monna", x, f=2, own=own, pre=["nnm", "arc"])).all()


def test_krum_counts_as_many_neighbours_as_it_is_told():
    """byzfl counts n − f − 1 where the paper counts n − f − 2: the two choices differ on these rows."""
    x = next(x for x in (drawn(s, 7, 3) for s in range(99)) if (naive.krum(x, 2) != naive.krum(x, 2, 4)).any())
    assert np.array_equal(krum(x, f=2), naive.krum(x, 2))
    assert np.array_equal(krum(x, f=2, neighbours=4), naive.krum(x, 2, 4))


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two():
    """torch.median answers 2 here."""
    assert coordinate_median(torch.tensor([[1.0], [4.0], [2.0], [3.0]])).tolist() == [2.5]


@pytest.mark.parametrize(("steps", "floor"), [(1, 0.1), (3, 0.1), (8, 1e-6)])
def test_weiszfeld_on_weights_is_weiszfeld_on_vectors(steps, floor):
    x = drawn(3, 11, 60) + 2
    ours = geometric_median(x, f=2, steps=steps, floor=floor, from_origin=True)
    close(ours, naive.weiszfeld(x, steps, floor), 1e-9)


@given(st.integers(0, 10**6), st.integers(3, 12), st.integers(1, 20))
@settings(max_examples=30)
def test_no_point_is_nearer_to_all_rows_together_than_the_geometric_median(seed, n, d):
    x = drawn(seed, n, d)
    found = geometric_median(x)

    def summed(z):
        return np.linalg.norm(x - z, axis=1).sum()

    steps = drawn(seed + 1, 30, d, 0.1)
    assert summed(found) <= min(summed(found + step) for step in [*steps, *(steps * 1e-2)]) * (1 + 1e-4)


def test_the_geometric_median_of_a_majority_of_equal_rows_is_that_row():
    x = np.vstack([np.full((4, 5), 3.0), drawn(0, 3, 5, 100.0)])
    close(geometric_median(x, f=3), np.full(5, 3.0))


@pytest.mark.parametrize("start", [None, 0.5])
@pytest.mark.parametrize("radius", [None, 2.0])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_centered_clipping_keeps_its_centre_between_rounds(steps, radius, start):
    """One step takes a way of its own, without a Gram matrix; both are the paper's."""
    x, v = drawn(5, 12, 70), None if start is None else np.full(70, start)
    ours = centered_clipping(x, f=2, steps=steps, radius=radius, start=v)
    close(ours, naive.centered_clipping(x, 2, steps, radius, v), 1e-5 if steps == 1 else 1e-9)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("start", [np.zeros(1), np.zeros(69), np.zeros(71), np.full(70, math.nan)])
def test_a_start_that_does_not_fit_the_rows_is_refused(steps, start):
    """One value would be added to every coordinate, what is too long cut off, a NaN answered with NaN."""
    with pytest.raises(ValueError, match="start is a finite vector of 70 values"):
        centered_clipping(drawn(5, 12, 70), f=2, steps=steps, start=start)


def test_a_weighted_mean_weighs():
    x = drawn(0, 3, 10)
    close(weighted_mean(x, [1, 0, 3]), (x[0] + 3 * x[2]) / 4, 1e-12)
    with pytest.raises(ValueError, match="3 rows and 2 weights"):
        weighted_mean(x, [1, 2])
    with pytest.raises(ValueError, match="not negative"):
        weighted_mean(x, [1, 2, -1])
    with pytest.raises(ValueError, match="no finite row has any weight"):
        weighted_mean(x, [0, 0, 0])


# pre-aggregations


@pytest.mark.parametrize("rule", ["mean", "krum", "multi_krum", "trimmed_mean", "coordinate_median", "meamed"])
@pytest.mark.parametrize(("n", "f"), [(5, 1), (9, 2), (20, 4)])
def test_neighbour_mixing_before_a_rule_equals_the_rule_on_mixed_rows(rule, n, f):
    x = drawn(n, n, 123)
    close(aggregate(rule, x, f=f, pre=["nnm"]), getattr(naive, rule)(naive.nnm(x, f), f), 1e-5)


@pytest.mark.parametrize("rule", ["mean", "multi_krum", "trimmed_mean"])
def test_adaptive_and_fixed_clipping_before_a_rule_equal_the_rule_on_clipped_rows(rule):
    x = drawn(8, 11, 50) * np.linspace(0.5, 20, 11)[:, None]
    close(aggregate(rule, x, f=2, pre=[arc]), getattr(naive, rule)(naive.arc(x, 2), 2), 1e-6)
    close(aggregate(rule, x, f=2, pre=["arc"]), getattr(naive, rule)(naive.arc(x, 2), 2), 1e-6)
    close(aggregate(rule, x, f=2, pre=[clip(3.0)]), getattr(naive, rule)(naive.clip(x, 3.0), 2), 1e-6)


def test_pre_aggregations_follow_each_other_in_the_order_given():
    x = drawn(8, 9, 50) * np.linspace(0.5, 5, 9)[:, None]
    clipped_first = naive.trimmed_mean(naive.nnm(naive.clip(x, 4.0), 2), 2)
    clipped_last = naive.trimmed_mean(naive.clip(naive.nnm(x, 2), 4.0), 2)
    close(trimmed_mean(x, f=2, pre=[clip(4.0), "nnm"]), clipped_first, 1e-6)
    close(trimmed_mean(x, f=2, pre=["nnm", clip(4.0)]), clipped_last, 1e-6)
    assert np.linalg.norm(clipped_first - clipped_last) > 1e-3


def test_buckets_hold_every_row_once_and_the_seed_decides_who_sits_together():
    """Of 7 rows in buckets of 2 one bucket is short: the mean of bucket means weighs that row double."""
    x = np.eye(7)
    one = mean(x, pre=[bucketing(2, b"one")])
    assert sorted(np.round(one * 8).tolist()) == [1, 1, 1, 1, 1, 1, 2]
    assert np.array_equal(one, mean(x, pre=[bucketing(2, b"one")]))
    others = [coordinate_median(drawn(0, 12, 9), f=1, pre=[bucketing(3, bytes([s]))]) for s in range(5)]
    assert len({other.tobytes() for other in others}) > 1


def test_buckets_too_few_for_the_liars_are_refused():
    with pytest.raises(ValueError, match="grouping 9 updates needs at least 7 updates to tolerate 3 liars, got 5"):
        trimmed_mean(drawn(0, 9, 4), f=3, pre=["bucketing"])


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'nmn' .did you mean 'nnm'..; known are nnm, arc"):
        trimmed_mean(drawn(0, 9, 4), f=1, pre=["nmn"])
    with pytest.raises(ValueError, match=r"'krumm' .did you mean 'krum'..; known are mean"):
        aggregate("krumm", drawn(0, 9, 4))
    with pytest.raises(ValueError, match="did you mean 'coordinate_median' or 'geometric_median'"):
        aggregate("median", drawn(0, 9, 4))


def test_liars_come_in_whole_numbers():
    for f in (-1, 1.5):
        with pytest.raises(ValueError, match=f"krum cannot tolerate {f} liars"):
            aggregate("krum", drawn(0, 9, 4), f=f)


def test_one_pre_aggregation_needs_no_list():
    x = drawn(0, 9, 4)
    assert (trimmed_mean(x, f=2, pre="nnm") == trimmed_mean(x, f=2, pre=["nnm"])).all()


# what all rules promise


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("f", [0, 1, 3])
def test_too_few_rows_are_refused_with_the_number_that_would_do(rule, f):
    enough = least(rule, f)
    x = drawn(0, enough, 6)
    assert np.isfinite(aggregate(rule, x, **settings_of(rule, enough, f))).all()
    if enough > 1:
        with pytest.raises(ValueError, match=f"{rule} needs at least {enough} updates to tolerate {f} liars"):
            aggregate(rule, x[:-1], **settings_of(rule, enough - 1, f))


@pytest.mark.parametrize("rule", RULES)
def test_one_row_is_its_own_answer_where_one_is_enough(rule):
    if least(rule, 0) == 1:
        x = drawn(0, 1, 9).astype(np.float32)
        close(aggregate(rule, x, **settings_of(rule, 1, 0)), x[0], 1e-6)


@pytest.mark.parametrize("pre", [(), ("nnm",)])
@pytest.mark.parametrize("rule", RULES)
@given(seed=st.integers(0, 10**6), copies=st.booleans())
@settings(max_examples=10)
def test_the_order_of_the_rows_changes_no_bit(rule, pre, seed, copies):
    """Small whole numbers, so that scores tie; ties are broken by what rows say, not by where they stand."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, (11, 5)).astype(np.float32)
    if copies:
        x[3:6] = x[0]
    order = rng.permutation(11)
    before, after = settings_of(rule, 11, 2), settings_of(rule, 11, 2)
    if rule == "monna":
        after["own"] = order.tolist().index(before["own"])
    if rule == "weighted_mean":
        after["weights"] = [before["weights"][i] for i in order]
    elif pre:
        before, after = before | {"pre": pre}, after | {"pre": pre}
    one, other = aggregate(rule, x, **before), aggregate(rule, x[order], **after)
    if rule == "weighted_mean" or (rule == "mean" and not pre):
        close(other, one, 1e-5) if np.abs(one).max() > 1e-3 else None  # sums in the order given, one rounding each
    else:
        assert np.array_equal(one, other)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("centered_clipping", "clipped_caf")])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=8)
def test_moving_all_rows_moves_the_answer_and_scaling_scales_it(rule, seed):
    """Those that clip start at the origin, so they are left out; with `start` moved too centred clipping moves."""
    x, by = drawn(seed, 11, 8), drawn(seed + 1, 1, 8, 100.0)[0]
    asked = settings_of(rule, 11, 2)
    answer = aggregate(rule, x, **asked)
    close(aggregate(rule, x + by, **asked), answer + by, 1e-6)
    close(aggregate(rule, x * 1024.0, **asked), answer * 1024.0, 1e-6)


def test_centered_clipping_moves_with_its_rows_and_start():
    x, by = drawn(0, 11, 8), np.full(8, 50.0)
    close(centered_clipping(x + by, f=2, start=by), centered_clipping(x, f=2) + by, 1e-9)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["krum", "multi_krum", "geometric_median", "trimmed_mean"])
def test_a_mean_ten_thousand_times_the_spread_costs_no_choice(rule, offset):
    """An uncentred fp32 Gram loses every distance here. The oracle works on the same fp32 rows in fp64."""
    x = (drawn(4, 10, 3000) + offset * 1e4 * drawn(9, 1, 3000)).astype(np.float32)
    wide = x.astype(np.float64)
    theirs = (
        geometric_median(wide - wide[0]) + wide[0] if rule == "geometric_median" else getattr(naive, rule)(wide, 2)
    )
    ours = aggregate(rule, x, f=2).astype(np.float64)
    spread = np.linalg.norm(wide - wide.mean(axis=0), axis=1).mean()
    assert np.linalg.norm(ours - theirs) <= 1e-2 * spread if offset else 1e-5 * spread


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_dtype_goes_in_and_comes_out(rule, dtype):
    """Half precision is added up in fp32: within one rounding of the answer for the same rows wide."""
    x = torch.from_numpy(drawn(2, 11, 300)).to(dtype)
    asked = settings_of(rule, 11, 2)
    answer, wide = aggregate(rule, x, **asked), aggregate(rule, x.double(), **asked)
    assert answer.dtype == dtype
    close(answer.double(), wide.numpy(), 2 * torch.finfo(dtype).eps + 1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pre", [(), ("nnm",), ("arc",)])
def test_rows_are_only_read(rule, pre):
    """Also where a rule clips: byzfl's Clipping and ARC overwrite what they are given."""
    x = torch.from_numpy(drawn(2, 11, 300) * 100)
    x[3, 5] = math.nan
    before = x.clone()
    asked = settings_of(rule, 11, 2) | ({} if rule == "weighted_mean" else {"pre": pre})
    answer = aggregate(rule, x, **asked)
    assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0))
    assert answer.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("rule", RULES)
def test_tensors_arrays_and_lists_give_the_same_bits(rule):
    x = torch.from_numpy(drawn(2, 11, 300).astype(np.float32))
    asked = settings_of(rule, 11, 2)
    answer = aggregate(rule, x, **asked)
    assert isinstance(answer, torch.Tensor)
    assert torch.equal(answer, aggregate(rule, list(x), **asked))
    assert torch.equal(answer, aggregate(rule, x.T.contiguous().T, **asked))
    for same in (x.numpy(), list(x.numpy())):
        answer_array = aggregate(rule, same, **asked)
        assert isinstance(answer_array, np.ndarray)
        assert np.array_equal(answer_array, answer.numpy())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 5, 10])
def test_a_row_that_is_not_finite_is_out_and_counts_as_a_liar(rule, bad, where):
    """One bad number in one row: the answer is that of the ten others with one liar fewer."""
    x = drawn(2, 11, 300).astype(np.float32)
    x[where, 17] = bad
    others = np.delete(x, where, axis=0)
    if rule == "weighted_mean":
        asked, without = {"weights": [1.0] * 11}, {"weights": [1.0] * 10}
    else:
        asked, without = {"f": 2}, {"f": 1}
    if rule == "monna":
        asked["own"], without["own"] = (1, 0) if where == 0 else (0, 0)
    assert np.array_equal(aggregate(rule, x, **asked), aggregate(rule, others, **without))


def test_nothing_finite_is_said_so():
    with pytest.raises(ValueError, match="none of the 5 rows is finite"):
        trimmed_mean(np.full((5, 3), math.nan), f=1)
    with pytest.raises(ValueError, match="own row 2"):
        aggregate("monna", np.vstack([drawn(0, 2, 3), np.full((1, 3), math.nan)]), f=1, own=2)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "no rows"),
        ([np.ones(3), np.ones(4)], "length 4"),
        ([np.ones(3), np.ones(3, dtype=np.float32)], "must have the same length"),
        (np.ones((2, 3), dtype=np.int64), "int64"),
        (np.ones((2, 3, 4)), "shape"),
    ],
)
def test_rows_that_do_not_fit_together_are_named(rows, says):
    with pytest.raises(ValueError, match=says):
        mean(rows)


@given(st.integers(0, 10**6), st.integers(3, 10))
@settings(max_examples=20)
def test_the_search_for_the_least_diameter_is_exact(seed, n):
    """Against all subsets. Whole numbers in the plane, so that many distances tie; any of the tightest will do."""
    x = np.random.default_rng(seed).integers(0, 6, (n, 2)).astype(np.float64)
    f = (n - 1) // 2
    answer = mda(x, f=f)
    means = {}
    d2 = naive.apart2(x)
    for kept in naive.itertools.combinations(range(n), n - f):
        diameter = max(d2[i, j] for i in kept for j in kept)
        means.setdefault(diameter, []).append(x[list(kept)].mean(axis=0))
    assert any(np.allclose(answer, each) for each in means[min(means)])


def test_the_farthest_values_leave_no_trace_in_the_mean_around_the_median():
    """A window summed and then subtracted from would keep 1e30's rounding error, larger than all the rest."""
    x = drawn(0, 9, 64).astype(np.float32)
    x[:2] = np.float32([[-1e30], [1e30]])
    close(meamed(x, f=2), naive.meamed(x.astype(np.float64), 2))


# who is far away


def test_honest_rows_are_rarely_called_outliers():
    """100 times 10 rows of 1000 normal values: fewer than one in twenty; norm > 2 std flags every one."""
    flagged = sum(len(outliers(drawn(seed, 10, 1000))) for seed in range(100))
    assert flagged < 50


@pytest.mark.parametrize("liars", [1, 3])
def test_rows_far_away_are_all_called_outliers_even_together(liars):
    """Their own distance does not widen the scale they are measured with; a NaN is far by definition."""
    x = drawn(1, 10, 200)
    x[:liars] += 5
    assert outliers(x)[:liars] == tuple(range(liars))
    x[9, 0] = math.nan
    assert 9 in outliers(x)
    assert scores(x)[9] == math.inf


def test_among_equal_rows_the_different_one_is_out():
    x = np.ones((6, 4))
    assert outliers(x) == ()
    x[2] = 2.0
    assert outliers(x) == (2,)


def test_many_good_neighbours_find_each_other_at_large_size():
    """d = 200 000 in fp32, all rows about equally far apart: choices equal those of fp64 loops."""
    x = drawn(0, 8, 200_000).astype(np.float32)
    wide = x.astype(np.float64)
    assert np.array_equal(krum(x, f=2), x[int(np.argmin(naive.krum_scores(wide, 2)))])
    close(multi_krum(x, f=2), naive.multi_krum(wide, 2))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pre", [(), ("nnm",), ("arc",)])
def test_rows_that_arrived_one_by_one_take_no_second_pass_over_them(rule, pre, monkeypatch):
    """The same answer as for all at once, without a Gram matrix made anew. One that is not finite is a liar's.

    NNM leaves 4 different mixtures of these 11 rows, so that Bulyan's choice among them is rounding's.
    """
    if (rule, pre) == ("bulyan", ("nnm",)):
        return
    x = torch.from_numpy(drawn(5, 12, 300))
    x[4, 7] = math.nan
    asked = settings_of(rule, 12, 2) | ({} if rule == "weighted_mean" else {"pre": pre})
    truth, arrivals = aggregate(rule, x, **asked), IncrementalGramRows()
    for row in x:
        arrivals.add(row)
    monkeypatch.setattr("atoll.training.robust.rules.gram_of", None)
    close(aggregate(rule, arrivals, **asked), truth, 1e-6)
    assert scores(arrivals)[4] == math.inf
