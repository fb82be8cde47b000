"""Output of an attached loop: records of the logger "atoll", or lines on stderr if no logging is configured.

Invariants:
- A message is written once.
- Logging is never configured here: no handler, no level.
Not responsible for: texts (`loop_log.py`, `notices.py`), errors that end the program (`program_end.py`).
"""

from __future__ import annotations

import logging
import os

log = logging.getLogger("atoll")


def is_quiet() -> bool:
    """Whether the environment asks for warnings only: ATOLL_QUIET=1."""
    return os.environ.get("ATOLL_QUIET", "0") not in ("", "0")


def write_line(level: int, text: str, *, quiet: bool) -> None:
    """Log this message, or print it as Python prints warnings that no handler takes; `quiet`: warnings only."""
    if log.hasHandlers():
        log.log(level, "%s", text)
        return
    least = max(log.level or logging.INFO, logging.WARNING if quiet else 0, log.manager.disable + 1)
    if logging.lastResort is not None and not log.disabled and level >= least:
        logging.lastResort.handle(log.makeRecord(log.name, level, __file__, 0, "%s", (text,), None))
