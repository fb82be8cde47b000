"""Voters that lie, never more than the quorum rule withstands; nobody honest is harmed, and rounds go on."""

from __future__ import annotations

from atoll.sim.scenarios.stage import Stage


def liars(stage: Stage) -> None:
    stage.gather()
    stage.until_round(stage.rounds - 1)
