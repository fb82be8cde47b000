"""What can go wrong with a trainer, in words for people: what happened, the likely cause, what to do."""

from __future__ import annotations

import signal

from atoll.runtime.trainer.protocol import CommandFailed
from atoll.worker.trainer_commands import TrainerFailed

HINTS = {  # likely cause, what to do
    "memory": ("batch or model are too large for this device", "lower the batch or choose a smaller model"),
    "diverged": ("the learning rate or the outer step is too large", "lower them, then write x anew"),
}


def broken(said: CommandFailed) -> TrainerFailed:
    """It could not do what it was asked, and says so itself."""
    cause, fix = HINTS.get(said.why, ("", ""))
    return TrainerFailed(said.why, said.what, cause=cause, fix=fix, alive=True)


def hung(patience_s: float) -> TrainerFailed:
    """It made no progress for so long."""
    return TrainerFailed(
        "hung",
        f"the trainer made no progress for {patience_s:.0f} s and was ended",
        cause="a device driver that stopped answering, or a machine that swaps",
        fix="look at its load, lower the batch, then start it again",
    )


def death(code: int, last_words: str) -> TrainerFailed:
    """Its process is gone, with this exit status and after this on stderr."""
    if code == -signal.SIGKILL:
        return TrainerFailed(
            "memory",
            "the trainer was killed by the system (SIGKILL)",
            cause="out of memory, or somebody killed it",
            fix="lower the batch or choose a smaller model",
        )
    lines = [line for line in last_words.strip().splitlines() if line.strip()]
    how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
    return TrainerFailed("crashed", f"the trainer ended {how}", cause="\n  ".join(lines[-3:]))
