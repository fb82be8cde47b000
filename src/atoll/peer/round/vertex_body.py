"""Vertex body: writing one as the proposer and checking one as a voter, without touching a tensor.

The proposer writes a body from what it received; every voter recomputes every entry from signed statements in it.
A body that passes `check_body` can only be wrong in its state hash, which voters recompute from the combined parts.

Invariants:
- No field that can be derived is trusted.
Not responsible for: proposer turns (protocol/agreement).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.fair_draw import Credit
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId, Seconds
from atoll.base.limits import CLOCK_WRONG_S, REPORT_BYTES_MAX, REPORTS_PER_VERTEX_MAX
from atoll.base.workload import AdaptiveWorkloadState, progress_after
from atoll.crypto.digest import digest
from atoll.peer.governance.orders import Word, amends_in, first_of, paused_after, pauses_in, tunes_in, word_holds
from atoll.peer.governance.settings_change import tuned_after
from atoll.peer.round.commitment_rules import commitment_flaw, parts_fit
from atoll.peer.round.context import RoundContext
from atoll.peer.round.reputation import next_scores, resting_among
from atoll.peer.round.topology_choice import asked_in
from atoll.peer.settings import RunSettings, encode_settings
from atoll.policy.contributions import parts_counted, result_in
from atoll.policy.data.positions import next_positions
from atoll.policy.membership import VerifiedReport
from atoll.policy.membership_change import NextMembership, next_members
from atoll.policy.participation import next_credits
from atoll.policy.plan import RoundPlan
from atoll.policy.timeouts import ObservedRoundTiming, next_window
from atoll.policy.votes import next_votes
from atoll.protocol.allreduce.buffers import weights_digest
from atoll.protocol.allreduce.plan import with_reserves
from atoll.protocol.allreduce.validation import fits_weights, weighing_flaw
from atoll.protocol.history.chain import is_too_old
from atoll.wire.codec import decode_statement, encode
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import (
    Accusation,
    AgreedWeights,
    BaseStatement,
    ChangedSettings,
    Commitment,
    JoinRequest,
    OwnerResult,
    RollbackOrder,
    SignedStatement,
)
from atoll.wire.messages.vertex import (
    EarnedVoteRecord,
    IssuedTicketRecord,
    Member,
    SharedDataProgress,
    SwarmRoundMetrics,
    VertexBody,
)
from atoll.wire.opening import names_commitments_iff_opened

CLOCK_SLACK_S = 1.0  # seconds a body may be ahead of local run time; peers beyond 250 ms are sent their offset


def write_body(
    ground: RoundContext,
    notary: StatementSigner,
    attempt: int,
    parts: Sequence[SignedStatement | None],
    commits: dict[PeerId, tuple[Commitment, SignedStatement]],
    reports: Sequence[SignedStatement],
    *,
    state: Digest,
    now: Seconds,
    weighing: AgreedWeights | None = None,
) -> VertexBody:
    """The body that this proposer submits; reports that are not admissible are left out.

    If one of them is a rollback order (at most one, from `amend_among`), `state` is the one the run continues from.
    """
    results = tuple(result_in(part) for part in parts)
    chosen = {p: commits[p] for p in sorted(parts_counted(results))}
    time_s = next_time(ground.parent, now)
    kept, opened = _judge_reports(ground, notary, reports, time_s)
    inputs = BodyInputs(ground, attempt, time_s, results, {p: c for p, (c, _) in chosen.items()}, kept, opened)
    return VertexBody(
        run=notary.run,
        round=ground.plan.round,
        attempt=attempt,
        parent=ground.plan.head,
        time_s=time_s,
        proposer=notary.me,
        parts=tuple(parts),
        state=state,
        commits=tuple(s for _, s in chosen.values()),
        reports=tuple(kept),
        epoch=ground.parent.epoch,
        weighing=UNSET if weighing is None else weighing,
        **{field.name: field.derive(inputs) for field in DERIVED},
    )


def write_genesis(
    settings: RunSettings, state: Digest, founder: Member, tickets: tuple[IssuedTicketRecord, ...], now: Seconds
) -> VertexBody:
    """The first body of a run; its digest is the run's id."""
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
        metrics=SwarmRoundMetrics(0.0, 0, 0),
        settings=encode_settings(settings),
    )


