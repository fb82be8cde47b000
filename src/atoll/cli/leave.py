"""`atoll leave`, `stop` and `recover`: end a peer, or revive a run that has lost its quorum."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from atoll.base.errors import RefusedError, RunFailedError
from atoll.base.ids import PeerId, names_of, short_id
from atoll.base.units import counted_text
from atoll.cli.display.waiting import waiting
from atoll.cli.say import AsJson, Dir, folder_of, say, say_json

GONE_S = 80.0  # above the 60 s that a leave may take, with an export and the end of a trainer
AGREEING = "waiting for the other members to agree that this peer leaves, mostly when the round ends"


def leave(dir: Dir = None, *, json: AsJson = False) -> None:
    """Leave the run and end this peer. If the others need its vote for that, it ends with the next round.

    It gives up its place and its vote, so the quorum gets smaller. To keep them: atoll stop.
    """
    _end("leave", "left by its owner", dir, json)


def stop(dir: Dir = None, *, json: AsJson = False) -> None:
    """End this peer now; `atoll up` in the same folder resumes it.

    The others go on, and it stays a member: until it is back, its vote is missing. To give up both: atoll leave. To
    have all members rest: atoll pause.
    """
    _end("stop", "stopped by its owner", dir, json)


def _end(verb: str, why: str, dir: Dir, json: bool) -> None:
    from atoll.runtime.control.socket import send_request
    from atoll.runtime.storage.ownership import is_in_use

    folder = folder_of(dir)
    answer = send_request(folder, verb, why=why)
    until, holds = time.monotonic() + GONE_S, "the peer goes on to end; atoll status"
    with waiting(AGREEING if verb == "leave" and not json else "", holds):
        while (folder / "door").exists() or is_in_use(folder):  # a held folder would refuse the next `atoll up`
            if time.monotonic() > until:
                raise RunFailedError(
                    "E-DOOR-07",
                    f"the peer in {folder} is still ending after {GONE_S:.0f} s",
                    fix=f"end its process: kill {answer.get('process', 'NUMBER')}",
                )
            time.sleep(0.05)
    if json:
        say_json(answer)
    else:
        say(_ended_text(verb, answer, folder))


def _ended_text(verb: str, answer: dict[str, Any], folder: Path) -> str:
    """How far the peer came, and how it comes back. A peer of another version may not send all: it has ended."""
    after = f" after {counted_text(answer['trained'], 'trained round')}" if "trained" in answer else ""
    does, to = ("resumes it", "resume") if verb == "stop" else ("joins again", "join again")
    again = f"run its program again to {to}" if answer.get("attached") else f"atoll up --dir {folder} {does}"
    return f"{'ended' if verb == 'stop' else 'left the run'}{after}; {again}"


def recover(
    dir: Dir = None,
    *,
    yes: Annotated[
        bool, Parameter(negative="", help="Do it without the question whether these members are gone for good.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Restart from the last agreed round without lost members, if too few are left for a quorum.

    Only the founder's peer can do this: it needs the founder's folder, or its peer.key. First try `atoll up` in the
    folders of the others: that needs no recovery. If the others are only out of reach, and a quorum among
    themselves, they go on without this peer, and the run splits into two.

    If a quorum is here, the founder instead signs the history for members that are gone for good, so that new
    members believe it.
    """
    from atoll.runtime.control.socket import send_request

    folder = folder_of(dir)
    found = send_request(folder, "status")
    if not yes and found["present"] < found["quorum"]:
        named = names_of((PeerId(m["peer"]), m["name"] or short_id(m["peer"])) for m in found["members"])
        gone = [named[m["peer"]] for m in found["members"] if m["link"] == "gone"]
        vote, they = ("its vote", "it joins") if len(gone) == 1 else ("their votes", "they join")
        lose = f"{', '.join(gone)} will lose {vote} until {they} again; gone for good?"
        key = "the key in this folder becomes the key of its member; is the old one lost?"
        _sure(lose if gone else key, folder)
    elif not yes:
        _sure(
            "a quorum is here: this signs the history in this folder for members that have not "
            "signed it; do the others hold the same (atoll verify), and are those members gone for good?",
            folder,
        )
    answer = send_request(folder, "recover")
    if json:
        say_json(answer)
        return
    if answer["began"]:
        say(
            f"epoch {answer['epoch']} began with {', '.join(answer['members'])}; the history shows it as a recovery"
        )
    if answer["eras"]:
        last = ", ".join(map(str, answer["eras"]))
        say(f"signed the history up to its rounds {last} for members that had not; newcomers believe it now")


def _sure(question: str, folder: Path) -> None:
    if not sys.stdin.isatty():
        raise RefusedError(
            "E-ARG-10",
            question,
            cause="recovering needs a confirmation, and there is no terminal to ask at",
            fix=f"atoll recover --dir {folder} --yes, which answers yes",
        )
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise RefusedError("E-ARG-10", "nothing was changed", fix="atoll status")
