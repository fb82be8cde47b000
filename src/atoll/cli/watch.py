"""View of one running peer, for a person or a program.

On a terminal: a live picture of the run. Into a pipe: one line per round. With `--facts`: every fact as JSON, for
programs that start peers. With `--json`: one object at the end. Views for logs are in `display/log_views.py`.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from atoll.base.ids import one_line, printable
from atoll.base.units import bytes_text, counted_text, history_round_text, per_second_text
from atoll.base.version import VERSION
from atoll.cli.display.log_views import JsonLogView, LogView, NoticeLogHandler, TimestampedLogView
from atoll.cli.display.options import OutputOptions
from atoll.cli.say import json_text, qr, say_json
from atoll.peer.governance.settings_change import in_words
from atoll.runtime.evaluation.facts import evaluation_text
from atoll.runtime.event_log import RunStatus, alike_text, behind_text, is_unanswered
from atoll.runtime.network.addresses import scope_of
from atoll.runtime.supervisor import PeerDisplay

log = logging.getLogger(__name__)


NO_TICKET = {"ticket": None}
QR_BESIDE = 16  # lines of a terminal for the ticket above a QR code, and for the picture below it


def watched(work: Callable[[PeerDisplay], Awaitable[int]], output: OutputOptions) -> int:
    """Run a peer with the fitting view; returns its exit status."""
    shell = view_of(output)
    if output.verbose:
        logging.getLogger("atoll").addHandler(NoticeLogHandler(shell.notice))

    async def main() -> int:
        return await work(LogFileTee(shell))

    try:
        return asyncio.run(main())
    finally:
        if isinstance(shell, LiveTerminalView):
            shell.close()


def view_of(output: OutputOptions) -> PeerDisplay:
    """The view that these options ask for; on a terminal a live picture, unless another form is asked for."""
    if output.facts or output.json:
        return JsonLinesView() if output.facts else FinalJsonView()
    words, detail = (line_of, introduction, farewell), {"quiet": output.quiet, "verbose": output.verbose}
    if output.log_format != "auto":
        return (JsonLogView if output.log_format == "json" else TimestampedLogView)(*words, **detail)
    picture = sys.stdout.isatty() and not (output.quiet or output.verbose)
    return LiveTerminalView() if picture else PlainLinesView(**detail)


class LogFileTee:
    """Writes what a person would read into atoll.log, with times, and passes everything on to `shell`."""

    def __init__(self, shell: PeerDisplay) -> None:
        self.shell, self.ends_with_stdin = shell, shell.ends_with_stdin

    def opened(self, news: dict[str, Any]) -> None:
        what = "resumed" if news["resumed"] else "opened"  # never with the ticket, which is a secret
        log.info("%s: Atoll %s, process %d; %s", what, VERSION, news["process"], introduction(news | NO_TICKET))
        self.shell.opened(news)

    def entry(self, entry: dict[str, Any], progress: RunStatus) -> None:
        if line := line_of(entry, progress):
            log.info("%s", line)
        self.shell.entry(entry, progress)

    def notice(self, text: str) -> None:
        log.info("%s", text)
        self.shell.notice(text)

    def ended(self, news: dict[str, Any]) -> None:
        log.info("%s", farewell(news))
        self.shell.ended(news)


class JsonLinesView:
    """JSON lines for the program that started this peer; when it closes stdin, the peer leaves."""

    ends_with_stdin = True

    def opened(self, news: dict[str, Any]) -> None:
        self._write(news)

    def entry(self, entry: dict[str, Any], progress: RunStatus) -> None:
        self._write(entry)

    def notice(self, text: str) -> None:
        self._write({"fact": "Notice", "text": text})

    def ended(self, news: dict[str, Any]) -> None:
        self._write(news)

    def _write(self, entry: dict[str, Any]) -> None:
        try:
            sys.stdout.buffer.write(json_text(entry).encode() + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            return  # the reader is gone; the end of stdin will end this peer


class FinalJsonView:
    """Nothing but one object at the end."""

    ends_with_stdin = False

    def opened(self, news: dict[str, Any]) -> None:
        self.news = news

    def entry(self, entry: dict[str, Any], progress: RunStatus) -> None: ...

    def notice(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    def ended(self, news: dict[str, Any]) -> None:
        say_json(self.news | news)


class PlainLinesView(LogView):
    """One line per important event, for logs and pipes."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        super().__init__(line_of, introduction, farewell, quiet=quiet, verbose=verbose)


