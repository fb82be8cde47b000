"""Trainer protocol: commands and answers between a peer and its trainer, as frames over a pipe.

The parent sends a `Command` and gets one `Answer` to each, with `TrainerHeartbeat`s while it waits;
`CancelTraining` has no answer. An attached loop (`runtime/embed/peer_process.py`) uses some of the same types.
Frames never leave the computer and both ends run one version, so these types may change with every release.
"""

from __future__ import annotations

import struct
from typing import BinaryIO, Literal, NamedTuple

import msgspec

from atoll.base.ids import Digest
from atoll.training.exchange.layout import ModelLayout
from atoll.training.recipe.inner import Inner
from atoll.training.recipe.lr_position import ScheduleHorizon
from atoll.training.recipe.merge import Merge as How
from atoll.verification.replay_audit.replay import ChainLink, TrainingAssignment
from atoll.verification.replay_audit.tolerance import TrainingProfile
from atoll.verification.replay_audit.trainer_commands import (
    AuditStepCompleted,
    JudgeSegment,
    NextAuditStep,
    WriteSegmentExhibit,
)
from atoll.wire.data_ranges import DataClaim, DataRange, RoundDataShards
from atoll.worker.trainer_commands import (
    BeginReplay,
    BeginScoring,
    BeginValidation,
    ContinueMeasurement,
    LossesMeasured,
    TrainerSpec,
    Why,
)

FRAME_MAX = 2**20  # bytes of one command or answer; tensors never travel this way
LENGTH = struct.Struct("<I")

Taken = How | Literal["shift", "afresh"]


# ---- Commands ----------------------------------------------------------------------------------------------


class TrainSteps(msgspec.Struct, frozen=True, tag="TrainSteps"):
    job: int
    steps: int
    until: float | None  # time.monotonic() of this computer; a step that would end later does not begin
    cursor: int
    shard: int
    shards: int
    global_step: int  # or tokens, if there is a horizon: a position of training/recipe/lr_position.py
    ahead: int | None = None
    """Steps that the trainer takes by itself after the hand-over; a merge frees all steps of the next round.

    0: it waits for the merge. None: it waits for the next `TrainSteps`, also after a merge.
    """
    assignment: TrainingAssignment | None = None  # with it the trainer keeps a chain of these steps for audits
    held: tuple[int, ...] = ()  # rounds with a chain that is still to be shown
    apart: bool = False  # samples from half an epoch ahead: the run continues without these steps
    batch: int = 0  # samples per step; 0: those of the spec
    inner: Inner | None = None  # optimizer numbers from now on; None: inner and horizon stay as they are
    horizon: ScheduleHorizon | None = None
    span: tuple[int, int] | None = None  # values that this round exchanges; None: all
    data: RoundDataShards | None = None
    """For a loop that reads the shared data set: where each shard goes on. None: as before."""


class CancelTraining(msgspec.Struct, frozen=True, tag="CancelTraining"):
    job: int  # job to cancel: a late cancel must not stop the next job
    ahead: bool = False  # the trainer may continue by itself, as after all steps
    stands: bool = False  # the trainer waits for the next `TrainSteps`, also after a merge


class SetParameters(msgspec.Struct, frozen=True, tag="SetParameters"):
    counters: tuple[int, ...]


class MergeAnchorIntoParameters(msgspec.Struct, frozen=True, tag="MergeAnchorIntoParameters"):
    """x[lo:hi] merges the new anchor in the mailbox. `shift`: the mailbox is added. `afresh`: x becomes the mailbox
    and all steps are dropped."""

    lo: int
    hi: int
    how: Taken


class EvaluateModel(msgspec.Struct, frozen=True, tag="EvaluateModel"):
    samples: int
    given: bool = False  # evaluate the parameters behind x in the mailbox instead of x


class SampleText(msgspec.Struct, frozen=True, tag="SampleText"):
    prompt: str
    n: int
    seed: int
    given: bool = False


class SaveInner(msgspec.Struct, frozen=True, tag="SaveInner"):
    pass


class LoadInner(msgspec.Struct, frozen=True, tag="LoadInner"):
    size_bytes: int  # 0: fresh inner state


Command = (
    TrainSteps
    | CancelTraining
    | SetParameters
    | MergeAnchorIntoParameters
    | EvaluateModel
    | SampleText
    | SaveInner
    | LoadInner
    | WriteSegmentExhibit
    | JudgeSegment
    | NextAuditStep
    | BeginValidation
    | BeginScoring
    | BeginReplay
    | ContinueMeasurement
)


# ---- Answers -----------------------------------------------------------------------------------------------


class TrainerReady(msgspec.Struct, frozen=True, tag="TrainerReady"):
    layout: ModelLayout
    room_bytes: int


class TrainerHeartbeat(msgspec.Struct, frozen=True, tag="TrainerHeartbeat"):
    """A sign of progress, sent between steps and never by a separate thread."""

    steps: int  # of this job so far
    loss: float  # of the last step
    step_s: float


class SamplesRead(NamedTuple):
    name: Digest  # of the data set and of its order
    ranges: tuple[DataRange, ...]


class StepsTrained(msgspec.Struct, frozen=True, tag="StepsTrained"):
    steps: int  # since the last hand-over of x
    samples: int
    tokens: int
    loss: float | None  # mean over the steps; None if the deadline allowed no step
    seconds: float  # duration of the steps
    cursor: int
    counters: tuple[int, ...]
    links: tuple[ChainLink, ...] = ()  # of the requested chain
    profile: TrainingProfile | None = None
    notice: str = ""  # deviation from the command and its reason; sent once
    read: SamplesRead | None = None  # of the shared data set, behind the steps; None: the loop reads none
    data: DataClaim | None = None  # the same with earlier ones that no vertex counts, as the peer claims them


class ModelEvaluated(msgspec.Struct, frozen=True, tag="ModelEvaluated"):
    loss: float  # nats per token or image
    accuracy: float  # share of tokens or images guessed right


class TextSampled(msgspec.Struct, frozen=True, tag="TextSampled"):
    text: str


class InnerStateInMailbox(msgspec.Struct, frozen=True, tag="InnerStateInMailbox"):
    size_bytes: int


class TrainerCommandCompleted(msgspec.Struct, frozen=True, tag="TrainerCommandCompleted"):
    """The command was carried out; it has no other answer."""


class CommandFailed(msgspec.Struct, frozen=True, tag="CommandFailed"):
    why: Why
    what: str


Answer = (
    TrainerReady
    | TrainerHeartbeat
    | StepsTrained
    | ModelEvaluated
    | TextSampled
    | InnerStateInMailbox
    | AuditStepCompleted
    | LossesMeasured
    | TrainerCommandCompleted
    | CommandFailed
)


# Built while one thread runs: msgspec shows other threads the tables of a type before they are filled, and a
# trainer reads its spec in one thread and its commands in another.
SPEC = msgspec.msgpack.Decoder(TrainerSpec)
COMMAND: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


# ---- Frames ------------------------------------------------------------------------------------------------


def read_frame(source: BinaryIO) -> bytes | None:
    """The next frame, or None at the end of the pipe."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = source.read(size)
    return body if len(body) == size else None
