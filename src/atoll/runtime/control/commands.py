"""Table of operator commands: name, arguments, help, right and handler, for each way to reach a peer.

A new command is one entry in `COMMANDS` and one handler.

Invariants:
- A handler changes agreed values only through a vertex.
- A command that the run's authority must give is refused before its handler starts.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from atoll.base.errors import RefusedError, RunFailedError, UsageError
from atoll.base.ids import Digest
from atoll.runtime.control.attribution import blame_round
from atoll.runtime.control.invitations import AGREE_S, InviteArguments, invite, list_invitations
from atoll.runtime.control.pause import pause_run
from atoll.runtime.control.rollback import roll_back
from atoll.runtime.control.socket import RequestHandler
from atoll.runtime.control.status import peers_of, status_of

if TYPE_CHECKING:  # the driver imports torch, and light commands import this file
    from atoll.runtime.training_peer import TrainingPeer

FETCH_S = 90.0  # for hundreds of megabytes over a home link; the caller waits slightly longer
FETCHED_MAX = 64  # blobs per request: exhibits of all kept verdicts, and their states
SAMPLE_MAX = 4096  # bytes of text in one sample


class NoArguments(msgspec.Struct, frozen=True):
    """Arguments of a command that takes none."""


class RollbackArguments(msgspec.Struct, frozen=True):
    round: int
    without: tuple[str, ...] = ()  # members to expel, by name or the start of their id
    wait_s: float = AGREE_S


class PauseArguments(msgspec.Struct, frozen=True):
    paused: bool
    wait_s: float = AGREE_S

    @property
    def verb(self) -> str:
        return "pause" if self.paused else "resume"


class AmendArguments(msgspec.Struct, frozen=True):
    numbers: tuple[str, ...]  # key=value, with keys of run.toml
    wait_s: float = AGREE_S


class BlameArguments(msgspec.Struct, frozen=True):
    round: int


class FetchArguments(msgspec.Struct, frozen=True):
    blobs: tuple[str, ...]  # digests, in hexadecimal


class LeaveArguments(msgspec.Struct, frozen=True):
    why: str = "left by its owner"


class EvaluateArguments(msgspec.Struct, frozen=True):
    samples: int = 512


class SampleArguments(msgspec.Struct, frozen=True):
    prompt: str = ""
    count: int = 200  # bytes of text
    seed: int = 0


class ExportArguments(msgspec.Struct, frozen=True):
    path: str | None = None  # None: the usual file in the peer's folder


ONLY_AUTHORITY = "only the founder's peer can {action}, and this peer is another one"


class AuthorityRight(NamedTuple):
    """Right to a command that only the run's authority has. Texts may name arguments, such as {0.round}."""

    code: str
    action: str
    fix: str


class OperatorCommand(NamedTuple):
    """One request of an operator to a peer."""

    name: str
    arguments: type[msgspec.Struct]
    help: str  # one line
    handler: Callable[[TrainingPeer, Any], Awaitable[Any]]
    right: AuthorityRight | None = None  # None: the operator of any peer may give it


async def _status(host: TrainingPeer, _: NoArguments) -> Any:
    return status_of(host)


async def _peers(host: TrainingPeer, _: NoArguments) -> Any:
    return peers_of(host)


async def _invitations(host: TrainingPeer, _: NoArguments) -> Any:
    return list_invitations(host)


async def _recover(host: TrainingPeer, _: NoArguments) -> Any:
    before, began, bare = _present_names(host), _epoch_of(host), _unsigned_eras(host)
    host.recover()
    after, epoch, eras = _present_names(host), _epoch_of(host), sorted(bare - _unsigned_eras(host))
    found = {"epoch": epoch, "members": sorted(after), "gone": sorted(before - after)}
    return found | {"began": epoch > began, "eras": eras}


async def _rollback(host: TrainingPeer, given: RollbackArguments) -> Any:
    return await roll_back(host, given.round, given.wait_s, given.without)


async def _pause(host: TrainingPeer, given: PauseArguments) -> Any:
    return await pause_run(host, given.paused, given.wait_s)


async def _amend(host: TrainingPeer, given: AmendArguments) -> Any:
    from atoll.runtime.control.settings_change import amend_run

    return await amend_run(host, given.numbers, given.wait_s)


async def _blame(host: TrainingPeer, given: BlameArguments) -> Any:
    return await blame_round(host, given.round)


async def _fetch(host: TrainingPeer, given: FetchArguments) -> Any:
    wanted = [Digest(bytes.fromhex(name)) for name in given.blobs[:FETCHED_MAX]]
    return {"here": [blob.hex() for blob in await host.fetch(wanted, FETCH_S)]}


async def _leave(host: TrainingPeer, given: LeaveArguments) -> Any:
    host.on_leave(given.why[:200])
    progress = host.progress
    told = {"leaving": host.me, "round": progress.round, "trained": progress.trained, "process": os.getpid()}
    return told | {"attached": host.island.tended.attached}


