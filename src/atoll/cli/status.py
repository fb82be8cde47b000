"""Verbs that query the local peer: status, peers, invite, export. They never import torch."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from atoll.base.errors import NetworkError
from atoll.base.limits import PEERS_MAX
from atoll.base.units import bytes_text, counted_text, parse_duration_s, per_second_text, seconds_text
from atoll.cli.display.waiting import send_order
from atoll.cli.say import AsJson, Dir, folder_of, qr, run_title, say, say_json, say_reviews
from atoll.cli.stored.run import (
    NO_PEER,
    export_stored,
    export_target,
    learned_text,
    model_text,
    say_stored_status,
    stored_status,
)

RETURNS_SHOWN = 3  # newest returns shown; --json has all that are remembered
EXCHANGES = {
    "butterfly": "each member combines one part of the updates",
    "hierarchical": "members near each other combine their updates first",
    "ring": "updates go from member to member in a ring",
    "tree": "updates are combined along a tree of members",
    "star": "one member combines all updates",
}
LATE_SHOWN = 3  # newest contributions of members that were apart


def preference_lines(branch: dict[str, Any], folder: Path) -> list[str]:
    """Lines about two branches: which of them most peers prefer, how certain that is, and how to change sides."""
    found = branch.get("preferred")
    if found is None:
        return [
            "which of the two most peers prefer is not known yet: that takes a minute, and peers of both in reach"
        ]
    where = "this branch" if found["ours"] else "that other branch"
    sure = "settled" if found["settled"] else "not settled yet"
    told = f"most prefer {where}: {found['named']} of the {found['asked']} asked last, {sure}"
    lines = [f"{told} after {found['queries']} queries; it decides nothing"]
    if found["ours"]:
        return lines
    them = " or ".join(branch["members"][:3])
    return [
        *lines,
        f"to go over to it: ask {them} for a ticket (atoll invite), then",
        f"atoll leave --dir {folder}; atoll join TICKET --dir NEW_FOLDER",
    ]


def status(dir: Dir = None, *, json: AsJson = False) -> None:
    """Show how the run stands: round, phase, loss, members, bytes, and the reason if it is paused.

    If no peer is running in the folder, it tells what the folder holds.
    """
    from atoll.runtime.control.socket import send_request
    from atoll.runtime.evaluation.facts import evaluation_text, newest_evaluation

    folder, say_status = folder_of(dir), _say_running
    try:
        s = send_request(folder, "status")
    except NetworkError as why:
        if why.code != NO_PEER or (stored := stored_status(folder)) is None:
            raise
        s, say_status = stored, say_stored_status
    s["evaluated"] = newest_evaluation(folder)
    if json:
        say_json(s)
        return
    say_status(s)
    for line in evaluation_text(s["evaluated"]).splitlines() if s["evaluated"] else ():
        say(f"  {line}")


def _say_running(s: dict[str, Any]) -> None:
    """Print the status of a running peer."""
    from atoll.policy.data.positions import positions_text
    from atoll.runtime.event_log import alike_text

    of = f" of {s['rounds']}" if s["rounds"] else ""
    step = f" {s['step']}/{s['inner_steps']}" if s["phase"] == "training" else ""
    say(f"{run_title(s['run'], s['run_id'][:8])}: {s['trained']}{of} rounds trained, {s['phase']}{step}")
    if s["paused"]:
        say(f"  {s['paused']}")
    if amended := s.get("amended"):
        say(f"  amended after {counted_text(amended['trained'], 'round')}: {amended['words']}")
    if s["trouble"] and s["trouble"] != s["paused"]:
        say(f"  ! {s['trouble']}")
    if s.get("uncounted"):
        say(f"  ! {s['uncounted']}")
    for names in s.get("alike", []):
        say(f"  ! in the last round {alike_text(names)}")
    for b in s.get("branches", []):
        there = f"history round {b['round']}: epoch {b['epoch']}, {', '.join(b['members'])}"
        say(f"  ! the run goes on elsewhere, too, since {there}")
        say("    a recovery began while a quorum was alive; no peer changes sides by itself, see atoll docs vertex")
        for line in preference_lines(b, Path(s["folder"])):
            say(f"    {line}")
    if s.get("apart_steps"):
        say(f"  too few voters are reachable: {s['apart_steps']} steps taken apart so far")
    for late in s.get("late", [])[-LATE_SHOWN:]:
        say(
            f"  history round {late['round']} took in what {late['name']} did apart since round {late['since']}: "
            f"{late['steps']} steps"
        )
    if s["trained"]:
        rate = per_second_text(s["tokens_per_s"], s["unit"])
        say(f"  {learned_text(s)}" + f", {rate}" * bool(rate))
    beside = f" (beside a frozen base of {s['base_values']:,} values)" if s["base_values"] else ""
    say(f"  {model_text(s)}{beside}, state {s['state'][:16] or 'not agreed yet'}")
    less = f" (data-parallel training: {bytes_text(s['bytes_data_parallel'])})" if s["bytes_data_parallel"] else ""
    say(f"  sent {bytes_text(s['bytes_out'])}{less}, received {bytes_text(s['bytes_in'])}")
    if s["topology"] and len(s["members"]) > 1:
        say(f"  {exchange_text(s['topology'], s['topology_why'])}")
    if s.get("statistic", "mean") != "mean":
        say(f"  combining rule: {s['statistic']}")
    if data := s.get("data"):
        say(f"  data: {positions_text(data)}")
    if "coded" in (kept := s.get("kept") or {}):
        lacking = f", {kept['pieces_lacking']} pieces are being made anew" if kept["pieces_lacking"] else ""
        say(
            f"  older states: {kept['states_in_pieces']} in pieces ({kept['coded']}), "
            f"{kept['states_still_whole']} whole{lacking}; "
            f"here {kept['pieces']} pieces, {bytes_text(kept['piece_bytes'])}"
        )
    if kept:
        say(f"  states and data take {bytes_text(kept['blob_bytes'])} of this disk")
    _say_checks(s)
    raft = "; they agree by Raft" if s.get("protocol") == "raft" else ""
    say(f"  {s['present']} of {s['voters']} voting members present, {s['quorum']} needed{raft}")
    say(f"  this peer: {s['name'] or 'no name'}, {s['role']}, {s['standing']}, in {s['folder']}")
    for text in (s.get("unaudited"), s.get("vote")):
        if text:
            say(f"  ! {text}")
    _say_members(s["members"])


def exchange_text(topology: str, why: str) -> str:
    """How updates travel, and why or how long it takes."""
    return f"{EXCHANGES.get(topology, 'updates are combined')} ({topology}; {why})"


def _say_checks(s: dict[str, Any]) -> None:
    """Findings of audits, loss scores, redundant training and validators."""
    if s.get("audits"):
        found = ", ".join(f"{count} {what}" for what, count in s["audits"].items() if what != "drawn")
        say(f"  audits: {s['audits']['drawn']} drawn; found: {found or 'nothing yet'}")
    say_reviews(s.get("checks", {}))
    if (v := s.get("validation")) is not None:
        _say_validation(v)


def peers(dir: Dir = None, *, json: AsJson = False) -> None:
    """List the agreed members, their standing, and how this peer reaches them.

    If no peer is running in the folder, these are the members of the last round that it holds.
    """
    from atoll.runtime.control.socket import send_request

    folder = folder_of(dir)
    try:
        found = send_request(folder, "peers")
    except NetworkError as why:
        if why.code != NO_PEER or (stored := stored_status(folder)) is None:
            raise
        found = stored["members"]
        if not json:
            say(f"no peer is running in {folder}; members after {stored['trained']} rounds:")
    if json:
        say_json(found)
        return
    _say_members(found, addresses=True)


def invite(
    dir: Dir = None,
    *,
    uses: Annotated[
        int, Parameter(validator=Number(gte=1, lte=PEERS_MAX), help="How many peers may join with it. Default: 1.")
    ] = 1,
    ttl: Annotated[str, Parameter(help="Validity: 15min, 24h, 7d. Default: 24h.")] = "24h",
    role: Annotated[
        Literal["trainer", "observer"], Parameter(help="Role that it admits. Default: trainer.")
    ] = "trainer",
    address: Annotated[
        list[str], Parameter(negative="", help="Multiaddr to put into it; default: this peer's.")
    ] = [],  # noqa: B006
    revoke: Annotated[str, Parameter(help="End this ticket (or the one with this id) instead.")] = "",
    list: Annotated[bool, Parameter(negative="", help="Show the tickets that are still good instead.")] = False,
    json: AsJson = False,
) -> None:
    """Make a new ticket through the members' agreement, or revoke one."""
    from atoll.base.errors import UsageError
    from atoll.runtime.control.socket import send_request
    from atoll.runtime.network.dialer import endpoint_of

    if list:
        found = send_request(folder_of(dir), "invitations")
        if json:
            say_json(found)
        for t in [] if json else found:
            left_s = t["expires_wall_s"] - time.time()
            good = f"good for {seconds_text(left_s)}" if left_s > 0 else "expired"
            say(f"  {t['id'][:8]}  {t['role']:<8}  {counted_text(t['uses_left'], 'use')} left, {good}")
        return
    try:
        lasts_s = parse_duration_s(ttl)
        if lasts_s < 1:
            raise ValueError("that is too short to join")
    except ValueError as why:
        raise UsageError("E-ARG-06", f"--ttl {ttl}: {why}", fix="atoll invite --ttl 24h") from None
    for one in address:
        endpoint_of(one)  # a mistyped address would otherwise be found by the invited peer
    wish = {"uses": uses, "lasts_s": lasts_s, "role": role, "addresses": address, "revoke": revoke}
    answer = send_order(folder_of(dir), "invite", json=json, **wish)
    if json:
        say_json(answer)
        return
    when = "" if answer["agreed"] else "; it takes effect when the current round ends"
    if revoke:
        say(f"ticket {answer['id'][:8]} is revoked{when}")
        return
    left = seconds_text(answer["expires_wall_s"] - time.time())
    say(f"for {counted_text(answer['uses'], answer['role'])}, good for {left}{when}; join with:\n")
    say(f"  atoll join {answer['ticket']}\n")
    if sys.stdout.isatty():
        say(qr(answer["ticket"]))


