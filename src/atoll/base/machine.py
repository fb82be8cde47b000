"""The one shape every protocol has: events in, effects out, no I/O in between.

A machine never reads a clock, opens a socket, draws from a global generator or awaits. Whoever drives it
(`runtime/training_peer.py` over real sockets, `simulation/world.py` over a virtual network) supplies the time and
carries out
the effects. The contract between the two:

- Sends may be lost, delayed, duplicated and reordered. Nothing may depend on one arriving. One with a payload that
  still waits to leave gives its turn to a newer one of the same `place`.
- The effects of one call are carried out in order, and a `Keep` is durable before any later `Send` leaves or
  `RunTask` begins.
- An `RunTask` runs off the loop and is answered exactly once, by `TaskDone` or by `TaskFailed`.
- Setting a timer name again replaces the old deadline; `at=None` cancels it. Timers outlive the round that
  set them, so names carry the round and every `match` is closed.
- `now` is the driver's local clock. It never jumps backwards; it may jump forwards (a suspended laptop).
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum
from typing import Any, ClassVar

import msgspec

from atoll.base.ids import Digest, PeerId, Seconds


class Lane(IntEnum):
    """Two lanes per peer, so that tensors never delay a heartbeat."""

    CONTROL = 0  # small, latency first
    BULK = 1  # payloads; several connections, back-pressure


def tag_of(struct: msgspec.Struct | type[msgspec.Struct]) -> str:
    """The name of a message, statement or fact on the wire, on disk and in logs; it outlives names of classes."""
    tag = struct.__struct_config__.tag
    assert isinstance(tag, str), f"{struct} has no tag"
    return tag


class Message(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Anything that crosses the wire. Subclasses live in wire/messages and are the whole vocabulary."""

    @property
    def place(self) -> Hashable:
        """What a newer message to the same peer replaces while it still waits to leave; None: nothing.

        Only asked of messages with a payload: through a thin uplink these wait for long, and words that nobody
        needs any more must not stand in front of those that somebody waits for.
        """
        return None

    @property
    def of_round(self) -> int | None:
        """The round in which it is told to all whom it concerns: with a payload it need not leave any more once its
        sender has closed a later one. None: somebody asked for it, or it is of no round."""
        return None


class Payload(msgspec.Struct, frozen=True):
    """Bytes that machines move but never look into: encoded tensors, chunks of blobs.

    `digest` and `size_bytes` were computed from the very bytes by whoever made this value here (a job, or the
    driver on arrival), so they can be believed. `data` is a buffer in the real world; the virtual world puts
    multisets of contributor names here and charges `size_bytes` to the link.
    """

    digest: Digest
    size_bytes: int
    data: Any


# ---- Events: what happened ---------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, gc=False):
    """The first event a machine sees; `kept` is everything it durably kept in its life before."""

    kept: dict[str, bytes]


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message from an authenticated sender, with the bulk payload that came along, if any."""

    sender: PeerId
    message: Message
    payload: Payload | None = None


class TimerFired(msgspec.Struct, frozen=True, gc=False):
    name: str


class TaskDone(msgspec.Struct, frozen=True, gc=False):
    job: str
    result: Any


class TaskFailed(msgspec.Struct, frozen=True, gc=False):
    job: str
    why: str


class LinkUp(msgspec.Struct, frozen=True, gc=False):
    """An authenticated connection to this peer exists."""

    peer: PeerId


class LinkDown(msgspec.Struct, frozen=True, gc=False):
    """The last connection to this peer is gone.

    `refused`: a redial was refused too, so its process is gone and nobody needs to wait for it. Only an agreed
    vertex removes a member; this fact merely ends waiting.
    """

    peer: PeerId
    refused: bool


class Resumed(msgspec.Struct, frozen=True, gc=False):
    """The clock jumped: this computer slept. What was pending is stale."""


class BandwidthMeasured(msgspec.Struct, frozen=True, gc=False):
    """How fast bulk left this computer while more was waiting, as the driver measured it: links at their limit."""

    bytes_s: float  # to everybody together
    to: tuple[tuple[PeerId, float], ...]  # to single peers, as far as something waited for them
    round: int | None = None  # in which what `to` says was measured


Event = Start | Received | TimerFired | TaskDone | TaskFailed | LinkUp | LinkDown | Resumed | BandwidthMeasured


# ---- Effects: what should happen ---------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True, gc=False):
    to: PeerId
    message: Message
    lane: Lane = Lane.CONTROL
    payload: Payload | None = None


class SetTimer(msgspec.Struct, frozen=True, gc=False):
    name: str
    at: Seconds | None  # local clock of the driver; None cancels


class RunTask(msgspec.Struct, frozen=True, gc=False):
    """Slow work, done off the loop. `work` is one of the structs in peer/tasks.py."""

    job: str
    work: Any


class Persist(msgspec.Struct, frozen=True, gc=False):
    """Write this value durably under this name before any later Send leaves; None forgets the name."""

    name: str
    blob: bytes | None


class Connect(msgspec.Struct, frozen=True, gc=False):
    """Here is where this peer can be dialled (multiaddrs); keep a connection to it from now on."""

    peer: PeerId
    addresses: tuple[str, ...]


class Disconnect(msgspec.Struct, frozen=True, gc=False):
    """No connection to this peer is wanted any more."""

    peer: PeerId


class Emit(msgspec.Struct, frozen=True, gc=False):
    """A fact. One stream with three readers: tests assert on it, screens plot it, checkers watch it."""

    fact: Fact


class Fact(msgspec.Struct, frozen=True, gc=False, tag=True, kw_only=True):
    """Something that became true. Subclasses say in which phase; round and trace id come along always."""

    phase: ClassVar[str] = ""
    round: int = -1
    trace: str = ""  # hex prefix of the vertex the round started from: the same at every honest peer


Effect = Send | SetTimer | RunTask | Persist | Connect | Disconnect | Emit
