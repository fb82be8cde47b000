"""What every recipe relies on: the loop itself, its bytes, and what is lost on the way."""

import math

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from toy import DATA, PARAMETERS, begun, model, short, tried

import atoll
from atoll.base.errors import UsageError
from atoll.training.codec.two_bit import TWO_BIT
from atoll.training.data import TextDataset, batch, epoch_samples
from atoll.training.exchange.layout import bind, layout_of
from atoll.training.experiment.api import ExperimentSimulator, FaultSpec, MemberAbsence
from atoll.training.experiment.client_draw import ClientSampler
from atoll.training.models import loss_of
from atoll.training.recipe.inner import AdamW, fresh_inner, inner_step
from atoll.training.recipe.methods import METHODS, data_parallel, diloco, fedavg, local_sgd, sparseloco, streaming
from atoll.training.recipe.recipes import Recipe, check_recipe


def test_synchronous_data_parallelism_through_the_loop_is_torchs_adamw_on_the_joined_batch():
    """Twenty-five steps of four workers beside torch.optim.AdamW on the same samples in one batch, clipped, too."""
    recipe = data_parallel(rounds=25, lr=4e-3)
    flat = AdamW(lr=4e-3, warmup_steps=0, floor=1.0, total_steps=25)
    recipe = replace(recipe, outer=flat)
    run = begun(recipe)
    run.recipe = replace(run.recipe, outer=flat)
    theirs = model()
    adamw = torch.optim.AdamW(theirs.parameters(), lr=4e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(25):
        run.step()
        shards = [batch(DATA, shard, 4, step * 4, 4, 16, 0) for shard in range(4)]
        joined = tuple(torch.cat(pieces) for pieces in zip(*shards, strict=True))
        adamw.zero_grad()
        loss_of(theirs, joined).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adamw.step()
    expected = torch.cat([p.detach().reshape(-1) for p in theirs.parameters()])
    moved = (run.agreed() - torch.cat([p.detach().reshape(-1) for p in model().parameters()])).abs().max()
    assert float((run.agreed() - expected).abs().max()) < 1e-4 * float(moved)


def test_one_round_of_local_sgd_is_the_mean_of_workers_that_trained_alone():
    recipe = short(local_sgd(rounds=1, inner_steps=6))
    alone = []
    for shard in range(3):
        one = model()
        layout = layout_of(one)
        x, gradient = bind(one, layout)
        state = fresh_inner(layout.parameters)
        for step in range(6):
            gradient.zero_()
            loss_of(one, batch(DATA, shard, 3, 4 * step, 4, 16, 0)).backward()
            inner_step(recipe.inner, state, x, gradient, step)
        alone.append(x)
    done = tried(recipe, peers=3)
    assert torch.allclose(done.model_F, torch.stack(alone).mean(0), atol=1e-6)


def test_the_same_recipe_gives_the_same_bits_again():
    recipe = streaming(rounds=3, inner_steps=20)
    first, second = tried(recipe), tried(recipe)
    assert torch.equal(first.model_F, second.model_F) and first.history == second.history


def test_bytes_are_those_of_the_plan_copy_by_copy():
    """Four members, 4 424 values in 2 bits: three quarters of a row go out, one answer's part to three others."""
    wire = TWO_BIT.wire_bytes(PARAMETERS)
    done = tried(diloco(rounds=2, inner_steps=5, up="2bit", down="2bit"))
    assert done.upload_bytes == done.download_bytes == pytest.approx(2 * 2 * wire * 3 / 4, abs=1)
    ring = 2 * 3 / 4 * 4 * PARAMETERS * 10
    assert done.upload_ratio == ring / done.upload_bytes
    gathered = tried(sparseloco(rounds=2, inner_steps=5, codec="2bit"))
    assert gathered.upload_bytes == 2 * 3 * wire
    assert tried(data_parallel(rounds=5)).upload_ratio == 1.0


def test_what_does_not_arrive_stays_in_error_feedback():
    """Every update of a round is lost: the model stays where it was, and the next round brings both spans' work."""
    run = begun(diloco(rounds=2, inner_steps=10, up="fp32", down="fp32", outer_momentum=0.0))
    before = run.agreed().clone()
    run.trouble = FaultSpec(lost=1.0)
    while not (done := run.step()):
        trained = [worker.x_F.clone() for worker in run.workers]
    assert done[0].counted == () and torch.equal(run.agreed(), before)
    held = [worker.memory_F.clone() for worker in run.workers]
    assert all(float(row.norm()) > 0.9 * float((before - x).norm()) for row, x in zip(held, trained, strict=True))
    run.trouble = FaultSpec()
    own = [before - worker.x_F for worker in run.workers]
    assert all(not row.any() for row in own), "everybody started again from the model as it was"
    while not run.step():
        trained = [worker.x_F.clone() for worker in run.workers]
    assert all(not worker.memory_F.any() for worker in run.workers), "fp32 leaves nothing out"
    both = torch.stack([m + before - x for m, x in zip(held, trained, strict=True)]).mean(0)
    moved = before - run.agreed()
    assert float((moved - both).norm()) < 0.2 * float(moved.norm()), "but for the very last step"


def test_a_quarter_of_all_updates_lost_costs_little():
    recipe = diloco(rounds=8, inner_steps=8)
    calm, stormy = tried(recipe), tried(recipe, trouble=FaultSpec(lost=0.25))
    assert sum(len(one.counted) for one in stormy.history) < 32
    assert stormy.val_loss < calm.val_loss * 1.05
    assert stormy.upload_bytes == calm.upload_bytes, "what is lost was sent all the same"


def test_peers_vanish_and_come_back_and_the_others_go_on():
    away = FaultSpec(absent=(MemberAbsence(1, 10), MemberAbsence(2, 20, 40)))
    done = tried(diloco(rounds=6, inner_steps=10), trouble=away)
    assert [one.members for one in done.history] == [
        (0, 1, 2, 3),
        (0, 2, 3),
        (0, 3),
        (0, 3),
        (0, 2, 3),
        (0, 2, 3),
    ]
    assert done.val_loss < 4.0


def test_members_with_data_of_their_own_learn_from_all_of_it_and_share_none():
    """A letter that only the second member's text holds: the agreed model learns it, no other trains on it."""
    half = len(DATA.train) // 2
    plain, strange = DATA.train[:half], np.where(DATA.train[half:] == 3, 200, DATA.train[half:])
    own = [TextDataset(part.astype(np.uint8), DATA.validation) for part in (plain, strange)]
    recipe = short(local_sgd(rounds=3, inner_steps=20))
    run = ExperimentSimulator(recipe, model(), own, 2, 60, FaultSpec(), loss_of)
    run.run_to_end(0, 64, None)
    learned = [two_hundred(run.workers[peer].x_F) for peer in range(2)]
    alone = ExperimentSimulator(recipe, model(), own[:1], 1, 60, FaultSpec(), loss_of)
    alone.run_to_end(0, 64, None)
    assert min(learned) > two_hundred(alone.workers[0].x_F) + 0.1
    shared = ExperimentSimulator(recipe, model(), [own[0], own[0]], 2, 60, FaultSpec(), loss_of).run_to_end(
        0, 64, None
    )
    assert torch.equal(shared.model_F, alone.agreed())  # two of the same data are one of them
    listed, paired = (atoll.experiment(recipe, model(), data, peers=2, samples=64) for data in (own, tuple(own)))
    assert torch.equal(listed.model_F, paired.model_F)  # any sequence
    with pytest.raises(ValueError, match="3 peers need 3 data sets of their own, not 2"):
        atoll.experiment(recipe, model(), own, peers=3)


@pytest.mark.parametrize(
    ("recipe", "data", "says"),
    [
        (diloco, "stdlib", "what a method of atoll.training.recipe.methods returns"),
        (diloco(), 3, "'stdlib', a path, a TextDataset or ImageDataset"),
        (diloco(), ["stdlib", "no-such-file"], "no data at no-such-file"),
    ],
)
def test_a_slip_in_what_an_experiment_is_asked_for_is_named(recipe: object, data: object, says: str):
    with pytest.raises((atoll.UsageError, ValueError), match=says):
        atoll.experiment(recipe, data=data, peers=2)


def two_hundred(x_F: torch.Tensor) -> float:
    """How much likelier than before training the strange letter is where it belongs: the bias of its score."""
    return float(x_F[: sum(p.numel() for p in model().parameters())][-256:][200])


def test_who_comes_back_while_a_fragment_is_under_way_takes_it_in():
    """Peer 1 returns between sending and applying: it ends where the others are, plus its own steps."""
    run = begun(
        streaming(rounds=2, inner_steps=20, overlap=4, fragments=1),
        trouble=FaultSpec(absent=(MemberAbsence(1, 5, 22),)),
    )
    while run.now < 24:
        run.step()
    away, own = (float((run.workers[peer].x_F - run.agreed()).norm()) for peer in (1, 0))
    assert away < own, "it took two steps since, the others four"


def test_slow_peers_weigh_less_because_they_saw_less():
    """One of two workers stands still: the mean is the other's alone."""
    recipe = local_sgd(rounds=1, inner_steps=8)
    both, first = tried(recipe, peers=2, trouble=FaultSpec(speeds=(1.0, 0.1))), begun(recipe, peers=2)
    for _ in range(8):
        first.workers[0].train(first.recipe, (DATA, 0, 2), first.now)
        first.now += 1
    assert torch.allclose(both.model_F, first.workers[0].x_F, atol=1e-6)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_travels_as_plain_values_and_learns(name):
    """From 5.7 nats per byte to below 5.3 in 36 steps; the sparse ones have hardly begun by then."""
    recipe = METHODS[name]()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(recipe), type=Recipe) == recipe
    longer = replace(recipe, schedule=replace(recipe.schedule, inner_steps=min(recipe.schedule.inner_steps, 24)))
    assert tried(longer, steps=36, peers=3).val_loss < (
        5.67 if name in ("sparseloco", "demo_", "halos", "pipelined") else 5.3
    )


