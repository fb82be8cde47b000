"""Capabilities that this program offers to every peer, in the real world and in the simulator.

A new check is a folder in `verification/`, and one line in `verification/registry.py`.
"""

from __future__ import annotations

from atoll.features.archive.machine import ARCHIVE, ArchiveMachine
from atoll.features.attribution.row_archive import ROW_ARCHIVE
from atoll.features.forks.machine import ChainSplitMachine
from atoll.features.partition_training.machine import DisconnectedTraining
from atoll.peer.capabilities import PeerPlugins
from atoll.verification.registry import VERIFIERS

CAPABILITIES = PeerPlugins(
    (*VERIFIERS, ARCHIVE, ROW_ARCHIVE), DisconnectedTraining, ArchiveMachine, ChainSplitMachine
)
