"""Parsing and formatting of quantities: bytes, seconds, rates, counts, spans of rounds."""

from __future__ import annotations

import re

_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*$")
_SECONDS = {  # seconds per unit: the units that are written in this way
    1e-3: "ms millisecond milliseconds",
    1.0: "s sec secs second seconds",
    60.0: "m min mins minute minutes",
    3600.0: "h hr hrs hour hours",
    86400.0: "d day days",
    604800.0: "w week weeks",
}
_UNITS = {unit: seconds for seconds, units in _SECONDS.items() for unit in units.split()} | {"": 1.0}


def parse_duration_s(text: str) -> float:
    """Parse '30 s', '2h', '3 days', '250ms' or '15' to seconds. Raises ValueError with the accepted forms."""
    match = _DURATION.match(text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a duration; write for example 250ms, 30s, 15min, 2h or 7d")
    return float(match[1]) * _UNITS[match[2]]


_RATE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kMG]?)(bit|bps|B)(?:/s)?\s*$")
_COUNT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kKMBT]?)\s*$")
_THOUSANDS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def parse_rate_bytes_s(text: str) -> float:
    """Parse '20Mbit', '1 Gbit/s' or '2.5MB/s' to bytes per second. Raises ValueError with the accepted forms."""
    match = _RATE.match(text)
    if match is None or not float(match[1]):
        raise ValueError(
            f"{text!r} is not a rate; write for example {_rate_guess(text)}1Gbit or 2.5MB (per second)"
        )
    return float(match[1]) * _THOUSANDS[match[2]] / (1 if match[3] == "B" else 8)


def _rate_guess(text: str) -> str:
    """The number that was given without a unit, as a usual rate."""
    number = text.strip()
    return f"{number if number.isdecimal() and int(number) else 20}Mbit, "


def parse_count(text: str) -> int:
    """Parse '1B', '350M', '22k' or '1000000' to a count. Raises ValueError with the accepted forms."""
    match = _COUNT.match(text)
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is not a count; write for example 350M, 1B or 1.5B")
    return round(float(match[1]) * _THOUSANDS[match[2]])


def count_text(count: float) -> str:
    """Format 168_000 as '168 k', as in names of models."""
    for unit in ("", " k", " M", " B"):
        if abs(count) < 1000 or unit == " B":
            return f"{count:.3g}{unit}"
        count /= 1000
    raise AssertionError("unreachable")


def bytes_text(count: float) -> str:
    """Format 1536 bytes as '1.5 kB' (decimal units, as for network links)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def per_second_text(rate: float, unit: str) -> str:
    """Format 1910.2 samples as '1,910 samples/s', 0.42 as '0.42 samples/s'; empty if nothing was measured."""
    return (f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}") + f" {unit}/s" if rate else ""


def counted_text(count: int, noun: str) -> str:
    """Format 1, "round" as '1 round', and 2000 as '2,000 rounds'."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def seconds_text(duration_s: float) -> str:
    """Format 75.2 seconds as '1 min 15 s', 0.25 as '250 ms', 604_790 as '7 d': at most two units."""
    if duration_s < 1:
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    if round(duration_s) < 3600:
        return _two(round(duration_s), 60, "min", "s")
    if duration_s < 2 * 86400:
        return _two(round(duration_s / 60), 60, "h", "min")
    return _two(round(duration_s / 3600), 24, "d", "h")


def _two(count: int, size: int, large: str, small: str) -> str:
    """Format `count` small units, `size` of which are a large one; no small unit where there are none."""
    whole, rest = divmod(count, size)
    return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"


HISTORY_ROUND = "a round of the history, as atoll checkpoint list shows it"  # help of an argument


def history_round_text(round: int, trained: int | None) -> str:
    """Format a round of the history, and the trained rounds up to it if they are known: people count those."""
    if round == -1:
        return "genesis"
    after = f" (after {counted_text(trained, 'trained round')})" if trained is not None else ""
    return f"history round {round}{after}"


def spans_of(rounds: list[int]) -> list[tuple[int, int]]:
    """Group sorted rounds into spans: [3, 4, 5, 9] -> [(3, 5), (9, 9)]."""
    spans: list[tuple[int, int]] = []
    for round in rounds:
        if spans and spans[-1][1] == round - 1:
            spans[-1] = (spans[-1][0], round)
        else:
            spans.append((round, round))
    return spans


def spans_text(spans: list[tuple[int, int]]) -> str:
    return ", ".join(str(a) if a == b else f"{a}…{b}" for a, b in spans)
