"""Writing and checking the body of a vertex: everything that can be judged without touching a tensor.

The proposer writes a body from what it saw; every voter recomputes each entry from the signed statements inside.
A body that passes `check_body` can be wrong in one way only, its state hash, which voters recompute from the
combined parts. Whose turn it is to propose is the agreement's business. Never trusts a field that can be derived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from statistics import median

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import DIGEST_BYTES, ZERO_DIGEST, Digest, PeerId, Seconds
from atoll.base.limits import (
    ANSWER_BYTES_MAX,
    PARTS_MAX,
    PEERS_MAX,
    REPORT_BYTES_MAX,
    REPORTS_PER_VERTEX_MAX,
    WEIGHED_ROWS_MAX,
    WORDS_MAX,
)
from atoll.keys.digest import digest
from atoll.node.amend import amend_holds, amends_in, first_of
from atoll.node.reputation import next_scores
from atoll.node.settings import RunSettings, encode_settings
from atoll.node.topology import parts_most, way_of
from atoll.policy.apart import Apart
from atoll.policy.links import report_flaw
from atoll.policy.members import Recent, Reported, admissible, next_members
from atoll.policy.plan import RoundPlan
from atoll.policy.reputation import FLOOR, influence_of
from atoll.policy.room import WEIGHT_BYTES, name_bytes
from atoll.policy.trust import DISTANCES, StatisticName, liars_among, rows_needed, witnesses
from atoll.policy.windows import Shown, next_window
from atoll.protocol.reduce.checks import made_with, weighing_flaw
from atoll.protocol.reduce.plan import ReducePlan
from atoll.protocol.reduce.rows import name_of
from atoll.protocol.reduce.topology import Topology
from atoll.wire.codec import decode_statement, encode
from atoll.wire.envelope import Notary
from atoll.wire.messages.statements import (
    Amend,
    Answered,
    Caught,
    Commit,
    Compared,
    Join,
    Signed,
    Statement,
    Weighing,
)
from atoll.wire.messages.vertex import Body, Member, Metrics, TicketUse
from atoll.wire.opening import made_of_fits

NUMBER_MAX = 2**40  # steps and samples of one update: their sums stay far below 2^63, the largest on the wire
WEIGHING_BYTES = 32  # the heads of the lists in a weighing
PLACE_BYTES = 3  # of a part's number in it
CLOCK_SLACK_S = 1.0  # a body may be this much ahead of my run time; peers beyond 250 ms are told their offset


@dataclass(frozen=True)
class Ground:
    """What a round stands on: agreed facts and the judgement of reports, handed in by the peer."""

    plan: RoundPlan
    parent: Body
    topology: Topology | None  # how updates are reduced; None in a round that only assembles members
    why: str  # this topology, in words for people
    admissible: Callable[[Reported, bool], str | None]  # (report, as proposer)
    statistic: StatisticName = "mean"
    tolerance: float = 0.0
    witnessed: bool = False
    parts_most: int = PARTS_MAX  # that an update may have in the rounds to come
    recovery: bytes = b""  # public identity whose word sends the run back to an earlier state
    audited: bool = False  # who gives an update must claim how it trained
    reputed: bool = False  # members' records stand in vertices, and decide what rows weigh
    demanded: Amend | None = None  # validators found the state bad: where this round is to go back to
    opened: bool = False  # blocks of answers are opened
    apart: Apart | None = None  # who hears no quorum trains on

    @cached_property
    def owners(self) -> tuple[tuple[PeerId, ...], ...]:
        """Of each part, in the order in which they take over."""
        return tuple(part.owners for part in self.topology.parts) if self.topology is not None else ()

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Relative sizes of the parts."""
        return tuple(part.share for part in self.topology.parts) if self.topology is not None else ()

    @cached_property
    def weightless(self) -> frozenset[PeerId]:
        """Newcomers: their rows are shared and checked like any other, but move nothing yet."""
        return frozenset(m.peer for m in self.plan.trainers if m.standing == "new")

    def takes_late(self, peer: PeerId) -> bool:
        """Late work may ride on this member's update: it is merged in this run, and the row weighs something."""
        return self.apart is not None and self.apart.then == "merge" and peer not in self.weightless

    @cached_property
    def influence(self) -> dict[PeerId, int]:
        """What each settled trainer weighs against the others; nobody where no records are kept."""
        if not self.reputed:
            return {}
        settled = (m.peer for m in self.plan.trainers if m.standing == "member")
        return influence_of({peer: self.plan.scores.get(peer, FLOOR) for peer in settled})

    @cached_property
    def liars(self) -> int:
        """How many of the rows that count may be lies."""
        return liars_among(len(self.plan.trainers) - len(self.weightless), self.tolerance)

    @cached_property
    def weighs(self) -> bool:
        """Rows are weighed by distances between whole updates."""
        return self.statistic in DISTANCES

    @property
    def trainers_most(self) -> int:
        """Rows beyond those whose distances are taken would stop the learning of all."""
        return WEIGHED_ROWS_MAX if self.weighs else PEERS_MAX

    @cached_property
    def compared_bytes_max(self) -> int:
        """Of a signed comparison."""
        rows = min(len(self.plan.trainers), WEIGHED_ROWS_MAX)
        return self.answer_bytes_max + 8 * (rows * (rows + 1) // 2)

    @cached_property
    def weighing_bytes_max(self) -> int:
        """Of an encoded weighing, which travels beside an answer and stands in the vertex."""
        if not self.weighs:
            return 0
        names = sum(name_bytes(m.peer) + WEIGHT_BYTES for m in self.plan.trainers)
        digests = DIGEST_BYTES * (len(self.owners) if self.witnesses else 1)
        return names + digests + PLACE_BYTES * len(self.owners) + WEIGHING_BYTES

    @cached_property
    def witnesses(self) -> int:
        """Owners after the first that combine every part too."""
        owners = min((len(part.owners) for part in self.topology.parts), default=1) if self.topology else 1
        return witnesses(owners, liars_among(len(self.plan.voters), self.tolerance)) if self.witnessed else 0

    def reduce_plan(self, attempt: int, timing: RoundPlan | None = None) -> ReducePlan:
        """`timing`: the plan with the windows that I go by, if they are others."""
        assert self.topology is not None
        plan = timing or self.plan
        return ReducePlan(
            plan.round,
            attempt,
            plan.trace,
            self.topology,
            tuple(m.peer for m in plan.members if m.present),
            plan.times(attempt).answer_until,
            self.statistic,
            self.liars,
            rows_needed(self.statistic, self.liars),
            self.witnesses,
            self.weighs,
            self.weightless,
            frozenset(m.peer for m in plan.members if m.present and not m.trains),
            plan.window_s(attempt),
            plan.has_clock,
            self.influence if self.weighs else {},
            self.opened,
        )

    @cached_property
    def answer_bytes_max(self) -> int:
        """Of a signed answer: who says more than there is to say fills the vertex."""
        return ANSWER_BYTES_MAX + sum(name_bytes(m.peer) for m in self.plan.members if m.trains)

    @cached_property
    def vote_key_of(self) -> dict[PeerId, bytes]:
        return {m.peer: m.vote_key for m in self.plan.members if m.present}

    @cached_property
    def known_keys(self) -> dict[PeerId, bytes]:
        return known_keys(self.plan.members)


def known_keys(members: Sequence[Member]) -> dict[PeerId, bytes]:
    """Under which anybody's words may be held against it: also of those that are away."""
    return {m.peer: m.vote_key for m in members if m.standing != "expelled"}


def ground_after(settings: RunSettings, plan: RoundPlan, parent: Body, recent: Recent, run: Digest) -> Ground:
    """What the round after `parent` stands on. Enough members, or it only assembles more.

    The first round that trains waits for settled ones: a newcomer's update moves nothing, and nobody who was waited
    for shall count for nothing.
    """
    parts = parts_most(settings, parent)
    if parent.trained:
        enough = len(plan.voters) >= settings.min_peers
    else:
        settled = sum(m.votes and m.standing == "member" for m in plan.members)
        enough = settled >= max(settings.start_peers, settings.min_peers)

    def judge(reported: Reported, as_proposer: bool) -> str | None:
        wall_s = parent.time_s if as_proposer else None
        return admissible(reported, parent, recent, run, settings.open_to_all, wall_s, parts)

    who, validations = settings.recovery, recent.validations
    demanded = validations.demanded() if validations.head == parent.round else None
    if not enough:
        why, kind = "too few members to train", settings.statistic
        return Ground(
            plan,
            parent,
            None,
            why,
            judge,
            kind,
            parts_most=parts,
            recovery=who,
            reputed=settings.reputed,
            demanded=demanded,
        )
    way = way_of(settings, plan, _answered_bytes(parent))
    trust = settings.statistic, settings.tolerance, settings.witnessed
    audited, reputed, opened = bool(settings.audited_share), settings.reputed, settings.opened is not None
    more = audited, reputed, demanded, opened, settings.apart_terms
    return Ground(plan, parent, way.topology, way.why, judge, *trust, parts, who, *more)


def _answered_bytes(parent: Body) -> int:
    """Of all combined parts of the last round; 0 where the length of an update is its caller's choice."""
    commits = [decode_statement(signed.body, signed.signer) for signed in parent.commits[:1]]
    if any(isinstance(commit, Commit) and commit.values for commit in commits):
        return 0
    answers = [decode_statement(signed.body, signed.signer) for signed in parent.parts if signed is not None]
    return sum(a.size_bytes for a in answers if isinstance(a, Answered))


def write_body(
    ground: Ground,
    notary: Notary,
    attempt: int,
    parts: Sequence[Signed | None],
    commits: dict[PeerId, tuple[Commit, Signed]],
    reports: Sequence[Signed],
    state: Digest,
    now: Seconds,
    weighing: Weighing | None = None,
) -> Body:
    """The body that this proposer puts forward. Reports that are not admissible are left out.

    With a word to go back among them (`amend_among`, one at most) `state` is what the run then goes on from.
    """
    plan, parent = ground.plan, ground.parent
    answers = [_answered(p) for p in parts]
    contributors = _contributors(answers)
    chosen = {p: commits[p] for p in sorted(contributors)}
    time_s = max(now, parent.time_s)
    kept, opened = _judge_reports(ground, notary, reports, as_proposer=True)
    members, tickets = next_members(
        parent,
        {p: c for p, (c, _) in chosen.items()},
        contributors,
        opened,
        plan.settings.quorum,
        bool(ground.owners),
        ground.parts_most,
        ground.trainers_most,
    )
    return Body(
        run=notary.run,
        round=plan.round,
        attempt=attempt,
        parent=plan.head,
        time_s=time_s,
        proposer=notary.me,
        parts=tuple(parts),
        state=state,
        commits=tuple(s for _, s in chosen.values()),
        members=members,
        tickets=tickets,
        reports=tuple(kept),
        metrics=_metrics([c for c, _ in chosen.values()]),
        trained=_trained(ground, kept),
        epoch=parent.epoch,
        weighing=UNSET if weighing is None else weighing,
        window_s=_window(ground, attempt, time_s, answers, [c for c, _ in chosen.values()]),
        reputation=_scores(ground, members, answers, {p: c for p, (c, _) in chosen.items()}, opened),
    )


def write_genesis(
    settings: RunSettings, state: Digest, founder: Member, tickets: tuple[TicketUse, ...], now: Seconds
) -> Body:
    """The body that a run begins with; its digest is the run's name."""
    return Body(
        run=ZERO_DIGEST,
        round=-1,
        attempt=0,
        parent=ZERO_DIGEST,
        time_s=now,
        proposer=founder.peer,
        parts=(),
        state=state,
        commits=(),
        members=(founder,),
        tickets=tickets,
        reports=(),
        metrics=Metrics(0.0, 0, 0),
        settings=encode_settings(settings),
    )


def write_recovery(
    parent: Body, head: Digest, run: Digest, me: PeerId, here: set[PeerId], run_time: Seconds
) -> Body:
    """The body that begins a new epoch: the same state, and only those voters that are still here."""
    bare = [replace(m, links=b"") for m in parent.members]  # reports go by places among those who are here
    members = tuple(replace(m, standing="away") if m.votes and m.peer not in here else m for m in bare)
    return replace(
        parent,
        run=run,
        round=parent.round + 1,
        attempt=0,
        parent=head,
        time_s=max(run_time, parent.time_s),
        proposer=me,
        parts=(),
        commits=(),
        reports=(),
        members=members,
        metrics=Metrics(0.0, 0, 0),
        epoch=parent.epoch + 1,
        settings=b"",
        weighing=UNSET,
        window_s=UNSET,  # nothing is known of the pace of those who are left
    )


def check_body(ground: Ground, notary: Notary, body: Body, now: Seconds) -> str | None:
    """None if every entry of the body follows from what is signed in it; else what is wrong, in plain words."""
    try:
        return _check(ground, notary, body, now)
    except PeerFault as fault:
        return str(fault)


def _check(ground: Ground, notary: Notary, body: Body, now: Seconds) -> str | None:
    plan, parent = ground.plan, ground.parent
    if (body.run, body.round, body.parent, body.epoch) != (notary.run, plan.round, plan.head, parent.epoch):
        return "it does not follow the head"
    if body.trained != _trained(ground, body.reports):
        return "it miscounts the training rounds"
    if body.attempt < 0 or body.proposer not in plan.committee or body.settings:
        return "it is not by a voter of this round"
    if not parent.time_s <= body.time_s <= now + CLOCK_SLACK_S:
        return f"its time is {body.time_s - now:+.1f} s from mine"
    if len(body.parts) != len(ground.owners):
        return f"it has {len(body.parts)} parts, the plan has {len(ground.owners)}"
    answers: list[Answered | None] = []
    for part, signed in enumerate(body.parts):
        answers.append(None if signed is None else _check_part(ground, notary, body, part, signed))
    for answered in answers:
        if answered is not None and not ground.reduce_plan(body.attempt).enough(answered.contributors):
            return f"part {answered.part} has too few rows for a {ground.statistic}"
    misweighed = _misweighed(ground, body, [answered for answered in answers if answered is not None])
    if misweighed is not None:
        return misweighed
    contributors = _contributors(answers)
    commits: dict[PeerId, Commit] = {}
    for signed in body.commits:
        commit = notary.open(signed, Commit, ground.vote_key_of.get(signed.signer))
        slot = commit.round, commit.attempt
        if slot != (plan.round, body.attempt) or not (commit.parts and parts_fit(ground, commit)):
            return f"the commitment of {signed.signer} is for something else"
        flaw = commit_flaw(commit)
        if flaw is not None:
            return f"the commitment of {signed.signer} {flaw}"
        commits[signed.signer] = commit
        if not weighs_right(ground, signed.signer, commit):
            return f"the commitment of {signed.signer} claims a weight that is not its own"
        if not claims_right(ground, commit):
            return f"the commitment of {signed.signer} does not say how it trained"
        if not late_right(ground, signed.signer, commit):
            return f"the commitment of {signed.signer} holds late work that it cannot"
    if list(commits) != sorted(contributors) or len(commits) != len(body.commits):
        return "its commitments are not exactly those of its contributors"
    kept, opened = _judge_reports(ground, notary, body.reports, as_proposer=False)
    if len(kept) != len(body.reports) or len(kept) > REPORTS_PER_VERTEX_MAX:
        return "it carries a report that may not stand in a vertex"
    if len(amends_in(kept)) > 1:
        return "it goes back to two states"
    rule, trained = plan.settings.quorum, bool(ground.owners)
    most = ground.parts_most, ground.trainers_most
    expected = next_members(parent, commits, contributors, opened, rule, trained, *most)
    if (body.members, body.tickets) != expected:
        return "its membership does not follow from its reports"
    if body.metrics != _metrics([commits[p] for p in sorted(commits)]):
        return "its metrics do not follow from its commitments"
    if body.window_s != _window(ground, body.attempt, body.time_s, answers, list(commits.values())):
        return "the window of the next round does not follow from how long it took"
    if body.reputation != _scores(ground, body.members, answers, commits, opened):
        return "its reputations do not follow from what it shows of its members"
    return None


def _scores(
    ground: Ground,
    members: Sequence[Member],
    answers: Sequence[Answered | None],
    commits: Mapping[PeerId, Commit],
    reports: Sequence[Reported],
) -> tuple[int, ...] | UnsetType:
    """What every line of `members` is worth after this round, where records are kept."""
    if not ground.reputed:
        return UNSET
    return next_scores(ground.plan, ground.owners, ground.audited, members, answers, commits, reports)


def _trained(ground: Ground, reports: Sequence[Signed]) -> int:
    """Training rounds that the state stands for. Those that the run went back behind count no more."""
    back = first_of(amends_in(reports))
    return back[1].trained if back is not None else ground.parent.trained + bool(ground.owners)


def amend_among(ground: Ground, notary: Notary, reports: Sequence[Signed]) -> tuple[Signed, Amend] | None:
    """The word to go back that a proposer may put into its body, if there is one: a person's, or what validators
    demand, which it says itself."""
    kept, _ = _judge_reports(ground, notary, [signed for signed, _ in amends_in(reports)], as_proposer=True)
    demanded = [] if ground.demanded is None else [(notary.sign(ground.demanded), ground.demanded)]
    return first_of([*amends_in(kept), *demanded])


def _forged(ground: Ground, notary: Notary, signed: Signed, report: Reported) -> bool:
    """A word to go back that is neither the recovery identity's nor the one that validators demand."""
    statement = report.statement
    if not isinstance(statement, Amend):
        return False
    if not statement.signature:
        return statement != ground.demanded or signed.body != encode(statement)
    return not amend_holds(signed, statement, notary, ground.recovery)


def _check_part(ground: Ground, notary: Notary, body: Body, part: int, signed: Signed) -> Answered:
    answered = notary.open(signed, Answered, ground.vote_key_of.get(signed.signer))
    owners = ground.owners[part]
    fits = (
        (answered.round, answered.attempt, answered.part) == (body.round, body.attempt, part)
        and 0 <= answered.owner_index < len(owners)
        and owners[answered.owner_index] == signed.signer
        and len(answered.contributors) > 0
        and list(answered.contributors) == sorted(set(answered.contributors))
        and made_of_fits(answered.made_of, ground.opened)
    )
    if not fits:
        raise PeerFault(signed.signer, f"the answer for part {part} is not its owner's")
    return answered


def _misweighed(ground: Ground, body: Body, answers: Sequence[Answered]) -> str | None:
    """All answers of a body are of one weighing, which stands in it, where rows are weighed; else there is none."""
    weighing = body.weighing
    if not ground.weighs or not answers:
        return "it weighs rows that nobody weighed" if weighing is not UNSET else None
    if weighing is UNSET:
        return "it does not say what its rows weigh"
    flaw = weighing_flaw(ground.reduce_plan(body.attempt), weighing)
    if flaw is not None:
        return f"it {flaw}"
    name = name_of(weighing)
    other = [answered.part for answered in answers if answered.rows != name or not made_with(answered, weighing)]
    return f"its answer for part {other[0]} is of another weighing" if other else None


def parts_fit(ground: Ground, commit: Commit) -> bool:
    """A pass has no parts; an update has all of them, or the first ones where its length is its caller's choice."""
    planned = len(ground.owners)
    return commit.parts in (0, planned) or (commit.values > 0 and 0 < commit.parts < planned)


def weighs_right(ground: Ground, peer: PeerId, commit: Commit) -> bool:
    """A row weighs what it should. Where rows are sorted, each must weigh something."""
    member = ground.plan.by_peer.get(peer)
    if member is None or not member.trains:
        return False
    if commit.parts == 0 or member.standing == "new":
        return commit.weight == 0
    own = row_weight(ground, peer, commit.steps_now, commit.samples_now)
    return commit.weight == own and (commit.samples > 0 or ground.statistic == "mean")


def row_weight(ground: Ground, peer: PeerId, steps: int, samples: int) -> int:
    """What a trainer's update counts in a mean: the samples it learned from, and a newcomer's nothing.

    Where records are kept these decide, and how many of the steps assigned it took: what it says of its samples
    then moves nothing.
    """
    if peer in ground.weightless:
        return 0
    if not ground.reputed or ground.statistic != "mean":
        return samples
    return ground.influence[peer] * max(0, min(steps, ground.plan.settings.inner_steps))


def late_right(ground: Ground, peer: PeerId, commit: Commit) -> bool:
    """Late work is where it may be, and is a part of what the commitment stands for."""
    late = commit.late
    if late is None:
        return True
    fits = 0 <= late.since < commit.round and 0 < late.steps < commit.steps and 0 < late.samples < commit.samples
    return commit.parts > 0 and ground.takes_late(peer) and fits


def claims_right(ground: Ground, commit: Commit) -> bool:
    """Where rounds are audited an update comes with a claim that can be, and nowhere else does anything."""
    if commit.claimed is None:
        return not (ground.audited and commit.parts)
    return ground.audited and commit.parts > 0 and len(commit.claimed) == DIGEST_BYTES


def commit_flaw(commit: Commit) -> str | None:
    """What no honest peer says: numbers that break sums for everybody, or words that fill the vertex."""
    if not (
        isfinite(commit.loss)
        and isfinite(commit.step_s)
        and isfinite(commit.offset_s)
        and abs(commit.loss) < NUMBER_MAX
    ):
        return "holds a number that is not one"
    if not (
        0 <= commit.values < NUMBER_MAX
        and 0 <= commit.steps < NUMBER_MAX
        and 0 <= commit.samples < NUMBER_MAX
        and 0 <= commit.step_s < NUMBER_MAX
    ):
        return "holds a number that cannot be"
    if len(commit.why) > WORDS_MAX or len(commit.root) != DIGEST_BYTES:
        return "holds a text or a digest that is too long"
    return report_flaw(commit.links)


def _window(
    ground: Ground, attempt: int, time_s: Seconds, answers: Sequence[Answered | None], commits: Sequence[Commit]
) -> Seconds | UnsetType:
    """An owner's in the next round, where windows follow the pace. Only rounds that train show any."""
    plan, settings = ground.plan, ground.plan.settings
    if plan.pace is None or settings.window_min_s is UNSET:
        return UNSET
    if not ground.owners:
        return ground.parent.window_s
    if not commits:
        return settings.owner_s  # nobody had the time to train
    took_s = time_s - plan.begin
    said = [a for a in answers if a is not None]
    named = [set(a.contributors) for a in said]
    awaited = [m.peer for m in plan.trainers if m.standing == "member"]
    # an owner that keeps silent keeps its own row of its part, too: whoever is slow lacks in more than one
    here = sum(2 * sum(peer in names for names in named) > len(answers) for peer in awaited)
    whole = here >= min(len(awaited), plan.quorum_of_updates or len(awaited))
    # where owners watch each other a late one may be complained of: if it is only slow, it shall get its time
    excused = not ground.witnessed and any(a.owner_index > 0 for a in said)
    training_s = median(c.steps_now * c.step_s for c in commits)
    shown = Shown(took_s, training_s, attempt, took_s >= plan.pace.train_s, whole, excused)
    return next_window(plan.pace.owner_s, shown, settings.window_min_s, settings.owner_s)


def _answered(signed: Signed | None) -> Answered | None:
    statement = decode_statement(signed.body, signed.signer) if signed is not None else None
    return statement if isinstance(statement, Answered) else None


def _contributors(answers: Sequence[Answered | None]) -> set[PeerId]:
    named: set[PeerId] = set()
    for answered in answers:
        if answered is not None:
            named.update(answered.contributors)
    return named


def _judge_reports(
    ground: Ground, notary: Notary, reports: Sequence[Signed], as_proposer: bool
) -> tuple[list[Signed], list[Reported]]:
    kept: list[Signed] = []
    opened: list[Reported] = []
    for signed in reports[:REPORTS_PER_VERTEX_MAX]:
        report = open_report(notary, signed, ground.vote_key_of, ground.known_keys)
        if (
            report is not None
            and not _forged(ground, notary, signed, report)
            and ground.admissible(report, as_proposer) is None
        ):
            kept.append(signed)
            opened.append(report)
    return kept, opened


def open_report(
    notary: Notary,
    signed: Signed,
    vote_keys: Mapping[PeerId, bytes],
    known_keys: Mapping[PeerId, bytes] | None = None,
) -> Reported | None:
    """A member report whose signature holds. A Join brings its own key, certified by the identity it names.

    What somebody was caught at holds only if that one signed it, under one of `known_keys`.
    """
    if len(signed.body) > REPORT_BYTES_MAX:
        return None
    identity, vote_key = ZERO_DIGEST, vote_keys.get(signed.signer)
    try:
        statement = decode_statement(signed.body, signed.signer)
        if isinstance(statement, Join):
            certified = notary.verifier.certifies(
                statement.certificate, statement.peer, statement.vote_key, notary.run
            )
            if not certified or statement.peer != signed.signer:
                return None
            vote_key = statement.vote_key
            identity = digest(notary.verifier.identity_of(statement.certificate) or b"")
        statement = notary.open(signed, Statement, vote_key)
        if isinstance(statement, Caught):
            for said in (statement.answer, statement.other):
                if said is not None:
                    found = notary.open(said, Statement, (known_keys or vote_keys).get(statement.answer.signer))
                    if statement.other is None and not isinstance(found, Answered | Compared):
                        return None
    except PeerFault:
        return None
    return Reported(signed.signer, statement, identity)  # pyright: ignore[reportArgumentType]  # decode gives AnyStatement


def _metrics(commits: Sequence[Commit]) -> Metrics:
    samples_now = sum(c.samples_now for c in commits)
    weighted = 0.0
    for c in commits:  # in the order of the commitments: float sums depend on order
        weighted += c.loss * c.samples_now
    loss = weighted / samples_now if samples_now else 0.0
    return Metrics(loss, sum(c.steps for c in commits), sum(c.samples for c in commits))
