"""All-reduce without a training run: see `atoll.runtime.allreduce.api`."""

from atoll.runtime.allreduce.api import ReduceOptions, found, join
from atoll.runtime.allreduce.call import ReduceResult
from atoll.runtime.allreduce.delta_reference import DeltaReference
from atoll.runtime.allreduce.error_feedback import ErrorFeedback
from atoll.runtime.allreduce.group import Group
from atoll.runtime.allreduce.pending import PendingReduce

__all__ = [
    "DeltaReference",
    "ErrorFeedback",
    "Group",
    "PendingReduce",
    "ReduceOptions",
    "ReduceResult",
    "found",
    "join",
]
