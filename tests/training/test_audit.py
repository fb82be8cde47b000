"""Audits of a trainer's segments: who is accepted, who is found out, and who cannot be judged."""

from __future__ import annotations

import asyncio
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from toy import DATA

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from cheats import Take, at_each_boundary, cheats, honest, poison, skipping, trained

from atoll.base.errors import PeerFault, RunFailedError
from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.crypto.digest import digest
from atoll.runtime.trainer import TrainerClient, TrainerSpec
from atoll.training.data import data_digest, load_data
from atoll.training.exchange.layout import layout_of
from atoll.training.models import build_model
from atoll.training.recipe.inner import SGD, AdamW, fresh_inner, inner_from_bytes
from atoll.training.recipe.recipes import Recipe, diloco
from atoll.verification.replay_audit.judge import (
    EndStateNeeded,
    ExhibitHashMismatch,
    ReplayAccepted,
    ReplayImpossible,
    ReplayMismatch,
    Verdict,
    furthest,
    judge_segment,
)
from atoll.verification.replay_audit.replay import (
    ChainLink,
    ReplayReplica,
    TrainerSnapshot,
    TrainingAssignment,
    fresh_private,
    live_bytes,
    live_from_bytes,
    name_of,
    name_of_x,
    segments,
)
from atoll.verification.replay_audit.state_chain import ChainClaim, StateChain, chain_head
from atoll.verification.replay_audit.tolerance import PINS, TrainingProfile, profile_here

RECIPE = diloco("gpt-nano", rounds=3, inner_steps=20, batch=4)
DATA_NAME = data_digest(DATA)
LAYOUT = layout_of(build_model("gpt-nano", 0))
PINNED = TrainingProfile(torch.__version__, 1, tuple(PINS.values()))


def replica_of(recipe: Recipe = RECIPE, pieces: int = 1) -> ReplayReplica:
    return ReplayReplica(recipe, DATA, DATA_NAME, pieces)


def begun() -> TrainerSnapshot:
    return replica_of().live()


def assigned(begin: TrainerSnapshot | None = None) -> TrainingAssignment:
    """The second round of peer 1 of 3: it begins in the middle of the run and of the data."""
    begin = begin or begun()
    where = {"shard": 1, "shards": 3, "cursor": 80, "global_step": 20, "steps": 20, "segment_steps": 5}
    name = name_of(begin)
    return TrainingAssignment(b"run", 1, PeerId("ada"), RECIPE, DATA_NAME, name.x, carried=name.private, **where)


class Round:
    """A recorded round of a trainer that keeps every state, and what it shows when asked."""

    def __init__(
        self,
        take: Take = honest,
        assignment: TrainingAssignment | None = None,
        begin: TrainerSnapshot | None = None,
    ) -> None:
        self.begin = begin or begun()
        self.assignment = assignment or assigned(self.begin)
        self.record = trained(replica_of(), self.assignment, self.begin, take, keep_every=1)
        self.claim = ChainClaim(self.record.head, self.record.steps, digest(b"parts"), profile_here())

    def audited(self, segment: int, auditor: ReplayReplica | None = None, **asked) -> Verdict:
        """The verdict on a segment as it is, or with something else in place of what is named."""
        told = {"assignment": self.assignment, "claim": self.claim, "links": self.record.links}
        told |= {"begin": self.record.kept[segment], "end": self.record.kept[segment + 1]}
        return judge_segment(**told | {"segment": segment, "replica": auditor or replica_of()} | asked)

    def verdicts(self, **asked) -> list[type]:
        return [type(self.audited(segment, **asked)) for segment in range(len(self.record.links) - 1)]


@cache
def honest_round() -> Round:
    return Round()


def test_an_honest_trainer_is_accepted_in_every_segment_by_its_bits_alone():
    """The state at the end need not travel where the replay gives its name."""
    made = honest_round()
    assert [type(made.audited(segment, end=None)) for segment in range(4)] == [ReplayAccepted] * 4
    assert made.audited(2, end=None).distance == 0.0


