"""`atoll.local`: many processes of one script on this computer, none of which outlives the call."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import atoll
from atoll.runtime.local_progress import SwarmProgress
from atoll.runtime.local_swarm import _exclusive
from atoll.runtime.network.addresses import LOOPBACK
from atoll.runtime.storage.ownership import safe_folder

BROKEN = """
import os, sys
if os.environ["ATOLL_NAME"] == "peer-2":
    sys.exit("no such data")
import torch, atoll
model = torch.nn.Linear(64, 64)
run = atoll.join(or_found={"rounds": 3, "inner_steps": 2})
run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))  # waits for its other member
"""


def test_a_script_that_fails_before_the_run_began_ends_the_others(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(BROKEN)
    with pytest.raises(atoll.RunFailedError, match=r"E-LOC-03 .* peer-2 failed"):
        atoll.local(script, peers=2, folder=tmp_path / "swarm")


LATE = """
import os, pathlib, torch, atoll
os.environ["ATOLL_START_PEERS"] = "1"
ended = pathlib.Path(os.environ["ENDED"])
last = os.environ["ATOLL_NAME"] == "peer-2"
if last:
    ended.read_text()  # a pipe, which the other process opens at its end
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = atoll.join(or_found={"rounds": 3, "inner_steps": 2})
run.attach(model, optimizer)
while not run.done:
    model(torch.ones(64)).sum().backward()
    optimizer.step()
said = f"{run.trained} {float(model.weight.detach().sum())}"
ended.with_name(os.environ["ATOLL_NAME"]).write_text(said)
run.close()
if not last:
    import atexit
    atexit.register(ended.write_text, "")
"""


@pytest.mark.net
def test_a_process_that_comes_after_the_end_gets_the_agreed_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in a second call in which one process trains all remaining rounds alone. It once waited without an end."""
    os.mkfifo(ended := tmp_path / "ended")
    monkeypatch.setenv("ENDED", str(ended))
    script = tmp_path / "train.py"
    script.write_text(LATE)
    monkeypatch.setattr("atoll.runtime.local_swarm.STAY_AFTER_S", 0.0)
    atoll.local(script, peers=2, folder=tmp_path / "swarm")
    first, second = ((tmp_path / f"peer-{n}").read_text() for n in (1, 2))
    assert first == second and first.startswith("3 ")


def test_the_error_of_a_function_names_its_exception(tmp_path: Path):
    """A notebook may not show what its processes print."""

    def work():
        raise ValueError("no such data\nlook elsewhere")

    with pytest.raises(atoll.RunFailedError, match="E-LOC-02") as failed:
        atoll.local(work, peers=2, folder=tmp_path / "swarm")
    assert failed.value.cause == "peer-1 ended with ValueError: no such data"
    assert failed.value.fix.startswith("mend")
    with pytest.raises(atoll.RunFailedError, match="E-LOC-02") as failed:
        atoll.local(lambda: None, peers=2, folder=tmp_path / "swarm")
    assert "atoll.join(or_found=" in failed.value.fix


def test_the_bar_reports_the_start_before_the_first_round(tmp_path: Path):
    bar = SwarmProgress(tmp_path / "facts.jsonl", 3)
    bar.update()
    assert [task.fields["rounds"] for task in bar._bar.tasks] == ["starting 3 processes"]
    bar.close()


def test_a_second_call_in_a_folder_in_use_is_refused_before_it_writes_anything(tmp_path: Path):
    """It once overwrote the function and the results of the first one."""

    def work():
        raise AssertionError

    swarm = tmp_path / "swarm"
    safe_folder(swarm)
    holder = f"from pathlib import Path; from atoll.runtime.local_swarm import _exclusive; p = Path({str(swarm)!r})"
    holder += "\nwith _exclusive(p): print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"\n"
        with pytest.raises(atoll.UsageError, match=r"E-DIR-01 .*swarm") as refused:
            atoll.local(work, peers=2, folder=swarm)
        other.communicate(b"\n")
    assert "atoll.local" in (refused.value.cause or "") and not (swarm / "function.pickle").exists()
    with _exclusive(swarm), pytest.raises(atoll.UsageError, match="E-DIR-01"):  # a thread of this process
        atoll.local(work, peers=2, folder=tmp_path / "here" / ".." / "swarm")
    with _exclusive(swarm):
        pass


def test_requests_that_make_no_swarm_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """What a script leaves lies in a folder of its own: another one in the same place begins another run."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(atoll.UsageError, match="E-USE-07"):
        atoll.local(tmp_path / "none.py")
    (tmp_path / "train.py").write_text("")
    with pytest.raises(atoll.UsageError, match="E-USE-08"):
        atoll.local(tmp_path / "train.py", peers=0)
    with pytest.raises(atoll.RunFailedError, match="E-LOC-02"):
        atoll.local(tmp_path / "train.py", peers=2)
    assert (tmp_path / "atoll-local" / "train").is_dir()


def test_what_this_shell_says_of_one_peer_is_not_said_to_the_swarm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A ticket and an address that were exported for a run elsewhere: the first one founds all the same."""
    monkeypatch.setenv("ATOLL_TICKET", "ATOLL1:elsewhere")
    monkeypatch.setenv("ATOLL_LISTEN", "/ip4/0.0.0.0/tcp/7071")
    script, said = tmp_path / "train.py", tmp_path / "said"
    words = "os.environ.get('ATOLL_TICKET', '') + os.environ.get('ATOLL_LISTEN', '')"
    script.write_text(f"import os, pathlib\npathlib.Path({str(said)!r}).write_text({words})\n")
    with pytest.raises(atoll.RunFailedError, match="E-LOC-02"):
        atoll.local(script, peers=2, folder=tmp_path / "swarm")
    assert said.read_text() == ""


def test_a_script_listens_where_its_call_or_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """One script serves all computers; on each of them the call comes first, then ATOLL_LISTEN, then loopback."""
    everywhere, here = "/ip4/0.0.0.0/tcp/7071", "/ip4/10.0.0.5/tcp/7071"
    monkeypatch.setattr("atoll.runtime.embed.api.parse", lambda ticket: None)
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path / "mine"))
    assert atoll.found()._request.folder == atoll.join("ATOLL1:")._request.folder == str(tmp_path / "mine")
    assert atoll.found(folder=tmp_path)._request.listen == LOOPBACK
    monkeypatch.setenv("ATOLL_LISTEN", everywhere)
    assert atoll.join(or_found={}, folder=tmp_path)._request.listen == (everywhere,)
    assert atoll.join("ATOLL1:", folder=tmp_path)._request.listen == (everywhere,)
    assert atoll.join("ATOLL1:", folder=tmp_path, listen=(here,))._request.listen == (here,)
    monkeypatch.setenv("ATOLL_LISTEN", f"{everywhere} {here}")  # as many as `atoll up` takes there
    assert atoll.found(folder=tmp_path)._request.listen == (everywhere, here)
