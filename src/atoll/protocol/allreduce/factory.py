"""Which of the three reduces carries out a plan: witnesses check owners, distances weigh rows, or neither."""

from __future__ import annotations

from atoll.protocol.allreduce.engine import AllReduce
from atoll.protocol.allreduce.environment import ReduceEnvironment
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.verified import VerifiedReduce
from atoll.protocol.allreduce.weighted import WeightedReduce
from atoll.wire.envelope import StatementSigner


def reduce_for(notary: StatementSigner, plan: ReducePlan, around: ReduceEnvironment) -> AllReduce:
    if plan.witnesses:
        assert not plan.weighs, "settings refuse witnesses where distances weigh rows"
        return VerifiedReduce(notary, plan, around)
    return (WeightedReduce if plan.weighs else AllReduce)(notary, plan, around)
