"""All-reduce without the rest: see `atoll.host.group`."""

from atoll.host.group import Group, Work, found, join
from atoll.host.group_feedback import ErrorFeedback
from atoll.host.group_held import Held
from atoll.host.group_island import Reduced

__all__ = ["ErrorFeedback", "Group", "Held", "Reduced", "Work", "found", "join"]
