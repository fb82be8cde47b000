"""`atoll pause` and `atoll resume`: stop and continue training of a whole run, by agreement.

Only the founder's peer (the recovery identity) can order it; the commands send the order to the local peer. All
processes stay, and so does the run's quorum.
"""

from __future__ import annotations

from atoll.base.units import counted_text
from atoll.cli.display.waiting import send_order
from atoll.cli.say import AsJson, Dir, folder_of, say, say_json


def pause(dir: Dir = None, *, json: AsJson = False) -> None:
    """Pause the whole run: the current round ends, then members stay and do not train until `atoll resume`."""
    _say_so(True, dir, json)


def resume(dir: Dir = None, *, json: AsJson = False) -> None:
    """Resume a paused run at the same place in the data."""
    _say_so(False, dir, json)


def _say_so(paused: bool, dir: Dir, json: bool) -> None:
    from atoll.policy.membership import AMEND_ROUNDS

    folder = folder_of(dir)
    answer = send_order(folder, "pause", json=json, paused=paused)
    if json:
        say_json(answer)
        return
    if not answer["agreed"]:
        say(
            "the members have the order; it takes effect when the current round ends: atoll status shows it. "
            f"If {AMEND_ROUNDS} rounds pass without it, run this command again"
        )
        return
    after = counted_text(answer["trained"], "trained round")
    if paused:
        say(f"the run is paused after {after}; atoll resume --dir {folder} goes on")
    else:
        say(f"the run goes on after {after}")