def write_recovery(
    parent: VertexBody, head: Digest, run: Digest, me: PeerId, here: set[PeerId], run_time: Seconds, vote_key: bytes
) -> VertexBody:
    """The body of a new epoch: the same state, with only the reachable voters.

    `vote_key` is the local peer's. Its identity signs the vertex and so admits a key that no quorum can admit.
    """
    # link reports are indexed by places among the present members
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
        metrics=SwarmRoundMetrics(0.0, 0, 0),
        epoch=parent.epoch + 1,
        settings=b"",
        weighing=UNSET,
        window_s=UNSET,  # the pace of the remaining members is unknown
    )


def next_time(parent: VertexBody, now: Seconds) -> Seconds:
    """Time of the body after `parent`: never earlier, unless wrong clocks put the parent far ahead of `now`."""
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
    """None if every entry of the body follows from what is signed in it, else the first flaw in plain words."""
    try:
        return _check(ground, notary, body, now)
    except PeerFault as fault:
        return str(fault)


def _check(ground: RoundContext, notary: StatementSigner, body: VertexBody, now: Seconds) -> str | None:
    way = ground.with_topology(asked_in(body.commits))
    if (flaw := _frame_flaw(ground, notary.run, body, now)) is not None:
        return flaw
    if len(body.parts) != len(way.owners):
        return f"it has {len(body.parts)} parts, the plan has {len(way.owners)}"
    results = tuple(
        None if signed is None else _check_part(way, notary, body, part, signed)
        for part, signed in enumerate(body.parts)
    )
    if (flaw := _results_flaw(way, body, [result for result in results if result is not None])) is not None:
        return flaw
    commits: dict[PeerId, Commitment] = {}
    for signed in body.commits:
        commit = notary.open(signed, Commitment, ground.vote_key_of.get(signed.signer))
        if (flaw := _commit_flaw(ground, way, body.attempt, signed.signer, commit)) is not None:
            return f"the commitment of {signed.signer} {flaw}"
        commits[signed.signer] = commit
    if list(commits) != sorted(parts_counted(results)) or len(commits) != len(body.commits):
        return "its commitments are not exactly those of its contributors"
    kept, opened = _judge_reports(ground, notary, body.reports, body.time_s)
    if len(kept) != len(body.reports) or len(kept) > REPORTS_PER_VERTEX_MAX:
        return "it carries a report that may not stand in a vertex"
    if (flaw := _orders_flaw(kept)) is not None:
        return flaw
    inputs = BodyInputs(ground, body.attempt, body.time_s, results, commits, kept, opened)
    wrong = (f.why for f in DERIVED if f.is_known(ground) and getattr(body, f.name) != f.derive(inputs))
    return next(wrong, None)


def _frame_flaw(ground: RoundContext, run: Digest, body: VertexBody, now: Seconds) -> str | None:
    """Flaw of the body's place in the history, its proposer or its time."""
    plan = ground.plan
    if (body.run, body.round, body.parent, body.epoch) != (run, plan.round, plan.head, ground.parent.epoch):
        return "it does not follow the head"
    if body.attempt < 0 or body.proposer not in plan.committee or body.settings:
        return "it is not by a voter of this round"
    if not _time_fits(ground.parent, body.time_s, now):
        return f"its time is {body.time_s - now:+.1f} s from the local one"
    return None


def _results_flaw(way: RoundContext, body: VertexBody, results: Sequence[OwnerResult]) -> str | None:
    """Flaw of the results: too few rows for the statistic, or another weighting than the one in the body."""
    reduce_plan = way.reduce_plan(body.attempt) if body.parts else None
    for result in results:
        if reduce_plan is not None and not reduce_plan.is_enough(result.contributors):
            return f"part {result.part} has too few rows for a {way.trust.statistic}"
    return _misweighed(way, body, results)


