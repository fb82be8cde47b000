"""What a member's record is worth: whole numbers that follow from one vertex to the next, the same at every voter.

    what a vertex shows of a member ─► score of the moment ─► memory: up by a sixteenth, down by a quarter
    score ─► tier: who owns parts, who is asked as auditor, how often somebody's steps are taken again
    scores ─► who votes, where not everybody can (`policy/committee.py`)
    scores ─► influence: what rows weigh once the liars among them were looked for

Promises: integers only, so no machine rounds otherwise; scores stay within FLOOR … SCORE_ONE; nobody is ever below
a newcomer, so a new identity gains nothing; nobody's influence is more than half as much again as an equal share,
whatever the scores. Losses are their senders' own words: who says a better one than the others gains nothing by it.
Never sees a tensor, never decides who is a member. Why each number is what it is: specs/reputation.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import UNSET

from atoll.base.ids import PeerId
from atoll.base.limits import SCORE_ONE
from atoll.wire.messages.vertex import VertexBody

FLOOR = SCORE_ONE // 10  # of a newcomer, and of whoever was convicted
RISE = 16  # a good round brings so great a part of what is missing: trust takes 28 of them
FALL = 4  # a bad one costs so great a part of what is there above its worth
VOUCHED = 4  # an accepted audit brings so great a part of what is missing: there are few, and they are facts
CLAIMED = 6 * SCORE_ONE // 10  # where there are audits, a member's own words lift nobody higher
CLAIMED_UNTAUGHT = 5 * SCORE_ONE // 10  # where updates are scored: nobody leaves probation by its own words
HOLLOW = 2  # a hollow update costs so great a part of what is there above the floor
PROGRESS, UPTIME, PARTICIPATION = 5, 3, 2  # tenths of the score of the moment

BELIEVED = 4  # spreads from the median within which a loss is believed in full
DISBELIEVED = 12  # from which on it is not believed at all
SPREAD_LEAST = 32  # a spread is at least the median's share of so many: honest losses may happen to agree
LOSSES_LEAST = 3  # fewer have no median that one of them could be held against
LOSS_UNITS = 2**20  # of a loss in one nat: a power of two, so that floats become integers exactly

Tier = Literal["probation", "regular", "trusted"]
TIERS: tuple[tuple[Tier, int], ...] = (  # from which score on; boasters end at 5 000, silent owners at 8 000
    ("trusted", 85 * SCORE_ONE // 100),
    ("regular", CLAIMED),
)
AUDITED: dict[Tier, int] = {"probation": 4, "regular": 2, "trusted": 1}  # times the run's rate


@dataclass(frozen=True)
class MemberConduct:
    """What a vertex shows of a settled trainer, in a round in which something was answered."""

    counted: int  # answered parts that hold its row
    answered: int  # parts that somebody answered
    steps: int  # that its update stands for, by its own word
    assigned: int  # steps of the round
    belief: int = SCORE_ONE  # in the loss that it reports: 0 … SCORE_ONE
    duties: int = 0  # answered parts whose first owner it was
    done: int = 0  # of those, the ones that it answered


def units_of(loss: float) -> int:
    """A loss in nats as a whole number; a finite float times a power of two is exact."""
    return int(loss * LOSS_UNITS)


def beliefs(losses: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """How far each loss is believed, 0 … SCORE_ONE: by its distance from the middle of all, on either side.

    Median and spread are honest ones' as long as liars are fewer than half (lower medians, so that nothing is
    divided). A liar can say what it expects the others to say: a belief is no proof of work.
    """
    if len(losses) < LOSSES_LEAST:
        return dict.fromkeys(losses, SCORE_ONE)
    middle = _lower_median(list(losses.values()))
    apart = {peer: abs(loss - middle) for peer, loss in losses.items()}
    spread = max(_lower_median(list(apart.values())), abs(middle) // SPREAD_LEAST, 1)
    width = (DISBELIEVED - BELIEVED) * spread
    return {
        peer: SCORE_ONE * min(max(DISBELIEVED * spread - distance, 0), width) // width
        for peer, distance in apart.items()
    }


def moment(conduct: MemberConduct) -> int:
    """0.5 · progress + 0.3 · uptime + 0.2 · participation, within FLOOR … SCORE_ONE."""
    uptime = SCORE_ONE * conduct.counted // conduct.answered
    progress = 0
    if conduct.counted and conduct.assigned:
        progress = conduct.belief * min(max(conduct.steps, 0), conduct.assigned) // conduct.assigned
    participation = SCORE_ONE * conduct.done // conduct.duties if conduct.duties else uptime
    return max(FLOOR, (PROGRESS * progress + UPTIME * uptime + PARTICIPATION * participation) // 10)


def moved(
    score: int,
    conduct: MemberConduct | None,
    *,
    audits: bool = False,
    vouched: bool = False,
    convicted: bool = False,
    scored: bool = False,
    hollow: bool = False,
    hid: bool = False,
) -> int:
    """The score after this vertex. `audits`, `scored`: the run has audits, loss scores; `vouched`: an audit of this
    member was accepted, or an update of its taught the model something; `hollow`: one did not, or is not what its
    samples make; `hid`: one was not shown to its referees, which costs what a round of silence does."""
    if convicted:
        return FLOOR
    if conduct is not None:
        now = moment(conduct)
        if now >= score:
            claimed = CLAIMED_UNTAUGHT if scored else CLAIMED if audits else SCORE_ONE
            score = max(score, min(score + _up(now - score, RISE), claimed))
        else:
            score -= _up(score - now, FALL)
    if hid:
        score -= _up(score - FLOOR, FALL)
    if hollow:
        return score - _up(score - FLOOR, HOLLOW)
    return score + _up(SCORE_ONE - score, VOUCHED) if vouched else score


def tier_of(score: int) -> Tier:
    for tier, least in TIERS:
        if score >= least:
            return tier
    return "probation"


def scores_of(body: VertexBody) -> dict[PeerId, int]:
    """Of all members, as this vertex has them; nothing where the run has no reputation, or has only begun."""
    if body.reputation is UNSET:
        return {}
    return {m.peer: max(score, FLOOR) for m, score in zip(body.members, body.reputation, strict=False)}


def audit_factor(scores: Mapping[PeerId, int], peer: PeerId) -> int:
    """How many times as often as genesis says this member's rounds are audited."""
    return AUDITED[tier_of(scores.get(peer, FLOOR))] if scores else 1


