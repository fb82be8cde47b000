"""A machine that asked is answered exactly once, whatever becomes of the work."""

from __future__ import annotations

import asyncio

import pytest

from atoll.base.errors import PeerFault, RunFailedError
from atoll.base.machine import TaskDone, TaskFailed
from atoll.runtime.driver import Driver


class Worker:
    def __init__(self, trouble: Exception | None) -> None:
        self.trouble = trouble

    async def run(self, work: object) -> object:
        if self.trouble is not None:
            raise self.trouble
        return work


def answers(trouble: Exception | None) -> list[TaskDone | TaskFailed]:
    host, heard = Driver.__new__(Driver), []
    host.island, host.handle = Worker(trouble), heard.append
    host._tell_refused = lambda why: None
    asyncio.run(host._answer("job", "work"))
    return heard


def test_work_that_is_done_is_answered_with_its_result():
    assert answers(None) == [TaskDone("job", "work")]


@pytest.mark.parametrize(
    "trouble",
    [
        RunFailedError("E-RUN-02", "the state is gone"),
        PeerFault("", "these bytes are nothing"),
        OSError(28, "No space left on device"),
        ValueError("the update holds values that are not finite"),
        RuntimeError("not enough memory: you tried to allocate 9 GB"),
        AssertionError(),
    ],
)
def test_work_that_fails_in_any_way_is_answered_too(trouble: Exception):
    """A diverged update, a model that is not the run's, memory: an unanswered ask would stop the peer for ever."""
    (answer,) = answers(trouble)
    assert isinstance(answer, TaskFailed) and answer.job == "job" and answer.why
