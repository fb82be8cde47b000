"""One member of an all-reduce group: the driver whose "training" is its user's calls.

Lets members in and out between calls, tells callers what they wait for, and ends their calls with words where no
answer can come. Promises: a call ends as its round was agreed, or with an error that says what happened.
Never touches tensors (`group_island.py` does), never speaks to users (`group.py` does).
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
    CaughtUp,
    GenesisKnown,
    IncompatibleCall,
    JoinRejected,
    MembershipChanged,
    RoundBegan,
    RoundClosed,
    ShareBegan,
)
from atoll.peer.round.topology_choice import PAIRS, pair_pieces
from atoll.peer.settings import RunSettings
from atoll.runtime import driver
from atoll.runtime.allreduce.trust import CheckedArithmetic
from atoll.runtime.allreduce.worker import (
    Cuts,
    GroupTerms,
    GroupWorker,
    ReduceCall,
    ReduceResult,
    asked_for,
    but_for_held,
)
from atoll.runtime.storage.store import in_use
from atoll.wire.codec import decode_statement
from atoll.wire.messages.membership import MemberReport
from atoll.wire.messages.round import CommitAnnouncement
from atoll.wire.messages.statements import JoinRequest, LeaveReport, OwnerResult, ReadyReport, SignedStatement
from atoll.wire.messages.vertex import Member, Standing, VertexBody

GIVES_WAY = "members come or go"  # why a member passes a round that nobody but they needs; all say it in one word
WORDS_MAX = 8  # rounds in a row made for a report on such a word alone; a true one has come by then
FAREWELL_S = 10.0  # for the others to agree that this member is gone, where they need its vote for that
VERTICES_KEPT = 64  # for members that were away
KEPT_ROWS_MAX = 2048 * MIB  # of memory between calls where rows outlive their sum: as many updates of 256 MiB as a
# part has owners at most, my own and the answers. What the next call does not use goes back all the same
FOLDERS = "atoll-group-"
ABANDONED_S = 60.0  # a younger folder may be that of a member that has not taken its lock yet
_mine: set[Path] = set()  # folders of this process: to look at its own locks would let go of them

_TERMS = msgspec.msgpack.Decoder(GroupTerms)


class GroupDriver(driver.Driver):
    """The member behind a `Group`; lives in its loop."""

    island: GroupWorker
    hash_on_loop_bytes = BULK_FRAME_MAX  # its names are quick: a thread would take longer to wake up

    def __init__(self, seat: driver.PeerConfig) -> None:
        super().__init__(seat, GroupWorker(seat.store))
        self.island.uplink_bytes_s = self.uplink_bytes_s
        self.follow, self.named = self.island.follow, self.island.named
        self.listeners = [self._wake, self._react_to_fact]  # no record: nobody plots a group
        self.on_broken, self.on_entry = self._broke, self._note
        self._unreachable = ""  # the last address of the ticket's that was dialled in vain
        self._refused: AtollError | None = None
        self._had_place = False
        self._gave_way = -1  # in this round somebody passed for those who come or go
        self._words = 0  # rounds in a row that made room for nobody but by such a word
        self._lost_since = self.clock.now()  # a quorum, or members for its rule; or when both were here
        self._news = asyncio.Event()

    async def listen(self, addresses: list[str], announce: tuple[str, ...] = (), upload_bytes_s: int = 0) -> None:
        await super().listen(addresses, announce, upload_bytes_s)
        self.island.room = self.links.memory  # what a row leaves behind has the size of an answer

    def call(self, calls: Iterable[ReduceCall]) -> None:
        for call in calls:
            self.island.call(call)
        if self._had_place and self._standing() == "expelled":  # it never comes back
            self.island.ousted(_without_place(self.me, "expelled"))

    def handle(self, event: Event) -> None:
        super().handle(event)
        match event:
            case Received(message=CommitAnnouncement()):
                self._look_who_waits()
            case Received(message=MemberReport()):
                self._give_way()
            case TimerFired("beat"):
                self._tell_if_nothing_can_be_agreed()
            case _:
                pass

    def _look_who_waits(self) -> None:
        """Others wait for my user's call; or one of them passes for who comes or goes, and then I do, too."""
        round = self.machine.round
        known = round.commits.get(round.attempt) if round is not None else None
        commits = [commit for commit, _ in known.of.values()] if known is not None else []
        if round is not None and any(commit.why == GIVES_WAY for commit in commits):
            self._gave_way = round.plan.round
            self.island.passes(GIVES_WAY)
        elif round is not None and commits:
            self.island.others_wait()

    def _note(self, entry: dict[str, Any]) -> None:
        if entry["fact"] == "Unreachable":
            self._unreachable = entry["why"]

    def _broke(self, why: BaseException) -> None:
        """A defect: nobody is left to answer the calls that wait."""
        text = f"an error of Atoll itself: {type(why).__name__}: {why}"
        fix = "report it with the lines above; close this group and join again"
        self.island.ousted(RunFailedError("E-INT-01", text, cause="a defect", fix=fix))

    def _give_way(self) -> None:
        """An idle group lets members in and out: whose user has not called passes, and calls that came are done
        again."""
        round, pool = self.machine.round, self.machine.pool
        if round is None or pool is None or not round.trains or self._closing:
            return
        reports = pool.chosen()
        if _newcomers(round.plan.members) or _lets_in(reports) or _leaving(reports):
            self.island.passes(GIVES_WAY)

    def _hurry(self) -> None:
        self._give_way()

    async def members(self) -> tuple[PeerId, ...]:
        return self._members()

    async def meet(self, count: int, timeout_s: Seconds) -> None:
        await self._until(lambda: len(self._members()) >= count, timeout_s, f"{count} members are here")

    async def seated(self, timeout_s: Seconds) -> None:
        """Until the others let me in and I hold what they agreed on."""
        await self._until(self._is_seated, timeout_s, "the others let this member in")

    async def trouble(self) -> str:
        round = self.machine.round
        if round is None and self._unreachable and not self.machine.linked:
            return f"nobody is reached: {self._unreachable}"
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
        awaited = [names[p] for p in round.awaited if p != self.me and not self.machine.heartbeat.gone(p)]
        if awaited:
            return f"these members have not called yet: {', '.join(awaited)}"
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
            case ShareBegan():
                self._look_who_waits()  # of what was said before I had begun, too
            case RoundBegan():
                asyncio.get_running_loop().call_soon(self._give_way)
            case RoundClosed():
                self.store.keep([(f"vertex/{fact.round - VERTICES_KEPT}", None)])
                if fact.body.parts:
                    assert self.machine.history is not None
                    before = self.machine.history.bodies.get(fact.round - 1)
                    lets_in = _lets_in(fact.body.reports) or (before is not None and _newcomers(before.members))
                    left = _leaving(fact.body.reports)
                    made_room = lets_in or bool(left)
                    # whoever passed may have known of a report that its proposer had not
                    self._words = self._words + 1 if self._gave_way == fact.round and not made_room else 0
                    made_room = made_room or 0 < self._words <= WORDS_MAX
                    again = bool(set(fact.missing) - left) and made_room
                    if not any(fact.body.parts):
                        again = self.island.goes_again(fact.round, again)
                    others = {} if again else self._others(fact)
                    if others and others.keys() >= set(fact.counted):
                        other = next(iter(others.values()))
                        why = _left_behind() if _differs_in_held(other) else self._other_call(other)
                        self.island.fails(fact.round, why)
                    if self.island.checked is not None:
                        others = {}  # a liar's word alone must not spoil a part for everybody; its row decoded
                    cuts = () if again else self.island.cuts_of(fact.round)
                    self.island.closed(_reduced(fact, cuts, self.me, others), again, _parts_of(fact.body, others))
            case CaughtUp(round=round):
                self.island.missed(round, _left_behind())
            case MembershipChanged():
                self._look_at_my_place()
            case IncompatibleCall() if _differs_in_held(fact):
                self.island.mixes(fact.round)
            case IncompatibleCall():
                self.island.fails(fact.round, self._other_call(fact))
            case JoinRejected():
                self._refused = RefusedError(fact.code, fact.what, fix=fact.fix)
            case _:
                pass
        self._news.set()

    def _standing(self) -> Standing | None:
        history = self.machine.history
        members = history.head_body.members if history is not None else ()
        return next((m.standing for m in members if m.peer == self.me), None)

    def _look_at_my_place(self) -> None:
        """Where the others agreed to go on without me, my user learns it now and not when its patience ends."""
        standing = self._standing()
        has_place = standing in ("new", "member")
        if self._had_place and not has_place and not self.machine.leaving:
            self.island.ousted(_without_place(self.me, standing))
        self._had_place = has_place or (self._had_place and standing == "expelled")

    def _learn_terms(self, settings: RunSettings) -> None:
        try:
            self.island.terms = _TERMS.decode(settings.learning)
        except UNREADABLE:
            self._refused = UsageError(
                "E-RED-12",
                "this ticket is not of a group",
                cause="it belongs to a run that learns a model",
                fix="atoll join TICKET, or atoll.join(ticket) in your own loop",
            )
            return
        self.island.pieces, self.island.pair_pieces = settings.pieces, pair_pieces(settings)
        self.island.remembers = settings.steady is True
        if settings.tolerance:
            terms, opened = self.island.terms, settings.opened is not None
            self.island.checked = CheckedArithmetic(self.store, terms.codec, terms.way_back or terms.codec, opened)
            # these names take longer than a thread's start
            self.hash_on_loop_bytes = driver.Driver.hash_on_loop_bytes
            self.links.memory.kept_bytes_max = KEPT_ROWS_MAX

    def _others(self, fact: RoundClosed) -> dict[PeerId, IncompatibleCall]:
        """Whose calls are in the mean and are not as mine was: they may never have reached me before."""
        mine = self.island.asked_in(fact.round)
        if mine is None:
            return {}
        values, asked = mine
        return {
            p: IncompatibleCall(peer=p, values=c.values, asked=c.asked, my_values=values, my_asked=asked)
            for p, c in commits_in(fact.body).items()
            if (c.values, c.asked) != mine
        }

    def _other_call(self, fact: IncompatibleCall) -> AtollError:
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
                f"after {timeout_s:.0f} s it is still not true that {what}",
                cause=await self.trouble(),
                fix="see that the other processes run and that their addresses can be reached from here",
            ) from None

    def _is_seated(self) -> bool:
        history = self.machine.history
        members = history.head_body.members if history is not None else ()
        return self.machine.round is not None and any(m.peer == self.me and m.standing == "member" for m in members)

    def _members(self) -> tuple[PeerId, ...]:
        history = self.machine.history
        return tuple(m.peer for m in history.head_body.members if m.trains) if history is not None else ()

    def _quorum_lost(self) -> str:
        """Who is not here, if nothing can be agreed on without them; else nothing."""
        round = self.machine.round
        if round is None:
            return ""
        left = self._gone_for_good()
        silent = [p for p in round.plan.voters if p != self.me and p not in left and self.machine.heartbeat.gone(p)]
        if len(silent) + len(left) <= round.plan.tolerated:
            return ""
        names = names_of((m.peer, m.name) for m in round.plan.members)
        told = [(silent, "cannot be heard"), (left, "left")]
        who = "; ".join(f"{', '.join(names[p] for p in peers)} {what}" for peers, what in told if peers)
        return f"too few members are left to agree: {who}"

    def _too_few(self) -> str:
        """What is lacking, if the group once reduced and has shrunk below what its rule needs; else nothing."""
        history, least = self.machine.history, self.machine.settings.min_peers
        begun = history is not None and history.head_body.trained > 0
        if not begun or (count := self._working()) >= least:
            return ""
        return f"{count} members are left, and it takes {least} to withstand one that lies"

    def _tell_if_nothing_can_be_agreed(self) -> None:
        """Those who are lacking may never come back: calls wait for that as long as for a user."""
        lost, too_few, now = self._quorum_lost(), self._too_few(), self.clock.now()
        if not (lost or too_few):
            self._lost_since = now
        elif self.island.calls and now - self._lost_since >= self.island.terms.timeout_s:
            self.island.ousted(_quorum_is_lost(lost) if lost else _rule_is_lost(too_few))

    def _gone_for_good(self) -> list[PeerId]:
        """Voters that said farewell, and whose vertex is not there yet."""
        round, pool = self.machine.round, self.machine.pool
        said = _leaving(pool.chosen()) if pool is not None else set[PeerId]()
        return [p for p in round.plan.voters if p in said] if round is not None else []

    def _working(self) -> int:
        """Members that count towards `start_peers` and `min_peers`."""
        history = self.machine.history
        return sum(m.works for m in history.head_body.members) if history is not None else 0


