"""Mutants of the agreement and of Raft: each lacks one rule of voting, locking or remembering; a seed catches it.
Those of epochs lack what keeps heights apart, whose committees differ, and are played in chains (`chain.py`).

A mutant is a change of the source text, so that the code needs no seams for it; if a rule moves, its mutant says
that it cannot find it any more. `seed` was found by `python tests/protocol/conformance/run.py --mutants`; the
unchanged code passes it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from clocks import DRIFT

from atoll.protocol.agreement import one_phase, two_phase, view_change, voter, voter_state
from atoll.protocol.agreement.one_phase import OnePhaseAgreement
from atoll.protocol.agreement.two_phase import TwoPhaseAgreement
from atoll.protocol.history import chain

AGREEMENT, GROUNDS, SAID, RAFT, VOTER, HISTORY = two_phase, view_change, voter_state, one_phase, voter, chain
ENGINES = {AGREEMENT: "TwoPhaseAgreement", RAFT: "OnePhaseAgreement"}


@dataclass(frozen=True)
class Mutant:
    lacks: str  # the rule, in words
    module: ModuleType
    text: str
    instead: str
    seed: int
    voters: int = 4
    liars: int = 1
    rule: str = "two-thirds"
    moves: int = 60
    hub: bool = False  # `World.hub`
    drift: float = 0.0  # `World.drift`
    forgers: bool = False  # `World.forgers`
    heights: int = 0  # `World.heights`

    def __str__(self) -> str:
        return self.lacks

    @property
    def whole(self) -> dict[str, Any]:
        """The machine with all of its rules."""
        return {"machine": OnePhaseAgreement if self.lacks.startswith("raft") else TwoPhaseAgreement}

    def build(self) -> dict[str, Any]:
        """The machine, or the history, without this rule."""
        assert self.module.__file__ is not None
        source = Path(self.module.__file__).read_text()
        assert source.count(self.text) == 1, f"{self.lacks}: its text is not in {self.module.__name__} any more"
        source = source.replace(self.text, self.instead)
        if self.module is HISTORY:
            return {**self.whole, "past": _made(HISTORY, source).VertexChain}
        engine = RAFT if self.lacks.startswith("raft") else AGREEMENT
        mutated = _made(self.module, source)
        try:
            sys.modules[self.module.__name__] = mutated  # where the engine looks for it
            machine = mutated if self.module is engine else _made(engine)
            return {"machine": getattr(machine, ENGINES[engine])}
        finally:
            sys.modules[self.module.__name__] = self.module

    def knobs(self) -> dict[str, Any]:
        names = ("voters", "liars", "rule", "moves", "hub", "drift", "forgers", "heights")
        return {name: getattr(self, name) for name in names}


def _made(module: ModuleType, source: str = "") -> Any:
    """The module anew, from this source or its own; only while it runs does anybody else see it."""
    made = ModuleType(module.__name__)
    made.__file__ = module.__file__
    sys.modules[module.__name__] = made  # where its classes look for it
    assert module.__file__ is not None
    try:
        exec(compile(source or Path(module.__file__).read_text(), module.__file__, "exec"), made.__dict__)
    finally:
        sys.modules[module.__name__] = module
    return made


CRASH = {"voters": 3, "liars": 0, "rule": "majority"}
CHAIN = {"heights": 4}
CRASHES = {**CRASH, **CHAIN}
SIGNER = (
    '__import__("atoll.simulation.signatures", fromlist=[""]).VirtualSigner'  # who ever was or will be a member
)
ANYBODY = f"{SIGNER}(signed.signer).vote_key"
ALL_OF = f"{{p: {SIGNER}(p).vote_key for p, _ in shown.votes}}"

MUTANTS = [
    # voting "It stops accepting messages (other than checkpoint, view-change, and new-view messages)" (Castro &
    # Liskov 1999, 4.4, of a backup whose timer expired)
    Mutant(
        "who closed a view says nothing in it",
        AGREEMENT,
        "view == self.view and view > self.state.timed_out",
        "True",
        0,
    ),
    Mutant("one vote per slot", AGREEMENT, "or self.state.conflicts(stage, view, digest)", "", 14),
    Mutant(
        "votes are for what was judged",
        AGREEMENT,
        "        if tally.digest in self.approved:\n",
        "        if True:\n",
        140,
    ),
    Mutant(
        "only the proposer of the view proposes",
        VOTER,
        "if signed.signer != self.proposer(view):",
        "if False:",
        8,
    ),
    Mutant(
        "the body is the one proposed", VOTER, "if vertex_id(message.body) != proposed.digest:", "if False:", 69
    ),
    Mutant("votes of another round count for nothing", AGREEMENT, "vote.round != self.round or not", "not", 10),
    Mutant("a quorum is needed", AGREEMENT, "vote.digest] < self.quorum:", "vote.digest] < self.quorum - 1:", 0),
    Mutant(
        "two phases",
        AGREEMENT,
        'if vote.stage == "commit":\n            return self._decide',
        "if True:\n            return self._decide",
        0,
    ),
    Mutant(
        "votes of both stages are counted apart",
        AGREEMENT,
        "if stage == vote.stage and digest == vote.digest",
        "if digest == vote.digest",
        0,
    ),
    # liars that speak for others
    Mutant(
        "a proposal is signed by its proposer",
        VOTER,
        "proposed = self.notary.open(signed, Proposal, self.vote_keys.get(signed.signer))",
        "from atoll.wire.codec import decode_statement; proposed = decode_statement(signed.body, signed.signer)",
        1,
        forgers=True,
    ),
    Mutant(
        "a timeout is signed by whoever gives up",
        AGREEMENT,
        "timeout = self.notary.open(signed, ViewTimeout, self.vote_keys.get(signed.signer))",
        "from atoll.wire.codec import decode_statement; timeout = decode_statement(signed.body, signed.signer)",
        1,
        forgers=True,
    ),
    Mutant(
        "so are the timeouts that a proposer shows",
        GROUNDS,
        "timeout = notary.open(signed, ViewTimeout, vote_keys.get(signed.signer))",
        "from atoll.wire.codec import decode_statement; timeout = decode_statement(signed.body, signed.signer)",
        2,
        forgers=True,
    ),
    # voters that do not hear each other
    Mutant(
        "a commit vote that is said again brings its certificate",
        AGREEMENT,
        'late = stage == "commit" and tally.repeated > PLAIN_REPEATS',
        "late = False",
        5,
        liars=0,
        hub=True,
    ),
    Mutant(
        "who hears a certificate votes to commit",
        AGREEMENT,
        'return [*effects, *self._vote("commit", certificate.view, certificate.digest)]',
        "return effects",
        5,
        liars=0,
        hub=True,
    ),
    Mutant(
        "a certificate that comes with a vote is proven",
        GROUNDS,
        'if proof is None or vote.stage != "commit":\n            raise PeerFault(who, "vote carries',
        'proof = proof or shown\n        if False:\n            raise PeerFault(who, "vote carries',
        0,
        hub=True,
    ),
    Mutant(
        "a certificate that comes with a vote raises the lock",
        AGREEMENT,
        "effects += self._adopt_received(certificate)\n        if certificate.view > self.view:",
        "self.certificates.add(certificate)\n        if certificate.view > self.view:",
        1,
        hub=True,
    ),
    # bodies that are not here
    Mutant(
        "a certificate binds whoever has its body",
        AGREEMENT,
        "body = self.bodies.get(certificate.digest)\n        if body is None:",
        'body = self.bodies.get(certificate.digest, b"")\n        if False:',
        3,
    ),
    Mutant(
        "who is bound keeps the body",
        SAID,
        "for c in (self.claimed, self.high) if c and",
        "for c in () if c and",
        101,
    ),
    # voters whose clocks are apart
    Mutant(
        "words of views to come are remembered",
        VOTER,
        "ahead = ATTEMPTS_AHEAD * len(self.proposers)",
        "ahead = 1",
        47,
        drift=DRIFT,
    ),
    # locking
    Mutant(
        "a timeout claims the highest certificate",
        SAID,
        "self.timed_out, self.claimed = view, self.high",
        "self.timed_out, self.claimed = view, None",
        0,
    ),
    Mutant("a new certificate raises the lock", SAID, "        self.high = certificate\n", "", 0),
    Mutant(
        "the lock never sinks",
        SAID,
        "if self.high is not None and self.high.view >= certificate.view:",
        "if False:",
        5,
    ),
    Mutant(
        "a timeout raises the lock of who hears it",
        AGREEMENT,
        "effects += self._adopt_received(self.certificates.for_timeout(sender, timeout, message.high))",
        "self.certificates.add(self.certificates.for_timeout(sender, timeout, message.high))",
        62,
    ),
    Mutant(
        "the highest certificate binds", GROUNDS, "return best if best.high_view >= 0 else None", "return None", 1
    ),
    Mutant(
        "the highest one, not any",
        GROUNDS,
        "best = max(timeouts, key=lambda t: t.high_view)",
        "best = min(timeouts, key=lambda t: t.high_view)",
        11,
    ),
    Mutant(
        "a proposal is checked against what binds it",
        GROUNDS,
        "if best.high_digest != vertex_id(message.body):",
        "if False:",
        8,
    ),
    Mutant(
        "a quorum of timeouts is shown",
        GROUNDS,
        "if len(timeouts) < quorum:",
        "if len(timeouts) < quorum - 1:",
        2,
    ),
    Mutant(
        "of distinct voters",
        GROUNDS,
        "if len(timeouts) < quorum:",
        "if len(message.timeouts) < quorum:",
        21,
    ),
    Mutant("of the view before", GROUNDS, "if (timeout.round, timeout.view) != (round, view - 1):", "if False:", 2),
    Mutant(
        "the proposer waits for a quorum of timeouts",
        GROUNDS,
        "if len(able) < self.quorum:",
        "if len(able) < self.quorum - 1:",
        5,
    ),
    Mutant(
        "a claim is proven", GROUNDS, "and self.notary.certificate_holds(shown, self.vote_keys, self.quorum)", "", 2
    ),
    # remembering
    Mutant(
        "a vote is durable before it is said",
        AGREEMENT,
        "return [self._persist(), self._broadcast(message), *self._count_vote(vote, signed)]",
        "return [self._broadcast(message), self._persist(), *self._count_vote(vote, signed)]",
        14,
    ),
    Mutant(
        "a vote is durable",
        AGREEMENT,
        "return [self._persist(), self._broadcast(message), *self._count_vote(vote, signed)]",
        "return [self._broadcast(message), *self._count_vote(vote, signed)]",
        165,
    ),
    Mutant(
        "a proposal is durable before it is said",
        AGREEMENT,
        'return [self._persist(), *sends, *self._vote("prepare", view, digest)]',
        'return [*sends, self._persist(), *self._vote("prepare", view, digest)]',
        16,
        **CRASH,
    ),
    Mutant(
        "a restarted proposer says the same",
        AGREEMENT,
        "if self.state.proposed.get(view, digest) != digest:",
        "if False:",
        1,
        **CRASH,
    ),
    Mutant(
        "a timeout is durable before it is said",
        AGREEMENT,
        "return [self._persist(), *self._send_timeout(view),",
        "return [*self._send_timeout(view), self._persist(),",
        29,
        **CRASH,
    ),
    Mutant(
        "a repeated timeout claims what it claimed",
        AGREEMENT,
        "high = self.state.claimed",
        "high = self.state.high",
        5,
        **CRASH,
    ),
    Mutant(
        "the lock is durable",
        SAID,
        "msgspec.msgpack.encode(self)",
        "msgspec.msgpack.encode(msgspec.structs.replace(self, high=None))",
        5,
        **CRASH,
    ),
    Mutant(
        "what the last timeout claimed is durable",
        SAID,
        "msgspec.msgpack.encode(self)",
        "msgspec.msgpack.encode(msgspec.structs.replace(self, claimed=None))",
        12,
        **CRASH,
    ),
    Mutant(
        "bodies that may be certified are durable",
        SAID,
        "self.bodies = binding | {digest: body}",
        "pass",
        11,
        **CRASH,
    ),
    Mutant(
        "who restarts goes on where it voted",
        AGREEMENT,
        "self.view = self.state.view",
        "self.view = self.state.timed_out + 1",
        914,
        **CRASH,
    ),
    # evidence
    Mutant(
        "what honest names say is signed by them",
        AGREEMENT,
        "vote = self.notary.open(signed, Vote, self.vote_keys.get(signed.signer))",
        "from atoll.wire.codec import decode_statement; vote = decode_statement(signed.body, signed.signer)",
        8,
    ),
    Mutant(
        "evidence is two statements of one slot",
        AGREEMENT,
        "slot: tuple[Stage, PeerId] = (vote.stage, signed.signer)",
        'slot: tuple[Stage, PeerId] = ("prepare", signed.signer)',
        0,
    ),
    # Raft: voting
    Mutant(
        "raft: who left a view accepts nothing in it", RAFT, "view == self.view and (self", "(self", 295, **CRASH
    ),
    Mutant(
        "raft: a quorum of votes is needed",
        RAFT,
        "if len(same) < self.quorum:",
        "if len(same) < self.quorum - 1:",
        0,
        **CRASH,
    ),
    # Raft: leading
    Mutant(
        "raft: a ballot names the newest entry",
        RAFT,
        "self.state.closed_view, self.state.ballot_entry = view, self.state.newest",
        "self.state.closed_view, self.state.ballot_entry = view, NOTHING",
        3,
        **CRASH,
    ),
    Mutant(
        "raft: the newest entry binds",
        RAFT,
        "return best if best[0] >= 0 else NOTHING",
        "return NOTHING",
        3,
        **CRASH,
    ),
    Mutant(
        "raft: the newest one, not any",
        RAFT,
        "best = max((ballot.high_view",
        "best = min((ballot.high_view",
        3,
        **CRASH,
    ),
    Mutant(
        "raft: a leader needs a quorum of ballots",
        RAFT,
        "len(heard) >= self.quorum:",
        "len(heard) >= self.quorum - 1:",
        3,
        **CRASH,
    ),
    Mutant(
        "raft: a leader takes over the newest entry",
        RAFT,
        "        if election.newest != NOTHING:\n            lacking",
        "        if False:\n            lacking",
        7,
        **CRASH,
    ),
    Mutant(
        "raft: a view is left when a quorum would leave it",
        RAFT,
        "last = _view_reached(would_close, self.quorum)",
        "last = _view_reached(would_close, 1)",
        5,
        **CRASH,
    ),
    # Raft: remembering
    Mutant(
        "raft: an entry is durable before it is acknowledged",
        RAFT,
        "return [self._accept(view, digest), *self._send_vote(view, digest)]",
        "return [*self._send_vote(view, digest), self._accept(view, digest)]",
        10,
        **CRASH,
    ),
    Mutant(
        "raft: a proposal is durable before it is said",
        RAFT,
        "return [self._accept(view, digest), *sends, *self._send_vote(view, digest)]",
        "return [*sends, self._accept(view, digest), *self._send_vote(view, digest)]",
        16,
        **CRASH,
    ),
    Mutant(
        "raft: a ballot is durable before it is said",
        RAFT,
        "self._persist(),\n            *self._send_ballot(),",
        "*self._send_ballot(),\n            self._persist(),",
        4,
        **CRASH,
    ),
    Mutant(
        "raft: a repeated ballot names what it named",
        RAFT,
        "self.round, view, *self.state.ballot_entry",
        "self.round, view, *self.state.newest",
        10,
        **CRASH,
    ),
    Mutant(
        "raft: the newest entry is durable",
        RAFT,
        "msgspec.msgpack.encode(self.state)",
        "msgspec.msgpack.encode(msgspec.structs.replace(self.state, newest=NOTHING))",
        3,
        **CRASH,
    ),
    Mutant(
        "raft: what the last ballot named is durable",
        RAFT,
        "msgspec.msgpack.encode(self.state)",
        "msgspec.msgpack.encode(msgspec.structs.replace(self.state, ballot_entry=NOTHING))",
        7,
        **CRASH,
    ),
    Mutant(
        "raft: which views are over is durable",
        RAFT,
        "msgspec.msgpack.encode(self.state)",
        "msgspec.msgpack.encode(msgspec.structs.replace(self.state, closed_view=-1))",
        262,
        **CRASH,
    ),
    Mutant(
        "raft: the body of the newest entry is durable",
        RAFT,
        "msgspec.msgpack.encode(self.state)",
        'msgspec.msgpack.encode(msgspec.structs.replace(self.state, body=b""))',
        3,
        **CRASH,
    ),
    # epochs: words of a committee that is not this height's count for nothing
    Mutant(
        "epochs: a vote is of somebody who votes at this height",
        AGREEMENT,
        "vote = self.notary.open(signed, Vote, self.vote_keys.get(signed.signer))",
        f"vote = self.notary.open(signed, Vote, {ANYBODY})",
        3,
        **CHAIN,
    ),
    Mutant(
        "epochs: timeouts are of those who vote at this height",
        GROUNDS,
        "timeout = notary.open(signed, ViewTimeout, vote_keys.get(signed.signer))",
        f"timeout = notary.open(signed, ViewTimeout, {ANYBODY})",
        2,
        **CHAIN,
    ),
    Mutant(
        "epochs: a quorum of those who vote at this height prepared",
        GROUNDS,
        "and self.notary.certificate_holds(shown, self.vote_keys, self.quorum)",
        f"and self.notary.certificate_holds(shown, {ALL_OF}, self.quorum)",
        473,
        heights=8,  # a wrong body has to be at hand, too, before a made-up certificate binds to it
    ),
    Mutant(
        "epochs: timeouts of another height let nobody speak",
        GROUNDS,
        "if (timeout.round, timeout.view) != (round, view - 1):",
        "if timeout.view != view - 1:",
        16,
        **CHAIN,
    ),
    Mutant(
        "epochs: a certificate of another height binds nobody",
        GROUNDS,
        "and (shown.round, shown.view, shown.digest) == (self.round, *claim)",
        "and (shown.view, shown.digest) == claim",
        88,
        **CHAIN,
    ),
    Mutant(
        "epochs: votes of another height count for nothing",
        AGREEMENT,
        "vote.round != self.round or not",
        "not",
        0,
        **CHAIN,
    ),
    Mutant(
        "epochs: a timeout of another height closes nothing",
        AGREEMENT,
        "timeout.round != self.round or not",
        "not",
        2,
        **CHAIN,
    ),
    Mutant(
        "epochs: locks stay where they were made",
        AGREEMENT,
        "self.state = VoterState.decode(kept)",
        'self.state = notary.__dict__.setdefault("state", VoterState.decode(kept))',
        0,
        **CHAIN,
    ),
    Mutant(
        "epochs: whoever has no vote is silent",
        VOTER,
        "self.votes = vote_keys.get(self.me) == notary.signer.vote_key",
        "self.votes = True",
        0,
        **CHAIN,
    ),
    Mutant(
        "epochs: so is who has another key than the agreed one",
        VOTER,
        "self.votes = vote_keys.get(self.me) == notary.signer.vote_key",
        "self.votes = self.me in vote_keys",
        9,
        **{**CHAIN, "liars": 0},
    ),
    Mutant(
        "epochs: a vertex is certified by the committee that its parent names",
        HISTORY,
        "self.voters_of(parent, before)",
        "self.voters_of(vertex_id(vertex.body), body)",
        0,
        **CHAIN,
    ),
    Mutant(
        "epochs: and not by the one that began",
        HISTORY,
        "self.voters_of(parent, before)",
        "self.voters_of(self.ids[-1], self.bodies[-1])",
        0,
        **CHAIN,
    ),
    Mutant(
        "epochs: a certificate is by those who vote there",
        HISTORY,
        "and self.notary.certificate_holds(certificate, keys, quorum)",
        f"and self.notary.certificate_holds(certificate, {ALL_OF.replace('shown', 'certificate')}, quorum)",
        1,
        **CHAIN,
    ),
    # the same of Raft, among those who do not lie: some are heights behind
    Mutant(
        "raft epochs: entries stay where they were accepted",
        RAFT,
        "self.state = _STATE.decode(kept) if kept else PersistentTerm()",
        'self.state = notary.__dict__.setdefault("state", _STATE.decode(kept) if kept else PersistentTerm())',
        0,
        **CRASHES,
    ),
    Mutant(
        "raft epochs: whoever has no vote is silent",
        VOTER,
        "self.votes = vote_keys.get(self.me) == notary.signer.vote_key",
        "self.votes = True",
        0,
        **CRASHES,
    ),
    Mutant(
        "raft epochs: so is who has another key than the agreed one",
        VOTER,
        "self.votes = vote_keys.get(self.me) == notary.signer.vote_key",
        "self.votes = self.me in vote_keys",
        1,
        **CRASHES,
    ),
    Mutant(
        "raft epochs: a vertex is certified by the committee that its parent names",
        HISTORY,
        "self.voters_of(parent, before)",
        "self.voters_of(self.ids[-1], self.bodies[-1])",
        1,
        **CRASHES,
    ),
]
