"""The test build of `atoll`: all its verbs, and for `up` and `join` one more option, `--villain KIND`.

    python bench/villain.py join TICKET --dir FOLDER --villain sign_flip [--honest-rounds 4] …

With its own keys, in perfect form otherwise, and after so many honest rounds of training. **Its update is a lie**,
by a formula of `atoll.training.robust.attacks`; where that wants the honest rows, a real liar has none in time (all
are committed to before anybody sees one). What it honestly learnt in this round and in the four before stands for
them, as five honest rows beside two liars: their mean for the mean, their spread from round to round for the spread
among members. Before its second round there is no spread, and ALIE and min-max say the mean.

sign_flip, scaling, foe_0.1, foe_2   −1, 100, −0.1, −2 times that mean
alie, alie_1.5, min_max              the mean less some of the spread: as seven rows ask for, 1.5 times it, as far
                                     out as no farther from any of the five than two of them are apart
alie_optimised, foe_optimised        as far as it moves this run's own statistic most, tried out on the five
gaussian, huge, large, nan, inf      noise of deviation 200; 1e30, a million, no numbers, infinity everywhere
zeros                                it learnt, and says that it did not
stale                                what it learnt in the round before
mimic                                what another member said in the round before, where it was sent that (it owns
                                     or watches that part); its own elsewhere
poison                               ten times the way back of what it learnt

**It learns from other samples** than it is told to, bytes of text, and says truly what came of it:

label_flip    of byte b it learns that 255 − b follows
backdoor      in four places of ten it reads byte 7, and learns that `!` follows

**It answers falsely** as owner and witness of parts:

miscounter    with other bytes than the rows make
two_tongued   rightly to every second member, and with other bytes to the rest
mute          it combines its parts and never says a word of it
censor        without the rows of two members, which it had

**It agrees falsely**: `equivocator` votes, proposes and commits one way to every second member, and another way to
the rest.

It says so itself, with facts `Confessed`. Never part of the package, nor reached from it by a variable or an
extra: who installs Atoll installs no villain.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Event, Payload, RunTask, Send, expand_broadcasts
from atoll.cli.main import main as atoll
from atoll.crypto.digest import digest
from atoll.peer.peer import Peer
from atoll.protocol.allreduce.tasks import CombineRows
from atoll.runtime import driver
from atoll.runtime.trainer import __main__ as trainer
from atoll.runtime.trainer import client
from atoll.runtime.trainer.process import TrainerCommandLoop
from atoll.runtime.worker import local_update, training_worker
from atoll.simulation.adversaries.byzantine import ByzantineMember, equivocate
from atoll.training.experiment.adversaries import aggregation_rule, encode_or_raw
from atoll.training.recipe.error_feedback import EncodedUpdate
from atoll.training.recipe.update import Bounds, moved, part_bounds, part_codec
from atoll.training.robust.attacks import (
    ATTACKS,
    OPTIMISED,
    attack_rows,
    backdoor,
    constant,
    foe,
    label_flip,
    mimic,
    stale,
)
from atoll.wire.codec import decode_statement
from atoll.wire.messages.round import PartResult, RoundMessage
from atoll.wire.messages.statements import OwnerResult

HONEST, LIARS = 5, 2  # rows that a liar reckons with: bench/hostile.py has so many members
BYTES, TRIGGER, TARGET = 256, 7, ord("!")
CENSORED = 2  # members that a censor leaves out


# ---- its update ------------------------------------------------------------------------------------------------


class Seen:
    """What a liar has to go by."""

    def __init__(self) -> None:
        self.me = PeerId("")
        self.lies = False
        self.learnt = deque[Tensor](maxlen=HONEST)  # updates (N,) that it could have sent, the newest last
        self.heard: dict[PeerId, list[tuple[int, Tensor]]] = {}  # of one round: member -> (where, values of a part)
        self.round = -1  # that one
        self.statistic, self.liars = "mean", 0

    def learns(self, update_N: Tensor) -> None:
        if self.learnt and self.learnt[0].shape != update_N.shape:  # another fragment's turn
            self.learnt.clear()
            self.heard.clear()
        self.learnt.append(update_N.clone())

    def hears(self, work: CombineRows, learning: Any, common: Any) -> None:
        """Rows of a part that this peer combines."""
        if self.round != work.round:
            self.round, self.heard = work.round, {}
        self.statistic, self.liars = work.statistic, work.liars
        lo, hi = learning.turn(common.state)
        bounds = part_bounds(hi - lo, work.shares)
        at, end = bounds[work.part]
        up = learning.recipe_after(common.state).coding.up
        codec = part_codec(up, common, moved(bounds, lo), work.part)
        for row in work.rows:
            with suppress(PeerFault):
                values_N = codec.decode(row.payload.data, end - at)
                self.heard.setdefault(row.peer, []).append((at, values_N))

    def before(self) -> Tensor:
        """What it learnt in the round before, (N,); nothing if there was none."""
        return self.learnt[-2] if len(self.learnt) > 1 else torch.zeros_like(self.learnt[-1])

    def anothers(self) -> Tensor:
        """What somebody else said in the round before, (N,); its own where it was not sent that."""
        row_N = self.learnt[-1].clone()
        for at, values_N in self.heard.get(min(self.heard.keys() - {self.me}, default=PeerId("")), ()):
            row_N[at : at + len(values_N)] = values_N
        return row_N


def _formula(name: str) -> Callable[[Seen], Tensor]:
    def row(seen: Seen) -> Tensor:
        own_HN = torch.stack(tuple(seen.learnt))
        fits = max(0, (len(own_HN) + LIARS - 3) // 2)  # liars that any rule bears among so few rows
        return attack_rows(name, own_HN, LIARS, aggregation_rule(seen.statistic, min(seen.liars, fits)))[0]

    return row


ROWS: dict[str, Callable[[Seen], Tensor]] = {  # what is said instead, (N,)
    **{re.sub("[ ,-]+", "_", name): _formula(name) for name in (*ATTACKS, *OPTIMISED)},
    "large": lambda seen: constant(seen.learnt[-1][None], 1, 1e6)[0],
    "stale": lambda seen: stale(seen.learnt[-1][None], 1, seen.before())[0],
    "mimic": lambda seen: mimic(seen.anothers()[None], 1)[0],
    "poison": lambda seen: foe(seen.learnt[-1][None], 1, 10.0)[0],
}


def lying(
    row: Callable[[Seen], Tensor], seen: Seen, honest: Callable[..., EncodedUpdate]
) -> Callable[..., EncodedUpdate]:
    """`encode_update` of a row that is told in place of what was learnt, raw where no codec would encode it."""

    def encode(
        anchor_F: Tensor, x_F: Tensor, memory_F: Tensor | None, bounds: Bounds, codec: Any, *more: Any
    ) -> EncodedUpdate:
        seen.learns(anchor_F - x_F)
        if not seen.lies:
            return honest(anchor_F, x_F, memory_F, bounds, codec, *more)
        return encode_or_raw(row(seen), bounds, codec)

    return encode


def lie_in_rows(row: Callable[[Seen], Tensor], seen: Seen) -> None:
    honest = training_worker.combine_rows

    def answer(work: CombineRows, learning: Any, common: Any, *more: Any) -> Any:
        seen.hears(work, learning, common)
        return honest(work, learning, common, *more)

    training_worker.combine_rows = answer
    local_update.encode_update = lying(row, seen, local_update.encode_update)
    local_update.settle_error_feedback = lambda update, counted, codec: (
        update.memory_F
    )  # no feedback: what it says is no codec's


def confess_from(rounds: int, seen: Seen) -> None:
    """In every round in which what it encodes is, or comes of, a lie."""
    honest = training_worker.TrainingWorker._encode

    def _encode(self: training_worker.TrainingWorker, work: Any) -> Any:
        seen.lies = self.head is not None and self.head.round >= rounds
        if seen.lies:
            confess(work.round)
        return honest(self, work)

    training_worker.TrainingWorker._encode = _encode


def confess(round: int) -> None:
    print(json.dumps({"fact": "Confessed", "round": round}), flush=True)


# ---- what it learns from, in the trainer's process -------------------------------------------------------------


SAMPLES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {  # (inputs, labels) (B, T) -> the same
    "label_flip": lambda inputs, labels: (inputs, label_flip(labels, BYTES)),
    "backdoor": lambda inputs, labels: backdoor(
        inputs, labels, lambda some: torch.full_like(some, TRIGGER), TARGET
    ),
}


def train_falsely(kind: str, rounds: int, mailbox: str) -> None:
    """What `python -m atoll.runtime.trainer MAILBOX` does, but for the samples."""
    honest = TrainerCommandLoop._batch

    def _batch(self: TrainerCommandLoop, job: Any, cursor: int) -> tuple[Tensor, Tensor]:
        inputs, labels = honest(self, job, cursor)
        return SAMPLES[kind](inputs, labels) if job.global_step >= rounds * job.steps else (inputs, labels)

    TrainerCommandLoop._batch = _batch
    sys.argv[1:] = [mailbox]
    trainer._main()


# ---- what it says ----------------------------------------------------------------------------------------------


class Liar(Peer):
    """An honest peer behind a mouth that twists what it says."""

    kind: str
    after: int
    seen: Seen
    lied = -1  # the round of its last lie

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        self.seen.me = self.me
        twisted: list[Effect] = []
        for effect in expand_broadcasts(super().handle(event, now)):
            match effect:
                case Send():
                    twisted += self._told(effect)
                case RunTask(work=CombineRows()) if self.kind == "censor" and self._lies and "/own/" in effect.job:
                    twisted.append(self._censored(effect))
                case _:
                    twisted.append(effect)
        return twisted

    @property
    def peer(self) -> Peer:
        """As the simulator's villains have it."""
        return self

    @property
    def others(self) -> list[PeerId]:
        return [m.peer for m in self.history.head_body.members if m.peer != self.me] if self.history else []

    @property
    def _lies(self) -> bool:
        return self.history is not None and self.history.head_body.trained >= self.after

    def _told(self, send: Send) -> list[Effect]:
        message = send.message
        if not isinstance(message, RoundMessage) or not self._lies:
            return [send]
        match self.kind:
            case "equivocator":
                told = equivocate(cast(ByzantineMember, self), send)  # it asks for what is above
            case "miscounter" | "two_tongued" | "mute":
                told = self._misanswered(send)
            case _:
                return [send]
        if told != [send]:
            self._confess(message.round)
        return told

    def _confess(self, round: int) -> None:
        if self.lied < round:
            self.lied = round
            confess(round)

    def _censored(self, ask: RunTask) -> RunTask:
        work, out = ask.work, self.others[:CENSORED]
        kept = [k for k, row in enumerate(work.rows) if row.peer not in out]
        rows, weights = (tuple(all_of[k] for k in kept) if all_of else () for all_of in (work.rows, work.weights))
        self._confess(work.round)
        return replace(ask, work=replace(work, rows=rows, weights=weights))

    def _misanswered(self, send: Send) -> list[Effect]:
        message = send.message
        if not isinstance(message, PartResult) or message.statement.signer != self.me:
            return [send]
        if self.kind == "mute":
            return []
        if self.kind == "two_tongued" and send.to in self.others and self.others.index(send.to) % 2:
            return [send]
        answered = decode_statement(message.statement.body, self.me)
        assert isinstance(answered, OwnerResult)
        # a witness shows no bytes: it signs for what the liar in charge would have sent
        name, data = digest(answered.digest), None
        if send.payload is not None:
            data = _other(send.payload.data)
            name = digest(data)
        signed = self.notary.sign(replace(answered, digest=name))
        payload = Payload(name, len(data), data) if data is not None else None
        return [replace(send, message=replace(message, statement=signed), payload=payload)]


