"""Which of the three reduces carries out a plan: witnesses check owners, distances weigh rows, or neither."""

from __future__ import annotations

from atoll.protocol.allreduce.engine import Reduce
from atoll.protocol.allreduce.environment import Surroundings
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.verified import WatchedReduce
from atoll.protocol.allreduce.weighted import WeighedReduce
from atoll.wire.envelope import Notary


def reduce_for(notary: Notary, plan: ReducePlan, around: Surroundings) -> Reduce:
    if plan.witnesses:
        assert not plan.weighs, "settings refuse witnesses where distances weigh rows"
        return WatchedReduce(notary, plan, around)
    return (WeighedReduce if plan.weighs else Reduce)(notary, plan, around)
