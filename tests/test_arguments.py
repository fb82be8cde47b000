"""The public functions refuse what they cannot use before anything begins, in words that end in what to do."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.base.arguments import arguments
from atoll.base.errors import short_traceback
from atoll.runtime.embed.messages import RunRequest
from atoll.training.experiment.simulator import ExperimentResult
from atoll.training.recipe.methods import diloco

GROUP = atoll.reduce.Group.__new__(atoll.reduce.Group)  # what is refused never gets as far as a group
WORK = atoll.reduce.PendingReduce.__new__(atoll.reduce.PendingReduce)
OUTCOME = ExperimentResult.__new__(ExperimentResult)
RUN = atoll.Run(RunRequest("nowhere"))
CHECKPOINT = atoll.Checkpoint.__new__(atoll.Checkpoint)
MODEL = nn.Linear(2, 2)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)
ONES = torch.ones(2)

DOORS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (atoll.found, ()),
    (atoll.join, ()),
    (atoll.RunOptions, ()),
    (atoll.local, ("train.py",)),
    (atoll.experiment, (diloco(rounds=1),)),
    (atoll.ExperimentOptions, ()),
    (atoll.reduce.found, ()),
    (atoll.reduce.ReduceOptions, ()),
    (atoll.reduce.join, ("ATOLL1:any",)),
    (GROUP.all_reduce, (ONES,)),
    (GROUP.all_reduce_async, (ONES,)),
    (GROUP.average_with_partner, (ONES,)),
    (GROUP.average_with_partner_async, (ONES,)),
    (GROUP.wait_for_peers, (2,)),
    (WORK.wait, ()),
    (RUN.attach, (MODEL, SGD)),
    (RUN.report, (1.0,)),
    (RUN.decline, ()),
    (RUN.shard, ([],)),
    (OUTCOME.plot, ("a.png",)),
    (atoll.checkpoints, ("atoll-run",)),
    (CHECKPOINT.report, ()),
]


def refusal(function: Callable[..., Any], *given: Any, **named: Any) -> str:
    with pytest.raises(atoll.UsageError) as refused:
        function(*given, **named)
    assert refused.value.cause and refused.value.fix
    return str(refused.value)


@pytest.mark.parametrize(("function", "needed"), DOORS, ids=lambda one: getattr(one, "__qualname__", ""))
def test_every_argument_of_every_public_function_is_judged(function: Callable[..., Any], needed: tuple[Any, ...]):
    """An object of no kind at all fits nowhere; a member that adds an argument that nothing judges fails here."""
    for place, parameter in enumerate(signature(function).parameters.values()):
        stranger = object()
        if parameter.kind is Parameter.VAR_POSITIONAL:
            told = refusal(function, *needed, stranger)
        elif place < len(needed):
            told = refusal(function, *needed[:place], stranger, *needed[place + 1 :])
        else:
            told = refusal(function, *needed, **{parameter.name: stranger})
        assert f"({parameter.name}=" in told


@pytest.mark.parametrize(
    ("function", "given", "says"),
    [
        (GROUP.all_reduce, {"tensors": ONES, "timeout_s": "x"}, "timeout_s='x'.*a number, at least 0"),
        (GROUP.all_reduce, {"tensors": ONES, "timeout_s": float("nan")}, "timeout_s=nan"),
        (GROUP.all_reduce, {"tensors": ONES, "weight": True}, "weight=True.*a whole number, at least 1"),
        (atoll.reduce.found, {"statistic": "mode"}, "statistic='mode'.*one of 'mean'.*leave statistic out.*'mean'"),
        (atoll.reduce.ReduceOptions, {"silence_s": float("inf")}, "silence_s=inf.*at most 100,000,000"),
        (atoll.reduce.ReduceOptions, {"listen": "/ip4/127.0.0.1/tcp/0"}, "listen=.*a list, of text each"),
        (atoll.reduce.found, {"codec": "INT8"}, "no codec is called 'INT8' .did you mean 'int8'[?]"),
        (atoll.reduce.found, {"topology": "rings"}, "no topology rings .did you mean 'ring'[?]"),
        (atoll.reduce.found, {"peer": 4}, r"unexpected keyword argument 'peer'.*help\(atoll.reduce.found\)"),
        (atoll.found, {"trust": "friends"}, "trust='friends'.*one of 'private', 'community', 'open'"),
        (atoll.found, {"inner_steps": 2.5}, "inner_steps=2.5"),
        (atoll.found, {"inner_steps": 10**30}, "inner_steps=1000.*below 2,147,483,648"),
        (atoll.RunOptions, {"sample": 1.5}, "sample=1.5.*at least 0, at most 1"),
        (atoll.RunOptions, {"sample_peers": 10**6}, "sample_peers=1000000.*at most 4,096"),
        (atoll.join, {"or_found": {"trust": 1}}, r"atoll.found\(trust=1\)"),
        (RUN.attach, {"model": SGD, "optimizer": MODEL}, r"attach\(model=<SGD>\)\n.*a Module"),
        (
            RUN.attach,
            {"model": MODEL, "optimizer": SGD, "only": "*lora*"},
            r"only='\*lora\*'.*a list, of text each",
        ),
        (
            atoll.experiment,
            {"recipe": "diloco"},
            "recipe='diloco'.*what a method of atoll.training.recipe.methods returns",
        ),
        (OUTCOME.plot, {"path": "", "other": 3}, "others="),
    ],
)
def test_what_is_meant_is_said(function: Callable[..., Any], given: dict[str, Any], says: str):
    import re

    with pytest.raises(atoll.UsageError) as refused:
        function(**given)
    assert re.search(says, str(refused.value), re.DOTALL)


def test_numbers_of_other_libraries_are_numbers(tmp_path: Path):
    import numpy

    run = atoll.found(
        folder=tmp_path,
        inner_steps=numpy.int64(3),
        start_peers=torch.tensor(2),
        options=atoll.RunOptions(
            outer_lr=numpy.float32(0.5),
            sample=numpy.float64(0.5),  # a float of Python, too, and yet another type
        ),
    )
    assert run._request.start_peers == 2 and run._request.sample.thousandths == 500
    assert type(run._request.recipe.schedule.inner_steps) is int
    assert atoll.RunOptions(outer_lr=numpy.linspace(0.5, 1, 3)[0]).outer_lr == 0.5


@pytest.mark.parametrize("order", [range(2), torch.tensor([1, 0]), list(torch.tensor([1, 0]))])
def test_ranges_and_arrays_are_lists(order: Any):
    """What comes after `order` is what is wrong here."""
    assert "sample='half'" in refusal(atoll.ExperimentOptions, order=order, sample="half")
    assert "order=" in refusal(atoll.ExperimentOptions, order=torch.tensor([0.5, 1.0]), sample="half")


@pytest.mark.parametrize("loss", [math.nan, math.inf, torch.tensor(math.nan)])
def test_a_loss_that_is_not_finite_counts_for_nothing(loss: object):
    """GradScaler passes over such a batch; counted, it would be the run's loss for every member."""
    run = atoll.Run(RunRequest("nowhere"))
    run.report(loss)
    assert (run._span.reported, run._span.loss_sum) == (0, 0.0)
    with pytest.raises(atoll.UsageError, match=r"E-ATT-11 run.report: (.*\n)+.*try: "):
        run.report(torch.ones(2))


