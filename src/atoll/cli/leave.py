"""`atoll leave`, `stop` and `recover`: how a peer, and how a stuck run, comes to an end."""

from __future__ import annotations

import time

from atoll.base.errors import RefusedError, RunFailedError
from atoll.cli.say import AsJson, Dir, folder_of, say, say_json

GONE_S = 80.0  # above the minute that a farewell may take, with an export and the end of a trainer


def leave(*, dir: Dir = None, json: AsJson = False) -> None:
    """Say farewell to the others and end this peer; where they need its vote for that, with the next round."""
    _end("leave", "left by its owner", dir, json)


def stop(*, dir: Dir = None, json: AsJson = False) -> None:
    """End this peer now; `atoll up` in the same folder comes back."""
    _end("stop", "stopped by its owner", dir, json)


def _end(verb: str, why: str, dir: Dir, json: bool) -> None:
    from atoll.host.api import ask

    folder = folder_of(dir)
    answer = ask(folder, verb, why=why)
    until = time.monotonic() + GONE_S
    while (folder / "door").exists():
        if time.monotonic() > until:
            raise RunFailedError(
                "E-DOOR-07",
                f"the peer in {folder} is still ending after {GONE_S:.0f} s",
                fix="end its process: kill " + str(answer["process"]),
            )
        time.sleep(0.05)
    if json:
        say_json(answer)
    else:
        say(f"ended at round {answer['round']}; atoll up --dir {folder} comes back")


def recover(*, dir: Dir = None, json: AsJson = False) -> None:
    """Start over from the last agreed vertex when a quorum is gone for good. Not yet."""
    raise RefusedError(
        "E-RUN-07",
        "recovering a run whose quorum is gone for good: not yet",
        cause="genesis of this version names no recovery key, so nobody could tell a recovery from a split",
        fix="bring enough members back (atoll status says how many); or atoll export, and found a new run",
    )
