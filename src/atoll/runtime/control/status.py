"""Status of a running peer, for its operator: the run, its members, and what holds this peer back.

Invariants:
- Every reply is plain data, exact at the time of the request. Nothing is shown as agreed before it is.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from atoll.base.ids import PeerId
from atoll.base.version import VERSION
from atoll.features.archive.machine import ArchiveMachine
from atoll.features.archive.reed_solomon import piece_bytes
from atoll.peer.governance.settings_change import settings_after
from atoll.peer.operator_commands import turnout
from atoll.peer.settings import RunSettings
from atoll.policy.data.positions import positions_told
from atoll.policy.reputation import scores_of
from atoll.runtime.control.agreed_loss import agreed_loss
from atoll.runtime.control.pause import pause_told
from atoll.runtime.event_log import member_entry, waiting_text
from atoll.runtime.network.addresses import scope_of

if TYPE_CHECKING:  # the driver imports torch, and this file is read by light verbs
    from atoll.runtime.training_peer import TrainingPeer

THROUGH_TOLD = 2  # names of members through which another one is reached
MISSED_TOLD = 8  # consecutive uncounted rounds; fewer are normal for newcomers and slow networks


def status_of(host: TrainingPeer) -> dict[str, Any]:
    from atoll.runtime.control.settings_change import amended_of

    p, machine = host.progress, host.machine
    members = peers_of(host)
    mine = next((m for m in members if m["peer"] == host.me), None)
    there = turnout(machine, host.clock.now())
    head = machine.history.head_body if machine.history is not None else None
    working = sum(m.is_auditable_trainer for m in head.members) if head is not None else 0
    now = _settings_now(host)
    wanted = now.min_peers if p.trained else now.start_peers
    return {
        "run": p.run,
        "run_id": host.run_id.hex(),
        "peer": host.me,
        "name": host.wish.name,
        "folder": str(host.folder),
        "process": os.getpid(),
        "version": VERSION,
        "standing": mine["standing"] if mine else "outside",
        "role": host.wish.role,
        "round": machine.at,
        "trained": head.trained if head is not None else 0,
        "rounds": _settings_now(host).rounds,
        "amended": amended_of(host),
        "phase": p.phase,
        "topology": p.topology,
        "topology_why": p.topology_why,
        "step": p.step,
        "inner_steps": p.inner_steps,
        "loss": agreed_loss(head, machine.history.bodies.get, p.loss) if machine.history is not None else p.loss,
        "step_loss": p.step_loss,
        "state": head.state.hex() if head is not None else "",
        "model": p.model,
        "parameters": p.parameters,
        "base_values": p.base_values,
        "unit": p.unit,
        "tokens": host.learned,
        "tokens_per_s": round(p.tokens_per_s, 3),
        "voters": len(there.voters),
        "present": there.here,
        "quorum": there.needed,
        "protocol": "raft" if machine.settings.by_raft else "bft",
        "statistic": machine.settings.statistic,
        "audits": {"drawn": p.audits_drawn} | p.verdicts if "audit" in machine.verifiers.machines else None,
        "checks": {
            check.name: {"title": check.title, "outcomes": p.opinions[check.name]}
            for check in machine.verifiers.verifiers
            if check.title and check.name in machine.verifiers.machines
        },
        "validation": _validation(host) if "validate" in machine.verifiers.machines else None,
        "data": positions_told(head) if head is not None else None,
        "kept": kept_of(host),
        "paused": host.paused() or pause_told(host) or waiting_text(working, wanted),
        "missing": p.missing,
        "alike": [[p.name_of(peer) for peer in peers] for peers in p.alike],
        "uncounted": uncounted_text(mine["missed"] if mine else 0, p.passed, _settings_now(host)),
        "apart_steps": p.apart_steps,
        "branches": [b | {"members": [p.name_of(peer) for peer in b["members"]]} for b in p.branches],
        "late": [work | {"name": p.name_of(work["peer"])} for work in p.late],
        "unaudited": unaudited_text(host),
        "vote": vote_text(host),
        "trouble": p.trouble,
        "bytes_out": host.bytes_out,
        "bytes_in": host.bytes_in,
        "bytes_data_parallel": p.bytes_data_parallel,
        "addresses": list(host.addresses),
        "over": machine.over,
        "members": members,
    }


def unaudited_text(host: TrainingPeer) -> str:
    """Warning for a member with work that cannot be replayed, in a run that audits; else empty."""
    if not (host.wish.unaudited and host.machine.settings.audited_share):
        return ""
    return (
        "this run replays some of its members' work, and the steps of a GPU cannot be replayed: this peer's "
        "updates move nothing and it gets no vote; on a CPU both count: --set node.device=cpu"
    )


def vote_text(host: TrainingPeer) -> str:
    """Progress of a trainer towards its vote, in a run where votes are earned; else empty."""
    history, terms = host.machine.history, host.machine.settings.vote_terms
    body = history.head_body if history is not None else None
    if body is None or terms is None or body.invited is UNSET or host.wish.unaudited:
        return ""
    for m, counted in zip(body.members, body.invited.counted, strict=False):
        if m.peer == host.me and m.role == "apprentice" and counted < terms.after_rounds:
            return f"this peer votes once {terms.after_rounds} of its updates have counted; {counted} have so far"
        if m.peer == host.me and m.role == "apprentice":
            return (
                "the vote of this peer waits: those who came by the same invitation hold as many votes as they "
                f"may; each is free once {terms.sponsor_rounds} of its updates have counted"
            )
    return ""


def _validation(host: TrainingPeer) -> dict[str, Any]:
    """The newest verdict on an agreed state, and the rollbacks behind bad ones with their contributors."""
    p = host.progress
    returns = [r | {"contributors": [p.name_of(peer) for peer in r["contributors"]]} for r in p.returns]
    return p.validation | {"returns": returns}


def kept_of(host: TrainingPeer) -> dict[str, Any]:
    """States in this peer's folder; if older ones are coded, also the number and health of its pieces."""
    store, pieces = host.store, host.machine.pieces
    kept: dict[str, Any] = {"blob_bytes": store.blob_bytes()}
    if not isinstance(pieces, ArchiveMachine):
        return kept
    entries = pieces.ledger.entries
    return kept | {
        "coded": f"{pieces.coded.k}/{pieces.coded.n}",
        "pieces": len(pieces.mine),
        "piece_bytes": sum(piece_bytes(m.names.size_bytes, pieces.coded.k) for m in pieces.mine.values()),
        "states_in_pieces": sum(entry.placed for entry in entries),
        "states_still_whole": sum(not entry.placed for entry in entries),
        "pieces_lacking": sum(pieces.coded.n - entry.here for entry in entries if entry.placed),
    }


