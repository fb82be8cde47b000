"""History in a run folder, read beside a running peer or without one. Unverified: `atoll verify` checks it.

Invariants:
- The folder's lock is not taken, and no file is changed.
- Torch is not imported.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from atoll.base.errors import UNREADABLE, AtollError, PeerFault, RunFailedError, UsageError
from atoll.base.ids import ATTACHED, Digest
from atoll.base.limits import BLOB_CHUNK
from atoll.base.units import history_round_text
from atoll.runtime.storage.ownership import read_secret

if TYPE_CHECKING:
    from atoll.peer.verify.chain import StoredHistory
    from atoll.wire.messages.vertex import Vertex, VertexBody


class _LearningData(msgspec.Struct, frozen=True):
    """What is read of a `TrainingSpec` without torch."""

    data: str = ""


_LEARNING = msgspec.msgpack.Decoder(_LearningData)


@contextmanager
def kept_in(folder: Path) -> Iterator[StoredHistory]:
    """The history in this folder at one moment. UsageError if there is none; changes no file."""
    from atoll.peer.verify.chain import StoredHistory

    path = folder / "kept.sqlite"
    if not path.exists():
        raise _no_run(folder)
    # a write-ahead log beside the database belongs to a running or killed peer and has to be read too; without one
    # the file is complete, and sqlite need not create a log in a folder that may belong to another user
    mode = "mode=ro" if path.with_name("kept.sqlite-wal").exists() else "immutable=1"
    try:
        database = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, isolation_level=None)
    except sqlite3.Error as why:
        raise _unreadable(path, why) from why
    try:
        yield _kept(database, folder, StoredHistory)
    except sqlite3.DatabaseError as why:
        raise _unreadable(path, why) from why
    finally:
        database.close()


def _kept(database: sqlite3.Connection, folder: Path, kept: type[StoredHistory]) -> StoredHistory:
    def value(name: str) -> bytes | None:
        row = database.execute("SELECT value FROM kept WHERE name = ?", (name,)).fetchone()
        return bytes(row[0]) if row is not None else None

    database.execute("BEGIN")  # one transaction for all reads
    run, genesis = value("run"), value("genesis")
    if run is None or genesis is None:
        raise _no_run(folder)
    names = database.execute(
        "SELECT substr(name, 8) FROM kept WHERE name GLOB 'vertex/[0-9]*' ORDER BY CAST(substr(name, 8) AS INTEGER)"
    )
    rounds = [int(name) for (name,) in names if name.isdecimal()]
    kept_rows = database.execute("SELECT CAST(substr(name, 6) AS INTEGER) FROM kept WHERE name GLOB 'rows/[0-9]*'")
    updates = sorted(round for (round,) in kept_rows)
    era = lambda round: value(f"sealed/{round}") or value(f"era/{round}")  # noqa: E731  # as short as its neighbour
    vertex, branch = (lambda round, kind=kind: value(f"{kind}/{round}") for kind in ("vertex", "branch"))
    ticket = (value("ticket") or b"").decode()
    return kept(run, genesis, rounds, vertex, era, value("pieces") or b"", branch, updates, ticket)


def read_vertex(kept: StoredHistory, folder: Path, round: int) -> tuple[Vertex, VertexBody]:
    """Vertex of a listed round, unverified. RunFailedError if it cannot be read."""
    from atoll.wire.codec import decode_body, decode_vertex

    data = kept.genesis if round == -1 else kept.read(round)
    assert data is not None  # it was listed in this very transaction
    try:
        vertex = decode_vertex(data)
        return vertex, decode_body(vertex.body)
    except PeerFault as fault:
        raise RunFailedError(
            "E-CHK-02",
            f"the vertex of {history_round_text(round, None)} cannot be read: {fault.what}",
            cause="this disk or a copy of this folder lost or changed bytes",
            fix=f"atoll verify {folder}",
        ) from fault


def trains_in_a_loop(folder: Path) -> bool:
    """True if the peer of this folder is a member that trains in a program of its own.

    False also if this cannot be read: the reason is reported where it matters.
    """
    from atoll.crypto.identity import Identity
    from atoll.peer.settings import settings_of_run

    try:
        with kept_in(folder) as kept:
            _, first = read_vertex(kept, folder, -1)
            _, newest = read_vertex(kept, folder, max(kept.rounds, default=-1))
        loops = is_run_of_loops(settings_of_run(first).learning)
        me = Identity.from_bytes(read_secret(folder / "peer.key") or b"").peer
    except (AtollError, *UNREADABLE):
        return False
    trains = any(member.peer == me and member.role != "observer" for member in newest.members)
    return trains and loops


def is_run_of_loops(learning: bytes) -> bool:
    """True if members of a run with these encoded settings train in programs of their own."""
    try:
        return _LEARNING.decode(learning).data == ATTACHED
    except UNREADABLE:
        return False


def agreed_state(folder: Path, body: VertexBody) -> Path:
    """File of the state that this vertex agreed on. RunFailedError if its bytes are others."""
    source = folder / "blobs" / body.state.hex()
    if blob_id_of(source) != body.state:
        raise RunFailedError(
            "E-CHK-05",
            f"the state of {history_round_text(body.round, body.trained)} is not the agreed one",
            cause="this disk or a copy of this folder lost or changed bytes",
            fix=f"atoll verify {folder} --deep",
        )
    return source


def blob_id_of(path: Path) -> Digest:
    """Digest of these bytes, read chunk by chunk."""
    from atoll.crypto.digest import BlobManifest, blob_id, digest

    chunks: list[Digest] = []
    size_bytes = 0
    with path.open("rb") as file:
        while data := file.read(BLOB_CHUNK):
            chunks.append(digest(data))
            size_bytes += len(data)
    return blob_id(BlobManifest(size_bytes, tuple(chunks)))


def _no_run(folder: Path) -> UsageError:
    return UsageError(
        "E-VER-12",
        f"no history is kept in {folder}",
        cause="this is not a peer's folder, or its peer has not received genesis yet",
        fix="name the folder of a peer: the --dir of `atoll up` or `atoll join`; or found a run: atoll up",
    )


def _unreadable(path: Path, why: Exception) -> RunFailedError:
    return RunFailedError(
        "E-VER-13",
        f"{path} cannot be read: {why}",
        cause="this disk damaged the database, or it was copied while a peer was writing to it",
        fix="atoll join TICKET --dir NEW_FOLDER fetches the whole history again",
    )
