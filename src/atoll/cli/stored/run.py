"""Status and model of a run from its folder, where no peer is running. Unverified: `atoll verify` checks it.

Invariants:
- Torch is imported only to write a model.
- Nothing but the exported file is written.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.base.errors import AtollError, PeerFault, RunFailedError, UsageError
from atoll.base.ids import PeerId, names_of, one_line, short_id
from atoll.base.units import bytes_text
from atoll.cli.say import run_title, say
from atoll.runtime.storage.ownership import is_in_use
from atoll.runtime.storage.stored_history import agreed_state

if TYPE_CHECKING:
    from atoll.runtime.event_log import RunStatus
    from atoll.wire.messages.vertex import VertexBody

NO_PEER = "E-DOOR-01"
HEADER_MAX = 16 * 2**20  # bytes read of a state, without its tensors
MODEL_FILES = ("model.safetensors", "adapters.safetensors")  # of a run that is over


def learned_text(s: dict[str, Any]) -> str:
    """Training loss and amount of a status, for people."""
    loss = "not reported" if s["loss"] is None else f"{s['loss']:.4f}"
    return f"training loss {loss}, {s['tokens']:,} {s['unit']} learned"


def model_text(s: dict[str, Any]) -> str:
    """The model of a status and its size, for people."""
    model = "model of an own loop" if s["model"] == "attached" else s["model"]
    return f"{model}, {s['parameters']:,} parameters"


def stored_status(folder: Path) -> dict[str, Any] | None:
    """How the run of this folder stood when its peer ended; None if the folder holds no run."""
    from contextlib import suppress

    from atoll.peer.governance.settings_change import is_over, settings_after
    from atoll.peer.settings import settings_of_run
    from atoll.runtime.control.agreed_loss import agreed_loss
    from atoll.runtime.event_log import RunStatus, entries_in, member_entry, plain
    from atoll.runtime.storage.stored_history import kept_in, read_vertex
    from atoll.wire.codec import vertex_id

    if not (folder / "kept.sqlite").exists():
        return None
    try:
        with kept_in(folder) as kept:
            genesis, first = read_vertex(kept, folder, -1)
            _, body = read_vertex(kept, folder, max(kept.rounds, default=-1))
            progress, rounds = RunStatus(), {*kept.rounds}
            with suppress(FileNotFoundError):
                progress = RunStatus.of(entries_in(folder / "facts.jsonl"))

            def body_of(round: int) -> VertexBody | None:
                with suppress(AtollError):  # damage, which `atoll verify` reports
                    return read_vertex(kept, folder, round)[1] if round in rounds else None
                return None

            loss = agreed_loss(body, body_of, progress.loss)
    except UsageError:
        return None  # it was to join a run, and never knew it
    settings = settings_of_run(first)
    return {
        "running": False,
        "run": one_line(settings.name),
        "run_id": vertex_id(genesis.body).hex(),
        "folder": str(folder),
        "over": is_over(settings, body),
        "round": body.round,
        "trained": body.trained,
        "rounds": settings_after(settings, body).rounds,
        "loss": loss,
        "tokens": _learned(folder, first, body, progress),
        "unit": progress.unit,
        "model": progress.model,
        "parameters": progress.parameters,
        "state": body.state.hex(),
        "bytes_out": progress.bytes_out,
        "bytes_in": progress.bytes_in,
        "members": [plain(member_entry(m)) | {"link": "", "rtt_ms": None} for m in body.members],
        "model_file": next((str(folder / name) for name in MODEL_FILES if (folder / name).exists()), None),
    }


def _learned(folder: Path, genesis: VertexBody, head: VertexBody, progress: RunStatus) -> int:
    """Tokens or samples in the agreed state, if it is here: a latecomer's log lacks the rounds before it came."""
    from contextlib import suppress

    import msgspec

    from atoll.peer.settings import settings_of_run

    with (
        suppress(OSError, KeyError, TypeError, ValueError),
        (folder / "blobs" / head.state.hex()).open("rb") as file,
    ):
        size_bytes = min(int.from_bytes(file.read(8), "little"), HEADER_MAX)  # a safetensors file
        tokens = int(msgspec.json.decode(file.read(size_bytes))["__metadata__"]["tokens"])
        recipe = msgspec.msgpack.decode(settings_of_run(genesis).learning)["recipe"]
        return tokens // recipe["seq_len"] * max(1, progress.seq_len)
    return progress.tokens


