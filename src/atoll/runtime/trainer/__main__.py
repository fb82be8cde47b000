"""A trainer process begins here, with the descriptor of its mailbox: `python -m atoll.runtime.trainer FD`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from contextlib import suppress

from atoll.runtime.trainer.process import CommandReader, TrainerProcess
from atoll.runtime.trainer.protocol import read_frame

NICE = 5  # below the peer beside it: a heartbeat is worth more than a step


def _main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a model or a library prints must not be taken for an answer
    _be_humble()
    frame = read_frame(sys.stdin.buffer)
    if frame is None:
        return
    commands = CommandReader(sys.stdin.buffer)
    threading.Thread(target=commands.listen, daemon=True).start()
    try:
        TrainerProcess(int(sys.argv[1]), frame, commands, answers).serve()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)  # an orderly end would wait for the listener, which waits for the parent


def _be_humble() -> None:
    """The peer beside this process comes first, for the processor and when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is the parent's to answer; its end ends us
    with suppress(OSError):
        os.nice(NICE)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


if __name__ == "__main__":
    _main()
