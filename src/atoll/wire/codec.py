"""Codec of messages, statements, vertex bodies and vertices: msgspec MessagePack, validated on decode.

Invariants:
- For any bytes, `decode_*` returns a valid value or raises PeerFault.
- Nothing is evaluated, and nothing is allocated beyond the size of the input.
- Unknown fields are accepted, so newer peers can add some; unknown message types are a fault.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from atoll.base.errors import UNREADABLE, PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.base.limits import CONTROL_FRAME_MAX
from atoll.base.machine import Message
from atoll.crypto.digest import digest
from atoll.wire.messages.audits import ExhibitRequest, ExhibitResponse, MalformedRowShown
from atoll.wire.messages.history import (
    ChunkRequest,
    ChunkResponse,
    EraSignatures,
    EraSignaturesRequest,
    ManifestRequest,
    ManifestResponse,
    VerticesRequest,
    VerticesResponse,
)
from atoll.wire.messages.membership import Hello, JoinRefused, Ping, PingReply, ReportMessage
from atoll.wire.messages.preference import PreferenceRequest, PreferenceResponse
from atoll.wire.messages.round import (
    CommitmentRequest,
    PartialSum,
    PartReductionDeclined,
    PartRequest,
    PartResponse,
    PartResult,
    PartRowProducts,
    PartStatementsRequest,
    ProposalMessage,
    ResendRequest,
    RowContribution,
    RowRequest,
    RowReroutedHint,
    RowResponse,
    TimeoutMessage,
    UpdateCommitmentMessage,
    ViewChangePreVote,
    VoteMessage,
)
from atoll.wire.messages.statements import AgreedWeights, AnyStatement, BaseStatement, SignedStatement
from atoll.wire.messages.vertex import Vertex, VertexBody

AnyMessage = (
    UpdateCommitmentMessage
    | RowContribution
    | PartResult
    | CommitmentRequest
    | PartRequest
    | RowRequest
    | PartStatementsRequest
    | RowResponse
    | PartResponse
    | ProposalMessage
    | VoteMessage
    | ResendRequest
    | PartialSum
    | RowReroutedHint
    | PartReductionDeclined
    | PartRowProducts
    | TimeoutMessage
    | ViewChangePreVote
    | VerticesRequest
    | VerticesResponse
    | ManifestRequest
    | ManifestResponse
    | ChunkRequest
    | ChunkResponse
    | EraSignatures
    | EraSignaturesRequest
    | Ping
    | PingReply
    | ReportMessage
    | JoinRefused
    | ExhibitRequest
    | ExhibitResponse
    | MalformedRowShown
    | PreferenceRequest
    | PreferenceResponse
    | Hello
)

_ENCODER = msgspec.msgpack.Encoder()
_MESSAGE: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)
_STATEMENT: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyStatement)
_BODY = msgspec.msgpack.Decoder(VertexBody)
_VERTEX = msgspec.msgpack.Decoder(Vertex)


def encode(value: Message | BaseStatement | VertexBody | Vertex | AgreedWeights) -> bytes:
    return _ENCODER.encode(value)


def decode_message(data: bytes | memoryview, who: PeerId) -> Message:
    if len(data) > CONTROL_FRAME_MAX:
        raise PeerFault(who, f"message of {len(data)} bytes, limit {CONTROL_FRAME_MAX}")
    return _decode(_MESSAGE, data, who, "message")


def decode_statement(data: bytes, who: PeerId) -> BaseStatement:
    return _decode(_STATEMENT, data, who, "statement")


def statement_in(signed: SignedStatement) -> BaseStatement | None:
    """Decode the statement without checking its signature; None if it is unreadable.

    Only a damaged history holds unreadable statements. Readers skip them, and `atoll verify` reports the vertex.
    """
    try:
        return decode_statement(signed.body, signed.signer)
    except PeerFault:
        return None


def decode_body(data: bytes, who: PeerId = PeerId("")) -> VertexBody:
    try:
        return _body_in(data)
    except PeerFault as fault:  # the sender is at fault
        raise PeerFault(who, fault.what) from None


@lru_cache(maxsize=16)  # independent of the sender: the newest bodies are decoded often
def _body_in(data: bytes) -> VertexBody:
    return _decode(_BODY, data, PeerId(""), "vertex body")


def decode_vertex(data: bytes, who: PeerId = PeerId("")) -> Vertex:
    return _decode(_VERTEX, data, who, "vertex")


def vertex_id(body: bytes) -> Digest:
    return digest(body)


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes | memoryview, who: PeerId, what: str) -> Any:
    try:
        return decoder.decode(data)
    except UNREADABLE as why:
        raise PeerFault(who, f"not a valid {what}: {why}") from None