@contextmanager
def own_folder() -> Iterator[Path]:
    """A place for this member's keys while it lives. Members that were killed could not clear theirs away."""
    for old in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        with suppress(OSError):
            if old not in _mine and time.time() - old.stat().st_mtime > ABANDONED_S and not in_use(old):
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


def _left_behind() -> AtollError:
    return RunFailedError(
        "E-RED-13",
        "the group agreed on this all-reduce, and its mean did not reach this member",
        cause="its links were too slow or broke for a while; its tensors are as they were",
        fix="go on with the next call; where tensors must be equal everywhere, take them from another member first",
    )


def _quorum_is_lost(who: str) -> AtollError:
    return RunFailedError(
        "E-RED-18",
        who,
        cause="their processes ended, or the network between is broken; this call changed nothing here",
        fix="call again when they are back, or close this group and found a new one with those that are left",
    )


def _rule_is_lost(who: str) -> AtollError:
    return RunFailedError(
        "E-RED-21",
        who,
        cause="others left or were sent away; this call changed nothing here",
        fix='let others join by its ticket and call again, or close this group and found one with trust="private"',
    )


def _without_place(me: PeerId, standing: Standing | None) -> AtollError:
    if standing == "expelled":
        return RefusedError(
            "E-RED-16",
            f"the group expelled this member ({me[-8:]}) for good",
            cause="others proved that what it signed or summed was wrong; memory or a disk may have failed",
            fix="close this group and join again, which makes a new identity: atoll.reduce.join(ticket)",
        )
    return RunFailedError(
        "E-RED-15",
        "the group went on without this member: this call and those that waited behind it will not be answered",
        cause="the others did not hear it, or waited in vain for its answers; its links or computer stood still",
        fix="call again: it comes back by itself; where tensors must be equal everywhere, take them from another "
        "member first",
    )


