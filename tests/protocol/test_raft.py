"""Raft under a hostile network: the properties of the thesis are checked after every single event.

Sentences in quotation marks are those of D. Ongaro, Consensus: Bridging Theory and Practice, Stanford 2014, or of
the shorter paper (Ongaro & Ousterhout, USENIX ATC 2014); each stands above what checks it.

A seeded enemy loses, doubles and reorders messages, cuts links in one or both directions, and kills voters in the
middle of what they were doing: of the effects of one call only a part is carried out, and what was written since
the last word that left is lost. Every voter has a clock of its own, which may run fast or slow, and which the enemy
may set. Everything runs in virtual time; a failing game is replayed by its seed.
"""

from __future__ import annotations

import heapq
import os
import random
import sys
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec
import pytest
from clocks import SET_S, Clock
from hypothesis import given, settings
from hypothesis import strategies as st
from mutated import without

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Event, Keep, Received, Report, Send, SetTimer, Start, TimerFired
from atoll.keys.digest import digest
from atoll.protocol.consensus import raft
from atoll.protocol.consensus.raft import Raft
from atoll.protocol.consensus.raft_words import (
    Append,
    Ballot,
    Committed,
    Elected,
    Entry,
    Meta,
    Restored,
    SteppedDown,
    TakeOver,
)

GAMES = int(os.environ.get("ATOLL_STORIES", "60"))
pack = msgspec.msgpack.encode


@dataclass
class Host:
    """One voter's computer: its disk, its process, and the state machine that the log drives."""

    name: PeerId
    kept: dict[str, bytes] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    raft: Raft | None = None
    life: int = 0
    timers: dict[str, int] = field(default_factory=dict)
    applied: int = 0
    state: bytes = b""  # digest of everything applied, in order

    def apply(self, fact: Committed) -> None:
        assert fact.index > self.applied, "a command was told twice or out of order"
        self.applied, self.state = fact.index, digest(self.state + fact.command)


