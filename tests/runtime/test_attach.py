"""The user's own loop: real processes, real sockets, a model that Atoll has never heard of."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
from loops import found_loop
from msgspec.structs import replace
from torch import nn

import atoll
from atoll.runtime.embed import peer_process
from atoll.runtime.embed.loop_model import HandoverSnapshot, LoopModel
from atoll.runtime.embed.messages import AttachLoopRequest, RunFinishedNotice
from atoll.runtime.embed.peer_process import _run_start
from atoll.runtime.event_log import entries_in
from atoll.runtime.trainer.protocol import LENGTH, CancelTraining, MergeAnchorIntoParameters, SetParameters
from atoll.runtime.training_spec import founding_blobs, parse_training_spec
from atoll.training.exchange.layout import flatten, layout_of
from atoll.training.recipe.methods import METHODS, data_parallel, delayed_nesterov, des_loc, pipelined, streaming
from atoll.training.recipe.recipes import BATCH, SEQ_LEN, Recipe, for_real_run, over_tokens
from training import network, train

pytestmark = [pytest.mark.net]

SCRIPT = """
import json, os, sys, torch
import atoll
from training import network, train

torch.set_num_threads(1)
model = network(int(sys.argv[2]))
if "peer-2" == os.environ["ATOLL_NAME"]:
    model = torch.compile(model, backend="eager")
