"""Raft's log held to the interaction stories of etcd/raft, told again in our own words (`raft_stories/*.txt`).

A story is a list of commands, and under each what the voters said and did: lines that begin with `> `. The postman
delivers nothing but what the story says, and time passes only where patience ends, so every word has its place.
What a story shows stands at its top, with the name of the one that it retells (github.com/etcd-io/raft,
`testdata/`, Apache-2.0); `NOT_TOLD` says why the others have no counterpart here.

`ATOLL_GOLDEN=write` writes the lines of stories; read them before you believe them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Keep, Received, Report, Send, Start, TimerFired
from atoll.protocol.consensus.raft import ELECTION, ENTRY, HEARTBEAT, META, Raft
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
    SteppedDown,
    TakeOver,
)

FOLDER = Path(__file__).parent / "raft_stories"
NOT_TOLD = {
    "async_storage_writes…": "what is kept is durable before any later word leaves: nothing is acknowledged twice",
    "campaign_learner_must_vote, confchange_…": "who votes changes with vertices, never in a log",
    "campaign_now_lease": "nothing is read under a leader's lease",
    "forget_leader…": "nobody is told to forget a leader: patience ends by itself",
    "replicate_pause": "a leader counts no messages in flight: whoever misses one says so",
}
SETTLED = 200  # words after which voters that still talk never will be


class Table:
    """Voters around a table, the mail between them, and a clock that patience alone moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.disks: dict[PeerId, dict[str, bytes]] = {}
        self.rafts: dict[PeerId, Raft] = {}
        self.mail: deque[tuple[PeerId, PeerId, Any]] = deque()

    def play(self, command: str) -> list[str]:
        """What is said and done because of it, one line each."""
        self.lines = []
        verb, *words = command.split()
        getattr(self, verb)(*words)
        return self.lines

    # ---- commands ------------------------------------------------------------------------------------------

    def voters(self, *names: str) -> None:
        self.names = [PeerId(name) for name in names]
        for name in names:
            self.restart(name)

    def disk(self, name: str, term: str, *entries: str) -> None:
        """What a life before left: its term, and the terms of its entries."""
        pack = msgspec.msgpack.encode
        kept = {f"{ENTRY}{i}": pack(Entry(int(t), f"e{t}.{i}".encode())) for i, t in enumerate(entries, 1)}
        self.disks[PeerId(name)] = kept | {META: pack(Meta(int(term)))}

    def restart(self, name: str) -> None:
        peer = PeerId(name)
        self.rafts[peer] = raft = Raft(peer, self.names, b"seed")
        self._carry_out(peer, raft.handle(Start(dict(self.disks.setdefault(peer, {}))), self.now))

    def patience(self, name: str) -> None:
        """It hears nobody for as long as it waits; so does whoever hears nobody either."""
        self.now = max(self.now, self.rafts[PeerId(name)].election_at)
        self._do(name, lambda raft: raft.handle(TimerFired(ELECTION), self.now))

    def elect(self, name: str) -> None:
        """It stands, wins, and all have its mark: told once in `campaign`, elsewhere in silence."""
        self.patience(name)
        self.settle()
        self.lines = []

    def hear(self, leader: str, after_s: str, *who: str) -> None:
        """Some time later these hear the leader's beat, and it their answers; nobody else does. In silence."""
        self.beat(leader, after_s)
        self.deliver(*who)
        self.deliver(leader)
        self.lose()
        self.lines = []

    def beat(self, name: str, after_s: str = "0") -> None:
        self.now += float(after_s)
        self._do(name, lambda raft: raft.handle(TimerFired(HEARTBEAT), self.now))

    def propose(self, name: str, *commands: str) -> None:
        for command in commands:
            self._do(name, lambda raft, c=command: raft.propose(c.encode(), self.now))

    def compact(self, name: str, index: str) -> None:
        self._do(name, lambda raft: raft.compact(int(index), f"sum of {index}".encode()))

    def forget(self, name: str, after: str) -> None:
        """Its disk loses what it had acknowledged, and it starts again: a promise is broken."""
        kept = self.disks[PeerId(name)]
        for entry in [k for k in kept if k.startswith(ENTRY) and int(k.removeprefix(ENTRY)) > int(after)]:
            del kept[entry]
        self.restart(name)

    def deliver(self, *to: str) -> None:
        """What lies here now, to these or to all; answers wait."""
        for _ in range(len(self.mail)):
            sender, peer, message = self.mail.popleft()
            if to and peer not in to:
                self.mail.append((sender, peer, message))
                continue
            self._do(peer, lambda raft, s=sender, m=message: raft.handle(Received(s, m), self.now))

    def settle(self, *among: str) -> None:
        """Until these, or all, have nothing more to say to each other."""
        inside = lambda mail: not among or {mail[0], mail[1]} <= set(among)  # noqa: E731  # a word for this place
        for _ in range(SETTLED):
            at = next((i for i, mail in enumerate(self.mail) if inside(mail)), None)
            if at is None:
                return
            sender, peer, message = self.mail[at]
            del self.mail[at]
            self._do(peer, lambda raft, s=sender, m=message: raft.handle(Received(s, m), self.now))
        raise AssertionError(f"they still talk after {SETTLED} words: {self.lines[-4:]}")

    def lose(self, *to: str) -> None:
        """What lies here for these, or for all, never arrives."""
        self.mail = deque(mail for mail in self.mail if to and mail[1] not in to)

    def state(self) -> None:
        for name, raft in self.rafts.items():
            led = f", led by {raft.leader}" if raft.leader not in (None, name) else ""
            known = " ".join(f"{p}:{raft.match[p]}" for p in raft.others) if raft.role == "leader" else ""
            held = f", knows {known}" if known else ""
            self.lines.append(
                f"{name} {raft.role}, term {raft.term}{led}; {raft.last_index} entries, {raft.commit} final{held}"
            )

    def logs(self) -> None:
        for name, raft in self.rafts.items():
            runs = [(term, len(list(same))) for term, same in groupby(e.term for e in raft.log)]
            since = f"{raft.snapshot.index} forgotten, " if raft.snapshot.index else ""
            self.lines.append(f"{name} {since}terms " + " ".join(" ".join([str(t)] * n) for t, n in runs))

    # ---- how it is done --------------------------------------------------------------------------------------

    def _do(self, name: str, what: Callable[[Raft], list[Effect]]) -> None:
        self._carry_out(PeerId(name), what(self.rafts[PeerId(name)]))

    def _carry_out(self, name: PeerId, effects: list[Effect]) -> None:
        disk = self.disks[name]
        for effect in effects:
            match effect:
                case Keep(key, None):
                    disk.pop(key, None)
                case Keep(key, bytes(blob)):
                    disk[key] = blob
                case Send(to, message):
                    self.lines.append(f"{name} -> {to}  {said(message)}")
                    self.mail.append((name, to, message))
                case Report(fact):
                    self.lines.append(f"{name} {told(fact)}")
                case _:
                    pass  # timers: the story says when they fire


