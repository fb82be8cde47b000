"""Stories use the same real processes as the benches, and begin them as the tests of commands do."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "bench"), str(Path(__file__).parents[1] / "cli")]
