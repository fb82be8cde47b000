"""Writing and checking the body of a vertex: everything that can be judged without touching a tensor.

The proposer writes a body from what it saw; every voter recomputes each entry from the signed statements inside.
A body that passes `check_body` can be wrong in one way only, its state hash, which voters recompute from the
combined parts. Whose turn it is to propose is the agreement's business. Never trusts a field that can be derived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import median

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.fair_draw import Credit
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId, Seconds
from atoll.base.limits import CLOCK_WRONG_S, REPORT_BYTES_MAX, REPORTS_PER_VERTEX_MAX
from atoll.base.workload import WorkloadProgress, reached_after
from atoll.crypto.digest import digest
from atoll.peer.governance.orders import Word, amends_in, first_of, paused_after, pauses_in, tunes_in, word_holds
from atoll.peer.governance.settings_change import tuned_after
from atoll.peer.round.commitment_rules import (
    claims_right,
    commit_flaw,
    draws_flaw,
    late_right,
    parts_fit,
    weighs_right,
)
from atoll.peer.round.context import RoundContext
from atoll.peer.round.reputation import next_scores, resting_among
from atoll.peer.round.topology_choice import asked_in
from atoll.peer.settings import RunSettings, encode_settings
from atoll.policy.membership import VerifiedReport
from atoll.policy.membership_change import next_members
from atoll.policy.participation import next_credits
from atoll.policy.plan import RoundPlan
from atoll.policy.timeouts import RoundTiming, next_window
from atoll.policy.votes import next_votes
from atoll.protocol.allreduce.buffers import name_of
from atoll.protocol.allreduce.plan import with_reserves
from atoll.protocol.allreduce.validation import made_with, weighing_flaw
from atoll.protocol.history.chain import is_too_old
from atoll.wire.codec import decode_statement, encode
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import (
    Accusation,
    AgreedWeights,
    Commitment,
    JoinRequest,
    OwnerResult,
    RollbackOrder,
    SignedStatement,
    Statement,
)
from atoll.wire.messages.vertex import InvitationRecord, Member, RoundMetrics, TicketUse, VertexBody
from atoll.wire.opening import made_of_fits

CLOCK_SLACK_S = 1.0  # a body may be this much ahead of my run time; peers beyond 250 ms are told their offset


def write_body(
    ground: RoundContext,
    notary: StatementSigner,
    attempt: int,
    parts: Sequence[SignedStatement | None],
    commits: dict[PeerId, tuple[Commitment, SignedStatement]],
    reports: Sequence[SignedStatement],
    state: Digest,
    now: Seconds,
    weighing: AgreedWeights | None = None,
) -> VertexBody:
    """The body that this proposer puts forward. Reports that are not admissible are left out.

    With a word to go back among them (`amend_among`, one at most) `state` is what the run then goes on from.
    """
    plan, parent = ground.plan, ground.parent
    answers = [_answered(p) for p in parts]
    contributors = _contributors(answers)
    chosen = {p: commits[p] for p in sorted(contributors)}
    time_s = next_time(parent, now)
    kept, opened = _judge_reports(ground, notary, reports, time_s)
    awaited = awaited_in(plan, opened, contributors)
    trained = _trained(ground, kept)
    members, tickets = next_members(
        parent,
        {p: c for p, (c, _) in chosen.items()},
        contributors,
        opened,
        plan.settings.quorum,
        bool(ground.owners),
        parts=ground.parts_most,
        trainers_most=ground.trainers_most,
        signing=plan.settings.signing,
        awaited=awaited,
    )
    members, invited = _votes(ground, members, tickets, contributors, opened)
    return VertexBody(
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
        trained=trained,
        epoch=parent.epoch,
        weighing=UNSET if weighing is None else weighing,
        window_s=_window(ground, attempt, time_s, answers, [c for c, _ in chosen.values()], awaited),
        reputation=_scores(ground, members, answers, {p: c for p, (c, _) in chosen.items()}, opened),
        credits=_credits(ground, members, contributors),
        effort=_effort(ground, {p: c for p, (c, _) in chosen.items()}, kept),
        paused=paused_after(parent, plan.round, kept),
        invited=invited,
        tuned=tuned_after(ground.settings, parent, trained, kept),
    )


def write_genesis(
    settings: RunSettings, state: Digest, founder: Member, tickets: tuple[TicketUse, ...], now: Seconds
) -> VertexBody:
    """The body that a run begins with; its digest is the run's name."""
    return VertexBody(
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
        metrics=RoundMetrics(0.0, 0, 0),
        settings=encode_settings(settings),
    )


