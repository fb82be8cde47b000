"""`atoll blame --round` in a folder without a running peer: for example, after the run is over.

Reads vertices, archived rows and the state before the round from this disk, and starts a trainer for the losses.

Invariants:
- No message is sent and no statement is signed: the effects of the peer's machine are dropped.
- No agreed value in the folder changes. The lock of the folder is held meanwhile.
Not responsible for: rows that are not in this folder (a running peer requests them from members).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.base.errors import RefusedError
from atoll.base.ids import ATTACHED, Digest
from atoll.base.machine import Start
from atoll.capabilities import CAPABILITIES
from atoll.crypto.identity import SessionSigner, SessionVerifier
from atoll.features.attribution.leave_one_out import archived_rows, question_of, state_lacking
from atoll.peer.membership.admission import DesiredRole
from atoll.peer.peer import Peer
from atoll.runtime.bootstrap import identity_of
from atoll.runtime.clock import SystemClock
from atoll.runtime.control.attribution import cannot_measure, cannot_replay, measure_effects
from atoll.runtime.control.socket import no_peer_here
from atoll.runtime.session_keys import LazySessionKey, session_of
from atoll.runtime.storage.store import PeerStore, damaged
from atoll.runtime.trainer import threads_per_trainer
from atoll.runtime.training_peer import link_data
from atoll.runtime.training_spec import parse_training_spec
from atoll.runtime.worker.capabilities import enable_capabilities
from atoll.runtime.worker.training_worker import TrainingWorker
from atoll.training.data import STDLIB
from atoll.training.spec import TrainingSpec, local_data


async def blame_offline(folder: Path, round: int) -> dict[str, Any]:
    """The change of the loss without each contributor of this round, from what this folder holds."""
    store = PeerStore(folder)
    try:
        peer = _peer_at_rest(store)
        island = TrainingWorker(store, threads_per_trainer(1))
        try:
            return await _blame(store, peer, island, round)
        finally:
            await island.close()
    finally:
        store.close()


def _peer_at_rest(store: PeerStore) -> Peer:
    """The machine of this folder's peer with its history and its index of rows; nothing drives it on."""
    kept, identity, clock = store.startup_values(), identity_of(store), SystemClock()
    if "genesis" not in kept:
        raise no_peer_here(store.folder)
    run = Digest(kept["run"])

    def make() -> SessionSigner:  # a visitor signs nothing
        return session_of(store, identity, run, peer.settings.round.signing.kind, clock.now())

    signer, visitor = LazySessionKey(identity.peer, make, clock.now), DesiredRole("visitor", "")
    peer = Peer(run, signer, SessionVerifier(), visitor, None, capabilities=CAPABILITIES)
    peer.handle(Start(kept), clock.now())
    if peer.mending is not None:
        raise damaged("the history", store.folder)
    return peer


async def _blame(store: PeerStore, peer: Peer, island: TrainingWorker, round: int) -> dict[str, Any]:
    try:
        asked = question_of(peer, round)
    except ValueError as why:
        raise cannot_replay(peer, round, why) from None
    history = peer.known.history
    island.learning = spec = parse_training_spec(peer.settings)
    island.tuned_before = lambda before: history.bodies[before - 1].tuned
    if spec.data == ATTACHED:
        raise cannot_measure()
    enable_capabilities(island, peer.settings, peer.run, peer.me)
    state = await island.context.find_state(asked.ground.parent.state, spec)
    if state is None:
        raise state_lacking(round, asked.body.trained)
    island.agreed.head, island.agreed.name = state, asked.ground.parent.state
    island.equip(_data_of(store, spec))
    here = archived_rows(peer).get(round, {})
    gone = tuple(place for place in asked.sources(peer.me) if place not in here)
    return await measure_effects(peer, island, asked, gone)


def _data_of(store: PeerStore, spec: TrainingSpec) -> str:
    """Location of the run's data set. Raises RefusedError if it is not on this disk."""
    if store.has_blob(spec.data_blob):
        return link_data(store, spec.data_blob)
    if local_data(spec) is not None:
        return STDLIB
    raise RefusedError(
        "E-BLM-09",
        "the data set of this run is not in this folder",
        cause="this peer observed, or it left before the data arrived",
        fix=f"ask at another member; or atoll up --dir {store.folder}, which fetches it",
    )
