"""Answers of pure functions, remembered for the very same arguments.

For values that are immutable, costly to look through and asked about again and again: what follows from the
members of the newest vertex is asked with every word that somebody says. Arguments are told apart by identity and
kept while they are known, so an answer is never another value's, and nothing is hashed. All peers of a simulation
share the answers; that hides nothing, since each would have made the same of the same value. What comes back is to
be read only. Never for functions of anything that can change. Holds the last few, no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")

LAST = 16  # a peer asks about one or two vertices; all peers of one simulation share them


def of_the_same(make: Callable[[A], R], last: int = LAST) -> Callable[[A], R]:
    """`make`, asked once per object."""
    known: dict[int, tuple[A, R]] = {}

    def ask(value: A) -> R:
        found = known.get(id(value))  # kept alive here: no other object can have this id
        if found is not None:
            return found[1]
        answer = make(value)
        if len(known) >= last:
            known.pop(next(iter(known)), None)
        known[id(value)] = value, answer
        return answer

    return ask
