"""Participation of a peer in a run that it knows: rounds, agreed state, reports and members.

Invariants:
- One round is in progress at a time; the next one begins after the local state reached its parent.
- A PeerFault drops the message that caused it and changes nothing.
Not responsible for: genesis and repair of the history, links and timers, peers without membership (peer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import EARLY_ROUNDS
from atoll.base.machine import (
    Broadcast,
    Effect,
    Emit,
    Event,
    Fact,
    Persist,
    Received,
    Send,
    Start,
    tag_of,
)
from atoll.crypto.signer import SignatureVerifier, Signer
from atoll.peer.capabilities import PeerPlugins
from atoll.peer.events import (
    UNSERVED,
    AgreedStateMissing,
    LocalStateCaughtUp,
    MemberAccused,
    ProtocolFault,
    RollbackStateUnavailable,
    RoundAttemptFailed,
    RoundClosed,
    RunOver,
    StateDownloadBegan,
    UpdateSharingBegan,
)
from atoll.peer.governance.orders import amend_of
from atoll.peer.governance.settings_change import is_over, plan_after
from atoll.peer.membership.admission import UNTOLD, AdmissionRequester, DesiredRole, expelled, refusal_of
from atoll.peer.membership.opt_out import WHY, RoundOptOut
from atoll.peer.membership.report_broadcaster import ReportBroadcaster
from atoll.peer.membership.roster import change_of
from atoll.peer.round.candidate import LocalMeasurements
from atoll.peer.round.machine import RoundMachine
from atoll.peer.round.outcome import left_open
from atoll.peer.round.part_exchange import PartArrivalTime
from atoll.peer.round.topology_choice import part_bytes_most
from atoll.peer.round.update_sharing import RoundEnvironment
from atoll.peer.run_view import HistoryExtended, RunView
from atoll.peer.settings import RunSettings
from atoll.peer.sync.downloads import BlobDownloads
from atoll.peer.sync.early_messages import EarlyMessageBuffer
from atoll.peer.sync.history_repair import HistoryRepair
from atoll.peer.sync.part_cache import RecentPartCache
from atoll.peer.sync.part_prefetch import PartPrefetch
from atoll.peer.sync.state_sync import StateSync
from atoll.peer.sync.vertex_sync import VertexSync
from atoll.peer.tasks import StateRestored
from atoll.peer.verify.registry import VerifierRegistry
from atoll.policy.fault_tolerance import OwnerStrikes
from atoll.policy.links import TransferRates, report
from atoll.policy.membership import only_counts, suspicions_needed
from atoll.protocol.membership.failure_detector import FailureDetector, PeerReturned, PeerSuspected
from atoll.protocol.transfer.download import BlobFetched, FetchFailed
from atoll.wire.codec import decode_body
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.audits import ExhibitResponse
from atoll.wire.messages.history import (
    VerticesResponse,
)
from atoll.wire.messages.membership import Ping, ReportMessage
from atoll.wire.messages.round import PartRequest, PartResponse, RoundMessage, RowRequest, RowResponse
from atoll.wire.messages.statements import (
    Accusation,
    AuditReport,
    ChangeSettings,
    LeaveReport,
    OwnerComplaint,
    RollbackOrder,
    SignedStatement,
    SuspicionReport,
)
from atoll.wire.messages.vertex import Vertex


def _signed_by(message: object) -> PeerId | None:
    signed = getattr(message, "statement", None)
    return signed.signer if isinstance(signed, SignedStatement) else None


class RunParticipationMachine:
    """Rounds, state and reports of one peer. `now` is the driver's clock; rounds get run time."""

    def __init__(
        self,
        run: Digest,
        signer: Signer,
        verifier: SignatureVerifier,
        wish: DesiredRole,
        capabilities: PeerPlugins,
    ) -> None:
        self.notary = StatementSigner(run, signer, verifier)
        self.me, self.wish, self.settings = signer.peer, wish, RunSettings()
        self.heartbeat = FailureDetector(self.me, 2.0, 6.0)
        self.view: RunView | None = None  # None until genesis is known
        self.mending: HistoryRepair | None = None  # set while the stored history has a hole
        self.at = -2  # round of the local state; -1: genesis, -2: no state
        self.round: RoundMachine | None = None
        self.regain = StateSync(run, self.me)
        self.downloads = BlobDownloads(self.notary, lambda: self.known, self._found_state)
        self.news = VertexSync()
        self.said: dict[str, bytes] = {}
        self.old_parts = RecentPartCache()
        self.early = EarlyMessageBuffer()
        self.admission = AdmissionRequester(self.me, signer, wish.role == "visitor")
        self.linked: set[PeerId] = set()
        self.unknown_key = False  # the local key differs from the one in the membership
        self.rates = TransferRates()
        self.strikes, self.part_pace = OwnerStrikes(), PartArrivalTime()
        self.prefetch = PartPrefetch(self.part_pace)
        self.resting = RoundOptOut()
        self.words = ReportBroadcaster(
            self.notary, lambda: self.known, self.heartbeat, self._writers, self.pool_report
        )
        self.capabilities = capabilities
        self.verifiers = VerifierRegistry(self.me, capabilities.verifiers)
        self.over = self.leaving = False

    @property
    def known(self) -> RunView:
        """The run view; only used after genesis is known."""
        assert self.view is not None
        return self.view

    @property
    def is_lost(self) -> bool:
        return self.view is None or self.mending is not None

    def judged(self, sender: PeerId, hear: Callable[[], list[Effect]]) -> list[Effect]:
        """Report a PeerFault and drop its message.

        Components raise before they change anything, so that suffices.
        """
        try:
            return hear()
        except PeerFault as fault:
            return [self.fact(ProtocolFault(peer=PeerId(fault.who) or sender, what=fault.what))]

    def fact(self, fact: Fact) -> Emit:
        """Add the round of the local state to an event outside a round."""
        return Emit(replace(fact, round=self.at) if fact.round == -1 else fact)

    # ---- rounds ------------------------------------------------------------------------------------------

    def begin_round(self, now: Seconds) -> list[Effect]:
        """Begin the round after the local state."""
        history, pool = self.known.history, self.known.pool
        parent, head = history.bodies.get(self.at), history.ids.get(self.at)
        if parent is None or head is None:
            # updates sent before a restart may have been counted meanwhile
            if self.settings.apart_terms is not None:
                self.regain.left = left_open(self.me, 0, None)
            return self.regain.begin(history, "the local state is older than the vertices in memory")
        waits = self.at == history.head and is_over(self.settings, parent)
        if waits and not pool.of_kind(tag_of(ChangeSettings)):  # otherwise members may agree on more rounds
            self.round, was_over, self.over = None, self.over, True
            fact = RunOver(round=self.at, rounds=parent.trained, state=parent.state)
            if was_over:
                return []
            return [self.fact(fact), *(Send(peer, Ping(now, self.at)) for peer in self.within_reach())]
        self.over = False
        mine = next((m for m in parent.members if m.peer == self.me and m.is_present), None)
        self.unknown_key = mine is not None and mine.vote_key != self.notary.signer.vote_key
        ground = self.known.ground_after(head, parent, self.run_time(now))
        plan = ground.plan
        if self.prefetch.parts.round != plan.round:
            self.prefetch.drop()
        env = RoundEnvironment(
            gone=self.known.mute,
            unheard=self.heartbeat.is_silent_only,
            reports=lambda: pool.chosen(self.heartbeat.is_gone),
            held=self.old_parts.begin(plan.round),
            said=self.said,
            measured=self._measured,
            strikes=self.strikes,
            part_pace=self.part_pace,
            extension=self.capabilities.round_extension,
            keeps_rows=self.verifiers.keeps_rows,
        )
        agreement = self.known.open_agreement(ground, self.said.get(f"said/{plan.round}/agreement"))
        self.round = RoundMachine(ground, self.notary, agreement, env)
        if self.round.trains and self.resting.covers(plan.round):
            self.round.update.passes = WHY
        elif self.round.trains and ground.trust.audited and self.wish.unaudited and self.me not in ground.unaudited:
            self.round.update.passes = UNTOLD
        looks = self.from_verifiers(self.verifiers.on_state(self.at), now) + self.seek_demanded()
        effects = looks + self._report_resting(now) + self.to_round(Start({}), now)
        vertex = history.vertices.get(plan.round)
        if vertex is not None:
            effects += self.from_round(self.learn_round(plan.round, vertex, now), now)
        return effects + self.words.round_begins(now) + self._replay_early(now) + self._ask_unheard()

    def learn_round(self, round: int, vertex: Vertex, now: Seconds) -> list[Effect]:
        current = self.round  # a round may close inside its own first event
        if current is None or current.plan.round != round:
            return []
        return current.accept_vertex(vertex, self.run_time(now), self.prefetch.take())

    def to_round(self, event: Event, now: Seconds) -> list[Effect]:
        if self.round is None:
            return []
        return self.from_round(self.round.handle(event, self.run_time(now)), now)

    def from_round(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        out: list[Effect] = []
        for effect in effects:
            if self.unknown_key and isinstance(effect, Send | Broadcast) and _signed_by(effect.message) == self.me:
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
                case UpdateSharingBegan():
                    out += self._arrange_old_parts(effect.fact)
                case RoundAttemptFailed() if self.round is not None:
                    out += self.heartbeat.ping_unwatched(self.round.plan.committee, now, self.head())
                case RollbackStateUnavailable(state=state):
                    out += self.downloads.earlier.find(state, anew=True)
                case AgreedStateMissing():
                    self._leave_round(effect.fact.vertex)
                    out += self.learn_vertex(effect.fact.vertex, self.me, now)
                    out += self.regain.begin(self.known.history, effect.fact.why)
                case _:
                    pass
        return out + self._request_next_parts(now)

    def _request_next_parts(self, now: Seconds) -> list[Effect]:
        """Request the next round's parts, if its vertex is here while the state of this round is made."""
        current, history = self.round, self.known.history
        if current is None or not (current.ground.has_pieces and current.makes_final_state) or self.leaving:
            return []
        round = current.plan.round
        head, parent, body = history.ids.get(round), history.bodies.get(round), history.bodies.get(round + 1)
        if head is None or parent is None or body is None or round < self.prefetch.parts.round:
            return []
        if amend_of(body) is not None or self.regain.is_shorter(history, self.at):
            return []  # the run goes back, or this peer fetches a state
        plan = plan_after(self.settings, head, parent)
        sources = dict.fromkeys([body.proposer, *plan.committee])
        holders = [p for p in sources if p != self.me and p in self.linked and not self.known.mute(p)]
        self.old_parts.keep_only(round)  # in memory there are two rounds at most; other members serve older ones
        return self.prefetch.request(plan, body, holders, self.run_time(now))

    def _arrange_old_parts(self, share: UpdateSharingBegan) -> list[Effect]:
        """Drop parts of earlier rounds once all members committed to this one: no member will request them.

        If one did not, it is behind, and more rounds may pass before it can request them. An observer always lacks.
        """
        assert self.round is not None
        lacking = [m for m in self.round.plan.members if m.is_present and m.peer not in share.committed]
        if not lacking:
            self.old_parts.keep_only(share.round)
        is_behind = any(m.role != "observer" for m in lacking)
        return self.old_parts.move_to_disk(share.round) if is_behind else []

    def _round_closed(self, closed: RoundClosed, now: Seconds) -> list[Effect]:
        effects = self._send_to_affected(closed) + self.learn_vertex(closed.vertex, self.me, now)
        if self.round is not None:
            effects += self.verifiers.on_round_closed(closed.body, self.round.answers)
        self.at, self.round = closed.body.round, None
        # not yet those of this round: its vertex might be lost in a crash that keeps the deletion
        old = [name for name in self.said if int(name.split("/")[1]) < self.at]
        for name in old:
            del self.said[name]
            effects.append(Persist(name, None))
        return effects + self.begin_round(now) + self.seek_admission(now)

    def _send_to_affected(self, closed: RoundClosed) -> list[Effect]:
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
        self.prefetch.drop()
        self.regain.left = left = current.settlement_on_leave(vertex) if current is not None else None
        if current is None or left is None:
            return
        bodies = [body for round, body in self.known.history.bodies.items() if round >= current.plan.round]
        bodies += [decode_body(vertex.body)] if vertex is not None else []  # the history may not have it yet
        self.regain.left = replace(left, afresh=any(amend_of(body) is not None for body in bodies))

    # ---- messages of rounds ------------------------------------------------------------------------------

    def receive_round(self, event: Received, message: RoundMessage, now: Seconds) -> list[Effect]:
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
            if given := self.verifiers.on_row_request(event.sender, message, body):
                return given
        if isinstance(message, RowResponse):
            taken = self.verifiers.on_row(event.sender, message, event.payload)
            if taken is not None:
                return taken
        if isinstance(message, PartResponse) and self.prefetch.receive(message, event.payload, self.run_time(now)):
            return []
        if message.round == current and self.round is not None:
            if standing == "away" and message.trace != self.round.plan.trace:
                return []  # it works on this round of another branch
            return self.to_round(event, now)
        if message.round >= current and standing == "away":
            return []
        if message.round >= current:
            if message.round <= max(current, self.head() + 1) + EARLY_ROUNDS:
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
                hear = partial(self.receive_round, event, message, now)
                effects += self.judged(event.sender, hear)
        return effects

    def _ask_unheard(self) -> list[Effect]:
        return self.round.repeats.ask(self.early.unheard(self.round.plan.round)) if self.round is not None else []

    # ---- history and membership --------------------------------------------------------------------------

    def learn_vertex(self, vertex: Vertex, who: PeerId, now: Seconds, handed: bool = False) -> list[Effect]:
        """Extend the history if this vertex is the next one and its certificate holds."""
        was_out = self.is_expelled
        grown = self.known.learn(vertex, who, handed)
        if not isinstance(grown, HistoryExtended):
            return grown
        self.downloads.settle()
        looks = self.from_verifiers(self.verifiers.on_vertex(grown.body, now), now) + self.seek_demanded()
        changed = grown.change
        out = [self.fact(expelled(self.me))] if self.is_expelled and not was_out else []
        kept = self.known.roster.keep_leavers(changed.left, now) if changed else []
        follows = [self.fact(changed), *kept, *self.follow_members(now)] if changed else []
        return [*grown.effects, *looks, *follows, *out]

    @property
    def is_expelled(self) -> bool:
        return self.known.roster.standing_of(self.me) == "expelled"

    def follow_members(self, now: Seconds) -> list[Effect]:
        """Update connections and heartbeats to the agreed membership."""
        roster = self.known.roster
        self.heartbeat.accusers_needed = suspicions_needed(roster.voters, self.settings.round.quorum)
        self.heartbeat.set_members(roster.present(), now)
        for fetch in (self.regain.fetch, *self.downloads.wanted.values()):
            if fetch is not None:
                fetch.add_candidates(roster.within_reach())
        return roster.contacts()

    def within_reach(self) -> list[PeerId]:
        return self.known.roster.within_reach()

    def head(self) -> int:
        return -2 if self.view is None else self.view.history.head

    # ---- the agreed state, and other blobs ---------------------------------------------------------------

    def catch_up(self, now: Seconds) -> list[Effect]:
        """Bring the local state to the head, and request the desired role at once: that takes some vertices."""
        return self._approach_head(now) + self.seek_admission(now)

    def _approach_head(self, now: Seconds) -> list[Effect]:
        """Replay the rounds' parts or fetch the state, by fewer bytes."""
        history = self.known.history
        if self.regain.is_outrun(history, now):
            # members will soon have dropped the old one
            return self._fetch_state("a newer state was agreed on", now)
        if self.regain.busy or history.head <= self.at:
            return []
        if self.round is None:
            return self.begin_round(now) if self.at >= -1 else self.regain.begin(history, "joining")
        if self.regain.is_shorter(history, self.at) or self.known.roster.came_after(self.at):
            self._leave_round(history.vertices.get(self.round.plan.round))
            return self.regain.begin(history, f"{history.head - self.at} rounds behind")
        vertex = history.vertices.get(self.round.plan.round)
        if vertex is None:
            return []
        return self.from_round(self.round.accept_vertex(vertex, self.run_time(now)), now)

    def _fetch_state(self, why: str, now: Seconds) -> list[Effect]:
        history = self.known.history
        if not self.regain.fetch_from(self.within_reach(), self.linked, history, now):
            return [self.fact(StateDownloadBegan(why=f"{why}; {UNSERVED}"))]
        return [self.fact(StateDownloadBegan(why=why)), *self.to_fetch(Start({}), now)]

    def on_restored(self, found: StateRestored | None, now: Seconds) -> list[Effect]:
        how = self.regain.restored(found)
        if how is None:
            return self._fetch_state(self.regain.lack, now)
        # the history may have grown meanwhile: continue from the state's own vertex
        self.at = self.regain.round
        body = self.known.history.bodies.get(self.at)
        trained = body.trained if body is not None else 0
        caught_up = self.fact(LocalStateCaughtUp(round=self.at, by=how, trained=trained))
        return [caught_up, *self.begin_round(now), *self.seek_admission(now)]

    def to_fetch(self, event: Event, now: Seconds) -> list[Effect]:
        out = self.downloads.handle(event, self.is_quiet, now)
        ended = [e.fact for e in out if isinstance(e, Emit) and isinstance(e.fact, BlobFetched | FetchFailed)]
        out += self.from_verifiers([e for fact in ended for e in self.verifiers.on_download(fact)], now)
        return out + self.regain.handle(event, self.known.history, now)

    def fetch_exhibit(self, sender: PeerId, told: ExhibitResponse, now: Seconds) -> list[Effect]:
        state = self.regain.fetch
        if state is not None and state.blob == told.blob:
            return []
        wanted = self.downloads.wanted
        fetch, effects = self.verifiers.on_exhibit(sender, told, wanted, now)
        if fetch is not None:
            wanted[fetch.blob] = fetch
        return effects

    def seek_demanded(self) -> list[Effect]:
        """Find the rollback target that validators demand; a visitor does not follow it."""
        return self.downloads.find_demanded() if self.wish.role != "visitor" else []

    def on_earlier_found(self, job: str, result: object, now: Seconds) -> list[Effect]:
        """Process a disk result: whether an earlier state is stored, or which vertex closed an old round."""
        kind, _, name = job.removeprefix("earlier/").partition("/")
        if kind == "state":
            return self.downloads.looked_up(Digest(bytes.fromhex(name)), bool(result), now)
        word = self.downloads.read(name, result)
        return self.judged(word.signer, partial(self.pool_report, word.signer, word, now)) if word else []

    def _found_state(self, state: Digest, now: Seconds) -> list[Effect]:
        """Continue a round that may have waited for this earlier state."""
        return self.from_round(self.round.found_state(state, self.run_time(now)), now) if self.round else []

    @property
    def is_quiet(self) -> bool:
        """True if no round needs the connection."""
        return self.round is None or not self.round.patience.sharing

    # ---- reports of members, local ones included ---------------------------------------------------------

    def _writers(self, most: int) -> list[PeerId]:
        return self.round.writers(most) if self.round is not None else []

    def pool_report(self, sender: PeerId, signed: SignedStatement, now: Seconds) -> list[Effect]:
        """Pool a report for the next vertex, forward it if it came from its author, act on its content."""
        pool = self.known.pool
        if look := self.downloads.earlier.read(signed, pool):
            return look  # names an old vertex: read from disk, then processed again
        pooled = pool.add(signed, self.run_time(now))
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
                was_gone = self.heartbeat.is_gone(peer)
                self.heartbeat.record_suspicion(peer, by, now)
                news = news or was_gone != self.heartbeat.is_gone(peer)
            case Accusation() if self.round is not None:
                effects += self.from_round(self.round.heed(statement, self.run_time(now)), now)
            case LeaveReport():
                self.heartbeat.record_farewell(by)
            case AuditReport():
                effects += self.from_verifiers(self.verifiers.on_report(by, statement, now), now)
            case RollbackOrder(state=state):
                effects += self.downloads.earlier.find(state)
            case _:
                pass
        if sender == signed.signer and sender != self.me and pooled.fresh and not only_counts(statement):
            effects += [Send(p, ReportMessage(signed)) for p in self.known.roster.passes_on_to(signed)]
        if self.round is not None and news:
            effects += self.from_round(self.round.poll(self.run_time(now)), now)
        if self.over and isinstance(statement, ChangeSettings):
            effects += self.begin_round(now)
        return effects

    def seek_admission(self, now: Seconds) -> list[Effect]:
        """Request the desired role until the agreed membership grants it."""
        if self.leaving:
            return []
        # a peer that fetches a state is not ready, whatever it held before
        at = self.at if not self.regain.busy else -2
        audited = bool(self.settings.audited_share)
        word = self.admission.word(self.wish, self.known.history, at, now, audited)
        return self.words.broadcast(word, now) if word is not None else []

    def _report_resting(self, now: Seconds) -> list[Effect]:
        words = self.resting.words(self.at + 1)
        return [effect for word in words for effect in self.words.broadcast(word, now)]

    def from_verifiers(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        """Report the verifiers' findings to the members; they have consequences only once a vertex holds them."""
        out: list[Effect] = []
        for effect in effects:
            out.append(effect)
            word = self.verifiers.report_of(effect) if not self.leaving else None
            if isinstance(word, Accusation | OwnerComplaint):
                out += self.words.accuse(word, now)
            elif word is not None:
                out += self.words.broadcast(word, now)
        for blob, drop in self.verifiers.abandoned().items():
            if (given_up := self.downloads.give_up(blob)) is not None:
                out += [*given_up, drop]
        return out

    def tend_pieces(self, now: Seconds) -> list[Effect]:
        """With every heartbeat, make missing pieces while no round needs the connection, and report stored ones."""
        pieces = self.known.pieces
        if pieces is None or self.leaving:
            return []
        effects = pieces.on_heartbeat(self.at, now)
        for word in pieces.own_reports(now):
            effects += self.words.broadcast(word, now)
        return effects

    # ---- heartbeats and time -----------------------------------------------------------------------------

    def from_heartbeat(self, effects: list[Effect], now: Seconds) -> list[Effect]:
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
                out += self.from_round(self.round.poll(self.run_time(now)), now)
        return out

    def _measured(self) -> LocalMeasurements:
        members = [m.peer for m in self.known.roster.members if m.is_present]
        links = report(self.rates, self.heartbeat.latencies(), members)
        return LocalMeasurements(self.heartbeat.offset_s, links)

    def run_time(self, now: Seconds) -> Seconds:
        return now + self.heartbeat.offset_s
