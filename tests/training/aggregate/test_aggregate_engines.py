"""The two engines by themselves: parts add up, chunks do not matter, networks sort."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.training.robust import IncrementalGramRows, columns, gram_of
from atoll.training.robust.columns import DROPPED, EXACT, network
from atoll.training.robust.rows import content_order, opened, squared_norms
from atoll.training.robust.weights import krum, nnm


def drawn(seed: int, n: int, d: int) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def true_squared(x: torch.Tensor) -> np.ndarray:
    """Distances by differences, fp64, the origin as one more row."""
    wide = torch.cat([x.double(), torch.zeros(1, x.shape[1]).double()])
    return np.array([[float(((a - b) ** 2).sum()) for b in wide] for a in wide])


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 32, 33, 50])
@pytest.mark.parametrize("chunk", [0, 100])
def test_every_distance_is_there_and_right(n, chunk):
    """Around every block boundary, with a mean a thousand times the spread, and to the origin too."""
    x = drawn(n, n, 1003) + 1000
    squared, truth = gram_of(list(x), n // 2, chunk=chunk).squared(), true_squared(x)
    off = ~np.eye(n + 1, dtype=bool)
    assert (np.abs(squared - truth)[off] <= 1e-9 * truth[off]).all()
    assert (np.diag(squared) == 0).all()


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 400), st.lists(st.integers(0, 400), max_size=4))
@settings(max_examples=30)
def test_the_matrices_of_parts_add_up_to_the_matrix_of_the_whole(seed, n, d, cuts):
    """Cut anywhere: the sum differs from the whole by rounding, and Krum's and NNM's choices do not differ."""
    x = drawn(seed, n, d)
    edges = sorted({0, d, *(min(cut, d) for cut in cuts)})
    parts = [gram_of(list(x[:, lo:hi]), n // 2) for lo, hi in itertools.pairwise(edges)]
    whole, summed = gram_of(list(x), n // 2), parts[0]
    for part in parts[1:]:
        summed = summed.plus(part)
    assert np.allclose(summed.products, whole.products, rtol=1e-12, atol=1e-12 * np.abs(whole.products).max())
    f = (n - 1) // 2
    assert np.array_equal(krum(summed, f), krum(whole, f))
    assert np.array_equal(nnm(summed, f), nnm(whole, f))


def test_parts_about_different_centres_do_not_add_up():
    x = drawn(0, 5, 8)
    with pytest.raises(ValueError, match="5 rows about 1 and 5 about 2"):
        gram_of(list(x), 1).plus(gram_of(list(x), 2))


def test_rows_that_arrive_one_by_one_give_the_same_distances():
    """Longer than a chunk, and with a mean of 30 times what they are apart."""
    for common in (0, 30):
        x = drawn(0, 6, 40_000) + common
        arrivals = IncrementalGramRows()
        for row in x:
            arrivals.add(row)
        assert np.allclose(arrivals.gram().squared(), true_squared(x), rtol=1e-10)
        assert np.allclose(arrivals.gram([4, 1]).squared(), true_squared(x[[4, 1]]), rtol=1e-10)
    with pytest.raises(ValueError, match="all rows must have the same length"):
        arrivals.add(x[0, 1:])


def test_a_huge_row_does_not_blur_the_others_wherever_it_stands():
    """1e30 first, in the middle and last: honest distances keep twelve digits, as without it."""
    x = drawn(1, 7, 500)
    truth = true_squared(x)
    for place in (0, 3, 7):
        rows = [*x[:place], torch.full((500,), 1e30), *x[place:]]
        order = content_order(rows, squared_norms(rows))
        squared = gram_of([rows[i] for i in order], len(rows) // 2).squared()
        at = [order.index(i) for i in range(8) if i != place]
        assert np.allclose(squared[np.ix_(at, at)], truth[:-1, :-1], rtol=1e-12)


def test_the_matrix_of_mixtures_is_that_of_mixed_rows():
    """Without the mixed rows ever being built."""
    x = drawn(3, 8, 300)
    gram = gram_of(list(x), 4)
    mix = nnm(gram, 3)
    mixed = torch.from_numpy(mix[:, :-1]) @ x.double()
    assert np.allclose(gram.mixed(mix).squared(), true_squared(mixed), rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("n", range(1, 11))
def test_the_network_sorts_every_sequence_of_noughts_and_ones(n):
    """Which by the zero-one principle (Knuth vol. 3, 5.3.4, theorem Z) means that it sorts everything."""
    columns_NC = torch.tensor(list(itertools.product([0.0, 1.0], repeat=n))).T.contiguous()

    def compare(ranked, into, _):
        assert all(bool((low <= high).all()) for low, high in itertools.pairwise(ranked))
        into.copy_(ranked[n // 2])

    answer = columns.by_columns(list(columns_NC), (EXACT,) * n, compare)
    assert torch.equal(answer, columns_NC.sort(dim=0).values[n // 2])


@pytest.mark.parametrize("n", [11, 16, 20, 33, 50])
def test_a_pruned_network_still_finds_what_is_asked_of_it(n):
    """Median, trimmed means and means around the median of values with many ties, against a full sort."""
    x = torch.randint(-3, 4, (n, 777), generator=torch.Generator().manual_seed(n)).double()
    ranked = x.sort(dim=0).values
    assert torch.equal(columns.median(list(x)), (ranked[(n - 1) // 2] + ranked[n // 2]) / 2)
    for trim in range((n - 1) // 2 + 1):
        assert torch.allclose(columns.trimmed_mean(list(x), trim), ranked[trim : n - trim].mean(dim=0))


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=60)
def test_the_values_nearest_the_median_are_found_without_trying_windows(seed, n, keep):
    """Also when far more are dropped than kept, as Bulyan does. Distances tie, so their sums are compared."""
    keep = min(keep, n)
    x = torch.randint(-9, 10, (n, 40), generator=torch.Generator().manual_seed(seed)).double()
    middle = columns.median(list(x))
    away = (x - middle).abs().sort(dim=0).values[:keep].sum(dim=0)
    answer = columns.mean_around_median(list(x), keep)
    # of all windows of `keep` ranks, the answer is the mean of one that is nearest
    ranked = x.sort(dim=0).values
    windows = [ranked[at : at + keep] for at in range(n - keep + 1)]
    good = [
        ((window - middle).abs().sum(dim=0) == away) & (window.mean(dim=0) - answer).abs().lt(1e-12)
        for window in windows
    ]
    assert bool(torch.stack(good).any(dim=0).all())


def test_leaving_comparators_out_leaves_out_work():
    """Of Batcher's 103 comparators for 20 rows, 206 operations: the counts that the speed of the rules rests on."""
    full = network((EXACT,) * 20)
    middle = network(tuple("kept" if rank in (9, 10) else DROPPED for rank in range(20)))
    trimmed = network(tuple("kept" if 4 <= rank < 16 else DROPPED for rank in range(20)))
    assert len(full.steps) == 206
    assert len(middle.steps) <= 150
    assert len(trimmed.steps) <= 172


