"""What real islands show of their updates and measure along others': the same everywhere, beside their training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from members import PEERS, SHARES, Members, recipe_for, story
from msgspec.structs import replace

from atoll.base.errors import PeerFault, RunFailedError, UsageError
from atoll.base.ids import Digest, PeerId
from atoll.crypto.digest import digest, merkle_root
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import BuildUpdateExhibit, ScoreUpdate
from atoll.runtime.config import load_config, recipe_of, settings_of
from atoll.runtime.training_spec import founding_blobs, parse_training_spec, start_of_built_in
from atoll.runtime.worker.capabilities import enable_checks
from atoll.training.recipe.inner import GradientSumOptimizer
from atoll.verification.loss_scoring.machine import LOSS_SCORING
from atoll.verification.loss_scoring.policy import opinion_of
from atoll.verification.shown_update import update_bytes

PLAIN, APART = {"overlap": 0, "fragments": 1}, {"overlap": 3, "fragments": 2}


def play(tmp_path: Path, book: str, tell: Callable[[Members], Awaitable[None]], how: dict | None = None) -> None:
    recipe = replace(recipe_for(how or PLAIN, rounds=9), batch=4)
    members = Members(tmp_path / "a", recipe, book)
    for island in members.islands:
        enable_checks(island, [LOSS_SCORING])
    story(tell, members)


class Scored:
    """The round that was closed last, and what is asked about it."""

    def __init__(self, members: Members, before: Digest) -> None:
        self.members, self.before, self.round = members, before, members.round - 1

    async def work(self, author: int, blob: Digest | None = None, **more) -> ScoreUpdate:
        members, steps = self.members, self.members.recipe.schedule.turn_steps
        shown = blob or (await members.islands[author].run(BuildUpdateExhibit(self.round))).blob
        wires = members.islands[author].outbox.wires[self.round]
        work = ScoreUpdate(
            blob=shown,
            round=self.round,
            peer=PeerId(str(author)),
            before=self.before,
            shard=author,
            shards=PEERS,
            shares=SHARES,
            steps=steps,
            steps_max=steps,
            root=merkle_root(tuple(map(digest, wires))),
            drawn=digest(b"drawn"),
        )
        return replace(work, **more)

    async def falls(self, scorer: int, work: ScoreUpdate) -> tuple[int, ...]:
        for store in self.members.stores:
            if store.has_blob(work.blob):
                self.members.stores[scorer].put_blob(store.read_blob(work.blob))
        return (await self.members.islands[scorer].run(work)).falls


async def closed(members: Members, rounds: int) -> Scored:
    for _ in range(rounds):
        before = members.state
        await members.play()
    return Scored(members, before)


@pytest.mark.parametrize("how", [PLAIN, APART], ids=["plain", "overlap and fragments"])
def test_two_scorers_measure_the_same_and_work_gains_most_where_it_was_assigned(tmp_path: Path, book: str, how):
    """Also said of the other's samples, the same update gains less there: on the whole of a few rounds."""

    async def tell(members: Members) -> None:
        mine = other = 0
        for _ in range(4):
            asked = await closed(members, 1)
            work = await asked.work(0)
            (one, two) = [await asked.falls(scorer, work) for scorer in range(2)]
            assert one == two and len(one) == 3 and one[2] > 0
            mine += one[0] - one[1]
            own, others, _ = await asked.falls(1, replace(work, shard=1))
            other += own - others
        assert mine > 0 and mine > other

    play(tmp_path, book, tell, how)


def test_what_was_not_committed_to_is_nothing_and_what_is_gone_is_nobodys_fault(tmp_path: Path, book: str):
    async def tell(members: Members) -> None:
        asked = await closed(members, 2)
        work = await asked.work(0)
        assert await asked.falls(1, replace(work, root=digest(b"another"))) == ()
        wires = [b"junk"] * PEERS
        junk = members.stores[1].put_blob(update_bytes(wires))
        told = replace(work, blob=junk, root=merkle_root(tuple(map(digest, wires))))
        assert await asked.falls(1, told) == ()
        assert opinion_of(()) == "hollow"
        with pytest.raises(RunFailedError, match="E-SCO-02"):
            await members.islands[1].run(replace(work, before=digest(b"gone")))
        with pytest.raises(RunFailedError, match="E-SCO-01"):
            await members.islands[0].run(BuildUpdateExhibit(99))

    play(tmp_path, book, tell)


def test_scoring_changes_nothing_and_training_goes_on_between_two_batches(tmp_path: Path, book: str):
    """One swarm scores every update while it trains the next one, the other none: the same states, to the bit."""

    async def tell(members: Members) -> None:
        (tmp_path / "b").mkdir()
        others = Members(tmp_path / "b", members.recipe, book)
        await others.begin()
        try:
            asked = await closed(members, 1)
            await others.play()
            for _ in range(2):
                work = await asked.work(0)
                looks = [asyncio.create_task(asked.falls(k, work)) for k in range(2)]
                before = members.state
                await members.play()
                await asyncio.gather(*looks)
                await others.play()
                assert members.state == others.state
                asked = Scored(members, before)
        finally:
            await others.close()

    play(tmp_path, book, tell)


def test_runs_that_cannot_be_scored_are_not_founded_and_not_joined(tmp_path: Path, book: str):
    recipe = recipe_for(PLAIN)
    sums = replace(recipe, inner=GradientSumOptimizer())
    scored = RunSettings(score_rate=0.1, reputation=True)
    founded = founding_blobs(start_of_built_in(recipe, book), scored)
    parse_training_spec(founded.settings)
    with pytest.raises(UsageError, match="E-RUN-21"):
        founding_blobs(start_of_built_in(sums, book), scored)
    other = founding_blobs(start_of_built_in(sums, book), RunSettings(reputation=True))
    with pytest.raises(PeerFault, match="sums of gradients"):
        parse_training_spec(replace(other.settings, score_rate=0.1))


def test_scores_without_records_are_refused_by_name(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("[run]\nscore_rate = 0.1\n")
    with pytest.raises(UsageError, match="keeps none"):
        load_config(path)
    path.write_text('[run]\nscore_rate = 0.1\ntrust = "community"\nstart_peers = 4\n')
    config = load_config(path)
    assert settings_of(config, recipe_of(config)).scored_share == 0.1
