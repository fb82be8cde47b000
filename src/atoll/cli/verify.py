"""`atoll verify RUN`: checks offline, vertex by vertex, that the history in this folder was agreed on.

Works while a peer runs in the folder and after it ended: the database is read in one transaction, without the
folder's lock, and nothing is written. Exit status 0 if all holds, 5 if anything is broken. Sends nothing, except
that `--fetch` queries the local peer. Imports torch only to judge an exhibit again (`--verdicts`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from atoll.base.errors import RunFailedError, UsageError
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId, one_line, short_id
from atoll.base.limits import SCORE_ONE
from atoll.base.units import counted_text, history_round_text, spans_of, spans_text
from atoll.cli.display.progress import busy
from atoll.cli.say import AsJson, Dir, folder_of, run_title, say, say_json, say_reviews
from atoll.cli.verdicts import RejudgedCases, judged_again, verdicts_object, verdicts_text
from atoll.runtime.storage.stored_history import blob_id_of, kept_in

if TYPE_CHECKING:
    from atoll.peer.verify.chain import HistoryVerificationReport
    from atoll.verification.offline import DisputeHistory

CHANGES_SHOWN = 12  # newest membership changes shown; --json has them all


def verify(
    run: Dir = None,
    *,
    trusted: Annotated[
        str,
        Parameter(help="Id of a vertex to trust without checking; the check begins after it. Default: genesis."),
    ] = "",
    deep: Annotated[
        bool, Parameter(negative="", help="Also read every blob and compare it with its name.")
    ] = False,
    verdicts: Annotated[
        bool,
        Parameter(negative="", help="Also say why members are out, and judge again what auditors judged."),
    ] = False,
    also: Annotated[
        list[Path],
        Parameter(negative="", help="Another peer's folder with exhibits and states to read; repeatable."),
    ] = [],  # noqa: B006  # cyclopts reads it, no code changes it
    fetch: Annotated[
        bool,
        Parameter(negative="", help="Have the local peer request missing exhibits from members."),
    ] = False,
    json: AsJson = False,
) -> int:
    """Check every vertex of a run's history, offline: links, votes, signed statements, membership, counters."""
    from atoll.capabilities import CAPABILITIES
    from atoll.crypto.identity import SessionVerifier
    from atoll.peer.verify.chain import verify_history
    from atoll.verification.offline import DisputeHistory

    folder, start, out = folder_of(run), _digest_of(trusted), DisputeHistory()
    for other in also:
        if not (other / "blobs").is_dir():
            raise UsageError(
                "E-VER-12",
                f"--also {other}: this is no peer's folder",
                fix="--also FOLDER, with the --dir of that peer's `atoll up` or `atoll join`",
            )
    with kept_in(folder) as kept, busy("verifying the history"):
        audit = verify_history(kept, SessionVerifier(), CAPABILITIES.verifiers, start, [out])
    blobs, damaged = check_blobs(folder / "blobs") if deep else (0, [])
    for name in damaged:
        audit.problems.append(_blob_problem(name, audit))
    looked = judged_again(audit, out, [folder, *also], fetch) if verdicts or fetch or also else None
    if json:
        say_json(_as_object(audit, out, blobs if deep else None) | {"verdicts": verdicts_object(out, looked)})
    else:
        _say(audit, out, blobs if deep else None, looked)
    return 0 if audit.intact else RunFailedError.exit_status


def check_blobs(folder: Path) -> tuple[int, list[str]]:
    """(number of complete blobs read, names of those with a wrong digest)."""
    read, damaged = 0, list[str]()
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        if path.suffix or len(path.name) != 2 * DIGEST_BYTES:
            continue  # incomplete, or set aside already
        try:
            name = blob_id_of(path)
        except FileNotFoundError:
            continue  # a running peer deletes blobs that are no longer needed
        read += 1
        if name.hex() != path.name:
            damaged.append(path.name)
    return read, damaged


def _blob_problem(name: str, audit: HistoryVerificationReport) -> Any:
    from atoll.peer.verify.chain import DISK, HistoryProblem

    head = audit.head_body
    agreed = head is not None and head.state.hex() == name
    what = f"blob {name[:8]} does not hash to its name" + (", it is the agreed state" if agreed else "")
    return HistoryProblem("E-VER-11", "blob", audit.head, what, DISK, "atoll up in this folder fetches it again")


