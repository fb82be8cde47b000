import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from atoll.base.errors import RunFailedError, UsageError
from atoll.runtime.system import anonymous_file
from atoll.runtime.trainer import (
    TrainerClient,
    TrainerCommandError,
    TrainerSpec,
    check_device,
    chosen_device,
    shared_memory,
    threads_per_trainer,
)
from atoll.runtime.trainer.process import TrainerCommandLoop
from atoll.runtime.trainer.shared_memory import SharedMailbox
from atoll.training.data import load_data
from atoll.training.experiment.member import SimulatedMember
from atoll.training.models import build_model
from atoll.training.recipe.inner import SGD, AdamW, Inner, Muon
from atoll.training.recipe.methods import diloco

pytestmark = pytest.mark.net  # real processes

JOB = {"cursor": 0, "shard": 0, "shards": 2, "global_step": 0}
FOR_EVER = 10**9  # steps


@pytest.fixture
def spec(tmp_path: Path) -> TrainerSpec:
    """The smallest model on a little text of its own."""
    book = tmp_path / "book.txt"
    book.write_text(" ".join(f"{i} squared is {i * i}." for i in range(4000)))
    return TrainerSpec("gpt-nano", seed=0, data=str(book), batch=2, seq_len=32, inner=AdamW())


def story(tell: Callable[[TrainerClient], Coroutine[None, None, None]], on_beat=None) -> None:
    async def told() -> None:
        trainer = TrainerClient(on_beat)
        try:
            await tell(trainer)
        finally:
            await trainer.stop()

    asyncio.run(told())


def test_a_trainer_does_what_it_is_asked(spec, forked_trainers):
    """Train, look, rewind and train again: the same steps from the same state give the same bits."""

    async def tell(trainer: TrainerClient) -> None:
        layout = await trainer.start(spec)
        before = trainer.read_x().clone()
        assert before.shape == (layout.floats,) == (21_504,)
        untrained = await trainer.evaluate(64)

        done = await trainer.train(30, **JOB)
        assert (done.steps, done.samples, done.tokens, done.cursor) == (30, 60, 60 * 32, 60)
        assert done.loss < untrained.loss and (await trainer.evaluate(64)).loss < untrained.loss
        half = trainer.read_x().clone()
        inner = await trainer.inner_state()
        await trainer.train(5, **JOB | {"cursor": 60, "global_step": 30})
        after = trainer.read_x().clone()

        await trainer.write_x(half)
        await trainer.set_inner_state(inner)
        await trainer.train(5, **JOB | {"cursor": 60, "global_step": 30})
        assert torch.equal(trainer.read_x(), after) and not torch.equal(half, after)

        await trainer.write_x(before)
        assert await trainer.evaluate(64) == untrained
        assert (await trainer.sample("3 squared", 5)).startswith("3 squared")

    story(tell)


def test_a_trainer_runs_no_file_of_the_working_directory(spec, tmp_path, monkeypatch):
    """Every module of the standard library that torch imports is planted as a file; none of them runs."""
    ran = tmp_path / "ran"
    for name in ("fractions", "random", "decimal", "statistics"):
        (tmp_path / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)

    async def tell(trainer: TrainerClient) -> None:
        await trainer.start(spec)

    story(tell)
    assert not ran.exists()