run = atoll.join(or_found={"rounds": 3, "inner_steps": 6})
end = train(run, model, forks=sys.argv[3] == "cpu", where=sys.argv[3])
open(sys.argv[1] + f"/{run.peer[-8:]}.json", "w").write(json.dumps(end))
run.close()
"""


on_every_device = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def two_loops(tmp_path: Path, leaves: bool = False, where: str = "cpu", **wish: object) -> list[dict]:
    """Each in a thread of its own; one of them `leaves` after the first round."""

    def whole(run: atoll.Run, seed: int) -> dict:
        with run:
            return train(run, network(seed), leaves=leaves and seed == 2, where=where)

    founder = found_loop(folder=tmp_path / "one", start_peers=2, **{"rounds": 3, "inner_steps": 6} | wish)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(whole, founder, 1)]
        while not founder.ticket and not ends[0].done():
            wait(ends, 0.02)
        ends.append(pool.submit(whole, atoll.join(founder.ticket, folder=tmp_path / "two"), 2))
        return [end.result() for end in ends]


@on_every_device
def test_two_loops_with_scheduler_accumulation_and_gradscaler_end_with_one_model(tmp_path: Path, where: str):
    """Each of two scripts takes 18 counted steps and some that GradScaler skips; both end with the same values.

    One of them attaches what torch.compile made of its model; both have their data from a worker of a DataLoader.
    """
    script = tmp_path / "train.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{SCRIPT}")
    atoll.local(script, str(tmp_path), "7", where, peers=2, folder=tmp_path / "swarm")
    ends = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(ends) == 2
    assert ends[0]["total"] == ends[1]["total"]
    for end in ends:
        assert end["trained"] == 3 and end["members"] == 2 and end["same_objects"]
        assert end["skipped"] >= 2 and end["steps"] - end["skipped"] <= 18


@on_every_device
@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        (streaming(rounds=3, inner_steps=6, fragments=2, overlap=2), 18 + 3),  # up to 3 that no member asked for
        (data_parallel(rounds=8), 8),
        (pipelined(rounds=8), 8 + 3),
        (des_loc(rounds=6, inner_steps=2), 12),
        (delayed_nesterov(rounds=3, inner_steps=4), 12),
    ],
    ids=["streaming", "data_parallel", "pipelined", "des_loc", "delayed_nesterov"],
)
def test_two_loops_end_with_one_model(
    tmp_path: Path, peers_in_threads: None, recipe: Recipe, steps: int, where: str
):
    """Whatever they agree on. A step that GradScaler skips is none, so another batch takes its place."""
    ends = two_loops(tmp_path, where=where, recipe=recipe, **{"rounds": 0, "inner_steps": 50})
    assert ends[0]["total"] == ends[1]["total"]
    for end in ends:
        assert end["trained"] == recipe.schedule.turns and end["members"] == 2 and end["same_objects"]
        assert end["skipped"] >= 1 and end["steps"] - end["skipped"] <= steps


def test_rounds_of_two_loops_end_by_samples_and_by_the_clock(tmp_path: Path, peers_in_threads: None):
    """Three steps each are 192 samples of both, where a round has six. No round takes a million steps."""
    ends = two_loops(tmp_path / "samples", target_samples=192)
    assert ends[0]["total"] == ends[1]["total"]
    assert all(end["trained"] == 3 and end["steps"] - end["skipped"] < 3 * 6 for end in ends)
    ends = two_loops(tmp_path / "clock", rounds=2, inner_steps=10**6, round_time=0.1)
    assert ends[0]["total"] == ends[1]["total"] and all(end["trained"] == 2 for end in ends)


def test_a_loop_takes_every_recipe_that_a_real_run_can_do(tmp_path: Path):
    """The others are refused before anything starts; so are numbers beside a recipe, which has its own."""
    layout = layout_of(nn.Sequential(*(nn.Linear(64, 128) for _ in range(4))))
    refused = set[str]()
    for name, method in METHODS.items():
        try:
            run = atoll.found(recipe=method(), folder=tmp_path, start_peers=2)
        except atoll.UsageError as why:
            assert "E-ATT-12" in str(why) and "only in atoll.experiment" in str(why) and "diloco" in str(why)
            refused.add(name)
            continue
        beginning, settings = _run_start(
            AttachLoopRequest(run._request, layout, batch=32), torch.zeros(layout.floats)
        )
        recipe = parse_training_spec(founding_blobs(beginning, settings).settings).recipe
        asked = for_real_run(method())
        if name == "delayed_nesterov":  # four whole updates, counted in samples
            assert (recipe.outer.every, asked.outer.every) == (4 * 50 * 32, 4 * 50 * BATCH * SEQ_LEN)
            asked = replace(asked, outer=replace(asked.outer, every=recipe.outer.every))
        assert (recipe.outer, recipe.merge, recipe.reducer) == (asked.outer, asked.merge, asked.reducer)
        assert settings.rounds == asked.schedule.turns and recipe.coding == asked.coding
    assert refused == {"halos", "noloco"}
    with pytest.raises(atoll.UsageError, match=r"E-ATT-12 .*numbers of its own.* inner_steps"):
        atoll.found(recipe=METHODS["cooperative"](), inner_steps=7)
    with pytest.raises(atoll.UsageError, match=r"E-ATT-12 .*your scheduler sets"):
        atoll.found(recipe=over_tokens(METHODS["diloco"](), 10**6))


@pytest.mark.parametrize(("per_gb", "owner_s", "agree_s"), [(1.0, 6.0, 10.0), (1e6, 16.4, 32.8)])
def test_windows_grow_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_gb: float, owner_s: float, agree_s: float
):
    """A billion values once ran out of time: on a slow disk their state takes half a minute."""
    monkeypatch.setattr(peer_process, "OWNER_S_PER_GB", per_gb)
    monkeypatch.setattr(peer_process, "AGREE_S_PER_GB", 2 * per_gb)
    layout = layout_of(nn.Linear(64, 64, bias=False))
    run = atoll.found(folder=tmp_path, start_peers=2)
    _, settings = _run_start(AttachLoopRequest(run._request, layout), torch.zeros(layout.floats))
    assert (round(settings.round.owner_s, 1), round(settings.round.agree_s, 1)) == (owner_s, agree_s)


def test_of_two_loops_one_may_end_early_and_the_other_goes_on(tmp_path: Path, peers_in_threads: None):
    """The two cannot agree that one is gone unless it stays for that; the other once waited for ever."""
    late, early = two_loops(tmp_path, leaves=True, inner_steps=2)
    assert early["trained"] < late["trained"] == 3
    assert early["members"] == 2 and late["members"] == 1


def test_two_loops_that_swap_a_few_values_end_with_one_model(tmp_path: Path, peers_in_threads: None):
    """SPARTA: a tenth of the values after every step; the last round averages what each kept of its own."""
    ends = two_loops(tmp_path, share=0.1, inner_steps=1, rounds=4)
    assert len(ends) == 2 and ends[0]["total"] == ends[1]["total"]
    assert all(end["trained"] == 4 and end["members"] == 2 and end["same_objects"] for end in ends)
    with pytest.raises(atoll.UsageError, match="drawn values"):
        found_loop(share=0.1, up="2bit")


def test_a_loop_goes_back_with_its_run(tmp_path: Path, peers_in_threads: None):
    """Asked for from outside while it trains: x is what the run began with, exactly once, and training goes on."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = model[0].weight.detach().clone()
    words = [sys.executable, "-m", "atoll", "checkpoint", "rollback", "--json", "--dir", str(tmp_path / "one")]
    asked: subprocess.Popen[str] | None = None
    trained: list[int] = []
    began_anew, until = 0, time.monotonic() + 120  # only a failing test waits so long
    with atoll.found(folder=tmp_path / "one", inner_steps=4) as run:
        run.attach(model, optimizer)
        while asked is None or asked.poll() is None or trained[-1] < min(trained[-200:]) + 3:
            if run.trained == 3 and asked is None:
                asked = subprocess.Popen([*words, "--", "-1"], stdout=subprocess.PIPE, text=True)
            began_anew += asked is not None and torch.equal(model[0].weight, first)
            x = torch.randn(16, 64)
            nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            trained.append(run.trained)
            assert time.monotonic() < until
    assert asked.stdout is not None
    done = json.loads(asked.stdout.read())
    asked.stdout.close()
    assert done["agreed"] and done["back_to"] == -1 and done["trained"] == 0
    assert began_anew == 1 and sum(b < a for a, b in pairwise(trained)) == 1


