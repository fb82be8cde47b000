"""One peer: the rooms it is made of, and the only place that connects them.

    Heartbeat   who is alive, what time it is           History   what was agreed
    Roster      whom it makes a member, whom I reach    News      vertices asked for, shown and read
    Admission   what I say to become a member           pool      member reports for the next vertex
    Round       the story of the round in progress      OldParts  of rounds that are over, for laggards
    Regain      the agreed state, on its way here       Serve     blobs for others
    Eras        long-lived signatures under the history
    Earlier     states that the run may go back to      Inspectors  is what others did any good?
    Pieces      older states in coded pieces            Branches, Sides  where the run goes on twice

Rooms of a round live in run time; this file translates from and to the driver's clock. A peer is *lost* until it
knows genesis, *behind* while its state is older than its history, *current* while a round is running. Never does
I/O, never decides without a vertex, and lets no stranger's message change anything before it is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import (
    CODEC_EXTRA,
    CONTROL_FRAME_MAX,
    EARLY_ROUNDS,
    PART_BYTES_MAX,
    ROUNDS_KEPT,
)
from atoll.base.machine import (
    Carried,
    Done,
    Effect,
    Event,
    Fact,
    Failed,
    Keep,
    LinkDown,
    LinkUp,
    Received,
    Report,
    Send,
    SetTimer,
    Start,
    TimerFired,
    Woke,
)
from atoll.keys.digest import digest
from atoll.keys.signer import Signer, Verifier, Vouch
from atoll.node.admission import Admission, Wish, refusal_of
from atoll.node.amend import Goal, amend_bytes, amend_of, amends_in
from atoll.node.apart import left_open
from atoll.node.body import write_recovery
from atoll.node.branches import Branches
from atoll.node.earlier import EarlierStates
from atoll.node.early import EarlyWords
from atoll.node.facts import (
    Accused,
    AttemptFailed,
    CaughtUp,
    Fault,
    FetchBegan,
    GenesisKnown,
    Refused,
    RoundClosed,
    RunOver,
    ShareBegan,
    StateLacked,
    StateLost,
    StateMissing,
    StateRebuilt,
)
from atoll.node.ground import ground_after
from atoll.node.inspectors import JOBS as INSPECTED
from atoll.node.inspectors import Inspectors
from atoll.node.jobs import OthersStates
from atoll.node.news import News
from atoll.node.old_parts import OldParts
from atoll.node.pieces import Pieces
from atoll.node.regain import Regain
from atoll.node.reports import ReportPool
from atoll.node.resting import WHY, Resting
from atoll.node.roster import Roster, change_of, identities_in
from atoll.node.round import Round
from atoll.node.settings import OTHER_RULES_FIX, RunSettings, other_rules, settings_of_run
from atoll.node.sides import TIMER as POLL
from atoll.node.sides import Sides
from atoll.node.trial import Measured
from atoll.policy.links import Rates, report
from atoll.policy.members import only_counts, suspicions_needed
from atoll.policy.plan import Turnout, plan_round, quorum
from atoll.policy.trust import Strikes
from atoll.protocol.consensus.door import open_door
from atoll.protocol.dag.eras import Eras
from atoll.protocol.dag.history import History, genesis_digest, recovery_bytes
from atoll.protocol.membership.heartbeat import Heartbeat, Returned, Suspected
from atoll.protocol.transfer.fetch import Fetch, Fetched, FetchFailed, Serve
from atoll.wire.codec import decode_body, decode_statement, decode_vertex, encode
from atoll.wire.envelope import Notary
from atoll.wire.messages.audits import ExhibitIs, WantExhibit
from atoll.wire.messages.history import (
    Chunk,
    EraSigned,
    ManifestIs,
    Vertices,
    WantChunk,
    WantEra,
    WantManifest,
    WantVertices,
)
from atoll.wire.messages.membership import Beat, BeatBack, Hello, JoinRefused, MemberReport
from atoll.wire.messages.preference import PreferenceIs, WantPreference
from atoll.wire.messages.round import PartBytes, RoundMessage, WantPart
from atoll.wire.messages.statements import (
    Amend,
    Caught,
    Complaint,
    Invite,
    Join,
    Leave,
    Signed,
    Suspect,
    Validated,
)
from atoll.wire.messages.vertex import Body, Vertex

WRITERS_TOLD = 8  # of a large swarm's voters, in turn: where a third lies all of them do so in 1 of 10,000 rounds
BACK_AGAIN_S = 3.0  # so are words to go back, to members that were a vertex behind when they heard them


def part_bytes_most(update_bytes: int) -> int:
    """Of one payload, where an update is so large without a codec; 0: nobody knows. Bodies fit in always."""
    part = min(PART_BYTES_MAX, update_bytes or PART_BYTES_MAX)
    return part + part // CODEC_EXTRA + CONTROL_FRAME_MAX


def _signed_by(message: object) -> PeerId | None:
    signed = getattr(message, "statement", None)
    return signed.signer if isinstance(signed, Signed) else None


class Peer:
    """One member of one run, in either world. `wall` says whether the driver's clock is wall time."""

    def __init__(
        self,
        run: Digest,
        signer: Signer,
        verifier: Verifier,
        wish: Wish,
        genesis: Vertex | None = None,
        bootstrap: Sequence[PeerId] = (),
        vouch: Vouch | None = None,
    ) -> None:
        self.notary = Notary(run, signer, verifier)
        self.me, self.run, self.wish = signer.peer, run, wish
        self.genesis, self.bootstrap = genesis, tuple(bootstrap)
        self.settings = RunSettings()
        self.heartbeat = Heartbeat(self.me, 2.0, 6.0)
        self.history: History | None = None
        self.vouch = vouch
        self.eras: Eras | None = None  # where the run has them
        self.at = -2  # the round whose agreed state I hold; -1 is genesis' state, -2 none at all
        self.round: Round | None = None
        self.regain = Regain(run)
        self.wanted: dict[Digest, Fetch] = {}  # other blobs that the driver asked for, such as the data set
        self.serve = Serve()
        self.news = News()
        self.roster: Roster | None = None  # as soon as there is a history
        self.pool: ReportPool | None = None  # the same
        self.branches: Branches | None = None  # the same
        self.sides: Sides | None = None  # the same
        self.said: dict[str, bytes] = {}
        self.old_parts = OldParts()
        self.early = EarlyWords()
        self.admission = Admission(self.me, signer)
        self.linked: set[PeerId] = set()
        self.unknown_key = False  # I sign with another key than the one that the membership holds
        self.rates = Rates()
        self.identities: dict[PeerId, bytes] = {}  # public identities that members joined with, for handshakes
        self.strikes = Strikes()
        self.resting = Resting()
        self.earlier = EarlierStates(self.notary)
        self.said_back: Seconds = 0.0  # when words to go back were last repeated
        self.inspectors = Inspectors(self.me)
        self.pieces: Pieces | None = None  # where older states lie in them
        self.over = self.leaving = False

    # ---- the table of contents -----------------------------------------------------------------------------

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        """`now` is the driver's clock; the rooms of a round are told run time."""
        return [self._to_local(e) for e in self._react(event, now)]

    def _react(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Start(kept):
                return self._start(kept, now)
            case Received(sender, message):
                alive = self.heartbeat_facts(self.heartbeat.heard(sender, now), now)
                return alive + self._judged(sender, lambda: self._hear(event, message, now))
            case TimerFired("beat"):
                return self._tick(now)
            case TimerFired("silence"):
                return self.heartbeat_facts(self.heartbeat.look(now), now) + self._look_for_silence(now)
            case LinkUp(peer):
                return self._link_up(event, peer, now)
            case LinkDown(peer):
                self.linked.discard(peer)
                return self.heartbeat_facts(self.heartbeat.link(event, now), now)
            case Woke():
                return self._wake(now)
            case Carried(bytes_s, to):
                self.rates = Rates(bytes_s, dict(to))
                return []
            case Done(job, result) if job == "restore":
                return self._restored(result if isinstance(result, OthersStates) else bool(result), now)
            case Failed(job) if job == "restore":
                return self._restored(False, now)
            case Done(job, result) if job.startswith("history/"):
                return self.news.read(job, result)
            case Failed(job) if job.startswith("history/"):
                return self.news.read(job, ())
            case Done(job, result) if job.startswith("era/"):
                return self.eras.read(job, result) if self.eras is not None else []
            case Failed(job) if job.startswith("era/"):
                return self.eras.read(job, None) if self.eras is not None else []
            case Done(job, result) if job.startswith("earlier/"):
                return self._earlier_answered(job, result, now)
            case Failed(job) if job.startswith("earlier/"):
                return self._earlier_answered(job, None, now)
            case Done(job) | Failed(job) if job.startswith(INSPECTED):
                return self._from_inspectors(self.inspectors.done(event, now), now)
            case Done(job) | Failed(job) if job.startswith("pieces/"):
                done = self.pieces.done(event, self._within_reach(), now) if self.pieces is not None else []
                return self._from_pieces(done, now)
            case TimerFired(name) if name.startswith(POLL) and self.sides is not None:
                return self.sides.fired(event, now)
            case Done() | Failed() | TimerFired():
                return self._to_rooms(event, now)

    def _judged(self, sender: PeerId, hear: Callable[[], list[Effect]]) -> list[Effect]:
        """Rooms raise PeerFault before they change anything, so dropping the message is all there is to do."""
        try:
            return hear()
        except PeerFault as fault:
            return [self._fact(Fault(peer=PeerId(fault.who) or sender, what=fault.what))]

    def _hear(self, event: Received, message: object, now: Seconds) -> list[Effect]:
        sender = event.sender
        match message:
            case RoundMessage():
                return self._hear_round(event, message, now)
            case Beat(head=head) | BeatBack(head=head):
                return self.heartbeat.beat(event, now, self._head()) + self.news.ask(sender, head, now)
            case Hello(run, head):
                if run != self.run:
                    raise PeerFault(sender, "belongs to another run")
                return self.news.ask(sender, head, now)
            case MemberReport(statement):
                return self._hear_report(sender, statement, now)
            case JoinRefused(code, what, fix):
                return [self._fact(Refused(by=sender, code=code, what=what, fix=fix))]
            case WantVertices(first):
                return self.news.give(sender, first)
            case Vertices():
                return self._hear_vertices(sender, message, now)
            case WantManifest() | WantChunk():
                return self.serve.handle(event, now)
            case EraSigned():
                return self._hear_era(self.eras, sender, message, now) if self.eras is not None else []
            case WantEra():
                return self.eras.give(sender, message) if self.eras is not None else []
            case ManifestIs() | Chunk():
                return self._to_fetch(event, now)
            case WantExhibit():
                return self.inspectors.give(sender, message)
            case ExhibitIs():
                return self._fetch_exhibit(sender, message, now)
            case WantPreference() | PreferenceIs():
                return self.sides.hear(event, now) if self.sides is not None else []
            case _:
                return []

    # ---- beginning -----------------------------------------------------------------------------------------

    def _start(self, kept: dict[str, bytes], now: Seconds) -> list[Effect]:
        effects: list[Effect] = [SetTimer("beat", now + self.heartbeat.beat_s)]
        self.said = {k: v for k, v in kept.items() if k.startswith("said/")}
        self.identities = {PeerId(k[9:]): v for k, v in kept.items() if k.startswith("identity/")}
        if self.genesis is None and "genesis" in kept:
            self.genesis = decode_vertex(kept["genesis"])
        if self.genesis is None:
            return [*effects, *self._ask_genesis()]
        effects += self._know_genesis(self.genesis)
        assert self.history is not None
        rounds = sorted(int(k.split("/")[1]) for k in kept if k.startswith("vertex/"))
        for round in rounds:
            if round == self.history.head + 1 or (rounds and round == rounds[0]):
                self.history.restore(decode_vertex(kept[f"vertex/{round}"]))
        if self.branches is not None:
            self.branches.restore(kept)
        effects += self.eras.restore(kept) if self.eras is not None else []
        effects += self._restore_pieces(kept)
        effects += self._from_inspectors(self.inspectors.resume(now), now) + self._seek_demanded()
        return effects + self._follow_members(now) + self.regain.begin(self.history)

    def _ask_genesis(self) -> list[Effect]:
        return [Send(peer, WantVertices(-1)) for peer in self.bootstrap]

    def _know_genesis(self, vertex: Vertex) -> list[Effect]:
        if genesis_digest(vertex) != self.run:
            raise PeerFault("", "sent a genesis that is not the one this run is named after")
        self.settings = settings_of_run(decode_body(vertex.body))
        self.history = History(vertex, self.notary, self._voters_of, self.settings.recovery)
        self.news.history = self.history
        self.roster = Roster(self.me, self.history, self.wish.role == "client")
        self.pool = ReportPool(self.notary, self.history, self.settings)
        self.branches = Branches(self.history)
        self.sides = Sides(self.me, self.history, self.linked)
        if every := self.settings.era_rounds:
            demands = self.wish.role != "visitor"  # it looks at what there is, and says what is wrong with it
            rounds, verifier = self.settings.rounds, self.notary.verifier
            self.eras = self.news.eras = Eras(self.history, every, rounds, verifier, self.vouch, demands)
        self.inspectors.appoint(self.settings, self.history, self.pool)
        if coded := self.settings.kept_coded:
            self.pieces = Pieces(self.me, coded, self.history, self.pool.ledger, self._unheard)
        s = self.settings.round
        self.heartbeat.beat_s, self.heartbeat.suspect_s = s.beat_s, s.suspect_s
        self.genesis = vertex
        for m in self.history.head_body.members:
            if self.settings.recovery and digest(self.settings.recovery) == m.identity:
                self.identities[m.peer] = self.settings.recovery
        return [
            Keep("genesis", encode(vertex)),
            self._fact(GenesisKnown(settings=self.settings, vertex=vertex)),
        ]

    def _voters_of(self, head: Digest, body: Body) -> tuple[dict[PeerId, bytes], int]:
        plan = plan_round(head, body, self.settings.round)
        return plan.vote_keys, plan.quorum

    def _leave_round(self, vertex: Vertex | None) -> None:
        """Its state is made elsewhere; `vertex` closed it, if that is still at hand."""
        assert self.history is not None
        current, self.round = self.round, None
        self.regain.left = left = current.left(vertex) if current is not None else None
        if current is None or left is None:
            return
        bodies = [body for round, body in self.history.bodies.items() if round >= current.plan.round]
        bodies += [decode_body(vertex.body)] if vertex is not None else []  # the history may not have it yet
        self.regain.left = replace(left, afresh=any(amend_of(body) is not None for body in bodies))

    def _restored(self, found: bool | OthersStates, now: Seconds) -> list[Effect]:
        how = self.regain.restored(found)
        if how is None:
            return self._fetch_state(self.regain.lack, now)
        # the history may have grown while the state was on its way: go on from the state's own vertex
        self.at = self.regain.round
        return [self._fact(CaughtUp(round=self.at, by=how)), *self._begin_round(now)]

    # ---- rounds --------------------------------------------------------------------------------------------

    def _begin_round(self, now: Seconds) -> list[Effect]:
        """The round after the state that I hold."""
        history, pool = self.history, self.pool
        assert history is not None and pool is not None
        parent, head = history.bodies.get(self.at), history.ids.get(self.at)
        if parent is None or head is None:
            if self.settings.apart_terms is not None:  # what a life before sent may have been counted meanwhile
                self.regain.left = left_open(self.me, 0, None)
            return self.regain.begin(history, "my state is older than the vertices in memory")
        if 0 < self.settings.rounds <= parent.trained and self.at == history.head:
            self.round, was_over, self.over = None, self.over, True
            fact = RunOver(round=self.at, rounds=parent.trained, state=parent.state)
            return [] if was_over else [self._fact(fact)]
        mine = next((m for m in parent.members if m.peer == self.me and m.present), None)
        self.unknown_key = mine is not None and mine.vote_key != self.notary.signer.vote_key
        plan = plan_round(head, parent, self.settings.round)
        ground = ground_after(self.settings, plan, parent, pool.recent(), self.run)
        kept = self.said.get(f"said/{plan.round}/agreement")
        raft = self.settings.by_raft
        turns = plan.turns(parent.proposer if raft else None)
        agreement = open_door(raft, self.notary, plan.round, plan.trace, plan.vote_keys, plan.quorum, turns, kept)
        held = self.old_parts.begin(plan.round)
        gone, unheard = self.heartbeat.gone, self.heartbeat.unheard
        self.round = Round(
            ground,
            self.notary,
            agreement,
            gone,
            unheard,
            pool.chosen,
            held,
            self.said,
            self._measured,
            self.strikes,
        )
        if self.round.trains and self.resting.covers(plan.round):
            self.round.update.passes = WHY
        looks = self._from_inspectors(self.inspectors.holds(self.at), now) + self._seek_demanded()
        effects = looks + self._say_resting(now) + self._to_round(Start({}), now)
        vertex = history.vertices.get(plan.round)
        if vertex is not None:
            effects += self._from_round(self._learned(plan.round, vertex, now), now)
        return effects + self._say_voices(self._voices(now)) + self._replay_early(now) + self._ask_unheard()

    def _learned(self, round: int, vertex: Vertex, now: Seconds) -> list[Effect]:
        current = self.round  # a round may close inside its own first event
        if current is None or current.plan.round != round:
            return []
        return current.learn(vertex, self._run_time(now))

    def _drop_adopted_parts(self, share: ShareBegan) -> None:
        """Everybody works on this round, so everybody holds what came before it: nobody will ask for its parts."""
        assert self.round is not None
        if {m.peer for m in self.round.plan.members if m.present} <= set(share.committed):
            self.old_parts.keep_only(share.round)

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
            if isinstance(effect, Keep) and effect.name.startswith("said/") and effect.blob is not None:
                self.said[effect.name] = effect.blob
            if not isinstance(effect, Report):
                continue
            match effect.fact:
                case RoundClosed():
                    out += self._round_closed(effect.fact, now)
                case Accused():
                    out += self._accuse(effect.fact.statement, now)
                case ShareBegan():
                    self._drop_adopted_parts(effect.fact)
                case AttemptFailed() if self.round is not None:
                    out += self.heartbeat.call(self.round.plan.committee, now, self._head())
                case StateLacked(state=state):
                    out += self.earlier.find(state, anew=True)
                case StateMissing():
                    self._leave_round(effect.fact.vertex)
                    out += self._learn_vertex(effect.fact.vertex, self.me, now)
                    assert self.history is not None
                    out += self.regain.begin(self.history, effect.fact.why)
                case _:
                    pass
        return out

    def _round_closed(self, closed: RoundClosed, now: Seconds) -> list[Effect]:
        effects = self._learn_vertex(closed.vertex, self.me, now)
        if self.round is not None:
            effects += self.inspectors.closed(closed.body, self.round.combined)
        self.at, self.round = closed.body.round, None
        # not yet those of this round: its vertex might be lost in a crash that keeps the deletion
        old = [name for name in self.said if int(name.split("/")[1]) < self.at]
        for name in old:
            del self.said[name]
            effects.append(Keep(name, None))
        return effects + self._begin_round(now) + self._seek_admission(now)

    def _learn_vertex(self, vertex: Vertex, who: PeerId, now: Seconds, handed: bool = False) -> list[Effect]:
        """The history grows by one, if this vertex is the next and its certificate holds."""
        history, pool, branches = self.history, self.pool, self.branches
        assert history is not None and pool is not None and branches is not None
        before = history.head_body
        try:
            body = history.append(vertex, who)
        except PeerFault:
            if (parted := branches.parts_us(vertex, who)) is not None:
                return parted
            raise
        if body is None:
            return branches.beside(vertex, who, self._within_reach())
        pool.settle(body)
        for unwanted in self.earlier.settle(pool):
            self.wanted.pop(unwanted, None)
        changed = change_of(before.members, body.members)
        effects: list[Effect] = [Keep(f"vertex/{body.round}", encode(vertex))]
        effects += self.pieces.grew() if self.pieces is not None else []
        effects += self._learn_identities(body)
        effects += self._end_era(body, handed)
        effects += self._from_inspectors(self.inspectors.grew(body, now), now) + self._seek_demanded()
        return effects + ([self._fact(changed), *self._follow_members(now)] if changed else [])

    def _end_era(self, body: Body, handed: bool) -> list[Effect]:
        """If an era ends with this vertex, sign it for as long as keys last; nobody waits for that."""
        if self.eras is None:
            return []
        ended = self.eras.grew(body, handed)
        return ended + self.eras.mine(body.round, self._within_reach()) if ended else []

    def _sign_for_eras(self, sign: Callable[[bytes], bytes]) -> list[Effect]:
        """The recovery identity's word under eras that will have no quorum."""
        eras = self.eras
        return eras.vouch_for(sign, self._within_reach()) if eras is not None else []

    def _hear_era(self, eras: Eras, sender: PeerId, said: EraSigned, now: Seconds) -> list[Effect]:
        """If this was what kept me from believing more of the history, I go on."""
        before, after = eras.demanded(self._head() + 1), eras.hear(sender, said, now)
        if before is not None and eras.demanded(self._head() + 1) is None:
            return [*after, Send(sender, WantVertices(self._head() + 1))]
        return after

    def _learn_identities(self, body: Body) -> list[Effect]:
        """For handshakes with those who joined in this round."""
        found = identities_in(body, self.notary.verifier)
        self.identities.update(found)
        return [Keep(f"identity/{peer}", public) for peer, public in found.items()]

    def _follow_members(self, now: Seconds) -> list[Effect]:
        """Connections and heartbeats follow the agreed membership."""
        assert self.roster is not None
        self.heartbeat.accusers_needed = suspicions_needed(self.roster.voters, self.settings.round.quorum)
        self.heartbeat.watch(self.roster.present(), now)
        return self.roster.contacts()

    def _within_reach(self) -> list[PeerId]:
        assert self.roster is not None
        return self.roster.within_reach()

    # ---- messages of rounds --------------------------------------------------------------------------------

    def _hear_round(self, event: Received, message: RoundMessage, now: Seconds) -> list[Effect]:
        """Members are heard; those that are away are helped to catch up; a stranger leaves no trace."""
        standing = self.roster.standing_of(event.sender) if self.roster is not None else None
        if standing is None or standing == "expelled":
            return []
        self._check_size(event)
        current = self.round.plan.round if self.round is not None else self.at + 1
        if isinstance(message, WantPart) and message.round != current:
            return self.old_parts.give(event.sender, message)
        if message.round == current and self.round is not None:
            if standing == "away" and message.trace != self.round.plan.trace:
                return []  # it works on this round of another branch: no word of it is meant for us
            return self._to_round(event, now)
        if message.round >= current and standing == "away":
            return []
        if message.round >= current:
            if message.round <= max(current, self._head() + 1) + EARLY_ROUNDS:
                self.early.remember(event)
            else:
                self.early.drop(event)
            return []
        if isinstance(message, PartBytes):
            return []
        return self.news.hint(event.sender, message.round, now)

    def _check_size(self, event: Received) -> None:
        """Raise PeerFault for more bytes than a part, or a body, of this run can have."""
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
        return self.round.ask_again(self.early.unheard(self.round.plan.round)) if self.round is not None else []

    # ---- catching up ---------------------------------------------------------------------------------------

    def _head(self) -> int:
        return self.history.head if self.history is not None else -2

    def _hear_vertices(self, sender: PeerId, message: Vertices, now: Seconds) -> list[Effect]:
        effects: list[Effect] = []
        vertices = list(message.vertices)
        fresh = self.history is None
        if self.history is None:
            if not vertices:
                return []
            genesis = vertices.pop(0)
            if genesis_digest(genesis) == self.run and (why := other_rules(decode_body(genesis.body).settings)):
                refused = Refused(by=self.me, code="E-RUN-15", what=why, fix=OTHER_RULES_FIX, for_good=True)
                return [self._fact(refused)]
            effects += self._know_genesis(genesis)
        history = self.history
        assert history is not None
        before = history.head
        handed = self.at < history.head or message.head > history.head + 1
        for vertex in vertices:  # what was right before a wrong one stays right
            if self.eras is not None and self.eras.demanded(history.head + 1) is not None:
                return effects + self.eras.demand(sender, history.head + 1, now)
            effects += self._judged(sender, partial(self._learn_vertex, vertex, sender, now, handed))
        if message.head > history.head and (fresh or history.head > before):
            effects.append(Send(sender, WantVertices(history.head + 1)))
            return effects  # all of them first: a state is fetched once, for the newest
        if fresh:
            return effects + self._follow_members(now) + self.regain.begin(history)
        return effects + self._catch_up(now)

    def _catch_up(self, now: Seconds) -> list[Effect]:
        """My history is ahead of my state: by a few rounds, replay their parts; by many, fetch the state."""
        history = self.history
        assert history is not None
        if self.regain.is_outrun(history):
            return self._fetch_state("a newer state was agreed on", now)  # the old one is soon nobody's any more
        if self.regain.busy or history.head <= self.at:
            return self._seek_admission(now)
        if self.round is None:
            return self._begin_round(now) if self.at >= -1 else self.regain.begin(history, "joining")
        if history.head - self.at > ROUNDS_KEPT // 2:
            self._leave_round(history.vertices.get(self.round.plan.round))
            return self.regain.begin(history, f"{history.head - self.at} rounds behind")
        vertex = history.vertices.get(self.round.plan.round)
        if vertex is None:
            return []
        return self._from_round(self.round.learn(vertex, self._run_time(now)), now)

    def _fetch_state(self, why: str, now: Seconds) -> list[Effect]:
        history = self.history
        assert history is not None
        if not self.regain.fetch_from(self._within_reach(), history, now):
            return [self._fact(FetchBegan(why=f"{why}; nobody else could serve it"))]
        return [self._fact(FetchBegan(why=why)), *self._to_fetch(Start({}), now)]

    def seek(self, state: Digest, now: Seconds) -> list[Effect]:
        """An earlier agreed state, out of pieces if it lies in some. `Fetched`, `StateRebuilt` or a failure
        says how that ended."""
        made = self.pieces.seek(state, now) if self.pieces is not None else None
        return self._from_pieces(made, now) if made is not None else self.want(state, now)

    def want(self, blob: Digest, now: Seconds) -> list[Effect]:
        """Fetch a blob from the members; `Fetched` says when it is here."""
        assert self.history is not None
        sources = self._within_reach()
        fetch = self.wanted[blob] = Fetch(blob, sources)
        return fetch.handle(Start({}), now)

    def _to_fetch(self, event: Event, now: Seconds) -> list[Effect]:
        out: list[Effect] = []
        for fetch in list(self.wanted.values()):
            got = fetch.handle(event, now)
            out += got
            if fetch.over:
                del self.wanted[fetch.blob]
                here = any(isinstance(e, Report) and isinstance(e.fact, Fetched) for e in got)
                out += self._earlier_ended(fetch.blob, here, now)
        if self.pieces is not None:
            out += self._serve_pieces(event, now)
        ended = [e.fact for e in out if isinstance(e, Report) and isinstance(e.fact, Fetched | FetchFailed)]
        out += self._from_inspectors([e for fact in ended for e in self.inspectors.fetched(fact)], now)
        return out + self.regain.handle(event, self.history, now)

    # ---- pieces of older states ----------------------------------------------------------------------------

    def _restore_pieces(self, kept: dict[str, bytes]) -> list[Effect]:
        if self.pieces is None or self.pool is None:
            return []
        self.pieces.restore(kept)
        self.pool.recent()  # the ledger takes in what the book does not hold yet
        return self.pieces.begin()

    def _unheard(self, peer: PeerId) -> bool:
        """It is no member now, or silent: whoever has another choice does not ask it."""
        assert self.roster is not None
        return self.roster.standing_of(peer) in (None, "away", "expelled") or self.heartbeat.gone(peer)

    def _tend_pieces(self, now: Seconds) -> list[Effect]:
        """Every beat: make what is lacking while no round needs the line, say what is here."""
        if self.pieces is None or self.leaving:
            return []
        effects = self.pieces.work(self.at, now)
        for word in self.pieces.words(now):
            effects += self._tell_members(self.notary.sign(word), now)
        return effects

    def _serve_pieces(self, event: Event, now: Seconds) -> list[Effect]:
        quiet = self.round is None or not self.round.patience.sharing
        return self._from_pieces(self.pieces.serves(event, quiet, now), now) if self.pieces is not None else []

    def _from_pieces(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        """A state that came, or did not, may be waited for by those who want to go back to it."""
        out: list[Effect] = []
        for effect in effects:
            out.append(effect)
            match effect:
                case Report(StateRebuilt(state=state)):
                    out += self._earlier_ended(state, True, now)
                case Report(StateLost(state=state)) if state in self.earlier.fetching:
                    out += self._earlier_ended(state, False, now)
                case _:
                    pass
        return out

    # ---- looking at what others did ------------------------------------------------------------------------

    def _from_inspectors(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        """What they found is told to the members; a vertex will hold it, and only that has consequences."""
        out: list[Effect] = []
        for effect in effects:
            out.append(effect)
            word = self.inspectors.word_of(effect) if not self.leaving else None
            if isinstance(word, Caught | Complaint):
                out += self._accuse(word, now)
            elif word is not None:
                out += self._tell_members(self.notary.sign(word), now)
        for blob, drop in self.inspectors.given_up().items():
            if self.wanted.pop(blob, None) is not None:
                out += [SetTimer(f"fetch/{blob.hex()}/stall", None), drop]
        return out

    def _fetch_exhibit(self, sender: PeerId, told: ExhibitIs, now: Seconds) -> list[Effect]:
        state = self.regain.fetch
        if state is not None and state.blob == told.blob:
            return []
        fetch, effects = self.inspectors.point(sender, told, self.wanted, now)
        if fetch is not None:
            self.wanted[fetch.blob] = fetch
        return effects

    def _seek_demanded(self) -> list[Effect]:
        """Where validators demand to go back, the state is looked for at once."""
        demanded = self.pool.recent().validations.demanded() if self.pool is not None else None
        if demanded is None or self.wish.role == "visitor":  # who only reads along goes nowhere
            return []
        return self.earlier.find(demanded.state)

    # ---- joining, leaving, reports -------------------------------------------------------------------------

    def _seek_admission(self, now: Seconds) -> list[Effect]:
        """Ask to be what I wish to be, until the agreed membership says so."""
        if self.history is None or self.leaving:
            return []
        word = self.admission.word(self.wish, self.history, self.at, now)
        return self._tell_members(self.notary.sign(word), now) if word is not None else []

    def farewell(self, why: str, now: Seconds) -> list[Effect]:
        """I am leaving on purpose: say so to everybody, so that nobody waits."""
        self.leaving = True
        if self.history is None:
            return []
        effects = self._tell_members(self.notary.sign(Leave(self.at + 1, why[:200])), now)
        return [self._to_local(e) for e in effects]

    def rest(self, rounds: int, now: Seconds, at_once: bool = False) -> list[Effect]:
        """Train in none of the next so many rounds; 0: in all again. `at_once`: nor in the one under way, in which
        my trainer is to give nothing any more."""
        self.resting.begins(self.at + (1 if at_once else 2), rounds)
        return [self._to_local(e) for e in self._say_resting(now)]

    def _say_resting(self, now: Seconds) -> list[Effect]:
        if self.history is None:
            return []
        words = self.resting.words(self.at + 1)
        return [effect for word in words for effect in self._tell_members(self.notary.sign(word), now)]

    def turnout(self, now: Seconds) -> Turnout:
        """Whether those who decide on the next vertex are here, as far as I can know."""
        if self.history is None:
            return Turnout((), (), (), 0)
        if self.round is not None:
            voters, needed = self.round.plan.committee, self.round.plan.quorum
        else:
            voters = tuple(m.peer for m in self.history.head_body.members if m.votes)
            needed = quorum(len(voters), self.settings.round.quorum)
        absent = tuple(p for p in voters if p != self.me and not self.heartbeat.here(p, now))
        anew = self._rekeyed().difference(absent)
        return Turnout(voters, absent, tuple(p for p in voters if p in anew), needed)

    def _rekeyed(self) -> set[PeerId]:
        """Members that ask for another key than the one that the membership holds."""
        if self.pool is None or self.roster is None:
            return set()
        held = {m.peer: m.vote_key for m in self.roster.members}
        asked = ((s.signer, decode_statement(s.body, s.signer)) for s in self.pool.of_kind(Join.__name__))
        return {p for p, join in asked if isinstance(join, Join) and held.get(p, join.vote_key) != join.vote_key}

    def recover(self, sign: Callable[[bytes], bytes], now: Seconds) -> list[Effect]:
        """Start over from the last agreed vertex with the members that can be heard; a quorum is gone for good.

        Where a quorum is here, but not of those who had to sign eras, or the lack of these keeps me from the rest
        of the history, sign them instead, and no more. `sign` is the recovery identity's. Raises ValueError with
        the reason where that would be wrong.
        """
        history = self.history
        if history is not None and self.eras is not None and self.eras.demanded(history.head + 1) is not None:
            more = [Send(p, WantVertices(history.head + 1)) for p in self._within_reach()]
            return [self._to_local(e) for e in (*self._sign_for_eras(sign), *more)]
        if history is None or self.at != history.head or self.round is None:
            raise ValueError("this peer does not hold the last agreed state; let it catch up first")
        body, turnout = history.head_body, self.turnout(now)
        if turnout.here >= turnout.needed:
            if unsigned := self._sign_for_eras(sign):
                return [self._to_local(e) for e in unsigned]
            raise ValueError(
                f"{turnout.here} voters are here, {turnout.needed} needed: the run can go on by itself"
            )
        if not any(m.peer == self.me and m.votes for m in body.members):
            raise ValueError("this peer has no vote in the last agreed membership")
        # in a large swarm I watch a few: who is out of sight shall not be counted on in the next quorum
        out_of_sight = {*turnout.absent, *turnout.anew}
        linked = {p for p in self.linked - out_of_sight if self.heartbeat.here(p, now)} | {self.me}
        after = write_recovery(body, history.head_id, self.run, self.me, linked, self._run_time(now))
        raw = encode(after)
        vertex = Vertex(raw, None, sign(recovery_bytes(self.run, raw)))
        effects = self._learn_vertex(vertex, self.me, now)
        news = Vertices((vertex,), after.round)
        effects += [Send(m.peer, news) for m in after.members if m.present and m.peer != self.me]
        effects += self._sign_for_eras(sign)
        effects += self._from_round(self._learned(after.round, vertex, now), now)
        return [self._to_local(e) for e in effects]

    def invite(self, invite: Invite, now: Seconds) -> list[Effect]:
        """Put an invitation (or its revocation) before the members."""
        effects = self._tell_members(self.notary.sign(invite), now)
        return [self._to_local(e) for e in effects]

    def go_back(self, goal: Goal, sign: Callable[[bytes], bytes], now: Seconds) -> list[Effect]:
        """Ask the members to go on from what this earlier vertex of our chain left behind.

        `sign` is the recovery identity's. Raises ValueError with the reason where that is no use.
        """
        history, pool = self.history, self.pool
        mine = self.roster.mine if self.roster is not None else None
        if history is None or pool is None or mine is None or not mine.present:
            raise ValueError("this peer is not a member (yet)")
        if self.over:
            raise ValueError("the run is over")
        if self.settings.paired:
            raise ValueError("its members have models of their own, and no earlier one that all of them held")
        pool.goals[goal.id] = goal
        plain = Amend(history.head_id, goal.round, goal.id, goal.state, goal.trained, b"")
        amend = replace(plain, signature=sign(amend_bytes(self.run, plain)))
        return [self._to_local(e) for e in self._tell_members(self.notary.sign(amend), now)]

    def _earlier_answered(self, job: str, result: object, now: Seconds) -> list[Effect]:
        """The disk says whether an earlier state is here, or which vertex an old round closed with."""
        assert self.pool is not None
        kind, _, name = job.removeprefix("earlier/").partition("/")
        if kind == "vertex":
            heard = self.earlier.heard(name, result, self.pool)
            return self._judged(heard.signer, partial(self._pool_report, heard.signer, heard, now)) if heard else []
        state = Digest(bytes.fromhex(name))
        if result:
            return self._earlier_came(state, now)
        return self.seek(state, now) if self.earlier.fetches(state) else []

    def _earlier_ended(self, state: Digest, here: bool, now: Seconds) -> list[Effect]:
        """What the members could give of an earlier state is here, or nobody gave it."""
        self.earlier.fetching.discard(state)
        if here:
            return self._earlier_came(state, now)
        return self.earlier.again(state, now) if self._wants_back() else []

    def _earlier_came(self, state: Digest, now: Seconds) -> list[Effect]:
        return self._from_round(self.round.found_state(state, self._run_time(now)), now) if self.round else []

    def _tell_members(self, signed: Signed, now: Seconds) -> list[Effect]:
        assert self.history is not None
        message = MemberReport(signed)
        sends: list[Effect] = [Send(p, message) for p in self._within_reach()]
        return sends + self._pool_report(self.me, signed, now)

    def _accuse(self, statement: Caught | Complaint, now: Seconds) -> list[Effect]:
        """A proof is told to everybody, unless there is one already. So is a voice that only counts, but in a large
        swarm, where it goes to those who write the vertex that it may stand in."""
        assert self.roster is not None and self.pool is not None
        signed = self.notary.sign(statement)
        if isinstance(statement, Caught) and self.pool.proves(statement):
            return self._pool_report(self.me, signed, now)
        return self._say_voice(signed, now) if only_counts(statement) else self._tell_members(signed, now)

    def _say_voice(self, signed: Signed, now: Seconds) -> list[Effect]:
        assert self.pool is not None
        if not self.pool.crowded:
            return self._tell_members(signed, now)
        return self._pool_report(self.me, signed, now) + self._say_voices([signed])

    def _say_voices(self, voices: Sequence[Signed]) -> list[Effect]:
        """To those who write this round's vertex: to the first ones, since some are gone and some are liars."""
        writers = self.round.writers(WRITERS_TOLD) if self.round is not None else []
        return [Send(peer, MemberReport(signed)) for signed in voices for peer in writers]

    def _voices(self, now: Seconds) -> list[Signed]:
        """Mine that wait for a vertex, where not everybody was told. Suspicions anew, of those who are still gone:
        others forget what is of rounds before."""
        assert self.pool is not None
        voices: list[Signed] = []
        for signed in self.pool.voices_of(self.me) if self.pool.crowded else ():
            said = decode_statement(signed.body, self.me)
            if isinstance(said, Suspect):
                if not self.heartbeat.gone(said.peer):
                    continue
                signed = self.notary.sign(replace(said, round=self._head() + 1))
                self.pool.add(signed, self._run_time(now))
            voices.append(signed)
        return voices

    def _hear_report(self, sender: PeerId, signed: Signed, now: Seconds) -> list[Effect]:
        if self.history is None:
            return []
        return self._pool_report(sender, signed, now)

    def _pool_report(self, sender: PeerId, signed: Signed, now: Seconds) -> list[Effect]:
        """Remember a report for the next vertex, pass on what came from its author, act on what it says."""
        assert self.roster is not None and self.pool is not None
        if look := self.earlier.read(signed, self.pool, self.settings.recovery):
            return look  # it names an old vertex: on disk, and then heard again
        pooled = self.pool.add(signed, self._run_time(now))
        if pooled is None:
            return []
        by, statement = pooled.reported.by, pooled.reported.statement
        if pooled.wrong is not None:
            refused = refusal_of(pooled.reported, pooled.wrong) if sender == by else None
            return [Send(sender, refused)] if refused is not None else []
        effects: list[Effect] = []
        news = not (self.pool.crowded and only_counts(statement))  # else it alone changes nothing for a round
        if isinstance(statement, Suspect) and by != self.me:
            was_gone = self.heartbeat.gone(statement.peer)
            self.heartbeat.accuse(statement.peer, by, now)
            news = news or was_gone != self.heartbeat.gone(statement.peer)
        if isinstance(statement, Caught) and self.round is not None:
            effects += self._from_round(self.round.heed(statement, self._run_time(now)), now)
        if isinstance(statement, Leave):
            self.heartbeat.refused.add(by)
        if isinstance(statement, Amend):
            effects += self.earlier.find(statement.state)
        if sender == signed.signer and sender != self.me and pooled.fresh and not only_counts(statement):
            effects += [Send(p, MemberReport(signed)) for p in self.roster.passes_on_to(signed)]
        if self.round is not None and news:
            effects += self._from_round(self.round.look_again(self._run_time(now)), now)
        return effects

    # ---- heartbeats, links, time ---------------------------------------------------------------------------

    def _tick(self, now: Seconds) -> list[Effect]:
        effects: list[Effect] = [SetTimer("beat", now + self.heartbeat.beat_s)]
        if self.history is None:
            return [*effects, *self._ask_genesis()]
        effects += self._watch(now)
        if not self.regain.busy and self.round is None and not self.over:
            effects += self._catch_up(now) if self.at >= -1 else self.regain.begin(self.history, "trying again")
        effects += self.eras.ask(self._within_reach(), now) if self.eras is not None else []
        effects += self.inspectors.ask_again()
        effects += self._tend_pieces(now)
        effects += self._say_again(now)
        if self.sides is not None and self.branches is not None and self.wish.role != "visitor":
            effects += self.sides.look(self.branches.known, now)
        return effects + self._seek_admission(now)

    def _say_again(self, now: Seconds) -> list[Effect]:
        """My words to go back and about states, while they wait for their vertex: who was a vertex behind could not
        believe them yet, and a leader that stays would never hear what was lost on its way to it."""
        if self.pool is None or now < self.said_back + BACK_AGAIN_S:
            return []
        mine = [signed for signed, _ in amends_in(self.pool.pool.values()) if signed.signer == self.me]
        mine += self.pool.said_by(self.me, Validated.__name__)
        self.said_back = now
        return [Send(p, MemberReport(signed)) for signed in mine for p in self._within_reach()]

    def _watch(self, now: Seconds) -> list[Effect]:
        """Ask everybody I watch, and look again the moment that somebody's silence gets too long."""
        effects = self.heartbeat_facts(self.heartbeat.tick(now, self._head()), now)
        return [*effects, *self._look_for_silence(now)]

    def _look_for_silence(self, now: Seconds) -> list[Effect]:
        due = self.heartbeat.next_silence(now)
        return [SetTimer("silence", due)] if due is not None else []

    def heartbeat_facts(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        """Act on what the heartbeat noticed: stop waiting, tell the members, or welcome back."""
        out: list[Effect] = []
        for effect in effects:
            out.append(effect)
            if not isinstance(effect, Report):
                continue
            match effect.fact:
                case Suspected(peer=peer, why=why):
                    out += self._suspect(peer, why, now)
                case Returned(peer=peer):
                    if self.pool is not None:
                        self.pool.withdraw_suspicion(self.me, peer)
                case _:
                    continue
            if self.round is not None:
                out += self._from_round(self.round.look_again(self._run_time(now)), now)
        return out

    def _suspect(self, peer: PeerId, why: str, now: Seconds) -> list[Effect]:
        mine = self.roster.mine if self.roster is not None else None
        if self.history is None or mine is None or not mine.votes:
            return []
        reason = "refused" if why == "refused" else "silent"
        signed = self.notary.sign(Suspect(self.history.head + 1, peer, reason))
        # everybody begins to watch by the words of those who always do: all others' words only count
        watches = peer in self.heartbeat.chosen
        return self._tell_members(signed, now) if watches else self._say_voice(signed, now)

    def _link_up(self, event: LinkUp, peer: PeerId, now: Seconds) -> list[Effect]:
        self.linked.add(peer)
        effects: list[Effect] = [Send(peer, Hello(self.run, self._head()))]
        effects += self.heartbeat_facts(self.heartbeat.link(event, now), now)
        if self.history is None:
            effects.append(Send(peer, WantVertices(-1)))
        state = self.regain.fetch
        for fetch in (*self.wanted.values(), *((state,) if state is not None else ())):
            effects += fetch.linked(peer, now)
        effects += self.pieces.linked(peer, now) if self.pieces is not None else []
        effects += self.eras.ask_of(peer, now) if self.eras is not None else []
        if self.branches is not None and self.roster is not None:
            effects += self.branches.met(peer, self.roster.put_away())
        if self.round is not None:
            effects += self._from_round(self.round.greet(peer, self._run_time(now)), now)
        return effects

    def _wake(self, now: Seconds) -> list[Effect]:
        """This computer slept: nobody was silent, I was deaf. Ask what happened meanwhile."""
        self.heartbeat.slept(now)
        self.news.woke()
        effects: list[Effect] = [SetTimer("beat", now)]
        if self.history is not None:
            peers = self._within_reach()
            effects += [Send(p, WantVertices(self.history.head + 1)) for p in peers[:4]]
        return effects

    def _to_rooms(self, event: Done | Failed | TimerFired, now: Seconds) -> list[Effect]:
        name = event.name if isinstance(event, TimerFired) else event.job
        if name.startswith("earlier/"):
            state = Digest(bytes.fromhex(name.rpartition("/")[2]))
            return self.earlier.find(state, anew=True) if self._wants_back() else []
        if name == "fetch-again":
            if self.regain.busy or self.history is None:
                return []
            return self.regain.begin(self.history, "the last source failed")
        if name.startswith("gather/"):
            return self._serve_pieces(event, now)
        if name.startswith("serve/"):
            return self.serve.handle(event, now)
        if name.startswith("fetch/"):
            return self._to_fetch(event, now)
        return self._to_round(event, now)

    def _wants_back(self) -> bool:
        """True while a word to go back waits for its vertex."""
        return self.pool is not None and bool(self.pool.wanted_back())

    def _measured(self) -> Measured:
        assert self.history is not None
        members = [m.peer for m in self.history.head_body.members if m.present]
        links = report(self.rates, self.heartbeat.latencies(), members)
        return Measured(self.heartbeat.offset_s, links)

    def _run_time(self, now: Seconds) -> Seconds:
        return now + self.heartbeat.offset_s

    def _to_local(self, effect: Effect) -> Effect:
        """Timers of a round are set in run time; the driver knows only its own clock."""
        if isinstance(effect, SetTimer) and effect.at is not None and effect.name.startswith(("round/", "reduce/")):
            return replace(effect, at=effect.at - self.heartbeat.offset_s)
        return effect

    def _fact(self, fact: Fact) -> Report:
        """Facts outside a round carry the round whose state I hold."""
        return Report(replace(fact, round=self.at) if fact.round == -1 else fact)
