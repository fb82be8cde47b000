"""Sans-IO machine interface: events in, effects out.

A machine never reads a clock, opens a socket, uses a global random generator or awaits. Its driver
(`runtime/training_peer.py` over real sockets, `simulation/world.py` over a virtual network) supplies the time and
executes the effects. The contract:

- A `Send` may be lost, delayed, duplicated and reordered. No step may depend on its arrival. A waiting one with a
  payload is replaced by a newer one with the same `replaces_key`.
- A `Broadcast` becomes one `Send` for each of the peers that the driver's contacts policy picks from its roster.
- The effects of one call are executed in order. A `Persist` is durable before any later `Send` or `RunTask`.
- A `RunTask` runs outside the event loop and is answered exactly once, by `TaskDone` or `TaskFailed`.
- A second `SetTimer` of a name replaces the old deadline; `at=None` cancels it. Timers outlive their round, so
  their names carry the round and every `match` is closed.
- `now` is the driver's local clock. It never jumps backwards; it may jump forwards (a suspended laptop).
- Equal calls of two fresh machines give equal effects, in a list that the machine does not keep.
- A message causes no exception but PeerFault, which blames a peer. After another one, restart from disk.

A machine states at its top only what its own contract adds. Its test: `tests/simulation/test_contracts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from enum import IntEnum
from typing import Any, ClassVar

import msgspec

from atoll.base.ids import Digest, PeerId, Seconds


class Lane(IntEnum):
    """Lanes per peer, so that tensors never delay a heartbeat."""

    CONTROL = 0  # small messages with low latency
    BULK = 1  # payloads, over several connections with back-pressure


def tag_of(struct: msgspec.Struct | type[msgspec.Struct]) -> str:
    """Name of a message, statement or fact on the wire, on disk and in logs, independent of its class name."""
    tag = struct.__struct_config__.tag
    assert isinstance(tag, str), f"{struct} has no tag"
    return tag


class Message(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Base of all messages on the wire. All subclasses are in wire/messages."""

    @property
    def replaces_key(self) -> Hashable:
        """Key by which a newer message to the same peer replaces a waiting one; None: never.

        Used only for messages with a payload: they wait long for a slow uplink, and obsolete ones must not delay
        the others.
        """
        return None

    @property
    def expires_with_round(self) -> int | None:
        """Round of a broadcast message; None for responses and messages without a round.

        With a payload it is dropped while waiting once its sender has closed a later round.
        """
        return None


class Payload(msgspec.Struct, frozen=True):
    """Bytes that machines move without reading them: encoded tensors, chunks of blobs.

    The local task or driver that created this value computed `digest` and `size_bytes` from the bytes, so they are
    trusted. `data` is a buffer; in simulations it is a multiset of contributor names, and the link is charged with
    `size_bytes`.
    """

    digest: Digest
    size_bytes: int
    data: Any


# ---- events ------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, gc=False):
    """First event of a machine. `kept`: everything that it persisted in earlier processes."""

    kept: dict[str, bytes]


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message from an authenticated sender, with its bulk payload, if any."""

    sender: PeerId
    message: Message
    payload: Payload | None = None


class TimerFired(msgspec.Struct, frozen=True, gc=False):
    """The timer of this name has reached its deadline."""

    name: str


class TaskDone(msgspec.Struct, frozen=True, gc=False):
    """The task of this job name has finished."""

    job: str
    result: Any


class TaskFailed(msgspec.Struct, frozen=True, gc=False):
    """The task of this job name has failed."""

    job: str
    why: str


class LinkUp(msgspec.Struct, frozen=True, gc=False):
    """An authenticated connection to this peer exists."""

    peer: PeerId


class LinkDown(msgspec.Struct, frozen=True, gc=False):
    """The last connection to this peer is closed.

    `refused`: a redial was refused too, so its process has ended and waiting for it ends. Only an agreed vertex
    removes a member.
    """

    peer: PeerId
    refused: bool


class ResumedFromSleep(msgspec.Struct, frozen=True, gc=False):
    """The clock jumped because this computer slept. Pending steps are stale."""


class BandwidthMeasured(msgspec.Struct, frozen=True, gc=False):
    """Bulk upload rate of this computer while more data was queued, measured by the driver."""

    bytes_s: float | None  # bytes per second to all peers together; None: never seen at its limit
    to: tuple[tuple[PeerId, float], ...]  # bytes per second to single peers with queued data
    round: int | None = None  # round in which `to` was measured


Event = (
    Start | Received | TimerFired | TaskDone | TaskFailed | LinkUp | LinkDown | ResumedFromSleep | BandwidthMeasured
)


# ---- effects -----------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send a message to a peer, without a delivery guarantee."""

    to: PeerId
    message: Message
    lane: Lane = Lane.CONTROL
    payload: Payload | None = None


class Broadcast(msgspec.Struct, frozen=True, gc=False):
    """Send a control message to the roster, as far as the contacts policy of the driver picks its peers."""

    topic: str  # conversation, by which a policy may choose
    message: Message
    roster: tuple[PeerId, ...]  # peers for which the machine means the message, without the local peer


class SetTimer(msgspec.Struct, frozen=True, gc=False):
    """Set or cancel the timer of this name."""

    name: str
    at: Seconds | None  # deadline by the driver's local clock; None cancels


class RunTask(msgspec.Struct, frozen=True, gc=False):
    """Run slow work outside the event loop. `work` is one of the structs in peer/tasks.py."""

    job: str
    work: Any


class Persist(msgspec.Struct, frozen=True, gc=False):
    """Store this value durably under this name before any later Send leaves; None deletes the name."""

    name: str
    blob: bytes | None


class Connect(msgspec.Struct, frozen=True, gc=False):
    """Keep a connection to this peer from now on, at these multiaddrs."""

    peer: PeerId
    addresses: tuple[str, ...]


class Disconnect(msgspec.Struct, frozen=True, gc=False):
    """Keep no connection to this peer any more."""

    peer: PeerId


class Emit(msgspec.Struct, frozen=True, gc=False):
    """Publish a fact, for tests, displays and invariant checkers."""

    fact: Fact


class Fact(msgspec.Struct, frozen=True, gc=False, tag=True, kw_only=True):
    """Base of all facts, with the phase of its class, the round and the trace id."""

    phase: ClassVar[str] = ""
    round: int = -1
    trace: str = ""  # hex prefix of the vertex that the round started from, equal at every honest peer


Effect = Send | Broadcast | SetTimer | RunTask | Persist | Connect | Disconnect | Emit

ContactsPolicy = Callable[[str, tuple[PeerId, ...]], tuple[PeerId, ...]]
"""Peers that get a broadcast: a function of its topic and roster."""


def contact_all(topic: str, roster: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
    """The contacts policy of a full mesh."""
    return roster


def expand_broadcasts(effects: Iterable[Effect], contacts: ContactsPolicy = contact_all) -> Iterator[Effect]:
    """The effects in their order, with one `Send` per contact in place of each `Broadcast`."""
    for effect in effects:
        if isinstance(effect, Broadcast):
            for peer in contacts(effect.topic, effect.roster):
                yield Send(peer, effect.message)
        else:
            yield effect
