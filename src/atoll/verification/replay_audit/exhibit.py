"""Exhibit of a trained segment: one blob that the trainer makes once and shows to all its auditors.

Holds the two states around the drawn segment, all links, and the x and error feedback that the update was made of.
Also holds the claims that the trainer's last two commitments name.
Invariants:
- Reading trusts no byte: it checks sizes and forms.
Not responsible for: all other checks (`judge`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import torch
from torch import Tensor

from atoll.base.errors import UNREADABLE, PeerFault
from atoll.base.ids import Digest
from atoll.base.limits import PARTS_OF_ANY
from atoll.crypto.digest import Buffer
from atoll.training.exchange.layout import ModelLayout
from atoll.training.exchange.tensorfile import dump, load
from atoll.verification.replay_audit.judge import ExhibitHashMismatch
from atoll.verification.replay_audit.replay import ChainLink, TrainerSnapshot, live_from_bytes
from atoll.verification.replay_audit.state_chain import ChainClaim, claim_name

LINKS_MAX = 2**16  # a round of half a million steps; a link is 64 bytes


class SegmentExhibit(msgspec.Struct, frozen=True, array_like=True):
    claim: ChainClaim
    last: ChainClaim | None  # claim of the last counted round before, if the trainer still has it
    links: Annotated[tuple[ChainLink, ...], msgspec.Meta(max_length=LINKS_MAX)]  # too many: refused unread
    begin: bytes  # the state before the drawn segment, as `live_bytes`
    end: bytes  # the state after it
    x: bytes  # parameters and buffers at the end of the round
    memory: bytes  # error feedback before the update was encoded; empty: none
    wires: Annotated[
        tuple[bytes, ...], msgspec.Meta(max_length=PARTS_OF_ANY)
    ] = ()  # only if encoders differ between machines


def shown_bytes(shown: SegmentExhibit) -> bytes:
    return msgspec.msgpack.encode(shown)


_SHOWN = msgspec.msgpack.Decoder(SegmentExhibit)


def shown_from_bytes(data: Buffer) -> SegmentExhibit:
    """Decode an exhibit. PeerFault if it has another form."""
    try:
        return _SHOWN.decode(data)
    except UNREADABLE as why:
        raise PeerFault("", f"what it lays out is no exhibit: {why}") from None


def vector_bytes(values_F: Tensor) -> bytes:
    return dump({"values": values_F}, {})


def vector_from_bytes(data: Buffer, floats: int) -> Tensor:
    tensors, _ = load(data)
    values_F = tensors.get("values")
    if values_F is None or values_F.shape != (floats,) or values_F.dtype != torch.float32:
        raise PeerFault("", f"not a vector of {floats} fp32 values")
    return values_F


def states_of(shown: SegmentExhibit, layout: ModelLayout) -> tuple[TrainerSnapshot, TrainerSnapshot]:
    """The states around the segment. PeerFault if one is malformed."""
    return live_from_bytes(shown.begin, layout), live_from_bytes(shown.end, layout)


def why_not_said(shown: SegmentExhibit, claim: Digest, last: Digest | None) -> str:
    """Why the trainer's commitments do not name these claims; empty if they do. Any peer can show junk."""
    if claim_name(shown.claim) != claim:
        return "it shows another claim than it committed to"
    if shown.last is not None and claim_name(shown.last) != last:
        return "its claim before that is not the one it committed to"
    return ""


def why_contradicts(shown: SegmentExhibit, steps: int, root: Digest) -> ExhibitHashMismatch | None:
    """A contradiction between the claim and the commitment that names it."""
    if (shown.claim.steps, shown.claim.root) != (steps, root):
        return ExhibitHashMismatch("its claim is of other steps, or of another update, than its commitment")
    return None
