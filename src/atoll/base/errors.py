"""Errors that Atoll raises on purpose.

    AtollError                     an error that a person can act on, with a stable code and an exit status
     ├─ UsageError        (exit 2) the request is wrong: a flag, a config key, a file
     ├─ NetworkError      (exit 3) no peer answered, or an address cannot be reached
     ├─ RefusedError      (exit 4) a peer answered and refused: ticket, key, policy
     ├─ RunFailedError    (exit 5) the run itself failed
     └─ RunEnded                   a loop takes a step after the end of its run, and wants to know
    PeerFault                      a peer broke the protocol; it costs the peer trust and never ends the process

Impossible arguments inside the library are `ValueError`s; broken internal invariants are `assert`s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import msgspec

from atoll.base.ids import one_line, printable, without_tickets

P = ParamSpec("P")
T = TypeVar("T")

# what msgspec raises for undecodable bytes, also for invalid UTF-8 and for lists nested a thousand levels deep
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class AtollError(Exception):
    """Error with a stable code such as `E-TKT-02`, what failed, the likely cause and the exact next command.

    Its texts never show a whole ticket.
    """

    exit_status = 1

    def __init__(self, code: str, what: str, *, cause: str = "", fix: str = "") -> None:
        self.code = code
        self.what, self.cause, self.fix = (without_tickets(printable(text)) for text in (what, cause, fix))
        super().__init__(self.__str__())

    def __str__(self) -> str:
        text = f"{self.code} {self.what}"
        if self.cause:
            text += f"\n  likely cause: {self.cause}"
        if self.fix:
            text += f"\n  try: {self.fix}"
        return text


class UsageError(AtollError):
    """The request is wrong."""

    exit_status = 2


class NetworkError(AtollError):
    """No peer answered, or an address cannot be reached."""

    exit_status = 3


class RefusedError(AtollError):
    """A peer refused the request."""

    exit_status = 4


class RunFailedError(AtollError):
    """The run itself failed."""

    exit_status = 5


class RunEnded(AtollError):
    """The run is over. Raised by steps after its end if the loop chose `attach(…, after_end="raise")`."""


def short_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of public functions: the traceback of an AtollError or of Ctrl-C ends here, not inside."""

    @wraps(function)
    def bordered(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (AtollError, KeyboardInterrupt) as why:
            raise why.with_traceback(None) from None

    return bordered


class PeerFault(Exception):
    """A peer's bytes broke the protocol. Raised where the bytes are checked, and handled by dropping the peer.

    `what` may quote the peer; it is one short line that is safe to print.
    """

    def __init__(self, who: str, what: str, evidence: bytes = b"") -> None:
        self.who, self.what, self.evidence = who, one_line(what), evidence
        super().__init__(f"{one_line(who) or 'unknown peer'}: {self.what}")
