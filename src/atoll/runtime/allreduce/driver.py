"""Driver of one member of an all-reduce group; its "training" is its user's calls.

Lets members in and out between calls, reports what callers wait for, and ends calls that cannot succeed.

Invariants:
- A call ends as its round was agreed, or with an error that gives the reason.
Not responsible for: tensors (`worker.py`), the user's interface (`api.py`).
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from atoll.base.errors import UNREADABLE, AtollError, NetworkError, RefusedError, RunFailedError, UsageError
from atoll.base.ids import PeerId, Seconds, names_of
from atoll.base.limits import BULK_FRAME_MAX, MIB
from atoll.base.machine import Event, Fact, Received, TimerFired
from atoll.features.attribution.row_archive import commits_in
from atoll.peer.events import (
    GenesisKnown,
    IncompatibleUpdateReceived,
    JoinRejected,
    LocalStateCaughtUp,
    MembershipChanged,
    RoundBegan,
    RoundClosed,
    UpdateSharingBegan,
)
from atoll.peer.round.topology_choice import PAIRS, pair_pieces
from atoll.peer.settings import RunSettings
from atoll.runtime import driver
from atoll.runtime.allreduce.call import Cuts, GroupTerms, ReduceCall, ReduceResult, asked_for, but_for_held
from atoll.runtime.allreduce.trust import VerifiableReduceArithmetic
from atoll.runtime.allreduce.worker import GroupWorker
from atoll.runtime.storage.ownership import is_in_use
from atoll.wire.codec import decode_statement
from atoll.wire.messages.membership import ReportMessage
from atoll.wire.messages.round import UpdateCommitmentMessage
from atoll.wire.messages.statements import JoinRequest, LeaveReport, OwnerResult, ReadyReport, SignedStatement
from atoll.wire.messages.vertex import Member, Standing, VertexBody

# reason of a pass that lets members join or leave; the same text at all members
MEMBERSHIP_CHANGE = "members come or go"
PASSES_MAX = 8  # consecutive rounds repeated because of a pass alone; a true report has arrived by then
FAREWELL_S = 10.0  # seconds for the others to agree on this member's leave, if they need its vote
VERTICES_KEPT = 64  # for members that were away
# pooled memory between calls if rows outlive their sum: as many updates of 256 MiB as a part has owners at most,
# plus the local row and results; memory that the next call does not use is freed anyway
KEPT_ROWS_MAX = 2048 * MIB
FOLDERS = "atoll-group-"
ABANDONED_S = 60.0  # a younger folder may belong to a member that has not taken its lock yet
_mine: set[Path] = set()  # folders of this process; testing its own locks would release them

_TERMS = msgspec.msgpack.Decoder(GroupTerms)


class GroupDriver(driver.Driver):
    """Driver of the member behind a `Group`; runs in the group's event loop."""

    island: GroupWorker
    hash_on_loop_bytes = BULK_FRAME_MAX  # fast hashes: a thread would take longer to wake up

    def __init__(self, seat: driver.PeerStartParameters) -> None:
        super().__init__(seat, GroupWorker(seat.store))
        self.island.uplink_bytes_s = self.uplink_bytes_s
        self.follow, self.named = self.island.follow, self.island.named
        self.listeners = [self._wake, self._react_to_fact]  # no event log: a group has no plots
        self.on_bug, self.on_entry = self._fail_calls, self._note
        self._unreachable = ""  # address of the ticket that failed last
        self._refused: AtollError | None = None
        self._had_place = False
        self._passed_round = -1  # last round in which a member passed so that others could join or leave
        self._passes_in_row = 0  # consecutive rounds with such a pass and no join or leave in the vertex
        self._lost_since = self.clock.now()  # since when the quorum or the members for the rule are lacking
        self._news = asyncio.Event()

    async def listen(self, addresses: list[str], announce: tuple[str, ...] = (), upload_bytes_s: int = 0) -> None:
        await super().listen(addresses, announce, upload_bytes_s)
        self.island.room = self.links.memory  # a residual has the size of a result

    def call(self, calls: Iterable[ReduceCall]) -> None:
        for call in calls:
            self.island.call(call)
        if self._had_place and self._standing() == "expelled":  # final: an expelled member never returns
            self.island.fail_all(_lost_place_error(self.me, "expelled"))

    def handle(self, event: Event) -> None:
        super().handle(event)
        match event:
            case Received(message=UpdateCommitmentMessage()):
                self._follow_commits()
            case Received(message=ReportMessage()):
                self._pass_for_membership()
            case TimerFired("beat"):
                self._fail_if_stuck()
            case _:
                pass

    def _follow_commits(self) -> None:
        """Follow the commits of the others: wait for the local call, or pass if a member passed for a join or
        leave.
        """
        round = self.machine.round
        known = round.commits.get(round.attempt) if round is not None else None
        commits = [commit for commit, _ in known.of.values()] if known is not None else []
        if round is not None and any(commit.why == MEMBERSHIP_CHANGE for commit in commits):
            self._passed_round = round.plan.round
            self.island.pass_round(MEMBERSHIP_CHANGE)
        elif round is not None and commits:
            self.island.start_pass_timer()

    def _note(self, entry: dict[str, Any]) -> None:
        if entry["fact"] == "Unreachable":
            self._unreachable = entry["why"]

    def _fail_calls(self, why: BaseException) -> None:
        """Fail all pending calls after a defect: this driver can no longer finish them."""
        text = f"an error of Atoll itself: {type(why).__name__}: {why}"
        fix = "report it with the lines above; close this group and join again"
        self.island.fail_all(RunFailedError("E-INT-01", text, cause="a defect", fix=fix))

    def _pass_for_membership(self) -> None:
        """Pass if a member wants to join or leave and the user has not called; calls already made are repeated."""
        round, pool = self.machine.round, self.machine.pool
        if round is None or pool is None or not round.trains or self._closing:
            return
        reports = pool.chosen()
        if _newcomers(round.plan.members) or _admits(reports) or _leavers(reports):
            self.island.pass_round(MEMBERSHIP_CHANGE)

    def abandon_work(self) -> None:
        self._pass_for_membership()

    async def members(self) -> tuple[PeerId, ...]:
        return self._members()

    async def meet(self, count: int, timeout_s: Seconds) -> None:
        await self._until(lambda: len(self._members()) >= count, timeout_s, f"{count} members are here")

    async def seated(self, timeout_s: Seconds) -> None:
        """Wait until the others have admitted this member and it holds the agreed state."""
        await self._until(self._is_seated, timeout_s, "the group has admitted this member")

    async def trouble(self) -> str:
        round = self.machine.round
        if round is None and self._unreachable and not self.machine.linked:
            return f"no member can be reached: {self._unreachable}"
        if round is None:
            return "this member is still catching up with the group"
        names = names_of((m.peer, m.name) for m in round.plan.members)
        if too_few := self._too_few():
            return too_few
        if round.assembling:
            return f"{self._working()} of {self.machine.settings.start_peers} members are here"
        if lost := self._quorum_lost():
            return lost
        if not self.island.calls:
            return f"{len(names)} are here ({', '.join(names.values())}), and this member has not called"
        awaited = [names[p] for p in round.awaited if p != self.me and not self.machine.heartbeat.is_gone(p)]
        if awaited:
            return f"these members have not called all_reduce yet: {', '.join(awaited)}"
        return "parts are still on their way"

    async def way(self) -> tuple[str, str]:
        round = self.machine.round
        topology = round.way.topology if round is not None else None
        return (topology.name, round.way.why) if round is not None and topology is not None else ("", "")

    async def stop(self, why: str = "the group was closed", farewell: bool = True) -> None:
        if farewell and not self._closing:
            await self.leave(why, FAREWELL_S)
        await super().stop(why, farewell=False)
        _clear(self.folder)

    def _react_to_fact(self, fact: Fact) -> None:
        match fact:
            case GenesisKnown():
                self._learn_terms(fact.settings)
            case UpdateSharingBegan():
                self._follow_commits()  # covers commits that arrived before this share began
            case RoundBegan():
                asyncio.get_running_loop().call_soon(self._pass_for_membership)
            case RoundClosed():
                self.store.keep([(f"vertex/{fact.round - VERTICES_KEPT}", None)])
                if fact.body.parts:
                    self._deliver_round(fact)
            case LocalStateCaughtUp(round=round):
                self.island.fail_missed(round, _missed_mean_error())
            case MembershipChanged():
                self._check_own_place()
            case IncompatibleUpdateReceived() if _differs_in_held(fact):
                self.island.mark_mixed(fact.round)
            case IncompatibleUpdateReceived():
                self.island.fail_call(fact.round, self._differing_call_error(fact))
            case JoinRejected():
                self._refused = RefusedError(fact.code, fact.what, fix=fact.fix)
            case _:
                pass
        self._news.set()

    def _deliver_round(self, fact: RoundClosed) -> None:
        """End the call of an agreed round, or repeat it if the round only changed the membership."""
        assert self.machine.history is not None
        before = self.machine.history.bodies.get(fact.round - 1)
        admits = _admits(fact.body.reports) or (before is not None and _newcomers(before.members))
        left = _leavers(fact.body.reports)
        has_passed = self._passed_round == fact.round and not (admits or left)
        # the passing member may know a report that the proposer did not know
        self._passes_in_row = self._passes_in_row + 1 if has_passed else 0
        made_room = admits or bool(left) or 0 < self._passes_in_row <= PASSES_MAX
        again = bool(set(fact.missing) - left) and made_room
        if not any(fact.body.parts):
            again = self.island.repeats_call(fact.round, again)
        others = {} if again else self._differing_calls(fact)
        if others and others.keys() >= set(fact.counted):
            other = next(iter(others.values()))
            why = _missed_mean_error() if _differs_in_held(other) else self._differing_call_error(other)
            self.island.fail_call(fact.round, why)
        if self.island.checked is not None:
            others = {}  # a liar's claim alone must not spoil a part for all members; its row did decode
        cuts = () if again else self.island.cuts_of(fact.round)
        result = _reduced(fact, cuts, self.me, others)
        self.island.deliver_round(result, again, _parts_of(fact.body, others))

    def _standing(self) -> Standing | None:
        history = self.machine.history
        members = history.head_body.members if history is not None else ()
        return next((m.standing for m in members if m.peer == self.me), None)

    def _check_own_place(self) -> None:
        """Report a lost place to the user at once, instead of at the timeout."""
        standing = self._standing()
        has_place = standing in ("new", "member")
        if self._had_place and not has_place and not self.machine.leaving:
            self.island.fail_all(_lost_place_error(self.me, standing))
        self._had_place = has_place or (self._had_place and standing == "expelled")

    def _learn_terms(self, settings: RunSettings) -> None:
        try:
            self.island.terms = _TERMS.decode(settings.learning)
        except UNREADABLE:
            self._refused = UsageError(
                "E-RED-12",
                "this ticket does not belong to an all-reduce group",
                cause="it belongs to a run that learns a model",
                fix="atoll join TICKET, or atoll.join(ticket) in your own loop",
            )
            return
        self.island.pieces, self.island.pair_pieces = max(1, settings.pieces), pair_pieces(settings)
        self.island.remembers = settings.steady is True
        if settings.tolerance:
            terms, opened = self.island.terms, settings.opened is not None
            self.island.checked = VerifiableReduceArithmetic(
                self.store, terms.codec, terms.way_back or terms.codec, opened
            )
            # BLAKE3 of these payloads takes longer than waking a thread
            self.hash_on_loop_bytes = driver.Driver.hash_on_loop_bytes
            self.links.memory.kept_bytes_max = KEPT_ROWS_MAX

    def _differing_calls(self, fact: RoundClosed) -> dict[PeerId, IncompatibleUpdateReceived]:
        """Contributors with a call that differs from the local one; their commits may never have arrived here."""
        own = self.island.asked_in(fact.round)
        if own is None:
            return {}
        values, asked = own
        return {
            p: IncompatibleUpdateReceived(peer=p, values=c.values, asked=c.asked, my_values=values, my_asked=asked)
            for p, c in commits_in(fact.body).items()
            if (c.values, c.asked) != own
        }

    def _differing_call_error(self, fact: IncompatibleUpdateReceived) -> AtollError:
        assert self.machine.history is not None
        names = names_of((m.peer, m.name) for m in self.machine.history.head_body.members)
        other = names.get(fact.peer, fact.peer)
        if fact.asked != fact.my_asked:
            own = f"the group's {asked_for(self.island.terms.codec, self.machine.settings.topology)}"
            return RunFailedError(
                "E-RED-10",
                f"{other} called with {fact.asked or own}, this member with {fact.my_asked or own}",
                cause="members ask for one all-reduce in different ways",
                fix="pass the same topology= and the same codec= at all members (average_with_partner is "
                "topology=pairs); with lowrank and changed, tensors of the same shapes; this call changed nothing",
            )
        return RunFailedError(
            "E-RED-09",
            f"{other} called with {fact.values:,} values, this member with {fact.my_values:,}",
            cause="members do not make the same calls in the same order, or their tensors differ in size",
            fix="call all_reduce with tensors of the same sizes at all members; this call changed nothing",
        )

    async def _until(self, holds: Callable[[], bool], timeout_s: Seconds, what: str) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    if self._refused is not None:
                        raise self._refused
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise NetworkError(
                "E-RED-07",
                f"after {timeout_s:.0f} s this condition still fails: {what}",
                cause=await self.trouble(),
                fix="see that the other processes run and that their addresses can be reached from here",
            ) from None

    def _is_seated(self) -> bool:
        history = self.machine.history
        members = history.head_body.members if history is not None else ()
        return self.machine.round is not None and any(m.peer == self.me and m.standing == "member" for m in members)

    def _members(self) -> tuple[PeerId, ...]:
        history = self.machine.history
        return tuple(m.peer for m in history.head_body.members if m.may_train) if history is not None else ()

    def _quorum_lost(self) -> str:
        """Absent voters without which no agreement is possible; else ""."""
        round = self.machine.round
        if round is None:
            return ""
        left = self._departed_voters()
        silent = [
            p for p in round.plan.voters if p != self.me and p not in left and self.machine.heartbeat.is_gone(p)
        ]
        if len(silent) + len(left) <= round.plan.tolerated:
            return ""
        names = names_of((m.peer, m.name) for m in round.plan.members)
        told = [(silent, "cannot be heard"), (left, "left")]
        who = "; ".join(f"{', '.join(names[p] for p in peers)} {what}" for peers, what in told if peers)
        return f"too few members are left to agree: {who}"

    def _too_few(self) -> str:
        """Shortfall if the group has reduced before and is now smaller than its rule requires; else ""."""
        history, least = self.machine.history, self.machine.settings.min_peers
        begun = history is not None and history.head_body.trained > 0
        if not begun or (count := self._working()) >= least:
            return ""
        return f"{count} members are left, and {least} are needed to withstand one liar"

    def _fail_if_stuck(self) -> None:
        """Fail pending calls if no agreement has been possible for `timeout_s`: absent members may never return."""
        lost, too_few, now = self._quorum_lost(), self._too_few(), self.clock.now()
        if not (lost or too_few):
            self._lost_since = now
        elif self.island.calls and now - self._lost_since >= self.island.terms.timeout_s:
            self.island.fail_all(_quorum_error(lost) if lost else _rule_error(too_few))

    def _departed_voters(self) -> list[PeerId]:
        """Voters that have sent their leave report, before a vertex contains it."""
        round, pool = self.machine.round, self.machine.pool
        said = _leavers(pool.chosen()) if pool is not None else set[PeerId]()
        return [p for p in round.plan.voters if p in said] if round is not None else []

    def _working(self) -> int:
        """Members that count towards `start_peers` and `min_peers`."""
        history = self.machine.history
        return sum(m.is_auditable_trainer for m in history.head_body.members) if history is not None else 0


