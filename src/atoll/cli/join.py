"""`atoll join TICKET`: takes part in a run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from atoll.base.errors import UsageError
from atoll.cli.display.options import OutputOptions
from atoll.cli.say import Dir, Sets, TicketFile, folder_of, ticket_of, ticket_then_folder
from atoll.cli.up import Announce, Data, Listen, Name, Stay, Threads, with_own_data

if TYPE_CHECKING:
    from atoll.peer.config.sections import RunConfig

StateFrom = Annotated[
    str,
    Parameter(
        help="Ask this place of published checkpoints (atoll publish) for the agreed state before the members: "
        "a folder, s3://BUCKET/PREFIX, hf://OWNER/NAME or https://… Default: $ATOLL_STATE_FROM, or node.state_from."
    ),
]


def join(
    ticket: Annotated[
        str,
        Parameter(
            help="The line that `atoll up` or `atoll invite` printed; - reads it from standard input. Default: "
            "$ATOLL_TICKET.",
        ),
    ] = "",
    /,
    dir: Dir = None,
    *,
    ticket_file: TicketFile = None,
    name: Name = "",
    role: Annotated[
        Literal["trainer", "client", "observer"],
        Parameter(
            help="A client trains but cannot be dialed: it owns no part and has no vote. An observer only holds "
            "the model."
        ),
    ] = "trainer",
    listen: Listen = [],  # noqa: B006  # cyclopts reads it, no code changes it
    announce: Announce = [],  # noqa: B006
    bootstrap: Annotated[
        list[str],
        Parameter(negative="", help="Multiaddr of a member to try beside those in the ticket; repeatable."),
    ] = [],  # noqa: B006
    data: Data = None,
    state_from: StateFrom = "",
    config: Annotated[
        Path | None, Parameter(help="run.toml; only its [network] and [node] matter to a joiner.")
    ] = None,
    set: Sets = [],  # noqa: B006
    threads: Threads = 0,
    stay: Stay = False,
    output: OutputOptions = OutputOptions(),
) -> int:
    """Join the run of this ticket, train with the others, leave with Ctrl-C."""
    from atoll.runtime.config import load_config
    from atoll.runtime.preflight import check_computer
    from atoll.runtime.supervisor import PeerOptions, run_join
    from atoll.wire.ticket import parse

    ticket, dir = ticket_then_folder(ticket, dir, ticket_file)
    text = ticket_of(ticket, ticket_file) or os.environ.get("ATOLL_TICKET", "")
    if not text:
        raise UsageError(
            "E-ARG-05", "there is no ticket", fix="atoll join TICKET, with the line that `atoll up` printed"
        )
    if data is not None and role == "observer":
        raise UsageError("E-ARG-14", "--data and --role observer exclude each other", fix="leave one of them out")
    parsed, folder = parse(text), folder_of(dir)
    settings = _from_published(with_own_data(load_config(config, set), data), state_from)
    if not (folder / "kept.sqlite").exists():
        # reports a bad ticket before anything heavy starts; a peer that has joined no longer needs it
        parsed.verify(time.time())
        for finding in check_computer(folder):  # the cheap part of `atoll check`
            if finding.error is not None:
                raise finding.error
    start = PeerOptions(folder, settings, config, name, tuple(listen), tuple(announce), threads, stay)
    from atoll.cli.watch import watched

    return watched(lambda shell: run_join(start, text, role, tuple(bootstrap), shell), output)


def _from_published(settings: RunConfig, state_from: str) -> RunConfig:
    """These settings with `node.state_from`, as --state-from or ATOLL_STATE_FROM names it.

    UsageError if there is no such place.
    """
    from msgspec.structs import replace

    from atoll.runtime.publishing.places import place_at

    if state_from := state_from or os.environ.get("ATOLL_STATE_FROM", ""):
        settings = replace(settings, node=replace(settings.node, state_from=state_from))
    if settings.node.state_from:
        place_at(settings.node.state_from)  # reports a wrong place or a missing library before anything starts
    return settings
