"""Which of the four reduces carries a plan out: who believes owners or not, who weighs rows by distances or not."""

from __future__ import annotations

from atoll.protocol.reduce.plan import ReducePlan
from atoll.protocol.reduce.run import Reduce
from atoll.protocol.reduce.surroundings import Surroundings
from atoll.protocol.reduce.watched import WatchedReduce
from atoll.protocol.reduce.watched_weighed import WatchedWeighedReduce
from atoll.protocol.reduce.weighed import WeighedReduce
from atoll.wire.envelope import Notary


def reduce_for(notary: Notary, plan: ReducePlan, around: Surroundings) -> Reduce:
    if plan.witnesses:
        return (WatchedWeighedReduce if plan.weighs else WatchedReduce)(notary, plan, around)
    return (WeighedReduce if plan.weighs else Reduce)(notary, plan, around)