def test_an_auditor_that_adds_in_another_order_is_near_and_accepts():
    """Batches in two pieces: other bits, so the end is asked for, and then far inside the tolerance."""
    made, auditor = honest_round(), replica_of(pieces=2)
    assert isinstance(made.audited(1, auditor, end=None), EndStateNeeded)
    verdict = made.audited(1, auditor)
    assert isinstance(verdict, ReplayAccepted) and 0.0 < verdict.distance < verdict.tolerance


@pytest.mark.net
def test_what_is_replayed_is_what_the_trainer_trains(tmp_path):
    """Ten steps of the real trainer process end in the very state that a replay of its assignment ends in."""
    book = tmp_path / "book.txt"
    book.write_text(" ".join(f"{i} squared is {i * i}." for i in range(4000)))
    data = load_data(str(book))
    name = data_digest(data)
    recipe = replace(RECIPE, inner=AdamW(), seed=3)
    spec = TrainerSpec("gpt-nano", 3, str(book), recipe.batch, recipe.seq_len, recipe.inner)

    async def train() -> tuple[TrainerSnapshot, TrainerSnapshot]:
        trainer = TrainerClient()
        try:
            layout = await trainer.start(spec)
            begin = TrainerSnapshot(
                trainer.read_x().clone(), torch.zeros(0, dtype=torch.int64), fresh_inner(layout.parameters)
            )
            await trainer.train(10, cursor=40, shard=1, shards=2, global_step=7)
            inner = inner_from_bytes(await trainer.inner_state(), layout.parameters)
            return begin, TrainerSnapshot(trainer.read_x().clone(), begin.counters_K, inner)
        finally:
            await trainer.stop()

    begin, end = asyncio.run(train())
    told = {"shard": 1, "shards": 2, "cursor": 40, "global_step": 7, "steps": 10}
    assignment = TrainingAssignment(b"run", 1, PeerId("ada"), recipe, name, name_of_x(begin.x_F), **told)
    assert name_of(ReplayReplica(recipe, data, name).replay(assignment, begin, 0, 10)) == name_of(end)


# ---- cheats ------------------------------------------------------------------------------------------------


TOLERANCE = 1e-3  # the library's, for this model
CHEATS = cheats(torch.full((LAYOUT.floats,), 1e-3), TOLERANCE)


def skips(at: int) -> Take:
    return skipping(100, at)


@pytest.mark.parametrize("name", CHEATS)
def test_every_cheat_is_found_where_it_touched_and_its_other_segments_are_accepted(name):
    """With the library's own tolerance, by an auditor that sums in another order."""
    cheat = CHEATS[name]
    made = Round(cheat.take)
    for segment, cut in enumerate(segments(made.assignment, 20)):
        verdict = made.audited(segment, replica_of(pieces=2))
        assert isinstance(verdict, ReplayMismatch if cheat.touches(*cut) else ReplayAccepted), (segment, verdict)
        assert verdict.tolerance == TOLERANCE


def test_what_moves_less_than_the_tolerance_is_not_seen():
    """The price of a tolerance, which the rule that combines updates has to bear."""
    made = Round(at_each_boundary(poison(0.5 * TOLERANCE)))
    assert [type(made.audited(segment)) for segment in range(4)] == [ReplayAccepted] * 4


def test_one_skipped_step_is_found_in_its_segment_and_nowhere_else():
    """Later segments follow honestly from what the cheat left, so a look at the round's end alone sees nothing."""
    cheated = Round(skips(7))
    assert cheated.verdicts() == [ReplayAccepted, ReplayMismatch, ReplayAccepted, ReplayAccepted]
    verdict = cheated.audited(1)
    assert verdict.distance > 5 * verdict.tolerance > 0.0


def test_the_assigned_batches_in_another_order_are_found():
    """The same data in all, each pair of batches swapped."""

    def swapped(replica: ReplayReplica, assignment: TrainingAssignment, step: int) -> None:
        replica.step(replica.samples(assignment, step ^ 1), assignment.global_step + step)

    assert Round(swapped).verdicts() == [ReplayMismatch] * 4


def test_a_chain_over_other_positions_than_the_assigned_ones_is_wrong():
    """A trainer that chose its own data and says so in its chain trained something else."""
    begin = begun()
    chosen = replace(assigned(begin), cursor=4000)
    made = Round(begin=begin, assignment=chosen)
    assert made.verdicts() == [ReplayAccepted] * 4  # by its own account
    assert isinstance(made.audited(0, assignment=assigned(begin)), ExhibitHashMismatch)


