"""Options that decide what a running peer prints, shared by `atoll up` and `atoll join`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

LogFormat = Literal["auto", "text", "json"]


@Parameter(name="*")
@dataclass(frozen=True)
class OutputOptions:
    """What a running peer prints, and how."""

    quiet: Annotated[
        bool,
        Parameter(
            name=("--quiet", "-q"), negative="", help="Print the ticket, warnings and the end, nothing else."
        ),
    ] = False
    verbose: Annotated[
        bool,
        Parameter(name=("--verbose", "-v"), negative="", help="Print every fact, and the messages of atoll.log."),
    ] = False
    log_format: Annotated[
        LogFormat,
        Parameter(
            name="--log-format",
            env_var="ATOLL_LOG_FORMAT",
            help="auto: a live picture on a terminal, else one line per round and event. text: these lines with "
            "times. json: each of them as an object.",
        ),
    ] = "auto"
    facts: Annotated[
        bool,
        Parameter(
            name="--facts",
            negative="",
            help="Write every fact as a line of JSON, as in facts.jsonl; the end of stdin ends the peer.",
        ),
    ] = False
    json: Annotated[
        bool, Parameter(name="--json", negative="", help="Print one JSON object when the peer has ended.")
    ] = False
