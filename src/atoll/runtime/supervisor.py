"""Supervisor of one peer process: what `atoll up` and `atoll join` do from start to farewell.

It opens the control socket and shows every fact. It ends when the run is over, the owner stops it, a member refuses
it, no peer is reachable, or its trainer keeps failing. The first Ctrl-C or SIGTERM sends a farewell; a Ctrl-C after
it ends the process at once.

Invariants: nothing of the peer runs on after the end, whatever the reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from atoll.base.errors import AtollError, PeerFault, RefusedError, RunFailedError, UsageError
from atoll.base.ids import ATTACHED
from atoll.peer.config.sections import RunConfig, of_the_run
from atoll.peer.membership.admission import EXPELLED
from atoll.policy.participation import named
from atoll.runtime.config import (
    canary_of,
    data_of,
    missing_protections,
    own_data_of,
    recipe_of,
    settings_of,
    tokenizer_of,
    weights_of,
)
from atoll.runtime.control.agreed_loss import agreed_loss
from atoll.runtime.control.commands import handlers_of
from atoll.runtime.control.socket import ControlServer, count_local_peers
from atoll.runtime.control.status import unaudited_text
from atoll.runtime.event_log import RunStatus
from atoll.runtime.network.dialer import endpoint_of
from atoll.runtime.peer_folder import default_name
from atoll.runtime.preflight import check_bindable
from atoll.runtime.reachability import JoinProgress
from atoll.runtime.storage.atomic_files import unusable
from atoll.runtime.storage.ownership import check_unlocked, private_folder
from atoll.runtime.storage.stored_history import trains_in_a_loop
from atoll.runtime.transfer_progress import downloaded_bytes
from atoll.wire.ticket import Ticket, parse

if TYPE_CHECKING:
    from atoll.runtime.bootstrap import Make
    from atoll.runtime.training_peer import TrainingPeer

FAREWELL_S = 60.0  # wait for agreement on the farewell, if it needs this peer's vote
LINGER_S = 6.0  # after the last round: three heartbeats, in which a laggard requests what it lacks
UNFIT = "its computer cannot take part"  # farewell of a member that refused the run itself
GONE = "its folder is gone"
GONE_CODE = "E-DIR-13"
AT_ONCE = (  # reasons that end without a farewell
    "stopped by its owner",
    "its parent process is gone",
    "an error of Atoll itself",
    "its disk refused",
    GONE,
    "expelled",
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeerOptions:
    """Options of the command line."""

    folder: Path
    config: RunConfig
    file: Path | None = None
    name: str = ""
    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    threads: int = 0
    stay: bool = False
    uses: int = 0  # uses of a founder's ticket; 0: the default of the run's trust


class PeerDisplay(Protocol):
    """Output of a peer: a terminal, or a pipe of a program."""

    ends_with_stdin: bool

    def opened(self, news: dict[str, Any]) -> None: ...
    def entry(self, entry: dict[str, Any], progress: RunStatus) -> None: ...
    def notice(self, text: str) -> None: ...
    def ended(self, news: dict[str, Any]) -> None: ...


async def run_up(start: PeerOptions, shell: PeerDisplay) -> int:
    """Found a run in the folder, or resume the one in it."""
    made_here = not start.folder.exists()
    _check_addresses(start)
    own_data_of(start.config, start.file)
    if not (start.folder / "kept.sqlite").exists():
        await check_bindable(_listening(start))
        _check_settings(start)
    _check_folder(start.folder)
    _check_loop(start)
    from atoll.runtime.bootstrap import holds_run, resume_run

    listening, threads, name = _ready(start, made_here)
    if holds_run(start.folder):
        if start.file is not None or of_the_run(start.config) != of_the_run(RunConfig()):
            passed = f"{start.file} is not read" if start.file is not None else "other settings change nothing"
            shell.notice(
                f"{start.folder} holds a run already; it goes on as it was founded, {passed}; to change it: "
                "atoll amend; for another run: --dir NEW_FOLDER"
            )
        make = _factory(threads, start)
        host = await resume_run(start.folder, name if start.name else "", listening, make)
        return await _run(host, host.ticket_text(), start, shell, resumed=True)
    try:
        host, ticket = await _found_new_run(start, shell, listening, threads, name)
    except AtollError:
        if made_here:
            _remove_unused(start.folder)
        raise
    if start.config.run.start_peers == 1:
        shell.notice(
            "training begins now, alone, and others may come; to wait for them first, found it with "
            "--set run.start_peers=2 or more"
        )
    else:
        shell.notice(f"training begins once {start.config.run.start_peers} members are here")
    return await _run(host, ticket.text, start, shell)


def _remove_unused(folder: Path) -> None:
    """Remove a folder that has only the log; another process may have founded a run in it meanwhile."""
    if {path.name for path in folder.iterdir()} <= {"atoll.log"}:
        with suppress(OSError):
            (folder / "atoll.log").unlink(missing_ok=True)
            folder.rmdir()


async def _found_new_run(
    start: PeerOptions, shell: PeerDisplay, listening: Any, threads: int, name: str
) -> tuple[Any, Ticket]:
    """Found a run. The first state, the data set and the base lie on disk afterwards, not in memory."""
    from atoll.runtime.bootstrap import TicketTerms, found_run
    from atoll.runtime.training_spec import founding_blobs, start_of_built_in
    from atoll.training.data.tokens import read_tokenizer

    weights = weights_of(start.config, start.file)
    data, canary = data_of(start.config, start.file), canary_of(start.config, start.file)
    named = tokenizer_of(start.config, start.file)
    try:
        config = _named_by(start.config, weights)
        recipe = recipe_of(config)
        tokenizer = read_tokenizer(Path(named)) if named else b""
        beginning = start_of_built_in(
            recipe, data, canary, tokenizer, config.data.column, weights, config.model.only
        )
        floats = beginning.layout.floats
        founded = founding_blobs(beginning, settings_of(config, recipe, floats))
        for text in missing_protections(config, recipe, floats):
            shell.notice(text)
        make = _factory(threads, start)
        return await found_run(start.folder, founded, name, listening, TicketTerms(start.uses), make)
    except ValueError as why:
        raise UsageError(
            "E-DATA-02",
            f"this run cannot be founded: {why}",
            fix="change what this line is about: data.source, data.canary, data.tokenizer, data.column, "
            "model.weights, or train.seq_len where text is short; atoll config --all explains them",
        ) from why


def _check_settings(start: PeerOptions) -> None:
    """Report wrong settings before there is a folder; missing files before torch is loaded. Raises UsageError."""
    data_of(start.config, start.file)
    canary_of(start.config, start.file)
    tokenizer_of(start.config, start.file)
    weights = weights_of(start.config, start.file)
    try:
        config = _named_by(start.config, weights)
    except ValueError:
        return  # an unreadable folder of weights is reported with the data
    settings = settings_of(config, recipe_of(config))
    if config.node.data:
        from atoll.runtime.own_data import check_rules

        check_rules(settings)


def _named_by(config: RunConfig, weights: str) -> RunConfig:
    """Take the model name from the folder of weights, unless the config has one. UsageError if they conflict."""
    from atoll.training.models.weights import hugging_face_name_in, name_in

    model = config.model
    if model.architecture == "hf" and (model.name or model.lora_rank or not weights):
        raise UsageError(
            "E-CFG-15",
            'model.architecture = "hf" takes its model from the folder in model.weights, and nothing else names it',
            cause="model.weights is empty, or model.name or model.lora_rank is set",
            fix='write model.weights = "FOLDER" with its config.json and .safetensors files, and neither of the '
            "others; for adapters: atoll init --example finetune",
        )
    if not weights or model.name:
        return config
    name = (hugging_face_name_in if model.architecture == "hf" else name_in)(Path(weights))
    return replace(config, model=replace(model, name=name))


async def run_join(
    start: PeerOptions, ticket: str, role: str, bootstrap: tuple[str, ...], shell: PeerDisplay
) -> int:
    """Join the ticket's run, or resume in a folder that belongs to it."""
    made_here = not start.folder.exists()
    _check_addresses(start)
    own_data_of(start.config, start.file)
    for address in bootstrap:
        endpoint_of(address)
    if role != "client" and not (start.folder / "kept.sqlite").exists():
        await check_bindable(_listening(start))
    _check_folder(start.folder)
    if role != "observer":
        _check_loop(start)
    from atoll.runtime.bootstrap import join_run

    listening, threads, name = _ready(start, made_here)
    make, is_first = _factory(threads, start), not (start.folder / "kept.sqlite").exists()
    host = await join_run(start.folder, ticket, role, name if start.name or is_first else "", listening, make)
    host.bootstrap += tuple((address, None) for address in bootstrap)
    return await _run(host, None, start, shell)