@pytest.mark.parametrize("inner", [AdamW(), Muon(), SGD()], ids=["adamw", "muon", "sgd"])
def test_a_trainer_takes_the_steps_of_an_experiment_with_every_inner_optimizer(
    spec: TrainerSpec, inner: Inner, forked_trainers
):
    """Ten steps of one worker in this process, the same bits; hidden matrices are Muon's in both."""
    recipe = msgspec.structs.replace(
        diloco(spec.model), inner=inner, batch=spec.batch, seq_len=spec.seq_len, seed=spec.seed
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    worker = SimulatedMember(build_model(spec.model, spec.seed), 1)
    for step in range(10):
        worker.train(recipe, (load_data(spec.data), 0, 2), step)
    torch.set_num_threads(threads)

    async def tell(trainer: TrainerClient) -> None:
        await trainer.start(msgspec.structs.replace(spec, inner=inner))
        await trainer.train(10, **JOB)
        assert torch.equal(trainer.read_x(), worker.x_F)

    story(tell)


def test_a_round_ends_by_steps_or_by_time_whichever_comes_first(spec, forked_trainers):
    """A deadline that has passed leaves no time for a step; a later one, on however busy a computer, for some."""

    async def tell(trainer: TrainerClient) -> None:
        await trainer.start(spec)
        late = await trainer.train(5, **JOB, until=time.monotonic())
        assert (late.steps, late.loss, late.cursor) == (0, None, 0)
        cut, window_s = late, 0.25
        while cut.steps == 0:
            window_s *= 2
            cut = await trainer.train(FOR_EVER, **JOB, until=time.monotonic() + window_s)
        assert cut.steps < FOR_EVER and cut.cursor == 2 * cut.steps

    story(tell)


def test_a_cancel_ends_training_at_the_next_step_and_only_that_training(spec, forked_trainers):
    """Cancelled at its first heartbeat; the job after it runs to its end, as does one whose waiter left."""
    trainer_of: list[TrainerClient] = []

    async def tell(trainer: TrainerClient) -> None:
        trainer_of.append(trainer)
        await trainer.start(spec)
        cut = await trainer.train(FOR_EVER, **JOB)
        assert 1 <= cut.steps < FOR_EVER
        trainer_of.clear()
        assert (await trainer.train(7, **JOB)).steps == 7

        waiter = asyncio.ensure_future(trainer.train(FOR_EVER, **JOB))
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert (await trainer.train(3, **JOB)).steps == 3

    story(tell, on_beat=lambda beat: [trainer.cancel() for trainer in trainer_of])


def test_divergence_is_said_at_once_and_can_be_recovered_from(spec, forked_trainers):
    """Parameters of NaN: a typed failure from a living process, which trains on when x is written anew."""

    async def tell(trainer: TrainerClient) -> None:
        await trainer.start(spec)
        good = trainer.read_x().clone()
        await trainer.write_x(good * float("nan"))
        with pytest.raises(TrainerCommandError, match="the loss is nan at step 0") as failed:
            await trainer.train(5, **JOB)
        assert failed.value.why == "diverged" and failed.value.alive
        await trainer.write_x(good)
        await trainer.set_inner_state(b"")
        assert (await trainer.train(5, **JOB)).steps == 5

    story(tell)


def trainer_process() -> psutil.Process:
    """The trainer among this process's children: pytest and PyTorch may have started others."""
    return next(c for c in psutil.Process().children() if "atoll.runtime.trainer" in c.cmdline())


def test_a_killed_trainer_is_noticed_and_can_be_started_again(spec):
    """SIGKILL in the middle of training: the training fails, so does what is asked next, then all is well."""

    def kill(beat) -> None:
        trainer_process().kill()

    async def tell(trainer: TrainerClient) -> None:
        await trainer.start(spec)
        with pytest.raises(TrainerCommandError, match="killed by the system") as failed:
            await trainer.train(FOR_EVER, **JOB)
        assert failed.value.why == "memory" and not failed.value.alive
        with pytest.raises(TrainerCommandError, match="killed by the system"):
            await trainer.evaluate()
        await trainer.start(spec)
        assert (await trainer.evaluate(8)).loss > 0

    story(tell, on_beat=kill)


def test_a_trainer_that_makes_no_progress_is_ended(spec):
    """Stopped by a signal at its first step, it sends no heartbeat and is given up after its patience."""

    def freeze(beat) -> None:
        trainer_process().send_signal(signal.SIGSTOP)

    async def tell(trainer: TrainerClient) -> None:
        await trainer.start(msgspec.structs.replace(spec, patience_s=0.2))
        with pytest.raises(TrainerCommandError, match="made no progress") as failed:
            await trainer.train(FOR_EVER, **JOB)
        assert failed.value.why == "hung"

    story(tell, on_beat=freeze)


def test_a_wish_that_cannot_be_met_is_refused_in_words_and_leaves_no_process(spec, forked_trainers):
    before = set(psutil.Process().children())  # other tests' warm interpreter

    async def tell(trainer: TrainerClient) -> None:
        for change, words in (({"model": "bert"}, "no built-in model"), ({"data": "/nowhere"}, "no data at")):
            with pytest.raises(TrainerCommandError, match=words) as failed:
                await trainer.start(msgspec.structs.replace(spec, **change))
            assert failed.value.why == "refused"
        assert set(psutil.Process().children()) <= before

    story(tell)


def test_a_batch_that_no_memory_holds_is_named_as_such(spec, forked_trainers):
    """Eight terabytes of sample numbers: the allocator says no, the process lives."""

    async def tell(trainer: TrainerClient) -> None:
        await trainer.start(msgspec.structs.replace(spec, batch=10**12))
        with pytest.raises(TrainerCommandError, match="lower the batch") as failed:
            await trainer.train(1, **JOB)
        assert failed.value.why == "memory" and failed.value.alive
        assert (await trainer.evaluate(8)).loss > 0

    story(tell)


ORPHAN = """
import asyncio, os, signal, sys, msgspec, psutil
from atoll.runtime.trainer import TrainerClient, TrainerSpec

async def main():
    trainer = TrainerClient(on_beat=lambda beat: os.kill(os.getpid(), signal.SIGKILL))
    await trainer.start(msgspec.json.decode(sys.argv[1], type=TrainerSpec))
    print(psutil.Process().children()[0].pid, flush=True)
    await trainer.train(10**9, cursor=0, shard=0, shards=1, global_step=0)

asyncio.run(main())
"""


def test_a_trainer_does_not_outlive_its_parent(spec):
    """The parent kills itself while the trainer is busy; the trainer is gone soon after."""
    arguments = [sys.executable, "-c", ORPHAN, msgspec.json.encode(spec).decode()]
    parent = subprocess.run(arguments, stdout=subprocess.PIPE, timeout=120)
    assert parent.returncode == -signal.SIGKILL
    with suppress(psutil.NoSuchProcess):  # it may have been faster still
        psutil.Process(int(parent.stdout)).wait(timeout=30)


def test_shared_memory_has_no_name_that_could_be_left_behind():
    """The descriptor's file has no link, and two mailboxes over it are one memory."""
    fd = anonymous_file()
    assert os.fstat(fd).st_nlink == 0
    ours, theirs = SharedMailbox(fd, 10, 8), SharedMailbox(fd, 10, 8)
    os.close(fd)
    ours.x_F.fill_(2.5)
    ours.put(b"inner")
    assert theirs.x_F.tolist() == [2.5] * 10 and theirs.take(5) == b"inner"
    with pytest.raises(ValueError, match="do not fit"):
        ours.put(b"too long.")


def test_a_full_disk_under_the_mailbox_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch):
    """A write into a file without blocks would kill the process."""

    def refuse(_handle: int, _size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fd = anonymous_file()
    mailbox = SharedMailbox(fd, 2, 8)
    os.close(fd)
    monkeypatch.setattr(shared_memory, "reserve_blocks", refuse)
    for write in (lambda: mailbox.put(b"inner"), lambda: mailbox.show(torch.ones(2))):
        with pytest.raises(RunFailedError, match="No space left on device") as full:
            write()
        assert full.value.code == "E-DISK-01"


def test_a_gpu_that_is_not_here_is_said_before_anything_begins():
    check_device("cpu")
    count = torch.cuda.device_count()
    with pytest.raises(UsageError, match=f'E-TRN-14 node.device = "cuda:{count}", and PyTorch finds {count} GPUs'):
        check_device(f"cuda:{count}")


def test_a_device_that_the_computer_is_to_choose_is_always_here():
    check_device("auto")
    assert chosen_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert chosen_device("cuda:1") == "cuda:1" and chosen_device("cpu") == "cpu"


def test_a_claim_says_on_what_its_steps_were_taken(spec: TrainerSpec):
    """Else an auditor would hold the steps of a GPU to a tolerance that was measured on CPUs."""
    child = TrainerCommandLoop(-1, msgspec.msgpack.encode(spec), None, None)
    for device in ("cpu", "meta"):
        child.x_F = torch.empty(0, device=device)
        assert child._profile().device == device


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [AdamW(), SGD(), Muon()])
def test_a_trainer_on_a_gpu_takes_the_steps_of_one_on_the_cpu(spec: TrainerSpec, inner: Inner):
    """But for roundings; with x and an inner state that are carried from one process to the other and back."""
    ends: dict[str, torch.Tensor] = {}

    def on(device: str) -> Callable[[TrainerClient], Coroutine[None, None, None]]:
        async def tell(trainer: TrainerClient) -> None:
            await trainer.start(msgspec.structs.replace(spec, inner=inner, device=device))
            await trainer.train(8, **JOB)
            half, kept = trainer.read_x().clone(), await trainer.inner_state()
            await trainer.write_x(half)
            await trainer.set_inner_state(kept)
            assert (await trainer.train(8, **JOB | {"cursor": 16, "global_step": 8})).steps == 8
            assert (await trainer.evaluate(64)).loss > 0 and await trainer.sample("3 squared", 5)
            ends[device] = trainer.read_x().clone()

        return tell

    for device in ("cpu", "cuda"):
        story(on(device))
    assert torch.allclose(ends["cpu"], ends["cuda"], atol=1e-3)


def test_trainers_share_the_cores():
    cores = len(os.sched_getaffinity(0))
    assert threads_per_trainer(1) == cores and threads_per_trainer(10 * cores) == 1
