"""PowerSGD's two phases as plain functions: what all make alike of agreed factors, and how near it comes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vectors import gaussian

from atoll.learn.codec.low_rank import Piece
from atoll.learn.codec.two_phase import (
    Places,
    basis,
    begun,
    first_half,
    orthonormal,
    places_of,
    product,
    second_half,
    two_phase,
)


@given(
    rows=st.integers(1, 12),
    size=st.integers(12, 700),
    seed=st.integers(0, 99),
    exponent=st.sampled_from([-30, 0, 30]),
)
@settings(max_examples=40)
def test_rows_are_made_orthonormal_and_span_what_they_spanned(rows: int, size: int, seed: int, exponent: int):
    """Of any size, and almost parallel to each other: what is left of each row beside the new ones is rounding."""
    common_N = gaussian(size, seed=seed)
    given_KN = (common_N + 1e-3 * gaussian(rows * size, seed=seed + 1).view(rows, size)) * 2.0**exponent
    made_KN = orthonormal(given_KN)
    assert torch.allclose(made_KN @ made_KN.T, torch.eye(rows), atol=1e-6)
    left_KN = given_KN - (given_KN @ made_KN.T) @ made_KN
    assert float(left_KN.norm()) <= 1e-5 * float(given_KN.norm())


def test_a_row_that_others_make_up_is_no_direction_and_is_drawn_anew_for_the_next_call():
    piece = Piece(0, 60, 50, 4, 0)
    rows_KC = torch.zeros(4, 50)
    rows_KC[0, :2], rows_KC[2, 1], rows_KC[3, 0] = 1.0, 3.0, -2.0
    made_KC = orthonormal(rows_KC)
    assert made_KC.any(1).tolist() == [True, False, True, False]  # the fourth is the first less the third
    again_KC = begun(piece, rows_KC.view(-1))
    assert torch.allclose(again_KC @ again_KC.T, torch.eye(4), atol=1e-6)
    assert float((made_KC - made_KC @ again_KC.T @ again_KC).norm()) < 1e-6  # what it knew is in it still


def story(x: torch.Tensor, places: Places, calls: int, warm: bool = True) -> torch.Tensor:
    """What one member alone gets of so many calls with the same values."""
    kept_S, out = None, torch.empty_like(x)

    def mine(piece: Piece) -> torch.Tensor:
        return x[piece.at : piece.end]

    for _ in range(calls):
        basis_F = basis(places, first_half(places, mine, kept_S if warm else None))
        kept_S = second_half(places, mine, basis_F)
        for place in places:
            product(place, basis_F, kept_S, out[place.piece.at : place.piece.end])
    return out


@pytest.mark.parametrize("warm", [True, False])
def test_calls_with_one_matrix_come_to_the_best_that_its_rank_allows(warm: bool):
    """Eckart and Young 1936 say what that is. Without the last call's Q they stay as far off as the first one."""
    signal_RC = gaussian(900, seed=2).view(300, 3) @ gaussian(600, seed=3).view(3, 200)
    x = gaussian(300 * 200) + 0.2 * signal_RC.view(-1)
    places = places_of(((300, 200), (1, 77)), 4)
    x = torch.cat([x, gaussian(77, seed=4)])
    best = float(torch.linalg.svdvals(x[:-77].view(300, 200))[4:].norm())
    first, last = (float((story(x, places, n, warm) - x)[:-77].norm()) for n in (1, 40))
    assert best * (1 - 1e-6) <= last <= first
    assert (last < best * 1.0005) == warm and first > best * 1.003
    assert torch.equal(story(x, places, 1)[-77:], x[-77:])


def test_what_is_tiny_or_huge_stays_a_number():
    for size in (2.0**-140, 2.0**-70, 2.0**55):
        x, places = gaussian(4096) * size, places_of(((64, 64),), 2)
        out = story(x, places, 3)
        assert bool(out.isfinite().all()) and float(out.abs().max()) <= 2.0**60
        assert not out.any() or float((out - x).norm()) <= float(x.norm())


def test_names():
    assert two_phase("powersgd") == two_phase("powersgd:4+fp32") == (4, "fp32")
    assert two_phase("powersgd:2+int8") == (2, "int8") and two_phase("lowrank:4") is None
    for wrong in ("powersgd:65", "powersgd:4+topk:0.1", "powersgd:", "powersgd:4+int8+zstd", "powersgd:04"):
        with pytest.raises(ValueError, match="powersgd"):
            two_phase(wrong)
