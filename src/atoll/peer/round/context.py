"""What a round stands on: the plan, its parent and what genesis says, as one value that everybody works out alike.

Promises: everything in it follows from agreed vertices, so two peers with one head hold equal grounds; sizes that
strangers could grow have their ceilings here. Never holds what was said in the round itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from msgspec import UNSET

from atoll.base.draw import shuffled
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId, Seconds
from atoll.base.limits import (
    ANSWER_BYTES_MAX,
    COMMITTEE_MAX,
    PARTS_MAX,
    PEERS_MAX,
    WEIGHED_ROWS_MAX,
)
from atoll.base.memoize import of_the_same
from atoll.features.partition_training.policy import PartitionPolicy
from atoll.peer.governance.settings_change import is_over, settings_after
from atoll.peer.round.topology_choice import (
    PAIRS,
    TopologyChoice,
    asked_in,
    parts_most,
    topology_in,
    way_asked,
    way_of,
)
from atoll.peer.settings import RunSettings
from atoll.policy.fault_tolerance import (
    DISTANCES,
    MIXED,
    StatisticName,
    jury_of,
    liars_among,
    rows_needed,
    verdict_of,
    witnesses,
)
from atoll.policy.membership import RecentVertices, VerifiedReport, admissible
from atoll.policy.plan import RoundPlan
from atoll.policy.reputation import FLOOR, influence_of
from atoll.policy.vertex_capacity import WEIGHT_BYTES, name_bytes
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.topology import ReduceTopology
from atoll.verification.loss_scoring.policy import ScoreLedger, SettledScore
from atoll.verification.redundant_training.policy import RedundancyDraw, RedundancyLedger, RedundancyVerdict
from atoll.wire.codec import decode_statement, encode
from atoll.wire.messages.round import PartResult, RowComparison
from atoll.wire.messages.statements import (
    AgreedWeights,
    OwnerResult,
    RollbackOrder,
)
from atoll.wire.messages.vertex import WEIGHTLESS, Member, VertexBody

WEIGHING_BYTES = 32  # the heads of the lists in a weighing
PLACE_BYTES = 3  # of a part's number in it


@dataclass(frozen=True)
class RoundContext:
    """What a round stands on: agreed facts and the judgement of reports, handed in by the peer."""

    plan: RoundPlan
    settings: RunSettings  # genesis'; what the round goes by is in the plan
    parent: VertexBody
    topology: ReduceTopology | None  # how updates are reduced; None in a round that only assembles members
    why: str  # this topology, in words for people
    admissible: Callable[[VerifiedReport, Seconds], str | None]  # (report, the time of the body)
    statistic: StatisticName = "mean"
    tolerance: float = 0.0
    witnessed: bool = False
    captured: float = (
        0.0  # share of parts that liars may own by themselves, where openings find what they say there
    )
    parts_most: int = PARTS_MAX  # that an update may have in the rounds to come
    recovery: bytes = b""  # public identity whose word sends the run back to an earlier state
    audited: bool = False  # who gives an update must claim how it trained
    reputed: bool = False  # members' records stand in vertices, and decide what rows weigh
    demanded: RollbackOrder | None = None  # validators found the state bad: where this round is to go back to
    opened: bool = False  # blocks of answers are opened
    apart: PartitionPolicy | None = None  # who hears no quorum trains on
    scored: tuple[SettledScore, ...] | None = (
        None  # updates whose scores the parent settled; None: the run has none
    )
    twins: RedundancyDraw | None = None  # members take each other's samples in secret; None: the run has no twins
    compared: tuple[RedundancyVerdict, ...] = ()  # what became of twins, as the parent settled it
    words_lost: bool = False  # of scorers or referees, on this disk: records are taken at their word
    ways: Callable[[str], TopologyChoice] | None = (
        None  # by its name, where whoever calls may choose how its call is reduced
    )

    def by(self, asked: str) -> RoundContext:
        """The same for updates whose callers asked for this. PeerFault for a way that there is none of.

        What the callers chose stands in their commitments, so a round that nobody planned like that is reduced by
        a plan that all work out alike, and whoever checks its body finds in it what it was reduced by.
        """
        if self.ways is None or self.topology is None or not (name := topology_in(asked)):
            return self
        if name not in self._asked:
            way = self.ways(name)
            self._asked[name] = replace(self, topology=way.topology, why=way.why)
        return self._asked[name]

    @cached_property
    def _asked(self) -> dict[str, RoundContext]:
        return {}

    @cached_property
    def owners(self) -> tuple[tuple[PeerId, ...], ...]:
        """Of each part, in the order in which they take over."""
        return tuple(part.owners for part in self.topology.parts) if self.topology is not None else ()

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Relative sizes of the parts."""
        return tuple(part.share for part in self.topology.parts) if self.topology is not None else ()

    def takes(self, part: int) -> frozenset[PeerId] | None:
        """Whose rows this part is made of, its owner's among them; None: everybody's."""
        assert self.topology is not None
        return self.topology.parts[part].takes

    def taking(self, peer: PeerId) -> int:
        """How many parts take this peer's row."""
        return self.topology.taking(peer) if self.topology is not None else 0

    @cached_property
    def weightless(self) -> frozenset[PeerId]:
        """Newcomers, and members whose work cannot be replayed: their rows are checked like any other, and move
        nothing."""
        return frozenset(m.peer for m in self.plan.trainers if m.standing in WEIGHTLESS)

    @cached_property
    def unaudited(self) -> frozenset[PeerId]:
        """Members that said that their work cannot be replayed."""
        return frozenset(m.peer for m in self.plan.trainers if m.standing == "unaudited")

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

    @cached_property
    def mixes(self) -> bool:
        """And mixed by them, before mixtures are sorted value by value."""
        return self.statistic in MIXED

    @property
    def trainers_most(self) -> int:
        """Rows without distances would stop the learning of all."""
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
        names = sum(name_bytes(m.peer) + WEIGHT_BYTES for m in self.plan.trainers)  # or a line of bits each
        return names + DIGEST_BYTES + PLACE_BYTES * len(self.owners) + WEIGHING_BYTES

    @cached_property
    def witnesses(self) -> int:
        """Owners after the first that combine every part too."""
        if not self.witnessed:
            return 0
        owners = min((len(part.owners) for part in self.topology.parts), default=1) if self.topology else 1
        lying = liars_among(len(self.plan.voters), self.tolerance)
        return witnesses(owners, len(self.plan.owners), lying, self.captured)

    @cached_property
    def reserves(self) -> tuple[PeerId, ...]:
        """Who takes parts that no owner answers for: authors have their rows still. Where members may lie they are
        drawn as owners are. In pairs a part is nobody else's, and where distances weigh rows every part must be
        compared before any is combined: there is no time for two words more."""
        plan = self.plan
        if self.topology is None or self.topology.apart or self.weighs:
            return ()
        if not plan.may_lie:
            return plan.owners
        return tuple(shuffled(plan.head, "reserves", [p for p in plan.owners if p in plan.committee]))

    def stands_in(self, part: int, owner_index: int) -> bool:
        """Is this the index of a reserve?"""
        return bool(self.reserves) and owner_index >= len(self.owners[part])

    @cached_property
    def juries(self) -> tuple[tuple[PeerId, ...], ...]:
        """Of each part, in a large committee: if every voter opened all rows of a doubted part, that would be the
        whole updates of all to all."""
        committee = self.plan.committee
        if not self.witnesses or len(committee) <= COMMITTEE_MAX:
            return ()
        head, first = self.plan.head, self.witnesses + 1
        return tuple(jury_of(head, part, committee, owners, first) for part, owners in enumerate(self.owners))

    def reduce_plan(self, attempt: int, timing: RoundPlan | None = None) -> ReducePlan:
        """`timing`: the plan with the windows that I go by, if they are others."""
        assert self.topology is not None
        plan = timing or self.plan
        times = plan.times(attempt)
        return ReducePlan(
            plan.round,
            attempt,
            plan.trace,
            self.topology,
            tuple(m.peer for m in plan.members if m.present),
            times.answer_until,
            self.statistic,
            self.liars,
            rows_needed(self.statistic, self.liars),
            self.witnesses,
            self.juries,
            verdict_of(liars_among(len(plan.committee), self.tolerance)),
            self.weighs,
            self.mixes,
            self.weightless,
            frozenset(m.peer for m in plan.members if m.present and m.peer not in plan.givers),
            plan.window_s(attempt),
            plan.has_clock,
            self.influence if self.weighs else {},
            self.opened,
            self.reserves,
            times.reserves_until,
            plan.may_lie,
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


@of_the_same  # asked with every report
def known_keys(members: tuple[Member, ...]) -> dict[PeerId, bytes]:
    """Under which anybody's words may be held against it: also of those that are away."""
    return {m.peer: m.vote_key for m in members if m.standing != "expelled"}


def ground_after(
    settings: RunSettings, plan: RoundPlan, parent: VertexBody, recent: RecentVertices, run: Digest
) -> RoundContext:
    """What the round after `parent` stands on; `settings` are genesis'. Enough members, no pause, rounds left to
    train, or it only assembles members.

    The first round that trains waits for settled ones: a newcomer's update moves nothing, and nobody who was waited
    for shall count for nothing.
    """
    genesis, over = settings, is_over(settings, parent)
    settings = settings_after(settings, parent)
    parts = parts_most(settings, parent)
    if parent.trained:
        enough = sum(m.works for m in plan.members) >= settings.min_peers
    else:
        settled = sum(m.works and m.standing == "member" for m in plan.members)
        enough = settled >= max(settings.start_peers, settings.min_peers)

    def judge(reported: VerifiedReport, time_s: Seconds) -> str | None:
        is_open, signing = settings.open_to_all, settings.round.signing
        now_s = parent.time_s
        return admissible(
            reported, parent, recent, run, is_open, now_s, parts=parts, signing=signing, time_s=time_s
        )

    who, demanded = settings.recovery, recent.ledgers.demanded(parent.round)
    scored = None
    if settings.scored_share:
        scores = recent.ledgers.find(ScoreLedger)
        scored = scores.settled if scores is not None and scores.head == parent.round else ()
    drawing, compared = None, ()
    if settings.twinned_share:
        twins = recent.ledgers.find(RedundancyLedger)
        here = twins is not None and twins.head == parent.round
        drawing = RedundancyDraw(settings.twinned_share, plan.head, parent, twins.owed if here else None)
        compared = twins.settled if here else ()
    if over or not enough or parent.paused is not UNSET:
        why = "too few members to train" if parent.paused is UNSET else f"paused since round {parent.paused}"
        why = "the run is over" if over else why
        kind = settings.statistic
        return RoundContext(
            plan,
            genesis,
            parent,
            None,
            why,
            judge,
            kind,
            parts_most=parts,
            recovery=who,
            reputed=settings.reputed,
            demanded=demanded,
            scored=scored,
            compared=compared,
        )
    way = way_of(settings, plan, answered_bytes(parent))
    trust = settings.statistic, settings.tolerance, settings.witnessed, settings.captured_share
    audited, reputed, opened = bool(settings.audited_share), settings.reputed, settings.opened is not None
    more = audited, reputed, demanded, opened, settings.apart_terms, scored
    chosen = settings.round.quorum == "majority" and not plan.has_clock  # all is direct where members may lie
    ways = partial(way_asked, settings, plan, trained=parent.trained) if chosen else None
    fixed = plan, genesis, parent, way.topology, way.why, judge
    drawn: dict[str, Any] = {"twins": drawing, "compared": compared}
    return RoundContext(*fixed, *trust, parts, who, *more, ways=ways, **drawn)


def answered_bytes(parent: VertexBody) -> int:
    """Of all combined parts of the last round. Where lengths are callers' choice the next is likely as long, but of
    pairs there are only names."""
    if topology_in(asked_in(parent.commits)) == PAIRS:
        return 0
    answers = [decode_statement(signed.body, signed.signer) for signed in parent.parts if signed is not None]
    return sum(a.size_bytes for a in answers if isinstance(a, OwnerResult))


def size_flaw(ground: RoundContext, message: object) -> str | None:
    """What is longer in this message than anything of this round can be; None if nothing is."""
    match message:
        case PartResult(statement=statement) if len(statement.body) > ground.answer_bytes_max:
            return f"an answer of {len(statement.body)} bytes"
        case PartResult(weighing=AgreedWeights() as weighing) if (
            size := len(encode(weighing))
        ) > ground.weighing_bytes_max:
            return f"an answer with {size} bytes of weights"
        case RowComparison(statement=statement) if (size := len(statement.body)) > ground.compared_bytes_max:
            return f"a comparison of {size} bytes"
        case _:
            return None