def test_a_model_that_is_not_the_runs_is_refused_with_the_difference(tmp_path: Path, peers_in_threads: None):
    """The founder trains 64→128, the joiner brings 64→100: it is told which tensors part, and was no member."""
    models = [nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 4)) for hidden in (128, 100)]
    founder, joiner = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    with atoll.found(folder=tmp_path / "one", inner_steps=5) as run:
        run.attach(models[0], founder)
        with pytest.raises(atoll.RefusedError, match=r"(?s)E-ATT-01 .*\[128, 64\]") as refused:
            atoll.join(run.ticket, folder=tmp_path / "two").attach(models[1], joiner)
    assert "[100, 64]" in str(refused.value) and "another run, join with its ticket" in refused.value.fix
    entries = list(entries_in(tmp_path / "one" / "facts.jsonl"))
    assert not [entry for entry in entries if entry["fact"] == "MembershipChanged" and entry["joined"]]


def test_a_loop_that_diverges_is_told_and_what_ctrl_c_reaches_is_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A nan in one gradient ends the loop with the round, not a run of nans; Ctrl-C leaves its peer alone.

    The peer runs no file of the working directory, where one has the name of a standard module.
    """
    ran = tmp_path / "ran"
    (tmp_path / "fractions.py").write_text(f"open({str(ran)!r}, 'a').write('fractions')\n")
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = set(psutil.Process().children())  # other tests' warm interpreter
    with atoll.found(folder=tmp_path / "one", inner_steps=3) as run:
        run.attach(model, optimizer)
        mine = set(psutil.Process().children()) - before
        assert mine and all(os.getpgid(child.pid) != os.getpgrp() for child in mine)
        model(torch.full((1, 64), float("nan"))).sum().backward()
        with pytest.raises(atoll.RunFailedError, match=r"E-ATT-10 .*step 3"):
            for _ in range(3):
                optimizer.step()
        with pytest.raises(atoll.UsageError, match="E-ATT-02"):
            run.attach(model, optimizer)
    assert (tmp_path / "one" / "atoll.log").exists() and not ran.exists()


def test_what_no_run_can_be_is_told_before_anything_starts(tmp_path: Path):
    """Arguments that are none: tests/test_arguments.py."""
    model = nn.Linear(64, 64)
    with pytest.raises(atoll.UsageError, match=r"E-ATT-05 .*holds none of the parameters"):
        others = torch.optim.SGD(nn.Linear(64, 64).parameters(), lr=0.1)
        atoll.found(folder=tmp_path / "one").attach(model, others)
    assert not (tmp_path / "one").exists()


def test_a_script_that_is_run_again_is_told_that_its_run_is_over(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Else it would end at once without a word, as if it had trained."""
    run = atoll.found(folder=tmp_path / "one")
    run._handle(RunFinishedNotice(20))
    assert run.done and run.trained == 20
    assert "ended after 20 rounds. The" in (told := caplog.text) and f"folder than {tmp_path / 'one'}" in told


