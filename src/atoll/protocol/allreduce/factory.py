"""Composition of the all-reduce engine with the strategies that a plan names."""

from __future__ import annotations

from atoll.protocol.allreduce.engine import AllReduce
from atoll.protocol.allreduce.environment import ReduceEnvironment
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.strategies import PlainMean, TrustingResultVerification
from atoll.protocol.allreduce.verified import CrossCheckedOwners
from atoll.protocol.allreduce.weighted import DistanceWeighting
from atoll.wire.envelope import StatementSigner


def build_reduce(notary: StatementSigner, plan: ReducePlan, around: ReduceEnvironment) -> AllReduce:
    assert not (plan.witnesses and plan.has_distance_weights), (
        "settings refuse witnesses where distances weigh rows"
    )
    weighting = DistanceWeighting if plan.has_distance_weights else PlainMean
    verification = CrossCheckedOwners if plan.witnesses else TrustingResultVerification
    return AllReduce(notary, plan, around, weighting, verification)
