"""All-reduce without the rest: see `atoll.runtime.allreduce.api`."""

from atoll.runtime.allreduce.api import Group, PendingReduce, found, join
from atoll.runtime.allreduce.delta_reference import DeltaReference
from atoll.runtime.allreduce.error_feedback import ErrorFeedback
from atoll.runtime.allreduce.worker import ReduceResult

__all__ = ["DeltaReference", "ErrorFeedback", "Group", "PendingReduce", "ReduceResult", "found", "join"]