@dataclass
class Cluster:
    voters: int
    draw: random.Random
    loss: float = 0.0
    doubled: float = 0.0
    latency_s: tuple[float, float] = (0.005, 0.08)
    entries_max: int = 64
    disks: list[dict[str, bytes]] = field(default_factory=list)  # what they start with
    forgets: str = ""  # mutant: a name that the disk never keeps
    drift: float = 0.0  # clocks run by up to so much too fast or too slow, and are set
    now: float = 0.0
    queue: list[tuple[float, int, PeerId, int, Event, str]] = field(default_factory=list)
    count: int = 0
    cut: set[tuple[PeerId, PeerId]] = field(default_factory=set)
    dying: PeerId | None = None  # its next call is cut short
    leaders: dict[int, PeerId] = field(default_factory=dict)
    ballots: dict[tuple[PeerId, int], PeerId] = field(default_factory=dict)
    entries: dict[tuple[int, int], tuple[bytes, int]] = field(default_factory=dict)
    committed: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    states: dict[int, bytes] = field(default_factory=dict)
    largest_bytes: int = 0  # of commands in one message
    told: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = [PeerId(f"p{i}") for i in range(self.voters)]
        self.hosts = {p: Host(p, dict(disk)) for p, disk in zip_longest(self.names, self.disks, fillvalue={})}
        if self.drift:
            for host in self.hosts.values():
                host.clock = Clock.drifting(self.draw, self.drift)
        for p in self.names:
            self.start(p)

    # ---- the world -----------------------------------------------------------------------------------------

    def start(self, name: PeerId) -> None:
        host = self.hosts[name]
        host.life, host.timers, host.applied, host.state = host.life + 1, {}, 0, b""
        host.raft = Raft(name, self.names, b"seed", 0.5, 0.05, self.entries_max)
        self.carry_out(host, host.raft.handle(Start(dict(host.kept)), self.time_at(name)))

    def crash(self, name: PeerId) -> None:
        self.hosts[name].raft = None

    def time_at(self, name: PeerId) -> float:
        return self.hosts[name].clock.shows(self.now)

    def run(self, for_s: float) -> None:
        until = self.now + for_s
        while self.queue and self.queue[0][0] <= until:
            self.now, number, name, life, event, timer = heapq.heappop(self.queue)
            host = self.hosts[name]
            if host.raft is None or (host.life != life and timer):
                continue
            if timer and host.timers.get(timer) != number:
                continue  # set anew since
            self.carry_out(host, host.raft.handle(event, self.time_at(name)))
        self.now = until

    def ask(self, name: PeerId, do: Any) -> bool:
        """Something the host wants of its voter; False if it may not."""
        host = self.hosts[name]
        try:
            effects = do(host.raft)
        except ValueError:
            return False
        self.carry_out(host, effects)
        return True

    def carry_out(self, host: Host, effects: list[Effect]) -> None:
        """All of it; or, if it dies now, a part, without the writes that no word has followed yet."""
        machine = host.raft
        assert machine is not None
        if self.dying == host.name:
            self.dying = None
            effects = effects[: self.draw.randint(0, len(effects))]
            last_word = max((i for i, e in enumerate(effects) if isinstance(e, (Send, Report))), default=-1)
            synced = self.draw.randint(last_word + 1, len(effects))
            effects = [e for i, e in enumerate(effects) if not isinstance(e, Keep) or i < synced]
            host.raft = None
        for effect in effects:
            match effect:
                case Keep(name, blob):
                    self._check_append_only(host, machine, name, blob)
                    self._keep(host, name, blob)
                case Send(to, message):
                    self._send(host.name, to, message)
                case SetTimer(name, at):
                    self.count += 1
                    host.timers[name] = self.count
                    if at is not None:
                        event = TimerFired(name)
                        at = self.now + host.clock.wait_s(at, self.now)
                        heapq.heappush(self.queue, (at, self.count, host.name, host.life, event, name))
                case Report(fact):
                    self._check(host, machine, fact)
                case _:
                    raise AssertionError(effect)

    def _keep(self, host: Host, name: str, blob: bytes | None) -> None:
        if blob is None:
            host.kept.pop(name, None)
        elif not self.forgets or not name.startswith(self.forgets):
            host.kept[name] = blob

    def _send(self, sender: PeerId, to: PeerId, message: Any) -> None:
        if isinstance(message, Ballot) and message.granted and not message.pre:
            first = self.ballots.setdefault((sender, message.term), to)
            assert first == to, f"{sender} voted for {first} and for {to} in term {message.term}"
        if isinstance(message, Append):
            self.largest_bytes = max(self.largest_bytes, sum(len(e.command) for e in message.entries))
            self._check_log_matching(message)
        if (sender, to) in self.cut or self.draw.random() < self.loss:
            return
        for _ in range(1 + (self.draw.random() < self.doubled)):
            self.count += 1
            at = self.now + self.draw.uniform(*self.latency_s)
            item = (at, self.count, to, self.hosts[to].life, Received(sender, message), "")
            heapq.heappush(self.queue, item)

    # ---- what must always hold (Ongaro 2014, figure 3.2) -----------------------------------------------------

    # "Leader Append-Only: a leader never overwrites or deletes entries in its log; it only appends new entries."
    def _check_append_only(self, host: Host, machine: Raft, name: str, blob: bytes | None) -> None:
        if machine.role == "leader" and name.startswith(raft.ENTRY):
            digested = int(name.removeprefix(raft.ENTRY)) <= machine.snapshot.index  # what a marker sums up may go
            assert digested or host.kept.get(name) in (None, blob), f"{host.name} leads and changes {name}"

    # "Log Matching: if two logs contain an entry with the same index and term, then the logs are identical in all
    # entries up through the given index."
    def _check_log_matching(self, message: Append) -> None:
        """One (index, term) has one command and one entry before it: so logs that agree once agree before."""
        before = message.previous_term
        for index, entry in enumerate(message.entries, message.previous + 1):
            first = self.entries.setdefault((index, entry.term), (entry.command, before))
            assert first == (entry.command, before), f"log matching: two entries {index} of term {entry.term}"
            before = entry.term

    def _check(self, host: Host, machine: Raft, fact: Any) -> None:
        self.told.append(fact)
        match fact:
            # "Election Safety: at most one leader can be elected in a given term."
            # "Leader Completeness: if a log entry is committed in a given term, then that entry will be present in
            # the logs of the leaders for all higher-numbered terms."
            case Elected(term=term):
                first = self.leaders.setdefault(term, host.name)
                assert first == host.name, f"election safety: {first} and {host.name} lead term {term}"
                for index, (of, _) in self.committed.items():
                    held = index <= machine.snapshot.index or (
                        index <= machine.last_index and machine.term_at(index) == of
                    )
                    assert held, f"leader completeness: {host.name} leads term {term} without entry {index}"
            # "State Machine Safety: if a server has applied a log entry at a given index to its state machine, no
            # other server will ever apply a different log entry for the same index."
            case Committed(index=index, term=term, command=command):
                first = self.committed.setdefault(index, (term, command))
                assert first == (term, command), f"state machine safety: two commands at {index}"
                host.apply(fact)
                assert self.states.setdefault(index, host.state) == host.state, f"two states after {index}"
            case Restored(index=index, marker=marker):
                assert self.states.get(index) == marker, f"a marker at {index} that nobody's commands lead to"
                host.applied, host.state = index, marker
            case _:
                pass

    # ---- the enemy -----------------------------------------------------------------------------------------

    def play(self, moves: int) -> None:
        for _ in range(moves):
            self._move()
            self.run(self.draw.choice([0.01, 0.05, 0.3, 0.9]))

    def _move(self) -> None:
        what, draw = self.draw.random(), self.draw
        leaders = self.leading() if draw.random() < 0.5 else []
        name = draw.choice(leaders or self.names)  # leaders have the most to lose
        host = self.hosts[name]
        if self.drift and draw.random() < 0.2:
            host.clock.set(draw, self.now)
        if host.raft is None:
            if what < 0.9:
                self.start(name)
        elif what < 0.45:
            self.count += 1
            command = f"command {self.count}".encode()
            self.ask(name, lambda raft: raft.propose(command, self.time_at(name)))
        elif what < 0.6:
            self.dying = name
        elif what < 0.67:
            self.crash(name)
        elif what < 0.78:
            self._cut_links()
        elif what < 0.84:
            self.cut.clear()
        elif what < 0.92:
            if host.applied > host.raft.snapshot.index:
                self.ask(name, lambda raft: raft.compact(host.applied, host.state))
        else:
            self.ask(name, lambda raft: raft.transfer(draw.choice(self.names), self.time_at(name)))

    def _cut_links(self) -> None:
        """Two sides deaf to each other, or one deaf to the other; and some links at random."""
        side = {p for p in self.names if self.draw.random() < 0.5}
        both_ways = self.draw.random() < 0.5
        for a in self.names:
            for b in self.names:
                apart = (a in side) != (b in side) and (both_ways or a in side)
                if apart or self.draw.random() < 0.05:
                    self.cut.add((a, b))

    def heal(self) -> None:
        self.cut.clear()
        self.loss = self.doubled = 0.0
        self.dying = None
        for p in self.names:
            if self.hosts[p].raft is None:
                self.start(p)

    def leading(self) -> list[PeerId]:
        found = [(r.term, p) for p in self.names if (r := self.hosts[p].raft) is not None and r.role == "leader"]
        return [p for term, p in found if term == max(found)[0]]

    def raft_of(self, name: PeerId) -> Raft:
        machine = self.hosts[name].raft
        assert machine is not None
        return machine