def _check_addresses(start: PeerOptions) -> None:
    """Report wrong addresses before the run exists and before torch is loaded."""
    for address in (*_listening(start), *(start.announce or start.config.network.announce_addresses)):
        endpoint_of(address)


def _listening(start: PeerOptions) -> tuple[str, ...]:
    return start.listen or start.config.network.listen_addresses


def _check_folder(folder: Path) -> None:
    """Report a folder that cannot be used, or that another process uses, before torch is loaded."""
    try:
        private_folder(folder)
        check_unlocked(folder)
    except (OSError, ValueError) as why:  # ValueError: a zero byte in the name
        raise unusable(folder, why) from None


def _check_loop(start: PeerOptions) -> None:
    """Refuse the folder of a member that trains in a program of its own, before any other member notices.

    With `--stay` the peer serves the others without training. RefusedError otherwise.
    """
    if (start.folder / "kept.sqlite").exists() and not start.stay and trains_in_a_loop(start.folder):
        raise _needs_a_loop(start.folder)


def _ready(start: PeerOptions, made_here: bool) -> tuple[Any, int, str]:
    """Prepare the folder and the log; returns listening options, threads and name.

    `made_here`: this start made the folder, so it goes again if the computer lacks the device.
    """
    import torch

    from atoll.runtime.bootstrap import ListenOptions, prepare_folder
    from atoll.runtime.trainer import check_device, threads_per_trainer

    try:
        check_device(start.config.node.device)
    except UsageError:
        if made_here:
            _remove_unused(start.folder)
        raise
    network = start.config.network
    asked = _listening(start)
    nothing_said = not start.listen and asked == ListenOptions().listen
    listening = ListenOptions(
        asked, start.announce or network.announce_addresses, network.upload_bytes_s, as_before=nothing_said
    )
    prepare_folder(start.folder)
    threads = start.threads or start.config.node.threads or threads_per_trainer(1 + count_local_peers())
    torch.set_num_threads(threads)
    name = start.name or start.config.node.name or default_name(start.folder)
    return listening, threads, named(name, start.config.node.group)


