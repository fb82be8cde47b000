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
from atoll.base.memoize import memoize_by_identity
from atoll.base.units import history_round_text
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
from atoll.policy.capability_terms import PartitionPolicy
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
from atoll.policy.ledger import RedundantTrainingDraw
from atoll.policy.membership import RecentVertices, VerifiedReport, admissible
from atoll.policy.plan import RoundPlan
from atoll.policy.reputation import FLOOR, NO_FINDINGS, WorkFindings, influence_of
from atoll.policy.vertex_capacity import WEIGHT_BYTES, name_bytes
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.topology import ReduceTopology
from atoll.wire.authority import Authority
from atoll.wire.codec import decode_statement, encode
from atoll.wire.messages.round import PartResult, PartRowProducts
from atoll.wire.messages.statements import (
    AgreedWeights,
    OwnerResult,
    RollbackOrder,
)
from atoll.wire.messages.vertex import WEIGHTLESS, Member, VertexBody

WEIGHING_BYTES = 32  # list headers of an encoded `AgreedWeights`
PLACE_BYTES = 3  # one part number in it


@dataclass(frozen=True, kw_only=True)
class TrustTerms:
    """How much a training round trusts its members; the defaults trust them fully."""

    statistic: StatisticName = "mean"  # rule for the rows of a part
    tolerance: float = 0.0  # share of members that may lie
    witnessed: bool = False  # several owners combine each part
    captured: float = 0.0  # share of parts that liars may own alone, where openings check results
    audited: bool = False  # an update comes with a claim about how it was trained
    scored: bool = False  # updates are scored by the loss that they save
    reputed: bool = False  # vertices hold reputations, which decide row weights
    opened: bool = False  # blocks of results are opened


@dataclass(frozen=True)
class AssignedMemberWork:
    """Training work that a round assigns to one member."""

    steps: int  # inner steps, at most
    batch: int  # samples per step; 0: the recipe's
    limit_s: Seconds | None  # training time from when the trainer runs; None: no limit


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """Agreed facts of one round and the rule for reports, handed in by the peer."""

    plan: RoundPlan
    settings: RunSettings  # those of genesis; the plan holds what the round uses
    parent: VertexBody
    topology: ReduceTopology | None  # how updates are reduced; None in a round that only assembles members
    why: str  # reason for this topology, for people
    admissible: Callable[[VerifiedReport, Seconds], str | None]  # (report, time of the body) → flaw
    trust: TrustTerms = TrustTerms()
    parts_most: int = PARTS_MAX  # most parts of an update in the rounds to come
    authority: Authority | None = None  # rule for operator orders; None: none holds
    demanded: RollbackOrder | None = None  # rollback that validators demand after a bad state
    apart: PartitionPolicy | None = None  # members without a quorum train on
    findings: WorkFindings = NO_FINDINGS  # about members' work, settled by the parent
    twins: RedundantTrainingDraw | None = None  # draw for redundant training; None: the run has none
    has_lost_reports: bool = False  # some judges' reports are not on this disk: reputations are not checked
    ways: Callable[[str], TopologyChoice] | None = None  # topology by name, where callers may choose it

    def with_topology(self, asked: str) -> RoundContext:
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

    def work_of(self, peer: PeerId) -> AssignedMemberWork:
        """The work of this member; the one place for values that differ between members."""
        return AssignedMemberWork(self.plan.steps_of(peer), self.plan.batch, self.plan.limit_s)

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
        return self.topology.parts[part].authors

    def taking(self, peer: PeerId) -> int:
        """Number of parts that include this peer's row."""
        return self.topology.parts_taking(peer) if self.topology is not None else 0

    @cached_property
    def has_pieces(self) -> bool:
        """True if members do not lie and an owner has several parts, so that parts come one after the other."""
        parts = self.topology.parts if self.topology is not None else ()
        return not self.plan.may_lie and len(parts) > len({part.owners[0] for part in parts})

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
        if not self.trust.reputed:
            return {}
        settled = (m.peer for m in self.plan.trainers if m.standing == "member")
        return influence_of({peer: self.plan.scores.get(peer, FLOOR) for peer in settled})

    @cached_property
    def liars(self) -> int:
        """Number of counted rows that may be lies."""
        return liars_among(len(self.plan.trainers) - len(self.weightless), self.trust.tolerance)

    @cached_property
    def weighs(self) -> bool:
        """True if rows are weighted by distances between whole updates."""
        return self.trust.statistic in DISTANCES

    @cached_property
    def mixes(self) -> bool:
        """True if rows are also mixed by these distances before values are sorted."""
        return self.trust.statistic in MIXED

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
        if not self.trust.witnessed:
            return 0
        owners = min((len(part.owners) for part in self.topology.parts), default=1) if self.topology else 1
        lying = liars_among(len(self.plan.voters), self.trust.tolerance)
        return witnesses(owners, len(self.plan.owners), lying, self.trust.captured)

    @cached_property
    def reserves(self) -> tuple[PeerId, ...]:
        """Peers that take over parts without a result of any owner; authors still have their rows.

        Where members may lie they are drawn like owners. There are none in pairs, where a part belongs to one pair,
        and none where distances weight rows: every part must be compared before any is combined, which leaves no
        time.
        """
        plan = self.plan
        if self.topology is None or self.topology.has_separate_results or self.weighs:
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
            round=plan.round,
            attempt=attempt,
            trace=plan.trace,
            topology=self.topology,
            recipients=tuple(m.peer for m in plan.members if m.is_present),
            answer_until=times.answer_until,
            statistic=self.trust.statistic,
            liars=self.liars,
            rows_least=rows_needed(self.trust.statistic, self.liars),
            witnesses=self.witnesses,
            juries=self.juries,
            verdict=verdict_of(liars_among(len(plan.committee), self.trust.tolerance)),
            has_distance_weights=self.weighs,
            has_mixtures=self.mixes,
            weightless=self.weightless,
            rowless=frozenset(m.peer for m in plan.members if m.is_present and m.peer not in plan.givers),
            unsettled=frozenset(m.peer for m in plan.members if m.is_present and m.standing in ("observer", "new")),
            window_s=plan.window_s(attempt),
            has_clock=plan.has_clock,
            influence=self.influence if self.weighs else {},
            is_audited=self.trust.opened,
            reserves=self.reserves,
            reserves_until=times.reserves_until,
            may_lie=plan.may_lie,
        )

    @cached_property
    def answer_bytes_max(self) -> int:
        """Largest signed result, in bytes: a longer one would only fill the vertex."""
        return ANSWER_BYTES_MAX + sum(name_bytes(m.peer) for m in self.plan.members if m.may_train)

    @cached_property
    def vote_key_of(self) -> dict[PeerId, bytes]:
        return {m.peer: m.vote_key for m in self.plan.members if m.is_present}

    @cached_property
    def known_keys(self) -> dict[PeerId, bytes]:
        return known_keys(self.plan.members)


