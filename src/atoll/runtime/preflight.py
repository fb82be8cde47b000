"""Preflight: checks of this computer, of a folder and of the way to a run's members, in 5 seconds at most.

Invariants:
- Nothing is written, and no use of a ticket is spent: members see only connections that close again.
- Every failure is the error that joining would end with, or names what would be missing.
Not responsible for: admission by the members, and whether a model fits.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

from atoll.base.errors import AtollError, NetworkError, RunFailedError, UsageError
from atoll.base.units import bytes_text, seconds_text
from atoll.base.version import VERSION
from atoll.crypto.identity import require_post_quantum
from atoll.runtime.network.dialer import cannot_dial, cannot_listen, endpoint_of
from atoll.runtime.network.link_settings import LinkSettings
from atoll.runtime.network.transport import Connection, ConnectionCallbacks, Transport, TransportOptions
from atoll.runtime.network.transports import TRANSPORTS
from atoll.wire.libp2p.multiaddr import DialAddress
from atoll.wire.ticket import parse

LINK_S = 4.0  # longest wait for all addresses together
DISK_LEAST_BYTES = 50 * 10**6  # history, keys and log of a small run; states come on top
DISK_FEW_BYTES = 2 * 10**9  # less is worth a warning: a member keeps several states of the model
MEMORY_LEAST_BYTES = 200 * 10**6  # PyTorch in the peer process alone takes more
MEMORY_FEW_BYTES = 10**9  # less is worth a warning: two processes load PyTorch


@dataclass(frozen=True)
class PreflightResult:
    """Result of one check."""

    what: str
    text: str
    error: AtollError | None = None
    warning: bool = False

    @property
    def verdict(self) -> Literal["ok", "warning", "failed"]:
        return "failed" if self.error is not None else "warning" if self.warning else "ok"


def check_computer(folder: Path) -> list[PreflightResult]:
    """Checks that need neither torch nor a network: versions, disk, memory."""
    return [check_versions(), check_disk(folder), check_memory()]


def check_versions() -> PreflightResult:
    text = f"atoll {VERSION}, Python {platform.python_version()}"
    try:
        require_post_quantum()
        return PreflightResult("versions", f"{text}, torch {metadata.version('torch')}")
    except AtollError as why:
        return PreflightResult("versions", why.what, why)


def check_disk(folder: Path) -> PreflightResult:
    """Room where the peer's folder is, or will be."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    text = f"{bytes_text(free)} free in {there}"
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        why = UsageError(
            "E-DIR-05",
            f"{folder!s:.200} cannot be a peer's folder: {there} is not writable, or no folder",
            cause="a file has that name, or the place is read-only or another user's",
            fix="choose another folder with --dir",
        )
        return PreflightResult("disk", why.what, why)
    if free < DISK_LEAST_BYTES:
        why = RunFailedError(
            "E-DISK-01",
            f"{text}; a peer needs {bytes_text(DISK_LEAST_BYTES)} at least",
            cause="the disk is full",
            fix="free some space, or choose a folder on another disk with --dir",
        )
        return PreflightResult("disk", text, why)
    few = free < DISK_FEW_BYTES
    return PreflightResult(
        "disk", f"{text}; a member keeps several states of the model" if few else text, warning=few
    )


def check_memory() -> PreflightResult:
    free = psutil.virtual_memory().available
    text = f"{bytes_text(free)} available"
    if free < MEMORY_LEAST_BYTES:
        why = RunFailedError(
            "E-TRN-03",
            f"{text}; a peer and its trainer need {bytes_text(MEMORY_FEW_BYTES)}",
            cause="other programs hold the memory",
            fix="end other programs, or use another computer",
        )
        return PreflightResult("memory", text, why)
    few = free < MEMORY_FEW_BYTES
    return PreflightResult("memory", f"{text}; two processes load PyTorch" if few else text, warning=few)


def check_processor(device: str) -> PreflightResult:
    """The device that trains. Imports torch."""
    from atoll.runtime.trainer import check_device, chosen_device

    try:
        check_device(device)
    except AtollError as why:
        return PreflightResult("device", why.what, why)
    return PreflightResult("device", f"{chosen_device(device)}, {os.cpu_count()} cores")


def check_ticket(text: str) -> tuple[PreflightResult, tuple[str, ...]]:
    """The ticket itself, and the addresses in it."""
    try:
        ticket = parse(text)
        ticket.verify(now := time.time())
    except AtollError as why:
        return PreflightResult("ticket", why.what, why), ()
    left = seconds_text(ticket.expires_wall_s - now)
    return PreflightResult("ticket", f"for a {ticket.role}, good for {left}"), ticket.addresses


async def check_links(addresses: Sequence[str]) -> list[PreflightResult]:
    """Whether a process listens at each address; the failures are errors only if none answers."""
    found = await asyncio.gather(*map(_check_link, addresses))
    reached = any(one.error is None for one in found)
    return [PreflightResult(one.what, one.text, warning=one.error is not None) if reached else one for one in found]


async def check_bindable(addresses: Sequence[str]) -> None:
    """Raise NetworkError for an address that this computer cannot listen on now. Nothing listens afterwards."""
    for address in addresses:
        where = endpoint_of(address)
        try:
            listener = await _transport_of(where).listen(where, _refuse)
        except OSError as why:
            raise cannot_listen(address, why) from why
        listener.close()
        await listener.wait_closed()


def _transport_of(where: DialAddress) -> Transport:
    options = TransportOptions(LinkSettings().congestion, on_written=lambda written_bytes: None)
    return TRANSPORTS[where.transport](options)


def _refuse(connection: Connection) -> ConnectionCallbacks:
    raise ConnectionAbortedError("this address is only being checked")


async def _check_link(address: str) -> PreflightResult:
    begin = time.monotonic()
    try:
        where = endpoint_of(address)
        async with asyncio.timeout(LINK_S):
            (await _transport_of(where).dial(where)).abort()
    except OSError as why:  # TimeoutError is one too
        error = cannot_dial(address, why)
        return PreflightResult("link", error.what, error)
    except UsageError as why:
        return PreflightResult("link", why.what, NetworkError(why.code, why.what, cause=why.cause, fix=why.fix))
    return PreflightResult("link", f"{address} answers after {seconds_text(time.monotonic() - begin)}")