async def _run(host: Any, ticket: str | None, start: PeerOptions, shell: PeerDisplay, resumed: bool = False) -> int:
    """Run this peer until one of the reasons to end."""
    end: asyncio.Future[tuple[str, AtollError | None]] = asyncio.get_running_loop().create_future()

    def leave(why: str, trouble: AtollError | None = None) -> None:
        if not end.done():
            end.set_result((why, trouble))

    host.progress.max_retries = start.config.consensus.max_retries
    host.progress.transferred = lambda: downloaded_bytes(host.machine)
    watch = _EndWatcher(host, start, shell, leave)
    host.on_entry = watch.entry
    _end_when_broken(host, leave)
    host.on_persist_failed = lambda why: leave(GONE if why.code == GONE_CODE else "its disk refused", why)
    host.on_leave = leave
    door = ControlServer(start.folder, handlers_of(host))
    signals = _answer_signals(leave, shell)
    said = False  # the farewell was sent
    if shell.ends_with_stdin:
        _leave_at_end_of_stdin(leave)
    try:
        await door.open()
        host.start()
        ticket = None if host.has_ended else ticket
        shell.opened(
            {
                "fact": "Opened",
                "resumed": resumed,
                "ticket": ticket,
                "ticket_uses": parse(ticket).uses if ticket else 0,
                "peer": host.me,
                "run_id": host.run_id.hex(),
                "name": host.wish.name,
                "folder": str(start.folder),
                "addresses": list(host.addresses),
                "process": os.getpid(),
            }
        )
        why, trouble = await watch.until(end)
        said = why not in AT_ONCE and not host.machine.over
        if said and not await host.leave(why, FAREWELL_S):
            shell.notice(
                "the others could not agree on this farewell: they may be paused until a member comes back"
            )
        exported = await host.export() if host.machine.over and host.island.head is not None else None
    finally:
        await door.close()
        await host.stop(end.result()[0] if end.done() else "its process ended", not (said or host.machine.over))
        signals()
    shell.ended({"fact": "Ended", "why": why, "model": str(exported) if exported else None} | _sum(host))
    if trouble is not None:
        log.error("%s", trouble)
        raise trouble
    return 0


