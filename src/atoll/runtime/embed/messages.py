"""Messages between a user's training loop and its peer process, over a socket pair.

The commands and replies of `trainer/protocol.py`, plus the ones that only an attached loop needs.
"""

from __future__ import annotations

import msgspec

from atoll.base.arguments import Peers, Whole
from atoll.base.workload import AdaptiveWorkloadPolicy
from atoll.peer.config.node_sections import FeedbackPrecision, StateMemory
from atoll.policy.fault_tolerance import StatisticName
from atoll.policy.participation import ParticipationPolicy
from atoll.policy.presets import Trust
from atoll.runtime.trainer.protocol import (
    BeginValidation,
    CancelTraining,
    CommandFailed,
    InnerStateInMailbox,
    LoadInner,
    LossesMeasured,
    MergeAnchorIntoParameters,
    SaveInner,
    SetParameters,
    StepsTrained,
    TrainerCommandCompleted,
    TrainSteps,
)
from atoll.training.exchange.layout import ModelLayout
from atoll.training.recipe.recipes import Recipe


class RunRequest(msgspec.Struct, frozen=True):
    """The run that a process joins, or the terms of the run that it founds."""

    folder: str
    ticket: str = ""  # empty: found a new run, or continue the folder's
    name: str = ""  # with its group, see `policy.participation.named`
    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    state_from: str = ""  # place of published checkpoints that is asked before the members
    recipe: Recipe | None = None  # recipe of a run to found; None when joining
    start_peers: Peers = 1
    min_peers: Whole = 0  # 0: as many as the rule needs
    trust: Trust = "private"
    statistic: StatisticName | None = None  # combining rule; None: default of trust
    sample: ParticipationPolicy | None = None  # members drawn per round of a run to found; None: all members
    effort: AdaptiveWorkloadPolicy | None = None  # adaptive length of its rounds; None: fixed length


class AttachLoopRequest(msgspec.Struct, frozen=True, tag="AttachLoopRequest"):
    """First message of the user's process: its request and its model."""

    request: RunRequest
    layout: ModelLayout
    batch: int = 1  # samples behind one optimizer step
    pass_steps: Whole = 0  # optimizer steps of one pass over the loop's own data; 0: unknown
    validates: bool = False  # the loop can measure a held-out loss
    state_memory: StateMemory = "memory"
    feedback_precision: FeedbackPrecision = "fp32"
    threads: Whole = 0  # of torch in the loop's process; 0: its model is on a GPU
    config: str = ""  # JSON of a Hugging Face model's configuration, for `checkpoint export --hf`


class AttachedPeerIdentity(msgspec.Struct, frozen=True, tag="AttachedPeerIdentity"):
    """Identity of the peer and ticket of its run."""

    ticket: str  # empty if the folder's ticket has expired, or its run is over
    me: str
    lacks: tuple[str, ...] = ()  # protections of the chosen trust that a newly founded run lacks, for people
    ignored: tuple[str, ...] = ()  # arguments that the run of this folder does not follow, for people


class RoundsBegin(msgspec.Struct, frozen=True, tag="RoundsBegin"):
    """The first job comes next. The recipe may need gradients or moments of the loop's optimizer."""

    recipe: Recipe
    validated: bool = False  # members of this run evaluate its agreed model


class AgreedReadings(msgspec.Struct, frozen=True, tag="AgreedReadings"):
    """Figures of the last agreed round: sent after each round, before the loop's first job, and at the end."""

    round: int
    trained: int  # agreed training rounds so far
    members: int  # present ones
    loss: float | None  # of the last training round; None: no member reported one


class LoopLogLine(msgspec.Struct, frozen=True, tag="LoopLogLine"):
    """A line for the loop's logger."""

    level: int  # of the module logging
    text: str


class RunFinishedNotice(msgspec.Struct, frozen=True, tag="RunFinishedNotice"):
    """The run has had its rounds; x holds the agreed model."""

    rounds: int
    model: str = ""  # file with the agreed model; empty if it could not be written


class PeerFailureNotice(msgspec.Struct, frozen=True, tag="PeerFailureNotice"):
    """Fields of the AtollError that ends this peer."""

    code: str
    what: str
    cause: str
    fix: str
    exit_status: int


class DeclineRounds(msgspec.Struct, frozen=True, tag="DeclineRounds"):
    """The loop contributes nothing to this round and the next `rounds - 1`."""

    job: int  # id of the TrainSteps that this replies to; 0: none is pending
    rounds: int


class LoopDetachNotice(msgspec.Struct, frozen=True, tag="LoopDetachNotice"):
    """Last message of the user's process."""


ToUser = (
    TrainSteps
    | CancelTraining
    | SetParameters
    | MergeAnchorIntoParameters
    | SaveInner
    | LoadInner
    | BeginValidation
    | RoundsBegin
    | AttachedPeerIdentity
    | AgreedReadings
    | LoopLogLine
    | RunFinishedNotice
    | PeerFailureNotice
)
FromUser = (
    AttachLoopRequest
    | StepsTrained
    | TrainerCommandCompleted
    | InnerStateInMailbox
    | LossesMeasured
    | CommandFailed
    | DeclineRounds
    | LoopDetachNotice
)


def mailbox_room_bytes(layout: ModelLayout) -> int:
    """Bytes behind x in the shared mailbox: two moments with their header, or a model to evaluate.

    The system allocates the pages on first use.
    """
    return max(8 * layout.parameters, 4 * layout.floats) + 4096
