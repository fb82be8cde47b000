"""The pages in docs/stories as they stand: every command is typed, and every expected line has to come."""

from __future__ import annotations

import os
import queue
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from processes import PATIENCE_S, atoll
from warm import WarmPeer, code_of_script

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

STORIES = Path(__file__).parents[2] / "docs" / "stories"
PAGES = sorted(page.stem for page in STORIES.glob("*.md") if page.stem != "index")
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_true(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a fresh folder, with free ports; what still runs at the end of the page is killed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATOLL_DIR", raising=False)
    monkeypatch.delenv("ATOLL_TICKET", raising=False)
    terminal = Terminal(tmp_path)
    try:
        for kind, name, text in BLOCK.findall(
            (STORIES / "index.md").read_text() + (STORIES / f"{page}.md").read_text()
        ):
            if name:
                (tmp_path / name).write_text(text)
            for command, expected in commands_of(text) if kind == "console" else ():
                terminal.enter(command, expected)
    finally:
        terminal.close()


def commands_of(block: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a block with the lines that it has to answer."""
    for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
        command, *expected = part.splitlines()
        yield command, expected


def pattern_of(expected: Iterable[str]) -> re.Pattern[str]:
    """`…` is the rest of a line, or any lines; `<NAME>` is one word, kept as `$NAME`."""
    text = ""
    for line in expected:
        words = re.sub(r"<([A-Z]+)>", r"(?P<\1>\\S+)", re.escape(line.rstrip())).replace("…", ".*")
        text += r"(?:.*\n)*?" if line == "…" else rf"{words} *\n"
    return re.compile(text)


class Terminal:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: list[Job] = []
        self.variables: dict[str, str] = {"?": "0"}

    def enter(self, typed: str, expected: list[str]) -> None:
        command, *expected = map(self._filled, (typed, *expected))
        words, pattern = shlex.split(command), pattern_of(expected)
        match words:
            case [*words, "&"]:
                self.jobs.append(Job(words, self.folder))
                found = self.jobs[-1].wait(pattern)
            case ["fg", job]:
                found = self._job(job).wait(pattern)
            case ["wait", job]:
                found = self._job(job).wait(pattern, to_the_end=True)
                self.variables["?"] = str(self._job(job).process.wait(PATIENCE_S))
            case ["kill", *which, job]:
                number = signal.Signals[f"SIG{which[0][1:]}"] if which else signal.SIGTERM
                self._job(job).process.send_signal(number)
                return
            case ["atoll", *words]:
                done = atoll(*words)
                found = self._answer(done, pattern)
            case _:
                done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=self.folder)
                found = self._answer(done, pattern)
        if isinstance(found, str):
            pytest.fail("\n".join([f"$ {command}", found, "expected:", *expected]), pytrace=False)
        self.variables |= found.groupdict()

    def _filled(self, line: str) -> str:
        return re.sub(r"\$(\?|[A-Z]+)", lambda name: self.variables[name[1]], line)

    def _job(self, name: str) -> Job:
        return self.jobs[int(name.removeprefix("%")) - 1]

    def _answer(self, done: subprocess.CompletedProcess[str], pattern: re.Pattern[str]) -> re.Match[str] | str:
        self.variables["?"], said = str(done.returncode), done.stdout + done.stderr
        if os.environ.get("ATOLL_SHOW"):
            print(f"$ {' '.join(map(str, done.args))}\n{said}")
        return pattern.fullmatch(said) or said

    def close(self) -> None:
        for job in self.jobs:
            job.close()


class Job:
    """A command in the background, and the lines that it has said."""

    def __init__(self, words: list[str], folder: Path) -> None:
        script = words[1:] if words[0] == "python" else ()
        self.process = WarmPeer(words[1:], lies=code_of_script(folder, *script))
        self.news: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.readers = [
            threading.Thread(target=self._read, args=(pipe,)) for pipe in (self.process.stdout, self.process.stderr)
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, pipe: Iterable[str]) -> None:
        for line in pipe:
            self.news.put(line)
        self.news.put(None)

    def wait(self, pattern: re.Pattern[str], to_the_end: bool = False) -> re.Match[str] | str:
        """Its next lines, once they fit; without a fit, all that came until it ended or patience did."""
        said, until = "", time.monotonic() + PATIENCE_S
        while to_the_end or not (found := pattern.fullmatch(said)):
            try:
                line = self.news.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return said
            if os.environ.get("ATOLL_SHOW"):
                print(line or "(end)\n", end="", flush=True)
            if line is None:
                return pattern.fullmatch(said) or said
            said += line
        return found

    def close(self) -> None:
        self.process.kill()
        for reader in self.readers:
            reader.join()
        self.process.close()