def write_recovery(
    parent: VertexBody, head: Digest, run: Digest, me: PeerId, here: set[PeerId], run_time: Seconds, vote_key: bytes
) -> VertexBody:
    """The body that begins a new epoch: the same state, and only those voters that are still here.

    `vote_key` is `me`'s: its identity signs the vertex, and so admits a key that no quorum can admit.
    """
    # reports of links go by places among those who are here
    bare = [replace(m, links=b"", vote_key=vote_key if m.peer == me else m.vote_key) for m in parent.members]
    members = tuple(replace(m, standing="away") if m.votes and m.peer not in here else m for m in bare)
    return replace(
        parent,
        run=run,
        round=parent.round + 1,
        attempt=0,
        parent=head,
        time_s=next_time(parent, run_time),
        proposer=me,
        parts=(),
        commits=(),
        reports=(),
        members=members,
        metrics=RoundMetrics(0.0, 0, 0),
        epoch=parent.epoch + 1,
        settings=b"",
        weighing=UNSET,
        window_s=UNSET,  # nothing is known of the pace of those who are left
    )


def next_time(parent: VertexBody, now: Seconds) -> Seconds:
    """The time of the body after `parent`: never earlier, unless wrong clocks put the parent far ahead of `now`."""
    return now if parent.time_s > now + CLOCK_WRONG_S else max(now, parent.time_s)


def _time_fits(parent: VertexBody, time_s: Seconds, now: Seconds) -> bool:
    """True if a voter may agree to this time.

    A proposer sets the time back only if the parent is `CLOCK_WRONG_S` ahead of it. Later views may vote on the
    same body, so voters agree to it while the parent is ahead of them at all.
    """
    if time_s > now + CLOCK_SLACK_S or is_too_old(parent, time_s):
        return False
    ahead = parent.time_s > now + CLOCK_SLACK_S
    return time_s >= parent.time_s or (ahead and time_s >= now - CLOCK_WRONG_S)


def check_body(ground: RoundContext, notary: StatementSigner, body: VertexBody, now: Seconds) -> str | None:
    """None if every entry of the body follows from what is signed in it; else what is wrong, in plain words."""
    try:
        return _check(ground, notary, body, now)
    except PeerFault as fault:
        return str(fault)


