"""Every method does what its paper says it does: a test fails when the step that defines it is removed."""

from dataclasses import replace as changed
from itertools import pairwise

import pytest
import torch
from msgspec.structs import replace
from toy import DATA, PARAMETERS, begun, model, tried

from atoll.training.codec.chain import check_codec_name
from atoll.training.codec.fp32 import FP32
from atoll.training.exchange.layout import layout_of
from atoll.training.experiment.api import (
    ExperimentOptions,
    ExperimentSimulator,
    FaultSpec,
    MemberAbsence,
    experiment,
)
from atoll.training.experiment.two_level import RegionServers
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.inner import AdamW, Muon, fresh_inner, inner_step, lasting, matrices_of, orthogonalize
from atoll.training.recipe.methods import (
    auto,
    cooperative,
    data_parallel,
    decoupled,
    delayed_nesterov,
    demo_,
    des_loc,
    diloco,
    eager,
    fedavg,
    halos,
    intellect1,
    local_sgd,
    muloco,
    noloco,
    opendiloco,
    parameter_server,
    pipelined,
    powersgd,
    sparseloco,
    sparta,
    streaming,
)
from atoll.training.recipe.outer import (
    AgreementNesterov,
    DelayedNesterov,
    Nesterov,
    OuterStepInputs,
    RegionalNesterov,
    SignOuter,
    fresh_outer,
    momentum_at,
    move,
    outer_step,
)
from atoll.training.recipe.recipes import UpdateCoding, check_recipe, for_real_run
from atoll.training.recipe.reducer import ReductionSettings, agreement, arrived, scales_of, support_mean, weight_of
from atoll.training.recipe.schedule import (
    SyncSchedule,
    SyncSchedulePhase,
    check_schedule,
    due,
    fragments_of,
    parse_phases,
    phase_at,
)


def rows(*values: list[float]) -> list[tuple[int, bytes]]:
    return [(1, FP32.encode(torch.tensor(one))) for one in values]


def spread(run) -> float:
    """How far members' anchors are apart."""
    return float((torch.stack(run.anchors) - torch.stack(run.anchors).mean(0)).norm())


# ---- schedules: streaming ------------------------------------------------------------------------------------


def test_fragments_take_turns_and_all_close_the_run():
    schedule = SyncSchedule(inner_steps=32, rounds=3, fragments=4)
    sent = {step: due(schedule, step, 80) for step in range(1, 81) if due(schedule, step, 80)}
    assert sent == {
        **{8: (1,), 16: (2,), 24: (3,), 32: (0,), 40: (1,), 48: (2,), 56: (3,), 64: (0,)},
        **{72: (1,), 80: (0, 1, 2, 3)},
    }


def test_the_rhythm_changes_where_a_phase_begins():
    schedule = SyncSchedule(
        inner_steps=20, rounds=5, phases=(SyncSchedulePhase(0.5, 10, "int8", "int8"), SyncSchedulePhase(0.9, 2))
    )
    assert [step for step in range(1, 101) if due(schedule, step, 100)] == [
        *(20, 40, 60, 70, 80, 90),
        *(92, 94, 96, 98, 100),
    ]
    assert phase_at(schedule, 60, 100)[1].up == "int8"


def test_fragments_are_whole_tensors_of_about_one_size():
    layout = layout_of(build_model("gpt-tiny", 0))
    bounds = fragments_of(layout, 4)
    ends = {slot.at + slot.size for slot in layout.slots}
    assert all(hi in ends for _, hi in bounds) and bounds[0][0] == 0 and bounds[-1][1] == layout.floats
    assert max(hi - lo for lo, hi in bounds) < 1.3 * layout.floats / 4
    with pytest.raises(ValueError, match="cannot be cut"):
        fragments_of(layout, 99)


