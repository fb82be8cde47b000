"""Robust aggregation: one vector out of many rows, some of which may be Byzantine.

Two engines carry every rule: Gram matrix (distances) and sorted columns (order statistics). Usable alone, with
numpy arrays and torch tensors, rows as one (n, d) or as a list of d-vectors:

    from atoll.training.robust import trimmed_mean
    trimmed_mean(updates, f=2, pre=["nnm"])  # or default(len(updates))(updates)

Invariants:
- Rows are never written to, results never hold a NaN, and nothing is drawn at random.
"""

from atoll.training.robust.default import default, liars_of
from atoll.training.robust.gram import GramMatrix, IncrementalGramRows, gram_of
from atoll.training.robust.rules import (
    RULES,
    aggregate,
    blended_caf,
    bulyan,
    caf,
    centered_clipping,
    clipped_caf,
    coordinate_median,
    geometric_median,
    krum,
    mda,
    meamed,
    mean,
    monna,
    multi_krum,
    outliers,
    scores,
    trimmed_mean,
    weighted_mean,
)
from atoll.training.robust.weights import arc, bucketing, clip, nnm

__all__ = [
    "RULES",
    "GramMatrix",
    "IncrementalGramRows",
    "aggregate",
    "arc",
    "blended_caf",
    "bucketing",
    "bulyan",
    "caf",
    "centered_clipping",
    "clip",
    "clipped_caf",
    "coordinate_median",
    "default",
    "geometric_median",
    "gram_of",
    "krum",
    "liars_of",
    "mda",
    "meamed",
    "mean",
    "monna",
    "multi_krum",
    "nnm",
    "outliers",
    "scores",
    "trimmed_mean",
    "weighted_mean",
]
