"""What a loop's user sees at the end of a run, in a folder that holds one, and from the logger."""

from __future__ import annotations

import json
import logging
import platform
import pydoc
import re
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from loops import found_loop
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.base.machine import Fact
from atoll.cli.checkpoint import export as checkpoint_export
from atoll.cli.status import export
from atoll.cli.status import peers as show_members
from atoll.cli.stored.run import stored_status
from atoll.peer.events import GenesisKnown
from atoll.runtime.embed import peer_process, run_end
from atoll.runtime.embed.after_end import PostRunStepHook
from atoll.runtime.embed.loop_log import LOOP_KILLED, messages_of
from atoll.runtime.embed.python_fix import in_python
from atoll.runtime.event_log import CLOSED_BEFORE, RunStatus
from atoll.runtime.reachability import unanswered_text

ASKS = """
import sys
from atoll.cli.main import main

try:
    main(sys.argv[1:])
except SystemExit as end:
    print("torch:", "torch" in sys.modules)
    raise
"""


def small_loop() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(8, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, run: atoll.Run | None = None) -> None:
    x = torch.randn(16, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if run is not None:
        run.report(loss)
    optimizer.step()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def shown_by_status(folder: Path) -> str:
    """What `atoll status` prints of this folder, and whether it imported torch."""
    asked = [sys.executable, "-c", ASKS, "status", "--dir", str(folder)]
    return subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_loop_is_told_once_that_its_run_is_over_and_its_folder_holds_the_model(
    tmp_path: Path, peers_in_threads: None, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    """A loop takes three steps after the end of its run. Two further programs find the finished run there."""
    caplog.set_level(logging.INFO, "atoll")
    model, optimizer = small_loop()
    with atoll.found(folder=tmp_path / "one", rounds=2, inner_steps=2) as run:
        assert run.ticket == "" and "empty until run.attach" in caplog.text
        run.attach(model, optimizer)
        assert run.ticket and "others join with" in capsys.readouterr().out
        while not run.done:
            step(model, optimizer)
        agreed = values(model)
        assert run.model_file == str(tmp_path / "one" / "model.safetensors")
        assert equal(load_file(run.model_file), agreed)
        assert caplog.text.count("reports no training loss") == 1
        assert re.search(r"round 2 of 2: loss not reported, 1 member\n", caplog.text)
        for _ in range(3):
            step(model, optimizer)
        assert not equal(values(model), agreed)
        assert caplog.text.count("the run is over after 2 rounds (the agreed model is in ") == 1
        assert caplog.text.count("this step is yours alone") == 1

    told = shown_by_status(tmp_path / "one")
    assert "over after 2 rounds; no peer is running in" in told and "loss not reported, 4 samples" in told
    assert f"members of the last round: {platform.node()}/one\n" in told and "torch: False" in told
    record = tmp_path / "one" / "facts.jsonl"  # as that of a latecomer, which has seen one round alone
    lines = record.read_text().splitlines(keepends=True)
    first = next(line for line in lines if '"RoundClosed"' in line)
    record.write_text("".join(line for line in lines if line != first))
    stored = stored_status(tmp_path / "one")
    assert stored is not None and stored["tokens"] == 4
    show_members(dir=tmp_path / "one")
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith("members after 2 rounds:") and f"{run.peer[-8:]}  member" in shown[1]
    Path(run.model_file).unlink()
    export(dir=tmp_path / "one")
    export(tmp_path / "copy.safetensors", dir=tmp_path / "one")
    checkpoint_export(1, tmp_path / "round.safetensors", tmp_path / "one")
    checkpoint_export(1, tmp_path / "state.safetensors", tmp_path / "one", state=True)
    for written in (run.model_file, tmp_path / "copy.safetensors", tmp_path / "round.safetensors"):
        assert equal(load_file(written), agreed)
    assert {"anchor", "momentum"} <= {*load_file(tmp_path / "state.safetensors")}
    assert "of the last round" not in capsys.readouterr().out

    caplog.clear()
    with found_loop(folder=tmp_path / "one", rounds=5, inner_steps=2, start_peers=3, up="fp32") as run:
        assert run.attach(model, optimizer, after_end="skip").done and run.model_file
        assert "it ended after 2 rounds. The model" in caplog.text  # no loss was reported
        assert capsys.readouterr().out == "" and run.ticket == ""
        assert "rounds=5 (it has 2), start_peers=3 (it has 1), recipe, or the options" in caplog.text
        assert "inner_steps=" not in caplog.text and str(tmp_path / "one") in caplog.text
        assert equal(values(model), agreed)
        step(model, optimizer)
        assert equal(values(model), agreed) and model.weight.grad is not None

    with atoll.found(folder=tmp_path / "one") as run, pytest.raises(atoll.RunEnded, match="E-ATT-17") as ended:
        run.attach(model, optimizer, after_end="raise")
        step(model, optimizer)
    own = [frame for frame in traceback.extract_tb(ended.tb) if "/src/atoll/" in frame.filename]
    assert len(own) == 1  # the border: nothing of what lies behind it


def test_a_loop_knows_the_members_once_it_is_attached_and_the_last_figures_of_a_finished_run(
    tmp_path: Path, peers_in_threads: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Two loops train to the end. Then each program runs again, as its user would, and trains nothing."""

    def whole(run: atoll.Run) -> tuple[int, int, float]:
        model, optimizer = small_loop()
        with run:
            begin = run.attach(model, optimizer).members
            while not run.done:
                step(model, optimizer, run)
        return begin, run.members, run.loss

    founder = atoll.found(folder=tmp_path / "one", start_peers=2, rounds=2, inner_steps=2)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(whole, founder)]
        while not founder.ticket and not ends[0].done():
            wait(ends, 0.02)
        ends.append(pool.submit(whole, atoll.join(founder.ticket, folder=tmp_path / "two")))
        begins, members, losses = zip(*(end.result() for end in ends), strict=True)
    assert begins == members == (2, 2) and losses[0] == losses[1] > 0
    monkeypatch.setattr(run_end, "LINGER_S", 0.0)
    for again in (atoll.found(folder=tmp_path / "one"), atoll.join(founder.ticket, folder=tmp_path / "two")):
        caplog.clear()
        assert whole(again) == (2, 2, losses[0]) and again.trained == 2
        told = f"this run is over, nothing is trained: it ended after 2 rounds with loss {losses[0]:.4f}. "
        assert caplog.text.count(told) == 1


def test_skipped_steps_call_a_closure_and_refuse_an_optimizer_that_moves_on_without_gradients():
    """SGD's step returns the loss of its closure. One that shrinks parameters by itself gets an error."""

    class Shrinking(torch.optim.SGD):
        def step(self, closure=None):
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.mul_(0.5)

    for kind in (torch.optim.SGD, Shrinking):
        model = nn.Linear(2, 1)
        optimizer, ends = kind(model.parameters(), lr=0.1), PostRunStepHook("skip")
        optimizer.register_step_pre_hook(lambda *given, ends=ends: ends.before_step("", *given))
        optimizer.register_step_post_hook(lambda *_, ends=ends: ends.after_step())
        before = values(model)

        def closure(model=model) -> torch.Tensor:
            loss = model(torch.ones(1, 2)).square().sum()
            loss.backward()
            return loss

        if kind is Shrinking:
            with pytest.raises(atoll.UsageError, match=r"E-ATT-17 .*moves parameters that have no gradient"):
                optimizer.step(closure)
        else:
            assert optimizer.step(closure).item() > 0 and model.weight.grad is not None
            assert equal(values(model), before)


def test_the_logger_tells_of_members_and_an_error_names_the_folder_as_python_does(
    tmp_path: Path, peers_in_threads: None, caplog: pytest.LogCaptureFixture
):
    """A second loop comes and leaves while the first one trains. A third one joins in the folder of another run."""
    caplog.set_level(logging.INFO, "atoll")
    first, second = small_loop(), small_loop()
    with found_loop(folder=tmp_path / "one", inner_steps=5, name="ada") as founder:
        founder.attach(*first)
        with atoll.found(folder=tmp_path / "other") as other:
            other.attach(*small_loop())
        with pytest.raises(atoll.UsageError, match=r"(?s)E-DIR-03 .*with folder=") as refused:
            atoll.join(founder.ticket, folder=tmp_path / "other").attach(*small_loop())
        assert "--dir" not in str(refused.value) and str(tmp_path) in str(refused.value)
        with atoll.join(founder.ticket, folder=tmp_path / "two") as joining:
            stop = Event()

            def trains() -> None:
                while not stop.is_set():
                    step(*first, founder)

            thread = Thread(target=trains)
            thread.start()
            try:
                joining.attach(*second)
                while ", 2 members" not in caplog.text:
                    step(*second, joining)
                joining.close()
                while founder.members > 1 or "has left" not in caplog.text:
                    assert thread.is_alive()
                    Event().wait(0.02)
                with atoll.join(founder.ticket, folder=tmp_path / "two") as again:  # with the ticket once more
                    again.attach(*small_loop())
            finally:
                stop.set()
                thread.join()
    name = f"{platform.node()}/two"
    assert caplog.text.count(f"{name} joined") == 1 and f"{name} has left" in caplog.text
    assert caplog.text.count(f"{name} is back: its updates count once it has caught up") == 1
    assert f"as {name}, after " in caplog.text and "other members: ada\n" in caplog.text
    assert "ada joined" not in caplog.text
    assert re.search(r"round \d+: loss \d+\.\d{4}, 2 members", caplog.text)


def test_a_member_that_is_still_catching_up_when_the_run_ends_gets_its_end(
    tmp_path: Path, peers_in_threads: None, monkeypatch: pytest.MonkeyPatch
):
    """The only member that holds the end stays until the other one has it, though its own program is done."""
    arrived, may_go_on, watch = Event(), Event(), peer_process._watch
    first, second = small_loop(), small_loop()

    def watch_slowly(fact: Fact, *args: Any) -> None:
        if isinstance(fact, GenesisKnown):  # the joiner stands still, as on a computer that is busy; its links stay
            arrived.set()
            may_go_on.wait(60)
        watch(fact, *args)

    with atoll.found(folder=tmp_path / "one", rounds=6, inner_steps=2) as founder:
        founder.attach(*first)
        monkeypatch.setattr(peer_process, "_watch", watch_slowly)
        with atoll.join(founder.ticket, folder=tmp_path / "two") as other:

            def joins() -> None:
                other.attach(*second)
                while not other.done:
                    step(*second, other)

            joining, closing = Thread(target=joins), Thread(target=founder.close)
            joining.start()
            assert arrived.wait(60)
            while not founder.done:
                step(*first, founder)
            closing.start()
            closing.join(1.0)
            may_go_on.set()
            joining.join(60)
            closing.join(60)
            assert not joining.is_alive() and other.trained == 6
    assert equal(values(first[0]), values(second[0]))


def test_a_finished_program_that_starts_again_gives_the_end_to_a_member_that_is_behind(
    tmp_path: Path, peers_in_threads: None, monkeypatch: pytest.MonkeyPatch
):
    """The member left after the first round. It once waited, as the finished program ended before they had met."""
    monkeypatch.setattr(run_end, "LINGER_S", 60.0)  # on a busy computer; it ends once the member has the end
    first, second = small_loop(), small_loop()
    one, two = tmp_path / "one", tmp_path / "two"

    def trains(run: atoll.Run, loop: tuple[nn.Module, torch.optim.Optimizer], rounds: int) -> int:
        with run:
            run.attach(*loop)
            while not run.done and run.trained < rounds:
                step(*loop, run)
            return run.trained

    founder = atoll.found(folder=one, start_peers=2, rounds=4, inner_steps=2)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(trains, founder, first, 4)
        while not founder.ticket and not whole.done():
            wait([whole], 0.02)
        assert trains(atoll.join(founder.ticket, folder=two), second, 1) == 1
        assert whole.result(60) == 4
        behind = pool.submit(trains, atoll.join(founder.ticket, folder=two), second, 4)
        assert trains(atoll.found(folder=one), small_loop(), 4) == 4
        assert behind.result(60) == 4
    assert equal(values(first[0]), values(second[0]))


MEMBERS = [
    {"peer": "A", "name": "ada", "role": "trainer", "standing": "member", "since": -1},
    {"peer": "B", "name": "bob", "role": "trainer", "standing": "expelled", "since": 5},
    {"peer": "S", "name": "sue", "role": "trainer", "standing": "away", "since": 5},
    {"peer": "K", "name": "kim", "role": "trainer", "standing": "away", "since": 5},
    {"peer": "L", "name": "lee", "role": "trainer", "standing": "away", "since": 5},
    {"peer": "C", "name": "cid", "role": "trainer", "standing": "member", "since": 6},
]
NEW = {"peer": "N", "name": "nan", "role": "trainer", "standing": "observer", "since": 9}
FAREWELLS = {"K": LOOP_KILLED, "L": "its training loop ended"}


def _gone(peer: str) -> dict[str, Any]:
    return {"fact": "MembershipChanged", "members": MEMBERS, "joined": [], "left": [peer]}


CLOSED = {"fact": "RoundClosed", "round": 9, "trained": 4, "state": "", "time_s": 9.0, "loss": None, "samples": 1}
CLOSED |= {"counted": ["A"], "missing": [], "steps": 1}


def test_a_reported_loss_of_zero_is_no_missing_one(
    tmp_path: Path, peers_in_threads: None, caplog: pytest.LogCaptureFixture
):
    """The loop reports 0.0 after each step, as a model that fits its data exactly."""
    caplog.set_level(logging.INFO, "atoll")
    model, optimizer = small_loop()
    with atoll.found(folder=tmp_path, rounds=2, inner_steps=2) as run:
        run.attach(model, optimizer)
        while not run.done:
            step(model, optimizer)
            run.report(0.0)
        assert run.loss == 0.0
    assert "round 2 of 2: loss 0.0000, 1 member\n" in caplog.text
    assert "over after 2 rounds" in shown_by_status(tmp_path) and "loss 0.0000, " in shown_by_status(tmp_path)
    record = tmp_path / "facts.jsonl"  # as that of a member that was away for the last round and fetched it
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    closed = [line for line in lines if line["fact"] == "RoundClosed"]
    closed[-2]["loss"] = 9.0
    record.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not closed[-1]))
    stored = stored_status(tmp_path)
    assert stored is not None and stored["loss"] == 0.0


def test_a_joiner_counts_the_rounds_of_the_state_that_it_fetched():
    """It fetches the state of a run with 46 training rounds, and saw none of them closed."""
    progress = RunStatus()
    for entry in (
        {"fact": "LocalStateCaughtUp", "round": 50, "by": "blob", "trained": 46},
        {"fact": "RoundBegan", "round": 51, "assembling": False, "topology": "butterfly", "why": "", "members": []},
    ):
        progress.fold(entry)
    assert progress.trained == 46


@pytest.mark.parametrize(
    ("entry", "level", "says"),
    [
        (
            {"fact": "PeerSuspected", "peer": "A", "why": "silent"},
            "WARNING",
            "ada does not respond (silent); the others",
        ),
        (
            {
                "fact": "PeerSuspected",
                "peer": "A",
                "why": "silent",
                "paused": unanswered_text(4, 0, "atoll recover"),
            },
            "WARNING",
            "no member answers: the run may be over",
        ),
        ({"fact": "PeerReturned", "peer": "S"}, "INFO", "sue responds again"),
        (
            {"fact": "RoundAttemptFailed", "attempt": 0, "round": 9},
            "WARNING",
            "attempt 1 of this round ran out of time",
        ),
        ({"fact": "LocalContributionSkipped", "round": 9, "why": "slow"}, "WARNING", "no part in this round: slow"),
        (
            {"fact": "LocalContributionSkipped", "round": 9, "why": CLOSED_BEFORE},
            "INFO",
            "no part in this round: it is",
        ),
        ({"fact": "WorkRefused", "why": "disk full"}, "WARNING", "tries again: disk full"),
        (
            {"fact": "PeerSuspected", "peer": "A", "why": "silent", "never_linked": True},
            "INFO",
            "no direct link to",
        ),
        ({"fact": "StoredVertexLost", "lacks": 3}, "WARNING", "damaged or lost the vertex of history round 3"),
        (CLOSED, "INFO", "round 4: loss not reported, 1 member"),
        (CLOSED | {"counted": [], "missing": ["A"]}, "WARNING", "no update counted in round 4"),
        (CLOSED | {"back_to": 2}, "WARNING", "went back to the state of history round 2"),
        (CLOSED | {"counted": [], "alike": [["A", "B"]]}, "WARNING", "ada and bob sent the very same update"),
        (CLOSED | {"counted": [], "pauses": True}, "INFO", "paused by its founder"),
        (
            {"fact": "MembershipChanged", "members": MEMBERS, "joined": [], "left": ["B"]},
            "WARNING",
            "bob is expelled; why: atoll verify --verdicts",
        ),
        (
            {"fact": "MembershipChanged", "members": MEMBERS, "joined": ["S"], "left": []},
            "INFO",
            "sue is back: its updates count from the next round on",
        ),
        (
            {"fact": "MembershipChanged", "members": [*MEMBERS, NEW], "joined": ["N"], "left": []},
            "INFO",
            "nan joined",
        ),
        (_gone("S"), "WARNING", "sue is lost: it stopped responding"),
        (_gone("K"), "WARNING", "kim has left (its program was killed or crashed)"),
        (_gone("L"), "INFO", "lee has left (its training loop ended)"),
    ],
)
def test_a_line_of_the_event_log_becomes_a_message(entry: dict, level: str, says: str):
    """What `atoll up` would print goes to the logger of an attached loop, problems as warnings."""
    progress = RunStatus()
    progress.fold({"fact": "MembershipChanged", "members": MEMBERS, "joined": [], "left": []})
    progress.fold(CLOSED | {"farewells": FAREWELLS})
    progress.fold({"fact": "PeerSuspected", "peer": "S", "why": "silent"})
    progress.fold(entry)
    messages = [*messages_of(entry, progress, "C")]
    assert [m.level for m in messages if says in m.text][:1] == [getattr(logging, level)], messages


def test_members_that_stay_alike_are_reported_once():
    progress, said = RunStatus(), list[str]()
    progress.fold({"fact": "MembershipChanged", "members": MEMBERS, "joined": [], "left": []})
    for alike in ([["A", "B"]], [["A", "B"]], [], [["A", "B"]]):
        entry = CLOSED | {"alike": alike}
        progress.fold(entry)
        said += [m.text for m in messages_of(entry, progress, "C") if "the very same update" in m.text]
    assert len(said) == 2  # when it began, and when it began again


@pytest.mark.parametrize(
    ("command", "call"),
    [
        (
            "atoll status, or choose another folder with --dir",
            "atoll status, or choose another folder with folder=",
        ),
        ("ask a member, then atoll join TICKET --dir /run; the others", 'atoll.join(ticket, folder="/run"); the'),
        ("atoll up --dir /run to go on with it, or another", 'same program goes on with it: folder="/run", or'),
        ("atoll up run.toml, or atoll join TICKET", "atoll.found(…), or atoll.join(ticket)"),
        ("let it announce: atoll up --announce /ip4/…/tcp/…", "announce: RunOptions(announce=(…,))"),
        ("atoll invite --dir /run", "atoll invite --dir /run"),
    ],
)
def test_advice_of_commands_becomes_advice_of_calls(command: str, call: str):
    """What Python has a call for is named by it; what only a command can do stays."""
    assert call in in_python(command)


def test_help_and_a_type_checker_find_the_api():
    """help(atoll) shows docstrings of what is imported on first use. A Run has properties with docstrings."""
    text = pydoc.plain(pydoc.render_doc(atoll))
    assert "found(*, recipe:" in text and "Found a run of DiLoCo rounds" in text and "class Run(" in text
    assert not {"Any", "TYPE_CHECKING", "annotations"} & {*dir(atoll)}
    for name in ("done", "ticket", "trained", "members", "peer", "round", "loss", "model_file", "shard_index"):
        found = getattr(atoll.Run, name)
        assert isinstance(found, property) and found.__doc__
    assert (Path(sys.modules["atoll"].__file__).parent / "py.typed").exists()
