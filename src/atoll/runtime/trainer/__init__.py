"""The trainer: its own process that owns a device, and the asyncio object through which a peer drives it.

Networking never waits for a step and a step never waits for Python's lock. Tensors cross by shared memory
(`shared.py`), commands and answers as length-prefixed msgpack over the child's stdin and stdout; what a model
prints goes to stderr. One command is under way at a time; only `cancel` overtakes.

A trainer may go on by itself from what it handed over (`Train.ahead`): it takes steps whenever nobody says
anything, and they count when the next ones are asked for. What peers agree on meanwhile comes as a `MergeAnchor`.

A trainer that crashes, hangs, runs out of memory or diverges surfaces at once as a `TrainerFailed` in plain
words. If the parent dies, however it dies, the pipe ends and the trainer exits.
Never forks: the child is a fresh interpreter, `python -m atoll.runtime.trainer`, which works from notebooks too.

    words     what the two say to each other
    parent    the peer's side: starts the process, asks it, watches it, ends it
    child     the process's side: model, data and inner state, and what is done on each command
    auditing  there too: the chain of a round, and segments shown or taken again, step by step
    failures  what went wrong, in words for people
"""

from __future__ import annotations

from atoll.runtime.trainer.client import TrainerClient, check_device, threads_per_trainer
from atoll.runtime.trainer.protocol import ModelEvaluated, TrainerHeartbeat
from atoll.worker.trainer_commands import TrainerFailed, TrainerSpec

__all__ = [
    "ModelEvaluated",
    "TrainerClient",
    "TrainerFailed",
    "TrainerHeartbeat",
    "TrainerSpec",
    "check_device",
    "threads_per_trainer",
]