def said(message: Any) -> str:
    match message:
        case RequestVote(term, last_index, last_term, pre):
            ask = "would you elect me" if pre else "elect me"
            return f"{ask} in term {term}? my log ends with {last_index} of term {last_term}"
        case Ballot(term, pre, granted):
            yes = "I would" if pre else "you have my vote"
            return f"{yes if granted else 'no'}; term {term}"
        case Append(term, previous, previous_term, entries, commit):
            new = ", ".join(f"{i} {text(e)}" for i, e in enumerate(entries, previous + 1)) or "nothing new"
            return f"term {term}: after {previous} of term {previous_term}: {new}; {commit} final"
        case Appended(term, fits, upto):
            return f"term {term}: " + (f"I hold what you hold up to {upto}" if fits else f"no, try from {upto}")
        case Install(term, index, index_term):
            return f"term {term}: take the sum of everything up to {index} of term {index_term}"
        case TakeOver(term):
            return f"term {term}: take over"
        case _:
            raise AssertionError(message)


def text(entry: Entry) -> str:
    return f"{entry.command.decode() or 'mark'} of term {entry.term}"


def told(fact: Any) -> str:
    match fact:
        case Elected(term=term):
            return f"leads term {term}"
        case SteppedDown(why=why):
            return f"steps down: {why}"
        case Committed(index=index, command=command):
            return f"does {index} {command.decode()}"
        case Restored(index=index):
            return f"goes on from the sum of {index}"
        case _:
            raise AssertionError(fact)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_a_story_goes_as_it_is_told(path: Path):
    table, lines = Table(), list[str]()
    for line in path.read_text().splitlines():
        if line.startswith("> "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += [f"> {happened}" for happened in table.play(line)]
    now = "\n".join(lines) + "\n"
    if os.environ.get("ATOLL_GOLDEN") == "write":
        path.write_text(now)
    assert now == path.read_text()
