"""Updates as their authors show them to judges: one blob with the parts as they were sent.

Invariants:
- Reading trusts no byte: the parts must be those that the author committed to.
Not responsible for: sending (`verification/update_review.py`), keeping own ones (`verification/update_cache.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from atoll.base.errors import UNREADABLE, PeerFault, RunFailedError
from atoll.base.ids import Digest
from atoll.base.limits import PARTS_OF_ANY
from atoll.crypto.digest import Buffer, merkle_root
from atoll.training.codec import Codec
from atoll.training.recipe.schedule import turn_of
from atoll.training.recipe.state import SharedState
from atoll.training.recipe.update import Bounds, moved, part_bounds, part_codecs
from atoll.worker.context import WorkerContext

Wires = Annotated[tuple[bytes, ...], msgspec.Meta(max_length=PARTS_OF_ANY)]
_WIRES: msgspec.msgpack.Decoder[tuple[bytes, ...]] = msgspec.msgpack.Decoder(Wires)


def update_bytes(wires: Sequence[Buffer]) -> bytes:
    """The parts of an update as they were sent, as its author shows them."""
    return msgspec.msgpack.encode([bytes(wire) for wire in wires])


def wires_from_bytes(
    data: Buffer, root: Digest, bounds: Bounds, digest_of: Callable[[Buffer], Digest]
) -> tuple[bytes, ...]:
    """The parts, if they are those that their author committed to. PeerFault if not."""
    try:
        wires = _WIRES.decode(data)
    except UNREADABLE as why:
        raise PeerFault("", f"what it lays out is no update: {why}") from None
    if len(wires) != len(bounds) or merkle_root(tuple(map(digest_of, wires))) != root:
        raise PeerFault("", "what it lays out is another update than it committed to")
    return wires


@dataclass(frozen=True)
class ShownUpdate:
    """The update that its author committed to, still encoded."""

    wires: Sequence[Buffer]
    bounds: Bounds  # of the parts, in the shared vector
    codecs: Sequence[Codec]

    def parts(self) -> Iterator[tuple[int, int, Tensor]]:
        """Each part with its bounds in the shared vector; its values are finite. PeerFault if it is unreadable."""
        for wire, (lo, hi), codec in zip(self.wires, self.bounds, self.codecs, strict=True):
            yield lo, hi, codec.decode(wire, hi - lo)

    def subtract_from(self, x_F: Tensor) -> None:
        """Take the update off this shared vector, part by part."""
        for lo, hi, part in self.parts():
            x_F[lo:hi] -= part

    def decode(self) -> Tensor:
        """All values that the round sent, in order (fp32). PeerFault if they are unreadable."""
        return torch.cat([part for _, _, part in self.parts()])


async def read_shown_update(
    context: WorkerContext, blob: Digest, root: Digest, round: int, before: Digest, shares: tuple[int, ...]
) -> tuple[SharedState, ShownUpdate]:
    """The state that this round began with, and the update in the blob.

    `root`: the commitment's Merkle root. `before`: name of that state. `shares`: relative sizes of the parts.
    Raises PeerFault if the blob holds another update, RunFailedError if the blob or the state is not on this disk.
    """
    spec = context.spec_of(round)
    state, data = await context.find_state(before, spec), await asyncio.to_thread(context.blobs.read_blob, blob)
    if data is None or state is None:
        raise RunFailedError("E-SCO-02", "the update to review, or the state before it, is no longer on this disk")
    return state, await context.run_tensor_job(_open, context, data, root, round, state, before, shares)


def _open(
    context: WorkerContext,
    data: Buffer,
    root: Digest,
    round: int,
    state: SharedState,
    before: Digest,
    shares: tuple[int, ...],
) -> ShownUpdate:
    spec = context.spec_of(round)
    lo, hi = turn_of(spec.recipe.schedule, spec.layout, state.round)
    bounds = part_bounds(hi - lo, shares)
    wires, bounds = wires_from_bytes(data, root, bounds, context.wire_digest), moved(bounds, lo)
    codecs = part_codecs(spec.recipe_after(state).coding.up, spec.round_inputs(round, state, before), bounds)
    return ShownUpdate(wires, bounds, codecs)
