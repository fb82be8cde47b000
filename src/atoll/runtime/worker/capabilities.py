"""Capabilities of a training worker: handlers that every run has, and those that genesis switches on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.base.ids import Digest, PeerId
from atoll.features.archive import worker as archive
from atoll.features.attribution import worker as attribution
from atoll.peer.settings import RunSettings
from atoll.verification.loss_scoring import worker as loss_scoring
from atoll.verification.malformed_updates import worker as malformed_updates
from atoll.verification.redundant_training import worker as redundant_training
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
    if settings.scored_share:
        enable_loss_scoring(worker)
    if settings.twinned_share:
        enable_redundant_training(worker)


def enable_sum_check(worker: TrainingWorker) -> None:
    """Wires are named by the root of their leaves, so that blocks of them can be opened."""
    check = SumCheckWorker(worker.context)
    worker.digests = check.names
    worker.register(check.handlers())
    worker.register(malformed_updates.handlers(worker.context, check.names.up))


def enable_replay_audit(worker: TrainingWorker, run: Digest, me: PeerId) -> None:
    worker.auditing = ReplayAuditWorker(worker.context, run, me, worker.run_audit_step)
    worker.register(worker.auditing.handlers())


def enable_loss_scoring(worker: TrainingWorker) -> None:
    _keep_sent_updates(worker, 2)  # the last agreed round and the current one
    worker.register(loss_scoring.handlers(worker.context))


def enable_redundant_training(worker: TrainingWorker) -> None:
    _keep_sent_updates(worker, 3)  # which members were paired is known one round later
    worker.register(redundant_training.handlers(worker.context))


def _keep_sent_updates(worker: TrainingWorker, rounds: int) -> None:
    worker.outbox = SentUpdateCache(worker.retention, rounds)
    worker.register(worker.outbox.handlers())