@pytest.mark.parametrize("method", [streaming, muloco], ids=["streaming", "muloco"])
def test_overlap_keeps_the_steps_taken_while_a_fragment_is_under_way(method):
    """One worker that averages alone, in fp32: with the delta merge it is as if it had trained alone."""
    alone = dict(outer_momentum=0.0, up="fp32", down="fp32")
    overlapped = method(rounds=4, inner_steps=20, fragments=4, overlap=4, **alone)
    plain = tried(method(rounds=1, inner_steps=80, fragments=1, overlap=0, **alone), peers=1)
    assert torch.allclose(tried(overlapped, peers=1).model_F, plain.model_F, atol=1e-5)
    late = replace(overlapped, merge="replace")
    assert not torch.allclose(tried(late, peers=1).model_F, plain.model_F, atol=1e-3)


def test_a_fragment_is_applied_so_many_steps_after_it_was_sent():
    run = begun(streaming(rounds=2, inner_steps=20, overlap=3))
    before = run.agreed().clone()
    lo, hi = run.fragments[1]
    changed = []
    for _ in range(9):
        run.step()
        changed.append(not torch.equal(run.agreed()[lo:hi], before[lo:hi]))
    assert changed == [False] * 7 + [True] * 2, "sent after step 5, applied after step 8"


def test_decoupled_as_published_has_several_fragments_under_way_at_once():
    """One of 24 sent after every step, applied two steps later: two are on their way, and all have their turn."""
    deep = "gpt:d=8,l=6,h=2,t=16"
    recipe = decoupled(deep, rounds=2, fragments=24, batch=1, seq_len=16)
    run = ExperimentSimulator(recipe, build_model(deep, 0), DATA, 4, recipe.schedule.steps, FaultSpec(), loss_of)
    first = run.agreed().clone()
    for step in range(1, 25):
        run.step()
        assert [flight.fragment for flight in run.flights] == [s % 24 for s in range(max(1, step - 1), step + 1)]
    moved = [not torch.equal(run.agreed()[lo:hi], first[lo:hi]) for lo, hi in run.fragments]
    assert [k for k, has in enumerate(moved) if not has] == [0, 23], "those that are under way"


def test_mixing_keeps_a_share_of_ones_own():
    run = begun(streaming(rounds=2, inner_steps=20, fragments=1, overlap=0, mix=0.25))
    while run.now < 20:
        before = [worker.x_F.clone() for worker in run.workers]
        done = run.step()
    assert done
    for worker, x in zip(run.workers, before, strict=True):
        kept = (worker.x_F - run.agreed()).norm() / (x - run.agreed()).norm()
        assert 0.2 < float(kept) < 0.3, "a quarter, but for the last step"


def test_a_closing_average_is_the_mean_of_live_parameters():
    run = begun(streaming(rounds=2, inner_steps=20, closing="fp32"))
    while run.now < run.steps:
        run.step()
    assert torch.allclose(run.agreed(), run.live_F, atol=1e-6)


# ---- outer steps -----------------------------------------------------------------------------------------------


def test_the_outer_rate_falls_in_a_line_and_the_momentum_settles_at_the_end():
    anchor, momentum, update = torch.zeros(1), torch.ones(1), torch.ones(1)
    plain = Nesterov(1.0, 0.5)
    assert outer_step(plain, anchor, momentum, update, 90)[0].item() == -1.75
    falling = Nesterov(1.0, 0.5, floor=0.0, total_steps=100)
    assert outer_step(falling, anchor, momentum, update, 50)[0].item() == -1.75 / 2
    settling = Nesterov(1.0, 0.5, settle=0.2, total_steps=100)
    assert outer_step(settling, anchor, momentum, update, 80)[0].item() == -1.75
    assert outer_step(settling, anchor, momentum, update, 100)[0].item() == -1.0, "plain averaging"


def test_local_sgd_has_no_outer_momentum_and_opendiloco_and_intellect_1_have_their_papers():
    assert local_sgd().outer.momentum == 0.0
    recipe = opendiloco()
    assert (recipe.outer.lr, recipe.outer.momentum, recipe.coding.up) == (0.7, 0.9, "fp16")
    assert recipe.schedule.inner_steps == 500
    recipe = intellect1()
    assert (recipe.outer.lr, recipe.outer.momentum, recipe.schedule.inner_steps) == (0.7, 0.9, 100)
    assert (recipe.coding.up, recipe.coding.down) == ("int8", "int8")


