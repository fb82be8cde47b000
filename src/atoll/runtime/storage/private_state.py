"""What only this peer knows, on its disk: error feedback, moments, its last claim, late work, values of its own.

Two files. One goes with a vertex. The other is written ahead, while a round is under way and before its vertex can
be kept: it has the update that was sent, and all else as it will be once a vertex counts that. So whatever vertex
a start finds, one of the two goes with it, and a crash between the writes of a round costs nothing.

    vertex v ─► train, encode ─► written ahead {after v, root} ─► advance ─► vertex w is kept ─┐
        w counts all of root: the file takes the other's place ◄───────────────────────────────┤
        of what w counts something else follows: written anew  ◄───────────────────────────────┘

Promises: what is read is whole, of this model, and says which vertex it goes with. Never says what a vertex counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from atoll.base.errors import UNREADABLE, PeerFault
from atoll.base.ids import DIGEST_BYTES, Digest
from atoll.crypto.digest import Buffer, blob_id, manifest_of
from atoll.features.partition_training.tensors import DeferredUpdate, late_bytes, late_from_bytes
from atoll.peer.tasks import UpdateSettlement
from atoll.runtime.storage.store import PeerStore
from atoll.training.codec.blocks import tensor_over
from atoll.training.exchange.tensorfile import load, pieces_of
from atoll.training.recipe.private_parameters import PrivateParameters
from atoll.training.recipe.update import Bounds, EncodedUpdate

FORMAT = "atoll/private/3"
BYTES = ("inner", "claim", "late")  # what stands in the file as bytes, beside vectors


@dataclass(frozen=True)
class InFlightUpdate:
    """An update whose vertex is not known yet."""

    root: Digest  # of its parts, as my commitment has it
    claim: Digest | None  # as my commitment names it, where rounds are audited
    state: Digest  # that it builds on
    begins: int  # where the stretch that it is of begins
    update: EncodedUpdate


@dataclass(frozen=True)
class PrivateState:
    """Good for exactly one vertex, but for `kept`, which says what it is good for."""

    vertex: Digest | None  # with `sent`: the one before
    memory_F: Tensor | None = None  # error feedback; with `sent`: before it, where that is of a stretch alone
    inner: Buffer = b""  # moments
    claim: bytes = b""  # the last one that a vertex holds, where rounds are audited
    late: DeferredUpdate | None = None  # what it did apart and no vertex has yet
    kept: PrivateParameters | None = None  # parameters that the recipe leaves to it
    sent: InFlightUpdate | None = None  # a vertex that counts it is the one that this is good for

    def goes_with(self, vertex: Digest, mine: UpdateSettlement | None) -> bool:
        """`mine`: what this vertex counts of mine."""
        if self.sent is None:
            return self.vertex == vertex
        if mine is None or mine.before != self.vertex:
            return False
        return (mine.root, mine.claim) == (self.sent.root, self.sent.claim)


NOTHING = PrivateState(None)


def going_with(
    files: Sequence[PrivateState], vertex: Digest, mine: Sequence[UpdateSettlement]
) -> tuple[PrivateState, UpdateSettlement | None]:
    """Of these files the one that goes with this vertex, and what a vertex counts of what was sent in it.

    `mine`: of this vertex and the one before. Where this one counts nothing of mine what was good for the one
    before still is: whoever is restarted has lost what it did in such a round.
    """
    newest, before = (*mine, None, None)[:2]
    for one in files:
        if one.goes_with(vertex, newest):
            return one, newest
    if newest is not None and newest.root is None:
        for one in files:
            if one.goes_with(newest.before, before):
                return one, before
    return NOTHING, None


def placed(memory_F: Tensor | None, left_N: Tensor, begins: int, floats: int) -> Tensor:
    """Error feedback (F,) after a round whose stretch left this (N,), which it may write into."""
    if len(left_N) >= floats:
        return left_N[:floats]
    if memory_F is None:
        memory_F = torch.zeros(floats, dtype=torch.float32)
    memory_F[begins : begins + len(left_N)] = left_N
    return memory_F


# ---- as bytes ----------------------------------------------------------------------------------------------


class _InFlightHeader(msgspec.Struct, frozen=True):
    """What of `InFlightUpdate` is no vector and no wire."""

    root: bytes
    claim: bytes | None
    state: bytes
    begins: int
    bounds: Bounds


_SENT = msgspec.msgpack.Decoder(_InFlightHeader)


def write_private(store: PeerStore, private: PrivateState) -> None:
    """Tensors go to disk from where they lie. With `sent` in it, ahead."""
    assert private.vertex is not None
    late = late_bytes(private.late) if private.late is not None else b""
    beside: dict[str, Buffer] = dict(zip(BYTES, (private.inner, private.claim, late), strict=True))
    told = {"format": FORMAT, "vertex": private.vertex.hex()}
    vectors: dict[str, Tensor] = {}
    if private.memory_F is not None:
        vectors["memory"] = private.memory_F
    if private.kept is not None:
        vectors["kept"], told["kept"] = private.kept.x_F, private.kept.state.hex()
    if (sent := private.sent) is not None:
        word = _InFlightHeader(sent.root, sent.claim, sent.state, sent.begins, sent.update.bounds)
        vectors["left"], beside["sent"] = sent.update.memory_F, msgspec.msgpack.encode(word)
        beside |= {f"wire/{part:06}": wire for part, wire in enumerate(sent.update.wires)}
    tensors = vectors | {name: tensor_over(data, torch.uint8) for name, data in beside.items() if len(data)}
    _, *body = pieces_of(tensors, {})
    told["body"] = blob_id(manifest_of(*body)).hex()
    store.private.write(*pieces_of(tensors, told), ahead=sent is not None)


def read_private(store: PeerStore, floats: int) -> list[PrivateState]:
    """What was written last, of a model of so many values, and what was written ahead. Left out is what is damaged,
    which costs what is this peer's own and nothing that was agreed."""
    found = (store.private.read(), store.private.read(ahead=True))
    return [one for data in found if data is not None and (one := _read(data, floats)) is not None]