@contextmanager
def own_folder() -> Iterator[Path]:
    """Temporary folder for this member's keys. Removes the folders of members that were killed."""
    for old in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        with suppress(OSError):
            if old not in _mine and time.time() - old.stat().st_mtime > ABANDONED_S and not is_in_use(old):
                shutil.rmtree(old)
    folder = Path(tempfile.mkdtemp(prefix=FOLDERS))
    _mine.add(folder)
    try:
        yield folder
    except BaseException:
        _clear(folder)
        raise


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _mine.discard(folder)


def _missed_mean_error() -> AtollError:
    return RunFailedError(
        "E-RED-13",
        "the group agreed on this all-reduce, but its mean did not reach this member",
        cause="its links were too slow or broke for a while; its tensors are as they were",
        fix="go on with the next call; where tensors must be equal everywhere, take them from another member first",
    )


def _quorum_error(who: str) -> AtollError:
    return RunFailedError(
        "E-RED-18",
        who,
        cause="their processes ended, or the network between is broken; this call changed no tensor here",
        fix="call again when they are back, or close this group and found a new one with those that are left",
    )


def _rule_error(who: str) -> AtollError:
    return RunFailedError(
        "E-RED-21",
        who,
        cause="others left or were sent away; this call changed nothing here",
        fix='let others join by its ticket and call again, or close this group and found one with trust="private"',
    )


