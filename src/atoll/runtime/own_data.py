"""A member's own training data in place of the run's: what they must fit, and the copy that its trainer reads.

Invariants:
- Own data are no blob: they have no name in the run, and no message asks for them or carries them.
- Before the first step they have the form of the run's: the same tokenizer, or the same images and classes.
Not responsible for: what updates tell about the data.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET

from atoll.base.errors import UsageError
from atoll.peer.settings import RunSettings
from atoll.runtime.storage.atomic_files import write_durably
from atoll.training.data import Data, data_blob, epoch_samples, load_data
from atoll.training.data.pictures import has_images
from atoll.training.data.records import COLUMN
from atoll.training.data.text import NUMBERED, TextDataset
from atoll.training.data.tokens import read_tokenizer
from atoll.training.models import label_of, misfit, spec_of
from atoll.training.models.names import BYTES
from atoll.training.spec import TrainingSpec

COPY = "own-data.safetensors"  # in the peer's folder: a member that comes back trains on it again


class OwnData(NamedTuple):
    """Where a member's own data lie. Empty: in the copy of an earlier start, else it has none."""

    source: str = ""
    column: str = COLUMN


def check_rules(settings: RunSettings) -> None:
    """Raise UsageError if members of this run check each other's training on data that all of them hold."""
    rules = {
        "replay audits (run.audit_rate = 0)": settings.audited_share,
        "loss scores (run.score_rate = 0)": settings.scored_share,
        "redundant training (run.twin_rate = 0)": settings.twinned_share,
        "validation (run.validate_every = 0)": settings.validated is not None,
    }
    if found := [name for name, on in rules.items() if on]:
        raise UsageError(
            "E-DATA-08",
            f"this run cannot train on data of a member's own: it has {', '.join(found)}",
            cause="these checks use samples that all members hold, and own data never leave their member",
            fix='join without own data (--data, node.data); or found a run with run.trust = "private", or with the '
            "settings in brackets",
        )


def copy_own_data(own: OwnData, learning: TrainingSpec, tokenizer: Path | None, folder: Path) -> Path:
    """Check own data against the run, and write the copy that the trainer reads. Raises AtollError.

    `tokenizer`: the run's, if it has one.
    """
    try:
        if problem := _tokens_problem(own, learning):
            raise ValueError(problem)
        data = load_data(own.source, read_tokenizer(tokenizer) if tokenizer else b"", own.column)
        if problem := misfit(learning.recipe.model, data).partition("; set")[0] or _classes_problem(
            own, learning.recipe.model, data
        ):
            raise ValueError(problem)
        epoch_samples(data, learning.recipe.seq_len)
    except ValueError as why:
        raise UsageError(
            "E-DATA-09",
            f"these data do not fit this run: {why}",
            cause=f"it trains {label_of(learning.recipe.model)} on data of one form: {_form(learning)}",
            fix="name data of that form (--data, node.data; data.column where records hold the text), or join "
            "without: this member then trains on the run's data",
        ) from None
    write_durably(folder / COPY, [data_blob(data)])
    return folder / COPY


def _tokens_problem(own: OwnData, learning: TrainingSpec) -> str:
    """Reason why tokens of these data would mean something else than in the run; empty if they do not."""
    are_numbers = Path(own.source).suffix in NUMBERED
    if learning.tokenizer is not UNSET:
        return f"{own.source} holds token numbers, and the run's tokenizer reads text" if are_numbers else ""
    known = spec_of(learning.recipe.model).numbers.get("v", BYTES)
    if known != BYTES and not are_numbers:
        return f"the run has token numbers without a tokenizer, and {own.source} holds none"
    return ""


def _classes_problem(own: OwnData, model: str, data: Data) -> str:
    """Folders are numbered by the order of their names, so a missing one would move the others."""
    path, classes = Path(own.source), spec_of(model).numbers.get("c", 10)
    if isinstance(data, TextDataset) or not path.is_dir() or not has_images(path):
        return ""
    found = 1 + int(data.train_labels.max())
    return "" if found == classes else f"{model} has {classes} classes, and {path} has {found} folders of images"


def _form(learning: TrainingSpec) -> str:
    spec = spec_of(learning.recipe.model)
    if spec.task == "images":
        images = f"images of {spec.numbers['i']} channels" if "i" in spec.numbers else "gray images of 28 x 28"
        return f"{images}, in {spec.numbers.get('c', 10)} classes"
    numbers = "bytes of text" if spec.numbers["v"] == BYTES else "token numbers"
    form = numbers if learning.tokenizer is UNSET else "text for its tokenizer"
    return f"{form}, in windows of {learning.recipe.seq_len}"
