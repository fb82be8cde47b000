"""Handlers of the control socket: status, peers, invite, recover, rollback, pause, leave and others.

Invariants:
- Every reply is plain data, exact at the time of the request. Nothing is shown as agreed before it is.
- A handler changes agreed values only through a vertex.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from atoll.base.errors import RefusedError, RunFailedError, UsageError
from atoll.base.ids import Digest
from atoll.base.limits import TICKET_MOST_S
from atoll.base.version import VERSION
from atoll.features.archive.machine import ArchiveMachine
from atoll.features.archive.reed_solomon import piece_bytes
from atoll.peer.governance.settings_change import settings_after
from atoll.peer.operator_commands import turnout
from atoll.peer.settings import RunSettings
from atoll.policy.reputation import scores_of
from atoll.runtime.control.attribution import blame_round
from atoll.runtime.control.pause import pause_run, pause_told
from atoll.runtime.control.rollback import roll_back
from atoll.runtime.control.socket import Handler
from atoll.runtime.event_log import line_of, waiting_text
from atoll.wire.messages.statements import TicketInvite
from atoll.wire.ticket import issue

if TYPE_CHECKING:  # the driver imports torch, and this file is read by light verbs
    from atoll.runtime.training_peer import TrainingPeer

AGREE_S = 30.0  # wait for the next vertex, which holds an invitation; later, the reply says that it is pending
INVITED_MOST_S = TICKET_MOST_S - 86400.0  # longest ticket; vertices are dated slightly behind the owner's clock
FETCH_S = 90.0  # for hundreds of megabytes over a home link; the caller waits slightly longer
FETCHED_MAX = 64  # blobs per request: exhibits of all kept verdicts, and their states
SAMPLE_MAX = 4096  # bytes of text in one sample
MISSED_TOLD = 8  # consecutive uncounted rounds; fewer are normal for newcomers and slow networks


def handlers_of(host: TrainingPeer, leave: Callable[[str], None]) -> dict[str, Handler]:
    """Handlers by verb. `leave` ends the process in order."""

    async def status(_: dict[str, Any]) -> Any:
        return status_of(host)

    async def peers(_: dict[str, Any]) -> Any:
        return peers_of(host)

    async def invite(with_: dict[str, Any]) -> Any:
        return await _invite(host, with_)

    async def invitations(_: dict[str, Any]) -> Any:
        return _invitations(host)

    async def recover(_: dict[str, Any]) -> Any:
        before = {m["name"] or m["peer"] for m in peers_of(host) if m["standing"] in ("new", "member")}
        began, bare = _epoch_of(host), _eras_lacking(host)
        host.recover()
        after = {m["name"] or m["peer"] for m in peers_of(host) if m["standing"] in ("new", "member")}
        epoch, eras = _epoch_of(host), sorted(bare - _eras_lacking(host))
        found = {"epoch": epoch, "members": sorted(after), "gone": sorted(before - after)}
        return found | {"began": epoch > began, "eras": eras}

    async def rollback(with_: dict[str, Any]) -> Any:
        wait_s, without = float(with_.get("wait_s", AGREE_S)), list(map(str, with_.get("without", ())))
        return await roll_back(host, int(with_["round"]), wait_s, without)

    async def pause(with_: dict[str, Any]) -> Any:
        return await pause_run(host, bool(with_["paused"]), float(with_.get("wait_s", AGREE_S)))

    async def amend(with_: dict[str, Any]) -> Any:
        from atoll.runtime.control.settings_change import amend_run

        return await amend_run(host, list(map(str, with_["numbers"])), float(with_.get("wait_s", AGREE_S)))

    async def blame(with_: dict[str, Any]) -> Any:
        return await blame_round(host, int(with_["round"]))

    async def fetch(with_: dict[str, Any]) -> Any:
        wanted = [Digest(bytes.fromhex(str(name))) for name in with_["blobs"]][:FETCHED_MAX]
        return {"here": [blob.hex() for blob in await host.fetch(wanted, FETCH_S)]}

    async def leaving(with_: dict[str, Any]) -> Any:
        leave(str(with_.get("why", "left by its owner"))[:200])
        return {"leaving": host.me, "round": host.progress.round, "process": os.getpid()}

    async def evaluate(with_: dict[str, Any]) -> Any:
        _needs_state(host)
        found = await host.island.evaluate(int(with_.get("samples", 512)))
        return {"loss": found.loss, "accuracy": found.accuracy, "trained": host.progress.trained}

    async def sample(with_: dict[str, Any]) -> Any:
        _needs_state(host)
        count = int(with_.get("count", 200))
        if not 0 < count <= SAMPLE_MAX:
            raise UsageError("E-ARG-02", f"a sample has 1 to {SAMPLE_MAX} bytes, not {count}", fix="ask for 200")
        text = await host.island.sample(str(with_.get("prompt", "")), count, int(with_.get("seed", 0)))
        return {"text": text}

    async def export(with_: dict[str, Any]) -> Any:
        _needs_state(host)
        path = await host.export(Path(with_["path"]) if with_.get("path") else None)
        return {"path": str(path), "trained": host.progress.trained}

    return {
        "status": status,
        "peers": peers,
        "invite": invite,
        "invitations": invitations,
        "recover": recover,
        "rollback": rollback,
        "pause": pause,
        "amend": amend,
        "blame": blame,
        "fetch": fetch,
        "leave": leaving,
        "stop": leaving,
        "evaluate": evaluate,
        "sample": sample,
        "export": export,
    }


def status_of(host: TrainingPeer) -> dict[str, Any]:
    from atoll.runtime.control.settings_change import amended_of

    p, machine = host.progress, host.machine
    members = peers_of(host)
    mine = next((m for m in members if m["peer"] == host.me), None)
    there = turnout(machine, host.clock.now())
    head = machine.history.head_body if machine.history is not None else None
    working = sum(m.works for m in head.members) if head is not None else 0
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
        "loss": p.loss,
        "step_loss": p.step_loss,
        "state": head.state.hex() if head is not None else "",
        "model": p.model,
        "parameters": p.parameters,
        "base_values": p.base_values,
        "unit": p.unit,
        "tokens": p.tokens,
        "tokens_per_s": round(p.tokens_per_s, 1),
        "voters": len(there.voters),
        "present": there.here,
        "quorum": there.needed,
        "protocol": "raft" if machine.settings.by_raft else "bft",
        "statistic": machine.settings.statistic,
        "audits": {"drawn": p.audits_drawn} | p.verdicts if "audit" in machine.inspectors.machines else None,
        "scores": p.opinions if "score" in machine.inspectors.machines else None,
        "twins": p.twins if "twins" in machine.inspectors.machines else None,
        "validation": _validation(host) if "validate" in machine.inspectors.machines else None,
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
    return [_with_link(host, line_of(m, scores)) for m in history.head_body.members]


def _with_link(host: TrainingPeer, line: dict[str, Any]) -> dict[str, Any]:
    if line["peer"] == host.me:
        return line | {"link": "me", "rtt_ms": None}
    stats = host.links.stats().get(line["peer"])
    if host.machine.heartbeat.gone(line["peer"]):
        link = "gone"
    else:
        link = "up" if stats is not None and stats.up else "down"
    rtt = round(stats.rtt_s * 1000, 2) if stats is not None and stats.rtt_s is not None else None
    return line | {"link": link, "rtt_ms": rtt}


def _epoch_of(host: TrainingPeer) -> int:
    history = host.machine.history
    return history.head_body.epoch if history is not None else 0


def _eras_lacking(host: TrainingPeer) -> set[int]:
    """Last rounds of the eras without a quorum of signatures."""
    eras = host.machine.eras
    return set(eras.lacking) if eras is not None else set()


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


def _needs_state(host: TrainingPeer) -> None:
    if host.island.head is None:
        raise RunFailedError(
            "E-RUN-06",
            "this peer does not hold the agreed model yet",
            cause="it is still joining",
            fix="atoll status",
        )


async def _invite(host: TrainingPeer, with_: dict[str, Any]) -> dict[str, Any]:
    """Issue or revoke a ticket. `agreed` in the reply: a vertex holds it already."""
    history = host.machine.history
    mine = None if history is None else next((m for m in history.head_body.members if m.peer == host.me), None)
    if mine is None or not mine.votes:
        raise RefusedError(
            "E-TKT-09",
            "only voting members can invite",
            cause="this peer is still joining, takes part as an observer, or has not earned its vote yet",
            fix="atoll invite in the folder of a member, or try again in a minute: atoll status",
        )
    revoked = with_.get("revoke")
    statement, text = _revocation(host, revoked) if revoked else _invitation(host, with_)
    host.invite(statement)
    agreed, until = False, time.monotonic() + float(with_.get("wait_s", AGREE_S))
    while not agreed and time.monotonic() < until:
        history = host.machine.history
        tickets = history.head_body.tickets if history else ()
        held = {t.ticket for t in tickets if t.uses_left or not revoked}
        agreed = (statement.ticket in held) != bool(revoked)
        if not agreed:
            await host.next_round(until - time.monotonic())
    return {
        "ticket": text,
        "id": statement.ticket.hex(),
        "role": statement.role,
        "uses": statement.uses,
        "expires_wall_s": int(statement.expires_s),
        "addresses": list(host.addresses),
        "revoked": bool(revoked),
        "agreed": agreed,
    }


def _invitation(host: TrainingPeer, with_: dict[str, Any]) -> tuple[TicketInvite, str]:
    uses, role = int(with_.get("uses", 1)), str(with_.get("role", "trainer"))
    if role not in ("trainer", "observer"):
        raise UsageError("E-ARG-03", f"a ticket admits no {role!r}", fix="--role trainer, or --role observer")
    lasts_s = float(with_.get("lasts_s", 86400.0))
    if lasts_s > INVITED_MOST_S:
        raise UsageError(
            "E-ARG-06",
            f"--ttl {lasts_s / 86400:.0f}d is too long: members refuse tickets valid for more than a year",
            fix="atoll invite --ttl 365d",
        )
    expires_s = int(host.clock.now() + lasts_s)
    addresses = tuple(with_.get("addresses") or host.addresses)
    ticket = issue(
        host.identity, genesis=host.run_id, role=role, expires_wall_s=expires_s, addresses=addresses, uses=uses
    )
    return TicketInvite(ticket.id, ticket.key, role, uses, float(expires_s)), ticket.text


def _invitations(host: TrainingPeer) -> list[dict[str, Any]]:
    """Agreed tickets with uses left. Only the issuer has the text of a ticket."""
    history = host.machine.history
    if history is None:
        return []
    tickets = [t for t in history.head_body.tickets if t.uses_left]
    return [
        {"id": t.ticket.hex(), "role": t.role, "uses_left": t.uses_left, "expires_wall_s": int(t.expires_s)}
        for t in tickets
    ]


def _revocation(host: TrainingPeer, text: str) -> tuple[TicketInvite, str]:
    """`text` is a ticket or the start of its id."""
    from atoll.wire.ticket import parse

    wanted = parse(text).id.hex() if ":" in text else text.lower()
    assert host.machine.history is not None
    tickets = host.machine.history.head_body.tickets
    found = [t for t in tickets if t.uses_left and t.ticket.hex().startswith(wanted)]
    if len(wanted) < 8 or len(found) != 1:
        raise RefusedError(
            "E-TKT-11",
            f"{len(found)} tickets of this run are called {wanted!r}",
            cause="it was used up, has expired or was revoked before" if not found else "the id is too short",
            fix="atoll invite --list",
        )
    t = found[0]
    return TicketInvite(t.ticket, t.key, t.role, 0, t.expires_s), ""