def _commit_flaw(
    ground: RoundContext, way: RoundContext, attempt: int, peer: PeerId, commit: Commitment
) -> str | None:
    """Flaw of one commitment in a body of this attempt and topology, as a predicate."""
    slot = commit.round, commit.attempt
    if slot != (ground.plan.round, attempt) or not (commit.parts and parts_fit(ground, commit)):
        return "is for something else"
    if (
        ground.with_topology(commit.asked) is not way
    ):  # only where callers may choose; elsewhere the option changes nothing
        return "is for another topology than the others"
    return commitment_flaw(ground, peer, commit)


def _orders_flaw(kept: Sequence[SignedStatement]) -> str | None:
    """Flaw of the operator orders among a body's reports: more than one of a kind."""
    if len(amends_in(kept)) > 1:
        return "it goes back to two states"
    if len(pauses_in(kept)) > 1:
        return "it pauses or resumes the run twice"
    if len(tunes_in(kept)) > (not amends_in(kept)):  # a rollback restores the settings of its target
        return "it changes numbers twice, or as it goes back"
    return None


# ---- derived fields: written by the proposer, recomputed by every voter ------------------------------------


@dataclass(frozen=True)
class BodyInputs:
    """Verified statements of one body, from which its other fields are derived."""

    ground: RoundContext
    attempt: int
    time_s: Seconds
    results: tuple[OwnerResult | None, ...]
    commits: dict[PeerId, Commitment]  # of its contributors, sorted by name
    kept: Sequence[SignedStatement]  # its reports
    opened: Sequence[VerifiedReport]  # the same, decoded

    @cached_property
    def contributors(self) -> set[PeerId]:
        return set(parts_counted(self.results))

    @cached_property
    def awaited(self) -> frozenset[PeerId] | None:
        return awaited_in(self.ground.plan, self.opened, self.contributors)

    @cached_property
    def trained(self) -> int:
        """Training rounds behind the state; rounds undone by a rollback no longer count."""
        back = first_of(amends_in(self.kept))
        return back[1].trained if back is not None else self.ground.parent.trained + bool(self.ground.owners)

    @cached_property
    def membership(self) -> tuple[NextMembership, EarnedVoteRecord | UnsetType]:
        """Membership and invitations after the round, with the votes that members have earned."""
        ground, plan = self.ground, self.ground.plan
        after = next_members(
            ground.parent,
            self.commits,
            self.contributors,
            self.opened,
            plan.settings.quorum,
            bool(ground.owners),
            parts=ground.parts_most,
            trainers_most=ground.trainers_most,
            signing=plan.settings.signing,
            awaited=self.awaited,
        )
        terms = ground.settings.vote_terms
        if terms is None:
            return after, UNSET
        joined = after.members, after.tickets
        voting, invited = next_votes(ground.parent, *joined, self.contributors, self.opened, terms)
        return after._replace(members=voting), invited


@dataclass(frozen=True)
class DerivedBodyField:
    """A field of a vertex body that follows from the others."""

    name: str
    derive: Callable[[BodyInputs], Any]
    why: str  # flaw of a body with another value
    is_known: Callable[[RoundContext], bool] = lambda _: True  # False: not derivable from this disk


def awaited_in(
    plan: RoundPlan, reports: Sequence[VerifiedReport], contributors: Collection[PeerId]
) -> frozenset[PeerId] | None:
    """Members that the round waits for: drawn and not resting. None: all trainers."""
    resting = resting_among(plan, reports) - set(contributors)
    return None if plan.drawn is None and not resting else plan.givers - resting


def _credits(inputs: BodyInputs) -> tuple[Credit, ...] | UnsetType:
    """Sampling credit per line of `members` after this round; no member is drawn while members assemble."""
    ground, plan = inputs.ground, inputs.ground.plan
    if plan.drawn is None:
        return UNSET
    drawn, trusted = plan.drawn if ground.owners else (), plan.settings.quorum == "majority"
    return next_credits(ground.parent, inputs.membership[0].members, drawn, inputs.contributors, trusted)


