"""What audits are worth: how often a cheater is caught, what it must have to lose, and what auditing costs.

Plain arithmetic on shares of one round's training, which is 1.
"""

from __future__ import annotations

RATE = 0.05  # of all rounds of all trainers that are audited: a stake of 20 rounds' gain, 2 to 3 % more work


def caught_share(rate: float, power: float = 1.0, touched: float = 1.0) -> float:
    """p': chance per round that a cheater is caught. The rate, times how often a replay of what it touched finds it
    out, times the share of its segments that it touched, since one of them is drawn."""
    return rate * power * touched


def stake_needed(gain: float, caught: float) -> float:
    """The least stake with which honesty is best: g (1 − p') − S p' ≤ 0, so S ≥ g (1 − p') / p'.

    Whoever cheats in a share m of its segments gains m g and is caught with m p', so it must lose
    (g / p') (1 − m p'): the fewer it touches, the more, up to g / p'. `stake_for_any` is that bound.
    """
    return gain * (1 - caught) / caught


def stake_for_any(gain: float, caught: float) -> float:
    """The stake that also keeps those honest who would cheat in few of their segments."""
    return gain / caught


def expected_gain(gain: float, caught: float, stake: float) -> float:
    """Per round, of a cheater: what it saves while unseen, less what it loses when it is not."""
    return gain * (1 - caught) - stake * caught


def unseen_share(caught: float, rounds: int) -> float:
    """Chance that so many cheating rounds are never caught: (1 − p')^r."""
    return (1 - caught) ** rounds
