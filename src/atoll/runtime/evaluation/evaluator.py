"""Evaluator of agreed states for built-in models: held-out loss, accuracy, predictions, text samples.

Invariants:
- The same held-out samples and the same seed every time, so that two rounds can be compared.
- The trainer's model and its random numbers are not touched.
Not responsible for: models of members' own loops (`atoll.checkpoints` gives their tensors).
"""

from __future__ import annotations

from pathlib import Path

import torch
from msgspec import UNSET, UnsetType
from torch import nn

from atoll.base.errors import PeerFault, UsageError
from atoll.base.ids import ATTACHED, Digest
from atoll.peer.settings import settings_of_run
from atoll.runtime.evaluation.facts import PREDICTIONS_MAX, StateEvaluated
from atoll.runtime.own_data import COPY
from atoll.runtime.publishing.checkpoints import AgreedCheckpoint
from atoll.runtime.storage.stored_history import blob_id_of, kept_in, read_vertex
from atoll.runtime.training_spec import parse_training_spec
from atoll.training.data import Data, data_from_blob, load_data, validation
from atoll.training.exchange.layout import unflatten
from atoll.training.models import generate_sample, misfit, task_of
from atoll.training.models.frozen_base import build_with_base
from atoll.training.recipe.state import state_from_bytes
from atoll.training.spec import local_data

BATCH = 64  # samples; fits any device that can train
SEED = 1  # of text samples


class CheckpointEvaluator:
    """The model and the held-out data of the run in this folder."""

    def __init__(self, folder: Path, data: str = "", threads: int = 1) -> None:
        """`data`: held-out data of the user's own; empty: those of the run. UsageError if either is missing."""
        self.folder = folder
        torch.set_num_threads(threads)  # of this process
        with kept_in(folder) as kept:
            genesis = read_vertex(kept, folder, -1)[1]
        try:
            self.learning = parse_training_spec(settings_of_run(genesis))
        except PeerFault as fault:
            raise _no_model(fault.what, folder) from None
        recipe = self.learning.recipe
        if recipe.model == ATTACHED:
            raise _no_model("its members train models of their own", folder)
        self.tokenizer = self._blob(self.learning.tokenizer)
        self.data = self._held_out(data)
        if problem := misfit(recipe.model, self.data):
            raise UsageError("E-EVA-02", problem, fix="choose other data: atoll evaluate --data PATH")
        base = self._blob(self.learning.base)
        if self.learning.base is not UNSET and not base:
            raise _not_here("the base of its model", folder)
        self.model: nn.Module = build_with_base(recipe.model, recipe.seed, base)[0].eval()

    @property
    def is_text(self) -> bool:
        return task_of(self.learning.recipe.model) == "text"

    @torch.no_grad()
    def evaluate(self, checkpoint: AgreedCheckpoint, samples: int, prompt: str, length: int) -> StateEvaluated:
        """Measure a state on at most `samples`; a text model continues the prompt by `length` tokens."""
        layout, seq_len = self.learning.layout, self.learning.recipe.seq_len
        state = state_from_bytes(checkpoint.state(), layout)
        unflatten(state.anchor_F, state.counters_K, self.model, layout)
        loss_sum, right, targets_seen, samples_seen = 0.0, 0, 0, 0
        predictions: list[tuple[int, int]] = []
        for inputs, targets in validation(self.data, samples, BATCH, seq_len):
            scores, wanted = self.model(inputs), targets.reshape(-1)
            flat = scores.reshape(-1, scores.shape[-1])
            loss_sum += float(nn.functional.cross_entropy(flat, wanted, reduction="sum"))
            found = flat.argmax(1)
            right += int((found == wanted).sum())
            targets_seen, samples_seen = targets_seen + wanted.numel(), samples_seen + len(inputs)
            if not self.is_text:
                predictions += zip(wanted.tolist(), found.tolist(), strict=True)
        text = ""
        if self.is_text and length:
            text = generate_sample(self.model, prompt, length, SEED, self.tokenizer)
        return StateEvaluated(
            round=checkpoint.body.round,
            trace=checkpoint.body.parent.hex()[:16],
            trained=checkpoint.body.trained,
            state=checkpoint.body.state,
            loss=loss_sum / targets_seen,
            accuracy=right / targets_seen,
            samples=samples_seen,
            prompt=prompt if text else "",
            text=text,
            predictions=tuple(predictions[:PREDICTIONS_MAX]),
        )

    def _held_out(self, data: str) -> Data:
        learning, folder = self.learning, self.folder
        try:
            if data:
                return load_data(data, self.tokenizer)
            if blob := self._blob(learning.data_blob):
                return data_from_blob(blob)
            if (built_in := local_data(learning)) is not None:
                return built_in
            if (folder / COPY).exists():
                return load_data(str(folder / COPY))
        except (ValueError, PeerFault) as why:
            raise UsageError(
                "E-EVA-02", f"no held-out data: {why}", fix="choose other data: atoll evaluate --data PATH"
            ) from None
        raise _not_here("the run's data", folder)

    def _blob(self, name: Digest | UnsetType) -> bytes:
        """Blob of the run; empty if the run has none or this folder does not hold it unchanged."""
        if name is UNSET:
            return b""
        path = self.folder / "blobs" / name.hex()
        return path.read_bytes() if path.exists() and blob_id_of(path) == name else b""


def _no_model(why: str, folder: Path) -> UsageError:
    return UsageError(
        "E-EVA-01",
        f"the model of the run in {folder} cannot be built here: {why}",
        cause="only built-in models are named in a run; code does not travel",
        fix="in Python, with your model: atoll.checkpoints(FOLDER), see help(atoll.checkpoints)",
    )


def _not_here(what: str, folder: Path) -> UsageError:
    return UsageError(
        "E-EVA-03",
        f"{what} is not in {folder}",
        cause="an observer fetches no data, and a member has not all of it in its first minute",
        fix="atoll evaluate --data PATH, with held-out data of the same form; or in the folder of a trainer",
    )
