"""Orders of an operator that a vertex must hold: sends one to the local peer and shows what it waits for.

Invariants:
- A refused order, and one that is answered at once, prints no other line.
- Ctrl-C ends the wait and not the order, and the command says so.
- Standard output stays as it is; with `--json` nothing is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

from atoll.base.ids import printable
from atoll.cli.display.progress import busy

QUIET_S = 0.3  # a refusal, or the answer of a run with short rounds, comes before


def send_order(folder: Path, verb: str, *, json: bool, **with_: Any) -> Any:
    """Send an order and wait for the vertex that holds it; returns the peer's answer or raises the error in it."""
    from atoll.runtime.control.invitations import AGREE_S
    from atoll.runtime.control.socket import send_request

    awaited = "" if json else _awaited_text(send_request(folder, "status"))
    with waiting(
        f"{awaited}, at most {AGREE_S:.0f} s" if awaited else "", "the members have the order; atoll status"
    ):
        return send_request(folder, verb, **with_)


@contextmanager
def waiting(text: str, after_interrupt: str) -> Iterator[None]:
    """Show what the block waits for: with the elapsed time on a terminal, else once as a line on standard error.

    After Ctrl-C, say that only the wait has ended, and what still holds.
    """
    on_terminal = sys.stderr.isatty()
    notice = Timer(QUIET_S, lambda: _say_aside(text))
    notice.daemon = True
    if text and not on_terminal:
        notice.start()
    try:
        if text and on_terminal:
            with busy(printable(text)):
                yield
        else:
            yield
    except KeyboardInterrupt:
        _say_aside(f"only the wait has ended: {after_interrupt}")
        raise
    finally:
        notice.cancel()


def _awaited_text(s: Any) -> str:
    """What an order waits for in a run of this status. A peer of another version may not send all of it."""
    if not isinstance(s, dict):
        return "waiting for the members"
    if s.get("over"):
        return "the run has ended: waiting until a quorum of members is running (atoll up --stay at each)"
    here, needed = s.get("present", 0), s.get("quorum", 0)
    if here < needed:
        return f"waiting for voting members: {here} of the {needed} needed are here"
    if s.get("phase") == "training" and s.get("inner_steps"):
        return f"waiting for the current round to end (step {s.get('step', 0)} of {s['inner_steps']})"
    return "waiting for the current round to end"


def _say_aside(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
