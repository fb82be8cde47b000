"""One round of agreed results applied to a state, as peers do it in two tasks."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.crypto.digest import Buffer
from atoll.training.codec import Codec
from atoll.training.recipe.outer import SHARED
from atoll.training.recipe.state import SharedState, apply_update, decode_parts


def advance(
    state: SharedState,
    parts: Sequence[Buffer | None],
    bounds: Sequence[tuple[int, int]],
    codec: Codec,
    outer: SHARED,
    *,
    steps: int,
    samples: int,
    tokens: int,
    counters: Sequence[Sequence[int]] = (),
    turn: tuple[int, int] | None = None,
) -> SharedState:
    """The state after a round with encoded means as results: `moved_by` the decoded results.

    `parts` are the owners' results in the order of `bounds`; None is a part without a result: its combined update
    is zero. `bounds` count from the beginning of `turn`. PeerFault if a result does not decode.
    """
    lo, hi = turn or (0, len(state.anchor_F))
    combined_N = decode_parts(parts, bounds, [codec] * len(bounds), hi - lo)
    return apply_update(
        combined_N, state, outer, steps=steps, samples=samples, tokens=tokens, counters=counters, turn=turn
    )
