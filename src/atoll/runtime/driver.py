"""Driver: runs one peer in the real world by carrying out the effects of its machine, in order.

Invariants:
- A `Persist` is on disk before any later `Send` leaves.
- Every `RunTask` gets exactly one reply.
- Arriving bytes are decoded only here. They are hashed here or, if chunks of blobs, in storage/chunk_disk_queue.py.
- Nothing runs on after `stop`.
Not responsible for: decisions of the protocol, which the machine makes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from atoll.base.errors import AtollError, NetworkError, PeerFault, RefusedError, RunFailedError
from atoll.base.ids import Digest, PeerId, Seconds, short_id
from atoll.base.machine import (
    Connect,
    ContactsPolicy,
    Disconnect,
    Effect,
    Emit,
    Event,
    Fact,
    Message,
    Payload,
    Persist,
    Received,
    ResumedFromSleep,
    RunTask,
    Send,
    SetTimer,
    Start,
    TaskDone,
    TaskFailed,
    TimerFired,
    contact_all,
    expand_broadcasts,
)
from atoll.capabilities import CAPABILITIES
from atoll.crypto.digest import Buffer
from atoll.crypto.identity import (
    Identity,
    PublicIdentity,
    SessionSigner,
    SessionVerifier,
    public_bytes,
    public_from_bytes,
    signature_bytes,
)
from atoll.crypto.signer import IdentitySigner
from atoll.peer import operator_commands
from atoll.peer.bandwidth import BandwidthEstimator
from atoll.peer.events import MembershipChanged, RoundAttemptFailed, RoundClosed
from atoll.peer.governance.orders import RollbackGoal
from atoll.peer.membership.admission import DesiredRole
from atoll.peer.peer import Peer
from atoll.protocol.membership.failure_detector import PeerDeparted, PeerSuspected
from atoll.protocol.transfer.tasks import ReadChunk, StoreChunk
from atoll.runtime.clock import SystemClock
from atoll.runtime.event_log import EventLog, RunStatus, fact_to_entry, plain
from atoll.runtime.network.addresses import advertised
from atoll.runtime.network.bulk_channel import PayloadHasher
from atoll.runtime.network.connection_manager import ConnectionManager
from atoll.runtime.network.discovery import Discovery, FoundAddress, StaticAddressDiscovery
from atoll.runtime.network.libp2p import Libp2pSecurity
from atoll.runtime.network.link_settings import LinkCallbacks, LinkSettings
from atoll.runtime.reachability import why_paused
from atoll.runtime.session_keys import LazySessionKey, session_of
from atoll.runtime.storage.atomic_files import gone
from atoll.runtime.storage.chunk_disk_queue import ChunkDiskQueue
from atoll.runtime.storage.store import PeerStore
from atoll.wire.codec import decode_message, encode
from atoll.wire.messages.history import ChunkResponse
from atoll.wire.messages.statements import ChangeableSettings, TicketInvite
from atoll.wire.messages.vertex import Vertex
from atoll.wire.ticket import parse

log = logging.getLogger(__name__)

PULSE_S = 0.5  # interval of the check for a suspend
SLEPT_S = 3.0  # delay of a pulse that means a suspended computer or a stopped process
DIAL_AGAIN_S = 2.0


class PersistError(Exception):
    """The disk refused a write that must precede the next message."""

    def __init__(self, why: RunFailedError) -> None:
        self.why = why
        super().__init__(str(why))


class TaskWorker(Protocol):
    """Does the slow work of a peer, off its event loop."""

    async def run(self, work: Any) -> Any:
        """The result of a task. AtollError, PeerFault and OSError become `TaskFailed`."""
        ...

    def digest_of(self, message: Message, payload: Buffer) -> Digest:
        """Digest by which arriving bytes are named."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class PeerStartParameters:
    """Identity, run and store of one member."""

    store: PeerStore
    identity: Identity
    run: Digest
    wish: DesiredRole
    genesis: Vertex | None = None
    bootstrap: tuple[tuple[str, PeerId | None], ...] = ()


