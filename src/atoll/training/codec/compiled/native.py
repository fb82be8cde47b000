"""Whether codecs run as compiled kernels (`kernels.py`, the extra `fast`) or through torch. Bits are the same.

Importing numba costs half a second and the first compilation on a computer some seconds, so both wait until a
large vector is about to be coded (or the peer knows that one will be), and happen on a thread of their own while
torch does the work. Only rules over whole vectors (training/robust) wait for them: `at_once`.
ATOLL_NATIVE=0 turns the kernels off. Never fails: what keeps them from loading is logged, and torch goes on.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import threading
from types import ModuleType

SWITCH = "ATOLL_NATIVE"
PAYS_FROM = 2**20  # values of a vector: whoever moves fewer waits for networks, not for codecs

log = logging.getLogger(__name__)
kernels: ModuleType | None = None  # codecs look here at every span
_loader: threading.Thread | None = None
_fails = False  # it was tried, and would fail again
_one_at_a_time = threading.Lock()


def load_for(values: int) -> None:
    """A vector of so many values will be coded, and others after it. Returns at once."""
    global _loader
    if values >= PAYS_FROM and _loader is None and kernels is None:
        _loader = threading.Thread(target=load, name="kernels")
        with contextlib.suppress(RuntimeError):  # the process is ending
            _loader.start()


def load() -> bool:
    """Make the kernels ready; may take seconds. False if there are none: then nothing has changed."""
    global kernels, _fails
    with _one_at_a_time:
        wanted = kernels is None and not _fails and os.environ.get(SWITCH) != "0"
        if wanted and importlib.util.find_spec("numba") is not None:
            try:
                kernels = importlib.import_module("atoll.training.codec.compiled.kernels")
            except Exception as why:  # a compiler has many ways to fail, and none is worth a round
                _fails = True
                log.warning("codecs run without compiled kernels: %s", why)
    return kernels is not None


def at_once(values: int) -> ModuleType | None:
    """The kernels for so many values, loaded before this returns: for those whose last bits follow from them.

    What answers depends on the number of values and on the computer alone, so the same call gives the same bits.
    """
    return kernels if values >= PAYS_FROM and load() else None
