"""All-reduces of tensors on GPUs: of one that lags behind what it is told and is always there, and of a real one.

What the lagging GPU gives is compared with what the same calls give on the CPU, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import lagging
import pytest
import torch
from grouped import PATIENCE_S, groups
from torch import Tensor

import atoll.reduce
from atoll.runtime.allreduce import flatten
from atoll.training.codec import codec_named
from atoll.training.codec.compiled import device

pytestmark = [pytest.mark.net]
OTHER = torch.device("cuda", 1)
VALUES = 150_001  # parts of two owners, the last of which ends inside a block
# the last works on the host, and like the others on a few values at a time: where parts are cut does not matter
CODECS = ("fp32", "fp16", "int8", "2bit", "2means")
every_codec = pytest.mark.parametrize("codec", CODECS)
Move = Callable[[Tensor], Tensor]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """One that lags; what happened to memory of the host."""
    told: list[str] = []

    def pinned(size: int, dtype: torch.dtype) -> Tensor:
        told.append("pinned")
        return lagging._spoiled(torch.empty(size, dtype=dtype))

    monkeypatch.setattr(flatten, "cuda", lagging.cuda)
    monkeypatch.setattr(flatten, "_give_back", lambda: told.append("given back"))
    monkeypatch.setattr(device, "pinned", pinned)
    monkeypatch.setattr(device, "_agreed", {})
    lagging._users.clear()
    lagging.recorded.clear()
    yield told


def stays(x: Tensor) -> Tensor:
    return x.clone()


def alone(x: Tensor) -> list[Tensor]:
    return [x]


def in_pieces(x: Tensor) -> list[Tensor]:
    """Of all sorts: bf16, transposed, nothing, one number in fp64."""
    return [x[:600].to(torch.bfloat16), x[600:1200].reshape(20, 30).t(), x[:0], x[1200].double(), x[1201:]]


def means(rows: Sequence[Tensor], cut: Callable[[Tensor], list[Tensor]], move: Move, **wishes) -> list[Tensor]:
    """Two calls that follow each other, the second of what the first left; as the first member holds it."""
    owed = [atoll.reduce.ErrorFeedback() if wishes.pop("feedback", False) else None for _ in rows]
    with groups(len(rows), codec=wishes.pop("codec")) as members:
        given = [[move(tensor) for tensor in cut(row)] for row in rows]
        for call in range(2):
            works = [
                member.all_reduce_async(tensors, weight=1 + i, error_feedback=owed[i], **wishes)
                for i, (member, tensors) in enumerate(zip(members, given, strict=True))
            ]
            assert all(work.wait(PATIENCE_S).complete for work in works)
            if call == 0:
                for i, tensors in enumerate(given):
                    for tensor in tensors:
                        tensor.mul_(1.5 + i)
        held = [[lagging.here(tensor).cpu() for tensor in tensors] for tensors in given]
        assert all(torch.equal(*both) for both in zip(*held, strict=True))
        return held[0]


def rows(scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(VALUES, generator=generator) * scale for _ in range(2)]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@every_codec
@pytest.mark.parametrize("cut", [alone, in_pieces])
def test_a_gpu_that_lags_gets_the_bits_of_the_cpu(codec: str, cut, gpu: list[str]):
    """What is still on its way when a call is made, and what the next call follows on, is waited for."""
    on_host = means(rows(), cut, stays, codec=codec)
    assert not gpu
    assert same(means(rows(), cut, lagging.there, codec=codec), on_host)
    assert gpu.count("given back") == 2, "each group lets go of what it pinned when it is closed"


def test_wires_and_not_vectors_come_to_the_host_where_the_codec_works_there(gpu: list[str], monkeypatch):
    sizes: list[tuple[int, torch.dtype]] = []
    plain = device.pinned
    monkeypatch.setattr(device, "pinned", lambda *what: (sizes.append(what), plain(*what))[1])
    means(rows(), alone, lagging.there, codec="2bit")
    bytes_in_all = sum(size * dtype.itemsize for size, dtype in sizes)
    assert bytes_in_all < 12 * VALUES / 4 + 10**5, "two calls of two members, there and back, and a sample"
    means(rows(), alone, lagging.there, codec="fp32")
    assert (VALUES, torch.float32) in sizes


@pytest.mark.parametrize("codec", ["int8", "2means"])
def test_tensors_of_several_gpus_and_of_the_host_meet_on_the_host(codec: str, gpu: list[str]):
    places = iter([lagging.there, stays, lambda x: lagging.there(x, OTHER), lagging.there, stays] * 2)
    on_host = means(rows(), in_pieces, stays, codec=codec)
    assert same(means(rows(), in_pieces, lambda x: next(places)(x), codec=codec), on_host)


@pytest.mark.parametrize("second", ["sign", "2means"])
def test_what_codecs_leave_out_stays_where_it_was_first(second: str, gpu: list[str]):
    """Three calls under error feedback: there, by a codec that works there or not, and there again."""

    def calls(move: Move) -> list[Tensor]:
        owed, kept = [atoll.reduce.ErrorFeedback() for _ in range(2)], []
        with groups(2, codec="2bit") as members:
            for codec in ("2bit", second, "2bit"):
                given = [move(row) for row in rows()]
                works = [
                    m.all_reduce_async(t, codec=codec, error_feedback=o)
                    for m, t, o in zip(members, given, owed, strict=True)
                ]
                assert all(work.wait(PATIENCE_S).complete for work in works)
                kept.append(lagging.here(given[0]))
            kept += [lagging.here(one._owed_N) for one in owed]
        return kept

    assert same(calls(lagging.there), calls(stays))


def test_a_device_that_rounds_otherwise_is_found_out_and_its_tensors_go_by_the_host(gpu, monkeypatch, caplog):
    on_host = means(rows(), alone, stays, codec="int8")
    divided = torch.div

    def by_inverse(x, y, **into):
        return x * divided(torch.ones_like(y), y) if isinstance(x, lagging.Lagging) else divided(x, y, **into)

    monkeypatch.setattr(torch, "div", by_inverse)
    assert same(means(rows(), alone, lagging.there, codec="int8"), on_host)
    assert "int8 works on the CPU: cuda:0 computes different bits" in caplog.text


def test_a_call_waits_for_nothing_and_its_memory_outlives_who_drops_it(gpu: list[str]):
    """What the user's stream was told before is not done when `fused` returns, and is in the vector later on."""
    lanes, tensors = flatten.CudaStreamPool(), [lagging.there(row) for row in rows()]
    user = lagging.current_stream()
    for works_on in (lambda tensor: False), (lambda tensor: True):
        lagging.recorded.clear()
        fused = lanes.fused(tensors, works_on)
        assert user.done == 0
        side = lanes._streams[lagging.WHERE]
        assert {at for at, stream in lagging.recorded if stream is side} == {
            tensor.inner.untyped_storage().data_ptr() for tensor in tensors
        }
    with fused.lane.work():
        fused.vector_N.mul_(2)
    assert torch.equal(fused.vector_N.inner, torch.cat(rows()) * 2), "done, and nobody else had to wait"
    lagging.recorded.clear()
    flatten.unfused(fused, tensors)
    assert (fused.vector_N.inner.untyped_storage().data_ptr(), user) in lagging.recorded
    assert torch.equal(lagging.here(tensors[1]), rows()[1] * 2)