class Driver:
    """One peer of one run on this computer; `island` does its slow work."""

    hash_on_loop_bytes = 4 * 2**20  # larger payloads are hashed on a thread: 4 MiB take 1 ms

    def __init__(
        self, me: PeerStartParameters, island: TaskWorker, *, on_fact: Callable[[Fact], None] = lambda fact: None
    ) -> None:
        self.store, self.identity = me.store, me.identity
        self.folder, self.me = me.store.folder, me.identity.peer
        self.run_id, self.wish, self.bootstrap = me.run, me.wish, me.bootstrap
        self.island = island
        known = tuple(p for _, p in me.bootstrap if p is not None)
        vouch = IdentitySigner(public_bytes(me.identity.public), self._sign_for_long)
        signer = LazySessionKey(self.me, self._session, lambda: self.clock.now())
        self.machine = Peer(
            me.run, signer, SessionVerifier(), me.wish, me.genesis, known, vouch, capabilities=CAPABILITIES
        )
        self.clock = SystemClock()
        self.record = EventLog(self.folder / "facts.jsonl")
        self.progress = RunStatus.of(self.record.tail(), self.me)
        # called with every line of the event log
        self.on_entry: Callable[[dict[str, Any]], None] = lambda entry: None
        # where names are quick: hasher of arriving payloads, and the name made from its digest, or None
        self.follow: Callable[[], PayloadHasher | None] = lambda: None
        self.named: Callable[[Message, bytes], Digest | None] = lambda message, followed: None
        self.on_bug: Callable[[BaseException], None] = lambda broken: None  # called on a defect of Atoll itself
        # called once the disk refuses writes, or has lost what no member can replace
        self.on_persist_failed: Callable[[RunFailedError], None] = lambda refused: None
        self.listeners: list[Callable[[Fact], None]] = [self._record, self._wake, self._react_to_fact, on_fact]
        # `handlers` takes further libp2p protocols
        self.security = Libp2pSecurity(self.identity, self.run_id, known=self._identity_of)
        self.discovery: Discovery = StaticAddressDiscovery(lambda: self.bootstrap)
        self.contacts: ContactsPolicy = contact_all
        self._bandwidth = BandwidthEstimator()
        self._upload_bytes_s = 0  # upload cap; 0: none
        self.stopped = asyncio.Event()
        self._round_closed = asyncio.Event()
        self._happened = asyncio.Event()  # set after every event
        self.bound: list[str] = []
        self.addresses: tuple[str, ...] = ()
        self._bytes_before = (self.progress.bytes_out, self.progress.bytes_in)  # traffic before a restart
        self._timers: dict[str, tuple[Seconds, asyncio.TimerHandle]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unkept: list[tuple[str, bytes | None]] = []
        # last message and its encoding: a broadcast is encoded once
        self._last: tuple[Message, bytes] | None = None
        self._refused: set[tuple[int, str]] = set()  # (round, reason) of refused work that was reported
        self._closing = False
        self._silent = False  # a durable write failed: nothing is sent any more

    # ---- life ----------------------------------------------------------------------------------------------

    async def listen(self, addresses: list[str], announce: tuple[str, ...] = (), upload_bytes_s: int = 0) -> None:
        """Listen; must precede `start`. The peer advertises `announce`, or else the bound addresses."""
        settings, self._upload_bytes_s = LinkSettings(upload_bytes_s=upload_bytes_s), upload_bytes_s
        self.links = ConnectionManager(
            self.me,
            self.security,
            LinkCallbacks(self.handle, self._on_message, self._on_fault),
            follow=self.follow,
            settings=settings,
        )
        self._chunks = ChunkDiskQueue(self.store, self.links.memory)
        self.bound = await self.links.listen(addresses)
        self.addresses = announce or advertised(self.bound)
        self.machine.wish = replace(self.wish, addresses=self.addresses)

    def start(self) -> None:
        """Start the machine with its persisted values; from now on events drive it."""
        self._pulse_at = self.clock.now()
        self.handle(Start(self.store.startup_values()))
        self._spawn(self._find_peers())
        self._spawn(self._pulse())

    async def stop(self, why: str = "stopped by its owner", farewell: bool = True) -> None:
        """Send a farewell and the last messages, then end every task and the trainer."""
        if self._closing:
            return
        if farewell:
            self.run_step(lambda: operator_commands.farewell(self.machine, why, self.clock.now()))
            await asyncio.sleep(0)  # the messages are queued; `links.close` sends them
        self._closing = True
        for _, handle in self._timers.values():
            handle.cancel()
        await self.links.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.island.close()
        self._chunks.close()
        self.record.close()
        self.store.close()
        self.stopped.set()

    async def leave(self, why: str, patience_s: Seconds) -> bool:
        """Send a farewell and stay while the others need this vote to agree on it. False after `patience_s`."""
        self.run_step(lambda: operator_commands.farewell(self.machine, why, self.clock.now()))
        self.abandon_work()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self._needed():
                    self._happened.clear()
                    await self._happened.wait()
        return not self._needed()

    def _needed(self) -> bool:
        """True while reachable voters lack exactly this peer's vote, or none has confirmed the vertex without it.

        Until then, the last messages of this peer may not have arrived.
        """
        history = self.machine.history
        if history is None or self.machine.over:
            return False
        there = operator_commands.turnout(self.machine, self.clock.now())
        if any(m.peer == self.me and m.votes for m in history.head_body.members):
            return there.here == there.needed > 1
        stay, ends = {*there.voters} - {*there.absent, self.me}, self.machine.news.ends
        return bool(stay) and all(ends.get(peer, -2) < history.head for peer in stay)

    # ---- commands of the owner ------------------------------------------------------------------------------

    def invite(self, statement: TicketInvite) -> None:
        """Send an invitation or its revocation to the members; the next vertex holds it."""
        self.run_step(lambda: self.machine.say(statement, self.clock.now()))

    def skip_rounds(self, rounds: int, at_once: bool = False) -> None:
        """Skip the next `rounds` rounds; `at_once` also skips the one under way."""
        self.run_step(lambda: operator_commands.rest(self.machine, rounds, self.clock.now(), at_once))

    def recover(self) -> None:
        """Start a new epoch with the reachable members. Raises RefusedError if there is nothing to recover."""
        try:
            self.run_step(lambda: operator_commands.recover(self.machine, self._sign_for_long, self.clock.now()))
        except ValueError as why:
            raise RefusedError("E-RUN-08", f"there is nothing to recover: {why}", fix="atoll status") from None

    def paused(self) -> str | None:
        """Reason why no agreement is possible now, for people; None if enough voters are here."""
        return None if self.machine.over else why_paused(self, self.may_recover, bool(self._authorities))

    @property
    def may_recover(self) -> bool:
        """True if this peer has the run's recovery identity."""
        return public_bytes(self.identity.public) in self._authorities

    @property
    def _authorities(self) -> tuple[bytes, ...]:
        """Public identities that may order changes of the run."""
        history = self.machine.history
        return history.authority.identities if history is not None else ()

    def go_back(self, goal: RollbackGoal, without: tuple[PeerId, ...] = ()) -> None:
        """Order a rollback to an earlier vertex, without the members in `without`. Raises ValueError."""
        self.run_step(
            lambda: operator_commands.go_back(self.machine, goal, self._sign_for_long, self.clock.now(), without)
        )

    def pause(self, paused: bool) -> None:
        """Order a pause or its end. Raises ValueError."""
        self.run_step(lambda: operator_commands.pause(self.machine, paused, self._sign_for_long, self.clock.now()))

    def change_numbers(self, to: ChangeableSettings) -> None:
        """Order a change of numbers. Raises ValueError."""
        self.run_step(lambda: operator_commands.tune(self.machine, to, self._sign_for_long, self.clock.now()))

    def ticket_text(self) -> str | None:
        """The ticket that this peer made as it founded the run; None once it has expired."""
        text = self.store.startup_values().get("ticket", b"").decode()
        is_own = bool(text) and parse(text).issuer == self.me
        return text if is_own and parse(text).expires_wall_s > self.clock.now() else None

    async def next_round(self, timeout_s: Seconds) -> None:
        """Wait until a round closes or the time is over."""
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._round_closed.wait()
        except TimeoutError:
            return

    def _session(self) -> SessionSigner:
        assert self.machine.genesis is not None  # statements need genesis
        kind = self.machine.settings.round.signing.kind
        try:
            return session_of(self.store, self.identity, self.run_id, kind, self.clock.now())
        except RunFailedError as why:
            raise PersistError(why) from why

    # ---- events in, effects out ----------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        if not self._closing:
            self.run_step(lambda: self.machine.handle(event, self.clock.now()))
            self._happened.set()

    def run_step(self, step: Callable[[], list[Effect]]) -> None:
        """Run one step of the machine and its effects. The first failed durable write ends all output."""
        if self._silent:
            return
        try:
            self._carry_out(step())
        except PersistError as unkept:
            log.warning("the disk refuses writes, so this peer sends nothing any more: %s", unkept.why.what)
            self._silent = True
            self.on_persist_failed(unkept.why)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in expand_broadcasts(effects, self.contacts):
            match effect:
                case Persist(name, blob):
                    self._unkept.append((name, blob))
                case Send():
                    self._flush()
                    self._send(effect)
                case RunTask(job, StoreChunk() | ReadChunk() as work):
                    self._flush()
                    self._chunks.run(work, partial(self._chunk_answered, job))
                case RunTask(job, work):
                    self._flush()
                    self._spawn(self._answer(job, work))
                case SetTimer(name, at):
                    self._set_timer(name, at)
                case Connect(peer, addresses):
                    self.links.contact(peer, addresses)
                case Disconnect(peer):
                    self.links.forget(peer)
                case Emit(fact):
                    for listener in self.listeners:
                        listener(fact)
        self._flush()

    def _flush(self) -> None:
        """Make all persisted values durable in one commit, before the next message leaves."""
        if self._unkept:
            try:
                self.store.keep(self._unkept)
            except RunFailedError as why:
                raise PersistError(why) from why
            self._unkept.clear()

    def _send(self, send: Send) -> None:
        if self._last is None or self._last[0] is not send.message:
            self._last = (send.message, encode(send.message))
        data = self._last[1]
        if send.payload is None:
            self.links.send(send.to, data, send.lane)
        else:
            message = send.message
            self.links.send(
                send.to, data, send.lane, send.payload.data, message.replaces_key, message.expires_with_round
            )

    def _set_timer(self, name: str, at: Seconds | None) -> None:
        old = self._timers.pop(name, None)
        if old is not None:
            old[1].cancel()
        if at is None:
            return
        loop = asyncio.get_running_loop()
        handle = loop.call_at(self.clock.monotonic_at(at), self._fire, name)
        self._timers[name] = (at, handle)

    def _fire(self, name: str) -> None:
        self._timers.pop(name, None)
        self.handle(TimerFired(name))

    async def _answer(self, job: str, work: object) -> None:
        try:
            result = await self.island.run(work)
        except Exception as why:  # without a reply, the machine would wait forever
            result = why
        self._answered(job, result)

    def _chunk_answered(self, job: str, result: object) -> None:
        try:
            self._answered(job, result)
        except Exception as broken:
            log.exception("the result of %s led to an error of this peer", job)
            self.on_bug(broken)

    def _answered(self, job: str, result: object) -> None:
        match result:
            case AtollError(what=what, cause=cause):
                self.handle(TaskFailed(job, f"{what}: {cause}" if cause else what))
                if isinstance(result.__cause__, OSError):  # reported in words by `atomic_files.refused`
                    self._tell_refused(result.__cause__)
            case PeerFault(what=what):
                self.handle(TaskFailed(job, what))
            case OSError():
                self.handle(TaskFailed(job, f"the disk or the system refused: {result}"))
                self._tell_refused(result)
            case Exception():
                log.error("the work for %s failed", job, exc_info=result)
                self.handle(TaskFailed(job, str(result) or type(result).__name__))
            case _:
                self.handle(TaskDone(job, result))

    def _tell_refused(self, why: OSError) -> None:
        """Report refused work once per round and reason; otherwise people would only see attempts fail."""
        told = (self.progress.round, why.strerror or str(why))
        if told not in self._refused:
            self._refused = {told, *(one for one in self._refused if one[0] == told[0])}
            log.warning("the disk or the system refused work: %s", why)
            self._show("WorkRefused", phase=self.progress.phase, round=told[0], why=told[1])

    # ---- the network ---------------------------------------------------------------------------------------

    @property
    def bytes_out(self) -> int:
        """Bytes sent since this peer exists, handshakes and encryption included."""
        return self._bytes_before[0] + self.links.traffic()[0]

    @property
    def bytes_in(self) -> int:
        return self._bytes_before[1] + self.links.traffic()[1]

    def _sign_for_long(self, data: bytes) -> bytes:
        """Sign by this peer's identity, with both keys."""
        return signature_bytes(self.identity.sign(data))

    def _identity_of(self, peer: PeerId) -> PublicIdentity | None:
        """Long-lived keys with which a member joined; no other peer can take its place."""
        public = self.machine.identities.get(peer)
        return public_from_bytes(public) if public is not None else None

    def _on_message(self, sender: PeerId, data: bytes, payload: memoryview | None, followed: bytes | None) -> None:
        try:
            message = decode_message(data, sender)
        except PeerFault as fault:
            self._on_fault(fault)
            self.links.forget(sender)
            return
        if payload is not None and isinstance(message, ChunkResponse):
            self._chunks.receive_chunk(message, payload, partial(self._named, sender, message))
            return
        if payload is not None and followed is not None and (name := self.named(message, followed)) is not None:
            self.handle(Received(sender, message, Payload(name, len(payload), payload)))
            return
        if payload is not None and len(payload) > self.hash_on_loop_bytes:
            self._spawn(self._hash_then_handle(sender, message, payload))
            return
        parcel = None
        if payload is not None:
            parcel = Payload(self.island.digest_of(message, payload), len(payload), payload)
        self.handle(Received(sender, message, parcel))

    async def _hash_then_handle(self, sender: PeerId, message: Message, payload: memoryview) -> None:
        name = await asyncio.to_thread(self.island.digest_of, message, payload)
        self._named(sender, message, Payload(name, len(payload), payload))

    def _named(self, sender: PeerId, message: Message, payload: Payload) -> None:
        """Handle a payload hashed off the loop. It is dropped if its sender is gone, or that would seem alive."""
        if sender in self.machine.linked:
            self.handle(Received(sender, message, payload))

    def _on_fault(self, fault: PeerFault) -> None:
        log.warning("%s broke the protocol: %s", short_id(fault.who), fault.what)

    async def _find_peers(self) -> None:
        """Announce the local peer; dial what discovery finds, until a peer is linked."""
        dialed = set[FoundAddress]()
        try:
            await self.discovery.announce(self.run_id, self.addresses)
        except OSError as why:
            log.warning("cannot announce the addresses of this peer: %s", why)
        while not self._closing and not self.machine.linked:
            try:
                found = await self.discovery.find(self.run_id)
            except OSError as why:
                log.warning("cannot look up the addresses of this run: %s", why)
            else:
                for each in found:
                    if each not in dialed:
                        dialed.add(each)
                        self._spawn(self._dial(each.address, each.peer))
            await asyncio.sleep(DIAL_AGAIN_S)

    async def _dial(self, address: str, peer: PeerId | None) -> None:
        """Dial one address until any peer is linked."""
        while not self._closing and not self.machine.linked:
            try:
                found = await self.links.dial(address, peer)
                if found not in self.machine.bootstrap:  # discovery may not know the peer at an address
                    self.machine.bootstrap += (found,)
                return
            except (NetworkError, RefusedError) as why:  # another program there may give way to the peer
                log.info("cannot reach %s yet: %s", address, why.what)
                self._show("Unreachable", code=why.code, address=address, why=why.what, cause=why.cause)
                await asyncio.sleep(DIAL_AGAIN_S)

    async def _pulse(self) -> None:
        """Detect a suspend or a stop of this process, after which timers are stale."""
        while True:
            await asyncio.sleep(PULSE_S)
            now = self.clock.now()
            late = now - self._pulse_at - PULSE_S
            self._pulse_at = now
            self._measure(now)
            if not (self.folder / "kept.sqlite").exists() and not self._silent:
                self._silent = True  # open files still take writes, but no restart would find them
                self.on_persist_failed(gone(self.folder))
            if late > SLEPT_S:
                for name, (at, _) in list(self._timers.items()):
                    self._set_timer(name, at)  # the loop's clock may have stopped
                self.handle(ResumedFromSleep())

    def _measure(self, now: Seconds) -> None:
        round = self.machine.round
        carried = self._bandwidth.sample(
            now, self.links.upload_progress(), round.plan.round if round is not None else None
        )
        if carried is not None:
            self.handle(carried)

    def uplink_bytes_s(self) -> float | None:
        """Uplink rate by cap and measurement; None if neither is known."""
        return min(filter(None, (self._upload_bytes_s, self.machine.rates.uplink_bytes_s)), default=None)

    def _react_to_fact(self, fact: Fact) -> None:
        """Hook of subclasses for facts of the machine."""

    def abandon_work(self) -> None:
        """Hook of subclasses: this peer leaves, so the rest of its work for the round is useless."""

    # ---- facts ---------------------------------------------------------------------------------------------

    def _wake(self, fact: Fact) -> None:
        """Wake callers that wait for the end of a round, and drop queued messages of earlier rounds."""
        if isinstance(fact, RoundClosed):
            self._round_closed.set()
            self._round_closed = asyncio.Event()
            self.links.drop_rounds(fact.round)

    def _record(self, fact: Fact) -> None:
        entry = fact_to_entry(fact, self.clock.now())
        if entry is None:
            return
        if isinstance(fact, RoundClosed):
            entry |= {"bytes_out": self.bytes_out, "bytes_in": self.bytes_in}
        elif isinstance(fact, RoundAttemptFailed | PeerSuspected | PeerDeparted):
            entry |= {"paused": why} if (why := self.paused()) is not None else {}
            if isinstance(fact, PeerSuspected) and not operator_commands.was_linked(self.machine, fact.peer):
                entry["never_linked"] = True
        elif isinstance(fact, MembershipChanged) and (fact.joined or fact.left):
            history = self.machine.history
            if history is not None and history.head > self.machine.at + 1:
                entry["behind"] = True  # news of a round that this peer still catches up with
        elif isinstance(fact, MembershipChanged):
            standings = [(m["peer"], m["standing"]) for m in self.progress.members]
            if standings == [(m.peer, m.standing) for m in fact.members]:
                return  # only speeds changed, as in every round
        self.record_entry(entry)

    def record_entry(self, entry: dict[str, Any], durable: bool = True) -> None:
        entry = plain(entry)
        if durable:
            self.record.write(entry)
        self.progress.fold(entry)
        self.on_entry(entry)

    def _show(self, fact: str, phase: str = "join", **fields: Any) -> None:
        """Show a fact that is not recorded."""
        self.record_entry({"at": round(self.clock.now(), 3), "fact": fact, "phase": phase} | fields, durable=False)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (broken := task.exception()) is not None:
            log.error("a task of this peer failed", exc_info=broken)
            self.on_bug(broken)