def _scores(inputs: BodyInputs) -> tuple[int, ...] | UnsetType:
    """Reputation per line of `members` after this round, where the run keeps it."""
    ground = inputs.ground
    if not ground.trust.reputed:
        return UNSET
    return next_scores(
        ground.plan,
        ground.owners,
        ground.trust.audited,
        inputs.membership[0].members,
        inputs.results,
        inputs.commits,
        reports=inputs.opened,
        scored=ground.trust.scored,
        findings=ground.findings,
    )


def amend_among(
    ground: RoundContext, notary: StatementSigner, reports: Sequence[SignedStatement]
) -> tuple[SignedStatement, RollbackOrder] | None:
    """The rollback order for the next body, if any: an operator's or the validators'.

    The proposer signs a demanded order itself.
    """
    back = [signed for signed, _ in amends_in(reports)]
    kept, _ = _judge_reports(ground, notary, back, ground.parent.time_s)
    demanded = [] if ground.demanded is None else [(notary.sign(ground.demanded), ground.demanded)]
    return first_of([*amends_in(kept), *demanded])


def _forged(ground: RoundContext, notary: StatementSigner, signed: SignedStatement, report: VerifiedReport) -> bool:
    """Whether an operator order is not by the run's authority, and not the rollback that validators demand."""
    statement = report.statement
    if not isinstance(statement, Word):
        return False
    if isinstance(statement, RollbackOrder) and not statement.signature:
        return statement != ground.demanded or signed.body != encode(statement)
    authority, roster = ground.authority, ground.parent.members
    return authority is None or not word_holds(signed, statement, notary, authority, roster)


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
        and names_commitments_iff_opened(answered.made_of, ground.trust.opened)
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
    """All results use the one weighting in the body if rows are weighted; otherwise the body holds none."""
    weighing = body.weighing
    if not ground.weighs or not answers:
        return "it weighs rows that no owner weighed" if weighing is not UNSET else None
    if weighing is UNSET:
        return "it does not say what its rows weigh"
    flaw = weighing_flaw(ground.reduce_plan(body.attempt), weighing)
    if flaw is not None:
        return f"it {flaw}"
    name = weights_digest(weighing)
    other = [answered.part for answered in answers if answered.rows != name or not fits_weights(answered, weighing)]
    return f"its answer for part {other[0]} is of another weighing" if other else None


def _window(inputs: BodyInputs) -> Seconds | UnsetType:
    """An owner's window in the next round where windows follow the pace; only training rounds change it."""
    ground, time_s, commits, whom = inputs.ground, inputs.time_s, inputs.commits.values(), inputs.awaited
    plan, settings = ground.plan, ground.plan.settings
    if plan.pace is None or settings.window_min_s is UNSET:
        return UNSET
    if not ground.owners:
        return ground.parent.window_s
    if not commits:
        return settings.owner_s  # no member had the time to train
    took_s = max(0.0, time_s - ground.parent.time_s)  # each peer may adjust the plan's own start time
    said = [a for a in inputs.results if a is not None]
    awaited = [m.peer for m in plan.trainers if m.standing == "member" and (whom is None or m.peer in whom)]
    here = len(_in_time(ground, said).intersection(awaited))
    whole = here >= min(len(awaited), plan.quorum_of_updates or len(awaited))
    # where owners check each other a late owner may be reported; a merely slow one shall get its time
    excused = not ground.trust.witnessed and any(a.owner_index > 0 for a in said)
    training_s = median(c.steps_now * c.step_s for c in commits)
    shown = ObservedRoundTiming(took_s, training_s, inputs.attempt, took_s >= plan.pace.train_s, whole, excused)
    return next_window(plan.pace.owner_s, shown, settings.window_min_s, settings.owner_s)


