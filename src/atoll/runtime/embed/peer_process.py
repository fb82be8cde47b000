"""The peer process behind a user's own training loop, and the stand-in for a trainer through which it drives it.

Turned round from `trainer/`: there the peer starts the trainer, here the user's process is the trainer and starts
the peer (`python -m atoll.runtime.embed.peer_process`). Same commands and answers, same shared memory, over a
socket pair.
If either side dies the other one notices by the end of the socket: the peer says farewell, the loop gets an error.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
from msgspec import UNSET
from torch import Tensor

from atoll.base.arguments import Peers, Whole
from atoll.base.errors import AtollError, RefusedError, RunFailedError, UsageError
from atoll.base.limits import COMMITTEE_MOST, PEERS_MAX
from atoll.base.machine import Fact
from atoll.base.workload import WorkloadPolicy
from atoll.crypto.digest import Buffer
from atoll.peer.events import GenesisKnown, JoinRejected, RoundClosed, RunOver
from atoll.peer.settings import ERA_ROUNDS, RunSettings
from atoll.policy.fault_tolerance import StatisticName
from atoll.policy.participation import ParticipationPolicy
from atoll.policy.plan import RoundSettings
from atoll.policy.presets import PRESETS, Trust, looked_every
from atoll.runtime.control.handlers import handlers_of
from atoll.runtime.control.socket import ControlServer
from atoll.runtime.embed.trust_defaults import forgone, opened_share, rule_of
from atoll.runtime.trainer import ModelEvaluated, TrainerFailed, TrainerSpec
from atoll.runtime.trainer.protocol import (
    FRAME_MAX,
    LENGTH,
    CancelTraining,
    CommandDone,
    CommandFailed,
    InnerSaved,
    LoadInner,
    MergeAnchor,
    SaveInner,
    StepsTrained,
    Taken,
    TrainSteps,
    WriteParameters,
)
from atoll.runtime.trainer.shared_memory import SharedMailbox
from atoll.training.codec.blocks import Room, new_wire
from atoll.training.exchange.layout import ModelLayout, difference
from atoll.training.recipe.outer import DelayedNesterov
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.state import SharedState, state_bytes
from atoll.verification.state_validation.policy import ValidationRule
from atoll.worker.trainer_commands import BeginValidation, Look, LossesMeasured, NextBatch

if TYPE_CHECKING:
    from atoll.runtime.training_spec import RunStart

T = TypeVar("T")
FAREWELL_S = 10.0  # for the others to agree that I am gone; below what a loop waits for its peer (attach.LEAVE_S)


class AttachLoop(msgspec.Struct, frozen=True, tag="Attach"):
    """First words of the user's process: who it wants to be."""

    folder: str
    name: str
    ticket: str  # empty: found a new run, or go on with the folder's
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    layout: ModelLayout
    recipe: Recipe | None  # of a run to found; None when joining
    start_peers: Peers = 1
    min_peers: Whole = 0  # 0: as many as the rule needs
    trust: Trust = "private"
    statistic: StatisticName | None = None  # how updates are combined; None: as trust has it
    sample: ParticipationPolicy | None = None  # how many train in a round of a run to found; None: everybody
    effort: WorkloadPolicy | None = None  # what of its rounds' work follows the run; None: nothing
    batch: int = 1  # samples behind one optimizer step
    pass_steps: Whole = 0  # optimizer steps of one pass over the loop's own data; 0: it did not say
    validates: bool = False  # the loop can measure a held-out loss


class PeerNews(msgspec.Struct, frozen=True, tag="Told"):
    """News for the user's process."""

    ticket: str
    me: str
    lacks: tuple[str, ...] = ()  # a run that it founded, of what its trust stands for


class RoundsBegin(msgspec.Struct, frozen=True, tag="Begins"):
    """The first job comes next: what the run's recipe works with may be in the hands of the loop's optimizer."""

    recipe: Recipe
    validated: bool = False  # members look at its agreed model


