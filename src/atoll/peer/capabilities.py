"""Optional capabilities of a peer, as the composition root hands them in (`atoll/capabilities.py`).

Invariants:
- The kernel knows these interfaces and no capability. Without any capability a peer trains and agrees.
Not responsible for: whether a run turns a capability on; its genesis does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

from atoll.base.ids import PeerId
from atoll.peer.round_extension import RoundHooks
from atoll.peer.sync.fork_monitor import ForkMonitor
from atoll.peer.sync.state_archive import DistributedStateArchive
from atoll.peer.verify.interface import Verifier
from atoll.policy.capability_terms import ErasureParams
from atoll.policy.ledger import LedgerSet
from atoll.protocol.history.chain import VertexChain

ArchiveMaker: TypeAlias = Callable[
    [PeerId, ErasureParams, VertexChain, LedgerSet, Callable[[PeerId], bool]], DistributedStateArchive
]


@dataclass(frozen=True)
class PeerPlugins:
    verifiers: Sequence[Verifier] = ()  # ledgers and machines, in the order of calls
    round_extension: type[RoundHooks] = RoundHooks
    archive: ArchiveMaker | None = None  # None: older states stay whole
    forks: Callable[[PeerId, VertexChain, Set[PeerId]], ForkMonitor] = ForkMonitor