class LiveTerminalView(PlainLinesView):
    """Picture at the bottom of the screen while the events scroll above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__()
        self.progress = RunStatus()
        self.console = Console(highlight=False, markup=False, emoji=False)  # names in brackets are names
        # drawn anew four times a second: bytes of a download come without facts
        self.live = Live(console=self.console, refresh_per_second=4, transient=True, get_renderable=self.picture)

    def opened(self, news: dict[str, Any]) -> None:
        self.console.print(printable(introduction(news)), soft_wrap=True)
        self.live.start()

    def entry(self, entry: dict[str, Any], progress: RunStatus) -> None:
        self.progress = progress
        line = line_of(entry, progress)
        if line:
            self.console.print(printable(line))

    def picture(self) -> Any:
        from atoll.cli.picture import peer_picture

        return peer_picture(self.progress)

    def notice(self, text: str) -> None:
        self.console.print(printable(text))

    def ended(self, news: dict[str, Any]) -> None:
        self.close()
        self.console.print(printable(farewell(news)))

    def close(self) -> None:
        self.live.stop()


# ---- words -------------------------------------------------------------------------------------------------


def introduction(news: dict[str, Any]) -> str:
    """Lines for a founder to pass on, with a hint if others cannot reach it."""
    lines = [f"peer {news['name']} ({news['peer'][-8:]}) of run {news['run_id'][:8]}, folder {news['folder']}"]
    scopes = {scope_of(a) for a in news["addresses"]}
    lines += [f"  reached at {a}" for a in news["addresses"]]
    if not scopes:
        lines.append("  it dials the others; a client cannot be dialed")
    elif scopes <= {"computer"}:
        lines.append(
            "  only this computer can dial these, which is enough to train with members that this peer dials; to "
            "let other computers dial it: --listen /ip4/0.0.0.0/tcp/7071 (and --announce, behind a router)"
        )
    elif "internet" not in scopes:
        lines.append("  only this network can dial these; behind a router say --announce /ip4/PUBLIC/tcp/PORT")
    if news["ticket"]:
        lines += ["", "others join with:", "", f"  atoll join {news['ticket']}", ""]
        if news.get("ticket_uses") == 1:
            lines += [f"  it admits one; for each of the others: atoll invite --dir {news['folder']}", ""]
        code = qr(news["ticket"]) if sys.stdout.isatty() and not news["resumed"] else ""
        room = shutil.get_terminal_size().lines - QR_BESIDE
        lines += [code] if code and code.count("\n") < room else []  # the ticket stays on the screen
    return "\n".join(lines)


def line_of(entry: dict[str, Any], progress: RunStatus) -> str:
    """One line about a fact, empty for facts that the picture shows anyway."""
    name = progress.name_of
    match entry["fact"]:
        case "RoundClosed":
            return _round_lines(entry, progress)
        case "MembershipChanged":
            return _membership_lines(entry, progress)
        case "PeerSuspected" if progress.over:
            return ""  # they leave as this peer does
        case "PeerSuspected" | "RoundAttemptFailed" if is_unanswered(entry):
            return progress.unanswered_text
        case "PeerSuspected" if entry.get("never_linked") and "paused" not in entry:
            return f"no direct link to {name(entry['peer'])}; its updates come through the other members"
        case "PeerSuspected":
            what = entry.get("paused", "the others go on")
            return f"! {name(entry['peer'])} does not respond ({entry['why']}); {what}"
        case "PeerDeparted" if "paused" in entry and not progress.over:
            return f"! {name(entry['peer'])} has left; {entry['paused']}"
        case "PeerReturned":
            return "" if entry["peer"] != progress.returned else f"{name(entry['peer'])} responds again"
        case "RoundAttemptFailed" if progress.phase in ("paused", "assembling") and "paused" not in entry:
            return ""  # there was nothing to agree on: it waits for members
        case "RoundAttemptFailed":
            why = entry.get("paused", "trying again")
            return f"! attempt {entry['attempt'] + 1} of this round ran out of time; {why}"
        case "WorkRefused":
            told = f"! this computer cannot do its part of the round: {entry['why']}"
            return f"{told}; free memory or disk, or fix the cause: the peer tries again"
        case "LocalContributionSkipped":
            alarm = "" if progress.is_late_start(entry["why"]) else "! "
            return f"{alarm}this peer has no part in this round: {entry['why']}"
        case "LocalReviewFailed":
            what = f"the update of {name(entry['peer'])} in history round {entry['of']}"
            return f"! {what} is not reviewed here ({entry['check']}): {entry['why']}"
        case "LearningKnown" if entry.get("data") == "own data":
            return "this peer trains on data of its own, which never leave this computer"
        case "StateDownloadBegan":
            return progress.download_text
        case "JoinRejected" if entry["by"] == progress.me:
            return ""  # the error at the end of this peer says the same
        case "JoinRejected":
            return f"! {name(entry['by'])} reports: {one_line(entry['what'])}"
        case "ProtocolFault":
            return f"! {name(entry['peer'])} broke the protocol: {one_line(entry['what'])}"
        case "MalformedRowDetected":
            return f"! the update of {name(entry['peer'])} cannot be read: {one_line(entry['why'])}"
        case "PublishedStateFetched":
            size = bytes_text(entry["size_bytes"])
            return f"the agreed state came from {entry['place']} ({size}), checked against its vertex"
        case "PublishedStateNotFetched":
            return f"! no state from {entry['place']}: {entry['why']}; asking the members"
        case "StateEvaluated":
            return evaluation_text(entry)
        case "RunOver":
            return f"the run is over after {counted_text(entry['rounds'], 'round')}; state {entry['state'][:16]}"
        case _:
            return _history_line(entry, progress)


def _membership_lines(entry: dict[str, Any], progress: RunStatus) -> str:
    """Lines about joined and gone members, as seen by the peer of this log."""
    name, me, joined, left = progress.name_of, progress.me, entry["joined"], entry["left"]
    if me and not progress.is_member(me):
        return ""  # this peer reads the history from before it joined
    if me in joined:
        present = [m["peer"] for m in progress.members if m["standing"] not in ("away", "expelled")]
        return "  ".join(["this peer is a member now", *(f"{name(p)} is here" for p in present if p != me)])
    out = {m["peer"] for m in progress.members if m["standing"] == "expelled"}
    told = behind_text(entry) + "  ".join(
        [f"+ {progress.arrival_text(p)}" for p in joined]
        + ["the others go on without this peer" for p in left if p == me]
        + [f"- {progress.parting_text(p)}" for p in left if p not in out and p != me]
        + [f"! {name(p)} is expelled; why: atoll verify --verdicts" for p in left if p in out and p != me]
    )
    waits = progress.waiting_text() if left else None  # a newcomer has no vote yet
    return f"{told}\n! {waits}" if waits else told


def _round_lines(entry: dict[str, Any], progress: RunStatus) -> str:
    """Lines about a closed round: its result, then what else its vertex decided."""
    if "back_to" in entry:
        why = "validators found the model bad; " if entry.get("by") == "validators" else ""
        back = (
            f"went back to the state of {history_round_text(entry['back_to'], entry['trained'])}; all go on there"
        )
        return f"! {why}history round {entry['round']} {back}"
    lines = [_result_line(entry, progress)]
    for peers in progress.alike_anew:
        lines.append(f"! {alike_text([progress.name_of(p) for p in peers])}")
    if "amends" in entry:
        lines.append(f"! from the next round on, by order of the founder: {in_words(entry['amends'])}")
    if "pauses" in entry:
        paused = "! the run is paused: members stay and do not train until `atoll resume` in the founder's folder"
        lines.append(paused if entry["pauses"] else "the run goes on")
    return "\n".join(line for line in lines if line)


def _result_line(entry: dict[str, Any], progress: RunStatus) -> str:
    of = f"/{progress.rounds}" if progress.rounds else ""
    if not entry["counted"]:
        if progress.missed_start(entry):
            return f"round {entry['trained']}{of} closed before this peer was ready; the model is unchanged"
        unchanged = f"! round {entry['trained']}{of} counted no update; the model is unchanged"
        return unchanged if entry["missing"] else ""
    absent = f", without {', '.join(map(progress.name_of, progress.missing))}" if progress.missing else ""
    count, less = len(entry["counted"]), progress.bytes_data_parallel
    loss = "not reported" if entry["loss"] is None else f"{entry['loss']:.3f}"
    return (
        f"round {entry['trained']}{of}  loss {loss}  {counted_text(count, 'peer')}{absent}  "
        f"sent {bytes_text(entry.get('bytes_out', 0))}"
        + (f" (data-parallel: {bytes_text(less)})" if less else "")
        + (f"  {per_second_text(progress.tokens_per_s, progress.unit)}" if progress.tokens_per_s else "")
    )


def _history_line(entry: dict[str, Any], progress: RunStatus) -> str:
    """One line about missing signatures, damaged history or another branch; empty for all other facts."""
    name = progress.name_of
    match entry["fact"]:
        case "HistoryLacksEraSignatures" if entry.get("elsewhere"):
            return (
                f"! {entry['elsewhere']} members that had to sign the history up to its round {entry['round']} "
                "signed another one: the history here is forged; take a new folder and another member's ticket "
                "(atoll join TICKET --dir NEW_FOLDER)"
            )
        case "HistoryLacksEraSignatures":
            return (
                f"! the history after its round {entry['round']} has {entry['signed']} of {entry['needed']} "
                "signatures that it needs, and the members asked so far have no others: signers are gone, and the "
                "founder can sign for them with atoll recover; or it is forged, and another member's ticket leads "
                "to the true one: atoll join TICKET --dir NEW_FOLDER"
            )
        case "StoredVertexLost":
            return (
                f"! this disk damaged or lost the vertex of history round {entry['lacks']}; requesting it from "
                "members (if no member has it: atoll verify lists the damage; peer.key in an empty folder and a "
                "member's ticket, atoll invite, lead back)"
            )
        case "HistoryVertexRecovered":
            return f"the vertex of history round {entry['lacked']} is whole again: {name(entry['by'])} sent it"
        case "ForkBranchDetected":
            members = ", ".join(map(name, entry["members"]))
            return (
                f"! the run goes on elsewhere, too, since history round {entry['round']}: {members} (atoll status)"
            )
        case "BranchPollResult":
            where = "this one" if entry["ours"] else "the other one"
            sure = ", settled" if entry["settled"] else ""
            return (
                f"! of two branches since history round {entry['round']} most prefer {where}: {entry['named']} of "
                f"the {entry['asked']} asked last{sure} (atoll status says how to change sides)"
            )
        case _:
            return ""


def farewell(news: dict[str, Any]) -> str:
    text = f"bye ({news['why']})"
    if news["trained"]:
        learned = f"{news['tokens']:,} {news['unit']} learned together"
        text += f": {counted_text(news['trained'], 'round')}, {learned}"
    if news["bytes_data_parallel"]:
        text += f", {bytes_text(news['bytes_out'])} sent"
    if news["model"]:
        text += f"\nthe model is in {news['model']}"
    return text
