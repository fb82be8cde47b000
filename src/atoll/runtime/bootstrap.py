"""Bootstrap of a peer: founds, joins or resumes a run, from a folder and options to a listening peer.

Invariants:
- The folder holds everything: a process started in it again is the same peer of the same run.
- Facts in a ticket or in the folder are never requested from the network.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.base.errors import AtollError, NetworkError, RefusedError, RunFailedError, UsageError
from atoll.base.ids import Digest, Seconds, one_line, printable
from atoll.base.limits import CLOCK_ZONE_S
from atoll.base.machine import Fact
from atoll.base.units import bytes_text
from atoll.crypto.digest import digest
from atoll.crypto.identity import Identity, new_vote_key, public_bytes
from atoll.peer.config.node_sections import FeedbackPrecision, StateMemory
from atoll.peer.config.sections import KeepSection
from atoll.peer.membership.admission import DesiredRole
from atoll.peer.round.vertex_body import write_genesis
from atoll.peer.settings import OTHER_RULES_FIX, other_rules
from atoll.policy.participation import GROUP_MARK, group_of, named
from atoll.protocol.history.chain import decode_undamaged, find_missing_vertex, genesis_digest
from atoll.runtime.clock import SystemClock
from atoll.runtime.driver import Driver, PeerStartParameters
from atoll.runtime.embed.attached_trainer import AttachedTrainer
from atoll.runtime.network.addresses import advertised, as_last_time, only_here, with_free_ports
from atoll.runtime.own_data import OwnData
from atoll.runtime.peer_folder import default_name
from atoll.runtime.publishing.state_source import ask_published_first
from atoll.runtime.session_keys import certify, kept_session, remember_session
from atoll.runtime.storage.atomic_files import refused, unusable
from atoll.runtime.storage.ownership import make_private, private_folder
from atoll.runtime.storage.store import PeerStore, damaged
from atoll.runtime.trainer import chosen_device
from atoll.runtime.training_peer import TrainingPeer
from atoll.runtime.training_spec import FoundingBlobs
from atoll.runtime.worker.training_worker import TrainingWorker
from atoll.wire.codec import decode_body, decode_vertex, encode
from atoll.wire.messages.vertex import IssuedTicketRecord, Member, Vertex
from atoll.wire.ticket import Ticket, issue, parse, ticket_id

log = logging.getLogger(__name__)
LOG_LINE_MAX = 2000  # characters of one log message
CLOCK_IS_RIGHT = "ATOLL_CLOCK_IS_RIGHT"  # environment variable: resume although the last round is dated later
STATES_AT_FIRST = 3  # that a member keeps: the one before, the head, the next one
LAST_S = 253402300799.0  # end of the year 9999, the last printable time
PRIVATE_USES = 64  # uses of a founder's ticket, if members trust each other
LOG_MAX_BYTES = 2 * 2**20  # of atoll.log; older lines go to atoll.log.1, which has as many


@dataclass(frozen=True)
class ListenOptions:
    """Network options of a peer. `announce` replaces the bound addresses, for peers behind a router.

    `as_before`: no address was given, so a resumed folder keeps its previous ones.
    """

    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce: tuple[str, ...] = ()
    upload_bytes_s: int = 0  # upload cap; 0: none
    as_before: bool = False


@dataclass(frozen=True)
class TicketTerms:
    uses: int = 0  # 0: the default of the run's trust
    lasts_s: Seconds = 7 * 86400.0


Host = TypeVar("Host", bound=Driver)
Make = Callable[[PeerStartParameters], Host]  # makes a training peer, or one that only reduces


def training_peer_factory(
    threads: int,
    on_fact: Callable[[Fact], None],
    trainer: AttachedTrainer | None = None,
    keep: KeepSection = KeepSection(),  # a frozen value
    device: str = "cpu",
    state_memory: StateMemory = "memory",
    own: OwnData = OwnData(),
    *,
    feedback: FeedbackPrecision = "fp32",
    state_from: str = "",
) -> Callable[[PeerStartParameters], TrainingPeer]:
    """Factory of training peers."""

    def make(me: PeerStartParameters) -> TrainingPeer:
        trains, chosen = me.wish.role != "observer", chosen_device(device)
        if trains and trainer is None:
            log.info('node.device = "%s": the trainer computes on %s', device, chosen)
            if chosen != "cpu":
                me = replace(me, wish=replace(me.wish, unaudited=True))
        island = TrainingWorker(
            me.store,
            threads,
            trains=trains,
            trainer=trainer,
            keep=keep,
            device=chosen,
            state_memory=state_memory,
            feedback=feedback,
        )
        peer = TrainingPeer(me, island, on_fact=on_fact, own=own)
        if state_from:
            ask_published_first(peer, state_from)
        return peer

    return make


def prepare_folder(folder: Path) -> None:
    """Make the folder and send log messages to a file in it. Raises UsageError."""
    path = folder / "atoll.log"
    try:
        private_folder(folder)
        make_private(path)
        logging.raiseExceptions = False  # on a full disk, log lines are lost silently
        layout = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        if not logging.getLogger().handlers:
            file = RotatingFileHandler(path, maxBytes=LOG_MAX_BYTES, backupCount=1)
            file.rotator = _rotate_privately
            file.addFilter(_safe_to_print)
            logging.basicConfig(handlers=[file], level=logging.INFO, format=layout)
    except (OSError, ValueError) as why:  # ValueError: a zero byte in the name
        raise unusable(folder, why) from None


def _rotate_privately(source: str, destination: str) -> None:
    """Rename the full log; the next one is private from its first line on."""
    Path(source).replace(destination)
    make_private(Path(source))


def _safe_to_print(record: logging.LogRecord) -> bool:
    """Make log messages one line and tracebacks printable, since both quote strangers."""
    record.msg, record.args = one_line(record.getMessage(), LOG_LINE_MAX), None
    if record.exc_info:
        record.exc_text = printable(logging.Formatter().formatException(record.exc_info))
    return True


async def found_run(
    folder: Path,
    founded: FoundingBlobs,
    name: str,
    listening: ListenOptions,
    invitation: TicketTerms,
    make: Make[Host],
    durable: bool = True,
) -> tuple[Host, Ticket]:
    """Found a run. Returns its first peer, listening but not started, and a ticket. Raises AtollError.

    A founding that fails leaves the folder as it was: what is half made would found another run at the next start.
    """
    before = set(folder.rglob("*"))
    store = PeerStore(folder, durable)  # from here on, no other process writes into the folder
    if "genesis" in store.startup_values():
        store.close()
        raise UsageError(
            "E-DIR-02",
            f"{folder} already holds a run",
            cause="a run was founded or joined here before",
            fix=f"atoll up --dir {folder} to go on with it, or choose another folder",
        )
    try:
        _check_room(folder, founded)
        return await _found(store, founded, name, listening, invitation, make)
    except BaseException as why:
        store.close()
        for path in sorted({*folder.rglob("*")} - before, reverse=True):  # files before their folders
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        if isinstance(why, RunFailedError | NetworkError):
            why.fix += f"; nothing is left of this run in {folder}, so name all its settings again"
        raise


def _check_room(folder: Path, founded: FoundingBlobs) -> None:
    """Raise RunFailedError if the disk cannot hold the first states and the data."""
    blobs = (founded.data, founded.canary, founded.tokenizer, founded.base)
    state_bytes = sum(memoryview(piece).nbytes for piece in founded.state)
    needed = STATES_AT_FIRST * state_bytes + sum(map(len, blobs))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise refused("found this run", f"it needs {bytes_text(needed)} of disk", folder, "the disk is too full")


async def _found(
    store: PeerStore,
    founded: FoundingBlobs,
    name: str,
    listening: ListenOptions,
    invitation: TicketTerms,
    make: Make[Host],
) -> tuple[Host, Ticket]:
    identity = identity_of(store)
    session_key, ticket_key = new_vote_key(founded.settings.round.signing.kind), Ed25519PrivateKey.generate()
    now = SystemClock().now()
    key = ticket_key.public_key().public_bytes_raw()
    expires_s = int(now + invitation.lasts_s)
    # an invited person could join once per use, so if members may lie, each needs a ticket
    uses = invitation.uses or (1 if founded.settings.round.quorum == "two-thirds" else PRIVATE_USES)
    use = IssuedTicketRecord(ticket_id(key), key, "trainer", uses, float(expires_s))
    vote_key = session_key.public_key().public_bytes_raw()
    public = public_bytes(identity.public)
    settings = msgspec.structs.replace(founded.settings, recovery=public)
    listening = replace(listening, listen=tuple(with_free_ports(listening.listen)))
    addresses = listening.announce or advertised(list(listening.listen))
    founder = Member(
        identity.peer, vote_key, addresses, "trainer", "member", -1, 0.0, name, identity=digest(public)
    )
    genesis = Vertex(encode(write_genesis(settings, store.put_blob(*founded.state), founder, (use,), now)), None)
    store.put_blob(founded.data)
    for blob in (founded.canary, founded.tokenizer, founded.base):
        if blob:
            store.put_blob(blob)
    run = genesis_digest(genesis)
    certify(store, identity, run, session_key, now)
    me = PeerStartParameters(store, identity, run, DesiredRole("trainer", name), genesis)
    host = await _open(me, listening, make)
    ticket = issue(
        identity,
        genesis=run,
        role="trainer",
        expires_wall_s=expires_s,
        addresses=host.addresses,
        uses=uses,
        generate=lambda: ticket_key,
    )
    # last, so that a founder that could not listen may retry with other options
    store.keep([("run", run), ("genesis", encode(genesis)), ("ticket", ticket.text.encode())])
    return host, ticket


async def join_run(
    folder: Path,
    ticket_text: str,
    role: str,
    name: str,
    listening: ListenOptions,
    make: Make[Host],
    durable: bool = True,
) -> Host:
    """A listening peer for the ticket's run. Raises AtollError, also for an invalid ticket."""
    ticket = parse(ticket_text)
    store = PeerStore(folder, durable)
    kept = store.startup_values()
    try:
        if "genesis" not in kept:  # before genesis is known, another ticket may be tried
            ticket.verify(SystemClock().now())
        elif kept["run"] != ticket.genesis:
            raise UsageError(
                "E-DIR-03",
                f"{folder} belongs to another run than this ticket",
                cause="another run was founded or joined in this folder before",
                fix="choose another folder with --dir",
            )
        _check_history(kept, ticket.genesis, folder)
        _check_clock(kept, folder)
    except AtollError:
        store.close()
        raise
    identity = identity_of(store)
    kept_session(store, ticket.genesis)  # reports a damaged session before the start
    store.keep([("run", ticket.genesis), ("ticket", ticket_text.encode())])
    bootstrap = tuple((address, ticket.issuer) for address in ticket.addresses)
    if "run" in kept:  # it comes back
        name = _name_as_before(name, kept.get("name", b"").decode(), folder)
    wish = DesiredRole(role, name, (), ticket.redeem(identity.peer))
    return await _open(PeerStartParameters(store, identity, ticket.genesis, wish, None, bootstrap), listening, make)


