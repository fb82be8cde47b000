"""`atoll checkpoint export --hf`: an agreed state as a model folder, with a card from the run's history.

Reads what `checkpoint` reads, unverified (`atoll verify` checks it). The folder appears complete or not at all.
Imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.base.errors import PeerFault, RunFailedError
from atoll.runtime.peer_folder import MODEL_CONFIG

if TYPE_CHECKING:
    from msgspec import UnsetType

    from atoll.base.ids import Digest
    from atoll.crypto.digest import Buffer
    from atoll.peer.verify.chain import StoredHistory
    from atoll.training.export import ModelCard
    from atoll.training.spec import TrainingSpec


def write_model_folder(kept: StoredHistory, folder: Path, round: int, state: Buffer, to: Path) -> list[Path]:
    """Write a model folder; returns its files. RunFailedError if this version cannot read the run or the state."""
    return write_files(model_files(kept, folder, round, state), to)


def model_files(kept: StoredHistory, folder: Path, round: int, state: Buffer) -> dict[str, Sequence[Buffer]]:
    """Content of a model folder by file name. RunFailedError if this version cannot read the run or the state."""
    from atoll.peer.settings import decode_settings
    from atoll.runtime.storage.stored_history import read_vertex
    from atoll.runtime.training_spec import parse_training_spec
    from atoll.training.export import hugging_face_files
    from atoll.training.recipe.state import state_from_bytes

    try:
        settings = decode_settings(read_vertex(kept, folder, -1)[1].settings)
        learning = parse_training_spec(settings)
        agreed = state_from_bytes(state, learning.layout)
        story = _story(kept, folder, round, settings.name, learning)._replace(config=_config(folder))
        beside = (_blob(folder, name) for name in (learning.tokenizer, learning.base))
        return hugging_face_files(agreed, learning.layout, story, *beside)
    except PeerFault as fault:
        raise RunFailedError(
            "E-CHK-06",
            f"this run has no model to export: {fault.what}",
            cause="a group that only reduces, or a run of another version",
            fix="leave out --hf to have the state as it is",
        ) from None


def write_files(files: Mapping[str, Sequence[Buffer]], to: Path) -> list[Path]:
    """Write these files into a folder that gets its name once it is complete."""
    from atoll.runtime.storage.atomic_files import write_durably
    from atoll.runtime.storage.ownership import private_folder

    aside = to.with_name(to.name + ".partial")
    private_folder(aside, "write it to another place")
    for name, pieces in files.items():
        write_durably(aside / name, pieces, exported=True)
    os.umask(umask := os.umask(0o077))  # reading the umask sets it
    aside.chmod(0o777 & ~umask)
    aside.rename(to)
    return [to / name for name in files]


def _blob(folder: Path, name: Digest | UnsetType) -> bytes:
    """Blob of the run; empty if the run has none or this folder does not hold it unchanged."""
    from msgspec import UNSET

    from atoll.runtime.storage.stored_history import blob_id_of

    if name is UNSET:
        return b""
    blob = folder / "blobs" / name.hex()
    return blob.read_bytes() if blob.exists() and blob_id_of(blob) == name else b""


def _config(folder: Path) -> dict[str, Any] | None:
    """The configuration that this peer's own loop attached with its model; None if there is none."""
    import json

    file = folder / MODEL_CONFIG
    return json.loads(file.read_bytes()) if file.exists() else None


def what_is(files: list[Path]) -> str:
    """Kind of content in the written folder, for people."""
    return "adapters" if any(file.name.startswith("adapters.") for file in files) else "model"


def _story(kept: StoredHistory, folder: Path, round: int, run: str, learning: TrainingSpec) -> ModelCard:
    from msgspec import UNSET

    from atoll.cli.stored_vertices import validated
    from atoll.runtime.storage.stored_history import read_vertex
    from atoll.training.export import CardContributor, ModelCard
    from atoll.wire.codec import decode_statement, vertex_id
    from atoll.wire.messages.statements import Commitment

    shares: dict[str, CardContributor] = {}
    names: dict[str, str] = {}
    losses: list[float] = []
    for number in [-1, *(r for r in kept.rounds if r <= round)]:
        vertex, body = read_vertex(kept, folder, number)
        names |= {member.peer: member.name for member in body.members if member.name}
        losses += [loss] if body.commits and (loss := body.metrics.reported_loss) is not None else []
        for signed in body.commits:
            commit = decode_statement(signed.body, signed.signer)
            if isinstance(commit, Commitment):
                before = shares.get(signed.signer, CardContributor("", 0, 0, 0))
                steps, samples = before.steps + commit.steps, before.samples + commit.samples
                shares[signed.signer] = CardContributor("", before.rounds + 1, steps, samples)
    given = [share._replace(name=names.get(peer) or peer) for peer, share in shares.items()]
    recipe = learning.recipe
    sent, alone = _bytes_until(folder / "facts.jsonl", round)
    return ModelCard(
        run=run,
        round=round,
        vertex=vertex_id(vertex.body).hex(),
        state=body.state.hex(),
        genesis=vertex_id(read_vertex(kept, folder, -1)[0].body).hex(),
        model=recipe.model,
        data=Path(learning.data).name,
        inner_steps=recipe.schedule.inner_steps,
        codecs=(recipe.coding.up, recipe.coding.down),
        trained=body.trained,
        contributors=tuple(sorted(given, key=lambda c: (-c.samples, c.name))),
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        sent_bytes=sent,
        data_parallel_bytes=alone,
        tokenizer="" if learning.tokenizer is UNSET else learning.tokenizer.hex(),
        validated=tuple(validated(kept, folder, round).items()),
    )


def _bytes_until(record: Path, round: int) -> tuple[int | None, int | None]:
    """(bytes sent by this peer, bytes of data-parallel training) up to a round; None if the event log does not
    cover it.
    """
    from atoll.runtime.event_log import ROTATED, RunStatus, entries_in

    if not record.exists():
        return None, None
    progress = RunStatus()
    for number, entry in enumerate(entries_in(record)):
        if number == 0 and entry.get("fact") == ROTATED:
            return None, None  # the log was rotated, so it does not begin where this peer did
        if entry.get("round", -2) <= round:
            progress.fold(entry)
    return (progress.bytes_out, progress.bytes_data_parallel) if progress.trained else (None, None)
