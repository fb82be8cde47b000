"""`atoll verify --verdicts`: reasons why members are out, and auditors' findings judged again. For people and
--json.

The history needs no torch. An exhibit in the folder is judged again by the auditors' code, which imports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from atoll.base.ids import PeerId, names_of, short_id
from atoll.base.units import history_round_text

if TYPE_CHECKING:
    from atoll.peer.verify.chain import HistoryVerificationReport
    from atoll.verification.offline import DisputedCase, DisputeHistory
    from atoll.verification.offline_judge import RejudgedReport

RejudgedCases: TypeAlias = "Sequence[tuple[DisputedCase, Sequence[RejudgedReport]]]"

PROVEN = {  # ground of a reason → what proves it
    "two words": "proves itself by two signatures",
    "audit": "judged below",
    "row": "judged below",
    "voices": "more reporters than may lie: one is honest",
    "own word": "signed",
    "unsaid": "nothing to prove",
}


def judged_again(
    audit: HistoryVerificationReport, out: DisputeHistory, folders: Sequence[Path], fetch: bool
) -> RejudgedCases:
    """Judge every disputed case again. Verdicts that do not hold are problems of the audit.

    `fetch`: the peer of the first folder requests missing exhibits from members.
    """
    doubts = list(out.doubts.values())
    if not doubts:
        return []
    from atoll.crypto.identity import SessionVerifier
    from atoll.peer.verify.chain import reading
    from atoll.runtime.training_spec import parse_training_spec
    from atoll.verification.offline_judge import OfflineJudge, fallen

    court = OfflineJudge(folders, audit.settings, reading(audit.run, SessionVerifier()), parse_training_spec)
    if fetch and (lacking := court.lacking(doubts)):
        from atoll.runtime.control.socket import send_request

        send_request(folders[0], "fetch", blobs=[blob.hex() for blob in lacking])
    looked = [(doubt, court.look(doubt)) for doubt in doubts]
    found = {id(doubt): words for doubt, words in looked}
    for round, peer in fallen(doubts, lambda doubt: found[id(doubt)]):
        name = _names(audit)[peer]
        audit.problem("verdict", round, f"{name} was refuted by reports that the judged exhibit does not support")
    return looked


def verdicts_object(out: DisputeHistory, looked: RejudgedCases | None) -> dict[str, Any] | None:
    from msgspec import to_builtins

    if looked is None:
        return None
    doubts = [
        {
            "round": doubt.round,
            "peer": doubt.peer,
            "what": doubt.what,
            "needed": doubt.needed,
            "outcome": doubt.outcome,
            "exhibits": [exhibit.hex() for exhibit in doubt.exhibits],
            "accepted_by": [one.auditor for one in doubt.said.values() if one.finding == "accepted"],
            "words": [
                {
                    "auditor": one.said.auditor,
                    "finding": one.said.finding,
                    "round": one.said.round,
                    "exhibit": one.said.exhibit.hex() if one.said.exhibit is not None else "",
                    "result": one.result,
                    "what": one.what,
                }
                for one in words
            ],
        }
        for doubt, words in looked
    ]
    return {"departures": to_builtins(out.departures), "doubts": doubts}


def verdicts_text(
    audit: HistoryVerificationReport, out: DisputeHistory, looked: RejudgedCases | None
) -> Iterator[str]:
    """Table of the members that are out with the reasons, then the disputed cases and their new verdicts."""
    names = _names(audit)
    expelled = {d.peer for d in out.departures if d.standing == "expelled"}
    if looked is None:
        if expelled:
            yield f"expelled: {', '.join(sorted(names[p] for p in expelled))}; why: atoll verify --verdicts"
        return
    for d in out.departures:
        yield f"{history_round_text(d.round, audit.trained.get(d.round))}: {names[d.peer]} is {d.standing}"
        for reason in d.reasons:
            yield f"    {reason.what} ({PROVEN[reason.ground]})"
    for doubt, words in looked:
        count = f"{len(doubt.against)} against it, it takes {doubt.needed}"
        if doubt.outcome == "refuted" and len(doubt.against) < doubt.needed:
            count += ", with those about its other rows"
        yield f"{names[doubt.peer]}, {doubt.what}: {doubt.outcome}; {count}"
        for one in words:
            yield f"    {one.result:<8} {names[one.said.auditor]} said {one.said.finding}: {one.what}"
        if agreeing := [names[one.auditor] for one in doubt.said.values() if one.finding == "accepted"]:
            yield f"    accepted by {', '.join(agreeing)}"
        if len(doubt.exhibits) > 1:
            yield f"    different exhibits were judged: {', '.join(map(short_id, doubt.exhibits))}"
    if not out.departures and not looked:
        yield "no member left, and no report was disputed"


def _names(audit: HistoryVerificationReport) -> dict[PeerId, str]:
    return names_of((peer, share.name) for peer, share in audit.shares.items())
