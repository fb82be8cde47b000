"""What every test process begins with."""

import gc

from hypothesis import settings

# a change is judged by the same examples wherever it is tested; `make long` looks at new ones
settings.register_profile("steady", derandomize=True)
settings.load_profile("steady")


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: collections that looked at them again took up to a fifth of the time."""
    gc.freeze()
