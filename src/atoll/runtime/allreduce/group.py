"""Membership of this process in an all-reduce group, with the background thread that runs it.

Invariants:
- Calls are checked here, before other members notice them.
- Members leave when Python exits; a forked process is not a member.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError
from typing import Any, Self, TypeVar

from torch import Tensor, inference_mode

from atoll.base.arguments import Peers, arguments
from atoll.base.errors import AtollError, UsageError
from atoll.base.ids import PeerId
from atoll.base.limits import MIB, PAIRED_MAX
from atoll.peer.round.topology_choice import PAIRS
from atoll.runtime.allreduce.call import GATHERED, SAMPLE, ReduceCall, ReduceResult, is_shaped
from atoll.runtime.allreduce.call_checks import (
    CODE,
    Patience,
    Weight,
    check_tensor,
    codec_name,
    known_topology,
    row_topology,
)
from atoll.runtime.allreduce.delta_reference import DeltaReference
from atoll.runtime.allreduce.driver import GroupDriver
from atoll.runtime.allreduce.error_feedback import ErrorFeedback
from atoll.runtime.allreduce.flatten import CudaStreamPool
from atoll.runtime.allreduce.parts import placed
from atoll.runtime.allreduce.pending import PendingReduce
from atoll.training.codec import codec_named
from atoll.training.codec.compiled.device import is_supported_on

T = TypeVar("T")
SLICE_BYTES = 256 * MIB  # size of one round; a longer call takes several, so that a member holds at most twice this
MEET_S = 120.0  # time limit for all founding peers to arrive
_not_closed: set[Group] = set()


def _close_all() -> None:
    """Close the groups that a script left open at its end."""
    for group in list(_not_closed):
        group.close()


class Group:
    """Membership of this process in a group. `found` and `join` create it; thread-safe; close it when done."""

    def __init__(self, opening: Coroutine[Any, Any, tuple[GroupDriver, str]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="atoll-group", daemon=True)
        self._thread.start()
        self._closed, self._process = False, os.getpid()
        self._lanes = CudaStreamPool()
        try:
            self._host, self.ticket = self._run(opening)
        except BaseException:
            self._stop_loop()
            raise
        _not_closed.add(self)

    @property
    def me(self) -> PeerId:
        return self._host.me

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which other members reach this one."""
        return self._host.addresses

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Members that take part, by the last agreed vertex."""
        return self._query(GroupDriver.members)

    @property
    def topology(self) -> tuple[str, str]:
        """Topology of the current round, and the reason for it. It may change with what members measure."""
        return self._query(GroupDriver.way)

    @arguments("group.wait_for_peers", CODE)
    def wait_for_peers(self, count: Peers, timeout_s: Patience = MEET_S) -> None:
        """Wait until `count` members are present. RunFailedError if they are not within `timeout_s`."""
        self._query(lambda host: host.meet(count, timeout_s))

    @arguments("group.all_reduce", CODE)
    def all_reduce(
        self,
        tensors: Tensor | Iterable[Tensor],
        *,
        weight: Weight = 1,
        codec: str | None = None,
        topology: str | None = None,
        error_feedback: ErrorFeedback | None = None,
        held: DeltaReference | None = None,
        timeout_s: Patience | None = None,
    ) -> ReduceResult:
        """Replace the tensors by the weighted mean over all members.

        Raises RunFailedError if the mean is not agreed in time, or if too few members for an agreement were present
        for the group's `timeout_s`. After an error the tensors are unchanged, with two exceptions that the error
        names. With E-RED-03 the call goes on and still owns them. One fp32 tensor that is reduced in place
        (contiguous, on the CPU) may hold part of the mean: if it exceeds 256 MiB, or if an agreed part does not
        decode (E-RED-17).

        `codec` and `topology` (default: the group's) must be equal at all members, else all members get an error;
        see specs/codecs.md and specs/topologies.md. `error_feedback` keeps what the codec leaves out of these
        tensors and sends it with the next call that names it. It does not cover the way back: a lossy `way_back`
        loses part of every mean again, unless both ways are `randk` or owners remember
        (`ReduceOptions(remembered=True)`). `held` keeps the mean: members that hold the same one send differences
        from it in the next call that names it. Codecs lose much less of a difference when tensors change slowly. If
        one member holds another mean, all members send whole values. A difference contains what codecs left out
        before, so `held` excludes `error_feedback`.

        Tensors may lie on GPUs. The call waits for the work that their current stream already had. If all lie on
        one GPU and the codec works there (specs/codecs.md), only encoded bytes leave it. When this returns, later
        work of the current stream sees the mean.
        """
        work = self.all_reduce_async(
            tensors, weight=weight, codec=codec, topology=topology, error_feedback=error_feedback, held=held
        )
        return work.wait(timeout_s)

    @arguments("group.all_reduce_async", CODE)
    def all_reduce_async(
        self,
        tensors: Tensor | Iterable[Tensor],
        *,
        weight: Weight = 1,
        codec: str | None = None,
        topology: str | None = None,
        error_feedback: ErrorFeedback | None = None,
        held: DeltaReference | None = None,
    ) -> PendingReduce:
        """Start an `all_reduce` without waiting. Do not touch the tensors until `wait` has returned."""
        self._check_open()
        if held is not None and error_feedback is not None:
            raise UsageError(
                "E-RED-08",
                "error_feedback with held",
                cause="a difference already contains what codecs left out, which would then count twice",
                fix="leave one of them out",
            )
        if held is not None and self._host.island.checked is not None:
            raise UsageError(
                "E-RED-14",
                "held= is not possible if members may lie",
                cause="a liar that claims to hold another mean makes all members send whole values",
                fix="leave held out",
            )
        return self._begin(tensors, weight, codec, self._call_topology(topology), error_feedback, held)

    @arguments("group.average_with_partner", CODE)
    def average_with_partner(
        self,
        tensors: Tensor | Iterable[Tensor],
        *,
        weight: Weight = 1,
        codec: str | None = None,
        error_feedback: ErrorFeedback | None = None,
        timeout_s: Patience | None = None,
    ) -> ReduceResult:
        """Gossip: replace the tensors by the weighted mean with one other member.

        There is no common result, and each member sends its tensors once only. Errors are those of `all_reduce`.

        All members make this call together and are drawn in new pairs each time; of an odd number, one stays alone.
        `done.contributors` lists the members in the mean. It holds only the local member if its partner died or did
        not call. It is empty if the local mean was not agreed; the tensors are then unchanged. More than 256 MiB of
        fp32 take several rounds, each with its own partner (`done.parts`).
        """
        work = self.average_with_partner_async(tensors, weight=weight, codec=codec, error_feedback=error_feedback)
        return work.wait(timeout_s)

    @arguments("group.average_with_partner_async", CODE)
    def average_with_partner_async(
        self,
        tensors: Tensor | Iterable[Tensor],
        *,
        weight: Weight = 1,
        codec: str | None = None,
        error_feedback: ErrorFeedback | None = None,
    ) -> PendingReduce:
        """Start an `average_with_partner` without waiting. Do not touch the tensors until `wait` has returned."""
        self._check_open()
        if self._host.island.checked is not None:
            raise UsageError(
                "E-RED-14",
                "averages in pairs are not possible if members may lie",
                cause="only the two members of a pair can check their mean",
                fix="call all_reduce",
            )
        if (count := len(self.peers)) > PAIRED_MAX:
            raise UsageError(
                "E-RED-08",
                f"pairs of {count} members",
                cause=f"each member announces its digest to all others, so at most {PAIRED_MAX} can be paired",
                fix="call all_reduce",
            )
        return self._begin(tensors, weight, codec, PAIRS, error_feedback)

    def _call_topology(self, asked: str | None) -> str:
        """Topology of this call where it differs from the group's, else "". UsageError if it is not possible."""
        island, settings = self._host.island, self._host.machine.settings
        if asked is None or asked == settings.topology:
            return ""
        if island.checked is not None:
            raise UsageError("E-RED-14", "a call cannot choose its topology if members may lie", fix="leave it out")
        name = known_topology(asked)
        if island.remembers or island.terms.way_back == GATHERED:
            name = row_topology(name, "private", "a group with owners that return more than a mean")
        return name if name != settings.topology else ""

    def _begin(
        self,
        tensors: Tensor | Iterable[Tensor],
        weight: int,
        codec: str | None,
        topology: str,
        error_feedback: ErrorFeedback | None,
        held: DeltaReference | None = None,
    ) -> PendingReduce:
        name = codec_name(codec) if codec else self._host.island.terms.codec
        if name != self._host.island.terms.codec and self._host.island.checked is not None:
            raise UsageError("E-RED-14", "a call cannot choose its codec if members may lie", fix="leave it out")
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        for tensor in given:
            check_tensor(tensor)
        if not any(tensor.numel() for tensor in given):  # without a value there is no part to own or to wait for
            fix = "pass at least one value; a member with nothing to add passes as many zeros as the others"
            raise UsageError("E-RED-02", "the tensors are empty", fix=fix)
        with inference_mode(False):  # another thread writes to both
            fused = self._lanes.fused(
                given, lambda tensor: held is None and is_supported_on(codec_named(name, SAMPLE), tensor)
            )
            owed_N = error_feedback.owed(given, fused.vector_N) if error_feedback is not None else None
        flat_N = fused.vector_N
        if held is not None:
            held.of(given)
        step = SLICE_BYTES // flat_N.element_size()
        slices = [slice(at, at + step) for at in range(0, len(flat_N), step)]
        owed = [None if owed_N is None else owed_N[piece] for piece in slices]
        shaped = is_shaped(f"{name}+{self._host.island.terms.way_back}")
        answers = error_feedback.answers if error_feedback is not None and self._host.island.remembers else None
        calls = [
            ReduceCall(
                flat_N[s],
                weight,
                name,
                lane=fused.lane,
                owed_N=o,
                topology=topology,
                tensors=placed(given, s.start) if shaped else (),
                owing=answers if topology != PAIRS else None,
                held=held,
                at=s.start,
                whole=len(flat_N),
            )
            for s, o in zip(slices, owed, strict=True)
        ]
        try:
            self._loop.call_soon_threadsafe(self._host.call, calls)
        except RuntimeError:  # another thread closed the group in between
            raise _closed() from None
        return PendingReduce(self, given, fused, calls)

    def close(self) -> None:
        """Leave once the others can agree without this member. Idempotent; also called when Python exits."""
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        _not_closed.discard(self)
        self._run(self._host.stop())
        self._stop_loop()
        self._lanes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        self.check_process()
        if self._closed:
            raise _closed()

    def check_process(self) -> None:
        if self._process != os.getpid():
            raise UsageError(
                "E-RED-20",
                "this group belongs to the process that this one was forked from",
                cause="its background thread runs in the parent process; a fork copies no threads",
                fix="start this process anew (multiprocessing: spawn) and let it atoll.reduce.join(group.ticket)",
            )

    def _query(self, question: Callable[[GroupDriver], Coroutine[Any, Any, T]]) -> T:
        self._check_open()
        try:
            return self._run(question(self._host))
        except (CancelledError, RuntimeError):
            if not self._closed:  # in between, by another thread
                raise
            raise _closed() from None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _work(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_end_tasks())
        self._loop.close()

    def trouble(self) -> str:
        """Reason why the group makes no progress, as far as this member knows."""
        return self._query(GroupDriver.trouble)


async def _end_tasks() -> None:
    """Cancel queries of other threads, which would otherwise wait forever."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _closed() -> AtollError:
    return UsageError("E-RED-01", "this group was closed", fix="found or join a group again")


# runs while thread pools still accept work, which leaving needs; atexit runs after they have ended
getattr(threading, "_register_atexit", atexit.register)(_close_all)
# a forked data-loader worker is no member and must not leave for its parent
os.register_at_fork(after_in_child=_not_closed.clear)