def test_fedavg_steps_along_the_gradient_itself():
    """Twice the gradient, twice the step: AdamW would take the same one."""
    spec = lasting(fedavg().inner, 100)
    moved = []
    for scale in (1e-3, 2e-3):
        x = torch.zeros(3)
        inner_step(spec, fresh_inner(3), x, torch.ones(3) * scale, 50)
        moved.append(x)
    assert torch.allclose(moved[1], 2 * moved[0])


def test_demo_moves_every_parameter_by_its_rate_in_the_direction_of_the_sign():
    run = begun(demo_(rounds=1000, lr=1e-3))
    before = run.agreed().clone()
    run.step()
    moved = (run.agreed() - before).abs()
    rate = 1e-3 / run.recipe.outer.warmup_steps
    assert (
        bool(((moved - rate).abs() < 1e-7).logical_or(moved == 0).all()) and float((moved > 0).float().mean()) > 0.9
    )
    assert outer_step(SignOuter(lr=1.0), torch.zeros(2), torch.zeros(2), torch.tensor([-3.0, 0.1]))[0].tolist() == [
        1,
        -1,
    ]


def test_demo_gathers_in_error_feedback_what_was_too_small_to_send():
    run = begun(demo_(rounds=100, codec="dct+topk:0.01+fp16"))
    run.step()
    worker = run.workers[0]
    assert float(worker.memory_F.norm() / (worker.memory_F + worker.inner.first_P).norm()) > 0.2
    assert float(worker.memory_F.norm()) > 0 and run.recipe.coding.beta == 0.999


def test_delayed_nesterov_feels_its_momentum_with_every_fourth_update_only():
    outer = DelayedNesterov(lr=1.0, momentum=0.5, every=4)
    state, anchor, at = fresh_outer(outer, 1), torch.zeros(1), []
    for _ in range(8):
        anchor, state = move(outer, state, anchor, torch.ones(1), OuterStepInputs(0))
        at.append(anchor.item())
    # a quarter each; then the mean of four times 0.5; at the second renewal m = 0.5 * 1 + 1
    assert at == [-0.25, -0.5, -0.75, -1.5, -1.75, -2.0, -2.25, -3.25]


def test_in_rounds_an_update_counts_by_the_tokens_behind_it_and_the_momentum_is_renewed_by_them():
    """Four times 10 tokens renew it: half a round moves half as far, and two of these are felt like a whole one."""
    outer = DelayedNesterov(lr=1.0, momentum=0.5, every=40)
    state, anchor, at = fresh_outer(outer, 1), torch.zeros(1), []
    for tokens in (20, 20, 40, 30, 10, 400):
        anchor, state = move(outer, state, anchor, torch.ones(1), OuterStepInputs(0, learned=tokens))
        at.append(anchor.item())
    assert at == [-0.5, -1.5, -3.25, -4.0, -5.125, -7.0625], "of ten times as many members no more than the mean"
    recipe = for_real_run(delayed_nesterov(rounds=2, inner_steps=6, batch=4, seq_len=16))
    assert recipe.outer.every == 4 * 6 * 4 * 16 and recipe.reducer == ReductionSettings(quorum=1)


def test_asynchronous_workers_wait_for_nobody_and_the_slow_take_fewer_steps():
    speeds = FaultSpec(speeds=(1.0, 1.0, 1.0, 0.5))
    run = begun(delayed_nesterov(rounds=6, inner_steps=20), trouble=speeds)
    done = [one for _ in range(100) for one in run.step()]
    assert {one.members for one in done} == {(0,), (1,), (2,), (3,)}
    slow = [one.step for one in done if one.members == (3,)]
    assert all(19 <= later - earlier <= 21 for earlier, later in pairwise(slow[1:])), "ten steps"


