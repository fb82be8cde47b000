"""Test of the distribution: what README shows, played by a user who has the wheel and no file of this repository.

Builds the sdist, and the wheel from the sdist. Installs the wheel into a new environment of each interpreter that a
classifier names, and plays README's commands and the examples in an empty folder there.

Usage: make wheel-test              dependencies come from the package index
       make wheel-test BORROW=--borrow      links to those of this environment, only what the wheel asks for (CI)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement

from atoll.runtime.shipped_files import examples, pages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PATIENCE_S = 300
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
SHORT = ("run.rounds=3", "train.inner_steps=4")
PLAYED = {  # arguments of each example that needs no extra; the others are only compiled here
    "cifar": ["cifar.tar.gz", "--local", "2", "--rounds", "2", "--inner-steps", "4", "--width", "4"],
    "federated": ["--rounds", "2"],
    "mnist": ["mnist.npz", "--local", "2", "--rounds", "2", "--inner-steps", "4"],
    "robust": [],
}
IMPORT_ALL = """
import pathlib, pkgutil, sys, importlib, atoll
assert pathlib.Path(atoll.__file__).is_relative_to(sys.prefix), atoll.__file__
for module in pkgutil.walk_packages(atoll.__path__, "atoll."):
    of_an_extra = "kernels" in module.name or module.name.startswith("atoll.integrations.")
    if not module.name.endswith("__main__") and not of_an_extra:
        importlib.import_module(module.name)
print(len([name for name in sys.modules if name.startswith("atoll.")]), *{*sys.modules} & {*sys.argv[1:]})
"""


class Clean:
    """A new environment with the wheel, and an empty folder to work in."""

    def __init__(self, work: Path, interpreter: str) -> None:
        self.home = work / "env"
        self.folder = work / "empty"
        self.folder.mkdir()
        subprocess.run([interpreter, "-m", "venv", "--without-pip", self.home], check=True)
        kept = {name: value for name, value in os.environ.items() if not re.match("PYTHON|ATOLL|VIRTUAL_ENV", name)}
        self.variables = kept | {"PATH": f"{self.home}/bin:/usr/bin:/bin", "HOME": str(work)}
        self.running = list[subprocess.Popen[str]]()

    def install(self, wheel: Path, borrow: bool) -> None:
        python = str(self.home / "bin" / "python")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        subprocess.run([*pip, *(("--no-deps", "--no-index") if borrow else ()), str(wheel)], check=True)
        if borrow:
            for name in sorted(needed("atoll", set()) - {"atoll"}):
                link_distribution(name, next((self.home / "lib").glob("python3*/site-packages")))

    def start(self, *words: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [str(self.home / "bin" / words[0]), *words[1:]]
        child = subprocess.Popen(
            command, cwd=self.folder, env=self.variables, start_new_session=True, stdin=subprocess.DEVNULL, **pipes
        )
        self.running.append(child)
        return child

    def end_of(self, child: subprocess.Popen[str], status: int = 0) -> str:
        text, _ = child.communicate(timeout=PATIENCE_S)
        self.running.remove(child)
        assert child.returncode == status, f"{child.args}: exit {child.returncode}\n{text}"
        return text

    def ticket_of(self, founder: subprocess.Popen[str]) -> str:
        assert founder.stdout is not None
        line = next((line for line in founder.stdout if "ATOLL1:" in line), "")
        return line.split()[-1] if line else self.end_of(founder)

    def play(self, *words: str, status: int = 0) -> str:
        return self.end_of(self.start(*words), status)

    def close(self) -> None:
        for child in self.running:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def needed(name: str, known: set[str]) -> set[str]:
    """The distribution and all that it asks for, without extras."""
    if name not in known:
        known.add(name)
        for line in distribution(name).requires or []:
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                needed(wanted.name, known)
    return known


def link_distribution(name: str, site: Path) -> None:
    found = distribution(name)
    for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(Path(str(found.locate_file(top))))


def build(work: Path) -> Path:
    """The wheel, built from the sdist and not from this folder."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", work], cwd=ROOT, check=True)
    (source,) = work.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(work)]
    subprocess.run([*pip, str(source)], cwd=work, check=True)
    (wheel,) = work.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl"), wheel
    return wheel


