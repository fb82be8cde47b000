"""Raft: one leader, one log, for voters that may crash but do not lie.

No run uses it: rounds that agree by Raft decide one entry each, strangers check it, and who votes changes with it
(`raft_round.py`, which has these rules for one entry). This is Raft whole, for hosts of a trusted cluster that need
a log of many commands or an elected leader, held to etcd/raft's own stories, and the yardstick of what a round's
engine costs (`bench/consensus.py`).

A voter whose patience ends asks whether it would be elected (pre-vote) before it disturbs anybody with a new term;
a leader that hears from no quorum steps down (check-quorum), so that nobody waits for one on the wrong side of a
partition. The leader appends commands to its log, the others copy it, and what a quorum holds in the leader's own
term is committed, with everything before it. Entries that the host has digested give way to its snapshot marker.

Promises (Ongaro 2014, figure 3.2): one leader per term; logs that agree at one entry agree in all before it; a
leader's log holds everything committed; nobody is told two commands for one index. Term, vote and log are durable
before any word rests on them. Commands are told in order, once per life: a restarted voter hears those after its
marker again. Never reads a clock: patience ends when the timer it set fires. Never changes who votes.

Source: D. Ongaro, Consensus: Bridging Theory and Practice, Stanford 2014; sections are named where they apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from atoll.base.draw import draw_below
from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Event, Keep, Message, Received, Report, Send, SetTimer, Start, TimerFired
from atoll.protocol.consensus.raft_words import (
    Append,
    Appended,
    Ballot,
    Committed,
    Elected,
    Entry,
    Install,
    Meta,
    RequestVote,
    Restored,
    Snapshot,
    SteppedDown,
    TakeOver,
)

COMMAND_BYTES_MAX = 2**18  # so that a message of one entry fits a control frame
ENTRIES_PER_MESSAGE = 64
BYTES_PER_MESSAGE = 2**19  # of commands, but always at least one of them
UNCOMMITTED_MAX = 1024  # entries that a leader without a quorum piles up at most
PARTS = 1 << 20  # into which a patience is divided when it is drawn

META, SNAPSHOT, ENTRY = "raft/meta", "raft/snapshot", "raft/entry/"
ELECTION, HEARTBEAT = "raft/election", "raft/heartbeat"

Role = Literal["follower", "canvassing", "candidate", "leader"]


class Raft:
    """One voter. `voters` includes me and is the same for all; `seed` spreads patience and need not be secret."""

    def __init__(
        self,
        me: PeerId,
        voters: Sequence[PeerId],
        seed: bytes,
        election_s: Seconds = 1.0,  # shortest patience; the longest is twice that. Keep above 10 x heartbeat_s
        heartbeat_s: Seconds = 0.1,  # keep above the round trip
        entries_max: int = ENTRIES_PER_MESSAGE,
    ) -> None:
        if me not in voters or len(set(voters)) != len(voters):
            raise ValueError(f"{me} has to be one of the voters, and none may be named twice")
        if not 0 < heartbeat_s < election_s:
            raise ValueError(f"a heartbeat of {heartbeat_s} s has to be shorter than a patience of {election_s} s")
        self.me, self.voters, self.seed = me, tuple(voters), seed
        self.others = tuple(p for p in voters if p != me)
        self.quorum = len(self.voters) // 2 + 1
        self.election_s, self.heartbeat_s, self.entries_max = election_s, heartbeat_s, entries_max
        self.meta, self.snapshot = Meta(), Snapshot()
        self.log: list[Entry] = []  # after the snapshot
        self.commit = 0
        self.role: Role = "follower"
        self.leader: PeerId | None = None
        self.led_at: Seconds = float("-inf")  # when the leader was heard last
        self.election_at: Seconds = float("inf")
        self.draws = 0
        self.votes: set[PeerId] = set()
        self.next: dict[PeerId, int] = {}  # index of the first entry to send
        self.match: dict[PeerId, int] = {}  # known to equal mine up to here
        self.heard: dict[PeerId, Seconds] = {}
        self.successor: PeerId | None = None
        self.successor_until: Seconds = 0.0

    # ---- what the host calls -------------------------------------------------------------------------------

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        """Raises PeerFault, before anything changed, for words of somebody who does not vote here."""
        match event:
            case Start(kept):
                return self._start(kept, now)
            case Received(sender, message):
                if sender not in self.others:
                    raise PeerFault(sender, "talks to voters and is none")
                return self._hear(sender, message, now)
            case TimerFired("raft/election"):
                return self._lose_patience(now)
            case TimerFired("raft/heartbeat"):
                return self._beat(now)
            case _:
                return []

    def propose(self, command: bytes, now: Seconds) -> list[Effect]:
        """Put a command into the log; `Committed` says when it is final. It may get lost if the leader changes.

        Raises ValueError where this voter cannot: it does not lead, is handing over, or has no quorum.
        """
        if self.role != "leader":
            raise ValueError(f"{self.me} does not lead term {self.term}; ask {self.leader or 'again later'}")
        if self.successor is not None:
            raise ValueError(f"{self.me} is handing over to {self.successor}; ask again in {self.election_s} s")
        if not 0 < len(command) <= COMMAND_BYTES_MAX:
            raise ValueError(f"a command has 1 to {COMMAND_BYTES_MAX} bytes, this one has {len(command)}")
        if self.last_index - self.commit >= UNCOMMITTED_MAX:
            raise ValueError(f"{UNCOMMITTED_MAX} commands wait for a quorum; ask again once some are committed")
        return [*self._append([Entry(self.term, command)]), *self._spread(), *self._advance()]

    def transfer(self, to: PeerId, now: Seconds) -> list[Effect]:
        """Hand leadership to this voter once it has my whole log; I go on if it has not taken over in time."""
        if self.role != "leader" or to not in self.others:
            raise ValueError(f"only a leader can hand over, and only to another voter; {to} leads or is none")
        self.successor, self.successor_until = to, now + self.election_s
        return self._hand_over(to) or self._send_log(to)

    def compact(self, index: int, marker: bytes) -> list[Effect]:
        """The host has digested all commands up to `index` and `marker` sums them up: forget the entries."""
        if not self.snapshot.index < index <= self.commit:
            raise ValueError(f"only committed entries after {self.snapshot.index} can be forgotten, {index} is not")
        old = self.snapshot.index
        snapshot = Snapshot(index, self.term_at(index), marker)
        self.log = self.log[index - old :]
        return [*self._keep_snapshot(snapshot), *_forget(range(old + 1, index + 1))]

    @property
    def term(self) -> int:
        return self.meta.term

    @property
    def last_index(self) -> int:
        return self.snapshot.index + len(self.log)

    def term_at(self, index: int) -> int:
        """Term of the entry at this index, which must not be older than the snapshot; 0 before the first."""
        assert self.snapshot.index <= index <= self.last_index
        return (
            self.snapshot.term if index == self.snapshot.index else self.log[index - self.snapshot.index - 1].term
        )

    # ---- beginning -----------------------------------------------------------------------------------------

    def _start(self, kept: dict[str, bytes], now: Seconds) -> list[Effect]:
        if META in kept:
            self.meta = _META.decode(kept[META])
        if SNAPSHOT in kept:
            self.snapshot = _SNAPSHOT.decode(kept[SNAPSHOT])
        self.commit = self.snapshot.index
        while (blob := kept.get(f"{ENTRY}{self.last_index + 1}")) is not None:
            self.log.append(_ENTRY.decode(blob))
        mine = {f"{ENTRY}{self.snapshot.index + 1 + k}" for k in range(len(self.log))}
        leftover = sorted(name for name in kept if name.startswith(ENTRY) and name not in mine)
        effects: list[Effect] = [Keep(name, None) for name in leftover]  # of a compaction that a crash cut short
        if self.snapshot.index:
            effects.append(Report(Restored(index=self.snapshot.index, marker=self.snapshot.marker)))
        return [*effects, *self._be_patient(now)]

    # ---- messages ------------------------------------------------------------------------------------------

    def _hear(self, sender: PeerId, message: Message, now: Seconds) -> list[Effect]:
        match message:
            case RequestVote():
                return self._hear_candidate(sender, message, now)
            case Ballot():
                return self._hear_ballot(sender, message, now)
            case Append():
                return self._hear_append(sender, message, now)
            case Appended():
                return self._hear_appended(sender, message, now)
            case Install():
                return self._hear_install(sender, message, now)
            case TakeOver(term):
                return self._stand(now, transfer=True) if term == self.term and self.role != "leader" else []
            case _:
                return []

    def _hear_candidate(self, sender: PeerId, message: RequestVote, now: Seconds) -> list[Effect]:
        if message.term < self.term:
            return [Send(sender, Ballot(self.term, message.pre, granted=False))]
        if self._is_led(now) and not message.transfer:
            return []  # a voter that came back from a partition must not depose a leader that works (4.2.3)
        up_to_date = (message.last_term, message.last_index) >= (self.term_at(self.last_index), self.last_index)
        if message.pre:
            granted = up_to_date and message.term > self.term
            return [Send(sender, Ballot(message.term if granted else self.term, pre=True, granted=granted))]
        effects = self._follow(message.term, None, "a newer term", now) if message.term > self.term else []
        if not up_to_date or self.meta.voted_for not in ("", sender):
            return [*effects, Send(sender, Ballot(self.term, pre=False, granted=False))]
        vote = self._keep_meta(Meta(self.term, sender))
        return [*effects, vote, Send(sender, Ballot(self.term, pre=False, granted=True)), *self._be_patient(now)]

    def _hear_ballot(self, sender: PeerId, message: Ballot, now: Seconds) -> list[Effect]:
        if not message.granted:
            return self._follow(message.term, None, "a newer term", now) if message.term > self.term else []
        if message.pre and self.role == "canvassing" and message.term == self.term + 1:
            self.votes.add(sender)
            return self._stand(now) if len(self.votes) >= self.quorum else []
        if not message.pre and self.role == "candidate" and message.term == self.term:
            self.votes.add(sender)
            return self._lead(now) if len(self.votes) >= self.quorum else []
        return []

    def _hear_append(self, sender: PeerId, message: Append, now: Seconds) -> list[Effect]:
        if message.term < self.term:
            return [Send(sender, Appended(self.term, fits=False, upto=self.last_index + 1))]
        effects = self._be_led(sender, message.term, now)
        previous, previous_term, entries = message.previous, message.previous_term, message.entries
        if previous < self.snapshot.index:  # what my marker sums up is committed, so it is the same there
            entries = entries[self.snapshot.index - previous :]
            previous, previous_term = self.snapshot.index, self.snapshot.term
        if previous > self.last_index:
            return [*effects, Send(sender, Appended(self.term, fits=False, upto=self.last_index + 1))]
        if self.term_at(previous) != previous_term:
            return [*effects, Send(sender, Appended(self.term, fits=False, upto=self._start_of_term_at(previous)))]
        upto = max(message.previous + len(message.entries), self.snapshot.index)
        effects += self._copy(previous, entries)
        effects += self._commit_to(min(message.commit, upto))
        return [*effects, Send(sender, Appended(self.term, fits=True, upto=upto))]

    def _copy(self, previous: int, entries: Sequence[Entry]) -> list[Effect]:
        """Take over entries that I lack; what contradicts them was never committed and goes, last one first."""
        effects: list[Effect] = []
        for index, entry in enumerate(entries, previous + 1):
            if index <= self.last_index and self.term_at(index) == entry.term:
                continue
            if index <= self.last_index:
                effects += self._cut(index)
            effects += self._append([entry])
        return effects

    def _hear_appended(self, sender: PeerId, message: Appended, now: Seconds) -> list[Effect]:
        if message.term > self.term:
            return self._follow(message.term, None, "a newer term", now)
        if self.role != "leader" or message.term < self.term:
            return []
        self.heard[sender] = now
        if not message.fits:
            self.next[sender] = max(self.match[sender] + 1, min(message.upto, self.next[sender] - 1))
            # below what it acknowledged it skips a term, or its disk lost that: the next beat is soon enough
            return self._send_log(sender) if message.upto > self.match[sender] else []
        self.match[sender] = max(self.match[sender], message.upto)
        self.next[sender] = max(self.next[sender], self.match[sender] + 1)
        effects = self._advance()
        if sender == self.successor:
            effects += self._hand_over(sender)
        if self.next[sender] <= self.last_index:
            effects += self._send_log(sender)
        return effects

    def _hear_install(self, sender: PeerId, message: Install, now: Seconds) -> list[Effect]:
        if message.term < self.term:
            return [Send(sender, Appended(self.term, fits=False, upto=self.last_index + 1))]
        effects = self._be_led(sender, message.term, now)
        if message.index <= self.commit:
            return [*effects, Send(sender, Appended(self.term, fits=True, upto=self.commit))]
        old = self.snapshot.index
        snapshot = Snapshot(message.index, message.index_term, message.marker)
        if message.index <= self.last_index and self.term_at(message.index) == message.index_term:
            held, self.log = message.index, self.log[message.index - old :]
        else:
            if message.index < self.last_index:
                effects += self._cut(message.index + 1)  # before the marker is there, or they would follow it
            held, self.log = self.last_index, []
        effects += [*self._keep_snapshot(snapshot), *_forget(range(old + 1, held + 1))]
        self.commit = message.index
        effects.append(Report(Restored(index=message.index, marker=message.marker)))
        return [*effects, Send(sender, Appended(self.term, fits=True, upto=message.index))]

    # ---- elections -----------------------------------------------------------------------------------------

    def _lose_patience(self, now: Seconds) -> list[Effect]:
        if self.role == "leader":
            return []
        if now < self.election_at:  # fired a hair too early, by the rounding of a clock
            return [SetTimer(ELECTION, self.election_at)]
        self.role, self.leader, self.votes = "canvassing", None, {self.me}
        if len(self.votes) >= self.quorum:
            return self._stand(now)
        wish = RequestVote(self.term + 1, self.last_index, self.term_at(self.last_index), pre=True)
        return [*self._be_patient(now), *(Send(p, wish) for p in self.others)]

    def _stand(self, now: Seconds, transfer: bool = False) -> list[Effect]:
        self.role, self.leader, self.votes = "candidate", None, {self.me}
        kept = self._keep_meta(Meta(self.term + 1, self.me))
        if len(self.votes) >= self.quorum:
            return [kept, *self._lead(now)]
        wish = RequestVote(self.term, self.last_index, self.term_at(self.last_index), pre=False, transfer=transfer)
        return [kept, *self._be_patient(now), *(Send(p, wish) for p in self.others)]

    def _lead(self, now: Seconds) -> list[Effect]:
        self.role, self.leader, self.successor = "leader", self.me, None
        self.next = {p: self.last_index + 1 for p in self.others}
        self.match = {p: 0 for p in self.others}
        self.heard = {p: now for p in self.others}
        effects: list[Effect] = [SetTimer(ELECTION, None), Report(Elected(term=self.term))]
        mark = self._append([Entry(self.term, b"")])  # commits what earlier terms left behind (6.4)
        return [*effects, *mark, *self._spread(), *self._set_heartbeat(now), *self._advance()]

    def _follow(self, term: int, leader: PeerId | None, why: str, now: Seconds) -> list[Effect]:
        """Give up whatever I was, in my term or in a newer one."""
        effects: list[Effect] = []
        if term > self.term:
            effects.append(self._keep_meta(Meta(term)))
        if self.role == "leader":
            effects += [SetTimer(HEARTBEAT, None), Report(SteppedDown(term=term, why=why))]
        self.role, self.leader, self.successor = "follower", leader, None
        return [*effects, *self._be_patient(now)]

    def _be_led(self, leader: PeerId, term: int, now: Seconds) -> list[Effect]:
        assert self.role != "leader" or term > self.term, "two leaders in one term"
        self.led_at = now
        return self._follow(term, leader, "a newer leader", now)

    def _is_led(self, now: Seconds) -> bool:
        return self.role == "leader" or (self.leader is not None and now < self.led_at + self.election_s)

    def _be_patient(self, now: Seconds) -> list[Effect]:
        self.draws += 1
        part = draw_below(self.seed, f"raft/{self.me}/{self.term}/{self.draws}", PARTS) / PARTS
        self.election_at = now + self.election_s * (1 + part)
        return [SetTimer(ELECTION, self.election_at)]

    # ---- leading -------------------------------------------------------------------------------------------

    def _beat(self, now: Seconds) -> list[Effect]:
        if self.role != "leader":
            return []
        here = 1 + sum(now < at + self.election_s for at in self.heard.values())
        if here < self.quorum:
            why = f"only {here} of {len(self.voters)} voters answer, {self.quorum} are needed"
            return self._follow(self.term, None, why, now)
        if self.successor is not None and now >= self.successor_until:
            self.successor = None
        return [*self._set_heartbeat(now), *self._spread()]

    def _set_heartbeat(self, now: Seconds) -> list[Effect]:
        return [SetTimer(HEARTBEAT, now + self.heartbeat_s)]

    def _spread(self) -> list[Effect]:
        return [effect for peer in self.others for effect in self._send_log(peer)]

    def _send_log(self, peer: PeerId) -> list[Effect]:
        """What this voter lacks next, as far as I know; nothing new is a sign of life."""
        first = self.next[peer]
        if first <= self.snapshot.index:
            self.next[peer] = self.snapshot.index + 1
            s = self.snapshot
            return [Send(peer, Install(self.term, s.index, s.term, s.marker))]
        entries = self._some_entries(first - self.snapshot.index - 1)
        self.next[peer] += len(entries)  # taken as received; whoever missed it says so at the next sign of life
        return [Send(peer, Append(self.term, first - 1, self.term_at(first - 1), entries, self.commit))]

    def _some_entries(self, start: int) -> tuple[Entry, ...]:
        """As many of the log from this position on as one message carries."""
        chosen = self.log[start : start + self.entries_max]
        size_bytes = 0
        for count, entry in enumerate(chosen):
            size_bytes += len(entry.command)
            if count > 0 and size_bytes > BYTES_PER_MESSAGE:
                return tuple(chosen[:count])
        return tuple(chosen)

    def _advance(self) -> list[Effect]:
        """Commit what a quorum holds, and tell the others at once."""
        held = sorted([self.last_index, *self.match.values()], reverse=True)[self.quorum - 1]
        if held <= self.commit or not self._is_mine(held):
            return []
        return [*self._commit_to(held), *self._spread()]

    def _is_mine(self, index: int) -> bool:
        """Entries of earlier terms are never committed by counting, only by one of mine after them (figure 3.7)."""
        return self.term_at(index) == self.term

    def _hand_over(self, peer: PeerId) -> list[Effect]:
        return [Send(peer, TakeOver(self.term))] if self.match[peer] == self.last_index else []

    # ---- the log -------------------------------------------------------------------------------------------

    def _append(self, entries: Sequence[Entry]) -> list[Effect]:
        effects: list[Effect] = []
        for entry in entries:
            self.log.append(entry)
            effects.append(Keep(f"{ENTRY}{self.last_index}", msgspec.msgpack.encode(entry)))
        return effects

    def _cut(self, first: int) -> list[Effect]:
        """Forget the entries from `first` on, the last one first: a crash in between leaves a shorter log."""
        assert first > self.commit, "a committed entry was contradicted"
        gone = range(self.last_index, first - 1, -1)
        del self.log[first - self.snapshot.index - 1 :]
        return _forget(gone)

    def _commit_to(self, index: int) -> list[Effect]:
        effects: list[Effect] = []
        while self.commit < index:
            self.commit += 1
            entry = self.log[self.commit - self.snapshot.index - 1]
            if entry.command:
                effects.append(Report(Committed(index=self.commit, term=entry.term, command=entry.command)))
        return effects

    def _start_of_term_at(self, index: int) -> int:
        """First index of the term that stands at `index`: one refusal skips a whole term (section 3.5)."""
        term = self.term_at(index)
        while index - 1 > self.commit and self.term_at(index - 1) == term:
            index -= 1
        return index

    def _keep_meta(self, meta: Meta) -> Effect:
        self.meta = meta
        return Keep(META, msgspec.msgpack.encode(meta))

    def _keep_snapshot(self, snapshot: Snapshot) -> list[Effect]:
        self.snapshot = snapshot
        return [Keep(SNAPSHOT, msgspec.msgpack.encode(snapshot))]


def _forget(indexes: Sequence[int]) -> list[Effect]:
    return [Keep(f"{ENTRY}{index}", None) for index in indexes]


_META = msgspec.msgpack.Decoder(Meta)
_SNAPSHOT = msgspec.msgpack.Decoder(Snapshot)
_ENTRY = msgspec.msgpack.Decoder(Entry)