def test_it_is_found_where_it_is_promised():
    done = atoll.experiment(diloco("gpt-nano", rounds=1, inner_steps=2), data=DATA, peers=2, samples=8)
    assert done.rounds == 1 and len(done.model_F) == 21_504


def test_a_model_that_reads_less_than_the_recipe_says_gets_shorter_samples():
    """diloco()'s samples of 64 tokens ended in an error of torch from the inside of gpt-nano, which reads 32."""
    done = atoll.experiment(diloco(rounds=1, inner_steps=1), "gpt-nano", DATA, peers=2, samples=8)
    assert done.rounds == 1 and math.isfinite(done.val_loss)


def test_progress_is_told_round_by_round():
    seen = []
    done = tried(diloco(rounds=3, inner_steps=4), progress=seen.append, evaluate_every=4)
    assert tuple(seen) == done.history and [one.step for one in seen] == [4, 8, 12]
    assert [step for step, _ in done.curve] == [4, 8, 12]
    assert done.history[0].train_loss > done.history[-1].train_loss


def test_pieces_that_do_not_fit_are_refused_in_words():
    whole = diloco()
    for wrong, words in (
        (replace(whole, reducer=replace(whole.reducer, group="pair")), "Gossip"),
        (replace(whole, schedule=replace(whole.schedule, fragments=4, overlap=50)), "more than 50 steps"),
        (replace(data_parallel(), merge="delta"), "merge='replace'"),
        (replace(whole, coding=replace(whole.coding, down="int8+zstd")), "cannot encode results"),
    ):
        with pytest.raises(ValueError, match=words):
            check_recipe(wrong)
    with pytest.raises(ValueError, match="at least 3 peers"):
        tried(METHODS["cooperative"](), peers=2)
    with pytest.raises(ValueError, match="one entry for each of 4"):
        tried(whole, trouble=FaultSpec(speeds=(1.0, 0.5)))
    with pytest.raises(ValueError, match="diverged"):
        tried(diloco(rounds=40, inner_steps=2, outer_lr=1e30))