def test_moments_that_lie_are_found_although_x_is_right():
    """Halved squares make the next segment's steps larger, by its committed state rightly so."""

    def take(replica: ReplayReplica, assignment: TrainingAssignment, step: int) -> None:
        honest(replica, assignment, step)
        if step == 9:
            replica.inner.second_P.mul_(0.5)

    verdicts = Round(take).verdicts()
    assert verdicts == [ReplayAccepted, ReplayMismatch, ReplayAccepted, ReplayAccepted]
    assert Round(take).audited(1).what == "second moments"


def test_a_count_that_lies_is_found_although_all_values_are_right():
    """AdamW's first steps are larger by their count: a wrong one is a step of its own choice later on."""

    def take(replica: ReplayReplica, assignment: TrainingAssignment, step: int) -> None:
        honest(replica, assignment, step)
        if step == 9:
            replica.inner.steps = 1

    made = Round(take)
    assert made.verdicts() == [ReplayAccepted, ReplayMismatch, ReplayAccepted, ReplayAccepted]
    assert made.audited(1).what == "counters"


def test_states_that_are_not_in_the_chain_are_refused():
    """A peer that did not train could show a begin and an end that follow from each other, or the auditor's own."""
    lazy, good = Round(skips(7)), honest_round()
    assert isinstance(lazy.audited(1), ReplayMismatch)
    assert isinstance(lazy.audited(1, begin=good.record.kept[1], end=good.record.kept[2]), ExhibitHashMismatch)
    assert isinstance(lazy.audited(2, begin=good.record.kept[2]), ExhibitHashMismatch)
    assert isinstance(good.audited(1, begin=good.record.kept[0], end=good.record.kept[1]), ExhibitHashMismatch)
    links = [*good.record.links[:2], ChainLink(digest(b"x"), digest(b"y")), *good.record.links[3:]]
    assert isinstance(good.audited(1, links=links), ExhibitHashMismatch)
    assert isinstance(good.audited(1, links=good.record.links[:-1]), ExhibitHashMismatch)


def test_a_round_starts_from_the_agreed_anchor_and_the_moments_it_ended_with():
    """A stale anchor needs no replay, nor do moments out of nowhere; fresh ones are what a crash leaves."""
    begin = begun()
    later = honest_round().record.kept[4]
    stale = TrainerSnapshot(later.x_F, begin.counters_K, begin.inner)
    made = Round(begin=stale, assignment=assigned(begin))
    assert "agreed" in made.audited(0).why
    odd = TrainerSnapshot(begin.x_F, begin.counters_K, later.inner)
    assert "moments" in Round(begin=odd, assignment=assigned(begin)).audited(0).why
    carried = replace(assigned(begin), carried=name_of(later).private)
    assert isinstance(Round(begin=odd, assignment=carried).audited(0), ReplayAccepted)
    assert isinstance(Round(begin=begin, assignment=carried).audited(0), ReplayAccepted)
    assert fresh_private(LAYOUT) == name_of(begin).private


def told_of(steps: int) -> Round:
    """Twenty steps were assigned, `steps` taken, and the chain reports them."""
    other = Round(assignment=replace(assigned(), steps=steps))
    made = Round()
    made.record = StateChain(assigned(), other.begin, keep_every=1)
    for boundary, (_, end) in enumerate(segments(other.assignment, steps)):
        made.record.note(other.record.kept[boundary + 1], end)
    made.claim = replace(made.claim, head=made.record.head, steps=steps)
    return made


def test_more_steps_than_assigned_are_refused_and_fewer_are_a_slow_trainer():
    """Seventeen steps of twenty: the last segment has two."""
    assert segments(assigned(), 17)[-1] == (15, 17)
    assert told_of(17).verdicts() == [ReplayAccepted] * 4
    assert "25 steps are claimed" in told_of(25).audited(4).why


# ---- comparing ---------------------------------------------------------------------------------------------