def hostile(seed: int, voters: int, moves: int = 100, forgets: str = "", drift: float = 0.0) -> Cluster:
    draw = random.Random(seed)
    knobs = {"loss": draw.choice([0.0, 0.05, 0.25]), "doubled": draw.choice([0.0, 0.2])}
    latency_s = draw.choice([(0.001, 0.01), (0.005, 0.08), (0.001, 0.4)])
    cluster = Cluster(
        voters,
        draw,
        **knobs,
        latency_s=latency_s,
        entries_max=draw.choice([1, 2, 64]),
        forgets=forgets,
        drift=drift,
    )
    cluster.play(moves)
    return cluster


def figure_3_7(seed: int) -> Cluster:
    """The five disks of figure 3.7 (b) of the thesis, then the enemy: entries go one by one, leaders die young.

    p0 led term 2 and copied its entry to p1 only; p4 led term 3 and wrote another one in its place.
    """
    logs = [(1, 2), (1, 2), (1,), (1,), (1, 3)]
    metas = [Meta(2, PeerId("p0")), Meta(2, PeerId("p0")), *[Meta(3, PeerId("p4"))] * 3]
    disks = [{"raft/meta": pack(meta)} for meta in metas]
    for disk, log in zip(disks, logs, strict=True):
        disk.update({f"raft/entry/{i}": pack(Entry(t, b"of term %d" % t)) for i, t in enumerate(log, 1)})
    draw = random.Random(seed)
    cluster = Cluster(5, draw, entries_max=1, disks=disks)
    cluster.crash(cluster.names[4])
    for _ in range(8):
        while not cluster.leading():
            cluster.run(0.01)
        cluster.run(draw.uniform(0.0, 0.3))
        dead = [p for p in cluster.names if cluster.hosts[p].raft is None]
        for name in {*cluster.leading(), draw.choice(cluster.names)} - set(dead):
            cluster.crash(name)
        for name in dead:
            cluster.start(name)
    return cluster