def _newcomers(members: Iterable[Member]) -> bool:
    return any(m.standing == "new" for m in members)


def _lets_in(reports: Iterable[SignedStatement]) -> bool:
    """True if one of them brings somebody in."""
    return any(isinstance(decode_statement(s.body, s.signer), JoinRequest | ReadyReport) for s in reports)


def _leaving(reports: Iterable[SignedStatement]) -> set[PeerId]:
    """Who says farewell in them."""
    return {s.signer for s in reports if isinstance(decode_statement(s.body, s.signer), LeaveReport)}


def _differs_in_held(call: IncompatibleCall) -> bool:
    """And in nothing else."""
    mine, theirs = but_for_held(call.my_asked), but_for_held(call.asked)
    return (call.my_values, mine) == (call.values, theirs)


def _parts_of(body: VertexBody, among: Collection[PeerId]) -> frozenset[int]:
    """The parts whose mean holds what one of these sent."""
    if not among:
        return frozenset()
    return frozenset(i for i, signed in enumerate(body.parts) if any(p in among for p in _in(signed)))


def _in(part: SignedStatement | None) -> tuple[PeerId, ...]:
    answered = decode_statement(part.body, part.signer) if part is not None else None
    return answered.contributors if isinstance(answered, OwnerResult) else ()


def _reduced(fact: RoundClosed, cuts: Cuts, me: PeerId, others: Container[PeerId] = ()) -> ReduceResult:
    """What it did for me: where members exchange in pairs, what is in my own parts. Nothing, where `others` are in
    it, whose calls were not as mine."""
    named = [() if any(p in others for p in names) else names for names in map(_in, fact.body.parts)]
    parts = tuple(zip(cuts, named, strict=True)) if cuts else ()
    if fact.topology != PAIRS:
        return ReduceResult(fact.round, fact.counted, fact.partly, fact.missing, parts, fact.topology)
    owners = (signed.signer if signed is not None else None for signed in fact.body.parts)
    mine = tuple(part for part, owner in zip(parts, owners, strict=False) if owner == me)
    rows = [frozenset(names) for _, names in mine]
    held = frozenset[PeerId]().union(*rows)
    partly = held - held.intersection(*rows)
    return ReduceResult(fact.round, tuple(sorted(held)), tuple(sorted(partly)), fact.missing, mine, fact.topology)
