"""Audits of rounds in which something was lost: a life, a trainer, files, the vertex. Nobody is a liar for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from audited import SHARES, STEPS, Swarm, play

from atoll.base.errors import RunFailedError
from atoll.crypto.digest import digest
from atoll.peer.tasks import AdoptState, BuildExhibit, EncodeUpdate, RestoreState
from atoll.peer.tasks import TrainRound as TrainAsked
from atoll.runtime.trainer import TrainerCommandError
from atoll.runtime.trainer.protocol import LoadInner
from atoll.runtime.worker import trainer_supervisor


def test_a_round_that_was_not_counted_never_happened(tmp_path: Path, book: str):
    """Bob's second update comes too late: its third round begins from the anchor, with moments as of its first."""

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        await swarm.play(counted=(0, 2))
        await swarm.play()
        for segment in range(3):
            assert (await swarm.audited(1, segment)).finding == "accepted"

    play(tmp_path, book, story)


def test_a_restart_goes_on_from_the_last_claim_and_one_without_its_files_from_fresh_moments(
    tmp_path: Path, book: str
):
    async def story(swarm: Swarm) -> None:
        await swarm.play()
        for lost in (False, True):
            await swarm.islands[1].close()
            if lost:
                (tmp_path / "bob" / "private.bin").unlink()
            island = swarm.again(1)
            found = RestoreState(swarm.round - 1, swarm.vertex(swarm.round - 1), swarm.state, mine=swarm.mine[1])
            assert await island.run(found)
            assert (island.auditing.last is None) == lost
            await swarm.play()
            said = await swarm.audited(1, 0)
            assert said.finding == "accepted", said

    play(tmp_path, book, story)


def test_who_was_killed_before_its_vertex_came_goes_on_from_the_claim_that_this_holds(tmp_path: Path, book: str):
    """Another life hears of the round from the others: moments, feedback and claim are those of the file ahead."""

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        before = RestoreState(0, swarm.vertex(0), swarm.state, mine=swarm.mine[1])
        await swarm.play()
        old = swarm.islands[1]
        await old.close()
        island = swarm.again(1)
        assert await island.run(before)
        held = swarm.mine[1][0]
        await island.run(AdoptState(1, swarm.vertex(1), swarm.state, None, held.claim, mine=held))
        assert torch.equal(island.mine.memory_F, old.mine.memory_F) and island.auditing.last == old.auditing.last
        assert bytes(island.live.inner) == bytes(old.live.inner) != b""
        await swarm.play()
        said = await swarm.audited(1, 0)
        assert said.finding == "accepted", said

    play(tmp_path, book, story)


def test_a_trainer_that_restarts_before_its_round_is_agreed_goes_on_with_fresh_moments(tmp_path: Path, book: str):
    """It holds moments of the round before: neither what the claim ended with nor fresh, so nobody may go on from
    them."""

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        bob = swarm.islands[1]
        own_do, old = bob.run, bob.live.inner

        async def run(work: Any) -> Any:
            if isinstance(work, AdoptState):
                await swarm.trainers[1].set_inner_state(old)
                bob.tended.lives += 1
            return await own_do(work)

        bob.run = run
        await swarm.play()
        assert bob.live.inner == b""
        bob.run = own_do
        await swarm.play()
        said = await swarm.audited(1, 0)
        assert said.finding == "accepted", said

    play(tmp_path, book, story)


def test_who_lost_its_trainer_before_its_update_was_made_passes_and_is_no_liar(
    tmp_path: Path, book: str, monkeypatch: pytest.MonkeyPatch
):
    """An audit fails between the last step and the encoding, and the next one starts the trainer again: its x is
    the anchor. An update of nothing under the claim of 25 steps would be a lie that two auditors expel for."""
    monkeypatch.setattr(trainer_supervisor, "RETRY_FIRST_S", 0.0)

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        bob = swarm.islands[1]
        own_do = bob.run

        async def run(work: Any) -> Any:
            if isinstance(work, EncodeUpdate):
                await bob.tended.failed(TrainerCommandError("crashed", "the audit failed"))
                await bob.warm_up()
                assert torch.equal(swarm.trainers[1].read_x(), bob.head.anchor_F)
            return await own_do(work)

        bob.run = run
        await swarm.play()
        assert swarm.roots[1] is None and swarm.roots[0] is not None
        bob.run = own_do
        with pytest.raises(RunFailedError, match="E-TRN-14"):
            await bob.run(EncodeUpdate(swarm.round, SHARES))
        for segment in range(3):
            await swarm.play()
            said = await swarm.audited(1, segment)
            assert said.finding == "accepted", said

    play(tmp_path, book, story)


@pytest.mark.parametrize("again", [False, True], ids=["gone", "started again"])
def test_moments_that_went_with_a_trainer_are_not_written_ahead(tmp_path: Path, book: str, again: bool):
    """Its trainer fails while the update is encoded, then the peer is killed when the vertex is kept: what it had
    before the round is neither what the claim ends with nor fresh."""

    async def gone(room: object = None) -> bytes:
        raise TrainerCommandError("crashed", "it was killed")

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        bob, trainer = swarm.islands[1], swarm.trainers[1]
        own_do, own_encode, old, disk = bob.run, bob.mine.encode, bytes(bob.live.inner), dict[str, bytes]()

        def encode(*given: Any) -> Any:
            made = own_encode(*given)  # of x as the steps left it
            trainer.child.mailbox.put(old)
            trainer.ask(LoadInner(len(old)))
            bob.tended.lives += 1
            return made

        async def run(work: Any) -> Any:
            if isinstance(work, EncodeUpdate) and again:
                bob.mine.encode = encode
            elif isinstance(work, EncodeUpdate):
                trainer.inner_state = gone
            elif isinstance(work, AdoptState):
                disk.update((path.name, path.read_bytes()) for path in bob.store.folder.glob("private.*"))
            return await own_do(work)

        bob.run = run
        await swarm.play()
        await bob.close()
        for name, data in disk.items():
            (bob.store.folder / name).write_bytes(data)
        assert await swarm.again(1).run(RestoreState(1, swarm.vertex(1), swarm.state, mine=swarm.mine[1]))
        await swarm.play()
        said = await swarm.audited(1, 0)
        assert said.finding == "accepted", said

    play(tmp_path, book, story)


def test_what_a_crash_took_is_never_a_lie(tmp_path: Path, book: str):
    """The vertex holds a claim whose record is gone: nothing can be shown, and the next round begins afresh."""

    async def story(swarm: Swarm) -> None:
        await swarm.play()
        swarm.islands[1].auditing.made.clear()
        with pytest.raises(RunFailedError, match="E-AUD-02"):
            await swarm.islands[1].run(BuildExhibit(0, 0))
        island = swarm.islands[1]
        await island.run(TrainAsked(1, STEPS, 600.0, 1, 3))
        await island.run(EncodeUpdate(1, SHARES))
        island.auditing.made.clear()
        await island.run(
            AdoptState(1, swarm.vertex(1), swarm.state, (True,) * 3, digest(b"what I said in a life before"))
        )
        assert island.live.inner == b"" and island.mine.memory_F is None and island.auditing.last is None

    play(tmp_path, book, story)
