"""Compiled kernels and torch give the same bits; no other peer can detect which one a peer uses."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vectors import lengths, vectors

from atoll.base.errors import PeerFault
from atoll.training.codec import codec_named
from atoll.training.codec.blocks import largest_of
from atoll.training.codec.compiled import native
from atoll.training.codec.fp32 import FP32
from atoll.training.exchange.combine import combine
from atoll.training.exchange.statistic import RowCombinationRule
from atoll.training.recipe.outer import Nesterov, outer_step
from atoll.training.robust import gram_of, trimmed_mean
from atoll.training.robust import rows as aggregate_rows

pytest.importorskip("numba", reason="kernels are compiled by numba: pip install numba")
NAMES = (
    "fp32",
    "int8",
    "int4",
    "e3m0",
    "2bit",
    "sign",
    "2means",
    "int8+lz4",
    "topk:0.1+int8",
    "topk:64/4096",
    "sparse+fp32",
)
every_name = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def torch_afterwards(monkeypatch):
    monkeypatch.setattr(native, "kernels", None)


def both_ways(work):
    """What it returns, or what it says is wrong, by torch and by kernels."""
    answers = []
    for has_kernels in (False, True):
        native.kernels = None
        assert not has_kernels or native.load()
        try:
            answers.append(work())
        except (ValueError, PeerFault) as refusal:
            answers.append(str(refusal))
    return answers


@every_name
@given(x=vectors())
@settings(max_examples=40)
def test_both_encode_to_the_same_bytes_or_refuse_in_the_same_words(name, x):
    codec = codec_named(name)
    by_torch, by_kernels = both_ways(lambda: bytes(codec.encode(x)))
    assert by_torch == by_kernels


@every_name
@given(n=lengths, seed=st.integers(0, 2**32), weights=st.lists(st.integers(0, 2**48), min_size=1, max_size=4))
@settings(max_examples=30)
def test_both_decode_and_combine_to_the_same_bits(name, n, seed, weights):
    """Members of very different sizes, with weights that divide badly; wires lie at odd addresses."""
    codec, rows = codec_named(name), []
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        x = torch.randn(n, generator=generator) * 2.0 ** int(torch.randint(-80, 40, (1,), generator=generator))
        rows.append((weight, memoryview(b"_" + codec.encode(x))[1:]))

    def work():
        answer = combine(rows, n, codec, codec_named("fp32"))
        return codec.decode(rows[0][1], n).numpy().tobytes(), answer.counted, bytes(answer.wire or b"")

    by_torch, by_kernels = both_ways(work)
    assert by_torch == by_kernels


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0", "2bit", "sign"])
@given(n=st.integers(0, 1100), seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=40)
def test_both_make_the_same_of_a_strangers_bytes(name, n, seed, data):
    """Any codes under any scales, valid ones and others: the same values, or the same fault."""
    codec = codec_named(name)
    wire = bytearray(np.random.default_rng(seed).bytes(codec.wire_bytes(n)))
    scales = data.draw(st.sampled_from([None, 0x3F80, 0x1780, 0x5A00, 0]))
    if scales is not None:
        wire[: 2 * -(-n // 256)] = scales.to_bytes(2, "little") * -(-n // 256)
    by_torch, by_kernels = both_ways(lambda: codec.decode(wire, n).numpy().tobytes())
    assert by_torch == by_kernels


@pytest.mark.parametrize("name", ["topk:64/4096", "topk:0.1+int8"])
@given(n=st.integers(1, 5000), seed=st.integers(0, 2**32), flips=st.lists(st.floats(0, 1), max_size=3))
@settings(max_examples=40)
def test_both_make_the_same_of_places_that_a_stranger_changed(name, n, seed, flips):
    """Some bits of an honest wire are turned: the same places and values, or the same fault."""
    codec = codec_named(name)
    wire = bytearray(codec.encode(torch.from_numpy(np.random.default_rng(seed).standard_normal(n, np.float32))))
    for flip in flips:
        bit = int(flip * (8 * len(wire) - 1))
        wire[bit // 8] ^= 1 << bit % 8
    by_torch, by_kernels = both_ways(lambda: codec.decode(wire, n).numpy().tobytes())
    assert by_torch == by_kernels


@given(
    members=st.integers(1, 10),
    n=st.integers(1, 1100),
    seed=st.integers(0, 2**32),
    powers=st.integers(-149, 127),
    apart=st.booleans(),
)
@settings(max_examples=40)
def test_both_sum_rows_to_the_same_bits(members, n, seed, powers, apart):
    """Rows from denormal to overflowing, with zeros and minus zeros, cut anywhere; some values lie apart."""
    generator = np.random.default_rng(seed)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rows_ND = np.ldexp(generator.standard_normal((members, n), np.float32), powers)
        rows_ND[generator.random((members, n)) < 0.3] *= np.float32(-0.0)
    rows = [torch.from_numpy(row) for row in rows_ND]
    if apart:
        rows[-1] = torch.from_numpy(np.ascontiguousarray(rows_ND.T))[:, -1]
    weights = (generator.standard_normal(members) * 3).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregate_rows, "SUM_SPAN", 300)
        by_torch, by_kernels = both_ways(lambda: aggregate_rows.weighted_sum(rows, weights).numpy())
    number = ~np.isnan(by_torch)  # the payload of a NaN is not specified
    assert np.array_equal(number, ~np.isnan(by_kernels))
    assert by_torch[number].tobytes() == by_kernels[number].tobytes()


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**32), momentum=st.floats(0, 1), lr=st.floats(0, 4))
@settings(max_examples=40)
def test_both_take_the_same_outer_step(n, seed, momentum, lr):
    generator = torch.Generator().manual_seed(seed)
    anchor_P, momentum_P, combined_P = torch.randn(3, n, generator=generator)
    by_torch, by_kernels = both_ways(
        lambda: [
            value.numpy().tobytes()
            for value in outer_step(Nesterov(lr, momentum), anchor_P, momentum_P, combined_P)
        ]
    )
    assert by_torch == by_kernels


@pytest.mark.parametrize("n", [1, 2, 5, 10, 17])
@pytest.mark.parametrize("start", [False, True])
def test_compiled_distances_are_right_and_nothing_between_equal_rows(n, start, monkeypatch):
    """About a centre, with a mean a thousand times the spread, to the origin too; fp64 rows are left to BLAS."""
    monkeypatch.setattr(native, "PAYS_FROM", 1)
    x = torch.randn(n, 1003, generator=torch.Generator().manual_seed(n)) + 1000
    x[-1] = x[0]
    origin = x.mean(0) if start else None
    points = [*x.double(), torch.zeros(1003).double() if origin is None else origin.double()]
    truth = np.array([[float(((a - b) ** 2).sum()) for b in points] for a in points])
    for rows in (x, x.double()):
        gram = gram_of(list(rows), n // 2, None if origin is None else origin.to(rows.dtype), chunk=700)
        assert (np.abs(gram.squared() - truth) <= 1e-9 * truth).all()
    assert native.kernels is not None


@pytest.mark.parametrize("statistic", ["median", "trimmed_mean", "meamed"])
@pytest.mark.parametrize("members", [3, 4, 10, 17])
def test_both_sort_columns_to_the_same_bits(statistic, members):
    """Rows with ties, zeros and minus zeros, as a part's owner has them; longer than what is sorted at once."""
    generator = torch.Generator().manual_seed(members)
    rows = [(1, torch.randint(-3, 4, (40_000,), generator=generator).mul(0.1)) for _ in range(members)]
    wires = [
        (weight, FP32.encode(torch.where(x == 0, -0.0, x) if k % 2 else x)) for k, (weight, x) in enumerate(rows)
    ]
    rule = RowCombinationRule(statistic, (members - 1) // 3)
    by_torch, by_kernels = both_ways(lambda: bytes(combine(wires, 40_000, FP32, FP32, rule).wire or b""))
    assert by_torch == by_kernels != b""


def test_both_sort_mixtures_of_rows_alike():
    """Mixed by the same products in chunks of other sizes; rows are left as they were."""
    x = torch.randn(9, 40_000, generator=torch.Generator().manual_seed(9))
    before = x.clone()
    by_torch, by_kernels = both_ways(lambda: trimmed_mean(x, 2, pre=["nnm"]))
    assert torch.allclose(by_torch, by_kernels, atol=1e-6) and torch.equal(x, before)


def test_whether_distances_are_compiled_follows_from_how_much_there_is():
    """Not from what a codec has loaded meanwhile: two calls with the same rows give the same bits."""
    assert native.load_now(native.PAYS_FROM - 1) is None and native.kernels is None
    assert native.load_now(native.PAYS_FROM) is native.kernels is not None
    assert native.load_now(native.PAYS_FROM - 1) is None


UNASKED = """
import os, sys
from atoll.training.codec.compiled import native
native.load_for(native.PAYS_FROM - 1)
os.environ[native.SWITCH] = "0"
native.load()
print("numba" in sys.modules)
"""


def test_the_switch_turns_kernels_off_and_nobody_imports_numba_unasked():
    """In a process of its own, where nothing has been loaded yet."""
    done = subprocess.run([sys.executable, "-c", UNASKED], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_where_nothing_can_be_kept_on_disk_kernels_are_compiled_all_the_same(monkeypatch):
    """numba says so when it finds no folder to write to."""
    from numba import types

    from atoll.training.codec.compiled import kernels

    def without_folder(signatures, cache=False, **how):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return numba_njit(signatures, **how)

    numba_njit = kernels.njit
    monkeypatch.setattr(kernels, "njit", without_folder)
    twice = kernels.compiled(types.float32(types.float32))(lambda x: x + x)
    assert twice(2.0) == 4.0


def test_what_keeps_kernels_from_loading_is_said_and_torch_goes_on(monkeypatch, caplog):
    def fails(name):
        raise RuntimeError("no compiler today")

    monkeypatch.setattr(native, "_fails", False)  # and again afterwards
    monkeypatch.setattr(native.importlib, "import_module", fails)
    assert not native.load() and "no compiler today" in caplog.text
    assert not native.load() and caplog.text.count("no compiler today") == 1
    assert len(codec_named("int8").encode(torch.ones(10))) == 12


def test_a_process_that_is_ending_codes_with_torch(monkeypatch):
    """No thread can be started any more, and the last update shall leave all the same."""

    class NoMore(native.threading.Thread):
        def start(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(native, "_loader", None)
    monkeypatch.setattr(native.threading, "Thread", NoMore)
    native.load_for(native.PAYS_FROM)
    assert native.kernels is None


@pytest.mark.parametrize("last", [-7.0, float("nan"), float("-inf")])
def test_the_largest_magnitude_is_found_in_any_shape(last: float):
    """Vectors, matrices, transposed matrices with gaps, a matrix that has a gradient, empty tensors."""
    x_RC = torch.arange(12, dtype=torch.float32).view(3, 4) / 4
    x_RC[2, 3] = last
    shapes = [x_RC, x_RC.view(-1), x_RC.T, x_RC[:, 3], x_RC.clone().requires_grad_().detach(), torch.empty(0)]
    by_torch, by_kernels = both_ways(lambda: [np.float32(largest_of(x)).tobytes() for x in shapes])
    assert by_torch == by_kernels