def nudged(take_at: int) -> Take:
    """Honest except for the last bit of one value."""

    def take(replica: ReplayReplica, assignment: TrainingAssignment, step: int) -> None:
        honest(replica, assignment, step)
        if step == take_at:
            replica.x_F[100:101] = torch.nextafter(replica.x_F[100:101], torch.tensor(9.0))

    return take


def test_inside_the_pinned_profile_bits_are_compared():
    """One bit of one value passes between different machines and not between two that promise the same bits."""
    made = Round(nudged(4))
    assert isinstance(made.audited(0), ReplayAccepted)
    made.claim = replace(made.claim, profile=PINNED)
    verdict = made.audited(0, here=PINNED)
    assert isinstance(verdict, ReplayMismatch) and verdict.tolerance == 0.0 < verdict.distance < 1e-6
    assert isinstance(made.audited(0, here=PINNED, end=None), ReplayMismatch)
    assert isinstance(made.audited(0, here=replace(PINNED, threads=2)), ReplayAccepted)
    assert isinstance(made.audited(0, here=replace(PINNED, torch="2.12")), ReplayAccepted)


def test_what_is_not_a_number_is_never_near():
    """Comparisons with NaN are false both ways; a state that holds one is refused before that."""
    made = honest_round()
    begin, end = made.record.kept[0], made.record.kept[1]
    nan = TrainerSnapshot(end.x_F * float("nan"), end.counters_K, end.inner)
    assert furthest(begin, end, nan) == ("x", float("inf"))
    assert furthest(begin, nan, end) == ("x", float("inf"))
    broken = StateChain(made.assignment, begin, keep_every=1)
    broken.note(nan, 5)
    for boundary, at in ((2, 10), (3, 15), (4, 20)):
        broken.note(made.record.kept[boundary], at)
    claim = replace(made.claim, head=broken.head)
    assert "finite" in made.audited(0, claim=claim, links=broken.links, end=nan).why


def test_a_distance_is_measured_by_what_the_auditor_computed():
    """A claimed step a thousand times too long does not make its own error look small."""
    made = honest_round()
    begin, end = made.record.kept[0], made.record.kept[1]
    far = TrainerSnapshot(begin.x_F + 1000 * (end.x_F - begin.x_F), end.counters_K, end.inner)
    assert furthest(begin, end, far)[1] == pytest.approx(999, rel=1e-3)
    still = TrainerSnapshot(begin.x_F, end.counters_K, end.inner)
    assert furthest(begin, end, still)[1] == pytest.approx(1.0)


# ---- what cannot be audited --------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [{"device": "cuda"}, {"precision": "bf16"}, {"compiled": True}])
def test_a_claim_that_nobody_could_replay_is_wrong_of_a_member_that_is_not_unaudited(said: dict[str, Any]):
    """Members say on what they train before their updates weigh anything: afterwards such a claim is a way out of
    audits."""
    made = honest_round()
    verdict = made.audited(0, claim=replace(made.claim, profile=replace(profile_here(), **said)))
    assert isinstance(verdict, ExhibitHashMismatch) and "cannot be replayed" in verdict.why


def test_what_cannot_be_replayed_is_said_by_name():
    made = honest_round()
    mine = made.assignment
    overlapping = replace(RECIPE, schedule=replace(RECIPE.schedule, overlap=4))
    cases = {
        "attached": {"assignment": replace(mine, recipe=replace(RECIPE, model="attached"))},
        "never leaves": {"assignment": replace(mine, data=ZERO_DIGEST)},
        "with overlap": {"assignment": replace(mine, recipe=overlapping)},
        "own": {"assignment": replace(mine, recipe=replace(RECIPE, merge="delta"))},
        "no tolerance tells noise from a lie for resnet18 under AdamW": {
            "assignment": replace(mine, recipe=replace(RECIPE, model="resnet18-mnist"))
        },
        "segments of 40": {"assignment": replace(mine, segment_steps=40)},
        "holds other data": {"auditor": ReplayReplica(RECIPE, DATA, digest(b"other"))},
    }
    for words, asked in cases.items():
        verdict = made.audited(0, **asked)
        assert isinstance(verdict, ReplayImpossible) and words in verdict.why, (words, verdict)


