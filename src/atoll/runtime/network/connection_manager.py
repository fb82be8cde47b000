"""Links to other peers: dialled, redialled, accepted, authenticated, and one per peer whoever dialled first.

Each link has a control connection, which is the link, and bulk connections beside it (`bulk.py`).
Promises: `LinkUp` and `LinkDown` alternate; a peer whose process died on a reachable host is reported with
`refused=True` after one redial; whatever a stranger sends costs its own connection and nothing else; after
`close` no task, socket or callback of ours is left.
Never blocks, never raises for what the network does: sends may be lost by contract, and are counted then.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Hashable
from ipaddress import ip_address
from socket import socket

import msgspec

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId, Seconds, one_line, short
from atoll.base.limits import BULK_FRAME_MAX, CONTROL_FRAME_MAX, MIB, PEERS_MAX
from atoll.base.machine import Lane, LinkDown, LinkUp
from atoll.runtime.network.addresses import Ambiguity, ambiguity_of
from atoll.runtime.network.buffer_pool import BufferPool
from atoll.runtime.network.bulk_channel import (
    BulkChannel,
    BulkLane,
    BulkLimits,
    PayloadHasher,
    ReceiveBudget,
    RecordBuffers,
)
from atoll.runtime.network.control_channel import ControlChannel, ControlFrame
from atoll.runtime.network.dialer import (
    DialRefused,
    DialResult,
    cannot_dial,
    cannot_listen,
    dial_any,
    endpoint_of,
    endpoints_of,
)
from atoll.runtime.network.file_slice import FileSlice
from atoll.runtime.network.peer_link import LinkStats, PeerLink
from atoll.runtime.network.secure_channel import SessionFactory
from atoll.runtime.network.tcp import BACKLOG, TcpConnection, connect, listening
from atoll.runtime.network.upload_limiter import UploadLimiter
from atoll.wire.libp2p.multiaddr import DialEndpoint, text_of

log = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview

HALF_OPEN_MAX = 512  # strangers in a handshake; each holds 64 kB and may cost us one signature (1 ms)
HALF_OPEN_PER_SOURCE_MAX = 64  # of them from one host: a full mesh that starts on one machine
GUESTS_MAX = 64  # foreign peers that only ask who we are; the oldest makes room
RESETS_MAX = 3  # a process that dies closes its listener last: a reset handshake is worth another try at once
REDIAL_FIRST_S, REDIAL_LAST_S = 0.1, 15.0
TELL_S = 1.0  # a redial that takes longer than this is not waited for to say that the link is down
RETIRING_MAX = 4  # connections of one peer on their way out
RETIRE_S = 10.0  # both ends agree which connection stays within a round trip; later one of them is mute
SWEEP_S = 10.0
CLOSE_S = 1.0  # for last words to leave
REASON_MAX = 200  # characters of a stranger's reason that we show


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How links behave. The defaults suit a home connection and a data centre alike."""

    congestion: str = "bbr"  # at 100 ms and 1 % loss bbr moves 150 of 200 Mbit/s, cubic 1
    bulk_connections: int = 1  # where the kernel grants that congestion control
    bulk_connections_lossy: int = 8  # where it does not: 8 cubic connections carry ten times one at 1 % loss
    lossy_rtt_s: Seconds = 0.005  # nearer peers lose nothing worth several connections
    control_queue_bytes: int = 16 * MIB  # seconds of votes and heartbeats; older ones are stale anyway
    bulk_queue_bytes: int = 1024 * MIB  # keep above one whole update; counts payloads that the caller still holds
    receive_bytes: int = 4 * (BULK_FRAME_MAX + CONTROL_FRAME_MAX)  # one peer's incomplete frames
    receive_total_bytes: int = 4096 * MIB  # all peers' incomplete frames; beyond it reading waits
    upload_bytes_s: int = 0  # on all links together, 0: no cap; bulk waits for it, control messages only count
    handshake_s: Seconds = 10.0  # three round trips and two signatures, on a bad day