class _EndWatcher:
    """Detects reasons to end in facts and timeouts."""

    def __init__(self, host: Any, start: PeerOptions, shell: PeerDisplay, leave: Callable[..., None]) -> None:
        self.host, self.start, self.shell, self.leave = host, start, shell, leave
        self.over = asyncio.Event()
        self.join = JoinProgress(host, shell.notice)

    def entry(self, entry: dict[str, Any]) -> None:
        self.shell.entry(entry, self.host.progress)
        self.join.entry(entry)
        match entry["fact"]:
            case "RunOver":
                self.over.set()
            case "GenesisKnown":
                if text := unaudited_text(self.host):
                    self.shell.notice(text)
            case "LearningKnown" if (refusal := self._loop_missing(entry["data"])) is not None:
                self.host.withdraw()
                self.leave(UNFIT, refusal)
            case "JoinRejected":
                self._refused(entry)
            case "LocalContributionSkipped" if self.host.island.tended.hopeless:
                self.leave("its trainer failed", _trainer_failed(self.host.island.tended, self.start.folder))
            case _:
                pass

    def _loop_missing(self, data: str) -> RefusedError | None:
        """The refusal, if this peer is to train but members of the run train in their own programs."""
        members = self.host.machine.history.head_body.members
        is_newcomer = all(member.peer != self.host.me for member in members)
        if data != ATTACHED or not self.host.island.trains or (self.start.stay and not is_newcomer):
            return None
        return _needs_a_loop(None if is_newcomer else self.start.folder)

    def _refused(self, entry: dict[str, Any]) -> None:
        why = "expelled" if entry["code"] == EXPELLED else UNFIT if entry["by"] == self.host.me else "refused"
        cause = entry.get("cause", "")
        self.leave(why, RefusedError(entry["code"], entry["what"], cause=cause, fix=entry["fix"]))

    async def until(self, end: asyncio.Future[tuple[str, AtollError | None]]) -> tuple[str, AtollError | None]:
        tasks = [asyncio.create_task(self._end_when_over()), asyncio.create_task(self._end_if_unreachable())]
        try:
            return await end
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_when_over(self) -> None:
        if self.start.stay:
            return
        while True:
            await self.over.wait()
            if self._not_alone():
                self.shell.notice(f"members that are behind may fetch the end of the run, {LINGER_S:.0f} s more")
                await asyncio.sleep(LINGER_S)
            if self.host.machine.over:
                return self.leave("the run is over")
            self.over.clear()  # its members agreed on more rounds meanwhile

    def _not_alone(self) -> bool:
        """True if other members may still request data or agree on more rounds."""
        history = self.host.machine.history
        others = history is not None and any(
            m.is_present for m in history.head_body.members if m.peer != self.host.me
        )
        return others or any(s.up for s in self.host.links.stats().values())

    async def _end_if_unreachable(self) -> None:
        if failure := await self.join.failure():
            self.leave("no member answered", failure)


def _needs_a_loop(folder: Path | None) -> RefusedError:
    """`folder`: of a member that comes back; None: a newcomer."""
    joins = "run the founder's program with ATOLL_TICKET=TICKET, or look on: atoll join TICKET --role observer"
    returns = (
        f"start the program that trained in this folder; or, if the run is over, atoll up --dir {folder} --stay"
    )
    return RefusedError(
        "E-JOIN-07",
        "members of this run train a model in their own programs",
        cause="its founder attached a PyTorch model from Python",
        fix=joins if folder is None else returns,
    )