def _lost_place_error(me: PeerId, standing: Standing | None) -> AtollError:
    if standing == "expelled":
        return RefusedError(
            "E-RED-16",
            f"the group expelled this member ({me[-8:]}) for good",
            cause="others proved that what it signed or summed was wrong; memory or a disk may have failed",
            fix="close this group and join again, which makes a new identity: atoll.reduce.join(ticket)",
        )
    return RunFailedError(
        "E-RED-15",
        "the group went on without this member: this call and those queued behind it fail",
        cause="the others received no heartbeats or no results from it; its links or computer stalled",
        fix="call again: it rejoins by itself; where tensors must be equal everywhere, take them from another "
        "member first",
    )


def _newcomers(members: Iterable[Member]) -> bool:
    return any(m.standing == "new" for m in members)


def _admits(reports: Iterable[SignedStatement]) -> bool:
    """True if a report admits a member."""
    return any(isinstance(decode_statement(s.body, s.signer), JoinRequest | ReadyReport) for s in reports)


def _leavers(reports: Iterable[SignedStatement]) -> set[PeerId]:
    """Signers of leave reports."""
    return {s.signer for s in reports if isinstance(decode_statement(s.body, s.signer), LeaveReport)}


def _differs_in_held(call: IncompatibleUpdateReceived) -> bool:
    """True if the calls differ in their delta reference only."""
    own, theirs = but_for_held(call.my_asked), but_for_held(call.asked)
    return (call.my_values, own) == (call.values, theirs)