@pytest.mark.parametrize("d", [1, 99, 100, 101, 300])
@pytest.mark.parametrize("chunk", [3, 50, 100, 5000])
def test_the_size_of_chunks_changes_no_bit_of_a_column_rule(d, chunk):
    x = list(drawn(d, 9, d))
    assert torch.equal(columns.median(x), columns.median(x, chunk=chunk))
    assert torch.equal(columns.trimmed_mean(x, 2), columns.trimmed_mean(x, 2, chunk=chunk))
    assert torch.equal(columns.mean_around_median(x, 5), columns.mean_around_median(x, 5, chunk=chunk))
    mix = nnm(gram_of(x, 4), 2)[:, :-1]
    assert torch.allclose(columns.median(x, mix), columns.median(x, mix, chunk=chunk), atol=1e-6)


@pytest.mark.parametrize("chunk", [3, 50, 100, 5000])
def test_the_size_of_chunks_changes_no_choice_of_a_distance_rule(chunk):
    x = list(drawn(5, 9, 1001))
    one, other = gram_of(x, 4), gram_of(x, 4, chunk=chunk)
    assert np.allclose(one.products, other.products, rtol=1e-12, atol=1e-9)
    assert np.array_equal(krum(one, 3), krum(other, 3)) and np.array_equal(nnm(one, 3), nnm(other, 3))


def test_rows_have_an_order_that_follows_from_what_they_say():
    """Equal lengths are told apart by their first different value; equal rows are equal."""
    rows = opened([np.array(row) for row in ([3.0, 4.0], [4.0, 3.0], [-3.0, 4.0], [0.0, 1.0], [3.0, 4.0])])
    order = content_order(rows, squared_norms(rows))
    assert [rows[i].tolist() for i in order] == [[0, 1], [-3, 4], [3, 4], [3, 4], [4, 3]]


@pytest.mark.parametrize("value", [1e30, 3e38, -1e25])
def test_the_norm_of_a_huge_but_finite_row_is_finite(value):
    norms = squared_norms([torch.full((1000,), value), torch.tensor([math.nan] * 1000)])
    assert norms[0] == pytest.approx(1000 * float(np.float32(value)) ** 2, rel=1e-6)
    assert not math.isfinite(norms[1])


@pytest.mark.parametrize("common", [0.0, 30.0])
@pytest.mark.parametrize(("n", "f"), [(10, 2), (20, 6)])
def test_neighbours_of_a_million_values_are_those_of_plain_differences_in_fp64(n, f, common):
    """Sets, not distances, against ‖a − b‖² of widened rows; a mean of 30 spreads would drown an fp32 Gram.

    Liars sit a little off the honest ones' middle, so that neighbors are decided by little.
    """
    x = drawn(n + f, n, 1_000_000) + common
    x[-f:] *= 0.5
    x[-f:] += 0.5 * common
    wide = [row.double().numpy() for row in x]
    truth = np.zeros((n, n))
    for i, j in itertools.combinations(range(n), 2):
        apart = wide[i] - wide[j]
        truth[i, j] = truth[j, i] = apart @ apart
    expected = [set(np.argsort(line, kind="stable")[: n - f].tolist()) for line in truth]
    order = content_order(list(x), squared_norms(list(x)))
    mix = nnm(gram_of([x[i] for i in order], n // 2), f)[:, :-1]
    found = {order[i]: {order[j] for j in np.flatnonzero(line)} for i, line in enumerate(mix)}
    assert found == dict(enumerate(expected))
    gaps = [np.diff(np.sort(line))[n - f - 1] / np.sort(line)[n - f] for line in truth]
    assert min(gaps) < 1e-3, "some choice was close"
