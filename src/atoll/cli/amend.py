"""`atoll amend KEY=VALUE …`: changes settings of a running run by agreement.

Only the founder's peer (the recovery identity) can order it; the command sends the order to the local peer.
specs/tuning.md lists the settings.
"""

from __future__ import annotations

from pathlib import Path

from atoll.base.errors import UsageError
from atoll.base.units import counted_text
from atoll.cli.display.waiting import send_order
from atoll.cli.say import AsJson, Dir, folder_of, say, say_json


def amend(*numbers: str, dir: Dir = None, json: AsJson = False) -> None:
    """Change numbers of a running run, or give a finished one more rounds: atoll amend run.rounds=60.

    Members of a finished run must be running for it: atoll up --stay. With more rounds the learning rate, which
    falls over all rounds, may rise again.

    Parameters
    ----------
    numbers
        As in run.toml: train.lr=0.002 run.rounds=60. They apply at all members from the same round on. The last
        word may be the peer's folder.
    """
    if numbers and dir is None and "=" not in numbers[-1] and Path(numbers[-1]).is_dir():
        numbers, dir = numbers[:-1], Path(numbers[-1])
    if not numbers:
        raise UsageError("E-CFG-07", "no number is named", fix="atoll amend run.rounds=60; atoll amend --help")
    answer = send_order(folder_of(dir), "amend", json=json, numbers=list(numbers))
    if json:
        say_json(answer)
        return
    told = ", ".join(f"{key} = {value:g}" for key, value in answer["amended"].items())
    if not answer["agreed"]:
        say(f"the members have the order ({told}); {_awaited(answer['was_over'])}")
        return
    since = counted_text(answer["trained"], "trained round")
    say(f"{told}: in effect after {since}{_effect(answer['was_over'], answer['over'])}")
    if answer["changes_rate"] and not answer["over"]:
        say("the learning rate changes with it; a higher one can raise the loss at first")


def _effect(was_over: bool, over: bool) -> str:
    if over:
        return "; the run has ended, so nothing trains until it has more rounds: atoll amend run.rounds=…"
    return "; the run had ended and goes on" if was_over else ""


def _awaited(was_over: bool) -> str:
    """What the change of these settings waits for."""
    from atoll.policy.membership import AMEND_ROUNDS

    if was_over:
        return "the run has ended; it takes effect once a quorum of members is running: atoll up --stay at each"
    return (
        "it takes effect when the current round ends: atoll status shows it. If "
        f"{AMEND_ROUNDS} rounds pass without it, run this command again"
    )
