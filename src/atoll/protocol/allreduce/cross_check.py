"""Cross-check of owners: signed results of each part, which of them are true, and which owners lied.

A result is *believed* if all w + 1 owners sign the same, since hardly ever all of them lie, or if the local peer
recomputed it from rows that their authors committed to. A part is *disputed* if its owners differ, or if one of
them is silent past its time. The local peer then requests the rows of a disputed part and recomputes every result
that was signed for it. Of the results that prove true, the one with most contributors stands.

An owner is called a liar only for what it signed: bytes that its contributors' rows do not make, or two results in
one slot. It is judged by the commitments that it names: an author may have sent different commitments to the owner
and to the local peer. In a large committee a jury, drawn for each part, requests the rows for all. A result is then
believed for what owners and jurors sign alone, the same at every peer. Other peers request no row and blame no
owner.

Invariants:
- No result is believed because of its signer.
- A row is requested at most ROW_REQUESTS_MAX times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.machine import Effect, Emit, Fact, Payload, RunTask, Send
from atoll.base.memoize import memoize_by_identity
from atoll.crypto.digest import digest
from atoll.protocol.allreduce.buffers import GatheredRow, ReceivedResult
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.tasks import CombineRows, RowsCombined, TaskRow
from atoll.wire.codec import encode
from atoll.wire.messages.round import RowRequest
from atoll.wire.messages.statements import Commitment, Lapse, OwnerResult, SignedStatement
from atoll.wire.opening import rows_digest

Rows = Digest  # digest of contributors and their commitments: faster to compare than a hundred names
Kind = tuple[Rows, Digest]  # rows and bytes of a result: equal for all signers that agree

RESULTS_PER_OWNER = 2  # signed results of one owner for one part: a second is evidence, a third adds nothing
ROWS_PATIENCE = 3  # checks, 1 s each, until rows for a jury are requested again: a hundred may be on their way
FORMS_MAX = 1024  # results with remembered digests: of all owners and juries of a round
ROW_REQUESTS_MAX = 6  # for one row, to one holder after the other; then its result stays unproven


class OwnerResultsDisagreed(Fact, frozen=True, kw_only=True, tag="OwnerResultsDisagreed"):
    """The owners of this part do not agree in time: the local peer recomputes it."""

    phase = "share"
    part: int
    results: int  # different results


class FalseOwnerResultProven(Fact, frozen=True, kw_only=True, tag="FalseOwnerResultProven"):
    """This owner signed a result that its contributors' rows do not make."""

    phase = "trust"
    peer: PeerId
    part: int
    statement: SignedStatement


class OwnerContradicted(Fact, frozen=True, kw_only=True, tag="OwnerContradicted"):
    """This owner signed two different results for one slot."""

    phase = "trust"
    peer: PeerId
    part: int
    first: SignedStatement
    second: SignedStatement


class CommitmentsDiffer(Fact, frozen=True, kw_only=True, tag="CommitmentsDiffer"):
    """This owner has other commitments of these contributors than the local peer, which should send it its own."""

    phase = "share"
    owner: PeerId
    contributors: tuple[PeerId, ...]


class ResultComparisonKey(NamedTuple):
    """Forms of a result that are fast to compare."""

    named: Digest  # digest of the content, independent of the signer
    kind: Kind
    names: frozenset[PeerId]


def _forms_of(answered: OwnerResult) -> ResultComparisonKey:
    content = replace(answered, owner_index=0)
    rows = digest(encode(replace(content, digest=ZERO_DIGEST, size_bytes=0)))
    return ResultComparisonKey(digest(encode(content)), (rows, answered.digest), frozenset(answered.contributors))


forms_of = memoize_by_identity(_forms_of, FORMS_MAX)


class SignedResult:
    """A result and its signer."""

    def __init__(self, statement: SignedStatement, answered: OwnerResult) -> None:
        self.statement, self.result = statement, answered
        self.named, self.kind, self.names = forms_of(answered)

    @property
    def rows(self) -> Rows:
        return self.kind[0]