@pytest.mark.parametrize("codec", ["fp16", "int8", "2bit"])
def test_a_wire_is_whole_when_it_is_returned(codec: str, gpu: list[str]):
    here, there = rows()[0], lagging.there(rows()[0])
    coder = codec_named(codec)
    wire = bytes(coder.encode(there))
    assert wire == bytes(coder.encode(here))
    coder.decode_into(wire, there)
    assert torch.equal(lagging.here(there), coder.decode(wire, VALUES))


def test_lazily_negated_tensors_are_plain_when_they_arrive(gpu: list[str]):
    """torch negates the copy on the host by itself: before it has arrived, if no member waits."""
    lanes, tensor = flatten.CudaStreamPool(), torch._neg_view(lagging.there(torch.arange(9.0)))
    fused = lanes.fused([tensor], lambda tensor: False)
    with fused.lane.work():
        assert torch.equal(fused.vector_N, -torch.arange(9.0))


# ---- where there is a GPU ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_codec
@pytest.mark.parametrize("cut", [alone, in_pieces])
def test_a_gpu_gets_the_bits_of_the_cpu(codec: str, cut):
    assert same(means(rows(), cut, lambda x: x.cuda(), codec=codec), means(rows(), cut, stays, codec=codec))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["fp32", "2bit"])
def test_tensors_of_a_gpu_and_of_the_host_in_one_call(codec: str):
    places = iter([Tensor.cuda, stays, Tensor.cuda, stays, Tensor.cuda] * 2)
    on_host = means(rows(), in_pieces, stays, codec=codec)
    assert same(means(rows(), in_pieces, lambda x: next(places)(x), codec=codec), on_host)


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_kernel_that_still_writes_the_tensor_is_waited_for(codec: str):
    """On a stream of its own, with a tenth of a second of work before it; its memory is dropped right after."""
    assert device.is_supported_on(codec_named("int8"), torch.empty(1, device="cuda"))
    with groups(1, codec=codec) as (member,):
        for value in (1.0, 2.0):
            busy, stream = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
            tensor = torch.zeros(2**22, device="cuda")
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(40):
                    busy = busy @ busy / 64
                tensor.fill_(value)
                work = member.all_reduce_async([tensor, torch.full_like(tensor, value)[::2]])
            work.wait(PATIENCE_S)
            assert torch.equal(tensor.cpu(), torch.full((2**22,), value))


@pytest.mark.gpu
def test_what_a_gpus_codecs_leave_out_comes_with_the_next_calls():
    """The sum of what was agreed in twenty calls by two bits comes close to that of what was given."""
    owed = [atoll.reduce.ErrorFeedback() for _ in range(2)]
    given, got = rows(), torch.zeros(VALUES)
    with groups(2, codec="2bit", way_back="fp32") as members:
        for _ in range(20):
            tensors = [row.cuda() for row in given]
            works = [
                m.all_reduce_async(t, error_feedback=o) for m, t, o in zip(members, tensors, owed, strict=True)
            ]
            assert all(work.wait(PATIENCE_S).complete for work in works)
            got += tensors[0].cpu()
    assert owed[0]._owed_N is not None and owed[0]._owed_N.is_cuda
    assert (got / 20 - (given[0] + given[1]) / 2).abs().mean() < 0.05
