"""Training peer: a driver that also reads genesis, finds the data set and exports the model.

Not responsible for: what is learned; genesis and vertices define it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import UNSET, UnsetType

from atoll.base.errors import AtollError, PeerFault, RunFailedError, UsageError
from atoll.base.ids import ATTACHED, Digest, Seconds
from atoll.base.limits import MIB
from atoll.base.machine import Fact
from atoll.base.units import history_round_text
from atoll.features.archive.reed_solomon import ready
from atoll.features.attribution.leave_one_out import gather_rows
from atoll.peer import operator_commands
from atoll.peer.events import (
    ArchivedStateRebuildFailed,
    ArchivedStateRebuilt,
    AttributionRowsGathered,
    GenesisKnown,
    JoinRejected,
    LocalStateCaughtUp,
    RoundBegan,
    StateDownloadBegan,
)
from atoll.peer.governance.settings_change import is_over
from atoll.protocol.transfer.download import BlobFetched, FetchFailed
from atoll.runtime.driver import Driver, PeerStartParameters
from atoll.runtime.own_data import COPY, OwnData, check_rules, copy_own_data
from atoll.runtime.storage.atomic_files import write_durably
from atoll.runtime.storage.store import PeerStore
from atoll.runtime.trainer import TrainerHeartbeat
from atoll.runtime.training_spec import parse_training_spec
from atoll.runtime.worker.capabilities import enable_capabilities
from atoll.runtime.worker.training_worker import TrainingWorker
from atoll.training.data import STDLIB
from atoll.training.export import tensor_file
from atoll.training.models import label_of, task_of
from atoll.training.models.hugging_face import library_problem
from atoll.training.recipe.state import export_pieces
from atoll.training.spec import local_data
from atoll.verification.replay_audit.machine import EXHIBIT_UPDATES
from atoll.wire.messages.statements import ChangedSettings


def link_data(store: PeerStore, blob: Digest) -> str:
    """Path of this data set under a name that shows its form, as loaders go by the end of a name."""
    link = store.folder / "data.safetensors"
    link.unlink(missing_ok=True)
    link.symlink_to(store.blob_path(blob).relative_to(store.folder))  # relative, since the folder may be moved
    return str(link)


class TrainingPeer(Driver):
    """A member that trains or observes."""

    island: TrainingWorker

    def __init__(
        self,
        me: PeerStartParameters,
        island: TrainingWorker,
        *,
        on_fact: Callable[[Fact], None],
        own: OwnData = OwnData(),  # a frozen value
    ) -> None:
        self._data = ""  # location of the data set
        self._own = own
        self._sought: dict[Digest, asyncio.Future[bool]] = {}  # earlier states with a waiting caller
        self._fetching: dict[Digest, asyncio.Future[None]] = {}  # blobs with a waiting caller
        self._rows_gathered: dict[
            int, asyncio.Future[AttributionRowsGathered]
        ] = {}  # rounds with a caller that waits for their rows
        self.on_leave: Callable[[str], None] = lambda why: None  # ends the process in order, for this reason
        super().__init__(me, island, on_fact=on_fact)
        island.tended.on_beat = self._stepped
        self.machine.verifiers.archived_rounds = island.keep.updates
        island.tuned_before = self._tuned_before
        island.mine.uplink_bytes_s = self.uplink_bytes_s

    def _tuned_before(self, round: int) -> ChangedSettings | UnsetType:
        """Numbers that the vertex before this round changes. Raises RunFailedError."""
        history = self.machine.history
        body = history.bodies.get(round - 1) if history is not None else None
        if body is None:
            raise RunFailedError("E-RUN-29", f"the vertex before round {round} is not in memory any more")
        return body.tuned

    def abandon_work(self) -> None:
        self.island.trainer.cancel()  # the remaining steps of this round do not count

    async def export(self, path: Path | None = None) -> Path:
        """Write the agreed model, or its adapters, as a safetensors file; returns its path. Raises UsageError."""
        head = self.island.head
        assert self.island.learning is not None and head is not None
        exported, path = path is not None, path or self.folder
        path = path / tensor_file(self.island.learning.layout) if path.is_dir() else path
        pieces = export_pieces(head, self.island.learning.layout)
        try:
            await asyncio.to_thread(write_durably, path, pieces, exported=exported)
        except OSError as why:
            raise UsageError("E-ARG-04", f"cannot write {path}: {why.strerror}", fix="name another file") from why
        return path

    @property
    def has_ended(self) -> bool:
        """True if the folder's run has had its rounds, so that no one can join it with a ticket."""
        history = self.machine.history
        return history is not None and is_over(self.machine.settings, history.head_body)

    @property
    def learned(self) -> int:
        """Tokens or samples in the agreed state, so equal at all members, also at those that came late."""
        head, learning = self.island.head, self.island.learning
        if head is None or learning is None:
            return self.progress.tokens
        return head.tokens // learning.recipe.seq_len * max(1, self.progress.seq_len)

    def lies_in_pieces(self, state: Digest) -> bool:
        return self.machine.pieces is not None and self.machine.pieces.is_placed(state)

    async def restore_state(self, state: Digest, wait_s: Seconds) -> bool:
        """Rebuild an earlier state from its holders' pieces; False if that failed or took longer than `wait_s`."""
        made = self._sought.setdefault(state, asyncio.get_running_loop().create_future())
        self.run_step(lambda: self.machine.downloads.fetch_state(state, self.clock.now()))
        try:
            return await asyncio.wait_for(asyncio.shield(made), wait_s)
        except TimeoutError:
            return False

    async def fetch(self, blobs: Sequence[Digest], wait_s: Seconds) -> list[Digest]:
        """Fetch missing blobs from members; returns those on this disk in the end, which stay for one minute.

        For exhibits and states: a longer blob is not fetched.
        """
        most = EXHIBIT_UPDATES * self.machine.settings.update_bytes + MIB
        lacking = [blob for blob in blobs if not self.store.has_blob(blob) and blob not in self._fetching]
        loop = asyncio.get_running_loop()
        asked: dict[Digest, asyncio.Future[None]] = {blob: loop.create_future() for blob in lacking}
        self._fetching |= asked
        try:
            for blob in asked:
                self.run_step(lambda blob=blob: self.machine.downloads.fetch_blob(blob, self.clock.now(), most))
            if asked:
                await asyncio.wait(asked.values(), timeout=wait_s)
        finally:
            for blob in asked:
                del self._fetching[blob]
        return [blob for blob in blobs if self.store.has_blob(blob)]

    async def gather_rows(self, round: int) -> AttributionRowsGathered:
        """Fetch the rows of this round. Raises ValueError if it cannot be replayed or a request is running."""
        if self._rows_gathered:
            raise ValueError(f"round {next(iter(self._rows_gathered))} is being looked at just now")
        gathered = self._rows_gathered[round] = asyncio.get_running_loop().create_future()
        try:
            self.run_step(lambda: gather_rows(self.machine, round))
            return await gathered
        finally:
            del self._rows_gathered[round]

    def _react_to_fact(self, fact: Fact) -> None:
        match fact:
            case GenesisKnown():
                self._learn_recipe(fact)
            case LocalStateCaughtUp():
                self._spawn(self.island.warm_up())
            case StateDownloadBegan() if self._is_only_member:
                self.on_persist_failed(self._state_lost())
            case RoundBegan(paused=True):
                self.island.trainer.stand()
            case ArchivedStateRebuilt(state=state) | ArchivedStateRebuildFailed(state=state) if (
                state in self._sought
            ):
                self._sought.pop(state).set_result(isinstance(fact, ArchivedStateRebuilt))
            case AttributionRowsGathered(of=of) if (
                waits := self._rows_gathered.get(of)
            ) is not None and not waits.done():
                waits.set_result(fact)
            case BlobFetched(blob=blob) | FetchFailed(blob=blob) if (waits := self._fetching.get(blob)) is not None:
                if not waits.done():
                    waits.set_result(None)
            case BlobFetched(blob=blob) if (
                self.island.learning is not None and blob == self.island.learning.data_blob
            ):
                self._use_data_blob(blob)
            case BlobFetched(blob=blob) if self.island.learning is not None and blob == self.island.learning.base:
                self._equip()
            case BlobFetched(blob=blob) if (
                self.island.learning is not None and blob == self.island.learning.tokenizer and self._own.source
            ):
                self._spawn(self._use_own_data())
            case _:
                pass

    @property
    def _is_only_member(self) -> bool:
        history = self.machine.history
        return history is not None and [m.peer for m in history.head_body.members] == [self.me]

    def _state_lost(self) -> RunFailedError:
        history = self.machine.history
        assert history is not None
        blob = self.store.blob_path(history.head_body.state)
        return RunFailedError(
            "E-DIR-14",
            f"the state of {history_round_text(history.head, history.head_body.trained)} in {self.folder} is "
            "damaged or gone, and no other member has it",
            cause=f"this disk changed or lost {blob}",
            fix=f"copy that file from a backup; or atoll checkpoint list --dir {self.folder} names older states, "
            "and atoll checkpoint export ROUND FILE writes one, as the model of a new run",
        )

    def _learn_recipe(self, genesis: GenesisKnown) -> None:
        try:
            self.island.learning = parse_training_spec(genesis.settings)
        except PeerFault as fault:
            self._refuse(
                "E-RUN-11",
                fault.what,
                "upgrade atoll; or, if it is the ticket of a group, atoll.reduce.join(ticket)",
            )
            return
        if genesis.settings.kept_coded and not ready():
            self._refuse(
                "E-PCS-01",
                "this run keeps older states in coded pieces, and PyECLib is not installed here",
                "pip install pyeclib",
            )
            return
        if self.wish.role != "observer" and (problem := library_problem(self.island.learning.recipe.model)):
            self._refuse(
                "E-RUN-31", f"this computer cannot train in this run: {problem}", "pip install transformers"
            )
            return
        if self._has_own_data and self.island.learning.data != ATTACHED:
            try:
                check_rules(genesis.settings)
            except UsageError as why:
                self._refuse(why.code, why.what, why.fix, why.cause)
                return
        if self._own.source and self.wish.role != "observer" and self.island.learning.data != ATTACHED:
            operator_commands.postpone(self.machine)  # until these data are found to fit
        enable_capabilities(self.island, genesis.settings, self.run_id, self.me)
        self._tell_learning()
        self._spawn(self._find_data())

    def withdraw(self) -> None:
        """Never ask to be a member: this computer cannot take part in the run."""
        operator_commands.withdraw(self.machine)

    def _refuse(self, code: str, what: str, fix: str, cause: str = "") -> None:
        """Report that this computer cannot take part in the run. A peer that is no member yet never becomes one."""
        self.withdraw()
        refused = JoinRejected(by=self.me, code=code, what=what, fix=fix, cause=cause, for_good=True)
        for listener in self.listeners:
            listener(refused)

    async def _find_data(self) -> None:
        """Load the data set from this disk, else fetch it from members."""
        learning = self.island.learning
        assert learning is not None
        if self.wish.role == "observer":
            return
        for blob in learning.beside:
            if not self.store.has_blob(blob):
                self.run_step(lambda blob=blob: self.machine.downloads.fetch_blob(blob, self.clock.now()))
        if self.island.tended.attached:
            return self.island.equip(ATTACHED)
        if self._has_own_data and learning.data != ATTACHED:
            return await self._use_own_data()
        if self.store.has_blob(learning.data_blob):
            return self._use_data_blob(learning.data_blob)
        if await asyncio.to_thread(local_data, learning) is not None:
            self._equip(STDLIB)
        else:
            self.run_step(lambda: self.machine.downloads.fetch_blob(learning.data_blob, self.clock.now()))

    @property
    def _has_own_data(self) -> bool:
        return bool(self._own.source) or (self.folder / COPY).exists()

    async def _use_own_data(self) -> None:
        """Train on data of this member's own once the run's tokenizer is here, which it may need."""
        learning, path = self.island.learning, self.folder / COPY
        assert learning is not None
        if self._own.source:
            name = learning.tokenizer
            if name is not UNSET and not self.store.has_blob(name):
                return
            tokenizer = None if name is UNSET else self.store.blob_path(name)
            try:
                path = await asyncio.to_thread(copy_own_data, self._own, learning, tokenizer, self.folder)
            except AtollError as why:
                self._refuse(why.code, why.what, why.fix, why.cause)
                return
            self.run_step(lambda: operator_commands.seek_role(self.machine, self.clock.now()))
        self.island.tended.own_data = True
        self._equip(str(path))

    def _use_data_blob(self, blob: Digest) -> None:
        self._equip(link_data(self.store, blob))

    def _equip(self, data: str = "") -> None:
        """Start the trainer once the data set and the base are here; `data` is the location of a new data set."""
        self._data, learning = data or self._data, self.island.learning
        if self._data and learning is not None and (learning.base is UNSET or self.store.has_blob(learning.base)):
            self.island.equip(self._data)

    def _tell_learning(self) -> None:
        """Record the training part of genesis, which is not a fact of the machine."""
        learning = self.island.learning
        assert learning is not None
        recipe = learning.recipe
        text = learning.data != ATTACHED and task_of(recipe.model) == "text"
        self.record_entry(
            {
                "at": round(self.clock.now(), 3),
                "fact": "LearningKnown",
                "phase": "join",
                "model": label_of(recipe.model),
                "parameters": learning.layout.parameters,
                "base_values": learning.layout.base_values,
                "batch": recipe.batch,
                "seq_len": recipe.seq_len if text else 1,
                "unit": "tokens" if text else "samples",
                "data": "own data" if self._has_own_data else learning.data,
            }
        )

    def _stepped(self, beat: TrainerHeartbeat) -> None:
        """Show a heartbeat of the trainer; it is not recorded."""
        entry = {"at": round(self.clock.now(), 3), "fact": "Stepped", "phase": "train", "steps": beat.steps}
        self.record_entry(entry | {"loss": round(beat.loss, 4), "step_s": round(beat.step_s, 5)}, durable=False)