@dataclass
class PartCrossCheck:
    """Signed results of one part, and what was found out about them."""

    results: list[SignedResult] = field(default_factory=list[SignedResult])
    signed_by: dict[Kind, set[int]] = field(default_factory=dict[Kind, set[int]])  # owner indices, without reserves
    bytes_of: dict[Digest, Payload] = field(default_factory=dict[Digest, Payload])  # results received or recomputed
    rows: dict[PeerId, GatheredRow] = field(default_factory=dict[PeerId, GatheredRow])  # rows fetched for a check
    # recomputed results; None: the rows make none
    makes: dict[Rows, Digest | None] = field(default_factory=dict[Rows, Digest | None])
    # recomputations, finished or running: one result for each set of rows
    checks: dict[Rows, SignedResult] = field(default_factory=dict[Rows, SignedResult])
    requests: Counter[PeerId] = field(default_factory=Counter[PeerId])  # by the author of the row
    blamed: set[int] = field(default_factory=set[int])  # owner indices
    compared: set[PeerId] = field(default_factory=set[PeerId])  # owners with other commitments than the local peer
    same: dict[Rows, bool] = field(default_factory=dict[Rows, bool])  # whether the commitments are the known ones
    doubted: bool = False
    rows_came: bool = False  # since the last check
    silent_for: int = 0  # checks without a row, since rows were requested
    # caches: read with every row and at every check, and hardly ever changed
    belief: dict[Digest, bool | None] = field(default_factory=dict[Digest, bool | None])  # by content
    standing: tuple[int, bool] | None = None  # count of kinds, and whether the truth of any is unknown
    settled: dict[bool, ReceivedResult | None] = field(
        default_factory=dict[bool, ReceivedResult | None]
    )  # by patience
    all_requested: bool = False  # every row that is needed was requested once
    # work lists: read with every row, so kept as short as possible
    unmade: dict[Digest, SignedResult] = field(
        default_factory=dict[Digest, SignedResult]
    )  # not recomputed, by content
    uncompared: list[SignedResult] = field(default_factory=list[SignedResult])  # with unchecked commitments
    lacks: dict[Digest, PeerId] = field(default_factory=dict[Digest, PeerId])  # author of a row that is not here
    uncommitted: dict[Rows, PeerId] = field(default_factory=dict[Rows, PeerId])  # author of a commitment not here

    def invalidate(self) -> None:
        """Drop the caches: a result was signed or recomputed."""
        self.belief.clear()
        self.settled.clear()
        self.standing, self.all_requested = None, False

    def add_bytes(self, payload: Payload) -> None:
        """Keep the bytes of a result that some owner signed; ignore others."""
        if any(r.result.digest == payload.digest for r in self.results):
            self.bytes_of[payload.digest] = payload
            self.settled.clear()