def _check(ground: RoundContext, notary: StatementSigner, body: VertexBody, now: Seconds) -> str | None:
    plan, parent, way = ground.plan, ground.parent, ground.by(asked_in(body.commits))
    if (body.run, body.round, body.parent, body.epoch) != (notary.run, plan.round, plan.head, parent.epoch):
        return "it does not follow the head"
    if body.trained != _trained(ground, body.reports):
        return "it miscounts the training rounds"
    if body.attempt < 0 or body.proposer not in plan.committee or body.settings:
        return "it is not by a voter of this round"
    if not _time_fits(parent, body.time_s, now):
        return f"its time is {body.time_s - now:+.1f} s from mine"
    if len(body.parts) != len(way.owners):
        return f"it has {len(body.parts)} parts, the plan has {len(way.owners)}"
    answers: list[OwnerResult | None] = []
    for part, signed in enumerate(body.parts):
        answers.append(None if signed is None else _check_part(way, notary, body, part, signed))
    reduce_plan = way.reduce_plan(body.attempt) if body.parts else None
    for answered in answers:
        if reduce_plan is not None and answered is not None and not reduce_plan.enough(answered.contributors):
            return f"part {answered.part} has too few rows for a {ground.statistic}"
    misweighed = _misweighed(ground, body, [answered for answered in answers if answered is not None])
    if misweighed is not None:
        return misweighed
    contributors = _contributors(answers)
    commits: dict[PeerId, Commitment] = {}
    for signed in body.commits:
        commit = notary.open(signed, Commitment, ground.vote_key_of.get(signed.signer))
        slot = commit.round, commit.attempt
        if slot != (plan.round, body.attempt) or not (commit.parts and parts_fit(ground, commit)):
            return f"the commitment of {signed.signer} is for something else"
        if ground.by(commit.asked) is not way:  # nobody's choice in most runs: there its words change nothing
            return f"the commitment of {signed.signer} is for another topology than the others"
        flaw = commit_flaw(commit)
        if flaw is not None:
            return f"the commitment of {signed.signer} {flaw}"
        commits[signed.signer] = commit
        if not weighs_right(ground, signed.signer, commit):
            return f"the commitment of {signed.signer} claims a weight that is not its own"
        if not claims_right(ground, commit):
            return f"the commitment of {signed.signer} does not say how it trained"
        flaw = draws_flaw(ground, signed.signer, commit)
        if flaw is not None:
            return f"the commitment of {signed.signer} {flaw}"
        if not late_right(ground, signed.signer, commit):
            return f"the commitment of {signed.signer} holds late work that it cannot"
    if list(commits) != sorted(contributors) or len(commits) != len(body.commits):
        return "its commitments are not exactly those of its contributors"
    kept, opened = _judge_reports(ground, notary, body.reports, body.time_s)
    if len(kept) != len(body.reports) or len(kept) > REPORTS_PER_VERTEX_MAX:
        return "it carries a report that may not stand in a vertex"
    if len(amends_in(kept)) > 1:
        return "it goes back to two states"
    if len(pauses_in(kept)) > 1 or body.paused != paused_after(parent, plan.round, kept):
        return "whether the run is paused does not follow from its reports"
    if len(tunes_in(kept)) > (not amends_in(kept)):  # what is gone back to has numbers of its own
        return "it changes numbers twice, or as it goes back"
    if body.tuned != tuned_after(ground.settings, parent, body.trained, kept):
        return "the numbers of the run do not follow from its reports"
    rule, trained = plan.settings.quorum, bool(ground.owners)
    awaited = awaited_in(plan, opened, contributors)
    members, tickets = next_members(
        parent,
        commits,
        contributors,
        opened,
        rule,
        trained,
        parts=ground.parts_most,
        trainers_most=ground.trainers_most,
        signing=plan.settings.signing,
        awaited=awaited,
    )
    members, invited = _votes(ground, members, tickets, contributors, opened)
    if (body.members, body.tickets) != (members, tickets):
        return "its membership does not follow from its reports"
    if body.invited != invited:
        return "by whom its members came does not follow from its reports"
    if body.metrics != _metrics([commits[p] for p in sorted(commits)]):
        return "its metrics do not follow from its commitments"
    if body.window_s != _window(ground, body.attempt, body.time_s, answers, list(commits.values()), awaited):
        return "the window of the next round does not follow from how long it took"
    if body.effort != _effort(ground, commits, body.reports):
        return "what it asks of the next round does not follow from its losses"
    if not ground.words_lost and body.reputation != _scores(ground, body.members, answers, commits, opened):
        return "its reputations do not follow from what it shows of its members"
    if body.credits != _credits(ground, body.members, contributors):
        return "its credits do not follow from who was drawn and who counts"
    return None


def awaited_in(
    plan: RoundPlan, reports: Sequence[VerifiedReport], contributors: Collection[PeerId]
) -> frozenset[PeerId] | None:
    """Whose update is missing if it does not count: who was drawn and did not say that it rests. None: everybody
    who trains."""
    resting = resting_among(plan, reports) - set(contributors)
    return None if plan.drawn is None and not resting else plan.givers - resting


def _votes(
    ground: RoundContext,
    members: tuple[Member, ...],
    tickets: Sequence[TicketUse],
    contributors: Collection[PeerId],
    reports: Sequence[VerifiedReport],
) -> tuple[tuple[Member, ...], InvitationRecord | UnsetType]:
    """Members with the votes that they have earned, where these are."""
    terms = ground.settings.vote_terms
    return (
        (members, UNSET)
        if terms is None
        else next_votes(ground.parent, members, tickets, contributors, reports, terms)
    )