def _trainer_failed(tended: Any, folder: Path) -> RunFailedError:
    """Why this peer pauses: the last failure of its trainer, with the end of the trainer's own output."""
    failure = tended.last_failure
    fix = f"{failure.fix}; then" if failure.fix else "repair what the trainer reports; then"
    return RunFailedError(
        "E-TRN-13",
        f"the trainer failed {tended.failures} times in a row, so this peer pauses: {failure.what}",
        cause=failure.cause or "the trainer wrote nothing more about it",
        fix=f"{fix} atoll up --dir {folder} goes on from the last agreed round (all failures: "
        f"{folder / 'atoll.log'})",
    )


def _answer_signals(leave: Callable[[str], None], shell: PeerDisplay) -> Callable[[], None]:
    """Leave in order on Ctrl-C or SIGTERM, exit at once on a Ctrl-C after that. Returns the undo function.

    A second SIGTERM is no second wish: `timeout` and process managers signal the process and its group.
    """
    loop = asyncio.get_running_loop()
    asked = False

    def answer(name: str) -> None:
        nonlocal asked
        if asked and name == "SIGTERM":
            shell.notice("still saying farewell (Ctrl-C ends now)")
            return
        if asked:
            os._exit(130)
        asked = True
        shell.notice("leaving: saying farewell to the others (Ctrl-C once more ends now)")
        leave(name)

    for number, name in ((signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")):
        loop.add_signal_handler(number, answer, name)

    def undo() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    return undo


def _end_when_broken(host: Any, leave: Callable[..., None]) -> None:
    """End the peer at a defect of Atoll, near its cause, instead of running on in part."""

    def broken(why: BaseException | None, what: str) -> None:
        # faults of the network or of a peer cost a connection, never the process
        if why is not None and not isinstance(why, OSError | PeerFault | AtollError):
            text = f"{type(why).__name__}: {why}" if str(why) else type(why).__name__
            log.error("this peer broke: %s", what, exc_info=why)
            leave(
                "an error of Atoll itself",
                RunFailedError(
                    "E-INT-01",
                    f"an error of Atoll itself: {text}",
                    cause="a defect; the whole story is in atoll.log",
                    fix=f"atoll up --dir {host.folder} goes on from the last agreed round",
                ),
            )

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, found: broken(found.get("exception"), found.get("message", "")))
    host.on_bug = lambda why: broken(why, "a task failed")


def _leave_at_end_of_stdin(leave: Callable[[str], None]) -> None:
    """Leave once the process that started this peer is gone."""
    loop = asyncio.get_running_loop()

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 4096):  # not sys.stdin, the lock of which would be held when the interpreter ends
                pass
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(leave, "its parent process is gone")

    threading.Thread(target=watch, daemon=True).start()


def _sum(host: Any) -> dict[str, Any]:
    p, history = host.progress, host.machine.history
    loss = agreed_loss(history.head_body, history.bodies.get, p.loss) if history is not None else p.loss
    return {
        "trained": p.trained,
        "state": p.state,
        "loss": loss,
        "unit": p.unit,
        "tokens": host.learned,
        "over": host.machine.over,
        "bytes_out": p.bytes_out,
        "bytes_in": p.bytes_in,
        "bytes_data_parallel": p.bytes_data_parallel,
    }


def _factory(threads: int, start: PeerOptions) -> Make[TrainingPeer]:
    from atoll.runtime.bootstrap import training_peer_factory
    from atoll.runtime.own_data import OwnData

    config, node = start.config, start.config.node
    own = OwnData(own_data_of(config, start.file), config.data.column)
    return training_peer_factory(
        threads,
        _ignore,
        keep=config.keep,
        device=node.device,
        state_memory=node.state_memory,
        own=own,
        feedback=node.feedback_precision,
        state_from=node.state_from,
    )


def _ignore(fact: object) -> None:
    """Facts arrive as lines of the event log instead."""
