"""Offline judge: judges audit exhibits again from blobs in folders, and compares with the auditors' reports.

    agrees    the exhibit is refuted here too, and the audited peer's signature fixes every byte of it: proven
    word      the exhibit is not what the peer signed; that the peer showed it rests on the auditor's report alone
    differs   the judgment here is another one than the auditor signed
    unknown   no judgment is possible here; the text names the reason

Invariants:
- The auditors' own code, with numbers that follow from vertices and from agreed state.
- No file is changed and no peer is contacted.
- Data set and model are loaded only if there is an exhibit to judge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
import torch
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, short_id
from atoll.crypto.digest import Buffer, blob_id, digest, manifest_of
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import JudgeMalformedRow, JudgeReplay, JudgmentResult
from atoll.policy.findings import REFUTING
from atoll.training.data import Data, data_from_blob
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.state import SharedState, state_from_bytes
from atoll.training.spec import TrainingSpec, local_data, spec_after
from atoll.verification.malformed_updates.messages import malformed_row_from_bytes
from atoll.verification.malformed_updates.worker import judge_row
from atoll.verification.offline import AuditorFinding, DisputedCase
from atoll.verification.replay_audit.exhibit import shown_from_bytes
from atoll.verification.replay_audit.replay import ReplayReplica
from atoll.verification.replay_audit.replay_judge import OfflineJudgment, ReplayJudge, judge_again
from atoll.verification.sum_check.wire_digests import WireDigestCache
from atoll.verification.sum_check.worker import judge_opening
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import Commitment

Result = Literal["agrees", "word", "differs", "unknown"]


class CannotJudge(Exception):
    """No judgment is possible here; the text is for people."""


class RejudgedReport(msgspec.Struct, frozen=True):
    """One auditor's report, compared with a judgment of its exhibit here."""

    said: AuditorFinding
    result: Result
    what: str


def fallen(
    doubts: Iterable[DisputedCase], looked: Callable[[DisputedCase], Sequence[RejudgedReport]]
) -> list[tuple[int, PeerId]]:
    """Refuted rounds and peers with a verdict that falls without the reports that differ from the judgment here.

    Reports are counted as members count them: those against several results of one round together, and those of one
    vertex about rows of several rounds together, under the first of these rounds.
    """
    together: defaultdict[tuple[bool, int, PeerId], list[DisputedCase]] = defaultdict(list)
    for doubt in doubts:
        at = doubt.round if doubt.vertex is None else doubt.vertex
        together[doubt.vertex is not None, at, doubt.peer].append(doubt)
    found: list[tuple[int, PeerId]] = []
    for group in together.values():
        against = {one.auditor for doubt in group for one in doubt.counted}
        words = [one for doubt in group for one in looked(doubt) if one.said in doubt.counted]
        left = {one.said.auditor for one in words if one.result != "differs"}
        if len(against) >= group[-1].needed > len(left):
            found.append((group[0].round, group[0].peer))
    return found


