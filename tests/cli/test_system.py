"""Linux-only parts: one module asks for them, a run works without them, and Windows is refused in words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import TWO, Peer, lying, peers

import atoll
from atoll.cli.main import main

PACKAGE = Path(atoll.__file__).parent
OF_ONE_SYSTEM = re.compile(
    r"memfd_|posix_fallocate|RWF_|sched_|MADV_|SETLEASE|TCP_(?:INFO|CONGESTION|USER)|/(?:proc|sys|dev/shm)/|sys\.platform"
)
MAY_NAME_THEM = {"runtime/system.py", "simulation/scenarios/harness.py"}  # the latter: unit of a peak, on macOS
WITHOUT_LINUX = """
import fcntl, mmap, os, socket
for module, names in {
    fcntl: ("F_SETLEASE",),
    mmap: ("MADV_HUGEPAGE",),
    os: ("memfd_create", "posix_fallocate", "RWF_NOWAIT", "sched_getaffinity"),
    socket: ("TCP_CONGESTION", "TCP_INFO", "TCP_USER_TIMEOUT"),
}.items():
    for name in names:
        delattr(module, name)
with open(os.environ["STARTED"], "a") as file:
    file.write(f"{os.getpid()}\\n")
"""


def test_one_module_asks_for_what_one_system_has():
    naming = {str(f.relative_to(PACKAGE)) for f in PACKAGE.rglob("*.py") if OF_ONE_SYSTEM.search(f.read_text())}
    assert naming == MAY_NAME_THEM


def test_windows_is_refused_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """By a command and by the Python API, with what to do there."""
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        main(["status"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("E-SYS-01") and "WSL 2" in error
    monkeypatch.delitem(vars(atoll), "reduce", raising=False)  # there once some test has imported it
    for name in ("found", "join", "local", "reduce"):
        with pytest.raises(atoll.UsageError, match="Windows"):
            getattr(atoll, name)


def test_the_command_line_is_imported_without_modules_of_posix():
    """Else Windows would show a traceback in place of the refusal."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('fcntl', 'resource', 'pwd', 'termios')); import atoll.cli.main"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.net
def test_a_run_works_without_what_only_linux_has(tmp_path: Path):
    """Two peers and their trainers, all without leases, reserved blocks, memory files and facts about TCP."""
    env = lying(tmp_path, WITHOUT_LINUX) | {"STARTED": str(tmp_path / "started")}
    words = (*TWO, "--set", "run.rounds=2")
    with peers(Peer("up", "--dir", tmp_path / "ada", *words, env=env)) as running:
        ada = running[0]
        running.append(bob := Peer("join", ada.until_fact("Opened")["ticket"], "--dir", tmp_path / "bob", env=env))
        assert len(ada.until_fact("RoundClosed", trained=2)["counted"]) == 2
        assert (ada.ends(), bob.ends()) == (0, 0)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("ada", "bob")]
    assert models[0] == models[1]
    assert len((tmp_path / "started").read_text().split()) == 4
