"""wip"""


def init() -> None:
    """wip"""