class OfflineJudge:
    """`folders` hold the blobs of peers of this run; the first is searched first."""

    def __init__(
        self,
        folders: Sequence[Path],
        settings: RunSettings,
        notary: StatementSigner,
        parse_spec: Callable[[RunSettings], TrainingSpec],
    ) -> None:
        self.folders, self.settings, self.notary = folders, settings, notary
        self._parse_spec = parse_spec
        self._again: dict[tuple[int, PeerId, str, Digest], OfflineJudgment] = {}
        self._taking: ReplayReplica | None = None  # replica of the last judged recipe
        torch.set_num_threads(1)  # as in trainers that are compared bit by bit

    def lacking(self, doubts: Iterable[DisputedCase]) -> list[Digest]:
        """Blobs that these judgments need and that are not here, newest first."""
        needed: dict[Digest, None] = {}
        for doubt in sorted(doubts, key=lambda doubt: -doubt.round):
            needed |= dict.fromkeys(one.exhibit for one in doubt.against if one.exhibit is not None)
            if isinstance(doubt.work, JudgeReplay) and any(one.exhibit is not None for one in doubt.against):
                needed[doubt.work.before] = None
        return [name for name in needed if self._blob(name) is None]

    def look(self, doubt: DisputedCase) -> list[RejudgedReport]:
        """Judge every report of this case again."""
        return [RejudgedReport(said, *self._compare(doubt, said)) for said in doubt.against]

    def _compare(self, doubt: DisputedCase, said: AuditorFinding) -> tuple[Result, str]:
        if said.exhibit is None:
            none = "nothing was shown" if said.finding == "withheld" else "it names no exhibit"
            return "word", f"{none}: its word"
        try:
            again = self._judged(doubt, said.exhibit)
        except CannotJudge as why:
            return "unknown", str(why)
        found, why = again.said.finding, again.said.why
        if found == "unauditable":
            return "unknown", why
        if not again.proven:
            result: Result = "differs" if said.finding == "mismatch" else "word"
            return result, f"the exhibit is not what the peer committed to ({why}): any peer could have made it"
        if found in REFUTING:
            return "agrees", f"judged again here: {found}, {why}; what the peer signed fixes its bytes"
        return "differs", f"judged again here nothing is wrong ({why or found})"

    def _judged(self, doubt: DisputedCase, exhibit: Digest) -> OfflineJudgment:
        key = doubt.round, doubt.peer, doubt.what, exhibit
        if key not in self._again:
            self._again[key] = self._judge(doubt, exhibit)
        return self._again[key]

    def _judge(self, doubt: DisputedCase, exhibit: Digest) -> OfflineJudgment:
        if doubt.work is None:
            raise CannotJudge("the vertices with its assignment are lost here")
        data = self._blob(exhibit)
        if data is None:
            raise CannotJudge(
                f"exhibit {short_id(exhibit)} is not here; auditors keep those of refuted peers: while a peer "
                "runs here atoll verify --verdicts --fetch, else --also FOLDER of one of them"
            )
        learning = spec_after(self._learning, doubt.tuned)
        before = self._state(doubt.work, learning) if isinstance(doubt.work, JudgeReplay) else None
        try:
            if isinstance(doubt.work, JudgeMalformedRow):
                return self._judge_row(doubt, doubt.work, data, learning)
            if not isinstance(doubt.work, JudgeReplay):
                said = judge_opening(doubt.work, data, learning, self._names)
                return OfflineJudgment(said, self._is_bound(doubt, said))
            assert before is not None
            trial = ReplayJudge(self.notary.run, learning, doubt.work, shown_from_bytes(data), before, self._name)
            return judge_again(trial, self._replica)
        except (PeerFault, TypeError, ValueError) as why:  # bytes of a remote peer
            return OfflineJudgment(
                JudgmentResult("withheld", why.what if isinstance(why, PeerFault) else str(why)), proven=False
            )
        except (MemoryError, RuntimeError) as why:
            raise CannotJudge(f"this computer could not: {why}") from why

    def _judge_row(
        self, doubt: DisputedCase, work: JudgeMalformedRow, data: bytes, learning: TrainingSpec
    ) -> OfflineJudgment:
        statement = malformed_row_from_bytes(data).statement
        if statement.signer != doubt.peer:
            raise PeerFault("", "it is about another peer's row")
        self.notary.open(statement, Commitment, doubt.keys.get(doubt.peer))
        up = None if self.settings.opened is None else self._names.up
        why = judge_row(replace(work, shown=data), learning, up)
        return OfflineJudgment(
            JudgmentResult("mismatch" if why else "accepted", why or "the row can be read"), proven=True
        )

    def _is_bound(self, doubt: DisputedCase, said: JudgmentResult) -> bool:
        """Whether an opening and the commitments in it are bound to what was signed."""
        for signed in said.others:
            self.notary.open(signed, Commitment, doubt.keys.get(signed.signer))
        return said.finding != "withheld"

    # ---- inputs --------------------------------------------------------------------------------------------

    def _blob(self, name: Digest) -> bytes | None:
        """The blob if it is here, byte for byte; else None."""
        for folder in self.folders:
            path = folder / "blobs" / name.hex()
            if path.exists() and blob_id(manifest_of(data := path.read_bytes())) == name:
                return data
        return None

    @cached_property
    def _learning(self) -> TrainingSpec:
        try:
            return self._parse_spec(self.settings)
        except PeerFault as fault:
            raise CannotJudge(fault.what) from fault

    @cached_property
    def _names(self) -> WireDigestCache:
        coding = self._learning.recipe.coding
        return WireDigestCache(coding.up, coding.down)

    def _name(self, wire: Buffer) -> Digest:
        return digest(wire) if self.settings.opened is None else self._names.of_row(wire)

    def _state(self, work: JudgeReplay, learning: TrainingSpec) -> SharedState:
        data = self._blob(work.before)
        if data is None:
            raise CannotJudge(
                f"the state that the round began with ({short_id(work.before)}) is no longer here; it lies beside "
                "the exhibit, where that is kept: --fetch while a peer runs here, else --also FOLDER"
            )
        try:
            return state_from_bytes(data, learning.layout)
        except PeerFault as fault:
            raise CannotJudge(f"the state that the round began with cannot be read here: {fault.what}") from fault

    @cached_property
    def _data(self) -> Data:
        learning = self._learning
        blob = self._blob(learning.data_blob)
        try:
            data = local_data(learning) if blob is None else data_from_blob(blob)
        except PeerFault as why:
            raise CannotJudge(f"the run's data set is not here: {why}") from why
        if data is None:
            raise CannotJudge("the run's data set is not here; --also FOLDER of a member that has it")
        return data

    def _replica(self, recipe: Recipe) -> ReplayReplica:
        if self._taking is None or self._taking.recipe != recipe:
            data = self._data
            try:
                self._taking = ReplayReplica(recipe, data, self._learning.data_blob)
            except ValueError as why:
                raise CannotJudge(f"this version cannot take the run's steps: {why}") from why
        return self._taking
