"""Peer: one member of a run, and the only place that connects its components.

    known       the run view, once genesis is known     heartbeat   reachable members, run time
    round       the round in progress                   news        vertex requests and hints
    regain      fetching the agreed state               admission   requests for membership
    kept_rows   rows of closed rounds, for attribution  early       messages of rounds not begun here
    serve       blobs for others                        old_parts   parts of closed rounds, for others
    downloads   other blobs and rollback targets        mending     repair of the stored history
    inspectors  verifiers                               words       reports to the members
    readers     peers that may read

Components of a round use run time; this file translates from and to the driver's clock. A peer is *lost* until it
knows genesis, *behind* while its state is older than its history, *current* while a round is running.

Invariants:
- The peer does no input or output and decides nothing without a vertex.
- No message of a stranger changes anything before it is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import EARLY_ROUNDS
from atoll.base.machine import (
    BandwidthMeasured,
    Effect,
    Emit,
    Event,
    Fact,
    LinkDown,
    LinkUp,
    Persist,
    Received,
    Resumed,
    Send,
    SetTimer,
    Start,
    TaskDone,
    TaskFailed,
    TimerFired,
    tag_of,
)
from atoll.crypto.signer import IdentitySigner, SignatureVerifier, Signer
from atoll.features.archive.machine import ArchiveMachine
from atoll.features.attribution.row_archive import RowArchive
from atoll.features.partition_training.machine import left_open
from atoll.peer.events import (
    AttemptFailed,
    CaughtUp,
    FetchBegan,
    GenesisKnown,
    JoinRejected,
    MemberAccused,
    MembershipChanged,
    ProtocolFault,
    RoundClosed,
    RunOver,
    ShareBegan,
    StateMissing,
    StateUnavailable,
)
from atoll.peer.governance.orders import amend_of
from atoll.peer.governance.settings_change import is_over
from atoll.peer.membership.admission import EXPELLED, UNTOLD, AdmissionRequest, DesiredRole, expelled, refusal_of
from atoll.peer.membership.opt_out import WHY, RoundOptOut
from atoll.peer.membership.readers import Readers, Reads
from atoll.peer.membership.report_broadcaster import ReportBroadcaster
from atoll.peer.membership.report_pool import ReportPool
from atoll.peer.membership.roster import change_of
from atoll.peer.round.candidate import LocalMeasurements
from atoll.peer.round.machine import RoundMachine
from atoll.peer.round.topology_choice import part_bytes_most
from atoll.peer.round.update_sharing import RoundEnvironment
from atoll.peer.run_view import HistoryExtended, RunView
from atoll.peer.settings import OTHER_RULES_FIX, RunSettings, other_rules, settings_of_run
from atoll.peer.sync.downloads import BlobDownloads
from atoll.peer.sync.early_messages import EarlyMessageBuffer
from atoll.peer.sync.history_repair import HistoryRepair
from atoll.peer.sync.part_cache import RecentPartCache
from atoll.peer.sync.state_sync import StateSync
from atoll.peer.sync.vertex_sync import VertexSync
from atoll.peer.tasks import StateRestored
from atoll.peer.verify.interface import Verifier
from atoll.peer.verify.registry import VerifierRegistry, ledgers_of
from atoll.policy.fault_tolerance import OwnerStrikes
from atoll.policy.links import TransferRates, report
from atoll.policy.membership import only_counts, suspicions_needed
from atoll.protocol.history.chain import VertexChain, genesis_digest
from atoll.protocol.history.era_signatures import EraChain
from atoll.protocol.membership.failure_detector import FailureDetector, PeerReturned, PeerSuspected
from atoll.protocol.transfer.download import BlobFetched, BlobServer, FetchFailed
from atoll.wire.codec import decode_body, decode_vertex, encode
from atoll.wire.envelope import StatementSigner
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
from atoll.wire.messages.membership import Hello, JoinRefused, MemberReport, Ping, PingReply, RefusalCode
from atoll.wire.messages.preference import PreferenceRequest, PreferenceResponse
from atoll.wire.messages.round import PartRequest, PartResponse, RoundMessage, RowRequest, RowResponse
from atoll.wire.messages.statements import (
    Accusation,
    AuditReport,
    ChangeSettings,
    LeaveReport,
    OwnerComplaint,
    RollbackOrder,
    SignedStatement,
    Statement,
    SuspicionReport,
)
from atoll.wire.messages.vertex import Vertex


def _signed_by(message: object) -> PeerId | None:
    signed = getattr(message, "statement", None)
    return signed.signer if isinstance(signed, SignedStatement) else None


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
        verifiers: Sequence[Verifier],
    ) -> None:
        self.notary = StatementSigner(run, signer, verifier)
        self.me, self.run, self.wish = signer.peer, run, wish
        self.genesis, self.bootstrap = genesis, tuple(bootstrap)
        self.settings = RunSettings()
        self.heartbeat = FailureDetector(self.me, 2.0, 6.0)
        self._known: RunView | None = None  # None until genesis is known
        self.mending: HistoryRepair | None = None  # set while the stored history has a hole
        self.vouch = vouch
        self.at = -2  # round of the local state; -1: genesis, -2: no state
        self.round: RoundMachine | None = None
        self.regain = StateSync(run, self.me)
        self.downloads = BlobDownloads(self.notary, lambda: self.known, self._found_state)
        self.serve = BlobServer()
        self.news = VertexSync()
        self.said: dict[str, bytes] = {}
        self.old_parts = RecentPartCache()
        self.kept_rows = RowArchive()
        self.early = EarlyMessageBuffer()
        self.admission, self.readers = AdmissionRequest(self.me, signer, wish.role == "visitor"), Readers()
        self.linked: set[PeerId] = set()
        self.unknown_key = False  # the local key differs from the one in the membership
        self.rates = TransferRates()
        self.identities: dict[PeerId, bytes] = {}  # public identities that members joined with, for handshakes
        self.strikes = OwnerStrikes()
        self.resting = RoundOptOut()
        self.words = ReportBroadcaster(
            self.notary, lambda: self.known, self.heartbeat, self._writers, self._pool_report
        )
        self.inspectors = VerifierRegistry(self.me, verifiers)
        self.over = self.leaving = False

    # ---- the table of contents -----------------------------------------------------------------------------

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        """Process one event. `now` is the driver's clock; components of a round get run time."""
        effects = self._react(event, now)
        if self._known is not None and not self.settings.is_public:
            effects = self._for_readers(effects, now)
        return [self._to_local(e) for e in effects]

    def _for_readers(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        """Drop every send to a peer that may not read it, whatever caused it."""
        out: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Send):
                left = self.readers.may_leave(effect, self._known, self._run_time(now))
                out += [left] if left is not None else []
            else:
                out.append(effect)
        return out

    def _react(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Start(kept):
                return self._start(kept, now)
            case Received(sender, message):
                alive = self.heartbeat_facts(self.heartbeat.heard(sender, now), now)
                return alive + self._judged(sender, lambda: self._hear(event, message, now))
            case LinkUp(peer):
                return self._link_up(event, peer, now)
            case LinkDown(peer):
                self.linked.discard(peer)
                self.readers.shown.pop(peer, None)
                return self.heartbeat_facts(self.heartbeat.link(event, now), now)
            case Resumed():
                return self._wake(now)
            case BandwidthMeasured(bytes_s, to, round):
                self.rates = TransferRates(bytes_s, dict(to), round)
                return []
            case TaskDone() | TaskFailed():
                return self._answered(event, now)
            case TimerFired():
                return self._fired(event, now)

    def _answered(self, event: TaskDone | TaskFailed, now: Seconds) -> list[Effect]:
        """Pass a finished job to its component, named by the job's prefix."""
        job, result = event.job, event.result if isinstance(event, TaskDone) else None
        match job.partition("/")[0]:
            case name if name in self.inspectors.names:
                return self._from_inspectors(self.inspectors.on_task_done(event, now), now)
            case "restore":
                return self._restored(result if isinstance(result, StateRestored) else None, now)
            case "history":
                return self.news.read(job, result or (), self._within_reach())
            case "era":
                return self.known.eras.read(job, result) if self.known.eras is not None else []
            case "earlier":
                return self._earlier_answered(job, result, now)
            case "pieces":
                return self.downloads.made(event, now)
            case "rows":
                return self.kept_rows.done(event)
            case "gather":
                return self.downloads.gather(event, self._is_quiet, now)
            case "serve":
                return self.serve.handle(event, now)
            case "fetch":
                return self._to_fetch(event, now)
            case _:
                return self._to_round(event, now)

    def _fired(self, event: TimerFired, now: Seconds) -> list[Effect]:
        """Pass a timer to its component, named by its prefix."""
        match event.name.partition("/")[0]:
            case "beat":
                return self._tick(now)
            case "silence":
                return self.heartbeat_facts(self.heartbeat.look(now), now)
            case "fetch-again":
                return [] if self.regain.busy else self.regain.begin(self.known.history, "the last source failed")
            case "earlier":
                return self.downloads.again(Digest(bytes.fromhex(event.name.rpartition("/")[2])))
            case "gather":
                return self.downloads.gather(event, self._is_quiet, now)
            case "fetch":
                return self._to_fetch(event, now)
            case "snow":
                return self.known.sides.fired(event, now)
            case _:
                return self._to_round(event, now)

    def _hear(self, event: Received, message: object, now: Seconds) -> list[Effect]:
        sender = event.sender
        if isinstance(message, Reads) and (code := self._refusal(sender, now)) is not None:
            return self._turn_away(sender, message, code, now)
        match message:
            case Ping(head=head) | PingReply(head=head):
                return self.heartbeat.beat(event, now, self._head()) + self.news.ask(sender, head, now)
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
            case ManifestRequest() | ChunkRequest() if self._known is not None:
                return self.serve.handle(event, now)
            case VerticesRequest(first):
                return self.news.give(sender, first)
            case _ if self.is_lost:
                return []  # nothing else can be judged yet
            case RoundMessage():
                return self._hear_round(event, message, now)
            case MemberReport(statement):
                return self._pool_report(sender, statement, now)
            case EraSignatures():
                return self.known.hear_era(sender, message, now)
            case EraSignaturesRequest():
                return self.known.eras.give(sender, message) if self.known.eras is not None else []
            case ManifestResponse() | ChunkResponse():
                return self._to_fetch(event, now)
            case ExhibitRequest():
                return self.inspectors.serve(sender, message)
            case ExhibitResponse():
                return self._fetch_exhibit(sender, message, now)
            case MalformedRowShown():
                return self._from_inspectors(self.inspectors.on_malformed_row(sender, message), now)
            case PreferenceRequest() | PreferenceResponse():
                return self.known.sides.hear(event, now)
            case _:
                return []

    def _judged(self, sender: PeerId, hear: Callable[[], list[Effect]]) -> list[Effect]:
        """Report a PeerFault and drop its message.

        Components raise before they change anything, so that suffices.
        """
        try:
            return hear()
        except PeerFault as fault:
            return [self._fact(ProtocolFault(peer=PeerId(fault.who) or sender, what=fault.what))]

    # ---- strangers -----------------------------------------------------------------------------------------

    def _refusal(self, peer: PeerId, now: Seconds) -> RefusalCode | None:
        """Why this peer may read nothing here; None: it may."""
        return self.readers.refusal(peer, self._known, self._run_time(now))

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
        return [refusal, *self.news.give(sender, message.first - 1)]  # `may_leave` ends it

    def _hear_refusal(self, sender: PeerId, code: RefusalCode) -> list[Effect]:
        """Count a refusal: from the dialed peer before genesis is known, later from more voters than may lie."""
        if self._known is None:
            counts, needed = sender in self.bootstrap, 1
        else:
            roster, mine = self.known.roster, self.known.roster.mine
            if mine is not None and mine.present:
                return []
            counts = any(m.peer == sender and m.votes for m in roster.members)
            liars = self.settings.round.quorum == "two-thirds"
            needed = suspicions_needed(roster.voters, self.settings.round.quorum) if liars else 1
        refused = self.admission.hear_refusal(sender, code, needed) if counts else None
        return [self._fact(refused)] if refused is not None else []

    def _hello(self, peer: PeerId, now: Seconds) -> Send:
        head = self._head() if self._refusal(peer, now) is None else -2
        return Send(peer, Hello(self.run, head, self.wish.admission))

    def _answer_hello(self, sender: PeerId, head: int, now: Seconds) -> list[Effect]:
        """Send the head again to a peer that has just shown its ticket; before, it could not be sent."""
        if self.is_lost or self.settings.is_public or head >= self._head():
            return []
        by_ticket = self.known.roster.standing_of(sender) is None and self._refusal(sender, now) is None
        return [self._hello(sender, now)] if by_ticket else []

    def _show_ticket(self, peers: Sequence[PeerId], now: Seconds) -> list[Effect]:
        """Repeat the ticket with every heartbeat until this peer is a member, as messages may be lost."""
        if not self.wish.admission or (self._known is not None and self.known.roster.mine is not None):
            return []
        return [self._hello(peer, now) for peer in peers]

    # ---- lost, and found -----------------------------------------------------------------------------------

    def _start(self, kept: dict[str, bytes], now: Seconds) -> list[Effect]:
        effects: list[Effect] = [SetTimer("beat", now + self.heartbeat.beat_s)]
        self.said = {k: v for k, v in kept.items() if k.startswith("said/")}
        self.identities = {PeerId(k[9:]): v for k, v in kept.items() if k.startswith("identity/")}
        if self.genesis is None and "genesis" in kept:
            self.genesis = decode_vertex(kept["genesis"])
        if self.genesis is None:
            return [*effects, *self._ask_lost(self.bootstrap)]
        effects += self._know_genesis(self.genesis)
        self.mending = self.known.mending(kept)
        if self.mending is not None:
            return [*effects, self.mending.begin(), *self._follow_members(now)]
        return effects + self._know(kept, now)

    def _know(self, kept: dict[str, bytes], now: Seconds) -> list[Effect]:
        """Restore persisted state and continue from it."""
        effects = self.known.restore(kept)
        if self.known.history.head > -1:  # otherwise genesis was the last event about members
            members = self.known.history.head_body.members
            effects.append(self._fact(MembershipChanged(joined=(), left=(), members=members)))
        effects += self._from_inspectors(self.inspectors.resume(kept, now), now) + self._seek_demanded()
        effects += self.kept_rows.start(kept)
        effects += [self._fact(expelled(self.me))] if self._is_out else []
        return effects + self._follow_members(now) + self.regain.begin(self.known.history)

    def _ask_lost(self, peers: Sequence[PeerId]) -> list[Effect]:
        """Request genesis, or vertices that the disk lost."""
        if self.mending is not None:
            return self.mending.ask(peers)
        self.admission.begins()
        return [Send(peer, VerticesRequest(-1)) for peer in peers]

    def _know_genesis(self, vertex: Vertex) -> list[Effect]:
        if genesis_digest(vertex) != self.run:
            raise PeerFault("", "sent a genesis that is not the one this run is named after")
        self.genesis, self.settings = vertex, settings_of_run(decode_body(vertex.body))
        self.admission.knows_genesis()
        s, gone = self.settings.round, self.heartbeat.gone
        ledgers = ledgers_of(self.inspectors.verifiers, self.settings)
        self._known = known = RunView(
            vertex, ledgers, self.notary, self.wish, self.vouch, self.linked, self.identities, gone
        )
        self.news.history, self.news.eras = known.history, known.eras
        self.inspectors.start(self.settings, known.history, known.pool)
        self.heartbeat.beat_s, self.heartbeat.suspect_s = s.beat_s, s.suspect_s
        return [
            Persist("genesis", encode(vertex)),
            self._fact(GenesisKnown(settings=self.settings, vertex=vertex)),
        ]

    @property
    def is_lost(self) -> bool:
        return self._known is None or self.mending is not None

    @property
    def known(self) -> RunView:
        """The run view; only used after genesis is known."""
        assert self._known is not None
        return self._known

    # ---- rounds --------------------------------------------------------------------------------------------

    def _begin_round(self, now: Seconds) -> list[Effect]:
        """Begin the round after the local state."""
        history, pool = self.known.history, self.known.pool
        parent, head = history.bodies.get(self.at), history.ids.get(self.at)
        if parent is None or head is None:
            # updates sent before a restart may have been counted meanwhile
            if self.settings.apart_terms is not None:
                self.regain.left = left_open(self.me, 0, None)
            return self.regain.begin(history, "my state is older than the vertices in memory")
        waits = self.at == history.head and is_over(self.settings, parent)
        if waits and not pool.of_kind(tag_of(ChangeSettings)):  # otherwise members may agree on more rounds
            self.round, was_over, self.over = None, self.over, True
            fact = RunOver(round=self.at, rounds=parent.trained, state=parent.state)
            return [] if was_over else [self._fact(fact)]
        self.over = False
        mine = next((m for m in parent.members if m.peer == self.me and m.present), None)
        self.unknown_key = mine is not None and mine.vote_key != self.notary.signer.vote_key
        ground = self.known.ground_after(head, parent, self._run_time(now))
        plan = ground.plan
        env = RoundEnvironment(
            gone=self.known.mute,
            unheard=self.heartbeat.unheard,
            reports=lambda: pool.chosen(self.heartbeat.gone),
            held=self.old_parts.begin(plan.round),
            said=self.said,
            measured=self._measured,
            strikes=self.strikes,
            keeps_rows=self.kept_rows.rounds > 0,
        )
        agreement = self.known.open_door(ground, self.said.get(f"said/{plan.round}/agreement"))
        self.round = RoundMachine(ground, self.notary, agreement, env)
        if self.round.trains and self.resting.covers(plan.round):
            self.round.update.passes = WHY
        elif self.round.trains and ground.trust.audited and self.wish.unaudited and self.me not in ground.unaudited:
            self.round.update.passes = UNTOLD
        looks = self._from_inspectors(self.inspectors.on_state(self.at), now) + self._seek_demanded()
        effects = looks + self._say_resting(now) + self._to_round(Start({}), now)
        vertex = history.vertices.get(plan.round)
        if vertex is not None:
            effects += self._from_round(self._learned(plan.round, vertex, now), now)
        return effects + self.words.round_begins(now) + self._replay_early(now) + self._ask_unheard()

    def _learned(self, round: int, vertex: Vertex, now: Seconds) -> list[Effect]:
        current = self.round  # a round may close inside its own first event
        if current is None or current.plan.round != round:
            return []
        return current.learn(vertex, self._run_time(now))

    def _to_round(self, event: Event, now: Seconds) -> list[Effect]:
        if self.round is None:
            return []
        return self._from_round(self.round.handle(event, self._run_time(now)), now)

    def _from_round(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        out: list[Effect] = []
        for effect in effects:
            if self.unknown_key and isinstance(effect, Send) and _signed_by(effect.message) == self.me:
                continue  # others would take it for a forgery
            out.append(effect)
            if isinstance(effect, Persist) and effect.name.startswith("said/") and effect.blob is not None:
                self.said[effect.name] = effect.blob
            if not isinstance(effect, Emit):
                continue
            match effect.fact:
                case RoundClosed():
                    out += self._round_closed(effect.fact, now)
                case MemberAccused():
                    out += self.words.accuse(effect.fact.statement, now)
                case ShareBegan():
                    self._drop_adopted_parts(effect.fact)
                case AttemptFailed() if self.round is not None:
                    out += self.heartbeat.call(self.round.plan.committee, now, self._head())
                case StateUnavailable(state=state):
                    out += self.downloads.earlier.find(state, anew=True)
                case StateMissing():
                    self._leave_round(effect.fact.vertex)
                    out += self._learn_vertex(effect.fact.vertex, self.me, now)
                    out += self.regain.begin(self.known.history, effect.fact.why)
                case _:
                    pass
        return out

    def _drop_adopted_parts(self, share: ShareBegan) -> None:
        """Drop parts of earlier rounds once all members committed to this one: no member will request them."""
        assert self.round is not None
        if {m.peer for m in self.round.plan.members if m.present} <= set(share.committed):
            self.old_parts.keep_only(share.round)

    def _round_closed(self, closed: RoundClosed, now: Seconds) -> list[Effect]:
        effects = self._tell_who_comes_or_goes(closed) + self._learn_vertex(closed.vertex, self.me, now)
        if self.round is not None:
            mine = self.round.answers
            effects += self.inspectors.on_round_closed(closed.body, mine)
            effects += self.kept_rows.closed(closed.body.round, mine.rows)
        self.at, self.round = closed.body.round, None
        # not yet those of this round: its vertex might be lost in a crash that keeps the deletion
        old = [name for name in self.said if int(name.split("/")[1]) < self.at]
        for name in old:
            del self.said[name]
            effects.append(Persist(name, None))
        return effects + self._begin_round(now) + self._seek_admission(now)

    def _tell_who_comes_or_goes(self, closed: RoundClosed) -> list[Effect]:
        """Send the vertex to members that it admits or lets go.

        The former would learn of it with the next heartbeat; the latter stay until they learn that the others have
        it.
        """
        change = change_of(self.known.roster.members, closed.body.members)
        concerned = {*change.joined, *change.left} if change is not None else set[PeerId]()
        news = VerticesResponse((closed.vertex,), closed.body.round)
        return [Send(peer, news) for peer in sorted(concerned & self.linked)]

    def _leave_round(self, vertex: Vertex | None) -> None:
        """Abandon the round, as its state is made elsewhere; `vertex` closed it, if available."""
        current, self.round = self.round, None
        self.regain.left = left = current.left(vertex) if current is not None else None
        if current is None or left is None:
            return
        bodies = [body for round, body in self.known.history.bodies.items() if round >= current.plan.round]
        bodies += [decode_body(vertex.body)] if vertex is not None else []  # the history may not have it yet
        self.regain.left = replace(left, afresh=any(amend_of(body) is not None for body in bodies))

    # ---- messages of rounds --------------------------------------------------------------------------------

    def _hear_round(self, event: Received, message: RoundMessage, now: Seconds) -> list[Effect]:
        """Process a round message: help members that are away to catch up, ignore strangers."""
        standing = self.known.roster.standing_of(event.sender)
        if standing is None or standing == "expelled":
            return []
        self._check_size(event)
        current = self.round.plan.round if self.round is not None else self.at + 1
        if isinstance(message, PartRequest) and message.round != current:
            return self.old_parts.give(event.sender, message)
        if isinstance(message, RowRequest) and message.round < current:
            body = self.known.history.bodies.get(message.round)
            if given := self.kept_rows.give(event.sender, message, body):
                return given
        if isinstance(message, RowResponse) and self.kept_rows.looks_into(message.round):
            return self.kept_rows.take(event.sender, message, event.payload)
        if message.round == current and self.round is not None:
            if standing == "away" and message.trace != self.round.plan.trace:
                return []  # it works on this round of another branch
            return self._to_round(event, now)
        if message.round >= current and standing == "away":
            return []
        if message.round >= current:
            if message.round <= max(current, self._head() + 1) + EARLY_ROUNDS:
                self.early.remember(event)
            else:
                self.early.drop(event)
            return []
        if isinstance(message, PartResponse):
            return []
        return self.news.hint(event.sender, message.round, now)

    def _check_size(self, event: Received) -> None:
        """Raise PeerFault for more bytes than a part or a body of this run can have."""
        most, payload = part_bytes_most(self.settings.update_bytes), event.payload
        if payload is not None and payload.size_bytes > most:
            what = f"sent {payload.size_bytes} bytes at once; a part of this run has {most} at most"
            raise PeerFault(event.sender, what)

    def _replay_early(self, now: Seconds) -> list[Effect]:
        effects: list[Effect] = []
        for event in self.early.take() if self.round is not None else ():
            message = event.message
            assert isinstance(message, RoundMessage)
            if message.round > self.at:
                hear = partial(self._hear_round, event, message, now)
                effects += self._judged(event.sender, hear)
        return effects

    def _ask_unheard(self) -> list[Effect]:
        return self.round.repeats.ask(self.early.unheard(self.round.plan.round)) if self.round is not None else []

    # ---- the history grows ---------------------------------------------------------------------------------

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
                return [self._fact(refused)]
            effects += self._know_genesis(genesis)
        history = self.known.history
        before = history.head
        handed = self.at < history.head or message.head > history.head + 1
        for vertex in vertices:  # vertices before an invalid one stay valid
            if self.known.awaits_signatures:
                return effects + self.known.demand_signatures(sender, now)
            effects += self._judged(sender, partial(self._learn_vertex, vertex, sender, now, handed))
        if message.head > history.head and (fresh or history.head > before):
            effects.append(Send(sender, VerticesRequest(history.head + 1)))
            return effects  # all vertices first: a state is fetched once, for the newest
        if fresh:
            return effects + self._follow_members(now) + self.regain.begin(history)
        return effects + self._catch_up(now)

    def _mend(
        self, mending: HistoryRepair, sender: PeerId, message: VerticesResponse, now: Seconds
    ) -> list[Effect]:
        effects = mending.take(sender, message.vertices)
        if mending.hole is not None:
            return effects
        self.mending = None
        return effects + self._know(mending.kept, now)

    def _learn_vertex(self, vertex: Vertex, who: PeerId, now: Seconds, handed: bool = False) -> list[Effect]:
        """Extend the history if this vertex is the next one and its certificate holds."""
        was_out = self._is_out
        grown = self.known.learn(vertex, who, handed)
        if not isinstance(grown, HistoryExtended):
            return grown
        self.downloads.settle()
        looks = self._from_inspectors(self.inspectors.on_vertex(grown.body, now), now) + self._seek_demanded()
        changed = grown.change
        out = [self._fact(expelled(self.me))] if self._is_out and not was_out else []
        follows = [self._fact(changed), *self._follow_members(now)] if changed else []
        return [*grown.effects, *looks, *follows, *out]

    @property
    def _is_out(self) -> bool:
        return self.known.roster.standing_of(self.me) == "expelled"

    def _follow_members(self, now: Seconds) -> list[Effect]:
        """Update connections and heartbeats to the agreed membership."""
        roster = self.known.roster
        self.heartbeat.accusers_needed = suspicions_needed(roster.voters, self.settings.round.quorum)
        self.heartbeat.watch(roster.present(), now)
        for fetch in (self.regain.fetch, *self.downloads.wanted.values()):
            if fetch is not None:
                fetch.suppose(roster.within_reach())
        return roster.contacts()

    def _within_reach(self) -> list[PeerId]:
        return self.known.roster.within_reach()

    def _head(self) -> int:
        return -2 if self._known is None else self._known.history.head

    # ---- the agreed state, and other blobs -----------------------------------------------------------------

    def _catch_up(self, now: Seconds) -> list[Effect]:
        """Bring the local state to the head: replay the rounds' parts or fetch the state, by fewer bytes."""
        history = self.known.history
        if self.regain.is_outrun(history, now):
            # members will soon have dropped the old one
            return self._fetch_state("a newer state was agreed on", now)
        if self.regain.busy or history.head <= self.at:
            return self._seek_admission(now)
        if self.round is None:
            return self._begin_round(now) if self.at >= -1 else self.regain.begin(history, "joining")
        if self.regain.is_shorter(history, self.at) or self.known.roster.came_after(self.at):
            self._leave_round(history.vertices.get(self.round.plan.round))
            return self.regain.begin(history, f"{history.head - self.at} rounds behind")
        vertex = history.vertices.get(self.round.plan.round)
        if vertex is None:
            return []
        return self._from_round(self.round.learn(vertex, self._run_time(now)), now)

    def _fetch_state(self, why: str, now: Seconds) -> list[Effect]:
        history = self.known.history
        if not self.regain.fetch_from(self._within_reach(), history, now):
            return [self._fact(FetchBegan(why=f"{why}; nobody else could serve it"))]
        return [self._fact(FetchBegan(why=why)), *self._to_fetch(Start({}), now)]

    def _restored(self, found: StateRestored | None, now: Seconds) -> list[Effect]:
        how = self.regain.restored(found)
        if how is None:
            return self._fetch_state(self.regain.lack, now)
        # the history may have grown meanwhile: continue from the state's own vertex
        self.at = self.regain.round
        caught_up = self._fact(CaughtUp(round=self.at, by=how))
        return [caught_up, *self._begin_round(now), *self._seek_admission(now)]

    def _to_fetch(self, event: Event, now: Seconds) -> list[Effect]:
        out = self.downloads.handle(event, self._is_quiet, now)
        ended = [e.fact for e in out if isinstance(e, Emit) and isinstance(e.fact, BlobFetched | FetchFailed)]
        out += self._from_inspectors([e for fact in ended for e in self.inspectors.on_download(fact)], now)
        return out + self.regain.handle(event, self.known.history, now)

    def _fetch_exhibit(self, sender: PeerId, told: ExhibitResponse, now: Seconds) -> list[Effect]:
        state = self.regain.fetch
        if state is not None and state.blob == told.blob:
            return []
        wanted = self.downloads.wanted
        fetch, effects = self.inspectors.on_exhibit(sender, told, wanted, now)
        if fetch is not None:
            wanted[fetch.blob] = fetch
        return effects

    def _seek_demanded(self) -> list[Effect]:
        """Find the rollback target that validators demand; a visitor does not follow it."""
        return self.downloads.find_demanded() if self.wish.role != "visitor" else []

    def _earlier_answered(self, job: str, result: object, now: Seconds) -> list[Effect]:
        """Process a disk result: whether an earlier state is stored, or which vertex closed an old round."""
        kind, _, name = job.removeprefix("earlier/").partition("/")
        if kind == "state":
            return self.downloads.looked_up(Digest(bytes.fromhex(name)), bool(result), now)
        word = self.downloads.read(name, result)
        return self._judged(word.signer, partial(self._pool_report, word.signer, word, now)) if word else []

    def _found_state(self, state: Digest, now: Seconds) -> list[Effect]:
        """Continue a round that may have waited for this earlier state."""
        return self._from_round(self.round.found_state(state, self._run_time(now)), now) if self.round else []

    @property
    def _is_quiet(self) -> bool:
        """True if no round needs the connection."""
        return self.round is None or not self.round.patience.sharing

    # ---- reports of members, local ones included -----------------------------------------------------------

    def _writers(self, most: int) -> list[PeerId]:
        return self.round.writers(most) if self.round is not None else []

    def _pool_report(self, sender: PeerId, signed: SignedStatement, now: Seconds) -> list[Effect]:
        """Pool a report for the next vertex, forward it if it came from its author, act on its content."""
        pool = self.known.pool
        if look := self.downloads.earlier.read(signed, pool, self.settings.recovery):
            return look  # names an old vertex: read from disk, then processed again
        pooled = pool.add(signed, self._run_time(now))
        if pooled is None:
            return []
        by, statement = pooled.reported.by, pooled.reported.statement
        if pooled.wrong is not None:
            refused = refusal_of(pooled.reported, pooled.wrong) if sender == by else None
            return [Send(sender, refused)] if refused is not None else []
        effects: list[Effect] = []
        # otherwise the report alone changes nothing in a round
        news = not (pool.crowded and only_counts(statement))
        match statement:
            case SuspicionReport(peer=peer) if by != self.me:
                was_gone = self.heartbeat.gone(peer)
                self.heartbeat.accuse(peer, by, now)
                news = news or was_gone != self.heartbeat.gone(peer)
            case Accusation() if self.round is not None:
                effects += self._from_round(self.round.heed(statement, self._run_time(now)), now)
            case LeaveReport():
                self.heartbeat.refused.add(by)
            case AuditReport():
                effects += self._from_inspectors(self.inspectors.on_report(by, statement, now), now)
            case RollbackOrder(state=state):
                effects += self.downloads.earlier.find(state)
            case _:
                pass
        if sender == signed.signer and sender != self.me and pooled.fresh and not only_counts(statement):
            effects += [Send(p, MemberReport(signed)) for p in self.known.roster.passes_on_to(signed)]
        if self.round is not None and news:
            effects += self._from_round(self.round.look_again(self._run_time(now)), now)
        if self.over and isinstance(statement, ChangeSettings):
            effects += self._begin_round(now)
        return effects

    def _seek_admission(self, now: Seconds) -> list[Effect]:
        """Request the desired role until the agreed membership grants it."""
        if self.leaving:
            return []
        # a peer that fetches a state is not ready, whatever it held before
        at = self.at if not self.regain.busy else -2
        audited = bool(self.settings.audited_share)
        word = self.admission.word(self.wish, self.known.history, at, now, audited)
        return self.words.tell(word, now) if word is not None else []

    def _say_resting(self, now: Seconds) -> list[Effect]:
        words = self.resting.words(self.at + 1)
        return [effect for word in words for effect in self.words.tell(word, now)]

    def _from_inspectors(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        """Report the verifiers' findings to the members; they have consequences only once a vertex holds them."""
        out: list[Effect] = []
        for effect in effects:
            out.append(effect)
            word = self.inspectors.report_of(effect) if not self.leaving else None
            if isinstance(word, Accusation | OwnerComplaint):
                out += self.words.accuse(word, now)
            elif word is not None:
                out += self.words.tell(word, now)
        for blob, drop in self.inspectors.abandoned().items():
            if (given_up := self.downloads.give_up(blob)) is not None:
                out += [*given_up, drop]
        return out

    def _tend_pieces(self, now: Seconds) -> list[Effect]:
        """With every heartbeat, make missing pieces while no round needs the connection, and report stored ones."""
        pieces = self.known.pieces
        if pieces is None or self.leaving:
            return []
        effects = pieces.work(self.at, now)
        for word in pieces.words(now):
            effects += self.words.tell(word, now)
        return effects

    # ---- heartbeats, links, time ---------------------------------------------------------------------------

    def _tick(self, now: Seconds) -> list[Effect]:
        effects: list[Effect] = [SetTimer("beat", now + self.heartbeat.beat_s)]
        if self._known is None:
            return [*effects, *self._show_ticket(self.bootstrap, now), *self._ask_lost(self.bootstrap)]
        known = self._known
        effects += self.heartbeat_facts(self.heartbeat.tick(now, self._head()), now)
        if self.mending is not None:
            return [*effects, *self._ask_lost(self._within_reach())]
        effects += self._show_ticket(self._within_reach(), now)
        if not self.regain.busy and self.round is None and not self.over:
            effects += self._catch_up(now) if self.at >= -1 else self.regain.begin(known.history, "trying again")
        effects += known.eras.ask(self._within_reach(), now) if known.eras is not None else []
        effects += self.inspectors.retransmit() + self.kept_rows.ask_again()
        effects += self._tend_pieces(now)
        effects += self.words.again(now)
        if self.wish.role != "visitor":
            effects += known.sides.look(known.branches.known, now)
        return effects + self._seek_admission(now)

    def heartbeat_facts(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        """Act on heartbeat events: stop waiting for a peer, report it, or accept its return."""
        if self.is_lost:
            return effects  # there are no members yet
        out: list[Effect] = []
        for effect in effects:
            out.append(effect)
            if not isinstance(effect, Emit):
                continue
            match effect.fact:
                case PeerSuspected(peer=peer, why=why):
                    out += self.words.suspect(peer, why, now)
                case PeerReturned(peer=peer):
                    self.known.pool.withdraw_suspicion(self.me, peer)
                case _:
                    continue
            if self.round is not None:
                out += self._from_round(self.round.look_again(self._run_time(now)), now)
        return out

    def _link_up(self, event: LinkUp, peer: PeerId, now: Seconds) -> list[Effect]:
        self.linked.add(peer)
        effects: list[Effect] = [self._hello(peer, now)]
        effects += self.heartbeat_facts(self.heartbeat.link(event, now), now)
        if self.is_lost:
            return [*effects, *self._ask_lost([peer])]
        known = self.known
        known.pool.withdraw_farewell(peer)
        farewell = known.pool.said_by(self.me, tag_of(LeaveReport)) if self.leaving else []
        effects += [Send(peer, MemberReport(word)) for word in farewell]
        effects += self.downloads.linked(peer, now)
        effects += self.regain.fetch.linked(peer, now) if self.regain.fetch is not None else []
        effects += known.eras.ask_of(peer, now) if known.eras is not None else []
        effects += known.branches.met(peer, known.roster.put_away())
        if self.round is not None:
            effects += self._from_round(self.round.greet(peer), now)
        return effects

    def _wake(self, now: Seconds) -> list[Effect]:
        """After a sleep of this computer, request what happened meanwhile; the others were not silent."""
        self.heartbeat.slept(now)
        self.news.woke()
        effects: list[Effect] = [SetTimer("beat", now)]
        if not self.is_lost:
            effects += [Send(p, VerticesRequest(self._head() + 1)) for p in self._within_reach()[:4]]
        return effects

    def _measured(self) -> LocalMeasurements:
        members = [m.peer for m in self.known.roster.members if m.present]
        links = report(self.rates, self.heartbeat.latencies(), members)
        return LocalMeasurements(self.heartbeat.offset_s, links)

    def _run_time(self, now: Seconds) -> Seconds:
        return now + self.heartbeat.offset_s

    def _to_local(self, effect: Effect) -> Effect:
        """Convert a round's timer from run time to the driver's clock."""
        if isinstance(effect, SetTimer) and effect.at is not None and effect.name.startswith(("round/", "reduce/")):
            return replace(effect, at=effect.at - self.heartbeat.offset_s)
        return effect

    def _fact(self, fact: Fact) -> Emit:
        """Add the round of the local state to an event outside a round."""
        return Emit(replace(fact, round=self.at) if fact.round == -1 else fact)

    # ---- for operators (`operator_commands.py`) --------------------------------------------------------------

    def say(self, statement: Statement, now: Seconds) -> list[Effect]:
        """Send a report of the local peer to the members."""
        return [self._to_local(e) for e in self.words.tell(statement, now)]

    def begin_epoch(self, vertex: Vertex, now: Seconds) -> list[Effect]:
        """Continue the run from this vertex, which the recovery identity has signed."""
        effects = self._learn_vertex(vertex, self.me, now)
        after = self.known.history.head_body
        news = VerticesResponse((vertex,), after.round)
        effects += [Send(m.peer, news) for m in after.members if m.present and m.peer != self.me]
        effects += self._from_round(self._learned(after.round, vertex, now), now)
        return [self._to_local(e) for e in effects]

    # None until genesis is known

    @property
    def history(self) -> VertexChain | None:
        return self._known.history if self._known is not None else None

    @property
    def pool(self) -> ReportPool | None:
        return self._known.pool if self._known is not None else None

    @property
    def eras(self) -> EraChain | None:
        return self._known.eras if self._known is not None else None

    @property
    def pieces(self) -> ArchiveMachine | None:
        return self._known.pieces if self._known is not None else None
