"""Connection manager: dials, redials, accepts and authenticates; keeps one link per peer.

A link is a control connection with bulk connections beside it (bulk_channel.py).

Invariants:
- `LinkUp` and `LinkDown` alternate, except for a second `LinkDown` with `refused=True`.
- The death of a peer's process on a reachable host is reported with `refused=True` after one redial, also if a
  `LinkDown` without it was reported before: the host may have been unreachable then.
- A stranger's bytes cost its own connection and nothing else.
- After `close`, no task, connection or callback of the manager is left.
- Network failures raise nothing: a send may be lost, and is counted then.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Hashable

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId, one_line, short_id
from atoll.base.limits import BULK_FRAME_MAX, CONTROL_FRAME_MAX, PEERS_MAX
from atoll.base.machine import Lane, LinkDown, LinkUp
from atoll.runtime.network.addresses import Ambiguity, ambiguity_of, is_everywhere
from atoll.runtime.network.buffer_pool import BufferPool
from atoll.runtime.network.bulk_channel import (
    BulkChannel,
    BulkLane,
    BulkLimits,
    PayloadHasher,
    ReceiveBudget,
    RecordBuffers,
)
from atoll.runtime.network.control_channel import ControlChannel, ControlFrameKind
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
from atoll.runtime.network.link_settings import LinkCallbacks, LinkSettings
from atoll.runtime.network.peer_link import LinkStats, PeerLink
from atoll.runtime.network.secure_channel import SessionFactory
from atoll.runtime.network.transport import Connection, Listener, TransportOptions, Transports
from atoll.runtime.network.transports import TRANSPORTS
from atoll.runtime.network.unlinked import UnlinkedConnections
from atoll.runtime.network.upload_limiter import UploadLimiter
from atoll.wire.libp2p.multiaddr import DialAddress, text_of

log = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview

# A process that dies closes its listener last, and a connection may break right after its handshake: dial again.
RESETS_MAX = 3
REDIAL_FIRST_S, REDIAL_LAST_S = 0.1, 15.0
LINK_DOWN_DELAY_S = 1.0  # a redial that takes longer no longer delays the LinkDown
RETIRING_MAX = 4  # retiring connections of one peer
RETIRE_S = 10.0  # both ends agree within a round trip which connection stays; later, one of them is silent
SWEEP_S = 10.0
CLOSE_S = 1.0  # for the last frames to leave
REASON_MAX = 200  # characters shown of a stranger's reason


class ConnectionManager:
    """All links of one peer. Made and used inside one running event loop."""

    def __init__(
        self,
        me: PeerId,
        security: SessionFactory,
        callbacks: LinkCallbacks,
        *,
        allocate: Callable[[int], memoryview] | None = None,
        follow: Callable[[], PayloadHasher | None] = lambda: None,
        settings: LinkSettings | None = None,
        transports: Transports = TRANSPORTS,
    ) -> None:
        """`allocate` provides memory for payloads, and `follow` a hasher that sees each payload as it arrives."""
        self._me, self._security, self._callbacks = me, security, callbacks
        self._settings = settings or LinkSettings()
        self._loop = asyncio.get_running_loop()
        self._links: dict[PeerId, PeerLink] = {}
        self._unlinked = UnlinkedConnections()
        self.memory = BufferPool()
        self._allocate, self._follow = allocate or self.memory, follow
        self._limiter = UploadLimiter(self._settings.upload_bytes_s)
        options = TransportOptions(self._settings.congestion, self._limiter.count)
        self._transports = {name: make(options) for name, make in transports.items()}
        self._boxes = RecordBuffers()
        self._receive_budget = ReceiveBudget(self._settings.receive_total_bytes)
        self._listeners: list[Listener] = []
        self._dialable_kinds = set[Ambiguity]({""})  # kinds of addresses that other peers may make this one dial
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._past_traffic = (0, 0)  # of links that were removed
        self._closing = False
        self._spawn(self._sweep())

    # ---- what the driver uses ----

    async def listen(self, addresses: list[str]) -> list[str]:
        """Accept connections at these addresses; returns them as bound. Raises UsageError or NetworkError."""
        bound: list[str] = []
        for address in addresses:
            where = endpoint_of(address, self._transports)
            try:
                listener = await self._transports[where.transport].listen(where, self._accept)
            except OSError as why:
                raise cannot_listen(address, why) from why
            if not is_everywhere(own := listener.endpoint.host):
                self._dialable_kinds.add(ambiguity_of(own))
            self._listeners.append(listener)
            bound.append(text_of(where.with_port(listener.endpoint.port) if where.host else listener.endpoint))
        self._security.listening(bound)
        return bound

    def contact(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Keep a connection to this peer from now on. Addresses of unknown transports are skipped.

        Loopback and link-local addresses and places on a computer mean another one at every member: a member could
        use them to make others connect to their own services. They are dialed only in these cases:
        - This peer listens on such an address, too. A listener on every interface does not count.
        - `dial` reached one.
        - Loopback only: a peer on this computer is connected and was named by `contact`.
        """
        if peer == self._me or self._closing:
            return
        link = self._link(peer)
        known = link.endpoints
        link.endpoints = endpoints_of(peer, addresses, frozenset(self._transports))
        if link.endpoints != known:
            link.wake_redialer.set()
        self._redial(link)

    async def dial(self, address: str, expected_peer: PeerId | None = None) -> PeerId:
        """Connect to the peer at this address and keep the link. Raises AtollError."""
        where = endpoint_of(address, self._transports)
        expected = expected_peer or where.peer
        try:
            connection = await self._transports[where.transport].dial(where)
            kind = ambiguity_of(connection.source)
            peer = await self._introduce(connection, where, Lane.CONTROL, expected)
        except (OSError, PeerFault) as why:
            raise cannot_dial(address, why) from why
        self._dialable_kinds.add(kind)
        link = self._link(peer)
        link.endpoints = link.endpoints or (where,)
        return peer

    def forget(self, peer: PeerId) -> None:
        """Close the link to this peer and stop redialing. The peer may still dial, if it is allowed to."""
        link = self._links.get(peer)
        if link is None:
            return
        link.endpoints = ()
        if link.redialer:
            link.redialer.cancel()
        if link.control:
            link.control.finish()
            link.retiring[link.control], link.control = None, None
        self._report_down(link, refused=False)
        self._settle(link, refused=False)

    def suspect(self, peer: PeerId) -> None:
        """Abort this peer's connections, since its heartbeat is overdue, and redial."""
        link = self._links.get(peer)
        if link and link.control:
            for channel in link.bulk.channels:
                channel.connection.abort()
            link.control.connection.abort(TimeoutError("no heartbeat"))

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

        A newer message of the same `place` replaces one that still waits there. A waiting message is dropped once
        its round is long over (`base.machine.Message`, `rounds_over`).
        """
        link = self._links.get(peer)
        if link is None or link.log is None or self._closing:
            return False
        view = payload if payload is None or isinstance(payload, FileSlice) else _bytes_view(payload)
        if len(message) > CONTROL_FRAME_MAX or (view is not None and len(view) > BULK_FRAME_MAX):
            link.refused_sends += 1
            return False
        if lane is Lane.CONTROL and view is None:
            link.push(message)
        elif link.control is None:
            return False
        else:
            link.bulk.send(message, view, place, of_round)
            if not link.bulk_wanted:
                link.bulk_wanted = self._choose_bulk_connections(link.control.connection)
                self._open_bulk(link)
        return True

    def drop_rounds(self, before: int) -> None:
        """Drop waiting messages of earlier rounds: they help no peer any more."""
        for link in self._links.values():
            link.bulk.drop_rounds(before)

    def stats(self) -> dict[PeerId, LinkStats]:
        return {peer: link.stats() for peer, link in self._links.items()}

    def traffic(self) -> tuple[int, int]:
        """(sent, received) bytes on the connections of all links so far."""
        return _add_traffic(self._past_traffic, *(link.traffic() for link in self._links.values()))

    def upload_progress(self) -> dict[PeerId, tuple[int, bool]]:
        """Per peer: bulk bytes acknowledged on current connections, and whether some still wait to leave.

        Without an upload cap, peers on this computer are left out: the load of processors would be measured, and
        parts would be sized by it.
        """
        found: dict[PeerId, tuple[int, bool]] = {}
        for peer, link in self._links.items():
            connections = [channel.connection for channel in link.bulk.channels]
            if self._settings.upload_bytes_s or not any(each.is_loopback for each in connections):
                found[peer] = sum(each.acked_bytes for each in connections), link.bulk.has_unsent
        return found

    async def close(self) -> None:
        """Send the last frames, then end everything. No event is reported any more."""
        self._closing = True
        for link in self._links.values():
            if link.down_timer:
                link.down_timer.cancel()
        for listener in self._listeners:
            listener.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self._links.values():
            if link.control:
                link.control.finish()
            link.bulk.hang_up()
        self._unlinked.abort_all()
        if self._connections:
            await asyncio.wait([each.closed for each in self._connections], timeout=CLOSE_S)
        for connection in list(self._connections):
            connection.abort()
        if self._connections:
            await asyncio.wait([each.closed for each in self._connections])
        self._limiter.close()
        for listener in self._listeners:
            await listener.wait_closed()
        self._links.clear()

    # ---- dialing ----

    def _redial(self, link: PeerLink) -> None:
        if link.endpoints and link.control is None and link.redialer is None and not self._closing:
            link.redialer = self._spawn(self._redial_until_up(link))

    async def _redial_until_up(self, link: PeerLink) -> None:
        async def introduce(connection: Connection, where: DialAddress) -> None:
            await self._introduce(connection, where, Lane.CONTROL, link.peer)

        pause_s, resets = REDIAL_FIRST_S, 0
        try:
            while link.endpoints and link.control is None:
                link.wake_redialer.clear()
                outcome = await dial_any(link.endpoints, self._transports, introduce, self._may_dial)
                if link.control is not None:
                    return  # by this attempt, or because the remote dialed meanwhile
                resets += 1
                if outcome in (DialResult.RESET, DialResult.UP) and resets < RESETS_MAX:
                    await asyncio.sleep(0.01 * resets)
                    continue
                self._settle(link, refused=outcome is DialResult.REFUSED)
                try:
                    async with asyncio.timeout(pause_s * random.uniform(0.5, 1.5)):  # noqa: S311  # spreads retries
                        await link.wake_redialer.wait()
                    pause_s = REDIAL_FIRST_S  # the addresses are new
                except TimeoutError:
                    pause_s = min(2 * pause_s, REDIAL_LAST_S)
        finally:
            link.redialer = None

    def _may_dial(self, host: str) -> bool:
        kind = ambiguity_of(host)
        if kind == "loopback" and any(link.is_member_on_this_computer() for link in self._links.values()):
            self._dialable_kinds.add(kind)
        return kind in self._dialable_kinds

    async def _introduce(
        self, connection: Connection, where: DialAddress, lane: Lane, expected: PeerId | None
    ) -> PeerId:
        """Handshake on a dialed connection. Raises OSError or PeerFault."""
        self._track(connection)
        control = ControlChannel(
            self,
            lambda: self._security.dialing(lane, expected),
            deadline_s=self._settings.handshake_s,
            queue_bytes=self._settings.control_queue_bytes,
            endpoint=where,
            expected=expected,
        )
        try:
            await connection.start(control)
            return await control.ready
        except BaseException:
            control.ready.cancel()
            connection.abort()
            raise

    # ---- accepting ----

    def _accept(self, connection: Connection) -> ControlChannel:
        self._track(connection)
        return ControlChannel(
            self,
            self._security.accepting,
            deadline_s=self._settings.handshake_s,
            queue_bytes=self._settings.control_queue_bytes,
        )

    def _track(self, connection: Connection) -> None:
        self._connections.add(connection)
        connection.closed.add_done_callback(lambda _: self._connections.discard(connection))

    def admit_connection(self, control: ControlChannel) -> None:
        if self._closing:
            raise ConnectionAbortedError("this peer is closing")
        self._unlinked.add_stranger(control)

    # ---- what control channels report ----

    def admit_guest(self, control: ControlChannel) -> None:
        self._unlinked.end_handshake(control)
        if not self._callbacks.allow(control.peer):
            raise ConnectionAbortedError("this guest is not admitted")
        self._unlinked.add_guest(control)
        control.set_deadline(None)

    def on_opened(self, control: ControlChannel) -> None:
        """The handshake is over and `control.peer` is known."""
        self._unlinked.end_handshake(control)
        peer = control.peer
        if peer == self._me:
            raise PeerFault("", "the remote is this peer itself")
        if control.expected not in (None, peer):
            raise PeerFault("", f"{peer} answered where {control.expected} was expected")
        if control.lane is Lane.BULK:
            self._join_bulk(control)
        elif not control.is_dialed:
            self._admit_or_refuse(control)
        # else: the listener decides

    def _admit_or_refuse(self, control: ControlChannel) -> None:
        if not self._callbacks.allow(control.peer):
            control.refuse(b"this peer does not admit you")
        elif control.peer not in self._links and len(self._links) >= PEERS_MAX:
            control.refuse(b"this peer has too many links")
        else:
            link = self._link(control.peer)
            if link.control is None or self._prefers(control, link.control):
                control.welcome(link.log)
                self._adopt(link, control)
            else:
                self._retire(link, control)

    def on_frame(self, control: ControlChannel, kind: ControlFrameKind, body: bytes) -> None:
        link = self._links.get(control.peer)
        adopted = link is not None and link.owns(control)
        match kind:
            case ControlFrameKind.WELCOME if control.is_dialed and not adopted:
                link = self._link(control.peer)
                if link.control is None or self._prefers(control, link.control):
                    control.receive_welcome(body, link.log)
                    self._adopt(link, control)
                else:
                    self._retire(link, control)
                control.finish_dial()
            case ControlFrameKind.REFUSED if control.is_dialed and not adopted:
                raise DialRefused(one_line(body.decode(errors="replace"), REASON_MAX))
            case ControlFrameKind.RETIRE if control.is_dialed and not adopted:
                if link is None or link.control is None:
                    raise ConnectionResetError("the remote prefers a connection that does not exist here")
                self._retire(link, control)
                self._receive_retire(control)
                control.finish_dial()
            case ControlFrameKind.RETIRE if adopted:
                self._receive_retire(control)
            case ControlFrameKind.MESSAGE if adopted:
                if control.accept_message(body):
                    self._notify(self._callbacks.on_message, control.peer, body, None, None)
            case ControlFrameKind.ACK if link is not None and adopted:
                link.receive_count(control, body)
            case ControlFrameKind.MORE_BULK if adopted and control.is_dialed and len(body) == 1 and body[0] > 0:
                assert link is not None
                link.bulk_wanted = min(body[0], self._bulk_connections_max())
                self._open_bulk(link)
            case _:
                raise PeerFault(control.peer, f"sent {kind.name} out of turn")

    def on_control_ended(self, control: ControlChannel, why: Exception | None) -> None:
        self._unlinked.discard(control)
        if not control.ready.done():
            if control.is_dialed:
                control.ready.set_exception(why or ConnectionResetError("hung up during the handshake"))
            else:
                control.ready.cancel()
        if isinstance(why, PeerFault) and why.who:
            # the fault was inside sealed frames: it is this peer's, not that of anything on the path
            self._notify(self._callbacks.on_fault, why)
        link = self._links.get(control.peer) if hasattr(control, "peer") else None
        if link is None or not link.owns(control):
            return
        in_use = link.control is control
        link.remove_control(control)
        if in_use:
            log.debug("lost %s: %r", short_id(link.peer), why)
            if link.up:
                link.down_timer = self._loop.call_later(LINK_DOWN_DELAY_S, self._settle, link, False)
            self._redial(link)
        if link.control is None and link.redialer is None:
            self._settle(link, refused=False)

    # ---- one connection per pair ----

    def _prefers(self, new: ControlChannel, old: ControlChannel) -> bool:
        """True if `new` replaces `old`. Both ends reach the same decision without a message."""
        if new.is_dialed == old.is_dialed:
            return True  # a dialer that dials again knows that the first connection is dead
        if self._loop.time() - old.linked_at > self._settings.handshake_s:
            return True  # no simultaneous dial lasts that long: the remote has lost the old connection
        return new.is_dialed == (self._me < new.peer)  # the connection that the smaller id dialed stays

    def _adopt(self, link: PeerLink, new: ControlChannel) -> None:
        old = link.use_control(new)
        new.session.keep_tickets()
        new.linked_at = self._loop.time()
        new.set_deadline(None)
        if old is not None:
            self._retire(link, old)
        self._settle(link, refused=False)
        if not link.up:
            link.up, link.may_be_refused = True, False
            self._notify(self._callbacks.on_event, LinkUp(link.peer))
        link.wake_redialer.set()
        if link.bulk_wanted:
            self._open_bulk(link)

    def _retire(self, link: PeerLink, control: ControlChannel) -> None:
        if len(link.retiring) >= RETIRING_MAX:
            next(iter(link.retiring)).connection.abort()
        link.retiring[control] = None
        control.sent_retire = True
        control.send_frame(ControlFrameKind.RETIRE)
        control.set_deadline(RETIRE_S)
        if control.received_retire:
            control.finish()

    def _receive_retire(self, control: ControlChannel) -> None:
        control.received_retire = True
        if control.sent_retire:
            control.finish()  # both ends sent their last frame: nothing is in flight any more

    def _settle(self, link: PeerLink, refused: bool) -> None:
        """Report a due LinkDown, and release what only a live link needs."""
        if link.down_timer or (refused and link.may_be_refused):
            self._report_down(link, refused)
        if link.control is None:
            link.end_session()
            self._security.forget(link.peer)
            link.bulk_wanted = 0
            link.bulk.hang_up()
            if not link.endpoints and not link.retiring:
                self._past_traffic = _add_traffic(self._past_traffic, link.traffic())
                self._links.pop(link.peer, None)

    def _report_down(self, link: PeerLink, refused: bool) -> None:
        if link.down_timer:
            link.down_timer.cancel()
            link.down_timer = None
        if link.up or (refused and link.may_be_refused):
            link.up, link.may_be_refused = False, not refused
            self._notify(self._callbacks.on_event, LinkDown(link.peer, refused))

    # ---- bulk connections ----

    def _join_bulk(self, control: ControlChannel) -> None:
        link = self._links.get(control.peer)
        if link is None or link.control is None or len(link.bulk.channels) >= self._bulk_connections_max():
            raise ConnectionAbortedError("a bulk connection without a link")
        sealer, opener, rest = control.session.boxes()
        channel = BulkChannel(control.connection, link.bulk, self._limiter, sealer, opener)
        control.hand_over(channel)
        link.bulk.attach(channel)
        channel.feed(rest)
        control.finish_dial()

    def _open_bulk(self, link: PeerLink) -> None:
        """Open missing bulk connections. The dialer of the control connection dials them: it knows that it can."""
        if link.control is None:
            return
        if not link.control.is_dialed:
            if len(link.bulk.channels) < link.bulk_wanted:
                link.control.send_frame(ControlFrameKind.MORE_BULK, bytes((link.bulk_wanted,)))
        elif link.bulk_opener is None and not self._closing:
            link.bulk_opener = self._spawn(self._dial_bulk(link))

    async def _dial_bulk(self, link: PeerLink) -> None:
        pause_s = REDIAL_FIRST_S
        try:
            while (
                (control := link.control)
                and (where := control.endpoint)
                and len(link.bulk.channels) < min(link.bulk_wanted, self._bulk_connections_max())
            ):
                try:
                    connection = await self._transports[where.transport].dial(where, self._may_dial)
                    await self._introduce(connection, where, Lane.BULK, link.peer)
                    pause_s = REDIAL_FIRST_S
                except (OSError, PeerFault) as why:
                    log.debug("bulk connection to %s: %r", short_id(link.peer), why)
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311  # spreads retries
                    pause_s = min(2 * pause_s, REDIAL_LAST_S)
        finally:
            link.bulk_opener = None

    def _on_bulk_detached(self, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link and link.control and link.control.is_dialed and link.bulk_wanted:
            self._open_bulk(link)  # kept open: a new connection spends a short round on slow start

    def _choose_bulk_connections(self, control: Connection) -> int:
        if control.congestion in ("", self._settings.congestion) or control.is_loopback:
            return self._settings.bulk_connections
        is_far = (control.rtt_s or 0.0) > self._settings.lossy_rtt_s
        return self._settings.bulk_connections_lossy if is_far else self._settings.bulk_connections

    def _bulk_connections_max(self) -> int:
        return max(self._settings.bulk_connections, self._settings.bulk_connections_lossy)

    # ---- helpers ----

    def _link(self, peer: PeerId) -> PeerLink:
        if peer not in self._links:
            bulk = BulkLane(
                BulkLimits(self._settings.bulk_queue_bytes, self._settings.receive_bytes),
                self._receive_budget,
                self._allocate,
                deliver=lambda message, payload, digest: self._notify(
                    self._callbacks.on_message, peer, message, payload, digest
                ),
                on_detached=lambda: self._on_bulk_detached(peer),
                follow=self._follow,
                boxes=self._boxes,
            )
            self._links[peer] = PeerLink(peer, bulk)
        return self._links[peer]

    def _notify(self, callback: Callable[..., None], *what: object) -> None:
        """Call back; an exception there is the owner's, never the remote's."""
        if self._closing:
            return
        try:
            callback(*what)
        except Exception as mistake:
            self._loop.call_exception_handler({"message": "a callback of links failed", "exception": mistake})

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


def _add_traffic(*traffics: tuple[int, int]) -> tuple[int, int]:
    return sum(sent for sent, _ in traffics), sum(received for _, received in traffics)


def _bytes_view(data: Buffer) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # cast refuses empty shapes
