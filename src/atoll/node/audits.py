"""One peer's side of all audits: it shows what it was drawn for, and takes again what it was drawn to.

    every vertex     who is audited, and whose turn it is to take the segment again (`policy/audits.py`)
    audited          Ask Exhibit ─► a blob ─► its name to any auditor that was drawn and asks
    auditor          WantExhibit ─► ExhibitIs ─► fetch the blob ─► Ask Judge ─► a signed report, `Audited`

Nothing here is waited for by a round: slow work is the island's, which does it while its trainer rests, and an
auditor that is late is followed by the next one. Bounded by the open cases of the docket; a blob may be as large
as this run's states are and no larger. Never judges, never acts on a verdict: a later vertex does.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import AUDIT_TURN, MIB
from atoll.base.machine import Ask, Done, Effect, Fact, Failed, Report, Send, Start
from atoll.node.body import ground_after
from atoll.node.facts import AuditDrawn, AuditEnded, Verdict
from atoll.node.jobs import Exhibit, Exhibited, Hold, Judge, Judged
from atoll.node.reports import ReportPool
from atoll.node.settings import RunSettings
from atoll.policy.audits import Case, Key
from atoll.policy.plan import plan_round
from atoll.protocol.dag.history import History
from atoll.protocol.transfer.fetch import Fetch, Fetched, FetchFailed
from atoll.protocol.transfer.work import DropBlob
from atoll.wire.codec import decode_statement
from atoll.wire.messages.audits import ExhibitIs, WantExhibit
from atoll.wire.messages.statements import Answered, Commit, Finding
from atoll.wire.messages.vertex import Body

GIVE_UP = AUDIT_TURN - 2  # rounds of my turn after which nothing was shown: the next one's turn comes two later
TRIES_MAX = 3  # downloads of one exhibit that failed: who sends wrong bytes shall not waste more of my link
GIVE_UP_S = 10.0  # and so many seconds, since rounds may take milliseconds and links may stall
EXHIBIT_UPDATES = 10  # an exhibit is at most so many updates in fp32 long: two states, x, feedback, parts


@dataclass
class Turn:
    """An audit that is mine to do."""

    case: Case
    since: int  # the head when my turn began
    since_s: Seconds
    blob: Digest | None = None  # what I was pointed at; asked again while it is None
    tries: int = 0
    judging: bool = False
    said: Finding | None = None


class Audits:
    """`settings` say that there are some. Effects go to the driver; `AuditEnded` is to be told to the members."""

    def __init__(self, me: PeerId, settings: RunSettings, history: History, pool: ReportPool) -> None:
        self.me, self.settings, self.history, self.pool = me, settings, history, pool
        self.docket = pool.docket
        self.turns: dict[Key, Turn] = {}
        self.exhibits: dict[int, Digest | None] = {}  # by round; None while it is being made, or if it cannot be
        self.held: tuple[Digest, ...] = ()
        self.fetching: set[Digest] = set()

    # ---- vertices ------------------------------------------------------------------------------------------

    def resume(self, now: Seconds) -> list[Effect]:
        """After a restart: what was drawn for me is lost, what I was drawn for is not."""
        self._follow()
        return self._work(now)

    def grew(self, body: Body, now: Seconds) -> list[Effect]:
        """The history has one vertex more."""
        self._follow()
        effects: list[Effect] = []
        for by, said in self.docket.news(body):
            effects.append(
                _fact(Verdict(peer=said.peer, of=said.round, auditor=by, finding=said.finding), body.round)
            )
        for case in (case for case in self.docket.cases.values() if case.round == body.round):
            effects.append(_fact(AuditDrawn(peer=case.peer, segment=case.segment, auditors=case.order), case.round))
            if case.peer == self.me:
                self.exhibits[case.round] = None
                effects.append(Ask(f"audit/show/{case.round}", Exhibit(case.round, case.segment)))
        return effects + self._work(now)

    def _follow(self) -> None:
        history = self.history
        self.docket.follow(history.head, history.ids, history.bodies)
        self.turns = {key: turn for key, turn in self.turns.items() if key in self.docket.cases}
        live = {round for round, peer in self.docket.cases if peer == self.me}
        self.exhibits = {round: blob for round, blob in self.exhibits.items() if round in live}

    def _work(self, now: Seconds) -> list[Effect]:
        """My turns that begin with this head, and those that lasted too long."""
        effects, head = self._hold(), self.history.head
        here = {m.peer for m in self.history.head_body.members if m.present}
        for key, case in self.docket.cases.items():
            if key not in self.turns and case.peer in here and self.me in case.turns(head):
                self.turns[key] = Turn(case, head, now)
                effects += self._ask(self.turns[key])
        for turn in self.turns.values():
            waited = head - turn.since >= GIVE_UP and now - turn.since_s >= GIVE_UP_S
            if waited and turn.said is None and not turn.judging and turn.case.peer in here:
                effects += self._end(turn, "withheld", "nothing was shown in time")
        return effects

    def _hold(self) -> list[Effect]:
        """I keep what I show, what I am shown, and the states that audited rounds began with."""
        bodies, head = self.history.bodies, self.history.head
        undone = [case for case in self.docket.cases.values() if case.turns(head)]
        mine = {case.round for case in undone if case.peer == self.me}
        rounds = {case.round - 1 for case in undone if self.me in case.order}
        names = {bodies[round].state for round in rounds if round in bodies}
        names |= {blob for round, blob in self.exhibits.items() if blob is not None and round in mine}
        names |= {turn.blob for turn in self.turns.values() if turn.blob is not None and turn.said is None}
        needed = tuple(sorted(names))
        if needed == self.held:
            return []
        self.held = needed
        return [Ask("audit/hold", Hold(needed))]

    # ---- showing -------------------------------------------------------------------------------------------

    def give(self, sender: PeerId, wish: WantExhibit) -> list[Effect]:
        """Only those who were drawn are told where it lies."""
        case = self.docket.cases.get((wish.round, self.me))
        if case is None or sender not in case.order:
            return []
        return [Send(sender, ExhibitIs(wish.round, self.exhibits.get(wish.round)))]

    def _shown(self, round: int, blob: Digest) -> list[Effect]:
        case = self.docket.cases.get((round, self.me))
        if case is None:
            return []
        self.exhibits[round] = blob
        return [*self._hold(), *(Send(asker, ExhibitIs(round, blob)) for asker in case.turns(self.history.head))]

    # ---- taking again --------------------------------------------------------------------------------------

    def ask_again(self) -> list[Effect]:
        """With every heartbeat: words may be lost."""
        return [
            e for turn in self.turns.values() if turn.said is None and not turn.judging for e in self._ask(turn)
        ]

    def _ask(self, turn: Turn) -> list[Effect]:
        return [Send(turn.case.peer, WantExhibit(turn.case.round))] if turn.blob is None else []

    def point(
        self, sender: PeerId, told: ExhibitIs, busy: set[Digest], now: Seconds
    ) -> tuple[Fetch | None, list[Effect]]:
        """The audited peer says where to look; what is on its way for other reasons is no exhibit."""
        turn = self.turns.get((told.round, sender))
        if turn is None or turn.blob is not None or turn.said is not None or told.blob is None or told.blob in busy:
            return None, []
        turn.blob = told.blob
        most = EXHIBIT_UPDATES * self.settings.update_bytes + MIB
        fetch = Fetch(told.blob, [sender], most)
        self.fetching.add(told.blob)
        return fetch, [*self._hold(), *fetch.handle(Start({}), now)]

    def given_up(self) -> list[Digest]:
        """Downloads that nobody waits for any more: the audit is over, or was given up."""
        live = {turn.blob for turn in self.turns.values() if turn.said is None}
        over = sorted(self.fetching - live)
        self.fetching.difference_update(over)
        return over

    def fetched(self, fact: Fetched | FetchFailed) -> list[Effect]:
        if fact.blob not in self.fetching:
            return []
        self.fetching.discard(fact.blob)
        waiting = (t for t in self.turns.values() if t.said is None and not t.judging)
        turn = next((t for t in waiting if t.blob == fact.blob), None)
        if isinstance(fact, FetchFailed):  # what came of it is of no use to anybody
            effects: list[Effect] = [Ask(f"audit/drop/{fact.blob.hex()}", DropBlob(fact.blob))]
            if turn is None:
                return effects
            turn.blob = None  # asked for again: a restart, or a link, may have broken it
            turn.tries += 1
            return [*effects, *self._end(turn, "withheld", fact.why)] if turn.tries >= TRIES_MAX else effects
        if turn is None:
            return []
        work = self._judge(turn.case, fact.blob)
        if work is None:
            return self._end(turn, "unauditable", "the vertices before this round are not in memory")
        turn.judging = True
        return [Ask(f"audit/judge/{turn.case.round}/{turn.case.peer}", work)]

    def _judge(self, case: Case, blob: Digest) -> Judge | None:
        """What the peer was told to do, out of the vertices: the same at every auditor."""
        history, commit = self.history, case.commit
        parent, head = history.bodies.get(case.round - 1), history.ids.get(case.round - 1)
        if parent is None or head is None or commit.claim is UNSET:
            return None
        plan = plan_round(head, parent, self.settings.round)
        ground = ground_after(self.settings, plan, parent, self.pool.recent(), history.notary.run)
        shard, shards = plan.shard(case.peer)
        last = self._last_claim(case)
        if last is None:
            return None
        return Judge(
            blob=blob,
            round=case.round,
            peer=case.peer,
            segment=case.segment,
            before=parent.state,
            steps_max=self.settings.round.inner_steps,
            shard=shard,
            shards=shards,
            shares=ground.shares,
            steps=commit.steps,
            root=commit.root,
            claim=commit.claim,
            last_claim=last[0],
            last_whole=last[1],
        )

    def _last_claim(self, case: Case) -> tuple[Digest | None, bool] | None:
        """Of the last of its rounds that a vertex counts, if there is one; and whether every part of it has it.

        None if vertices are missing that might say so.
        """
        for round in range(case.round - 1, -1, -1):
            body = self.history.bodies.get(round)
            if body is None:
                return None
            for signed in body.commits:
                if signed.signer != case.peer:
                    continue
                commit = decode_statement(signed.body, signed.signer)
                if isinstance(commit, Commit) and commit.claim is not UNSET:
                    return commit.claim, _in_all_parts(body, case.peer)
        return None, False

    # ---- jobs ----------------------------------------------------------------------------------------------

    def done(self, event: Done | Failed) -> list[Effect]:
        match event:
            case Done(job, Exhibited(blob)) if job.startswith("audit/show/"):
                return self._shown(int(job.rsplit("/", 1)[1]), blob)
            case Done(job, Judged(finding, why)) if (turn := self._turn_of(job)) is not None:
                return self._end(turn, finding, why)
            case Failed(job, why) if (turn := self._turn_of(job)) is not None:
                return self._end(turn, "unauditable", why)
            case _:
                return []

    def _turn_of(self, job: str) -> Turn | None:
        if not job.startswith("audit/judge/"):
            return None
        _, _, round, peer = job.split("/", 3)
        return self.turns.get((int(round), PeerId(peer)))

    def _end(self, turn: Turn, finding: Finding, why: str) -> list[Effect]:
        turn.judging, turn.said = False, finding
        case = turn.case
        ended = AuditEnded(peer=case.peer, of=case.round, segment=case.segment, finding=finding, why=why)
        return [_fact(ended, self.history.head)]


def _fact(fact: Fact, round: int) -> Report:
    return Report(replace(fact, round=round))


def _in_all_parts(body: Body, peer: PeerId) -> bool:
    answers = [decode_statement(s.body, s.signer) if s is not None else None for s in body.parts]
    return all(isinstance(a, Answered) and peer in a.contributors for a in answers)
