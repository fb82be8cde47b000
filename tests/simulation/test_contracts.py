"""The driving contract of every machine, as one property over calls recorded from simulated runs.

Two fresh machines that get the same calls return equal effects, in fresh lists, and fail for no message. Recorded
calls are played as they were (the effects equal those of the run), and with messages that come twice or from
strangers, as `base/machine.py` allows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.machine import Received, RunTask, TaskDone, TaskFailed
from atoll.features.archive.download import ErasureDownload
from atoll.peer.peer import Peer
from atoll.protocol.agreement.one_phase import OnePhaseAgreement
from atoll.protocol.agreement.two_phase import TwoPhaseAgreement
from atoll.protocol.membership.failure_detector import FailureDetector
from atoll.protocol.transfer.download import BlobDownload
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios import run_scenario
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm

Machine = Any
CALLS_MAX = 400  # of one machine
VOTER = "start", "receive", "approve", "propose", "close_view", "add_body", "retransmit"


@dataclass
class Recording:
    """Calls of one machine: method, arguments, and what came of it."""

    make: Callable[[], Machine]
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)


@contextmanager
def recorded(machine: type, methods: tuple[str, ...]) -> Iterator[list[Recording]]:
    """Record every instance of this class, its arguments and its outermost calls."""
    found: list[Recording] = []
    by_machine: dict[int, Recording] = {}
    depth = 0
    create = machine.__init__

    def created(self: Machine, *args: Any, **named: Any) -> None:
        frozen, names = _frozen(args), _frozen(named)
        create(self, *args, **named)
        recording = Recording(lambda: machine(*_frozen(frozen), **_frozen(names)))
        by_machine[id(self)] = recording
        found.append(recording)

    def wrapped(name: str) -> Callable[..., Any]:
        call = getattr(machine, name)

        def outermost(self: Machine, *args: Any, **named: Any) -> Any:
            nonlocal depth
            frozen, depth = (_frozen(args), _frozen(named)), depth + 1
            try:
                result = call(self, *args, **named)
            except PeerFault as fault:
                result = fault
                raise
            finally:
                depth -= 1
                if depth == 0:
                    by_machine[id(self)].calls.append((name, *frozen, _frozen(result)))
            return result

        return outermost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "__init__", created)
        for name in methods:
            patch.setattr(machine, name, wrapped(name))
        yield found


def _frozen(value: Any) -> Any:
    """A copy of containers that the caller may change later."""
    if type(value) in (list, set, dict, tuple):
        return copy.copy(value) if type(value) is not tuple else tuple(_frozen(v) for v in value)
    return value


def bad_weather(seed: int, **settings: Any) -> None:
    run_scenario("churn", seed, peers=4, rounds=3, **settings)


def lone_swarm() -> None:
    world = VirtualSwarm(3, SwarmKnobs(peers=4, network=NetworkKnobs(loss_rate=0.05, duplicate_rate=0.05))).world
    world.run(20.0)


TABLE: dict[str, tuple[type, tuple[str, ...], Callable[[], object]]] = {
    "peer": (Peer, ("handle",), lone_swarm),
    "peer in churn": (Peer, ("handle",), lambda: bad_weather(2)),
    "peer with raft": (Peer, ("handle",), lambda: bad_weather(3, protocol="raft")),
    "joining peer": (Peer, ("handle",), lambda: run_scenario("growth", 1, rounds=4)),
    "agreement in two phases": (TwoPhaseAgreement, VOTER, lambda: bad_weather(2)),
    "agreement in one phase": (OnePhaseAgreement, VOTER, lambda: bad_weather(3, protocol="raft")),
    "failure detector": (
        FailureDetector,
        (
            "ping_unwatched",
            "set_members",
            "tick",
            "check_silence",
            "record_life",
            "record_suspicion",
            "on_link_event",
            "on_heartbeat",
            "reset_silence",
        ),
        lambda: bad_weather(2),
    ),
    "download": (
        BlobDownload,
        ("handle", "on_link_up", "add_sources", "add_candidates", "set_allowance"),
        lambda: bad_weather(12),
    ),
    "download of pieces": (
        ErasureDownload,
        ("handle", "linked", "stop"),
        lambda: run_scenario("pieces", 1),
    ),
}


SET_BY_CALLERS = {"failure detector", "download of pieces"}  # callers set attributes, which no recording holds


@cache
def recordings(name: str) -> list[Recording]:
    machine, methods, run = TABLE[name]
    with recorded(machine, methods) as found:
        run()
    used = sorted((r for r in found if r.calls), key=lambda r: -len(r.calls))[:4]
    for recording in used:
        del recording.calls[CALLS_MAX:]
    return used


def play(recording: Recording, calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]]) -> list[Any]:
    machine, results = recording.make(), []
    is_peer = isinstance(machine, Peer)  # the tasks of other machines are begun by several calls
    asked = set[str]()  # jobs without an answer: each is answered once
    for method, args, named, _ in calls:
        if method == "handle" and isinstance(args[0], TaskDone | TaskFailed) and is_peer:
            if args[0].job not in asked:
                continue
            asked.discard(args[0].job)
        try:
            results.append(getattr(machine, method)(*_frozen(args), **_frozen(named)))
        except PeerFault as fault:
            assert fault.who, f"{method}{args} blames no peer"
            results.append(str(fault))
        if isinstance(results[-1], list):
            asked |= {effect.job for effect in results[-1] if isinstance(effect, RunTask)}
    lists = [id(r) for r in results if isinstance(r, list)]
    assert len(lists) == len(set(lists)), "a machine returns a list that it returned before"
    return results


@pytest.mark.parametrize("name", [name for name in TABLE if name not in SET_BY_CALLERS])
def test_a_fresh_machine_repeats_what_the_run_did(name: str):
    """A recorded sequence of calls, played into a fresh machine, has the effects of the run."""
    assert recordings(name)
    for recording in recordings(name):
        for number, (result, call) in enumerate(
            zip(play(recording, recording.calls), recording.calls, strict=True)
        ):
            assert result == (str(call[3]) if isinstance(call[3], PeerFault) else call[3]), (number, call[:2])


@pytest.mark.parametrize("name", TABLE)
@settings(max_examples=3)
@given(number=st.integers(0, 3), seed=st.integers(0, 2**32))
def test_repeated_and_strange_messages_do_no_harm(name: str, number: int, seed: int):
    """Two machines with the same repeated and strange messages have equal effects; only PeerFault is raised."""
    draw, chosen = Random(seed), recordings(name)
    recording, calls = chosen[number % len(chosen)], []
    for call in recording.calls[: CALLS_MAX // 2]:
        place = next((k for k, arg in enumerate(call[1]) if isinstance(arg, Received)), None)
        fate = draw.random()
        if place is None or fate > 0.3:
            calls.append(call)
        elif fate > 0.15:  # it comes twice
            calls += [call, call]
        else:  # from a stranger, too
            event = replace(call[1][place], sender=PeerId("stranger"))
            calls += [call, (call[0], (*call[1][:place], event, *call[1][place + 1 :]), call[2], None)]
    assert play(recording, calls) == play(recording, calls)
