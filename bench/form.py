"""The form that benches share: what every one is asked on its command line, and the one object it answers with.

With `--json` a bench prints `{"bench", "settings", "figures", "versions"}` and nothing else on stdout, so that one
program can read them all; without it, lines or a table of its own. Measures nothing.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec


def asking(about: str | None, quick: str, json: str = "one object instead of a table") -> argparse.ArgumentParser:
    """What every bench is asked, `--quick` and `--json`; a bench adds its own. Its docstring is the help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help=json)
    return parser


def versions(*packages: str) -> dict[str, str]:
    """Of what every figure depends on, and of the packages that this bench's depend on, too."""
    always = {"atoll": version("atoll"), "python": platform.python_version(), "kernel": platform.release()}
    return always | {package: version(package) for package in packages}


def report(
    bench: str, settings: Mapping[str, Any], figures: object, versions: Mapping[str, Any], **more: object
) -> str:
    """The one object, as JSON; what is not finite becomes null, since JSON has no word for it."""
    told = {"bench": bench, "settings": settings, "figures": figures, "versions": versions, **more}
    return msgspec.json.encode(told).decode()


def lines(figures: Mapping[str, object]) -> str:
    """A line per figure, for benches without a table."""
    return "\n".join(f"{name:28}{figure!s:>12}" for name, figure in figures.items())


def congestion() -> str:
    """The congestion control of TCP here, which decides what links reach; `unknown` where there is no /proc."""
    setting = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return setting.read_text().strip() if setting.exists() else "unknown"