def test_a_loop_that_is_to_stand_may_take_no_step_ahead_whatever_is_merged(tmp_path: Path):
    """Handed over with 4 steps to take ahead; then a paused round begins, and what was agreed comes after it."""
    model = nn.Linear(2, 2)
    run = atoll.found(folder=tmp_path / "one")
    run._local = LoopModel(model, torch.optim.SGD(model.parameters()))
    values, _ = flatten(model, run._local.layout)
    run._local.mailbox = SimpleNamespace(x_F=values.clone())
    run._sent, run._steps_ahead_next, run._steps_ahead, run._span.steps = HandoverSnapshot(0, values), 8, 4, 1
    run._channel = SimpleNamespace(send=lambda message: None)
    run._handle(CancelTraining(3, stands=True))
    run._handle(MergeAnchorIntoParameters(0, len(values), "delta"))
    assert run._steps_ahead == 0


def words_in(sock: socket.socket) -> list[str]:
    """The names of those that came by now."""
    data, names = sock.recv(1 << 16), []
    while data:
        (size,) = LENGTH.unpack(data[: LENGTH.size])
        names.append(msgspec.msgpack.decode(data[LENGTH.size : LENGTH.size + size])["type"])
        data = data[LENGTH.size + size :]
    return names


def test_a_loop_that_is_interrupted_while_its_peer_waits_has_left_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ctrl-C in a notebook: on the way to a word nothing is lost; in the midst of what it asks for half may be."""
    model, interrupted = nn.Linear(2, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = atoll.found(folder=tmp_path / "one")
    run._local, run._joined, channel = LoopModel(model, optimizer), True, run._channel
    run._local.mailbox = SimpleNamespace(x_F=flatten(model, run._local.layout)[0])
    channel._process, channel._owner_pid = SimpleNamespace(wait=lambda timeout=None: 0), os.getpid()
    ours, theirs = socket.socketpair()

    class Interrupted:
        """Its third call is."""

        def recv(self, count: int) -> bytes:
            interrupted.append(count)
            if len(interrupted) == 3:
                raise KeyboardInterrupt
            return ours.recv(min(count, 3))

        def __getattr__(self, name: str):
            return getattr(ours, name)

    channel._socket = Interrupted()
    word = msgspec.msgpack.encode(SetParameters((1, 2, 3)))
    theirs.sendall(LENGTH.pack(len(word)) + word)
    with pytest.raises(KeyboardInterrupt):
        channel.receive()
    assert channel.receive() == SetParameters((1, 2, 3)) and len(interrupted) > 3

    def copy_in(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LoopModel, "copy_in", copy_in)
    with pytest.raises(KeyboardInterrupt):
        run._handle(SetParameters(()))
    assert words_in(theirs) == ["LoopDetachNotice"], "what it wrote half is not said to be carried out"
    with pytest.raises(atoll.RunFailedError, match=r"E-ATT-14 .*KeyboardInterrupt"):
        optimizer.step()
    run.close()
    optimizer.step()
    theirs.close()


def test_joining_without_a_ticket_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ATOLL_TICKET", raising=False)
    with pytest.raises(atoll.UsageError, match="E-TKT-09"):
        atoll.join()
    with pytest.raises(atoll.UsageError, match="E-TKT-01"):  # before a model is attached, and no peer is started
        atoll.join("not a ticket")
