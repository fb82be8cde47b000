"""Identifiers of peers, digests and times, and safe display of foreign text. Plain types that hash fast."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, NewType

from msgspec import Meta

from atoll.base.limits import PEER_ID_CHARACTERS_MAX

DIGEST_BYTES = 32

if TYPE_CHECKING:
    PeerId = NewType("PeerId", str)  # base58 libp2p peer id; in simulations a short name
    Digest = NewType("Digest", bytes)  # BLAKE3
else:  # msgspec then refuses other lengths in every decoded type that uses these
    PeerId = NewType("PeerId", Annotated[str, Meta(max_length=PEER_ID_CHARACTERS_MAX)])
    Digest = NewType("Digest", Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)])
Seconds = float  # a duration, or a point on a clock that is named where it is used

ZERO_DIGEST = Digest(bytes(DIGEST_BYTES))

ATTACHED = "attached"  # model and data of a run in which members train in loops of their own

SHOWN_MAX = 500  # displayed characters of a foreign text: six lines of a terminal
TICKET = re.compile(r"(ATOLL\d:\w{8})\w+", re.IGNORECASE)  # a ticket, and the start of it that may be shown
NAME_SHOWN_MAX = 64  # displayed characters of a name: members of runs in groups have names like eu/fra/ada


def names_of(peers: Iterable[tuple[PeerId, str]]) -> dict[PeerId, str]:
    """Unique display names of these peers, one line each, from the names that they chose."""
    lines = {peer: one_line(name, NAME_SHOWN_MAX) for peer, name in peers}
    count = Counter(lines.values())
    return {
        peer: peer if not name else name if count[name] == 1 else f"{name} ({short_id(peer)})"
        for peer, name in lines.items()
    }


def one_line(text: str, most: int = SHOWN_MAX) -> str:
    """Make foreign text safe to print: one line of at most `most` characters, with an ellipsis if it was cut.

    Escapes, line breaks and direction marks become blanks. Screens, logs and errors show other peers' text only
    through this function.
    """
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else " " for c in cut)


def printable(text: str) -> str:
    """Make local text with foreign parts safe to print; its length and lines stay."""
    return "\n".join(one_line(line, len(line)) for line in text.split("\n"))


def without_tickets(text: str) -> str:
    """Cut every ticket in this text to its start: a ticket admits its reader to a run."""
    return TICKET.sub(r"\1…", text)


def short_id(name: PeerId | Digest | str | bytes) -> str:
    """Eight characters for people to compare; never an input of a decision."""
    return name.hex()[:8] if isinstance(name, bytes) else name[-8:]