def live(cluster: Cluster) -> None:
    """After the storm: one leader within seconds, and what it is asked to do is done by all. Patience ends by a
    voter's own clock: one that was set back is waited for."""
    cluster.heal()
    cluster.latency_s = (0.005, 0.02)
    cluster.run(8.0 + (2 * max(SET_S) if cluster.drift else 0.0))
    (leader,) = cluster.leading()
    assert cluster.ask(leader, lambda raft: raft.propose(b"after the storm", cluster.time_at(leader)))
    cluster.run(2.0)
    assert {h.state for h in cluster.hosts.values()} == {cluster.hosts[leader].state}
    assert max(cluster.committed.items())[1][1] == b"after the storm"


@pytest.mark.parametrize("voters", [1, 2, 3, 5])
def test_the_properties_of_the_thesis_hold_in_every_game_and_peace_brings_progress(voters: int):
    for seed in range(GAMES):
        try:
            live(hostile(seed, voters))
        except (AssertionError, ValueError) as why:
            raise AssertionError(f"seed {seed}: {why}") from why


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from([3, 4, 5, 7]))
def test_whatever_the_enemy_draws(seed: int, voters: int):
    live(hostile(seed, voters))


# ---- short stories -------------------------------------------------------------------------------------------


def quiet(voters: int = 3) -> tuple[Cluster, PeerId]:
    cluster = Cluster(voters, random.Random(7))
    cluster.run(3.0)
    (leader,) = cluster.leading()
    return cluster, leader


# "In the Pre-Vote algorithm, a candidate only increments its term if it first learns from a majority of the cluster
# that they would be willing to grant the candidate their votes (if the candidate's log is sufficiently up-to-date,
# and the voters have not received heartbeats from a valid leader for at least a baseline election timeout)." (9.6)
def test_a_voter_back_from_a_partition_does_not_depose_the_leader():
    """Alone it asks in vain for votes but never begins a term of its own (pre-vote): the term stays what it was."""
    cluster, leader = quiet()
    term, alone = cluster.raft_of(leader).term, next(p for p in cluster.names if p != leader)
    cluster.cut |= {(a, b) for a in cluster.names for b in cluster.names if alone in (a, b)}
    cluster.run(20.0)
    assert cluster.raft_of(alone).role == "canvassing"
    cluster.cut.clear()
    cluster.run(5.0)
    assert cluster.leading() == [leader] and {cluster.raft_of(p).term for p in cluster.names} == {term}


def test_a_timer_that_fires_a_rounding_too_early_is_set_again():
    """As event loops do: a voter that ignored it would be patient for ever, and whoever waits for a leader, too."""
    cluster = Cluster(3, random.Random(1))
    machine = cluster.raft_of(cluster.names[0])
    due = machine.election_at
    assert machine.handle(TimerFired(raft.ELECTION), due - 1e-6) == [SetTimer(raft.ELECTION, due)]
    assert any(isinstance(e, Send) for e in machine.handle(TimerFired(raft.ELECTION), due))


# "a leader in Raft steps down if an election timeout elapses without a successful round of heartbeats to a majority
# of its cluster" (6.2)
def test_a_leader_that_hears_nobody_steps_down_though_all_hear_it():
    """Its heartbeats still arrive and would keep the others waiting for ever (check-quorum)."""
    cluster, leader = quiet()
    cluster.cut |= {(p, leader) for p in cluster.names}
    cluster.run(1.0)
    assert any(isinstance(f, SteppedDown) and "only 1 of 3 voters answer, 2 are" in f.why for f in cluster.told)
    cluster.run(5.0)
    (successor,) = cluster.leading()
    assert successor != leader


# "1. The prior leader stops accepting new client requests. 2. The prior leader fully updates the target server's
# log to match its own, using the normal log replication mechanism described in Section 3.5. 3. The prior leader
# sends a TimeoutNow request to the target server." (3.10)
def test_leadership_moves_to_the_one_that_is_named_without_waiting_for_anybodys_patience():
    cluster, leader = quiet(5)
    heir = next(p for p in cluster.names if p != leader)
    cluster.ask(leader, lambda raft: raft.propose(b"last will", cluster.now))
    cluster.ask(leader, lambda raft: raft.transfer(heir, cluster.now))
    assert not cluster.ask(leader, lambda raft: raft.propose(b"too late", cluster.now))
    cluster.run(0.45)  # below the shortest patience
    assert cluster.leading() == [heir]
    cluster.run(1.0)
    assert [c for _, c in cluster.committed.values()] == [b"last will"]