def test_a_region_goes_up_after_so_many_updates_and_takes_over_a_share_of_what_is_above():
    plain = DelayedNesterov(lr=1.0, momentum=0.0, every=1)
    regions = RegionServers(RegionalNesterov(plain, plain, regions=2, every=2, pull=0.25), torch.zeros(1), 1)
    here, there = torch.zeros(1), torch.zeros(1)
    assert not regions.add_update(0, here.sub_(1), 0)
    assert regions.add_update(0, here.sub_(1), 0)
    assert (regions.anchor_F.item(), here.item()) == (-2, -2)
    assert not regions.add_update(1, there.sub_(4), 0)
    assert regions.add_update(1, there.sub_(4), 0)
    assert (regions.anchor_F.item(), there.item()) == (-10, -8.5), "three quarters of -8, a quarter of -10"
    assert not regions.add_update(0, here, 0, last=True), "it has nothing new"
    assert not regions.add_update(0, here.sub_(1), 0)
    assert regions.add_update(0, here, 0, last=True)
    assert regions.anchor_F.item() == -11, "its own progress since it last went up, and nothing twice"


def test_halos_workers_hear_of_another_region_only_through_the_server_above():
    run = begun(halos(rounds=4, inner_steps=2, every=3))
    before = [run.anchors[1].clone(), run.anchor_set.regions.anchor_F.clone()]
    while run.anchor_set.regions.since[0] < 2:
        run.step()
    assert not torch.equal(run.anchors[0], run.anchors[1])
    assert torch.equal(run.anchor_set.regions.anchor_F, before[1]), "no region has made three updates"
    while run.now < run.steps:
        run.step()
    assert not torch.equal(run.anchor_set.regions.anchor_F, before[1])
    assert run.anchor_set.regions.since == [0, 0], "nothing that a region learned is left out"


# ---- gradients -------------------------------------------------------------------------------------------------


def test_a_parameter_server_is_data_parallelism_through_the_links_of_one_member():
    exact, run = begun(data_parallel(rounds=4)), begun(parameter_server(rounds=4))
    for _ in range(4):
        exact.step()
        run.step()
    assert torch.equal(run.agreed(), exact.agreed())
    sent = run.traffic.sent
    assert sent[1] == sent[2] == sent[3] > 0
    assert sent[0] == 3 * sent[1]
    assert sum(sent) == pytest.approx(sum(exact.traffic.sent), rel=1e-3)


def test_pipelined_gradients_are_applied_three_steps_late_and_none_is_left_out():
    run = begun(pipelined(rounds=8))
    at = [run.agreed().clone()]
    for _ in range(8):
        run.step()
        at.append(run.agreed().clone())
    moved = [not torch.equal(a, b) for a, b in pairwise(at)]
    assert moved == [False, False, False, True, True, True, True, True]
    assert run.anchor_set.outers[0][0].inner.steps == 8
    same = begun(data_parallel(rounds=8))
    same.step()
    first = same.anchor_set.outers[0][0].inner
    again = begun(pipelined(rounds=8))
    for _ in range(4):
        again.step()
    assert torch.equal(again.anchor_set.outers[0][0].inner.first_P, first.first_P), "the first step's own gradient"


# ---- reducers --------------------------------------------------------------------------------------------------


def test_the_radial_mean_gives_a_long_row_no_more_direction_than_a_short_one():
    """Two rows at a right angle, one a hundred times longer: the mean points between them."""
    two, share = torch.tensor([[100.0, 0.0], [0.0, 1.0]]), torch.tensor([0.5, 0.5])
    scale_GT = scales_of("radial", two, share, (2,))
    assert (two * scale_GT).sum(0).tolist() == pytest.approx([25.25, 25.25])


