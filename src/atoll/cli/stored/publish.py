"""`atoll publish TARGET`: sends agreed checkpoints as loadable models to a folder, an object store or a hub.

Reads a peer's folder as `atoll checkpoint export` does, beside a running peer or without one. Imports torch, to
write tensors by name.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from atoll.base.errors import AtollError, NetworkError, UsageError
from atoll.base.ids import one_line
from atoll.base.units import bytes_text, history_round_text
from atoll.cli.display.progress import busy
from atoll.cli.say import AsJson, Dir, folder_of, say, say_json

if TYPE_CHECKING:
    from atoll.runtime.publishing.checkpoints import AgreedCheckpoint
    from atoll.runtime.publishing.places import CheckpointPlace
    from atoll.runtime.publishing.published import PublishedCheckpoint

EVERY = 20  # rounds, as [keep] every_rounds
Every = Annotated[int, Parameter(validator=Number(gte=1), help="Rounds between two checkpoints.")]
Once = Annotated[bool, Parameter(negative="", help="Only the newest checkpoint that is in the folder, then end.")]


def publish(
    target: Annotated[
        str,
        Parameter(
            help="A folder, s3://BUCKET/PREFIX (pip install s3fs), hf://OWNER/NAME (pip install huggingface_hub). "
            "Credentials come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for other stores "
            "than Amazon's, AWS_ENDPOINT_URL; HF_TOKEN."
        ),
    ],
    /,
    dir: Dir = None,
    *,
    every: Every = EVERY,
    once: Once = False,
    json: AsJson = False,
) -> None:
    """Send agreed checkpoints, as models that other libraries load, to a folder, object store or hub.

    It follows the peer of the folder until that ends, by default every 20 rounds and after the last one. Each
    checkpoint is a model folder (atoll checkpoint export --hf) and the agreed state, from which others join:
    atoll join TICKET --state-from TARGET. latest.json names the newest; it is written last. Nothing is deleted,
    except that a hub repository shows one state at a time.
    """
    from atoll.runtime.publishing.checkpoints import follow_checkpoints
    from atoll.runtime.publishing.places import place_at

    folder, place = folder_of(dir), place_at(target, to_write=True)
    latest, told = _latest_in(place), list[dict[str, Any]]()
    trouble: AtollError | None = None  # of the newest checkpoint, if an earlier one was sent
    for found in follow_checkpoints(folder, every, once=once):
        try:
            sent = _send(place, found, latest)
            trouble = None
        except FileNotFoundError:
            continue  # the peer removed the state meanwhile: a newer one follows
        except NetworkError as why:
            if not told:
                raise
            trouble = why
            print(f"! {why.what}; the next checkpoint is tried again", file=sys.stderr, flush=True)
            continue
        round, state = found.body.round, found.body.state.hex()
        told.append({"round": round, "trained": found.body.trained, "state": state, "sent": sent is not None})
        if not json:
            how = f"{bytes_text(sum(sent.files.values()))}, is in" if sent else "not sent: it or a newer one is in"
            say(f"  {history_round_text(round, found.body.trained)}, {state[:8]}: {how} {place.shown}")
        latest = sent or latest
    if trouble is not None:
        raise trouble
    if json:
        say_json({"target": place.shown, "checkpoints": told, "latest": latest})


def _send(
    place: CheckpointPlace, found: AgreedCheckpoint, latest: PublishedCheckpoint | None
) -> PublishedCheckpoint | None:
    """Send a checkpoint; None if it or a newer one is there. FileNotFoundError if its state is gone here."""
    from atoll.cli.hub import model_files
    from atoll.runtime.publishing.places import size_of
    from atoll.runtime.publishing.published import PublishedCheckpoint, encode_latest, state_file
    from atoll.runtime.storage.stored_history import kept_in

    body, run_id = found.body, found.run_id.hex()
    if latest is not None and latest.run_id != run_id:
        raise UsageError(
            "E-PUB-05",
            f"{place.shown} holds checkpoints of another run: {one_line(latest.run)} ({latest.run_id[:8]})",
            cause="its latest.json would change from one run to another, and readers could not tell",
            fix="publish to another folder, prefix or repository",
        )
    if latest is not None and latest.round >= body.round:
        return None
    state = found.state()
    with kept_in(found.folder) as kept:
        model = model_files(kept, found.folder, body.round, state)
    at = place.model_folder(body.round, body.state)
    files = {f"{at}/{name}" if at else name: pieces for name, pieces in model.items()} | {
        state_file(body.state): (state,)
    }
    told = PublishedCheckpoint(
        run=found.run,
        run_id=run_id,
        round=body.round,
        trained=body.trained,
        vertex=found.vertex.hex(),
        state=body.state.hex(),
        model=at,
        files={name: size_of(pieces) for name, pieces in files.items()},
    )
    with busy(f"sending {history_round_text(body.round, body.trained)} to {place.shown}"):
        place.put(
            files, encode_latest(told), f"{history_round_text(body.round, body.trained)}, state {told.state[:8]}"
        )
    return told


def _latest_in(place: CheckpointPlace) -> PublishedCheckpoint | None:
    from atoll.runtime.publishing.places import read_latest
    from atoll.runtime.publishing.published import decode_latest

    data = read_latest(place)
    try:
        return decode_latest(data) if data is not None else None
    except ValueError as why:
        raise UsageError(
            "E-PUB-06",
            f"{place.shown} holds something else: {why}",
            cause="latest.json is of another program or version",
            fix="publish to another folder, prefix or repository",
        ) from None