async def resume_run(folder: Path, name: str, listening: ListenOptions, make: Make[Host]) -> Host:
    """The peer in this folder, listening. `name` renames it; without a group in it, the old group stays."""
    store = PeerStore(folder)
    kept = store.startup_values()
    if "run" not in kept:
        store.close()
        raise UsageError(
            "E-DIR-04",
            f"{folder} holds no run",
            cause="nothing was founded or joined here yet",
            fix="atoll up run.toml, or atoll join TICKET",
        )
    run = Digest(kept["run"])
    try:
        _check_history(kept, run, folder)
        _check_clock(kept, folder)
    except AtollError:
        store.close()
        raise
    identity = identity_of(store)
    kept_session(store, run)  # reports a damaged session before the start
    remember_session(store)
    genesis = decode_vertex(kept["genesis"]) if "genesis" in kept else None
    if genesis is not None and (why := other_rules(decode_body(genesis.body).settings)):
        store.close()
        raise RefusedError("E-RUN-15", why, fix=OTHER_RULES_FIX)
    role, before = kept.get("role", b"trainer").decode(), kept.get("name", b"").decode()
    wish, bootstrap = DesiredRole(role, _name_as_before(name, before, folder)), ()
    if "ticket" in kept:
        ticket = parse(kept["ticket"].decode())
        wish = replace(wish, admission=ticket.redeem(identity.peer))
        if ticket.issuer != identity.peer:
            bootstrap = tuple((address, ticket.issuer) for address in ticket.addresses)
    return await _open(PeerStartParameters(store, identity, run, wish, genesis, bootstrap), listening, make)


