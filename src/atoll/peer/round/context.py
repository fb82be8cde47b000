"""Round context: the plan, the parent vertex and the settings that all decisions of one round follow from.

Invariants:
- Every field follows from agreed vertices, so two peers with the same head hold equal contexts.
- Sizes that strangers could grow have their upper bounds here.
Not responsible for: anything sent during the round.
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
from atoll.verification.loss_scoring.policy import SettledScore
from atoll.verification.redundant_training.policy import RedundancyDraw, RedundancyVerdict
from atoll.wire.codec import decode_statement, encode
from atoll.wire.messages.round import PartResult, RowComparison
from atoll.wire.messages.statements import (
    AgreedWeights,
    OwnerResult,
    RollbackOrder,
)
from atoll.wire.messages.vertex import WEIGHTLESS, Member, VertexBody

WEIGHING_BYTES = 32  # list headers of an encoded `AgreedWeights`
PLACE_BYTES = 3  # one part number in it


@dataclass(frozen=True)
class RoundContext:
    """Agreed facts of one round and the rule for reports, handed in by the peer."""

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
        """The context for updates with this topology as their callers' choice; PeerFault for an unknown one.

        Commitments carry the callers' choice. So all peers derive the same plan for it, and a voter finds in the
        body which topology the round used.
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
        """Owners of each part, in the order in which they take over."""
        return tuple(part.owners for part in self.topology.parts) if self.topology is not None else ()

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Relative sizes of the parts."""
        return tuple(part.share for part in self.topology.parts) if self.topology is not None else ()

    def takes(self, part: int) -> frozenset[PeerId] | None:
        """Peers with rows in this part, its owner included; None: all."""
        assert self.topology is not None
        return self.topology.parts[part].takes

    def taking(self, peer: PeerId) -> int:
        """Number of parts that include this peer's row."""
        return self.topology.taking(peer) if self.topology is not None else 0

    @cached_property
    def weightless(self) -> frozenset[PeerId]:
        """Newcomers and members without replayable work: their rows are checked but have weight 0."""
        return frozenset(m.peer for m in self.plan.trainers if m.standing in WEIGHTLESS)

    @cached_property
    def unaudited(self) -> frozenset[PeerId]:
        """Members that declared their work not replayable."""
        return frozenset(m.peer for m in self.plan.trainers if m.standing == "unaudited")

    def takes_late(self, peer: PeerId) -> bool:
        """True if this member's update may carry late work: the run merges it and the row has weight."""
        return self.apart is not None and self.apart.then == "merge" and peer not in self.weightless

    @cached_property
    def influence(self) -> dict[PeerId, int]:
        """Influence of each settled trainer; empty where the run keeps no reputation."""
        if not self.reputed:
            return {}
        settled = (m.peer for m in self.plan.trainers if m.standing == "member")
        return influence_of({peer: self.plan.scores.get(peer, FLOOR) for peer in settled})

    @cached_property
    def liars(self) -> int:
        """Number of counted rows that may be lies."""
        return liars_among(len(self.plan.trainers) - len(self.weightless), self.tolerance)

    @cached_property
    def weighs(self) -> bool:
        """True if rows are weighted by distances between whole updates."""
        return self.statistic in DISTANCES

    @cached_property
    def mixes(self) -> bool:
        """True if rows are also mixed by these distances before values are sorted."""
        return self.statistic in MIXED

    @property
    def trainers_most(self) -> int:
        """Largest number of trainers: rows without distances would stop training for all."""
        return WEIGHED_ROWS_MAX if self.weighs else PEERS_MAX

    @cached_property
    def compared_bytes_max(self) -> int:
        """Largest signed comparison, in bytes."""
        rows = min(len(self.plan.trainers), WEIGHED_ROWS_MAX)
        return self.answer_bytes_max + 8 * (rows * (rows + 1) // 2)

    @cached_property
    def weighing_bytes_max(self) -> int:
        """Largest encoded `AgreedWeights`, in bytes; it travels beside a result and stands in the vertex."""
        if not self.weighs:
            return 0
        names = sum(name_bytes(m.peer) + WEIGHT_BYTES for m in self.plan.trainers)  # or one row of bits each
        return names + DIGEST_BYTES + PLACE_BYTES * len(self.owners) + WEIGHING_BYTES

    @cached_property
    def witnesses(self) -> int:
        """Owners after the first that also combine every part."""
        if not self.witnessed:
            return 0
        owners = min((len(part.owners) for part in self.topology.parts), default=1) if self.topology else 1
        lying = liars_among(len(self.plan.voters), self.tolerance)
        return witnesses(owners, len(self.plan.owners), lying, self.captured)

    @cached_property
    def reserves(self) -> tuple[PeerId, ...]:
        """Peers that take over parts without a result of any owner; authors still have their rows.

        Where members may lie they are drawn like owners. There are none in pairs, where a part belongs to one pair,
        and none where distances weight rows: every part must be compared before any is combined, which leaves no
        time.
        """
        plan = self.plan
        if self.topology is None or self.topology.apart or self.weighs:
            return ()
        if not plan.may_lie:
            return plan.owners
        return tuple(shuffled(plan.head, "reserves", [p for p in plan.owners if p in plan.committee]))

    def stands_in(self, part: int, owner_index: int) -> bool:
        """True if this owner index is a reserve's."""
        return bool(self.reserves) and owner_index >= len(self.owners[part])

    @cached_property
    def juries(self) -> tuple[tuple[PeerId, ...], ...]:
        """Jury of each part in a large committee.

        If every voter opened all rows of a disputed part, all updates would go to all voters.
        """
        committee = self.plan.committee
        if not self.witnesses or len(committee) <= COMMITTEE_MAX:
            return ()
        head, first = self.plan.head, self.witnesses + 1
        return tuple(jury_of(head, part, committee, owners, first) for part, owners in enumerate(self.owners))

    def reduce_plan(self, attempt: int, timing: RoundPlan | None = None) -> ReducePlan:
        """The all-reduce plan of one attempt; `timing` is the plan with locally applied windows, if they differ."""
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
        """Largest signed result, in bytes: a longer one would only fill the vertex."""
        return ANSWER_BYTES_MAX + sum(name_bytes(m.peer) for m in self.plan.members if m.trains)

    @cached_property
    def vote_key_of(self) -> dict[PeerId, bytes]:
        return {m.peer: m.vote_key for m in self.plan.members if m.present}

    @cached_property
    def known_keys(self) -> dict[PeerId, bytes]:
        return known_keys(self.plan.members)


@of_the_same  # called for every report
def known_keys(members: tuple[Member, ...]) -> dict[PeerId, bytes]:
    """Keys under which a statement may be held against its signer, absent members included."""
    return {m.peer: m.vote_key for m in members if m.standing != "expelled"}


def ground_after(
    settings: RunSettings, plan: RoundPlan, parent: VertexBody, recent: RecentVertices, run: Digest
) -> RoundContext:
    """Context of the round after `parent`; `settings` are those of genesis.

    The round only assembles members if there are too few of them, the run is paused, or no training rounds are
    left. The first training round waits for settled members: a newcomer's update has weight 0, and no awaited
    member shall count for nothing.
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
        judged = settings.open_to_all, parent.time_s, parts, settings.round.signing, time_s
        return admissible(reported, parent, recent, run, *judged)

    who, validations = settings.recovery, recent.validations
    demanded = validations.demanded() if validations.head == parent.round else None
    scored = None
    if settings.scored_share:
        scored = recent.scores.settled if recent.scores.head == parent.round else ()
    drawing, compared = None, ()
    if settings.twinned_share:
        here = recent.twins.head == parent.round
        drawing = RedundancyDraw(settings.twinned_share, plan.head, parent, recent.twins.owed if here else None)
        compared = recent.twins.settled if here else ()
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
    twins: dict[str, Any] = {"twins": drawing, "compared": compared}
    return RoundContext(*fixed, *trust, parts, who, *more, ways=ways, **twins)


def answered_bytes(parent: VertexBody) -> int:
    """Encoded bytes of all combined parts of the last round, an estimate for the next one; 0 for pairs."""
    if topology_in(asked_in(parent.commits)) == PAIRS:
        return 0
    answers = [decode_statement(signed.body, signed.signer) for signed in parent.parts if signed is not None]
    return sum(a.size_bytes for a in answers if isinstance(a, OwnerResult))


def size_flaw(ground: RoundContext, message: object) -> str | None:
    """Which field of this message exceeds the largest size in this round; None if none does."""
    match message:
        case PartResult(statement=statement) if len(statement.body) > ground.answer_bytes_max:
            return f"a result of {len(statement.body)} bytes"
        case PartResult(weighing=AgreedWeights() as weighing) if (
            size := len(encode(weighing))
        ) > ground.weighing_bytes_max:
            return f"a result with {size} bytes of weights"
        case RowComparison(statement=statement) if (size := len(statement.body)) > ground.compared_bytes_max:
            return f"a comparison of {size} bytes"
        case _:
            return None