def test_a_run_may_bring_its_own_tolerance_for_what_nobody_measured():
    """Gradient descent is in no table of ours."""
    begin, recipe = begun(), replace(RECIPE, inner=SGD())
    assignment = replace(assigned(begin), recipe=recipe)
    assert isinstance(honest_round().audited(0, assignment=assignment), ReplayImpossible)
    trainer = replica_of(recipe)
    record = StateChain(assignment, begin, keep_every=1)
    state = begin
    for first, end in segments(assignment, 20):
        state = trainer.replay(assignment, state, first, end)
        record.note(state, end)
    claim = ChainClaim(record.head, 20, ZERO_DIGEST, profile_here())
    ask = (assignment, claim, record.links, 1, record.kept[1], record.kept[2], replica_of(recipe, pieces=2))
    assert isinstance(judge_segment(*ask, tolerance=1e-4), ReplayAccepted)
    assert isinstance(judge_segment(*ask, tolerance=1e-12), ReplayMismatch)


# ---- the trainer's record ----------------------------------------------------------------------------------


def test_any_state_is_made_anew_from_the_nearest_kept_one():
    """Every third is kept, and the newest; what is shown has the name that was committed to."""
    made = honest_round()
    record = StateChain(made.assignment, made.begin, keep_every=3)
    for boundary, (_, end) in enumerate(segments(made.assignment, 20)):
        record.note(made.record.kept[boundary + 1], end)
    assert sorted(record.kept) == [0, 3, 4] and record.head == made.record.head
    assert [name_of(record.state_at(b, replica_of())) for b in range(5)] == record.links
    assert [record.retaken_steps(segment) for segment in range(4)] == [5, 10, 10, 0]


def test_a_trainer_that_cannot_repeat_itself_says_so_and_shows_nothing():
    """Here the settings changed: it trained with whole batches and repeats with halves."""
    record = StateChain(honest_round().assignment, honest_round().begin)
    for boundary, (_, end) in enumerate(segments(record.assignment, 20)):
        record.note(honest_round().record.kept[boundary + 1], end)
    with pytest.raises(RunFailedError, match=r"E-AUD-01.*boundary 2 of round 1"):
        record.state_at(2, replica_of(pieces=2))


def test_the_head_depends_on_every_link_and_on_all_that_was_assigned():
    made = honest_round()
    heads = {made.record.head}
    for index in range(5):
        for wrong in (
            ChainLink(digest(b"x"), made.record.links[index].private),
            ChainLink(ZERO_DIGEST, ZERO_DIGEST),
        ):
            links = list(made.record.links)
            links[index] = wrong
            heads.add(chain_head(made.assignment, 20, links))
    changes = ({"cursor": 84}, {"shard": 0}, {"global_step": 21}, {"round": 2}, {"run": b"other"}, {"shards": 4})
    changes += ({"peer": PeerId("bob")}, {"steps": 21}, {"anchor": digest(b"x")}, {"data": digest(b"y")})
    changes += ({"recipe": replace(RECIPE, batch=8)}, {"recipe": replace(RECIPE, inner=AdamW(lr=1e-3))})
    heads |= {chain_head(replace(made.assignment, **change), 20, made.record.links) for change in changes}
    assert len(heads) == 1 + 10 + len(changes)


def test_a_state_travels_as_bytes_and_nothing_else_is_taken_for_one():
    live = honest_round().record.kept[2]
    data = live_bytes(live)
    assert name_of(live_from_bytes(data, LAYOUT)) == name_of(live)
    for wrong in (data[:-4], b"", data.replace(b"atoll/audit/live/1", b"atoll/audit/live/2")):
        with pytest.raises(PeerFault):
            live_from_bytes(wrong, LAYOUT)
    infinite = TrainerSnapshot(live.x_F / 0.0, live.counters_K, live.inner)
    with pytest.raises(PeerFault, match="not finite"):
        live_from_bytes(live_bytes(infinite), LAYOUT)
    with pytest.raises(PeerFault, match="expected"):
        live_from_bytes(data, layout_of(build_model("gpt-tiny", 0)))


def test_batches_are_not_cut_where_the_model_sees_them_whole():
    with pytest.raises(ValueError, match="pieces must be 1"):
        ReplayReplica(replace(RECIPE, model="resnet18:w=8,i=1"), DATA, DATA_NAME, pieces=2)