def test_a_leader_whose_heir_is_dead_goes_on_itself():
    cluster, leader = quiet()
    heir = next(p for p in cluster.names if p != leader)
    cluster.crash(heir)
    cluster.ask(leader, lambda raft: raft.transfer(heir, cluster.now))
    cluster.run(1.0)
    assert cluster.ask(leader, lambda raft: raft.propose(b"on we go", cluster.now))


def test_a_voter_that_lost_its_disk_gets_the_marker_and_the_rest():
    cluster, leader = quiet()
    late = next(p for p in cluster.names if p != leader)
    cluster.crash(late)
    for number in range(20):
        cluster.ask(leader, lambda raft, n=number: raft.propose(b"%d" % n, cluster.now))
        cluster.run(0.3)
    host = cluster.hosts[leader]
    cluster.ask(leader, lambda raft: raft.compact(host.applied - 5, cluster.states[host.applied - 5]))
    assert len(cluster.raft_of(leader).log) == 5 and sum(n.startswith("raft/entry") for n in host.kept) == 5
    cluster.start(late)
    cluster.run(3.0)
    assert cluster.hosts[late].state == host.state and cluster.raft_of(late).snapshot.index == host.applied - 5


def test_large_commands_travel_few_at_a_time_and_all_arrive():
    """Nine of the largest commands: no message holds more than its bytes allow, and a late voter gets them all."""
    cluster, leader = quiet()
    late = next(p for p in cluster.names if p != leader)
    cluster.crash(late)
    for number in range(9):
        command = bytes([number]) * raft.COMMAND_BYTES_MAX
        assert cluster.ask(leader, lambda raft, c=command: raft.propose(c, cluster.now))
    cluster.run(1.0)
    cluster.start(late)
    cluster.run(3.0)
    assert cluster.hosts[late].applied == cluster.hosts[leader].applied >= 9
    assert 0 < cluster.largest_bytes <= raft.BYTES_PER_MESSAGE


def test_words_of_strangers_and_impossible_wishes_are_refused():
    cluster, leader = quiet()
    machine = cluster.raft_of(leader)
    with pytest.raises(PeerFault, match="is none"):
        machine.handle(Received(PeerId("stranger"), TakeOver(machine.term)), cluster.now)
    other = cluster.raft_of(next(p for p in cluster.names if p != leader))
    with pytest.raises(ValueError, match=f"ask {leader}"):
        other.propose(b"x", cluster.now)
    with pytest.raises(ValueError, match="only committed entries"):
        machine.compact(machine.commit + 1, b"")
    for _ in range(raft.UNCOMMITTED_MAX - (machine.last_index - machine.commit)):
        machine.propose(b"x", cluster.now)
    with pytest.raises(ValueError, match="wait for a quorum"):
        machine.propose(b"x", cluster.now)
    with pytest.raises(ValueError, match="named twice"):
        Raft(PeerId("a"), [PeerId("a"), PeerId("a")], b"")


# ---- mutants: a rule is deleted, and a listed seed notices -----------------------------------------------------


# "Persistent state on all servers: (Updated on stable storage before responding to RPCs) currentTerm, votedFor,
# log" (figure 3.1)
def test_mutant_a_voter_that_forgets_whom_it_voted_for(monkeypatch: pytest.MonkeyPatch):
    """Its term is kept, its vote is not: after a restart it votes again in the same term."""
    assert len(hostile(122, 3).leaders) > 1
    remember = Raft._keep_meta

    def forget(self: Raft, meta: Meta) -> Effect:
        remember(self, meta)
        return Keep(raft.META, pack(Meta(meta.term)))

    monkeypatch.setattr(Raft, "_keep_meta", forget)
    with pytest.raises(AssertionError, match="voted for"):
        hostile(122, 3)


# "Raft never commits log entries from previous terms by counting replicas. Only log entries from the leader's
# current term are committed by counting replicas; once an entry from the current term has been committed in this
# way, then all prior entries are committed indirectly because of the Log Matching Property." (3.6.2)
def test_mutant_entries_of_earlier_terms_are_committed_by_counting(monkeypatch: pytest.MonkeyPatch):
    """Figure 3.7: an entry that a majority holds is overwritten all the same, after it was told to be final."""
    for seed in (23, 46, 104):
        figure_3_7(seed)
    monkeypatch.setattr(Raft, "_is_mine", lambda self, index: True)
    for seed in (23, 46, 104):
        with pytest.raises(AssertionError, match="leader completeness"):
            figure_3_7(seed)


