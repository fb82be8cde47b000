"""Every error Atoll raises on purpose, drawn as a tree.

    AtollError                     something a person can act on; carries a stable code and an exit status
     ├─ UsageError        (exit 2) the request itself is wrong: a flag, a config key, a file
     ├─ NetworkError      (exit 3) nobody answered, or an address cannot be reached
     ├─ RefusedError      (exit 4) somebody answered and said no: ticket, key, policy
     └─ RunFailedError    (exit 5) the run itself broke
    PeerFault                      a peer broke the protocol; costs the peer trust, never us the process

Impossible arguments inside the library are `ValueError`s; broken promises to ourselves are `assert`s.
"""

from __future__ import annotations

import msgspec

from atoll.base.ids import one_line, printable

# what msgspec raises for bytes that are no such value: also where a word is no UTF-8, or lists nest a thousand deep
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class AtollError(Exception):
    """What happened, the likely cause and the exact next command, with a stable code such as `E-TKT-02`."""

    exit_status = 1

    def __init__(self, code: str, what: str, *, cause: str = "", fix: str = "") -> None:
        self.code, self.what, self.cause, self.fix = code, printable(what), printable(cause), printable(fix)
        super().__init__(self.__str__())

    def __str__(self) -> str:
        text = f"{self.code} {self.what}"
        if self.cause:
            text += f"\n  likely cause: {self.cause}"
        if self.fix:
            text += f"\n  try: {self.fix}"
        return text


class UsageError(AtollError):
    exit_status = 2


class NetworkError(AtollError):
    exit_status = 3


class RefusedError(AtollError):
    exit_status = 4


class RunFailedError(AtollError):
    exit_status = 5


class PeerFault(Exception):
    """A peer's bytes broke the protocol. Made where the bytes are judged, handled by dropping the peer.

    `what` may quote the peer: it is one short line that is safe to print.
    """

    def __init__(self, who: str, what: str, evidence: bytes = b"") -> None:
        self.who, self.what, self.evidence = who, one_line(what), evidence
        super().__init__(f"{one_line(who) or 'unknown peer'}: {self.what}")