class LoopRoundClosed(msgspec.Struct, frozen=True, tag="Closed"):
    """A round was agreed."""

    round: int
    trained: int
    counted: int
    members: int
    loss: float


class LoopRunOver(msgspec.Struct, frozen=True, tag="Over"):
    """The run has had its rounds; x holds the agreed model."""

    rounds: int


class PeerError(msgspec.Struct, frozen=True, tag="Trouble"):
    """This peer cannot go on: an AtollError in parts."""

    code: str
    what: str
    cause: str
    fix: str


class DeclineRounds(msgspec.Struct, frozen=True, tag="Declines"):
    """The loop gives nothing to this round, nor to so many less one after it."""

    job: int  # its Train, which this answers; 0: it has none just now
    rounds: int


class DetachLoop(msgspec.Struct, frozen=True, tag="Farewell"):
    """Last words of the user's process."""


ToUser = (
    TrainSteps
    | CancelTraining
    | WriteParameters
    | MergeAnchor
    | SaveInner
    | LoadInner
    | BeginValidation
    | RoundsBegin
    | PeerNews
    | LoopRoundClosed
    | LoopRunOver
    | PeerError
)
FromUser = (
    AttachLoop
    | StepsTrained
    | CommandDone
    | InnerSaved
    | LossesMeasured
    | CommandFailed
    | DeclineRounds
    | DetachLoop
)

_FROM_USER: msgspec.msgpack.Decoder[FromUser] = msgspec.msgpack.Decoder(FromUser)
_ATTACH = msgspec.msgpack.Decoder(AttachLoop)


def room_of(layout: ModelLayout) -> int:
    """Bytes behind x in the mailbox, for two moments and what names them, or for a model to look at. Memory is
    taken when they come."""
    return max(8 * layout.parameters, 4 * layout.floats) + 4096


