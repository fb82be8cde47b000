"""A round made again out of its kept rows by real islands: the same bits with all, and whose absence helps."""

from __future__ import annotations

from pathlib import Path

import pytest
from members import Members, recipe_for, story
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Payload
from atoll.crypto.digest import digest
from atoll.features.attribution.leave_one_out import notable
from atoll.peer.config.sections import KeepSection
from atoll.peer.tasks import (
    ArchivedRow,
    EncodeUpdate,
    LeaveOneOut,
    LeaveOneOutResult,
    PartRows,
    RetainArchivedRows,
    StoreArchivedRows,
    UpdateEncoded,
)
from atoll.peer.tasks import TrainRound as TrainAsked
from atoll.runtime.storage.store import PeerStore

FOUR = 4


class Remembering(Members):
    """Keeps what everybody sent, as owners do, and can make one of them send its update turned round."""

    villain = -1
    far = 0.0  # how far the villain's update leads, in lengths of the honest one

    async def train(self, index: int, late: bool = False) -> UpdateEncoded:
        asked = TrainAsked(self.round, self.steps, 600.0, index, self.peers, self.batch)
        await self.islands[index].run(asked)
        if index == self.villain:
            x_F, anchor_F = self.trainers[index].read_x(), self.islands[index].head.anchor_F
            x_F.copy_(anchor_F + self.far * (x_F - anchor_F))
        sent = await self.islands[index].run(EncodeUpdate(self.round, self.shares, late))
        self.sent[index] = sent.parts
        return sent

    async def closed(self, villain: int = -1, far: float = 0.0) -> LeaveOneOut:
        """One round, and what is asked about it."""
        self.sent: dict[int, tuple[Payload, ...]] = {}
        self.villain, self.far = villain, far
        before, round, steps = self.state, self.round, self.steps
        await self.play()
        weight, parts = steps * self.recipe.batch, list[PartRows]()
        for part in range(self.peers):
            rows = tuple(ArchivedRow(part, PeerId(str(k)), (), sent[part]) for k, sent in self.sent.items())
            blobs = await self.islands[0].run(StoreArchivedRows(rows))
            parts.append(PartRows(tuple((row.peer, weight, blob) for row, blob in zip(rows, blobs, strict=True))))
        await self.islands[0].run(RetainArchivedRows(tuple(blob for part in parts for _, _, blob in part.rows)))
        samples = weight * len(self.sent)
        return LeaveOneOut(
            round, before, self.state, self.shares, tuple(parts), "mean", 0, steps, samples, self.peers, self.batch
        )

    async def asked(self, work: LeaveOneOut) -> LeaveOneOutResult:
        return await self.islands[0].run(work)


@pytest.mark.parametrize("how", [{"overlap": 0, "fragments": 1}, {"overlap": 3, "fragments": 2}], ids=str)
def test_the_round_is_made_again_to_the_bit_and_only_the_villain_stands_out(tmp_path: Path, book: str, how: dict):
    """Three honest rounds name nobody; in the fourth one goes four times as far the other way."""

    async def tell(members: Remembering) -> None:
        for _ in range(3):
            found = await members.asked(await members.closed())
            assert found.exact and notable(found) == () and len(found.without) == FOUR
        bad = await members.asked(await members.closed(villain=2, far=-4.0))
        assert bad.exact and notable(bad) == ("2",)
        assert bad.whole > bad.before > dict((w.peer, w.loss) for w in bad.without)["2"]

    members = Remembering(tmp_path / "a", replace(recipe_for(how, rounds=9), batch=4), book, peers=FOUR)
    story(tell, members)


def test_a_part_whose_row_is_gone_counts_for_nobody_and_it_is_said(tmp_path: Path, book: str):
    """The rest is measured all the same, of another state than the one that was agreed on."""

    async def tell(members: Remembering) -> None:
        work = await members.closed(villain=1, far=-4.0)
        found = await members.asked(replace(work, parts=(None, *work.parts[1:])))
        assert not found.exact and notable(found) == ("1",)
        lost = Digest(bytes(32))
        gone = replace(work.parts[0], rows=((PeerId("0"), 1, lost), *work.parts[0].rows[1:]))
        with pytest.raises(Exception, match="E-BLM-06"):
            await members.asked(replace(work, parts=(gone, *work.parts[1:])))
        with pytest.raises(Exception, match="E-BLM-05"):
            await members.asked(replace(work, before=lost))

    story(
        tell, Remembering(tmp_path / "a", replace(recipe_for({"overlap": 0, "fragments": 1}), batch=4), book, FOUR)
    )


def test_rows_stay_as_long_as_they_are_held_and_there_is_room(tmp_path: Path):
    """Three rows, of which two are held in room for one: the first of them stays, and is shown as it came."""
    from atoll.runtime.storage.blob_retention import BlobRetention

    store = PeerStore(tmp_path, durable=False)
    retention = BlobRetention(store, KeepSection(newest=0, updates=2, bytes_max=1500))
    rows = [
        ArchivedRow(0, PeerId(name), (), Payload(digest(name.encode()), 1000, name.encode() * 1000))
        for name in "abc"
    ]
    a, b, c = retention.rows.put(rows)
    retention.tidy(set(), 5)
    assert all(map(store.has_blob, (a, b, c)))  # nobody has said yet what is to stay
    assert retention.rows.hold((b, c, a)) == () and retention.rows.hold((b, c)) == ()
    retention.tidy(set(), 5)
    assert [store.has_blob(name) for name in (a, b, c)] == [False, True, False]
    assert retention.rows.hold((b, c)) == (c,)
    shown = retention.rows.read(b, rows[1].payload.digest)
    assert shown is not None and bytes(shown.data) == b"b" * 1000 and retention.rows.read(c, a) is None
    store.close()
