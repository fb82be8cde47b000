"""State of one attempt of an all-reduce: plan, rows, results and routing, shared by the engine and its strategies.

Invariants:
- A part has at most one accumulator as an owner, one as a relay, and one accepted result.
- Only the engine accepts a result, declares a part missing, or starts and finishes the attempt.
Not responsible for: deciding when a part is closed, and which result is true (engine and strategies).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Emit, Fact, RunTask, Send
from atoll.protocol.allreduce.broadcast import ResultBroadcast
from atoll.protocol.allreduce.buffers import (
    ComputedResults,
    GatheredRow,
    LocalRow,
    PartRowCollector,
    ReceivedResult,
)
from atoll.protocol.allreduce.deferred_results import DeferredReserveResults
from atoll.protocol.allreduce.environment import ReduceEnvironment
from atoll.protocol.allreduce.events import LocalPartCombineFailed, RowDecodeFailed
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.reroute import BrokenLinkRerouter
from atoll.protocol.allreduce.result_recovery import ResultRecovery
from atoll.protocol.allreduce.routing import AttemptRouting
from atoll.protocol.allreduce.row_server import RowServer
from atoll.protocol.allreduce.tasks import CombineRows, ProductsComputed, RowsCombined, TaskRow
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import PartReductionDeclined
from atoll.wire.messages.statements import AgreedWeights

ONWARD = -1  # the owner index of a relay: it combines rows and hands the sum on


class AttemptState:
    """The local peer's side of one attempt, as data."""

    def __init__(self, notary: StatementSigner, plan: ReducePlan, around: ReduceEnvironment) -> None:
        self.notary, self.me, self.environment = notary, notary.me, around
        self.commit_of, self.gone = around.commitment_of, around.is_gone
        self.agreed_plan = plan
        self.route = AttemptRouting(plan, self.me, self.gone)
        self.answers: dict[int, ReceivedResult] = {}  # accepted results, by part
        self.missing: set[int] = set()  # parts without a result
        self.recovery = ResultRecovery(plan, self.gone)
        self.reroute = BrokenLinkRerouter(self.me, self.route, around)
        self.weighings: dict[Digest, AgreedWeights] = {}  # agreed weights that results name, by digest
        self.outliers: dict[bytes, tuple[PeerId, ...]] = {}  # authors of far rows, by digest of the comparisons
        self.broadcast = ResultBroadcast(
            self.route, around.is_unheard, self.weighings, lambda peer: around.commitment_of(peer) is not None
        )
        self.deferred = DeferredReserveResults(self.route, self.gone, self.answers)
        self.update: LocalRow | None = None
        self.gathers: dict[int, PartRowCollector] = {}  # rows of parts that the local peer may have to answer for
        self.row_server = RowServer(plan, self.me, self.gathers, self.gone, around.can_see_rows)
        # rows of parts that the local peer hands on to an owner
        self.relays = {
            part: PartRowCollector(ONWARD, below | {self.me}) for part, below in self.route.below.items()
        }
        self.made: ComputedResults = {}  # kept if rows may be inspected
        self.unread: dict[tuple[int, PeerId], GatheredRow] = {}  # rows that do not decode, by part and author
        self.started = self.finished = False
        self.begun_at: Seconds = 0.0
        self._pace_s: Seconds | None = None  # time until the rows of all but `liars` members arrived
        self._local_rows: dict[int, GatheredRow] = {}
        for part in range(plan.parts):
            if self.me in plan.owners(part):
                # a result signed before a restart has lost its bytes: stay silent, the next owner answers
                closed = self.result_key(part) in around.durable_keys
                takes = plan.topology.parts[part].authors
                self.gathers[part] = PartRowCollector(plan.owners(part).index(self.me), takes, closed=closed)

    @property
    def plan(self) -> ReducePlan:
        """The agreed plan, with the windows of this peer."""
        return self.route.plan

    # ---- windows -------------------------------------------------------------------------------------------

    def begin(self, now: Seconds) -> None:
        self.started, self.begun_at = True, now
        self._set_windows()

    def set_update(self, update: LocalRow) -> None:
        self.update, self._local_rows = update, {}
        if self.started:
            self._set_windows()

    def _set_windows(self) -> None:
        """Stretch the owners' windows by the size of the local update: other updates are as large."""
        update_bytes = sum(part.size_bytes for part in self.update.parts) if self.update is not None else 0
        self.route.plan = self.agreed_plan.started_at(self.begun_at, update_bytes, self._pace_s)

    def note_pace(self, now: Seconds) -> bool:
        """True once: when all members but `liars` have sent what the local peer combines as a first owner."""
        if self._pace_s is not None or self.plan.has_clock or not self.plan.is_distrusting:
            return False
        first = [part for part, g in self.gathers.items() if g.owner_index == 0 and part not in self.missing]
        if not first or any(self._count_outstanding(part) > self.plan.liars for part in first):
            return False  # a peer that combines nothing measures nothing
        self._pace_s = now - self.begun_at
        if self.started:
            self._set_windows()
        return True

    def _count_outstanding(self, part: int) -> int:
        """Members that have neither sent their row of this part nor committed to none."""
        lacking = [self.commit_of(peer) for peer in self.plan.authors - self.gathers[part].names]
        return sum(commit is None or commit.parts > part for commit in lacking)

    # ---- rows ----------------------------------------------------------------------------------------------

    def gather_for(self, part: int, owner_index: int) -> PartRowCollector | None:
        """The open accumulator that a row with this owner index belongs to."""
        gather = self.relays.get(part) if owner_index == ONWARD else self.gathers.get(part)
        if gather is None and 0 <= part < self.plan.parts:
            takers = self.plan.owners_and_reserves(part)
            if 0 <= owner_index < len(takers) and takers[owner_index] == self.me:
                gather = self.stand_in(part)
        if gather is None or gather.owner_index != owner_index or gather.closed or part in self.answers:
            return None
        return gather

    def stand_in(self, part: int) -> PartRowCollector:
        """The accumulator of a part as an owner or reserve; a reserve's is created when it is first needed."""
        if part not in self.gathers:
            index = self.plan.owners_and_reserves(part).index(self.me)
            closed = self.result_key(part) in self.environment.durable_keys
            self.gathers[part] = PartRowCollector(index, closed=closed)
        return self.gathers[part]

    def takes_row(self, part: int, peer: PeerId) -> bool:
        takes = self.plan.topology.parts[part].authors
        return takes is None or peer in takes

    def owner_lacks_row(self, part: int) -> bool | None:
        """Whether the owner of a part that takes only some rows committed to none. None: it takes all rows."""
        if self.plan.topology.parts[part].authors is None:
            return None
        commit = self.commit_of(self.plan.owners(part)[0])
        return commit is None or commit.parts <= part

    def awaited_authors(self, gather: PartRowCollector) -> list[PeerId] | None:
        """Authors that may still send a row. None: all members.

        If a part takes only some rows, an author without a commitment at the start has none to give.
        """
        return None if gather.below is None else [p for p in gather.below if self.commit_of(p) is not None]

    def has_local_row(self, part: int) -> bool:
        return self.update is not None and 0 <= part < len(self.update.parts)

    def local_row(self, part: int) -> GatheredRow:
        if part not in self._local_rows:
            update, commit = self.update, self.commit_of(self.me)
            assert update is not None and commit is not None
            names, path = frozenset((self.me,)), update.path(part)
            row = GatheredRow(names, commit.weight, update.parts[part], path, update.statement)
            self._local_rows[part] = row
        return self._local_rows[part]

    def row_of(self, part: int, peer: PeerId) -> GatheredRow | None:
        """The row of this author, if the local peer holds it."""
        if peer == self.me:
            return self.local_row(part) if self.has_local_row(part) else None
        gather = self.gathers.get(part)
        return gather.rows.get(peer) if gather is not None else None

    def note_undecodable(
        self, part: int, result: RowsCombined | ProductsComputed, rows: Mapping[PeerId, GatheredRow]
    ) -> list[Effect]:
        self.unread.update({(part, peer): rows[peer] for peer in result.undecodable if peer in rows})
        return [self.report(RowDecodeFailed(peer=peer, part=part)) for peer in result.undecodable]

    # ---- effects and names ---------------------------------------------------------------------------------

    def combine(self, part: int, gather: PartRowCollector, job: str, onward: bool = False) -> RunTask:
        rows = tuple(
            TaskRow(sender, held.weight, held.payload, tuple(sorted(held.names)), held.handed)
            for sender, held in gather.disjoint_rows().items()
        )
        plan = self.plan
        work = CombineRows(plan.round, part, plan.shares, rows, onward, plan.statistic, plan.liars)
        return RunTask(self.job(f"{job}/{part}"), work)

    def announce_decline(self, part: int, why: str) -> list[Effect]:
        """Report that the local peer cannot combine this part, and send that to all listeners."""
        plan = self.plan
        message = PartReductionDeclined(plan.round, plan.attempt, plan.trace, part)
        sends = [Send(peer, message) for peer in self.route.others()]
        return [self.report(LocalPartCombineFailed(part=part, why=why)), *sends]

    def report(self, fact: Fact) -> Emit:
        return Emit(replace(fact, round=self.plan.round, trace=self.plan.trace))

    def result_key(self, part: int) -> str:
        """Storage key of the own result of a part."""
        return f"said/{self.plan.round}/{self.plan.attempt}/answer/{part}"

    def timer(self) -> str:
        return f"reduce/{self.plan.round}/{self.plan.attempt}"

    def job(self, name: str) -> str:
        return f"combine/{self.plan.round}/{self.plan.attempt}/{name}"
