"""Private state on disk: error feedback, moments, the last claim, late work and private parameters.

Two files exist. The current file matches one vertex. The staged file is written while a round is under way, before
its vertex is persisted: it holds the update that was sent, and the state as it will be if a vertex counts that
update. So one of the two matches any vertex found at a start, and a crash between writes costs nothing.

    vertex v ─► train, encode ─► staged {after v, root} ─► advance ─► vertex w is persisted ─┐
        w counts all of root: the staged file is promoted ◄──────────────────────────────────┤
        w counts something else: the file is written anew ◄──────────────────────────────────┘

Invariants: a state that is read is whole, belongs to this model and names its vertex.
Not responsible for: what a vertex counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from atoll.base.errors import UNREADABLE, PeerFault
from atoll.base.ids import DIGEST_BYTES, Digest
from atoll.base.limits import MIB
from atoll.crypto.digest import Buffer, blob_id, manifest_of
from atoll.features.partition_training.tensors import UpdateWithoutQuorum, late_bytes, late_from_bytes
from atoll.peer.tasks import LocalUpdateOutcome
from atoll.runtime.storage.store import PeerStore
from atoll.training.codec.blocks import largest_of, tensor_over
from atoll.training.exchange.tensorfile import load, pieces_of
from atoll.training.recipe.error_feedback import EncodedUpdate
from atoll.training.recipe.private_parameters import PrivateModelCopy
from atoll.training.recipe.update import Bounds

FORMAT = "atoll/private/4"
MAPPED_FROM_BYTES = MIB  # a map of a smaller file costs more than its memory
# prefixes of names: vectors come first in the file, the longer values before the shorter ones, so all are aligned
VECTOR, HALF, RAW = "f32/", "half/", "u8/"
BYTES = ("inner", "claim", "late")  # fields stored as bytes; the others are vectors


@dataclass(frozen=True)
class InFlightUpdate:
    """An update in a round that has no vertex yet."""

    root: Digest  # root of its parts, as in the commitment
    claim: Digest | None  # claim named by the commitment; None unless rounds are audited
    state: Digest  # state on which it builds
    begins: int  # start of its fragment in the vector
    update: EncodedUpdate


@dataclass(frozen=True)
class PrivateState:
    """Valid for exactly one vertex; `kept` names its own state."""

    vertex: Digest | None  # vertex for which it is valid; with `sent`, the one before
    memory_F: Tensor | None = None  # error feedback; with `sent` of one fragment, that before the update
    inner: Buffer = b""  # encoded moments of the inner optimizer
    claim: bytes = b""  # last claim in a vertex; empty unless rounds are audited
    late: UpdateWithoutQuorum | None = None  # work done while partitioned that no vertex counts yet
    kept: PrivateModelCopy | None = None  # private parameters of the recipe
    sent: InFlightUpdate | None = None  # update in flight; this state is valid for the vertex that counts it

    def matches(self, vertex: Digest, settlement: LocalUpdateOutcome | None) -> bool:
        """True if the state is valid for this vertex; `settlement` is what it counts of the local peer."""
        if self.sent is None:
            return self.vertex == vertex
        if settlement is None or settlement.before != self.vertex:
            return False
        return (settlement.root, settlement.claim) == (self.sent.root, self.sent.claim)


NOTHING = PrivateState(None)


def matching_state(
    files: Sequence[PrivateState], vertex: Digest, settlements: Sequence[LocalUpdateOutcome]
) -> tuple[PrivateState, LocalUpdateOutcome | None]:
    """The state that matches this vertex, and what a vertex counts of the update in it.

    `settlements` are those of this vertex and the one before. If this vertex counts nothing of the local peer,
    the state of the previous vertex is still valid: a restart has lost the work of such a round.
    """
    newest, before = (*settlements, None, None)[:2]
    for one in files:
        if one.matches(vertex, newest):
            return one, newest
    if newest is not None and newest.root is None:
        for one in files:
            if one.matches(newest.before, before):
                return one, before
    return NOTHING, None


def write_span(memory_F: Tensor | None, left_N: Tensor, begins: int, floats: int) -> Tensor:
    """Error feedback (F,) after a round of one fragment that left `left_N` (N,), which may be overwritten."""
    if len(left_N) >= floats:
        return left_N[:floats]
    if memory_F is None:
        memory_F = torch.zeros(floats, dtype=left_N.dtype)
    memory_F[begins : begins + len(left_N)] = left_N
    return memory_F


# ---- as bytes ----------------------------------------------------------------------------------------------


class _InFlightHeader(msgspec.Struct, frozen=True):
    """Fields of `InFlightUpdate` that are neither vectors nor wires."""

    root: bytes
    claim: bytes | None
    state: bytes
    begins: int
    bounds: Bounds


_SENT = msgspec.msgpack.Decoder(_InFlightHeader)


def write_private(store: PeerStore, private: PrivateState) -> PrivateState:
    """Write without copying tensors; a state with `sent` is staged.

    Returns the same state. Its long vectors are maps of the file: they need no memory that cannot be taken back.
    """
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
    tensors = {(HALF if v.dtype == torch.bfloat16 else VECTOR) + name: v for name, v in vectors.items()}
    tensors |= {RAW + name: tensor_over(data, torch.uint8) for name, data in beside.items() if len(data)}
    _, *body = pieces_of(tensors, {})
    told["body"] = blob_id(manifest_of(*body)).hex()
    view = store.private.write(*pieces_of(tensors, told), ahead=sent is not None)
    if len(view) < MAPPED_FROM_BYTES:
        return private
    mapped, _ = _vectors_in(load(view)[0])
    if private.kept is not None:
        private = replace(private, kept=replace(private.kept, x_F=mapped["kept"]))
    if sent is not None:
        private = replace(private, sent=replace(sent, update=replace(sent.update, memory_F=mapped["left"])))
    return replace(private, memory_F=mapped.get("memory"))


def read_private(store: PeerStore, floats: int) -> list[PrivateState]:
    """The current and the staged state for a model of `floats` values.

    A damaged file is left out: that costs private state, never agreed state.
    """
    found = (store.private.read(), store.private.read(ahead=True))
    return [one for data in found if data is not None and (one := _read(data, floats)) is not None]


def _read(data: memoryview, floats: int) -> PrivateState | None:
    try:
        tensors, told = load(data)
        if told.get("body") != blob_id(manifest_of(*pieces_of(tensors, {})[1:])).hex():
            return None  # files are overwritten: a power cut may leave pages of another round
        vectors, others = _vectors_in(tensors)
        whole = {name: vector for name, vector in vectors.items() if name != "left"}
        if told.get("format") != FORMAT or any(vector.shape != (floats,) for vector in whole.values()):
            return None
        if not all(_fits(vector) for vector in vectors.values()):
            return None
        beside = {name.removeprefix(RAW): value.numpy().tobytes() for name, value in others.items()}
        inner, claim, late = (beside.get(name, b"") for name in BYTES)
        kept_F, left_N = vectors.get("kept"), vectors.get("left")
        return PrivateState(
            _digest(bytes.fromhex(told.get("vertex", ""))),
            vectors.get("memory"),
            inner,
            claim,
            late_from_bytes(late, floats) if late else None,
            PrivateModelCopy(kept_F, _digest(bytes.fromhex(told.get("kept", "")))) if kept_F is not None else None,
            _sent(beside, left_N) if left_N is not None else None,
        )
    except (PeerFault, ValueError, *UNREADABLE):
        return None


def _vectors_in(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(vectors by name, the other tensors of a file by their names there)."""
    vectors = {name.partition("/")[2]: value for name, value in tensors.items() if not name.startswith(RAW)}
    return vectors, {name: value for name, value in tensors.items() if name.startswith(RAW)}


def _sent(beside: dict[str, bytes], left_N: Tensor) -> InFlightUpdate:
    word = _SENT.decode(beside.get("sent", b""))
    if not word.bounds or word.bounds[-1][1] != len(left_N):
        raise ValueError("the bounds do not match the update in flight")
    wires = tuple(beside.get(f"wire/{part:06}", b"") for part in range(len(word.bounds)))
    claim = _digest(word.claim) if word.claim is not None else None
    return InFlightUpdate(
        _digest(word.root), claim, _digest(word.state), word.begins, EncodedUpdate(wires, left_N, word.bounds)
    )


def _fits(vector: Tensor) -> bool:
    return vector.ndim == 1 and vector.dtype in (torch.float32, torch.bfloat16) and largest_of(vector) < torch.inf


def _digest(data: bytes) -> Digest:
    if len(data) != DIGEST_BYTES:
        raise ValueError(f"{len(data)} bytes are not a digest")
    return Digest(data)