def _name_as_before(name: str, before: str, folder: Path) -> str:
    """This name, with what it leaves out, the name itself or the group, as at the last start in this folder."""
    own = name.removesuffix(GROUP_MARK + group_of(name)) or before.removesuffix(GROUP_MARK + group_of(before))
    return named(own or default_name(folder), group_of(name) or group_of(before))


def _check_history(kept: Mapping[str, bytes], run: Digest, folder: Path) -> None:
    """Raise UsageError if this disk damaged the history and no member can replace it."""
    if "genesis" not in kept or (hole := find_missing_vertex(kept, run)) is None:
        return
    if hole.id is not None:  # the newest vertex is whole
        newest = max(int(name.removeprefix("vertex/")) for name in kept if name.startswith("vertex/"))
        if len(decode_body(decode_vertex(kept[f"vertex/{newest}"]).body).members) > 1:
            return
    raise damaged(f"round {hole.round} of the history" if hole.round >= 0 else "the genesis", folder)


def _check_clock(kept: Mapping[str, bytes], folder: Path) -> None:
    """Raise RefusedError if this computer's clock is before the newest vertex: one of the two is wrong.

    A clock far ahead looks like a long pause and does no lasting harm: later vertices correct the time.
    """
    rounds = [int(name.removeprefix("vertex/")) for name in kept if name.startswith("vertex/")]
    row = kept.get(f"vertex/{max(rounds)}" if rounds else "genesis")
    vertex = next(iter(decode_undamaged([row])), None) if row is not None else None
    if vertex is None or os.environ.get(CLOCK_IS_RIGHT) == "1":
        return  # members replace what the disk lost
    agreed_s = decode_body(vertex.body).time_s
    behind_s = agreed_s - SystemClock().now()
    if behind_s > CLOCK_ZONE_S:
        told = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(min(agreed_s, LAST_S)))
        raise RefusedError(
            "E-CLK-01",
            f"this computer's clock is {behind_s / 86400:.0f} days before the last agreed round ({told})",
            cause="the clock is wrong now, or it was wrong in that round",
            fix=f"set this computer's clock, then start again; or, if it is right now, once: {CLOCK_IS_RIGHT}=1 "
            f"atoll up --dir {shlex.quote(str(folder))} (a loop of your own: {CLOCK_IS_RIGHT}=1 python SCRIPT)",
        )