def _digest_of(text: str) -> Digest | None:
    if not text:
        return None
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) != DIGEST_BYTES:
        raise UsageError(
            "E-VER-14",
            f"--trusted {text} is not the id of a vertex",
            cause=f"an id has {2 * DIGEST_BYTES} hexadecimal digits",
            fix="atoll checkpoint list --json shows the ids in a folder that you trust",
        )
    return Digest(data)


def _as_object(audit: HistoryVerificationReport, out: DisputeHistory, blobs: int | None) -> dict[str, Any]:
    from msgspec.structs import asdict

    body = audit.head_body
    return {
        "intact": audit.intact,
        "run": audit.settings.name,
        "run_id": audit.run.hex(),
        "head": audit.head,
        "vertices": audit.vertices,
        "trained": body.trained if body is not None else 0,
        "epoch": body.epoch if body is not None else 0,
        "state": body.state.hex() if body is not None else "",
        "trusted_round": audit.trusted,
        "problems": [asdict(p) for p in audit.problems],
        "gaps": spans_of(audit.missing),
        "unchecked": audit.unchecked,
        "recoveries": audit.recoveries,
        "rollbacks": [asdict(r) for r in audit.returns],
        "pauses": [asdict(p) for p in audit.pauses],
        "amendments": [asdict(t) for t in audit.tunes],
        "branches": [asdict(b) for b in audit.branches],
        "eras": [asdict(e) | {"sealed": e.sealed} for e in audit.eras],
        "votes_alone": votes_alone(audit),
        "members": [asdict(c) for c in audit.members],
        "checks": _reviews(audit),
        "audits": {"drawn": out.drawn} | out.findings if audit.settings.audited_share else None,
        "reputations": {peer: score / SCORE_ONE for peer, score in audit.scores.items()},
        "contributions": {peer: asdict(share) for peer, share in audit.shares.items()},
        "blobs": blobs,
    }


def _reviews(audit: HistoryVerificationReport) -> dict[str, dict[str, Any]]:
    """Title and outcomes of each check that is on, as in `atoll status --json`."""
    from atoll.capabilities import CAPABILITIES

    return {
        check.name: {"title": check.title, "outcomes": audit.outcomes.get(check.name, {})}
        for check in CAPABILITIES.verifiers
        if check.title and check.is_on(audit.settings)
    }


def _say(
    audit: HistoryVerificationReport, out: DisputeHistory, blobs: int | None, looked: RejudgedCases | None
) -> None:
    for p in audit.problems:
        say(f"{p.code} {_place(audit, p.round)}: {p.what}; likely cause: {p.cause}; try: {p.fix}")
    body = audit.head_body
    trained, epoch = (body.trained, body.epoch) if body is not None else (0, 0)
    title = run_title(audit.settings.name, short_id(audit.run))
    vertices = f"{audit.vertices:,} {'vertex' if audit.vertices == 1 else 'vertices'}"
    say(f"{title}: {vertices}, {counted_text(trained, 'trained round')}, epoch {epoch}")
    if audit.trusted >= 0:
        say(f"  not checked, since you trust that vertex: all history rounds up to {audit.trusted}")
    if audit.missing:
        say(f"  gaps, history rounds that are not in this folder: {spans_text(spans_of(audit.missing))}")
    if audit.unchecked:
        rounds = spans_text(spans_of(audit.unchecked))
        say(f"  not checked, because the rounds before them are lost or damaged: history rounds {rounds}")
    if audit.settings.audited_share:
        found = ", ".join(f"{count} {finding}" for finding, count in sorted(out.findings.items()))
        say(f"  audits: {out.drawn} drawn; found: {found or 'nothing yet'}")
    say_reviews(_reviews(audit))
    for line in (*_orders_text(audit), *_eras_text(audit), *_members_text(audit), *_shares_text(audit)):
        say(f"  {line}")
    for line in verdicts_text(audit, out, looked):
        say(f"  {line}")
    if blobs is not None:
        say(f"  {counted_text(blobs, 'blob')} read and compared with {'its name' if blobs == 1 else 'their names'}")
    say("intact" if audit.intact else f"broken: {counted_text(len(audit.problems), 'problem')}")


