"""Entry point of a trainer process: `python -m atoll.runtime.trainer FD`, with the descriptor of its mailbox."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from contextlib import suppress

from atoll.runtime.system import end_first
from atoll.runtime.trainer.process import CommandReader, TrainerCommandLoop
from atoll.runtime.trainer.protocol import read_frame

NICE = 5  # lower priority than the peer: a heartbeat is worth more than a step


def _main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of a model or a library must not be read as an answer
    _lower_priority()
    frame = read_frame(sys.stdin.buffer)
    if frame is None:
        return
    commands = CommandReader(sys.stdin.buffer)
    threading.Thread(target=commands.listen, daemon=True).start()
    try:
        TrainerCommandLoop(int(sys.argv[1]), frame, commands, answers).serve()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)  # an orderly end would wait for the listener, which waits for the parent


def _lower_priority() -> None:
    """The peer comes first, for the processor and when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl+C; its end ends this process
    with suppress(OSError):
        os.nice(NICE)
    end_first()


if __name__ == "__main__":
    _main()