def holds_run(folder: Path) -> bool:
    """True if a run was founded or joined in this folder. Raises UsageError if its database is gone."""
    if not (folder / "kept.sqlite").exists():
        if (folder / "session.key").exists():
            raise UsageError(
                "E-DIR-06",
                f"{folder} has lost its run: kept.sqlite is gone",
                cause="the file was deleted, or its disk was; with it went what this peer agreed to and signed",
                fix=f"ask a member for a ticket (atoll invite), then atoll join TICKET --dir {folder}; the others "
                "know the identity in peer.key",
            )
        return False
    store = PeerStore(folder)
    held = "run" in store.startup_values()
    store.close()
    return held


async def _open(me: PeerStartParameters, listening: ListenOptions, make: Make[Host]) -> Host:
    store, wish, host = me.store, me.wish, make(me)
    if wish.role == "client":
        listening = replace(listening, listen=(), announce=(), as_before=False)  # a client only dials
    kept = store.startup_values()
    before = kept.get("listening", b"").decode().split()
    announced = listening.announce or tuple(kept.get("announced", b"").decode().split())
    if listening.as_before and (announced or not all(map(only_here, before))):
        listening = replace(listening, listen=tuple(before), announce=announced)
    asked = list(listening.listen)
    last = as_last_time(asked, before)
    try:
        try:
            await host.listen(last, listening.announce, listening.upload_bytes_s)
        except NetworkError:
            if last == asked:
                raise
            await host.links.close()  # another process has the port now
            await host.listen(asked, listening.announce, listening.upload_bytes_s)
    except AtollError:
        await host.stop(farewell=False)
        raise
    addresses = {"listening": host.bound, "announced": listening.announce}
    store.keep([(key, " ".join(told).encode()) for key, told in addresses.items()])
    store.keep([("name", wish.name.encode()), ("role", wish.role.encode())])
    return host


def identity_of(store: PeerStore) -> Identity:
    """This folder's identity, made at first use."""
    secret = store.secret("peer.key")
    if secret is not None:
        return Identity.from_bytes(secret, str(store.folder / "peer.key"))
    identity = Identity.generate()
    store.write_secret("peer.key", identity.to_bytes())
    return identity