def _in_time(ground: RoundContext, answers: Sequence[OwnerResult]) -> set[PeerId]:
    """Members with rows in time, as far as the results show."""
    named = parts_counted(answers)
    # a silent owner also keeps its own row out of its part, so a slow member is missing in more than one part
    return {peer for peer, times in named.items() if 2 * times > ground.taking(peer)}


def _effort(inputs: BodyInputs) -> AdaptiveWorkloadState | UnsetType:
    """Workload progress after this round where it follows losses, from settled members' losses.

    A state undone by a rollback contributes no losses.
    """
    ground = inputs.ground
    settings = ground.plan.settings
    if settings.effort is UNSET:
        return UNSET
    losses = [c.loss for peer, c in inputs.commits.items() if peer not in ground.weightless]
    if first_of(amends_in(inputs.kept)) is not None:
        losses = []
    return progress_after(settings.effort, settings.inner_steps, ground.parent.effort, losses)


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
    """A member report with a valid signature; None if it is invalid.

    A JoinRequest brings its own key, certified by the identity that it names. Evidence in an Accusation must be
    signed by the accused peer under one of `known_keys`.
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
        statement = notary.open(signed, BaseStatement, vote_key)
        if isinstance(statement, Accusation):
            for said in (statement.answer, statement.other):
                if said is not None:
                    found = notary.open(said, BaseStatement, (known_keys or vote_keys).get(statement.answer.signer))
                    if statement.other is None and not isinstance(found, OwnerResult | Commitment):
                        return None
    except PeerFault:
        return None
    # decode returns AnyStatement
    return VerifiedReport(signed.signer, statement, identity, validity)  # pyright: ignore[reportArgumentType]


def _metrics(inputs: BodyInputs) -> SwarmRoundMetrics:
    commits = inputs.commits.values()
    samples_now = sum(c.samples_now for c in commits)
    weighted = 0.0
    for c in commits:  # in the order of the commitments: float sums depend on order
        weighted += c.loss * c.samples_now
    loss = weighted / samples_now if samples_now else 0.0
    return SwarmRoundMetrics(loss, sum(c.steps for c in commits), sum(c.samples for c in commits))


def _paused(inputs: BodyInputs) -> int | UnsetType:
    return paused_after(inputs.ground.parent, inputs.ground.plan.round, inputs.kept)


def _tuned(inputs: BodyInputs) -> ChangedSettings | UnsetType:
    return tuned_after(inputs.ground.settings, inputs.ground.parent, inputs.trained, inputs.kept)


def _data(inputs: BodyInputs) -> SharedDataProgress | UnsetType:
    undone = first_of(amends_in(inputs.kept)) is not None
    return next_positions(inputs.ground.parent, inputs.commits, inputs.membership[0].members, undone)


MISMATCHED_MEMBERS = "its membership does not follow from its reports"
DERIVED = (
    DerivedBodyField("trained", lambda inputs: inputs.trained, "it miscounts the training rounds"),
    DerivedBodyField("paused", _paused, "whether the run is paused does not follow from its reports"),
    DerivedBodyField("tuned", _tuned, "the numbers of the run do not follow from its reports"),
    *(
        DerivedBodyField(name, lambda inputs, name=name: getattr(inputs.membership[0], name), MISMATCHED_MEMBERS)
        for name in NextMembership._fields
    ),
    DerivedBodyField(
        "invited", lambda inputs: inputs.membership[1], "its invitations do not follow from its reports"
    ),
    DerivedBodyField("metrics", _metrics, "its metrics do not follow from its commitments"),
    DerivedBodyField("window_s", _window, "the window of the next round does not follow from the time it took"),
    DerivedBodyField("effort", _effort, "the work of the next round does not follow from its losses"),
    DerivedBodyField(
        "reputation", _scores, "its reputations do not follow from its reports", lambda g: not g.has_lost_reports
    ),
    DerivedBodyField("data", _data, "its positions in the data do not follow from its commitments"),
    DerivedBodyField("credits", _credits, "its credits do not follow from the draw and its contributors"),
)
