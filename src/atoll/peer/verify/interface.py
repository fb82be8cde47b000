"""Interface of an optional verifier: all that the kernel knows of it, and all that a new one implements.

Driving contract of a machine: `resume` first, then `on_vertex` in order of rounds; other hooks in any order.
A hook raises PeerFault only for its sender. The peer carries out the effects in order before the next event.

    Verifier          the name and the two factories of one check; the composition root lists those it offers
    Ledger            the fold over vertices: checked members, checkers, meaning of reports (`policy/ledger.py`)
    VerifierMachine   one peer's side: it draws its work from the ledger, and emits facts

Invariants:
- A finding becomes a signed report for the members, and only a vertex that carries reports has consequences.
- The hooks of `VerifierMachine` do nothing by default. The kernel never asks which check it talks to.
Not responsible for: running tasks on tensors (`worker.py` of a check).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Fact, Payload, TaskDone, TaskFailed
from atoll.peer.membership.report_pool import ReportPool
from atoll.peer.round.owned_results import OwnedResults
from atoll.peer.settings import RunSettings
from atoll.peer.verify.evidence_store import ConvictionEvidenceStore
from atoll.policy.ledger import CapabilityLedger
from atoll.protocol.history.chain import VertexChain
from atoll.protocol.transfer.download import BlobDownload, BlobFetched, FetchFailed
from atoll.wire.messages.audits import ExhibitRequest, ExhibitResponse, MalformedRowShown
from atoll.wire.messages.round import RowRequest, RowResponse
from atoll.wire.messages.statements import AuditReport, BaseStatement
from atoll.wire.messages.vertex import VertexBody


@dataclass(frozen=True)
class VerifierContext:
    """What a peer hands to its verifier machines."""

    me: PeerId
    settings: RunSettings
    history: VertexChain
    pool: ReportPool  # also holds the ledgers
    evidence: ConvictionEvidenceStore = field(default_factory=ConvictionEvidenceStore)
    archived_rounds: int = 0  # newest rounds with rows that this computer keeps


class VerifierMachine:
    """One peer's side of one check; sans-IO. Times are the driver's."""

    @property
    def keeps_rows(self) -> bool:
        """True if it reads rows of own results in `on_round_closed`: audited rounds have them, others only then."""
        return False

    def resume(self, kept: Mapping[str, bytes], now: Seconds) -> list[Effect]:
        """Continue after a restart; `kept` holds the rows on disk."""
        return []

    def on_vertex(self, body: VertexBody, now: Seconds) -> list[Effect]:
        """The history has grown by this vertex."""
        return []

    def on_state(self, round: int) -> list[Effect]:
        """The local peer holds the agreed state of this round."""
        return []

    def on_round_closed(self, body: VertexBody, results: OwnedResults) -> list[Effect]:
        """The local round is closed; `results` leave memory after this call."""
        return []

    def on_report(self, by: PeerId, report: AuditReport, now: Seconds) -> list[Effect]:
        """A member's admissible report arrived, which no vertex carries yet."""
        return []

    def on_malformed_row(self, sender: PeerId, shown: MalformedRowShown) -> list[Effect]:
        """A member shows a row that it cannot decode. PeerFault if the claim is visibly false."""
        return []

    def on_row_request(self, sender: PeerId, wish: RowRequest, body: VertexBody | None) -> list[Effect]:
        """A member requests a row of a past round; `body` is that round's vertex, if it is in memory."""
        return []

    def on_row(self, sender: PeerId, message: RowResponse, payload: Payload | None) -> list[Effect] | None:
        """A row of a round arrived; None: this machine did not request it. PeerFault if it is another row."""
        return None

    def on_task_done(self, event: TaskDone | TaskFailed, now: Seconds) -> list[Effect]:
        """A task with this verifier's prefix in its name has ended."""
        return []

    def retransmit(self) -> list[Effect]:
        """Repeat unanswered requests; called with every heartbeat."""
        return []

    def serve(self, sender: PeerId, request: ExhibitRequest) -> list[Effect]:
        """Answer a checker that asks where an exhibit of the local peer lies."""
        return []

    def on_exhibit(
        self, sender: PeerId, response: ExhibitResponse, under_way: Mapping[Digest, BlobDownload], now: Seconds
    ) -> tuple[BlobDownload | None, list[Effect]]:
        """The sender names the blob of an exhibit: a new download, or one source more for one `under_way`."""
        return None, []

    def on_download(self, fact: BlobFetched | FetchFailed) -> list[Effect]:
        """A download has ended, perhaps one of this machine."""
        return []

    def abandoned(self) -> list[Digest]:
        """Downloads that this machine no longer needs; each is named once."""
        return []

    def report_of(self, fact: Fact) -> BaseStatement | None:
        """The report that the members get for this fact, if it is a finding of this machine."""
        return None


@dataclass(frozen=True)
class Verifier:
    """One check that a run can turn on."""

    name: str  # prefix of its tasks
    ledger: Callable[[RunSettings], CapabilityLedger[Any] | None] = lambda settings: None
    """None: the settings leave the check off, or it needs no ledger."""
    machine: Callable[[VerifierContext], VerifierMachine | None] = lambda context: None
    """None: the settings leave the check off, or the capability is no check."""
    title: str = ""  # heading of its outcomes in `atoll status` and `atoll verify`; empty: they show none
    worker: str = ""  # module with `handlers(context)` for its tasks, imported where the check is on
    updates_kept: int = 0  # own updates of so many rounds stay in memory, to be shown to judges
    by_name: bool = False  # `run.checks` turns it on, and no setting of its own

    def is_on(self, settings: RunSettings) -> bool:
        """Whether the settings turn on the ledger of this check."""
        return self.ledger(settings) is not None
