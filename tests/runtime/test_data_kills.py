"""Members that read one data set are killed: no sample is lost without account, and reading goes on as before."""

from __future__ import annotations

import multiprocessing
import random
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import reading
from msgspec import UNSET
from warm import _forked

from atoll.runtime.storage.stored_history import kept_in, read_vertex
from atoll.simulation.data_reading import check_positions
from atoll.training.data.shards.sources import RandomAccessSource
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import Commitment
from atoll.wire.messages.vertex import VertexBody

pytestmark = [pytest.mark.net]
SOURCE = RandomAccessSource(list(range(reading.SAMPLES)), reading.SHARDS, 3, True)


class ReadingMember:
    """A member, over all its lives."""

    def __init__(self, folder: Path, rounds: int, peers: int, ticket: str = "") -> None:
        self.folder, self.terms = folder, (ticket, rounds, peers)
        self.read: list[list[int]] = []  # samples per step, of all lives
        self.lives: list[int] = []  # steps before each life
        self.is_over = False
        self.begin()

    def begin(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe(duplex=False)
        self.lives.append(len(self.read))
        self.process = _forked(reading.live, str(self.folder), *self.terms, theirs)
        theirs.close()

    def hear(self) -> object:
        """The next message: a ticket, the samples of a step, or "over". None if the process ended."""
        try:
            told = self.pipe.recv()
        except EOFError:
            return None
        if isinstance(told, list):
            self.read.append(told)
        self.is_over = self.is_over or told == "over"
        return told

    def kill(self) -> None:
        self.process.kill()
        while self.hear() is not None:
            pass
        self.process.join()


def bodies_of(folder: Path) -> list[VertexBody]:
    with kept_in(folder) as kept:
        return [read_vertex(kept, folder, round)[1] for round in kept.rounds if round >= 0]


def counted_in(bodies: list[VertexBody]) -> Counter[tuple[int, int]]:
    """Sample → counted updates that hold it; compared with the positions of every vertex."""
    seen = Counter[tuple[int, int]]()
    for body in bodies:
        for signed in body.commits:
            commit = statement_in(signed)
            assert isinstance(commit, Commitment) and commit.data is not None
            if commit.weight:
                seen.update((r.shard, at) for r in commit.data.ranges for at in range(r.first, r.until))
        if body.data is not UNSET:
            check_positions(seen, body.data, lambda shard: reading.SAMPLES // reading.SHARDS)
    return seen


def play(tmp_path: Path, kills: int, peers: int, seed: int) -> list[ReadingMember]:
    """Members train while one after another is killed, at a drawn step of its life, and started again.

    Ends, with the last kills, when each has taken some steps in its last life.
    """
    draw, terms = random.Random(seed), (10**6, peers)
    members = [ReadingMember(tmp_path / "0", *terms)]
    ticket = members[0].hear()
    assert isinstance(ticket, str)
    members += [ReadingMember(tmp_path / str(k), *terms, ticket) for k in range(1, peers)]
    try:
        victim, after = draw.choice(members), draw.randint(1, 9)
        while kills or any(len(member.read) - member.lives[-1] < 9 for member in members):
            for pipe in wait([member.pipe for member in members]):
                member = next((one for one in members if one.pipe is pipe), None)
                if member is None:
                    continue  # of the life before
                assert member.hear() is not None, f"a member ended by itself with {member.process.exitcode}"
                if kills and member is victim and len(member.read) - member.lives[-1] >= after:
                    member.kill()
                    member.begin()
                    kills, victim, after = kills - 1, draw.choice(members), draw.randint(1, 9)
    finally:
        for member in members:
            member.kill()
    return members


@pytest.mark.parametrize(
    ("kills", "peers"),
    [(2, 2), pytest.param(20, 4, marks=pytest.mark.long)],
    ids=["two", "twenty"],
)
def test_no_sample_is_lost_when_members_are_killed(tmp_path: Path, kills: int, peers: int):
    """The positions of each vertex match the samples in counted updates, and loops have read all of these."""
    members = play(tmp_path, kills, peers, 7)
    bodies = max((bodies_of(member.folder) for member in members), key=len)
    seen = counted_in(bodies)
    assert [body.round for body in bodies] == list(range(len(bodies))) and sum(seen.values()) > 9 * reading.BATCH
    learned = Counter(one for member in members for step in member.read for one in step)
    items = {shard: [item for item, _ in SOURCE.read(shard, 0)] for shard, _ in seen}
    claimed = Counter[int]()
    for (shard, at), times in seen.items():
        claimed[items[shard][at]] += times
    assert not claimed - learned


def test_a_loop_that_is_killed_goes_on_at_the_same_sample(tmp_path: Path):
    """Alone, twice: a life begins at the sample where the newest vertex is. At the end all were counted once."""
    member = ReadingMember(tmp_path / "0", 8, 1)
    begins = [(0, 0)]
    try:
        for steps in (6, 11):
            while len(member.read) < member.lives[-1] + steps:
                assert member.hear() is not None
            member.kill()
            newest = bodies_of(member.folder)[-1]
            begins.append(newest.data.open[0][:2] if newest.data is not UNSET else (0, 0))
            member.begin()
        while not member.is_over:
            assert member.hear() is not None
    finally:
        member.kill()
    for (shard, at), life in zip(begins, member.lives, strict=True):
        assert member.read[life][0] == next(SOURCE.read(shard, at))[0]
    bodies = bodies_of(member.folder)
    data = bodies[-1].data
    assert data is not UNSET and (data.dropped, data.repeated) == (0, 0) and data.counted >= 7 * 4 * reading.BATCH
    assert set(counted_in(bodies).values()) == {1}
