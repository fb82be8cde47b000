"""Bytes of a known length have no other in any message, statement, vertex body or part of genesis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from atoll.base.errors import PeerFault
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId
from atoll.training.spec import TrainingSpec
from atoll.wire.codec import AnyMessage, decode_message, decode_statement, encode
from atoll.wire.messages.history import ChunkRequest
from atoll.wire.messages.membership import Hello, ReportMessage
from atoll.wire.messages.round import PartRequest
from atoll.wire.messages.statements import AnyStatement, Proposal, ReadyReport, SignedStatement
from atoll.wire.messages.vertex import Vertex, VertexBody

EVE = PeerId("eve")
NO_LONGER_THAN_THEIR_FRAME = {  # what has any length, and why that costs nothing more than its message
    ("SignedStatement", "body"): "a statement, decoded and bounded by itself",
    ("Vertex", "body"): "a vertex body, decoded and bounded by itself",
    ("ProposalMessage", "body"): "a vertex body, decoded and bounded by itself",
    ("Vertex", "recovery"): "a statement with its signature",
    ("ManifestResponse", "here"): "one byte per chunk of a blob, compared with the manifest",
    ("RowInnerProducts", "products"): "as many as its contributors, at most WEIGHED_ROWS_MAX",
    ("AgreedWeights", "compared"): "one digest, or one for each part; compared with what it should be",
    ("AgreedWeights", "weights"): "compared with the number of its peers",
    ("Commitment", "links"): "of a statement of at most COMMIT_BYTES_MAX",
    ("Member", "links"): "from a commitment of at most COMMIT_BYTES_MAX",
    ("VertexBody", "settings"): "genesis alone has them; their own decoder bounds what they hold",
}


def structs_in(*types: Any) -> dict[str, inspect.StructType]:
    """Every struct that a value of these types may hold, by its name."""
    found: dict[str, inspect.StructType] = {}

    def walk(kind: Any) -> None:
        if isinstance(kind, inspect.StructType):
            if kind.cls.__name__ in found:
                return
            found[kind.cls.__name__] = kind
        for part in parts_of(kind):
            walk(part)

    for kind in inspect.multi_type_info(types):
        walk(kind)
    return found


def parts_of(kind: Any) -> Iterator[Any]:
    for name in ("types", "fields", "item_types"):
        for part in getattr(kind, name, ()):
            yield part.type if isinstance(part, inspect.Field) else part
    for name in ("item_type", "key_type", "value_type", "type"):
        if isinstance(part := getattr(kind, name, None), inspect.Type):
            yield part


def leaves(kind: Any) -> Iterator[Any]:
    """The plain kinds in a field; structs in it have fields of their own."""
    if not isinstance(kind, inspect.StructType):
        yield kind
        for part in parts_of(kind):
            yield from leaves(part)


WIRE = structs_in(AnyMessage, AnyStatement, VertexBody, Vertex)
FIELDS = [
    (name, field.encode_name, kind) for name, s in WIRE.items() for field in s.fields for kind in leaves(field.type)
]


def test_all_bytes_on_the_wire_have_a_longest_length_or_a_reason_for_none():
    endless = {(s, f) for s, f, kind in FIELDS if isinstance(kind, inspect.BytesType) and kind.max_length is None}
    assert endless == set(NO_LONGER_THAN_THEIR_FRAME)


def test_names_of_peers_have_a_longest_length():
    """A name in a log line or a vertex is no longer than a peer id can be."""
    for name, good in (("x" * 64, True), ("x" * 65, False), ("x" * 2**20, False)):
        leave = ReportMessage(SignedStatement(PeerId(name), b"", b""))
        if good:
            assert decode_message(encode(leave), EVE) == leave
            continue
        with pytest.raises(PeerFault) as fault:
            decode_message(encode(leave), EVE)
        assert len(str(fault.value)) < 200


@pytest.mark.parametrize("kind", [Digest, Digest | msgspec.UnsetType, tuple[Digest, ...]])
def test_a_digest_has_one_length(kind: Any):
    assert [
        (k.min_length, k.max_length) for k in leaves(inspect.type_info(kind)) if isinstance(k, inspect.BytesType)
    ] == [(DIGEST_BYTES, DIGEST_BYTES)]


@pytest.mark.parametrize("size", [0, DIGEST_BYTES - 1, DIGEST_BYTES + 1, 2**20])
def test_a_digest_of_another_length_is_a_fault_with_a_short_reason(size: int):
    wrong = Digest(bytes(size))
    for message in (ChunkRequest(wrong, 0), Hello(wrong, 0), PartRequest(0, 0, "", wrong)):
        with pytest.raises(PeerFault, match="bytes") as fault:
            decode_message(encode(message), EVE)
        assert len(str(fault.value)) < 200
    for statement in (ReadyReport(wrong, wrong), Proposal(0, 0, wrong)):
        with pytest.raises(PeerFault, match="bytes"):
            decode_statement(encode(statement), EVE)


def test_digests_of_genesis_have_one_length_too():
    names = {
        f.encode_name
        for f in structs_in(TrainingSpec)["TrainingSpec"].fields
        if f.encode_name.endswith(("blob", "base"))
    }
    assert names == {"data_blob", "base"}
    for field in structs_in(TrainingSpec)["TrainingSpec"].fields:
        for kind in leaves(field.type):
            assert not isinstance(kind, inspect.BytesType) or kind.max_length == DIGEST_BYTES
