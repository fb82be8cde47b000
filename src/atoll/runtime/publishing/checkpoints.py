"""Agreed checkpoints of a run folder, one after the other, while a peer runs in it or after it ended.

Invariants:
- The bytes of a state are checked against the digest that its vertex names.
- Nothing in the folder is changed; the peer is only asked whether it runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from atoll.base.errors import RunFailedError, UsageError
from atoll.base.ids import Digest, one_line
from atoll.peer.governance.settings_change import is_over
from atoll.peer.settings import settings_of_run
from atoll.runtime.control.socket import is_running
from atoll.runtime.storage.atomic_files import map_path
from atoll.runtime.storage.stored_history import agreed_state, kept_in, read_vertex
from atoll.wire.codec import vertex_id
from atoll.wire.messages.vertex import VertexBody

POLL_S = 1.0  # seconds between two looks at a folder; a look reads the database once


class AgreedCheckpoint(NamedTuple):
    """A round whose agreed state is in the folder."""

    folder: Path
    run: str
    run_id: Digest
    vertex: Digest
    body: VertexBody
    is_last: bool  # the run is over

    def state(self) -> memoryview:
        """The checked state, as a map of its file.

        Raises FileNotFoundError if the peer removed it meanwhile, RunFailedError if it differs.
        """
        state = map_path(self.folder / "blobs" / self.body.state.hex())  # open, so that its bytes stay
        agreed_state(self.folder, self.body)
        return state


def newest_checkpoint(folder: Path) -> AgreedCheckpoint | None:
    """The newest round whose state is here; None if no state is. UsageError if the folder holds no run."""
    with kept_in(folder) as kept:
        genesis, first = read_vertex(kept, folder, -1)
        settings = settings_of_run(first)
        for round in (*reversed(kept.rounds), -1):
            vertex, body = read_vertex(kept, folder, round)
            if (folder / "blobs" / body.state.hex()).exists():
                ids = vertex_id(genesis.body), vertex_id(vertex.body)
                return AgreedCheckpoint(folder, one_line(settings.name), *ids, body, is_over(settings, body))
    return None


def follow_checkpoints(folder: Path, every: int = 1, *, once: bool = False) -> Iterator[AgreedCheckpoint]:
    """Newest checkpoints, `every` rounds apart or more, until the peer has ended or the run is over.

    The first one comes at once, the last one whatever its distance. `once`: only the newest one.
    """
    before: AgreedCheckpoint | None = None
    while True:
        runs = not once and is_running(folder)  # asked first: what it agreed on before its end is read below
        try:
            found = newest_checkpoint(folder)
        except UsageError:
            if not runs:
                raise
            found = None  # it joins, and does not know the run yet
        ends = not runs or (found is not None and found.is_last)
        if found is not None and _is_due(found, before, every, ends):
            yield found
            before = found
        if before is None and ends:
            raise RunFailedError(
                "E-CHK-16",
                f"no agreed state of the run is in {folder}",
                cause="its peer ended before it had one",
                fix=f"atoll up --dir {folder}, or atoll checkpoint pull from members",
            )
        if ends:
            return
        time.sleep(POLL_S)


def _is_due(found: AgreedCheckpoint, before: AgreedCheckpoint | None, every: int, ends: bool) -> bool:
    if before is None:
        return True
    if found.body.state == before.body.state:
        return False  # members only assembled
    return ends or found.body.round >= before.body.round + every
