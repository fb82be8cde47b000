"""Peer: one member of a run. Dispatches events to its components and handles genesis, links, timers and strangers.

Driving contract: pass `Start` with all persisted values first, then any event, in any order.
Carry out the effects of one call in order before the next call; a `Persist` is durable before a later `Send`.
A message that breaks the protocol becomes a fact, not an exception. After an exception, start a new peer from disk.

    participation   rounds, agreed state and reports, once the run is known
    readers         peers that may read                     serve       blobs for others
    admission       requests for membership                 heartbeat   reachable members, run time
    news            vertex requests and hints               regain      fetching the agreed state
    downloads       other blobs and rollback targets        old_parts   parts of closed rounds, for others
    early           messages of rounds not begun here       verifiers   checks and row archive
    words           reports to the members

Components of a round use run time; this file translates from and to the driver's clock. A peer is *lost* until it
knows genesis, *behind* while its state is older than its history, *current* while a round is running.

Invariants:
- The peer does no input or output and decides nothing without a vertex.
- No message of a stranger changes anything before it is verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import (
    BandwidthMeasured,
    Broadcast,
    Effect,
    Event,
    LinkDown,
    LinkUp,
    Persist,
    Received,
    ResumedFromSleep,
    Send,
    SetTimer,
    Start,
    TaskDone,
    TaskFailed,
    TimerFired,
    tag_of,
)
from atoll.crypto.signer import IdentitySigner, SignatureVerifier, Signer
from atoll.peer.capabilities import PeerPlugins
from atoll.peer.events import (
    GenesisKnown,
    JoinRejected,
    MembershipChanged,
)
from atoll.peer.membership.admission import EXPELLED, DesiredRole, expelled
from atoll.peer.membership.readers import ReadAccessControl, Reads
from atoll.peer.membership.report_pool import ReportPool
from atoll.peer.participation import RunParticipationMachine
from atoll.peer.round.machine import RoundMachine
from atoll.peer.run_view import RunView
from atoll.peer.settings import OTHER_RULES_FIX, RunSettings, other_rules, settings_of_run
from atoll.peer.sync.history_repair import HistoryRepair
from atoll.peer.sync.state_archive import DistributedStateArchive
from atoll.peer.tasks import StateRestored
from atoll.policy.links import TransferRates
from atoll.policy.membership import suspicions_needed
from atoll.protocol.history.chain import VertexChain, genesis_digest
from atoll.protocol.history.era_signatures import EraSignatureTracker
from atoll.protocol.transfer.serve import BlobServer
from atoll.wire.codec import decode_body, decode_vertex, encode
from atoll.wire.messages.audits import ExhibitRequest, ExhibitResponse, MalformedRowShown
from atoll.wire.messages.history import (
    ChunkRequest,
    ChunkResponse,
    EraSignatures,
    EraSignaturesRequest,
    ManifestRequest,
    ManifestResponse,
    VerticesRequest,
    VerticesResponse,
)
from atoll.wire.messages.membership import Hello, JoinRefused, Ping, PingReply, RefusalCode, ReportMessage
from atoll.wire.messages.preference import PreferenceRequest, PreferenceResponse
from atoll.wire.messages.round import RoundMessage
from atoll.wire.messages.statements import (
    BaseStatement,
    LeaveReport,
)
from atoll.wire.messages.vertex import Vertex


class Peer:
    """One member of one run, in a real process or in the simulator."""

    def __init__(
        self,
        run: Digest,
        signer: Signer,
        verifier: SignatureVerifier,
        wish: DesiredRole,
        genesis: Vertex | None = None,
        bootstrap: Sequence[PeerId] = (),
        vouch: IdentitySigner | None = None,
        *,
        capabilities: PeerPlugins,
    ) -> None:
        self.participation = mine = RunParticipationMachine(run, signer, verifier, wish, capabilities)
        self.me, self.run, self.notary = signer.peer, run, mine.notary
        self.genesis, self.bootstrap, self.vouch = genesis, tuple(bootstrap), vouch
        self.serve, self.readers = BlobServer(), ReadAccessControl()
        self.identities: dict[PeerId, bytes] = {}  # public identities that members joined with, for handshakes
        self.heartbeat, self.linked, self.said = mine.heartbeat, mine.linked, mine.said
        self.news, self.regain, self.downloads = mine.news, mine.regain, mine.downloads
        self.early, self.old_parts = mine.early, mine.old_parts
        self.admission, self.resting = mine.admission, mine.resting
        self.words, self.verifiers = mine.words, mine.verifiers

    # ---- the table of contents ---------------------------------------------------------------------------

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        """Process one event. `now` is the driver's clock; components of a round get run time."""
        effects = self._react(event, now)
        if self.view is not None and not self.settings.is_public:
            effects = self._for_readers(effects, now)
        return [self._to_local(e) for e in effects]

    def _for_readers(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        """Drop every send to a peer that may not read it, whatever caused it."""
        out: list[Effect] = []
        run_s = self.participation.run_time(now)
        for effect in effects:
            match effect:
                case Send():
                    left = self.readers.may_leave(effect, self.view, run_s)
                    out += [left] if left is not None else []
                case Broadcast():
                    out.append(self.readers.narrow(effect, self.view, run_s))
                case _:
                    out.append(effect)
        return out

    def _react(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Start(kept):
                return self._start(kept, now)
            case Received(sender, message):
                alive = self.participation.from_heartbeat(self.heartbeat.record_life(sender, now), now)
                return alive + self.participation.judged(sender, lambda: self._hear(event, message, now))
            case LinkUp(peer):
                return self._link_up(event, peer, now)
            case LinkDown(peer):
                return self._link_down(event, peer, now)
            case ResumedFromSleep():
                return self._wake(now)
            case BandwidthMeasured(bytes_s, to, round):
                self.participation.rates = TransferRates(bytes_s, dict(to), round)
                return []
            case TaskDone() | TaskFailed():
                return self._answered(event, now)
            case TimerFired():
                return self._fired(event, now)

    def _answered(self, event: TaskDone | TaskFailed, now: Seconds) -> list[Effect]:
        """Pass a finished job to its component, named by the job's prefix."""
        job, result = event.job, event.result if isinstance(event, TaskDone) else None
        match job.partition("/")[0]:
            case name if name in self.verifiers.names:
                return self.participation.from_verifiers(self.verifiers.on_task_done(event, now), now)
            case "restore":
                return self.participation.on_restored(result if isinstance(result, StateRestored) else None, now)
            case "history":
                return self.news.read(job, result or (), self.participation.within_reach())
            case "era":
                return self.known.eras.on_era_read(job, result) if self.known.eras is not None else []
            case "earlier":
                return self.participation.on_earlier_found(job, result, now)
            case "pieces":
                return self.downloads.made(event, now)
            case "parts":
                return self.participation.old_parts.on_moved(event)
            case "gather":
                return self.downloads.gather(event, self.participation.is_quiet, now)
            case "serve":
                return self.serve.handle(event, now)
            case "fetch":
                return self.participation.to_fetch(event, now)
            case _:
                return self.participation.to_round(event, now)

    def _fired(self, event: TimerFired, now: Seconds) -> list[Effect]:
        """Pass a timer to its component, named by its prefix."""
        match event.name.partition("/")[0]:
            case "beat":
                return self._tick(now)
            case "silence":
                return self.participation.from_heartbeat(self.heartbeat.check_silence(now), now)
            case "leavers":
                return self.known.roster.disconnect_leavers(int(event.name.partition("/")[2]))
            case "fetch-again":
                return [] if self.regain.busy else self.regain.begin(self.known.history, "the last source failed")
            case "earlier":
                return self.downloads.again(Digest(bytes.fromhex(event.name.rpartition("/")[2])))
            case "gather":
                return self.downloads.gather(event, self.participation.is_quiet, now)
            case "fetch":
                return self.participation.to_fetch(event, now)
            case "snow":
                return self.known.forks.on_timer(event, now)
            case _:
                return self.participation.to_round(event, now)

    def _hear(self, event: Received, message: object, now: Seconds) -> list[Effect]:
        sender = event.sender
        if isinstance(message, Reads) and (code := self._refusal(sender, now)) is not None:
            return self._turn_away(sender, message, code, now)
        match message:
            case Ping(head=head) | PingReply(head=head):
                return self.heartbeat.on_heartbeat(event, now, self.participation.head()) + self.news.ask(
                    sender, head, now
                )
            case Hello(run, head, admission):
                if run != self.run:
                    raise PeerFault(sender, "belongs to another run")
                if sender in self.linked:
                    self.readers.shown[sender] = admission
                return self.news.ask(sender, head, now) + self._answer_hello(sender, head, now)
            case JoinRefused(code):
                return self._hear_refusal(sender, code)
            case VerticesResponse():
                return self._hear_vertices(sender, message, now)
            case ManifestRequest() | ChunkRequest() if self.view is not None:
                return self.serve.handle(event, now)
            case VerticesRequest(first):
                return self.news.serve(sender, first)
            case _ if self.is_lost:
                return []  # nothing else can be judged yet
            case RoundMessage():
                return self.participation.receive_round(event, message, now)
            case ReportMessage(statement):
                return self.participation.pool_report(sender, statement, now)
            case EraSignatures():
                return self.known.hear_era(sender, message, now)
            case EraSignaturesRequest():
                return self.known.eras.serve(sender, message) if self.known.eras is not None else []
            case ManifestResponse() | ChunkResponse():
                return self.participation.to_fetch(event, now)
            case ExhibitRequest():
                return self.verifiers.serve(sender, message)
            case ExhibitResponse():
                return self.participation.fetch_exhibit(sender, message, now)
            case MalformedRowShown():
                return self.participation.from_verifiers(self.verifiers.on_malformed_row(sender, message), now)
            case PreferenceRequest() | PreferenceResponse():
                return self.known.forks.on_message(event, now)
            case _:
                return []

    # ---- strangers ---------------------------------------------------------------------------------------

    def _refusal(self, peer: PeerId, now: Seconds) -> RefusalCode | None:
        """Why this peer may read nothing here; None: it may."""
        return self.readers.refusal(peer, self.view, self.participation.run_time(now))

    def _turn_away(self, sender: PeerId, message: Reads, code: RefusalCode, now: Seconds) -> list[Effect]:
        """Reply to a peer that may not read, if it asks for the history or a state as joiners and visitors do."""
        if isinstance(message, Ping):
            # it may be a member in later vertices than the local head
            return self.news.ask(sender, message.head, now)
        refusal = Send(sender, JoinRefused(code))
        if isinstance(message, ManifestRequest):
            return [refusal]
        if not isinstance(message, VerticesRequest):
            return []
        if code != EXPELLED or self.news.hinted_lately(sender, now):
            return [refusal]
        return [refusal, *self.news.serve(sender, message.first - 1)]  # `may_leave` ends it

    def _hear_refusal(self, sender: PeerId, code: RefusalCode) -> list[Effect]:
        """Count a refusal: from the dialed peer before genesis is known, later from more voters than may lie."""
        if self.view is None:
            counts, needed = sender in self.bootstrap, 1
        else:
            roster, mine = self.known.roster, self.known.roster.mine
            if mine is not None and mine.is_present:
                return []
            counts = any(m.peer == sender and m.votes for m in roster.members)
            liars = self.settings.round.quorum == "two-thirds"
            needed = suspicions_needed(roster.voters, self.settings.round.quorum) if liars else 1
        refused = self.admission.hear_refusal(sender, code, needed) if counts else None
        return [self.participation.fact(refused)] if refused is not None else []

    def _hello(self, peer: PeerId, now: Seconds) -> Send:
        head = self.participation.head() if self._refusal(peer, now) is None else -2
        return Send(peer, Hello(self.run, head, self.wish.admission))

    def _answer_hello(self, sender: PeerId, head: int, now: Seconds) -> list[Effect]:
        """Send the head again to a peer that has just shown its ticket; before, it could not be sent."""
        if self.is_lost or self.settings.is_public or head >= self.participation.head():
            return []
        by_ticket = self.known.roster.standing_of(sender) is None and self._refusal(sender, now) is None
        return [self._hello(sender, now)] if by_ticket else []

    def _show_ticket(self, peers: Sequence[PeerId], now: Seconds) -> list[Effect]:
        """Repeat the ticket with every heartbeat until this peer is a member, as messages may be lost."""
        if not self.wish.admission or (self.view is not None and self.known.roster.mine is not None):
            return []
        return [self._hello(peer, now) for peer in peers]

    # ---- lost, and found ---------------------------------------------------------------------------------

    def _start(self, kept: dict[str, bytes], now: Seconds) -> list[Effect]:
        effects: list[Effect] = [SetTimer("beat", now + self.heartbeat.beat_s)]
        self.said.update({k: v for k, v in kept.items() if k.startswith("said/")})
        self.identities = {PeerId(k[9:]): v for k, v in kept.items() if k.startswith("identity/")}
        if self.genesis is None and "genesis" in kept:
            self.genesis = decode_vertex(kept["genesis"])
        if self.genesis is None:
            return [*effects, *self._ask_lost(self.bootstrap)]
        effects += self._know_genesis(self.genesis)
        self.participation.mending = mending = self.known.mending(kept)
        if mending is not None:
            return [*effects, mending.begin(), *self.participation.follow_members(now)]
        return effects + self._know(kept, now)

    def _know(self, kept: dict[str, bytes], now: Seconds) -> list[Effect]:
        """Restore persisted state and continue from it."""
        effects = self.known.restore(kept)
        if self.known.history.head > -1:  # otherwise genesis was the last event about members
            members = self.known.history.head_body.members
            effects.append(self.participation.fact(MembershipChanged(joined=(), left=(), members=members)))
        effects += self.participation.from_verifiers(self.verifiers.resume(kept, now), now)
        effects += self.participation.seek_demanded()
        effects += [self.participation.fact(expelled(self.me))] if self.participation.is_expelled else []
        return effects + self.participation.follow_members(now) + self.regain.begin(self.known.history)

    def _ask_lost(self, peers: Sequence[PeerId]) -> list[Effect]:
        """Request genesis, or vertices that the disk lost."""
        if self.mending is not None:
            return self.mending.ask(peers)
        self.admission.begins()
        return [Send(peer, VerticesRequest(-1)) for peer in peers]

    def _know_genesis(self, vertex: Vertex) -> list[Effect]:
        if genesis_digest(vertex) != self.run:
            raise PeerFault("", "sent a genesis that is not the one this run is named after")
        self.genesis, self.participation.settings = vertex, settings_of_run(decode_body(vertex.body))
        self.admission.knows_genesis()
        s, gone, offered = self.settings.round, self.heartbeat.is_gone, self.participation.capabilities
        self.participation.view = known = RunView(
            vertex, offered, self.notary, self.wish, self.vouch, self.linked, self.identities, gone
        )
        self.news.history, self.news.eras = known.history, known.eras
        self.verifiers.start(self.settings, known.history, known.pool)
        self.heartbeat.beat_s, self.heartbeat.suspect_s = s.beat_s, s.suspect_s
        return [
            Persist("genesis", encode(vertex)),
            self.participation.fact(GenesisKnown(settings=self.settings, vertex=vertex)),
        ]

    # ---- the history grows -------------------------------------------------------------------------------

    def _hear_vertices(self, sender: PeerId, message: VerticesResponse, now: Seconds) -> list[Effect]:
        effects: list[Effect] = []
        self.news.ends_with(sender, message.head)
        if self.mending is not None:
            return self._mend(self.mending, sender, message, now)
        effects += self.news.mended(sender, message.vertices)
        vertices = list(message.vertices)
        fresh = self.is_lost
        if fresh:
            if not vertices:
                return []
            genesis = vertices.pop(0)
            first = decode_body(genesis.body, sender)
            if first.round >= 0:
                return []  # for this peer before its disk was lost; genesis was requested
            if genesis_digest(genesis) == self.run and (why := other_rules(first.settings)):
                refused = JoinRejected(by=self.me, code="E-RUN-15", what=why, fix=OTHER_RULES_FIX, for_good=True)
                return [self.participation.fact(refused)]
            effects += self._know_genesis(genesis)
        history = self.known.history
        before = history.head
        handed = self.at < history.head or message.head > history.head + 1
        for vertex in vertices:  # vertices before an invalid one stay valid
            if self.known.awaits_signatures:
                return effects + self.known.demand_signatures(sender, now)
            learn = partial(self.participation.learn_vertex, vertex, sender, now, handed)
            effects += self.participation.judged(sender, learn)
        if message.head > history.head and (fresh or history.head > before):
            effects.append(Send(sender, VerticesRequest(history.head + 1)))
            return effects  # all vertices first: a state is fetched once, for the newest
        if fresh:
            return effects + self.participation.follow_members(now) + self.regain.begin(history)
        return effects + self.participation.catch_up(now)

    def _mend(
        self, mending: HistoryRepair, sender: PeerId, message: VerticesResponse, now: Seconds
    ) -> list[Effect]:
        effects = mending.take(sender, message.vertices)
        if mending.hole is not None:
            return effects
        self.participation.mending = None
        return effects + self._know(mending.kept, now)

    # ---- heartbeats, links, time -------------------------------------------------------------------------

    def _tick(self, now: Seconds) -> list[Effect]:
        effects: list[Effect] = [SetTimer("beat", now + self.heartbeat.beat_s)]
        if self.view is None:
            return [*effects, *self._show_ticket(self.bootstrap, now), *self._ask_lost(self.bootstrap)]
        known = self.view
        effects += self.participation.from_heartbeat(self.heartbeat.tick(now, self.participation.head()), now)
        if self.mending is not None:
            return [*effects, *self._ask_lost(self.participation.within_reach())]
        effects += self._show_ticket(self.participation.within_reach(), now)
        if not self.regain.busy and self.round is None and not self.over:
            again = self.participation.catch_up(now) if self.at >= -1 else None
            effects += self.regain.begin(known.history, "trying again") if again is None else again
        effects += (
            known.eras.request_missing(self.participation.within_reach(), now) if known.eras is not None else []
        )
        effects += self.verifiers.retransmit()
        effects += self.participation.tend_pieces(now)
        effects += self.words.again(now)
        if self.wish.role != "visitor":
            effects += known.forks.on_heartbeat(now)
        return effects + self.participation.seek_admission(now)

    def _link_up(self, event: LinkUp, peer: PeerId, now: Seconds) -> list[Effect]:
        self.linked.add(peer)
        effects: list[Effect] = [self._hello(peer, now)]
        effects += self.participation.from_heartbeat(self.heartbeat.on_link_event(event, now), now)
        if self.is_lost:
            return [*effects, *self._ask_lost([peer])]
        known = self.known
        known.pool.withdraw_farewell(peer)
        farewell = known.pool.said_by(self.me, tag_of(LeaveReport)) if self.leaving else []
        effects += [Send(peer, ReportMessage(word)) for word in farewell]
        effects += self.downloads.linked(peer, now)
        effects += self.regain.fetch.on_link_up(peer, now) if self.regain.fetch is not None else []
        effects += known.eras.request_from(peer, now) if known.eras is not None else []
        effects += known.forks.on_peer_connected(peer, known.roster.put_away())
        if self.round is not None:
            effects += self.participation.from_round(self.round.greet(peer), now)
        return effects

    def _link_down(self, event: LinkDown, peer: PeerId, now: Seconds) -> list[Effect]:
        self.linked.discard(peer)
        self.readers.shown.pop(peer, None)
        was_gone = self.heartbeat.is_gone(peer)
        effects = self.participation.from_heartbeat(self.heartbeat.on_link_event(event, now), now)
        if self.is_lost:
            return effects
        if self.round is not None and was_gone != self.heartbeat.is_gone(peer):
            effects += self.participation.from_round(self.round.poll(self.participation.run_time(now)), now)
        effects += self.downloads.unlinked(peer, now)
        return effects + (self.regain.fetch.on_link_down(peer, now) if self.regain.fetch is not None else [])

    def _wake(self, now: Seconds) -> list[Effect]:
        """After a sleep of this computer, request what happened meanwhile; the others were not silent."""
        self.heartbeat.reset_silence(now)
        self.news.woke()
        effects: list[Effect] = [SetTimer("beat", now)]
        if not self.is_lost:
            wish = VerticesRequest(self.participation.head() + 1)
            effects += [Send(p, wish) for p in self.participation.within_reach()[:4]]
        return effects

    def _to_local(self, effect: Effect) -> Effect:
        """Convert a round's timer from run time to the driver's clock."""
        if isinstance(effect, SetTimer) and effect.at is not None and effect.name.startswith(("round/", "reduce/")):
            return replace(effect, at=effect.at - self.heartbeat.offset_s)
        return effect

    # ---- for operators (`operator_commands.py`) ----------------------------------------------------------

    def say(self, statement: BaseStatement, now: Seconds) -> list[Effect]:
        """Send a report of the local peer to the members."""
        return [self._to_local(e) for e in self.words.broadcast(statement, now)]

    def begin_epoch(self, vertex: Vertex, now: Seconds) -> list[Effect]:
        """Continue the run from this vertex, which the recovery identity has signed."""
        effects = self.participation.learn_vertex(vertex, self.me, now)
        after = self.known.history.head_body
        news = VerticesResponse((vertex,), after.round)
        effects += [Send(m.peer, news) for m in after.members if m.is_present and m.peer != self.me]
        effects += self.participation.from_round(self.participation.learn_round(after.round, vertex, now), now)
        return [self._to_local(e) for e in effects]

    # ---- state of the participation ----------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self.participation.is_lost

    @property
    def known(self) -> RunView:
        """The run view; only used after genesis is known."""
        return self.participation.known

    @property
    def view(self) -> RunView | None:
        return self.participation.view

    @property
    def wish(self) -> DesiredRole:
        return self.participation.wish

    @wish.setter
    def wish(self, wish: DesiredRole) -> None:
        self.participation.wish = wish

    @property
    def settings(self) -> RunSettings:
        return self.participation.settings

    @property
    def mending(self) -> HistoryRepair | None:
        return self.participation.mending

    @property
    def round(self) -> RoundMachine | None:
        return self.participation.round

    @property
    def at(self) -> int:
        """Round of the local state; -1: genesis, -2: no state."""
        return self.participation.at

    @property
    def over(self) -> bool:
        return self.participation.over

    @property
    def leaving(self) -> bool:
        return self.participation.leaving

    @property
    def rates(self) -> TransferRates:
        return self.participation.rates

    # None until genesis is known

    @property
    def history(self) -> VertexChain | None:
        return self.view.history if self.view is not None else None

    @property
    def pool(self) -> ReportPool | None:
        return self.view.pool if self.view is not None else None

    @property
    def eras(self) -> EraSignatureTracker | None:
        return self.view.eras if self.view is not None else None

    @property
    def pieces(self) -> DistributedStateArchive | None:
        return self.view.pieces if self.view is not None else None
