"""`atoll version` and `atoll --version`: version and platform facts for reports of bugs. Never imports torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from atoll.base.version import VERSION
from atoll.cli.say import AsJson, say, say_json
from atoll.runtime.system import usable_cores

PACKAGES = ("torch", "numpy", "cryptography", "msgspec", "cyclopts")
GIT_S = 2.0  # longest wait for git


def version(*, json: AsJson = False) -> None:
    """Show the version, and the facts about Python, packages and computer that a report of a bug needs."""
    if json:
        say_json({"version": VERSION, **platform_facts()})
    else:
        say(version_text())


def version_text() -> str:
    """The version in the first line, then one fact per line."""
    return "\n".join([VERSION, *(f"{name}: {fact}" for name, fact in platform_facts().items())])


def platform_facts() -> dict[str, str]:
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}",
        **{name: _version_of(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cores": f"{usable_cores()} of {os.cpu_count()}",
        "installed": _origin(),
    }


def _version_of(package: str) -> str:
    from importlib import metadata  # 30 modules, which `atoll --help` need not import

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _origin() -> str:
    """A wheel, or the git commit of a source folder."""
    source = Path(__file__).parents[4]
    if not (source / ".git").exists():
        return f"a wheel in {Path(__file__).parents[2]}"
    command = ["git", "-C", str(source), "describe", "--always", "--dirty"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S).stdout.strip()  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        told = ""
    return f"sources in {source}" + (f", commit {told}" if told else "")
