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


def names_of(peers: Iterable[tuple[PeerId, str]]) -> dict[PeerId, str]:
    """What people call these peers, whatever they call themselves: one line, and another one for each."""
    told = {peer: one_line(name) for peer, name in peers}
    count = Counter(told.values())
    return {
        peer: peer if not name else name if count[name] == 1 else f"{name} ({short(peer)})"
        for peer, name in told.items()
    }


def one_line(text: str) -> str:
    """Words of a stranger without what would move a terminal's cursor, or begin another line."""
    return "".join(c if c.isprintable() else " " for c in text)


def short(name: PeerId | Digest | str | bytes) -> str:
    """Eight characters that people can compare; never used to decide anything."""
    return name.hex()[:8] if isinstance(name, bytes) else name[-8:]
