"""What a peer and its trainer say to each other, frame by frame over a pipe.

The parent asks with a `Command` and gets one `Answer` to each, and a `Beat` now and then while it waits;
`CancelTraining`
alone has no answer. An attached loop (`runtime/embed/peer_process.py`) uses some of the same words.
Never leave the computer, and both ends are of one version: these words may change with every release.
"""

from __future__ import annotations

import struct
from typing import BinaryIO, Literal

import msgspec

from atoll.training.exchange.layout import ModelLayout
from atoll.training.recipe.inner import Inner
from atoll.training.recipe.lr_position import ScheduleHorizon
from atoll.training.recipe.merge import Merge as How
from atoll.verification.replay_audit.replay import ChainLink, TrainingAssignment
from atoll.verification.replay_audit.tolerance import TrainingProfile
from atoll.verification.replay_audit.trainer_commands import AuditProgress, JudgeSegment, NextAuditStep, ShowSegment
from atoll.worker.trainer_commands import (
    BeginReplay,
    BeginScoring,
    BeginValidation,
    LossesMeasured,
    NextBatch,
    TrainerSpec,
    Why,
)

FRAME_MAX = 2**20  # bytes of one command or answer; tensors never travel this way
LENGTH = struct.Struct("<I")

Taken = How | Literal["shift", "afresh"]


# ---- What the parent says ----------------------------------------------------------------------------------


class TrainSteps(msgspec.Struct, frozen=True, tag="Train"):
    job: int
    steps: int
    until: float | None  # time.monotonic() of this machine: no step begins that would end later
    cursor: int
    shard: int
    shards: int
    global_step: int  # or tokens, where there is a horizon: a position of training/recipe/lr_position.py
    ahead: int | None = None
    """Steps that it goes on afterwards, until something is merged, which then frees all of the next round's; these
    count. 0: it stands until then. None: whatever is merged, it waits to be asked."""
    assignment: TrainingAssignment | None = None  # keep a chain of these steps: the round may be audited
    held: tuple[int, ...] = ()  # rounds whose chain is still to be shown
    apart: bool = False  # from half an epoch ahead: the run goes on without these steps
    batch: int = 0  # samples of a step; 0: as the spec has it
    inner: Inner | None = None  # with these numbers from now on; None: as before, and so is the horizon
    horizon: ScheduleHorizon | None = None


class CancelTraining(msgspec.Struct, frozen=True, tag="Cancel"):
    job: int  # a cancel that comes too late must not stop the next job
    ahead: bool = False  # only these steps are over: it may go on from there, as after all of them
    stands: bool = False  # nor does it go on from there, whatever is merged, until it is asked


class WriteParameters(msgspec.Struct, frozen=True, tag="WriteX"):
    counters: tuple[int, ...]


class MergeAnchor(msgspec.Struct, frozen=True, tag="Merge"):
    """x[lo:hi] takes in the new anchor that lies in the mailbox there; `shift`: what lies there is added; `afresh`:
    x becomes it, and nothing is left of any steps."""

    lo: int
    hi: int
    how: Taken


class EvaluateModel(msgspec.Struct, frozen=True, tag="Evaluate"):
    samples: int
    given: bool = False  # not x, but the parameters behind it in the mailbox


class SampleText(msgspec.Struct, frozen=True, tag="Sample"):
    prompt: str
    n: int
    seed: int
    given: bool = False


class SaveInner(msgspec.Struct, frozen=True, tag="SaveInner"):
    pass


class LoadInner(msgspec.Struct, frozen=True, tag="LoadInner"):
    size_bytes: int  # 0: begin afresh


Command = (
    TrainSteps
    | CancelTraining
    | WriteParameters
    | MergeAnchor
    | EvaluateModel
    | SampleText
    | SaveInner
    | LoadInner
    | ShowSegment
    | JudgeSegment
    | NextAuditStep
    | BeginValidation
    | BeginScoring
    | BeginReplay
    | NextBatch
)


# ---- What the trainer says ---------------------------------------------------------------------------------


class TrainerReady(msgspec.Struct, frozen=True, tag="Ready"):
    layout: ModelLayout
    room_bytes: int


class TrainerHeartbeat(msgspec.Struct, frozen=True, tag="Beat"):
    """A sign of progress, made between steps and never by a thread of its own."""

    steps: int  # of this job so far
    loss: float  # of the last step
    step_s: float


class StepsTrained(msgspec.Struct, frozen=True, tag="Trained"):
    steps: int  # since x was handed over last
    samples: int
    tokens: int
    loss: float | None  # mean over the steps; None if the deadline left no time for one
    seconds: float  # that they took
    cursor: int
    counters: tuple[int, ...]
    links: tuple[ChainLink, ...] = ()  # of the chain that was asked for
    profile: TrainingProfile | None = None
    notice: str = ""  # what it does otherwise than it was asked to, and why; said once


class ModelEvaluated(msgspec.Struct, frozen=True, tag="Evaluated"):
    loss: float  # nats per token or image
    accuracy: float  # share of tokens or images guessed right


class TextSampled(msgspec.Struct, frozen=True, tag="Sampled"):
    text: str


class InnerSaved(msgspec.Struct, frozen=True, tag="Saved"):
    size_bytes: int


class CommandDone(msgspec.Struct, frozen=True, tag="Carried"):
    """The command was carried out and has no answer of its own."""


class CommandFailed(msgspec.Struct, frozen=True, tag="Broken"):
    why: Why
    what: str


Answer = (
    TrainerReady
    | TrainerHeartbeat
    | StepsTrained
    | ModelEvaluated
    | TextSampled
    | InnerSaved
    | AuditProgress
    | LossesMeasured
    | CommandDone
    | CommandFailed
)


# Made while one thread runs: msgspec lets other threads see the tables of a type before they are filled, and a
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
