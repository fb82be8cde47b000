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
from atoll.base.units import counted_text, history_round_text
from atoll.runtime.embed.messages import LoopLogLine
from atoll.runtime.event_log import RunStatus, alike_text, behind_text, is_unanswered

TROUBLES = ("HistoryLacksEraSignatures", "StoredVertexLost")  # facts that RunStatus explains in its `trouble`
LOOP_KILLED = "its program was killed or crashed"  # farewell of a peer process that outlives its loop
NAMED_MAX = 8  # other members named when a loop begins; more are counted
UNMOVED = "no update counted in round {trained}: the model is unchanged"

Entry = Mapping[str, Any]


class LoopLog:
    """Messages of one loop; before its first round, where it takes part or what it waits for."""

    def __init__(self, me: PeerId) -> None:
        self._me, self._has_begun, self._waits_for = me, False, ""

    def messages_of(self, entry: Entry, progress: RunStatus) -> Iterator[LoopLogLine]:
        """Messages about one line of the event log, which `progress` has folded already."""
        if entry["fact"] == "RoundBegan" and not self._has_begun and self._me in entry["members"]:
            yield from self._before_first_round(entry, progress)
        yield from messages_of(entry, progress, self._me)

    def _before_first_round(self, entry: Entry, progress: RunStatus) -> Iterator[LoopLogLine]:
        self._has_begun, before = not entry["assembling"], self._waits_for
        self._waits_for = waiting_text(progress) if entry["assembling"] else ""
        if self._has_begun:
            yield LoopLogLine(logging.INFO, attached_text(progress, self._me))
        elif self._waits_for != before:
            yield LoopLogLine(logging.INFO, self._waits_for)


def messages_of(entry: Entry, progress: RunStatus, me: PeerId) -> Iterator[LoopLogLine]:
    """Messages about one line of the event log, which `progress` has folded already."""
    name = progress.name_of
    match entry["fact"]:
        case "MembershipChanged":
            yield from _membership(entry, progress, me)
        case "PeerSuspected" | "RoundAttemptFailed" if is_unanswered(entry):
            if progress.unanswered_text:
                yield LoopLogLine(logging.WARNING, progress.unanswered_text)
        case "PeerSuspected" if entry.get("never_linked") and "paused" not in entry:
            what = f"no direct link to {name(entry['peer'])}; its updates come through the other members"
            yield LoopLogLine(logging.INFO, what)
        case "PeerSuspected" if not progress.over:
            then = entry.get("paused", "the others go on")
            yield LoopLogLine(logging.WARNING, f"{name(entry['peer'])} does not respond ({entry['why']}); {then}")
        case "PeerDeparted" if "paused" in entry and not progress.over:
            yield LoopLogLine(logging.WARNING, f"{name(entry['peer'])} has left; {entry['paused']}")
        case "PeerReturned" if entry["peer"] == progress.returned:
            yield LoopLogLine(logging.INFO, f"{name(entry['peer'])} responds again")
        case "RoundClosed":
            yield from _round(entry, progress)
        case "RoundAttemptFailed" if progress.phase not in ("paused", "assembling") or "paused" in entry:
            then = entry.get("paused", "trying again")
            what = f"attempt {entry['attempt'] + 1} of this round ran out of time; {then}"
            yield LoopLogLine(logging.WARNING, what)
        case "LocalContributionSkipped":
            level = logging.INFO if progress.is_late_start(entry["why"]) else logging.WARNING
            yield LoopLogLine(level, f"this peer has no part in this round: {entry['why']}")
        case "WorkRefused":
            what = f"this computer cannot do its part of the round, and tries again: {entry['why']}"
            yield LoopLogLine(logging.WARNING, what)
        case "StateDownloadBegan" if progress.download_text:
            yield LoopLogLine(logging.INFO, progress.download_text)
        case fact if fact in TROUBLES and progress.trouble:
            yield LoopLogLine(logging.WARNING, progress.trouble)
        case _:
            return


def waiting_text(progress: RunStatus) -> str:
    """Message of a loop whose run waits for members."""
    return progress.waiting_text() or "waiting for more members before training begins"


def attached_text(progress: RunStatus, me: PeerId) -> str:
    """Message of a loop that begins its first round: its run and name, rounds so far, who else is here."""
    here = [m["peer"] for m in progress.members if m["standing"] not in ("away", "expelled")]
    names = [progress.name_of(peer) for peer in here if peer != me]
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    of = f" of {progress.rounds}" if progress.rounds else ""
    return (
        f"attached to run {progress.run} as {progress.name_of(me)}, after {progress.trained}{of} rounds; "
        f"other members: {', '.join(names[:NAMED_MAX]) or 'none yet'}{more}"
    )


def _membership(entry: Entry, progress: RunStatus, me: PeerId) -> Iterator[LoopLogLine]:
    if not progress.is_member(me):
        return  # this peer reads the history from before it joined
    standing = {m["peer"]: m["standing"] for m in entry["members"]}
    for peer in entry["joined"] if me not in entry["joined"] else ():  # else `attached_text` names them
        yield LoopLogLine(logging.INFO, behind_text(entry) + progress.arrival_text(peer))
    for peer in entry["left"]:
        if standing.get(peer) == "expelled":
            yield LoopLogLine(
                logging.WARNING, f"{progress.name_of(peer)} is expelled; why: atoll verify --verdicts"
            )
        else:
            in_order = peer in progress.farewells and progress.farewells[peer] != LOOP_KILLED
            level = logging.INFO if in_order or "behind" in entry else logging.WARNING
            yield LoopLogLine(level, behind_text(entry) + progress.parting_text(peer))


def _round(entry: Entry, progress: RunStatus) -> Iterator[LoopLogLine]:
    counted, of = len(entry["counted"]), f" of {progress.rounds}" * bool(progress.rounds)
    if "back_to" in entry:
        yield LoopLogLine(
            logging.WARNING,
            f"the run went back to the state of {history_round_text(entry['back_to'], entry['trained'])}",
        )
    elif counted:
        loss = "not reported" if entry["loss"] is None else f"{entry['loss']:.4f}"
        absent = f", without {', '.join(map(progress.name_of, progress.missing))}" if progress.missing else ""
        who = counted_text(counted, "member") + absent
        yield LoopLogLine(logging.INFO, f"round {entry['trained']}{of}: loss {loss}, {who}")
    elif entry["missing"]:
        level = logging.INFO if progress.missed_start(entry) else logging.WARNING
        yield LoopLogLine(level, UNMOVED.format(trained=entry["trained"]))
    for peers in progress.alike_anew:
        yield LoopLogLine(logging.WARNING, alike_text([progress.name_of(peer) for peer in peers]))
    if "pauses" in entry:
        until = "the run is paused by its founder until `atoll resume`" if entry["pauses"] else "the run goes on"
        yield LoopLogLine(logging.INFO, until)