def _credits(
    ground: RoundContext, members: Sequence[Member], contributors: Collection[PeerId]
) -> tuple[Credit, ...] | UnsetType:
    """Of every line of `members` after this round, where who trains is drawn. Nobody is where members assemble."""
    plan, parent = ground.plan, ground.parent
    if plan.drawn is None:
        return UNSET
    trusted = plan.settings.quorum == "majority"
    return next_credits(parent, members, plan.drawn if ground.owners else (), contributors, trusted)


def _scores(
    ground: RoundContext,
    members: Sequence[Member],
    answers: Sequence[OwnerResult | None],
    commits: Mapping[PeerId, Commitment],
    reports: Sequence[VerifiedReport],
) -> tuple[int, ...] | UnsetType:
    """What every line of `members` is worth after this round, where records are kept."""
    if not ground.reputed:
        return UNSET
    shown = members, answers, commits, reports, ground.scored, ground.compared
    return next_scores(ground.plan, ground.owners, ground.audited, *shown)


def _trained(ground: RoundContext, reports: Sequence[SignedStatement]) -> int:
    """Training rounds that the state stands for. Those that the run went back behind count no more."""
    back = first_of(amends_in(reports))
    return back[1].trained if back is not None else ground.parent.trained + bool(ground.owners)


def amend_among(
    ground: RoundContext, notary: StatementSigner, reports: Sequence[SignedStatement]
) -> tuple[SignedStatement, RollbackOrder] | None:
    """The word to go back that a proposer may put into its body, if there is one: a person's, or what validators
    demand, which it says itself."""
    back = [signed for signed, _ in amends_in(reports)]
    kept, _ = _judge_reports(ground, notary, back, ground.parent.time_s)
    demanded = [] if ground.demanded is None else [(notary.sign(ground.demanded), ground.demanded)]
    return first_of([*amends_in(kept), *demanded])


def _forged(ground: RoundContext, notary: StatementSigner, signed: SignedStatement, report: VerifiedReport) -> bool:
    """A word of the recovery identity that is not its own, nor the one to go back that validators demand."""
    statement = report.statement
    if not isinstance(statement, Word):
        return False
    if isinstance(statement, RollbackOrder) and not statement.signature:
        return statement != ground.demanded or signed.body != encode(statement)
    return not word_holds(signed, statement, notary, ground.recovery)


def _check_part(
    ground: RoundContext, notary: StatementSigner, body: VertexBody, part: int, signed: SignedStatement
) -> OwnerResult:
    answered = notary.open(signed, OwnerResult, ground.vote_key_of.get(signed.signer))
    owners = ground.owners[part]
    if answered.owner_index >= len(owners):
        owners = with_reserves(owners, ground.reserves)
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
    takes = ground.takes(part)
    if takes is not None and not (
        signed.signer in answered.contributors and takes.issuperset(answered.contributors)
    ):
        raise PeerFault(signed.signer, f"the answer for part {part} is made of rows that it does not take")
    return answered


def _misweighed(ground: RoundContext, body: VertexBody, answers: Sequence[OwnerResult]) -> str | None:
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


def _window(
    ground: RoundContext,
    attempt: int,
    time_s: Seconds,
    answers: Sequence[OwnerResult | None],
    commits: Sequence[Commitment],
    whom: Collection[PeerId] | None,
) -> Seconds | UnsetType:
    """An owner's in the next round, where windows follow the pace. Only rounds that train show any. `whom` they
    waited for, where not for everybody who trains."""
    plan, settings = ground.plan, ground.plan.settings
    if plan.pace is None or settings.window_min_s is UNSET:
        return UNSET
    if not ground.owners:
        return ground.parent.window_s
    if not commits:
        return settings.owner_s  # nobody had the time to train
    took_s = max(0.0, time_s - ground.parent.time_s)  # the plan's own begin may be set right by each peer
    said = [a for a in answers if a is not None]
    awaited = [m.peer for m in plan.trainers if m.standing == "member" and (whom is None or m.peer in whom)]
    here = len(_in_time(ground, said).intersection(awaited))
    whole = here >= min(len(awaited), plan.quorum_of_updates or len(awaited))
    # where owners watch each other a late one may be complained of: if it is only slow, it shall get its time
    excused = not ground.witnessed and any(a.owner_index > 0 for a in said)
    training_s = median(c.steps_now * c.step_s for c in commits)
    shown = RoundTiming(took_s, training_s, attempt, took_s >= plan.pace.train_s, whole, excused)
    return next_window(plan.pace.owner_s, shown, settings.window_min_s, settings.owner_s)


