"""Matrices that travel as factors: how near they come, and what a stranger's may do."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vectors import gaussian, through

from atoll.base.errors import PeerFault
from atoll.training.codec import CODECS, SharedKnowledge, codec_named


def matrix(rows: int, columns: int, rank: int, seed: int = 0) -> torch.Tensor:
    """A random matrix of this rank, as the vector that it travels as."""
    return (
        gaussian(rows * rank, seed=seed).view(rows, rank) @ gaussian(rank * columns, seed=seed + 1).view(rank, -1)
    ).view(-1)


def in_shapes(*shapes: tuple[int, int], near: torch.Tensor | None = None) -> SharedKnowledge:
    return SharedKnowledge(shapes=shapes, reference_N=near)


@given(rows=st.integers(20, 90), columns=st.integers(20, 90), rank=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_a_matrix_of_low_rank_comes_back_from_its_factors(rows, columns, rank, seed):
    x = matrix(rows, columns, rank, seed)
    decoded = through("lowrank:4+fp32", x, in_shapes((rows, columns)))
    assert float((decoded - x).norm()) <= 1e-4 * float(x.norm())


def test_factors_cost_what_they_hold_and_vectors_travel_as_they_are():
    """A 300 x 200 matrix at rank 4 between two vectors, and a matrix too small to gain: 2000 values and 150."""
    shapes = ((1, 50), (300, 200), (1, 70), (5, 6))
    n = sum(rows * columns for rows, columns in shapes)
    x = torch.cat([gaussian(50), matrix(300, 200, 2), gaussian(70), gaussian(30)])
    codec = codec_named("lowrank:4+fp32", in_shapes(*shapes))
    assert codec.wire_bytes(n) == 4 * (50 + 4 * 500 + 70 + 30) == len(codec.encode(x))
    decoded = codec.decode(codec.encode(x), n)
    assert torch.equal(decoded[:50], x[:50]) and torch.equal(decoded[-100:], x[-100:])
    with pytest.raises(ValueError, match="in a vector of 10"):
        codec.encode(torch.zeros(10))


def test_factors_are_nearly_the_best_there_are():
    """Eckart and Young 1936: no matrix of that rank is closer than the largest singular values make it."""
    x = matrix(120, 100, 30) + 0.3 * gaussian(12_000, seed=9)
    values = torch.linalg.svdvals(x.view(120, 100))
    best = float(values[8:].norm())
    error = float((through("lowrank:8+fp32", x, in_shapes((120, 100))) - x).norm())
    assert best * (1 - 1e-5) <= error < 1.1 * best


def test_a_start_from_what_was_expected_finds_directions_that_a_single_pass_would_not():
    """The paper's warm start: the reference holds the right rows, the update is noise around them."""
    signal = matrix(200, 150, 4)
    x = signal * 0.2 + gaussian(30_000, seed=5) * 0.3
    known = in_shapes((200, 150), near=signal)
    best = float(torch.linalg.svdvals(x.view(200, 150))[4:].norm())
    assert float((through("lowrank:4+fp32", x, known) - x).norm()) < 1.01 * best


@given(seed=st.integers(0, 99), rows=st.integers(3, 50), columns=st.integers(3, 3000), rank=st.integers(1, 5))
@settings(max_examples=30)
def test_factors_multiply_in_plain_order(seed, rows, columns, rank):
    """numpy, one rank after another, rounding each product and each sum: the same bits, across spans of any cut."""
    x = gaussian(rows * columns, 1e-3, seed)
    codec = codec_named(f"lowrank:{rank}+fp32", in_shapes((rows, columns)))
    wire = codec.encode(x)
    if len(wire) == 4 * len(x):
        assert torch.equal(codec.decode(wire, len(x)), x)  # factors would not have been smaller
        return
    factors = np.frombuffer(wire, np.float32)
    p, q = factors[: rank * rows].reshape(rank, rows), factors[rank * rows :].reshape(rank, columns)
    expected = np.multiply.outer(p[0], q[0])
    for k in range(1, rank):
        expected = expected + np.multiply.outer(p[k], q[k])
    assert np.array_equal(codec.decode(wire, len(x)).numpy(), expected.reshape(-1))


def test_a_strangers_factors_cannot_overflow():
    """Every factor at its ceiling is a large finite vector; one beyond it is a fault."""
    shapes, n = in_shapes((64, 64)), 4096
    codec = codec_named("lowrank:8+fp32", shapes)
    count = codec.wire_bytes(n) // 4
    most = codec.decode(CODECS["fp32"].encode(torch.full((count,), 2.0**40)), n)
    assert bool((most == 2.0**60).all())
    with pytest.raises(PeerFault, match="a factor of the matrix at 0 is too large"):
        codec.decode(CODECS["fp32"].encode(torch.full((count,), 2.0**41)), n)


def test_factors_are_no_answer_to_compare():
    """Products of matrices differ between processors, so two owners need not find the same ones."""
    assert not codec_named("lowrank:2+int8", in_shapes((64, 64))).same_everywhere
    with pytest.raises(ValueError, match="lowrank needs the matrices"):
        codec_named("lowrank:2+int8")