def peers_of(host: TrainingPeer) -> list[dict[str, Any]]:
    """The agreed membership, with the local link to each member."""
    history = host.machine.history
    if history is None:
        return []
    scores = scores_of(history.head_body)
    return [_with_link(host, member_entry(m, scores)) for m in history.head_body.members]


def _with_link(host: TrainingPeer, line: dict[str, Any]) -> dict[str, Any]:
    if line["peer"] == host.me:
        return line | {"link": "me", "rtt_ms": None}
    linked = host.links.stats()
    stats, is_up = linked.get(line["peer"]), {peer for peer, stats in linked.items() if stats.up}
    if host.machine.heartbeat.is_gone(line["peer"]):
        link = "indirect" if _counts_without_link(host, line["peer"]) else "gone"
    else:
        link = "up" if line["peer"] in is_up else "down"
    rtt = round(stats.rtt_s * 1000, 2) if stats is not None and stats.rtt_s is not None else None
    more: dict[str, Any] = {"link": link, "rtt_ms": rtt}
    if link == "indirect":
        more["through"] = [host.progress.name_of(p) for p in host.progress.counted if p in is_up][:THROUGH_TOLD]
    if link in ("up", "indirect") and not (stats is not None and stats.same_computer):
        more["not_dialable"] = [a for a in line["addresses"] if scope_of(a) in ("", "computer")]
    return line | more


def _counts_without_link(host: TrainingPeer, peer: PeerId) -> bool:
    """True for a member that is silent here while the others still count it: no link leads there."""
    heartbeat, progress = host.machine.heartbeat, host.progress
    heard = heartbeat.watched.get(peer)
    return (
        heartbeat.is_silent_only(peer)
        and peer in progress.counted
        and heard is not None
        and progress.closed_at_s > heard.heard_s + heartbeat.offset_s
    )


def _settings_now(host: TrainingPeer) -> RunSettings:
    """Settings of the next round."""
    settings, history = host.machine.settings, host.machine.history
    return settings if history is None else settings_after(settings, history.head_body)


def uncounted_text(missed: int, passed: str, settings: RunSettings) -> str:
    """Explanation and advice for a member after `MISSED_TOLD` uncounted rounds in a row; else empty."""
    if missed < MISSED_TOLD:
        return ""
    told = f"the last {missed} rounds counted nothing of this peer"
    accepts = settings.round.acceptance
    if passed:
        return f"{told}: {passed}"
    if accepts is UNSET:
        return f"{told}: what it sends comes too late or not at all; see its links with `atoll peers`"
    return (
        f"{told}: {accepts.quorum} others are done first, and are waited with for {accepts.grace} of their steps; "
        "its own work comes later, and will as long as it is so much slower. What helps: more threads or a faster "
        "device for this peer, or a run founded with a longer sync.grace, at least a step of this peer's"
    )
