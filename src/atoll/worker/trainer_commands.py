"""Trainer commands that capabilities send: loss measurements and replays in a second model, one batch at a time.

The peer sends them to the trainer process between two rounds. `runtime/trainer/protocol.py` has all other commands
and the framing. Both ends run the same version, so these types may change with every release.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest
from atoll.training.recipe.gradient import PLAIN, ComputeOptions
from atoll.training.recipe.inner import Inner
from atoll.training.recipe.lr_position import ScheduleHorizon

Why = Literal["crashed", "hung", "memory", "diverged", "refused"]


class TrainerCommandError(RunFailedError):
    """A trainer could not carry out a command. `alive`: the process still takes commands (after a `write_x`)."""

    def __init__(self, why: Why, what: str, *, cause: str = "", fix: str = "", alive: bool = False) -> None:
        self.why, self.alive = why, alive
        codes = {"crashed": 1, "hung": 2, "memory": 3, "diverged": 4, "refused": 5}
        super().__init__(f"E-TRN-{codes[why]:02d}", what, cause=cause, fix=fix)


class TrainerSpec(msgspec.Struct, frozen=True):
    """What a trainer process is started with."""

    model: str  # name of a built-in model
    seed: int  # of the first weights and of the order of the data
    data: str  # argument of training.data.load_data: "stdlib" or a path
    batch: int  # samples per step
    seq_len: int
    inner: Inner
    threads: int = 1  # threads_per_trainer(); too many cost up to 8x CPU per step
    device: str = "cpu"
    patience_s: float = 30.0  # silence during training that counts as hung; rises with the step time
    first_patience_s: float = 300.0  # the same before the first sign of life: loading, compiling, one huge step
    horizon: ScheduleHorizon | None = None  # of the learning rate; None: the rate follows steps
    base: str = ""  # path of the blob of frozen parameters (training/models/frozen_base.py); empty: all train
    computing: ComputeOptions = PLAIN  # of gradients
    own_data: bool = False  # no other member reads these data, so all samples are for this one


class BeginValidation(msgspec.Struct, frozen=True, tag="BeginValidation"):
    """Measure held-out losses of the parameters behind x in the mailbox, in a second model: first batch."""

    samples: int  # of each set
    canary: str = ""  # path of a blob with a second set of data; empty: none


class BeginScoring(msgspec.Struct, frozen=True, tag="BeginScoring"):
    """Measure losses on drawn samples of the training data: first those that one peer took, then others."""

    drawn: Digest
    shard: int
    shards: int
    cursor: int
    samples: int  # that the peer took from the cursor on
    dealt: int  # position before which all samples are dealt out


class BeginReplay(msgspec.Struct, frozen=True, tag="BeginReplay"):
    """Replay the steps of another peer's round in a second model, from the parameters behind x in the mailbox.

    The first step is taken at once. After the last one the mailbox holds the update.
    """

    shard: int
    shards: int
    cursor: int
    steps: int
    batch: int
    position: int  # of training/recipe/lr_position.py
    inner: Inner
    horizon: ScheduleHorizon | None = None


class ContinueMeasurement(msgspec.Struct, frozen=True, tag="ContinueMeasurement"):
    """The next batch of a measurement, or the next step of a replay."""


class LossesMeasured(msgspec.Struct, frozen=True, tag="LossesMeasured"):
    """One batch is done. The last one brings losses in nats: a mean per set of data, or one per sample."""

    done: bool
    losses: tuple[float, ...] = ()
    right: tuple[float, ...] = ()  # share of tokens or images guessed right, per set


Look = BeginValidation | BeginScoring | BeginReplay
