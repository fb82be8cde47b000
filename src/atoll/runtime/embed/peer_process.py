"""Peer process of a user's training loop.

In `trainer/` the peer starts the trainer. Here the user's process is the trainer and starts the peer
(`python -m atoll.runtime.embed.peer_process`). Commands, replies and shared memory are the same, over a socket
pair. If either side dies, the other sees the end of the socket: the peer leaves its run, the loop gets an error.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor

from atoll.base.errors import UNREADABLE, AtollError, RefusedError, RunFailedError, UsageError
from atoll.base.ids import ATTACHED, Digest, PeerId, Seconds
from atoll.base.limits import COMMITTEE_MOST, PEERS_MAX
from atoll.base.machine import Fact
from atoll.crypto.digest import digest
from atoll.peer.events import GenesisKnown, JoinRejected, LocalStateCaughtUp, RoundClosed, RunOver
from atoll.peer.governance.orders import amend_of
from atoll.peer.settings import ERA_ROUNDS, RunSettings
from atoll.policy.capability_terms import StateValidationTerms
from atoll.policy.data.claims import CarriedOverSamples
from atoll.policy.participation import GROUP_MARK, group_of, named
from atoll.policy.plan import RoundSettings
from atoll.policy.presets import PRESETS, looked_every
from atoll.protocol.transfer.download import FetchFailed
from atoll.runtime.control.agreed_loss import agreed_loss
from atoll.runtime.control.commands import handlers_of
from atoll.runtime.control.socket import ControlServer
from atoll.runtime.embed import run_end
from atoll.runtime.embed.attached_trainer import AttachedTrainer
from atoll.runtime.embed.ignored import ignored_arguments
from atoll.runtime.embed.loop_log import LOOP_KILLED, LoopLog
from atoll.runtime.embed.messages import (
    AgreedReadings,
    AttachedPeerIdentity,
    AttachLoopRequest,
    LoopLogLine,
    PeerFailureNotice,
    RunFinishedNotice,
    mailbox_room_bytes,
)
from atoll.runtime.embed.shared_cores import SharedCoresAdvice
from atoll.runtime.embed.trust_defaults import forgone, opened_share, rule_of
from atoll.runtime.peer_folder import MODEL_CONFIG, default_name
from atoll.runtime.reachability import JoinProgress
from atoll.runtime.storage.atomic_files import refused, write_durably
from atoll.runtime.storage.staged_file import StagedFile
from atoll.runtime.trainer import TrainerCommandError
from atoll.runtime.trainer.protocol import (
    LENGTH,
)
from atoll.runtime.trainer.shared_memory import SharedMailbox
from atoll.training.exchange.layout import ModelLayout, difference
from atoll.training.recipe.outer import DelayedNesterov
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.state import SharedState, state_pieces, untouched_zeros
from atoll.wire.codec import decode_body
from atoll.wire.messages.vertex import VertexBody

if TYPE_CHECKING:
    from atoll.runtime.bootstrap import Make
    from atoll.runtime.training_peer import TrainingPeer
    from atoll.runtime.training_spec import RunStart

log = logging.getLogger(__name__)
# windows of an owner and of agreement per GB of the fp32 model, longer than the defaults from 0.4 GB on: disks that
# write 0.3 GB/s need so long for a state
OWNER_S_PER_GB, AGREE_S_PER_GB = 15.0, 25.0
FAREWELL_S = 10.0  # seconds for the others to agree on this leave; below `peer_channel.LEAVE_S`


_ATTACH = msgspec.msgpack.Decoder(AttachLoopRequest)
_UNCOUNTED = msgspec.json.Decoder(CarriedOverSamples)
_NO_CLAIMS = msgspec.json.encode(CarriedOverSamples(""))


async def serve(fd: int, memory: int) -> None:
    """Run the peer of the loop behind this socket until either of them ends."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    try:
        await _serve(reader, writer, memory)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, memory: int) -> None:
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    wish = _ATTACH.decode(await reader.readexactly(size))
    mailbox = SharedMailbox(memory, wish.layout.floats, mailbox_room_bytes(wish.layout))
    trainer = AttachedTrainer(reader, writer, mailbox)
    claims = _DataClaims(trainer, Path(wish.request.folder))
    trainer.layout, trainer.pass_steps, trainer.validates = wish.layout, wish.pass_steps, wish.validates
    over = asyncio.Event()
    trouble: list[AtollError] = []

    def end(why: AtollError) -> None:
        trouble.append(why)
        over.set()
        host.withdraw()  # a loop that does not fit the run never asks to be a member

    def watch(fact: Fact) -> None:
        if isinstance(fact, FetchFailed) and fact.local and _is_agreed_state(host, fact.blob):
            end(_disk_refused(fact.why, wish.request.folder))
        _watch(fact, trainer, over, end)
        if isinstance(fact, RoundClosed) and (refused := claims.on_closed(fact, host.me)):
            end(refused)
        if isinstance(fact, LocalStateCaughtUp):
            claims.on_caught_up(fact, host)

    reading = asyncio.create_task(trainer.read_messages())
    try:
        host, ticket, lacks = await _enter_run(wish, trainer.read_x(), _factory(wish, watch, trainer))
    except AtollError as why:
        trainer.send(_sent(why))
        with suppress(ConnectionError):  # the loop may have ended in between
            await writer.drain()
        return

    def leave(why: str) -> None:
        end(RunFailedError("E-ATT-04", f"this peer ends: {why}", fix="run your script again"))

    trainer.readings = lambda: _readings_of(host)

    join = _connect_loop(host, trainer, wish)
    host.on_persist_failed, host.on_leave = end, leave
    server = ControlServer(Path(wish.request.folder), handlers_of(host))
    await server.open()
    host.start()
    ended_before, serves_until = host.has_ended, asyncio.get_running_loop().time() + run_end.LINGER_S
    trainer.send(AttachedPeerIdentity("" if host.has_ended else ticket, host.me, lacks, _ignored(wish, host)))
    joining = asyncio.create_task(_end_if_unreachable(join, end))
    ends = [asyncio.create_task(e.wait()) for e in (over, trainer.ended)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if trouble:
        trainer.send(_sent(trouble[0]))
    elif over.is_set():
        with suppress(TrainerCommandError):
            if host.island.head is not None:
                await host.island.warm_up()  # a peer that came back after the end may not have written the model
            await host.island.end_on_head()
        trainer.send(read := _readings_of(host))
        trainer.send(RunFinishedNotice(read.trained, await _write_model(host)))
        with suppress(TimeoutError):  # slower members may still need blobs of this one
            await asyncio.wait_for(trainer.ended.wait(), 10.0)
    await server.close()
    if not ended_before or not trainer.has_detached or trouble:
        serves_until = 0.0  # the other members had their time at the end of the run, or this program was killed
    await _leave_run(host, trouble, farewell_of(trainer, trouble), serves_until)
    for one in (reading, joining, *ends):
        one.cancel()
    await asyncio.gather(reading, joining, *ends, return_exceptions=True)
    with suppress(ConnectionError):
        await writer.drain()


def _factory(
    wish: AttachLoopRequest, watch: Callable[[Fact], None], trainer: AttachedTrainer
) -> Make[TrainingPeer]:
    from atoll.runtime.bootstrap import training_peer_factory

    return training_peer_factory(
        1,
        watch,
        trainer,
        state_memory=wish.state_memory,
        feedback=wish.feedback_precision,
        state_from=wish.request.state_from,
    )


def farewell_of(trainer: AttachedTrainer, trouble: list[AtollError]) -> str:
    """Why the peer of this loop leaves, for the other members."""
    return "its training loop ended" if trainer.has_detached or trouble else LOOP_KILLED


async def _leave_run(host: TrainingPeer, trouble: list[AtollError], why: str, serves_until: Seconds) -> None:
    """Stop the peer, with a farewell to a run that is not over. `serves_until`: see `run_end.see_off`."""
    if host.machine.over:
        await run_end.see_off(host, serves_until)
    fails = bool(trouble) and not isinstance(trouble[0], OtherDataError)  # who reads other data can still leave
    has_left = not (fails or host.machine.over)
    if has_left:
        await host.leave(why, FAREWELL_S)
    await host.stop(why, farewell=not (has_left or host.machine.over))


def _connect_loop(host: TrainingPeer, trainer: AttachedTrainer, wish: AttachLoopRequest) -> JoinProgress:
    """Let the loop decline rounds, send it messages about the event log, and keep its model's configuration."""
    if wish.config:
        write_durably(host.folder / MODEL_CONFIG, [wish.config.encode()])
    trainer.on_decline = lambda rounds: host.skip_rounds(rounds, at_once=True)

    def send(level: int, text: str) -> None:
        trainer.send(LoopLogLine(level, text))

    join = JoinProgress(host, partial(send, logging.WARNING), routine=partial(send, logging.INFO))
    messages, advice = LoopLog(host.me), SharedCoresAdvice(wish.threads)

    def tell(entry: dict[str, Any]) -> None:
        join.entry(entry)
        for message in messages.messages_of(entry, host.progress):
            trainer.send(message)
        if entry["fact"] == "MembershipChanged" and (text := advice.text_once()):
            send(logging.INFO, text)

    host.on_entry = tell
    return join


async def _write_model(host: TrainingPeer) -> str:
    """Write the agreed model into the folder; returns its path, or nothing if the disk refuses it."""
    if host.island.head is None:
        return ""
    try:
        return str(await host.export())
    except AtollError as why:
        log.warning("the agreed model is not in %s: %s", host.folder, why.what)
        return ""


def _sent(why: AtollError) -> PeerFailureNotice:
    return PeerFailureNotice(why.code, why.what, why.cause, why.fix, why.exit_status)


def _ignored(wish: AttachLoopRequest, host: TrainingPeer) -> tuple[str, ...]:
    """Arguments that this run does not follow, as it was founded before."""
    if wish.request.recipe is None or host.machine.genesis is None:
        return ()
    request = replace(wish.request, recipe=_outer_interval_in_samples(wish.request.recipe, wish.batch))
    return ignored_arguments(request, host.machine.settings)


async def _end_if_unreachable(join: JoinProgress, end: Callable[[AtollError], None]) -> None:
    if failure := await join.failure():
        end(failure)


def _readings_of(host: TrainingPeer) -> AgreedReadings:
    """Figures of the last agreed round, with the loss of the last round that trained."""
    history = host.machine.history
    if history is None:
        return AgreedReadings(-1, 0, 0, None)
    loss = agreed_loss(history.head_body, history.bodies.get, host.progress.loss)
    return _readings(history.head_body, loss)


def _readings(body: VertexBody, loss: float | None) -> AgreedReadings:
    return AgreedReadings(body.round, body.trained, sum(m.is_present for m in body.members), loss)


async def _enter_run(
    wish: AttachLoopRequest, x_F: Tensor, make: Make[TrainingPeer]
) -> tuple[TrainingPeer, str, tuple[str, ...]]:
    """Join, resume or found the requested run: (peer, ticket, missing protections of a new run)."""
    from atoll.runtime.bootstrap import (
        ListenOptions,
        TicketTerms,
        found_run,
        holds_run,
        join_run,
        prepare_folder,
        resume_run,
    )
    from atoll.runtime.training_spec import founding_blobs

    request, folder = wish.request, Path(wish.request.folder)
    if not request.name.removesuffix(GROUP_MARK + group_of(request.name)) and not holds_run(folder):
        request = replace(request, name=named(default_name(folder), group_of(request.name)))
        wish = replace(wish, request=request)
    listening = ListenOptions(request.listen, request.announce)
    prepare_folder(folder)
    if request.ticket:
        host = await join_run(folder, request.ticket, "trainer", request.name, listening, make)
        return host, request.ticket, ()
    if holds_run(folder):
        host = await resume_run(folder, request.name, listening, make)
        return host, host.ticket_text() or "", ()
    beginning, settings = _run_start(wish, x_F)
    uses, founded = TicketTerms(_ticket_uses()), founding_blobs(beginning, settings)
    host, made = await found_run(folder, founded, request.name, listening, uses, make)
    return host, made.text, forgone(request.trust, request.statistic, settings.statistic, beginning.recipe)


def _ticket_uses() -> int:
    """Uses of the new run's ticket, as `local` sets them; 0: the default of the run's trust."""
    text = os.environ.get("ATOLL_TICKET_USES", "0")
    if not (text.isdecimal() and int(text) <= PEERS_MAX):
        raise UsageError(
            "E-ATT-11",
            f"ATOLL_TICKET_USES={text!r} is not a number of peers",
            fix="unset ATOLL_TICKET_USES, or set it to a number such as 4",
        )
    return int(text)


def _run_start(wish: AttachLoopRequest, x_F: Tensor) -> tuple[RunStart, RunSettings]:
    """Terms of the run that this loop founds: its current model, its own data and the requested recipe."""
    from atoll.runtime.training_spec import RunStart, terms_of

    request = wish.request
    assert request.recipe is not None
    layout, recipe = wish.layout, _outer_interval_in_samples(request.recipe, wish.batch)
    first = SharedState(
        x_F, untouched_zeros(layout.parameters), torch.zeros(layout.counters, dtype=torch.int64)
    )  # views of the mailbox
    beginning = RunStart(recipe, layout, tuple(state_pieces(first, layout)), ATTACHED, b"")
    schedule = recipe.schedule
    preset = PRESETS[request.trust]
    statistic, min_peers = rule_of(request.trust, request.statistic, request.start_peers, request.min_peers)
    opened = opened_share(request.trust, recipe)
    settings = RunSettings(
        name=request.name,
        rounds=schedule.turns,
        start_peers=request.start_peers,
        min_peers=min_peers,
        statistic=statistic,
        tolerance=preset.tolerance,
        witnessed=preset.witnessed,
        era_rounds=ERA_ROUNDS,
        vote_after_rounds=preset.vote_after_rounds or msgspec.UNSET,
        sponsor_rounds=preset.sponsor_rounds or msgspec.UNSET,
        openings=terms_of(recipe, opened),
        captured=(opened and preset.captured) or msgspec.UNSET,
        validation=StateValidationTerms(every)
        if (every := looked_every(preset, schedule.turn_steps))
        else msgspec.UNSET,
        round=RoundSettings(
            inner_steps=schedule.turn_steps,
            quorum=preset.quorum,
            sample=request.sample or msgspec.UNSET,
            effort=replace(request.effort, batch=wish.batch) if request.effort else msgspec.UNSET,
            committee=msgspec.UNSET if request.trust == "private" else COMMITTEE_MOST,
            owner_s=max(RoundSettings().owner_s, OWNER_S_PER_GB * 4 * layout.floats / 1e9),
            agree_s=max(RoundSettings().agree_s, AGREE_S_PER_GB * 4 * layout.floats / 1e9),
        ),
    )
    return beginning, settings


def _outer_interval_in_samples(recipe: Recipe, batch: int) -> Recipe:
    """The recipe with its outer interval in samples: the loop counts steps of `batch` samples."""
    outer = recipe.outer
    if not isinstance(outer, DelayedNesterov):
        return recipe
    return replace(recipe, outer=replace(outer, every=outer.every * batch))


def _model_mismatch(run: ModelLayout, mine: ModelLayout) -> RefusedError | None:
    """Error that explains why this model cannot take part; None if it can."""
    text = difference(mine, run)
    if not text:
        return None
    if run.slots == mine.slots and run.base is not UNSET and mine.base is not UNSET:
        return RefusedError(
            "E-ATT-07",
            f"your model's base is not the base of this run (here: yours, there: the run's):\n{text}",
            cause="another checkpoint or revision, another dtype, or training since",
            fix="load the weights that the founder loaded before attach: a run never sends its base",
        )
    frozen = {one.name for one in run.held} != {one.name for one in mine.held}
    return RefusedError(
        "E-ATT-01",
        f"your model is not the model of this run (here: yours, there: the run's):\n{text}",
        fix="build the model as the founder did"
        + (", freeze the same parameters and pass the same only=" if frozen else "")
        + "; or, if you meant another run, join with its ticket, in another folder",
    )


def _is_agreed_state(host: TrainingPeer, blob: Digest) -> bool:
    """True if this is the state that the peer has to fetch before it can take part."""
    history = host.machine.history
    body = history.bodies.get(host.machine.regain.round) if history is not None else None
    return body is not None and body.state == blob


def _disk_refused(why: str, folder: str) -> RunFailedError:
    return RunFailedError(
        "E-DISK-01",
        f"cannot keep the state of this run: {why}",
        cause="a member holds some states, each of 8 bytes for every exchanged value",
        fix=f"free some space on the disk of {folder}, or name a folder on another disk; then start again",
    )


class OtherDataError(RefusedError):
    """The loop reads another data set than the run."""


class _DataClaims:
    """The claims of the loop's data in a file beside the private state, so that a restart loses none.

    Like the private state, it is not synced: after a power cut, its samples are read again.
    """

    def __init__(self, trainer: AttachedTrainer, folder: Path) -> None:
        self._trainer, self._claims, self._file = trainer, trainer.claims, StagedFile(folder, "data-claims")
        self._folder = folder
        with suppress(*UNREADABLE):  # damaged
            self._claims.stored = _UNCOUNTED.decode(self._file.read() or _NO_CLAIMS)

    def on_caught_up(self, fact: LocalStateCaughtUp, host: TrainingPeer) -> None:
        history = host.machine.history
        vertex = history.vertices.get(fact.round) if history is not None else None
        if vertex is not None:
            self._claims.restore(digest(vertex.body), decode_body(vertex.body), host.me)

    def on_closed(self, fact: RoundClosed, me: PeerId) -> AtollError | None:
        """Settle the round's claim; an error if the loop reads another data set, or the disk is full."""
        claims, body, recipe = self._claims, fact.body, self._trainer.recipe
        was, remembers = claims.stored, recipe is not None and recipe.coding.beta > 0 and amend_of(body) is None
        claims.settle(fact.id, body, me, remembers)
        if claims.stored.ranges or was.ranges:
            try:
                self._file.write(msgspec.json.encode(claims.stored))
            except OSError as why:
                return refused("write data-claims.bin", why.strerror, self._folder)
        if body.data is UNSET or claims.name is None or claims.name == body.data.name:
            return None
        names = claims.name.hex()[:8], body.data.name.hex()[:8]
        what = f"run.data: this loop reads the data set {names[0]}, the run's is {names[1]}"
        cause = "another data set, or other arguments: its length, shards, seed and shuffle give the name"
        return OtherDataError(
            "E-DATA-07",
            what,
            cause=cause,
            fix="pass the data set and arguments of the others; own data need no run.data",
        )


def _watch(fact: Fact, trainer: AttachedTrainer, over: asyncio.Event, end: Callable[[AtollError], None]) -> None:
    match fact:
        case RoundClosed(body=body) if body.parts:
            trainer.send(_readings(body, body.metrics.reported_loss))
        case RunOver():
            over.set()
        case GenesisKnown(settings=settings):
            from atoll.runtime.training_spec import parse_training_spec

            assert trainer.layout is not None
            learning = parse_training_spec(settings)
            trainer.recipe = learning.recipe
            trainer.validated = settings.validated is not None
            if learning.recipe.schedule.epochs is not msgspec.UNSET and trainer.pass_steps < 1:
                what = "a round of this run is a pass over your data, but attach got no pass_steps"
                fix = "run.attach(model, optimizer, pass_steps=len(loader))"
                end(RefusedError("E-ATT-09", what, fix=fix))
            if mismatch := _model_mismatch(learning.layout, trainer.layout):
                end(mismatch)
        case JoinRejected(code=code, what=what, fix=fix):
            end(RefusedError(code, what, fix=fix))
        case _:
            pass


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)
