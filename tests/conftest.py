"""What every test process begins with."""

import gc
import signal
import sys
from collections.abc import Generator, Iterator
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings

# nobody fails because others use the computer: an example has no deadline, and to draw it slowly is no fault
settings.register_profile("new", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# a change is judged by the same examples wherever it is tested; `make long` looks at new ones
settings.register_profile("steady", settings.get_profile("new"), derandomize=True)
settings.load_profile("steady")
# in the background of a shell it is ignored, and so it would be in all processes that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def doors_of_their_own() -> Iterator[None]:
    """Peers under test have no neighbours from elsewhere, and those that are killed leave no sockets behind."""
    with (
        TemporaryDirectory(prefix="doors-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no GPU here: torch.cuda.is_available() is False")


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: collecting them again and again took up to two fifths of the time."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)  # as fast as no collection, without its memory


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that a scenario fails reports the smallest schedule of faults that fails like it."""
    report = yield
    harness = sys.modules.get("atoll.simulation.scenarios.harness")
    why = call.excinfo.value if call.excinfo is not None else None
    if harness is not None and isinstance(why, harness.ScenarioFailed) and not report.skipped:
        from atoll.simulation.failure_minimizer import FailureMinimizer
        from atoll.simulation.scenarios import SCENARIOS

        report.sections.append(("smallest schedule", FailureMinimizer(why, SCENARIOS).minimize()))
    return report
