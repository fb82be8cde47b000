"""Registry of verifiers: one loop per event over the checks that the run has turned on.

Invariants:
- Machines are called in the order of the list of verifiers, the same in every process.
- A finding of a machine becomes a report to the members here and nowhere else (`report_of`).
Not responsible for: judging, signing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from msgspec import UNSET

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds, one_line
from atoll.base.machine import Effect, Emit, Payload, RunTask, TaskDone, TaskFailed
from atoll.peer.events import MemberAccused
from atoll.peer.membership.report_pool import ReportPool
from atoll.peer.round.owned_results import OwnedResults
from atoll.peer.settings import RunSettings
from atoll.peer.verify.evidence_store import ROW, ConvictionEvidenceStore
from atoll.peer.verify.interface import Verifier, VerifierContext, VerifierMachine
from atoll.policy.ledger import LedgerSet
from atoll.protocol.history.chain import VertexChain
from atoll.protocol.transfer.download import BlobDownload, BlobFetched, FetchFailed
from atoll.protocol.transfer.tasks import DropBlob
from atoll.wire.messages.audits import ExhibitRequest, ExhibitResponse, MalformedRowShown
from atoll.wire.messages.round import RowRequest, RowResponse
from atoll.wire.messages.statements import AuditReport, BaseStatement
from atoll.wire.messages.vertex import VertexBody

M = TypeVar("M", bound=VerifierMachine)


def ledgers_of(verifiers: Sequence[Verifier], settings: RunSettings) -> LedgerSet:
    """The ledgers that this run needs. PeerFault if it names a check that this version does not have."""
    if problem := unknown_check(verifiers, settings):
        raise PeerFault("", problem)
    return LedgerSet(ledger for v in verifiers if (ledger := v.ledger(settings)) is not None)


def unknown_check(verifiers: Sequence[Verifier], settings: RunSettings) -> str:
    """What is wrong with the checks that these settings name; empty if all are known."""
    known = sorted(verifier.name for verifier in verifiers if verifier.by_name)
    names = [] if settings.checks is UNSET else [check.check for check in settings.checks]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        return (
            f"this version of atoll has no check {one_line(unknown)}; it has {', '.join(known) or 'none to name'}"
        )
    return "it names a check twice" if len(set(names)) < len(names) else ""


class VerifierRegistry:
    """The checks of one peer; empty until `start`."""

    def __init__(self, me: PeerId, verifiers: Sequence[Verifier]) -> None:
        self.me, self.verifiers = me, tuple(verifiers)
        self.names = frozenset(verifier.name for verifier in verifiers)
        self.machines: dict[str, VerifierMachine] = {}
        self.evidence = ConvictionEvidenceStore()
        self.archived_rounds = 0  # newest rounds with rows that this computer keeps; set before genesis is known

    def start(self, settings: RunSettings, history: VertexChain, pool: ReportPool) -> None:
        """Create the machines; genesis is known."""
        context = VerifierContext(self.me, settings, history, pool, self.evidence, self.archived_rounds)
        built = ((verifier.name, verifier.machine(context)) for verifier in self.verifiers)
        self.machines = {name: machine for name, machine in built if machine is not None}

    def find(self, kind: type[M]) -> M | None:
        """The machine of this class, if the run has it."""
        return next((machine for machine in self.machines.values() if isinstance(machine, kind)), None)

    @property
    def keeps_rows(self) -> bool:
        """True if a machine reads rows of own results after the round."""
        return any(machine.keeps_rows for machine in self.machines.values())

    # ---- events --------------------------------------------------------------------------------------------

    def resume(self, kept: Mapping[str, bytes], now: Seconds) -> list[Effect]:
        started = self.evidence.start(kept.get(ROW, b""))
        return started + [e for machine in self.machines.values() for e in machine.resume(kept, now)]

    def on_vertex(self, body: VertexBody, now: Seconds) -> list[Effect]:
        return [e for machine in self.machines.values() for e in machine.on_vertex(body, now)]

    def on_state(self, round: int) -> list[Effect]:
        return [e for machine in self.machines.values() for e in machine.on_state(round)]

    def on_round_closed(self, body: VertexBody, results: OwnedResults) -> list[Effect]:
        return [e for machine in self.machines.values() for e in machine.on_round_closed(body, results)]

    def on_report(self, by: PeerId, report: AuditReport, now: Seconds) -> list[Effect]:
        return [e for machine in self.machines.values() for e in machine.on_report(by, report, now)]

    def on_malformed_row(self, sender: PeerId, shown: MalformedRowShown) -> list[Effect]:
        return [e for machine in self.machines.values() for e in machine.on_malformed_row(sender, shown)]

    def on_row_request(self, sender: PeerId, wish: RowRequest, body: VertexBody | None) -> list[Effect]:
        return [e for machine in self.machines.values() for e in machine.on_row_request(sender, wish, body)]

    def on_row(self, sender: PeerId, message: RowResponse, payload: Payload | None) -> list[Effect] | None:
        """At most one machine waits for rows of a past round."""
        taken = (machine.on_row(sender, message, payload) for machine in self.machines.values())
        return next((effects for effects in taken if effects is not None), None)

    def on_task_done(self, event: TaskDone | TaskFailed, now: Seconds) -> list[Effect]:
        machine = self.machines.get(event.job.partition("/")[0])
        return machine.on_task_done(event, now) if machine is not None else []

    def retransmit(self) -> list[Effect]:
        return [e for machine in self.machines.values() for e in machine.retransmit()]

    # ---- exhibits ------------------------------------------------------------------------------------------

    def serve(self, sender: PeerId, request: ExhibitRequest) -> list[Effect]:
        return [e for machine in self.machines.values() for e in machine.serve(sender, request)]

    def on_exhibit(
        self, sender: PeerId, response: ExhibitResponse, under_way: Mapping[Digest, BlobDownload], now: Seconds
    ) -> tuple[BlobDownload | None, list[Effect]]:
        """At most one machine waits for an exhibit."""
        for machine in self.machines.values():
            fetch, effects = machine.on_exhibit(sender, response, under_way, now)
            if fetch is not None or effects:
                return fetch, effects
        return None, []

    def on_download(self, fact: BlobFetched | FetchFailed) -> list[Effect]:
        return [e for machine in self.machines.values() for e in machine.on_download(fact)]

    def abandoned(self) -> dict[Digest, RunTask]:
        """Downloads that no machine needs, each with the task that drops its chunks."""
        over = {blob: name for name, machine in self.machines.items() for blob in machine.abandoned()}
        return {blob: RunTask(f"{name}/drop/{blob.hex()}", DropBlob(blob)) for blob, name in over.items()}

    # ---- reports -------------------------------------------------------------------------------------------

    def report_of(self, effect: Effect) -> BaseStatement | None:
        """The report that the members get, if this effect is a finding."""
        if not isinstance(effect, Emit):
            return None
        if isinstance(effect.fact, MemberAccused):
            return effect.fact.statement
        reports = (machine.report_of(effect.fact) for machine in self.machines.values())
        return next((report for report in reports if report is not None), None)
