"""All-reduce without the rest: see `atoll.runtime.allreduce.api`."""

from atoll.runtime.allreduce.api import Group, Work, found, join
from atoll.runtime.allreduce.delta_reference import Held
from atoll.runtime.allreduce.error_feedback import ErrorFeedback
from atoll.runtime.allreduce.worker import Reduced

__all__ = ["ErrorFeedback", "Group", "Held", "Reduced", "Work", "found", "join"]