class ConnectionManager:
    """All links of one peer. Made and used inside one running event loop."""

    def __init__(
        self,
        me: PeerId,
        security: SessionFactory,
        on_event: Callable[[LinkUp | LinkDown], None],
        on_message: Callable[[PeerId, bytes, memoryview | None, bytes | None], None],
        *,
        on_fault: Callable[[PeerFault], None] = lambda fault: None,
        allow: Callable[[PeerId], bool] = lambda peer: True,
        allocate: Callable[[int], memoryview] | None = None,
        follow: Callable[[], PayloadHasher | None] = lambda: None,
        settings: LinkSettings | None = None,
    ) -> None:
        self._me, self._security = me, security
        self._on_event, self._on_message, self._on_fault, self._allow = on_event, on_message, on_fault, allow
        self._settings = settings or LinkSettings()
        self._loop = asyncio.get_running_loop()
        self._links: dict[PeerId, PeerLink] = {}
        self._half_open: dict[ControlChannel, None] = {}  # oldest first
        self._guests: dict[ControlChannel, None] = {}  # oldest first
        self.memory = BufferPool()
        self._allocate = allocate or self.memory  # payloads are decrypted right into what this returns
        self._follow = follow  # and hashed by what this returns, on their way
        self._cap = UploadLimiter(self._settings.upload_bytes_s)
        self._boxes = RecordBuffers()
        self._intake = ReceiveBudget(self._settings.receive_total_bytes)
        self._servers: list[asyncio.Server] = []
        self._meant = set[Ambiguity]({""})  # kinds of addresses that others may tell us to dial
        self._wires: set[TcpConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._traffic_before = (0, 0)  # of links that were let go
        self._closing = False
        self._spawn(self._sweep())

    # ---- what the driver uses ----

    async def listen(self, addresses: list[str]) -> list[str]:
        """Accept connections there; answers with what was bound. Raises UsageError or NetworkError."""
        bound: list[str] = []
        for address in addresses:
            where = endpoint_of(address)
            try:
                sock = await listening(where, self._settings.congestion)
            except OSError as why:
                raise cannot_listen(address, why) from why
            if not ip_address(own := sock.getsockname()[0]).is_unspecified:
                self._meant.add(ambiguity_of(own))
            self._servers.append(await self._loop.create_server(self._accept, sock=sock, backlog=BACKLOG))
            bound.append(text_of(where._replace(port=sock.getsockname()[1])))
        self._security.listening(bound)
        return bound

    def contact(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Keep a connection to this peer from now on. Addresses that Atoll does not understand are skipped.

        So are loopback and link-local ones, which are another machine at every member: with them a member makes
        others connect to their own services. They are dialed if this peer listens on such an address too, or if
        `dial` reached one. A listener on every interface is none on loopback: there, and at a client, a connection
        with a peer on this computer shows that members are here, if `contact` named that peer, too.
        """
        if peer == self._me or self._closing:
            return
        link = self._link(peer)
        known = link.endpoints
        link.endpoints = endpoints_of(peer, addresses)
        if link.endpoints != known:
            link.nudge.set()
        self._redial(link)

    async def dial(self, address: str, expected_peer: PeerId | None = None) -> PeerId:
        """Connect to whoever is there, and keep the connection. Raises UsageError, NetworkError or RefusedError."""
        where = endpoint_of(address)
        expected = expected_peer or where.peer
        try:
            sock = await connect(where, self._settings.congestion)
            told = ambiguity_of(sock.getpeername()[0])
            peer = await self._introduce(sock, where, Lane.CONTROL, expected)
        except (OSError, PeerFault) as why:
            raise cannot_dial(address, why) from why
        self._meant.add(told)
        link = self._link(peer)
        link.endpoints = link.endpoints or (where,)
        return peer

    def forget(self, peer: PeerId) -> None:
        """No connection to this peer is wanted any more. It may still dial us, if it is allowed to."""
        link = self._links.get(peer)
        if link is None:
            return
        link.endpoints = ()
        if link.redialler:
            link.redialler.cancel()
        if link.control:
            link.control.finish()
            link.retiring[link.control], link.control = None, None
        self._down(link, refused=False)
        self._settle(link, refused=False)

    def suspect(self, peer: PeerId) -> None:
        """Its heartbeat is overdue: give up this connection, and see whether a new one can be made."""
        link = self._links.get(peer)
        if link and link.control:
            for channel in link.bulk.channels:
                channel.wire.abort()
            link.control.wire.abort(TimeoutError("no heartbeat"))

    def send(
        self,
        peer: PeerId,
        message: bytes,
        lane: Lane = Lane.CONTROL,
        payload: Buffer | FileSlice | None = None,
        place: Hashable = None,
        of_round: int | None = None,
    ) -> bool:
        """Queue a message; a payload always takes the bulk lane. False: no link, or too large for any frame.

        A message that still waits there gives its turn to a newer one of the same `place`, and is dropped once its
        round is long over (`base.machine.Message`, `rounds_over`).
        """
        link = self._links.get(peer)
        if link is None or link.control is None or self._closing:
            return False
        view = payload if payload is None or isinstance(payload, FileSlice) else _bytes_view(payload)
        if len(message) > CONTROL_FRAME_MAX or (view is not None and len(view) > BULK_FRAME_MAX):
            link.refused_sends += 1
            return False
        if lane is Lane.CONTROL and view is None:
            link.control.send(message)
        else:
            link.bulk.send(message, view, place, of_round)
            if not link.bulk_wanted:
                link.bulk_wanted = self._bulk_connections(link.control)
                self._open_bulk(link)
        return True

    def rounds_over(self, before: int) -> None:
        """What waits to leave, and was said in a round before this one, has nobody left whom it would help."""
        for link in self._links.values():
            link.bulk.rounds_over(before)

    def stats(self) -> dict[PeerId, LinkStats]:
        return {peer: link.stats() for peer, link in self._links.items()}

    def traffic(self) -> tuple[int, int]:
        """(sent, received) bytes on the sockets of all links there have been."""
        return _sum(self._traffic_before, *(link.traffic() for link in self._links.values()))

    def uploading(self) -> dict[PeerId, tuple[int, bool]]:
        """Per peer: bulk bytes acknowledged on the connections there are, and whether some still waits to leave.

        Of peers on this computer only where a cap sets the pace: else it is the load of processors that would be
        measured, and parts would be cut by it.
        """
        found: dict[PeerId, tuple[int, bool]] = {}
        for peer, link in self._links.items():
            wires = [channel.wire for channel in link.bulk.channels]
            if self._settings.upload_bytes_s or not any(wire.local for wire in wires):
                found[peer] = sum(wire.acked_bytes for wire in wires), link.bulk.waits
        return found

    async def close(self) -> None:
        """Last words leave, then everything ends. Tells no events any more."""
        self._closing = True
        for link in self._links.values():
            if link.down_owed:
                link.down_owed.cancel()
        for server in self._servers:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self._links.values():
            if link.control:
                link.control.finish()
            link.bulk.hang_up()
        for control in [*self._half_open, *self._guests]:
            control.wire.abort()
        if self._wires:
            await asyncio.wait([wire.closed for wire in self._wires], timeout=CLOSE_S)
        for wire in list(self._wires):
            wire.abort()
        if self._wires:
            await asyncio.wait([wire.closed for wire in self._wires])
        self._cap.close()
        for server in self._servers:
            await server.wait_closed()
        self._links.clear()

    # ---- dialling ----

    def _redial(self, link: PeerLink) -> None:
        if link.endpoints and link.control is None and link.redialler is None and not self._closing:
            link.redialler = self._spawn(self._redial_until_up(link))

    async def _redial_until_up(self, link: PeerLink) -> None:
        async def introduce(sock: socket, where: DialEndpoint) -> None:
            await self._introduce(sock, where, Lane.CONTROL, link.peer)

        pause_s, resets = REDIAL_FIRST_S, 0
        try:
            while link.endpoints and link.control is None:
                link.nudge.clear()
                outcome = await dial_any(link.endpoints, self._settings.congestion, introduce, self._may_dial)
                if link.control is not None:
                    return  # by this attempt, or because they dialled us meanwhile
                resets += 1
                if outcome is DialResult.RESET and resets < RESETS_MAX:
                    await asyncio.sleep(0.01 * resets)
                    continue
                self._settle(link, refused=outcome is DialResult.REFUSED)
                try:
                    async with asyncio.timeout(pause_s * random.uniform(0.5, 1.5)):  # noqa: S311  # spreads retries
                        await link.nudge.wait()
                    pause_s = REDIAL_FIRST_S  # new addresses, new hope
                except TimeoutError:
                    pause_s = min(2 * pause_s, REDIAL_LAST_S)
        finally:
            link.redialler = None

    def _may_dial(self, host: str) -> bool:
        kind = ambiguity_of(host)
        if kind == "loopback" and any(map(_is_member_here, self._links.values())):
            self._meant.add(kind)
        return kind in self._meant

    async def _introduce(self, sock: socket, where: DialEndpoint, lane: Lane, expected: PeerId | None) -> PeerId:
        """Handshake on a fresh connection. Raises OSError or PeerFault."""
        control = ControlChannel(
            self,
            lambda: self._security.dialing(lane, expected),
            deadline_s=self._settings.handshake_s,
            queue_bytes=self._settings.control_queue_bytes,
            endpoint=where,
            expected=expected,
        )
        wire = self._wire(control)
        try:
            await self._loop.create_connection(lambda: wire, sock=sock)
            return await control.ready
        except BaseException:
            control.ready.cancel()
            wire.abort()
            raise

    # ---- accepting ----

    def _accept(self) -> TcpConnection:
        return self._wire(
            ControlChannel(
                self,
                self._security.accepting,
                deadline_s=self._settings.handshake_s,
                queue_bytes=self._settings.control_queue_bytes,
            )
        )

    def _wire(self, control: ControlChannel) -> TcpConnection:
        wire = TcpConnection(control, self._cap.count)
        self._wires.add(wire)
        wire.closed.add_done_callback(lambda _: self._wires.discard(wire))
        return wire

    def admit(self, control: ControlChannel) -> None:
        source = control.wire.source
        if self._closing or sum(c.wire.source == source for c in self._half_open) >= HALF_OPEN_PER_SOURCE_MAX:
            raise ConnectionAbortedError("too many strangers from one source")
        if len(self._half_open) >= HALF_OPEN_MAX:
            next(iter(self._half_open)).wire.abort()  # the slowest; strangers cannot lock others out by waiting
        self._half_open[control] = None

    # ---- what connections tell us ----

    def visited(self, control: ControlChannel) -> None:
        self._half_open.pop(control, None)
        if not self._allow(control.peer):
            raise ConnectionAbortedError("this guest is not admitted")
        if len(self._guests) >= GUESTS_MAX:
            next(iter(self._guests)).wire.abort()
        self._guests[control] = None
        control.settled()

    def opened(self, control: ControlChannel) -> None:
        """The handshake is over: we know who it is."""
        self._half_open.pop(control, None)
        peer = control.peer
        if peer == self._me:
            raise PeerFault("", "this is myself")
        if control.expected not in (None, peer):
            raise PeerFault("", f"{peer} answered where {control.expected} was expected")
        if control.lane is Lane.BULK:
            self._join_bulk(control)
        elif not control.dialled:
            self._judge(control)
        # otherwise the listener has the next word

    def _judge(self, control: ControlChannel) -> None:
        if not self._allow(control.peer):
            control.say(ControlFrame.REFUSED, b"this peer does not admit you")
            control.finish()
        elif control.peer not in self._links and len(self._links) >= PEERS_MAX:
            control.say(ControlFrame.REFUSED, b"this peer has too many links")
            control.finish()
        else:
            link = self._link(control.peer)
            if link.control is None or self._prefers(control, link.control):
                control.say(ControlFrame.WELCOME)
                self._adopt(link, control)
            else:
                self._retire(link, control)

    def heard(self, control: ControlChannel, word: ControlFrame, body: bytes) -> None:
        link = self._links.get(control.peer)
        adopted = link is not None and link.holds(control)
        match word:
            case ControlFrame.WELCOME if control.dialled and not adopted:
                link = self._link(control.peer)
                if link.control is None or self._prefers(control, link.control):
                    self._adopt(link, control)
                else:
                    self._retire(link, control)
                if not control.ready.done():
                    control.ready.set_result(control.peer)
            case ControlFrame.REFUSED if control.dialled and not adopted:
                raise DialRefused(one_line(body.decode(errors="replace"), REASON_MAX))
            case ControlFrame.RETIRE if control.dialled and not adopted:
                if link is None or link.control is None:
                    raise ConnectionResetError("it believes in another connection to us")
                self._retire(link, control)
                self._left(control)
                if not control.ready.done():
                    control.ready.set_result(control.peer)
            case ControlFrame.RETIRE if adopted:
                self._left(control)
            case ControlFrame.MESSAGE if adopted:
                self._tell(self._on_message, control.peer, body, None, None)
            case ControlFrame.MORE_BULK if adopted and control.dialled and len(body) == 1 and body[0] > 0:
                assert link is not None
                link.bulk_wanted = min(body[0], self._bulk_connections_max())
                self._open_bulk(link)
            case _:
                raise PeerFault(control.peer, f"said {word.name} out of turn")

    def over(self, control: ControlChannel, why: Exception | None) -> None:
        self._half_open.pop(control, None)
        self._guests.pop(control, None)
        if not control.ready.done():
            if control.dialled:
                control.ready.set_exception(why or ConnectionResetError("hung up during the handshake"))
            else:
                control.ready.cancel()
        if isinstance(why, PeerFault) and why.who:
            self._tell(self._on_fault, why)  # said inside sealed frames: it was this peer, nobody on the path
        link = self._links.get(control.peer) if hasattr(control, "peer") else None
        if link is None or not link.holds(control):
            return
        in_use = link.control is control
        link.let_go(control)
        if in_use:
            log.debug("lost %s: %r", short(link.peer), why)
            if link.up:
                link.down_owed = self._loop.call_later(TELL_S, self._settle, link, False)
            self._redial(link)
        if link.control is None and link.redialler is None:
            self._settle(link, refused=False)

    # ---- one connection per pair ----

    def _prefers(self, new: ControlChannel, old: ControlChannel) -> bool:
        """Both ends must come to the same answer without asking each other."""
        if new.dialled == old.dialled:
            return True  # who dials again knows that the first connection is dead
        if self._loop.time() - old.since > self._settings.handshake_s:
            return True  # no simultaneous dial lasts so long: the other end has lost the old one
        return new.dialled == (self._me < new.peer)  # the connection that the smaller id dialled stays

    def _adopt(self, link: PeerLink, new: ControlChannel) -> None:
        old, link.control = link.control, new
        new.since = self._loop.time()
        new.settled()
        if old is not None:
            old.move_messages(new)
            self._retire(link, old)
        self._settle(link, refused=False)
        if not link.up:
            link.up = True
            self._tell(self._on_event, LinkUp(link.peer))
        link.nudge.set()
        if link.bulk_wanted:
            self._open_bulk(link)

    def _retire(self, link: PeerLink, control: ControlChannel) -> None:
        if len(link.retiring) >= RETIRING_MAX:
            next(iter(link.retiring)).wire.abort()
        link.retiring[control] = None
        control.retired = True
        control.say(ControlFrame.RETIRE)
        control.settled(RETIRE_S)
        if control.left:
            control.finish()

    def _left(self, control: ControlChannel) -> None:
        control.left = True
        if control.retired:
            control.finish()  # both have said their last word: nothing is under way any more

    def _settle(self, link: PeerLink, refused: bool) -> None:
        """Tell a LinkDown that is owed; let go of what only a live link needs."""
        if link.down_owed:
            self._down(link, refused)
        if link.control is None:
            link.bulk_wanted = 0
            link.bulk.hang_up()
            if not link.endpoints and not link.retiring:
                self._traffic_before = _sum(self._traffic_before, link.traffic())
                self._links.pop(link.peer, None)

    def _down(self, link: PeerLink, refused: bool) -> None:
        if link.down_owed:
            link.down_owed.cancel()
            link.down_owed = None
        if link.up:
            link.up = False
            self._tell(self._on_event, LinkDown(link.peer, refused))

    # ---- bulk connections ----

    def _join_bulk(self, control: ControlChannel) -> None:
        link = self._links.get(control.peer)
        if link is None or link.control is None or len(link.bulk.channels) >= self._bulk_connections_max():
            raise ConnectionAbortedError("a bulk connection without a link, perhaps no longer")
        sealer, opener, rest = control.session.boxes()
        channel = BulkChannel(control.wire, link.bulk, self._cap, sealer, opener)
        control.hand_over(channel)
        link.bulk.attach(channel)
        channel.feed(rest)
        if not control.ready.done():
            control.ready.set_result(control.peer)

    def _open_bulk(self, link: PeerLink) -> None:
        """The side that dialled the control connection dials these too: it knows that it can."""
        if link.control is None:
            return
        if not link.control.dialled:
            if len(link.bulk.channels) < link.bulk_wanted:
                link.control.say(ControlFrame.MORE_BULK, bytes((link.bulk_wanted,)))
        elif link.bulk_opener is None and not self._closing:
            link.bulk_opener = self._spawn(self._open_bulk_until_enough(link))

    async def _open_bulk_until_enough(self, link: PeerLink) -> None:
        pause_s = REDIAL_FIRST_S
        try:
            while (
                (control := link.control)
                and control.endpoint
                and len(link.bulk.channels) < min(link.bulk_wanted, self._bulk_connections_max())
            ):
                try:
                    sock = await connect(control.endpoint, self._settings.congestion, self._may_dial)
                    await self._introduce(sock, control.endpoint, Lane.BULK, link.peer)
                    pause_s = REDIAL_FIRST_S
                except (OSError, PeerFault) as why:
                    log.debug("bulk connection to %s: %r", short(link.peer), why)
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311  # spreads retries
                    pause_s = min(2 * pause_s, REDIAL_LAST_S)
        finally:
            link.bulk_opener = None

    def _bulk_detached(self, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link and link.control and link.control.dialled and link.bulk_wanted:
            self._open_bulk(link)  # kept warm: a cold connection spends a short round on slow start

    def _bulk_connections(self, control: ControlChannel) -> int:
        wire = control.wire
        if wire.congestion in ("", self._settings.congestion) or wire.local:
            return self._settings.bulk_connections
        far = (wire.rtt_s or 0.0) > self._settings.lossy_rtt_s
        return self._settings.bulk_connections_lossy if far else self._settings.bulk_connections

    def _bulk_connections_max(self) -> int:
        return max(self._settings.bulk_connections, self._settings.bulk_connections_lossy)

    # ---- inside ----

    def _link(self, peer: PeerId) -> PeerLink:
        if peer not in self._links:
            bulk = BulkLane(
                BulkLimits(self._settings.bulk_queue_bytes, self._settings.receive_bytes),
                self._intake,
                self._allocate,
                deliver=lambda message, payload, followed: self._tell(
                    self._on_message, peer, message, payload, followed
                ),
                detached=lambda: self._bulk_detached(peer),
                follow=self._follow,
                boxes=self._boxes,
            )
            self._links[peer] = PeerLink(peer, bulk)
        return self._links[peer]

    def _tell(self, listener: Callable[..., None], *what: object) -> None:
        """Our own driver's mistakes must not be taken for the remote's."""
        if self._closing:
            return
        try:
            listener(*what)
        except Exception as mistake:
            self._loop.call_exception_handler({"message": "a listener of links failed", "exception": mistake})

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.memory.sweep()
            self._boxes.sweep()
            for link in self._links.values():
                link.bulk.sweep()


def _sum(*traffics: tuple[int, int]) -> tuple[int, int]:
    return sum(sent for sent, _ in traffics), sum(received for _, received in traffics)


def _bytes_view(data: Buffer) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # cast refuses empty shapes


def _is_member_here(link: PeerLink) -> bool:
    """Connected from this computer, and a peer that was to be contacted: strangers may come from here, too."""
    return bool(link.endpoints) and link.control is not None and link.control.wire.inside