def clients(counts: list[int]) -> list[TextDataset]:
    """`counts` windows of 16 per member, the same held-out text for all."""
    return [TextDataset(DATA.train[: 16 * n + 1], DATA.validation) for n in counts]


def test_of_members_with_data_of_their_own_those_that_are_drawn_train_a_pass_each():
    """Six members, three per round, two of them one group: even turns, whole passes, samples as weights."""
    recipe = short(replace(fedavg(rounds=20, inner_steps=12, epochs=1), batch=4))
    data = clients([8, 12, 16, 20, 24, 400])
    groups = ["a", "a", "b", "c", "d", "e"]
    run = ExperimentSimulator(recipe, model(), data, 6, 240, FaultSpec(), loss_of)
    run.clients = ClientSampler(6, 3, groups)
    turns = dict.fromkeys(groups, 0)
    for _ in range(20):
        for _ in range(11):
            run.step()
        taken = [run.workers[p].steps[0] for p in range(6)]
        drawn = run.clients.drawn
        whole = [min(-(-epoch_samples(one, 16) // 4), 11) for one in data]  # the longest is not done yet
        assert taken == [whole[p] if p in drawn else 0 for p in range(6)]
        assert all(torch.equal(run.workers[p].x_F, run.anchors[0]) for p in range(6) if p not in drawn)
        assert [run._weight(p, 0) for p in drawn] == [4 * run.workers[p].steps[0] for p in drawn]
        (one,) = run.step()
        assert one.counted == tuple(drawn) and len(drawn) == 3
        for p in drawn:
            turns[groups[p]] += 1
        assert max(turns.values()) - min(turns.values()) <= 1


def test_a_sample_of_everybody_is_nobody_left_out_to_the_bit():
    recipe = short(fedavg(rounds=3, inner_steps=4))
    assert torch.equal(tried(recipe).model_F, tried(recipe, sample=1.0).model_F)


@pytest.mark.parametrize(
    ("recipe", "more", "says"),
    [
        (short(fedavg()), {"sample": 1.5}, "share"),
        (short(fedavg()), {"sample": 9}, "1 … 4"),
        (short(fedavg()), {"groups": ["a"] * 4}, "sampled"),
        (short(fedavg()), {"sample": 2, "groups": ["a"]}, "each of 4"),
        (short(streaming()), {"sample": 2}, "fragments"),
        (short(METHODS["noloco"]()), {"sample": 2}, "anchors of their own"),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_words(recipe: Recipe, more: dict, says: str):
    with pytest.raises(ValueError, match=says):
        tried(recipe, **more)


def test_outcomes_are_drawn_side_by_side_under_their_names(tmp_path):
    """In an SVG with readable words; a missing folder is named in the error."""
    done = tried(diloco(rounds=2, inner_steps=2))
    done.plot(tmp_path / "two.svg", "plain averages", momentum=done)
    drawn = (tmp_path / "two.svg").read_text()
    assert all(word in drawn for word in ("plain averages", "momentum", "MB sent per peer"))
    done.plot(tmp_path / "own.svg")
    assert ">diloco<" in (tmp_path / "own.svg").read_text()
    with pytest.raises(UsageError, match="cannot write"):
        done.plot(tmp_path / "nowhere" / "a.png")
