"""All-reduce as a library: encrypted, elastic, and told exactly who is in the result.

    group = atoll.reduce.found(peers=4)           # prints nothing; hand group.ticket to the others
    group = atoll.reduce.join(ticket)             # in every other process, anywhere
    done = group.all_reduce([tensor, ...])        # the mean, in place; done.contributors says over whom

Every call is one agreed round of the same protocol that trains models (`peer/round/machine.py`), so members may
die at any
moment, and newcomers join with the ticket between calls. All members make the same calls in the same order, with
tensors of the same sizes. Promises: all members hold the same bits after a call, or the call fails and says why.
Never averages silently over fewer members than it reports. Runs in a background thread of this process.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import wait as ended
from itertools import accumulate
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from msgspec import Meta
from torch import Tensor, inference_mode, strided

from atoll.base.arguments import Peers, arguments, did_you_mean
from atoll.base.errors import AtollError, RunFailedError, UsageError
from atoll.base.ids import PeerId, Seconds
from atoll.base.limits import MIB, PAIRED_MAX, PEERS_MAX, PIECES_MAX
from atoll.peer.round.topology_choice import PAIRS, TOPOLOGIES
from atoll.peer.settings import RunSettings, TopologyName
from atoll.policy.fault_tolerance import StatisticName
from atoll.policy.plan import RoundSettings
from atoll.runtime.allreduce.delta_reference import DeltaReference
from atoll.runtime.allreduce.driver import GroupDriver, own_folder
from atoll.runtime.allreduce.error_feedback import ErrorFeedback
from atoll.runtime.allreduce.flatten import FlatTensors, StreamPool, unfused
from atoll.runtime.allreduce.trust import distrusting
from atoll.runtime.allreduce.worker import (
    GATHERED,
    PART_VALUES,
    SAMPLE,
    SAMPLE_VALUES,
    GroupTerms,
    Part,
    ReduceCall,
    ReduceResult,
    is_shaped,
    placed,
)
from atoll.runtime.bootstrap import ListenOptions, TicketTerms, found_run, join_run
from atoll.runtime.network.addresses import listening
from atoll.runtime.training_spec import FoundingBlobs, with_room
from atoll.training.codec import codec_named
from atoll.training.codec.compiled.device import works_on

T = TypeVar("T")
RATE_MAX = 2**40  # bytes per second: no link is faster
WEIGHT_MAX = 2**31 - 1  # samples behind one call; the sum over all members fits a signed 64-bit integer
FOREVER_S = 1e8  # a group may be idle for as long as it likes: rounds begin with a call, not with the clock
SLICE_BYTES = 256 * MIB  # a longer call is reduced in several rounds, so that nobody holds more than this twice
STATE = b"atoll/group/1"  # a group begins with nothing: its members bring their tensors with them
SPAN_MIN_S = 0.1  # a shorter silence would make beats more work than what they watch
MEET_S = 120.0  # for all founding peers to be there
CODE = "E-RED-02"  # of an argument that is none

Weight = Annotated[int, Meta(ge=1, le=WEIGHT_MAX)]
Rate = Annotated[int, Meta(ge=0, le=RATE_MAX)]
Patience = Annotated[Seconds, Meta(ge=0, le=FOREVER_S)]
Span = Annotated[Seconds, Meta(ge=SPAN_MIN_S, le=FOREVER_S)]

_not_closed: set[Group] = set()


def _close_all() -> None:
    """For scripts that end without a farewell."""
    for group in list(_not_closed):
        group.close()


# while threads can still be given work, which a farewell needs: atexit comes after the pools of threads have ended
getattr(threading, "_register_atexit", atexit.register)(_close_all)
os.register_at_fork(after_in_child=_not_closed.clear)  # a worker of a data loader has no farewell to say


class Group:
    """This process's seat in a group. Made by `found` and `join`; thread-safe; close it when done."""

    def __init__(self, opening: Coroutine[Any, Any, tuple[GroupDriver, str]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="atoll-group", daemon=True)
        self._thread.start()
        self._closed, self._process = False, os.getpid()
        self._lanes = StreamPool()
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
        """Where others reach this member."""
        return self._host.addresses

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The members that take part, by the last agreed vertex."""
        return self._ask(GroupDriver.members)

    @property
    def topology(self) -> tuple[str, str]:
        """(how the round in progress is reduced, why this way): it may change with what members measure."""
        return self._ask(GroupDriver.way)

    @arguments("group.wait_for_peers", CODE)
    def wait_for_peers(self, count: Peers, timeout_s: Patience = MEET_S) -> None:
        """Until so many members are there. RunFailedError if they are not in time."""
        self._ask(lambda host: host.meet(count, timeout_s))

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
        """The weighted mean over all members, in place. Raises RunFailedError when it cannot be agreed in time, or
        too few members to agree on anything have been here for the group's `timeout_s`. After an error the tensors
        are as they were, but for two that say so: E-RED-03, where the call goes on and they are its own, and where
        one fp32 tensor is reduced where it lies (contiguous, on the CPU) and part of the mean was in it already:
        of more than 256 MiB, or because an agreed part does not decode (E-RED-17).

        `codec` and `topology` (default: the group's) must be the same at all members, or all are told; see
        specs/codecs.md and specs/topologies.md. `error_feedback` keeps what the codec leaves out of these tensors
        and sends it with the next call that names it. The way back is not in it: a lossy `way_back` loses of every
        mean again, unless both ways are `randk`, or owners remember (`found(remembered=True)`). `held` keeps the
        mean: members that hold the same one send differences from it in the next call that names it, of which
        codecs lose much less where tensors change slowly; if one of them does not, all send whole values again.
        What codecs left out is in these differences, so they take no `error_feedback`.

        Tensors may lie on GPUs. What their current stream was told before the call is waited for; where all lie on
        one, and the codec works there (specs/codecs.md), only wires leave it. When this returns the mean is in them
        for whatever the current stream is told next.
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
        """The same without waiting; the tensors are not to be touched until `wait` has returned."""
        self._check_open()
        if held is not None and error_feedback is not None:
            raise UsageError(
                "E-RED-08",
                "error_feedback with held",
                cause="what codecs left out before is in a difference from what all hold, and would come twice",
                fix="leave one of them out",
            )
        if held is not None and self._host.island.checked is not None:
            raise UsageError(
                "E-RED-14",
                "differences from what members hold, where members may lie",
                cause="whoever says that it holds something else has all of them send whole values",
                fix="leave held out",
            )
        return self._begin(tensors, weight, codec, self._topology_name(topology), error_feedback, held)

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
        """Gossip: the weighted mean with one other member, in place. There is no common result, and much less is
        sent: each member's tensors once. Errors are those of `all_reduce`.

        All members call it as they would call `all_reduce`, and are drawn in pairs anew with every call; of an odd
        number one stays alone. `done.contributors` says whose two rows the tensors hold: only my own where my
        partner died or did not call, nobody's where my own mean was not agreed on and the tensors are as they were.
        What more than 256 MiB of fp32 hold goes in several rounds, each with a partner of its own (`done.parts`).
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
        """The same without waiting; the tensors are not to be touched until `wait` has returned."""
        self._check_open()
        if self._host.island.checked is not None:
            raise UsageError(
                "E-RED-14",
                "averages in pairs, where members may lie",
                cause="nobody but the two of a pair could say what its mean follows from",
                fix="call all_reduce",
            )
        if (count := len(self.peers)) > PAIRED_MAX:
            raise UsageError(
                "E-RED-08",
                f"pairs of {count} members",
                cause=f"each tells all others the name of what it holds, so at most {PAIRED_MAX} are drawn",
                fix="call all_reduce",
            )
        return self._begin(tensors, weight, codec, PAIRS, error_feedback)

    def _topology_name(self, asked: str | None) -> str:
        """What a call asks for otherwise than its group. UsageError for what cannot be."""
        island, settings = self._host.island, self._host.machine.settings
        if asked is None or asked == settings.topology:
            return ""
        if island.checked is not None:
            raise UsageError("E-RED-14", "another topology for one call, where members may lie", fix="leave it out")
        name = _known_topology(asked)
        if island.remembers or island.terms.way_back == GATHERED:
            name = _for_rows(name, "private", "a group whose owners answer with more than a mean")
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
        codec_name = _codec_name(codec) if codec else self._host.island.terms.codec
        if codec_name != self._host.island.terms.codec and self._host.island.checked is not None:
            raise UsageError("E-RED-14", "another codec for one call, where members may lie", fix="leave it out")
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        for tensor in given:
            _check_tensor(tensor)
        if not any(tensor.numel() for tensor in given):  # there is no part that anybody could own or wait for
            fix = "give at least one value; whoever has nothing to add gives zeros, as many as the others"
            raise UsageError("E-RED-02", "no value that a mean could be taken of", fix=fix)
        with inference_mode(False):  # another thread will write to both
            fused = self._lanes.fused(
                given, lambda tensor: held is None and works_on(codec_named(codec_name, SAMPLE), tensor)
            )
            owed_N = error_feedback.owed(given, fused.vector_N) if error_feedback is not None else None
        flat_N = fused.vector_N
        if held is not None:
            held.of(given)
        step = SLICE_BYTES // flat_N.element_size()
        slices = [slice(at, at + step) for at in range(0, len(flat_N), step)]
        owed = [None if owed_N is None else owed_N[piece] for piece in slices]
        shaped = is_shaped(f"{codec_name}+{self._host.island.terms.way_back}")
        answers = error_feedback.answers if error_feedback is not None and self._host.island.remembers else None
        calls = [
            ReduceCall(
                flat_N[s],
                weight,
                codec_name,
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
        except RuntimeError:  # another thread closed the group meanwhile
            raise _closed() from None
        return PendingReduce(self, given, fused, calls)

    def close(self) -> None:
        """Say farewell and end, once the others can agree without this member. Harmless the second time; also done
        when Python exits."""
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
        self._check_process()
        if self._closed:
            raise _closed()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise UsageError(
                "E-RED-20",
                "a group of the process that this one was forked from",
                cause="the thread in which it works is there, and a fork takes no threads along",
                fix="start this process anew (multiprocessing: spawn) and let it atoll.reduce.join(group.ticket)",
            )

    def _ask(self, question: Callable[[GroupDriver], Coroutine[Any, Any, T]]) -> T:
        self._check_open()
        try:
            return self._run(question(self._host))
        except (CancelledError, RuntimeError):
            if not self._closed:  # meanwhile, by another thread
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
        """Why nothing happens, as far as this member knows."""
        return self._ask(GroupDriver.trouble)


class PendingReduce:
    """An all-reduce that is under way."""

    def __init__(
        self, group: Group, tensors: Sequence[Tensor], fused: FlatTensors, calls: Sequence[ReduceCall]
    ) -> None:
        self._group, self._tensors, self._fused, self._calls = group, tensors, fused, calls
        self._done: ReduceResult | None = None

    def done(self) -> bool:
        self._group._check_process()
        return all(call.future.done() for call in self._calls)

    @arguments("work.wait", CODE)
    def wait(self, timeout_s: Patience | None = None) -> ReduceResult:
        """Until the mean is in the tensors. RunFailedError if it is not within `timeout_s`, where one is given, or
        nothing came of it: then nothing writes to the tensors any more, and they hold what `all_reduce` says."""
        self._group._check_process()
        if self._done is None:
            futures = [call.future for call in self._calls]
            if ended(futures, timeout_s).not_done:  # also where another slice failed: this one may still be written
                raise RunFailedError(
                    "E-RED-03",
                    f"the all-reduce was not agreed within {timeout_s} s; it goes on, and its tensors are its own",
                    cause=self._group.trouble(),
                    fix="wait again with work.wait() (what all_reduce_async answers with), or close the group and "
                    "found a new one",
                )
            try:
                results = [future.result() for future in futures]
            except AtollError as why:
                raise self._with_what_is_left(why) from None
            unfused(self._fused, self._tensors)
            self._done = _joined(results, [len(call.flat_N) for call in self._calls])
        return self._done

    def _with_what_is_left(self, why: AtollError) -> AtollError:
        """The same, and of a tensor that is reduced where it lies what was written over already."""
        spans = [f"{call.at} to {call.at + call.written}" for call in self._calls if call.written]
        if not spans or not self._fused.own:
            return why
        count = len(self._fused.vector_N)
        what = f"{why.what}; of {count} values {' and '.join(spans)} were written over, the others not"
        fix = f"{why.fix}; " if why.fix else ""
        return type(why)(why.code, what, cause=why.cause, fix=f"{fix}before the tensor is used, fill it again")


async def _end_tasks() -> None:
    """Questions of other threads, which would wait for ever."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _closed() -> AtollError:
    return UsageError("E-RED-01", "this group was closed", fix="found or join a group again")


@arguments("atoll.reduce.found", CODE)
def found(
    *,
    peers: Peers = 1,
    codec: str = "fp32",
    way_back: str = "",
    remembered: bool = False,
    topology: str = "auto",
    statistic: StatisticName = "mean",
    trust: str = "private",
    timeout_s: Span = 60.0,
    silence_s: Span = 6.0,
    name: str = "",
    listen: tuple[str, ...] = (),
    announce: tuple[str, ...] = (),
    upload_bytes_s: Rate = 0,
) -> Group:
    """A new group with this process as its first member; the first all-reduce begins when `peers` are there.

    `topology` "auto" is a hierarchy if names say that members are in several places: "eu/ada" is near "eu/bob" and
    far from "us/cleo"; else what is cheapest on the links that members have measured and agreed on so far. A call
    may choose another.
    `codec` encodes what members send, `way_back` (default: the same) the mean that comes back. With `randk` both
    ways a mean has other places in every call and is zero elsewhere, for `ErrorFeedback`. With
    `way_back="gathered"` all get all rows, or their mean in fp32 where that is shorter, so that nothing is lost a
    second time: as many bytes back as all members sent, and no topology that makes sums on the way. With
    `remembered` members answer for the same values in every call, keep in the `ErrorFeedback` of their own call
    what their answers left out, and make it good in the next ones: the bytes of `way_back` alone. A member whose
    user has not called for `timeout_s` while others wait passes; one that is silent for `silence_s` is gone; one
    that is heard and does not answer for its part of a call is answered for by another after 5 x `timeout_s`, or
    after as long as three such calls take at 2 Mbit/s; where members may lie, no longer than four times what all
    but a third of them took.
    `trust` "community" or "open" is for members of whom up to a third may lie: rows are combined by `statistic`
    (docs/config.md), owners are spot-checked or watch each other (specs/trust.md, specs/openings.md). Since a mean
    is what is asked for here, it stays one unless you name another: nobody can then falsify the sum, but one member
    can move it by what it sends; `statistic="trimmed_mean"`, or "robust" with "community", withstands that. With
    fewer members than it takes to withstand one, a group that has shrunk reduces nothing: calls wait for others to
    join, and fail with E-RED-21 once the group has been that small for `timeout_s`.
    Members on other computers can dial this one if `listen`, or ATOLL_LISTEN, says /ip4/0.0.0.0/tcp/7071.
    `upload_bytes_s` is the most that this member sends, 0: no cap.
    Raises UsageError for settings that cannot be.
    """
    topology, codec = _known_topology(topology), _codec_name(codec)
    if remembered and way_back == GATHERED:
        raise UsageError("E-RED-08", f'remembered = True with way_back = "{GATHERED}"', fix="leave one of them out")
    if remembered or way_back == GATHERED:
        topology = _for_rows(topology, trust, "remembered = True" if remembered else f'way_back = "{GATHERED}"')
    if way_back != GATHERED:
        way_back = _codec_name(way_back) if way_back else ""
    terms = GroupTerms(codec, way_back, timeout_s)
    rounds = RoundSettings(
        inner_steps=1,
        first_train_s=FOREVER_S,
        train_max_s=FOREVER_S,
        owner_s=max(timeout_s, silence_s),
        suspect_s=silence_s,
        beat_s=min(2.0, silence_s / 3),
    )
    settings = RunSettings(
        name="group",
        start_peers=peers,
        round=rounds,
        topology=topology,
        pieces=min(PIECES_MAX, max(1, SLICE_BYTES // (4 * PART_VALUES * max(peers, 2)))),
        update_bytes=SLICE_BYTES,
        spread=True,
        learning=msgspec.msgpack.encode(terms),
        steady=True if remembered else msgspec.UNSET,
    )
    settings = distrusting(settings, trust, statistic, codec, way_back or codec, peers)
    with_room(settings)

    async def opening() -> tuple[GroupDriver, str]:
        founded, where = FoundingBlobs(settings, STATE), ListenOptions(listening(listen), announce, upload_bytes_s)
        invitation = TicketTerms(uses=PEERS_MAX)  # members of a group come and go
        with own_folder() as folder:
            host, ticket = await found_run(folder, founded, name, where, invitation, GroupDriver, durable=False)
        host.start()
        return host, ticket.text

    return Group(opening())


@arguments("atoll.reduce.join", CODE)
def join(
    ticket: str,
    *,
    name: str = "",
    via: tuple[str, ...] = (),
    listen: tuple[str, ...] = (),
    announce: tuple[str, ...] = (),
    upload_bytes_s: Rate = 0,
    client: bool = False,
) -> Group:
    """Take a seat in the ticket's group; returns when its members have let this one in.

    `via` are addresses of other members (`group.addresses`), for when whoever issued the ticket is gone.
    `client`: nobody can dial this member, so it only dials out, counts in means, owns no part and has no vote.
    `upload_bytes_s` is the most that it sends, 0: no cap.
    Raises the ticket's own error, or NetworkError if nobody lets it in for two minutes.
    """

    async def opening() -> tuple[GroupDriver, str]:
        where, role = ListenOptions(listening(listen), announce, upload_bytes_s), "client" if client else "trainer"
        with own_folder() as folder:
            host = await join_run(folder, ticket, role, name, where, GroupDriver, durable=False)
        host.bootstrap += tuple((address, None) for address in via)
        host.start()
        try:
            await host.seated(MEET_S)
        except AtollError:
            await host.stop()
            raise
        return host, ticket

    return Group(opening())


def _check_tensor(tensor: Tensor) -> None:
    """UsageError for what a mean cannot be taken of, or not be written back to, before the others hear of it."""
    fix = "reduce floating-point tensors"
    if tensor is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise UsageError(
            "E-RED-02",
            "None where a tensor is expected",
            cause="a parameter without a gradient: no backward pass has come to it",
            fix="give zeros as large as it is, so that all members reduce the same values",
        )
    if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = type(tensor).__name__
        if (
            type(tensor).__module__ == "numpy"
        ):  # an array among the tensors, or a number of one that was given alone
            fix = "reduce torch.from_numpy(array)"
        raise UsageError("E-RED-02", f"{kind} where a tensor is expected", fix=fix)
    if not tensor.is_floating_point():
        raise UsageError("E-RED-02", f"a tensor of {tensor.dtype}", fix=fix)
    kind = "nested" if tensor.is_nested else tensor.layout
    if kind != strided or tensor.is_meta:
        raise UsageError("E-RED-02", f"a tensor on {tensor.device}, {kind}", fix="reduce dense tensors")
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UsageError("E-RED-02", "a tensor whose values share memory", fix="reduce tensor.clone()")


def _known_topology(name: str) -> TopologyName:
    if name not in TOPOLOGIES:
        fix = f"choose one of {', '.join(TOPOLOGIES)}; for means of two, call average_with_partner"
        raise UsageError("E-RED-08", f"no topology {name}{did_you_mean(name, TOPOLOGIES)}", fix=fix)
    return name


def _codec_name(name: str) -> str:
    """The full name of a codec that a group can use. UsageError for others."""
    try:
        codec = codec_named(name, SAMPLE)
        codec.wire_bytes(SAMPLE_VALUES)  # of matrices that another codec hides nobody could say how long it is
        return codec.name
    except ValueError as why:
        if "delta" in name.split("+"):
            rest = "+".join(stage for stage in name.split("+") if stage != "delta")
            raise UsageError(
                "E-RED-08",
                f"a group cannot use the codec {name}",
                cause="whoever is new, or missed a call, could not read a difference",
                fix=f'say "{rest}", and all_reduce(…, held=atoll.reduce.DeltaReference())',
            ) from None
        if name.startswith("powersgd"):
            raise UsageError(
                "E-RED-08",
                f"a group cannot use the codec {name}",
                cause="PowerSGD needs two exchanges, and a call is one",
                fix='say "lowrank:4" or "lowrank:4+int8", with error_feedback=atoll.reduce.ErrorFeedback()',
            ) from None
        raise UsageError(
            "E-RED-08", f"a group cannot use the codec {name}: {why}", fix="specs/codecs.md has every codec"
        ) from None


def _for_rows(topology: str, trust: str, asked: str) -> Literal["butterfly", "star"]:
    """The topology of a group whose owners answer with what they got, or remember. UsageError where they cannot."""
    if trust != "private":
        raise UsageError(
            "E-RED-14",
            f'{asked} with trust = "{trust}"',
            cause="owners that hand rows on, or answer with what only they know, could not be checked",
            fix='leave it out and say way_back = "fp32", or trust = "private"',
        )
    if topology not in ("auto", "butterfly", "star"):
        raise UsageError(
            "E-RED-08",
            f'{asked} with topology = "{topology}"',
            cause="its owners get sums that were made on the way, and no rows",
            fix='say topology = "butterfly", or leave it out and say way_back = "fp32"',
        )
    return "star" if topology == "star" else "butterfly"


def _joined(results: Sequence[ReduceResult], lengths: Sequence[int]) -> ReduceResult:
    """What the slices of one call did together."""
    if len(results) == 1:
        return results[0]
    parts: list[Part] = []
    for at, result in zip(accumulate(lengths, initial=0), results, strict=False):
        parts += [((at + lo, at + hi), names) for (lo, hi), names in result.parts]
    everywhere = set(results[0].contributors) - set(results[0].partly)
    for result in results:
        everywhere &= set(result.contributors) - set(result.partly)
    contributors = {peer for result in results for peer in result.contributors}
    missing = {peer for result in results for peer in result.missing} - contributors
    counted, partly, missing = (tuple(sorted(s)) for s in (contributors, contributors - everywhere, missing))
    return ReduceResult(results[-1].round, counted, partly, missing, tuple(parts), results[-1].topology)
