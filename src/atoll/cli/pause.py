"""`atoll pause` and `atoll resume`: stop and continue training of a whole run, by agreement.

Only the founder's peer (the recovery identity) can order it; the commands send the order to the local peer. All
processes stay, and so does the run's quorum.
"""

from __future__ import annotations

from atoll.cli.say import AsJson, Dir, folder_of, say, say_json


def pause(dir: Dir = None, *, json: AsJson = False) -> None:
    """Pause the whole run: the current round ends, then members stay and do not train until `atoll resume`."""
    _say_so(True, dir, json)


def resume(dir: Dir = None, *, json: AsJson = False) -> None:
    """Resume a paused run at the same place in the data."""
    _say_so(False, dir, json)


def _say_so(paused: bool, dir: Dir, json: bool) -> None:
    from atoll.policy.membership import AMEND_ROUNDS
    from atoll.runtime.control.socket import send_request

    folder = folder_of(dir)
    answer = send_request(folder, "pause", paused=paused)
    if json:
        say_json(answer)
    elif not answer["agreed"]:
        say(
            "the members were told; it takes effect when the current round closes: atoll status says when. "
            f"If {AMEND_ROUNDS} rounds pass without it, run this command again"
        )
    elif paused:
        say(f"the run is paused after {answer['trained']} trained rounds; atoll resume --dir {folder} goes on")
    else:
        say(f"the run goes on after {answer['trained']} trained rounds")
