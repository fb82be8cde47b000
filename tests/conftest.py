"""What every test process begins with."""

import gc


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: collections that looked at them again took up to a fifth of the time."""
    gc.freeze()
