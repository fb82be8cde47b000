"""`atoll checkpoint rollback ROUND`: continues the run from an earlier agreed state.

Only the founder's peer (the recovery identity) can order it; the command sends the order to the local peer. History
is not rewritten: the round that goes back names its target and the signature behind it.
"""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from atoll.base.units import HISTORY_ROUND, history_round_text
from atoll.cli.display.waiting import send_order
from atoll.cli.say import AsJson, Dir, folder_of, say, say_json


def rollback(
    round: Annotated[int, Parameter(help=f"The state to continue from: {HISTORY_ROUND}; -1 is genesis.")],
    /,
    run: Dir = None,
    *,
    without: Annotated[
        list[str] | None,
        Parameter(negative="", help="Send this member away for good, by name or id; repeatable."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Send the whole run back to the state of an earlier round, which must be in this folder.

    Progress since then is dropped at every member; data that was used is not used again. Settings that atoll amend
    changed since then are undone, too. To undo the rollback, go back to the round before it.
    """
    from atoll.policy.membership import AMEND_ROUNDS

    folder = folder_of(run)
    answer = send_order(folder, "rollback", json=json, round=round, without=without or [])
    if json:
        say_json(answer)
        return
    goal = history_round_text(round, answer["trained"])
    if answer["refused"]:
        say(
            f"! validators went back behind {goal} before, and may again: atoll blame {folder} says where "
            f"to, atoll blame {folder} --round {round} whose update it was"
        )
    if answer["agreed"]:
        gone = f", without {', '.join(without)}" if without else ""
        say(f"history round {answer['round']} went back to the state of {goal}; all members go on from there{gone}")
        if answer.get("numbers"):
            undone = answer["undone"] or "back to what was amended then"
            say(f"! this undid an amendment ({undone}): settings are those of that round again; atoll amend")
    else:
        say(
            f"the members have the order, and no round has ended with it yet: atoll checkpoint list {folder}. "
            f"If {AMEND_ROUNDS} rounds pass without it, run this command again"
        )
