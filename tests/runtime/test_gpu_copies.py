"""Flat values between a model on a GPU and the host: a GPU that lags and is always there, and a real one.

A copy that is read too early holds NaN on the one that lags. Values are those of the same model on the CPU.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import lagging
import pytest
import torch
from torch import Tensor, nn

from atoll.runtime.embed.loop_model import LoopModel
from atoll.runtime.system import anonymous_file
from atoll.runtime.trainer.protocol import MergeAnchorIntoParameters
from atoll.runtime.trainer.shared_memory import SharedMailbox
from atoll.training.codec.compiled import device
from atoll.training.exchange import device_copies
from atoll.training.exchange.layout import flatten, layout_of, unflatten


@pytest.fixture
def laggard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One that lags; the sizes of the pinned vectors."""
    sizes: list[int] = []

    def pinned(size: int, dtype: torch.dtype) -> Tensor:
        sizes.append(size)
        return lagging._spoiled(torch.empty(size, dtype=dtype))

    monkeypatch.setattr(device_copies, "cuda", lagging.cuda)
    monkeypatch.setattr(device_copies, "_streams", {})
    monkeypatch.setattr(device, "pinned", pinned)
    lagging._users.clear()
    yield sizes


def network() -> nn.Module:
    """Of all sorts: running statistics and their count, bf16, a transposed parameter."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4).to(torch.bfloat16))
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    model[1].num_batches_tracked.fill_(7)
    return model


def moved(model: nn.Module, move: Callable[[Tensor], Tensor]) -> nn.Module:
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = move(tensor.detach())
    return model


def same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_values_of_a_gpu_that_lags_are_whole_on_the_host_and_back(laggard: list[int]):
    model, plain = moved(network(), lagging.there), network()
    layout = layout_of(plain)
    values = flatten(model, layout)
    assert same(values, flatten(plain, layout)) and laggard == [layout.floats]
    doubled = values[0] * 2, values[1] * 2
    unflatten(*doubled, model, layout)
    doubled[0].zero_()  # the caller may write over it at once
    read = moved(model, lambda tensor: tensor.inner.clone())
    unflatten(values[0] * 2, values[1] * 2, plain, layout)
    assert same(flatten(read, layout), flatten(plain, layout))


def test_values_are_copied_as_ever_where_no_more_memory_can_be_pinned(laggard, monkeypatch: pytest.MonkeyPatch):
    def refuses(size: int, dtype: torch.dtype) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(device, "pinned", refuses)
    model, layout = moved(network(), lagging.there), layout_of(network())
    assert same(flatten(model, layout), flatten(network(), layout))


# ---- where there is a GPU ----------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_values_of_a_gpu_are_those_of_the_cpu_after_all_work_that_was_queued():
    """A tenth of a second of work is queued before the values that are read, in a stream of the caller."""
    model, plain = network().cuda(), network()
    layout, busy = layout_of(plain), torch.randn(4096, 4096, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(40):
            busy = busy @ busy / 64
        with torch.no_grad():
            for tensor in (*model.parameters(), *plain.parameters()):
                tensor.mul_(2)
        values = flatten(model, layout)
        assert same(values, flatten(plain, layout)) and values[0].is_pinned()
        unflatten(values[0] * 3, values[1] * 3, model, layout)
        unflatten(values[0] * 3, values[1] * 3, plain, layout)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert same(flatten(model, layout), flatten(plain, layout))


def exchanged(where: str) -> list[Tensor]:
    """What a loop on this device holds after it has met its peer in every way."""
    model, kept = network().float().to(where), []
    optimizer = torch.optim.AdamW(model.parameters())
    local = LoopModel(model, optimizer)
    os.close(local.open_mailbox())
    assert local.mailbox.x_F.is_pinned() == (where == "cuda")
    sent_F = local.take_update()
    local.mailbox.x_F.copy_(sent_F * 2)
    for how in ("shift", "replace", "delta"):
        local.merge(MergeAnchorIntoParameters(1, 30, how), sent_F)
        kept.append(local.values().clone())
    local.write_agreed()
    local.mailbox.show(sent_F * 3)
    total = local.evaluate(lambda: sum(float(p.sum()) for p in model.parameters()))
    return [*kept, local.values().clone(), torch.tensor(total.losses)]


@pytest.mark.gpu
def test_a_loop_on_a_gpu_holds_what_one_on_the_cpu_holds():
    here, there = exchanged("cpu"), exchanged("cuda")
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(here, there, strict=True))


@pytest.mark.gpu
def test_shared_memory_is_pinned_while_its_mailbox_lives():
    fd = anonymous_file()
    mailbox = SharedMailbox(fd, 100_003, 8)
    os.close(fd)
    x_F = mailbox.x_F
    mailbox.pin(torch.device("cuda"))
    assert x_F.is_pinned()
    del mailbox
    gc.collect()
    assert not x_F.is_pinned()
