"""Data positions: how far the counted work of all members is in one shared data set, shard by shard.

The data set is an endless row of shards: shard g is shard g mod S of epoch g div S, if the data set has S shards.
Each open shard has one reader and one position. A commitment claims the ranges behind its update; a vertex that
counts it moves the positions. A shard stays with its reader while it is present. Shards of members that are gone
are dealt first, from their position on; then come new ones. So a joiner takes no shard away, and a restarted
member continues at the agreed position.

Invariants:
- Everything is a pure fold over vertices: a member needs only the newest one.
- positions of all shards = counted − repeated + dropped.
- A reader moves its own shards only. What else counted updates hold is recorded as repeated.
- A range whose update has no weight moves nothing, since its samples are not in the model.
- At most 8 shards are open for each member that may train, now or later: vertices have room for these.
Not responsible for: reading samples (training/data/shards), and what a rollback undid in earlier rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType

from atoll.base.ids import Digest, PeerId
from atoll.base.limits import DATA_SHARDS_MAX
from atoll.policy.vertex_capacity import may_train
from atoll.wire.data_ranges import AssignedShard, DataClaim, DataRange
from atoll.wire.messages.statements import Commitment
from atoll.wire.messages.vertex import Member, SharedDataProgress, UnfinishedShard, VertexBody

SHARDS_LEAST = 2  # untouched ones of a reader: a step may begin in one and end in the next
OPEN_SHOWN = 6  # open shards in a line for people
COUNT_MAX = 2**53  # larger sums stay there: only false claims lead to them


@dataclass
class _ShardProgress:
    position: int
    reader: PeerId | None


@dataclass
class _ShardLedger:
    """Open shards while one vertex is folded in."""

    next: int = 0
    open: dict[int, _ShardProgress] = field(default_factory=dict[int, _ShardProgress])
    counted: int = 0
    dropped: int = 0
    repeated: int = 0

    def claim(self, by: PeerId, claimed: DataRange, undone: bool) -> None:
        shard, samples = self.open.get(claimed.shard), claimed.until - claimed.first
        if not undone:
            self.counted += samples
        if shard is None or shard.reader != by:
            self.repeated += 0 if undone else samples
            return
        passed = max(0, claimed.until - shard.position)  # samples by which the position moves
        fresh = min(samples, passed)
        if undone:
            self.dropped += passed
        else:
            self.dropped += passed - fresh
            self.repeated += samples - fresh
        shard.position += passed
        if claimed.ends and claimed.until == shard.position:
            del self.open[claimed.shard]

    def deal(self, wanted: Mapping[PeerId, int]) -> None:
        """Give each of these readers so many untouched shards, in this order. All others lose theirs.

        Shards that a member left in the middle come first, to those with the fewest.
        """
        total, untouched = Counter[PeerId](), Counter[PeerId]()
        begun, whole = list[int](), list[int]()
        for number, shard in sorted(self.open.items()):
            if shard.reader is not None and shard.reader in wanted:
                total[shard.reader] += 1
                untouched[shard.reader] += shard.position == 0
            else:
                shard.reader = None
                (begun if shard.position else whole).append(number)
        for number in begun if wanted else ():
            reader = min(wanted, key=lambda peer: total[peer])
            if total[reader] < DATA_SHARDS_MAX - SHARDS_LEAST:
                self.open[number].reader = reader
                total[reader] += 1
        whole.reverse()
        for reader, count in wanted.items():
            for _ in range(min(count - untouched[reader], DATA_SHARDS_MAX - total[reader])):
                if whole:
                    self.open[whole.pop()].reader = reader
                else:
                    self.open[self.next] = _ShardProgress(0, reader)
                    self.next += 1

    def close_oldest(self, most: int) -> None:
        """Close the oldest shards that were left in the middle, if more than so many are open: a liar left them."""
        left = [number for number, shard in sorted(self.open.items()) if shard.reader is None and shard.position]
        for number in left[: max(0, len(self.open) - most)]:
            del self.open[number]


def next_positions(
    parent: VertexBody, commits: Mapping[PeerId, Commitment], members: Sequence[Member], undone: bool
) -> SharedDataProgress | UnsetType:
    """The field of the vertex after `parent` that counts these commitments and has these members.

    `undone`: the vertex goes back to an earlier state, so that its own claims end in no model.
    """
    said = {peer: claim for peer, c in commits.items() if (claim := c.data) is not None}
    name = _name_of(parent, [claim for peer, claim in said.items() if commits[peer].weight])
    if name is None:
        return UNSET
    claims = {peer: claim for peer, claim in said.items() if claim.name == name}
    ledger, ended = _opened(parent), Counter[PeerId]()
    for peer, claim in claims.items():
        if commits[peer].weight == 0:
            continue
        for claimed in claim.ranges:
            ledger.claim(peer, claimed, undone)
            ended[peer] += claimed.ends
    readers = [m.peer for m in members if m.may_train and (m.peer not in commits or m.peer in claims)]
    ledger.deal({peer: max(SHARDS_LEAST, 2 * ended[peer]) for peer in readers})
    ledger.close_oldest(DATA_SHARDS_MAX * sum(map(may_train, members)))
    return _written(ledger, name, members)


def shards_of(body: VertexBody, peer: PeerId) -> tuple[AssignedShard, ...]:
    """The shards that this member reads in the round after `body`."""
    open_shards = sorted(_opened(body).open.items())
    return tuple(AssignedShard(number, shard.position) for number, shard in open_shards if shard.reader == peer)


def positions_told(body: VertexBody) -> dict[str, Any] | None:
    """The positions in a vertex, for people; None if it has none."""
    data = body.data
    if data is UNSET:
        return None
    names = [m.name or m.peer[-8:] for m in body.members]
    return {
        "name": data.name.hex(),
        "used_up": data.next - len(data.open),
        "open": [
            {
                "shard": s.shard,
                "position": s.position,
                "reader": names[s.reader] if 0 <= s.reader < len(names) else None,
            }
            for s in data.open
        ],
        "counted": data.counted,
        "dropped": data.dropped,
        "repeated": data.repeated,
    }


def positions_text(told: dict[str, Any]) -> str:
    """The same in one line."""
    shown = [f"{s['shard']} at {s['position']:,} ({s['reader'] or 'no reader'})" for s in told["open"][:OPEN_SHOWN]]
    more = f", and {len(told['open']) - OPEN_SHOWN} more" if len(told["open"]) > OPEN_SHOWN else ""
    return (
        f"{told['counted']:,} samples counted, {told['dropped']:,} dropped, {told['repeated']:,} repeated; "
        f"{told['used_up']:,} shards used up, open: {', '.join(shown)}{more}"
    )


def _name_of(parent: VertexBody, claims: Iterable[DataClaim]) -> Digest | None:
    """The run's data set: the first one that members claim, at first the one of most."""
    if parent.data is not UNSET:
        return parent.data.name
    counts = Counter(claim.name for claim in claims)
    return max(counts, key=lambda name: (counts[name], name), default=None)


def _opened(body: VertexBody) -> _ShardLedger:
    """The ledger of a vertex. Before the first claim it is dealt anew to all trainers."""
    data = body.data
    if data is UNSET:
        ledger = _ShardLedger()
        ledger.deal({m.peer: SHARDS_LEAST for m in body.members if m.may_train})
        return ledger
    names = [m.peer for m in body.members]
    shards = {
        s.shard: _ShardProgress(s.position, names[s.reader] if 0 <= s.reader < len(names) else None)
        for s in data.open
    }
    return _ShardLedger(data.next, shards, data.counted, data.dropped, data.repeated)


def _written(ledger: _ShardLedger, name: Digest, members: Sequence[Member]) -> SharedDataProgress:
    line = {m.peer: at for at, m in enumerate(members)}
    shards = tuple(
        UnfinishedShard(number, shard.position, -1 if shard.reader is None else line[shard.reader])
        for number, shard in sorted(ledger.open.items())
    )
    sums = (min(count, COUNT_MAX) for count in (ledger.counted, ledger.dropped, ledger.repeated))
    return SharedDataProgress(name, ledger.next, shards, *sums)