def _in_time(ground: RoundContext, answers: Sequence[OwnerResult]) -> set[PeerId]:
    """Whose rows came in time, as far as answers show it."""
    named = Counter(peer for answered in answers for peer in answered.contributors)
    # an owner that keeps silent keeps its own row of its part, too: whoever is slow lacks in more than one
    return {peer for peer, times in named.items() if 2 * times > ground.taking(peer)}


def _effort(
    ground: RoundContext, commits: Mapping[PeerId, Commitment], reports: Sequence[SignedStatement]
) -> WorkloadProgress | UnsetType:
    """What the next round goes by, where that follows losses: of settled members. A state that the run goes back
    behind shows nothing."""
    settings, before = ground.plan.settings, ground.parent.effort
    if settings.effort is UNSET:
        return UNSET
    losses = [c.loss for peer, c in commits.items() if peer not in ground.weightless]
    if first_of(amends_in(reports)) is not None:
        losses = []
    return reached_after(settings.effort, settings.inner_steps, before, losses)


def _answered(signed: SignedStatement | None) -> OwnerResult | None:
    statement = decode_statement(signed.body, signed.signer) if signed is not None else None
    return statement if isinstance(statement, OwnerResult) else None


def _contributors(answers: Sequence[OwnerResult | None]) -> set[PeerId]:
    named: set[PeerId] = set()
    for answered in answers:
        if answered is not None:
            named.update(answered.contributors)
    return named


def _judge_reports(
    ground: RoundContext, notary: StatementSigner, reports: Sequence[SignedStatement], time_s: Seconds
) -> tuple[list[SignedStatement], list[VerifiedReport]]:
    kept: list[SignedStatement] = []
    opened: list[VerifiedReport] = []
    for signed in reports[:REPORTS_PER_VERTEX_MAX]:
        report = open_report(notary, signed, ground.vote_key_of, ground.known_keys)
        if (
            report is not None
            and not _forged(ground, notary, signed, report)
            and ground.admissible(report, time_s) is None
        ):
            kept.append(signed)
            opened.append(report)
    return kept, opened


def open_report(
    notary: StatementSigner,
    signed: SignedStatement,
    vote_keys: Mapping[PeerId, bytes],
    known_keys: Mapping[PeerId, bytes] | None = None,
) -> VerifiedReport | None:
    """A member report whose signature holds. A Join brings its own key, certified by the identity it names.

    What somebody was caught at holds only if that one signed it, under one of `known_keys`.
    """
    if len(signed.body) > REPORT_BYTES_MAX:
        return None
    identity, validity, vote_key = ZERO_DIGEST, None, vote_keys.get(signed.signer)
    try:
        statement = decode_statement(signed.body, signed.signer)
        if isinstance(statement, JoinRequest):
            certified = notary.verifier.certifies(
                statement.certificate, statement.peer, statement.vote_key, notary.run
            )
            if not certified or statement.peer != signed.signer:
                return None
            vote_key = statement.vote_key
            identity = digest(notary.verifier.identity_of(statement.certificate) or b"")
            validity = notary.verifier.validity_of(statement.certificate)
        statement = notary.open(signed, Statement, vote_key)
        if isinstance(statement, Accusation):
            for said in (statement.answer, statement.other):
                if said is not None:
                    found = notary.open(said, Statement, (known_keys or vote_keys).get(statement.answer.signer))
                    if statement.other is None and not isinstance(found, OwnerResult | Commitment):
                        return None
    except PeerFault:
        return None
    # decode gives AnyStatement
    return VerifiedReport(signed.signer, statement, identity, validity)  # pyright: ignore[reportArgumentType]


def _metrics(commits: Sequence[Commitment]) -> RoundMetrics:
    samples_now = sum(c.samples_now for c in commits)
    weighted = 0.0
    for c in commits:  # in the order of the commitments: float sums depend on order
        weighted += c.loss * c.samples_now
    loss = weighted / samples_now if samples_now else 0.0
    return RoundMetrics(loss, sum(c.steps for c in commits), sum(c.samples for c in commits))
