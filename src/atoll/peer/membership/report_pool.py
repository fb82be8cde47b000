"""Member reports on their way into a vertex: joins, readiness, farewells, suspicions, invitations.

Voices are reports that count only if more members send them than may lie: 34 against each liar among a hundred
members. They have room of their own. In a large swarm the pool holds only as many voices as count, and a vertex
carries them in whole sets.

Invariants:
- One report per kind, signer and target, only while it may stand in the next vertex.
- At most as many reports as a vertex can carry. In a full pool the busiest signer gives way, then
  `RoundOptOutNotice`.
Not responsible for: judging reports (`policy/membership.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import COMMITTEE_MAX, REPORTS_BYTES_MAX, REPORTS_PER_VERTEX_MAX, VOICES_MAX
from atoll.base.machine import tag_of
from atoll.base.memoize import memoize_by_identity
from atoll.peer.governance.orders import (
    WANTS,
    RollbackGoal,
    Word,
    agrees,
    amends_in,
    goal_of,
    may_follow,
    pauses_in,
    rank,
    tunes_in,
    word_holds,
)
from atoll.peer.governance.settings_change import why_not
from atoll.peer.round.context import known_keys
from atoll.peer.round.topology_choice import parts_most
from atoll.peer.round.vertex_body import open_report
from atoll.peer.settings import RunSettings
from atoll.policy.ledger import LedgerSet
from atoll.policy.membership import (
    RECENT,
    Earlier,
    RecentVertices,
    VerifiedReport,
    admissible,
    only_counts,
    suspicions_needed,
    target_of,
)
from atoll.policy.vertex_capacity import SIGNED_BYTES, name_bytes
from atoll.protocol.history.chain import VertexChain
from atoll.wire.codec import decode_statement, statement_in
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import (
    Accusation,
    BaseStatement,
    ChangeSettings,
    HeldOutLossReport,
    JoinRequest,
    LeaveReport,
    PauseOrder,
    RollbackOrder,
    RoundOptOutNotice,
    SignedStatement,
    SuspicionReport,
    TicketInvite,
)
from atoll.wire.messages.vertex import VertexBody

AMENDS_MAX = 2  # rollback orders that a proposer considers; a body carries one, the farthest back

Key = tuple[str, PeerId, str]


@dataclass(frozen=True)
class ReportPoolResult:
    """An accepted report, and whether it was news."""

    reported: VerifiedReport
    fresh: bool  # the first of its kind from this signer
    wrong: str | None = None  # why it may not stand in the next vertex, in words for its sender


JOIN_TAG = tag_of(JoinRequest)  # looked up for every message


class ReportPool:
    def __init__(
        self, notary: StatementSigner, history: VertexChain, settings: RunSettings, ledgers: LedgerSet
    ) -> None:
        self.notary, self.history, self.settings, self.ledgers = notary, history, settings, ledgers
        self.pool: dict[Key, SignedStatement] = {}
        self.voices: Counter[tuple[str, str]] = Counter()  # voices in the pool, by kind and target
        self.goals: dict[Digest, RollbackGoal] = {}  # vertices older than memory holds, read from disk
        self._recent: tuple[int, RecentVertices] = (
            -2,
            RecentVertices({}),
        )  # as of this head: needed with every report

    def __len__(self) -> int:
        return len(self.pool)

    def add(self, signed: SignedStatement, run_time: Seconds) -> ReportPoolResult | None:
        """Remember a report. None if its signature does not hold, it is known already, or the pool is full.

        PeerFault for a forged order of the recovery identity.
        """
        head, reported = self.history.head_body, self.opened(signed)
        if reported is None:
            return None
        statement = reported.statement
        authority = self.history.authority
        if isinstance(statement, Word) and not word_holds(signed, statement, self.notary, authority, head.members):
            raise PeerFault(
                signed.signer, f"wants to {WANTS[type(statement)]} in a name that is not its own", signed.body
            )
        wrong = self.judge(reported, head, self.recent(), run_time)
        if wrong is not None:
            return ReportPoolResult(reported, fresh=False, wrong=wrong)
        if isinstance(statement, Accusation) and reported.by != self.notary.me and self.proves(statement):
            return ReportPoolResult(reported, fresh=False)  # accepted, not stored
        key = _key(reported)
        fresh = key not in self.pool
        if not fresh and (self.pool[key].body == signed.body or self._older(statement, reported.by)):
            return None
        if fresh and not self._has_room(key, only_counts(statement)):
            return None
        self._remember(key, signed, only_counts(statement))
        return ReportPoolResult(reported, fresh)

    def _remember(self, key: Key, signed: SignedStatement, counts: bool) -> None:
        if counts and key not in self.pool:
            self.voices[key[0], key[2]] += 1
        self.pool[key] = signed

    def _forget(self, key: Key) -> None:
        if self.pool.pop(key, None) is not None and self._counts(key):
            self.voices[key[0], key[2]] -= 1
            self.voices += Counter()  # drops counts of zero

    def _counts(self, key: Key) -> bool:
        return (key[0], key[2]) in self.voices

    def _has_room(self, wanted: Key, counts: bool) -> bool:
        if not self.crowded:
            return len(self.pool) < REPORTS_PER_VERTEX_MAX or self._make_room(wanted, list(self.pool))
        if counts and self.voices[wanted[0], wanted[2]] >= self._voices_needed():
            return False  # enough voices
        voices = self.voices.total()
        if voices < VOICES_MAX if counts else len(self.pool) - voices < REPORTS_PER_VERTEX_MAX:
            return True
        return self._make_room(wanted, [key for key in self.pool if self._counts(key) == counts])

    def _make_room(self, wanted: Key, rivals: list[Key]) -> bool:
        """Drop a report for the wanted one; a flood displaces only its own reports, the least shared ones first.

        A report that many members send soon has enough voices; a few of each never. Strangers count as one signer:
        new identities are free. Without a flood, `RoundOptOutNotice` gives way: all members may send it in every
        round.
        """
        members = _names(self.history.head_body)

        def voice(peer: PeerId) -> PeerId | None:
            return peer if peer in members else None

        words = Counter(voice(signer) for _, signer, _ in rivals)
        loudest = max(words, key=lambda who: words[who])
        end: Key | None = None
        if words[voice(wanted[1])] + 1 < words[loudest]:
            company = Counter((kind, target) for kind, _, target in rivals)
            its = (key for key in reversed(rivals) if voice(key[1]) == loudest)
            end = min(its, key=lambda key: company[key[0], key[2]])
        elif wanted[0] != tag_of(RoundOptOutNotice):
            end = next((key for key in reversed(rivals) if key[0] == tag_of(RoundOptOutNotice)), None)
        if end is not None:
            self._forget(end)
        return end is not None

    @property
    def crowded(self) -> bool:
        """There are more voters than a swarm may have where all voices reach all members and a vertex."""
        return _voters(self.history.head_body) > COMMITTEE_MAX

    def _voices_needed(self) -> int:
        return suspicions_needed(_voters(self.history.head_body), self.settings.round.quorum)

    def proves(self, caught: Accusation) -> bool:
        """A proof against this liar is here already: one is enough, and weighs more than any voice."""
        pair = target_of(replace(caught, other=caught.answer))
        return any(kind == tag_of(Accusation) and target == pair for kind, _, target in self.pool)

    def withdraw_suspicion(self, by: PeerId, peer: PeerId) -> None:
        """Drop a suspicion: its signer hears the accused again."""
        self._forget((tag_of(SuspicionReport), by, peer))

    def withdraw_farewell(self, peer: PeerId) -> None:
        """Drop the farewell of a peer that is back. A peer that still leaves repeats it to its neighbors."""
        self._forget((tag_of(LeaveReport), peer, ""))

    def suspected_by(self, peer: PeerId) -> set[PeerId]:
        """Members that this peer suspects."""
        return {PeerId(target) for kind, by, target in self.pool if (kind, by) == (tag_of(SuspicionReport), peer)}

    def said_by(self, peer: PeerId, kind: str) -> list[SignedStatement]:
        """Its reports of this kind that wait for their vertex."""
        return [signed for signed in self.of_kind(kind) if signed.signer == peer]

    def my_words(self) -> list[SignedStatement]:
        """Local reports to repeat while they wait for their vertex: the recovery identity's, and about states."""
        kinds = RollbackOrder, PauseOrder, ChangeSettings, HeldOutLossReport
        return [signed for kind in kinds for signed in self.said_by(self.notary.me, tag_of(kind))]

    def my_voices(self, gone: Callable[[PeerId], bool], run_time: Seconds) -> list[SignedStatement]:
        """Local voices that wait for enough others, where not all members received them.

        Suspicions of members still gone are signed anew: others forget those of earlier rounds.
        """
        me, voices = self.notary.me, list[SignedStatement]()
        waiting = [s for key, s in self.pool.items() if key[1] == me and self._counts(key)] if self.crowded else []
        for signed in waiting:
            said = decode_statement(signed.body, me)
            if isinstance(said, SuspicionReport):
                if not gone(said.peer):
                    continue
                signed = self.notary.sign(replace(said, round=self.history.head + 1))
                self.add(signed, run_time)
            voices.append(signed)
        return voices

    def join_of(self, peer: PeerId) -> JoinRequest | None:
        """The peer's join request, if no vertex holds it yet."""
        signed = self.pool.get((JOIN_TAG, peer, ""))
        said = decode_statement(signed.body, peer) if signed is not None else None
        return said if isinstance(said, JoinRequest) else None

    def _older(self, said: BaseStatement, peer: PeerId) -> bool:
        """Whether this join is older than the stored one: another peer repeats it."""
        if not isinstance(said, JoinRequest) or (newer := self.join_of(peer)) is None:
            return False
        rounds = self.recent().rounds
        return rounds.get(said.after, -2) < rounds.get(newer.after, -2)

    def of_kind(self, kind: str) -> list[SignedStatement]:
        return [signed for key, signed in self.pool.items() if key[0] == kind]

    def chosen(self, gone: Callable[[PeerId], bool] = lambda peer: True) -> list[SignedStatement]:
        """Reports for a proposer's vertex: orders of the recovery identity, then as many as fit, shortest first.

        Suspicions of members that the proposer hears are left out. Many members are silent for a moment in a long
        round; without all of them, liars would be too many among the rest. An order is longer than most reports,
        and a peer that pads its reports must not keep it out. `RoundOptOutNotice` comes last: all members may send
        it in every round, and no join or farewell shall wait for it. In a large swarm voices come just before it.
        """
        back = [signed for signed, _ in sorted(amends_in(self.pool.values()), key=rank)]
        pauses = sorted((signed for signed, _ in pauses_in(self.pool.values())), key=lambda signed: signed.body)
        tunes = sorted((signed for signed, _ in tunes_in(self.pool.values())), key=lambda signed: signed.body)
        every = {id(signed) for signed in [*back, *pauses, *tunes]}
        crowded = self.crowded
        news = [
            (key[0] == tag_of(RoundOptOutNotice), signed)
            for key, signed in self.pool.items()
            if id(signed) not in every and not (crowded and self._counts(key)) and _may_go(key, gone)
        ]
        news.sort(key=lambda one: (one[0], len(one[1].body)))
        # all admissible pauses or resumes want the same; one change of settings is enough
        words = [*back[:AMENDS_MAX], *pauses[:1], *tunes[:1]]
        lots = [[signed] for signed in words] + [[signed] for rests, signed in news if not rests]
        lots += self._whole_sets(gone) if crowded else []
        lots += [[signed] for rests, signed in news if rests]
        chosen: list[SignedStatement] = []
        size = 0
        for lot in lots:
            size += sum(map(_size_bytes, lot))
            if len(chosen) + len(lot) > REPORTS_PER_VERTEX_MAX or size > REPORTS_BYTES_MAX:
                break
            chosen += lot
        return chosen

    def _whole_sets(self, gone: Callable[[PeerId], bool]) -> list[list[SignedStatement]]:
        """Sets of exactly as many voices as count: against liars, then against silent members."""
        needed = self._voices_needed()
        enough = sorted(said for said, count in self.voices.items() if count >= needed)
        sets: defaultdict[tuple[str, str], list[SignedStatement]] = defaultdict(list)
        for key, signed in self.pool.items():
            if _may_go(key, gone):
                sets[key[0], key[2]].append(signed)
        return [sets[said][:needed] for said in enough]

    def settle(self, body: VertexBody) -> None:
        """Drop reports that a vertex carried, or that no longer fit the membership."""
        carried = {s.body for s in body.reports}
        recent, keys, known = self.recent(), _vote_keys(body), known_keys(body.members)
        for key, signed in list(self.pool.items()):
            reported = open_report(self.notary, signed, keys, known)
            stale = reported is None or self.judge(reported, body, recent, None) is not None
            done = reported is not None and isinstance(reported.statement, TicketInvite) and signed.body in carried
            # many members are silent for a moment in some round: their old suspicions would add up for no reason
            stale = stale or (self.crowded and _of_before(reported, body))
            if stale or done:  # a carried Join or Leave that had to wait for its turn stays
                self._forget(key)
        for signed in body.reports if self.ledgers else ():
            self._repeat(signed, body, recent)

    def _repeat(self, signed: SignedStatement, body: VertexBody, recent: RecentVertices) -> None:
        """Every member repeats an auditor's finding against a trainer, until enough auditors agree."""
        said = statement_in(signed)
        ledger = self.ledgers.judge_of(said) if said is not None else None
        if ledger is None or not ledger.must_repeat(said):
            return
        news = len(self.pool) - (self.voices.total() if self.crowded else 0)
        if news >= REPORTS_PER_VERTEX_MAX:
            return
        reported = open_report(self.notary, signed, _vote_keys(body))
        if reported is not None and self.judge(reported, body, recent, None) is None:
            self.pool.setdefault(_key(reported), signed)

    def judge(
        self, reported: VerifiedReport, parent: VertexBody, recent: RecentVertices, wall_s: Seconds | None
    ) -> str | None:
        settings, ledger = self.settings, self.ledgers.judge_of(reported.statement)
        wrong = admissible(
            reported,
            parent,
            recent,
            self.notary.run,
            settings.open_to_all,
            wall_s,
            parts=parts_most(settings, parent),
            signing=settings.round.signing,
            time_s=wall_s,
        )
        if wrong is None and ledger is not None:
            return ledger.problem_to_propose(reported.by, reported.statement)
        return wrong

    def recent(self) -> RecentVertices:
        head = self.history.head
        if self._recent[0] != head:
            self.ledgers.follow(head, self.history.ids, self.history.bodies)
            recent = RecentVertices(
                self.history.recent_states(RECENT),
                self._may_follow,
                self._earlier,
                self.ledgers,
                self.history.rounds(),
                self._unfit,
                audited=bool(self.settings.audited_share),
                authority=self.history.authority,
            )
            self._recent = (head, recent)
        return self._recent[1]

    def wanted_back(self) -> list[RollbackOrder]:
        """Rollbacks that the next vertices may hold: waiting orders, and the demand of validators."""
        demanded = self.recent().ledgers.demanded(self.history.head)
        return [amend for _, amend in amends_in(self.pool.values())] + ([demanded] if demanded else [])

    def opened(self, signed: SignedStatement) -> VerifiedReport | None:
        """The report, if a current member signed it."""
        head = self.history.head_body
        return open_report(self.notary, signed, _vote_keys(head), known_keys(head.members))

    def goal(self, round: int) -> RollbackGoal | None:
        """The vertex of this round, if it is in memory."""
        body = self.history.bodies.get(round)
        return goal_of(body, self.history.ids[round]) if body is not None else None

    def _may_follow(self, word: Word) -> bool:
        return may_follow(self.history, word)

    def _unfit(self, word: ChangeSettings, parent: VertexBody) -> str:
        return why_not(self.settings, parent, word.to)

    def _earlier(self, amend: RollbackOrder) -> Earlier:
        return agrees(amend, self.goal(amend.round) or self.goals.get(amend.back_to))


@memoize_by_identity  # called with every report
def _vote_keys(body: VertexBody) -> dict[PeerId, bytes]:
    return {m.peer: m.vote_key for m in body.members if m.is_present}


@memoize_by_identity  # called with every report that finds no room
def _names(body: VertexBody) -> frozenset[PeerId]:
    return frozenset(m.peer for m in body.members)


@memoize_by_identity  # called with every report and every body
def _voters(body: VertexBody) -> int:
    return sum(m.votes for m in body.members)


def _of_before(reported: VerifiedReport | None, body: VertexBody) -> bool:
    """A suspicion that is older than the round of this vertex."""
    return (
        reported is not None
        and isinstance(reported.statement, SuspicionReport)
        and reported.statement.round < body.round
    )


def _may_go(key: Key, gone: Callable[[PeerId], bool]) -> bool:
    """False for a suspicion of a member that the local peer hears."""
    return key[0] != tag_of(SuspicionReport) or gone(PeerId(key[2]))


def _size_bytes(signed: SignedStatement) -> int:
    return len(signed.body) + len(signed.signature) + name_bytes(signed.signer) + SIGNED_BYTES


def _key(reported: VerifiedReport) -> Key:
    return tag_of(reported.statement), reported.by, target_of(reported.statement)
