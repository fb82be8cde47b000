"""Capabilities of a training worker: handlers that every run has, and those that genesis switches on."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from atoll.base.ids import Digest, PeerId
from atoll.capabilities import CAPABILITIES
from atoll.features.archive import worker as archive
from atoll.features.attribution import worker as attribution
from atoll.peer.settings import RunSettings
from atoll.peer.verify.interface import Verifier
from atoll.training.recipe.error_feedback import FEEDBACK_DTYPES
from atoll.verification.malformed_updates import worker as malformed_updates
from atoll.verification.replay_audit.worker import ReplayAuditWorker
from atoll.verification.state_validation import worker as state_validation
from atoll.verification.sum_check.worker import SumCheckWorker
from atoll.verification.update_cache import SentUpdateCache
from atoll.worker.context import Handlers, WorkerContext

if TYPE_CHECKING:
    from atoll.runtime.worker.training_worker import TrainingWorker

ALWAYS = (archive, attribution, malformed_updates, state_validation)


def handlers_of_every_run(context: WorkerContext) -> Handlers:
    return {task: handler for each in ALWAYS for task, handler in each.handlers(context).items()}


def enable_capabilities(worker: TrainingWorker, settings: RunSettings, run: Digest, me: PeerId) -> None:
    """Enable what the settings in genesis ask for."""
    if settings.opened is not None:
        enable_sum_check(worker)
    if settings.audited_share:
        enable_replay_audit(worker, run, me)
    enable_checks(worker, [check for check in CAPABILITIES.verifiers if check.is_on(settings)])


def enable_checks(worker: TrainingWorker, checks: Sequence[Verifier]) -> None:
    """Register the tasks of these checks, and keep sent updates as long as one of them may show them."""
    if rounds := max((check.updates_kept for check in checks), default=0):
        worker.outbox = SentUpdateCache(worker.retention, rounds)
        worker.register(worker.outbox.handlers())
    for check in checks:
        if check.worker:
            worker.register(import_module(check.worker).handlers(worker.context))


def enable_sum_check(worker: TrainingWorker) -> None:
    """Wires are named by the root of their leaves, so that blocks of them can be opened."""
    check = SumCheckWorker(worker.context)
    worker.digests = check.names
    worker.register(check.handlers())
    worker.register(malformed_updates.handlers(worker.context, check.names.up))


def enable_replay_audit(worker: TrainingWorker, run: Digest, me: PeerId) -> None:
    worker.mine.kept_as = FEEDBACK_DTYPES["fp32"]  # auditors compute error feedback again
    worker.auditing = ReplayAuditWorker(worker.context, run, me, worker.run_audit_step)
    worker.register(worker.auditing.handlers())
