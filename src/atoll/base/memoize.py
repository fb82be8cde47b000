"""Memoization of pure functions by the identity of their argument.

For immutable arguments that are costly to hash, such as the members of the newest vertex, which every message
needs. The cache keeps its arguments alive, so an id is never reused, and nothing is hashed. All peers of a
simulation share the results, which are equal for equal arguments. The caller must not change a result.
Invariants: at most `last` results are held.
Not responsible for: functions of mutable values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")

LAST = 16  # results held: a peer needs one or two vertices, and all peers of a simulation share them


def memoize_by_identity(make: Callable[[A], R], last: int = LAST) -> Callable[[A], R]:
    """Wrap `make` so that it runs once per argument object."""
    known: dict[int, tuple[A, R]] = {}

    def call_once(value: A) -> R:
        found = known.get(id(value))  # the argument is kept alive here, so no other object has this id
        if found is not None:
            return found[1]
        result = make(value)
        if len(known) >= last:
            known.pop(next(iter(known)), None)
        known[id(value)] = value, result
        return result

    return call_once