@memoize_by_identity  # called for every report
def known_keys(members: tuple[Member, ...]) -> dict[PeerId, bytes]:
    """Keys under which a statement may be held against its signer, absent members included."""
    return {m.peer: m.vote_key for m in members if m.standing != "expelled"}


def context_after(
    settings: RunSettings, plan: RoundPlan, parent: VertexBody, recent: RecentVertices, run: Digest
) -> RoundContext:
    """Context of the round after `parent`; `settings` are those of genesis.

    The round only assembles members if there are too few of them, the run is paused, or no training rounds are
    left. The first training round waits for settled members: a newcomer's update has weight 0, and no awaited
    member shall count for nothing.
    """
    genesis, settings = settings, settings_after(settings, parent)
    parts = parts_most(settings, parent)

    def judge(reported: VerifiedReport, time_s: Seconds) -> str | None:
        is_open, signing = settings.open_to_all, settings.round.signing
        now_s = parent.time_s
        return admissible(
            reported, parent, recent, run, is_open, now_s, parts=parts, signing=signing, time_s=time_s
        )

    assembling = RoundContext(
        plan=plan,
        settings=genesis,
        parent=parent,
        topology=None,
        why=_why_assembling(genesis, settings, plan, parent),
        admissible=judge,
        trust=TrustTerms(
            statistic=settings.statistic, scored=bool(settings.scored_share), reputed=settings.reputed
        ),
        parts_most=parts,
        authority=recent.authority,
        demanded=recent.ledgers.demanded(parent.round),
        findings=recent.ledgers.findings(parent.round),
    )
    if assembling.why:
        return assembling
    way = way_of(settings, plan, answered_bytes(parent))
    chosen = settings.round.quorum == "majority" and not plan.has_clock  # where members may lie all rows are direct
    return replace(
        assembling,
        topology=way.topology,
        why=way.why,
        trust=TrustTerms(
            statistic=settings.statistic,
            tolerance=settings.tolerance,
            witnessed=settings.witnessed,
            captured=settings.captured_share,
            audited=bool(settings.audited_share),
            scored=bool(settings.scored_share),
            reputed=settings.reputed,
            opened=settings.opened is not None,
        ),
        apart=settings.apart_terms,
        twins=recent.ledgers.sample_draw(plan.head, parent),
        ways=partial(way_asked, settings, plan, trained=parent.trained) if chosen else None,
    )


def _why_assembling(genesis: RunSettings, settings: RunSettings, plan: RoundPlan, parent: VertexBody) -> str:
    """Why the round after `parent` only assembles members; empty if it trains. `settings`: with changed numbers."""
    if is_over(genesis, parent):
        return "the run is over"
    if parent.paused is not UNSET:
        return f"paused since {history_round_text(parent.paused, None)}"
    if parent.trained:
        enough = sum(m.is_auditable_trainer for m in plan.members) >= settings.min_peers
    else:
        settled = sum(m.is_auditable_trainer and m.standing == "member" for m in plan.members)
        enough = settled >= max(settings.start_peers, settings.min_peers)
    return "" if enough else "too few members to train"


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
        case PartRowProducts(statement=statement) if (size := len(statement.body)) > ground.compared_bytes_max:
            return f"a comparison of {size} bytes"
        case _:
            return None
