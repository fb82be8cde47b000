"""Results of an experiment: its outcome, and one record per synchronization."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from atoll.base.arguments import arguments
from atoll.base.ids import Digest
from atoll.training.experiment.plots import draw_outcomes


@dataclass(frozen=True)
class SyncRecord:
    """One synchronization of one fragment. Bytes and rounds count from the beginning, bytes for an average peer."""

    step: int
    fragment: int
    members: tuple[int, ...]
    counted: tuple[int, ...]  # members with an update in the result
    train_loss: float  # mean over the steps since the last record of the same members
    upload_bytes: float
    download_bytes: float
    batch: int = 0  # samples per step


@dataclass(frozen=True)
class ExperimentResult:
    val_loss: float  # of the agreed model, nats per token or image
    live_loss: float  # of the mean of live parameters before the last round: the result of a closing average
    upload_ratio: float | None  # reduction factor against ring data parallelism; None if no byte is sent
    download_ratio: float | None
    upload_bytes: float  # of an average peer, whole run
    download_bytes: float
    steps: int
    rounds: int  # synchronizations of the first fragment
    curve: tuple[tuple[int, float], ...]  # (step, validation loss)
    history: tuple[SyncRecord, ...]
    model_F: Tensor  # the agreed model as one flat vector
    state: (
        Digest | None
    )  # state hash of the same real run; None if real runs cannot do this, or members never agree
    method: str = "own recipe"  # name of the published method behind it

    @arguments("Outcome.plot", "E-PLOT-03")
    def plot(self, path: Path | str, name: str = "", **others: ExperimentResult) -> None:
        """Draw its losses over steps and bytes, beside those of others by name: done.plot("a.png", auto=other).

        Without a name it has the one of its method.
        """
        draw_outcomes({name or self.method: self, **others}, path)
