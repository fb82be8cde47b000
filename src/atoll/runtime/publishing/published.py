"""`latest.json`: the newest published checkpoint of a run, and the names of its files.

    latest.json                        written last, so that its files are complete
    checkpoints/round-000012-5f8ab1/   a model folder: tensors, config, card (on the hub: the root)
    states/<hex>                       the agreed state of the same round, a blob that joiners check by its name

Invariants:
- It is read from a place that is not trusted: a reader believes no digest here, and asks for a state by the digest
  that a vertex names.
"""

from __future__ import annotations

import msgspec

from atoll.base.errors import UNREADABLE
from atoll.base.ids import Digest

LATEST = "latest.json"
LATEST_BYTES_MAX = 2**20  # a few hundred bytes; a longer file is none of ours
FORMAT = "atoll/published/1"
DIGEST_SHOWN = 6  # characters of the state in a folder's name: after a recovery a round may have two states


class PublishedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `latest.json`. Digests are hexadecimal."""

    format: str = FORMAT
    run: str
    run_id: str
    round: int
    trained: int
    vertex: str
    state: str
    model: str  # folder of the model; empty: beside latest.json
    files: dict[str, int]  # name -> size in bytes, of model and state


def state_file(state: Digest) -> str:
    return f"states/{state.hex()}"


def model_folder(round: int, state: Digest) -> str:
    name = "genesis" if round == -1 else f"round-{round:06}"
    return f"checkpoints/{name}-{state.hex()[:DIGEST_SHOWN]}"


def encode_latest(checkpoint: PublishedCheckpoint) -> bytes:
    return msgspec.json.format(msgspec.json.encode(checkpoint)) + b"\n"


_LATEST = msgspec.json.Decoder(PublishedCheckpoint)


def decode_latest(data: bytes) -> PublishedCheckpoint:
    """Raises ValueError if this is no `latest.json` of this version."""
    try:
        found = _LATEST.decode(data)
    except UNREADABLE as why:
        raise ValueError(f"{LATEST} is not readable: {why}") from None
    if found.format != FORMAT:
        raise ValueError(f"{LATEST} has the format {found.format[:40]!r}, not {FORMAT}")
    return found
