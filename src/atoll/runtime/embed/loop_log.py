"""Log messages of an attached loop: members that come, leave, stop responding and return, rounds, and problems.

The peer process turns the lines of its event log into messages; the loop's process logs them under "atoll".

Invariants:
- A message is one printable line.
Not responsible for: errors that end the loop, which are raised; unreachable members while it joins
(runtime/reachability.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from atoll.base.ids import PeerId
from atoll.base.units import counted_text
from atoll.runtime.embed.messages import LoopLogLine
from atoll.runtime.event_log import RunStatus, alike_text

TROUBLES = ("EraSignaturesOverdue", "HistoryVertexLost")  # facts that RunStatus explains in its `trouble`
LOOP_KILLED = "its program was killed or crashed"  # farewell of a peer process that outlives its loop
UNMOVED = "no update counted in round {trained}: the model is unchanged"

Entry = Mapping[str, Any]


def messages_of(entry: Entry, progress: RunStatus, me: PeerId) -> Iterator[LoopLogLine]:
    """Messages about one line of the event log, which `progress` has folded already."""
    name = progress.name_of
    match entry["fact"]:
        case "MembershipChanged":
            yield from _membership(entry, progress, me)
        case "PeerSuspected" if entry.get("never_linked") and "paused" not in entry:
            what = f"no direct link to {name(entry['peer'])}; its updates come through the other members"
            yield LoopLogLine(logging.INFO, what)
        case "PeerSuspected" if not progress.over:
            then = entry.get("paused", "the others go on")
            yield LoopLogLine(logging.WARNING, f"{name(entry['peer'])} does not respond ({entry['why']}); {then}")
        case "PeerReturned" if entry["peer"] == progress.returned:
            yield LoopLogLine(logging.INFO, f"{name(entry['peer'])} responds again")
        case "RoundClosed":
            yield from _round(entry, progress)
        case "RoundAttemptFailed" if progress.phase not in ("paused", "assembling") or "paused" in entry:
            then = entry.get("paused", "trying again")
            what = f"attempt {entry['attempt'] + 1} of round {entry['round']} ran out of time; {then}"
            yield LoopLogLine(logging.WARNING, what)
        case "RoundSkipped":
            yield LoopLogLine(logging.WARNING, f"this peer has no part in round {entry['round']}: {entry['why']}")
        case "WorkRefused":
            what = f"this computer cannot do its part of the round, and tries again: {entry['why']}"
            yield LoopLogLine(logging.WARNING, what)
        case "StateDownloadBegan":
            yield LoopLogLine(logging.INFO, f"downloading the agreed model ({entry['why']})")
        case fact if fact in TROUBLES and progress.trouble:
            yield LoopLogLine(logging.WARNING, progress.trouble)
        case _:
            return


def _membership(entry: Entry, progress: RunStatus, me: PeerId) -> Iterator[LoopLogLine]:
    since = {m["peer"]: m["since"] for m in entry["members"]}
    standing = {m["peer"]: m["standing"] for m in entry["members"]}
    if me in entry["joined"]:
        others = [progress.name_of(p) for p, how in standing.items() if p != me and how not in ("away", "expelled")]
        yield LoopLogLine(logging.INFO, f"joined the run; its other members: {', '.join(others) or 'none'}")
    for peer in entry["joined"]:
        if peer != me:
            came = "is here" if since.get(peer, 0) < since.get(me, 0) else "joined"
            yield LoopLogLine(logging.INFO, f"{progress.name_of(peer)} {came}")
    for peer in entry["left"]:
        if standing.get(peer) == "expelled":
            yield LoopLogLine(
                logging.WARNING, f"{progress.name_of(peer)} is expelled; why: atoll verify --verdicts"
            )
        else:
            in_order = peer in progress.farewells and progress.farewells[peer] != LOOP_KILLED
            yield LoopLogLine(logging.INFO if in_order else logging.WARNING, progress.parting_text(peer))


def _round(entry: Entry, progress: RunStatus) -> Iterator[LoopLogLine]:
    counted, of = len(entry["counted"]), f" of {progress.rounds}" * bool(progress.rounds)
    if "back_to" in entry:
        yield LoopLogLine(logging.WARNING, f"the run went back to the state of round {entry['back_to']}")
    elif counted:
        loss = "not reported" if entry["loss"] is None else f"{entry['loss']:.4f}"
        absent = f", without {', '.join(map(progress.name_of, progress.missing))}" if progress.missing else ""
        who = counted_text(counted, "member") + absent
        yield LoopLogLine(logging.INFO, f"round {entry['trained']}{of}: loss {loss}, {who}")
    elif entry["missing"]:
        yield LoopLogLine(logging.WARNING, UNMOVED.format(trained=entry["trained"]))
    for peers in progress.alike_anew:
        yield LoopLogLine(logging.WARNING, alike_text([progress.name_of(peer) for peer in peers]))
    if "pauses" in entry:
        until = "the run is paused by its founder until `atoll resume`" if entry["pauses"] else "the run goes on"
        yield LoopLogLine(logging.INFO, until)