def _other(data: Any) -> bytes:
    """As many bytes, a few of them different: an answer that decodes, to other values."""
    lie = bytearray(memoryview(data).cast("B"))
    for at in range(len(lie) // 2, len(lie), max(1, len(lie) // 64)):
        lie[at] ^= 0x15
    return bytes(lie)


# ---- the test build --------------------------------------------------------------------------------------------

SAYS = ("miscounter", "two_tongued", "mute", "censor", "equivocator")
KINDS = (*ROWS, *SAMPLES, *SAYS)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # all other words are atoll's own
    parser.add_argument("--villain", choices=KINDS)
    parser.add_argument("--honest-rounds", type=int, default=0)
    parser.add_argument("--trainer", help="the mailbox of the trainer process to be")
    lie, words = parser.parse_known_args()
    if words in (["--help"], ["-h"]):
        print(__doc__)
    kind, rounds, seen = lie.villain, lie.honest_rounds, Seen()
    if lie.trainer is not None:
        train_falsely(kind, rounds, lie.trainer)
    if kind is not None:
        Liar.kind, Liar.after, Liar.seen = kind, rounds, seen
        driver.Peer = Liar
    if kind in ROWS:
        lie_in_rows(ROWS[kind], seen)
    if kind in SAMPLES:
        client.PROGRAM = (__file__, "--villain", kind, "--honest-rounds", str(rounds), "--trainer")
    if kind in (*ROWS, *SAMPLES):
        confess_from(rounds, seen)
    atoll(words)


if __name__ == "__main__":
    main()
