"""Validation of an agreed state: its held-out losses, measured by this peer's trainer between two rounds.

Not responsible for: what the losses mean (vertices decide).
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest
from atoll.peer.tasks import MeasureValidationLoss, ValidationLosses
from atoll.worker.context import BlobStore, Handlers, WorkerContext
from atoll.worker.evaluation import SAMPLES, measure_losses
from atoll.worker.trainer_commands import BeginValidation


def handlers(context: WorkerContext) -> Handlers:
    async def validate(work: MeasureValidationLoss) -> ValidationLosses:
        """Mean losses in nats and shares of right answers, one per set of data."""
        spec = context.genesis_spec()
        state = await context.find_state(work.state, spec)
        canary = _canary_path(context.blobs, spec.canary)
        if state is None:
            raise RunFailedError("E-VAL-01", "the state to validate is no longer on this disk")
        found = await measure_losses(context, BeginValidation(SAMPLES, canary), state.anchor_F)
        return ValidationLosses(found.losses, found.right)

    return {MeasureValidationLoss: validate}


def _canary_path(blobs: BlobStore, canary: Digest | UnsetType) -> str:
    """The path of the run's canary data; empty if it has none. RunFailedError if the blob has not arrived yet."""
    if canary is UNSET:
        return ""
    if not blobs.has_blob(canary):
        raise RunFailedError("E-VAL-03", "the canary data of this run has not arrived yet")
    return str(blobs.blob_path(canary))
