"""Defaults of omitted or abbreviated config keys, as pure functions of a config."""

from __future__ import annotations

from typing import Any

from atoll.base.errors import UsageError
from atoll.base.limits import CODED_PIECES_MAX
from atoll.peer.config.sections import KeepSection, RunConfig, RunSection, declarations, value_of
from atoll.policy.capability_terms import ErasureParams
from atoll.policy.fault_tolerance import StatisticName, peers_for_one_liar
from atoll.policy.participation import THOUSAND, ParticipationPolicy
from atoll.policy.presets import PRESETS, statistic_of


def from_trust(config: RunConfig, key: str) -> Any:
    """A setting as written, else the value of its `run.trust`."""
    value = value_of(config, key)
    return getattr(PRESETS[config.run.trust], declarations()[key].trust) if value is None else value


def tolerance_of(run: RunSection) -> float:
    """Share of members that may lie, derived from `trust` if omitted."""
    return from_trust(RunConfig(run), "run.byzantine_tolerance")


def keeps_records(config: RunConfig) -> bool:
    """Whether vertices keep reputation: from the config, else from its trust or recipe."""
    is_cooperative = config.run.reputation is None and config.train.recipe == "cooperative"
    return is_cooperative or from_trust(config, "run.reputation")


def is_validated(run: RunSection) -> bool:
    """Whether members evaluate the agreed model: from the config, else from its trust."""
    return bool(PRESETS[run.trust].looked_steps if run.validate_every is None else run.validate_every)


def chosen_statistic(config: RunConfig) -> StatisticName:
    """Statistic for the rows of a part: from the config, else from its trust and number of members."""
    run = config.run
    if config.sync.statistic is not None:
        return config.sync.statistic
    least = run.min_peers or run.start_peers
    return statistic_of(PRESETS[run.trust], tolerance_of(run), least, run.start_peers)


def min_peers_of(config: RunConfig) -> int:
    """Members required for a round to train: from the config, else what its statistic needs for one liar.

    So a run that shrinks waits. 1 if the run starts with fewer members than that.
    """
    run = config.run
    if run.min_peers is not None:
        return run.min_peers
    needed = peers_for_one_liar(tolerance_of(run), chosen_statistic(config)) if tolerance_of(run) else 1
    return needed if needed <= run.start_peers else 1


def sample_of(config: RunConfig) -> ParticipationPolicy | None:
    """Sampling of trainers per round; None: all train."""
    run, tolerance = config.run, tolerance_of(config.run)
    thousandths = -(-round(run.sample * THOUSAND * THOUSAND) // THOUSAND)
    if not run.sample_peers and not 0 < thousandths < THOUSAND:
        return None
    least = peers_for_one_liar(tolerance, chosen_statistic(config)) if tolerance else 1
    return ParticipationPolicy(0 if run.sample_peers else thousandths, run.sample_peers, least)


def coded_of(keep: KeepSection) -> ErasureParams | None:
    """Erasure parameters of older states; None: whole states. UsageError for an invalid code."""
    if not keep.coded:
        return None
    k, _, n = keep.coded.partition("/")
    try:
        made = ErasureParams(int(k), int(n), keep.every_rounds, keep.repair_after)
        if 1 <= made.k < made.n <= CODED_PIECES_MAX:
            return made
    except ValueError:
        pass
    raise UsageError(
        "E-CFG-12",
        f'keep.coded = "{keep.coded}" is not of the form K/N (K of N pieces make a state)',
        cause=f"it needs 1 <= K < N <= {CODED_PIECES_MAX}",
        fix='write keep.coded = "6/10", or leave it empty',
    )
