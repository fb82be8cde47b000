"""Reference model of membership and rounds in plain dictionaries, compared with every vertex that a peer adopts.

Written from specs/membership.md and specs/vertex.md, without the code that it checks: a wrong rule shows even if
all peers follow it.

Invariants:
- One vertex per height, and a peer's head only grows.
- Lines, tickets and roots of a vertex follow from its parent's and from the statements in it.
- Each contributor is a trainer, committed once, and counts at most once in a part.
Not responsible for: signatures, proofs in accusations, timing, room in a vertex (simulated runs never fill one).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from msgspec import UNSET

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.peer.settings import RunSettings, decode_settings
from atoll.wire.codec import statement_in
from atoll.wire.messages import statements as said
from atoll.wire.messages.vertex import VertexBody
from atoll.wire.ticket import redeemed_ticket

Line = dict[str, Any]  # role, standing, since, key
Reports = list[tuple[PeerId, Any]]  # signer, statement
FOUNDED = 0  # root of founders and of their tickets


class ReferenceModelMismatch(Exception):
    """A vertex or a head differs from what the model expects."""


@dataclass
class ExpectedVertex:
    """What the model knows of one vertex. `sums`: peer → parts that count it in the state."""

    round: int = -1
    epoch: int = 0
    time_s: float = 0.0
    trained: int = 0
    state: Digest = ZERO_DIGEST
    lines: dict[PeerId, Line] = field(default_factory=dict[PeerId, Line])
    tickets: dict[bytes, Line] = field(default_factory=dict[bytes, Line])  # uses, expires_s, role, root
    roots: dict[PeerId, int] = field(default_factory=dict[PeerId, int])
    rounds: dict[PeerId, int] = field(default_factory=dict[PeerId, int])  # counted rounds per member
    sums: dict[PeerId, int] = field(default_factory=dict[PeerId, int])


@dataclass
class ReferenceModel:
    settings: RunSettings = field(default_factory=RunSettings)
    vertices: dict[Digest, ExpectedVertex] = field(default_factory=dict[Digest, ExpectedVertex])
    heights: dict[int, Digest] = field(default_factory=dict[int, Digest])
    heads: dict[PeerId, int] = field(default_factory=dict[PeerId, int])

    def close(self, peer: PeerId, vertex: Digest, bodies: Mapping[int, VertexBody], round: int) -> None:
        """A peer adopts this vertex. `bodies`: its history, from which the model takes vertices that it missed."""
        if (first := self.heights.setdefault(round, vertex)) != vertex:
            _differ(f"two vertices agreed for round {round}: {first.hex()[:8]} and {vertex.hex()[:8]}")
        if round <= self.heads.get(peer, -1):
            _differ(f"{peer} closed round {round} after round {self.heads[peer]}")
        self.heads[peer] = round
        if vertex not in self.vertices:
            self._add(vertex, bodies, round)

    def catch_up(self, peer: PeerId, round: int) -> None:
        """A peer adopts a state without closing its round."""
        self.heads[peer] = max(round, self.heads.get(peer, -1))

    def counts(self, vertex: Digest) -> dict[PeerId, int]:
        """Parts that count each peer in the state of this vertex."""
        return self.vertices[vertex].sums

    def _add(self, vertex: Digest, bodies: Mapping[int, VertexBody], round: int) -> None:
        body = bodies[round]
        if body.parent not in self.vertices and round - 1 in bodies:
            self._add(body.parent, bodies, round - 1)
        before = self.vertices.get(body.parent)
        if not self.vertices:
            self.settings = decode_settings(bodies[-1].settings)
        seen = _read(body)
        if before is not None:
            try:
                seen.sums = self._sums(before, body)
                expected = _recovered(before, seen) if body.epoch > before.epoch else self._next(before, body)
            except ReferenceModelMismatch as why:
                raise ReferenceModelMismatch(f"round {round}: {why}") from None
            for what in ("lines", "tickets", "roots", "rounds"):
                _compare(f"round {round}: {what}", getattr(expected, what), getattr(seen, what))
        self.vertices[vertex] = seen

    # ---- rounds --------------------------------------------------------------------------------------------

    def _sums(self, before: ExpectedVertex, body: VertexBody) -> dict[PeerId, int]:
        commits = [(signed.signer, statement_in(signed)) for signed in body.commits]
        names, sums = [peer for peer, _ in commits], dict(before.sums)
        for rows in _rows(body):
            if sorted(set(rows)) != list(rows) or not set(rows).issubset(names):
                _differ(f"a part counts {rows}, committed are {names}")
            for peer in rows:
                sums[peer] = sums.get(peer, 0) + 1
        if names != sorted(_contributors(body)):
            _differ(f"commitments of {names}, contributions of {sorted(_contributors(body))}")
        for peer, commit in commits:
            line = before.lines.get(peer)
            if line is None or not _trains(line) or not isinstance(commit, said.Commitment):
                _differ(f"{peer} counts, and does not train in it: {line}")
            if line["standing"] in ("new", "unaudited") and commit.weight:
                _differ(f"{peer} is {line['standing']}, and its update weighs {commit.weight}")
        back = [order for _, order in _reports(body) if isinstance(order, said.RollbackOrder)]
        return dict(self.vertices[back[0].back_to].sums) if back else sums

    # ---- membership ----------------------------------------------------------------------------------------

    def _next(self, before: ExpectedVertex, body: VertexBody) -> ExpectedVertex:
        """Lines, tickets, roots and counted rounds that the vertex must have."""
        reports, counted = _reports(body), _contributors(body)
        for by, word in reports:
            if flaw := self._flaw(before, by, word):
                _differ(f"{type(word).__name__} of {by} {flaw}")
        after = replace(before, lines={peer: dict(line) for peer, line in before.lines.items()})
        after.tickets = {id: dict(t) for id, t in before.tickets.items() if t["expires_s"] >= before.time_s}
        for line in after.lines.values():
            line["standing"] = "member" if line["standing"] == "new" else line["standing"]
        change = _VoterChange(before, after)
        gone = self._depart(change, reports, counted)
        _make_ready(change, reports, gone, body.round)
        _admit(change, [r for r in reports if r[0] not in change.liars], body.round)
        _apply_invites(change, reports)
        if self.settings.vote_terms is not None:
            self._earn_votes(change, reports, counted)
        return after

    def _flaw(self, before: ExpectedVertex, by: PeerId, word: Any) -> str:
        line, about = before.lines.get(by), before.lines.get(getattr(word, "peer", by))
        match word:
            case said.JoinRequest(after=known):
                named = self.vertices.get(known)
                if line is not None and line["standing"] == "expelled":
                    return "is by an expelled peer"
                if line is not None and named is not None and named.round < line["since"]:
                    return "is older than its line"
                if _needs_ticket(line, word) and not self.settings.open_to_all:
                    ticket = before.tickets.get(redeemed_ticket(word.admission), {"uses": 0})
                    return "" if ticket["uses"] and ticket["expires_s"] >= before.time_s else "has no valid ticket"
            case said.ReadyReport(vertex=known, state=state):
                named = self.vertices.get(known)
                if line is None or line["role"] == "observer" or not _is_present(line):
                    return "is by no member that trains or will"
                return "names another state" if named is not None and named.state != state else ""
            case said.LeaveReport(round=round):
                return "" if line is not None and _is_present(line) and round >= line["since"] else "is old"
            case said.SuspicionReport(round=round):
                if about is None or not _is_present(about) or round < about["since"]:
                    return "is about no present member, or old"
                return "" if _votes(line) else "is by no voter"
            case said.OwnerComplaint() | said.Accusation() | said.AuditReport() | said.CheckReport():
                return "" if _votes(line) else "is by no voter"
            case said.TicketInvite(ticket=id, uses=uses):
                held = before.tickets.get(id)
                fits = held is None if uses else held is not None and held["uses"]
                return "" if fits and _votes(line) else "is by no voter, or names a known ticket"
            case _:
                pass
        return ""

    def _depart(self, change: _VoterChange, reports: Reports, counted: set[PeerId]) -> set[PeerId]:
        """Expel liars and send away members that leave, are suspected or fail. Returns those that leave."""
        voters, lying = change.before_voters, self.settings.round.quorum == "two-thirds"
        more_than_lie = (len(voters) - 1) // 3 + 1
        needed = more_than_lie if lying else 2 if len(voters) > 3 else 1
        gone, by_order = {by for by, word in reports if isinstance(word, said.LeaveReport)}, set[PeerId]()
        voices: dict[tuple[str, PeerId, int], set[PeerId]] = {}
        for by, word in reports:
            match word:
                case said.RollbackOrder():
                    by_order |= set(word.sent_away)
                case said.SuspicionReport(peer=peer):
                    voices.setdefault(("silent", peer, 0), set()).add(by)
                case said.OwnerComplaint(peer=peer):
                    voices.setdefault(("failed", peer, 0), set()).add(by)
                case said.Accusation(answer=answer, other=None):
                    voices.setdefault(("lied", answer.signer, 0), set()).add(by)
                case said.Accusation(answer=answer):
                    change.liars |= {answer.signer} if lying else set()
                    voices.setdefault(("lied", answer.signer, 0), set()).add(by)
                case said.AuditReport(round=round, peer=peer, finding="mismatch" | "wrong"):
                    voices.setdefault(("refuted", peer, round), set()).add(by)
                    voices.setdefault(("unproven", peer, round), set()).add(by)
                case said.AuditReport(round=round, peer=peer, finding="withheld"):
                    voices.setdefault(("unproven", peer, round), set()).add(by)
                case _:
                    pass
        for (kind, peer, round), who in voices.items():
            audited = kind in ("refuted", "unproven")
            if len(who) < (max(2, more_than_lie) if audited else needed) or not (lying or kind == "silent"):
                continue
            if kind in ("lied", "refuted"):
                change.liars.add(peer)
            elif kind == "silent" and peer in counted:
                continue
            elif kind != "unproven" or round > change.before.lines[peer]["since"]:
                gone.add(peer)
        change.budget -= len(by_order & voters)
        for peer, line in change.after.lines.items():
            if peer in by_order or (peer in change.liars and not _is_present(line)):
                line["standing"] = "expelled"
            elif peer in change.liars | gone and _is_present(line):
                change.set(peer, line, standing="expelled" if peer in change.liars else "away")
        change.liars |= by_order
        return gone

    def _earn_votes(self, change: _VoterChange, reports: Reports, counted: set[PeerId]) -> None:
        """Rules 1 to 7 of earned votes (specs/membership.md)."""
        terms, before, after = self.settings.vote_terms, change.before, change.after
        assert terms is not None
        taken = {*before.roots.values(), *(t["root"] for t in before.tickets.values())}
        unused = (root for root in range(1, 2**31) if root not in taken)
        redeemed = {by: redeemed_ticket(w.admission) for by, w in reports if isinstance(w, said.JoinRequest)}
        after.roots, after.rounds = {}, {}
        for peer, line in after.lines.items():
            was = before.lines.get(peer)
            after.roots[peer] = before.roots.get(peer, FOUNDED)
            if was is None or (line["role"] == "trainer" and was["role"] in ("client", "observer")):
                ticket = before.tickets.get(redeemed.get(peer, b""))
                root = ticket["root"] if ticket is not None else FOUNDED
                after.roots[peer] = root or before.roots.get(peer) or next(unused)
                if line["role"] == "trainer" and (before.trained or root):
                    line["role"] = "apprentice"
            moves = was is not None and was["standing"] == "member" and peer in counted
            after.rounds[peer] = min(before.rounds.get(peer, 0) + moves, 2**16 - 1)

        def too_many(peer: PeerId, voters: Collection[PeerId]) -> bool:
            young = [p for p in voters if after.rounds[p] < terms.sponsor_rounds]
            of_root = sum(after.roots[p] == after.roots[peer] for p in young)
            return peer in young and of_root > max(1, (len(voters) - 1) // 3)

        for peer in [p for p, m in after.lines.items() if _votes(m) and p in before.lines]:
            if peer not in change.before_voters and after.roots[peer] and too_many(peer, change.voters):
                after.lines[peer]["role"] = "apprentice"
        budget = max(1, (len(change.before_voters) - 1) // 3) - len(change.before_voters ^ change.voters)
        able = [(-after.rounds[p], m["since"], p) for p, m in after.lines.items() if m["role"] == "apprentice"]
        for rounds, _, peer in sorted(able):
            is_able = after.lines[peer]["standing"] == "member" and -rounds >= terms.after_rounds
            if is_able and budget > 0 and not too_many(peer, change.voters | {peer}):
                after.lines[peer]["role"], budget = "trainer", budget - 1
        makers = {word.ticket: by for by, word in reversed(reports) if isinstance(word, said.TicketInvite)}
        for id in after.tickets.keys() - before.tickets.keys():
            after.tickets[id]["root"] = after.roots[makers[id]]


class _VoterChange:
    """Lines before and after, and how many more voters may change in this vertex."""

    def __init__(self, before: ExpectedVertex, after: ExpectedVertex) -> None:
        self.before, self.after = before, after
        self.before_voters = {peer for peer, line in before.lines.items() if _votes(line)}
        self.budget = max(1, (len(self.before_voters) - 1) // 3)
        self.liars: set[PeerId] = set()

    @property
    def voters(self) -> set[PeerId]:
        return {peer for peer, line in self.after.lines.items() if _votes(line)}

    def set(self, peer: PeerId, line: Line, **changed: Any) -> bool:
        """Change the line, unless too many voters change or the last one ends."""
        turns = _votes(line) != _votes(line | changed)
        if turns and (self.budget < 1 or not self._others_vote(peer, line | changed)):
            return False
        self.budget -= turns
        line |= changed
        return True

    def _others_vote(self, peer: PeerId, changed: Line) -> bool:
        return _votes(changed) or bool((self.voters & self.before_voters) - {peer})


def _make_ready(change: _VoterChange, reports: Reports, gone: set[PeerId], round: int) -> None:
    """An observing trainer becomes `new`; a trainer whose device changed becomes `new` or `unaudited`."""
    ready = {by: word for by, word in reversed(reports) if isinstance(word, said.ReadyReport)}
    for peer in [peer for peer in change.after.lines if peer in ready and peer not in gone]:
        line, unaudited = change.after.lines[peer], ready[peer].unaudited is True
        trains = _trains(line)
        if line["standing"] == "observer" or (trains and unaudited != (line["standing"] == "unaudited")):
            standing = "unaudited" if unaudited else "new"
            change.set(peer, line, standing=standing, since=round if trains else line["since"])


def _admit(change: _VoterChange, reports: Reports, round: int) -> None:
    """Lines of joining peers. A restarted voter steps back to observer; the last voter stays a voter."""
    lines, tickets = change.after.lines, change.after.tickets
    for peer, join in reports:
        if not isinstance(join, said.JoinRequest):
            continue
        line, ticket = lines.get(peer), tickets.get(redeemed_ticket(join.admission))
        if _needs_ticket(line, join) and ticket is not None and not ticket["uses"]:
            continue  # used up by another join of this vertex
        if line is not None and _is_present(line) and line["key"] == join.vote_key:
            continue  # new addresses only
        is_last = _votes(line) and len(change.voters) == 1
        if _votes(line) and not is_last:
            if change.budget < 1:
                continue
            change.budget -= 1
        if _needs_ticket(line, join) and ticket is not None:
            ticket["uses"] -= 1
        role = join.role if line is None or _needs_ticket(line, join) else line["role"]
        standing = "member" if is_last else "observer"
        lines[peer] = {"role": role, "standing": standing, "since": round, "key": join.vote_key}


def _apply_invites(change: _VoterChange, reports: Reports) -> None:
    """Revoke tickets, and add those whose id has no line."""
    known = set(change.before.tickets)
    for _, invite in reports:
        if isinstance(invite, said.TicketInvite):
            if invite.uses == 0 and invite.ticket in change.after.tickets:
                change.after.tickets[invite.ticket]["uses"] = 0
            if invite.uses and invite.ticket not in known:
                line = {"uses": invite.uses, "expires_s": invite.expires_s, "role": invite.role, "root": FOUNDED}
                change.after.tickets[invite.ticket] = line
            known.add(invite.ticket)


def _recovered(before: ExpectedVertex, seen: ExpectedVertex) -> ExpectedVertex:
    """A recovery sends voters away and may replace one key; nothing else changes."""
    if (seen.state, seen.trained) != (before.state, before.trained):
        _differ("a recovery changes the state")
    lines = {peer: dict(line) for peer, line in before.lines.items()}
    for peer, line in lines.items():
        if _votes(line) and seen.lines[peer]["standing"] == "away":
            line["standing"] = "away"
    rekeyed = [peer for peer, line in lines.items() if line["key"] != seen.lines[peer]["key"]]
    if len(rekeyed) == 1:
        lines[rekeyed[0]]["key"] = seen.lines[rekeyed[0]]["key"]
    return replace(before, lines=lines)


# ---- reading a body ----------------------------------------------------------------------------------------


def _read(body: VertexBody) -> ExpectedVertex:
    names, ids = [m.peer for m in body.members], [t.ticket for t in body.tickets]
    seen = ExpectedVertex(body.round, body.epoch, body.time_s, body.trained, body.state)
    seen.lines = {
        m.peer: {"role": m.role, "standing": m.standing, "since": m.since, "key": m.vote_key} for m in body.members
    }
    roots = dict.fromkeys(ids, FOUNDED)
    if body.invited is not UNSET:
        seen.roots = dict(zip(names, body.invited.roots, strict=True))
        seen.rounds = dict(zip(names, body.invited.counted, strict=True))
        roots = dict(zip(ids, body.invited.tickets, strict=True))
    seen.tickets = {
        t.ticket: {"uses": t.uses_left, "expires_s": t.expires_s, "role": t.role, "root": roots[t.ticket]}
        for t in body.tickets
    }
    return seen


def _reports(body: VertexBody) -> Reports:
    """Reports in the order of kind, signer and target; of two that are alike in these the first counts."""
    found: dict[tuple[str, ...], tuple[PeerId, Any]] = {}
    for signed in body.reports:
        word = statement_in(signed)
        target = [str(getattr(word, name, "")) for name in ("round", "peer", "finding")]
        if isinstance(word, said.Accusation):
            target += [word.answer.signer, str(word.other is None)]
        key = type(word).__name__, signed.signer, *target, getattr(word, "ticket", b"").hex()
        found.setdefault(key, (signed.signer, word))
    return [found[key] for key in sorted(found)]


def _rows(body: VertexBody) -> Iterator[tuple[PeerId, ...]]:
    for signed in body.parts:
        result = statement_in(signed) if signed is not None else None
        if isinstance(result, said.OwnerResult):
            yield result.contributors


def _contributors(body: VertexBody) -> set[PeerId]:
    return {peer for rows in _rows(body) for peer in rows}


def _is_present(line: Line) -> bool:
    return line["standing"] not in ("away", "expelled")


def _votes(line: Line | None) -> bool:
    return line is not None and line["role"] == "trainer" and line["standing"] in ("new", "member")


def _trains(line: Line) -> bool:
    return line["role"] != "observer" and line["standing"] in ("new", "member", "unaudited")


def _needs_ticket(line: Line | None, join: said.JoinRequest) -> bool:
    """A stranger needs a ticket, and a member that wants another role."""
    return line is None or join.role != ("trainer" if line["role"] == "apprentice" else line["role"])


def _compare(what: str, expected: Mapping[Any, Any], seen: Mapping[Any, Any]) -> None:
    for key in {**expected, **seen}:
        if expected.get(key) != seen.get(key):
            name = key if isinstance(key, str) else key.hex()
            _differ(f"{what} of {name}: expected {expected.get(key)}, agreed {seen.get(key)}")


def _differ(what: str) -> NoReturn:
    raise ReferenceModelMismatch(what)
