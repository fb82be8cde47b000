"""Reputation inputs from a vertex body, and the scores that follow: computed by the proposer and by every voter.

All inputs come from the parent and from what is signed in the body, never from local observation. The arithmetic is
in `policy/reputation.py`; specs/reputation.md explains what counts and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median_low

from msgspec import UNSET

from atoll.base.ids import PeerId
from atoll.policy.contributions import parts_counted
from atoll.policy.membership import VerifiedReport, convicted
from atoll.policy.plan import RoundPlan
from atoll.policy.reputation import FLOOR, NO_FINDINGS, MemberConduct, WorkFindings, beliefs, shift_bounds, units_of
from atoll.wire.messages.statements import AuditReport, Commitment, LeaveReport, OwnerResult, RoundOptOutNotice
from atoll.wire.messages.vertex import Member


def next_scores(
    plan: RoundPlan,
    owners: Sequence[Sequence[PeerId]],
    audits: bool,
    members: Sequence[Member],
    answers: Sequence[OwnerResult | None],
    commits: Mapping[PeerId, Commitment],
    *,
    reports: Sequence[VerifiedReport],
    scored: bool = False,
    findings: WorkFindings = NO_FINDINGS,
) -> tuple[int, ...]:
    """One score per line of `members`, the membership after this round. Commits are those of its contributors.

    `scored`: the run scores updates. `findings`: those that the parent settled.
    """
    shown = conduct_in(plan, owners, answers, commits, reports)
    liars, failing = convicted(reports, plan.members, plan.settings.quorum)
    said, settled = [r.statement for r in reports], set(_settled(plan))
    vouched = {
        s.peer for s in said if isinstance(s, AuditReport) and s.finding == "accepted" and s.opening is UNSET
    }
    vouched = (vouched | findings.taught) & settled  # work of its own: a correct sum proves nothing about it
    return tuple(
        shift_bounds(
            plan.scores.get(m.peer, FLOOR),
            shown.get(m.peer),
            audits=audits,
            vouched=m.peer in vouched,
            convicted=m.peer in liars or m.peer in failing or m.standing == "expelled",
            scored=scored,
            hollow=m.peer in findings.hollow & settled,
            hid=m.peer in findings.hid & settled,
        )
        for m in members
    )


def conduct_in(
    plan: RoundPlan,
    owners: Sequence[Sequence[PeerId]],
    answers: Sequence[OwnerResult | None],
    commits: Mapping[PeerId, Commitment],
    reports: Sequence[VerifiedReport],
) -> dict[PeerId, MemberConduct]:
    """Conduct of settled trainers that were drawn, if any result exists.

    Members that leave or rest in this round and do not count in it are left out.
    """
    given = [(first[0], answered) for first, answered in zip(owners, answers, strict=False) if answered is not None]
    if not given:
        return {}
    settled = _settled(plan)
    counted = parts_counted(answers)
    duties = Counter(owner for owner, _ in given)
    done = Counter(owner for owner, answered in given if answered.owner_index == 0)
    belief = beliefs({peer: units_of(commits[peer].loss) for peer in settled if peer in commits})
    leaving = {r.by for r in reports if isinstance(r.statement, LeaveReport)} | resting_among(plan, reports)
    assigned = _assigned(plan, [commits[peer].steps_now for peer in settled if peer in commits])
    return {
        peer: MemberConduct(
            counted=counted[peer],
            answered=len(given),
            steps=commits[peer].steps_now if peer in commits else 0,
            assigned=assigned,
            belief=belief.get(peer, 0),
            duties=duties[peer],
            done=done[peer],
        )
        for peer in settled
        if peer in commits or peer not in leaving
    }


def resting_among(plan: RoundPlan, reports: Sequence[VerifiedReport]) -> set[PeerId]:
    """Members that report that they do not train in this round."""
    return {r.by for r in reports if isinstance(r.statement, RoundOptOutNotice) and r.statement.round == plan.round}


def _assigned(plan: RoundPlan, taken: Sequence[int]) -> int:
    """Steps that make a whole round.

    Where time or each member's speed ends a round it is the median of the steps taken, so claiming to be slow gains
    nothing.
    """
    effort = plan.settings.effort
    if effort is UNSET or (effort.train_s is UNSET and effort.by_speed is not True) or not taken:
        return plan.steps
    return max(1, min(plan.steps, median_low(taken)))


def _settled(plan: RoundPlan) -> list[PeerId]:
    """Members that are judged: not in their first round, not watching, not away."""
    return [m.peer for m in plan.trainers if m.standing == "member"]
