"""The README's measured facts and the summaries of runs say what bench/results holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from benchmark_reference import README, RESULTS, RUNS, readme_text, results


def test_every_measured_fact_of_the_readme_is_a_committed_result():
    """The table between the two markers is generated: python tools/benchmark_reference.py."""
    text = README.read_text()
    assert readme_text(text) == text


@pytest.mark.parametrize("name", results())
def test_a_result_says_what_its_figures_say(name: str):
    """Command, title and summary follow from the run's entry and the figures beside them."""
    run = next(run for run in RUNS if run.name == name)
    result = results()[name]
    told = (result["command"], result["measured"], result["summary"])
    assert told == (run.command, run.measured(result), run.summary(result))


def test_every_file_of_results_has_a_command():
    assert {file.stem for file in RESULTS.iterdir()} <= {run.name for run in RUNS}