def export(
    file: Annotated[
        Path | None,
        Parameter(help="File to write; default: model.safetensors, or adapters.safetensors, in the peer's folder."),
    ] = None,
    /,
    dir: Dir = None,
    *,
    json: AsJson = False,
) -> None:
    """Write the agreed model, or the adapters of a run that exchanges only these, as a safetensors file.

    If no peer is running in the folder, the newest state in it is written.
    """
    from atoll.runtime.control.socket import send_request

    if file is not None and dir is None and (file / "kept.sqlite").exists():
        file, dir = None, file  # `atoll export FOLDER`
    folder, path = folder_of(dir), export_target(file)
    try:
        answer = send_request(folder, "export", path=str(path) if path else None)
    except NetworkError as why:
        if why.code != NO_PEER or (stored := export_stored(folder, path)) is None:
            raise
        answer = stored
    if json:
        say_json(answer)
    else:
        say(f"the model after {counted_text(answer['trained'], 'round')} is in {answer['path']}")


def _say_validation(v: dict[str, Any]) -> None:
    if "opinion" in v:
        losses = ", ".join(loss_text(loss) for loss in v["values"])
        most = ", ".join(loss_text(bound) for bound in v["bounds"])
        right = f", right {', '.join(f'{one:.1%}' for one in v['accuracy'])}" if v.get("accuracy") else ""
        bound = f"; bad above {most}" if most else ""
        say(f"  validated: history round {v['of']} is {v['opinion']}, loss {losses}{right}{bound}")
    for r in v["returns"][-RETURNS_SHOWN:]:
        rounds = ", ".join(map(str, r["refused"]))
        who = ", ".join(r["contributors"])
        back = f"history round {r['round']} went back to round {r['back_to']}"
        say(f"  ! {back}; rounds {rounds} were refused, with {who}")


def loss_text(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _say_members(members: list[dict[str, Any]], addresses: bool = False) -> None:
    for m in members:
        speed = f"{m['step_s'] * 1000:.0f} ms/step" if m["step_s"] else ""
        rtt = f"{m['rtt_ms']:.1f} ms" if m["rtt_ms"] is not None else ""
        who = f"{m['name'] or m['peer'][-8:]:<16} {m['peer'][-8:]}"
        worth = f" {m['reputation']:>6.2f} {m['tier']:<9}" if "reputation" in m else ""
        line = f"  {who}  {m['standing']:<9}{worth} {m['link']:<8} {speed:>12} {rtt:>10}".rstrip()
        line += f"  no direct link, through {' or '.join(m['through'])}" if m.get("through") else ""
        shown = [f"{a} (not dialable)" if a in m.get("not_dialable", ()) else a for a in m["addresses"]]
        say(line + (f"  {', '.join(shown)}" if addresses else ""))
