"""Parsing and formatting of quantities: bytes, seconds, rates, counts, spans of rounds."""

from __future__ import annotations

import re

_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|sec|m|min|h|d)?\s*$")
_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


def parse_duration_s(text: str) -> float:
    """Parse '30 s', '2h', '250ms' or '15' to seconds. Raises ValueError with the accepted forms."""
    match = _DURATION.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write for example 250ms, 30s, 15min, 2h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


_RATE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kMG]?)(bit|bps|B)(?:/s)?\s*$")
_COUNT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kKMBT]?)\s*$")
_THOUSANDS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def parse_rate_bytes_s(text: str) -> float:
    """Parse '20Mbit', '1 Gbit/s' or '2.5MB/s' to bytes per second. Raises ValueError with the accepted forms."""
    match = _RATE.match(text)
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is not a rate; write for example 20Mbit, 1Gbit or 2.5MB (per second)")
    return float(match[1]) * _THOUSANDS[match[2]] / (1 if match[3] == "B" else 8)


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


def counted_text(count: int, noun: str) -> str:
    """Format 1, "round" as '1 round', and 2000 as '2,000 rounds'."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def seconds_text(duration_s: float) -> str:
    """Format 75.2 seconds as '1 min 15 s', 0.25 as '250 ms'."""
    if duration_s < 1:
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


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
