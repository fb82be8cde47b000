"""A quick start is a courtesy: verbs that only ask or tell never import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from atoll.runtime.storage.ownership import lock_folder

LIGHT = ["status", "peers", "invite", "export", "leave", "stop", "recover", "init", "plot", "simulate"]
LIGHT += ["verify", "checkpoint", "plan", "pause", "resume", "amend", "config", "docs", "publish", "evaluate"]
HEAVY_MODULES = ("torch", "numpy", "matplotlib")
BESIDE = ["explain", "version", "check", "quickstart", "watch"]  # verbs that help


def imported_by(*words: str) -> set[str]:
    """Every module that a command imported."""
    command = [sys.executable, "-X", "importtime", "-m", "atoll", *words]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
    return {line.rsplit("|", 1)[-1].strip() for line in told.splitlines() if line.startswith("import time:")}


HELPS = f"""
import sys
from atoll.cli.main import main
for verb in sys.argv[1:]:
    try:
        main([verb, "--help"])
    except SystemExit:
        print(verb, *set({HEAVY_MODULES}) & sys.modules.keys(), file=sys.stderr)
"""


ASKS = f"""
import sys
from atoll.cli.main import main
for verb in sys.argv[2:]:
    try:
        main([verb, "--dir", sys.argv[1]])
    except SystemExit as ended:
        print(ended.code, *set({HEAVY_MODULES}) & sys.modules.keys())
"""


USES = """
import sys
from atoll.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    print(ended.code, *{"torch"} & sys.modules.keys())
"""


def test_help_never_imports_torch():
    """Of all verbs, one after the other in a process of its own."""
    verbs = [*LIGHT, *BESIDE, "up", "join", "demo"]
    done = subprocess.run([sys.executable, "-c", HELPS, *verbs], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == verbs and done.stdout.count("Usage: ") == len(verbs)


def test_what_the_package_promises_is_there_for_whoever_imports_no_more_than_it():
    """`atoll.reduce` is a module of its own, and nothing before its first use imports it."""
    code = f"import sys, atoll; print(*{{*sys.modules}} & {{*{HEAVY_MODULES}}}); atoll.reduce.found; atoll.local"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_asking_a_folder_where_nobody_runs_never_imports_torch(tmp_path: Path):
    """The whole way to the answer, not just the help."""
    found = imported_by("invite", "--dir", str(tmp_path))
    assert "atoll.runtime.control.socket" in found and not found & {*HEAVY_MODULES}
    asked = [sys.executable, "-c", ASKS, str(tmp_path), "status", "peers", "leave", "pause"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["3"] * 4, done.stderr


def test_a_folder_in_use_is_reported_before_torch_is_imported(tmp_path: Path):
    """Loading torch takes seconds. This process holds the folder as a peer does."""
    (tmp_path / "kept.sqlite").touch()
    handle = lock_folder(tmp_path)
    try:
        command = [sys.executable, "-c", USES, "up", "--dir", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    finally:
        os.close(handle)
    assert "E-DIR-01 another Atoll process" in done.stderr and done.stdout == "2\n", done.stderr


def test_help_is_there_before_anybody_gets_impatient():
    """Counted in modules, which no busy computer makes more of: 390 are half a second, and a peer has 1550."""
    assert len(imported_by("--help")) < 450
