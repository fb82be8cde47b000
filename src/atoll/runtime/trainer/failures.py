"""Trainer failures as texts for people: what happened, the likely cause, the next step."""

from __future__ import annotations

import signal

from atoll.runtime.trainer.protocol import CommandFailed
from atoll.worker.trainer_commands import TrainerCommandError

LAST_LINES = 6  # of the trainer's own output that a failure shows: the end of a traceback
HINTS = {  # likely cause, what to do
    "memory": ("batch or model are too large for this device", "lower the batch or choose a smaller model"),
    "diverged": ("the learning rate or the outer step is too large", "lower them, then write x anew"),
}


def broken(said: CommandFailed) -> TrainerCommandError:
    """The failure that the trainer itself reports."""
    cause, fix = HINTS.get(said.why, ("", ""))
    return TrainerCommandError(said.why, said.what, cause=cause, fix=fix, alive=True)


def hung(patience_s: float) -> TrainerCommandError:
    """The failure of a trainer without progress for `patience_s` seconds."""
    return TrainerCommandError(
        "hung",
        f"the trainer made no progress for {patience_s:.0f} s and was ended",
        cause="a device driver that stopped answering, or a machine that swaps",
        fix="check the load of this computer, lower the batch, then start it again",
    )


def death(code: int, last_words: str) -> TrainerCommandError:
    """The failure of a process that ended with this exit status; `last_words`: the end of its stderr."""
    if code == -signal.SIGKILL:
        return TrainerCommandError(
            "memory",
            "the trainer was killed by the system (SIGKILL)",
            cause="out of memory, or another process killed it",
            fix="lower the batch or choose a smaller model",
        )
    lines = [line for line in last_words.strip().splitlines() if line.strip()]
    how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
    return TrainerCommandError("crashed", f"the trainer ended {how}", cause="\n  ".join(lines[-LAST_LINES:]))