def _parts_of(body: VertexBody, among: Collection[PeerId]) -> frozenset[int]:
    """Parts with a mean that includes a row of one of these peers."""
    if not among:
        return frozenset()
    return frozenset(i for i, signed in enumerate(body.parts) if any(p in among for p in _contributors_of(signed)))


def _contributors_of(part: SignedStatement | None) -> tuple[PeerId, ...]:
    answered = decode_statement(part.body, part.signer) if part is not None else None
    return answered.contributors if isinstance(answered, OwnerResult) else ()


def _reduced(fact: RoundClosed, cuts: Cuts, me: PeerId, others: Container[PeerId] = ()) -> ReduceResult:
    """Result for the local member. In pairs it covers the member's own parts. Parts with a row of `others`,
    which made different calls, count as empty.
    """
    named = [() if any(p in others for p in names) else names for names in map(_contributors_of, fact.body.parts)]
    parts = tuple(zip(cuts, named, strict=True)) if cuts else ()
    if fact.topology != PAIRS:
        return ReduceResult(fact.round, fact.counted, fact.partly, fact.missing, parts, fact.topology)
    owners = (signed.signer if signed is not None else None for signed in fact.body.parts)
    own = tuple(part for part, owner in zip(parts, owners, strict=False) if owner == me)
    rows = [frozenset(names) for _, names in own]
    held = frozenset[PeerId]().union(*rows)
    partly = held - held.intersection(*rows)
    return ReduceResult(fact.round, tuple(sorted(held)), tuple(sorted(partly)), fact.missing, own, fact.topology)