def _orders_text(audit: HistoryVerificationReport) -> list[str]:
    """What the founder ordered, what validators undid, and other branches, by round."""
    from atoll.peer.governance.settings_change import in_words

    lines = [
        (round, "the founder continued the run without a quorum (atoll recover); a new epoch began")
        for round in audit.recoveries
    ]
    for b in audit.branches:
        by = "a recovery by the founder" if b.recovered else "a quorum's votes"
        voters = counted_text(b.voters, "voter")
        lines.append((b.round, f"another branch begins here, by {by}: epoch {b.epoch}, {voters}"))
    for r in audit.returns:
        why = "by order of the founder" if r.by == "recovery" else "since validators found a later state bad"
        state = f"the state of {history_round_text(r.back_to, r.trained)}"
        lines.append((r.round, f"the run went back to {state}, {why}"))
    lines += [(p.round, f"the founder {'paused' if p.paused else 'resumed'} the run") for p in audit.pauses]
    lines += [(t.round, f"the founder changed settings: {in_words(t.to)}") for t in audit.tunes]
    return [f"{_place(audit, round)}: {text}" for round, text in sorted(lines)]


def _members_text(audit: HistoryVerificationReport) -> list[str]:
    """The newest changes of the membership."""
    lines = list[str]()
    for c in audit.members[-CHANGES_SHOWN:]:
        news = [f"joined: {', '.join(c.joined)}"] * bool(c.joined) + [f"left: {', '.join(c.left)}"] * bool(c.left)
        size = f"{counted_text(c.present, 'member')}, {counted_text(c.voters, 'voter')}"
        lines.append("; ".join([f"{_place(audit, c.round)}: {size}", *news]))
    return lines


def _shares_text(audit: HistoryVerificationReport) -> list[str]:
    """What each member contributed, the largest share first."""
    from atoll.policy.reputation import tier_of

    total, lines = sum(s.samples for s in audit.shares.values()), list[str]()
    for peer, s in sorted(audit.shares.items(), key=lambda item: -item[1].samples):
        part = f"{s.samples / total:.1%}" if total else "0"
        who = f"{one_line(s.name) or _tail(peer):<16} {_tail(peer)}"
        gave = f"{counted_text(s.rounds, 'round'):>14}  {counted_text(s.samples, 'sample'):>20}"
        worth = audit.scores.get(peer)
        told = f"  reputation {worth / SCORE_ONE:.2f}, {tier_of(worth)}" if worth is not None else ""
        told += f"  {s.late} of its {s.steps} steps apart from the others" if s.late else ""
        lines.append(f"{who}  {gave}  {part:>6}{told}")
    return lines


def _place(audit: HistoryVerificationReport, round: int) -> str:
    return history_round_text(round, audit.trained.get(round))


def votes_alone(audit: HistoryVerificationReport) -> list[tuple[int, int]]:
    """Spans of rounds that no quorum of long-lived identities signed: only votes protect them."""
    held = {r for e in audit.eras if e.held for r in range(e.first, e.last + 1)}
    return spans_of([r for r in range(audit.head + 1) if r not in held])


def votes_text(audit: HistoryVerificationReport) -> str:
    """Signature scheme of the votes, as its readers know it."""
    return {"ed25519": "Ed25519", "ml-dsa-65": "ML-DSA-65"}[audit.settings.round.signing.kind] + " votes"


def _eras_text(audit: HistoryVerificationReport) -> list[str]:
    if not audit.settings.era_rounds:
        return [
            f"all rounds are protected by {votes_text(audit)} alone: this run was founded with run.era_rounds = 0, "
            "or by a version of Atoll without eras"
        ]
    held = [e for e in audit.eras if e.sealed and e.anchored and e.last > audit.trusted]
    covered = [e for e in audit.eras if e.covered]
    rounds = spans_text(spans_of([r for e in held for r in range(e.first, e.last + 1)]))
    by = f"the long-term keys (Ed25519 and ML-DSA-65) of a quorum of members, in {counted_text(len(held), 'era')}"
    lines = [f"history rounds {rounds}: signed by {by}"] if held else []
    if covered:
        spans = spans_text(spans_of([r for e in covered for r in range(e.first, e.last + 1)]))
        lines.append(f"history rounds {spans}: covered by a later recovery, which the founder signed")
    for e in audit.eras:
        if not e.sealed and not e.covered:
            signed = f"{e.signed} of the {e.needed} long-term keys needed have signed so far"
            lines.append(f"history rounds {e.first}…{e.last}: {signed}")
    alone = votes_alone(audit)
    if alone:
        over = audit.eras[-1].last if audit.eras else -1
        later = (
            f"; members sign the era that begins with history round {over + 1} when it is over"
            if audit.head > over
            else ""
        )
        lines.append(f"history rounds {spans_text(alone)}: protected by {votes_text(audit)} alone{later}")
    return lines


def _tail(peer: PeerId) -> str:
    return peer[-8:]