def test_mutant_a_leader_that_makes_room_in_its_own_log(monkeypatch: pytest.MonkeyPatch):
    """What is not final yet goes when something new is proposed."""
    propose = Raft.propose

    def instead(self: Raft, command: bytes, now: float) -> list[Effect]:
        cut = self._cut(self.last_index) if self.role == "leader" and self.last_index > self.commit else []
        return [*cut, *propose(self, command, now)]

    monkeypatch.setattr(Raft, "propose", instead)
    with pytest.raises(AssertionError, match="leads and changes"):
        for seed in range(20):
            hostile(seed, 3)


def test_mutant_a_log_that_is_not_kept():
    with pytest.raises(AssertionError, match=r"without entry|contradicted"):
        hostile(0, 3, forgets="raft/entry")


def test_mutant_half_the_voters_elect_and_commit(monkeypatch: pytest.MonkeyPatch):
    """Two halves of a partition lead the same term."""
    begin = Raft.__init__

    def half(self: Raft, *args: Any) -> None:
        begin(self, *args)
        self.quorum = len(self.voters) // 2

    monkeypatch.setattr(Raft, "__init__", half)
    with pytest.raises(AssertionError, match=r"election safety|state machine safety|leader completeness"):
        for seed in range(40):
            hostile(seed, 4)


# Not caught by the first 120 to 350 seeds of 3, 4 and 5 voters: that a vote, or a candidate's own one, is durable
# before it is said (that it is kept at all is, above), that a newer term is kept, that ballots and answers of an
# older one count for nothing, and those whose stories stand above, of partitions and of leaders that hear nobody.
RULES = [  # the rule, its text, what stands there instead, seed, voters
    (
        "who votes has no newer entries than who is elected",
        "up_to_date = (message.last_term, message.last_index) >= (self.term_at(self.last_index), self.last_index)",
        "up_to_date = True",
        *(0, 5),
    ),
    (
        "one vote per term",
        'if not up_to_date or self.meta.voted_for not in ("", sender):',
        "if not up_to_date:",
        *(1, 5),
    ),
    (
        "a leader of an older term is not followed",
        "            return [Send(sender, Appended(self.term, fits=False, upto=self.last_index + 1))]\n"
        "        effects = self._be_led(sender, message.term, now)\n        previous,",
        "            pass\n        effects = self._be_led(sender, message.term, now)\n        previous,",
        *(39, 5),
    ),
    (
        "entries follow one that both have",
        "if self.term_at(previous) != previous_term:",
        "if False:",
        *(9, 5),
    ),
    (
        "what was not copied is not committed",
        "self._commit_to(min(message.commit, upto))",
        "self._commit_to(min(message.commit, self.last_index))",
        *(9, 5),
    ),
    (
        "what contradicts the leader's log goes",
        "                effects += self._cut(index)\n",
        "                continue\n",
        *(2, 3),
    ),
    (
        "a quorum holds what is committed",
        "reverse=True)[self.quorum - 1]",
        "reverse=True)[self.quorum - 2]",
        *(0, 3),
    ),
    (
        "others hold what they say, not what was sent",
        "self.match[sender] = max(self.match[sender], message.upto)",
        "self.match[sender] = self.last_index",
        *(0, 3),
    ),
    (
        "a marker knows its term",
        "Snapshot(index, self.term_at(index), marker)",
        "Snapshot(index, 0, marker)",
        *(0, 3),
    ),
]


@pytest.mark.parametrize(("text", "instead", "seed", "voters"), [r[1:] for r in RULES], ids=[r[0] for r in RULES])
def test_a_rule_that_is_deleted_is_missed(
    text: str, instead: str, seed: int, voters: int, monkeypatch: pytest.MonkeyPatch
):
    """The listed seed catches the mutant and passes the machine as it is."""
    hostile(seed, voters)
    monkeypatch.setattr(sys.modules[__name__], "Raft", without(raft, text, instead).Raft)
    with pytest.raises(AssertionError):
        hostile(seed, voters)


def test_every_start_of_figure_3_7_ends_well():
    for seed in range(GAMES):
        live(figure_3_7(seed))
