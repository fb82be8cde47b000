"""Which of the four reduces carries a plan out: who believes owners or not, who weighs rows by distances or not."""

from __future__ import annotations

from collections.abc import Callable, Container

from atoll.base.ids import PeerId
from atoll.protocol.reduce.plan import ReducePlan
from atoll.protocol.reduce.run import Awaits, Reduce
from atoll.protocol.reduce.watched import WatchedReduce
from atoll.protocol.reduce.watched_weighed import WatchedWeighedReduce
from atoll.protocol.reduce.weighed import WeighedReduce
from atoll.wire.envelope import Notary
from atoll.wire.messages.statements import Commit


def reduce_for(
    notary: Notary,
    plan: ReducePlan,
    vote_key_of: Callable[[PeerId], bytes | None],
    commit_of: Callable[[PeerId], Commit | None],
    awaits: Awaits,
    gone: Callable[[PeerId], bool],
    said: Container[str] = (),
    filled: Callable[[], int | None] = lambda: None,
    unheard: Callable[[PeerId], bool] = lambda peer: False,
    judges: bool = False,
    two_faced: Container[PeerId] = (),
) -> Reduce:
    """`judges`: I vote, so I believe no single owner where there are witnesses. `two_faced`: who committed twice.

    All else as in `Reduce`.
    """
    common = notary, plan, vote_key_of, commit_of, awaits, gone, said, filled, unheard
    if plan.witnesses:
        kind = WatchedWeighedReduce if plan.weighs else WatchedReduce
        return kind(*common, judges, two_faced)
    return WeighedReduce(*common) if plan.weighs else Reduce(*common)
