"""What a config stands for where a key is left out or written short: pure functions of its values."""

from __future__ import annotations

from atoll.base.errors import UsageError
from atoll.base.limits import CODED_PIECES_MAX
from atoll.features.archive.policy import ErasureParams
from atoll.peer.config.sections import KeepSection, RunConfig, RunSection
from atoll.policy.fault_tolerance import StatisticName, peers_for_one_liar
from atoll.policy.participation import THOUSAND, ParticipationPolicy
from atoll.policy.presets import PRESETS, statistic_of


def tolerance_of(run: RunSection) -> float:
    """The share of members that may lie, also where only `trust` is written."""
    if run.byzantine_tolerance is not None:
        return run.byzantine_tolerance
    return PRESETS[run.trust].tolerance


def keeps_records(config: RunConfig) -> bool:
    """Vertices hold what every member's record is worth: as the config says, else as its trust, or its recipe."""
    if config.run.reputation is not None:
        return config.run.reputation
    return PRESETS[config.run.trust].reputation or config.train.recipe == "cooperative"


def is_validated(run: RunSection) -> bool:
    """Members look at the agreed model: as the config says, else as its trust."""
    return bool(PRESETS[run.trust].looked_steps if run.validate_every is None else run.validate_every)


def chosen_statistic(config: RunConfig) -> StatisticName:
    """What rows become: as the config says, else as its trust has it, as far as there are members enough."""
    run = config.run
    if config.sync.statistic is not None:
        return config.sync.statistic
    least = run.min_peers or run.start_peers
    return statistic_of(PRESETS[run.trust], tolerance_of(run), least, run.start_peers)


def min_peers_of(config: RunConfig) -> int:
    """Members without which no round trains: as the config says, else as many as its rule needs for one liar,
    so that a run that shrinks waits; 1 where so many are not waited for at the start.
    """
    run = config.run
    if run.min_peers is not None:
        return run.min_peers
    needed = peers_for_one_liar(tolerance_of(run), chosen_statistic(config)) if tolerance_of(run) else 1
    return needed if needed <= run.start_peers else 1


def sample_of(config: RunConfig) -> ParticipationPolicy | None:
    """How many train in a round; None: everybody."""
    run, tolerance = config.run, tolerance_of(config.run)
    thousandths = -(-round(run.sample * THOUSAND * THOUSAND) // THOUSAND)
    if not run.sample_peers and not 0 < thousandths < THOUSAND:
        return None
    least = peers_for_one_liar(tolerance, chosen_statistic(config)) if tolerance else 1
    return ParticipationPolicy(0 if run.sample_peers else thousandths, run.sample_peers, least)


def coded_of(keep: KeepSection) -> ErasureParams | None:
    """How older states are cut, None where they lie whole. UsageError for what is no code."""
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
        f'keep.coded = "{keep.coded}" says not how many pieces of how many make a state',
        cause=f"it is K/N with 1 <= K < N <= {CODED_PIECES_MAX}",
        fix='write keep.coded = "6/10", or leave it empty',
    )