def _read(data: bytes, floats: int) -> PrivateState | None:
    try:
        tensors, told = load(data)
        if told.get("body") != blob_id(manifest_of(*pieces_of(tensors, {})[1:])).hex():
            return None  # files are written over: a power cut may leave pages of another round in one
        vectors = {name: tensors.pop(name).clone() for name in ("memory", "kept", "left") if name in tensors}
        whole = {name: vector for name, vector in vectors.items() if name != "left"}
        if told.get("format") != FORMAT or any(vector.shape != (floats,) for vector in whole.values()):
            return None
        if not all(_fits(vector) for vector in vectors.values()):
            return None
        beside = {name: value.numpy().tobytes() for name, value in tensors.items()}
        inner, claim, late = (beside.get(name, b"") for name in BYTES)
        kept_F, left_N = vectors.get("kept"), vectors.get("left")
        return PrivateState(
            _digest(bytes.fromhex(told.get("vertex", ""))),
            vectors.get("memory"),
            inner,
            claim,
            late_from_bytes(late, floats) if late else None,
            PrivateParameters(kept_F, _digest(bytes.fromhex(told.get("kept", "")))) if kept_F is not None else None,
            _sent(beside, left_N) if left_N is not None else None,
        )
    except (PeerFault, ValueError, *UNREADABLE):
        return None


def _sent(beside: dict[str, bytes], left_N: Tensor) -> InFlightUpdate:
    word = _SENT.decode(beside.get("sent", b""))
    if not word.bounds or word.bounds[-1][1] != len(left_N):
        raise ValueError("these are no parts of what was sent")
    wires = tuple(beside.get(f"wire/{part:06}", b"") for part in range(len(word.bounds)))
    claim = _digest(word.claim) if word.claim is not None else None
    return InFlightUpdate(
        _digest(word.root), claim, _digest(word.state), word.begins, EncodedUpdate(wires, left_N, word.bounds)
    )


def _fits(vector: Tensor) -> bool:
    return vector.ndim == 1 and vector.dtype == torch.float32 and bool(vector.isfinite().all())


def _digest(data: bytes) -> Digest:
    if len(data) != DIGEST_BYTES:
        raise ValueError(f"{len(data)} bytes are no digest")
    return Digest(data)