def test_the_clipped_mean_takes_no_row_longer_than_the_median():
    three, share = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-90.0, 0.0]]), torch.full((3,), 1 / 3)
    scale_GT = scales_of("clipped", three, share, (2,))
    assert (three * scale_GT).sum(0).tolist() == pytest.approx([0.0, 1 / 3])


def test_the_support_mean_divides_by_those_who_sent_a_value():
    two, share = torch.tensor([[4.0, 0.0, 2.0], [0.0, 0.0, 4.0]]), torch.tensor([0.5, 0.5])
    assert support_mean(two, share).tolist() == [4.0, 0.0, 3.0]


def test_weights_by_tokens_count_pace_too():
    plain, paced = ReductionSettings(), ReductionSettings(weight="tokens")
    assert weight_of(plain, 8, 512, 2) == 8 and weight_of(paced, 8, 512, 2) == 512 * 512 // 2
    assert weight_of(paced, 0, 0, 0) == 0


def test_a_quorum_and_its_grace_close_a_round():
    two = ReductionSettings(quorum=2, grace=3)
    assert arrived(two, [0, 2, 5, 9], 1) == ([True, True, True, False], 5)
    assert arrived(two, [0, 2, 6, 9], 1) == ([True, True, False, False], 5)
    assert arrived(two, [0, 0, 0, 4], 6) == ([True] * 4, 6), "an overlap waits anyway"
    assert arrived(ReductionSettings(), [0, 2, 5, 9], 1) == ([True] * 4, 9)


def test_decoupled_rounds_do_not_wait_for_a_straggler_and_lose_nothing_of_it():
    run = begun(decoupled(rounds=3), trouble=FaultSpec(late=(0, 0, 1, 50)))
    done = [one for _ in range(30) for one in run.step()]
    assert {one.counted for one in done} == {(0, 1, 2)} and done[0].members == (0, 1, 2, 3)
    held = [float(worker.memory_F.norm()) for worker in run.workers]
    assert held[3] > 3 * max(held[:3]), "its progress waits in error feedback"


def test_updates_that_agree_keep_the_momentum_and_updates_that_do_not_lose_it():
    assert agreement(rows([1.0, 0.0], [2.0, 0.0]), 2, FP32) == pytest.approx(1.0)
    assert agreement(rows([1.0, 0.0], [0.0, 3.0]), 2, FP32) == pytest.approx(0.0)
    assert agreement(rows([1.0, 0.0], [-1.0, 0.0]), 2, FP32) == 0.0
    outer, update = AgreementNesterov(lr=1.0, momentum=0.5), torch.ones(1)
    state = replace_momentum(fresh_outer(outer, 1))
    assert move(outer, state, torch.zeros(1), update, OuterStepInputs(0, 1.0))[0].item() == -1.75
    assert move(outer, state, torch.zeros(1), update, OuterStepInputs(0, 0.0))[0].item() == -1.0


def replace_momentum(state):
    return changed(state, momentum_P=torch.ones(1))


def test_cooperative_workers_keep_a_share_of_their_own_and_want_company():
    """x = alpha x + (1 - alpha) mean: workers end a round apart, at alpha times what they were apart before."""
    run = begun(cooperative(rounds=2, inner_steps=10, alpha=0.5, up="fp32", down="fp32", outer_momentum=0.0))
    while not run.history:
        run.step()
    apart = torch.stack([worker.x_F for worker in run.workers])
    assert torch.allclose(apart.mean(0), run.agreed(), atol=1e-5)
    assert float((apart - run.agreed()).norm()) > 0
    few = begun(cooperative(rounds=2, inner_steps=10), peers=2)
    assert [one for _ in range(20) for one in few.step()] == [], "with two of three members there is no round"