def say_stored_status(s: dict[str, Any]) -> None:
    """Print the status of a folder where no peer is running."""
    title = run_title(s["run"], s["run_id"][:8])
    of = f" of {s['rounds']}" if s["rounds"] else ""
    stands = f"over after {s['trained']} rounds" if s["over"] else f"{s['trained']}{of} rounds trained"
    no_peer = "a peer is starting or ending" if is_in_use(Path(s["folder"])) else "no peer is running"
    say(f"{title}: {stands}; {no_peer} in {s['folder']}")
    if s["trained"]:
        say(f"  {learned_text(s)}")
    if s["model"]:
        say(f"  {model_text(s)}, state {s['state'][:16]}")
    say(f"  sent {bytes_text(s['bytes_out'])}, received {bytes_text(s['bytes_in'])}")
    names = ", ".join(
        names_of((PeerId(m["peer"]), m["name"] or short_id(m["peer"])) for m in s["members"]).values()
    )
    say(f"  members of the last round: {names}")
    if s["over"]:
        where = f"the agreed model is in {s['model_file']}" if s["model_file"] else "atoll export writes its model"
        say(f"  {where}")
    else:
        how = "its own program goes" if s["model"] == "attached" else f"atoll up --dir {s['folder']} goes"
        say(f"  {how} on from here")


def export_stored(folder: Path, path: Path | None) -> dict[str, Any] | None:
    """Write the model of the newest state in this folder; None if the folder holds no run. Raises AtollError."""
    from atoll.runtime.storage.stored_history import kept_in, read_vertex

    if not (folder / "kept.sqlite").exists():
        return None
    try:
        with kept_in(folder) as kept:
            first = read_vertex(kept, folder, -1)[1]
            bodies = (read_vertex(kept, folder, round)[1] for round in (*reversed(kept.rounds), -1))
            body = next((body for body in bodies if (folder / "blobs" / body.state.hex()).exists()), None)
    except UsageError:
        return None
    if body is None:
        raise UsageError(
            "E-CHK-03",
            f"no state of the run is in {folder}",
            cause="its peer ended before it had one",
            fix=f"atoll up --dir {folder}, or atoll checkpoint pull from members",
        )
    path, _ = write_model(agreed_state(folder, body), first, path or folder)
    return {"path": str(path), "trained": body.trained}


def export_target(file: Path | None) -> Path | None:
    """Where to write a model: a file, or a folder for its usual name. UsageError if other data would be lost."""
    if file is None:
        return None
    path = file.expanduser().absolute()
    if not path.parent.is_dir():
        raise UsageError(
            "E-ARG-04",
            f"cannot write {path}: there is no folder {path.parent}",
            fix=f"mkdir -p {shlex.quote(str(path.parent))}, or name another file",
        )
    if path.is_file() and not _holds_tensors(path):
        raise UsageError(
            "E-ARG-08",
            f"{path} is there already, and it is no model",
            cause="an export replaces only safetensors files",
            fix="name another file",
        )
    return path


def _holds_tensors(path: Path) -> bool:
    """True if this looks like a safetensors file: the size of a JSON header, then the header."""
    with path.open("rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size


def write_model(source: Path, genesis: VertexBody, to: Path) -> tuple[Path, int]:
    """Write the model of this state to a file, or under its usual name into a folder; returns (path, bytes)."""
    from atoll.peer.settings import settings_of_run
    from atoll.runtime.storage.atomic_files import map_path, write_durably
    from atoll.runtime.training_spec import parse_training_spec
    from atoll.training.export import tensor_file
    from atoll.training.recipe.state import export_pieces, state_from_bytes

    try:
        layout = parse_training_spec(settings_of_run(genesis)).layout
        pieces = export_pieces(state_from_bytes(map_path(source), layout), layout)
    except PeerFault as fault:
        raise RunFailedError(
            "E-CHK-06",
            f"this run has no model to export: {fault.what}",
            cause="a group that only reduces, or a run of another version",
            fix="atoll checkpoint export ROUND FILE --state writes the state as it is",
        ) from None
    path = to / tensor_file(layout) if to.is_dir() else to
    write_durably(path, pieces, exported=True)
    return path, sum(map(len, pieces))
