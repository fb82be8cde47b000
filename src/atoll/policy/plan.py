"""Round plan: a pure function of the last agreed vertex, equal at every peer without a message.

Gives trainers, voters, proposers, data slices and the deadline of each phase. Deadlines are absolute run times:
peers that count from their own start drift apart even on a perfect network. Attempts follow the clock alone, so
peers that lost each other for an hour meet again in the same attempt.

Not responsible for: local measurements, which must first be signed reports in a vertex.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from atoll.base.arguments import Window
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import (
    CLOCK_BOUND_S,
    CLOCK_WRONG_S,
    COMMITTEE_MAX,
    COMMITTEE_MOST,
    OWNER_WINDOWS,
    OWNERS_PER_PART,
    PEERS_MAX,
)
from atoll.base.workload import (
    STEPS_MOST,
    AdaptiveWorkloadPolicy,
    RoundWorkload,
    Steps,
    fastest_of,
    steps_at,
    workload_of,
)
from atoll.policy.committee import draw_committee, on_circle, whose_turn
from atoll.policy.participation import ParticipationPolicy, drawn_after
from atoll.policy.reputation import on_duty, scores_of
from atoll.policy.signing import VoteSignatureScheme
from atoll.policy.timeouts import GROWTH, within
from atoll.wire.messages.vertex import Member, VertexBody

QuorumRule = Literal["majority", "two-thirds"]
CommitteeSize = Annotated[int, msgspec.Meta(ge=1, le=COMMITTEE_MOST)]

GROWN_ATTEMPTS = 6  # attempts after which windows stay at 11 times their length
HAND_OVER_S = 1.0  # seconds before the end of training at which a trainer is told to stop, encode and commit
START_S = 2.0  # seconds at the start of a round in which members adopt the last state and wake their trainers
SPREAD_S = 0.02  # seconds per member: an owner sends its combined part to all over one uplink
GRACE_SHARE = 1 / 12  # share of an owner's window: about one trip through the network, for messages under way
STRAGGLER_LIMIT = 3.0  # a member's claimed speed stretches the plan to at most this times the median


class StragglerPolicy(msgspec.Struct, frozen=True):
    """When a round stops waiting for stragglers (Decoupled DiLoCo 2604.21428): specs/round.md."""

    quorum: Annotated[int, msgspec.Meta(ge=1, le=PEERS_MAX)]  # updates of settled trainers
    grace: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]  # median steps that the others may be late


class RoundSettings(msgspec.Struct, frozen=True):
    """Settings that plans depend on: those of genesis, with the numbers that vertices changed."""

    inner_steps: Steps = 32
    first_train_s: Window = 180.0  # seconds; no speed is known yet, and imports may still be running
    train_max_s: Window = 3600.0  # longest training of a round, even if steps are left
    owner_s: Window = 6.0  # time of one owner to gather and answer; keep at or above suspect_s
    agree_s: Window = 10.0  # time for a proposal and two votes; keep above 10 x the median round trip
    quorum: QuorumRule = "majority"
    suspect_s: Window = 6.0  # silence after which a member is no longer waited for
    beat_s: Window = 2.0  # heartbeat period; keep at or below a third of suspect_s
    committee: CommitteeSize | UnsetType = UNSET  # most voters; unset: COMMITTEE_MAX
    window_min_s: Window | UnsetType = UNSET
    """Shortest owner_s where rounds prove to be fast; unset: it never shrinks. Keep above 1 s: lost messages are
    repeated after that, and training may pause for a busy moment."""
    acceptance: StragglerPolicy | UnsetType = UNSET  # unset: all are awaited, as long as training may last
    votes: Literal["ml-dsa-65"] | UnsetType = UNSET  # kind of session keys; unset: Ed25519
    sample: ParticipationPolicy | UnsetType = UNSET  # sampling of trainers; unset: all train
    effort: AdaptiveWorkloadPolicy | UnsetType = UNSET  # unset: every round has inner_steps of the recipe's batch
    rhythm: tuple[tuple[Annotated[int, msgspec.Meta(ge=1, le=STEPS_MOST)], Steps], ...] | UnsetType = UNSET
    """(training rounds, steps of each), one stretch after the other; after them, or unset: inner_steps."""

    def steps_after(self, trained: int) -> int:
        """Steps of the round after `trained` training rounds, where nothing else decides."""
        for rounds, steps in () if self.rhythm is UNSET else self.rhythm:
            if trained < rounds:
                return steps
            trained -= rounds
        return self.inner_steps

    @property
    def committee_most(self) -> int:
        return COMMITTEE_MAX if self.committee is UNSET else self.committee

    @property
    def signing(self) -> VoteSignatureScheme:
        return VoteSignatureScheme("ed25519" if self.votes is UNSET else self.votes, self.committee_most)


@dataclass(frozen=True)
class AttemptDeadlines:
    """Latest ends of the phases of one attempt, in run time."""

    begin: Seconds
    train_until: Seconds  # for commitments
    answer_until: tuple[Seconds, ...]  # for the results of owner 0, 1, … of every part
    reserves_until: Seconds  # for the results of reserves
    agree_until: Seconds


@dataclass(frozen=True)
class FirstAttemptWindows:
    """Windows of a first attempt, where they follow the pace of earlier rounds."""

    train_s: Seconds  # training window
    owner_s: Seconds  # window of one owner: policy/timeouts.py
    training_s: Seconds  # training time of the slowest member; 0 while no speed is known


NO_CLOCK_S = 1e7  # a training window of this many seconds means no clock


@dataclass(frozen=True)
class RoundPlan:
    """Facts of one round that all peers know before it starts."""

    round: int
    head: Digest  # id of the parent vertex
    run: Digest
    wrote: PeerId  # proposer of the parent vertex
    begin: Seconds
    members: tuple[Member, ...]
    settings: RoundSettings
    train_s: Seconds  # training window of attempt 0
    owners_per_part: int
    pace: FirstAttemptWindows | None = None  # None: the windows of the settings
    # reputations, empty if the run keeps none
    scores: Mapping[PeerId, int] = field(default_factory=dict[PeerId, int])
    drawn: frozenset[PeerId] | None = None  # sampled trainers; None: all
    quota: RoundWorkload | None = None  # None: the workload of the settings
    # steps of trainers with fewer than the others
    by_speed: Mapping[PeerId, int] = field(default_factory=dict[PeerId, int])

    @property
    def steps(self) -> int:
        """Most inner steps of a trainer."""
        return self.settings.inner_steps if self.quota is None else self.quota.steps

    def steps_of(self, peer: PeerId) -> int:
        """Inner steps assigned to this trainer."""
        return self.by_speed.get(peer, self.steps)

    @property
    def batch(self) -> int:
        """Samples per step; 0: the recipe's."""
        return 0 if self.quota is None else self.quota.batch

    @property
    def samples_most(self) -> int | None:
        """Most samples counted for one trainer where rates follow samples; None: all that it claims."""
        effort = self.settings.effort
        return self.steps * self.batch if effort is not UNSET and effort.bounded is True else None

    @property
    def limit_s(self) -> Seconds | None:
        """Training time limit from when a trainer runs; None: steps and the window end it."""
        return _limit_s(self.settings)

    @property
    def may_lie(self) -> bool:
        """True where members may lie."""
        return self.settings.quorum == "two-thirds"

    @property
    def has_clock(self) -> bool:
        """True if training ends by time. Otherwise rounds begin when their work exists, and times mean nothing."""
        return self.train_s < NO_CLOCK_S

    @cached_property
    def trace(self) -> str:
        return self.head.hex()[:16]

    @cached_property
    def by_peer(self) -> dict[PeerId, Member]:
        return {m.peer: m for m in self.members}

    @cached_property
    def trainers(self) -> tuple[Member, ...]:
        """Members that may contribute: those that train, sampled if the run samples."""
        drawn = self.drawn
        return tuple(m for m in self.members if m.may_train and (drawn is None or m.peer in drawn))

    @cached_property
    def givers(self) -> frozenset[PeerId]:
        """Names of the trainers."""
        return frozenset(m.peer for m in self.trainers)

    @cached_property
    def voters(self) -> tuple[PeerId, ...]:
        """Members that all others can dial: they own parts and vote."""
        return tuple(m.peer for m in self.members if m.votes)

    @cached_property
    def owners(self) -> tuple[PeerId, ...]:
        """Voters that may own parts: settled ones with clocks near run time, if there are any.

        A newcomer is not awaited in its first round, so no member may depend on its result. Where the run keeps
        reputation, members on probation own nothing (policy/reputation.py).
        """
        voting = [m for m in self.members if m.votes]
        settled = [m for m in voting if m.standing == "member"] or voting
        near = tuple(m.peer for m in settled if abs(m.offset_s) <= CLOCK_BOUND_S)
        return on_duty(near or tuple(m.peer for m in settled), self.scores)

    @cached_property
    def first(self) -> PeerId:
        """First proposer of the round, which therefore votes."""
        since = {m.peer: m.since for m in self.members if m.votes}
        return whose_turn(self.run, self.round, since, self.wrote)

    @cached_property
    def committee(self) -> tuple[PeerId, ...]:
        """Voters of the round: all, or as many as genesis allows: the first proposer and others drawn by the
        head's id.

        A draw may hold more liars than agreement survives (`policy/fault_tolerance.captured_share`).
        """
        most = self.settings.committee_most
        if len(self.voters) <= most:
            return tuple(sorted(self.voters))
        others = [peer for peer in self.voters if peer != self.first]
        return tuple(sorted((self.first, *draw_committee(self.head, others, most - 1, self.scores))))

    @cached_property
    def vote_keys(self) -> dict[PeerId, bytes]:
        return {peer: self.by_peer[peer].vote_key for peer in self.committee}

    @cached_property
    def quorum(self) -> int:
        return quorum(len(self.committee), self.settings.quorum)

    @cached_property
    def tolerated(self) -> int:
        """Voters that may lie (two-thirds) or be dead (majority) without stopping the run."""
        return len(self.committee) - self.quorum

    def turns(self, leader: PeerId | None = None) -> tuple[PeerId, ...]:
        """Order in which the committee proposes: round the circle, from the first proposer or a stable leader
        on.
        """
        circle = on_circle(self.run, self.round, self.committee)
        first = circle.index(self.first if leader is None or leader not in circle else leader)
        return (*circle[first:], *circle[:first])

    def shard(self, peer: PeerId) -> tuple[int, int]:
        """(index, count) of this peer's slice of the training data in this round."""
        peers = [m.peer for m in self.trainers]
        return peers.index(peer), len(peers)

    def times(self, attempt: int) -> AttemptDeadlines:
        """Deadlines of one attempt. Later attempts do not train again: they share the same updates.

        Adaptive windows apply inside the first attempt only. Its length stays, so there is time for as many
        proposers, and the second attempt has the full windows of genesis.
        """
        begin = self.begin
        for earlier in range(min(attempt, GROWN_ATTEMPTS)):
            begin += self._length(earlier)
        if attempt > GROWN_ATTEMPTS:
            begin += (attempt - GROWN_ATTEMPTS) * self._length(GROWN_ATTEMPTS)
        stretch, owner_s = GROWTH ** min(attempt, GROWN_ATTEMPTS), self.window_s(attempt)
        train_s = self.train_s if self.pace is None else self.pace.train_s
        train_until = begin + (train_s if attempt == 0 else owner_s)
        windows = self._windows
        answers = tuple(train_until + min(k + 1, windows) * owner_s for k in range(self.owners_per_part))
        agree_until = answers[-1] + self.settings.agree_s * stretch
        if attempt == 0 and self.pace is not None:
            agree_until = begin + self._length(0)
        # one more window, if shorter ones left time for it: proposers keep theirs
        spare_until = agree_until - self.settings.agree_s * stretch
        reserves_until = max(answers[-1], min(answers[-1] + owner_s, spare_until))
        return AttemptDeadlines(begin, train_until, answers, reserves_until, agree_until)

    def begun(self, now: Seconds) -> RoundPlan:
        """The plan with fixed windows for a peer that begins too late to finish training.

        The votes on the last vertex may take longer than the pace shows, for all members; then all would skip the
        round.
        """
        if self.pace is None or now + self.pace.training_s + HAND_OVER_S <= self.begin + self.pace.train_s:
            return self
        return replace(self, pace=None)

    def set_right(self, now: Seconds) -> RoundPlan:
        """The plan counted from now, if clocks far ahead made the last vertex: no member waits for its time."""
        return self if self.begin <= now + CLOCK_WRONG_S else replace(self, begin=now)

    def window_s(self, attempt: int) -> Seconds:
        """Time of one owner to gather and answer."""
        if attempt == 0 and self.pace is not None:
            return self.pace.owner_s
        return self.settings.owner_s * GROWTH ** min(attempt, GROWN_ATTEMPTS)

    @cached_property
    def quorum_of_updates(self) -> int | None:
        """Updates of settled trainers that start the grace period; None: all are awaited.

        While no speed is known no member counts as slow.
        """
        accepted = self.settings.acceptance
        return None if accepted is UNSET or _typical_s(self.members) is None else accepted.quorum

    def grace_s(self, attempt: int) -> Seconds:
        """Length of the grace period once enough updates are committed."""
        accepted, step_s = self.settings.acceptance, _typical_s(self.members)
        assert accepted is not UNSET and step_s is not None
        return accepted.grace * step_s + GRACE_SHARE * self.window_s(attempt)

    def attempt_at(self, run_time: Seconds) -> int:
        """Attempt that is due by the clock; attempt 0 before the round begins."""
        attempt = 0
        while attempt < GROWN_ATTEMPTS and run_time >= self.times(attempt).agree_until:
            attempt += 1
        if attempt == GROWN_ATTEMPTS:
            start = self.times(GROWN_ATTEMPTS).begin
            attempt += max(0, int((run_time - start) // self._length(GROWN_ATTEMPTS)))
        return attempt

    def _length(self, attempt: int) -> Seconds:
        s, stretch = self.settings, GROWTH ** min(attempt, GROWN_ATTEMPTS)
        train = self.train_s if attempt == 0 else s.owner_s * stretch
        return train + (self._windows * s.owner_s + s.agree_s) * stretch

    @property
    def _windows(self) -> int:
        return min(OWNER_WINDOWS, self.owners_per_part)


class QuorumAvailability(NamedTuple):
    """Voters of the next vertex, and how many of them it needs."""

    voters: tuple[PeerId, ...]
    absent: tuple[PeerId, ...]  # are not here
    anew: tuple[PeerId, ...]  # present with a key that no vertex holds yet
    needed: int

    @property
    def here(self) -> int:
        return len(self.voters) - len(self.absent) - len(self.anew)


def quorum(voters: int, rule: QuorumRule) -> int:
    """Votes that make a certificate. Two quorums overlap in one voter (majority) or in an honest one (two-thirds).

    two-thirds: n - f with f = floor((n - 1) / 3), which is > 2n/3 for every n (Castro & Liskov 1999, section 3).
    """
    assert voters >= 1
    if rule == "majority":
        return voters // 2 + 1
    faulty = (voters - 1) // 3
    return voters - faulty


def plan_round(head: Digest, body: VertexBody, settings: RoundSettings) -> RoundPlan:
    """The plan of the round after `body`, with id `head`. Needs at least one voting member."""
    voting = [m for m in body.members if m.votes]
    assert voting, "a vertex without voting members was agreed on"
    owners = min(OWNERS_PER_PART, len(voting))
    drawn = None
    if settings.sample is not UNSET:
        drawn = drawn_after(head, body, settings.sample, settings.quorum == "majority")
    settled = [m.peer for m in body.members if m.may_train and m.standing == "member"]
    giving = len(settled if drawn is None else drawn.intersection(settled))
    quota = workload_of(settings.effort, settings.steps_after(body.trained), body.effort, giving)
    by_speed = _by_speed(body.members, drawn, settings, quota)
    train_s = _train_s(body, settings, quota, by_speed, 1.0)
    pace: FirstAttemptWindows | None = None
    if settings.window_min_s is not UNSET:
        agreed_s = settings.owner_s if body.window_s is UNSET else body.window_s
        owner_s = within(agreed_s, settings.window_min_s, settings.owner_s)
        slowest, limit_s = _slowest_s(body, quota, by_speed), _limit_s(settings)
        training_s = (slowest or 0.0) * quota.stretch * quota.steps
        training_s = training_s if limit_s is None else min(training_s, limit_s)
        haste = owner_s / settings.owner_s
        pace = FirstAttemptWindows(_train_s(body, settings, quota, by_speed, haste), owner_s, training_s)
    told = quota if settings.effort is not UNSET or settings.rhythm is not UNSET else None
    run = head if body.round < 0 else body.run
    of_body = body.proposer, body.time_s, body.members
    fixed = body.round + 1, head, run, *of_body, settings, train_s, owners, pace
    return RoundPlan(*fixed, scores_of(body), drawn, told, by_speed)


def _by_speed(
    members: Sequence[Member], drawn: frozenset[PeerId] | None, settings: RoundSettings, quota: RoundWorkload
) -> dict[PeerId, int]:
    """Steps of trainers with fewer than the round has, where genesis assigns them by speed.

    A newcomer's claimed speed changes only its own steps.
    """
    effort = settings.effort
    if effort is UNSET or effort.by_speed is not True:
        return {}
    trainers = [m for m in members if m.may_train and (drawn is None or m.peer in drawn)]
    settled = [m.step_s for m in trainers if m.standing == "member"]
    liars = 0 if settings.quorum == "majority" else max(0, len(settled) - 1) // 3
    fastest_s = fastest_of(settled, liars)
    if fastest_s is None:
        return {}
    steps = {m.peer: steps_at(m.step_s, fastest_s, quota.steps, effort.steps_min) for m in trainers}
    return {peer: own for peer, own in steps.items() if own < quota.steps}


def _train_s(
    body: VertexBody, settings: RoundSettings, quota: RoundWorkload, by_speed: Mapping[PeerId, int], haste: float
) -> Seconds:
    """Latest end of training, counted from the last proposal. All but training itself is scaled by `haste`."""
    slowest = _slowest_s(body, quota, by_speed)
    if slowest is None:
        return min(settings.first_train_s, settings.train_max_s)
    # half as much again: a busy machine is not dead, and the last combined part reaches the last member late
    steps_s, limit_s = 1.5 * slowest * quota.steps, _limit_s(settings)
    if any(_owes_first_update(m) for m in body.members):
        steps_s += slowest * quota.steps  # it began late, when the last parts had arrived
    if quota.stretch > 1.0:
        steps_s *= quota.stretch
    if limit_s is not None:
        steps_s = min(steps_s, limit_s + HAND_OVER_S)
    train_s = START_S * haste + SPREAD_S * len(body.members) + steps_s
    train_s += settings.agree_s * haste  # the plan counts from the proposal, which members learn of after the votes
    return min(train_s, settings.train_max_s)


def _owes_first_update(member: Member) -> bool:
    """True if this member is awaited and never trained here; after two missed rounds it gets no more time."""
    return member.may_train and member.standing == "member" and not member.step_s and member.missed < 2


def _limit_s(settings: RoundSettings) -> Seconds | None:
    """Training time limit, where genesis sets round time."""
    effort = settings.effort
    return None if effort is UNSET or effort.train_s is UNSET else effort.train_s


def _slowest_s(body: VertexBody, quota: RoundWorkload, by_speed: Mapping[PeerId, int]) -> Seconds | None:
    """Largest step time of a voter, per step of the round and bounded; None while most speeds are unknown."""
    typical_s = _typical_s(body.members)
    if typical_s is None:
        return None
    most_s = STRAGGLER_LIMIT * typical_s
    voting = [m for m in body.members if m.votes]
    return max(min(m.step_s, most_s) * (by_speed.get(m.peer, quota.steps) / quota.steps) for m in voting)


def _typical_s(members: Sequence[Member]) -> Seconds | None:
    """Step time of the median voter; None while most speeds are unknown."""
    voting = [m for m in members if m.votes]
    known = [m.step_s for m in voting if m.step_s > 0]
    return median(known) if len(known) * 2 > len(voting) else None
