"""Refusal of launchers that train one model in several processes."""

from __future__ import annotations

from atoll.base.errors import UsageError


def check_single_process(count: int, library: str) -> None:
    """UsageError if the library trains one model in `count` processes: a member of a run is one process."""
    if count > 1:
        raise UsageError(
            "E-ATT-19",
            f"{library} trains this model in {count} processes, but a member of a run is one process",
            cause="a launcher started them: torchrun, accelerate launch, or devices > 1",
            fix="start one process with one device for each member, each with a folder of its own",
        )
