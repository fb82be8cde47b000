"""`atoll check [TICKET]`: whether this computer can take part in a run, in 5 seconds and without joining."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from atoll.cli.say import AsJson, Dir, Sets, TicketFile, folder_of, say, say_json, ticket_of, ticket_then_folder


def check(
    ticket: Annotated[
        str,
        Parameter(
            help="The ticket to join with; checking does not use it up. - reads it from standard input. Default: "
            "$ATOLL_TICKET, else only this computer is checked."
        ),
    ] = "",
    /,
    dir: Dir = None,
    *,
    ticket_file: TicketFile = None,
    bootstrap: Annotated[
        list[str],
        Parameter(negative="", help="Multiaddr of a member to try beside those in the ticket; repeatable."),
    ] = [],  # noqa: B006  # cyclopts reads it, no code changes it
    config: Annotated[Path | None, Parameter(help="run.toml; only its [node] matters here.")] = None,
    set: Sets = [],  # noqa: B006
    json: AsJson = False,
) -> None:
    """Check versions, device, disk, memory, ticket and the way to the members, without joining.

    Ends with the error of the first check that failed; warnings do not count.
    """
    from atoll.runtime import preflight
    from atoll.runtime.config import load_config

    ticket, dir = ticket_then_folder(ticket, dir, ticket_file)
    settings = load_config(config, set)
    text = ticket_of(ticket, ticket_file) or os.environ.get("ATOLL_TICKET", "")
    found = preflight.check_computer(folder_of(dir))
    addresses = tuple(bootstrap)
    if text:
        about_ticket, invited_to = preflight.check_ticket(text)
        found.append(about_ticket)
        addresses += invited_to
    found += asyncio.run(preflight.check_links(addresses))
    found.append(preflight.check_processor(settings.node.device))
    _say_findings(found, json, bool(addresses))
    for one in found:
        if one.error is not None:
            raise one.error


def _say_findings(found: list[Any], json: bool, dialed: bool) -> None:
    if json:
        return say_json({"checks": [{"check": f.what, "verdict": f.verdict, "text": f.text} for f in found]})
    for one in found:
        say(f"  {one.verdict:<8} {one.what:<9} {one.text}")
    if all(one.verdict != "failed" for one in found):
        say(
            "nothing prevents joining from here" if dialed else "no member was asked: atoll check TICKET dials them"
        )