async def _evaluate(host: TrainingPeer, given: EvaluateArguments) -> Any:
    _demand_state(host)
    found = await host.island.evaluate(given.samples)
    return {"loss": found.loss, "accuracy": found.accuracy, "trained": host.progress.trained}


async def _sample(host: TrainingPeer, given: SampleArguments) -> Any:
    _demand_state(host)
    if not 0 < given.count <= SAMPLE_MAX:
        why = f"a sample has 1 to {SAMPLE_MAX} bytes, not {given.count}"
        raise UsageError("E-ARG-02", why, fix="ask for 200")
    return {"text": await host.island.sample(given.prompt, given.count, given.seed)}


async def _export(host: TrainingPeer, given: ExportArguments) -> Any:
    _demand_state(host)
    path = await host.export(Path(given.path) if given.path else None)
    return {"path": str(path), "trained": host.progress.trained}


COMMANDS = (
    OperatorCommand(
        "status",
        NoArguments,
        "Show how the run stands: round, phase, loss, members, bytes, and the reason if it is paused.",
        _status,
    ),
    OperatorCommand(
        "peers", NoArguments, "List the agreed members, their standing, and how this peer reaches them.", _peers
    ),
    OperatorCommand(
        "invite", InviteArguments, "Make a new ticket through the members' agreement, or revoke one.", invite
    ),
    OperatorCommand("invitations", NoArguments, "List the agreed tickets with uses left.", _invitations),
    OperatorCommand(
        "recover",
        NoArguments,
        "Restart from the last agreed round without lost members, if too few are left for a quorum.",
        _recover,
        AuthorityRight("E-RUN-25", "start over", "atoll recover in the founder's folder"),
    ),
    OperatorCommand(
        "rollback",
        RollbackArguments,
        "Send the whole run back to the state of an earlier round, which must be in this folder.",
        _rollback,
        AuthorityRight("E-RUN-25", "roll it back", "atoll checkpoint rollback {0.round} in the founder's folder"),
    ),
    OperatorCommand(
        "pause",
        PauseArguments,
        "Pause the whole run: the current round ends, then members stay and do not train until `atoll resume`.",
        _pause,
        AuthorityRight(
            "E-RUN-25", "{0.verb} it", "atoll {0.verb} in the founder's folder; to rest alone: atoll stop"
        ),
    ),
    OperatorCommand(
        "amend",
        AmendArguments,
        "Change numbers of a running run, or give a finished one more rounds: atoll amend run.rounds=60.",
        _amend,
        AuthorityRight("E-RUN-25", "change its numbers", "atoll amend in the founder's folder"),
    ),
    OperatorCommand("blame", BlameArguments, "Recompute a round without each contributor in turn.", _blame),
    OperatorCommand("fetch", FetchArguments, "Fetch blobs from members.", _fetch),
    OperatorCommand(
        "leave",
        LeaveArguments,
        "Leave the run and end this peer. If the others need its vote for that, it ends with the next round.",
        _leave,
    ),
    OperatorCommand("stop", LeaveArguments, "End this peer now; `atoll up` in the same folder resumes it.", _leave),
    OperatorCommand(
        "evaluate", EvaluateArguments, "Measure loss and accuracy of the agreed model on held-out data.", _evaluate
    ),
    OperatorCommand("sample", SampleArguments, "Continue a prompt by the agreed model.", _sample),
    OperatorCommand(
        "export",
        ExportArguments,
        "Write the agreed model, or the adapters of a run that exchanges only these, as a safetensors file.",
        _export,
    ),
)


def handlers_of(host: TrainingPeer) -> dict[str, RequestHandler]:
    """Handlers of the control socket by command name."""
    return {command.name: partial(run_command, command, host) for command in COMMANDS}


async def run_command(command: OperatorCommand, host: TrainingPeer, given: dict[str, Any]) -> Any:
    """Check arguments and right, then call the handler. Raises AtollError or msgspec.ValidationError."""
    arguments = msgspec.convert(given, command.arguments, strict=False)
    if command.right is not None and not host.may_recover:
        action, fix = (text.format(arguments) for text in command.right[1:])
        raise RefusedError(
            command.right.code,
            ONLY_AUTHORITY.format(action=action),
            cause="the founder alone may change the run; genesis names its key",
            fix=fix,
        )
    return await command.handler(host, arguments)


def _present_names(host: TrainingPeer) -> set[str]:
    """Names of the new and full members."""
    return {m["name"] or m["peer"] for m in peers_of(host) if m["standing"] in ("new", "member")}


def _epoch_of(host: TrainingPeer) -> int:
    history = host.machine.history
    return history.head_body.epoch if history is not None else 0


def _unsigned_eras(host: TrainingPeer) -> set[int]:
    """Last rounds of the eras without a quorum of signatures."""
    eras = host.machine.eras
    return set(eras.lacking) if eras is not None else set()


def _demand_state(host: TrainingPeer) -> None:
    """Raise RunFailedError while this peer lacks the agreed model."""
    if host.island.head is None:
        raise RunFailedError(
            "E-RUN-06",
            "this peer does not hold the agreed model yet",
            cause="it is still joining",
            fix="atoll status",
        )
