"""Options of an experiment beside the most common arguments: participation, workload, computation, evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.base.arguments import Whole, arguments
from atoll.base.workload import AdaptiveWorkloadPolicy
from atoll.training.models import loss_of
from atoll.training.recipe.gradient import Loss, Precision


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions:
    """Options of `atoll.experiment`. UsageError (E-EXP-01) for a value of the wrong kind."""

    effort: AdaptiveWorkloadPolicy | None = None
    """Length of rounds and batch sizes. Its `train_s` is not needed: every round lasts the same number of steps of
    the run's clock, and slow peers (`trouble`) take fewer."""
    evaluate_every: Whole = 0  # steps between validations; 0: only at the end
    order: Sequence[int] | None = None
    """Order in which owners add up rows; it decides the last bits. Peers are numbered by their data shares, in
    real runs by the order of joining. Real rows are added up in the order of ids."""
    only: Sequence[str] = ()  # patterns of exchanged tensors (`exchange/parameter_selection.py`)
    sample: int | float | None = None
    """Share (0.5) or number (10) of the peers that train in a round, drawn as in real rounds."""
    groups: Sequence[str] = ()  # data group of each peer, for `sample`
    records: Sequence[int] = ()
    """Weight of each peer's row per step, instead of its samples: its influence in a run that keeps records
    (specs/reputation.md). Constant in an experiment."""
    loss: Loss = loss_of  # training and validation loss
    precision: Precision | None = None  # of gradients; None: the recipe's (`recipe/gradient.py`)
    compiled: bool | None = None  # torch.compile for gradients; None: the recipe's
    feedback_precision: Precision = "fp32"  # of error feedback between rounds


ExperimentOptions.__init__ = arguments("atoll.ExperimentOptions", "E-EXP-01")(ExperimentOptions.__init__)