def test_a_cooperative_mean_weighs_members_by_their_records_and_by_those_of_the_accepted_alone():
    """Records of 10, 30, 50 and 10, no momentum: a weighted mean. Without the third the others' shares grow."""
    recipe = cooperative(rounds=2, inner_steps=5, alpha=0.5, up="fp32", down="fp32", outer_momentum=0.0)
    for lost, shares in ((None, (0.1, 0.3, 0.5, 0.1)), (2, (0.2, 0.6, 0.0, 0.2))):
        run = begun(recipe)
        run.records = (10, 30, 50, 10)
        run.trouble = FaultSpec(absent=() if lost is None else (MemberAbsence(lost, 0),))
        while not run.history:
            run.step()
        sent = [2 * worker.x_F - run.agreed() for worker in run.workers]  # x = (sent + mean) / 2
        mean = sum(share * x_F for share, x_F in zip(shares, sent, strict=True))
        assert torch.allclose(run.agreed(), mean, atol=1e-5)
    with pytest.raises(ValueError, match="one number per peer"):
        experiment(recipe, peers=4, options=ExperimentOptions(records=(1, 2)))
    with pytest.raises(ValueError, match="reduce all together"):
        experiment(noloco(rounds=1), peers=4, options=ExperimentOptions(records=(1, 2, 3, 4)))


@pytest.mark.parametrize(
    ("steps", "rounds", "phases"),
    [(6, 4, "0.4:4,0.8:3"), (20, 5, "0.5:10,0.9:2"), (50, 7, "0.33:60,0.5:7"), (8, 4, "0.05:9,0.1:3,0.97:50")],
)
def test_rounds_that_change_their_length_are_those_of_the_steps_at_which_something_is_due(steps, rounds, phases):
    """What is agreed on is counted in rounds, what is trained in steps: both say when a round ends."""
    schedule = SyncSchedule(steps, rounds, phases=parse_phases(phases))
    ends = [step for step in range(1, schedule.steps + 1) if due(schedule, step, schedule.steps)]
    assert [schedule.begun(turn) for turn in range(schedule.turns + 1)] == [0, *ends]


@pytest.mark.parametrize("text", ["0.5:0", "0.5:-4"])
def test_a_phase_of_no_steps_is_refused_as_such(text):
    with pytest.raises(ValueError, match=r"inner_steps \(also of phases\)"):
        check_schedule(SyncSchedule(20, 5, phases=parse_phases(text)))


@pytest.mark.parametrize(
    ("codecs", "up", "down"),
    [
        ("topk:0.1", "topk:0.1", ""),
        ("topk:64/4096+2means:int8+zstd:3", "topk:64/4096+2means", "int8+zstd:3"),
        (":changed:1e-5+2bit", "", "changed:1e-5+2bit"),
        ("lowrank:4:2bit", "lowrank:4", "2bit"),
        ("2bit:2means", "2bit", "2means"),  # names that begin with a digit
    ],
)
def test_codecs_of_a_phase_may_have_numbers_behind_a_colon(codecs: str, up: str, down: str):
    """A colon that ends a codec differs from a colon within a codec's name."""
    assert parse_phases(f"0.8:16,0.9:8:{codecs}") == (
        SyncSchedulePhase(0.8, 16),
        SyncSchedulePhase(0.9, 8, up, down),
    )
    for name in filter(None, (up, down)):
        check_codec_name(name)


@pytest.mark.parametrize("text", ["0.5", "half:8", "0.5:8:int8:int8:int8", "0.5:8:topk:0.1:int8:fp16", "0.5:x"])
def test_what_is_no_phase_is_refused_with_one_that_is(text):
    with pytest.raises(ValueError, match="is no phase"):
        parse_phases(text)


# ---- gossip and eager: anchors of their own ----------------------------------------------------------------------


def test_noloco_members_hear_one_other_only_and_gamma_pulls_their_anchors_together():
    runs = [begun(noloco(rounds=8, inner_steps=5, gamma=gamma)) for gamma in (0.7, 0.0)]
    for run in runs:
        for _ in range(40):
            run.step()
    near, far = map(spread, runs)
    assert 0 < near < 0.8 * far
    assert runs[0].traffic.sent == [8 * (4 + 4) * PARAMETERS] * 4, "one row and one anchor in fp32 per round"


