"""Replay audits in the trainer process: keeps the chain of a round, shows segments, replays segments of others.

Invariants:
- Showing and judging pause after every step, so that the peer can run the next round first.
- A show that begins during a replay ends before the replay continues; waiting work keeps the states that it needs.
- Replays run in a second model: x and the moments of this trainer are never touched.
- An exhibit file is never trusted.
Not responsible for: choosing the audited members.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

from msgspec.structs import replace

from atoll.base.errors import PeerFault, RunFailedError
from atoll.training.data import Data
from atoll.verification.replay_audit.exhibit import (
    SegmentExhibit,
    shown_bytes,
    shown_from_bytes,
    states_of,
    vector_bytes,
)
from atoll.verification.replay_audit.judge import ExhibitHashMismatch, Verdict, judging
from atoll.verification.replay_audit.replay import ReplayReplica, TrainerSnapshot, TrainingAssignment, live_bytes
from atoll.verification.replay_audit.state_chain import KEEP_EVERY, StateChain
from atoll.verification.replay_audit.trainer_commands import AuditStepCompleted, JudgeSegment, WriteSegmentExhibit

RECORDS_HELD = 2  # rounds: the last agreed one and the current one, besides those still to be shown
KEEP_ALL_BYTES = 256 * 2**20  # states of a round up to this size are all kept, so that showing takes no steps

Chore = Generator[None, None, Verdict | None]


class SegmentReplayer:
    def __init__(self, data: Data, open_private: Callable[[str, int], int]) -> None:
        """`open_private`: opener of files that no other user can read."""
        self.data, self._open_private = data, open_private
        self.record: StateChain | None = None  # of the current round
        self.records: dict[int, StateChain] = {}
        self.chores: list[Chore] = []  # a replay, and a show that runs before it
        self._replica: ReplayReplica | None = None

    # ---- keeping the chain ---------------------------------------------------------------------------------

    def begin(self, assignment: TrainingAssignment, live: TrainerSnapshot, held: tuple[int, ...] = ()) -> None:
        state_bytes = 4 * (len(live.x_F) + 2 * len(live.inner.first_P))
        all_bytes = state_bytes * (assignment.steps // assignment.segment_steps + 2)
        keep_every = 1 if all_bytes <= KEEP_ALL_BYTES else KEEP_EVERY
        self.record = self.records[assignment.round] = StateChain(assignment, live, keep_every)
        over = sorted(round for round in self.records if round not in held)
        for round in over[:-RECORDS_HELD]:
            del self.records[round]

    def end(self, live: Callable[[], TrainerSnapshot], steps: int) -> StateChain | None:
        """The complete record of the round; None if there is none, or no step was taken."""
        record, self.record = self.record, None
        if record is None or not steps:
            return None
        if record.steps != steps:
            record.note(live(), steps)
        return record

    # ---- chores --------------------------------------------------------------------------------------------

    def start(self, command: WriteSegmentExhibit | JudgeSegment) -> AuditStepCompleted:
        if isinstance(command, WriteSegmentExhibit):
            self.chores.append(self._show(command))
        else:
            self.chores = [self._judge(command)]
        return self.go_on()

    def go_on(self) -> AuditStepCompleted:
        """One step of the newest chore."""
        if not self.chores:
            raise ValueError("no audit is in progress")
        try:
            next(self.chores[-1])
        except StopIteration as done:
            del self.chores[-1]
            return AuditStepCompleted(True, done.value)
        except BaseException:
            del self.chores[-1]
            raise
        return AuditStepCompleted(False)

    def _show(self, wish: WriteSegmentExhibit) -> Chore:
        record = self.records.get(wish.round)
        if record is None or not wish.segment + 1 < len(record.links):
            raise ValueError(f"the chain of round {wish.round} is no longer kept")
        replica = self._replica_for(record.assignment)
        replaying = replica.live() if self.chores[:-1] and record.retaken_steps(wish.segment) else None
        try:
            begin = yield from record.making(wish.segment, replica)
            end = yield from record.making(wish.segment + 1, replica)
        except RunFailedError as why:
            raise ValueError(str(why)) from why  # an answer: this process continues
        finally:
            if replaying is not None:
                replica.load(replaying)
        last = record.kept[len(record.links) - 1]
        shown = SegmentExhibit(
            wish.claim,
            wish.last,
            tuple(record.links),
            live_bytes(begin),
            live_bytes(end),
            vector_bytes(last.x_F),
            b"",
        )
        with open(wish.path, "wb", opener=self._open_private) as file:
            file.write(shown_bytes(shown))
        return None

    def _judge(self, wish: JudgeSegment) -> Chore:
        replica = self._replica_for(wish.assignment)
        try:
            shown = shown_from_bytes(Path(wish.path).read_bytes())
            begin, end = states_of(shown, replica.layout)
        except PeerFault as fault:
            return ExhibitHashMismatch(fault.what)
        except (MemoryError, RuntimeError):
            raise  # too little memory here is no evidence against the audited member
        except Exception as why:  # bytes of a remote peer: no verdict, and this process continues
            raise ValueError(f"the exhibit cannot be read: {type(why).__name__}: {why}") from why
        told = (wish.assignment, shown.claim, shown.links, wish.segment, begin, end, replica)
        return (yield from judging(*told))

    def _replica_for(self, assignment: TrainingAssignment) -> ReplayReplica:
        recipe, replica = assignment.recipe, self._replica
        if replica is None or replace(replica.recipe, batch=recipe.batch) != recipe:
            replica = self._replica = ReplayReplica(recipe, self.data, assignment.data)
        replica.recipe = recipe  # rounds with other batches have the same model
        return replica