class AttachedTrainer:
    """Looks like `TrainerClient` to an island; behind it is somebody else's loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mailbox: SharedMailbox) -> None:
        self.layout: ModelLayout | None = None
        self._reader, self._writer, self._mailbox = reader, writer, mailbox
        self._lock = asyncio.Lock()
        self._answers: asyncio.Queue[FromUser] = asyncio.Queue()
        self._job = 0
        self._training = False  # the loop has the floor
        self.recipe: Recipe | None = None  # of the run, once genesis is known
        self.pass_steps = 0
        self.validated = self.validates = False  # members look at the model, and this loop can
        self.on_decline: Callable[[int], None] = lambda rounds: None
        self.ended = asyncio.Event()

    async def hear(self) -> None:
        """Read what the loop says until it ends."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                word = _FROM_USER.decode(await self._reader.readexactly(size))
                if isinstance(word, DetachLoop):
                    break
                if isinstance(word, DeclineRounds):
                    self.on_decline(word.rounds)
                    if not self._training or word.job != self._job:
                        continue  # it went on ahead of a round that it was not asked for yet
                self._answers.put_nowait(word)
        self.ended.set()

    def say(self, word: ToUser) -> None:
        body = msgspec.msgpack.encode(word)
        assert len(body) <= FRAME_MAX
        with suppress(ConnectionError):
            self._writer.write(LENGTH.pack(len(body)) + body)

    async def start(self, spec: TrainerSpec) -> ModelLayout:
        assert self.layout is not None
        if self.ended.is_set():
            raise _ended()
        assert self.recipe is not None, "who knows a spec knows genesis"
        self.say(RoundsBegin(self.recipe, self.validated))
        return self.layout

    async def train(
        self,
        steps: int,
        *,
        cursor: int,
        shard: int,
        shards: int,
        global_step: int,
        until: float | None = None,
        ahead: int | None = None,
        apart: bool = False,  # data are the loop's own
        batch: int = 0,  # and so is this
    ) -> StepsTrained:
        if self.recipe is not None and self.recipe.schedule.epochs is not msgspec.UNSET:
            steps = min(steps, self.recipe.schedule.steps_of(self.pass_steps))
        async with self._lock:
            self._job, self._training = self._job + 1, True
            try:
                word = TrainSteps(self._job, steps, until, cursor, shard, shards, global_step, ahead)
                return await self._turn(word, StepsTrained)
            finally:
                self._training = False

    def cancel(self) -> None:
        self.say(CancelTraining(self._job))

    def hand_over(self) -> None:
        self.cancel()

    def stand(self) -> None:
        self.say(CancelTraining(self._job, stands=True))

    def read_x(self) -> Tensor:
        return self._mailbox.x_F

    async def write_x(self, x_F: Tensor, counters: tuple[int, ...] = ()) -> None:
        async with self._lock:
            self._mailbox.x_F.copy_(x_F)
            await self._turn(WriteParameters(counters), CommandDone)

    async def merge(self, lo: int, value_N: Tensor, how: Taken) -> None:
        async with self._lock:
            self._mailbox.x_F[lo : lo + len(value_N)].copy_(value_N)
            await self._turn(MergeAnchor(lo, lo + len(value_N), how), CommandDone)

    async def evaluate(self, samples: int = 512, of_F: Tensor | None = None) -> ModelEvaluated:
        raise TrainerFailed("refused", "an attached loop evaluates its model itself", alive=True)

    async def sample(self, prompt: str, n: int, seed: int = 0, of_F: Tensor | None = None) -> str:
        raise TrainerFailed("refused", "an attached loop draws its own samples", alive=True)

    async def validate(self, work: Look | NextBatch, of_F: Tensor | None = None) -> LossesMeasured:
        if not isinstance(work, BeginValidation) or of_F is None or not self.validates:
            raise TrainerFailed("refused", "this attached loop brings no held-out loss (validate=)", alive=True)
        async with self._lock:
            self._mailbox.show(of_F)
            return await self._turn(work, LossesMeasured)

    def made(self) -> Tensor:
        raise TrainerFailed("refused", "an attached loop takes nobody's steps again", alive=True)

    async def inner_state(self, room: Room = new_wire) -> Buffer:
        if not self._averages:
            return b""  # the optimizer is the loop's own
        async with self._lock:
            saved = await self._turn(SaveInner(), InnerSaved)
            return self._mailbox.take(saved.size_bytes, room)

    async def set_inner_state(self, data: Buffer) -> None:
        if not self._averages:
            return
        async with self._lock:
            await self._turn(LoadInner(self._mailbox.put(data)), CommandDone)

    @property
    def _averages(self) -> bool:
        """Rounds average moments, which are in the hands of the loop's optimizer."""
        return self.recipe is not None and any(self.recipe.schedule.moments)

    async def stop(self) -> None:
        return  # the loop is not ours to end

    async def _turn(self, command: ToUser, expected: type[T]) -> T:
        self.say(command)
        answer = asyncio.ensure_future(self._answers.get())
        ended = asyncio.ensure_future(self.ended.wait())
        await asyncio.wait({answer, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not answer.done():
            answer.cancel()
            raise _ended()
        word = answer.result()
        if isinstance(word, CommandFailed):
            raise TrainerFailed(word.why, word.what, alive=True)
        if isinstance(word, DeclineRounds):
            raise RunFailedError("E-ATT-08", "its loop declined this round")
        assert isinstance(word, expected), f"{type(word).__name__} is no answer to {command}"
        return word


def _ended() -> TrainerFailed:
    return TrainerFailed("crashed", "the training loop that this peer belongs to has ended")


# ---- the peer process --------------------------------------------------------------------------------------


async def serve(fd: int, memory: int) -> None:
    """The peer of the loop behind this socket, until either of them ends."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    try:
        await _serve(reader, writer, memory)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, memory: int) -> None:
    from atoll.runtime.bootstrap import (
        ListenOptions,
        TicketTerms,
        found_run,
        holds_run,
        join_run,
        prepare,
        resume_run,
        training,
    )
    from atoll.runtime.training_spec import found

    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    wish = _ATTACH.decode(await reader.readexactly(size))
    mailbox = SharedMailbox(memory, wish.layout.floats, room_of(wish.layout))
    trainer = AttachedTrainer(reader, writer, mailbox)
    trainer.layout, trainer.pass_steps, trainer.validates = wish.layout, wish.pass_steps, wish.validates
    over = asyncio.Event()
    trouble: list[AtollError] = []

    def watch(fact: Fact) -> None:
        _watch(fact, trainer, over, trouble)

    hearing = asyncio.create_task(trainer.hear())
    listening, make = ListenOptions(wish.listen, wish.announce), training(1, watch, trainer)
    folder, lacks = Path(wish.folder), tuple[str, ...]()
    try:
        prepare(folder)
        if wish.ticket:
            host = await join_run(folder, wish.ticket, "trainer", wish.name, listening, make)
            ticket = wish.ticket
        elif holds_run(folder):
            host = await resume_run(folder, wish.name, listening, make)
            ticket = host.ticket_text() or ""
        else:
            beginning, settings = _beginning(wish, trainer.read_x())
            founded = found(beginning, settings)
            lacks = forgone(wish.trust, wish.statistic, settings.statistic, beginning.recipe)
            host, made = await found_run(folder, founded, wish.name, listening, TicketTerms(_uses()), make)
            ticket = made.text
    except AtollError as why:
        trainer.say(PeerError(why.code, why.what, why.cause, why.fix))
        with suppress(ConnectionError):  # the loop may have ended meanwhile
            await writer.drain()
        return

    def leave(why: str) -> None:
        trouble.append(RunFailedError("E-ATT-04", f"this peer ends: {why}", fix="run your script again"))
        over.set()

    trainer.on_decline = lambda rounds: host.rest(rounds, at_once=True)

    def end(why: AtollError) -> None:
        trouble.append(why)
        over.set()

    host.on_unkept = end
    door = ControlServer(folder, handlers_of(host, leave))
    await door.open()
    host.start()
    trainer.say(PeerNews(ticket, host.me, lacks))
    ends = [asyncio.create_task(e.wait()) for e in (over, trainer.ended)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if trouble:
        trainer.say(PeerError(trouble[0].code, trouble[0].what, trouble[0].cause, trouble[0].fix))
    elif over.is_set():
        with suppress(TrainerFailed):
            await host.island.end_on_head()
        trainer.say(LoopRunOver(host.machine.history.head_body.trained if host.machine.history else 0))
        with suppress(TimeoutError):  # laggards may still need what we hold
            await asyncio.wait_for(trainer.ended.wait(), 10.0)
    await door.close()
    why, said = "its training loop ended", not (trouble or host.machine.over)
    if said:
        await host.leave(why, FAREWELL_S)
    await host.stop(why, farewell=not (said or host.machine.over))
    hearing.cancel()
    for one in ends:
        one.cancel()
    await asyncio.gather(hearing, *ends, return_exceptions=True)
    with suppress(ConnectionError):
        await writer.drain()


def _uses() -> int:
    """Of the ticket of a run that is founded here, as `local` sets it; 0: as the run's trust has it."""
    text = os.environ.get("ATOLL_TICKET_USES", "0")
    if not (text.isdecimal() and int(text) <= PEERS_MAX):
        raise UsageError(
            "E-ATT-11",
            f"ATOLL_TICKET_USES={text!r} is no number of peers",
            fix="unset ATOLL_TICKET_USES, or say 4",
        )
    return int(text)


def _beginning(wish: AttachLoop, x_F: Tensor) -> tuple[RunStart, RunSettings]:
    """The run that this loop founds: its model as it is now, its own data, the recipe it asked for."""
    from atoll.runtime.training_spec import RunStart, terms_of
    from atoll.training.spec import ATTACHED

    assert wish.recipe is not None
    layout, recipe = wish.layout, _in_samples(wish.recipe, wish.batch)
    momentum_P = torch.zeros(layout.parameters, dtype=torch.float32)
    first = SharedState(x_F.clone(), momentum_P, torch.zeros(layout.counters, dtype=torch.int64))
    beginning = RunStart(recipe, layout, state_bytes(first, layout), ATTACHED, b"")
    schedule = recipe.schedule
    preset = PRESETS[wish.trust]
    statistic, min_peers = rule_of(wish.trust, wish.statistic, wish.start_peers, wish.min_peers)
    opened = opened_share(wish.trust, recipe)
    settings = RunSettings(
        name=wish.name,
        rounds=schedule.turns,
        start_peers=wish.start_peers,
        min_peers=min_peers,
        statistic=statistic,
        tolerance=preset.tolerance,
        witnessed=preset.witnessed,
        era_rounds=ERA_ROUNDS,
        vote_after_rounds=preset.vote_after_rounds or msgspec.UNSET,
        sponsor_rounds=preset.sponsor_rounds or msgspec.UNSET,
        openings=terms_of(recipe, opened),
        captured=(opened and preset.captured) or msgspec.UNSET,
        validation=ValidationRule(every) if (every := looked_every(preset, schedule.turn_steps)) else msgspec.UNSET,
        round=RoundSettings(
            inner_steps=schedule.turn_steps,
            quorum=preset.quorum,
            sample=wish.sample or msgspec.UNSET,
            effort=msgspec.structs.replace(wish.effort, batch=wish.batch) if wish.effort else msgspec.UNSET,
            committee=msgspec.UNSET if wish.trust == "private" else COMMITTEE_MOST,
        ),
    )
    return beginning, settings


def _in_samples(recipe: Recipe, batch: int) -> Recipe:
    """The same, where an outer step counts what was learned, in samples of which a step has so many."""
    outer = recipe.outer
    if not isinstance(outer, DelayedNesterov):
        return recipe
    return msgspec.structs.replace(recipe, outer=msgspec.structs.replace(outer, every=outer.every * batch))


def _parting(run: ModelLayout, mine: ModelLayout) -> RefusedError | None:
    """Why this model cannot take part; None if it can."""
    text = difference(mine, run)
    if not text:
        return None
    if run.slots == mine.slots and run.base is not UNSET and mine.base is not UNSET:
        return RefusedError(
            "E-ATT-07",
            f"your model's base is not the base of this run (here: yours, there: the run's):\n{text}",
            cause="another checkpoint or revision, another dtype, or it was trained in the meantime",
            fix="before attach load the very weights that the founder loaded: a run never sends its base",
        )
    frozen = {one.name for one in run.held} != {one.name for one in mine.held}
    return RefusedError(
        "E-ATT-01",
        f"your model is not the model of this run (here: yours, there: the run's):\n{text}",
        fix="build the model as the founder did"
        + (", freeze the same parameters and pass the same only=" if frozen else ""),
    )


def _watch(fact: Fact, trainer: AttachedTrainer, over: asyncio.Event, trouble: list[AtollError]) -> None:
    match fact:
        case RoundClosed(body=body) if body.parts:
            here = sum(m.present for m in body.members)
            trainer.say(LoopRoundClosed(body.round, body.trained, len(fact.counted), here, body.metrics.loss))
        case RunOver():
            over.set()
        case GenesisKnown(settings=settings):
            from atoll.runtime.training_spec import decode_learning

            assert trainer.layout is not None
            learning = decode_learning(settings)
            trainer.recipe = learning.recipe
            trainer.validated = settings.validated is not None
            if learning.recipe.schedule.epochs is not msgspec.UNSET and trainer.pass_steps < 1:
                what = "a round of this run is a pass over your data, and your loop does not say how long one is"
                fix = "run.attach(model, optimizer, pass_steps=len(loader))"
                trouble.append(RefusedError("E-ATT-09", what, fix=fix))
                over.set()
            if parting := _parting(learning.layout, trainer.layout):
                trouble.append(parting)
                over.set()
        case JoinRejected(code=code, what=what, fix=fix):
            trouble.append(RefusedError(code, what, fix=fix))
            over.set()
        case _:
            pass


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)
