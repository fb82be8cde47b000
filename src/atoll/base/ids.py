"""Names of things: who, what, when. Plain types, so that they hash fast and print readably."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, NewType

from msgspec import Meta

from atoll.base.limits import PEER_ID_CHARACTERS_MAX

DIGEST_BYTES = 32

if TYPE_CHECKING:
    PeerId = NewType("PeerId", str)  # base58 libp2p peer id in the real world, a short name in the virtual one
    Digest = NewType("Digest", bytes)  # BLAKE3
else:  # msgspec refuses other lengths wherever a type that it decodes names one of these
    PeerId = NewType("PeerId", Annotated[str, Meta(max_length=PEER_ID_CHARACTERS_MAX)])
    Digest = NewType("Digest", Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)])
Seconds = float  # a duration, or a point on some clock; which clock is said where it is used

ZERO_DIGEST = Digest(bytes(DIGEST_BYTES))

SHOWN_MAX = 500  # characters of a foreign text on a screen: six lines of a terminal
NAME_SHOWN_MAX = 64  # characters of a name on a screen: members of a run in groups are called like eu/fra/ada


def names_of(peers: Iterable[tuple[PeerId, str]]) -> dict[PeerId, str]:
    """What people call these peers, whatever they call themselves: one line, and another one for each."""
    told = {peer: one_line(name, NAME_SHOWN_MAX) for peer, name in peers}
    count = Counter(told.values())
    return {
        peer: peer if not name else name if count[name] == 1 else f"{name} ({short(peer)})"
        for peer, name in told.items()
    }


def one_line(text: str, most: int = SHOWN_MAX) -> str:
    """Foreign text that is safe to print: one line of at most `most` characters, an ellipsis where it was cut.

    Escapes, line breaks and marks that turn the direction of writing become blanks. Screens, logs and errors show
    no text of another peer that did not pass here.
    """
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else " " for c in cut)


def printable(text: str) -> str:
    """A text of our own, perhaps with foreign parts in it: as long as it is, and its lines stay lines."""
    return "\n".join(one_line(line, len(line)) for line in text.split("\n"))


def short(name: PeerId | Digest | str | bytes) -> str:
    """Eight characters that people can compare; never used to decide anything."""
    return name.hex()[:8] if isinstance(name, bytes) else name[-8:]