def package_story(clean: Clean) -> None:
    """Every module can be imported without an extra, and nothing comes from this folder."""
    extras = [
        plain for extra in PROJECT["optional-dependencies"].values() for plain in re.findall(r"^\w+", extra[0])
    ]
    counted = clean.play("python", "-c", IMPORT_ALL, *extras)
    assert re.fullmatch(r"\d{3,}\n", counted), f"an extra was imported: {counted}"
    assert json.loads(clean.play("atoll", "docs", "--json"))["pages"] == pages()
    clean.play("atoll", "docs", "specs/round.md")


def readme_story(clean: Clean) -> None:
    """The commands of "A run from a file", with fewer rounds and on loopback, and what follows a run."""
    shown = re.findall(r"^atoll (\w+)", (ROOT / "README.md").read_text(), re.M)
    assert {*shown} <= {"demo", "quickstart", "up", "join", "status"}, (
        f"play README's new command here, too: {shown}"
    )
    clean.play("atoll", "quickstart")
    founder = clean.start(
        "atoll", "up", "run.toml", "--listen", LOOPBACK, "--set", "run.start_peers=2", *SHORT, "--name", "anna"
    )
    ticket = clean.ticket_of(founder)
    assert "anna" in clean.play("atoll", "status")
    joiner = clean.start("atoll", "join", ticket, "--listen", LOOPBACK, "--dir", "two", "--name", "bob")
    for one in (joiner, founder):
        assert "the run is over after 3 rounds" in clean.end_of(one)
    states = [(clean.folder / place / "model.safetensors").read_bytes() for place in ("atoll-run", "two")]
    assert states[0] == states[1]
    assert "intact" in clean.play("atoll", "verify", "two")
    assert "pip install matplotlib" in clean.play("atoll", "plot", status=2)


def demo_story(clean: Clean) -> None:
    assert "ended with the same state, bit for bit" in clean.play("atoll", "demo", "--peers", "2", "--rounds", "2")


def examples_story(clean: Clean) -> None:
    draw = np.random.default_rng(0)
    drawn = {f"x_{part}": draw.integers(0, 256, (640, 28, 28), np.uint8) for part in ("train", "test")}
    np.savez(
        clean.folder / "mnist.npz",
        **drawn,
        **{name.replace("x", "y"): x[:, 0, 0] % 10 for name, x in drawn.items()},
    )
    with tarfile.open(clean.folder / "cifar.tar.gz", "w:gz") as archive:
        for name in (*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"):
            (clean.folder / name).write_bytes(draw.integers(0, 10, (64, 3073), np.uint8).tobytes())
            archive.add(clean.folder / name, f"cifar-10-batches-bin/{name}")
    for name in examples():
        clean.play("atoll", "init", "--example", name)
        clean.play("python", "-m", "py_compile", f"{name}.py")
        if name in PLAYED:
            clean.play("python", f"{name}.py", *PLAYED[name])
    group = [clean.start("python", "-u", "reduce.py")]
    ticket = clean.ticket_of(group[0])
    group += [clean.start("python", "reduce.py", ticket) for _ in range(2)]
    assert all("step 9: mean over" in clean.end_of(one) for one in group)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--borrow", action="store_true", help="link the dependencies of this environment")
    borrow = asked.parse_args().borrow
    versions = [re.findall(r":: (3\.\d+)$", line) for line in PROJECT["classifiers"]]
    here = f"3.{sys.version_info.minor}"
    for version in [found[0] for found in versions if found]:
        interpreter = sys.executable if version == here else shutil.which(f"python{version}")
        assert interpreter, f"a classifier names Python {version}, and python{version} is not here"
        with tempfile.TemporaryDirectory(prefix="atoll-wheel-") as work:
            clean = Clean(Path(work), interpreter)
            try:
                clean.install(build(Path(work)), borrow and version == here)
                for story in (package_story, readme_story, demo_story, examples_story):
                    story(clean)
                    print(f"Python {version}: {story.__name__} passed", flush=True)
            finally:
                clean.close()


if __name__ == "__main__":
    main()
