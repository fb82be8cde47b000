"""wip"""


def plot() -> None:
    """wip"""