def test_a_data_set_that_is_asked_by_index_is_sharded():
    """torch's own have no __iter__."""
    run = atoll.Run(RunRequest("nowhere"))
    run._seen.shard = 1, 2
    data = torch.utils.data.TensorDataset(torch.arange(4))
    assert [int(item) for (item,) in run.shard(data)] == [1, 3]


@pytest.mark.parametrize("path", ["", "losses", "."])
def test_a_picture_needs_a_name(path: str):
    """An empty one was written to ./.png without a word."""
    with pytest.raises(atoll.UsageError, match=r"E-PLOT-03 (.*\n)+.*losses.png"):
        OUTCOME.plot(path)


def test_what_else_stands_in_the_way_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "train.py").write_text("")
    assert "E-DIR-05" in refusal(atoll.local, tmp_path / "train.py", folder=tmp_path / "train.py")
    assert "E-USE-07" in refusal(atoll.local, tmp_path)
    with pytest.raises(atoll.UsageError, match=r"E-ATT-12 .*int3"):
        atoll.found(options=atoll.RunOptions(up="int3"))
    monkeypatch.delenv("ATOLL_TICKET", raising=False)
    monkeypatch.setenv("ATOLL_START_PEERS", "two")
    with pytest.raises(atoll.UsageError, match="E-ATT-11 ATOLL_START_PEERS='two'"):
        atoll.join(or_found={})


def test_a_prompt_shows_the_api_and_where_a_run_stands():
    """`dir(atoll)` lists what is loaded on first use, and a run prints its folder and progress."""
    assert set(atoll.__all__) <= set(dir(atoll))
    assert repr(RUN) == "<atoll.Run nowhere: not attached, 0 rounds trained>"


@pytest.mark.parametrize("border", [short_traceback, arguments("atoll.train", "E-ATT-11")])
def test_ctrl_c_shows_no_more_of_the_package_than_an_error(border: Callable[..., Any]):
    """A loop is interrupted while it waits for other members, many calls below its own step."""

    def inside() -> None:
        raise KeyboardInterrupt

    def step() -> None:
        inside()

    with pytest.raises(KeyboardInterrupt) as why:
        border(step)()
    assert "inside" not in [frame.name for frame in traceback.extract_tb(why.tb)]


def test_a_mistyped_argument_is_guessed_and_the_traceback_ends_at_the_border():
    """A traceback shows the caller's frames and one of the package; errors have the names that users import."""
    with pytest.raises(atoll.UsageError, match=r"inner_step'.* \(did you mean 'inner_steps'\?\)") as refused:
        atoll.found(inner_step=50)
    with pytest.raises(atoll.UsageError, match="E-TKT-02") as mistyped:
        atoll.join("ATOLL1:HELLO")
    for why in (refused, mistyped):
        frames = [frame for frame in traceback.extract_tb(why.tb) if "/src/atoll/" in frame.filename]
        assert len(frames) == 1
        assert traceback.format_exception_only(why.type, why.value)[0].startswith("atoll.UsageError: E-")
