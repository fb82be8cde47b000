"""`atoll checkpoint pull`: fetches an agreed model of a running run, the newest or an earlier one, without
membership.

Everything comes from members and is checked as a joining member checks it. The whole history is then verified as
`atoll verify` does, and the folder appears complete or not at all. Imports torch, to write tensors by name.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from atoll.base.errors import RunFailedError, UsageError
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId, short_id
from atoll.base.units import HISTORY_ROUND, bytes_text, history_round_text, parse_duration_s, spans_text
from atoll.cli.display.progress import DownloadBar, busy
from atoll.cli.say import AsJson, TicketFile, folder_of, run_title, say, say_json, ticket_of
from atoll.cli.verify import votes_alone, votes_text
from atoll.runtime.storage.stored_history import blob_id_of, kept_in

if TYPE_CHECKING:
    from atoll.peer.verify.chain import HistoryVerificationReport
    from atoll.wire.ticket import Ticket

MEMBERS_ASKED = 16  # members of a known folder to ask; each answer names the others

Bootstrap = list[tuple[str, PeerId | None]]


def pull(
    source: Annotated[
        str,
        Parameter(
            help="A ticket of the run (this does not use it up; - reads it from standard input), or the run's "
            "id with --via, for a public run or with --dir. Default: the run in --dir.",
        ),
    ] = "",
    /,
    *,
    ticket_file: TicketFile = None,
    dir: Annotated[
        Path | None,
        Parameter(
            name="--dir",
            help="A peer's folder: names the run, supplies the ticket if none is given, and its members are "
            "asked, too. If the ticket is used up or expired, make one at a member: atoll invite. "
            "Default: $ATOLL_DIR, or ./atoll-run, if neither ticket nor id is given.",
        ),
    ] = None,
    to: Annotated[Path, Parameter(help="The model folder to write; it must not exist yet.")],
    via: Annotated[
        list[str], Parameter(negative="", help="Multiaddr of a member, beside those in the ticket; repeatable.")
    ] = [],  # noqa: B006  # cyclopts reads it, no code changes it
    round: Annotated[
        int | None,
        Parameter(help=f"An earlier state that members still hold, whole or in pieces: {HISTORY_ROUND}."),
    ] = None,
    timeout: Annotated[str, Parameter(help="How long it may take: 30min, 12h. Default: 1h.")] = "1h",
    json: AsJson = False,
) -> None:
    """Fetch an agreed model of a running run and its history, verify both, write a model folder."""
    source = ticket_of(source, ticket_file)
    run, bootstrap, ticket = _run_of(source, via) if source or via else _known_in(folder_of(dir))
    if dir is not None and (source or via):
        members, known = _also_in(folder_of(dir), run)
        bootstrap, ticket = bootstrap + members, ticket or known
    try:
        timeout_s = parse_duration_s(timeout)
    except ValueError as why:
        raise UsageError("E-ARG-06", f"--timeout {timeout}: {why}", fix="--timeout 1h") from None
    to = to.expanduser().resolve()
    if to.exists():
        raise UsageError(
            "E-CHK-04", f"{to} exists already", cause="nothing is overwritten", fix="name another folder"
        )
    from atoll.capabilities import CAPABILITIES
    from atoll.cli.hub import what_is, write_model_folder
    from atoll.crypto.identity import SessionVerifier
    from atoll.peer.verify.chain import verify_history
    from atoll.runtime.readonly_client import download_state
    from atoll.runtime.storage.atomic_files import map_path

    # laid out as a peer's folder: after an interruption the fetched blobs are used again
    aside = to.with_name(f"{to.name}.pull")
    aside.mkdir(mode=0o700, parents=True, exist_ok=True)
    with DownloadBar("fetching the history and the model") as bar:
        taken = asyncio.run(download_state(aside, run, bootstrap, timeout_s, round, ticket, bar.show))
    blob = aside / "blobs" / taken.state.hex()
    with kept_in(aside) as found:
        # rounds agreed during the download are left out
        kept = replace(found, rounds=[r for r in found.rounds if r <= taken.round])
        with busy("verifying the history"):
            audit = verify_history(kept, SessionVerifier(), CAPABILITIES.verifiers)
        if not audit.intact or blob_id_of(blob) != taken.state:
            raise _broken(audit, aside)
        files = write_model_folder(kept, aside, taken.round, map_path(blob), to)
    shutil.rmtree(aside)
    size_bytes = sum(file.stat().st_size for file in files)
    alone = votes_alone(audit)
    if json:
        told = {"run": audit.settings.name, "run_id": run.hex(), "round": taken.round, "state": taken.state.hex()}
        told |= {"vertices": audit.vertices, "votes_alone": alone, "folder": str(to), "size_bytes": size_bytes}
        say_json(told)
        return
    say(f"  {run_title(audit.settings.name, short_id(run))}: {audit.vertices} vertices, all as they were agreed on")
    if alone:
        say(f"  protected by {votes_text(audit)} alone: history rounds {spans_text(alone)}")
    where = history_round_text(taken.round, audit.trained.get(taken.round))
    say(f"  the {what_is(files)} of {where} is in {to}: {taken.state.hex()[:8]}, {bytes_text(size_bytes)}")


def _run_of(source: str, via: Sequence[str]) -> tuple[Digest, Bootstrap, Ticket | None]:
    """Run id, addresses of members, and the ticket if there is one."""
    from atoll.runtime.network.dialer import endpoint_of
    from atoll.wire.ticket import parse

    for address in via:
        endpoint_of(address)
    named: Bootstrap = [(address, None) for address in via]
    if ":" in source:
        ticket = parse(source)
        ticket.verify(time.time())
        return ticket.genesis, [*((address, ticket.issuer) for address in ticket.addresses), *named], ticket
    try:
        run = bytes.fromhex(source)
    except ValueError:
        run = b""
    if len(run) != DIGEST_BYTES or not named:
        raise UsageError(
            "E-CHK-07",
            f"{source[:60]!r} names no run, or no address of a member",
            cause="a connection belongs to one run, which an address alone does not name",
            fix="atoll checkpoint pull TICKET --to MODEL; or RUN_ID --via ADDRESS, which atoll status --json has; "
            "or --dir FOLDER, with a peer's folder",
        )
    return Digest(run), named, None


def _known_in(folder: Path) -> tuple[Digest, Bootstrap, Ticket | None]:
    """Run id of this folder, addresses of members in its newest vertex, and its ticket."""
    from atoll.runtime.storage.stored_history import read_vertex
    from atoll.wire.ticket import parse

    with kept_in(folder) as kept:
        newest = read_vertex(kept, folder, max(kept.rounds, default=-1))[1]
        there = [m for m in newest.members if m.is_present and m.addresses]
        members: Bootstrap = [(address, m.peer) for m in there[:MEMBERS_ASKED] for address in m.addresses]
        return Digest(kept.run), members, parse(kept.ticket) if kept.ticket else None


def _also_in(folder: Path, run: Digest) -> tuple[Bootstrap, Ticket | None]:
    """Members and ticket that another folder of the same run knows."""
    held, members, ticket = _known_in(folder)
    if held != run:
        raise UsageError(
            "E-CHK-15",
            f"{folder} holds run {short_id(held)}, the ticket or id is of run {short_id(run)}",
            cause="--dir names a folder of the run, for the addresses of members; the model goes to --to",
            fix="leave one of the two out",
        )
    return members, ticket


def _broken(audit: HistoryVerificationReport, folder: Path) -> RunFailedError:
    first = f"; first of them: {audit.problems[0].what}" if audit.problems else ": the state is not its blob"
    return RunFailedError(
        "E-CHK-09",
        f"the fetched history or state is not the agreed one, {len(audit.problems)} problems{first}",
        cause="members sent an invalid history, or this disk changed bytes",
        fix=f"atoll verify {folder} lists them; remove that folder and use --via with another member",
    )
