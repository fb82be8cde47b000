"""`atoll checkpoint rollback ROUND`: the run goes on from what it had agreed on then. Asks the peer that runs here.

Only the founder's peer (the recovery identity) can say so. History is not rewritten: the round that goes back says
where to, and by whose signature.
"""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from atoll.cli.say import AsJson, Dir, folder_of, say, say_json


def rollback(
    round: Annotated[int, Parameter(help="The round whose state the run goes on from; -1 is genesis.")],
    /,
    *,
    without: Annotated[
        list[str] | None,
        Parameter(negative="", help="Send this member away for good, by name or id; repeatable."),
    ] = None,
    dir: Dir = None,
    json: AsJson = False,
) -> None:
    """Send the whole run back to the state of an earlier round, which must be in this folder.

    What was learned since is dropped at every member; data that was used is not used again. To undo it, go back to
    the round before it.
    """
    from atoll.policy.membership import AMEND_ROUNDS
    from atoll.runtime.control.socket import ask

    folder = folder_of(dir)
    answer = ask(folder, "rollback", round=round, without=without or [])
    if json:
        say_json(answer)
        return
    if answer["refused"]:
        say(
            f"! validators went back behind round {round} before, and may again: atoll blame {folder} says where "
            f"to, atoll blame {folder} --round {round} whose update it was"
        )
    if answer["agreed"]:
        gone = f", without {', '.join(without)}" if without else ""
        say(f"round {answer['round']} went back to the state of round {round}; all members go on from there{gone}")
        if answer.get("numbers"):
            say("numbers of the run are those of that round again: atoll status, and atoll amend to change them")
    else:
        say(
            f"the members were told, and no round has ended with it yet: atoll checkpoint list {folder}. "
            f"If {AMEND_ROUNDS} rounds pass without it, say it again"
        )
