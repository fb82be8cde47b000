"""Choice between compiled kernels (`kernels.py`, the extra `fast`) and torch for codecs; the bits are the same.

Importing numba takes half a second, and the first compilation on a computer some seconds. Both happen on a thread
of their own, when the first large vector is about to be coded, or earlier if the peer expects one. Until then torch
does the work. Only rules over whole vectors (training/robust) wait for the kernels: `at_once`. ATOLL_NATIVE=0 turns
them off.
Invariants:
- Loading never fails: an error is logged, and torch does the work.
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
PAYS_FROM = 2**20  # values of a vector: with fewer, the network is slower than the codec

log = logging.getLogger(__name__)
kernels: ModuleType | None = None  # codecs read this at every span
_loader: threading.Thread | None = None
_fails = False  # loading failed once, and would fail again
_one_at_a_time = threading.Lock()


def load_for(values: int) -> None:
    """Start loading if a vector of `values` values will be coded. Returns at once."""
    global _loader
    if values >= PAYS_FROM and _loader is None and kernels is None:
        _loader = threading.Thread(target=load, name="kernels")
        with contextlib.suppress(RuntimeError):  # the process is ending
            _loader.start()


def load() -> bool:
    """Load the kernels; may take seconds. False if there are none: then nothing has changed."""
    global kernels, _fails
    with _one_at_a_time:
        wanted = kernels is None and not _fails and os.environ.get(SWITCH) != "0"
        if wanted and importlib.util.find_spec("numba") is not None:
            try:
                kernels = importlib.import_module("atoll.training.codec.compiled.kernels")
            except Exception as why:  # compilers fail in many ways, and no failure is worth a round
                _fails = True
                log.warning("codecs run without compiled kernels: %s", why)
    return kernels is not None


def load_now(values: int) -> ModuleType | None:
    """The kernels, loaded first if `values` is large: for results with last bits that depend on them.

    The choice depends only on the number of values and the computer, so equal calls give equal bits.
    """
    return kernels if values >= PAYS_FROM and load() else None
