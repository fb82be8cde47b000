"""Trainer process: owns a device; a peer drives it through an asyncio object.

Networking never waits for a step, and a step never waits for Python's lock. Tensors cross by shared memory
(`shared_memory.py`). Commands and answers are length-prefixed msgpack over the child's stdin and stdout; output of
the model goes to stderr. One command runs at a time; only `cancel` overtakes.

After a hand-over a trainer may continue by itself (`TrainSteps.ahead`): it steps while no command arrives, and
these steps count in the next `train`. Agreed values arrive meanwhile as `MergeAnchorIntoParameters`.
Invariants:
- A trainer that crashes, hangs, runs out of memory or diverges surfaces at once as a `TrainerCommandError`.
- If the parent dies in any way, the pipe ends and the trainer exits.
- The child is never forked: it is a fresh interpreter, `python -m atoll.runtime.trainer`; this works in notebooks.

    protocol  commands, answers and frames (commands of capabilities lie beside these)
    client    the peer's side: starts, drives, watches and ends the process
    process   the process's side: model, data, inner state, and a handler per command
    failures  failures as texts for people
"""

from __future__ import annotations

from atoll.runtime.trainer.client import TrainerClient, check_device, chosen_device, threads_per_trainer
from atoll.runtime.trainer.protocol import ModelEvaluated, TrainerHeartbeat
from atoll.worker.trainer_commands import TrainerCommandError, TrainerSpec

__all__ = [
    "ModelEvaluated",
    "TrainerClient",
    "TrainerCommandError",
    "TrainerHeartbeat",
    "TrainerSpec",
    "check_device",
    "chosen_device",
    "threads_per_trainer",
]