def test_eager_rounds_leave_out_nothing_and_count_nothing_twice():
    """Averaging in fp32: a member lacks the others' newest shares alone, the agreed anchor nothing."""
    run = begun(eager(rounds=4, inner_steps=5, outer_momentum=0.0, up="fp32", down="fp32"))
    first, sums = run.agreed().clone(), torch.zeros_like(run.agreed())
    encoded, sent = run._encoded, dict[int, torch.Tensor]()

    def noted(peer, *rest):
        sent[peer] = run.anchor_set.local[peer].anchor_F - run.workers[peer].x_F
        return encoded(peer, *rest)

    run._encoded = noted
    while run.now < run.steps:
        if run.step():
            sums += torch.stack(list(sent.values())).mean(0)
    assert torch.allclose(run.agreed(), first - sums, atol=1e-6)
    for peer, own in enumerate(run.anchor_set.local):
        others = sum(sent[other] for other in sent if other != peer) / 4
        assert torch.allclose(own.anchor_F - run.agreed(), others, atol=1e-6) and float(others.norm()) > 1e-3


@pytest.mark.parametrize("outer", [AdamW(), DelayedNesterov(lr=1.0, momentum=0.5, every=4)])
def test_eager_updates_are_refused_where_the_outer_step_remembers_more_than_a_momentum(outer):
    with pytest.raises(ValueError, match="twice a round"):
        check_recipe(replace(eager(rounds=4, inner_steps=5), outer=outer))


def test_an_eager_worker_feels_its_own_newest_share_at_once():
    run = begun(eager(rounds=3, inner_steps=5, outer_momentum=0.0, up="fp32", down="fp32"))
    before = run.agreed().clone()
    while not run.history:
        apart = [worker.x_F.clone() for worker in run.workers]
        run.step()
    for worker, x, own in zip(run.workers, apart, run.anchor_set.local, strict=True):
        assert torch.equal(worker.x_F, own.anchor_F)
        share = float((before - own.anchor_F).norm() / (before - x).norm())
        assert 0.2 < share < 0.35, "a quarter of its own, nothing of the others yet"


# ---- sparse and low-rank ----------------------------------------------------------------------------------------


def test_sparseloco_sends_a_sixty_fourth_and_lives_by_its_error_feedback():
    recipe = sparseloco(rounds=16, inner_steps=4, outer_lr=2.0)
    without = replace(recipe, coding=UpdateCoding(recipe.coding.up, "fp32", 0.0, "gathered"))
    kept, lost = tried(recipe), tried(without)
    assert kept.upload_ratio > 200
    assert kept.val_loss < lost.val_loss - 0.01


def test_sparta_swaps_the_same_few_parameters_among_all_and_leaves_the_others_alone():
    run = begun(sparta(rounds=10, share=0.25))
    for _ in range(3):
        run.step()
    x = torch.stack([worker.x_F for worker in run.workers])
    alike = ((x - x[0]).abs().amax(0) < 1e-4).float().mean()
    assert 0.2 < float(alike) < 0.9 and float((x - x[0]).norm()) > 1e-2
    whole = tried(sparta(rounds=10, share=1))
    average = tried(local_sgd(rounds=10, inner_steps=1))
    assert torch.allclose(whole.model_F, average.model_F, atol=1e-4)


def test_powersgd_of_full_rank_is_data_parallelism():
    full, exact = tried(powersgd(rounds=12, rank=8)), tried(data_parallel(rounds=12))
    narrow = tried(powersgd(rounds=12, rank=1))
    assert narrow.upload_bytes < full.upload_bytes
    assert full.val_loss == pytest.approx(exact.val_loss, abs=0.02)


def test_des_loc_averages_moments_on_clocks_of_their_own():
    run = begun(des_loc(rounds=6, inner_steps=3))
    alike = []
    while run.now < run.steps:
        if run.step():
            pairs = [(w.inner.first_P, w.inner.second_P) for w in run.workers]
            alike.append(tuple(all(torch.equal(p[i], pairs[0][i]) for p in pairs) for i in (0, 1)))
    assert alike == [(False, False), (False, False), (True, False), (False, False), (False, False), (True, True)]


