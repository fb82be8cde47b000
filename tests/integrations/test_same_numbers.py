"""A library trains with Atoll as without it: accumulation, clipping, decay, schedulers, LoRA, and bf16."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import PATIENCE_S
from warm import WarmPeer

pytestmark = [pytest.mark.net, pytest.mark.timeout(150)]


def test_every_step_has_the_loss_of_a_plain_loop_and_all_that_is_saved_reloads(begun: Callable[..., WarmPeer]):
    """12 steps in 3 rounds of one member, whose outer step changes nothing; the plain loop is without Atoll."""
    process = begun(Path(__file__).with_name("same_numbers.py"))
    lines = process.stdout.read().splitlines()
    assert process.wait(PATIENCE_S) == 0, process.stderr.read()
    losses: dict[str, list[float]] = json.loads(lines[-1].removeprefix("losses"))
    cases = [case for case in losses if not case.startswith("plain")]
    plain = {case: losses.pop(f"plain {case}", losses["plain"]) for case in cases}
    assert len(plain) == 5 and len(losses.pop("plain")) == 12
    for case, found in losses.items():
        assert found == pytest.approx(plain[case], abs=1e-6, rel=0), case