def on_duty(peers: Sequence[PeerId], scores: Mapping[PeerId, int]) -> tuple[PeerId, ...]:
    """Those of `peers` that may own parts, in their order.

    Whoever is on probation may not, as long as they are no more than may lie: a run of newcomers works with
    newcomers, and never do a few settled ones own everything.
    """
    low = {p for p in peers if tier_of(scores.get(p, FLOOR)) == "probation"} if scores else set[PeerId]()
    return tuple(peers) if len(low) > (len(peers) - 1) // 3 else tuple(p for p in peers if p not in low)


def by_tier(peers: Sequence[PeerId], scores: Mapping[PeerId, int]) -> list[PeerId]:
    """In their order, but those on probation last."""
    return sorted(peers, key=lambda p: bool(scores) and tier_of(scores.get(p, FLOOR)) == "probation")


def influence_of(scores: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """What each weighs against the others: its score, cut so that nobody has more than 3 / (2n) of all.

    So f < n / 3 liars weigh less than half together, even if theirs are the best scores and all others the worst.
    """
    return cut_to_share(scores, 3, 2 * len(scores))


def cut_to_share(scores: Mapping[PeerId, int], part: int, of: int) -> dict[PeerId, int]:
    """Scores cut so that nobody has more than part / of of their sum; that share is an equal one at least.

    Cutting one lowers the sum that the share is of, so the level is found from above: with the k highest at level
    c, c ≤ part / of · (k · c + rest) holds up to c = part · rest / (of − part · k).
    """
    rest = sum(scores.values())
    for cut, score in enumerate(sorted(scores.values(), reverse=True)):
        level = part * rest // (of - part * cut)
        if score <= level:
            return {peer: min(score, level) for peer, score in scores.items()}
        rest -= score
    return {}


def _lower_median(values: Sequence[int]) -> int:
    return sorted(values)[(len(values) - 1) // 2]


def _up(amount: int, parts: int) -> int:
    """The part of an amount, rounded up: so that a score arrives."""
    return -(-amount // parts)