class CrossCheck:
    """`row_of(part, peer)`: a row that the local peer holds anyway. `judges`: False for a peer without a vote."""

    def __init__(
        self,
        plan: ReducePlan,
        me: PeerId,
        row_of: Callable[[int, PeerId], GatheredRow | None],
        commit_of: Callable[[PeerId], Commitment | None],
        gone: Callable[[PeerId], bool],
        judges: bool,
        two_faced: Container[PeerId] = (),
    ) -> None:
        self.plan, self.me, self.row_of = plan, me, row_of
        self.commit_of, self.gone, self.judges, self.two_faced = commit_of, gone, judges, two_faced
        self.disputes = [PartCrossCheck() for _ in range(plan.parts)]

    # ---- signed results ------------------------------------------------------------------------------------

    def record(self, signed: SignedStatement, answered: OwnerResult, payload: Payload | None) -> list[Effect]:
        """Add a checked result, with its bytes or only signed."""
        dispute, effects = self.disputes[answered.part], list[Effect]()
        earlier = [r for r in dispute.results if r.result.owner_index == answered.owner_index]
        if all(r.result != answered for r in earlier) and len(earlier) < RESULTS_PER_OWNER:
            result = SignedResult(signed, answered)
            dispute.results.append(result)
            dispute.invalidate()
            if result.rows not in dispute.checks:
                dispute.unmade.setdefault(result.named, result)
            stands_in = self.plan.stands_in(answered.part, answered.owner_index)
            if stands_in or answered.owner_index < len(self.plan.owners(answered.part)):
                dispute.uncompared.append(result)  # a juror sends the commitments that it has itself
            if not stands_in:  # a reserve's result is always recomputed: there are more reserves than may lie
                dispute.signed_by.setdefault(result.kind, set()).add(answered.owner_index)
            if earlier:
                first = earlier[0].statement
                fact = OwnerContradicted(peer=signed.signer, part=answered.part, first=first, second=signed)
                effects.append(self._report(fact))
        if payload is not None:
            dispute.add_bytes(payload)
        return effects + self._blame_liars(answered.part)

    def signers(self, part: int) -> set[PeerId]:
        return {r.statement.signer for r in self.disputes[part].results}

    def is_nearly_decided(self, part: int) -> bool:
        """Whether more than three quarters of the verdict agree: the missing statements may have been lost."""
        return 4 * max(map(len, self.disputes[part].signed_by.values()), default=0) > 3 * self.plan.verdict

    def seconded(self, answered: OwnerResult) -> tuple[SignedStatement, ...]:
        """Statements of other signers with the same content, of the same rows."""
        named, results = forms_of(answered).named, self.disputes[answered.part].results
        alike = (r for r in results if r.named == named and r.result.owner_index != answered.owner_index)
        return tuple(result.statement for result in alike)

    def is_recomputed(self, answered: OwnerResult) -> bool:
        """Whether the local peer recomputed this result, from rows that were fetched for it."""
        rows, made = forms_of(answered).kind
        return self.disputes[answered.part].makes.get(rows) == made

    def results_of(self, signer: PeerId) -> list[SignedResult]:
        return [r for dispute in self.disputes for r in dispute.results if r.statement.signer == signer]

    # ---- belief --------------------------------------------------------------------------------------------

    def believes(self, answered: OwnerResult) -> bool | None:
        """True, False, or None while it is unknown."""
        return self._believes_kind(self.disputes[answered.part], forms_of(answered).kind)

    def _believes_signed(self, result: SignedResult) -> bool | None:
        """`believes` with a cache, for recorded results."""
        dispute = self.disputes[result.result.part]
        if result.named not in dispute.belief:
            dispute.belief[result.named] = self._believes_kind(dispute, result.kind)
        return dispute.belief[result.named]

    def _believes_kind(self, dispute: PartCrossCheck, kind: Kind) -> bool | None:
        rows, claimed = kind
        plan, made = self.plan, dispute.makes.get(rows, claimed) if dispute.makes else claimed
        if made != claimed:
            return False
        by = dispute.signed_by.get(kind, ())
        if not plan.juries:
            return True if rows in dispute.makes or len(by) > plan.witnesses else None
        # an own recomputation counts as one juror's: if each peer believed its own, no body would find a majority
        alike = len(by) >= plan.verdict or sum(index <= plan.witnesses for index in by) > plan.witnesses
        return True if alike else None

    def settled(self, part: int, patient: bool) -> ReceivedResult | None:
        """The result that stands, once its bytes are here. While `patient`, a larger one may still prove true."""
        dispute = self.disputes[part]
        if patient not in dispute.settled:
            dispute.settled[patient] = self._settle(part, patient)
        return dispute.settled[patient]

    def _settle(self, part: int, patient: bool) -> ReceivedResult | None:
        dispute = self.disputes[part]
        for result in self._largest_first(part) if dispute.bytes_of else ():
            believed = self._believes_signed(result) if self.judges else True
            if believed and (payload := dispute.bytes_of.get(result.result.digest)) is not None:
                return ReceivedResult(result.statement, result.result, payload)
            if believed or (believed is None and patient):
                return None
        return None

    def believed_unseen(self, part: int) -> OwnerResult | None:
        """A result that is believed while its bytes are not here."""
        dispute = self.disputes[part]
        unseen = (r for r in dispute.results if r.result.digest not in dispute.bytes_of)
        return next((result.result for result in unseen if self._believes_signed(result)), None)

    # ---- disputes ------------------------------------------------------------------------------------------

    def is_in_doubt(self, part: int) -> bool:
        """Whether the truth of some result is unknown. Called at every check, and hardly ever so."""
        return self.judges and bool(self.disputes[part].results) and self._standing(part)[1]

    def pursue_doubt(self, part: int, waiting: bool, again: bool = False) -> list[Effect]:
        """Request rows and recompute. `waiting`: an owner may still sign. `again`: request rows once more."""
        dispute = self.disputes[part]
        if not self.is_in_doubt(part):
            return []
        differ, _ = self._standing(part)
        if differ == 1 and waiting:
            return []
        effects: list[Effect] = []
        if not dispute.doubted:
            dispute.doubted = True
            effects.append(self._report(OwnerResultsDisagreed(part=part, results=differ)))
        effects += self._compare_commitments(part)
        return effects + self._request_rows(part, again) + self._recompute(part) if self._opens(part) else effects

    def _standing(self, part: int) -> tuple[int, bool]:
        """The count of different results, and whether the truth of any is unknown."""
        dispute = self.disputes[part]
        if dispute.standing is None:
            kinds = len({r.kind for r in dispute.results})
            dispute.standing = kinds, any(self._believes_signed(r) is None for r in dispute.results)
        return dispute.standing

    def wants_row(self, part: int, peer: PeerId) -> bool:
        dispute = self.disputes[part]
        if not dispute.doubted or not self._opens(part) or self._row(part, peer) is not None:
            return False
        return any(peer in r.names and self._believes_signed(r) is None for r in dispute.results)

    def add_row(self, part: int, peer: PeerId, row: GatheredRow) -> list[Effect]:
        dispute = self.disputes[part]
        dispute.rows[peer], dispute.rows_came = row, True
        return self._recompute(part)

    def bytes_of(self, answered: OwnerResult) -> Payload:
        """The bytes of a recomputed result."""
        return self.disputes[answered.part].bytes_of[answered.digest]

    def largest_recomputed(self, part: int, patient: bool) -> OwnerResult | None:
        """The largest result that its rows make, which a juror can sign. While `patient`, wait for larger ones."""
        makes = self.disputes[part].makes
        for result in self._largest_first(part) if makes else ():
            if self.is_recomputed(result.result):
                return result.result
            if patient and result.rows not in makes:
                return None
        return None

    def record_check(self, part: int, check: int, combined: RowsCombined) -> list[Effect]:
        """The end of recomputation number `check`."""
        dispute = self.disputes[part]
        checked = list(dispute.checks.values())[check]
        # a row that does not decode cannot have been counted
        whole = combined.payload if combined.counted == checked.result.contributors else None
        dispute.makes[checked.rows] = whole.digest if whole is not None else None
        dispute.invalidate()
        if whole is not None:
            dispute.add_bytes(whole)
        return self._blame_liars(part)

    def _compare_commitments(self, part: int) -> list[Effect]:
        dispute, unknown, effects = self.disputes[part], list[SignedResult](), list[Effect]()
        for result in dispute.uncompared:
            owner, names = result.statement.signer, result.result.contributors
            same = self._matches_commitments(result.result)
            if same is None:
                unknown.append(result)
            elif not same and owner not in dispute.compared:
                dispute.compared.add(owner)
                effects.append(self._report(CommitmentsDiffer(owner=owner, contributors=names)))
        dispute.uncompared = unknown
        return effects

    def _blame_liars(self, part: int) -> list[Effect]:
        dispute, effects = self.disputes[part], list[Effect]()
        for result in dispute.results if dispute.makes else ():
            signed, index = result.statement, result.result.owner_index
            made = dispute.makes.get(result.rows, result.result.digest)
            if made != result.result.digest and index not in dispute.blamed:
                dispute.blamed.add(index)
                effects.append(
                    self._report(FalseOwnerResultProven(peer=signed.signer, part=part, statement=signed))
                )
        return effects

    def _recompute(self, part: int) -> list[Effect]:
        """Start the recomputation of results with all rows and commitments here."""
        dispute, plan, effects = self.disputes[part], self.plan, list[Effect]()
        for result in list(dispute.unmade.values()):
            if self._still_lacks_row(dispute, result):
                continue
            if result.rows in dispute.checks:
                del dispute.unmade[result.named]
                continue
            names = result.result.contributors
            if not self._matches_commitments(result.result):
                continue
            rows: list[GatheredRow] = []
            for name in names:
                row = self._row(part, name)
                if row is None:
                    dispute.lacks[result.named] = name
                    break
                rows.append(row)
            if len(rows) < len(names):
                continue
            dispute.checks[result.rows] = result
            del dispute.unmade[result.named]
            given = tuple(TaskRow(n, r.weight, r.payload, (n,)) for n, r in zip(names, rows, strict=True))
            job = f"combine/{plan.round}/{plan.attempt}/judge/{len(dispute.checks) - 1}/{part}"
            work = CombineRows(plan.round, part, plan.shares, given, False, plan.statistic, plan.liars)
            effects.append(RunTask(job, work))
        return effects

    def _still_lacks_row(self, dispute: PartCrossCheck, result: SignedResult) -> bool:
        """Whether the row that was missing at the last check is still missing: one lookup per row that comes."""
        name = dispute.lacks.get(result.named)
        return name is not None and self._row(result.result.part, name) is None

    # ---- rows ----------------------------------------------------------------------------------------------

    def _request_rows(self, part: int, again: bool) -> list[Effect]:
        """Request from the author first, then from owners that counted the row; if all are gone, from any peer."""
        dispute, plan, effects = self.disputes[part], self.plan, list[Effect]()
        if dispute.all_requested and not again:
            return []
        if again and self._rows_on_their_way(dispute):
            return []
        dispute.all_requested = True
        for name in sorted(self._authors_needed(part)):
            times = dispute.requests[name]
            if times >= ROW_REQUESTS_MAX or (times and not again) or self._row(part, name) is not None:
                continue
            counters = [r.statement.signer for r in self._by_owners(part) if name in r.result.contributors]
            holders = [p for p in dict.fromkeys([name, *counters]) if p != self.me and not self.gone(p)]
            holders = holders or [p for p in plan.recipients if p != self.me and not self.gone(p)]
            dispute.requests[name] += 1
            if holders:
                request = RowRequest(plan.round, plan.attempt, plan.trace, part, name)
                effects.append(Send(holders[times % len(holders)], request))
        return effects

    def _rows_on_their_way(self, dispute: PartCrossCheck) -> bool:
        """Rows are large: while some rows of a part come, the rest may come too, and the first may take a while."""
        if dispute.rows_came:
            dispute.rows_came, dispute.silent_for = False, ROWS_PATIENCE
            return True
        dispute.silent_for += 1
        if self.plan.juries and dispute.silent_for < ROWS_PATIENCE:
            return True
        dispute.silent_for = 0
        return False

    def _authors_needed(self, part: int) -> set[PeerId]:
        """Authors of the rows that unknown results name."""
        unknown = {r.rows: r.names for r in self.disputes[part].results if self._believes_signed(r) is None}
        return set[PeerId]().union(*unknown.values())

    def _matches_commitments(self, answered: OwnerResult) -> bool | None:
        """Whether its contributors sent these commitments to the local peer. None: a commitment is not here.

        The first commitment of an attempt counts, so the outcome never changes.
        """
        dispute, rows = self.disputes[answered.part], forms_of(answered).kind[0]
        if rows not in dispute.same:
            if rows in dispute.uncommitted and self.commit_of(dispute.uncommitted[rows]) is None:
                return None
            known: list[Commitment] = []
            for name in answered.contributors:
                commit = self.commit_of(name)
                if commit is None:
                    dispute.uncommitted[rows] = name
                    return None
                known.append(commit)
            dispute.same[rows] = rows_digest(known) == answered.rows
        return dispute.same[rows]

    def _row(self, part: int, peer: PeerId) -> GatheredRow | None:
        return self.row_of(part, peer) or self.disputes[part].rows.get(peer)

    # ---- failed owners -------------------------------------------------------------------------------------

    def lapses(self, part: int, stands: OwnerResult | None, late: bool) -> dict[PeerId, Lapse]:
        """Owners, not gone, that failed this part without a lie that could be proven."""
        found: dict[PeerId, Lapse] = {}
        signers = self.signers(part)
        for owner in self.plan.parallel_owners(part):
            if late and signers and owner not in signers and owner != self.me and not self.gone(owner):
                found[owner] = "withheld"
        for result in self._by_owners(part):
            known, names = self._believes_signed(result), result.names
            doubtful = late and known is None and self._opens(part) and not self.is_recomputed(result.result)
            if doubtful and not any(name in self.two_faced for name in names):
                found[result.statement.signer] = "unopened"
            elif known and stands is not None and names < set(stands.contributors):
                found[result.statement.signer] = "censored"
        found.pop(self.me, None)
        return found

    # ---- helpers -------------------------------------------------------------------------------------------

    def _opens(self, part: int) -> bool:
        return self.plan.recomputes_disputes(part, self.me)

    def _by_owners(self, part: int) -> list[SignedResult]:
        """Results without the jurors', which stand in no body."""
        takers, results = len(self.plan.owners_and_reserves(part)), self.disputes[part].results
        return [r for r in results if r.result.owner_index < takers] if self.plan.juries else results

    def _largest_first(self, part: int) -> list[SignedResult]:
        """By contributors; of equally large results those with known truth first, so that no wait adds nothing."""

        def place(result: SignedResult) -> tuple[int, bool, int]:
            unknown = (
                self.judges and self._believes_signed(result) is None and not self.is_recomputed(result.result)
            )
            return -len(result.result.contributors), unknown, result.result.owner_index

        return sorted(self._by_owners(part), key=place)

    def _report(self, fact: Fact) -> Emit:
        return Emit(replace(fact, round=self.plan.round, trace=self.plan.trace))