# ---- Muon -------------------------------------------------------------------------------------------------------


def test_muon_makes_every_direction_of_a_matrix_equally_large():
    matrix = torch.randn(24, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 16)
    values = torch.linalg.svdvals(orthogonalize(matrix))
    assert float(values.max()) < 1.3 and float(values.median()) > 0.6


def test_muon_leaves_embeddings_to_adamw():
    layout = layout_of(build_model("gpt-nano", 0))
    matrices = matrices_of(layout)
    assert {slot.name.split(".")[0] for slot in matrices} == {"blocks"} and len(matrices) == 4
    spec, rest = Muon(rest=AdamW(warmup_steps=0)), AdamW(warmup_steps=0)
    gradient = torch.randn(layout.parameters, generator=torch.Generator().manual_seed(1)) * 1e-3
    ours, theirs = torch.zeros(layout.parameters), torch.zeros(layout.parameters)
    inner_step(spec, fresh_inner(layout.parameters), ours, gradient.clone(), 0, matrices)
    inner_step(rest, fresh_inner(layout.parameters), theirs, gradient.clone(), 0)
    first = matrices[0].at
    assert torch.equal(ours[:first], theirs[:first]) and not torch.equal(ours[first:], theirs[first:])
    assert muloco().coding == UpdateCoding("2bit", "2bit", 0.95, "remembered")


def test_under_muon_the_momentum_outside_stays_small_and_settles_however_long_the_run():
    """Where AdamW inside gets more of it with the rounds. A rate that is given moves both, in proportion."""
    few, many = auto(rounds=40), auto(rounds=140)
    assert few.outer.momentum == many.outer.momentum < streaming(rounds=140).outer.momentum
    assert momentum_at(many.outer, 0) == 0.5 and momentum_at(many.outer, many.schedule.steps) == 0.0
    slow = auto(lr=few.inner.rest.lr / 5)
    assert (slow.inner.lr, slow.inner.rest.lr) == pytest.approx((few.inner.lr / 5, few.inner.rest.lr / 5))


def test_what_is_recommended_follows_the_swarm_its_links_and_its_tokens():
    """Rounds as long as the links ask for, as many as the tokens last, more momentum where the mean is less noisy;
    what is given stays."""
    assert auto(peers=8).outer.momentum > auto(peers=7).outer.momentum == auto().outer.momentum
    assert auto(peers=8, outer_momentum=0.5).outer.momentum == 0.5
    hidden, waits = auto(exchange_steps=4), auto(exchange_steps=10)
    assert hidden.schedule.inner_steps == auto().schedule.inner_steps == 32
    assert waits.schedule.inner_steps == 9 * 4 * (10 - 4), "four fragments wait six steps each: a tenth of the time"
    assert auto(exchange_steps=9.4).schedule.inner_steps == 196, "fragments divide a round"
    few, more = auto(tokens=10**7, batch=8), auto(tokens=10**7, batch=8, peers=8)
    assert few.schedule.rounds == round(10**7 / (4 * 32 * 8 * few.seq_len)) == 2 * more.schedule.rounds + 1
    assert auto(tokens=1).schedule.rounds == 1


def test_owners_remember_what_their_answers_left_out():
    """2-bit answers: with the owners' memory the model ends nearer to what exact answers would have made of it."""
    exact = diloco(rounds=8, inner_steps=5, up="fp32", down="fp32")
    coarse = replace(exact, coding=replace(exact.coding, down="2bit"))
    remembered = replace(coarse, coding=replace(coarse.coding, answer="remembered"))
    begin = torch.cat([p.detach().reshape(-1) for p in model().parameters()])
    goal = tried(exact).model_F
    far, near = (float((tried(one).model_F - goal).norm()) for one in (coarse, remembered))
    assert near < 0.9 * far < float((goal - begin).norm())
