"""Audits and openings at one peer: it shows the exhibits drawn from it, and judges those that it was drawn for.

    every vertex     draws audited trainers, opened results and auditors (`verification/replay_audit/policy.py`)
    audited member   BuildExhibit, lay_open ─► blobs ─► their names to each drawn auditor that asks
    auditor          ExhibitRequest ─► ExhibitResponse ─► fetch the blob ─► judge it ─► signed `AuditReport`

Each owner that computed a result can show it. The auditor asks the named owner first, and the others too with the
next heartbeat. An auditor that computed the result itself needs no exhibit. Reports on their way into a vertex
bring the next auditors early.
Invariants:
- No round waits for an audit: the worker audits while its trainer rests, and the next auditor follows a late one.
- The open cases of the ledger bound the memory. A blob is at most as large as this run's states allow.
Not responsible for: judging, acting on a verdict (a later vertex does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from atoll.base.errors import UNREADABLE, PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import AUDIT_TURN, MIB
from atoll.base.machine import Effect, Emit, Fact, Persist, RunTask, Send, TaskDone, TaskFailed
from atoll.peer.events import (
    AuditFindingRecorded,
    LocalAuditCompleted,
    MemberAccused,
    SumCheckFindingRecorded,
    TrainerDrawnForAudit,
)
from atoll.peer.round.owned_results import OwnedResults
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import BuildExhibit, ExhibitBuilt, JudgmentResult, PinBlobs, SumOpeningBuilt
from atoll.peer.verify.evidence_store import StoredEvidence
from atoll.peer.verify.interface import Verifier, VerifierContext, VerifierMachine
from atoll.policy.fault_tolerance import OwnerStrikes
from atoll.policy.findings import AGAINST, REFUTING
from atoll.protocol.transfer.download import BlobDownload, BlobFetched, FetchFailed
from atoll.verification.case import NOTHING
from atoll.verification.evidence_download import EvidenceDownloads, tried
from atoll.verification.replay_audit.policy import AuditCase, AuditLedger, Key, key_of
from atoll.verification.sum_check.policy import Place, SumSpotCheck, words_against
from atoll.verification.sum_check.tasks import lay_open, made_here, makers
from atoll.verification.task_builder import ground_of, twice_promised, work_for
from atoll.wire.messages.audits import ExhibitRequest, ExhibitResponse
from atoll.wire.messages.statements import (
    Accusation,
    AuditReport,
    BaseStatement,
    Finding,
    OwnerComplaint,
    SignedStatement,
)
from atoll.wire.messages.vertex import VertexBody

GIVE_UP = (
    AUDIT_TURN - 2
)  # rounds of a turn after which nothing counts as shown: the next turn starts two rounds later
OPENING_GIVE_UP = 2  # the same for an opening, which is small and made at once
GIVE_UP_S = 10.0  # least seconds before giving up, since rounds may take milliseconds and links may stall
LAID = "laid/"  # prefix of the row, before the round, that lists the blobs of openings
EXHIBIT_UPDATES = 10  # longest exhibit, in updates in fp32: two states, x, feedback, parts


class PersistedSumOpening(msgspec.Struct, frozen=True, array_like=True):
    """An opening that the local peer shows."""

    peer: PeerId  # named owner of the result
    number: int
    blob: Digest


@dataclass
class LocalAuditDuty:
    """An audit or an opening that the local peer has to judge."""

    case: AuditCase | SumSpotCheck
    since: int  # head at the start of the turn
    since_s: Seconds
    makers: tuple[PeerId, ...]  # peers that can show the exhibit, the checked one first
    blob: Digest | None = None  # named exhibit; requested again while None
    shower: PeerId | None = None  # peer that named it
    shown_s: Seconds = 0.0  # time of that
    useless: set[PeerId] = field(default_factory=set[PeerId])  # peers with an exhibit that could not be judged
    tries: int = 0
    judging: bool = False
    said: Finding | None = None
    told: bool = False  # reported; an accepted opening is not, unless a member doubts it

    @property
    def give_up(self) -> int:
        return OPENING_GIVE_UP if isinstance(self.case, SumSpotCheck) else GIVE_UP


class ReplayAudits(VerifierMachine):
    def __init__(self, context: VerifierContext) -> None:
        self.me, self.settings, self.history = context.me, context.settings, context.history
        self.docket = context.pool.ledgers.get(AuditLedger)
        self.turns: dict[Key, LocalAuditDuty] = {}
        self.ahead: dict[Key, dict[PeerId, Finding]] = {}  # received signed findings against members
        self.seconded: dict[Place, Sequence[SignedStatement]] = {}  # other owners' signatures under a result
        self.unshown: set[tuple[int, PeerId]] = set()  # round, owner with results not shown: noted once
        self.strikes = OwnerStrikes()  # counts of these rounds per owner
        self.known: set[Place] = set()  # results that the local peer computed, or recomputed
        self.exhibits: dict[Key, Digest | None] = {}  # None: under construction, or impossible
        self.laid: set[int] = set()  # rounds with a row on disk that lists the blobs of openings
        self.held: tuple[Digest, ...] = ()
        self.arriving = EvidenceDownloads("audit")
        self.evidence = context.evidence

    # ---- vertices ------------------------------------------------------------------------------------------

    def resume(self, kept: Mapping[str, bytes], now: Seconds) -> list[Effect]:
        """Continue after a restart: shown openings and local duties remain; other exhibits and rows are lost."""
        self._follow()
        for name, data in kept.items():
            if name.startswith(LAID):
                round = int(name.removeprefix(LAID))
                self.laid.add(round)
                self.exhibits.update(((round, one.peer, one.number), one.blob) for one in _read(data))
        return self._forget_laid() + self._work(now)

    def on_vertex(self, body: VertexBody, now: Seconds) -> list[Effect]:
        """Read verdicts from the vertex, and start the audits that it draws."""
        self._follow()
        effects = self._forget_laid()
        if news := self.docket.news(body):
            effects += [_fact(self._verdict(by, said), body.round) for by, said in news]
            effects += self._name_seconders()
        for case in (case for case in self.docket.cases.values() if case.round == body.round):
            if isinstance(case, SumSpotCheck):
                continue  # the round still holds its rows, and hands them over when it closes
            effects.append(
                _fact(TrainerDrawnForAudit(peer=case.peer, segment=case.segment, auditors=case.order), case.round)
            )
            if case.peer == self.me:
                self.exhibits[case.key] = None
                effects.append(RunTask(f"audit/show/{case.round}", BuildExhibit(case.round, case.segment)))
        return effects + self.evidence.keep(self._of_the_gone(body)) + self._work(now)

    def _of_the_gone(self, body: VertexBody) -> list[StoredEvidence]:
        """Judged exhibits of members that this vertex removes, whatever the finding."""
        here = {m.peer for m in body.members if m.is_present}
        doubted = (t for t in self.turns.values() if t.case.peer not in here and t.case.against)
        return [kept for turn in doubted if turn.said is not None for kept in self._kept(turn)]

    def _kept(self, turn: LocalAuditDuty) -> list[StoredEvidence]:
        """The judged exhibit, with all that a second judgment needs."""
        case, parent = turn.case, self.history.bodies.get(turn.case.round - 1)
        state = parent.state if parent is not None and isinstance(case, AuditCase) else None
        return [StoredEvidence(case.round, case.peer, turn.blob, state)] if turn.blob is not None else []

    def on_round_closed(self, body: VertexBody, results: OwnedResults) -> list[Effect]:
        """Show the openings that the vertex drew from results computed here; afterwards their rows are not needed.

        Other owners' signatures under the same results are kept: they count as theirs if the result is refuted.
        """
        made = results.made
        if self.docket.terms is not None:
            seconded = ((part, words) for part, words in results.seconded.items() if words)
            self.seconded.update({(body.round, part): words for part, words in seconded})
            self.known.update((body.round, part) for part in results.made_again)
        drawn = [case for case in self._openings(body.round) if made_here(case, made)]
        self.exhibits.update((case.key, None) for case in drawn)
        self.known.update(case.place for case in drawn)
        asked = [RunTask(f"audit/open/{body.round}/{part}", work) for part, work in lay_open(drawn, body, made)]
        return [*asked, *self._believe()]

    def _believe(self) -> list[Effect]:
        """Accept the results of turns that began before the local peer knew that it had computed them itself."""
        turns = (turn for turn in self.turns.values() if turn.said is None and self._knows(turn.case))
        return [effect for turn in turns for effect in self._end(turn, "accepted", "the local peer made it")]

    def _knows(self, case: AuditCase | SumSpotCheck) -> bool:
        return isinstance(case, SumSpotCheck) and case.place in self.known

    def _openings(self, round: int) -> list[SumSpotCheck]:
        cases = (
            case for case in self.docket.cases.values() if isinstance(case, SumSpotCheck) and case.round == round
        )
        return sorted(cases, key=lambda case: case.number)

    def _verdict(self, by: PeerId, said: AuditReport) -> Fact:
        case = self.docket.cases.get(key_of(said))
        if isinstance(case, SumSpotCheck):
            part = case.answered.part
            return SumCheckFindingRecorded(
                peer=said.peer, of=said.round, part=part, checker=by, finding=said.finding
            )
        return AuditFindingRecorded(peer=said.peer, of=said.round, auditor=by, finding=said.finding)

    def _name_seconders(self) -> list[Effect]:
        """Report once the other owners that signed a refuted result.

        For a result that no owner shows it is a complaint, and not the first time, since a crash loses rows.
        """
        cases = self.docket.cases.values()
        opened = [case for case in cases if isinstance(case, SumSpotCheck) and not self._knows(case)]
        lies = words_against(opened, self.seconded, REFUTING)
        liars = {word.signer for word in lies.values()}
        unshown = sorted(words_against(opened, self.seconded, AGAINST).keys() - self.unshown)
        self.unshown.update(unshown)
        voting = {m.peer for m in self.history.head_body.members if m.votes}
        failing = {peer for round, peer in unshown if self.strikes.note(peer, round)} & voting - liars - {self.me}
        for place, said in self.seconded.items():
            self.seconded[place] = [word for word in said if word.signer not in liars]
        head = self.history.head
        facts = [MemberAccused(peer=word.signer, statement=Accusation(word)) for word in lies.values()]
        facts += [MemberAccused(peer=p, statement=OwnerComplaint(head, p, "unopened")) for p in sorted(failing)]
        return [_fact(fact, head) for fact in facts]

    def _follow(self) -> None:
        history = self.history
        self.docket.follow(history.head, history.ids, history.bodies)
        self.turns = {key: turn for key, turn in self.turns.items() if key in self.docket.cases}
        self.ahead = {key: words for key, words in self.ahead.items() if key in self.docket.cases}
        self.exhibits = {key: blob for key, blob in self.exhibits.items() if key in self.docket.cases}
        open_rounds = {key[0] for key in self.docket.cases}
        self.seconded = {place: words for place, words in self.seconded.items() if place[0] in open_rounds}
        self.unshown = {noted for noted in self.unshown if noted[0] in open_rounds}
        self.known = {place for place in self.known if place[0] in open_rounds}

    def on_report(self, by: PeerId, report: AuditReport, now: Seconds) -> list[Effect]:
        """Take in an auditor's report that no vertex holds yet.

        The auditors that it would bring in begin now: a liar counts in every vertex until enough findings exist.
        """
        case = self.docket.cases.get(key_of(report))
        if case is None or by not in case.order or report.finding not in AGAINST:
            return []
        self.ahead.setdefault(case.key, {}).setdefault(by, report.finding)
        return self._work(now)

    def _asked(self, case: AuditCase | SumSpotCheck) -> tuple[PeerId, ...]:
        return case.asked(self.history.head, self.ahead.get(case.key, NOTHING))

    def _work(self, now: Seconds) -> list[Effect]:
        """Start the local turns that begin with this head, and end those that lasted too long."""
        effects, head = self._hold(), self.history.head
        here = {m.peer for m in self.history.head_body.members if m.is_present}
        for key, case in self.docket.cases.items():
            if self.me not in self._asked(case):
                continue
            if (turn := self.turns.get(key)) is None:
                if not here.isdisjoint(makers := self._makers(case)):
                    turn = self.turns[key] = LocalAuditDuty(case, head, now, makers)
                    effects += self._ask(turn)
            elif turn.said == "accepted" and not turn.told and case.against:
                effects += self._end(turn, turn.said, "as seen before others doubted it", turn.blob)
        for turn in self.turns.values():
            waited = head - turn.since >= turn.give_up and now - turn.since_s >= GIVE_UP_S
            if waited and turn.said is None and not turn.judging and not here.isdisjoint(turn.makers):
                effects += self._end(turn, "withheld", "nothing was shown in time")
        return [*effects, *self._believe()]

    def _makers(self, case: AuditCase | SumSpotCheck) -> tuple[PeerId, ...]:
        """Peers that can show the exhibit, as far as the vertices at hand name them."""
        if isinstance(case, SumSpotCheck) and self.settings.witnessed:
            ground = ground_of(case.round, self.history, self.settings)
            if ground is not None:
                return tuple(peer for peer in makers(case, ground) if peer != self.me)
        return (case.peer,)

    def _hold(self) -> list[Effect]:
        """Pin the local exhibits, the received ones, and the states that audited rounds began with."""
        bodies, head = self.history.bodies, self.history.head
        undone = [case for case in self.docket.cases.values() if case.asked(head)]
        rounds = {case.round - 1 for case in undone if self.me in case.order and isinstance(case, AuditCase)}
        names = {bodies[round].state for round in rounds if round in bodies}
        names |= {blob for case in undone if (blob := self.exhibits.get(case.key)) is not None}
        names |= {turn.blob for turn in self.turns.values() if turn.blob is not None and turn.said is None}
        needed = tuple(sorted(names))
        if needed == self.held:
            return []
        self.held = needed
        return [RunTask("audit/hold", PinBlobs(needed))]

    # ---- showing -------------------------------------------------------------------------------------------

    def serve(self, sender: PeerId, request: ExhibitRequest) -> list[Effect]:
        """Name the exhibit's blob to drawn auditors only."""
        if request.update is True:
            return []
        mine = _key(request.round, self.me, request.opening)
        key = next((k for k in self.exhibits if (k[0], k[2:]) == (mine[0], mine[2:])), mine)
        case = self.docket.cases.get(key)
        if case is None or sender not in case.order:
            return []
        return [Send(sender, ExhibitResponse(request.round, self.exhibits.get(key), request.opening))]

    def _shown(self, key: Key, blob: Digest) -> list[Effect]:
        case = self.docket.cases.get(key)
        if case is None:
            return []
        self.exhibits[key] = blob
        asking = self._asked(case) if case.peer == self.me else ()  # other owners' results: on request only
        told = [Send(asker, ExhibitResponse(case.round, blob, _number(case))) for asker in asking]
        return [*self._hold(), *told]

    def _laid_open(self, job: str, blobs: Sequence[Digest]) -> list[Effect]:
        round, part = (int(word) for word in job.split("/")[2:])
        drawn = (case for case in self._openings(round) if case.key in self.exhibits)
        mine = [case for case in drawn if case.answered.part == part]
        # the ledger may have forgotten all of them meanwhile, since they are of one round
        told = [e for case, blob in zip(mine, blobs, strict=bool(mine)) for e in self._shown(case.key, blob)]
        return [*self._remember_laid(round), *told]

    def _remember_laid(self, round: int) -> list[Effect]:
        """Write to disk where the openings of this round lie, for use after a restart."""
        here = ((case, self.exhibits.get(case.key)) for case in self._openings(round))
        laid = [PersistedSumOpening(case.peer, case.number, blob) for case, blob in here if blob is not None]
        self.laid.add(round)
        return [Persist(f"{LAID}{round}", msgspec.msgpack.encode(laid))]

    def _forget_laid(self) -> list[Effect]:
        over = sorted(self.laid - {key[0] for key in self.docket.cases})
        self.laid.difference_update(over)
        return [Persist(f"{LAID}{round}", None) for round in over]

    def report_of(self, fact: Fact) -> BaseStatement | None:
        """A report that the ledger admits: a checker reports "accepted" for an opening only if others doubt it."""
        if not isinstance(fact, LocalAuditCompleted):
            return None
        exhibit, opening = fact.exhibit or UNSET, UNSET if fact.opening is None else fact.opening
        report = AuditReport(fact.of, fact.peer, fact.finding, opening, exhibit)
        if fact.opening is not None and self.docket.problem(self.me, report) is not None:
            return None
        return report

    # ---- taking again --------------------------------------------------------------------------------------

    def retransmit(self) -> list[Effect]:
        """Repeat requests with every heartbeat: messages may be lost, and the first asked peer may be gone."""
        waiting = (turn for turn in self.turns.values() if turn.said is None and not turn.judging)
        return [effect for turn in waiting for effect in self._ask(turn, len(turn.makers))]

    def _ask(self, turn: LocalAuditDuty, most: int = 1) -> list[Effect]:
        """Request the exhibit from the next peers, except the one with an exhibit under way; others may have it."""
        wish = ExhibitRequest(turn.case.round, _number(turn.case))
        left = [peer for peer in turn.makers[:most] if peer not in turn.useless]
        return [Send(peer, wish) for peer in left if turn.blob is None or peer != turn.shower]

    def on_exhibit(
        self, sender: PeerId, response: ExhibitResponse, under_way: Mapping[Digest, BlobDownload], now: Seconds
    ) -> tuple[BlobDownload | None, list[Effect]]:
        """Fetch the exhibit that a maker names; if it is under way already, the sender is one source more."""
        if response.update is True:
            return None, []
        turns = (turn for turn in self.turns.values() if turn.case.round == response.round)
        turn = next((t for t in turns if _number(t.case) == response.opening and sender in t.makers), None)
        if turn is None or turn.said is not None or response.blob is None or sender in turn.useless:
            return None, []
        if turn.blob == response.blob:
            more = under_way.get(response.blob)
            return None, more.add_sources([sender], now) if more is not None else []
        if turn.blob is not None and turn.shower is not None:
            had_its_time = now - turn.shown_s >= GIVE_UP_S / len(turn.makers)
            if turn.judging or sender == turn.shower or not had_its_time:
                return None, []
            turn.useless.add(turn.shower)  # the named blob never came
            turn.tries = 0
        turn.blob, turn.shower, turn.shown_s = None, sender, now
        most = EXHIBIT_UPDATES * self.settings.update_bytes + MIB
        if isinstance(turn.case, SumSpotCheck):
            most = turn.case.bytes_most
        fetch, effects = self.arriving.point(turn, response.blob, sender, most, under_way, now)
        return fetch, [*self._hold(), *effects]

    def abandoned(self) -> list[Digest]:
        """Downloads that no turn needs: the audit is over, or was given up."""
        return self.arriving.given_up(turn.blob for turn in self.turns.values() if turn.said is None)

    def on_download(self, fact: BlobFetched | FetchFailed) -> list[Effect]:
        if not self.arriving.ended(fact.blob):
            return []
        waiting = (t for t in self.turns.values() if t.said is None and not t.judging)
        turn = next((t for t in waiting if t.blob == fact.blob), None)
        if isinstance(fact, FetchFailed):
            ended = self._shown_nothing(turn, fact.why) if turn is not None and tried(turn) else []
            return [self.arriving.drop(fact.blob), *ended]
        if turn is None:
            return []
        work = work_for(turn.case, fact.blob, self.history, self.settings)
        if work is None:
            return self._end(turn, "unauditable", "the vertices before this round are not in memory")
        turn.judging = True
        return [RunTask(f"audit/judge/{'/'.join(map(str, turn.case.key))}", work)]

    # ---- jobs ----------------------------------------------------------------------------------------------

    def on_task_done(self, event: TaskDone | TaskFailed, now: Seconds) -> list[Effect]:
        match event:
            case TaskDone(job, ExhibitBuilt(blob)) if job.startswith("audit/show/"):
                return self._shown((int(job.rsplit("/", 1)[1]), self.me), blob)
            case TaskDone(job, SumOpeningBuilt(blobs)) if job.startswith("audit/open/"):
                return self._laid_open(job, blobs)
            case TaskDone(job, JudgmentResult(finding, why, others)) if (turn := self._turn_of(job)) is not None:
                return self._judged(turn, finding, why, others)
            case TaskFailed(job, why) if (turn := self._turn_of(job)) is not None:
                return self._end(turn, "unauditable", why)
            case _:
                return []

    def _turn_of(self, job: str) -> LocalAuditDuty | None:
        if not job.startswith("audit/judge/"):
            return None
        _, _, round, peer, *number = job.split("/")
        return self.turns.get(_key(int(round), PeerId(peer), int(number[0]) if number else UNSET))

    def _judged(
        self, turn: LocalAuditDuty, finding: Finding, why: str, others: Sequence[SignedStatement]
    ) -> list[Effect]:
        try:
            twice = twice_promised(turn.case, others, self.history)
        except PeerFault as fault:
            return self._shown_nothing(turn, fault.what, turn.blob)
        if finding == "withheld":
            return self._shown_nothing(turn, why, turn.blob)
        accused = [MemberAccused(peer=s.signer, statement=Accusation(first, s)) for first, s in twice]
        ended = self._end(turn, finding, why, turn.blob)
        return [*(_fact(fact, self.history.head) for fact in accused), *ended]

    def _shown_nothing(self, turn: LocalAuditDuty, why: str, exhibit: Digest | None = None) -> list[Effect]:
        """Drop an exhibit that cannot be judged; the exhibit of another maker counts as much."""
        if turn.shower is not None:
            turn.useless.add(turn.shower)
        turn.blob = exhibit  # a blob that never came is not kept
        if turn.useless.issuperset(turn.makers):
            return self._end(turn, "withheld", why, exhibit)
        turn.blob, turn.shower, turn.tries, turn.judging = None, None, 0, False
        return self._ask(turn, len(turn.makers))

    def _end(self, turn: LocalAuditDuty, finding: Finding, why: str, exhibit: Digest | None = None) -> list[Effect]:
        """End the turn with this finding. `exhibit`: the judged blob; None if there was nothing to judge."""
        turn.judging, turn.said = False, finding
        case, opening = turn.case, turn.case.number if isinstance(turn.case, SumSpotCheck) else None
        turn.told = opening is None or finding in AGAINST or bool(case.against)
        segment = case.segment if isinstance(case, AuditCase) else -1
        ended = LocalAuditCompleted(
            peer=case.peer,
            of=case.round,
            segment=segment,
            finding=finding,
            why=why,
            opening=opening,
            exhibit=exhibit,
        )
        kept = self._kept(turn) if exhibit is not None and finding in REFUTING else []
        return [*self.evidence.keep(kept), _fact(ended, self.history.head)]


def _ledger_of(settings: RunSettings) -> AuditLedger | None:
    """Replay audits and sum checks share a ledger, since both count findings of auditors."""
    if not settings.audited_share and settings.opened is None:
        return None
    return AuditLedger(settings.audited_share, settings.round.quorum, settings.opened)


REPLAY_AUDIT = Verifier(
    "audit",
    _ledger_of,
    lambda context: ReplayAudits(context) if context.pool.ledgers.find(AuditLedger) is not None else None,
)

_LAID = msgspec.msgpack.Decoder(list[PersistedSumOpening])


def _read(data: bytes) -> list[PersistedSumOpening]:
    try:
        return _LAID.decode(data)
    except UNREADABLE:
        return []  # another version wrote the row: its openings are lost


def _fact(fact: Fact, round: int) -> Emit:
    return Emit(replace(fact, round=round))


def _number(case: AuditCase | SumSpotCheck) -> int | UnsetType:
    return case.number if isinstance(case, SumSpotCheck) else UNSET


def _key(round: int, peer: PeerId, opening: int | UnsetType) -> Key:
    return (round, peer) if opening is UNSET else (round, peer, opening)
